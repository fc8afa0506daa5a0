"""scripts/bench/report.py and plot.py on small made-up results."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts" / "bench"))

import figures
import plot
import report

BENCH = Path(plot.__file__).parent
ABOUT = {"date": "2026-11-30T13:00:00+00:00", "commit": "0123456789ab", "machine": "NVIDIA H200", "gpus": 2, "ranks": 2}
ABOUT |= {"torch": "2.13.0", "nccl": 23102, "env": {"NCCL_NVLS_ENABLE": "0", "NCCL_VERSION": "2.28"}}


def step() -> dict[str, Any]:
    options = {"model": "llama", "blocks": 4, "rounds": 6, "steps": 2, "param_dtype": "bf16", "mode": "slot_reuse"}
    options |= {"checkpoint": "full", "tokens": [2048], "out": "step.json", "debug": False}
    rows = {
        "stock": {"step_ms": 60.0, "to_stock": 1.0, "to_limit": 1.5, "peak_gib": 18.0, "resident": 0.42},
        "symm_mem": {"error": "rank 0: no windows\nand more"},
        "tide": {"step_ms": 45.0, "to_stock": 0.75, "to_limit": 1.125, "peak_gib": 18.0, "copy_engines": "yes"},
        "none": {"step_ms": 40.0, "to_stock": 0.667, "to_limit": 1.0, "peak_gib": 18.0},
    }
    return ABOUT | {"options": options, "block_mib": 1632.0, "tokens": {"2048": rows}}


def collectives() -> dict[str, Any]:
    def row(nbytes: float, us: float, **more: Any) -> dict[str, Any]:
        return {"link_bytes": nbytes, "us": us, "gb_per_s": nbytes / us / 1e3, "host_us": 40.0} | more

    gather = {
        "fsdp": row(8e8, 4000),
        "tide": row(8e8, 2100, matches=True, copy_engines="yes"),
        "copies": row(8e8, 2000),
    }
    reduce = {"fsdp": row(1.6e9, 8000), "copies": row(8e8, 2000)}
    reduce |= {f"tide {b} blocks, {mib} MiB": row(8e8, 2500) for mib in (16, 64) for b in (16, 64)}
    models = {
        "llama": {"all_gather": {"fp32": gather, "bf16": {"all": {"error": "no memory"}}}, "reduce_scatter": reduce}
    }
    return ABOUT | {"command": "torchrun collectives.py", "options": {}, "models": models}


def beside() -> dict[str, Any]:
    measured = {"slowdown": 1.8, "lasted": False, "alone_us": 52.0}
    cases = {
        "all-gather tide, fp32": {"link_bytes": 1, "8x16x16": measured, "16x16x32": {"error": "rank 1: gone"}},
        "all-gather copies, fp32": {"link_bytes": 1, "8x16x16": measured | {"slowdown": 1.07, "lasted": True}},
    }
    return ABOUT | {"options": {"model": "llama"}, "cases": cases}


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    made = []
    for name, found in (("step", step()), ("collectives", collectives()), ("beside", beside())):
        made.append(tmp_path / f"{name}.json")
        made[-1].write_text(json.dumps(found))
    return made


def test_tables(files: list[Path]) -> None:
    text = report.report(figures.load(files))
    assert "2026-11-30, 2 x NVIDIA H200, PyTorch 2.13.0, NCCL 2.31.2, commit 0123456789ab" in text
    # The command is put together where the file has none.
    assert (
        "`PYTHONPATH=. NCCL_NVLS_ENABLE=0 torchrun --nproc-per-node 2 scripts/bench/step.py --model llama --blocks 4 "
        in text
    )
    assert "### Steps: llama, 2048 tokens, bf16 parameters, Slot-Reuse, checkpointed" in text
    assert "| row | step ms | to stock | to limit | peak GiB | resident | CE |" in text
    assert "| stock | 60.00 | 1.000 | 1.500 | 18.00 | 42.0% | - |" in text
    assert "- symm_mem: rank 0: no windows\n" in text and "and more" not in text
    assert "| tide, fp32 | 2100 | 381.0 | 40 | yes | yes |" in text
    assert "- all, bf16: no memory" in text
    assert "| beside | 8x16x16 (alone 52 us) |" in text and "| all-gather tide, fp32 | 1.800x short |" in text
    assert "- all-gather tide, fp32, 16x16x32: rank 1: gone" in text


def test_plots(files: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plots extra is not installed")
    runs = figures.load(files)
    written = plot.draw(runs, tmp_path / "figures")
    names = ["steps_to_stock", "steps_to_limit", "all_gather", "reduce_scatter", "beside"]
    assert [path.name for path in written] == [f"{name}.svg" for name in names]
    drawn = {path.stem: path.read_text() for path in written}
    assert "0.750" in drawn["steps_to_stock"] and "1.125" in drawn["steps_to_limit"]
    assert "381" in drawn["all_gather"], "GB/s of TIDE"
    assert "100" in drawn["reduce_scatter"], "stock's rate in bytes of bf16: half of what it moves"
    assert "1.80 short" in drawn["beside"] and "failed" in drawn["beside"]
    assert all("NVIDIA H200" in text and len(text) < 60_000 for text in drawn.values())
    newer = replace(runs[0], found=json.loads(json.dumps(runs[0].found).replace("0.75", "0.65")))
    latest = plot.draw([runs[0], newer], tmp_path / "newer")[0].read_text()
    assert "0.650" in latest and "0.750" not in latest, "of the same training the last file counts"
    failed = replace(runs[0], found=json.loads(json.dumps(runs[0].found).replace("to_stock", "not_there")))
    left = plot.draw([runs[0], failed], tmp_path / "failed")
    assert [path.stem for path in left] == ["steps_to_limit"], "nor does an older one fill its gaps"
    again = plot.draw(runs[:1], tmp_path / "again")
    assert again[0].read_text() == drawn["steps_to_stock"], "the same file for the same figures"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file"),
        ("{", "not JSON"),
        ('{"rows": 1}', "none of step.py, collectives.py, beside.py wrote this"),
        ('{"tokens": {}}', "step.py's, but without date"),
        (json.dumps(ABOUT | {"options": {}, "tokens": {"8": {}}}), "not as step.py writes it: KeyError 'model'"),
    ],
)
def test_errors_are_one_line(tmp_path: Path, text: str | None, words: str) -> None:
    file = tmp_path / "x.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(figures.FiguresError, match=words) as raised:
        report.report(figures.load([file]))
    assert "\n" not in str(raised.value) and "x.json" in str(raised.value)


def test_command_line(files: list[Path], tmp_path: Path) -> None:
    def ran(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, BENCH / script, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert "### All-gather: llama" in ran("report.py", *files).stdout
    failed = ran("plot.py", tmp_path / "none.json")
    assert failed.returncode == 1 and failed.stderr.startswith("plot.py: ") and failed.stderr.count("\n") == 1
