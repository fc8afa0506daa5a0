"""From facts to findings, on machines that are not here; the end agrees with `attach`'s verdict."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.doctor.trees import cluster_machine, gpu, laptop, line
from tide_comm.doctor import check_gpus, check_network, check_system
from tide_comm.doctor.examine import Examination, check
from tide_comm.doctor.facts import Facts, Finding, Network
from tide_comm.doctor.outcome import cuda_problem


def changed(facts: Facts, part: str, **changes: Any) -> Facts:
    return replace(facts, **{part: replace(getattr(facts, part), **changes)})


def one(examination: Examination, name: str) -> Finding:
    (finding,) = [f for f in examination.findings if f.name == name]
    return finding


def test_a_good_machine_has_nothing_to_mend() -> None:
    found = check(cluster_machine())
    assert {f.status for f in found.findings} == {"ok"}, [f for f in found.findings if f.status != "ok"]
    assert found.exit_code == 0 and found.outcome.engine == "cuda"
    assert "8 GPUs of this machine: the CUDA engine" == found.outcome.lines[0]
    assert found.outcome.lines[2] == "several machines: the CUDA engine, rails over NCCL"
    old = replace(cluster_machine(), software=replace(cluster_machine().software, nccl=22907))
    said = check(old).outcome.lines
    assert "several machines: stock communication (2 machines: NCCL 2.29.7 is too old: rails need 2.31.2" in said[2]
    assert "pip install --no-deps" in said[2] and said[1].endswith(": the CUDA engine")


def test_a_laptop_is_told_what_works_there() -> None:
    found = check(laptop())
    assert found.exit_code == 0 and found.outcome.engine == "host"
    assert {f.status for f in found.findings} == {"ok", "not_here"}
    assert "host engine" in found.outcome.lines[0] and any("tide plan" in line for line in found.outcome.lines)


MISSING: list[tuple[str, str, str, dict[str, Any]]] = [
    ("driver", "driver", "580 or newer", {"cuda": 12080, "version": "570.1"}),
    ("GPUs", "driver", "hide it", {"gpus": (gpu(0), gpu(1, capability=(8, 0)))}),
    ("GPUs", "driver", "none: TIDE's kernels", {"gpus": (gpu(0, capability=(8, 9)), gpu(1, capability=(8, 9)))}),
    ("GPUs", "driver", "at most 8", {"gpus": tuple(gpu(i) for i in range(16))}),
    ("peer access", "driver", "CUDA_VISIBLE_DEVICES", {"unreachable": ((0, 1), (1, 0))}),
    ("CUDA", "software", "cu130", {"torch_cuda": ""}),
    ("CUDA", "software", "driver 580", {"torch_cuda": "14.0"}),
    ("CUDA engine", "software", "nvcc 13", {"engine": "", "engine_problem": "the CUDA engine was not compiled"}),
    ("NCCL", "software", "nvidia-nccl-cu13", {"nccl": 0}),
    ("PyTorch", "software", "tested version", {"seam_problem": "PyTorch 2.14 is not among the tested. Install ..."}),
    ("machine", "system", "Linux", {"platform": "darwin"}),
]


@pytest.mark.parametrize("name, part, mend, changes", MISSING)
def test_what_is_missing_is_named_with_its_mend_and_the_engine_does_not_run(
    name: str, part: str, mend: str, changes: dict[str, Any]
) -> None:
    found = check(changed(cluster_machine(), part, **changes))
    finding = one(found, name)
    assert finding.status == "missing" and mend in finding.mend and finding.consequence
    assert found.exit_code == 1
    assert not found.outcome.works, "the verdict and the findings disagree"


WARNED: list[tuple[str, str, str, dict[str, Any]]] = [
    ("NCCL", "software", "no rails", {"nccl": 22907, "nccl_installed": "nvidia-nccl-cu13 2.29.7"}),
    ("NVLink", "driver", "PCIe", {"gpus": tuple(gpu(i, nvlinks=0) for i in range(8))}),
    ("NVLink", "driver", "slowest", {"gpus": tuple(gpu(i, nvlinks=18 - (i == 3)) for i in range(8))}),
    ("NVLink", "driver", "not be checked", {"gpus": tuple(gpu(i, nvlinks=None) for i in range(8))}),
    ("POSIX-fd handles", "driver", "CUDA IPC", {"gpus": tuple(gpu(i, posix_fd=False) for i in range(8))}),
    ("GPUDirect RDMA", "driver", "no rails", {"gpus": tuple(gpu(i, dma_buf=False) for i in range(8))}),
    ("network lines", "network", "share", {"lines": (line(0), line(1, active=False))}),
    ("network lines", "network", "no rails", {"lines": (line(0, active=False),)}),
    (
        "pause and ECN counters",
        "network",
        "less",
        {"lines": (*(line(i) for i in range(7)), line(7, counters_problem="no"))},
    ),
    ("CUDA_DEVICE_MAX_CONNECTIONS", "system", "slow", {"environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}),
    ("/dev/shm", "system", "data loaders", {"shm_bytes": 64 * 2**20}),
    ("locked memory", "system", "fails", {"memlock_bytes": 8 * 2**20}),
    ("machine", "driver", "order of stores", {"gpus": ()}),
]


@pytest.mark.parametrize("name, part, consequence, changes", WARNED)
def test_what_falls_back_is_a_warning_and_the_engine_runs(
    name: str, part: str, consequence: str, changes: dict[str, Any]
) -> None:
    facts = cluster_machine()
    if name == "machine":
        facts = changed(facts, "system", processor="aarch64")
    found = check(changed(facts, part, **changes))
    finding = one(found, name)
    assert finding.status == "warn" and consequence in finding.consequence and finding.mend
    assert found.exit_code == 0 and found.outcome.works


def test_findings_and_outcome_agree_in_every_combination() -> None:
    """No finding is missing exactly where `attach` would take the CUDA engine."""
    for _, part, _, changes in MISSING:
        for _, other, _, more in MISSING + WARNED:
            if (part == other and changes.keys() & more.keys()) or more.get("gpus") == ():
                continue
            facts = changed(changed(cluster_machine(), part, **changes), other, **more)
            found = check(facts)
            assert any(f.status == "missing" for f in found.findings) == (not found.outcome.works)


def test_gpus_without_a_driver_are_missed_and_a_display_card_is_not() -> None:
    there = changed(laptop(), "driver", compute_devices=("0000:19:00.0",))
    assert check(there).exit_code == 1 and "docker run --gpus all" in one(check(there), "driver").mend
    display = changed(laptop(), "driver", display_devices=("0000:01:00.0",))
    assert check(display).exit_code == 0 and one(check(display), "driver").status == "warn"
    hidden = changed(there, "system", environment={"CUDA_VISIBLE_DEVICES": ""})
    assert "CUDA_VISIBLE_DEVICES=''" in one(check(hidden), "driver").found


def test_one_gpu() -> None:
    found = check(replace(cluster_machine(1, 0), multicast=None))
    assert found.exit_code == 0 and "from two ranks on" in found.outcome.lines[0]
    assert one(found, "peer access").found == "one GPU"


def test_nccl_from_another_place_than_its_package() -> None:
    facts = changed(cluster_machine(), "software", nccl=22907, nccl_path="/opt/libnccl.so.2")
    finding = one(check(facts), "NCCL")
    assert "2.29.7, loaded from /opt/libnccl.so.2, though nvidia-nccl-cu13 2.31.2 is installed" == finding.found
    assert "LD_LIBRARY_PATH" in finding.mend


@pytest.mark.parametrize(
    "environment, named",
    [
        ({"NCCL_P2P_DISABLE": "1"}, "host memory"),
        ({"NCCL_P2P_DISABLE": "0"}, ""),
        ({"NCCL_P2P_LEVEL": "LOC"}, "host memory"),
        ({"NCCL_CUMEM_ENABLE": "0"}, "symmetric"),
        ({"NCCL_WIN_ENABLE": "0"}, "windows"),
        ({"NCCL_HOSTID": "x"}, "one host for several"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "nothing overlaps"),
        ({"NCCL_IB_DISABLE": "1"}, "no network line"),
        ({"NCCL_NET": "Socket"}, "IB transport"),
        ({"NCCL_NET": "IB", "NCCL_DEBUG": "INFO"}, ""),
        ({"NCCL_IB_HCA": "mlx5_1,mlx5_2"}, "2 of 8"),
        ({"NCCL_IB_HCA": "mlx5"}, ""),
    ],
)
def test_nccl_variables(environment: dict[str, str], named: str) -> None:
    finding = check_system.check_variables(changed(cluster_machine(), "system", environment=environment))
    assert finding.status == ("warn" if named else "ok")
    assert named in finding.consequence and (not named or f"unset {next(iter(environment))}" == finding.mend)


def test_the_names_that_nccl_takes() -> None:
    lines = [line(1), line(10), line(2), line(2, port=2)]

    def taken(value: str) -> list[str]:
        return [found.name for found in check_network.chosen_by(value, lines)]

    assert taken("") == [found.name for found in lines]
    assert taken("mlx5_1") == ["mlx5_1", "mlx5_10"] and taken("=mlx5_1") == ["mlx5_1"]
    assert taken("^mlx5_1") == ["mlx5_2", "mlx5_2:2"] and taken("^=mlx5_1") == ["mlx5_10", "mlx5_2", "mlx5_2:2"]
    assert taken("mlx5_2:2") == ["mlx5_2:2"]


def test_rails_that_are_aligned_shared_or_far() -> None:
    good = check_network.check_rails(cluster_machine())
    assert good.status == "ok" and good.found.endswith("GPU 6: mlx5_6, GPU 7: mlx5_7 (one PCIe switch)")
    fewer = check_network.check_rails(cluster_machine(8, 4))
    # GPUs 4 to 7 are on the other NUMA node, all lines near GPUs of the first one.
    assert fewer.status == "warn"
    facts = cluster_machine(2, 2)
    shared = replace(facts, network=Network((line(0), line(0, device="mlx5_9"))))
    assert "GPU 1: mlx5_9 (one NUMA node)" in check_network.check_rails(shared).found
    far = replace(facts, network=Network((line(0), line(1, path=("pci0000:f0", "0000:f0:00.0"), numa=1))))
    finding = check_network.check_rails(far)
    assert finding.status == "warn"
    unseen = changed(facts, "driver", gpus=(gpu(0, path=()), gpu(1, path=())))
    assert "not known how far" in check_network.check_rails(unseen).found


def test_multicast_that_is_switched_off_is_no_fault() -> None:
    facts = replace(cluster_machine(), multicast=(False, "switched off by NCCL_NVLS_ENABLE=0"))
    finding = check_gpus.check_multicast(facts)
    assert finding.status == "ok" and "write to each GPU by itself" in finding.consequence and not finding.mend
    failed = check_gpus.check_multicast(replace(facts, multicast=(False, "the probe failed")))
    assert failed.status == "warn" and failed.consequence == finding.consequence and "fabricmanager" in failed.mend
    assert "all-gathers write to all GPUs" in failed.needed and "reads the switch's sum" in failed.needed


def test_numbers() -> None:
    assert check_gpus.numbers([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert check_gpus.cuda_text(12080) == "12.8"


def test_no_finding_is_long_or_without_need() -> None:
    for facts in (cluster_machine(), laptop()):
        for finding in check(facts).findings:
            assert finding.needed and finding.found and len(finding.name) < 29
            assert finding.status != "missing" or (finding.consequence and finding.mend)


def test_the_words_are_those_of_attach() -> None:
    """Capability and peer access: the function that attach calls on a live GPU."""
    facts = changed(cluster_machine(2), "driver", gpus=(gpu(0), gpu(1, capability=(8, 0))))
    assert cuda_problem(facts) == "compute capability 8.0, below 9.0"
    facts = changed(cluster_machine(2), "driver", unreachable=((1, 0),))
    assert cuda_problem(facts) == "GPU 1 has no peer access to GPU 0"
