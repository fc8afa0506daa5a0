"""The seam's tests on another PyTorch than this environment's."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from tide_comm.fsdp.guard import TESTED

ROOT = Path(__file__).parents[1]
OTHERS = [minor for minor in TESTED if not torch.__version__.startswith(f"{minor}.")]


@pytest.mark.slow
@pytest.mark.parametrize("minor", OTHERS)
def test_the_seam_on_another_pytorch(minor: str) -> None:
    """In `.venv-torch-<minor>...`, or with the Python that TIDE_TORCH_ENV names."""
    named = os.environ.get("TIDE_TORCH_ENV")
    found = [named] if named else sorted(map(str, ROOT.glob(f".venv-torch-{minor}*/bin/python")))
    if not found:
        pytest.skip(f"no environment with PyTorch {minor}: TIDE_TORCH={minor}.x scripts/test.sh tests/seam makes one")
    python = found[-1]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    version = subprocess.check_output([python, "-c", "import torch; print(torch.__version__)"], env=env, text=True)
    if not version.startswith(f"{minor}."):
        pytest.skip(f"{python} has PyTorch {version.strip()}, not {minor}")
    quick = ["-m", "not gpu and not gpu2 and not slow", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [python, "-m", "pytest", "tests/seam", *quick], cwd=ROOT, env=env, capture_output=True, text=True
    )
    print(f"PyTorch {version.strip()}: {done.stdout.splitlines()[-1] if done.stdout else 'no output'}")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
