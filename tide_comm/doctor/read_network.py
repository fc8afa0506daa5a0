"""Reads network lines from sysfs."""

from __future__ import annotations

from pathlib import Path

from tide_comm.doctor import counters, pci
from tide_comm.doctor.facts import Line, Network


def read_network(root: Path = Path("/")) -> Network:
    """RDMA ports, and the interfaces that are up without one. Raises nothing: what cannot be read is left out."""
    lines = tuple(_line(root, device, port) for device, port in counters.ports(root))
    carried = {interface for line in lines for interface in line.interfaces}
    try:
        names = sorted(entry.name for entry in (root / "sys/class/net").iterdir())
    except OSError:
        names = []
    up = (n for n in names if pci.text(root / "sys/class/net" / n / "operstate") == "up" and n not in carried)
    return Network(lines, tuple(up))


def _line(root: Path, device: str, port: int) -> Line:
    base = root / "sys/class/infiniband" / device
    folder = base / "ports" / str(port)
    path, numa = pci.place(root, base / "device")
    read = counters.read_line(root, device, port)
    return Line(
        device,
        port,
        "ACTIVE" in pci.text(folder / "state"),
        pci.text(folder / "link_layer") or "unknown link",
        pci.text(folder / "rate"),
        counters.interfaces(root, device, port),
        path,
        numa,
        tuple(read.values),
        read.problem,
    )
