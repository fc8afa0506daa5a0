"""Measuring over host engines: what is told apart, what is launched, and that all ranks end with the same."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tune.small import case, over_ranks
from tide_comm.config import TideConfig
from tide_comm.fsdp.rails import Multicast
from tide_comm.plan.program import CopyAll
from tide_comm.plan.topology import Topology
from tide_comm.tune import launches
from tide_comm.tune import shard as shard_module
from tide_comm.tune.launches import ROUNDS, Multiplies
from tide_comm.tune.settings import SETTINGS
from tide_comm.tune.shard import ALONE, BESIDE, MULTIPLIES, AgreedError, Shard, programs_of

BLOCKS, FINAL, BATCH, HEAD, AT_ONCE = SETTINGS
CONFIG = TideConfig(timeout_s=20)


def all_settings(rank: int, shard: Shard) -> Any:
    found = [shard.measure(setting, CONFIG) for setting in SETTINGS]
    shard.close()
    return found


def test_two_machines_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    cases = [case(4, "large"), case(4, "small", alike=1, gathers_per_step=1)]
    ranks = over_ranks(monkeypatch, Topology.regular(2, 2), cases, all_settings, said)
    blocks, final, batch, head, at_once = ranks[0]
    assert all(theirs == ranks[0] for theirs in ranks), "all ranks have the same times"
    assert set(blocks.alike.values()) == {16, 32, 64, 132, 264} and set(final.alike.values()) == {2, 4, 8, 16, 32, 64}
    # Two machines make up two batches of one, or one batch.
    assert batch.alike == {1: 1, 2: 8, 4: 8, 8: 8} and batch.arena_bytes is not None
    assert set(batch.arena_bytes) == {1, 8}
    # All of it fits into the smallest head.
    assert set(head.alike.values()) == {0, CONFIG.head_bytes}
    assert set(at_once.alike.values()) == {0} and not at_once.rows
    assert at_once.reason.startswith("multicast: no (a CPU has no switch")
    for measured, collectives in ((blocks, 1), (final, 1), (batch, 1), (head, 2)):
        large, small = measured.rows
        assert (large.case.title, small.case.title) == ("large.0 .. large.2 (3)", "small.0")
        assert large.launches_per_step == 3 * collectives and small.launches_per_step == 1
        for row in measured.rows:
            assert set(row.times_s) == set(measured.alike.values()) and row.counts == ALONE
            assert all(len(kinds[ALONE]) == ROUNDS and min(kinds[ALONE]) > 0 for kinds in row.times_s.values())
    assert "partial_blocks = 16, 32, 64, 132, 264: large.0 .. large.2 (3), group 1 of 2" in said
    # One arena until the inbox changes, two for its values; the all-gather goes on in the last.
    assert sum(text.startswith("making an arena") for text in said) == 3


def test_a_rank_that_sums_nothing_still_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row over two ranks: rank 1's programs are the same for all values, rank 0's are not."""
    cases = [case(2, rows=1)]
    ranks = over_ranks(monkeypatch, Topology.regular(1, 2), cases, lambda r, s: s.measure(BLOCKS, CONFIG))
    assert ranks[0] == ranks[1] and len(ranks[0].rows[0].times_s) == 5


def test_slot_reuse_and_multiplies_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TideConfig(memory_mode="slot_reuse", timeout_s=20)
    monkeypatch.setattr(Multiplies, "SHAPE", (8, 8, 8))
    monkeypatch.setattr(shard_module, "MOST_MULTIPLIES", 3)
    counted: list[int] = []
    times = Multiplies.__call__

    def count(self: Multiplies, number: int) -> None:
        counted.append(number)
        times(self, number)

    monkeypatch.setattr(Multiplies, "__call__", count)
    ranks = over_ranks(
        monkeypatch, Topology.regular(1, 2), [case(2)], lambda r, s: s.measure(BLOCKS, config), beside=True
    )
    assert ranks[0] == ranks[1]
    (row,) = ranks[0].rows
    # A multiply of this size is far shorter than a reduce-scatter.
    assert row.counts == BESIDE and row.multiplies == 3
    timed = 5 * (launches.WARMUP + launches.ROUNDS * launches.LAUNCHES)
    assert counted.count(3) == 2 * timed
    for kinds in row.times_s.values():
        assert all(both > multiplied for both, multiplied in zip(kinds[BESIDE], kinds[MULTIPLIES], strict=True))


def test_what_goes_to_all_lanes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs are those of attach: the smallest value sends nothing to all lanes; the inbox is that of a switch."""
    cases, yes = [case(4, rows=64)], Multicast(True, "multicast: yes (a test)")

    def body(rank: int, shard: Shard) -> Any:
        found = [shard.measure(setting, CONFIG) for setting in (BATCH, AT_ONCE)]
        inbox = shard.spec(CONFIG).inbox
        sent = [
            sum(isinstance(op, CopyAll) for op in programs_of(cases[0], shard.spec(CONFIG), rank, config, True)[0].ops)
            for config in (CONFIG, AT_ONCE.set_in(CONFIG, 1))
        ]
        return found, inbox, sent, shard.multicast_line

    ranks = over_ranks(monkeypatch, Topology.regular(2, 2), cases, body, multicast=yes)
    assert all(theirs == ranks[0] for theirs in ranks), ranks
    (batch, at_once), inbox, (by_default, at_one_byte), line = ranks[0]
    assert inbox.multicast and set(batch.alike.values()) == {1, 8} and line == yes.line
    assert by_default and not at_one_byte
    # Its pieces, at most 512 bytes, are below all values but the smallest.
    assert set(at_once.alike.values()) == {0, 1} and at_once.rows[0].launches_per_step == 6 and not at_once.reason


def test_an_engine_that_goes_lane_by_lane_has_no_crossover(monkeypatch: pytest.MonkeyPatch) -> None:
    yes, why = Multicast(True, "multicast: yes (a test)"), "rank 1: this arena: error 999"
    cases, topology = [case(2, rows=64)], Topology.regular(1, 2)

    def body(rank: int, shard: Shard) -> Any:
        return shard.measure(AT_ONCE, CONFIG), shard.measure(BLOCKS, CONFIG), shard.multicast_line

    (at_once, blocks, line), other = over_ranks(monkeypatch, topology, cases, body, multicast=yes, apart=why)
    assert (at_once, blocks, line) == other and blocks.rows and not at_once.rows
    assert set(at_once.alike.values()) == {0} and at_once.reason == line == f"multicast: no, lane by lane ({why})"
    asked = TideConfig(multicast="on", timeout_s=20)
    ranks = over_ranks(monkeypatch, topology, cases, lambda r, s: s.measure(BLOCKS, asked), multicast=yes, apart=why)
    assert {str(error) for error in ranks} == {f'multicast = "on" cannot be had: {why}; take "auto" or "off"'}


def test_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one machine there is no last step, no inbox, no round; and a group without gradients has no sum."""
    topology, said = Topology.regular(1, 2), []  # type: tuple[Topology, list[str]]
    ranks = over_ranks(
        monkeypatch,
        topology,
        [case(2, trainable=(), reduce_dtype=None)],
        lambda r, s: [s.measure(setting, CONFIG) for setting in SETTINGS],
        said,
    )
    assert [m.rows for m in ranks[0]] == [()] * 5 and said == [], "no arena was made"


def test_memory_that_one_rank_lacks_is_everybodys_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory(launches.GroupMemory):
        def __init__(self, engine: Any, *arguments: Any) -> None:
            if engine.rank == 1:
                raise RuntimeError("CUDA out of memory. Tried to allocate 9 GiB\nand much more")
            super().__init__(engine, *arguments)

    monkeypatch.setattr(shard_module, "GroupMemory", Memory)
    ranks = over_ranks(monkeypatch, Topology.regular(1, 2), [case(2)], lambda r, s: s.measure(BLOCKS, CONFIG))
    assert [type(error) for error in ranks] == [AgreedError] * 2
    assert len(set(map(str, ranks))) == 1 and "\n" not in str(ranks[0])
    assert "rank 1: no room for shards and gradients of block.0 .. block.2 (3)" in str(ranks[0])
    assert "Tried to allocate 9 GiB; free memory, or tune with more ranks" in str(ranks[0])
