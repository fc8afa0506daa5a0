"""scripts/bench/reduce_scatter.py runs on the CPU with tiny sizes."""

from __future__ import annotations

from pathlib import Path

from tests.bench_ranks import run


def test_rows_with_the_host_engine(tmp_path: Path) -> None:
    found, printed = run("reduce_scatter.py", tmp_path / "reduce_scatter.json")
    assert list(found["rows"]) == ["stock", "tide"] and found["ranks"] == 2
    assert all(row["alone_ms"] > 0 for row in found["rows"].values())
    assert "alone ms" in printed
