"""`ConfigError`, and the nearest valid name in its message."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(Exception):
    """A bad configuration; the message is one line that says what was found and what is taken."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """'; did you mean "x"?' with the nearest valid name, or the valid names when they are few, or nothing."""
    names = sorted(valid)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if not near:
        # A key without or in the wrong section: compare the last part alone.
        last = {full.rpartition(".")[2]: full for full in names}
        near = [last[key] for key in difflib.get_close_matches(name.rpartition(".")[2], last, n=1, cutoff=0.7)]
    if near:
        return f'; did you mean "{near[0]}"?'
    return f"; takes {', '.join(names)}" if len(names) <= 24 else ""
