"""What TorchTitan does around a step, with TIDE: checkpoints, evaluation, Float8, and what is refused before ranks start."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.titan.launch import CONFIG, job, run, same
from torchtitan_tide import cpu, job_check
from torchtitan_tide.errors import ConfigError

SAVE = ["--checkpoint.enable", "--checkpoint.last_save_model_only=false", "--lr_scheduler.total_steps=6"]
FLOAT8 = ["--model.converters=quantize.linear.float8", "--quantize.linear.float8.emulate"]


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


CASES = [
    ("llama3", "tide_debug", "fsdp", "in_place"),
    ("gpt_oss", "tide_debug", "fsdp", "slot_reuse"),  # bf16 parameters: the shards that are saved live in the arena
    ("qwen3", "tide_debug_moe", "ep", "in_place"),
    ("llama3", "tide_debug", "pp_interleaved", "in_place"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "flavor", "mesh", "mode"), CASES, ids=["-".join(case) for case in CASES])
def test_checkpoints_go_on_as_if_never_stopped(tmp_path: Path, model: str, flavor: str, mesh: str, mode: str) -> None:
    """Saved at once and while training goes on; what TIDE saves, stock loads, and the other way round."""

    def one(comm: str, dump: str, *overrides: str, steps: int = 6) -> dict:
        options = [*SAVE, f"--job.dump_folder={dump}", f"--tide.memory_mode={mode}", *overrides]
        return job(model, flavor, mesh, comm, *options, steps=steps)

    never, third, fourth = "--checkpoint.interval=100", "--checkpoint.load_step=3", "--checkpoint.load_step=4"
    whole, *others = run(
        [
            one("tide", "whole", never),
            one("tide", "a", "--checkpoint.interval=3", steps=3),
            one("tide", "a", never, third),
            one("stock", "a", never, third),
            one("tide", "b", "--checkpoint.interval=2", "--checkpoint.async_mode=async"),
            one("tide", "b", never, fourth),
            one("stock", "c", "--checkpoint.interval=4"),
            one("tide", "c", never, fourth),
        ],
        tmp_path,
    )
    for result in (whole, *others):
        assert "error" not in result, result["error"]
    first, resumed, by_stock, asynchronous, after_async, stock, after_stock = (r["losses"] for r in others)
    losses = whole["losses"]
    assert first + resumed == losses
    assert by_stock == losses[3:]
    assert asynchronous == losses and after_async == losses[4:]
    assert stock == losses and after_stock == losses[4:]


@pytest.mark.slow
@pytest.mark.skipif(not installed("safetensors"), reason="Hugging Face checkpoints need safetensors")
@pytest.mark.parametrize(("model", "flavor"), [("llama3", "tide_debug"), ("qwen3", "tide_debug_moe")])
def test_hugging_face_checkpoints(tmp_path: Path, model: str, flavor: str) -> None:
    """What stock and TIDE start from such a checkpoint is the same, and is the model that was saved."""
    save = ["--checkpoint.enable", "--checkpoint.last_save_in_hf", "--job.dump_folder=hf", "--checkpoint.interval=100"]
    load = ["--checkpoint.enable", "--checkpoint.initial_load_in_hf", "--checkpoint.interval=100"]
    load.append("--checkpoint.initial_load_path=hf/checkpoint/step-3")
    jobs = [job(model, flavor, "fsdp", "tide", *save, steps=3)]
    jobs += [
        job(model, flavor, "fsdp", comm, *load, f"--job.dump_folder={comm}", steps=3) for comm in ("stock", "tide")
    ]
    saved, stock, tide = run(jobs, tmp_path)
    for result in (saved, stock, tide):
        assert "error" not in result, result["error"]
    assert tide["losses"] == stock["losses"]
    assert tide["losses"][0] < saved["losses"][0] - 0.1


@pytest.mark.slow
def test_validation_between_steps(tmp_path: Path) -> None:
    options = ["--validation.enable", "--validation.freq=2", "--validation.steps=2", "--validation.seq_len=32"]
    jobs = [job("llama3", "tide_debug", "fsdp", "tide")]
    jobs += [job("llama3", "tide_debug", "fsdp", comm, *options) for comm in ("stock", "tide")]
    without, stock, tide = run(jobs, tmp_path)
    same(stock, tide)
    assert len(tide["validation"]) >= 2 and tide["validation"] == stock["validation"]
    assert tide["losses"] == without["losses"], "evaluation changes nothing"


@pytest.mark.slow
@pytest.mark.skipif(not installed("torchao"), reason="Float8 needs torchao")
def test_float8(tmp_path: Path) -> None:
    """Emulated, as TorchTitan configures it. Float8 weights stay on TIDE; gathered in float8 they go to stock, with the reason."""
    gathered = [*FLOAT8, "--quantize.linear.float8.enable_fsdp_float8_all_gather"]
    gathered.append("--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp")
    jobs = [job("llama3", "tide_debug", "fsdp", comm, *how) for how in (FLOAT8, gathered) for comm in ("stock", "tide")]
    results = run(jobs, tmp_path)
    same(*results[:2])
    assert {row[1] for row in results[1]["report"]} == {"tide"}
    same(*results[2:])
    left = {name: reason for name, comm, reason in results[3]["report"] if comm != "tide"}
    assert set(left) == {*(f"layers.{i}" for i in range(4)), "norm, output"}  # the embedding has no Linear
    assert set(left.values()) == {"fsdp_pre_all_gather (quantised all-gather)"}


@pytest.mark.skipif(cpu.has_accelerator(), reason="what a machine without an accelerator refuses")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--model.converters=quantize.linear.float9"], 'unknown; did you mean "quantize.linear.float8"'),
        (["--model.converters=quantize.linear.float8"], "SM89"),
        (["--checkpoint.enable", "--checkpoint.async_mode=async_with_pinned_mem"], "needs a GPU"),
        (["--profiling.enable_memory_snapshot"], "needs a GPU"),
        (["--model.name=qwen3", "--parallelism.pipeline_parallel_degree=2"], "does not support pipeline parallelism"),
        (["--model.name=gpt_oss", "--validation.enable"], "has no validator"),
        (["--experimental.custom_import=no_such_module"], "no_such_module"),
    ],
)
def test_refused_before_ranks_start(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        job_check.check(CONFIG, ["--model.hf_assets_path=python_manual", *overrides], world_size=4)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(installed("torchao"), reason="what happens without torchao")
def test_float8_without_torchao() -> None:
    with pytest.raises(ConfigError, match="torchao is not installed"):
        job_check.check(CONFIG, FLOAT8, world_size=4)
