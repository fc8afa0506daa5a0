"""Jobs for `tests.titan.jobs`: what a mesh is, and how a list of jobs is run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.processes import output_of

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "train_configs/llama3_debug.toml")

MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp": (2, {}),
    "hsdp": (4, {"data_parallel_replicate": 2}),
    "tp": (4, {"tensor_parallel": 2}),
    "cp": (4, {"context_parallel": 2}),
    "pp": (4, {"pipeline_parallel": 2}),
    "pp_interleaved": (4, {"pipeline_parallel": 2}),
    "ep": (4, {"expert_parallel": 2}),
    "ep_tp": (4, {"expert_parallel": 2, "tensor_parallel": 2}),
    "ep_etp": (4, {"expert_parallel": 2, "tensor_parallel": 2, "expert_tensor_parallel": 2}),
    "ep_hsdp": (4, {"expert_parallel": 2, "data_parallel_replicate": 2}),
}
"""Ranks, and the degrees that are not 1: FSDP takes what is left."""


def mesh_overrides(mesh: str) -> list[str]:
    """The overrides that make a job's mesh."""
    options = [f"--parallelism.{name}_degree={degree}" for name, degree in MESHES[mesh][1].items()]
    if mesh.startswith("pp"):
        options.append("--training.local_batch_size=4")  # microbatches of one sequence
    if mesh == "pp_interleaved":
        options.append("--parallelism.pipeline_parallel_schedule=Interleaved1F1B")
    return options


def job(model: str, flavor: str, mesh: str, comm: str, *overrides: str, steps: int = 5, **more: Any) -> dict[str, Any]:
    """A small job, seen by its last rank (the last pipeline stage has the losses). Sums are in the order that TIDE promises."""
    ranks = MESHES[mesh][0]
    options = [f"--model.name={model}", f"--model.flavor={flavor}", f"--training.steps={steps}"]
    options += ["--training.seq_len=32", "--lr_scheduler.warmup_steps=2", f"--tide.comm={comm}"]
    options += [*mesh_overrides(mesh), *overrides]
    return {"ranks": ranks, "config": CONFIG, "overrides": options, "reference": True, "seen_by": ranks - 1, **more}


def run(jobs: list[dict[str, Any]], folder: Path, timeout_s: float = 900) -> list[dict[str, Any]]:
    """What each job showed (see `tests.titan.jobs`), one after another in `folder`."""
    (folder / "in.json").write_text(json.dumps(jobs))
    env = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "tests.titan.jobs", str(folder / "in.json"), str(folder / "out.json")]
    output_of(command, ROOT, env, timeout_s)
    return json.loads((folder / "out.json").read_text())


def same(stock: dict[str, Any], tide: dict[str, Any], steps: int = 5, falls: float = 0.05) -> None:
    """Both ran, and TIDE gave stock's losses and gradient norms, to the bit."""
    for result in (stock, tide):
        assert "error" not in result, result["error"]
        assert len(result["losses"]) == steps
    assert min(stock["losses"]) < stock["losses"][0] - falls, "it learns, so gradients count"
    assert tide["losses"] == stock["losses"]
    assert tide["norms"] == stock["norms"]
