"""Connections to ranks of other machines: no data goes over them, but a process that dies closes its end, which is how the others notice.

Mates are connected by Unix sockets already (engine/host/shared.py). To other machines each rank connects to those of its own rail only, by
TCP: what happens to any other rank is told by a mate of it.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence

from tide_comm.engine.base import Exchange
from tide_comm.errors import TideError

_TOKEN_BYTES = 16
_HELLO = struct.Struct(f"<i{_TOKEN_BYTES}s")
ADDRESS_ENV = "TIDE_ADDRESS"
"""This machine's address for the others, where none of those that are tried by default reaches it."""


def own_addresses() -> list[str]:
    """By which other machines may reach this one, the likeliest first: the one that leads to MASTER_ADDR, then those of the host's name."""
    if asked := os.environ.get(ADDRESS_ENV):
        return [asked]
    found: list[str] = []
    master = os.environ.get("MASTER_ADDR", "")
    try:
        for family, kind, _, _, to in socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM) if master else ():
            with socket.socket(family, kind) as probe:
                probe.connect(to)  # sends nothing: it only chooses the interface
                found.append(probe.getsockname()[0])
    except OSError:
        pass
    try:
        found += [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    except OSError:
        pass
    return list(dict.fromkeys(found)) or ["127.0.0.1"]


def connect_lines(rank: int, peers: Sequence[int], exchange: Exchange, timeout_s: float) -> dict[int, socket.socket]:
    """A connection to each of `peers`, ready to be read without waiting. Collective; if a is b's peer then b is a's.

    Higher ranks connect to lower ones. Who connects must know a secret that went over the process group. Raises `TideError`, on this rank
    alone, with the ranks that did not come.
    """
    token = secrets.token_bytes(_TOKEN_BYTES)
    deadline = time.monotonic() + timeout_s
    connections: dict[int, socket.socket] = {}
    with _listener() as listener:
        offers = exchange((own_addresses(), listener.getsockname()[1], token))
        try:
            for peer in peers:
                if peer < rank:
                    connections[peer] = _connect(offers[peer], rank, peer, deadline)
            while missing := sorted(set(peers) - set(connections)):
                listener.settimeout(max(0.1, deadline - time.monotonic()))
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    raise TideError(f"ranks {missing} did not connect within {timeout_s:g} s; {_advice()}") from None
                greeted = _greeted(connection, token, missing)
                if greeted is not None:
                    connections[greeted] = connection
        except BaseException:
            for connection in connections.values():
                connection.close()
            raise
    for connection in connections.values():
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setblocking(False)
    return connections


def _listener() -> socket.socket:
    try:
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    except (OSError, ValueError):  # no IPv6 here
        return socket.create_server(("", 0))


def _advice() -> str:
    return f"machines must reach each other by TCP ({ADDRESS_ENV} names a machine's address; here it would be {own_addresses()})"


def _connect(offer: tuple[list[str], int, bytes], rank: int, peer: int, deadline: float) -> socket.socket:
    addresses, port, token = offer
    failed = ""
    while time.monotonic() < deadline:
        for address in addresses:
            try:
                connection = socket.create_connection((address, port), min(5.0, max(0.1, deadline - time.monotonic())))
                connection.sendall(_HELLO.pack(rank, token))
                return connection
            except OSError as error:
                failed = f"{address}: {error}"
        time.sleep(0.2)
    raise TideError(f"rank {peer} cannot be reached at {addresses} ({failed}); {_advice()}")


def _greeted(connection: socket.socket, token: bytes, expected: Sequence[int]) -> int | None:
    """Who has connected; None for a stranger, who is sent away."""
    connection.settimeout(5.0)
    try:
        hello = b""
        while len(hello) < _HELLO.size and (more := connection.recv(_HELLO.size - len(hello))):
            hello += more
    except OSError:
        hello = b""
    if len(hello) == _HELLO.size:
        peer, shown = _HELLO.unpack(hello)
        if peer in expected and hmac.compare_digest(shown, token):
            return int(peer)
    connection.close()
    return None
