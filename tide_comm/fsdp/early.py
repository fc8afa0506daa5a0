"""`early_reduce`: a group's reduce-scatter starts part by part, as autograd hands out gradients, while the group's backward still runs.

At few tokens a block's gradients are ready one after another over milliseconds, and the last block's reduce-scatter has nothing to hide
behind: with parts, what is left when backward ends is the last part's. Parts and their order are the plan's (`plan.parts`), equal on all
ranks; a part starts when its own gradients and all parts before it are there, so ranks launch the same programs in the same order whatever
order autograd takes. What has not started when FSDP2 reduces the group goes then, in one piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from tide_comm.errors import TideError
from tide_comm.fsdp.describe import dtype_name
from tide_comm.fsdp.reduction import Reduction, Settings
from tide_comm.plan.parts import parts_of

if TYPE_CHECKING:
    from tide_comm.fsdp.group import TideGroup


def why_whole(tide: TideGroup, parts: Sequence[Sequence[int]]) -> str:
    """Why a group's reduce-scatter goes as a whole, or "" if it may start in parts."""
    config, group = tide.domain.config, tide.group
    if not config.early_reduce:
        return "early_reduce = false"
    if not config.reduce_scatter:
        return "reduce_scatter = false"
    if config.memory_mode == "slot_reuse":
        return "Slot-Reuse: the slot still holds parameters"
    if len(group.modules) > 1 or group._num_param_groups > 1:
        return "several modules or parameter groups in one unit"
    if any(isinstance(m, FSDPModule) for m in group.modules[0].modules() if m is not group.modules[0]):
        return "other units inside it"
    if any(p.is_dtensor for p in group.fsdp_params):
        return "its gradients are DTensors (tensor parallelism)"
    if len({p.comm_dtype for p in tide.layout.params}) > 1:
        return "parameters of several dtypes"
    if not parts:
        return f"less than two parts of early_part_bytes = {config.early_part_bytes}"
    return ""


class EarlyReduce:
    """One group's parts in the backward that runs."""

    def __init__(self, tide: TideGroup) -> None:
        self.tide = tide
        params = tide.group.fsdp_params
        trainable = tuple(i for i, p in enumerate(params) if p.sharded_param.requires_grad)
        self.parts = parts_of(tide.layout, trainable, tide.domain.config.early_part_bytes)
        self.part_of = {i: k for k, part in enumerate(self.parts) for i in part}
        self.why_whole = why_whole(tide, self.parts)
        self._hooked: dict[int, tuple[torch.Tensor, Any]] = {}
        self.forget()
        if not self.why_whole:
            vars(tide.group)["pre_backward"] = self._pre_backward  # shadows the class's

    def forget(self) -> None:
        """Nothing has been started."""
        self._open = False
        self._next = 0
        self._arrived: set[int] = set()
        self.begun: Reduction | None = None
        if self.tide.attachment.early is self:
            self.tide.attachment.early = None

    def _pre_backward(self, *args: Any) -> None:
        FSDPParamGroup.pre_backward(self.tide.group, *args)
        if self.begun is not None:
            return  # the module ran twice in forward: its backward goes on
        group = self.tide.group
        self.forget()
        # Gradients of backwards that were not reduced are added by FSDP2 when it reduces.
        accumulated = any(p.unsharded_accumulated_grad is not None for p in group.fsdp_params)
        # With reduce_scatter_unused_params a gradient may never come on one rank and come on another.
        self._open = group.reduce_grads and not accumulated and not group.reduce_scatter_unused_params
        if self._open:
            self._hook()

    def _hook(self) -> None:
        """Hear of every gradient; FSDP2 makes the parameters that autograd sees at the first unshard."""
        for i, param in enumerate(self.tide.group.fsdp_params):
            leaf = getattr(param, "_unsharded_param", None)
            known = self._hooked.get(i)
            if leaf is None or not leaf.requires_grad or (known is not None and known[0] is leaf):
                continue
            if known is not None:
                known[1].remove()
            self._hooked[i] = leaf, leaf.register_post_accumulate_grad_hook(partial(self._on_grad, i))

    def _on_grad(self, index: int, leaf: torch.Tensor) -> None:
        if not self._open:
            return
        if self.part_of.get(index, self._next) < self._next:
            raise TideError(
                f"{self.tide.layout.name}.{self.tide.layout.params[index].name} got a second gradient in one backward, after "
                "early_reduce had sent the first. Set early_reduce = false for a model that uses a block several times"
            )
        self._arrived.add(index)
        while self._next < len(self.parts) and self._arrived.issuperset(self.parts[self._next]):
            if not self._start(self.parts[self._next]):
                self._open = False
                return
            self._next += 1

    @torch.no_grad()
    def _start(self, part: tuple[int, ...]) -> bool:
        """Launch a part; False if this group has to go as a whole from here on."""
        tide, attachment = self.tide, self.tide.attachment
        if attachment.early not in (None, self):
            return False  # one group at a time, or branches of a model could interleave differently on ranks
        grads = [tide.group.fsdp_params[i].unsharded_grad_data for i in part]
        dtype = grads[0].dtype
        if any(g.dtype != dtype for g in grads) or (
            self.begun is not None and self.begun.grad_dtype != dtype_name(dtype)
        ):
            return False
        if self.begun is None:
            everything = tuple(i for i, p in enumerate(tide.group.fsdp_params) if p.unsharded_param.requires_grad)
            self._release_inputs()
            self.begun = tide.begin_reduction(everything, dtype, Settings.of(tide.group))
            if self.begun is None:
                return False
            attachment.early = self
        tide.launch_reduction(self.begun, part, grads)
        tide.stats["early_parts"] += 1
        return True

    def _release_inputs(self) -> None:
        """What FSDP2 does before it reduces a group, done when the first part starts: gradients of groups before are let go, so that OUT,
        which is there earlier than without parts, does not add to the peak."""
        context = self.tide.group.comm_ctx
        states = context.reduce_scatter_states
        while len(states) >= context.reduce_scatter_max_input_buffers:
            oldest = states.pop(0)
            if oldest.event is not None:
                torch.cuda.current_stream(self.tide.domain.device).wait_event(oldest.event)

    def take(self) -> Reduction | None:
        """What was started; FSDP2 reduces the group now."""
        begun = self.begun
        self.forget()
        return begun

    def abandon(self) -> None:
        """Let what was started end: FSDP2 has dropped this backward."""
        if self.begun is not None:
            for launched in self.begun.launches:
                launched.wait("done")
                launched.wait("grads_read")
        self.forget()

    def detach(self) -> None:
        for _, handle in self._hooked.values():
            handle.remove()
        self._hooked.clear()
        vars(self.tide.group).pop("pre_backward", None)
