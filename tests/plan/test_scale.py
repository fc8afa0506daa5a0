"""Training sequences over many machines. All ranks up to 17 x 8; above that machine 0 alone, once machines are proven alike."""

from __future__ import annotations

import pytest

from tests.plan.ragged import MODES, ragged_plans
from tide_comm.plan.sequence import check_training

FULL = [(machines, lanes) for machines in range(1, 18) for lanes in (1, 2, 3, 4, 8)]


def cases(most: int, least: int = 1) -> list[tuple[int, int, str]]:
    """(machines, lanes, mode) by number of ranks; both modes up to eight, in turn above."""
    return [
        (machines, lanes, mode)
        for machines, lanes in FULL
        for number, mode in enumerate(MODES)
        if least <= machines * lanes <= most and (machines * lanes <= 8 or (machines + lanes) % 2 == number)
    ]


@pytest.mark.parametrize(("machines", "lanes", "mode"), cases(10))
def test_all_ranks(machines: int, lanes: int, mode: str) -> None:
    check_training(ragged_plans(machines, lanes, mode, padding=True), 2)


@pytest.mark.slow
@pytest.mark.parametrize(("machines", "lanes", "mode"), cases(17 * 8, 11))
def test_all_ranks_of_many(machines: int, lanes: int, mode: str) -> None:
    check_training(ragged_plans(machines, lanes, mode, padding=True), 2)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_all_ranks_of_17_machines_of_8(mode: str) -> None:
    check_training(ragged_plans(17, 8, mode, padding=True, seed=1), 2)


@pytest.mark.parametrize(("machines", "lanes", "mode"), cases(10))
def test_machine_zero_alone(machines: int, lanes: int, mode: str) -> None:
    check_training(ragged_plans(machines, lanes, mode, padding=False), 2, symmetric=True)


@pytest.mark.slow
@pytest.mark.parametrize(("machines", "lanes", "mode"), cases(24, 11))
def test_machine_zero_alone_of_many(machines: int, lanes: int, mode: str) -> None:
    check_training(ragged_plans(machines, lanes, mode, padding=False), 2, symmetric=True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("machines", "lanes"), [(32, 8), (64, 8), (1024, 1)])
def test_machine_zero_alone_of_very_many(machines: int, lanes: int, mode: str) -> None:
    check_training(ragged_plans(machines, lanes, mode, padding=False, batch=8), 2, symmetric=True, workers=2)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("machines", "lanes"), [(1, 3), (2, 2), (3, 2), (3, 1)])
@pytest.mark.parametrize(
    ("prefetch", "micro_steps", "evaluate", "keep", "recompute"),
    [
        (1, 2, False, (), False),
        (1, 1, True, (), True),
        (1, 1, False, (2,), False),
        (2, 2, True, (0, 2), True),
        (0, 1, True, (0, 1, 2), False),
    ],
)
def test_other_steps(
    machines: int,
    lanes: int,
    mode: str,
    symmetric: bool,
    prefetch: int,
    micro_steps: int,
    evaluate: bool,
    keep: tuple[int, ...],
    recompute: bool,
) -> None:
    """Gradients of two backward passes, evaluation between steps, groups that stay unsharded, activation checkpointing."""
    check_training(
        ragged_plans(machines, lanes, mode, padding=not symmetric),
        2,
        0,
        prefetch,
        micro_steps=micro_steps,
        evaluate=evaluate,
        keep=keep,
        recompute=recompute,
        symmetric=symmetric,
    )
