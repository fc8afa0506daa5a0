"""Programs: what each rank does in one collective, as one list of operations in issue order.

A program is pure data. It is made once per group, proven by `checker`, and carried out at every step by an engine. What changes from
launch to launch is bound when it starts (`Binding`): the slot, the first position of the STAGE ring, the running number of inbox batches,
and how many signals each word has seen. Everything else (addresses inside areas, order, streams) is fixed.

Streams order operations as CUDA streams do. Operations of one stream run in order, except that a run of copies with nothing between them
is one batch and unordered inside (`cudaMemcpyBatchAsync`). `Record`/`After` are events with CUDA's meaning: `After` waits for the most
recent `Record` at the time of issue, and for nothing if there was none, also across launches. The stream COMPUTE is the caller's.

Signals count. Word w at rank r has one writer; the k-th signal of a launch raises it to (signals of earlier launches) + k, and
`Wait(w, k)` waits for that value. k = 0 waits for everything that earlier launches announced, a negative k for less than that: that is how
credits that lag behind are awaited.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

COMPUTE = "compute"
"""The caller's stream: operations on it are ordered with the model's compute."""


class Area(str, Enum):
    """Where bytes live. PARAM, GRAD and OUT are the caller's own memory, the rest lies in the arena that all lanes can reach."""

    PARAM = "PARAM"  # a rank's sharded parameters in their own dtype; index: parameter
    SHARD = "SHARD"  # the same in the arena, where optimizers update them in place
    SLOT = "SLOT"  # unsharded parameters of one group; bound slot
    GRAD = "GRAD"  # unsharded gradients where autograd left them; index: parameter
    STAGE = "STAGE"  # ring of pieces pushed by the other lanes; index: piece of this launch
    PARTIAL = "PARTIAL"  # fp32 sums of one machine on their way to another; index: which of the two
    INBOX = "INBOX"  # fp32 partial sums from other machines; index: batch of this launch
    SCRATCH = "SCRATCH"  # fp32 running sum of the last step where sources come in several batches
    OUT = "OUT"  # the reduced shard, dense
    TAG = "TAG"  # one word a peer that says what it is doing; index as in Post


@dataclass(frozen=True)
class Region:
    """`rows` rows of `row_bytes` each, `pitch` bytes apart, from `offset` in an area."""

    area: Area
    offset: int
    row_bytes: int
    rows: int = 1
    pitch: int = 0
    index: int = 0

    @property
    def nbytes(self) -> int:
        return self.row_bytes * self.rows

    def spans(self) -> Iterator[tuple[int, int]]:
        """(start, end) of each contiguous run of bytes."""
        if self.rows == 1 or self.pitch == self.row_bytes:
            yield self.offset, self.offset + self.nbytes
            return
        for row in range(self.rows):
            start = self.offset + row * self.pitch
            yield start, start + self.row_bytes


@dataclass(frozen=True)
class Remote:
    """A region in another rank's memory (read by the last step of a reduce-scatter without multicast)."""

    rank: int
    region: Region


@dataclass(frozen=True)
class LaneSum:
    """The sum of what stands at one address on all lanes of a machine, formed by the switch: one read of a multicast address.

    A switch adds in no defined order. An engine without one adds the copies of `ranks` from left to right, behind what the sum holds
    already.
    """

    ranks: tuple[int, ...]
    region: Region


Source = Region | Remote | LaneSum


def copies_of(source: Source) -> tuple[Region | Remote, ...]:
    """What a source reads: itself, or each lane's copy."""
    return tuple(Remote(rank, source.region) for rank in source.ranks) if isinstance(source, LaneSum) else (source,)


@dataclass(frozen=True)
class Slotted:
    """A name that belongs to the bound slot: `Slotted("vacant", 3)` becomes `("vacant", slot, 3)` at launch."""

    name: str
    key: int = -1


@dataclass(frozen=True)
class Word:
    """A counter in the owner's memory with one writer. `name` with `key` is unique per rank; `slotted` words exist once per slot."""

    name: str
    key: int = 0
    slotted: bool = False


@dataclass(frozen=True)
class Event:
    """A local event; `slotted` events exist once per slot."""

    name: str
    key: int = 0
    slotted: bool = False


@dataclass(frozen=True)
class Op:
    stream: str


@dataclass(frozen=True)
class Copy(Op):
    """Contiguous bytes from this rank's `src` to `dst` in the memory of `peer` (a rank of this machine)."""

    src: Region
    dst: Region
    peer: int


@dataclass(frozen=True)
class Copy2D(Copy):
    """Rows at a pitch; `src` and `dst` agree in rows and row_bytes."""


@dataclass(frozen=True)
class CopyAll(Op):
    """Bytes from this rank's `src` to `dst` in the memory of every lane of its machine (`lanes`, this rank included), by one write to a
    multicast address.

    Where `dst` is `src`, this rank's own bytes are written with what stands there: to others that is no write, and readers may go on.
    """

    src: Region
    dst: Region
    lanes: tuple[int, ...]

    def lands(self, rank: int) -> Iterator[int]:
        """The ranks whose memory changes."""
        return (lane for lane in self.lanes if lane != rank or self.dst != self.src)


@dataclass(frozen=True)
class Put(Op):
    """One-sided write over the rail to `peer`; raises `word` there by one when the bytes have arrived.

    Its stream goes on when `src` has been read.
    """

    src: Region
    dst: Region
    peer: int
    word: Word


@dataclass(frozen=True)
class Signal(Op):
    """Raise `word` at `peer` by one, after all earlier operations of this stream."""

    peer: int
    word: Word


@dataclass(frozen=True)
class Wait(Op):
    """Wait until this rank's `word` has seen `count` signals of this launch (see the module's text for count <= 0)."""

    word: Word
    count: int


@dataclass(frozen=True)
class Record(Op):
    event: Event


@dataclass(frozen=True)
class After(Op):
    event: Event


@dataclass(frozen=True)
class Part:
    """One entry of a Cast's segment table."""

    src: Region
    dst: Region
    src_dtype: str
    dst_dtype: str


@dataclass(frozen=True)
class Cast(Op):
    """One kernel: copies the rank's own pieces, converting where dtypes differ (round to nearest even)."""

    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Clear(Op):
    """Zeros into this rank's `dst`."""

    dst: Region


@dataclass(frozen=True)
class Segment:
    """One entry of a Reduce's segment table: sources in the order of summation."""

    sources: tuple[Source, ...]
    dst: Region


@dataclass(frozen=True)
class Reduce(Op):
    """One kernel: dst = sources[0] + sources[1] + ... in fp32, from left to right (but for a `LaneSum`), never contracted.

    `carry`: the sum starts from what dst holds. `scaled`: the sum is multiplied by the launch's scale before it is rounded to `dst_dtype`.
    """

    segments: tuple[Segment, ...]
    src_dtype: str
    dst_dtype: str
    scaled: bool = False
    carry: bool = False
    blocks: int = 0


def inbox_tag(batch: int) -> int:
    """Tag index that means the inbox set of a batch of this launch."""
    return -2 - batch


@dataclass(frozen=True)
class Post(Op):
    """Write this launch's tag into `peer`'s TAG area at (index, this rank). index: a piece of STAGE, -1 for the bound slot, `inbox_tag`."""

    peer: int
    index: int


@dataclass(frozen=True)
class Agree(Op):
    """Compare the tags of `peers` at `index` with this launch's own; a difference ends the run with an error on every rank."""

    peers: tuple[int, ...]
    index: int


@dataclass(frozen=True)
class Use(Op):
    """What FSDP does between collectives (compute, optimizer). In sequences for the checker only; no engine sees it.

    `writes` get fresh contents, named by `label`; `expects` maps regions to what must stand there (checker.Content).
    """

    reads: tuple[Region, ...] = ()
    writes: tuple[tuple[Region, object], ...] = ()
    expects: tuple[tuple[Region, object], ...] = ()


@dataclass(frozen=True)
class Program:
    """One rank's part of one collective.

    `points` are the events that FSDP waits for (`sent`, `arrived`, `grads_read`, `done`). `arrivals` says how many signals each of this
    rank's words sees from its peers' programs in one launch; the checker verifies it.
    """

    name: str
    rank: int
    ops: tuple[Op, ...]
    points: Mapping[str, Event] = field(default_factory=dict)
    arrivals: Mapping[Word, int] = field(default_factory=dict)
    stage_pieces: int = 0
    inbox_batches: int = 0

    @cached_property
    def signals(self) -> dict[tuple[int, Word], int]:
        """Signals that this program sends: (peer, word) -> how many."""
        sent: Counter[tuple[int, Word]] = Counter()
        for op in self.ops:
            if isinstance(op, (Signal, Put)):
                sent[op.peer, op.word] += 1
        return dict(sent)

    def streams(self) -> list[str]:
        return list(dict.fromkeys(op.stream for op in self.ops))

    def without(self, index: int) -> Program:
        """This program less its index-th operation: a mutant for tests of the checker."""
        return replace(self, ops=self.ops[:index] + self.ops[index + 1 :])

    def __str__(self) -> str:
        from tide_comm.plan.render import render

        return render(self)


WordKey = tuple[str, int, int]
"""A word as bound: (name, key, slot or -1)."""
EventKey = tuple[str, int, int]


@dataclass
class Counters:
    """What one rank has sent and is due to have received, over all launches so far. Both ends count alike, without talking."""

    sent: Counter[tuple[int, WordKey]] = field(default_factory=Counter)
    received: Counter[WordKey] = field(default_factory=Counter)
    stage_piece: int = 0
    inbox_batch: int = 0


@dataclass(frozen=True)
class Binding:
    """What one launch binds: slot (or -1), ring positions, and the values that words had before it."""

    slot: int
    stage_piece: int
    inbox_batch: int
    received: Mapping[WordKey, int]
    sent: Mapping[tuple[int, WordKey], int]

    def word(self, word: Word) -> WordKey:
        return (word.name, word.key, self.slot if word.slotted else -1)

    def event(self, event: Event) -> EventKey:
        return (event.name, event.key, self.slot if event.slotted else -1)

    def wait_value(self, op: Wait) -> int:
        return max(0, self.received.get(self.word(op.word), 0) + op.count)


def bind(program: Program, counters: Counters, slot: int = -1) -> Binding:
    """Bind a launch and count it: `counters` move on to what they are after it."""

    def key(word: Word) -> WordKey:
        return (word.name, word.key, slot if word.slotted else -1)

    waited = {key(op.word) for op in program.ops if isinstance(op, Wait)}
    sent_keys = {(peer, key(word)): count for (peer, word), count in program.signals.items()}
    binding = Binding(
        slot,
        counters.stage_piece,
        counters.inbox_batch,
        {k: counters.received[k] for k in waited},
        {k: counters.sent[k] for k in sent_keys},
    )
    for word, count in program.arrivals.items():
        counters.received[key(word)] += count
    for peer_word, count in sent_keys.items():
        counters.sent[peer_word] += count
    counters.stage_piece += program.stage_pieces
    counters.inbox_batch += program.inbox_batches
    return binding


def tag_place(binding: Binding, index: int, ring: int) -> tuple[str, int]:
    """Where a tag of this index lies: ("slot", slot), ("stage", place of the ring) or ("inbox", set)."""
    if index == -1:
        return "slot", binding.slot
    if index < -1:
        return "inbox", (binding.inbox_batch - 2 - index) % 2
    return "stage", (binding.stage_piece + index) % ring
