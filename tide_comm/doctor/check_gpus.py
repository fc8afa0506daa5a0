"""Findings about GPUs, their driver and the paths between them. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from tide_comm.doctor.facts import Driver, Facts, Finding
from tide_comm.engine.cuda.nccl import OLDEST, version_name
from tide_comm.fsdp.verdict import MAX_LANES, OLDEST_CAPABILITY

STOCK = "every group on a GPU stays on stock communication"
ENGINE_CUDA = 13
"""Major version of the CUDA that the compiled part is built with (cmake/CMakeLists.txt)."""


def cuda_text(code: int) -> str:
    """13000 -> "13.0"."""
    return f"{code // 1000}.{code % 1000 // 10}"


def absent(name: str, needed: str) -> Finding:
    """A line for a machine without GPUs."""
    return Finding(name, "no GPU", needed, "not_here")


def numbers(indices: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    spans = []
    for _, run in groupby(enumerate(sorted(indices)), key=lambda pair: pair[1] - pair[0]):
        span = [index for _, index in run]
        spans.append(f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]))
    return ", ".join(spans)


def check_driver(facts: Facts) -> Finding:
    driver = facts.driver
    needed = f"a driver for CUDA {ENGINE_CUDA} or newer"
    if driver.gpus and driver.cuda >= ENGINE_CUDA * 1000:
        found = f"{driver.version or 'version not known'}, CUDA {cuda_text(driver.cuda)}"
        return Finding("driver", found, needed, "ok", compare=driver.version)
    update = "install driver 580 or newer"
    if driver.gpus:
        found = f"{driver.version or 'version not known'}, CUDA {cuda_text(driver.cuda)}"
        return Finding("driver", found, needed, "missing", STOCK, update, driver.version)
    inside = "in a container, start it with GPUs (docker run --gpus all; a Kubernetes limit nvidia.com/gpu)"
    visible = facts.system.environment.get("CUDA_VISIBLE_DEVICES")
    hidden = f" with CUDA_VISIBLE_DEVICES={visible!r}" if visible is not None else ""
    if driver.compute_devices:
        found = (
            f"{driver.problem or 'no GPU'}{hidden}, though there are GPUs at PCI {', '.join(driver.compute_devices)}"
        )
        return Finding("driver", found, needed, "missing", "TIDE runs on the CPU only", f"{update}; {inside}")
    if driver.display_devices:
        found = f"{driver.problem or 'no GPU'}{hidden}; a display card at PCI {', '.join(driver.display_devices)}"
        return Finding(
            "driver", found, needed, "warn", "TIDE runs on the CPU only", f"{update}, if the card is to be used"
        )
    return Finding("driver", f"no NVIDIA GPU{hidden}", needed, "not_here")


def check_gpus(facts: Facts) -> Finding:
    """Compute capability."""
    needed = f"compute capability {'.'.join(map(str, OLDEST_CAPABILITY))} or newer (Hopper)"
    gpus = facts.driver.gpus
    if not gpus:
        return absent("GPUs", needed)
    kinds = sorted({(gpu.name, gpu.capability) for gpu in gpus})
    found = ", ".join(f"{sum(g.name == name for g in gpus)} x {name} ({a}.{b})" for name, (a, b) in kinds)
    old = [gpu.index for gpu in gpus if gpu.capability < OLDEST_CAPABILITY]
    if old:
        mend = (
            "hide it with CUDA_VISIBLE_DEVICES"
            if len(old) < len(gpus)
            else "none: TIDE's kernels are for Hopper and newer"
        )
        return Finding("GPUs", found, needed, "missing", f"GPU {numbers(old)}: {STOCK}", mend, found)
    if len(gpus) > MAX_LANES:
        mend = f"give a job at most {MAX_LANES} of them (CUDA_VISIBLE_DEVICES)"
        return Finding("GPUs", found, f"at most {MAX_LANES} a machine", "missing", STOCK, mend, found)
    return Finding("GPUs", found, needed, "ok", compare=found)


def check_cuda(facts: Facts) -> Finding:
    """PyTorch's CUDA against the driver's."""
    software, driver = facts.software, facts.driver
    needed = "PyTorch built with CUDA, of a major version that the driver takes"
    if not driver.gpus:
        return Finding("CUDA", "no GPU", needed, "not_here")
    if not software.torch_cuda:
        mend = "install PyPI's build of PyTorch for Linux, or one from download.pytorch.org/whl/cu130"
        return Finding("CUDA", "PyTorch is a CPU build", needed, "missing", "training takes the CPU", mend)
    found = f"PyTorch built with {software.torch_cuda}, driver takes {cuda_text(driver.cuda)}"
    if int(software.torch_cuda.split(".")[0]) > driver.cuda // 1000:
        mend = "install driver 580 or newer, or a PyTorch for an older CUDA"
        return Finding("CUDA", found, needed, "missing", "PyTorch sees no GPU", mend, software.torch_cuda)
    return Finding("CUDA", found, needed, "ok", compare=software.torch_cuda)


def check_engine(facts: Facts) -> Finding:
    needed = "TIDE's compiled part"
    software = facts.software
    if software.engine:
        return Finding("CUDA engine", software.engine, needed, "ok", compare=software.engine)
    found = software.engine_problem.split(";")[0].removeprefix("the CUDA engine ") or "not there"
    mend = f"with nvcc {ENGINE_CUDA} in PATH install TIDE again, or run scripts/build_cuda.sh in its source"
    if not facts.driver.gpus:
        return Finding("CUDA engine", found, needed, "not_here")
    return Finding("CUDA engine", found, needed, "missing", STOCK, mend)


def check_nccl(facts: Facts) -> Finding:
    software = facts.software
    package = f"nvidia-nccl-cu{software.torch_cuda.split('.')[0] or ENGINE_CUDA}"
    install = f"pip install --no-deps '{package}=={version_name(OLDEST)}'"
    needed = f"{version_name(OLDEST)} for rails between machines (one-sided puts)"
    if not software.nccl:
        if not software.torch_cuda:
            return Finding("NCCL", "PyTorch without CUDA has none", needed, "not_here")
        return Finding("NCCL", "none that loads", needed, "missing", "FSDP2 itself needs it on GPUs", install)
    version = version_name(software.nccl)
    found = f"{version}, loaded from {software.nccl_path}"
    installed = software.nccl_installed.split(" ")[-1]
    # Another file than the package's comes before it, by LD_LIBRARY_PATH or LD_PRELOAD.
    other = installed and not installed.startswith(version)
    if other:
        found += f", though {software.nccl_installed} is installed"
    if software.nccl < OLDEST:
        mend = "unset LD_LIBRARY_PATH and LD_PRELOAD" if other else f"{install} (docs/clusters.md)"
        return Finding(
            "NCCL", found, needed, "warn", "no rails between machines; within a machine nothing changes", mend, version
        )
    return Finding("NCCL", found, needed, "ok", compare=version)


def check_peers(facts: Facts) -> Finding:
    needed = "peer access between all GPUs of the machine"
    driver = facts.driver
    if not driver.gpus:
        return absent("peer access", needed)
    if len(driver.gpus) == 1:
        return Finding("peer access", "one GPU", needed, "not_here")
    if driver.unreachable:
        pairs = ", ".join(f"{a}->{b}" for a, b in driver.unreachable[:4])
        more = f" and {len(driver.unreachable) - 4} more" if len(driver.unreachable) > 4 else ""
        mend = (
            "give GPUs that cannot reach each other to different jobs (CUDA_VISIBLE_DEVICES); on PCIe switch off ACS and the "
            "IOMMU; in virtual machines pass NVLink through"
        )
        return Finding("peer access", f"none for GPUs {pairs}{more}", needed, "missing", STOCK, mend)
    return Finding("peer access", f"between all {len(driver.gpus)} GPUs", needed, "ok")


def check_nvlink(facts: Facts) -> Finding:
    needed = "NVLinks, all up, as many on each GPU"
    gpus = facts.driver.gpus
    if len(gpus) < 2:
        return absent("NVLink", needed) if not gpus else Finding("NVLink", "one GPU", needed, "not_here")
    if any(gpu.nvlinks is None for gpu in gpus):
        return Finding(
            "NVLink",
            "not known: NVML does not say",
            needed,
            "warn",
            "nothing; it could not be checked",
            "see nvidia-smi topo -m",
        )
    counts = sorted({gpu.nvlinks or 0 for gpu in gpus})
    found = f"{' or '.join(map(str, counts))} links up a GPU"
    compare = str(counts)
    if counts == [0]:
        return Finding(
            "NVLink",
            "none",
            needed,
            "warn",
            "copies between GPUs go over PCIe, many times slower",
            "none, if the machine has no NVLink",
            compare,
        )
    if len(counts) > 1:
        few = [gpu.index for gpu in gpus if (gpu.nvlinks or 0) < counts[-1]]
        mend = "nvidia-smi nvlink -s shows which are down; reset or service that GPU"
        return Finding(
            "NVLink",
            f"{found} (GPU {numbers(few)} has fewer)",
            needed,
            "warn",
            "the slowest GPU sets the pace",
            mend,
            compare,
        )
    return Finding("NVLink", found, needed, "ok", compare=compare)


def check_multicast(facts: Facts) -> Finding:
    needed = (
        "an NVLink switch with multicast: all-gathers write to all GPUs of a machine at once, the reduce-scatter's last step between "
        "machines reads the switch's sum"
    )
    if facts.multicast is None:
        return Finding("multicast", "one GPU" if facts.driver.gpus else "no GPU", needed, "not_here")
    allowed, reason = facts.multicast
    if allowed:
        return Finding("multicast", reason, needed, "ok", compare="yes")
    consequence = (
        "all-gathers write to each GPU by itself, the last step reads each GPU's share: more bytes over NVLink"
    )
    if reason.startswith("switched off"):
        return Finding("multicast", reason, needed, "ok", consequence, compare="no")
    mend = (
        "nothing, if the machine has none; else see that nvidia-fabricmanager runs and has no errors (its log). "
        'multicast = "off" spares the question'
    )
    return Finding("multicast", reason, needed, "warn", consequence, mend, compare="no")


def _lacking(driver: Driver, attribute: str) -> list[int]:
    return [gpu.index for gpu in driver.gpus if not getattr(gpu, attribute)]


def check_handles(facts: Facts) -> list[Finding]:
    """How arenas can be shared between processes."""
    driver = facts.driver
    posix, fabric = (
        "cuMemCreate memory with POSIX descriptors",
        "fabric handles (only for NVLink between machines, which TIDE does not use)",
    )
    if not driver.gpus:
        return [absent("POSIX-fd handles", posix), absent("fabric handles", fabric)]
    lacking = sorted({*_lacking(driver, "vmm"), *_lacking(driver, "posix_fd")})
    if lacking:
        consequence = "arenas are shared by CUDA IPC instead: no multicast, no rails"
        first = Finding(
            "POSIX-fd handles",
            f"not on GPU {numbers(lacking)}",
            posix,
            "warn",
            consequence,
            "none: virtual GPUs often lack them",
        )
    else:
        first = Finding("POSIX-fd handles", "supported", posix, "ok")
    has = not _lacking(driver, "fabric")
    return [first, Finding("fabric handles", "supported" if has else "not supported", fabric, "ok")]


def check_rdma(facts: Facts) -> Finding:
    """Whether NICs can reach GPU memory."""
    needed = "GPUDirect RDMA, by DMA-BUF or the module nvidia_peermem"
    driver = facts.driver
    if not driver.gpus:
        return absent("GPUDirect RDMA", needed)
    ways = [
        name
        for name, there in (("DMA-BUF", not _lacking(driver, "dma_buf")), ("nvidia_peermem", facts.system.peermem))
        if there
    ]
    lacking = sorted({*_lacking(driver, "rdma"), *_lacking(driver, "rdma_vmm")})
    found = (
        f"not on GPU {numbers(lacking)}"
        if lacking
        else f"supported; {' and '.join(ways) or 'neither DMA-BUF nor nvidia_peermem'}"
    )
    if not facts.network.lines:
        return Finding("GPUDirect RDMA", f"{found}; no network line that would use it", needed, "not_here")
    if lacking or not ways:
        mend = "modprobe nvidia_peermem, or the open kernel modules with Linux 5.12 or newer (DMA-BUF)"
        return Finding("GPUDirect RDMA", found, needed, "warn", "no rails: data would go through host memory", mend)
    return Finding("GPUDirect RDMA", found, needed, "ok", compare=found)


def all_gpus(facts: Facts) -> list[Finding]:
    checks = (check_driver, check_gpus, check_cuda, check_engine, check_peers, check_nvlink, check_multicast)
    return [*(check(facts) for check in checks), *check_handles(facts), check_nccl(facts), check_rdma(facts)]
