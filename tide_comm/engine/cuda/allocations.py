"""Two ways to make memory on a GPU that other processes map. Both work on the current device and raise `TideError`."""

from __future__ import annotations

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
        code, rounded = library.tide_arena_bytes(self.device, nbytes)
        check(code, "the arena's size")
        self.nbytes = rounded
        code, address, handle, fd = library.tide_arena_create(self.device, self.nbytes)
        check(code, f"an arena of {self.nbytes / 2**20:.0f} MiB")
        self.own, self.fd = (address, handle), fd
        return int(address)

    def open(self, fd: int) -> int:
        """Map a peer's memory of the same size; returns the address. The descriptor stays the caller's."""
        code, address, handle = load().tide_arena_import(self.device, fd, self.nbytes)
        check(code, "mapping it")
        self.opened.append((address, handle))
        return int(address)

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
        handle = bytearray(HANDLE_BYTES)
        code, address = load().tide_ipc_create(self.nbytes, handle)
        check(code, f"an arena of {self.nbytes / 2**20:.0f} MiB")
        self.own = address
        return self.own, bytes(handle)

    def open(self, handle: bytes) -> int:
        """Map a peer's memory; returns the address."""
        assert len(handle) == HANDLE_BYTES
        code, address = load().tide_ipc_open(handle)
        check(code, "mapping it")
        self.opened.append(address)
        return int(address)

    def close_opened(self) -> None:
        for address in self.opened:
            check(load().tide_ipc_close(address), "unmapping a peer's arena")
        self.opened = []

    def free(self) -> None:
        if self.own:
            check(load().tide_ipc_free(self.own), "freeing the arena")
        self.own = 0
