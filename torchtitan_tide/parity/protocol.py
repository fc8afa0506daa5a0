"""The loss protocol: stock, stock again, TIDE, all else alike; what each curve keeps from the first, and the verdict.

The protocol is the published one for TIDE (Qwen3-30B-A3B from scratch, 1,000 steps): a first stock run is the reference; of each other
run, the largest relative distance of the 50-step moving average of its loss over the second half. There TIDE came to 0.73 %, a second stock
run to 1.12 %.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

REFERENCE, AGAIN, TIDE, NUDGED = "stock", "stock again", "tide", "stock nudged"
"""Runs. "stock nudged 1", ...: stock, its initial weights moved by one rounding (`measure.recorders.nudge_weights`)."""
SAME_SIZE = 2.0
"""Two draws of one distribution: the first exceeds the second half of the time, but seldom by more than this factor."""

Outcome = Literal["equal", "within", "same size", "outside", "no yardstick"]


def moving_average(losses: Sequence[float], window: int) -> list[float]:
    """Mean of each step's loss and the `window` - 1 before it: value i belongs to step window + i (steps count from 1)."""
    return [math.fsum(losses[i : i + window]) / window for i in range(len(losses) - window + 1)]


@dataclass(frozen=True)
class Gap:
    """How far a run's averaged curve is from the reference's, over the second half of the steps."""

    largest: float
    """Largest |average - reference's| / reference's."""
    at_step: int
    mean: float
    """Mean of the same with its sign: above 0 the run's loss is higher."""
    equal: bool
    """All losses of all steps are the reference's, to the bit."""
    first_different: int | None
    """The first step whose loss is another; None where all are equal."""


def gap(losses: Sequence[float], reference: Sequence[float], window: int) -> Gap:
    """The gap of a run to the reference. Raises `ValueError` for curves of unequal length, too short, or not finite."""
    steps = len(reference)
    if len(losses) != steps:
        raise ValueError(f"curves of {len(losses)} and {steps} steps: takes curves of equal length")
    if window < 1 or steps < 2 * window:
        raise ValueError(
            f"{steps} steps: takes at least two windows of {window}, so that the second half has full averages"
        )
    if not all(map(math.isfinite, (*losses, *reference))):
        raise ValueError("a loss is not finite: the training diverged, in whichever run")
    first = max(steps // 2, window)
    pairs = zip(moving_average(losses, window), moving_average(reference, window), strict=True)
    relative = [(a - b) / b for a, b in pairs][first - window :]
    at = max(range(len(relative)), key=lambda i: abs(relative[i]))
    different = next((i + 1 for i in range(steps) if losses[i] != reference[i]), None)
    mean = math.fsum(relative) / len(relative)
    return Gap(abs(relative[at]), first + at, mean, different is None, different)


@dataclass(frozen=True)
class Verdict:
    """`passed`, and why in a sentence."""

    outcome: Outcome
    passed: bool
    text: str


def verdict(gaps: Mapping[str, Gap]) -> Verdict:
    """Judge TIDE's gap by stock's own. `gaps`: of all runs but the reference.

    The yardstick is the second stock run's gap. Where that is 0, because stock is deterministic there, it says nothing about how far a
    rounding carries: then it is the largest gap of the nudged stock runs. TIDE passes

    - "equal": all its losses are the first stock run's, to the bit;
    - "within": its gap is at most the yardstick;
    - "same size": at most twice the yardstick. Each gap is one draw: if TIDE were just another stock run, its gap would exceed the other's
      half of the time.

    It does not pass "outside" that, nor with "no yardstick".
    """
    tide, again = gaps[TIDE], gaps[AGAIN]
    if tide.equal:
        return Verdict("equal", True, "TIDE's losses are stock's in every step, to the bit")
    nudged = [g.largest for name, g in gaps.items() if name.startswith(NUDGED)]
    if again.largest > 0:
        yardstick, whose = again.largest, "a second stock run's"
    elif nudged:
        yardstick, whose = max(nudged), "what one rounding of the initial weights does to stock"
    else:
        return Verdict(
            "no yardstick", False, "stock repeats itself to the bit and no nudged run says how far a rounding carries"
        )
    sizes = f"TIDE's largest gap is {tide.largest:.2%}, {whose} is {yardstick:.2%}"
    if tide.largest <= yardstick:
        return Verdict("within", True, f"{sizes}: within")
    if tide.largest <= SAME_SIZE * yardstick:
        return Verdict("same size", True, f"{sizes}: of the same size (at most {SAME_SIZE:g} times)")
    times = f" ({tide.largest / yardstick:.1f} times)" if yardstick else ""
    return Verdict("outside", False, f"{sizes}: outside{times}")


def stock_words(again: Gap) -> str:
    """What the two stock runs say of each other."""
    if again.equal:
        return "The two stock runs are equal to the bit: stock is deterministic here."
    return f"The two stock runs part at step {again.first_different}."
