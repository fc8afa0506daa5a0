"""Machines that are not here: facts by hand, and fake trees of /sys and /proc."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tide_comm.doctor.facts import Driver, Facts, Gpu, Line, Network, Software, System

GIB = 2**30


def gpu(index: int, **changes: Any) -> Gpu:
    """An H200 behind a PCIe switch of its own."""
    root, switch = f"pci0000:{index:02x}", f"0000:{index:02x}:01.0"
    pci = f"0000:{index:02x}:05.0"
    made = Gpu(index, "NVIDIA H200", (9, 0), pci, *[True] * 7, nvlinks=18, path=(root, switch, pci), numa=index // 4)
    return replace(made, **changes)


def line(index: int, **changes: Any) -> Line:
    """The network line behind the same switch as GPU `index`."""
    path = (f"pci0000:{index:02x}", f"0000:{index:02x}:01.0", f"0000:{index:02x}:06.0")
    made = Line(
        f"mlx5_{index}", 1, True, "InfiniBand", "400 Gb/sec (4X NDR)", (), path, index // 4, ("port_xmit_wait",)
    )
    return replace(made, **changes)


def laptop() -> Facts:
    system = System("laptop", cores=8, memory_bytes=16 * GIB, shm_bytes=8 * GIB, memlock_bytes=8 * 2**20)
    software = Software("2.13.0+cpu", engine_problem="the CUDA engine was not compiled (no nvcc); with nvcc 13 ...")
    return Facts(system, software, Driver(problem="the driver's library does not load"))


def cluster_machine(gpus: int = 8, lines: int = 8, host: str = "a") -> Facts:
    """Nothing is wrong with it."""
    return Facts(
        System(host, cores=128, memory_bytes=2048 * GIB, shm_bytes=1024 * GIB),
        Software(
            "2.13.0+cu130",
            "13.0",
            "2.13",
            "",
            23102,
            "/venv/libnccl.so.2",
            "nvidia-nccl-cu13 2.31.2",
            "nvcc 13.0 for 90",
        ),
        Driver("580.159.04", 13000, "", tuple(gpu(i) for i in range(gpus))),
        Network(tuple(line(i) for i in range(lines))),
        (True, "GPU 0: a multicast object was made, bound and freed"),
    )


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")


def add_pci(root: Path, path: str, vendor: str = "0x15b3", kind: str = "0x020700", numa: int = 0) -> Path:
    """A device at sys/devices/`path` and its link among the bus's devices; returns its folder."""
    folder = root / "sys/devices" / path
    write(folder, {"vendor": vendor, "class": kind, "numa_node": str(numa)})
    bus = root / "sys/bus/pci/devices"
    bus.mkdir(parents=True, exist_ok=True)
    (bus / folder.name).symlink_to(folder)
    return folder


def add_line(
    root: Path,
    name: str,
    path: str,
    link: str = "InfiniBand",
    state: str = "4: ACTIVE",
    counters: dict[str, int] | None = None,
    interface: str = "",
    port: int = 1,
    numa: int = 0,
) -> None:
    """An RDMA device with one port. `counters`: names with their folder, "hw_counters/out_of_sequence"."""
    device = add_pci(root, path, numa=numa)
    base = root / "sys/class/infiniband" / name
    ports = {
        f"ports/{port}/state": state,
        f"ports/{port}/link_layer": link,
        f"ports/{port}/rate": "400 Gb/sec (4X NDR)",
    }
    write(base, {**ports, **{f"ports/{port}/{c}": str(n) for c, n in (counters or {}).items()}})
    (base / "device").symlink_to(device)
    if interface:
        write(root, {f"sys/class/net/{interface}/operstate": "up"})
        write(device, {f"net/{interface}/dev_port": str(port - 1)})
