"""The host engine: carries programs out with threads on shared memory, as asynchronously as a GPU would.

`launch` binds the program, hands each operation to its stream's thread and returns. Operations on the caller's stream
happen in `launch` itself: a Record there is done at once, an After blocks.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable

import torch

from tide_comm.engine.base import ArenaSpec, Buffers, Engine, Exchange, Launched
from tide_comm.engine.host import kernels
from tide_comm.engine.host.shared import Mesh, PeerGone
from tide_comm.engine.host.streams import HostEvent, HostStream
from tide_comm.engine.host.trace import Trace
from tide_comm.engine.host.words import SharedWord, at_least
from tide_comm.engine.timing import HostClock, Timings, timed_point
from tide_comm.errors import TideError
from tide_comm.plan import names
from tide_comm.plan.program import (
    COMPUTE,
    After,
    Agree,
    Area,
    Binding,
    Cast,
    Clear,
    Copy,
    CopyAll,
    Counters,
    EventKey,
    Op,
    Post,
    Program,
    Put,
    Record,
    Reduce,
    Region,
    Remote,
    Signal,
    Wait,
    bind,
    copies_of,
)
from tide_comm.plan.render import op_text

POISON_ENV = "TIDE_POISON"
"""Set to 1: vacated slots and summed pieces of STAGE are filled with NaN, so that a use after the free cannot go unseen."""
DELAYS_ENV = "TIDE_DELAYS"
"""Set to a seed: random delays before operations, which must not change a bit."""
TRACE_ENV = "TIDE_TRACE"
"""A folder: each rank writes what its streams did there when the engine is closed, as a Chrome trace."""
SWITCH_INTERVAL_S = 0.0005
"""Python's thread switch interval while engines run; its default of 5 ms would dominate every hand-over."""
_PAGE_BYTES = 4096


def _wire(stream: str, peer: int) -> str:
    return f"{stream} to rank {peer}"


class HostLaunch(Launched):
    """One launch: its events by point, and the caller's buffers until they have been used."""

    def __init__(self, engine: HostEngine, program: Program, binding: Binding, buffers: Buffers, tag: int) -> None:
        self.engine = engine
        self.program = program
        self.binding = binding
        self.buffers = buffers
        self.tag = tag
        self.events: dict[EventKey, HostEvent] = {}
        read = program.points.get("grads_read")
        self.frees_grads_at = binding.event(read) if read else None
        self.started_s = 0.0
        self.ends_at: EventKey | None = None
        """The event that ends the launch's time, if it is timed."""

    def _event(self, point: str) -> HostEvent:
        return self.events[self.binding.event(self.program.points[point])]

    def wait(self, point: str) -> None:
        self.engine.wait_event(self._event(point), f"{self.program.name}: point {point!r}")

    def reached(self, point: str) -> bool:
        self.engine.raise_if_failed()
        return self._event(point).is_set()


class HostEngine(Engine):
    """See `Engine`. `exchange` is collective over the arena's ranks and is used here only, while the arena is made."""

    samples = False

    def __init__(self, spec: ArenaSpec, rank: int, exchange: Exchange, timeout_s: float) -> None:
        self.spec = spec
        self.rank = rank
        self.timeout_s = timeout_s
        self.poison = os.environ.get(POISON_ENV) == "1"
        seed = os.environ.get(DELAYS_ENV)
        self._delays = random.Random(f"{seed} {rank}") if seed else None
        self._mesh = Mesh(rank, -(-spec.total_bytes // _PAGE_BYTES) * _PAGE_BYTES, exchange, timeout_s)
        self.base = self._mesh.addresses
        self._counters = Counters()
        self._events: dict[EventKey, HostEvent] = {}
        self._streams: dict[str, HostStream] = {}
        self._wires: set[str] = set()
        self.trace = Trace(rank) if os.environ.get(TRACE_ENV) else None
        self._clock = HostClock()
        self._error: TideError | None = None
        self._lock = threading.Lock()
        self._last_heard = "nothing yet"
        self._closed = False
        self._words = [{key: SharedWord(base + at) for key, at in spec.words.items()} for base in self.base]
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))

    # Engine

    def launch(self, program: Program, slot: int = -1, buffers: Buffers | None = None, tag: int = 0) -> HostLaunch:
        self.raise_if_failed()
        launch = HostLaunch(self, program, bind(program, self._counters, slot), buffers or Buffers(), tag)
        if self._clock.on and (point := timed_point(program)):
            launch.started_s, launch.ends_at = self._clock.now(), launch.binding.event(program.points[point])
        sent: dict[object, int] = {}
        for op in program.ops:
            self._issue(op, launch, sent)
        return launch

    def window(self, area: Area, slot: int, offset: int, nbytes: int) -> torch.UntypedStorage:
        address = self.base[self.rank] + self.spec.start(area, slot) + offset
        return kernels.storage_at(address, nbytes)

    def time_launches(self, on: bool) -> None:
        self._clock.on = on

    def timings(self) -> Timings:
        return self._clock.drain()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # Streams before the wires that they feed.
        for stream in sorted(self._streams.values(), key=lambda stream: stream.name in self._wires):
            stream.close()
        if self.trace is not None:
            self.trace.write(os.environ.get(TRACE_ENV, "."))
        self._mesh.tell(str(self._error) if self._error else None)
        self._mesh.close()

    # Issue: what the caller's thread does

    def _issue(self, op: Op, launch: HostLaunch, sent: dict[object, int]) -> None:
        if isinstance(op, Record):
            event = HostEvent()
            self._events[launch.binding.event(op.event)] = event
            launch.events[launch.binding.event(op.event)] = event
            if op.stream == COMPUTE:
                event.set()
            else:
                self._put(op.stream, op, launch, lambda: self._record(op, event, launch))
        elif isinstance(op, After):
            awaited = self._events.get(launch.binding.event(op.event))
            if awaited is None:
                return
            what = f"{launch.program.name}: event {op.event.name!r}"
            if op.stream == COMPUTE:
                self.wait_event(awaited, what)
            else:
                self._put(op.stream, op, launch, lambda: self._after(awaited, what))
        elif isinstance(op, (Signal, Put)):
            key = (op.peer, launch.binding.word(op.word))
            sent[key] = sent.get(key, launch.binding.sent[key]) + 1
            word, value = self._words[op.peer][key[1]], sent[key]
            if isinstance(op, Put):
                put = op
                self._put(op.stream, op, launch, lambda: self._send(put, launch, word, value))
            else:
                self._put(op.stream, op, launch, lambda: self._over_wire(op, lambda: word.set(value)))
        else:
            self._put(op.stream, op, launch, lambda: self._carry_out(op, launch))

    def _put(self, stream: str, op: Op, launch: HostLaunch, item: Callable[[], None]) -> None:
        trace = self.trace
        if trace is None:
            self._stream(stream).put(item)
        else:
            self._stream(stream).put(lambda: trace.run(stream, op_text(op), launch.program.name, item))

    def _stream(self, name: str) -> HostStream:
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = HostStream(name, self._fail)
        return stream

    # Streams: what the threads do

    def _carry_out(self, op: Op, launch: HostLaunch) -> None:
        self._delay()
        if isinstance(op, Wait):
            self._wait_word(op, launch)
        elif isinstance(op, Copy):
            kernels.copy(self._address(op.src, launch), op.src, self._address(op.dst, launch, op.peer), op.dst)
        elif isinstance(op, CopyAll):
            # One write of a switch: here a copy to each lane, and nothing says that they land at one time.
            for lane in op.lands(self.rank):
                kernels.copy(self._address(op.src, launch), op.src, self._address(op.dst, launch, lane), op.dst)
                self._delay()
        elif isinstance(op, Cast):
            for part in op.parts:
                kernels.cast(self._address(part.src, launch), self._address(part.dst, launch), part)
        elif isinstance(op, Reduce):
            self._reduce(op, launch)
        elif isinstance(op, Clear):
            kernels.clear(self._address(op.dst, launch), op.dst)
        elif isinstance(op, Post):
            tag = SharedWord(self.base[op.peer] + self.spec.tag_of(self.rank, op.index, launch.binding))
            self._over_wire(op, lambda: tag.set(launch.tag))
        elif isinstance(op, Agree):
            self._agree(op, launch)
        else:
            raise TideError(f"the host engine cannot carry out {op!r}")

    def _send(self, op: Put, launch: HostLaunch, word: SharedWord, value: int) -> None:
        """A put: this stream goes on when the source has been read. With delays the write comes later, on a wire of its own, which keeps
        the order of what one stream sends to one peer; else it comes at once."""
        address, target = self._address(op.src, launch), self._address(op.dst, launch, op.peer)
        if self._delays is None:
            kernels.copy(address, op.src, target, op.dst)
            word.set(value)
        else:
            taken = kernels.taken(address, op.src)
            self._wires.add(_wire(op.stream, op.peer))

            def write() -> None:
                kernels.copy(taken.data_ptr(), kernels.dense(op.src), target, op.dst)
                word.set(value)

            self._over_wire(op, write)
        if self.poison and op.src.area is Area.PARTIAL:
            kernels.fill_nan(address, op.src.nbytes)

    def _over_wire(self, op: Put | Signal | Post, item: Callable[[], None]) -> None:
        """Behind the puts of this stream to this peer, where there are any."""
        name = _wire(op.stream, op.peer)
        if name not in self._wires:
            item()
            return

        def later() -> None:
            self._delay()
            item()

        with self._lock:
            wire = self._stream(name)
        wire.put(later)

    def _delay(self) -> None:
        if self._delays is not None and self._delays.random() < 0.3:
            time.sleep(self._delays.random() * 1e-3)

    def _record(self, op: Record, event: HostEvent, launch: HostLaunch) -> None:
        key = launch.binding.event(op.event)
        if self.poison and op.event == names.VACATED:
            kernels.fill_nan(self.base[self.rank] + self.spec.start(Area.SLOT, key[2]), self.spec.slot_bytes)
        if key == launch.frees_grads_at:
            launch.buffers.grads.clear()
        if key == launch.ends_at:
            self._clock.launches.append((launch.started_s, self._clock.now()))
        event.set()

    def _after(self, event: HostEvent, what: str) -> None:
        if not event.wait(self.timeout_s, self._between):
            raise TideError(self._timeout(what))

    def _wait_word(self, op: Wait, launch: HostLaunch) -> None:
        binding = launch.binding
        word = self._words[self.rank][binding.word(op.word)]
        what = f"{launch.program.name}: word {op.word.name!r} from {self._place(op.word.key)}"
        target, source = binding.wait_value(op), op.word.key

        def between() -> None:
            self._between()
            with self._lock:
                self._mesh.check()
            # A peer signals before it leaves, so what has not come by then never comes.
            if source in self._mesh.left and not at_least(word.value, target):
                raise PeerGone(f"{self._place(source)} has left: its process ended or its engine was closed")

        try:
            if not word.wait(target, self.timeout_s, between):
                raise TideError(self._timeout(what))
        except PeerGone as gone:
            raise PeerGone(
                f"{gone}; {self._place(self.rank)} waited for {what}; last heard: {self._last_heard}"
            ) from None
        self._last_heard = what

    def _reduce(self, op: Reduce, launch: HostLaunch) -> None:
        for segment in op.segments:
            copies = [copy for source in segment.sources for copy in copies_of(source)]
            sources = [(self._address(s, launch), s.region if isinstance(s, Remote) else s) for s in copies]
            kernels.reduce(sources, self._address(segment.dst, launch), segment.dst, op, launch.buffers.scale)
            if self.poison:
                for address, region in sources:
                    if region.area in (Area.STAGE, Area.INBOX):
                        kernels.fill_nan(address, region.nbytes)

    def _agree(self, op: Agree, launch: HostLaunch) -> None:
        for peer in op.peers:
            theirs = SharedWord(self.base[self.rank] + self.spec.tag_of(peer, op.index, launch.binding)).value
            if theirs != launch.tag:
                raise TideError(
                    f"{launch.program.name}: {self._place(peer)} runs something else here than {self._place(self.rank)} "
                    f"(tag {theirs:#x}, expected {launch.tag:#x}): ranks disagree on the order of collectives or on which parameters "
                    "got gradients. Every rank must use the same parameters in every step; for parameters that only some ranks use call "
                    "set_reduce_scatter_unused_params(True) on the FSDP module"
                )

    # Addresses

    def _address(self, source: Region | Remote, launch: HostLaunch, rank: int | None = None) -> int:
        region, owner = (source.region, source.rank) if isinstance(source, Remote) else (source, rank)
        binding, buffers = launch.binding, launch.buffers
        if region.area is Area.GRAD:
            grad = buffers.grads[region.index]
            assert grad is not None
            return grad.data_ptr() + region.offset
        if region.area is Area.PARAM:
            return buffers.params[region.index].data_ptr() + region.offset
        if region.area is Area.OUT:
            assert buffers.out is not None
            return buffers.out.data_ptr() + region.offset
        start = self.spec.region_start(region, binding)
        return self.base[self.rank if owner is None else owner] + start + region.offset

    def _place(self, rank: int) -> str:
        topology = self.spec.topology
        return f"rank {rank} (machine {topology.machine_of(rank)}, lane {topology.lane_of(rank)})"

    # Failure

    def wait_event(self, event: HostEvent, what: str) -> None:
        """The caller waits for an event; raises `TideError` when the engine fails or time is up."""
        if event.is_set():
            return
        began_s = self._clock.now()
        try:
            done = event.wait(self.timeout_s + 5, self._between)
        except TideError:
            done = True
        if self._clock.on:
            self._clock.waits.append((began_s, self._clock.now()))
        if not done:
            self._fail(TideError(self._timeout(what)))
        self.raise_if_failed()

    def raise_if_failed(self) -> None:
        if self._error is not None:
            raise TideError(str(self._error)) from self._error

    def _between(self) -> None:
        """Called while something waits: stop when the engine has failed.

        Peers are looked at by whoever waits for a word, at the end of each chain of events: it knows what did not come.
        """
        if self._error is not None:
            raise TideError(str(self._error))

    def _timeout(self, what: str) -> str:
        left = self._mesh.has_left()
        gone = f" Ranks {left} have closed their engine." if left else ""
        return (
            f"{self._place(self.rank)} waited longer than timeout_s = {self.timeout_s:g} for {what}; last heard: {self._last_heard}.{gone} "
            "A rank that got no gradient at all, or is much slower, looks like this"
        )

    def _fail(self, error: TideError) -> None:
        """The first failure counts: it is raised at the caller's next wait or launch, and told to the peers."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
        self._mesh.tell(str(error))


def make(spec: ArenaSpec, rank: int, exchange: Exchange, timeout_s: float) -> Engine:
    """A host engine whose ranks all run on this machine."""
    return HostEngine(spec, rank, exchange, timeout_s)
