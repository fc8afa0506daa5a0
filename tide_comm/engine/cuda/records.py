"""The records that the executor takes: operations and segment tables, as C++ lays them out, and the numbers in them."""

from __future__ import annotations

import numpy as np

KINDS = ("copy", "copy2d", "write", "wait", "record", "after", "cast", "reduce", "fill", "agree", "put", "clear")
COPY, COPY2D, WRITE, WAIT, RECORD, AFTER, CAST, REDUCE, FILL, AGREE, PUT, CLEAR = range(len(KINDS))
OP = np.dtype(
    [
        ("kind", "i4"),
        ("stream", "i4"),
        ("dst", "u8"),
        ("src", "u8"),
        ("bytes", "u8"),
        ("dst_pitch", "u8"),
        ("src_pitch", "u8"),
        ("dst_base", "u4"),
        ("src_base", "u4"),
        ("rows", "u4"),
        ("aux", "i4"),
        ("sources", "i4"),
        ("src_dtype", "i4"),
        ("dst_dtype", "i4"),
        ("flags", "i4"),
    ]
)
"""struct Op in csrc/executor.cu."""
MAX_SOURCES = 8
PLACE = np.dtype([("offset", "u8"), ("pitch", "u8"), ("base", "u4"), ("pad", "u4")])
SEGMENT = np.dtype(
    [
        ("elements", "u8"),
        ("width", "u8"),
        ("first_tile", "u8"),
        ("src_dtype", "i4"),
        ("dst_dtype", "i4"),
        ("dst", PLACE),
        ("src", PLACE, (MAX_SOURCES,)),
    ]
)
"""struct Segment in csrc/kernels.h."""
TILE = 16384
BYTES = 4
DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2, "float64": 3}
SUM_BLOCKS = 64
CAST_BLOCKS = 64
"""Half of an H200's SMs move all but a twentieth of what all of them do, and leave the others to multiplies."""
CARRY, SCALED, CHECKED, MULTIMEM = 1, 2, 4, 8
TAG_VALUE = -1
"""`aux` of a word operation whose value is the launch's tag."""
WORD_VALUE_BYTES = 4
RUNS = {COPY: 0, WRITE: 1, WAIT: 1, AGREE: 1, PUT: 2}
"""Kinds of which neighbours on one stream share a call of the driver, where the number is the same."""


def driver_calls(ops: np.ndarray) -> int:
    """How many calls of the driver the executor makes of them."""
    runs = [(int(op["stream"]), RUNS.get(int(op["kind"]))) for op in ops]
    return sum(not i or run[1] is None or runs[i - 1] != run for i, run in enumerate(runs))
