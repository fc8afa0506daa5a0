"""Two ways to make memory on a GPU that other processes map. Both work on the current device and raise `TideError`."""

from __future__ import annotations

import ctypes
import os

from tide_comm.engine.base import AREA_ALIGN_BYTES
from tide_comm.engine.cuda.library import check, load
from tide_comm.plan.layout import align

HANDLE_BYTES = 64
"""sizeof(cudaIpcMemHandle_t)."""


class VmmMemory:
    """cuMemCreate, shared by POSIX file descriptor. Whoever maps it holds it: it may be freed in any order."""

    how = "cuMemCreate"

    def __init__(self, device: int) -> None:
        self.device = device
        self.own: tuple[int, int] | None = None
        """Address and handle."""
        self.fd = -1
        """Made by `create`; `close_fd` closes it once the peers have it."""
        self.opened: list[tuple[int, int]] = []
        self.nbytes = 0

    def create(self, nbytes: int) -> int:
        """Zeroed memory of at least `nbytes` (`self.nbytes`: how much); returns its address."""
        library = load()
        rounded = ctypes.c_uint64()
        check(library.tide_arena_bytes(self.device, nbytes, ctypes.byref(rounded)), "the arena's size")
        self.nbytes = rounded.value
        address, handle, fd = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_int(-1)
        code = library.tide_arena_create(
            self.device, self.nbytes, ctypes.byref(address), ctypes.byref(handle), ctypes.byref(fd)
        )
        check(code, f"an arena of {self.nbytes / 2**20:.0f} MiB")
        self.own, self.fd = (address.value, handle.value), fd.value
        return address.value

    def open(self, fd: int) -> int:
        """Map a peer's memory of the same size; returns the address. The descriptor stays the caller's."""
        address, handle = ctypes.c_uint64(), ctypes.c_uint64()
        code = load().tide_arena_import(self.device, fd, self.nbytes, ctypes.byref(address), ctypes.byref(handle))
        check(code, "mapping it")
        self.opened.append((address.value, handle.value))
        return address.value

    def close_fd(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def close_opened(self) -> None:
        for address, handle in self.opened:
            check(load().tide_arena_free(address, handle, self.nbytes), "unmapping a peer's arena")
        self.opened = []

    def free(self) -> None:
        self.close_fd()
        if self.own is not None:
            check(load().tide_arena_free(*self.own, self.nbytes), "freeing the arena")
        self.own = None


class IpcMemory:
    """cudaMalloc, shared by CUDA IPC handle. May be freed only when no peer has it open any more."""

    how = "CUDA IPC"

    def __init__(self) -> None:
        self.own = 0
        self.opened: list[int] = []
        self.nbytes = 0

    def create(self, nbytes: int) -> tuple[int, bytes]:
        """Zeroed memory of `nbytes` rounded up to 2 MiB; returns its address and what peers open it by."""
        self.nbytes = align(nbytes, AREA_ALIGN_BYTES)
        address, handle = ctypes.c_uint64(), ctypes.create_string_buffer(HANDLE_BYTES)
        code = load().tide_ipc_create(self.nbytes, ctypes.byref(address), handle)
        check(code, f"an arena of {self.nbytes / 2**20:.0f} MiB")
        self.own = address.value
        return self.own, handle.raw

    def open(self, handle: bytes) -> int:
        """Map a peer's memory; returns the address."""
        address = ctypes.c_uint64()
        code = load().tide_ipc_open(ctypes.create_string_buffer(handle, HANDLE_BYTES), ctypes.byref(address))
        check(code, "mapping it")
        self.opened.append(address.value)
        return address.value

    def close_opened(self) -> None:
        for address in self.opened:
            check(load().tide_ipc_close(address), "unmapping a peer's arena")
        self.opened = []

    def free(self) -> None:
        if self.own:
            check(load().tide_ipc_free(self.own), "freeing the arena")
        self.own = 0
