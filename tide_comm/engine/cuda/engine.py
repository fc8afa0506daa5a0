"""The CUDA engine: binds a compiled program, and hands it to the executor in one call.

COMPUTE is torch's current stream when `launch` or `wait` is called. A wait for a peer that never comes cannot be called off on the GPU:
`watch.py` notices it, a dead peer or ranks that disagree, says so, and ends the process if the caller is stuck.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tide_comm.engine.base import ArenaSpec, Buffers, Engine, Exchange, Launched
from tide_comm.engine.cuda.agreement import first_objection
from tide_comm.engine.cuda.compile import Bound, Compiled
from tide_comm.engine.cuda.library import check, load
from tide_comm.engine.cuda.memory import CudaArena
from tide_comm.engine.cuda.numbers import WordTable
from tide_comm.engine.cuda.rail import NcclRail
from tide_comm.engine.cuda.records import KINDS
from tide_comm.engine.cuda.timing import Stopwatch, recorded
from tide_comm.engine.cuda.together import try_lanes
from tide_comm.engine.cuda.watch import GRACE_S, Under, Watchdog, note_failure
from tide_comm.engine.timing import Timings, timed_point
from tide_comm.errors import TideError
from tide_comm.plan.program import COMPUTE, Area, Binding, EventKey, Program, Record
from tide_comm.plan.slices import INBOX_SETS
from tide_comm.plan.trial import rail_trial

TRIAL_S = 60.0
"""How long a trial may take. NCCL connects machines when the first words are put."""
POISON_ENV = "TIDE_POISON"
DELAYS_ENV = "TIDE_DELAYS"


@dataclass(eq=False)
class Prepared:
    """What a launch hands over, made once for a program, a slot and a place in the ring; values and the caller's addresses come later."""

    bound: Bound
    bases: np.ndarray
    in_arenas: int
    """How many bases lie in arenas; the caller's follow."""
    params: int
    """Parameters of the group that the program touches."""
    values: np.ndarray
    tags: np.ndarray
    """Addresses, with the rank whose tag it is in the upper 16 bits."""
    out_stream: str


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
        # FSDP2's own stream waits for "done", so that nothing stands still there that would have computed.
        before = recorded() if engine.stopwatch.on and point != "done" else None
        code = engine.library.tide_event_wait(engine.handle, self.points[point], engine.current_stream())
        if code:
            check(code, f"{self.program.name}: waiting for {point!r}")
        if before is not None:
            engine.stopwatch.waited(before)
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
        event = torch.cuda.Event()
        event.record(self.engine.torch_stream(self.engine.stream_of(self.program, point)))
        return event


class CudaEngine(Engine):
    """See `Engine`. Collective over the arena's ranks while it is made. `device`: this rank's GPU; ranks may share one.

    `rail`: what carries bytes between machines, where there are several: "loopback" (copies, so all must be on this host) or "nccl".
    `multicast`: the arenas of a machine are to lie at one address too; where that does not work, programs made for it run lane by lane,
    with the reason in `apart`. Making it may be harmful: ask `multicast.decide_together` first.
    """

    samples = True

    def __init__(
        self,
        spec: ArenaSpec,
        rank: int,
        exchange: Exchange,
        timeout_s: float,
        device: torch.device | None = None,
        rail: str = "loopback",
        multicast: bool = False,
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
            nccl = rail == "nccl" and spec.topology.machines > 1
            apart = spec.topology if nccl else None
            lanes = spec.topology.table[spec.topology.machine_of(rank)] if multicast else ()
            self.arena = CudaArena(
                rank, self.device.index, spec.total_bytes, exchange, timeout_s, topology=apart, lanes=lanes
            )
        self.base = self.arena.addresses
        self.together = self.arena.together
        """Address of a multicast mapping of the machine's arenas; 0: there is none, and programs made for one run lane by lane."""
        self.apart = self.arena.apart
        self._words = WordTable(spec)
        self._stage_piece = 0
        self._inbox_batch = 0
        self._streams: dict[str, int] = {COMPUTE: 0}
        self._stream_handles = np.zeros(16, np.uint64)
        self._events: dict[EventKey, int] = {}
        self._torch_streams: dict[str, torch.cuda.ExternalStream] = {}
        self._point_streams: dict[tuple[int, str], str] = {}
        # By identity: hashing a program by value would walk all its operations. Compiled keeps the program alive.
        self._compiled: dict[int, Compiled] = {}
        self._prepared: dict[tuple[int, int, int, int], Prepared] = {}
        self.issued: dict[int, tuple[Under, str]] = {}
        self.stopwatch = Stopwatch()
        self._error: TideError | None = None
        self.rail = self._connect_rail(exchange) if nccl else None
        self._watch = Watchdog(self)
        self._watch.start()
        if nccl:
            self._try_rail(exchange)
        if self.together:
            self._try_lanes(exchange)

    def _try_lanes(self, exchange: Exchange) -> None:
        """Gives `together` up if a trial of it comes out wrong. Raises `TideError`, on all ranks alike, if it does not end."""
        timeout_s, self.timeout_s = self.timeout_s, min(self.timeout_s, TRIAL_S)
        try:
            with torch.cuda.device(self.device):
                self.apart = try_lanes(self, exchange, torch.cuda.synchronize)
        except TideError as error:
            self.fail(error)
            raise
        self.timeout_s = timeout_s
        if self.apart:
            self.together = 0
            self._compiled.clear()
            self._prepared.clear()

    def _connect_rail(self, exchange: Exchange) -> NcclRail:
        address, nbytes = self.base[self.rank], self.arena.arena_bytes
        rail = NcclRail(self.spec, self.rank, exchange, self.device, address, nbytes, self.timeout_s)
        check(self.library.tide_rail(self.handle, rail.functions()), "the rail")
        with torch.cuda.device(self.device):
            for name, channel in rail.channels.items():
                number = self._stream(name)
                code = self.library.tide_rail_channel(self.handle, number, channel.comm, channel.window)
                check(code, f"the rail's stream {name!r}")
        return rail

    def _try_rail(self, exchange: Exchange) -> None:
        """Raises `TideError`, on all ranks alike, if puts do not get through."""
        timeout_s, self.timeout_s = self.timeout_s, min(self.timeout_s, TRIAL_S)
        failed = ""
        try:
            with torch.cuda.device(self.device):
                launched = self.launch(rail_trial(self.spec.topology, self.rank))
            while not launched.reached("tried"):  # or the watchdog has found why not
                time.sleep(0.001)
        except TideError as caught:
            failed = str(caught)
        self.timeout_s = timeout_s
        objection = first_objection(exchange, failed)
        if objection:
            error = TideError(f"the nccl rail was made but does not work: {objection}")
            self.fail(error)
            raise error

    # Engine

    def launch(self, program: Program, slot: int = -1, buffers: Buffers | None = None, tag: int = 0) -> CudaLaunch:
        self.raise_if_failed()
        buffers = buffers or Buffers()
        prepared = self._prepare(program, slot)
        bound, counts = prepared.bound, self._words.counts
        values = counts.take(bound.value_from)
        values += bound.value_add
        np.maximum(values, 0, out=values)
        prepared.values[:] = values
        if prepared.in_arenas < len(prepared.bases):
            prepared.bases[prepared.in_arenas :] = self._callers(prepared.params, buffers)
        self._stream_handles[0] = self.current_stream()
        if buffers.out_ready is not None:
            self.torch_stream(prepared.out_stream).wait_event(buffers.out_ready)
        # Before the launch: once its events are recorded again, an entry of the launch before must not stand for them.
        under = Under(time.monotonic(), program, bound, slot, tag, values)
        for point, number in bound.points.items():
            self.issued[number] = (under, point)
        timed = timed_point(program) if self.stopwatch.on else ""
        begin = recorded() if timed else None
        code = self.library.tide_launch(
            self.handle,
            bound.ops,
            self._stream_handles,
            prepared.bases,
            prepared.values,
            buffers.scale,
            tag,
            prepared.tags,
        )
        if code:
            self.fail(TideError(f"{program.name}: {self.library.tide_error()}"))
            self.raise_if_failed()
        counts[bound.update_at] += bound.update_by
        self._stage_piece += program.stage_pieces
        self._inbox_batch += program.inbox_batches
        if timed:
            self.stopwatch.launched(begin, self.torch_stream(self.stream_of(program, timed)), reduces=timed == "done")
        return CudaLaunch(self, program, bound, buffers)

    def window(self, area: Area, slot: int, offset: int, nbytes: int) -> torch.UntypedStorage:
        address = self.base[self.rank] + self.spec.start(area, slot) + offset
        storage: Any = torch._C._construct_storage_from_data_pointer(address, self.device, nbytes)
        return storage

    def time_launches(self, on: bool) -> None:
        self.stopwatch.switch(on)

    def timings(self) -> Timings:
        return self.stopwatch.drain()

    def backward_ended(self) -> None:
        if self.stopwatch.on:
            self.stopwatch.backward_ended()

    def close(self) -> None:
        if self._watch.closed.is_set():
            return
        self._watch.stop()
        deadline = time.monotonic() + GRACE_S
        idle = self._error is None
        while idle and any(self.library.tide_stream_busy(int(s)) for s in self._stream_handles[1 : len(self._streams)]):
            idle = time.monotonic() < deadline
            time.sleep(0.001)
        self.arena.tell(str(self._error) if self._error else None)
        if not idle:
            self.arena.close()
            return  # memory that a stuck stream may still touch is left to the process's end
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            if self.rail is not None:
                self.rail.close()
            for stream in self._stream_handles[1 : len(self._streams)]:
                self.library.tide_stream_free(int(stream))
            self.library.tide_engine_free(self.handle)
            self.arena.free()
        self.arena.close()

    @property
    def memory_how(self) -> str:
        """What the arena's memory is, and why it is not the kind that is preferred."""
        return self.arena.how + (f" ({self.arena.reason})" if self.arena.reason else "")

    # Binding

    def _compile(self, program: Program) -> Compiled:
        compiled = self._compiled.get(id(program))
        if compiled is None:
            how = {"nccl": self.rail is not None, "multicast": self.together != 0}
            compiled = Compiled(program, self.spec, self._upload, self._stream, self.poison, **how)
            self._compiled[id(program)] = compiled
        return compiled

    def _prepare(self, program: Program, slot: int) -> Prepared:
        at, batch = self._stage_piece % self.spec.stage.ring, self._inbox_batch % INBOX_SETS
        key = (id(program), slot, at, batch)
        prepared = self._prepared.get(key)
        if prepared is None:
            compiled = self._compile(program)
            bound, count = compiled.for_slot(slot, self._words, self._event), compiled.numbers.params
            binding = Binding(slot, at, batch, {}, {})
            part = compiled.numbers.arena_part(self.base, binding, self.together)
            bases = np.array([*part, *[0] * compiled.numbers.callers], np.uint64)
            mine = self.base[self.rank]
            tag_addresses = [mine + self.spec.tag_of(p, index, binding) | p << 48 for p, index in compiled.tags]
            values, tags = np.zeros(len(bound.value_from), np.uint32), np.array(tag_addresses, np.uint64)
            prepared = Prepared(bound, bases, len(part), count, values, tags, compiled.out_stream)
            self._prepared[key] = prepared
        return prepared

    @staticmethod
    def _callers(count: int, buffers: Buffers) -> list[int]:
        """Addresses of the caller's tensors: parameters, gradients, OUT."""
        none = [0] * count
        params = [t.data_ptr() for t in buffers.params[:count]] or none
        grads = [0 if t is None else t.data_ptr() for t in buffers.grads[:count]] or none
        return [*params, *grads, 0 if buffers.out is None else buffers.out.data_ptr()]

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

    def torch_stream(self, name: str) -> torch.cuda.ExternalStream:
        stream = self._torch_streams.get(name)
        if stream is None:
            stream = torch.cuda.ExternalStream(self.stream_handle(name), device=self.device)
            self._torch_streams[name] = stream
        return stream

    def stream_of(self, program: Program, point: str) -> str:
        """The stream on which a point of a program that was launched is recorded."""
        key = (id(program), point)
        if key not in self._point_streams:
            wanted = program.points[point]
            records = [op for op in program.ops if isinstance(op, Record) and op.event == wanted]
            self._point_streams[key] = records[0].stream
        return self._point_streams[key]

    def current_stream(self) -> int:
        handle: int = torch._C._cuda_getCurrentRawStream(self.device.index)
        return handle

    def host_costs(self, on: bool) -> dict[str, tuple[int, float]]:
        """Driver calls and the host's microseconds in them since the last call of this, by kind of operation. `on`: count from here on."""
        counts = np.zeros(2 * len(KINDS), np.uint64)
        check(self.library.tide_costs(self.handle, on, counts), "the host's time")
        calls, spent = counts[: len(KINDS)], counts[len(KINDS) :]
        return {k: (int(n), float(t) / 1e3) for k, n, t in zip(KINDS, calls, spent, strict=True) if n}

    # Failure

    def raise_if_failed(self) -> None:
        if self._error is not None:
            self._watch.raised = True
            raise TideError(str(self._error)) from self._error

    def place(self, rank: int) -> str:
        topology = self.spec.topology
        return f"rank {rank} (machine {topology.machine_of(rank)}, lane {topology.lane_of(rank)})"

    def fail(self, error: TideError) -> None:
        """The first failure counts: it is raised at the caller's next wait or launch, and told to the peers."""
        if self._error is None:
            self._error = error
            note_failure()
            self.arena.tell(str(error))
