"""Who sits where: machines, lanes and the ranks on them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property


class TopologyError(ValueError):
    """Ranks that cannot be arranged as M machines of L lanes each."""


@dataclass(frozen=True)
class Topology:
    """M machines of L lanes; `table[m][l]` is the rank (in the shard group) of lane l on machine m.

    Ranks normally run machine by machine (rank = m*L + l), but any order is allowed.
    """

    table: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        widths = {len(row) for row in self.table}
        if not self.table or widths == {0}:
            raise TopologyError("a topology takes at least one machine with one lane; got none")
        if len(widths) != 1:
            raise TopologyError(
                f"machines differ in size: {[len(row) for row in self.table]} ranks; TIDE takes equal ones"
            )
        ranks = sorted(r for row in self.table for r in row)
        if ranks != list(range(len(ranks))):
            raise TopologyError(f"ranks must be 0..{len(ranks) - 1}, each once; got {ranks}")

    @classmethod
    def regular(cls, machines: int, lanes: int) -> Topology:
        """rank = m*L + l."""
        return cls(tuple(tuple(m * lanes + lane for lane in range(lanes)) for m in range(machines)))

    @classmethod
    def from_hosts(cls, hosts: Sequence[Hashable]) -> Topology:
        """Group ranks by host, in the order in which hosts first appear; lanes follow rank order.

        `hosts[r]` identifies rank r's host, or the emulated machine on it. Raises `TopologyError` when machines would differ in size.
        """
        by_host: dict[Hashable, list[int]] = defaultdict(list)
        for rank, host in enumerate(hosts):
            by_host[host].append(rank)
        return cls(tuple(map(tuple, by_host.values())))

    @cached_property
    def machines(self) -> int:
        return len(self.table)

    @cached_property
    def lanes(self) -> int:
        return len(self.table[0])

    @property
    def world(self) -> int:
        return self.machines * self.lanes

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        return {rank: (m, lane) for m, row in enumerate(self.table) for lane, rank in enumerate(row)}

    @cached_property
    def _mates(self) -> dict[int, tuple[int, ...]]:
        return {rank: row[lane + 1 :] + row[:lane] for row in self.table for lane, rank in enumerate(row)}

    def rank(self, machine: int, lane: int) -> int:
        return self.table[machine % self.machines][lane % self.lanes]

    def machine_of(self, rank: int) -> int:
        return self._places[rank][0]

    def lane_of(self, rank: int) -> int:
        return self._places[rank][1]

    def mates(self, rank: int) -> tuple[int, ...]:
        """The other ranks of this rank's machine, next lane first: each moment's pushes are a permutation."""
        return self._mates[rank]

    def rail(self, rank: int) -> tuple[int, ...]:
        """The ranks of this rank's lane, this one included, machine by machine."""
        lane = self.lane_of(rank)
        return tuple(row[lane] for row in self.table)
