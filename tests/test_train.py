"""Short trainings through torchrun, and the parallelize wrapper."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.processes import output_of
from tide_comm.config import TideConfig, TideConfigError
from torchtitan_tide import cpu

ROOT = Path(__file__).parents[1]


def train(config: str, folder: Path, *overrides: str, ranks: int = 2, timeout_s: float = 300) -> list[str]:
    """Losses, as printed, of a training that has to end with exit code 0."""
    output = train_output(config, folder, *overrides, ranks=ranks, timeout_s=timeout_s)
    losses = re.findall(r"step: +\d+ +loss: +([\d.]+)", output)
    assert losses, output[-4000:]
    return losses


def train_output(config: str, folder: Path, *overrides: str, ranks: int = 2, timeout_s: float = 300) -> str:
    """What rank 0 prints in a training that has to end with exit code 0."""
    # This tree before an installed one, and what was there before.
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--local-ranks-filter", "0", "--role", "rank", "--tee", "3", "-m", "torchtitan_tide.train"]
    command += ["--job.config_file", str(ROOT / f"train_configs/{config}.toml"), "--metrics.log_freq=1"]
    command += ["--metrics.disable_color_printing", *overrides]
    output = output_of(command, folder, env, timeout_s)
    assert "Training completed" in output
    assert "destroy_process_group() was not called" not in output
    return output


@pytest.mark.parametrize("comm", ["stock", "tide"])
def test_two_ranks_train_and_leave_nothing_behind(tmp_path: Path, comm: str) -> None:
    overrides = (f"--tide.comm={comm}", "--tide.strict", "--training.steps=3", "--lr_scheduler.warmup_steps=1")
    tensorboard = ("--metrics.enable_tensorboard", "--job.dump_folder=dump")
    output = train_output("llama3_debug", tmp_path, *overrides, *tensorboard)
    lines = re.findall(r"step: +\d+ +loss: +([\d.]+) +(.*)", output)
    losses = [float(loss) for loss, _ in lines]
    assert len(losses) == 3
    assert 7.5 < losses[0] < 8.5, "an untrained model of 2048 tokens: about ln 2048 = 7.6, or a little more"
    assert losses[2] < losses[0] - 0.1
    assert sorted(os.listdir(tmp_path)) == ["cache", "dump"] and os.listdir(tmp_path / "dump") == ["tb"]
    scalars = tensorboard_scalars(tmp_path / "dump")
    assert len(scalars["loss_metrics/global_avg_loss"]) == 3
    if comm == "stock":
        assert "tide" not in "".join(rest for _, rest in lines) and not any("tide" in tag for tag in scalars)
        assert "what ran" not in output
        return
    told = r"tide: 4\.5 MiB gathered, 2\.5 MiB reduced, 0 stock, [\d.]+ ms in communication, [\d.]+ ms waited$"
    assert all(re.search(told, rest.strip()) for _, rest in lines), lines
    assert re.search(r"average of 3: 4\.5 MiB gathered, .* ms in communication, .* 3 steps timed", output)
    # Parameters in bf16: five groups are gathered twice, the last one (2048 x 128 + 128) once.
    assert scalars["tide/bytes_reduced_per_step"] == [2 * 1311872] * 3
    assert scalars["tide/bytes_gathered_per_step"] == [2 * (2 * 1311872 - 2048 * 128 - 128)] * 3
    assert scalars["tide/collectives_stock"] == scalars["tide/groups_stock"] == [0] * 3
    for communicating, waiting in zip(
        scalars["tide/time_in_communication_ms"], scalars["tide/exposed_wait_ms"], strict=True
    ):
        assert 0 < communicating < 60e3 and 0 <= waiting < 60e3
    assert scalars["tide/memory_mib/SLOT"] == [6] * 3 and scalars["tide/memory_mib/STAGE"] == [2] * 3


def tensorboard_scalars(dump: Path) -> dict[str, list[float]]:
    """Values by tag, of the one run in a dump folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(next((dump / "tb").iterdir())))
    events.Reload()
    return {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.slow
def test_wandb_without_an_account_is_kept_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the wandb extra is not installed")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    output = train_output(
        "llama3_debug", tmp_path, "--training.steps=2", "--metrics.enable_wandb", "--job.dump_folder=dump"
    )
    assert "wandb: no account found" in output
    (kept,) = (tmp_path / "dump").rglob("offline-run-*/*.wandb")
    assert b"tide/exposed_wait_ms" in kept.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["in_place", "slot_reuse"])
@pytest.mark.parametrize("config", ["llama3_debug", "qwen3_moe_debug"])
def test_tide_trains_as_stock_does(tmp_path: Path, config: str, mode: str) -> None:
    """gloo adds in another order, so not to the bit; four ranks, as a newcomer starts them."""
    steps = ("--training.steps=10", "--training.seq_len=64")
    stock = train(config, tmp_path, *steps, "--tide.comm=stock", ranks=4)
    tide = train(config, tmp_path, *steps, "--tide.strict", f"--tide.memory_mode={mode}", ranks=4)
    assert [float(x) for x in tide] == pytest.approx([float(x) for x in stock], abs=2e-3)


def exact_losses(config: str, folder: Path, *overrides: str) -> list[float]:
    """Losses of a training with all their bits, from its TensorBoard file."""
    folder.mkdir()
    train(config, folder, "--metrics.enable_tensorboard", "--job.dump_folder=dump", *overrides)
    return tensorboard_scalars(folder / "dump")["loss_metrics/global_avg_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("comm", ["stock", "tide"])
@pytest.mark.parametrize("config", ["llama3_debug", "qwen3_moe_debug"])
def test_same_seed_same_losses_to_the_bit(tmp_path: Path, config: str, comm: str) -> None:
    overrides = (f"--tide.comm={comm}", "--training.steps=10", "--training.seq_len=64")
    first = exact_losses(config, tmp_path / "1", *overrides)
    assert len(first) == 10
    assert exact_losses(config, tmp_path / "2", *overrides) == first
    assert exact_losses(config, tmp_path / "3", *overrides, "--debug.seed=43") != first


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_activation_checkpointing_changes_no_loss(tmp_path: Path, mode: str) -> None:
    overrides = ("--tide.comm=stock", "--training.steps=5", "--training.seq_len=64")
    expected = train("llama3_debug", tmp_path, *overrides)
    assert train("llama3_debug", tmp_path, *overrides, f"--activation_checkpoint.mode={mode}") == expected


@pytest.mark.slow
def test_a_checkpoint_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    overrides = ("--tide.comm=stock", "--training.seq_len=64", "--lr_scheduler.total_steps=6")
    saved = (*overrides, "--checkpoint.enable", "--checkpoint.interval=3", "--checkpoint.last_save_model_only=false")
    whole = train("llama3_debug", tmp_path, *overrides, "--training.steps=6")
    train("llama3_debug", tmp_path, *saved, "--training.steps=3")
    assert train("llama3_debug", tmp_path, *saved, "--training.steps=6") == whole[3:]


@pytest.mark.slow
def test_profiling_validation_and_tensorboard_work_on_cpu(tmp_path: Path) -> None:
    overrides = ["--training.steps=6", "--profiling.enable_profiling", "--profiling.profile_freq=6"]
    overrides += ["--metrics.enable_tensorboard", "--validation.enable", "--validation.freq=3", "--validation.steps=1"]
    train("llama3_debug", tmp_path, *overrides, f"--job.dump_folder={tmp_path / 'out'}")
    found = {path.name for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert {"rank0_trace.json", "rank1_trace.json"} <= found and any("tfevents" in name for name in found)


def test_wrapping_the_specs_again_changes_nothing() -> None:
    cpu.prepare()
    from torchtitan.protocols.train_spec import get_train_spec

    from torchtitan_tide import specs

    specs.register()
    before = get_train_spec("llama3")
    specs.register()
    assert get_train_spec("llama3") is before
    assert "debugmodel" in before.model_args and "tide_debug" in before.model_args
    assert "tide_debug_moe" in get_train_spec("qwen3").model_args


def test_a_model_without_fsdp_is_refused() -> None:
    cpu.prepare()
    from torch import nn

    from torchtitan_tide.parallelize import choose_communication

    with pytest.raises(TideConfigError, match="no FSDP2 module"):
        choose_communication([nn.Linear(2, 2)], TideConfig())
    choose_communication([nn.Linear(2, 2)], TideConfig(comm="stock"))


def test_vocabulary_follows_the_tokenizer() -> None:
    cpu.prepare()
    from types import SimpleNamespace

    from torchtitan_tide import specs

    spec = SimpleNamespace(
        model_args={
            "tide_debug": SimpleNamespace(vocab_size=2048),
            "tide_shaped": SimpleNamespace(vocab_size=400),
            "small": SimpleNamespace(vocab_size=10),
        }
    )
    build = specs._build_tokenizer(spec, lambda config: SimpleNamespace(get_vocab_size=lambda: 300))

    def job(flavor: str) -> SimpleNamespace:
        return SimpleNamespace(model=SimpleNamespace(flavor=flavor, hf_assets_path="here"))

    build(job("tide_debug"))
    assert spec.model_args["tide_debug"].vocab_size == 300
    build(job("tide_shaped"))
    assert spec.model_args["tide_shaped"].vocab_size == 400, "the whole model's head and embedding"
    with pytest.raises(ValueError, match="300 tokens"):
        build(job("small"))


@pytest.mark.skipif(cpu.has_accelerator(), reason="the CPU forms are for machines without an accelerator")
def test_moe_counts_on_cpu() -> None:
    cpu.prepare()
    import torch

    cpu.prepare_moe()
    from torchtitan.models.moe import moe

    counts = moe.torch.histc(torch.tensor([0, 2, 2, 3]), bins=5, min=0, max=5)
    assert counts.tolist() == [1, 0, 2, 1, 0]
    assert moe.torch.topk is torch.topk
