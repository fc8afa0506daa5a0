"""How a compiled program names memory: bases by number, words by their place in one flat array of counters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tide_comm.engine.base import ArenaSpec
from tide_comm.errors import TideError
from tide_comm.plan.all_gather import SLOT_TAG
from tide_comm.plan.program import Area, Binding, Cast, Copy, Program, Put, Reduce, Region, Word, inbox_tag
from tide_comm.plan.slices import INBOX_SETS


class BaseNumbers:
    """How bases are numbered."""

    def __init__(self, spec: ArenaSpec, params: int | None, multicast: bool = False) -> None:
        """`params`: see `params_of`. `multicast`: the arena has an address at which all lanes of the machine are written and read."""
        self.spec = spec
        self.multicast = multicast
        self.params = params or 0
        self.callers = 0 if params is None else 2 * params + 1
        """Bases of the caller's tensors: parameters, gradients, OUT."""
        world, ring = spec.topology.world, spec.stage.ring
        self.slots = world
        self.stages = 2 * world
        self.tags = self.stages + world * ring
        self.inboxes = self.tags + world * ring
        self.inbox_tags = self.inboxes + world * INBOX_SETS
        self.together = self.inbox_tags + world * INBOX_SETS if spec.inbox else self.inboxes
        sets = INBOX_SETS if spec.inbox else 0
        self.caller = self.together + (1 + sets if multicast else 0)

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

    def of_all(self, region: Region) -> int:
        """The base at which all lanes of the machine are reached at once. Raises `TideError` for what is not to be had there."""
        if self.multicast and region.area is Area.SLOT:
            return self.together
        if self.multicast and region.area is Area.INBOX:
            return self.together + 1 + region.index % INBOX_SETS
        raise TideError(f"the CUDA engine has no multicast address of {region.area}")

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

    def arena_part(self, addresses: Sequence[int], binding: Binding, together: int = 0) -> list[int]:
        """The bases that lie in arenas, for a launch's slot, position of the ring and inbox set. `together`: the multicast address."""
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
        if self.multicast:
            part += [together + slot_start]
        if self.multicast and spec.inbox:
            part += [together + spec.start(Area.INBOX, index=binding.inbox_batch + k) for k in range(INBOX_SETS)]
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


def params_of(program: Program) -> int | None:
    """One more than the highest parameter that the program touches in the caller's memory; None if it does not touch that at all."""
    highest, touched = -1, False
    for op in program.ops:
        regions: list[Region] = []
        if isinstance(op, (Copy, Put)):
            regions = [op.src, op.dst]
        elif isinstance(op, Cast):
            regions = [r for part in op.parts for r in (part.src, part.dst)]
        elif isinstance(op, Reduce):
            regions = [r for seg in op.segments for r in (*seg.sources, seg.dst) if isinstance(r, Region)]
        highest = max([highest, *(r.index for r in regions if r.area in (Area.PARAM, Area.GRAD))])
        touched = touched or any(r.area in (Area.PARAM, Area.GRAD, Area.OUT) for r in regions)
    return highest + 1 if touched else None
