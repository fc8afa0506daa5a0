"""Runs benchmarks on two ranks that stay from one run to the next: starting Python and PyTorch is most of a tiny run's time."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import select
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "scripts" / "bench"
WORLD = 2
LIMIT_S = 120.0
"""Of a run."""
_ranks: list[subprocess.Popen[str]] = []


def run(script: str, out: Path, *options: str) -> tuple[dict[str, Any], str]:
    """(figures, what rank 0 printed) of a benchmark with --debug. Fails with what the ranks printed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    folder = Path(tempfile.mkdtemp(prefix="bench_ranks_"))  # not beside `out`, whose folder the benchmark makes
    logs = [folder / f"{rank}.log" for rank in range(WORLD)]
    arguments = [str(BENCH / script), "--debug", "--out", str(out), *options]
    if any(rank.poll() is not None for rank in _ranks):
        _end()
    if not _ranks:
        _ranks.extend(_start(rank) for rank in range(WORLD))
    for rank, log in zip(_ranks, logs, strict=True):
        assert rank.stdin is not None
        rank.stdin.write(json.dumps({"arguments": arguments, "port": store.port, "log": str(log)}) + "\n")
        rank.stdin.flush()
    end = time.monotonic() + LIMIT_S
    answers = [_answer(rank, end) for rank in _ranks]
    printed = [log.read_text() if log.exists() else "" for log in logs]
    shutil.rmtree(folder)
    if answers != ["done"] * WORLD:
        _end()
        raise AssertionError("\n".join(f"rank {r}: {a}\n{printed[r][-2000:]}" for r, a in enumerate(answers)))
    return json.loads(out.read_text()), printed[0]


def _start(rank: int) -> subprocess.Popen[str]:
    # As torchrun does, whose agent keeps the store.
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_RANK": str(rank)}
    env |= {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD)}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, __file__]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _answer(rank: subprocess.Popen[str], end: float) -> str:
    assert rank.stdout is not None
    ready, _, _ = select.select([rank.stdout], [], [], max(0.0, end - time.monotonic()))
    return (rank.stdout.readline().strip() or "ended") if ready else f"no answer in {LIMIT_S:.0f} s"


@atexit.register
def _end() -> None:
    for rank in _ranks:
        rank.kill()
        rank.wait()
    _ranks.clear()


def _serve() -> None:
    """One rank: a run a line, until the lines end."""
    answers = os.fdopen(os.dup(1), "w")
    sys.path[0] = str(BENCH)  # as for a script
    for line in sys.stdin:
        job = json.loads(line)
        os.environ["MASTER_PORT"] = str(job["port"])
        sys.argv = job["arguments"]
        with open(job["log"], "w") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            try:
                runpy.run_path(sys.argv[0], run_name="__main__")
                answer = "done"
            except (Exception, SystemExit):
                traceback.print_exc()
                answer = "failed"
        print(answer, file=answers, flush=True)


if __name__ == "__main__":
    _serve()
