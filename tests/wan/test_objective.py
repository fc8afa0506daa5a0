"""The flow-matching objective, with values worked out by hand."""

from __future__ import annotations

import pytest
import torch

from torchtitan_tide.models.wan.objective import Objective, drop_text, generator, noised, shifted, unshifted


def test_shift_by_hand() -> None:
    # 5 * 0.5 / (1 + 4 * 0.5) = 2.5 / 3
    assert shifted(torch.tensor(0.5), 5.0).item() == pytest.approx(2.5 / 3)
    assert shifted(torch.tensor([0.0, 1.0]), 5.0).tolist() == [0.0, 1.0]
    assert shifted(torch.tensor(0.3), 1.0).item() == pytest.approx(0.3)
    # 0.875 / (5 - 4 * 0.875) = 0.875 / 1.5
    assert unshifted(0.875, 5.0) == pytest.approx(7 / 12)
    assert unshifted(0.9, 5.0) == pytest.approx(0.9 / 1.4)


@pytest.mark.parametrize(
    "expert, boundary, shift, interval",
    [
        ("high_noise", 875.0, 5.0, (7 / 12, 1.0)),
        ("low_noise", 875.0, 5.0, (0.0, 7 / 12)),
        ("high_noise", 900.0, 5.0, (9 / 14, 1.0)),
        ("low_noise", 875.0, 1.0, (0.0, 0.875)),
    ],
)
def test_the_experts_split_t_after_the_shift(expert: str, boundary: float, shift: float, interval: tuple) -> None:
    objective = Objective(expert, boundary, shift)  # type: ignore[arg-type]
    assert objective.interval() == pytest.approx(interval)
    t = 1000 * objective.noise_levels(torch.linspace(0, 1, 10_001))
    low, high = (boundary, 1000.0) if expert == "high_noise" else (0.0, boundary)
    assert t.dtype == torch.float32
    assert t.min() == pytest.approx(low, abs=1e-3) and t.max() == pytest.approx(high, abs=1e-3)
    if expert == "high_noise":
        assert (t >= boundary).all()
    else:
        # To the bit: the boundary itself is the other expert's.
        assert (objective.noise_levels(torch.ones(1)) < boundary / 1000).all()


def test_u_is_uniform_within_the_interval_not_t() -> None:
    found = Objective("high_noise", 875.0, 5.0).noise_levels(torch.tensor([0.5])).item()
    u = (7 / 12 + 1) / 2
    assert found == pytest.approx(5 * u / (1 + 4 * u))
    assert found != pytest.approx((0.875 + 1) / 2, abs=1e-3)


def test_noised_by_hand() -> None:
    latents, noise = torch.full((2, 1, 1, 1, 1), 2.0).bfloat16(), torch.full((2, 1, 1, 1, 1), -1.0)
    x, t, target = noised(latents, noise, torch.tensor([0.0, 0.893]))
    assert x.flatten().tolist() == pytest.approx([2.0, 0.107 * 2 - 0.893])
    assert t.tolist() == pytest.approx([0.0, 893.0]) and t.dtype == torch.float32
    assert target.flatten().tolist() == [-3.0, -3.0] and target.dtype == torch.float32


def test_text_drop() -> None:
    text, uniform = torch.ones(3, 2, 4), torch.tensor([0.05, 0.1, 0.7])
    assert drop_text(text, None, uniform, 0.1)[:, 0, 0].tolist() == [0, 1, 1]
    assert drop_text(text, torch.full((2, 4), 7.0), uniform, 0.2)[:, 1, 3].tolist() == [7, 7, 1]
    assert drop_text(text, None, uniform, 0.0).equal(text)


def test_what_is_drawn_follows_from_its_key() -> None:
    def draw(*key: int) -> list[float]:
        return torch.rand(3, generator=generator(torch.device("cpu"), *key)).tolist()

    assert draw(1, 42, 7, 0, 3) == draw(1, 42, 7, 0, 3)
    keys = [(1, 42, step, micro, rank) for step in range(10) for micro in range(3) for rank in range(8)]
    assert len({tuple(draw(*key)) for key in [*keys, (2, 42, 0, 0, 0)]}) == len(keys) + 1
    assert draw(1, -1) != draw(1, 1)
