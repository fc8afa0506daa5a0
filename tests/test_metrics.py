"""What TIDE adds to TorchTitan's metrics, added up from made-up reports; wandb without an account; progress lines."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tide_comm.config import TideConfig
from tide_comm.engine.timing import Timings
from tide_comm.fsdp.report import GroupReport, Report
from tide_comm.progress import clock_text, progress
from torchtitan_tide import cpu, job_check
from torchtitan_tide.errors import ConfigError

cpu.prepare()

from torchtitan_tide import metrics  # noqa: E402

MIB = 1024 * 1024
LLAMA = str(Path(__file__).parents[1] / "train_configs/llama3_debug.toml")


class FakeReport(Report):
    """A report whose counts and times a test sets."""

    def __init__(self, groups: list[GroupReport] | None = None, samples: bool = False) -> None:
        super().__init__(TideConfig(), groups or [group("a")], memory={"SLOT": 2 * MIB, "STAGE": MIB})
        self.counts: dict[str, int] = {}
        self.timed: list[bool] = []
        self.pending = Timings()
        self._samples = samples

    @property
    def samples(self) -> bool:
        return self._samples

    def stats(self) -> dict[str, int]:
        return dict(self.counts)

    def time_launches(self, on: bool) -> None:
        self.timed.append(on)

    def timings(self) -> Timings:
        taken, self.pending = self.pending, Timings()
        return taken


def group(name: str, comm: str = "tide", reason: str = "", **stats: int) -> GroupReport:
    tide: Any = SimpleNamespace(stats=stats) if comm == "tide" else None
    return GroupReport(name, 1, MIB, 0, "tide", comm, reason, tide)


def test_averages_since_the_line_before() -> None:
    report = FakeReport()
    tally = metrics.Tally(lambda: [report])
    tally.time_next()
    report.counts = {"bytes_gathered": 4 * MIB, "bytes_reduced": 2 * MIB}
    report.pending = Timings([(0.0, 0.25), (0.125, 0.5)], [(0.25, 0.5)])
    tally.step_ended(next_is_logged=False)
    first = tally.interval()
    assert first["tide/bytes_gathered_per_step"] == 4 * MIB
    assert first["tide/time_in_communication_ms"] == 500 and first["tide/exposed_wait_ms"] == 250
    assert first["tide/memory_mib/SLOT"] == 2 and first["tide/memory_mib/STAGE"] == 1
    report.counts = {"bytes_gathered": 12 * MIB, "bytes_reduced": 3 * MIB, "all_gathers_stock": 3}
    report.pending = Timings([(1.0, 2.0)], [])
    tally.step_ended(False)
    tally.step_ended(False)
    second = tally.interval()
    assert second["tide/bytes_gathered_per_step"] == 4 * MIB and second["tide/bytes_reduced_per_step"] == MIB / 2
    assert second["tide/time_in_communication_ms"] == 500 and second["tide/exposed_wait_ms"] == 0
    assert second["tide/collectives_stock"] == 3
    (line,) = tally.measured_lines()
    assert "average of 3: 4.0 MiB gathered, 1.0 MiB reduced" in line
    assert "500.0 ms in communication, 83.3 ms waited" in line and "3 steps timed" in line


def test_steps_are_sampled_where_timing_costs_something() -> None:
    report = FakeReport(samples=True)
    tally = metrics.Tally(lambda: [report])
    tally.time_next()
    for step in range(1, 5):
        report.pending = Timings([(step, step + 0.5)] if report.timed[-1] else [], [])
        tally.step_ended(next_is_logged=step == 3)
        if step in (1, 2, 4):
            scalars = tally.interval()
            assert scalars.get("tide/time_in_communication_ms") == (None if step == 2 else 500)
    assert report.timed == [True, False, False, True, False]
    assert "2 steps timed" in tally.measured_lines()[0]


def test_every_step_is_timed_where_it_is_free() -> None:
    report = FakeReport()
    tally = metrics.Tally(lambda: [report])
    tally.step_ended(next_is_logged=False)
    assert report.timed == [True]
    assert "tide/exposed_wait_ms" not in tally.interval(), "the first step was not timed"


def test_no_report_no_metrics() -> None:
    tally = metrics.Tally(list)
    tally.time_next()
    tally.step_ended(True)
    assert tally.interval() == {} and tally.measured_lines() == []


def test_the_log_line() -> None:
    scalars = {
        "tide/bytes_gathered_per_step": 1.25 * 1024 * MIB,
        "tide/bytes_reduced_per_step": 640.0 * MIB,
        "tide/collectives_stock": 0,
        "tide/groups_stock": 0,
    }
    assert metrics.line_of(scalars) == "tide: 1.25 GiB gathered, 640.0 MiB reduced, 0 stock"
    scalars |= {"tide/groups_stock": 2, "tide/time_in_communication_ms": 12.34, "tide/exposed_wait_ms": 1.0}
    text = metrics.line_of(scalars)
    assert text.endswith("stock: 2 groups, 0 collectives, 12.3 ms in communication, 1.0 ms waited")


def test_only_the_loss_line_grows(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), metrics.longer_line("tide: 1"):
        metrics.logger.info("step: 1  loss: 2  memory: 5%")
        metrics.logger.info("something %s", "else")
    metrics.logger.info("step: 2  loss: 2")
    assert caplog.messages[:2] == ["step: 1  loss: 2  memory: 5%  tide: 1", "something else"]
    assert all("tide" not in message for message in caplog.messages[2:])


def test_the_summary_is_short() -> None:
    """Groups that ran alike share a row; groups on stock are named with their reason."""
    counts = {"all_gathers": 6, "reduce_scatters": 3, "bytes_gathered": 3 * MIB, "bytes_reduced": MIB}
    groups = [group("tok", all_gathers=1), *(group(f"layers.{i}", **counts) for i in range(80))]
    groups += [group("norm", "stock", "fp16 reduction"), group("output", "stock", "fp16 reduction")]
    report = Report(TideConfig(), groups, memory={"SLOT": MIB}, stock_memory={"unsharded": 2 * MIB})
    lines = report.summary_lines(["a line of the caller's"])
    assert len(lines) < 14
    assert any("layers.0 .. layers.79 (80, each)" in line for line in lines)
    assert lines[-4].startswith("a line") and lines[-3].startswith("arena") and lines[-2].startswith("stock would")
    assert lines[-1] == "on stock: norm, output (fp16 reduction)"


# wandb


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No account, and a place for a netrc file."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "WANDB_MODE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return tmp_path / "netrc"


def test_without_an_account_wandb_is_offline(nobody: Path, caplog: pytest.LogCaptureFixture) -> None:
    import os

    with caplog.at_level(logging.INFO):
        metrics.choose_wandb_mode()
    assert os.environ["WANDB_MODE"] == "offline" and "no account" in caplog.text


@pytest.mark.parametrize("how", ["key", "login", "mode", "server"])
def test_with_an_account_or_a_wish_wandb_is_left_alone(nobody: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    import os

    if how == "key":
        monkeypatch.setenv("WANDB_API_KEY", "0")
    elif how == "mode":
        monkeypatch.setenv("WANDB_MODE", "online")
    else:
        host = "api.wandb.ai" if how == "login" else "wandb.example.org"
        nobody.write_text(f"machine {host}\n  login user\n  password 0\n")
        nobody.chmod(0o600)
        if how == "server":
            assert not metrics.has_wandb_account()
            monkeypatch.setenv("WANDB_BASE_URL", f"https://{host}:8080/")
    metrics.choose_wandb_mode()
    assert os.environ.get("WANDB_MODE") == ("online" if how == "mode" else None)


def test_wandb_that_is_not_installed_is_told_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = [None, SimpleNamespace(origin=None), SimpleNamespace(origin="there")]
    real = job_check.importlib.util.find_spec
    monkeypatch.setattr(
        job_check.importlib.util, "find_spec", lambda name, *rest: found[0] if name == "wandb" else real(name, *rest)
    )
    for _ in range(2):
        with pytest.raises(ConfigError, match=r'wandb is not installed; pip install -e "\.\[wandb\]"'):
            job_check.check(LLAMA, ["--metrics.enable_wandb"], world_size=2)
        found.pop(0)
    job_check.check(LLAMA, ["--metrics.enable_wandb"], world_size=2)


# Progress


def test_progress_tells_what_takes_long(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("tide")
    with caplog.at_level(logging.INFO):
        with progress(logger, "being quick"):
            pass
        assert caplog.messages == []
        monkeypatch.setattr("tide_comm.progress.QUICK_S", 0.1)
        with progress(logger, "digging", every_s=0.05):
            time.sleep(0.2)
    assert caplog.messages[0] == "TIDE: still digging (0:00)"
    assert caplog.messages[-1].startswith("TIDE: digging took 0.")
    assert clock_text(65.9) == "1:05"
