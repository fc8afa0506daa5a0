"""scripts/bench/collectives.py runs on the CPU with tiny sizes, and TIDE's results are those of the collectives beside it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts" / "bench"))

import figures
import report

from tests.bench_ranks import run


def test_all_cases(tmp_path: Path) -> None:
    found, printed = run("collectives.py", tmp_path / "collectives.json", "--models", "qwen3,wan")
    assert set(found["models"]) == {"qwen3", "wan"}
    for model, kinds in found["models"].items():
        for dtype in ("fp32", "bf16"):
            gathers = kinds["all_gather"][dtype]
            assert list(gathers) == ["nccl", "fsdp", "tide", "copies"], (model, dtype)
            assert gathers["tide"]["matches"] is True and gathers["tide"]["link_bytes"] > 0
            assert gathers["tide"]["link_bytes"] == gathers["copies"]["link_bytes"]
        reduces = kinds["reduce_scatter"]
        tide = {name: row for name, row in reduces.items() if name.startswith("tide")}
        assert list(tide) == ["tide 16 blocks, 16 MiB"] and all(row["matches"] is True for row in tide.values()), (
            model,
            tide,
        )
        assert all(row["us"] > 0 for row in reduces.values())
    assert "symmetric memory takes GPUs" in found["symm_mem_error"]
    assert "to_copies" in printed
    assert "### Reduce-scatter: wan" in report.report(figures.load([tmp_path / "collectives.json"]))


def test_beside(tmp_path: Path) -> None:
    found, printed = run("beside.py", tmp_path / "beside.json")
    gathers = {f"all-gather {row}, {dtype}" for row in ("fsdp", "tide", "copies") for dtype in ("fp32", "bf16")}
    reduces = {f"reduce-scatter {row}" for row in ("nccl", "fsdp", "tide 16 blocks, 16 MiB", "copies")}
    assert set(found["cases"]) == {"all-gather nccl"} | gathers | reduces
    for name, row in found["cases"].items():
        assert row["8x16x16"]["slowdown"] > 0 and row["16x16x32"]["reps"] == 4, (name, row)
    assert "all-gather copies" in printed
    assert "| all-gather tide, bf16 | " in report.report(figures.load([tmp_path / "beside.json"]))
