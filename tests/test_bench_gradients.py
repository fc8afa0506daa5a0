"""scripts/bench/gradients.py: what counts as stock's gradients, and that no row's are added to another's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts" / "bench"))

from gradients import Gradients


class Sharded(torch.Tensor):
    """A DTensor, as far as the comparison is concerned."""

    def to_local(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


class Model:
    """One parameter, whose backward adds `grads`' next, as autograd does."""

    def __init__(self, *grads: float) -> None:
        self.parameter: Any = torch.nn.Parameter(torch.zeros(3))
        self.grads = list(grads)
        self.gradients = Gradients([self.parameter], self.backward, self.clear)

    def backward(self) -> None:
        before = self.parameter.grad
        more = torch.full((3,), self.grads.pop(0)).as_subclass(Sharded)
        self.parameter.grad = more if before is None else (before + more).as_subclass(Sharded)

    def clear(self) -> None:
        self.parameter.grad = None


def test_a_row_that_differs_leaves_nothing_to_the_next() -> None:
    """Once the next row's gradients were added to those of one that had failed, and it failed by 100%."""
    model = Model(1.0, 1.0, 1.02, 1.0, 1.009)
    assert model.gradients.compare() is None and len(model.grads) == 5
    model.gradients.take_stock()
    with pytest.raises(
        RuntimeError, match=r"differ from stock's by 2\.0e-02 of their norm; stock's from stock's by 0\.0e\+00"
    ):
        model.gradients.compare()
    assert model.gradients.compare() == 0.0
    assert model.gradients.compare() == pytest.approx(0.009, rel=1e-3)


def test_where_stock_differs_from_itself_so_may_a_row() -> None:
    model = Model(1.0, 1.02, 1.07, 1.09, float("nan"))
    model.gradients.take_stock()
    assert model.gradients.spread == pytest.approx(0.02, rel=1e-3)
    assert model.gradients.compare() == pytest.approx(0.07, rel=1e-3)
    for said in ("9.0e-02", "nan"):  # 8% are allowed here
        with pytest.raises(RuntimeError, match=said):
            model.gradients.compare()


def test_a_stock_that_differs_much_from_itself_excuses_nobody() -> None:
    model = Model(1.0, 1.25, 0.0, 1.09)
    model.gradients.take_stock()
    with pytest.raises(RuntimeError, match=r"differ from stock's by 1\.0e\+00"):
        model.gradients.compare()
    assert model.gradients.compare() == pytest.approx(0.09, rel=1e-3)
