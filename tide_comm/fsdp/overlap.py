"""`Report.overlap`: the first units' all-gathers start while the optimizer still updates the rest of the model.

The first all-gather of a step has nothing to hide behind: forward waits for it. Its parameters are ready long before the optimizer has
ended if the optimizer takes them first. So a hook before `optimizer.step` updates the first units' parameters, launches their all-gathers
(`FSDPModule.unshard(async_op=True)`, whose result forward finds), and leaves the rest to the step itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from tide_comm.errors import TideError

if TYPE_CHECKING:
    from tide_comm.fsdp.attachment import Attachment
    from tide_comm.fsdp.group import TideGroup

ELEMENTWISE: tuple[type[Optimizer], ...] = (Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, SGD)
"""Optimizers whose update of an element depends on that element's parameter alone: their order changes no bit."""
UNITS_AHEAD = 2


class Overlap:
    """Hooks on one optimizer."""

    def __init__(self, attachment: Attachment, optimizer: Optimizer) -> None:
        """Raises `TideError` if updating some parameters before the others could change a result."""
        if type(optimizer) not in ELEMENTWISE:
            names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
            raise TideError(
                f"overlap takes PyTorch's optimizers that update each element by itself ({names}); got {type(optimizer).__name__}, "
                "whose result might depend on which parameters are updated together"
            )
        self.attachment, self.optimizer = attachment, optimizer
        self._all: list[list[torch.Tensor]] = []
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(lambda *unused: self._restore()),
        ]

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._restore()  # a step that raised has not
        units = self._units()
        if args[1:] or kwargs or not units:
            return  # with a closure, gradients are not there yet
        groups = optimizer.param_groups
        self._all = [group["params"] for group in groups]
        step = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]  # without hooks
        taken: set[int] = set()
        for unit in units:
            ids = {id(p.sharded_param) for p in unit.group.fsdp_params}
            for group, params in zip(groups, self._all, strict=True):
                group["params"] = [p for p in params if id(p) in ids]
            step(optimizer)
            unit.group.modules[0].unshard(async_op=True)  # type: ignore[operator]
            unit.stats["gathered_ahead"] += 1
            taken |= ids
        for group, params in zip(groups, self._all, strict=True):
            group["params"] = [p for p in params if id(p) not in taken]

    def _restore(self) -> None:
        for group, params in zip(self.optimizer.param_groups, self._all, strict=bool(self._all)):
            group["params"] = params
        self._all = []

    def _units(self) -> list[TideGroup]:
        """The first units of the last forward that this optimizer updates wholly, as far as slots are free."""
        mine = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        found: list[TideGroup] = []
        for unit in self.attachment.take_order():
            trainable = {id(p.sharded_param) for p in unit.group.fsdp_params if p.sharded_param.requires_grad}
            domain = unit.domain
            ahead = sum(other.domain is domain for other in found)
            if len(found) == UNITS_AHEAD or not trainable <= mine or ahead >= len(domain.ledger.free):
                break
            if unit.slot is None:
                found.append(unit)
        return found

    def remove(self) -> None:
        """Leave the optimizer as it was."""
        self._restore()
        for handle in self._handles:
            handle.remove()
