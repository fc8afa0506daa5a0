"""What TIDE will do on a machine: the verdicts of `attach`, on facts that were read instead of asked for live."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from tide_comm.config import TideConfig
from tide_comm.doctor.check_gpus import ENGINE_CUDA, cuda_text
from tide_comm.doctor.facts import Facts
from tide_comm.engine.cuda.nccl import HOW_TO_GET, OLDEST, version_name
from tide_comm.fsdp.rails import choose
from tide_comm.fsdp.verdict import Capabilities, GroupFacts, capabilities_of, gpu_problem, verdict


@dataclass(frozen=True)
class Outcome:
    """`works`: TIDE's engine for the hardware that is there runs. `lines`: for people."""

    engine: str
    works: bool
    lines: tuple[str, ...]


def ordinary_group(ranks: int, hosts: int = 1, machines: int = 1) -> GroupFacts:
    """A group of a usual model, bf16 parameters and fp32 sums, over `ranks` ranks of `machines` machines on `hosts` hosts."""
    usual: dict[str, Any] = {
        "name": "layers.0",
        "trainable": 9,
        "shard_ranks": ranks,
        "machines": machines,
        "hosts": hosts,
        "lanes": ranks // machines,
        "topology_error": "",
        "reduce_dtype": "float32",
        "comm_dtypes": ("bfloat16",),
        "subclass": "",
    }
    # All other facts are flags that name something unusual.
    return GroupFacts(**{f.name: usual.get(f.name, False) for f in fields(GroupFacts)})


def cuda_problem(facts: Facts) -> str:
    """Why the CUDA engine cannot run on this machine's GPUs, or "": as `attach` would say it, or why it would not get so far."""
    software, driver = facts.software, facts.driver
    if not software.torch_cuda:
        return "PyTorch is built without CUDA"
    if driver.cuda // 1000 < int(software.torch_cuda.split(".")[0]):
        return f"the driver takes CUDA {cuda_text(driver.cuda)}, PyTorch is built with {software.torch_cuda}"
    if not software.nccl:
        return "PyTorch loads no NCCL, without which FSDP2 itself does not run on GPUs"
    if not software.engine:
        return software.engine_problem or "the CUDA engine is not there"
    if driver.cuda // 1000 < ENGINE_CUDA:
        return f"the driver takes CUDA {cuda_text(driver.cuda)}, the CUDA engine needs {ENGINE_CUDA}.0"
    for gpu in driver.gpus:
        unreachable = [b for a, b in driver.unreachable if a == gpu.index]
        if problem := gpu_problem(gpu.index, gpu.capability, unreachable):
            return problem
    return ""


def outcome(facts: Facts) -> Outcome:
    if facts.software.seam_problem:
        return Outcome("none", False, (f"nothing: {facts.software.seam_problem}",))
    if facts.system.platform != "linux":
        return Outcome("none", False, ("nothing: TIDE's engines run on Linux only",))
    if facts.driver.gpus:
        return _on_gpus(facts)
    return _on_cpu(facts)


def nccl_problem(facts: Facts) -> str:
    """Why NCCL cannot carry what crosses machines, as far as one machine can tell, or ""."""
    software = facts.software
    if software.nccl < OLDEST:
        return f"NCCL {version_name(software.nccl)} is too old: rails need {version_name(OLDEST)}. {HOW_TO_GET}"
    return ""


def _on(device: str, facts: GroupFacts, cuda_problem: str = "", nccl: str = "") -> Capabilities:
    """With the rail that "auto" chooses for such a group."""
    rail = choose("auto", device, facts.machines, facts.hosts, (nccl, ""))
    return capabilities_of(device, cuda_problem, rail.reason if rail and not rail.name else "")


def _says(facts: GroupFacts, capabilities: Capabilities, engine: str) -> str:
    reason = verdict(facts, TideConfig(), capabilities)
    return f"stock communication ({reason})" if reason else engine


def _on_cpu(facts: Facts) -> Outcome:
    engine = "the host engine, to be right and to be tried, not to be fast"
    groups = ordinary_group(4), ordinary_group(4, machines=2), ordinary_group(8, hosts=2, machines=2)
    one, emulated, several = (_says(group, _on("cpu", group), engine) for group in groups)
    lines = [
        f"ranks on this CPU: {one}",
        f"several machines emulated here (gpus_per_machine): {emulated}",
        f"several machines: {several}",
        "without a GPU also: `tide check`, `tide plan` (what TIDE would do on a cluster), the tests",
    ]
    # A GPU that is there, and cannot be used, is not what TIDE runs on by choice.
    return Outcome("host", not facts.driver.compute_devices, tuple(lines))


def _on_gpus(facts: Facts) -> Outcome:
    problem = cuda_problem(facts)
    count = len(facts.driver.gpus)
    ranks = max(2, count)
    here = capabilities_of("cuda", problem)
    within = _says(ordinary_group(ranks), here, "the CUDA engine")
    alone = " (from two ranks on; a single one has nothing to communicate)" if count == 1 and not problem else ""
    divided, several = ordinary_group(ranks - ranks % 2, machines=2), ordinary_group(2 * ranks, hosts=2, machines=2)
    emulated = _says(divided, _on("cuda", divided, problem), "the CUDA engine")
    rails = _on("cuda", several, problem, nccl_problem(facts))
    lines = [
        f"{count} GPU{'s' if count > 1 else ''} of this machine: {within}{alone}",
        f"several machines emulated here (gpus_per_machine): {emulated}",
        f"several machines: {_says(several, rails, 'the CUDA engine, rails over NCCL')}",
    ]
    works = not verdict(ordinary_group(ranks), TideConfig(), here)
    return Outcome("cuda" if works else "stock", works, tuple(lines))
