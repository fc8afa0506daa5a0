"""What TIDE raises: each error says what was expected, what was found and what to do."""

from __future__ import annotations


class TideError(RuntimeError):
    """TIDE cannot go on: a peer died or stalled, ranks disagree, or PyTorch is not what it was tested with."""
