"""From FSDP2's objects to layouts and facts: the only place that reads shapes and dtypes out of FSDPParamGroup."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from tide_comm.errors import TideError
from tide_comm.plan.layout import GroupLayout, ParamLayout


@dataclass(frozen=True)
class Unit:
    """One FSDP parameter group with parameters, by name.

    `depth` counts the groups around it, itself included; `prefetch` the groups that it asks for ahead; `siblings` the groups of its FSDP
    module, itself included; `modules` the modules that share it: it stays unsharded from the first one's forward to the last one's, and
    others run between.
    """

    name: str
    group: FSDPParamGroup
    depth: int
    keeps_slot: bool
    prefetch: int
    modules: int = 1
    siblings: int = 1


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def units_of(parts: Sequence[nn.Module]) -> list[Unit]:
    """All groups with parameters of all parts, in module order, each once.

    Raises `TideError` if there is no FSDP module at all.
    """
    units: list[Unit] = []
    seen: set[int] = set()
    found = False
    for i, part in enumerate(parts):
        prefix = f"part{i}." if len(parts) > 1 else ""
        names: dict[int, list[str]] = {}
        modules = [(name, m) for name, m in part.named_modules() if isinstance(m, FSDPModule)]
        for name, module in modules:
            names.setdefault(id(module._get_fsdp_state()), []).append(name or "(root)")
        for name, module in modules:
            found = True
            state = module._get_fsdp_state()
            if id(state) in seen:
                continue
            seen.add(id(state))
            around = [m for n, m in modules if m is module or n == "" or name.startswith(n + ".")]
            depth = sum(len(m._get_fsdp_state()._fsdp_param_groups) for m in around)
            is_root = len(around) == 1
            groups = state._fsdp_param_groups
            prefetch = max(
                sum(len(ahead._fsdp_param_groups) for ahead in states)
                for states in (state._states_to_forward_prefetch, state._states_to_backward_prefetch)
            )
            for k, group in enumerate(groups):
                if not group.fsdp_params:
                    continue
                label = prefix + ", ".join(names[id(state)]) + (f" #{k}" if len(groups) > 1 else "")
                auto = is_root and getattr(state, "_auto_reshard_after_forward", False)
                keeps = auto or group.post_forward_mesh_info is None
                units.append(Unit(label, group, depth, keeps, prefetch, len(group.modules), len(groups)))
    if not found:
        raise TideError(
            "attach found no FSDP2 module: call fully_shard on the model first (TIDE replaces FSDP2's communication; DDP, simple_fsdp and "
            "models on one rank have none)"
        )
    return units


def shard_group(group: FSDPParamGroup) -> dist.ProcessGroup | None:
    info = group.mesh_info
    return info.shard_process_group if isinstance(info, FSDPMeshInfo) else None


def comm_dtype(param: FSDPParam) -> torch.dtype:
    """The dtype that the all-gather moves: mixed precision's, for floating-point parameters."""
    orig = param.sharded_param.dtype
    wanted = param.mp_policy.param_dtype
    return wanted if wanted is not None and orig.is_floating_point else orig


def layout_of(unit: Unit, world: int) -> GroupLayout:
    """The group's layout; a parameter's shape is what FSDP shards (local to a TP rank)."""
    params = tuple(
        ParamLayout(
            f"{param._module_info.param_name}#{i}",
            tuple(param._orig_size),
            dtype_name(param.sharded_param.dtype),
            dtype_name(comm_dtype(param)),
            world,
            param.fsdp_placement.dim,
        )
        for i, param in enumerate(unit.group.fsdp_params)
    )
    return GroupLayout(unit.name, params, world)


def reduce_dtype(unit: Unit) -> str | None:
    """The dtype that gradients are reduced in; None for a group without trainable parameters."""
    for param in unit.group.fsdp_params:
        if param.sharded_param.requires_grad:
            return dtype_name(param.mp_policy.reduce_dtype or comm_dtype(param))
    return None


def local_tensor(param: FSDPParam) -> torch.Tensor:
    sharded = param.sharded_param
    return sharded._local_tensor if isinstance(sharded, DTensor) else sharded


def is_cpu_offloaded(unit: Unit) -> bool:
    return isinstance(unit.group.offload_policy, CPUOffloadPolicy)


def has_extensions(unit: Unit) -> bool:
    return any(hasattr(local_tensor(p), "fsdp_pre_all_gather") for p in unit.group.fsdp_params)


def has_custom_comm(unit: Unit) -> bool:
    ours = type(unit.group._all_gather_comm) is DefaultAllGather
    return not (ours and type(unit.group._reduce_scatter_comm) is DefaultReduceScatter)


def subclass_of(unit: Unit) -> str:
    """The name of a tensor subclass among the local shards, or ""."""
    for param in unit.group.fsdp_params:
        local = local_tensor(param)
        if type(local) not in (torch.Tensor, nn.Parameter):
            return type(local).__name__
    return ""


def units_by_ranks(units: list[Unit]) -> dict[tuple[int, ...], list[Unit]]:
    """Each shard group's units, in order. A parameter group that is not sharded has this rank alone."""
    by_ranks: dict[tuple[int, ...], list[Unit]] = defaultdict(list)
    for unit in units:
        group = shard_group(unit.group)
        by_ranks[tuple(dist.get_process_group_ranks(group)) if group is not None else (dist.get_rank(),)].append(unit)
    return by_ranks


def has_spmd_types(unit: Unit) -> bool:
    """Annotated parameters, which FSDP2 knows since 2.14, shard and type their gradients in a way of their own."""
    return any(getattr(p, "is_spmd_types", False) for p in unit.group.fsdp_params)
