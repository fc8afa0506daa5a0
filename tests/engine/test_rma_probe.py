"""The probe for NCCL windows: with stand-ins for NCCL, ranks as threads, and the ctypes part against a small C library."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import in_threads

from tide_comm.engine.cuda.nccl import LAUNCHED, Nccl
from tide_comm.engine.cuda.rma_probe import ARENA, NCCL_OWN, RmaWindow, probe
from tide_comm.errors import TideError

ROOT = Path(__file__).parents[2]


class FakeNccl:
    """`fails`: names of methods, with "register" as "register:KIND"."""

    def __init__(self, log: list[str], fails: tuple[str, ...] = ()) -> None:
        self.version, self.log, self.fails = "2.31.2", log, fails

    def _do(self, what: str, value: Any = None) -> Any:
        self.log.append(what)
        if what in self.fails:
            raise TideError(f"{what} failed")
        return value

    def unique_id(self) -> bytes:
        return self._do("unique_id", b"u" * 128)

    def init(self, world: int, unique_id: bytes, rank: int) -> int:
        assert unique_id == b"u" * 128
        return self._do("init", 7)

    def destroy(self, comm: int) -> None:
        self._do("destroy")

    def allocate(self, nbytes: int) -> int:
        return self._do("allocate", 2)

    def free(self, address: int) -> None:
        self._do("free")

    def register(self, comm: int, address: int, nbytes: int) -> int:
        return self._do("register:arena" if address == 1 else "register:own", 9)

    def deregister(self, comm: int, window: int) -> None:
        self._do("deregister")


def run(world: int, fails: dict[int, tuple[str, ...]]) -> tuple[list[RmaWindow], list[list[str]]]:
    logs: list[list[str]] = [[] for _ in range(world)]

    def body(rank: int, exchange: Any) -> RmaWindow:
        mine = fails.get(rank, ())

        def load() -> Any:
            if "load" in mine:
                raise TideError("NCCL 2.29.7 is too old")
            return FakeNccl(logs[rank], mine)

        @contextlib.contextmanager
        def arena(device: int) -> Iterator[tuple[int, int]]:
            if "arena" in mine:
                raise TideError("cuMemCreate: error 1")
            yield 1, 4096
            logs[rank].append("arena freed")

        return probe(exchange, rank, world, 0, load, arena)

    return in_threads(world, body), logs


def test_the_arena_registers() -> None:
    found, logs = run(2, {})
    assert found == [RmaWindow("2.31.2", True, ARENA, "memory made as the arena's registers")] * 2
    assert logs[1] == ["init", "register:arena", "deregister", "arena freed", "destroy"]
    assert str(found[0]) == "NCCL 2.31.2: window over arena: memory made as the arena's registers"


@pytest.mark.parametrize("failing", ["arena", "register:arena"])
def test_else_ncclmemalloc(failing: str) -> None:
    found, logs = run(3, {2: (failing,)})
    assert all(f.ok and f.memory == NCCL_OWN and "rank 2: " in f.reason for f in found)
    assert logs[0][-5:] == ["allocate", "register:own", "deregister", "free", "destroy"]


@pytest.mark.parametrize(
    ("failing", "reason"),
    [
        ("load", "rank 1: NCCL 2.29.7 is too old"),
        ("init", "rank 1: init failed"),
    ],
)
def test_no_window_without_nccl(failing: str, reason: str) -> None:
    found, _ = run(2, {1: (failing,)})
    assert [(f.ok, f.memory, f.reason) for f in found] == [(False, "", reason)] * 2


def test_neither_registers() -> None:
    found, logs = run(2, {0: ("unique_id",)})
    assert [f.reason for f in found] == ["rank 0: unique_id failed"] * 2 and logs[1] == []
    found, logs = run(2, {0: ("register:own",), 1: ("register:arena",)})
    assert not found[0].ok and found[0] == found[1]
    assert "rank 1: register:arena" in found[0].reason and "rank 0: register:own" in found[0].reason
    assert all(log[-2:] == ["free", "destroy"] for log in logs)


STUB = r"""
#include <stddef.h>
#include <string.h>
typedef struct { char internal[128]; } ncclUniqueId;
int ncclGetVersion(int *v) { *v = VERSION; return 0; }
const char *ncclGetErrorString(int code) { return code == 5 ? "invalid usage" : "other"; }
const char *ncclGetLastError(void *comm) { return "said last"; }
#if VERSION >= 23102
int ncclGetUniqueId(ncclUniqueId *id) { memset(id, 42, sizeof *id); return 0; }
int ncclCommInitRank(void **comm, int n, ncclUniqueId id, int rank) {
  if (id.internal[0] != 42 || id.internal[127] != 42) return 5;
  *comm = (void *)(size_t)(0x700000000000 + n * 16 + rank);
  return 0;
}
int ncclCommDestroy(void *comm) { return comm == (void *)0x700000000021 ? 0 : 5; }
int ncclMemAlloc(void **p, size_t n) { *p = (void *)(0x7f0000000000 + n); return 0; }
int ncclMemFree(void *p) { return p == (void *)0x7f0100000000 ? 0 : 5; }
int ncclCommWindowRegister(void *comm, void *p, size_t n, void **w, int flags) {
  if (comm != (void *)0x700000000021 || n != 0x100000000 || flags != 1) return 5;
  *w = p == (void *)0x1000 ? (void *)0 : (void *)0x7f0200000000;
  return 0;
}
int ncclCommGetAsyncError(void *comm, int *error) { *error = comm == (void *)0x700000000021 ? 0 : 2; return 0; }
int ncclPutSignal() { return 11; }
int ncclGroupStart() { return 12; }
int ncclGroupEnd() { return 13; }
int ncclCommWindowDeregister(void *comm, void *w) { return w == (void *)0x7f0200000000 ? 0 : 5; }
#endif
"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Any:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("nccl")
    (folder / "nccl.c").write_text(STUB)

    def build(version: int) -> str:
        out = folder / f"libstub{version}.so"
        command = [compiler, f"-DVERSION={version}", "-shared", "-fPIC", "-o", str(out), str(folder / "nccl.c")]
        subprocess.run(command, check=True, timeout=60)
        return str(out)

    return build


def test_calls_reach_c_as_they_are_declared(stub: Any) -> None:
    nccl = Nccl(stub(23102))
    assert nccl.version == "2.31.2"
    comm = nccl.init(2, nccl.unique_id(), 1)
    address = nccl.allocate(1 << 32)
    window = nccl.register(comm, address, 1 << 32)
    nccl.deregister(comm, window)
    with pytest.raises(TideError, match="NULL window"):
        nccl.register(comm, 4096, 1 << 32)
    with pytest.raises(TideError, match=r"ncclCommWindowRegister: invalid usage \(said last\)"):
        nccl.register(comm, address, 4096)
    nccl.free(address)
    assert nccl.trouble(comm) == "" and nccl.trouble(comm + 1) == "other (said last)"
    nccl.destroy(comm)


def test_the_executor_gets_the_librarys_own_functions(stub: Any) -> None:
    calls = [ctypes.CFUNCTYPE(ctypes.c_int)(address) for address in Nccl(stub(23102)).addresses()]
    assert [call() for call in calls[:3]] == [11, 12, 13] and len(calls) == len(LAUNCHED) == 4
    assert ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_int)(Nccl(stub(23102)).addresses()[3])(5) == b"invalid usage"


def test_old_or_absent_nccl_is_named(stub: Any, tmp_path: Path) -> None:
    with pytest.raises(TideError, match=r"NCCL 2\.29\.7 \(.*\) is too old: rails need 2\.31\.2.*pip install --no-deps"):
        Nccl(stub(22907))
    with pytest.raises(TideError, match="NCCL does not load"):
        Nccl(str(tmp_path / "none.so"))


def command(world: int) -> str:
    arguments = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    env.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    done = subprocess.run(
        [sys.executable, *arguments, "-m", "tide_comm.engine.cuda.rma_probe"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="says why not where there is no NCCL")
def test_the_command_without_a_gpu() -> None:
    lines = [line for line in command(2).splitlines() if line.startswith("rank ")]
    assert len(lines) == 2 and all("window no: rank 0: NCCL" in line for line in lines)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("world", [1, 2])
def test_the_command_on_gpus(world: int) -> None:
    lines = [line for line in command(world).splitlines() if line.startswith("rank ")]
    assert len(lines) == world and all(": NCCL " in line for line in lines)
