"""Every way to use FSDP2 that TIDE takes, against stock FSDP2 on the same ranks: losses, gradients and parameters equal to the bit.

Freed slots are filled with NaN throughout, so that a read after the free cannot go unseen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.seam.harness import Scenario
from tests.seam.launch import Job, Outcome, once_a_world, run, values
from tests.seam.scenarios import SCENARIOS

Case = tuple[str, str, int]
CASES: list[Case] = [
    (s.name, mode, world)
    for s in SCENARIOS.values()
    for world in ((*s.worlds, 3) if s.three else s.worlds)
    for mode in s.modes
]
Results = Callable[[str, str, int], list[Outcome]]


def case_id(case: Case) -> str:
    return " ".join(map(str, case)).replace(" ", "-").replace(",", "")


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Results:
    of = once_a_world(request, lambda case: case[2], job)
    return lambda *case: of(case)


def is_slow(case: Case) -> bool:
    """Two ranks are quick and run everything; four ranks run the core, and everything when slow tests are wanted."""
    return case[2] == 4 and not SCENARIOS[case[0]].core


def steps_of(case: Case) -> int:
    """Whatever a scenario does in some steps only, it has done within eight."""
    steps = SCENARIOS[case[0]].steps
    return steps if is_slow(case) else min(steps, 8)


def job(case: Case) -> Job:
    name, mode, _ = case
    kwargs = {"scenario": name, "mode": mode, "steps": steps_of(case)}
    return Job(f"{name} {mode}", "tests.seam.harness:compare", kwargs, {"TIDE_POISON": "1"})


def marked(case: Case) -> Any:
    return pytest.param(case, id=case_id(case), marks=[pytest.mark.slow] if is_slow(case) else [])


@pytest.mark.parametrize("case", [marked(c) for c in CASES])
def test_equal_to_stock(case: Case, results: Results) -> None:
    name, mode, world = case
    scenario = SCENARIOS[name]
    everybody = values(results(name, mode, world))
    assert max(value["largest_grad"] for value in everybody) > 0  # a rank may hold empty shards only
    for rank, value in enumerate(everybody):
        assert value["difference"] == "", f"rank {rank}: {value['difference']}"
        assert len(set(value["losses"])) >= steps_of(case) and all(loss == loss for loss in value["losses"])
        tide_ran(scenario, mode, value)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_over_all_steps(world: int) -> None:
    """Scenarios that no slow case above plays over all their steps, on the fewest ranks they take."""
    played = {name for name, *rest in CASES if is_slow((name, *rest))}
    left = [s for s in SCENARIOS.values() if s.worlds and s.worlds[0] == world and s.name not in played]
    chosen = [(s, mode) for s in left if s.steps > 8 for mode in s.modes]
    jobs = [
        Job(f"{s.name} {mode}", "tests.seam.harness:compare", {"scenario": s.name, "mode": mode}, {"TIDE_POISON": "1"})
        for s, mode in chosen
    ]
    outcomes = run(world, jobs)
    for scenario, mode in chosen:
        for rank, value in enumerate(values(outcomes[f"{scenario.name} {mode}"])):
            assert value["difference"] == "", f"{scenario.name} {mode}, rank {rank}: {value['difference']}"
            assert len(set(value["losses"])) >= scenario.steps
            tide_ran(scenario, mode, value)


def tide_ran(scenario: Scenario, mode: str, value: dict[str, Any]) -> None:
    """Each group communicated as often as stock's, and on what it had to; the report says so."""
    rows = value["rows"]
    assert len(rows) == len(value["counts"])
    for (name, comm, reason, stats), (gathers, reduces) in zip(rows, value["counts"], strict=True):
        assert name in value["printed"]
        if name in scenario.stock:
            # docs/semantics.md shows this text.
            assert comm == "stock" and scenario.stock[name] in reason and not stats, (name, comm, reason)
            continue
        if scenario.name == "detach":
            assert comm == "stock" and reason == "detached"
            continue
        assert comm == "tide" and not reason, (name, comm, reason)
        if scenario.name != "attach again":
            check_counts(scenario, name, stats, gathers, reduces)
    if set(scenario.stock) != {name for name, *_ in rows}:
        check_gradients(scenario, mode, value["out"] or value["stats"])


def check_counts(scenario: Scenario, name: str, stats: dict[str, int], gathers: int, reduces: int) -> None:
    on_tide, on_stock = stats.get("all_gathers", 0), stats.get("all_gathers_stock", 0)
    if scenario.config.get("all_gather", True):
        assert on_tide + on_stock == gathers, f"{name}: {stats}, stock ran {gathers} all-gathers"
        assert scenario.stock_all_gathers is not False or on_stock == 0 < on_tide, f"{name}: {stats}"
    else:
        assert on_tide == 0, stats
    if scenario.config.get("reduce_scatter", True):
        assert stats.get("reduce_scatters", 0) == reduces, f"{name}: {stats}, stock ran {reduces} reduce-scatters"
        assert stats.get("reduce_scatters_stock", 0) == 0, f"{name}: {stats}"
    else:
        assert stats.get("reduce_scatters", 0) == 0, stats


def check_gradients(scenario: Scenario, mode: str, stats: dict[str, int]) -> None:
    """In-Place copies no gradient; Slot-Reuse copies all where their slot is vacated and as wide."""
    copied, read = stats.get("grads_copied_bytes", 0), stats.get("grads_read_in_place_bytes", 0)
    assert copied + read == stats.get("bytes_reduced", 0)
    assert stats.get("all_gathers", 0) > 0 or not scenario.config.get("all_gather", True)
    if scenario.stock_all_gathers:
        assert stats.get("all_gathers_stock", 0) > 0
    if not scenario.config.get("reduce_scatter", True):
        assert copied == read == 0
    elif mode == "in_place":
        assert copied == 0 and read > 0
    elif scenario.copies is not None:
        assert (copied > 0 and read == 0) if scenario.copies else (copied == 0 and read > 0), stats
