"""docs/semantics.md is what the tests assert."""

from __future__ import annotations

from pathlib import Path

from tests.seam import table
from tests.seam.refusals import REFUSALS
from tests.seam.scenarios import SCENARIOS
from tests.seam.test_semantics import CASES


def test_the_document_is_up_to_date() -> None:
    assert table.PATH.read_text() == table.render(), "run python -m tests.seam.table"


def test_every_scenario_that_is_played_has_one_row() -> None:
    shown = [name for *_, names in table.rows() for name in names]
    assert len(shown) == len(set(shown))
    assert set(shown) == {name for name, *_ in CASES} == {s.name for s in SCENARIOS.values() if s.worlds}


def test_verdicts_say_where_collectives_run() -> None:
    for *_, verdict, names in table.rows():
        for scenario in (SCENARIOS[name] for name in names):
            partly = scenario.stock_all_gathers is not False
            assert bool(scenario.why) == partly, scenario.name
            assert verdict.startswith("falls back: ") == bool(scenario.stock), scenario.name
            assert (verdict == table.WORKS) == (not partly and not scenario.stock), scenario.name


def test_every_refusal_is_checked() -> None:
    here = Path(__file__).parent
    source = "".join((here / name).read_text() for name in ("test_failures.py", "test_copies.py", "test_lifetimes.py"))
    for key in REFUSALS:
        assert f'REFUSALS["{key}"].check(' in source, key
