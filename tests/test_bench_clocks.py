"""scripts/bench/clocks.py with scripts in nvidia-smi's place."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts" / "bench"))

import clocks
import step_table

BENCH = Path(clocks.__file__).parent
START = 1_796_000_000.0
"""Of the samples below, which are 20 ms apart whenever they are written."""
REFUSED = 'Field "power.draw.instant" is not a valid field to query.'


def line(i: int, rest: str) -> str:
    at = START + i * 0.02
    return f"{time.strftime('%Y/%m/%d %H:%M:%S', time.localtime(at))}.{i * 20 % 1000:03d}, {rest}\n"


SAMPLES = [
    *(line(i, "1980, 3201, 500.10, 0x0000000000000000") for i in range(10)),
    *(line(i, f"{1500 + i}, 3201, 699.50, 0x000000000000000{4 if i % 2 else 0}") for i in range(10, 20)),
    *(line(i, "1400, [N/A], [Not Supported], 0x0000000000000024") for i in range(20, 25)),
    *(line(i, "[N/A], 3201, 300, [N/A]") for i in range(25, 30)),
]


def during(first: int, last: int) -> tuple[float, float]:
    return START + first * 0.02 - 0.005, START + last * 0.02 + 0.005


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a shell script in nvidia-smi's place."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "samples").write_text("".join(SAMPLES))

    def put(script: str) -> None:
        path = tmp_path / "nvidia-smi"
        path.write_text(f'#!/bin/sh\ncd {tmp_path}\necho "$*" >> asked\n{script}\n')
        path.chmod(0o755)

    return put


def gone(pid: int) -> bool:
    """Within two seconds."""
    for _ in range(200):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True  # whoever inherits it has only to look
        except OSError:
            return True
        time.sleep(0.01)
    return False


def test_figures_of_intervals(smi: Any, tmp_path: Path) -> None:
    # A warning first; more samples later; then it stays, deaf to SIGTERM, and so does what it has started.
    smi(
        "trap '' TERM; echo 'a warning' >&2; head -n 12 samples; sleep 0.1; tail -n +13 samples; echo $$ > pid; sleep 60"
    )
    read = clocks.Clocks("GPU-0123")
    try:
        assert read.fields == clocks.FIELDS and not read.reason
        command = (
            "-i GPU-0123 --query-gpu=timestamp,clocks.sm,clocks.mem,power.draw.instant,clocks_event_reasons.active "
        )
        assert (tmp_path / "asked").read_text() == command + "--format=csv,noheader,nounits -lms 20\n"
        # `over` waits for the samples that are not there yet.
        found = read.over([during(2, 4), during(10, 19)])
        assert found == pytest.approx(
            {
                "samples": 13,
                "sm_mhz": 1516,
                "mem_mhz": 3201,
                "power_w": 699.5,
                "power_capped": 5 / 13,
                "otherwise_slowed": 0,
            }
        )
        assert read.over([during(20, 24)]) == {
            "samples": 5,
            "sm_mhz": 1400,
            "power_capped": 1.0,
            "otherwise_slowed": 1.0,
        }
        assert read.over([during(25, 28)]) == {"samples": 4, "mem_mhz": 3201, "power_w": 300}
        assert read.over([]) == {} and read.over([during(-9, -3)]) == {}
    finally:
        started = time.monotonic()
        read.close()
    assert time.monotonic() - started < 0.5
    assert gone(int((tmp_path / "pid").read_text()))
    assert len(read.samples()) == len(SAMPLES), "what was read stays"
    read.close()


@pytest.mark.parametrize("text", ["", "a warning", SAMPLES[0][:40], SAMPLES[0].rstrip(), "x" + SAMPLES[0]])
def test_no_samples(text: str) -> None:
    assert clocks.sample_of(text.encode()) is None


def test_older_fields(smi: Any) -> None:
    smi(f"case $* in *instant*) echo '{REFUSED}'; exit 2;; esac; cat samples")
    read = clocks.Clocks("0")
    assert read.fields == clocks.OLDER_FIELDS and not read.reason
    # It has ended by itself: nothing to wait for, although the last sample lies within the interval.
    assert read.over([during(0, 1000)])["samples"] == len(SAMPLES)
    read.close()


def test_left_out(smi: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi("echo 'No devices were found'; exit 6")
    read = clocks.Clocks("GPU-0123")
    assert read.reason == "nvidia-smi: No devices were found" and read.over([during(0, 9)]) == {}
    assert (tmp_path / "asked").read_text().count("\n") == 2, "asked once more, in older words"
    smi("exec sleep 60")
    monkeypatch.setattr(clocks, "START_S", 0.1)
    assert clocks.Clocks("0").reason == "nvidia-smi: no sample in 0 s"
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert clocks.Clocks("0").reason == "nvidia-smi is not on PATH"
    assert clocks.Clocks("").reason == "no GPU"


@pytest.mark.parametrize("end", ["raise SystemExit(1)", "os._exit(1)", "os.kill(os.getpid(), 9)"])
def test_ends_with_the_benchmark(smi: Any, tmp_path: Path, end: str) -> None:
    smi("echo $$ > pid; head -n 1 samples; exec sleep 60")  # which writes nothing that would fail
    script = f"import os, clocks; read = clocks.Clocks('0'); print(read.fields[0], flush=True); {end}"
    done = subprocess.run([sys.executable, "-c", script], cwd=BENCH, capture_output=True, text=True, timeout=10)
    assert done.stdout == "timestamp\n" and not done.stderr
    assert gone(int((tmp_path / "pid").read_text()))


def test_ranks(smi: Any) -> None:
    other = {"samples": 9.0, "sm_mhz": 1700.0, "power_w": 710.0, "power_capped": 0.25, "otherwise_slowed": 0.0}

    def exchange(mine: Any) -> list[Any]:
        return [mine, other if isinstance(mine, dict) else ""]

    smi("cat samples; exec sleep 60")
    read = clocks.RanksClocks("0", exchange)
    found = read.over([during(0, 9)])
    assert [rank["samples"] for rank in found.pop("clocks")] == [10, 9]
    # The memory's clock is known of one rank alone.
    assert found == {"sm_mhz": 1700, "power_w": 710, "power_capped": 0.25, "otherwise_slowed": 0}
    read.close()
    assert "power.draw.instant" in read.what
    read = clocks.RanksClocks("0", lambda mine: [mine, "no GPU"])
    assert read.what == "left out: rank 1: no GPU" and read.over([during(0, 9)]) == {}


def test_columns_only_where_measured(capsys: pytest.CaptureFixture[str]) -> None:
    options = {"blocks": 4, "model": "llama", "param_dtype": "fp32", "mode": "in_place", "checkpoint": "none"}
    about = {"options": options, "gpus": 2, "block_mib": 1632.0, "ranks": 2, "machine": "H200", "torch": "2", "nccl": 1}
    rows: dict[str, dict[str, Any]] = {"stock": {"step_ms": 90.0}, "tide": {"step_ms": 80.0, "clocks": [{}, {}]}}
    step_table.show(rows, about, 2048)
    printed = capsys.readouterr().out
    assert "power-capped" not in printed and "no sample from within" in printed
    rows["tide"] |= {"sm_mhz": 1512.5, "power_w": 699.6, "power_capped": 0.384, "clocks": [{"samples": 9}] * 2}
    table = step_table.table_of(rows, "")
    assert [column.header for column in table.columns][-3:] == ["SM MHz", "W", "power-capped"]
    assert [list(column.cells) for column in table.columns][-3:] == [["-", "1512"], ["-", "700"], ["-", "38%"]]
    step_table.show(rows, about, 2048)
    assert "no sample from within" not in capsys.readouterr().out
