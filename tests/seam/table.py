"""Writes docs/semantics.md from the scenarios and refusals that the tests assert.

python -m tests.seam.table
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.seam.harness import Scenario
from tests.seam.refusals import REFUSALS
from tests.seam.scenarios import SCENARIOS

PATH = Path(__file__).parents[2] / "docs" / "semantics.md"
TOPICS = (
    "Parameters and units",
    "Precision",
    "Resharding",
    "Order of all-gathers",
    "Accumulation",
    "Reductions",
    "HSDP",
    "Recomputation and compilation",
    "Writes to parameters",
    "Steps that fail",
    "Left to stock",
)
WORKS = "works"

HEAD = """\
# What works, what falls back, what raises

Written by `python -m tests.seam.table` from the tests; do not edit.

Each row is what one or more scenarios of `tests/seam/scenarios` do. `tests/seam/test_semantics.py` plays each on stock FSDP2 and on
TIDE (host engine, two or four ranks, both memory modes) and asserts that losses, gradients and parameters are equal to the bit, and that
what is said here is what ran:

- **works**: every all-gather and reduce-scatter runs on TIDE.
- **falls back**: such a unit stays on stock communication and `print(report)` shows the reason; the other units stay on TIDE.
- **works; ...**: single all-gathers run on stock, which `report.summary_lines()` counts.

Numbers are the same wherever things run. With `strict = true` a unit that falls back is an error.
"""

NOTES = """\
## Notes

- After an exception call `reset_iter_state()` before `zero_grad()`: on the CPU up to two units' gradients of the failed backward
  arrive in `.grad` with the reset. What then stands there is what stock leaves.
- Setters of communication (`set_custom_*`, `set_symm_mem_for_comm`) belong before `attach`. Those of FSDP2's schedule and reductions
  work before and after.
- Slots are counted when `attach` is called, from `reshard_after_forward` and the explicit prefetching of that moment: call these
  setters before it, or set `slots`.
- A copy of a layer, a parameter or a state dict has memory of its own and nothing of TIDE.
"""


def verdict_of(scenario: Scenario) -> str:
    """In words, what `test_semantics.tide_ran` asserts of where the groups run."""
    if scenario.stock:
        (reason,) = set(scenario.stock.values())
        return f"falls back: {reason}"
    return WORKS if scenario.stock_all_gathers is False else f"{WORKS}; {scenario.why}"


def rows() -> Iterator[tuple[str, str, str, list[str]]]:
    """(topic, row, verdict, scenarios) in order; variants of a row have one verdict."""
    found: dict[tuple[str, str], list[Scenario]] = {}
    for scenario in SCENARIOS.values():
        if scenario.row:
            found.setdefault((scenario.topic, scenario.row), []).append(scenario)
    for wanted in TOPICS:
        for (topic, row), variants in found.items():
            if topic == wanted:
                (verdict,) = {verdict_of(s) for s in variants}
                yield topic, row, verdict, [s.name for s in variants]


def render() -> str:
    parts = [HEAD]
    last = ""
    for topic, row, verdict, names in rows():
        if topic != last:
            parts.append(f"\n## {topic}\n\n| what | verdict | scenarios |\n|---|---|---|\n")
            last = topic
        parts.append(f"| {row} | {verdict} | {'; '.join(names)} |\n")
    for refusal in REFUSALS.values():
        if refusal.topic != last:
            parts.append(f"\n## {refusal.topic}\n\n| what | error | which says |\n|---|---|---|\n")
            last = refusal.topic
        says = " ... ".join(f"`{part}`" for part in refusal.says)
        parts.append(f"| {refusal.row} | `{refusal.error}` | {says} |\n")
    return "".join([*parts, "\n", NOTES])


if __name__ == "__main__":
    PATH.write_text(render())
