"""Signal words in shared memory: raise one, wait for one. Waits spin briefly, then sleep in the kernel (futex) or poll."""

from __future__ import annotations

import ctypes
import os
import platform
import time
from collections.abc import Callable

_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_libc = ctypes.CDLL(None, use_errno=True)
_SPINS = 50
_SLICE_S = 0.05
_POLL_S = 0.0002


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_SLICE = _Timespec(0, int(_SLICE_S * 1e9))


def at_least(value: int, target: int) -> bool:
    """value >= target on a counter of 32 bits that wraps around, as cuStreamWaitValue32's GEQ compares."""
    return ((value - target) & 0xFFFFFFFF) < 0x80000000


class SharedWord:
    """One 32-bit counter at an address of shared memory."""

    __slots__ = ("address", "cell")

    def __init__(self, address: int) -> None:
        self.address = address
        self.cell = ctypes.c_uint32.from_address(address)

    @property
    def value(self) -> int:
        return self.cell.value

    def set(self, value: int) -> None:
        """Publish a value (its only writer does) and wake who sleeps on it."""
        self.cell.value = value & 0xFFFFFFFF
        if _SYS_FUTEX is not None:
            _libc.syscall(_SYS_FUTEX, ctypes.c_void_p(self.address), _FUTEX_WAKE, 1 << 30, None, None, 0)

    def wait(self, target: int, timeout_s: float, between: Callable[[], None]) -> bool:
        """Wait until the counter has reached `target`; False when time is up. `between` is called now and then and may raise."""
        for _ in range(_SPINS):
            if at_least(self.cell.value, target):
                return True
            os.sched_yield()
        deadline = time.monotonic() + timeout_s
        while True:
            value = self.cell.value
            if at_least(value, target):
                return True
            if time.monotonic() > deadline:
                return False
            if _SYS_FUTEX is None:
                time.sleep(_POLL_S)
            else:
                _libc.syscall(
                    _SYS_FUTEX, ctypes.c_void_p(self.address), _FUTEX_WAIT, value, ctypes.byref(_SLICE), None, 0
                )
            between()
