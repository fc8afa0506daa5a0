"""A GPU's clocks, power and reasons for a lower clock over time, as nvidia-smi reads them in a process of its own.

nvidia-smi writes a line every `EVERY_MS`, a thread keeps the lines; all else comes after what is timed. No PyTorch in here.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

EVERY_MS = 20
START_S = 10.0
"""Longest wait for a first sample: without persistence mode nvidia-smi loads the driver first."""
END_S = 2.0
"""Longest wait for a sample from after an interval; a pipe may hold lines back."""
FIELDS = ("timestamp", "clocks.sm", "clocks.mem", "power.draw.instant", "clocks_event_reasons.active")
OLDER_FIELDS = ("timestamp", "clocks.sm", "clocks.mem", "power.draw", "clocks_throttle_reasons.active")
"""As older drivers name them; this power is a mean over a second on some GPUs."""
POWER_CAP = 0x4
"""Bit of the reasons: the driver's power limit holds the clock down."""
OTHERWISE = 0x8 | 0x20 | 0x40 | 0x80
"""Hardware slowdown, temperature in software, in hardware, the power brake."""

_RUN = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
"""Becomes a program that the kernel ends together with this process (PR_SET_PDEATHSIG, SIGKILL), however this one ends: torchrun stops
ranks by a signal, and `leave` may skip what runs at exit."""


@dataclass(frozen=True)
class Sample:
    """One line. `at`: seconds since the epoch; MHz, MHz, W, bits. None: this GPU or driver does not say."""

    at: float
    sm_mhz: float | None
    mem_mhz: float | None
    power_w: float | None
    reasons: int | None


def sample_of(line: bytes) -> Sample | None:
    """None for what is no whole line of figures, such as a warning."""
    cells = [cell.strip() for cell in line.decode(errors="replace").split(",")]
    if len(cells) != len(FIELDS) or not line.endswith(b"\n"):
        return None
    try:
        # In local time, as the process inherits this one's zone.
        at = datetime.datetime.strptime(cells[0], "%Y/%m/%d %H:%M:%S.%f").timestamp()
    except ValueError:
        return None
    sm, mem, power = (_number(cell, float) for cell in cells[1:4])
    reasons = _number(cells[4], lambda text: int(text, 16))
    return Sample(at, sm, mem, power, None if reasons is None else int(reasons))


def _number(text: str, read: Callable[[str], float]) -> float | None:
    """None for [N/A], [Not Supported], [Unknown Error] and the like."""
    try:
        return read(text)
    except ValueError:
        return None


class Clocks:
    """Reads one GPU from here on, until `close` or the end of Python. `gpu`: index, UUID or bus address as nvidia-smi takes it, or "".

    Never raises where it cannot be read: then `reason` says why, on one line, and there are no figures."""

    def __init__(self, gpu: str) -> None:
        self.fields: tuple[str, ...] = ()
        """What is asked for; empty if nothing is read."""
        self.reason = ""
        self._child: subprocess.Popen[bytes] | None = None
        self._lines: list[bytes] = []
        self._parsed = 0
        self._samples: list[Sample] = []
        self._thread = threading.Thread()
        if not gpu:
            self.reason = "no GPU"
            return
        for fields in (FIELDS, OLDER_FIELDS):
            self.reason = self._start(gpu, fields)
            if not self.reason:
                self.fields = fields
                return

    def _start(self, gpu: str, fields: Sequence[str]) -> str:
        """Why there was no first sample, or ""."""
        smi = shutil.which("nvidia-smi")
        if smi is None:
            return "nvidia-smi is not on PATH"
        command = [sys.executable, "-IS", "-c", _RUN, smi, "-i", gpu, f"--query-gpu={','.join(fields)}"]
        command += ["--format=csv,noheader,nounits", "-lms", str(EVERY_MS)]
        try:
            # A group of its own, so that `close` also ends what a wrapper script started.
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return f"nvidia-smi does not start: {error.strerror}"
        self._child, self._lines, self._parsed = child, [], 0
        atexit.register(self.close)
        self._thread = threading.Thread(target=_keep, args=(child, self._lines), daemon=True)
        self._thread.start()
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            ended = not self._thread.is_alive()
            if self.samples():
                return ""
            if ended:
                break
            time.sleep(0.005)
        said = [line.strip() for line in self._lines if line.strip()]
        self.close()
        return "nvidia-smi: " + (said[-1].decode(errors="replace")[:200] if said else f"no sample in {START_S:.0f} s")

    def samples(self) -> list[Sample]:
        """All so far, oldest first."""
        new = self._lines[self._parsed :]
        self._parsed += len(new)
        self._samples += filter(None, map(sample_of, new))
        return self._samples

    def over(self, intervals: Sequence[tuple[float, float]]) -> dict[str, float]:
        """Of the samples in any of these intervals (seconds since the epoch, oldest first): medians `sm_mhz`, `mem_mhz` and `power_w`;
        `power_capped` and `otherwise_slowed`, shares of samples with `POWER_CAP` or any bit of `OTHERWISE`; `samples`, how many. What
        nvidia-smi does not say is missing; empty without samples."""
        if not intervals or not self.fields:
            return {}
        end = time.monotonic() + END_S
        while not any(s.at > intervals[-1][1] for s in self.samples()[-1:]):
            if time.monotonic() > end or not self._thread.is_alive():
                break
            time.sleep(0.005)
        inside = [s for s in self.samples() if any(start <= s.at <= stop for start, stop in intervals)]
        if not inside:
            return {}
        found = {"samples": float(len(inside))}
        for name in ("sm_mhz", "mem_mhz", "power_w"):
            if figures := [f for s in inside if (f := getattr(s, name)) is not None]:
                found[name] = statistics.median(figures)
        if masks := [s.reasons for s in inside if s.reasons is not None]:
            found["power_capped"] = _share(mask & POWER_CAP for mask in masks)
            found["otherwise_slowed"] = _share(mask & OTHERWISE for mask in masks)
        return found

    def close(self) -> None:
        """End the process; again is nothing. What was read stays. Waits for no more than 2 s."""
        child, self._child = self._child, None
        if child is None:
            return
        atexit.unregister(self.close)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # it has nothing to put in order, and may not listen to anything else
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=1)  # longer if the driver hangs
        self._thread.join(timeout=1)


def _keep(child: subprocess.Popen[bytes], lines: list[bytes]) -> None:
    assert child.stdout is not None
    with child.stdout:
        for line in child.stdout:
            lines.append(line)


def _share(bits: Iterable[int]) -> float:
    return statistics.fmean(bool(b) for b in bits)


class RanksClocks:
    """Each rank's GPU, read by that rank until `close`; none if one of them cannot be. `exchange`: everybody's value in rank order.
    Collective, but for `close`."""

    def __init__(self, gpu: str, exchange: Callable[[Any], list[Any]]) -> None:
        self._exchange, self._mine = exchange, Clocks(gpu)
        reasons = exchange(self._mine.reason)
        self.what = f"{', '.join(self._mine.fields[1:])} every {EVERY_MS} ms"
        """What is read, or why nothing is."""
        if any(reasons):
            self.what = next(f"left out: rank {rank}: {text}" for rank, text in enumerate(reasons) if text)
            self.close()
        self.reads = not any(reasons)

    def over(self, intervals: Sequence[tuple[float, float]]) -> dict[str, Any]:
        """`Clocks.over` of each rank as `clocks`, and what `worst` makes of them. Empty if nothing is read."""
        if not self.reads:
            return {}
        everybody = self._exchange(self._mine.over(intervals))
        return worst(everybody) | {"clocks": everybody}

    def close(self) -> None:
        self._mine.close()


def worst(everybody: Sequence[dict[str, float]]) -> dict[str, float]:
    """The lowest clocks and the highest power and shares of any GPU; only figures that all of them have."""
    ways: dict[str, Any] = {"sm_mhz": min, "mem_mhz": min, "power_w": max, "power_capped": max, "otherwise_slowed": max}
    return {k: of(found[k] for found in everybody) for k, of in ways.items() if all(k in found for found in everybody)}
