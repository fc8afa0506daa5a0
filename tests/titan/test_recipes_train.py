"""The recipes' files as they are, but for the flavor, tokens and data: they train, with the losses of stock communication to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipe_memory import CONFIGS
from tests.titan.launch import job, run, same
from tests.wan.test_train import write_flat_videos

SMALL = {"llama3.1_70b": ("llama3", "tide_debug"), "qwen3_30b_a3b": ("qwen3", "tide_debug_moe")}
TEXT = ["--model.hf_assets_path=python_manual", "--training.dataset=python_manual", "--checkpoint.no-enable"]
FEWER = {"fsdp": [], "hsdp": ["--parallelism.data_parallel_replicate_degree=2"]}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", FEWER)
def test_recipes_train_at_debug_size(tmp_path: Path, mesh: str) -> None:
    (tmp_path / "data").mkdir()
    videos = [*write_flat_videos(tmp_path / "data"), "--wan.empty_text=", "--checkpoint.no-enable"]
    variant = "" if mesh == "fsdp" else "-hsdp"
    jobs = []
    for name, (model, flavor) in {**SMALL, "wan2.2_t2v_a14b": ("wan", "tide_debug")}.items():
        # Without a compiler, and with a rate that shows within five steps: theirs rises over hundreds.
        options = [*(videos if model == "wan" else TEXT), "--compile.no-enable", "--optimizer.lr=5e-3"]
        for comm in ("stock", "tide"):
            one = job(model, flavor, mesh, comm, *options, *FEWER[mesh])
            jobs.append({**one, "config": str(CONFIGS / f"{name}{variant}.toml")})
    results = run(jobs, tmp_path)
    for stock, tide in zip(results[::2], results[1::2], strict=True):
        same(stock, tide)
        assert {row[1] for row in tide["report"]} == {"tide"}
