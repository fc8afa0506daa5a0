"""scripts/bench/step.py and collectives.py run, on the CPU with tiny sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_all_rows_with_the_host_engine(tmp_path: Path) -> None:
    out = tmp_path / "step.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["scripts/bench/step.py", "--debug", "--mode", "slot_reuse", "--out", str(out)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    rows = json.loads(out.read_text())["rows"]
    assert list(rows) == ["stock", "tide", "tide_ag", "tide_rs", "none"]
    for name, row in rows.items():
        assert row["step_ms"] > 0 and row["host_ms"] > 0 and len(row["steps_ms"]) == 2, (name, row)
        assert (row["arena_gib"] > 0) == (name != "stock"), (name, row)
    assert rows["stock"]["to_stock"] == 1.0 and rows["none"]["to_limit"] == 1.0
    assert "to limit" in done.stdout


def test_collectives_with_the_host_engine(tmp_path: Path) -> None:
    out = tmp_path / "made" / "collectives.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["scripts/bench/collectives.py", "--debug", "--out", str(out)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found = json.loads(out.read_text())
    assert list(found["rows"]) == ["stock", "tide"] and found["ranks"] == 2
    assert all(row["alone_ms"] > 0 for row in found["rows"].values())
    assert "alone ms" in done.stdout
