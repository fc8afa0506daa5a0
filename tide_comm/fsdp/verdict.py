"""Which groups TIDE can carry, and why not the others: a pure function of facts about the group and of capabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tide_comm.config import TideConfig

MAX_LANES = 8
OLDEST_CAPABILITY = (9, 0)

ONE_RANK = "its shard group has one rank: nothing to communicate"
"""Not a fallback: `strict` does not object to it (experts whose expert parallelism takes all ranks)."""


@dataclass(frozen=True)
class Capabilities:
    """What the machine offers; probed live, or given to plan for another one."""

    device: str
    engine: bool
    engine_reason: str = ""
    rail_reason: str = ""
    """Why the rail that was asked for, or the one that is needed, is not to be had; "" if it is."""


@dataclass(frozen=True)
class GroupFacts:
    """What decides about one FSDP parameter group; the same on all ranks, or the ranks' verdicts are combined."""

    name: str
    trainable: int
    shard_ranks: int
    machines: int
    hosts: int
    lanes: int
    topology_error: str
    reduce_dtype: str | None
    comm_dtypes: tuple[str, ...]
    cpu_offload: bool
    extensions: bool
    custom_comm: bool
    subclass: str
    spmd_types: bool


def verdict(facts: GroupFacts, config: TideConfig, capabilities: Capabilities) -> str:
    """Why the group stays on stock communication, or "" if TIDE carries it."""
    if config.comm != "tide":
        return f'comm = "{config.comm}" was asked for'
    if facts.shard_ranks == 1:
        return ONE_RANK
    if not capabilities.engine:
        return capabilities.engine_reason
    if facts.trainable > config.max_group_params:
        return f"{facts.trainable} trainable tensors, more than max_group_params = {config.max_group_params}"
    if facts.topology_error:
        return facts.topology_error
    if facts.machines > 1 and capabilities.rail_reason:
        return f"{facts.machines} machines: {capabilities.rail_reason}"
    if facts.lanes > MAX_LANES:
        return f"{facts.lanes} GPUs a machine, more than {MAX_LANES}"
    if facts.cpu_offload:
        return "CPU offload"
    if facts.extensions:
        return "fsdp_pre_all_gather (quantised all-gather)"
    if facts.custom_comm:
        return "a custom communication object is set already"
    if facts.subclass:
        return f"sharded parameters are tensors of type {facts.subclass}"
    if facts.spmd_types:
        return "parameters annotated with spmd_types"
    if facts.reduce_dtype in ("float16", "float64"):
        return f"{facts.reduce_dtype} reduction"
    if "float64" in facts.comm_dtypes:
        return "float64 parameters"
    return ""


def capabilities_of(device: str, cuda_problem: str = "", rail_problem: str = "") -> Capabilities:
    """What the engine for devices of this type offers. `cuda_problem`: why the CUDA engine cannot run on this GPU, or "";
    `rail_problem`: the reason of `rails.choose` where it finds no rail, else ""."""
    if device == "cpu":
        return Capabilities("cpu", True, rail_reason=rail_problem)
    if device != "cuda":
        return Capabilities(device, False, f"no engine for {device}: TIDE takes CUDA GPUs and the CPU")
    return Capabilities("cuda", not cuda_problem, cuda_problem, rail_problem)


def gpu_problem(index: int, capability: tuple[int, int], unreachable: Sequence[int]) -> str:
    """Why the CUDA engine cannot run on GPU `index`, or "". `unreachable`: the GPUs to which it has no peer access."""
    if capability < OLDEST_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]}, below {'.'.join(map(str, OLDEST_CAPABILITY))}"
    for other in unreachable:
        return f"GPU {index} has no peer access to GPU {other}"
    return ""
