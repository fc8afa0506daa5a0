"""Who sits where, for any order of ranks."""

from __future__ import annotations

import pytest

from tide_comm.plan.topology import Topology, TopologyError


def test_regular_is_machine_by_machine() -> None:
    topology = Topology.regular(3, 4)
    assert (topology.machines, topology.lanes, topology.world) == (3, 4, 12)
    for rank in range(12):
        assert (topology.machine_of(rank), topology.lane_of(rank)) == divmod(rank, 4)
        assert topology.rank(topology.machine_of(rank), topology.lane_of(rank)) == rank


def test_mates_are_the_other_lanes_next_first() -> None:
    topology = Topology.regular(2, 4)
    assert topology.mates(5) == (6, 7, 4)
    assert Topology.regular(3, 1).mates(1) == ()


def test_each_step_of_the_mates_is_a_permutation() -> None:
    topology = Topology.regular(1, 8)
    for step in range(7):
        assert sorted(topology.mates(rank)[step] for rank in range(8)) == list(range(8))


def test_machine_and_lane_numbers_wrap() -> None:
    topology = Topology.regular(3, 2)
    assert topology.rank(3, 2) == topology.rank(0, 0) == 0
    assert topology.rank(-1, -1) == 5


def test_hosts_in_any_order() -> None:
    topology = Topology.from_hosts(["b", "a", "b", "a"])
    assert topology.table == ((0, 2), (1, 3))
    assert topology.machine_of(3) == 1
    assert topology.lane_of(3) == 1
    assert topology.mates(2) == (0,)


def test_emulated_machines_split_a_host() -> None:
    assert Topology.from_hosts([("a", 0), ("a", 0), ("a", 1), ("a", 1)]).table == ((0, 1), (2, 3))
    assert Topology.from_hosts([("a", 0), ("b", 0), ("a", 1), ("b", 1)]).machines == 4


@pytest.mark.parametrize(
    ("hosts", "says"),
    [
        (["a", "a", "b"], r"\[2, 1\]"),
        ([], "at least one machine"),
    ],
)
def test_unequal_hosts_are_an_error(hosts: list[str], says: str) -> None:
    with pytest.raises(TopologyError, match=says):
        Topology.from_hosts(hosts)


@pytest.mark.parametrize("table", [((0, 1), (1, 2)), ((0, 2),), ((0,), (1, 2)), ((),)])
def test_tables_that_are_not_a_permutation_are_an_error(table: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(TopologyError):
        Topology(table)
