"""What readers find on a machine, and what checks make of it. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["ok", "warn", "missing", "not_here"]
"""`warn`: TIDE works, with less; `missing`: TIDE's engine for the hardware that is there does not; `not_here`: nothing to check."""


@dataclass(frozen=True)
class Finding:
    """One line of the answer. `compare`: what must be alike on all machines of a job; "" where machines may differ."""

    name: str
    found: str
    needed: str
    status: Status
    consequence: str = ""
    mend: str = ""
    compare: str = ""


@dataclass(frozen=True)
class System:
    """The operating system and this process."""

    host: str = ""
    platform: str = "linux"
    processor: str = "x86_64"
    cores: int = 0
    memory_bytes: int = 0
    shm_bytes: int = 0
    """Of the file system /dev/shm; 0: there is none."""
    memlock_bytes: int | None = None
    """None: unlimited."""
    peermem: bool = False
    """The kernel module through which NICs reach GPU memory where there is no DMA-BUF."""
    environment: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class Software:
    """PyTorch, NCCL and TIDE's compiled part, as this process loads them."""

    torch: str = ""
    torch_cuda: str = ""
    """CUDA that PyTorch is built with; "": none."""
    tested: str = ""
    """The minor versions of PyTorch on which the seam was tested."""
    seam_problem: str = ""
    """Why `attach` would refuse this PyTorch."""
    nccl: int = 0
    """Version code of the loaded NCCL (23102: 2.31.2); 0: none."""
    nccl_path: str = ""
    nccl_installed: str = ""
    """Version of the installed nvidia-nccl package; "": none."""
    engine: str = ""
    """How the CUDA engine was compiled; "": it is not there."""
    engine_problem: str = ""


@dataclass(frozen=True)
class Gpu:
    """One that this process may use; `index` as CUDA numbers them."""

    index: int
    name: str
    capability: tuple[int, int]
    pci: str
    """Its address as in /sys/bus/pci/devices: 0000:19:00.0."""
    vmm: bool = False
    posix_fd: bool = False
    fabric: bool = False
    multicast: bool = False
    rdma: bool = False
    rdma_vmm: bool = False
    dma_buf: bool = False
    nvlinks: int | None = None
    """Active links; None: not known."""
    path: tuple[str, ...] = ()
    """The PCI buses and bridges from the host to it, itself last; () where it cannot be seen."""
    numa: int = -1


@dataclass(frozen=True)
class Driver:
    """NVIDIA's, and the GPUs behind it. `cuda`: 13000 for 13.0, the newest CUDA that it takes; 0: no driver, for `problem`."""

    version: str = ""
    cuda: int = 0
    problem: str = ""
    gpus: tuple[Gpu, ...] = ()
    unreachable: tuple[tuple[int, int], ...] = ()
    """Pairs of GPUs without peer access."""
    compute_devices: tuple[str, ...] = ()
    """PCI addresses of NVIDIA's GPUs without a display, whether or not there is a driver."""
    display_devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Line:
    """A port of an RDMA device."""

    device: str
    port: int
    active: bool
    link: str
    """InfiniBand or Ethernet (RoCE)."""
    rate: str
    interfaces: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    numa: int = -1
    counters: tuple[str, ...] = ()
    """Names of those that can be read."""
    counters_problem: str = ""

    @property
    def name(self) -> str:
        """mlx5_0, or mlx5_0:2 for another port than the first."""
        return self.device if self.port == 1 else f"{self.device}:{self.port}"


@dataclass(frozen=True)
class Network:
    """`lines` can carry rails; `interfaces` are the network interfaces without RDMA that are up."""

    lines: tuple[Line, ...] = ()
    interfaces: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class Facts:
    """One machine. `multicast`: (whether it may be used, the reason), None where it was not asked for."""

    system: System = field(default_factory=System)
    software: Software = field(default_factory=Software)
    driver: Driver = field(default_factory=Driver)
    network: Network = field(default_factory=Network)
    multicast: tuple[bool, str] | None = None
