"""`tide reproduce`: which cells, published figures from made-up records, what is written, and that one failure costs one cell."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.measure.fakes import FakeLauncher, steps_record
from torchtitan_tide import cli, cpu
from torchtitan_tide.errors import ConfigError
from torchtitan_tide.measure.options import LaunchOptions
from torchtitan_tide.reproduce import run
from torchtitan_tide.reproduce.asked import Asked
from torchtitan_tide.reproduce.matrix import DEBUG, FULL, ROWS, TABLES, cells_of, chosen, with_configs
from torchtitan_tide.reproduce.seed import FIGURES, Measured, Missing

cpu.prepare()

ROOT = Path(__file__).parents[2]
HERE = LaunchOptions(ranks=2)


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


# The matrix


def test_the_published_tables_cells() -> None:
    cells = cells_of(list(TABLES), FULL)
    assert len(cells) == len({cell.name for cell in cells}), "cells that tables share are run once"
    keys = {cell.key for cell in cells}
    assert len([k for k in keys if k[2] == "stock"]) == 9
    assert {r for m, s, r in keys if (m, s) == ("llama", "24K")} == set(ROWS)
    assert {r for m, s, r in keys if (m, s) == ("wan", "31.2K")} == {"stock", "symm_mem", "tide", "tide_slot_reuse"}
    assert {r for m, s, r in keys if m == "qwen"} == {"stock", "symm_mem", "tide"}
    assert {cell.key for cell in cells_of(["ablation"], FULL)} == {
        ("llama", "24K", row) for row in ("stock", "tide", "tide_ag", "tide_rs")
    }


def test_debug_has_a_cell_for_each_published_role() -> None:
    full, debug = ({(c.key[0], c.row) for c in cells_of(list(TABLES), models)} for models in (FULL, DEBUG))
    assert full == debug
    assert all((ROOT / model.config).is_file() for model in DEBUG)
    labels = {cell.size.label for cell in cells_of(["step_time"], DEBUG)}
    assert labels == {"32 for 8K", "96 for 24K", "72 for 31.2K"}
    assert {cell.size.label for cell in cells_of(["step_time"], FULL)} == {"8K", "16K", "24K", "32K", "31.2K"}


@pytest.mark.parametrize("row", [row for row in ROWS if row != "symm_mem"])
@pytest.mark.parametrize("model", DEBUG, ids=lambda model: model.key)
def test_every_debug_cell_is_a_sound_job(model: Any, row: str) -> None:
    from torchtitan_tide import job_check

    training = next(c for c in cells_of(["step_time"], [model])).training(1, 1, ())
    cell = replace(next(iter(cells_of(["step_time"], [model]))), row=row)
    training = cell.training(1, 1, ())
    job = job_check.check(training.config, list(training.overrides), 2, here=False)
    tide = job.config.tide
    expected = {
        "stock": ("stock", True, True, "in_place"),
        "tide": ("tide", True, True, "in_place"),
        "tide_slot_reuse": ("tide", True, True, "slot_reuse"),
        "tide_ag": ("tide", True, False, "in_place"),
        "tide_rs": ("tide", False, True, "in_place"),
    }[row]
    assert (tide.comm, tide.all_gather, tide.reduce_scatter, tide.memory_mode) == expected or row == "stock"
    assert tide.comm == expected[0]


def test_names_that_are_unknown_are_told() -> None:
    with pytest.raises(ConfigError, match='--rows tide_agg: .* did you mean "tide_ag"'):
        chosen("tide_agg", list(ROWS), "--rows")
    with pytest.raises(ConfigError, match="takes names"):
        chosen(",", list(ROWS), "--rows")
    assert chosen("tide,stock", list(ROWS), "--rows") == ("tide", "stock")
    with pytest.raises(ConfigError, match="--configs lama=x"):
        with_configs(FULL, "lama=x")
    assert [m.config for m in with_configs(FULL, "qwen=q.toml")][1] == "q.toml"


def test_overrides_of_the_user_come_through_the_command_line() -> None:
    args = ["reproduce", "--debug", "--out", "o", "--training.seq_len=8", "--tables=memory", "--tide.strict"]
    assert cli.overrides_last(args) == [
        *("reproduce", "--debug", "--out", "o", "--tables=memory"),
        *("--", "--training.seq_len=8", "--tide.strict"),
    ]
    args = ["parity", "a.toml", "--steps", "9", "--training.steps=3", "--launcher", "--x {entry}"]
    assert cli.overrides_last(args) == [
        *("parity", "a.toml", "--steps", "9", "--launcher", "--x {entry}", "--", "--training.steps=3"),
    ]


def test_flags_belong_to_their_command() -> None:
    assert cli.overrides_last(["check", "a.toml", "--debug", "--x.y=1"]) == [
        "check",
        "a.toml",
        "--",
        "--debug",
        "--x.y=1",
    ]


# Published figures


def published(records: dict[tuple[str, str, str], dict[str, Any]], **more: Any) -> dict[str, str]:
    """What is measured for each figure, by what it is; missing ones in brackets."""
    measured, found = Measured(records, **more), {}
    for figure in FIGURES:
        try:
            found[figure.what] = figure.measure(measured)
        except Missing as missing:
            found[figure.what] = f"({missing})"
    return found


def cluster() -> dict[tuple[str, str, str], dict[str, Any]]:
    """Cells with the published relations, as far as they are published."""
    profile = {"comm_sm_ms": 78e3, "resident": 0.89, "layout_ms": 330.0}
    tide_profile = {"comm_sm_ms": 3.8e3, "resident": 0.08, "layout_ms": 0.0}
    steps = {
        ("llama", "8K"): (5156.0, 4700.0, 4400.0),
        ("llama", "16K"): (9000.0, 8730.0, 8490.0),
        ("llama", "24K"): (13000.0, 12750.0, 12480.0),
        ("llama", "32K"): (17400.0, 17118.0, 16860.0),
        ("qwen", "8K"): (2000.0, 1551.0, 1458.0),
        ("qwen", "16K"): (3000.0, 2600.0, 2488.2),
        ("wan", "31.2K"): (10000.0, 9900.0, 9860.0),
    }
    records = {}
    for (model, size), times in steps.items():
        for row, step_ms in zip(("stock", "symm_mem", "tide"), times, strict=True):
            records[model, size, row] = steps_record(step_ms, profile if row == "stock" else tide_profile)
    records["llama", "24K", "tide_ag"] = steps_record(12740.0)
    records["llama", "24K", "tide_rs"] = steps_record(12698.4)
    for row, gib in (("stock", 60.0), ("symm_mem", 66.6), ("tide", 61.9)):
        records["llama", "24K", row]["peak_gib"] = gib
    records["wan", "31.2K", "stock"]["peak_gib"] = 50.0
    records["wan", "31.2K", "tide_slot_reuse"] = steps_record(9900.0, peak_gib=48.8)
    return records


def test_figures_from_records() -> None:
    found = published(cluster(), loss_gaps={"tide": 0.0073, "stock again": 0.0112})
    assert found["largest saving of step time against stock"] == "27.1% (qwen 8K, best of 7)"
    assert found["Llama 16K to 32K: saved a step"] == "0.510 to 0.540 s"
    assert found["Llama 16K to 32K: saving, in SymmMem's"] == "1.9 to 2.1 times"
    assert found["Llama 32K: saving"] == "3.1%" and found["Wan 31.2K: saving"] == "1.4%"
    assert found["Qwen3: saving against SymmMem"] == "4.3% to 6.0%"
    assert found["Llama 8K, stock: copies between layouts"] == "0.330 s, 6.4%"
    assert found["Llama 8K: SM time of communication, stock -> TIDE, SM s"] == "78.0 -> 3.8"
    assert found["Llama 8K: a communication kernel is resident, stock -> TIDE"] == "89% -> 8%"
    assert found["Llama 24K: of the saving, by the all-gather alone"] == "50%"
    assert found["Llama 24K: of the saving, by the reduce-scatter alone"] == "58%"
    assert found["Llama 24K: both parts together"] == "108%"
    assert found["Llama 24K: In-Place against SymmMem"] == "-4.70 GiB"
    assert found["Llama 24K: In-Place against stock"] == "+1.90 GiB"
    assert found["Wan: Slot-Reuse against stock"] == "-1.20 GiB"
    assert found["Qwen3, 1,000 steps: largest gap of the averaged loss"] == "tide 0.73%, stock again 1.12%"
    assert sum(value.startswith("(") for value in found.values()) == 5, "what no cell says"
    rows = {"stock": {"alone_ms": 6.75, "slowed": 0.69}, "stock, 4 blocks": {"alone_ms": 26.35, "slowed": 0.027}}
    rows["tide"] = {"alone_ms": 6.96}
    found = published({}, collectives={"rows": rows, "ranks": 64, "mib": 32.0})
    assert (
        found["8 machines, 32 MiB: the same, NCCL / NCCL with 4 blocks / TIDE"]
        == "6.75 / 26.35 / 6.96 (64 ranks, 32 MiB)"
    )
    assert found["... a multiply of 256 x 8192 x 8192 beside it slowed"] == "69.0% / 2.7% / n/a (64 ranks, 32 MiB)"


def test_figures_say_what_is_missing() -> None:
    found = published({("llama", "8K", "stock"): steps_record(5.0)})
    assert found["Llama 8K, stock: copies between layouts"] == "(n/a without a GPU)"
    assert found["Llama 32K: saving"] == "(llama 32K tide not run)"
    assert found["largest saving of step time against stock"] == "(any model: tide and stock not run at one size)"
    records = cluster()
    records["llama", "24K", "tide"] = steps_record(13100.0)
    assert published(records)["Llama 24K: both parts together"] == "(TIDE saved nothing to divide)"
    del records["llama", "32K", "tide"]
    found = published(records, unusable={("llama", "32K", "tide"): "ran partly on stock"})
    assert found["Llama 32K: saving"] == "(llama 32K tide ran partly on stock)"


# Runs


def reproduced(monkeypatch: pytest.MonkeyPatch, launcher: FakeLauncher, asked: Asked, *overrides: str) -> int:
    monkeypatch.setattr(LaunchOptions, "start", lambda self: launcher)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return run.run(asked, HERE, overrides)


def row_of(arguments: Sequence[str]) -> str:
    return next(row for row, overrides in ROWS.items() if tuple(arguments[-len(overrides) :]) == overrides)


def test_one_failure_costs_one_cell_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def record(arguments: Sequence[str]) -> dict[str, Any] | str:
        if row_of(arguments) == "tide_ag":
            return "[rank1]:torch.OutOfMemoryError: CUDA out of memory"
        more = {"groups_stock": 2, "stock_reasons": ["fp16 | reduction"]} if row_of(arguments) == "tide_rs" else {}
        return steps_record(100.0 if row_of(arguments) == "stock" else 80.0, **more)

    launcher = FakeLauncher(record)
    asked = Asked(models="llama", sizes="24K", debug=True, out=str(tmp_path))
    assert reproduced(monkeypatch, launcher, asked, "--debug.seed=3") == 1
    assert len(launcher.calls) == 5 and launcher.closed
    assert all("--debug.seed=3" in call for call in launcher.calls)
    data = json.loads((tmp_path / "reproduce.json").read_text())
    states = {cell["row"]: cell["state"] for cell in data["cells"]}
    assert states == {
        "stock": "done",
        "symm_mem": "not possible without a GPU",
        "tide": "done",
        "tide_slot_reuse": "done",
        "tide_ag": "FAILED: torch.OutOfMemoryError: CUDA out of memory",
        "tide_rs": "ON STOCK: 2 of 6 groups (fp16 | reduction), 0 collectives",
    }
    text = (tmp_path / "reproduce.md").read_text()
    assert "| llama3_debug | 96 for 24K | tide | 80.0 | 0.800 | 2.00 | +0.00 | 0.50 | n/a | n/a | n/a | done |" in text
    assert "(llama 24K tide_rs ran partly on stock)" in text and "fp16 / reduction" in text
    assert "(llama 24K tide_ag failed)" in text and "DEBUG: small models" in text
    with (tmp_path / "cells.csv").open() as file:
        table = {row["row"]: row for row in csv.DictReader(file)}
    assert table["tide"]["step_ms"] == "80.0" and table["tide_ag"]["step_ms"] == "" and table["tide"]["resident"] == ""

    launcher.record, launcher.calls = lambda arguments: steps_record(90.0), []
    assert reproduced(monkeypatch, launcher, asked, "--debug.seed=3") == 0
    assert [row_of(call) for call in launcher.calls] == ["tide_ag"]
    text = (tmp_path / "reproduce.md").read_text()
    assert "by the all-gather alone | 50% | debug sizes: 50% |" in text, "100 -> 90 of 100 -> 80"

    # Nothing is run for a report, and other settings have nothing finished.
    launcher.calls = []
    assert reproduced(monkeypatch, launcher, replace(asked, report_only=True), "--debug.seed=3") == 0
    assert reproduced(monkeypatch, launcher, replace(asked, report_only=True), "--debug.seed=4") == 1
    assert launcher.calls == []
    assert "5 not run, 1 not possible here" in capsys.readouterr().out


def test_ctrl_c_keeps_what_was_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def record(arguments: Sequence[str]) -> dict[str, Any]:
        if row_of(arguments) != "stock":
            raise KeyboardInterrupt
        return steps_record(100.0)

    asked = Asked(tables="sm_time", debug=True, out=str(tmp_path))
    assert reproduced(monkeypatch, FakeLauncher(record), asked) == 1
    states = [cell["state"] for cell in json.loads((tmp_path / "reproduce.json").read_text())["cells"]]
    assert states == ["done", "not possible without a GPU", "not run"]


def test_profiles_of_a_gpu_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = {"comm_sm_ms": 3800.0, "resident": 0.08, "layout_ms": 0.25}
    launcher = FakeLauncher(lambda arguments: steps_record(50.0, profile))
    reproduced(monkeypatch, launcher, Asked(tables="sm_time", debug=True, out=str(tmp_path)))
    assert "| 3.80 | 8.0% | 0.2 | done |" in (tmp_path / "reproduce.md").read_text()


def test_overrides_for_one_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cells = cells_of(["memory"], DEBUG, rows=("tide",))
    overrides = ("--wan:training.dataset_path=a:b=c", "--x.y=1:2")
    own = {cell.model.key: cell.training(1, 1, overrides).overrides[:2] for cell in cells}
    assert own["wan"] == ("--training.dataset_path=a:b=c", "--x.y=1:2") and own["llama"][0] == "--x.y=1:2"
    assert run.run(Asked(debug=True, out=str(tmp_path)), HERE, ("--wam:a.b=c",)) == 2
    assert "--MODEL:section.key=value, models llama, qwen, wan" in capsys.readouterr().err


def test_the_loss_protocols_result_is_taken_from_the_folder(tmp_path: Path) -> None:
    assert run.loss_gaps(tmp_path) == {}
    (tmp_path / "parity").mkdir()
    (tmp_path / "parity/parity.json").write_text(json.dumps({"gaps": {"tide": {"largest": 0.5}}}))
    assert run.loss_gaps(tmp_path) == {"tide": 0.5}


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        (Asked(debug=True, steps=0), "--steps 0"),
        (Asked(debug=True, tables="memory", rows="tide_ag"), "no cell is in all of them"),
        (Asked(debug=True, configs="llama=none.toml"), "none.toml: no such file"),
        (Asked(debug=True, sizes="9K"), "--sizes 9K"),
    ],
)
def test_mistakes_are_told_before_anything_starts(
    asked: Asked, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.run(replace(asked, out=str(tmp_path / "out")), HERE, ()) == 2
    captured = capsys.readouterr()
    assert what in captured.err and captured.err.count("\n") == 1 and not (tmp_path / "out").exists()


def test_plots_of_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="the plots extra is not installed")

    def record(arguments: Sequence[str]) -> dict[str, Any]:
        return steps_record(100.0 if row_of(arguments) == "stock" else 80.0)

    reproduced(monkeypatch, FakeLauncher(record), Asked(debug=True, out=str(tmp_path)))
    # SM times need a GPU: no plot without a bar.
    assert {path.name for path in tmp_path.glob("*.png")} == {"step_time.png", "ablation.png", "memory.png"}


@pytest.mark.slow
def test_real_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The ablation on the debug model; one cell's time limit is too short for it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked = Asked(tables="ablation", debug=True, warmup=1, steps=2, out=str(tmp_path / "out"))
    assert run.run(replace(asked, rows="tide_ag"), replace(HERE, limit_s=1.0), ()) == 1
    assert "FAILED: took longer than 1 s" in capsys.readouterr().out
    assert run.run(asked, replace(HERE, limit_s=300.0), ()) == 0
    cells = json.loads((tmp_path / "out/reproduce.json").read_text())["cells"]
    assert [cell["row"] for cell in cells] == ["stock", "tide", "tide_ag", "tide_rs"]
    assert all(cell["state"] == "done" and cell["record"]["step_ms"] > 0 for cell in cells)
    assert [cell["record"]["groups"] for cell in cells] == [0, 6, 6, 6]


# scripts/reproduce


@pytest.mark.parametrize(
    "script", sorted(p.stem for p in (ROOT / "scripts/reproduce").glob("*.sh") if p.stem != "common")
)
def test_each_script_asks_for_its_table(script: str, tmp_path: Path) -> None:
    """Run in a folder like the project's, with a stand-in for the environment; what it would run is parsed as `tide` would."""
    import shutil
    import subprocess

    shutil.copytree(ROOT / "scripts/reproduce", tmp_path / "scripts/reproduce")
    (tmp_path / "scripts/setup_env.sh").write_text(
        f'TIDE_ROOT={tmp_path}\nsetup_env() {{ PYTHON=fake; echo "extras $1"; }}\nfake() {{ printf "%s\\n" "$@"; }}\n'
    )
    script_file = str(tmp_path / f"scripts/reproduce/{script}.sh")
    done = subprocess.run(["bash", script_file, "--debug", "--ranks", "2", "--a.b=c d"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    extras, *words = done.stdout.splitlines()
    assert extras == "extras plots,photos"
    if script == "collectives":
        # The number of ranks was asked of the stand-in, too.
        at = words.index("scripts/bench/reduce_scatter.py")
        out = "outputs/reproduce_debug/collectives.json"
        assert words[at + 1 :] == ["--out", out, "--debug", "--ranks", "2", "--a.b=c d"]
        assert "--standalone" in words[:at]
        return
    assert words[:2] == ["-m", "torchtitan_tide.cli"] and words[-1] == "--a.b=c d"
    command, options = words[2], words[3:]
    if script == "loss":
        assert command == "parity" and options[0] == "train_configs/qwen3_moe_debug.toml" and "--debug" not in options
        assert (ROOT / options[0]).is_file()
    else:
        assert command == "reproduce" and "--debug" in options
        assert script == "all" or (options[0] == "--tables" and options[1] == script and script in TABLES)


def test_every_table_has_a_script() -> None:
    scripts = {p.stem for p in (ROOT / "scripts/reproduce").glob("*.sh")}
    assert {figure.table for figure in FIGURES} <= scripts


def test_noise_of_wans_size_is_a_data_set(tmp_path: Path) -> None:
    import subprocess
    import sys

    from torchtitan_tide.models.wan.parquet import ParquetSource

    script = str(ROOT / "scripts/reproduce/wan_noise.py")
    options = ["--files", "2", "--latents", "16", "3", "8", "12", "--text", "4", "32"]
    done = subprocess.run([sys.executable, script, str(tmp_path), *options], capture_output=True, text=True)
    assert done.returncode == 0 and "72 tokens a sample" in done.stdout, done.stderr
    source = ParquetSource(str(tmp_path), False, "normalised")
    sample = next(source.read(1, 0))()
    assert source.shards == 2 and sample.latents.shape == (16, 3, 8, 12) and sample.text.shape == (4, 32)
    assert 0.9 < sample.latents.float().std() < 1.1
