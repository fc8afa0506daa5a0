"""Where devices hang in the machine, from sysfs: how near a GPU and a network line are to each other."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from tide_comm.doctor.facts import Gpu, Line

FAR = 3
"""The class of distance from which on data crosses the link between processors, or nothing is known."""
_CLASSES = ("one PCIe switch", "one PCIe host bridge", "one NUMA node", "another NUMA node", "not known how far")


def text(file: Path) -> str:
    """A small file's contents without the newline; "" where it cannot be read."""
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


def number(file: Path, otherwise: int) -> int:
    try:
        return int(text(file), 0)
    except ValueError:
        return otherwise


def place(root: Path, device: Path) -> tuple[tuple[str, ...], int]:
    """(the buses and bridges down to `device` and itself, its NUMA node or -1). `device`: a folder or link in sysfs."""
    if not device.exists():
        return (), -1
    real = Path(os.path.realpath(device))
    try:
        path = real.relative_to(os.path.realpath(root / "sys/devices")).parts
    except ValueError:
        path = ()
    return path, number(device / "numa_node", -1)


def nvidia_devices(root: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """PCI addresses of NVIDIA's (GPUs without a display, with one), whether or not there is a driver."""
    compute, display = [], []
    try:
        devices = sorted((root / "sys/bus/pci/devices").iterdir())
    except OSError:
        return (), ()
    for device in devices:
        if text(device / "vendor") == "0x10de":
            kind = text(device / "class")
            if kind.startswith("0x0302"):
                compute.append(device.name)
            elif kind.startswith("0x0300"):
                display.append(device.name)
    return tuple(compute), tuple(display)


def distance(gpu: Gpu, line: Line) -> tuple[int, int]:
    """(class, negated length of the way they share): smaller is nearer."""
    if not gpu.path or not line.path:
        return 4, 0
    shared = len(os.path.commonprefix([gpu.path, line.path]))
    if shared >= 2:
        return 0, -shared
    if shared == 1:
        return 1, 0
    if gpu.numa < 0 or line.numa < 0:
        return 4, 0
    return (2, 0) if gpu.numa == line.numa else (3, 0)


def distance_text(found: tuple[int, int]) -> str:
    return _CLASSES[found[0]]


def assign(gpus: Sequence[Gpu], lines: Sequence[Line]) -> Mapping[int, Line | None]:
    """A line of its own for each GPU, among those that are nearest to it (lowest name first); None where others have taken them all."""
    wanted: dict[int, list[int]] = {}
    for g, gpu in enumerate(gpus):
        nearest = min((distance(gpu, line) for line in lines), default=(4, 0))
        wanted[g] = [i for i, line in enumerate(lines) if distance(gpu, line) == nearest]
    taken: dict[int, int] = {}

    def find(g: int, tried: set[int]) -> bool:
        """Take a line for `g`; whoever has it looks for another one."""
        free = next((i for i in wanted[g] if i not in taken), None)
        if free is not None:
            taken[free] = g
            return True
        for i in wanted[g]:
            if i not in tried:
                tried.add(i)
                if find(taken[i], tried):
                    taken[i] = g
                    return True
        return False

    for g in wanted:
        find(g, set())
    has = {g: lines[i] for i, g in taken.items()}
    return {gpu.index: has.get(g) for g, gpu in enumerate(gpus)}
