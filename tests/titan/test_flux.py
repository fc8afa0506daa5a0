"""flux through TorchTitan's own trainer: tiny random encoders, noise for images. Needs transformers, which TorchTitan's flux imports."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
import tarfile
from pathlib import Path

import pytest

from tests.titan.launch import CONFIG, job, run, same
from torchtitan_tide import cpu, job_check
from torchtitan_tide.errors import ConfigError

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="TorchTitan's flux needs transformers"
)


def assets(folder: Path) -> list[str]:
    """Encoders (configurations only, their weights are random), images and captions; the overrides that name them."""
    import numpy as np
    from PIL import Image

    t5 = {
        "model_type": "t5",
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 4096,
    }
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    clip = {"model_type": "clip_text_model", "vocab_size": 4096, "eos_token_id": 1, **text}
    for name, config in (("t5", t5), ("clip", clip)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    (folder / "images").mkdir()
    noise = np.random.default_rng(0)
    with tarfile.open(folder / "images/0.tar", "w") as tar:
        for i in range(16):
            picture = io.BytesIO()
            Image.fromarray(noise.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(picture, "jpeg")
            for suffix, content in (("jpg", picture.getvalue()), ("txt", f"picture number {i}".encode())):
                entry = tarfile.TarInfo(f"{i:04d}.{suffix}")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    options = ["--job.custom_config_module=torchtitan_tide.job_config_flux", "--training.test_mode"]
    options += ["--training.img_size=64", "--encoder.max_t5_encoding_len=16", "--training.dataset=cc12m-test"]
    options.append(f"--training.dataset_path={folder / 'images'}")
    return [*options, f"--encoder.t5_encoder={folder / 't5'}", f"--encoder.clip_encoder={folder / 'clip'}"]


@pytest.mark.slow
@needs_transformers
def test_flux_trains_as_with_stock(tmp_path: Path) -> None:
    options = assets(tmp_path)
    meshes = ["fsdp", "hsdp"]
    jobs = [job("flux", "tide_debug", mesh, comm, *options) for mesh in meshes for comm in ("stock", "tide")]
    jobs.append(job("flux", "tide_debug", "fsdp", "tide", *options, "--activation_checkpoint.mode=full"))
    results = run(jobs, tmp_path)
    for i in range(len(meshes)):
        same(*results[2 * i : 2 * i + 2], falls=0.01)
        assert [row[1] for row in results[2 * i + 1]["report"]] == ["tide"] * 9
    same(results[0], results[-1], falls=0.01)


@pytest.mark.slow
@needs_transformers
def test_flux_attaches(tmp_path: Path) -> None:
    from torchtitan_tide import plan as plan_command

    options = [
        "--job.custom_config_module=torchtitan_tide.job_config_flux",
        "--model.name=flux",
        "--model.flavor=flux-dev",
    ]
    for mesh in ([], ["--parallelism.data_parallel_replicate_degree=2"], ["--parallelism.context_parallel_degree=2"]):
        plan = plan_command.plan_job(CONFIG, [*options, *mesh], 2, 4)
        assert {(group.comm, group.reason) for group in plan.groups} == {("tide", "")}
        assert sum(len(group.names) for group in plan.groups) == 62


def test_flux_without_its_dependencies(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu.prepare()
    from torchtitan.protocols import train_spec

    # As if nothing of it had been imported, and transformers were not installed.
    for name in [name for name in sys.modules if name.startswith("torchtitan.models.flux")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(train_spec._extra_train_specs, "flux", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    for options in ([], ["--job.custom_config_module=torchtitan_tide.job_config_flux"]):
        with pytest.raises(ConfigError, match="transformers"):
            job_check.check(CONFIG, ["--model.name=flux", "--model.flavor=flux-debug", *options], world_size=4)
