"""scripts/bench/rows.py: what the limit's programs keep."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts" / "bench"))

from rows import without_peers

from tide_comm.plan import names, portions
from tide_comm.plan.all_gather import all_gather
from tide_comm.plan.layout import GroupLayout, ParamLayout
from tide_comm.plan.program import After, Cast, Copy, Record, Wait
from tide_comm.plan.topology import Topology


def test_the_limit_casts_in_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with casts at once, so that ratios to it have one meaning."""
    monkeypatch.setattr(portions, "LEAST_BYTES", 0)
    params = tuple(ParamLayout(f"w{i}", (2048, 8), "float32", "bfloat16", 2) for i in range(2))
    layout = GroupLayout("g", params, 2)
    gather = all_gather(layout, Topology.regular(1, 2), 0)
    assert sum(isinstance(op, Cast) for op in gather.ops) == 4
    alone = without_peers(gather)
    (cast,) = [op for op in alone.ops if isinstance(op, Cast)]
    assert sum(part.dst.nbytes for part in cast.parts) == sum(layout.piece(p, 0).nbytes for p in range(2))
    assert not any(isinstance(op, (Copy, Wait)) for op in alone.ops)
    # Whoever waits for a portion waits for all of it: the kernel stands before every event of theirs.
    at = alone.ops.index(cast)
    assert all(alone.ops.index(op) > at for op in alone.ops if isinstance(op, Record) and op.stream == names.OWN)
    assert After(names.ARRIVE, names.OWN_DONE) in alone.ops
