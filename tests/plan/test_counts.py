"""What a step costs in operations, bytes and driver calls does not change unnoticed."""

from __future__ import annotations

import json

import pytest

from tests.plan import counts

STORED = json.loads(counts.STORED.read_text())


@pytest.mark.parametrize("case", STORED)
def test_as_stored(case: str) -> None:
    model, size = case.split()
    machines, lanes = map(int, size.split("x"))
    found = counts.counts_of(model, machines, lanes)
    changed = {
        f"{program}.{what}": (stored, found[program][what])
        for program, all_stored in STORED[case].items()
        for what, stored in all_stored.items()
        if found[program][what] != stored
    }
    assert not changed, (
        f"(stored, now): {changed}. If this is meant: python -m tests.plan.counts, and say why in docs/log.md"
    )


def test_nothing_is_left_out() -> None:
    assert len(STORED) == 9
