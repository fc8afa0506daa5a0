"""scripts/bench/step.py runs, on the CPU with tiny sizes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts" / "bench"))

import blocks
import figures
import report
import shapes

from tests.bench_ranks import run


@pytest.mark.parametrize(
    "options",
    [
        ("--mode", "slot_reuse", "--stage-mib", "1"),
        (
            "--model",
            "qwen3",
            "--param-dtype",
            "bf16",
            "--checkpoint",
            "full",
            "--rows",
            "stock,tide_early,tide_ag,tide_rs,none",
        ),
        ("--model", "wan", "--rows", "stock,tide_ag,tide_rs,none", "--clocks"),
    ],
)
def test_all_rows_with_the_host_engine(tmp_path: Path, options: tuple[str, ...]) -> None:
    found, printed = run("step.py", tmp_path / "step.json", *options)
    (rows,) = found["tokens"].values()
    assert "GPUs" in rows.pop("symm_mem", {"error": "GPUs"})["error"]
    assert set(rows) >= {"stock", "tide_ag", "tide_rs", "none"}
    for name, row in rows.items():
        assert row["step_ms"] > 0 and row["host_ms"] > 0 and [len(r) for r in row["rounds_ms"]] == [1, 1], (name, row)
        assert (row["arena_gib"] > 0) == (name != "stock"), (name, row)
        assert sum(row["memory_gib"].values()) >= row["arena_gib"]
        if name not in ("stock", "none"):
            assert row["gradient_difference"] < 1e-6, "the same gradients, whoever communicates"
    assert rows["stock"]["to_stock"] == 1.0 and rows["none"]["to_limit"] == 1.0
    assert rows["tide_rs"]["memory_gib"].get("SLOT") is None and "STAGE" not in rows["tide_ag"]["memory_gib"]
    assert "to limit" in printed
    left_out = "left out: rank 0: no GPU"
    assert found.get("clocks", left_out) == left_out and (left_out in printed) == ("--clocks" in options)
    assert "SM MHz" not in printed
    assert (
        found["command"].startswith("PYTHONPATH=. ")
        and f"step.py --debug --out step.json {options[0]}" in found["command"]
    )
    assert found["options"]["out"] == "step.json"
    assert "| tide_ag | " in report.report(figures.load([tmp_path / "step.json"]))


@pytest.mark.parametrize("model", shapes.SIZES)
def test_blocks_have_the_models_parameters(model: str) -> None:
    import torch

    with torch.device("meta"):
        block = blocks.BLOCKS[model](shapes.SIZES[model])
    assert [tuple(p.shape) for p in block.parameters()] == shapes.shapes_of(model, shapes.SIZES[model])
    wanted = {"llama": 1632.0, "qwen3": 1188.5, "wan": 670.2}
    assert abs(shapes.mib_of(model, shapes.SIZES[model]) - wanted[model]) < 0.1
