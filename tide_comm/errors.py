"""What TIDE raises: each error says what was expected, what was found and what to do."""

from __future__ import annotations


class TideError(RuntimeError):
    """TIDE cannot go on: a peer died or stalled, ranks disagree, or PyTorch is not what it was tested with."""


def first_difference(a: str, b: str) -> str:
    """Where two texts part, with what stands around it, for a message."""
    at = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    lo, hi = max(0, at - 60), at + 60
    return f"'...{a[lo:hi]}' against '...{b[lo:hi]}'"
