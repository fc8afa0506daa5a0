"""Findings about the operating system, PyTorch, limits, and environment variables. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping

from tide_comm.doctor.check_network import active, chosen_by
from tide_comm.doctor.facts import Facts, Finding

GIB = 2**30
SHM_BYTES = GIB
"""NCCL and data loaders want more than the 64 MiB that containers give."""
QUEUES = 8
"""CUDA's own default for CUDA_DEVICE_MAX_CONNECTIONS, and the fewest with which TIDE was tested for speed."""
MAX_QUEUES = 32


def check_machine(facts: Facts) -> Finding:
    system = facts.system
    found = f"{system.platform} {system.processor}, {system.cores} cores, {system.memory_bytes / GIB:.0f} GiB"
    needed = "Linux; x86-64 for the host engine"
    if system.platform != "linux":
        return Finding(
            "machine",
            found,
            needed,
            "missing",
            "no engine: they share memory by Linux's calls",
            "use Linux",
            system.processor,
        )
    if system.processor not in ("x86_64", "AMD64") and not facts.driver.gpus:
        consequence = "the host engine relies on x86-64's order of stores and is not tested here"
        return Finding("machine", found, needed, "warn", consequence, 'comm = "stock" to be safe', system.processor)
    return Finding("machine", found, needed, "ok", compare=f"{system.platform} {system.processor}")


def check_torch(facts: Facts) -> Finding:
    software = facts.software
    needed = f"a version on which the FSDP2 seam was tested: {software.tested}"
    if software.seam_problem:
        mend = "install a tested version (constraints.txt)"
        return Finding(
            "PyTorch",
            software.torch or "none",
            needed,
            "missing",
            software.seam_problem.split(". Install")[0],
            mend,
            software.torch,
        )
    return Finding("PyTorch", software.torch, needed, "ok", compare=software.torch)


def check_queues(facts: Facts) -> Finding:
    name, needed = "CUDA_DEVICE_MAX_CONNECTIONS", f"unset, or {QUEUES} to {MAX_QUEUES}"
    value = facts.system.environment.get(name, "")
    found = value or f"unset ({QUEUES})"
    if not facts.driver.gpus:
        return Finding(name, "no GPU", needed, "not_here")
    if not value or (value.isdigit() and QUEUES <= int(value) <= MAX_QUEUES):
        return Finding(name, found, needed, "ok", compare=found)
    consequence = "streams share hardware queues: compute waits behind communication; right, but slow"
    return Finding(name, found, needed, "warn", consequence, f"unset {name}, or set it to {MAX_QUEUES}", found)


def variables_in_the_way(facts: Facts) -> list[tuple[str, str]]:
    """(NAME=value, what it does to TIDE or to stock NCCL beside it)."""
    environment = facts.system.environment
    out = []

    def off(name: str) -> bool:
        return environment.get(name, "").lower() in ("0", "no", "false", "off")

    def on(name: str) -> bool:
        return environment.get(name, "").lower() not in ("", "0", "no", "false", "off")

    def tell(name: str, what: str) -> None:
        out.append((f"{name}={environment[name]}", what))

    if on("NCCL_P2P_DISABLE"):
        tell("NCCL_P2P_DISABLE", "stock collectives go through host memory, and rails cannot be emulated in a machine")
    if environment.get("NCCL_P2P_LEVEL", "").upper() in ("LOC", "0"):
        tell("NCCL_P2P_LEVEL", "stock collectives go through host memory")
    if off("NCCL_CUMEM_ENABLE"):
        tell("NCCL_CUMEM_ENABLE", "NCCL has no symmetric windows: no rails")
    if off("NCCL_WIN_ENABLE"):
        tell("NCCL_WIN_ENABLE", "NCCL registers no windows: no rails")
    if "NCCL_HOSTID" in environment:
        tell("NCCL_HOSTID", "NCCL takes one host for several: no one-sided puts between them without InfiniBand")
    if on("CUDA_LAUNCH_BLOCKING"):
        tell("CUDA_LAUNCH_BLOCKING", "every kernel is waited for: nothing overlaps")
    if facts.network.lines:
        if on("NCCL_IB_DISABLE"):
            tell("NCCL_IB_DISABLE", "NCCL uses no network line: no rails")
        if environment.get("NCCL_NET", "IB").upper() != "IB":
            tell("NCCL_NET", "one-sided puts need NCCL's own IB transport: no rails")
        up = active(facts)
        taken = chosen_by(environment.get("NCCL_IB_HCA", ""), up)
        if up and len(taken) < min(len(up), max(1, len(facts.driver.gpus))):
            tell("NCCL_IB_HCA", f"NCCL takes {len(taken)} of {len(up)} active lines")
    return out


def check_variables(facts: Facts) -> Finding:
    needed = "none that takes something away from TIDE or NCCL"
    if not facts.driver.gpus:
        return Finding("NCCL variables", "no GPU", needed, "not_here")
    found = variables_in_the_way(facts)
    every = _nccl_variables(facts.system.environment)
    if not found:
        shown = f"none in the way ({every})" if every else "none set"
        return Finding("NCCL variables", shown, needed, "ok", compare=every)
    names = [text.split("=")[0] for text, _ in found]
    consequence = "; ".join(f"{text.split('=')[0]}: {what}" for text, what in found)
    return Finding(
        "NCCL variables",
        ", ".join(text for text, _ in found),
        needed,
        "warn",
        consequence,
        f"unset {' '.join(names)}",
        every,
    )


def _nccl_variables(environment: Mapping[str, str]) -> str:
    # What names files, interfaces or ranks may differ from machine to machine.
    own = ("NCCL_DEBUG_FILE", "NCCL_TOPO_DUMP_FILE", "NCCL_GRAPH_DUMP_FILE", "NCCL_SOCKET_IFNAME", "NCCL_HOSTID")
    return " ".join(f"{k}={v}" for k, v in sorted(environment.items()) if k.startswith("NCCL_") and k not in own)


def check_shm(facts: Facts) -> Finding:
    size = facts.system.shm_bytes
    found = f"{size / GIB:.2f} GiB" if size else "none"
    needed = f"{SHM_BYTES / GIB:.0f} GiB, for NCCL and data loaders (TIDE's own memory is not there)"
    if size >= SHM_BYTES:
        return Finding("/dev/shm", found, needed, "ok")
    mend = (
        "docker run --ipc=host or --shm-size 16g; in Kubernetes an emptyDir with medium: Memory (examples/kubernetes)"
    )
    return Finding(
        "/dev/shm", found, needed, "warn", "NCCL or data loaders may fail; TIDE's host engine does not", mend
    )


def check_memlock(facts: Facts) -> Finding:
    limit = facts.system.memlock_bytes
    found = "unlimited" if limit is None else f"{limit / 2**20:.0f} MiB"
    needed = "unlimited where there are network lines: RDMA pins memory"
    if limit is None:
        return Finding("locked memory", found, needed, "ok")
    if not facts.network.lines:
        return Finding("locked memory", f"{found}; no network line that needs more", needed, "not_here")
    mend = "ulimit -l unlimited; docker run --ulimit memlock=-1; Slurm: PropagateResourceLimitsExcept=MEMLOCK"
    return Finding("locked memory", found, needed, "warn", "registering memory with the network lines fails", mend)


def all_system(facts: Facts) -> list[Finding]:
    return [check_machine(facts), check_torch(facts)]


def all_limits(facts: Facts) -> list[Finding]:
    return [check_queues(facts), check_variables(facts), check_shm(facts), check_memlock(facts)]
