"""What a training shows while it runs: times and memory of its steps, or its losses. Both are context managers for `train.run`."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from torchtitan_tide import gpu_profile, parallelize

if TYPE_CHECKING:
    from torchtitan.train import Trainer

GIB = 1024**3
AFTER_TIMED = 2
"""Steps behind the timed ones: the profiled one, and the only one whose loss is read (which waits for the GPU and communicates)."""


QUIET = (
    "--metrics.enable_tensorboard=false",
    "--metrics.enable_wandb=false",
    "--metrics.disable_color_printing=true",
    "--profiling.enable_profiling=false",
    "--checkpoint.enable=false",
    "--validation.enable=false",
)
"""Nothing but training happens in a step."""


def everybody(mine: Any) -> list[Any]:
    """`mine` of every rank of the job, in order. Collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def about() -> dict[str, Any]:
    """Where a training runs: device, ranks, versions."""
    on_gpu = torch.cuda.is_available()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None
    return {
        "device": torch.cuda.get_device_name() if on_gpu else f"CPU, {os.cpu_count()} cores ({platform.machine()})",
        "gpu": on_gpu,
        "ranks": dist.get_world_size(),
        "ranks_a_machine": int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())),
        "torch": torch.__version__,
        "nccl": nccl,
    }


def communication() -> dict[str, Any]:
    """What TIDE's groups ran on: nothing where it is not attached."""
    groups = [group for report in parallelize.reports() for group in report.groups]
    stats = [report.stats() for report in parallelize.reports()]
    return {
        "groups": len(groups),
        "groups_stock": sum(group.comm != "tide" for group in groups),
        "stock_reasons": sorted({group.reason for group in groups if group.comm != "tide"}),
        "collectives_stock": sum(s.get("all_gathers_stock", 0) + s.get("reduce_scatters_stock", 0) for s in stats),
    }


def write(path: Path, record: dict[str, Any]) -> None:
    """Rank 0's file, there as a whole or not at all."""
    if dist.get_rank() == 0:
        half = path.with_suffix(".part")
        half.write_text(json.dumps(record))
        half.replace(path)


class Memory:
    """The peak of a rank's memory from `start` on, in bytes."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu

    def start(self) -> None:
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory starts anew
        except OSError:
            pass  # then it is that of the whole process, the model's making included

    def peak_bytes(self, arena_bytes: int) -> int:
        """GPU: PyTorch's allocator and TIDE's arena beside it. CPU: resident memory, which the touched part of the arena belongs to."""
        if self.on_gpu:
            return torch.cuda.max_memory_allocated() + arena_bytes
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise OSError("/proc/self/status: has no line VmHWM; expected on Linux")

    def device_bytes(self) -> int | None:
        """All that is taken of the GPU, by whomever: contexts, NCCL's buffers and what PyTorch's allocator keeps for later included."""
        if not self.on_gpu:
            return None
        free, total = torch.cuda.mem_get_info()
        return total - free


class StepRecorder:
    """Times `steps` steps after `warmup`, then profiles one (on GPUs), then has one logged, whose loss must be finite.

    The job takes `job_steps` steps and logs its last one only (`overrides`).
    """

    def __init__(self, path: Path, warmup: int, steps: int) -> None:
        self.path, self.warmup, self.steps = path, warmup, steps
        self._marks: list[Any] = []
        self._clock: list[float] = []
        self._profile: dict[str, float] | None = None
        self._peak_bytes = self._arena_bytes = 0
        self._device_bytes: int | None = None
        self._loss = math.nan
        self._calls = 0

    @property
    def job_steps(self) -> int:
        return self.warmup + self.steps + AFTER_TIMED

    def overrides(self) -> list[str]:
        """What the job must be told."""
        return [f"--training.steps={self.job_steps}", f"--metrics.log_freq={self.job_steps}", *QUIET]

    @contextmanager
    def __call__(self, trainer: Trainer) -> Iterator[None]:
        self.gpu = torch.cuda.is_available()
        self.memory = Memory(self.gpu)
        step, log = trainer.train_step, trainer.metrics_processor.log

        def measured(data: Any) -> None:
            self._step(lambda: step(data), trainer)

        def noted(number: int, loss: float, *rest: Any, **more: Any) -> None:
            self._loss = float(loss)
            log(number, loss, *rest, **more)

        trainer.train_step = measured  # type: ignore[method-assign,assignment]
        trainer.metrics_processor.log = noted  # type: ignore[method-assign,assignment]
        yield
        self._finish()

    def _step(self, step: Any, trainer: Trainer) -> None:
        self._calls += 1
        after = self._calls - self.warmup - self.steps
        if self._calls == self.warmup + 1:
            self._together()
            self.memory.start()
            self._mark()
        if after == 1:
            self._together()
            self._arena_bytes = sum(sum(report.memory.values()) for report in parallelize.reports())
            self._peak_bytes = self.memory.peak_bytes(self._arena_bytes)
            self._device_bytes = self.memory.device_bytes()
            if self.gpu:
                self._profile = gpu_profile.profiled(step, trainer.device)
                return
        step()
        if self._calls > self.warmup and after <= 0:
            self._mark()

    def _together(self) -> None:
        """All ranks here, nothing under way on any GPU."""
        if self.gpu:
            torch.cuda.synchronize()
        everybody(None)
        if self.gpu:
            torch.cuda.synchronize()

    def _mark(self) -> None:
        self._clock.append(time.perf_counter())
        if self.gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)

    def _finish(self) -> None:
        if self._calls != self.job_steps:
            raise RuntimeError(f"{self._calls} steps were trained, {self.job_steps} expected: is the data too short?")
        host = [(b - a) * 1e3 for a, b in zip(self._clock, self._clock[1:], strict=False)]
        if self.gpu:
            torch.cuda.synchronize()
            times = [a.elapsed_time(b) for a, b in zip(self._marks, self._marks[1:], strict=False)]
        else:
            times = host
        ranks = everybody((times, host, self._peak_bytes, self._arena_bytes, self._device_bytes, self._loss))
        # The slowest rank counts: a step ends for the job when it has ended for all.
        slowest = [max(each) for each in zip(*(rank[0] for rank in ranks), strict=True)]
        devices = [rank[4] for rank in ranks if rank[4] is not None]
        loss = max(rank[5] for rank in ranks)  # of pipeline stages only the last has one, the others -1
        if not math.isfinite(loss):
            raise RuntimeError(f"the loss of step {self.job_steps} is {loss}: what was timed is no training")
        record = {
            "kind": "steps",
            "steps_ms": slowest,
            "step_ms": statistics.median(slowest),
            "host_ms": statistics.median(max(each) for each in zip(*(rank[1] for rank in ranks), strict=True)),
            "peak_gib": max(rank[2] for rank in ranks) / GIB,
            "arena_gib": max(rank[3] for rank in ranks) / GIB,
            "device_gib": max(devices) / GIB if devices else None,
            "loss": loss,
            "profile": self._profile,
            **communication(),
            "about": about(),
        }
        write(self.path, record)


class LossRecorder:
    """The loss and the gradient norm of every step, with all their bits.

    `nudge`: 0, or the number of a disturbance: before the first step every weight is moved to a neighbouring number of its dtype, up or
    down by chance. It is as small as a change can be, like another order of fp32 sums.
    """

    def __init__(self, path: Path, steps: int, nudge: int = 0) -> None:
        self.path, self.steps, self.nudge = path, steps, nudge
        self._losses: list[float] = []
        self._norms: list[float] = []

    def overrides(self) -> list[str]:
        """What the job must be told: its length, and a loss in every step."""
        return [f"--training.steps={self.steps}", "--metrics.log_freq=1", *QUIET]

    @contextmanager
    def __call__(self, trainer: Trainer) -> Iterator[None]:
        log = trainer.metrics_processor.log

        def noted(number: int, loss: float, max_loss: float, norm: float, *rest: Any, **more: Any) -> None:
            self._losses.append(float(loss))
            self._norms.append(float(norm))
            log(number, loss, max_loss, norm, *rest, **more)

        trainer.metrics_processor.log = noted  # type: ignore[method-assign,assignment]
        if self.nudge:
            for part in trainer.model_parts:
                nudge_weights(part, self.nudge + 1000 * dist.get_rank())
        began = time.monotonic()
        yield
        ranks = everybody((self._losses, self._norms))
        # Pipeline stages without a loss log -1.
        losses, norms = next((r for r in reversed(ranks) if r[0] and min(r[0]) != -1.0), ranks[0])
        if len(losses) != self.steps:
            raise RuntimeError(f"{len(losses)} losses were logged, {self.steps} expected: is the data too short?")
        record = {"kind": "losses", "losses": losses, "norms": norms, "seconds": time.monotonic() - began}
        write(self.path, {**record, **communication(), "about": about()})


def nudge_weights(module: torch.nn.Module, seed: int) -> None:
    """Move every weight of `module` (this rank's shards) to the next number of its dtype, up or down by chance."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            mine = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            up = torch.randint(0, 2, mine.shape, generator=draw).to(mine.device, torch.bool)
            far = torch.tensor(math.inf, dtype=mine.dtype, device=mine.device)
            mine.copy_(torch.nextafter(mine, torch.where(up, far, -far)))
