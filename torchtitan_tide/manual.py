"""The Python manual's topics as documents: real English text and code that every CPython brings along.

`pydoc_data.topics` holds some 80 topics, 0.5 MB. Pure Python: also the pre-check reads it.
"""

from __future__ import annotations

import functools
import random
from typing import Literal

DOCUMENT_CHARS = 1000
"""Documents are cut at the first blank line after so many characters: enough documents for many ranks."""
VALIDATION_SHARE = 0.05
"""Share of the text, whole topics from the tail, that is held out."""


@functools.cache
def documents(split: Literal["train", "validation"]) -> tuple[str, ...]:
    """Documents of a split, in an order that is the same in every process of one Python version.

    Topics go to a split whole. Training documents are shuffled with a fixed seed, so that each rank's share covers
    all topics.
    """
    from pydoc_data.topics import topics

    # Some labels share one text: keep each text once.
    texts = list(dict.fromkeys(topics[label] for label in sorted(topics)))
    held_out_chars = VALIDATION_SHARE * sum(map(len, texts))
    tail = len(texts)
    while held_out_chars > 0:
        tail -= 1
        held_out_chars -= len(texts[tail])
    chosen = texts[:tail] if split == "train" else texts[tail:]
    found = [document for text in chosen for document in cut(text, DOCUMENT_CHARS)]
    if split == "train":
        random.Random(0).shuffle(found)
    return tuple(found)


def cut(text: str, chars: int) -> list[str]:
    """Pieces of at least `chars` characters (the last may be shorter), cut at blank lines; nothing is lost.

    A last piece of white space alone is left out.
    """
    pieces: list[str] = []
    lines: list[str] = []
    count = 0
    for line in text.splitlines(keepends=True):
        lines.append(line)
        count += len(line)
        if count >= chars and not line.strip():
            pieces.append("".join(lines))
            lines, count = [], 0
    if "".join(lines).strip():
        pieces.append("".join(lines))
    return pieces
