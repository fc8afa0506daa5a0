"""Findings about network lines: are there any, which GPU is each near, can their counters be read. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from tide_comm.doctor import pci
from tide_comm.doctor.facts import Facts, Finding, Line

_NAMES = "NCCL_IB_HCA"


def active(facts: Facts) -> list[Line]:
    return [line for line in facts.network.lines if line.active]


def chosen_by(value: str, lines: Sequence[Line]) -> list[Line]:
    """The lines that NCCL takes with NCCL_IB_HCA=value: a list of name prefixes, `=`: whole names, `^`: all others; `:2` chooses a port."""
    inverted, exact = value.startswith("^"), "=" in value[:2]
    entries = [entry.partition(":") for entry in value.lstrip("^=").split(",") if entry]

    def named(line: Line) -> bool:
        return any(
            (line.device == name if exact else line.device.startswith(name)) and (not port or port == str(line.port))
            for name, _, port in entries
        )

    return [line for line in lines if named(line) != inverted] if entries else list(lines)


def check_lines(facts: Facts) -> Finding:
    needed = "between machines: an InfiniBand or RoCE port a GPU"
    lines, up = facts.network.lines, active(facts)
    if not lines:
        others = f"; interfaces without RDMA: {', '.join(facts.network.interfaces)}" if facts.network.interfaces else ""
        return Finding("network lines", f"none{others}", needed, "not_here", "nothing within a machine")
    kinds = sorted({f"{line.link} {line.rate}".strip() for line in up})
    found = (
        f"{len(up)} active of {len(lines)}: {', '.join(line.name for line in up)} ({'; '.join(kinds)})"
        if up
        else f"{len(lines)}, none active"
    )
    compare = f"{len(up)} active ({'; '.join(kinds)})"
    down = [line.name for line in lines if not line.active]
    if not up:
        return Finding(
            "network lines", found, needed, "warn", "no rails", "check cables and the subnet manager (ibstat)", compare
        )
    if len(up) < len(facts.driver.gpus):
        consequence = "lanes share a line, rails are slower"
        mend = f"check {', '.join(down)} (ibstat)" if down else "none, if the machine has no more"
        return Finding("network lines", found, needed, "warn", consequence, mend, compare)
    return Finding("network lines", found, needed, "ok", compare=compare)


def check_rails(facts: Facts) -> Finding:
    """Which line each GPU is near, and whether each has one of its own."""
    needed = "a line of its own near each GPU, the same on all machines"
    gpus, up = facts.driver.gpus, active(facts)
    if not gpus or not up:
        return Finding("rail alignment", "no GPU" if not gpus else "no active line", needed, "not_here")
    usable = chosen_by(facts.system.environment.get(_NAMES, ""), up)
    by_gpu = pci.assign(gpus, usable)
    rows, far, without = [], [], []
    ways = {pci.distance_text(pci.distance(gpu, line)) for gpu in gpus if (line := by_gpu[gpu.index])}
    for gpu in gpus:
        line = by_gpu[gpu.index]
        if line is None:
            without.append(gpu.index)
            rows.append(f"GPU {gpu.index}: none")
            continue
        where = pci.distance(gpu, line)
        if where[0] >= pci.FAR:
            far.append(gpu.index)
        rows.append(f"GPU {gpu.index}: {line.name}" + (f" ({pci.distance_text(where)})" if len(ways) > 1 else ""))
    found = ", ".join(rows) + (f" ({ways.pop()})" if len(ways) == 1 else "")
    compare = ", ".join(f"GPU {g}: {line.name if line else 'none'}" for g, line in by_gpu.items())
    if without:
        consequence = f"GPU {', '.join(map(str, without))}: the nearest lines are other GPUs', which share them"
        return Finding(
            "rail alignment", found, needed, "warn", consequence, f"see nvidia-smi topo -m and {_NAMES}", compare
        )
    if far:
        consequence = (
            f"GPU {', '.join(map(str, far))}: data may cross the link between processors on its way to the line"
        )
        mend = f"see nvidia-smi topo -m, {_NAMES} and CUDA_VISIBLE_DEVICES; in a virtual machine pass the PCIe topology through"
        return Finding("rail alignment", found, needed, "warn", consequence, mend, compare)
    return Finding("rail alignment", found, needed, "ok", compare=compare)


def check_counters(facts: Facts) -> Finding:
    needed = "readable, so that a run's summary can tell of congestion"
    up = active(facts)
    if not up:
        return Finding("pause and ECN counters", "no active line", needed, "not_here")
    bad = [line for line in up if line.counters_problem]
    if bad:
        found = "; ".join(f"{line.name}: {line.counters_problem}" for line in bad[:2]) + (
            f"; and {len(bad) - 2} more" if len(bad) > 2 else ""
        )
        mend = "mount /sys into the container; install ethtool for pause counters"
        return Finding("pause and ECN counters", found, needed, "warn", "the summary says less", mend)
    count = min(len(line.counters) for line in up)
    return Finding("pause and ECN counters", f"{count} counters on each of {len(up)} lines", needed, "ok")


def all_network(facts: Facts) -> list[Finding]:
    return [check_lines(facts), check_rails(facts), check_counters(facts)]
