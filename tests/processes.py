"""Commands that tests run: whatever they start ends with them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def output_of(command: Sequence[str], cwd: Path, env: Mapping[str, str], timeout_s: float) -> str:
    """What a command prints that has to end with exit code 0; a group of its own, so that nothing that hangs is left behind."""
    with subprocess.Popen(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output[-4000:]
    return output
