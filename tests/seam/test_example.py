"""The plain FSDP2 example, as a user starts it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_example_trains_on_tide() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "examples/plain_fsdp2.py"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(x) for x in re.findall(r"step \d+: loss ([\d.]+)", done.stdout)]
    assert len(losses) == 20 and losses[-1] < losses[0] - 0.5, losses
    assert "TIDE: 5 of 5 groups" in done.stdout
    (gathers, on_stock) = re.search(r"TIDE: (\d+) all-gathers \((\d+) on stock\)", done.stdout).groups()  # type: ignore[union-attr]
    assert int(gathers) > 100 and int(on_stock) == 0
