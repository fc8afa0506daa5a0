"""`tide parity`: gaps and verdicts on made-up curves, the report, and one real comparison."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.measure.fakes import FakeLauncher, losses_record
from torchtitan_tide import cpu
from torchtitan_tide.errors import ConfigError
from torchtitan_tide.measure.options import LaunchOptions
from torchtitan_tide.parity import report, run
from torchtitan_tide.parity.protocol import AGAIN, NUDGED, TIDE, Gap, gap, moving_average, verdict

cpu.prepare()

ROOT = Path(__file__).parents[2]
LLAMA = str(ROOT / "train_configs/llama3_debug.toml")


def test_moving_average_by_hand() -> None:
    assert moving_average([1.0, 2.0, 4.0, 9.0], 2) == [1.5, 3.0, 6.5]
    assert moving_average([1.0, 2.0], 2) == [1.5]


def test_gap_by_hand() -> None:
    """8 steps, windows of 2, second half: averages of steps 4 to 8."""
    reference = [9.0, 9.0, 4.0, 4.0, 4.0, 2.0, 2.0, 2.0]
    losses = [1.0, 9.0, 4.0, 4.0, 4.0, 2.2, 2.2, 1.0]
    # Averages at steps 4..8: 4, 4, 3, 2, 2 and 4, 4, 3.1, 2.2, 1.6
    found = gap(losses, reference, 2)
    assert found.largest == pytest.approx(0.4 / 2) and found.at_step == 8
    assert found.mean == pytest.approx((0.1 / 3 + 0.1 - 0.2) / 5)
    assert not found.equal and found.first_different == 1


def test_the_first_half_does_not_count_but_equality_is_of_all_steps() -> None:
    reference = [5.0] * 8
    found = gap([6.0, *reference[1:]], reference, 2)
    assert found.largest == 0 and not found.equal and found.first_different == 1
    assert gap(list(reference), reference, 2) == Gap(0.0, 4, 0.0, True, None)
    # The window that ends at the first step of the second half reaches into the first one.
    assert gap([*reference[:2], 6.0, *reference[3:]], reference, 2).at_step == 4


def test_curves_that_cannot_be_compared() -> None:
    for losses, reference in (([1.0] * 8, [1.0] * 9), ([1.0] * 3, [1.0] * 3), ([1.0] * 3 + [math.nan], [1.0] * 4)):
        with pytest.raises(ValueError):
            gap(losses, reference, 2)


def a_gap(largest: float, equal: bool = False) -> Gap:
    return Gap(largest, 600, 0.0, equal, None if equal else 2)


@pytest.mark.parametrize(
    ("tide", "again", "nudged", "outcome"),
    [
        (a_gap(0.0, equal=True), a_gap(0.01), [], "equal"),
        (a_gap(0.0073), a_gap(0.0112), [], "within"),
        (a_gap(0.02), a_gap(0.0112), [0.5], "same size"),
        (a_gap(0.0225), a_gap(0.0112), [0.5], "outside"),
        (a_gap(0.004), a_gap(0.0, equal=True), [0.001, 0.005], "within"),
        (a_gap(0.009), a_gap(0.0, equal=True), [0.001, 0.005], "same size"),
        (a_gap(0.011), a_gap(0.0, equal=True), [0.001, 0.005], "outside"),
        (a_gap(0.0001), a_gap(0.0, equal=True), [], "no yardstick"),
        (a_gap(0.0001), a_gap(0.0, equal=True), [0.0], "outside"),
    ],
)
def test_verdicts(tide: Gap, again: Gap, nudged: list[float], outcome: str) -> None:
    gaps = {AGAIN: again, TIDE: tide} | {f"{NUDGED} {i}": a_gap(x) for i, x in enumerate(nudged, 1)}
    said = verdict(gaps)
    assert said.outcome == outcome
    assert said.passed == (outcome in ("equal", "within", "same size"))


def falling(offset: float = 0.0, steps: int = 20) -> list[float]:
    return [8.0 - 0.1 * i + offset * (i > 3) for i in range(steps)]


def launcher_of(curves: dict[str, list[float]], **tide_more: Any) -> FakeLauncher:
    """`curves`: by "stock", "tide" and "nudge"."""

    def record(arguments: Sequence[str]) -> dict[str, Any]:
        if arguments[3] != "0":
            return losses_record(curves["nudge"])
        comm = arguments[-1].removeprefix("--tide.comm=")
        return losses_record(curves[comm], **(tide_more if comm == "tide" else {}))

    return FakeLauncher(record)


def compared(folder: Path, launcher: FakeLauncher, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(LaunchOptions, "start", lambda self: launcher)
    return run.run(LLAMA, ("--training.seq_len=32",), 20, 4, 2, str(folder), LaunchOptions(ranks=2))


@pytest.mark.slow
def test_nudged_runs_are_made_only_where_stock_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher = launcher_of({"stock": falling(), "tide": falling()})
    assert compared(tmp_path / "equal", launcher, monkeypatch) == 0
    assert len(launcher.calls) == 3 and launcher.closed
    assert "PASSES (equal)" in capsys.readouterr().out

    launcher = launcher_of({"stock": falling(), "tide": falling(0.01), "nudge": falling(0.02)})
    assert compared(tmp_path / "nudged", launcher, monkeypatch) == 0
    assert [call[3] for call in launcher.calls] == ["0", "0", "0", "1", "2"]
    assert "--tide.comm=stock" in launcher.calls[3]
    assert "(within)" in capsys.readouterr().out

    # All kept: another start runs nothing, and judges alike.
    launcher.calls = []
    assert compared(tmp_path / "nudged", launcher, monkeypatch) == 0 and launcher.calls == []

    launcher = launcher_of({"stock": falling(), "tide": falling(0.05), "nudge": falling(0.02)})
    assert compared(tmp_path / "outside", launcher, monkeypatch) == 1
    assert "DOES NOT PASS (outside)" in capsys.readouterr().out


def test_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = launcher_of({"stock": falling(), "tide": falling(0.01), "nudge": falling(0.02)})
    compared(tmp_path, launcher, monkeypatch)
    data = json.loads((tmp_path / "parity.json").read_text())
    # From step 4 on all losses are 0.01 above; the last average, over steps 17 to 20, is 6.25.
    assert data["gaps"]["tide"]["largest"] == pytest.approx(0.01 / 6.25)
    assert data["gaps"]["tide"]["mean"] > 0 and data["gaps"]["stock again"]["equal"]
    assert data["verdict"]["outcome"] == "within"
    with (tmp_path / "parity.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["tide"]) for row in rows] == falling(0.01)
    assert float(rows[19]["stock, mean of 4"]) == pytest.approx(6.25) and rows[2]["stock, mean of 4"] == ""
    text = (tmp_path / "parity.md").read_text()
    assert "| tide | 0.160% | 20 |" in text and "16 of 20, from step 5 on" in text
    assert "1.12 %" in text and "deterministic" in text and "all 6 groups" in text


def test_stock_in_tides_place_does_not_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    curves = {"stock": falling(), "tide": falling()}
    launcher = launcher_of(curves, groups_stock=6, stock_reasons=["several hosts"])
    assert compared(tmp_path / "all", launcher, monkeypatch) == 1
    assert "NOTHING RAN ON TIDE: several hosts" in capsys.readouterr().out
    launcher = launcher_of(curves, groups_stock=2, stock_reasons=["fp16 reduction"])
    assert compared(tmp_path / "some", launcher, monkeypatch) == 0
    assert "2 of 6 groups (fp16 reduction)" in capsys.readouterr().out


def test_a_failed_training_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def record(arguments: Sequence[str]) -> dict[str, Any] | str:
        return "error: no such thing" if arguments[-1] == "--tide.comm=tide" else losses_record(falling())

    assert compared(tmp_path, FakeLauncher(record), monkeypatch) == 1
    assert "error: tide: no such thing" in capsys.readouterr().err


def test_ctrl_c_keeps_what_was_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def record(arguments: Sequence[str]) -> dict[str, Any]:
        if arguments[-1] == "--tide.comm=tide":
            raise KeyboardInterrupt
        return losses_record(falling())

    launcher = FakeLauncher(record)
    assert compared(tmp_path, launcher, monkeypatch) == 130 and launcher.closed
    launcher.record, launcher.calls = lambda arguments: losses_record(falling()), []
    assert compared(tmp_path, launcher, monkeypatch) == 0
    assert [call[-1] for call in launcher.calls] == ["--tide.comm=tide"]


def test_a_diverged_training_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher = launcher_of({"stock": falling(), "tide": [*falling()[:-1], math.nan]})
    assert compared(tmp_path, launcher, monkeypatch) == 1
    assert "diverged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "steps", "window", "nudged", "what"),
    [
        (("--tide.comm=stock",), 20, 4, 1, "sets this itself"),
        (("--training.steps=3",), 20, 4, 1, "--steps N"),
        (("--training.seq=3",), 20, 4, 1, "no such option"),
        ((), 20, 11, 1, "two windows"),
        ((), 20, 4, 0, "--nudged 0"),
    ],
)
def test_mistakes_are_told_before_anything_starts(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    overrides: tuple[str, ...],
    steps: int,
    window: int,
    nudged: int,
    what: str,
) -> None:
    code = run.run(LLAMA, overrides, steps, window, nudged, str(tmp_path / "out"), LaunchOptions(ranks=2))
    captured = capsys.readouterr()
    assert code == 2 and what in captured.err and captured.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_job_without_a_seed_gets_one(tmp_path: Path) -> None:
    text = Path(LLAMA).read_text()
    (tmp_path / "a.toml").write_text(text.replace("seed = 42", "deterministic = false"))
    assert run.checked_overrides(LLAMA, (), 2) == ()
    assert run.checked_overrides(str(tmp_path / "a.toml"), ("--training.seq_len=8",), 2)[1:] == ("--debug.seed=42",)


def test_the_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plots extra is not installed")
    curves = {"stock": falling(), "stock again": falling(), "tide": falling(0.01)}
    gaps = {name: gap(losses, curves["stock"], 4) for name, losses in curves.items() if name != "stock"}
    report.plot(tmp_path / "a.png", curves, gaps, 4, "title")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


def test_without_matplotlib_there_are_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"\.\[plots\]"):
        report.plot(tmp_path / "a.png", {"stock": falling()}, {}, 4, "title")


@pytest.mark.slow
def test_a_real_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Four ranks, where gloo adds in another order than TIDE."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    overrides = ("--training.seq_len=64", "--training.local_batch_size=1", "--lr_scheduler.warmup_steps=2")
    code = run.run(LLAMA, overrides, 40, 10, 1, "out", LaunchOptions(ranks=4, limit_s=400))
    said = json.loads((tmp_path / "out/parity.json").read_text())
    assert code == 0, capsys.readouterr().err
    assert said["gaps"]["stock again"]["equal"] and said["gaps"]["tide"]["largest"] < 0.02
    assert "all 6 groups" in (tmp_path / "out/parity.md").read_text()
