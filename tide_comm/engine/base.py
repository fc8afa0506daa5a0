"""What the seam asks of an engine, and how an arena is laid out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from tide_comm.engine.timing import Timings
from tide_comm.plan import names
from tide_comm.plan.layout import align
from tide_comm.plan.names import words_of
from tide_comm.plan.program import Area, Binding, Program, Region, WordKey, tag_place
from tide_comm.plan.slices import INBOX_SETS, PARTIALS, InboxSpec, StageSpec
from tide_comm.plan.topology import Topology

AREA_ALIGN_BYTES = 2 * 1024 * 1024
"""Arena and areas are multiples of this: copy engines ran at three quarters of the link rate into an arena that was not."""
WORD_BYTES = 64
"""One cache line a word, so that waiting for one does not disturb another."""

OUTBOX_PLACES = 32
"""Words and tags that one of a rail's streams can have on their way at once."""
OUTBOX_BYTES = len(names.RAIL_STREAMS) * OUTBOX_PLACES * 4

Exchange = Callable[[Any], list[Any]]
"""Collective over the arena's ranks: hands in an object, returns everybody's in rank order."""


@dataclass(frozen=True)
class ArenaSpec:
    """Sizes of one arena, equal on all its ranks: SHARD | slots | STAGE | PARTIAL | INBOX | SCRATCH | signal words and tags.

    `inbox`: for more than one machine.
    """

    topology: Topology
    shard_bytes: int
    slot_bytes: int
    slots: int
    stage: StageSpec
    inbox: InboxSpec | None = None

    def __post_init__(self) -> None:
        if self.inbox is not None and self.topology.machines == 1:
            raise ValueError(f"an arena on one machine takes no inbox; got {self.inbox}")

    @cached_property
    def words(self) -> dict[WordKey, int]:
        """Byte offset of each word from the start of the arena."""
        start = self._starts["words"]
        return {key: start + i * WORD_BYTES for i, key in enumerate(self._word_keys)}

    @property
    def _word_keys(self) -> list[WordKey]:
        return words_of(self.topology.world, self.slots, self.topology.machines)

    @property
    def _scratch_bytes(self) -> int:
        """The last step's running sum, where sources come in several batches."""
        return self.inbox.seat_bytes if self.inbox and self.topology.machines > self.inbox.batch else 0

    @cached_property
    def _starts(self) -> dict[str, int]:
        sizes = {
            "SHARD": self.shard_bytes,
            "SLOT": self.slot_bytes_aligned * self.slots,
            "STAGE": self.stage.total_bytes,
            "PARTIAL": PARTIALS * self.inbox.seat_bytes if self.inbox else 0,
            "INBOX": INBOX_SETS * self.inbox.set_bytes if self.inbox else 0,
            "SCRATCH": self._scratch_bytes,
            "words": len(self._word_keys) * WORD_BYTES,
            "tags": self._tag_bytes + (OUTBOX_BYTES if self.topology.machines > 1 else 0),
        }
        starts, at = {}, 0
        for name, size in sizes.items():
            starts[name] = at
            at += align(size, AREA_ALIGN_BYTES)
        starts["end"] = at
        return starts

    @property
    def _tag_bytes(self) -> int:
        return (self.slots + self.stage.ring + INBOX_SETS) * self.topology.world * 4

    def outbox(self, channel: int, place: int) -> int:
        """Byte offset of a word on its way to another machine: a rail can put only what lies in the arena. Behind the tags."""
        return self._starts["tags"] + self._tag_bytes + (channel * OUTBOX_PLACES + place) * 4

    @property
    def slot_bytes_aligned(self) -> int:
        return align(self.slot_bytes, AREA_ALIGN_BYTES)

    @property
    def total_bytes(self) -> int:
        return self._starts["end"]

    def start(self, area: Area, slot: int = -1, index: int = 0) -> int:
        """Byte offset of an area's instance: a slot by its number; a place of STAGE, a PARTIAL, an inbox set by a running number."""
        if area is Area.SHARD:
            return self._starts["SHARD"]
        if area is Area.SLOT:
            return self._starts["SLOT"] + slot * self.slot_bytes_aligned
        if area is Area.STAGE:
            return self._starts["STAGE"] + index % self.stage.ring * self.stage.place_bytes
        if self.inbox is not None and area is Area.PARTIAL:
            return self._starts["PARTIAL"] + index % PARTIALS * self.inbox.seat_bytes
        if self.inbox is not None and area is Area.INBOX:
            return self._starts["INBOX"] + index % INBOX_SETS * self.inbox.set_bytes
        if self._scratch_bytes and area is Area.SCRATCH:
            return self._starts["SCRATCH"]
        raise ValueError(f"{area} does not lie in this arena")

    def region_start(self, region: Region, binding: Binding) -> int:
        """Byte offset of the instance of a region's area that a launch is bound to."""
        first = {Area.STAGE: binding.stage_piece, Area.INBOX: binding.inbox_batch}.get(region.area, 0)
        return self.start(region.area, binding.slot, first + region.index)

    def slot_tag(self, source: int, slot: int) -> int:
        """Byte offset of the tag that `source` writes beside a slot."""
        return self._tag_at(source, slot)

    def tag_of(self, source: int, index: int, binding: Binding) -> int:
        """Byte offset of the tag that `source` writes at an index of a launch (`Post`)."""
        kind, place = tag_place(binding, index, self.stage.ring)
        return self._tag_at(
            source, {"slot": 0, "stage": self.slots, "inbox": self.slots + self.stage.ring}[kind] + place
        )

    def _tag_at(self, source: int, place: int) -> int:
        return self._starts["tags"] + (place * self.topology.world + source) * 4

    def areas(self) -> dict[str, int]:
        """Bytes by area, for reports."""
        return {
            "SHARD": align(self.shard_bytes, AREA_ALIGN_BYTES),
            "SLOT": self.slot_bytes_aligned * self.slots,
            "STAGE": align(self.stage.total_bytes, AREA_ALIGN_BYTES),
            "signals": self.total_bytes - self._starts["words"],
        } | self._rail_areas()

    def _rail_areas(self) -> dict[str, int]:
        if self.inbox is None:
            return {}
        sizes = {
            "PARTIAL": PARTIALS * self.inbox.seat_bytes,
            "INBOX": INBOX_SETS * self.inbox.set_bytes,
            "SCRATCH": self._scratch_bytes,
        }
        return {name: align(size, AREA_ALIGN_BYTES) for name, size in sizes.items() if size}


@dataclass
class Buffers:
    """The caller's memory of one launch. The engine drops `grads` when they have been read."""

    params: Sequence[torch.Tensor] = ()
    grads: list[torch.Tensor | None] = field(default_factory=list)
    out: torch.Tensor | None = None
    scale: float = 1.0
    out_ready: Any = None
    """An event of PyTorch's after which `out` may be written; None: it is ordered behind the caller's stream."""


class Launched(ABC):
    """One launch of a program."""

    @abstractmethod
    def wait(self, point: str) -> None:
        """Order the caller behind a named point of the program. Raises `TideError` if the engine has failed or time is up."""

    def event(self, point: str) -> Any:
        """The point as an event of PyTorch's, for FSDP2 to wait on. Engines without device streams have none."""
        raise NotImplementedError(f"{type(self).__name__} has no events of PyTorch's")

    @abstractmethod
    def reached(self, point: str) -> bool:
        """Whether the point has been passed, without waiting."""


class Engine(ABC):
    """Carries programs out on one arena. All methods are called by the same thread, in the same order on all ranks."""

    spec: ArenaSpec
    rank: int
    apart = ""
    """Why programs that reach all lanes at once are carried out lane by lane, where they should not have been."""
    samples: bool
    """Timing a launch costs something, so that single steps are timed; False: all may be."""

    @abstractmethod
    def launch(self, program: Program, slot: int = -1, buffers: Buffers | None = None, tag: int = 0) -> Launched:
        """Bind and start a program; returns at once. Raises `TideError` if the engine has failed before."""

    @abstractmethod
    def window(self, area: Area, slot: int, offset: int, nbytes: int) -> torch.UntypedStorage:
        """A storage of exactly these bytes of this rank's arena. It does not own them: the engine outlives it."""

    @abstractmethod
    def time_launches(self, on: bool) -> None:
        """Whether launches and waits from here on are timed; off at first. With `samples`, a new sample begins at each call."""

    @abstractmethod
    def timings(self) -> Timings:
        """What has ended since the last call, without waiting for anything."""

    def backward_ended(self) -> None:
        """FSDP2 has ordered the caller behind its reduce-scatters. For engines whose caller's waits are not their own."""
        return

    @abstractmethod
    def close(self) -> None:
        """End the streams, tell the peers and give the memory back. Collective in effect: peers must not wait for this rank any more."""
