"""What a run of `cuda_ranks.py` tries, counted without a GPU: no two of its conditions may exclude each other unnoticed."""

from __future__ import annotations

import pytest
from cuda_ranks import DIVIDED, how_of, is_large, random_case

from tide_comm.plan import portions
from tide_comm.plan.all_gather import all_gather
from tide_comm.plan.program import Cast


@pytest.mark.parametrize("world", [2, 4, 8])
def test_casts_in_portions_meet_everything(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(("LEAST_BYTES", "ALIGN_BYTES"), DIVIDED, strict=True):
        monkeypatch.setattr(portions, name, value)
    seen: set[str] = set()
    for seed in range(16):
        delays, divided = how_of(seed)
        case = random_case(seed, world)
        if not divided:
            continue
        casts = [op for op in all_gather(case.layout, case.topology, 0).ops if isinstance(op, Cast)]
        if len(casts) > 1:
            parts = [part for op in casts for part in op.parts]
            cut = any(p.dst.rows == 1 and p.dst.nbytes not in sizes(case.layout) for p in parts)
            seen |= {f"delays {delays}"}
            seen |= {"large"} if is_large(seed) else set()
            seen |= {"cut inside a row"} if cut else set()
    assert seen == {"delays True", "delays False", "large", "cut inside a row"}


def sizes(layout) -> set[int]:
    """Bytes of whole chunks and of their rows, which are no cuts."""
    pieces = [layout.piece(p, 0) for p in range(len(layout.params))]
    return {piece.nbytes for piece in pieces} | {piece.row_bytes for piece in pieces}


def test_sixteen_cases_have_all_kinds() -> None:
    kinds = {(is_large(seed), seed % 2, *how_of(seed)) for seed in range(16)}
    assert {(large, odd) for large, odd, _, _ in kinds} == {(a, b) for a in (False, True) for b in (0, 1)}
    assert {(delays, divided) for _, _, delays, divided in kinds} == {
        (a, b) for a in (False, True) for b in (False, True)
    }
