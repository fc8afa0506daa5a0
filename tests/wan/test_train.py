"""A short training on two ranks, with TIDE in all groups."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.test_train import ROOT, train, train_output
from tests.titan.launch import job, run, same
from torchtitan_tide import cpu

cpu.prepare()

from torchtitan_tide.models.wan import photographs  # noqa: E402
from torchtitan_tide.models.wan.parquet import write_parquet  # noqa: E402
from torchtitan_tide.models.wan.samples import Sample  # noqa: E402


def write_flat_videos(folder: Path, first_frame: bool = False) -> list[str]:
    """Videos of one colour each: latents are constant a channel. Returns the overrides that train on them."""
    draw = torch.Generator().manual_seed(0)
    for shard in range(2):
        rows = []
        for i in range(16):
            latents = torch.randn(16, 1, 1, 1, generator=draw).expand(16, 2, 4, 4).contiguous()
            text = torch.randn(4, 64, generator=draw)
            rows.append((f"{shard}-{i}", "", Sample(latents, text, latents if first_frame else None)))
        write_parquet(folder / f"{shard}.parquet", rows, "normalised")
    data = ["--training.dataset=wan_parquet", f"--training.dataset_path={folder}", "--validation.no-enable"]
    return [*data, "--lr_scheduler.warmup_steps=1", "--training.mixed_precision_param=float32", "--tide.strict"]


def test_two_ranks_train_with_all_groups_on_tide(tmp_path: Path) -> None:
    overrides = [*write_flat_videos(tmp_path), "--training.steps=12", "--training.local_batch_size=8"]
    output = train_output("wan_debug", tmp_path, *overrides)
    assert "TIDE: 5 of 5 groups" in output
    losses = [float(loss) for loss in re.findall(r"step: +\d+ +loss: +([\d.]+)", output)]
    # The head starts at 0, so the first loss is the target's mean square: 1 of the noise and about 1 of the latents.
    assert len(losses) == 12 and 1.7 < losses[0] < 2.3
    assert losses[-1] < losses[0] - 0.4


@pytest.mark.slow
def test_a_checkpoint_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    overrides = [*write_flat_videos(tmp_path), "--lr_scheduler.total_steps=6", "--training.global_batch_size=16"]
    saved = (*overrides, "--checkpoint.enable", "--checkpoint.interval=3", "--checkpoint.last_save_model_only=false")
    whole = train("wan_debug", tmp_path, *overrides, "--training.steps=6")
    train("wan_debug", tmp_path, *saved, "--training.steps=3")
    assert train("wan_debug", tmp_path, *saved, "--training.steps=6") == whole[3:]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_image_to_video_and_activation_checkpointing(tmp_path: Path, mode: str) -> None:
    overrides = [*write_flat_videos(tmp_path, first_frame=True), "--model.flavor=tide_debug_i2v", "--training.steps=4"]
    plain = train("wan_debug", tmp_path, *overrides)
    assert train("wan_debug", tmp_path, *overrides, f"--activation_checkpoint.mode={mode}") == plain


@pytest.mark.slow
def test_the_photographs_loss_falls(tmp_path: Path) -> None:
    if photographs.folder() is None:
        pytest.skip("scikit-learn, which brings the photographs, is not installed (extra: photos)")
    output = train_output("wan_debug", tmp_path, "--training.steps=50", "--validation.freq=25")
    losses = [float(loss) for loss in re.findall(r"validate step: +\d+ +loss: +([\d.]+)", output)]
    assert len(losses) == 3 and losses[0] > losses[1] > losses[2] and losses[2] < 0.7 * losses[0]


@pytest.mark.slow
def test_same_losses_as_with_stock_to_the_bit(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    options = [*write_flat_videos(tmp_path / "data"), "--training.mixed_precision_param=bfloat16"]
    modes = ["--tide.memory_mode=slot_reuse", "--activation_checkpoint.mode=full"]
    jobs = [job("wan", "tide_debug", mesh, comm, *options) for mesh in ("fsdp", "hsdp") for comm in ("stock", "tide")]
    jobs.append(job("wan", "tide_debug", "fsdp", "tide", *options, *modes))
    results = run([{**one, "config": str(ROOT / "train_configs/wan_debug.toml")} for one in jobs], tmp_path)
    for stock, tide in ((0, 1), (2, 3), (0, 4)):
        same(results[stock], results[tide])
        assert [row[1] for row in results[tide]["report"]] == ["tide"] * 5
