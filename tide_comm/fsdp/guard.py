"""Is this PyTorch the one that the seam was tested with? TIDE leans on FSDP2's internals, so a drift is one clear
error, never a wrong sum."""

from __future__ import annotations

import hashlib
import inspect

import torch
import torch.distributed.fsdp._fully_shard._fsdp_collectives as collectives
import torch.distributed.fsdp._fully_shard._fsdp_param as param
import torch.distributed.fsdp._fully_shard._fsdp_param_group as param_group

from tide_comm.errors import TideError

SIGNATURES = {
    "foreach_all_gather": "fsdp_params group async_op all_gather_copy_in_stream all_gather_stream device all_gather_comm",
    "foreach_all_gather_copy_out": "all_gather_result fsdp_params group",
    "foreach_reduce": "fsdp_params unsharded_grads reduce_scatter_group reduce_scatter_stream reduce_scatter_comm orig_dtype "
    "reduce_dtype device gradient_divide_factor all_reduce_group all_reduce_stream all_reduce_grads partial_reduce_output "
    "all_reduce_hook force_sum_reduction_for_comms",
    "foreach_reduce_scatter_copy_in": "unsharded_grads reduce_scatter_input world_size",
    "_get_gradient_divide_factors": "reduce_scatter_group all_reduce_group reduce_dtype device_type factor "
    "force_sum_reduction_for_comms",
}
"""Functions of _fsdp_collectives that are replaced or called, with their parameters."""

_SOURCES_2_13 = {
    "FSDPParamGroup.unshard": "63b4858bd8122192",
    "FSDPParamGroup.wait_for_unshard": "d8a22e680d60d77c",
    "FSDPParamGroup.pre_backward": "dc387e2644feb17b",
    "FSDPParamGroup.post_backward": "3c8bf9dee0f55861",
    "FSDPParamGroup.finalize_backward": "43e9475a329d4f9d",
    "FSDPParamGroup._reset_iter_state": "f0cd338bb447bbed",
    "FSDPParam.free_unsharded_param": "5d0205cdfe999fe5",
    "FSDPParam.init_unsharded_param": "8b4fc84a66856cf6",
    "FSDPParam.reset_sharded_param": "f911cdb84d020fc3",
    "foreach_reduce": "cc2a17ca7325d89e",
}

SOURCES = {
    "2.13": _SOURCES_2_13,
    # They gained only what concerns parameters annotated with spmd_types, which stay on stock.
    "2.14": _SOURCES_2_13
    | {
        "FSDPParamGroup.pre_backward": "a4813f93d3d3d429",
        "FSDPParamGroup.post_backward": "65e3fef1ac265f4c",
        "FSDPParam.init_unsharded_param": "267bab2156e22391",
    },
}
"""What the seam relies on without replacing it: a hash of each source, by minor version."""

TESTED = tuple(SOURCES)
"""Minor versions on which the seam's tests passed."""


def _source_hash(name: str) -> str:
    owner: object = collectives
    for home in (param_group, param):
        if hasattr(home, name.split(".")[0]) and "." in name:
            owner = home
    for part in name.split("."):
        owner = getattr(owner, part)
    text = inspect.getsource(inspect.unwrap(owner))  # type: ignore[arg-type]
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check() -> None:
    """Raises `TideError` naming what drifted, and how to go on."""
    minor = ".".join(torch.__version__.split(".")[:2])
    tested = minor in TESTED
    against = minor if tested else TESTED[-1]
    drift = _drift(SOURCES[against])
    if tested and not drift:
        return
    what = f"PyTorch {torch.__version__} is not " + (
        f"the {minor} that was tested" if tested else f"among the tested versions ({', '.join(TESTED)})"
    )
    if drift:
        what += f"; changed against {against}: {'; '.join(drift)}"
    raise TideError(f'{what}. Install a tested version, or set comm = "stock"')


def _drift(sources: dict[str, str]) -> list[str]:
    drift: list[str] = []
    for name, want in SIGNATURES.items():
        function = getattr(collectives, name, None)
        if function is None:
            drift.append(f"{name} is gone")
            continue
        got = " ".join(inspect.signature(inspect.unwrap(function)).parameters)
        if got != want:
            drift.append(f"{name} takes ({got}), expected ({want})")
    if not hasattr(torch.UntypedStorage, "_swap_data_ptr_"):
        drift.append("UntypedStorage._swap_data_ptr_ is gone")
    if not hasattr(torch._C, "_construct_storage_from_data_pointer"):
        drift.append("torch._C._construct_storage_from_data_pointer is gone")
    for name, want in sources.items():
        try:
            got = _source_hash(name)
        except AttributeError:
            drift.append(f"{name} is gone")
            continue
        if got != want:
            drift.append(f"the source of {name} changed")
    return drift
