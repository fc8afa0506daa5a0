"""An arena on GPUs: one allocation a rank, mapped by all; descriptors travel over the same sockets as the host engine's memory."""

from __future__ import annotations

import os

from tide_comm.engine.base import Exchange
from tide_comm.engine.cuda.library import check, load
from tide_comm.engine.host.shared import Connections


class CudaArena(Connections):
    """`addresses[r]` is where rank r's arena starts in this process. The current device must be `device`."""

    def __init__(self, rank: int, device: int, nbytes: int, exchange: Exchange, timeout_s: float) -> None:
        library = load()
        code, self.arena_bytes = library.tide_arena_bytes(device, nbytes)
        check(code, "the arena's size")
        code, address, handle, fd = library.tide_arena_create(device, self.arena_bytes)
        check(code, f"an arena of {self.arena_bytes / 2**20:.0f} MiB")
        self._mapped = [(rank, address, handle)]
        try:
            super().__init__(rank, fd, self.arena_bytes, exchange, timeout_s)
            for peer in range(len(self.fds)):
                if peer != rank:
                    code, address, handle = library.tide_arena_import(device, self.fds[peer], self.arena_bytes)
                    check(code, f"mapping rank {peer}'s arena")
                    self._mapped.append((peer, address, handle))
        finally:
            self.close_fds()
            os.close(fd)
        self.addresses = [at for _, at, _ in sorted(self._mapped)]

    def free(self) -> None:
        """Unmap everything. Nothing on this rank's GPU may touch an arena any more; peers keep what they have mapped."""
        for _, address, handle in self._mapped:
            load().tide_arena_free(address, handle, self.arena_bytes)
        self._mapped = []
