"""Connections to other machines: who may connect, what is said where somebody does not come."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
from ranks import in_threads

from tide_comm.engine.cuda import lines
from tide_comm.engine.cuda.lines import ADDRESS_ENV, connect_lines, own_addresses


def run(world: int, peers: dict[int, list[int]], timeout_s: float = 20.0) -> list[Any]:
    return in_threads(world, lambda rank, exchange: connect_lines(rank, peers.get(rank, []), exchange, timeout_s))


def test_each_rail_is_connected_and_nobody_else() -> None:
    """Three machines of two lanes."""
    rails = {rank: [p for p in range(6) if p % 2 == rank % 2 and p != rank] for rank in range(6)}
    found = run(6, rails)
    assert [sorted(connections) for connections in found] == [rails[rank] for rank in range(6)]
    for rank, connections in enumerate(found):
        for peer, connection in connections.items():
            connection.send(f"{rank}>{peer}".encode())
    for rank, connections in enumerate(found):
        for peer, connection in connections.items():
            connection.settimeout(5)
            assert connection.recv(100) == f"{peer}>{rank}".encode()
            connection.close()


def test_a_stranger_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[bytes] = []

    def intrude(offer: tuple[list[str], int, bytes], rank: int, peer: int, deadline: float) -> socket.socket:
        for hello in (b"", lines._HELLO.pack(rank, b"x" * 16), b"GET / HTTP/1.1\r\n\r\nmore than a greeting"):
            with socket.create_connection((offer[0][0], offer[1]), 5) as stranger:
                stranger.settimeout(10)
                try:
                    stranger.sendall(hello)
                    stranger.shutdown(socket.SHUT_WR)
                    said.append(stranger.recv(10))
                except OSError:  # sent away before it had finished
                    said.append(b"")
        return connect(offer, rank, peer, deadline)

    connect = lines._connect
    monkeypatch.setattr(lines, "_connect", intrude)
    found = run(2, {0: [1], 1: [0]})
    assert said == [b""] * 3 and sorted(found[0]) == [1] and sorted(found[1]) == [0]


def test_who_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESS_ENV, "127.0.0.1")
    began = time.monotonic()
    found = run(2, {0: [1]}, timeout_s=1.0)
    assert "ranks [1] did not connect within 1 s" in str(found[0]) and "127.0.0.1" in str(found[0])
    assert ADDRESS_ENV in str(found[0]) and time.monotonic() - began < 20


def test_what_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESS_ENV, "no.such.host.invalid")
    found = run(2, {1: [0]}, timeout_s=1.0)
    assert "rank 0 cannot be reached at ['no.such.host.invalid']" in str(found[1])


def test_own_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert own_addresses()[0] == "127.0.0.1"
    monkeypatch.delenv("MASTER_ADDR")
    assert own_addresses()
    monkeypatch.setenv(ADDRESS_ENV, "10.1.2.3")
    assert own_addresses() == ["10.1.2.3"]
