"""TIDE's part of TorchTitan's metrics: the log line, TensorBoard and wandb scalars, and the summary at the end.

A TrainSpec's `build_metrics_processor_fn` is where TorchTitan takes another `MetricsProcessor`. All figures are this rank's, as
TorchTitan's own memory is: no collective is made for them.
"""

from __future__ import annotations

import logging
import netrc
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlparse

from torchtitan.components.metrics import MetricsProcessor, build_metrics_processor
from torchtitan.tools.logging import logger

from tide_comm.engine.timing import Timings
from tide_comm.fsdp.report import Report
from torchtitan_tide import parallelize

MIB = 1024 * 1024


def size_text(nbytes: float) -> str:
    """MiB below one GiB, else GiB."""
    return f"{nbytes / MIB:.1f} MiB" if nbytes < 1024 * MIB else f"{nbytes / MIB / 1024:.2f} GiB"


class Tally:
    """Differences of what reports count, from one log line to the next, and totals for the end. Nothing where there is no report."""

    def __init__(self, reports: Callable[[], list[Report]]) -> None:
        self._reports = reports
        self._counted: Counter[str] = Counter()
        self._steps = self._timed_steps = 0
        self._timings = Timings()
        self._timing = False
        self.total_steps = self.total_timed_steps = 0
        self.total_communication_s = self.total_waited_s = 0.0

    def time_next(self, logged: bool = True) -> None:
        """Time the next step: each one where that is free, else (CUDA engine) the one that will be logged."""
        reports = self._reports()
        self._timing = bool(reports) and (logged or not any(report.samples for report in reports))
        for report in reports:
            report.time_launches(self._timing)

    def step_ended(self, next_is_logged: bool) -> None:
        """To be called once a step; nothing is read here, because the GPU may be far behind."""
        self._steps += 1
        self._timed_steps += self._timing
        self.time_next(next_is_logged)

    def interval(self) -> dict[str, float]:
        """Scalars since the last call of this, averages a step where the name says so; times only if a step was timed."""
        reports = self._reports()
        if not reports or not self._steps:
            return {}
        counted: Counter[str] = Counter()
        for report in reports:
            counted.update(report.stats())
        since = {key: counted[key] - self._counted[key] for key in counted}
        groups = [group for report in reports for group in report.groups]
        scalars: dict[str, float] = {
            "tide/bytes_gathered_per_step": since.get("bytes_gathered", 0) / self._steps,
            "tide/bytes_reduced_per_step": since.get("bytes_reduced", 0) / self._steps,
            "tide/collectives_stock": since.get("all_gathers_stock", 0) + since.get("reduce_scatters_stock", 0),
            "tide/groups_stock": sum(group.comm != "tide" for group in groups),
        }
        timed_steps = self._timed_steps
        if timed_steps:
            communication_s, waited_s = self._take_times()
            scalars["tide/time_in_communication_ms"] = communication_s * 1e3 / timed_steps
            scalars["tide/exposed_wait_ms"] = waited_s * 1e3 / timed_steps
        for report in reports:
            for area, nbytes in report.memory.items():
                scalars[f"tide/memory_mib/{area}"] = scalars.get(f"tide/memory_mib/{area}", 0) + nbytes / MIB
        self._counted = counted
        self.total_steps += self._steps
        self._steps = 0
        return scalars

    def _take_times(self) -> tuple[float, float]:
        for report in self._reports():
            self._timings.add(report.timings())
        communication_s, waited_s = self._timings.communication_s, self._timings.waited_s
        self.total_timed_steps += self._timed_steps
        self.total_communication_s += communication_s
        self.total_waited_s += waited_s
        self._timed_steps, self._timings = 0, Timings()
        return communication_s, waited_s

    def measured_lines(self) -> list[str]:
        """For the summary: averages a step over the whole run."""
        self.interval()
        if not self.total_steps:
            return []
        gathered, reduced = (self._counted[key] / self.total_steps for key in ("bytes_gathered", "bytes_reduced"))
        line = f"a step, average of {self.total_steps}: {size_text(gathered)} gathered, {size_text(reduced)} reduced"
        if steps := self.total_timed_steps:
            line += (
                f", {self.total_communication_s * 1e3 / steps:.1f} ms in communication, "
                f"{self.total_waited_s * 1e3 / steps:.1f} ms waited (this rank, {steps} steps timed)"
            )
        return [line]


def line_of(scalars: dict[str, float]) -> str:
    """What TorchTitan's log line ends in."""
    sizes = (size_text(scalars[f"tide/bytes_{what}_per_step"]) + f" {what}" for what in ("gathered", "reduced"))
    groups, collectives = int(scalars["tide/groups_stock"]), int(scalars["tide/collectives_stock"])
    stock = f"stock: {groups} groups, {collectives} collectives" if groups or collectives else "0 stock"
    parts = [*sizes, stock]
    if "tide/exposed_wait_ms" in scalars:
        parts.append(f"{scalars['tide/time_in_communication_ms']:.1f} ms in communication")
        parts.append(f"{scalars['tide/exposed_wait_ms']:.1f} ms waited")
    return "tide: " + ", ".join(parts)


@contextmanager
def longer_line(text: str) -> Iterator[None]:
    """Lets the log line that TorchTitan writes inside end in `text`: it takes no more fields."""

    def lengthen(record: logging.LogRecord) -> bool:
        if "loss:" in record.getMessage():
            record.msg, record.args = f"{record.getMessage()}  {text}", None
        return True

    logger.addFilter(lengthen)
    try:
        yield
    finally:
        logger.removeFilter(lengthen)


class TideMetricsProcessor(MetricsProcessor):
    """TorchTitan's, with TIDE's scalars in every log."""

    def __init__(self, job_config: Any, parallel_dims: Any, tag: str | None = None) -> None:
        super().__init__(job_config, parallel_dims, tag)
        self.tally = Tally(parallelize.reports)
        self._last_step = -1

    def should_log(self, step: int) -> bool:
        # TorchTitan asks once at the end of every step, whether it logs or not.
        if step != self._last_step:
            self._last_step = step
            self.tally.step_ended(super().should_log(step + 1))
        return super().should_log(step)

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        scalars = self.tally.interval()
        with longer_line(line_of(scalars) if scalars else ""):
            super().log(step, global_avg_loss, global_max_loss, grad_norm, {**(extra_metrics or {}), **scalars})


def build(job_config: Any, parallel_dims: Any, model_args: Any = None, tag: str | None = None) -> MetricsProcessor:
    """A TrainSpec's `build_metrics_processor_fn`: TIDE's processor for `tide.comm = "tide"`, TorchTitan's own for all else."""
    if job_config.metrics.enable_wandb:
        choose_wandb_mode()
    if job_config.tide.comm != "tide":
        return build_metrics_processor(job_config, parallel_dims, model_args, tag)
    return TideMetricsProcessor(job_config, parallel_dims, tag)


def start(processor: MetricsProcessor) -> None:
    """To be called when the model is there and before the first step, which is then timed too."""
    if isinstance(processor, TideMetricsProcessor):
        processor.tally.time_next()


def summary_lines(processor: MetricsProcessor) -> list[str]:
    """For the end of a training; none without TIDE."""
    measured = processor.tally.measured_lines() if isinstance(processor, TideMetricsProcessor) else []
    return [line for report in parallelize.reports() for line in report.summary_lines(measured)]


# wandb


def has_wandb_account() -> bool:
    """Whether wandb would find a key: in the environment, or where `wandb login` leaves it."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    files = [os.environ["NETRC"]] if "NETRC" in os.environ else ["~/.netrc", "~/_netrc"]
    for file in files:
        try:
            if netrc.netrc(os.path.expanduser(file)).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def choose_wandb_mode() -> None:
    """Offline where there is no account and nothing else was asked for: wandb would ask for a key at the terminal, and fail without one."""
    if os.environ.get("WANDB_MODE") or has_wandb_account():
        return
    os.environ["WANDB_MODE"] = "offline"
    logger.info(
        "wandb: no account found (WANDB_API_KEY or `wandb login`), so this run is kept offline, in job.dump_folder; "
        "`wandb sync` uploads it later"
    )
