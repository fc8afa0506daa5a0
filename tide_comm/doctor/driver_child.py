"""Started by read_gpus.py as a script: prints what the NVIDIA driver says of itself and its GPUs, as JSON.

A process of its own, because drivers have hung in their first call. No context is made and no memory taken. Imports nothing of TIDE.
"""

import ctypes
import json
from typing import Any

# Of CUdevice_attribute in cuda.h.
MAJOR, MINOR, PCI_BUS, PCI_DEVICE, PCI_DOMAIN = 75, 76, 33, 34, 50
FLAGS = {"vmm": 102, "posix_fd": 103, "rdma_vmm": 110, "rdma": 116, "dma_buf": 124, "fabric": 128, "multicast": 132}
MAX_LINKS = 18
"""NVML_NVLINK_MAX_LINKS."""


class Failed(Exception):
    """A call of the driver, and what it said."""


class Cuda:
    """libcuda: each call raises `Failed` unless it answers 0."""

    def __init__(self, library: Any) -> None:
        self.library = library

    def number(self, name: str, *arguments: int) -> int:
        """Calls a function whose first argument takes a number."""
        out = ctypes.c_int()
        self.call(name, ctypes.byref(out), *arguments)
        return out.value

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self.library.cuGetErrorString(code, ctypes.byref(text))
            raise Failed(f"{name}: {(text.value or b'unknown').decode()} ({code})")


def gpu_facts(cuda: Cuda, index: int, nvml: Any) -> dict[str, Any]:
    device = cuda.number("cuDeviceGet", index)

    def attribute(number: int) -> int:
        try:
            return cuda.number("cuDeviceGetAttribute", number, device)
        except Failed:  # older drivers do not know the newer ones
            return 0

    name = ctypes.create_string_buffer(128)
    cuda.call("cuDeviceGetName", name, len(name), device)
    pci = f"{attribute(PCI_DOMAIN):04x}:{attribute(PCI_BUS):02x}:{attribute(PCI_DEVICE):02x}.0"
    return {
        "index": index,
        "name": name.value.decode(errors="replace"),
        "capability": [attribute(MAJOR), attribute(MINOR)],
        "pci": pci,
        "nvlinks": active_links(nvml, pci),
        **{flag: attribute(number) > 0 for flag, number in FLAGS.items()},
    }


def active_links(nvml: Any, pci: str) -> int | None:
    """NVLinks of the GPU at `pci` that are up; None where NVML does not say."""
    if nvml is None:
        return None
    handle = ctypes.c_void_p()
    if nvml.nvmlDeviceGetHandleByPciBusId_v2(pci.encode(), ctypes.byref(handle)):
        return None
    active = 0
    for link in range(MAX_LINKS):
        up = ctypes.c_uint()
        if nvml.nvmlDeviceGetNvLinkState(handle, link, ctypes.byref(up)):
            break  # no such link: links are numbered from 0
        active += up.value == 1
    return active


def driver_facts(library: Any, nvml: Any) -> dict[str, Any]:
    """`library`: libcuda; `nvml`: libnvidia-ml, initialised, or None."""
    cuda = Cuda(library)
    facts: dict[str, Any] = {"version": "", "cuda": 0, "problem": "", "gpus": [], "unreachable": []}
    if nvml is not None:
        version = ctypes.create_string_buffer(96)
        if not nvml.nvmlSystemGetDriverVersion(version, len(version)):
            facts["version"] = version.value.decode()
    try:
        facts["cuda"] = cuda.number("cuDriverGetVersion")
        cuda.call("cuInit", 0)
        count = cuda.number("cuDeviceGetCount")
        facts["gpus"] = [gpu_facts(cuda, index, nvml) for index in range(count)]
        facts["unreachable"] = [
            [a, b]
            for a in range(count)
            for b in range(count)
            if a != b and not cuda.number("cuDeviceCanAccessPeer", a, b)
        ]
    except Failed as error:
        facts["problem"] = str(error)
    return facts


def load_nvml() -> Any:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        return None if nvml.nvmlInit_v2() else nvml
    except (OSError, AttributeError):
        return None


def main() -> None:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        print(json.dumps({"problem": f"the driver's library does not load ({error})"}))
        return
    print(json.dumps(driver_facts(library, load_nvml())))


if __name__ == "__main__":
    main()
