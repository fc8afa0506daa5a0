"""How a compiled program names memory: bases by number, words by their place in one flat array of counters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tide_comm.engine.base import ArenaSpec
from tide_comm.errors import TideError
from tide_comm.plan.all_gather import SLOT_TAG
from tide_comm.plan.program import Area, Binding, Region, Word, inbox_tag
from tide_comm.plan.slices import INBOX_SETS


class BaseNumbers:
    """How bases are numbered."""

    def __init__(self, spec: ArenaSpec, params: int | None) -> None:
        """`params`: see `_params_of`."""
        self.spec = spec
        self.params = params or 0
        self.callers = 0 if params is None else 2 * params + 1
        """Bases of the caller's tensors: parameters, gradients, OUT."""
        world, ring = spec.topology.world, spec.stage.ring
        self.slots = world
        self.stages = 2 * world
        self.tags = self.stages + world * ring
        self.inboxes = self.tags + world * ring
        self.inbox_tags = self.inboxes + world * INBOX_SETS
        self.caller = self.inbox_tags + world * INBOX_SETS if spec.inbox else self.inboxes

    def of(self, region: Region, rank: int) -> int:
        if region.area is Area.SHARD:
            return rank
        if region.area is Area.SLOT:
            return self.slots + rank
        if region.area is Area.STAGE:
            return self.stage(rank, region.index)
        if region.area is Area.PARAM:
            return self.caller + region.index
        if region.area is Area.GRAD:
            return self.caller + self.params + region.index
        if region.area is Area.OUT:
            return self.caller + 2 * self.params
        if region.area is Area.INBOX:
            return self.inboxes + rank * INBOX_SETS + region.index % INBOX_SETS
        if region.area in (Area.PARTIAL, Area.SCRATCH):
            return rank
        raise TideError(f"the CUDA engine has no {region.area}")

    def offset(self, region: Region) -> int:
        """Bytes from the base."""
        fixed = region.area in (Area.PARTIAL, Area.SCRATCH)
        return region.offset + (self.spec.start(region.area, index=region.index) if fixed else 0)

    def stage(self, rank: int, piece: int) -> int:
        return self.stages + rank * self.spec.stage.ring + piece % self.spec.stage.ring

    def tag(self, rank: int, index: int) -> int:
        """Where tags of a piece of STAGE or of an inbox set start (`Post.index`); a slot's have no base of their own."""
        if index < SLOT_TAG:
            return self.inbox_tags + rank * INBOX_SETS + (-2 - index) % INBOX_SETS
        return self.tags + rank * self.spec.stage.ring + index % self.spec.stage.ring

    def arena_part(self, addresses: Sequence[int], binding: Binding) -> list[int]:
        """The bases that lie in arenas, for a launch's slot, position of the ring and inbox set."""
        spec, ring = self.spec, range(self.spec.stage.ring)
        slot_start = spec.start(Area.SLOT, max(binding.slot, 0))
        part = [
            *addresses,
            *(a + slot_start for a in addresses),
            *(a + spec.start(Area.STAGE, index=binding.stage_piece + k) for a in addresses for k in ring),
            *(a + spec.tag_of(0, k, binding) for a in addresses for k in ring),
        ]
        if spec.inbox:
            sets = range(INBOX_SETS)
            part += [a + spec.start(Area.INBOX, index=binding.inbox_batch + k) for a in addresses for k in sets]
            part += [a + spec.tag_of(0, inbox_tag(k), binding) for a in addresses for k in sets]
        return part


class WordTable:
    """Counters of all words as one flat array: what this rank has received, then what it has sent to each rank."""

    def __init__(self, spec: ArenaSpec) -> None:
        self.number = {key: i for i, key in enumerate(spec.words)}
        self.offsets = list(spec.words.values())
        self.counts = np.zeros(len(self.number) * (1 + spec.topology.world), dtype=np.int64)

    def received(self, word: Word, slot: int) -> int:
        return self.number[word.name, word.key, slot if word.slotted else -1]

    def sent(self, peer: int, word: Word, slot: int) -> int:
        return len(self.number) * (1 + peer) + self.received(word, slot)

    def offset(self, word: Word, slot: int) -> int:
        return self.offsets[self.received(word, slot)]
