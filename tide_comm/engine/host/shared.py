"""Shared memory and the connections between the ranks of one machine.

Each rank makes one memfd and hands its descriptor to every other over a Unix socket: no name in any file system, nothing left behind
whatever happens. The sockets stay open: a peer that dies closes its end, which is how the others notice.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Collection

from tide_comm.engine.base import Exchange
from tide_comm.errors import TideError

_HELLO = struct.Struct("<iq")
_BYE = b"."
_FAILED = b"!"


class PeerGone(TideError):
    """A peer died, left or failed."""


class Connections:
    """One connection to each other rank, over which a descriptor has come: `fds[r]` is rank r's, until `close_fds`.

    `nbytes`, the size of what the descriptor stands for, must be the same on all ranks. `mates`: the ranks of this machine, if others
    take part that cannot be reached so.
    """

    def __init__(
        self,
        rank: int,
        fd: int,
        nbytes: int,
        exchange: Exchange,
        timeout_s: float,
        mates: Collection[int] | None = None,
    ) -> None:
        self.rank = rank
        self.nbytes = nbytes
        self.sockets: dict[int, socket.socket] = {}
        self.left: set[int] = set()
        self.after_bye: dict[int, bytes] = {}
        """What a peer that has left said besides."""
        self.fds = self._connect(fd, exchange, timeout_s, mates)

    def close_fds(self) -> None:
        """Close the peers' descriptors; what has been mapped stays."""
        for peer, fd in getattr(self, "fds", {}).items():
            if peer != self.rank:
                os.close(fd)
        self.fds = {}

    def _connect(self, fd: int, exchange: Exchange, timeout_s: float, mates: Collection[int] | None) -> dict[int, int]:
        """Everybody's descriptor, by rank. Higher ranks connect to lower ones."""
        name = "\0tide-" + secrets.token_hex(16)
        deadline = time.monotonic() + timeout_s
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(name)
            listener.listen()
            names = exchange(name)
            wanted = sorted({self.rank, *(range(len(names)) if mates is None else mates)})
            fds = {self.rank: fd}
            for peer in (other for other in wanted if other < self.rank):
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                connection.settimeout(max(0.1, deadline - time.monotonic()))
                connection.connect(names[peer])
                self._greet(connection, fd, fds)
            while len(fds) < len(wanted):
                listener.settimeout(max(0.1, deadline - time.monotonic()))
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    missing = sorted(set(wanted) - set(fds))
                    raise TideError(
                        f"ranks {missing} did not connect within {timeout_s:g} s while shared memory was set up; "
                        "are all ranks in one network namespace?"
                    ) from None
                self._greet(connection, fd, fds)
        return fds

    def _greet(self, connection: socket.socket, fd: int, fds: dict[int, int]) -> None:
        socket.send_fds(connection, [_HELLO.pack(self.rank, self.nbytes)], [fd])
        message, received, _, _ = socket.recv_fds(connection, _HELLO.size, 1)
        _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        peer, nbytes = _HELLO.unpack(message)
        if uid != os.getuid() or nbytes != self.nbytes or len(received) != 1:
            raise TideError(
                f"rank {peer} (user {uid}) offers {nbytes} bytes of shared memory; expected {self.nbytes} of this user"
            )
        connection.setblocking(False)
        self.sockets[peer] = connection
        fds[peer] = received[0]

    def check(self) -> None:
        """Raises `PeerGone` if a peer has died or failed."""
        for peer, connection in self.sockets.items():
            if peer in self.left:
                continue
            try:
                message = connection.recv(4096)
            except BlockingIOError:
                continue
            except OSError:
                message = b""
            if not message:
                raise PeerGone(f"rank {peer} has died: its process closed the connection")
            if message[:1] == _FAILED:
                raise PeerGone(f"rank {peer} failed first: {message[1:].decode(errors='replace')}")
            self.left.add(peer)
            self.after_bye[peer] = message[1:]

    def has_left(self) -> list[int]:
        """Peers that closed their engine in order."""
        return sorted(self.left)

    def tell(self, failed: str | None) -> None:
        """Tell all peers that this rank ends: in order, or because of `failed`."""
        message = _BYE if failed is None else _FAILED + failed.encode()[:4000]
        for connection in self.sockets.values():
            try:
                connection.send(message)
            except OSError:
                pass

    def close(self) -> None:
        """Close the connections. What is mapped stays, for tensors may still lie over it."""
        for connection in self.sockets.values():
            connection.close()
        self.sockets.clear()


class Mesh(Connections):
    """Everybody's memory mapped here. `addresses[r]` is where rank r's memory starts."""

    def __init__(self, rank: int, nbytes: int, exchange: Exchange, timeout_s: float) -> None:
        self.maps: list[mmap.mmap] = []
        fd = os.memfd_create("tide", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
            super().__init__(rank, fd, nbytes, exchange, timeout_s)
            self.maps = [mmap.mmap(self.fds[r], nbytes) for r in range(len(self.fds))]
        finally:
            self.close_fds()
            os.close(fd)
        self.addresses = [ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in self.maps]
