"""The seam: four functions that FSDP2 looks up by name are rebound, and dispatch on the group's communication object.

Everything else (hooks, prefetching, states, HSDP, hooks on gradients) stays FSDP2's own code.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.fsdp._fully_shard._fsdp_collectives as collectives
import torch.distributed.fsdp._fully_shard._fsdp_param_group as param_group
from torch.utils._python_dispatch import _disable_current_modes

from tide_comm.fsdp import guard
from tide_comm.fsdp.comms import TideAllGather, TideReduceScatter
from tide_comm.fsdp.group import Gathered
from tide_comm.fsdp.reduction import Settings

_stock: dict[str, Any] = {}


def install() -> None:
    """Rebind, once a process. Raises `TideError` if PyTorch is not what the seam was tested with."""
    if _stock:
        return
    guard.check()
    _stock["all_gather"] = collectives.foreach_all_gather
    _stock["copy_out"] = collectives.foreach_all_gather_copy_out
    _stock["reduce"] = collectives.foreach_reduce
    _stock["copy_in"] = collectives.foreach_reduce_scatter_copy_in
    here: Any = param_group
    here.foreach_all_gather = foreach_all_gather
    here.foreach_all_gather_copy_out = foreach_all_gather_copy_out
    here.foreach_reduce = foreach_reduce
    there: Any = collectives
    there.foreach_reduce_scatter_copy_in = foreach_reduce_scatter_copy_in


def foreach_all_gather(
    fsdp_params: Any, group: Any, async_op: bool, copy_in_stream: Any, stream: Any, device: Any, comm: Any
) -> Any:
    """FSDP2's, or TIDE's for its groups."""
    if isinstance(comm, TideAllGather):
        # Selective checkpointing recomputes under dispatch modes, which must not see the engine's tensors.
        with torch.no_grad(), _disable_current_modes():
            gathered = comm.tide.unshard(copy_in_stream)
        if gathered is not None:
            return gathered
    return _stock["all_gather"](fsdp_params, group, async_op, copy_in_stream, stream, device, comm)


def foreach_all_gather_copy_out(result: Any, fsdp_params: Any, group: Any) -> None:
    """FSDP2's, or TIDE's: there is nothing to copy, parameters stand where they belong."""
    if not isinstance(result, Gathered):
        _stock["copy_out"](result, fsdp_params, group)
        return
    with torch.no_grad(), _disable_current_modes():
        fsdp_params[0].tide.wait_for_unshard(result)


def foreach_reduce(
    fsdp_params: Any,
    unsharded_grads: Any,
    reduce_scatter_group: Any,
    reduce_scatter_stream: Any,
    reduce_scatter_comm: Any,
    orig_dtype: Any,
    reduce_dtype: Any,
    device: Any,
    gradient_divide_factor: Any,
    all_reduce_group: Any,
    all_reduce_stream: Any,
    all_reduce_grads: bool,
    partial_reduce_output: Any,
    all_reduce_hook: Any,
    force_sum_reduction_for_comms: bool = False,
) -> Any:
    """FSDP2's, or TIDE's: gradients go to the engine at once, FSDP2's tail follows when the sums are there."""
    comm = reduce_scatter_comm
    tail = None
    if isinstance(comm, TideReduceScatter):
        comm.tide.attachment.before_reduce()
        settings = Settings(
            reduce_scatter_group,
            reduce_scatter_stream,
            reduce_dtype,
            gradient_divide_factor,
            all_reduce_group,
            force_sum_reduction_for_comms,
        )
        with torch.no_grad(), _disable_current_modes():
            tail = comm.tide.reduce(fsdp_params, unsharded_grads, settings)

    def stock(grads: Any) -> Any:
        return _stock["reduce"](
            fsdp_params,
            grads,
            reduce_scatter_group,
            reduce_scatter_stream,
            comm,
            orig_dtype,
            reduce_dtype,
            device,
            gradient_divide_factor,
            all_reduce_group,
            all_reduce_stream,
            all_reduce_grads,
            partial_reduce_output,
            all_reduce_hook,
            force_sum_reduction_for_comms,
        )

    if tail is None:
        return stock(unsharded_grads)

    def run_tail() -> Any:
        comm.tail = tail
        try:
            return stock(tail.stand_ins())
        finally:
            comm.tail = None

    if device.type != "cpu":
        # Streams order the tail behind the sums, so it is issued at once. FSDP2 keeps the gradients until compute has waited for their
        # reading, not for the reduced shard.
        read = tail.read_event()
        _, _, *rest = run_tail()
        return tail.held, read, *rest
    if all_reduce_group is not None and (partial_reduce_output is not None or not all_reduce_grads):
        # HSDP accumulates the reduced shard across backwards: FSDP2 keeps it, so it must be there when this returns.
        comm.tide.attachment.finish_reductions()
        _, _, stream, _, _, _, partial = run_tail()
        return tail.held, None, stream, None, None, None, partial
    comm.tide.attachment.add_tail(run_tail, tail.launched)
    return tail.held, None, reduce_scatter_stream, None, None, None, None


def foreach_reduce_scatter_copy_in(unsharded_grads: Any, reduce_scatter_input: Any, world_size: int) -> None:
    """FSDP2's, or nothing inside a TIDE tail, where gradients are stand-ins on the meta device."""
    if unsharded_grads and unsharded_grads[0].is_meta:
        return
    _stock["copy_in"](unsharded_grads, reduce_scatter_input, world_size)
