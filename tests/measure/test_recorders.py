"""What recorders note of a training: with a made-up trainer in one process, and of a real one over two ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torchtitan_tide import cpu

cpu.prepare()

from torchtitan_tide.measure.launch import TemplateLauncher  # noqa: E402
from torchtitan_tide.measure.recorders import LossRecorder, StepRecorder, nudge_weights  # noqa: E402
from torchtitan_tide.measure.session import Session, Training  # noqa: E402

ROOT = Path(__file__).parents[2]


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class FakeTrainer:
    """Trains nothing for `steps` steps, and logs `losses` in them."""

    def __init__(self, losses: list[float | None]) -> None:
        self.losses = losses
        self.model_parts = [torch.nn.Linear(3, 2)]
        self.weights_at_start: torch.Tensor | None = None
        self.metrics_processor = SimpleNamespace(log=lambda *values: self.logged.append(values))
        self.logged: list[Any] = []
        self.device = torch.device("cpu")

    def train_step(self, data: Any) -> None:
        if self.weights_at_start is None:
            self.weights_at_start = self.model_parts[0].weight.detach().clone()
        loss = self.losses[data]
        if loss is not None:
            self.metrics_processor.log(data + 1, torch.tensor(loss), 9.0, 0.5)

    def train(self) -> None:
        for i in range(len(self.losses)):
            self.train_step(i)


def test_losses_keep_all_their_bits(alone: None, tmp_path: Path) -> None:
    recorder = LossRecorder(tmp_path / "r.json", 3)
    trainer: Any = FakeTrainer([0.1, 1 / 3, 2.0])
    with recorder(trainer):
        trainer.train()
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["losses"] == [float(torch.tensor(x)) for x in (0.1, 1 / 3, 2.0)] and record["norms"] == [0.5] * 3
    assert record["groups"] == 0 and record["about"]["ranks"] == 1
    assert len(trainer.logged) == 3, "the log goes on"


def test_a_training_that_ended_early_is_an_error(alone: None, tmp_path: Path) -> None:
    trainer: Any = FakeTrainer([0.1, 0.2])
    with (
        pytest.raises(RuntimeError, match="2 losses were logged, 3 expected"),
        LossRecorder(tmp_path / "r", 3)(trainer),
    ):
        trainer.train()
    trainer = FakeTrainer([None] * 3)
    with (
        pytest.raises(RuntimeError, match="3 steps were trained, 5 expected"),
        StepRecorder(tmp_path / "r", 1, 2)(trainer),
    ):
        trainer.train()
    assert not (tmp_path / "r").exists()


def test_a_nudge_moves_every_weight_by_one_rounding() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 30)
    before = model.weight.detach().clone()
    nudge_weights(model, 1)
    moved = model.weight.detach()
    up, down = (torch.nextafter(before, torch.tensor(x)) for x in (float("inf"), float("-inf")))
    assert ((moved == up) | (moved == down)).all()
    assert 400 < (moved == up).sum() < 800
    first = moved.clone()
    with torch.no_grad():
        model.weight.copy_(before)
    nudge_weights(model, 2)
    assert not torch.equal(model.weight, first)


@pytest.mark.parametrize("nudge", [0, 1])
def test_the_nudge_comes_before_the_first_step(alone: None, tmp_path: Path, nudge: int) -> None:
    trainer: Any = FakeTrainer([1.0])
    before = trainer.model_parts[0].weight.detach().clone()
    with LossRecorder(tmp_path / "r", 1, nudge)(trainer):
        trainer.train()
    assert trainer.weights_at_start is not None
    assert torch.equal(trainer.weights_at_start, before) == (nudge == 0)


@pytest.mark.skipif(cpu.has_accelerator(), reason="times come from the host's clock on the CPU only")
def test_only_the_steps_after_the_warmup_are_timed(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("torchtitan_tide.measure.recorders.time", SimpleNamespace(perf_counter=lambda: now[0]))
    recorder = StepRecorder(tmp_path / "r.json", warmup=2, steps=3)
    trainer: Any = FakeTrainer([None] * 6 + [2.5])
    took_s = iter([9.0, 9.0, 0.1, 0.3, 0.2, 9.0, 9.0])
    step = trainer.train_step

    def slow(data: Any) -> None:
        now[0] += next(took_s)
        step(data)

    trainer.train_step = slow
    with recorder(trainer):
        trainer.train()
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["steps_ms"] == pytest.approx([100, 300, 200]) and record["step_ms"] == pytest.approx(200)
    assert record["loss"] == 2.5 and record["profile"] is None and record["device_gib"] is None
    assert 0.05 < record["peak_gib"] < 64


@pytest.mark.skipif(cpu.has_accelerator(), reason="a GPU would be profiled")
def test_a_loss_that_is_not_finite_is_no_measurement(alone: None, tmp_path: Path) -> None:
    trainer: Any = FakeTrainer([None, None, None, float("nan")])
    with pytest.raises(RuntimeError, match="loss of step 4 is nan"), StepRecorder(tmp_path / "r.json", 1, 1)(trainer):
        trainer.train()
    assert not (tmp_path / "r.json").exists()


def test_watching_is_optional() -> None:
    import inspect

    from torchtitan_tide import train

    assert inspect.signature(train.main).parameters["watch"].default is nullcontext


@pytest.mark.slow
def test_a_real_training_over_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    overrides = ("--tide.comm=tide", "--training.seq_len=32", "--training.local_batch_size=1")
    config = str(ROOT / "train_configs/llama3_debug.toml")
    overrides = (*overrides, f"--job.dump_folder={tmp_path / 'dump'}")
    result = Session(tmp_path / "out", TemplateLauncher(2), "2", 200).run(
        Training("a", config, overrides, ("steps", "1", "2"))
    )
    assert result.record is not None, (tmp_path / "out/runs/a.log").read_text()[-4000:]
    record = result.record
    assert len(record["steps_ms"]) == 2 and 0 < min(record["steps_ms"]) <= record["step_ms"] <= max(record["steps_ms"])
    assert 6 < record["loss"] < 9
    assert (record["groups"], record["groups_stock"], record["collectives_stock"]) == (6, 0, 0)
    assert record["arena_gib"] == pytest.approx(12 / 1024) and 0.1 < record["peak_gib"] < 8
    assert record["about"]["ranks"] == 2
    assert not (tmp_path / "dump").exists(), "nothing but the record is left"
