"""Trains several small jobs, one after another, each over forked ranks: TorchTitan is imported once and not once a rank and job.

`python -m tests.titan.jobs IN.json OUT.json`. IN: a list of {"ranks": 2, "config": "x.toml", "overrides": [...], "reference": bool,
"seen_by": rank}. OUT: for each what that rank saw: {"losses": [...], "norms": [...], "report": rows of (group, comm, reason),
"validation": [...], "arenas": number}, or {"error": "..."}. Numbers have all their bits. `reference`: FSDP2's own reduce-scatter is
replaced by one that sums in the order that TIDE promises; gloo adds in another.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

JOB_LIMIT_S = 240.0


def main(source: str, target: str) -> None:
    """Run all jobs of `source` and write what they saw to `target`."""
    from torchtitan_tide import cpu, specs

    cpu.prepare()
    import torch

    torch.set_num_threads(1)
    import torchtitan.train

    from tests.seam import harness  # noqa: F401

    # Rank 0 sleeps two seconds at the end of a training.
    torchtitan.train.time = SimpleNamespace(sleep=lambda seconds: None, perf_counter=time.perf_counter)  # type: ignore[assignment]

    specs.register()
    gc.freeze()  # TorchTitan collects at the start of a training: each rank would look through all that has been imported
    results = []
    for job in json.loads(Path(source).read_text()):
        began = time.monotonic()
        results.append(run(job, Path(target).parent))
        results[-1]["seconds"] = round(time.monotonic() - began, 1)
        Path(target).write_text(json.dumps(results))


def run(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One job over `ranks` forked processes. All of them are ended when one fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    seen = folder / "seen.json"
    seen.unlink(missing_ok=True)
    pids = {}
    for rank in range(job["ranks"]):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _rank(job, rank, port, folder, seen)
        pids[pid] = rank
    failed = _wait(pids, time.monotonic() + JOB_LIMIT_S)
    if failed or not seen.exists():
        logs = [(folder / f"rank{rank}.log").read_text()[-6000:] for rank in failed[:1] if rank >= 0]
        return {"error": f"ranks {failed} failed\n" + "\n".join(logs)}
    return json.loads(seen.read_text())


def _wait(pids: dict[int, int], deadline: float) -> list[int]:
    """Ranks that failed, first ones first; -1 for a job that was too slow."""
    failed: list[int] = []
    left = dict(pids)
    while left:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in left:
            rank = left.pop(pid)
            if status:
                failed.append(rank)
                deadline = min(deadline, time.monotonic() + 5)
        elif time.monotonic() > deadline:
            failed.append(-1)
            for other in left:
                os.kill(other, signal.SIGKILL)
                os.waitpid(other, 0)
            break
        else:
            time.sleep(0.05)
    return failed


def _rank(job: dict[str, Any], rank: int, port: int, folder: Path, seen: Path) -> None:
    """Never returns."""
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(job["ranks"]),
        LOCAL_WORLD_SIZE=str(job["ranks"]),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    os.chdir(folder)
    code = 1
    try:
        noted = _watch(job)
        from torchtitan_tide import train

        sys.argv = ["train", f"--job.config_file={job['config']}", "--metrics.log_freq=1", *job["overrides"]]
        code = train.main()
        if rank == job.get("seen_by", 0) and code == 0:
            seen.write_text(json.dumps(noted))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _watch(job: dict[str, Any]) -> dict[str, Any]:
    """What this rank's training will have shown: filled in as it goes."""
    from torchtitan.components.metrics import MetricsProcessor

    from tests.seam.harness import sum_by_reference
    from torchtitan_tide import parallelize

    noted: dict[str, Any] = {"losses": [], "norms": [], "validation": [], "report": [], "arenas": 0}
    log, log_validation = MetricsProcessor.log, MetricsProcessor.log_validation

    def note(self: Any, step: int, loss: float, max_loss: float, norm: float, *rest: Any, **more: Any) -> None:
        noted["losses"].append(float(loss))
        noted["norms"].append(float(norm))
        log(self, step, loss, max_loss, norm, *rest, **more)

    def note_validation(self: Any, loss: float, step: int) -> None:
        noted["validation"].append(float(loss))
        log_validation(self, loss, step)

    MetricsProcessor.log, MetricsProcessor.log_validation = note, note_validation  # type: ignore[method-assign]
    choose = parallelize.choose_communication

    def chosen(parts: Any, cfg: Any) -> None:
        choose(parts, cfg)
        for report in parallelize.reports():
            noted["report"] = [(g.name, g.comm, g.reason) for g in report.groups]
            noted["arenas"] = len(report.attachment.domains)
        if job.get("reference"):
            for part in parts:
                sum_by_reference(part)

    parallelize.choose_communication = chosen
    return noted


if __name__ == "__main__":
    main(*sys.argv[1:])
