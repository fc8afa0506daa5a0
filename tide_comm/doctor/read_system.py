"""Reads the operating system, this process's limits, and the software that it loads."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from tide_comm.doctor import pci
from tide_comm.doctor.facts import Software, System
from tide_comm.errors import TideError


def read_system(root: Path = Path("/"), environment: Mapping[str, str] | None = None) -> System:
    """Limits from /proc/self/limits, sizes from /proc/meminfo and /dev/shm."""
    shm = root / "dev/shm"
    try:
        stat = os.statvfs(shm)
        shm_bytes = stat.f_frsize * stat.f_blocks
    except OSError:
        shm_bytes = 0
    return System(
        host=socket.gethostname(),
        platform=sys.platform,
        processor=platform.machine(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        memory_bytes=memory_bytes(pci.text(root / "proc/meminfo")),
        shm_bytes=shm_bytes,
        memlock_bytes=memlock_bytes(pci.text(root / "proc/self/limits")),
        peermem=any((root / "sys/module" / name).exists() for name in ("nvidia_peermem", "nv_peer_mem")),
        environment=dict(os.environ if environment is None else environment),
    )


def memlock_bytes(limits: str) -> int | None:
    """The soft limit of "Max locked memory"; None: unlimited, also where nothing is said."""
    for line in limits.splitlines():
        if line.startswith("Max locked memory"):
            soft = line.split()[3]
            return int(soft) if soft.isdigit() else None
    return None


def memory_bytes(meminfo: str) -> int:
    for line in meminfo.splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return 0


def read_software() -> Software:
    """Imports PyTorch, with it NCCL, and TIDE's compiled part. Touches no GPU."""
    try:
        import torch
    except ImportError as error:
        return Software(seam_problem=f"PyTorch does not load: {error}")
    from tide_comm.engine.cuda import library

    problem, tested = "", ""
    try:
        from tide_comm.fsdp import guard

        tested = ", ".join(guard.TESTED)
        guard.check()
    except (TideError, ImportError, AttributeError) as error:
        problem = str(error)
    nccl, path = (0, "")
    if torch.version.cuda:
        nccl, path = loaded_nccl()
    engine, engine_problem = "", ""
    try:
        engine = library.load().built
    except TideError as error:
        engine_problem = str(error)
    return Software(
        torch.__version__,
        torch.version.cuda or "",
        tested,
        problem,
        nccl,
        path,
        installed_nccl(),
        engine,
        engine_problem,
    )


def loaded_nccl() -> tuple[int, str]:
    """(version code, file) of the NCCL that this process has loaded with PyTorch; (0, "") without one."""
    from tide_comm.engine.cuda.nccl import loaded_path

    path, code = loaded_path(), ctypes.c_int()
    try:
        failed = ctypes.CDLL(path).ncclGetVersion(ctypes.byref(code))
    except (OSError, AttributeError):
        return 0, ""
    return (0, "") if failed else (code.value, path)


def installed_nccl() -> str:
    """Name and version of the installed package that brings NCCL, or ""."""
    for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""
