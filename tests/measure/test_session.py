"""Sessions: finished trainings are kept, failed ones are written down and tried again, others go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.measure.fakes import FakeLauncher, steps_record
from torchtitan_tide.errors import ConfigError
from torchtitan_tide.measure.session import Session, Training


def trainings(folder: Path) -> list[Training]:
    (folder / "job.toml").write_text("a = 1\n")
    return [Training(name, str(folder / "job.toml"), (f"--x={name}",), ("steps", "1", "2")) for name in "abc"]


def test_a_failed_training_does_not_stop_the_others(tmp_path: Path) -> None:
    def record(arguments: Sequence[str]) -> dict[str, Any] | str:
        return "[rank0]:ValueError: bad b" if "--x=b" in arguments else steps_record(5.0)

    launcher, told = FakeLauncher(record), []  # type: FakeLauncher, list[str]
    session = Session(tmp_path / "out", launcher, "here", 60)
    found = session.finish(trainings(tmp_path), told.append)
    assert [found[name].state for name in "abc"] == ["done", "failed", "done"]
    assert found["b"].error == "ValueError: bad b" and found["a"].record == steps_record(5.0)
    assert any("FAILED (ValueError: bad b)" in line and "b.log" in line for line in told)
    assert launcher.calls[0][0] == "steps" and launcher.calls[0][2:] == [
        "1",
        "2",
        "--",
        str(tmp_path / "job.toml"),
        "--x=a",
    ]

    # Again: only what failed.
    launcher.record, launcher.calls = lambda arguments: steps_record(7.0), []
    found = Session(tmp_path / "out", launcher, "here", 60).finish(trainings(tmp_path), told.append)
    assert [call[-1] for call in launcher.calls] == ["--x=b"]
    assert found["a"].record == steps_record(5.0) and found["b"].record == steps_record(7.0)
    assert found["a"].began.startswith("20")

    launcher.calls = []
    Session(tmp_path / "out", launcher, "here", 60).finish(trainings(tmp_path), told.append, again=True)
    assert len(launcher.calls) == 3


@pytest.mark.parametrize("change", ["overrides", "recorder", "toml", "where"])
def test_other_settings_are_another_training(tmp_path: Path, change: str) -> None:
    (training, *_) = trainings(tmp_path)
    session = Session(tmp_path / "out", FakeLauncher(lambda arguments: steps_record(5.0)), "here", 60)
    session.run(training)
    assert session.result(training).state == "done"
    if change == "overrides":
        training = replace(training, overrides=("--x=1",))
    elif change == "recorder":
        training = replace(training, recorder=("steps", "1", "3"))
    elif change == "toml":
        (tmp_path / "job.toml").write_text("a = 2\n")
    else:
        session = Session(tmp_path / "out", session.launcher, "there", 60)
    assert session.result(training).state == "not run"


def test_an_end_without_a_record_is_a_failure(tmp_path: Path) -> None:
    class Forgetful(FakeLauncher):
        def run(self, arguments: Sequence[str], log: Path, limit_s: float) -> int:
            log.write_text("")
            return 0

    session = Session(tmp_path / "out", Forgetful(lambda arguments: ""), "here", 60)
    assert "rank 0 must be able to write" in session.run(trainings(tmp_path)[0]).error


def test_a_half_written_result_counts_as_not_run(tmp_path: Path) -> None:
    session = Session(tmp_path / "out", FakeLauncher(lambda arguments: steps_record(5.0)), "here", 60)
    (training, *_) = trainings(tmp_path)
    session.run(training)
    file = tmp_path / "out" / "runs" / "a.json"
    file.write_text(file.read_text()[:50])
    assert session.result(training).state == "not run"


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        Session(tmp_path / "file" / "out", FakeLauncher(lambda arguments: ""), "here", 60)
