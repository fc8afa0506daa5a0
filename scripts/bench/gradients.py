"""Gradients of a row against stock's from the same parameters and data.

Attention's backward, and the scatter of a mixture of experts, add in no fixed order, and a router that is close to a tie may choose another
expert. So equality to the bit is for the tests; here a row may differ by 1% of the gradients' norm, or by a few times as much as stock
differs from itself, but never by more than a tenth.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

ALIKE = 0.01
TIMES_STOCK = 4.0
MOST = 0.1


class Gradients:
    """`backward` leaves gradients at `parameters`, `clear` takes them away."""

    def __init__(
        self, parameters: list[torch.nn.Parameter], backward: Callable[[], None], clear: Callable[[], None]
    ) -> None:
        self.parameters, self.backward, self.clear = parameters, backward, clear
        self.stock: list[torch.Tensor] = []
        self.spread = 0.0
        """How much stock's differ from stock's."""

    def take_stock(self) -> None:
        """From what communicates now."""
        self.stock, self.spread = self._of_this_row(), 0.0
        self.spread = self._difference()

    def compare(self) -> float | None:
        """The difference of what communicates now to stock's, as a part of stock's norm; None before `take_stock`. Raises `RuntimeError` if
        it is too large. Leaves no gradients behind, whatever happens: the next row's would be added to them."""
        if not self.stock:
            return None
        found = self._difference()
        if not found <= max(ALIKE, min(TIMES_STOCK * self.spread, MOST)):
            raise RuntimeError(
                f"gradients differ from stock's by {found:.1e} of their norm; stock's from stock's by {self.spread:.1e}"
            )
        return found

    def _difference(self) -> float:
        mine = self._of_this_row()
        diff = sum(float((a - b).double().pow(2).sum()) for a, b in zip(mine, self.stock, strict=True))
        norm = sum(float(b.double().pow(2).sum()) for b in self.stock)
        return float((diff / norm) ** 0.5) if norm else float(diff > 0)

    def _of_this_row(self) -> list[torch.Tensor]:
        try:
            self.backward()
            return [p.grad.to_local().clone() for p in self.parameters]  # type: ignore[union-attr]
        finally:
            self.clear()
