"""The checker: proves programs and sequences of them before any engine runs them.

It carries out every rank's operations on symbolic memory with vector clocks. Signals only count up and nothing consumes them, so what an
operation waits for does not depend on the interleaving: one run decides for all whether the sequence can deadlock, and the clocks
decide whether every pair of conflicting accesses is ordered. It accepts if

- no read meets a write that is not ordered before it, no write meets a read or write that is not ordered before it;
- each destination byte (SLOT, OUT) is written once a launch, and everything that is used holds what the layout alone
  demands (`demands`);
- all operations complete, also when each rank runs them strictly in issue order, one at a time (hardware queues can be
  shared);
- every word has one writer stream, and `arrivals` says how many signals it sees; every tag posted is compared; nothing
  lies outside its area; what is not a put, a signal or a tag stays within a machine.

With a `Symmetry` only the ranks of machine 0 are run, for machines that are alike (`symmetry` says how, `alike` proves that they are).
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tide_comm.plan.clocks import Clocks, Snapshot, Thread
from tide_comm.plan.memory import RaceError, Tags
from tide_comm.plan.moves import Launch, Memory
from tide_comm.plan.program import (
    After,
    Agree,
    Area,
    Copy,
    Copy2D,
    CopyAll,
    EventKey,
    LaneSum,
    Op,
    Post,
    Put,
    Record,
    Reduce,
    Remote,
    Signal,
    Wait,
    WordKey,
)
from tide_comm.plan.render import op_text
from tide_comm.plan.symmetry import Symmetry
from tide_comm.plan.topology import Topology

COPIES = frozenset((Copy, Copy2D, CopyAll))


class CheckError(Exception):
    """What is wrong with a sequence, with rank, launch and operation."""


@dataclass(frozen=True)
class Issued:
    op: Op
    launch: Launch


class _Word:
    """A word at a rank: who raises it, how often it was raised, who waits for that. Snapshots are kept only for values that are waited for
    and only until the last of these waits."""

    __slots__ = ("writer", "count", "waiting", "waits", "snapshots")

    def __init__(self) -> None:
        self.writer: tuple[int, str] | None = None
        self.count = 0
        self.waiting: list[tuple[int, _Queue]] = []
        self.waits: Counter[int] = Counter()
        self.snapshots: dict[int, Snapshot] = {}


class _Event:
    """One `Record`, and how many `After`s it is for."""

    __slots__ = ("done", "waiting", "uses", "snapshot")

    def __init__(self) -> None:
        self.done = False
        self.waiting: list[_Queue] = []
        self.uses = 0
        self.snapshot: Snapshot | None = None


class _Step:
    """An operation with what it waits for or raises. `peer`: the rank that is run in the receiver's place; `machines`: how far that image
    is moved."""

    __slots__ = ("op", "launch", "word", "value", "event", "peer", "machines")

    def __init__(self, op: Op, launch: Launch) -> None:
        self.op = op
        self.launch = launch
        self.word: _Word | None = None
        self.value = 0
        self.event: _Event | None = None
        self.peer = self.machines = 0


@dataclass
class _Queue:
    """What runs in order: a stream, or a rank where everything runs in issue order."""

    rank: int
    stream: str
    steps: list[_Step] = field(default_factory=list)
    at: int = 0


class Checker:
    """Checks one sequence: `issued[r]` are rank r's operations in issue order. `ring`: places in STAGE. `limits`: bytes of an area (of one
    slot, place, inbox set), for those that have a limit. `topology`: if given, copies across machines are errors. With `symmetry`,
    `issued` holds machine 0's ranks."""

    def __init__(
        self,
        issued: Sequence[Sequence[Issued]],
        ring: int = 1,
        limits: Mapping[Area, int] | None = None,
        topology: Topology | None = None,
        symmetry: Symmetry | None = None,
    ) -> None:
        self.issued = issued
        self.ring = ring
        self.limits = limits or {}
        self.topology = Topology.regular(symmetry.machines, symmetry.lanes) if symmetry else topology
        self.symmetry = symmetry

    def check(self) -> None:
        """Raises `CheckError` if the sequence is not accepted."""
        self._check_arrivals()
        self._link()
        self._check_tags()
        self._run(self._streams())
        self._run_in_issue_order()

    def _receiver(self, peer: int) -> tuple[int, int]:
        """(rank that is run in `peer`'s place, machines by which it is moved)."""
        if self.symmetry is None:
            return peer, 0
        machines, lane = divmod(peer, self.symmetry.lanes)
        return lane, machines

    def _word_key(self, key: WordKey, machines: int) -> WordKey:
        return self.symmetry.word(key, machines) if machines and self.symmetry else key

    def _image(self, rank: int, machines: int) -> int:
        return self.symmetry.rank(rank, machines) if machines and self.symmetry else rank

    # Static checks

    def _check_arrivals(self) -> None:
        by_number: dict[int, dict[int, Launch]] = defaultdict(dict)
        for rank, items in enumerate(self.issued):
            for item in items:
                by_number[item.launch.number][rank] = item.launch
        for launches in by_number.values():
            sent: Counter[tuple[int, WordKey]] = Counter()
            declared: Counter[tuple[int, WordKey]] = Counter()
            for rank, launch in launches.items():
                for (peer, word), count in launch.program.signals.items():
                    receiver, machines = self._receiver(peer)
                    sent[receiver, self._word_key(launch.binding.word(word), machines)] += count
                for word, count in launch.program.arrivals.items():
                    declared[rank, launch.binding.word(word)] += count
            if sent != declared:
                wrong = next(k for k in sent | declared if sent[k] != declared[k])
                name = next(iter(launches.values())).program.name
                raise CheckError(
                    f"{name}: rank {wrong[0]}'s word {wrong[1]} is signalled {sent[wrong]} times, its program counts on {declared[wrong]}"
                )

    def _check_tags(self) -> None:
        """Every tag that is posted in a launch is compared in it, or ranks could disagree unnoticed."""
        open_tags: Counter[tuple[int, int, int, int]] = Counter()
        for rank, items in enumerate(self.issued):
            for item in items:
                number = item.launch.number
                if isinstance(item.op, Post):
                    receiver, machines = self._receiver(item.op.peer)
                    open_tags[number, self._image(rank, machines), receiver, item.op.index] += 1
                elif isinstance(item.op, Agree):
                    for peer in item.op.peers:
                        open_tags[number, peer, rank, item.op.index] -= 1
        for (number, source, owner, index), count in open_tags.items():
            if count:
                what = "posted and never compared" if count > 0 else "compared and never posted"
                raise CheckError(f"launch {number}: tag {index} of rank {source} at rank {owner} is {what}")

    def _link(self) -> None:
        """Resolve words and events: what each operation waits for and raises. Events as CUDA does, at issue."""
        words: dict[tuple[int, WordKey], _Word] = defaultdict(_Word)
        self.linked: list[list[_Step]] = []
        for rank, items in enumerate(self.issued):
            steps: list[_Step] = []
            last: dict[EventKey, _Event] = {}
            for item in items:
                op, launch = item.op, item.launch
                step = _Step(op, launch)
                kind = type(op)
                if kind in COPIES or kind is Reduce:
                    self._check_within(rank, item)
                elif isinstance(op, Wait):
                    step.value = launch.binding.wait_value(op)
                    step.word = words[rank, launch.binding.word(op.word)]
                    step.word.waits[step.value] += 1
                elif isinstance(op, Record):
                    step.event = last[launch.binding.event(op.event)] = _Event()
                elif isinstance(op, After):
                    step.event = last.get(launch.binding.event(op.event))
                    if step.event is not None:
                        step.event.uses += 1
                elif isinstance(op, (Signal, Put)):
                    step.peer, step.machines = self._receiver(op.peer)
                    key = (step.peer, self._word_key(launch.binding.word(op.word), step.machines))
                    step.word = words[key]
                    writer = (self._image(rank, step.machines), op.stream)
                    if step.word.writer is None:
                        step.word.writer = writer
                    elif step.word.writer != writer:
                        raise CheckError(
                            f"rank {key[0]}'s word {key[1]} has two writers: {step.word.writer} and {writer}"
                        )
                elif isinstance(op, Post):
                    step.peer, step.machines = self._receiver(op.peer)
                steps.append(step)
            self.linked.append(steps)
        self.words = list(words.values())

    def _check_within(self, rank: int, item: Issued) -> None:
        """Only puts, signals and tags cross to another machine."""
        if self.topology is None:
            return
        peers: list[int] = []
        if isinstance(item.op, Copy):
            peers = [item.op.peer]
        sources = [s for segment in item.op.segments for s in segment.sources] if isinstance(item.op, Reduce) else []
        peers += [s.rank for s in sources if isinstance(s, Remote)]
        together = [item.op.lanes] if isinstance(item.op, CopyAll) else []
        together += [s.ranks for s in sources if isinstance(s, LaneSum)]
        if any(sorted(lanes) != sorted(self.topology.table[self.topology.machine_of(rank)]) for lanes in together):
            raise CheckError(f"{_where(rank, item.op, item.launch)}: a multicast address reaches all lanes, each once")
        for peer in peers:
            if peer != rank and self.topology.machine_of(peer) != self.topology.machine_of(rank):
                raise CheckError(f"{_where(rank, item.op, item.launch)}: rank {peer} is on another machine")

    # The run

    def _streams(self) -> list[_Queue]:
        queues: dict[tuple[int, str], _Queue] = {}
        for rank, steps in enumerate(self.linked):
            for step in steps:
                key = (rank, step.op.stream)
                if key not in queues:
                    queues[key] = _Queue(*key)
                queues[key].steps.append(step)
        return list(queues.values())

    def _run(self, queues: list[_Queue]) -> None:
        world = self.symmetry.world if self.symmetry else len(self.issued)
        streams = dict.fromkeys(queue.stream for queue in queues)
        self.clocks = Clocks(len(self.issued), world, list(streams))
        self.memory = Memory(self.ring, self.limits, Tags(), self.clocks.name, self.symmetry)
        ready = deque(queues)
        while ready:
            queue = ready.popleft()
            thread = self.clocks.thread(queue.rank, queue.stream)
            steps = queue.steps
            while queue.at < len(steps):
                step = steps[queue.at]
                if not _may_go(step, queue):
                    break
                try:
                    self._execute(queue.rank, step, thread, ready)
                except RaceError as error:
                    raise CheckError(f"{_where(queue.rank, step.op, step.launch)}: {error}") from None
                queue.at += 1
        _complain(queues, "deadlock")

    def _execute(self, rank: int, step: _Step, thread: Thread, ready: deque[_Queue]) -> None:
        op = step.op
        kind = type(op)
        if kind in COPIES:
            # A run of copies on one stream is one unordered batch: they share a tick.
            if not thread.in_batch:
                thread.tick += 1
                thread.in_batch = True
            self.memory.move(rank, op, step.launch, thread)
            return
        thread.tick += 1
        thread.in_batch = False
        if kind is Wait:
            word = step.word
            assert word is not None
            if step.value:
                thread.join(word.snapshots[step.value])
                word.waits[step.value] -= 1
                if not word.waits[step.value]:
                    del word.snapshots[step.value]
        elif kind is After:
            if step.event is not None:
                assert step.event.snapshot is not None
                thread.join(step.event.snapshot)
                step.event.uses -= 1
                if not step.event.uses:
                    step.event.snapshot = None
        elif kind is Record:
            assert step.event is not None
            if step.event.uses:
                step.event.snapshot = thread.snapshot()
            _record(step.event, ready)
        elif isinstance(op, (Signal, Put)):
            offset = self._offset(step.machines)
            if isinstance(op, Put):
                wire = self.clocks.wire(thread, op.peer, offset)
                wire.tick += 1
                self.memory.put(rank, op, step.launch, thread, wire, step.peer, step.machines)
            word = step.word
            assert word is not None
            if word.count + 1 in word.waits:
                on_wire = self.clocks.existing_wire(thread, op.peer)
                word.snapshots[word.count + 1] = thread.snapshot(on_wire, offset)
            _raise(word, ready)
        elif isinstance(op, Post):
            offset = self._offset(step.machines)
            wire = self.clocks.wire(thread, op.peer, offset)
            wire.tick += 1
            self.memory.post(self._image(rank, step.machines), op, step.launch, wire, step.peer)
        else:
            self.memory.move(rank, op, step.launch, thread)

    def _offset(self, machines: int) -> int:
        """Threads between a rank and the one so many machines further on."""
        return machines * self.symmetry.lanes * len(self.clocks.streams) if self.symmetry else 0

    def _run_in_issue_order(self) -> None:
        """Whether everything completes with one operation at a time on each rank; counts alone decide that."""
        for word in self.words:
            word.count = 0
        queues = [_Queue(rank, "") for rank in range(len(self.linked))]
        for queue, steps in zip(queues, self.linked, strict=True):
            queue.steps = [step for step in steps if step.word is not None or step.event is not None]
            for step in queue.steps:
                if step.event is not None:
                    step.event.done = False
        ready = deque(queues)
        while ready:
            queue = ready.popleft()
            while queue.at < len(queue.steps):
                step = queue.steps[queue.at]
                if not _may_go(step, queue):
                    break
                if isinstance(step.op, Record):
                    assert step.event is not None
                    _record(step.event, ready)
                elif isinstance(step.op, (Signal, Put)):
                    assert step.word is not None
                    _raise(step.word, ready)
                queue.at += 1
        _complain(queues, "deadlock when each rank runs strictly in issue order")


def _may_go(step: _Step, queue: _Queue) -> bool:
    """Whether the step may go; if not, its queue is woken when it may."""
    kind = type(step.op)
    if kind is Wait:
        assert step.word is not None
        if step.word.count < step.value:
            step.word.waiting.append((step.value, queue))
            return False
    elif kind is After and step.event is not None and not step.event.done:
        step.event.waiting.append(queue)
        return False
    return True


def _raise(word: _Word, ready: deque[_Queue]) -> None:
    word.count += 1
    if word.waiting:
        ready.extend(queue for value, queue in word.waiting if value <= word.count)
        word.waiting = [(value, queue) for value, queue in word.waiting if value > word.count]


def _record(event: _Event, ready: deque[_Queue]) -> None:
    event.done = True
    ready.extend(event.waiting)
    event.waiting = []


def _complain(queues: Sequence[_Queue], what: str) -> None:
    stuck = [(queue.rank, queue.steps[queue.at]) for queue in queues if queue.at < len(queue.steps)]
    if stuck:
        shown = "; ".join(_where(rank, step.op, step.launch) for rank, step in stuck[:4])
        raise CheckError(f"{what}: {shown}")


def _where(rank: int, op: Op, launch: Launch) -> str:
    return f"rank {rank}, launch {launch.number} ({launch.program.name}), {op.stream}: {op_text(op)}"
