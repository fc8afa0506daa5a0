"""Readers on fake trees and with stand-ins for the driver: nothing hangs, nothing raises."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from tests.doctor.trees import add_line, add_pci, cluster_machine, laptop, write
from tide_comm.doctor import driver_child, examine, pci, read_gpus
from tide_comm.doctor.facts import Network
from tide_comm.doctor.read_gpus import read_driver, read_multicast
from tide_comm.doctor.read_network import read_network
from tide_comm.doctor.read_system import memlock_bytes, memory_bytes, read_system
from tide_comm.limited import run_child, within

GPU_PCI = "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:19:00.0"
NEAR = "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:01.0/0000:1a:00.0"
FAR = "pci0000:97/0000:97:01.0/0000:9a:00.0"


class FakeCuda:
    """Two GPUs; answers by writing into the first argument, as the driver does."""

    def __init__(self, init: int = 0) -> None:
        self.init = init

    def cuDriverGetVersion(self, out: Any) -> int:
        out._obj.value = 13000
        return 0

    def cuInit(self, flags: int) -> int:
        return self.init

    def cuDeviceGetCount(self, out: Any) -> int:
        out._obj.value = 2
        return 0

    def cuDeviceGet(self, out: Any, index: int) -> int:
        out._obj.value = index
        return 0

    def cuDeviceGetName(self, name: Any, room: int, device: int) -> int:
        name.value = b"NVIDIA H200"
        return 0

    def cuDeviceGetAttribute(self, out: Any, attribute: int, device: int) -> int:
        known = {75: 9, 76: 0, 33: 0x19 + 0x80 * device, 34: 0, 50: 0, 102: 1, 103: 1, 110: 1, 116: 1, 128: 0, 132: 1}
        if attribute not in known:
            return 1
        out._obj.value = known[attribute]
        return 0

    def cuDeviceCanAccessPeer(self, out: Any, device: int, peer: int) -> int:
        out._obj.value = device < peer
        return 0

    def cuGetErrorString(self, code: int, out: Any) -> int:
        out._obj.value = b"no CUDA-capable device is detected"
        return 0


class FakeNvml:
    def nvmlSystemGetDriverVersion(self, out: Any, room: int) -> int:
        out.value = b"580.159.04"
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, pci: bytes, out: Any) -> int:
        return 0 if pci == b"0000:19:00.0" else 6

    def nvmlDeviceGetNvLinkState(self, handle: Any, link: int, out: Any) -> int:
        if link >= 4:
            return 3
        out._obj.value = link != 2
        return 0


def test_what_the_driver_says(tmp_path: Path) -> None:
    said = driver_child.driver_facts(FakeCuda(), FakeNvml())
    add_pci(tmp_path, GPU_PCI, "0x10de", "0x030200", numa=1)
    found = read_driver(tmp_path, [sys.executable, "-c", f"print('noise'); print({json.dumps(json.dumps(said))})"])
    assert (found.version, found.cuda, found.problem) == ("580.159.04", 13000, "")
    first, second = found.gpus
    assert (first.name, first.capability, first.pci) == ("NVIDIA H200", (9, 0), "0000:19:00.0")
    assert first.multicast and first.posix_fd and not first.fabric and not first.dma_buf, "unknown to this driver: no"
    assert (first.nvlinks, second.nvlinks) == (3, None)
    assert first.path[0] == "pci0000:15" and first.numa == 1 and second.path == ()
    assert found.unreachable == ((1, 0),) and found.compute_devices == ("0000:19:00.0",)


def test_a_driver_that_fails_says_why() -> None:
    said = driver_child.driver_facts(FakeCuda(init=100), None)
    assert said["problem"] == "cuInit: no CUDA-capable device is detected (100)" and said["gpus"] == []


def test_a_driver_that_hangs_crashes_or_talks_nonsense(tmp_path: Path) -> None:
    began_s = time.monotonic()
    hangs = read_driver(tmp_path, [sys.executable, "-c", "import time; time.sleep(60)"], limit_s=0.3)
    assert "did not end within 0.3 s" in hangs.problem and time.monotonic() - began_s < 5
    crashes = read_driver(tmp_path, [sys.executable, "-c", "import os; os.kill(os.getpid(), 11)"])
    assert "SIGSEGV" in crashes.problem
    assert "gave 'what'" in read_driver(tmp_path, [sys.executable, "-c", "print('what')"]).problem


def test_the_child_runs_here() -> None:
    said, problem = run_child(read_gpus.child_command(), 60, "the child")
    assert not problem and "problem" in json.loads(said)


def test_where_devices_hang(tmp_path: Path) -> None:
    add_pci(tmp_path, GPU_PCI, "0x10de", "0x030200")
    add_pci(tmp_path, "pci0000:00/0000:00:02.0", "0x10de", "0x030000")
    add_line(tmp_path, "mlx5_0", NEAR)
    add_line(tmp_path, "mlx5_1", FAR, numa=1)
    add_line(tmp_path, "mlx5_2", "pci0000:97/0000:97:02.0/0000:9b:00.0", state="1: DOWN")
    network = read_network(tmp_path)
    near, far, down = network.lines
    assert (near.name, near.active, near.link, near.rate) == ("mlx5_0", True, "InfiniBand", "400 Gb/sec (4X NDR)")
    assert not down.active and far.numa == 1
    path, numa = pci.place(tmp_path, tmp_path / "sys/bus/pci/devices/0000:19:00.0")
    (gpu,) = cluster_machine(1).driver.gpus
    gpu = type(gpu)(**{**gpu.__dict__, "path": path, "numa": numa})
    assert pci.distance(gpu, near) == (0, -3) and pci.distance_text(pci.distance(gpu, near)) == "one PCIe switch"
    assert pci.distance(gpu, far) == (3, 0)
    assert pci.assign([gpu], network.lines) == {0: near}
    assert pci.nvidia_devices(tmp_path) == (("0000:19:00.0",), ("0000:00:02.0",))


def test_interfaces_without_rdma_are_named(tmp_path: Path) -> None:
    add_line(tmp_path, "mlx5_0", NEAR, "Ethernet", interface="ens1")
    write(tmp_path, {"sys/class/net/eth0/operstate": "up", "sys/class/net/eth1/operstate": "down"})
    network = read_network(tmp_path)
    assert network.interfaces == ("eth0",) and network.lines[0].interfaces == ("ens1",)
    assert read_network(tmp_path / "nowhere") == Network()


def test_limits(tmp_path: Path) -> None:
    row = "Max locked memory         {}              unlimited            bytes     \n"
    assert memlock_bytes("Limit  Soft\n" + row.format(8388608)) == 8388608
    assert memlock_bytes(row.format("unlimited")) is None and memlock_bytes("") is None
    assert memory_bytes("MemTotal:       16384 kB\nMemFree: 1 kB") == 2**24
    write(tmp_path, {"proc/self/limits": row.format(65536), "sys/module/nvidia_peermem/version": "1"})
    system = read_system(tmp_path, {"NCCL_DEBUG": "INFO"})
    assert (system.memlock_bytes, system.shm_bytes, system.peermem) == (65536, 0, True)
    assert system.environment == {"NCCL_DEBUG": "INFO"}
    (tmp_path / "dev/shm").mkdir(parents=True)
    assert read_system(tmp_path, {}).shm_bytes > 0


def test_multicast_is_asked_last_and_only_where_it_is_permitted() -> None:
    never = [sys.executable, "-c", "raise AssertionError('started')"]
    facts = cluster_machine(2)
    driver, software = facts.driver, facts.software
    assert read_multicast(laptop().driver, software, {}, never) is None
    found = read_multicast(driver, software, {"NCCL_NVLS_ENABLE": "0"}, never)
    assert found == (False, "switched off by NCCL_NVLS_ENABLE=0")
    without = cluster_machine(2).driver.__class__(
        gpus=tuple(type(g)(**{**g.__dict__, "multicast": False}) for g in driver.gpus)
    )
    assert read_multicast(without, software, {}, never) == (False, "the device says that it has no multicast")
    found = read_multicast(driver, laptop().software, {}, never)
    assert found == (False, "not probed: the CUDA engine is not there")
    assert read_multicast(driver, software, {}, [sys.executable, "-c", ""]) == (
        True,
        "GPU 0: a multicast object was made, bound and freed",
    )
    found = read_multicast(driver, software, {}, never)
    assert found is not None and not found[0] and "started" in found[1]


def test_a_reader_that_hangs_or_fails_costs_one_line(monkeypatch: Any) -> None:
    made, problem = within(0.1, lambda: time.sleep(30), None)
    assert made is None and problem == "no answer within 0.1 s"
    made, problem = within(5, lambda: [][1], "otherwise")  # type: ignore[misc]
    assert made == "otherwise" and "IndexError" in problem
    facts = laptop()
    monkeypatch.setattr(examine, "READ_LIMIT_S", 0.2)
    monkeypatch.setattr(examine, "read_software", lambda: facts.software)
    monkeypatch.setattr(examine, "read_driver", lambda root: facts.driver)
    monkeypatch.setattr(examine, "read_network", lambda root: time.sleep(30))
    found = examine.check(*examine.gather(environment={}))
    assert found.problems == ("network: no answer within 0.2 s",) and found.exit_code == 0
