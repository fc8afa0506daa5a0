"""The CUDA engine: binds a compiled program, and hands it to the executor in one call.

COMPUTE is torch's current stream when `launch` or `wait` is called. Two things differ from the host engine. Ranks that disagree are noticed
by the sum of a reduce-scatter, which then writes nothing; all-gathers compare no tags. And a wait for a peer that never comes cannot be
called off on the GPU: a thread notices it (or a dead peer), says so, and ends the process if the caller is stuck.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

import numpy as np
import torch

from tide_comm.engine.base import ArenaSpec, Buffers, Engine, Exchange, Launched
from tide_comm.engine.cuda.compile import Bound, Compiled, WordTable
from tide_comm.engine.cuda.library import check, load
from tide_comm.engine.cuda.memory import CudaArena
from tide_comm.errors import TideError
from tide_comm.plan import names
from tide_comm.plan.program import COMPUTE, Area, EventKey, Program, Record

POISON_ENV = "TIDE_POISON"
DELAYS_ENV = "TIDE_DELAYS"
GRACE_S = 10.0
"""How long the caller may take to notice a failure before the process is ended: it may be waiting for the GPU, which waits for ever."""
_POLL_S = 0.1


class CudaLaunch(Launched):
    """One launch. Its events are the program's own: after a later launch of the same kind they stand for that one, which is later still."""

    def __init__(self, engine: CudaEngine, program: Program, bound: Bound, buffers: Buffers) -> None:
        self.engine = engine
        self.program = program
        self.points = bound.points
        self.buffers = buffers

    def wait(self, point: str) -> None:
        engine = self.engine
        engine.raise_if_failed()
        check(
            engine.library.tide_event_wait(engine.handle, self.points[point], engine.current_stream()),
            f"{self.program.name}: waiting for {point!r}",
        )
        if point == "grads_read":
            # The caller's stream is behind the reading from here on, so its allocator may hand the memory out again.
            self.buffers.grads.clear()

    def reached(self, point: str) -> bool:
        self.engine.raise_if_failed()
        busy = self.engine.library.tide_event_busy(self.engine.handle, self.points[point])
        if busy > 1:
            check(busy, self.program.name)
        return busy == 0

    def event(self, point: str) -> torch.cuda.Event:
        """The point as an event of PyTorch's, to be asked for right after the launch. It may lie later than the point itself."""
        wanted = self.program.points[point]
        stream = next(op.stream for op in self.program.ops if isinstance(op, Record) and op.event == wanted)
        event = torch.cuda.Event()
        event.record(torch.cuda.ExternalStream(self.engine.stream_handle(stream), device=self.engine.device))
        return event


class CudaEngine(Engine):
    """See `Engine`. Collective over the arena's ranks while it is made. `device`: this rank's GPU; ranks may share one."""

    def __init__(
        self, spec: ArenaSpec, rank: int, exchange: Exchange, timeout_s: float, device: torch.device | None = None
    ) -> None:
        self.spec = spec
        self.rank = rank
        self.timeout_s = timeout_s
        self.device = device or torch.device("cuda", torch.cuda.current_device())
        self.library = load()
        self.poison = os.environ.get(POISON_ENV) == "1"
        seed = os.environ.get(DELAYS_ENV)
        # Mapped memory belongs to the current device.
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            noise = (int(seed) + 1) * 1000 + rank if seed else 0
            code, self.handle = self.library.tide_engine_create(noise)
            check(code, "the CUDA engine")
            self._arena = CudaArena(rank, self.device.index, spec.total_bytes, exchange, timeout_s)
        self.base = self._arena.addresses
        self._words = WordTable(spec)
        self._stage_piece = 0
        self._streams: dict[str, int] = {COMPUTE: 0}
        self._stream_handles = np.zeros(16, np.uint64)
        self._events: dict[EventKey, int] = {}
        self._issued: dict[int, tuple[float, str]] = {}
        # By identity: hashing a program by value would walk all its operations. Compiled keeps the program alive.
        self._compiled: dict[int, Compiled] = {}
        self._bases: dict[tuple[int, int], list[int]] = {}
        self._error: TideError | None = None
        self._raised = False
        self._closed = threading.Event()
        self._watch = threading.Thread(target=self._watchdog, name="tide-watch", daemon=True)
        self._watch.start()

    # Engine

    def launch(self, program: Program, slot: int = -1, buffers: Buffers | None = None, tag: int = 0) -> CudaLaunch:
        self.raise_if_failed()
        buffers = buffers or Buffers()
        compiled = self._compile(program)
        bound = compiled.for_slot(slot, self._words, self._event)
        counts = self._words.counts
        values = np.maximum(counts[bound.value_from] + bound.value_add, 0).astype(np.uint32)
        bases = np.array(self._bases_of(compiled, slot, buffers), np.uint64)
        tags = np.array(
            [self.base[self.rank] + self.spec.tag(p, -1, self._stage_piece) for p in compiled.tag_peers], np.uint64
        )
        self._stream_handles[0] = self.current_stream()
        if buffers.out_ready is not None:
            torch.cuda.ExternalStream(self.stream_handle(names.SUM), device=self.device).wait_event(buffers.out_ready)
        code = self.library.tide_launch(
            self.handle,
            bound.ops,
            self._stream_handles,
            bases,
            values,
            buffers.scale,
            tag,
            tags,
        )
        if code:
            self._fail(TideError(f"{program.name}: {self.library.tide_error()}"))
            self.raise_if_failed()
        counts[bound.update_at] += bound.update_by
        self._stage_piece += program.stage_pieces
        now = time.monotonic()
        for point, number in bound.points.items():
            self._issued[number] = (now, f"{program.name}: point {point!r}")
        return CudaLaunch(self, program, bound, buffers)

    def window(self, area: Area, slot: int, offset: int, nbytes: int) -> torch.UntypedStorage:
        address = self.base[self.rank] + self.spec.start(area, slot) + offset
        storage: Any = torch._C._construct_storage_from_data_pointer(address, self.device, nbytes)
        return storage

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        self._watch.join()
        deadline = time.monotonic() + GRACE_S
        idle = self._error is None
        while idle and any(self.library.tide_stream_busy(int(s)) for s in self._stream_handles[1 : len(self._streams)]):
            idle = time.monotonic() < deadline
            time.sleep(0.001)
        self._arena.tell(str(self._error) if self._error else None)
        self._arena.close()
        if not idle:
            return  # memory that a stuck stream may still touch is left to the process's end
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            for stream in self._stream_handles[1 : len(self._streams)]:
                self.library.tide_stream_free(int(stream))
            self.library.tide_engine_free(self.handle)
            self._arena.free()

    # Binding

    def _compile(self, program: Program) -> Compiled:
        compiled = self._compiled.get(id(program))
        if compiled is None:
            compiled = Compiled(program, self.spec, self._upload, self._stream, self.poison)
            self._compiled[id(program)] = compiled
        return compiled

    def _bases_of(self, compiled: Compiled, slot: int, buffers: Buffers) -> list[int]:
        ring = self.spec.stage.ring
        where = (slot, self._stage_piece % ring)
        part = self._bases.get(where)
        if part is None:
            part = self._bases[where] = compiled.numbers.arena_part(self.base, slot, self._stage_piece % ring)
        count = compiled.numbers.params
        if not count:
            return part
        none = [0] * count
        params = [t.data_ptr() for t in buffers.params[:count]] or none
        grads = [0 if t is None else t.data_ptr() for t in buffers.grads[:count]] or none
        return [*part, *params, *grads, 0 if buffers.out is None else buffers.out.data_ptr()]

    def _upload(self, table: np.ndarray) -> int:
        code, address = self.library.tide_table(self.handle, table)
        check(code, "a segment table")
        return address

    def _stream(self, name: str) -> int:
        number = self._streams.get(name)
        if number is None:
            number = len(self._streams)
            code, self._stream_handles[number] = self.library.tide_stream_create()
            check(code, f"stream {name!r}")
            self._streams[name] = number
        return number

    def _event(self, key: EventKey) -> int:
        number = self._events.get(key)
        if number is None:
            number = self._events[key] = len(self._events)
            check(self.library.tide_event_reserve(self.handle, number + 1), f"event {key}")
        return number

    def stream_handle(self, name: str) -> int:
        return int(self._stream_handles[self._stream(name)])

    def current_stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream

    # Failure

    def raise_if_failed(self) -> None:
        if self._error is not None:
            self._raised = True
            raise TideError(str(self._error)) from self._error

    def _place(self, rank: int) -> str:
        topology = self.spec.topology
        return f"rank {rank} (machine {topology.machine_of(rank)}, lane {topology.lane_of(rank)})"

    def _watchdog(self) -> None:
        torch.cuda.set_device(self.device)
        while not self._closed.wait(_POLL_S):
            try:
                self._arena.check()
                self._look()
            except TideError as error:
                self._fail(error)
                if not self._closed.wait(GRACE_S) and not self._raised:
                    print(f"TIDE: {error}", file=sys.stderr, flush=True)
                    os._exit(1)
                return

    def _look(self) -> None:
        """Raises `TideError` if ranks have disagreed, or if something has been under way for longer than timeout_s."""
        disagree, _, theirs, ours = self.library.tide_report(self.handle)
        if disagree:
            raise TideError(
                f"{self._place(self.rank)} found another tag ({theirs:#x}) than its own ({ours:#x}) in a reduce-scatter: ranks disagree on "
                "the order of collectives or on which parameters got gradients. Every rank must use the same parameters in every step; for "
                "parameters that only some ranks use call set_reduce_scatter_unused_params(True) on the FSDP module"
            )
        late = time.monotonic() - self.timeout_s
        for number, (since, what) in list(self._issued.items()):
            if since > late:
                continue
            busy = self.library.tide_event_busy(self.handle, number)
            if busy > 1:
                check(busy, what)
            if busy and self._issued.get(number) == (since, what):
                raise TideError(
                    f"{self._place(self.rank)} waited longer than timeout_s = {self.timeout_s:g} for {what}. A rank that got no "
                    "gradient at all, or is much slower, looks like this"
                )

    def _fail(self, error: TideError) -> None:
        if self._error is None:
            self._error = error
            self._arena.tell(str(error))
