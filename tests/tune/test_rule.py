"""The rule that chooses, and how ranks come to the same choice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.tune.small import case
from tide_comm.config import MAX_BATCH, TideConfig
from tide_comm.fsdp.rails import MULTICAST_BYTES
from tide_comm.tune.launches import ROUNDS
from tide_comm.tune.settings import (
    KIB,
    MIB,
    NOT_TUNED,
    SETTINGS,
    SLACK,
    Setting,
    choose,
    numbered,
    one_for_all_alike,
    slack,
)
from tide_comm.tune.shard import ALONE, AgreedError, Measured, Row, medians_of_slowest
from tide_comm.tune.together import combined, compare_ranks

BLOCKS, FINAL, BATCH, HEAD, AT_ONCE = SETTINGS


def steady(**times_s: float) -> dict[int, tuple[float, ...]]:
    """Seconds by value ("v16"), the same in each turn."""
    return {int(name[1:]): (taken_s,) * ROUNDS for name, taken_s in times_s.items()}


def test_a_setting_that_spends_takes_the_smallest_that_is_fast_enough() -> None:
    assert choose(BLOCKS, steady(v16=1.50, v32=1.04, v64=1.02, v132=1.00, v264=1.01), 16) == 64
    assert choose(BLOCKS, steady(v16=1.03, v32=1.00), 32) == 16
    assert choose(BLOCKS, steady(v16=1.04, v32=1.00), 16) == 32
    assert choose(BATCH, steady(v1=2.0, v2=2.0, v8=2.0), 8) == 1


def test_a_setting_that_spends_nothing_stays_unless_another_is_faster() -> None:
    assert choose(HEAD, steady(v0=1.0, v1=1.02, v8=1.01), 8) == 8
    assert choose(HEAD, steady(v0=1.00, v1=0.99, v8=1.03), 8) == 1
    assert choose(HEAD, steady(v1=1.0, v0=1.0, v8=1.5), 8) == 0


def test_a_noisy_machine_tells_less_apart() -> None:
    turns_s = {16: (1.10, 1.00, 1.20), 32: (1.00, 1.10, 0.90), 64: (1.0, 1.0, 1.1)}
    assert slack(turns_s) == pytest.approx(0.2 / 1.1)  # 0.18, 0.2 and 0.1
    # None of them is proven to be slower, so nothing changes; what is slower, though, goes.
    assert choose(BLOCKS, turns_s, 64) == 64 and choose(BLOCKS, turns_s, 32) == 32
    assert choose(BLOCKS, {**turns_s, 264: (1.5, 1.5, 1.5), 8: (1.4, 1.4, 1.6)}, 264) == 16
    assert slack(steady(v16=1.1, v32=1.0)) == SLACK
    # The middle turn: one slow moment is not the value's.
    assert choose(BLOCKS, {16: (1.0, 9.0, 1.0), 32: (1.5, 1.5, 1.5), 64: (1.5, 1.5, 1.5)}, 64) == 16


def test_candidates_have_the_configurations_own_value() -> None:
    config = TideConfig(partial_blocks=48, head_bytes=2 * MIB)
    assert BLOCKS.candidates(config) == (16, 32, 48, 64, 132, 264)
    assert HEAD.candidates(config) == (0, MIB, 2 * MIB, 8 * MIB, 32 * MIB)
    assert max(BATCH.candidates(config)) <= MAX_BATCH
    for setting in SETTINGS:
        for value in setting.candidates(config):
            assert setting.of(setting.set_in(config, value)) == value  # `TideConfig` takes it
    assert HEAD.why_off(replace(config, all_gather=False)) == "all_gather = false"
    assert BLOCKS.why_off(replace(config, reduce_scatter=False)) and not BLOCKS.why_off(config)


def test_equal_values_are_one() -> None:
    assert one_for_all_alike({1: "a", 2: "b", 4: "b", 8: "b"}, 4) == {1: 1, 2: 4, 4: 4, 8: 4}
    assert one_for_all_alike({1: "a", 2: "b", 4: "b"}, 1) == {1: 1, 2: 2, 4: 2}
    assert numbered([[1], [2], [1], [3], [2]]) == [0, 1, 0, 2, 1]


def test_the_slowest_rank_of_each_launch_counts() -> None:
    ranks = [{16: [[(1.0, 5.0), (2.0, 6.0), (9.0, 7.0)]]}, {16: [[(3.0, 4.0), (1.0, 4.0), (1.0, 4.0)]]}]
    # Slowest by launch: 3, 2, 9 and 5, 6, 7.
    assert medians_of_slowest(ranks) == {16: [(3.0,), (6.0,)]}
    turns = [{8: [[(1.0,)], [(3.0,)]]}, {8: [[(2.0,)], [(1.0,)]]}]
    assert medians_of_slowest(turns) == {8: [(2.0, 3.0)]}


def measured(times_s: dict[int, float], alike: dict[int, int] | None = None, machines: int = 2) -> Measured:
    times = {value: {ALONE: (taken_s,) * ROUNDS} for value, taken_s in times_s.items()}
    rows = (Row(case(2), 3, ALONE, times),) if times else ()
    return Measured((0, 1), machines, alike or {v: v for v in times_s}, rows)


def test_the_rank_with_most_decides() -> None:
    """Rank 1's stage is slow with 16 blocks; rank 0 alone would take them."""
    fast, slow = measured({16: 1.0, 64: 1.0}), measured({16: 2.0, 64: 1.5})
    tuned = combined(BLOCKS, 16, [[fast], [slow]])
    assert tuned.chosen == 64 and tuned.step_s == {16: 6.0, 64: 4.5}
    assert combined(BLOCKS, 16, [[fast], [fast]]).chosen == 16
    # A rank of two shard groups has both.
    tuned = combined(BLOCKS, 16, [[fast, fast], [slow]])
    assert tuned.step_s == {16: 6.0, 64: 6.0} and tuned.chosen == 16
    # One row for groups that are alike, with the slower one's times.
    assert len(tuned.rows) == 1 and tuned.rows[0].times_s[16][ALONE] == (2.0,) * ROUNDS


def test_values_are_one_only_if_they_are_for_all_shard_groups() -> None:
    two, four = (
        measured({1: 1.0, 8: 1.0}, {1: 1, 2: 8, 4: 8, 8: 8}),
        measured({1: 3, 2: 1.5, 8: 1}, {1: 1, 2: 2, 4: 8, 8: 8}),
    )
    tuned = combined(BATCH, 8, [[two, four]])
    assert tuned.step_s == {1: 12.0, 2: 7.5, 8: 6.0} and tuned.chosen == 8


def test_what_changes_no_program_is_not_measured() -> None:
    nothing = measured({}, {16: 16, 64: 16}, machines=1)
    tuned = combined(BLOCKS, 16, [[nothing], [nothing]])
    assert (tuned.chosen, tuned.turns_s) == (16, {}) and tuned.reason.startswith("one machine: no program")
    # Ranks without a group on TIDE have measured nothing.
    assert combined(BLOCKS, 16, [[], [measured({16: 1.0, 64: 0.5})]]).chosen == 64


def test_ranks_that_disagree_are_told() -> None:
    config, groups = TideConfig(), {(0, 1): ["block: reduce float32", "norm: reduce float32"]}
    compare_ranks([(config, groups)] * 2)
    with pytest.raises(AgreedError, match=r"rank 1; start every rank with the same CONFIG"):
        compare_ranks([(config, groups), (replace(config, final_blocks=8), groups)])
    with pytest.raises(AgreedError, match="reduce float32.*reduce bfloat16.*rank 1"):
        compare_ranks([(config, groups), (config, {(0, 1): ["block: reduce bfloat16", "norm: reduce float32"]})])
    with pytest.raises(AgreedError, match=r"rank 1 has no parameter group over ranks \[0, 1\]"):
        compare_ranks([(config, groups), (config, {(1,): ["block"]})])


def test_a_zero_that_means_64_mib_is_that_value() -> None:
    """Shown as what it means, in its place, and written only where it was the configuration's own."""
    default, named = TideConfig(), TideConfig(multicast_max_bytes=MULTICAST_BYTES)
    rest = (1, 256 * KIB, 2 * MIB, 16 * MIB)
    assert AT_ONCE.candidates(default) == (*rest, 0, 256 * MIB)
    assert AT_ONCE.candidates(named) == (*rest, 64 * MIB, 256 * MIB)
    assert AT_ONCE.candidates(TideConfig(multicast_max_bytes=512 * MIB))[-3:] == (64 * MIB, 256 * MIB, 512 * MIB)
    shown = [AT_ONCE.text(value) for value in AT_ONCE.candidates(default)]
    assert shown == ["1 B", "256 KiB", "2 MiB", "16 MiB", "64 MiB (0)", "256 MiB"]
    slow = {1: (2.0,) * ROUNDS}
    assert choose(AT_ONCE, {**steady(v0=1.0, v2097152=0.98), **slow}, 0) == 0
    assert choose(AT_ONCE, {**steady(v0=1.0, v2097152=0.9), **slow}, 0) == 2 * MIB
    assert choose(AT_ONCE, {**steady(v67108864=1.0, v2097152=1.2), **slow}, 2 * MIB) == 64 * MIB
    assert AT_ONCE.name not in NOT_TUNED and AT_ONCE.why_off(replace(default, all_gather=False))


def test_why_nothing_goes_to_all_lanes_is_told() -> None:
    off = "multicast: no (switched off by NCCL_NVLS_ENABLE=0)"
    here = replace(measured({}, {1: 0, 0: 0}), reason=off)
    tuned = combined(AT_ONCE, 0, [[here], [here]])
    assert (tuned.chosen, tuned.turns_s, tuned.reason) == (0, {}, off)
    # One shard group has a switch, the other has not.
    tuned = combined(AT_ONCE, 0, [[here], [measured({1: 1.0, 0: 0.5})]])
    assert (tuned.chosen, tuned.reason) == (0, "") and set(tuned.step_s) == {1, 0}
    nothing = measured({}, {1: 0, 0: 0}, machines=1)
    assert combined(AT_ONCE, 0, [[nothing]]).reason == "no program of these groups depends on it"


def test_every_tuned_setting_is_a_field() -> None:
    names = [setting.name for setting in SETTINGS]
    assert set(names) <= set(TideConfig.field_names()) and len(set(names)) == len(names)
    assert (
        isinstance(BLOCKS, Setting) and HEAD.text(8 * MIB) == "8 MiB" and HEAD.text(0) == "0" and BLOCKS.text(8) == "8"
    )
