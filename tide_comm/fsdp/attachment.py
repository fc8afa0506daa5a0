"""What is alive between attach and detach: groups, domains, and the reductions whose tails are still to come."""

from __future__ import annotations

import atexit
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd import Variable

from tide_comm.engine.base import Launched
from tide_comm.fsdp.domain import Domain, exchange_over

if TYPE_CHECKING:
    from tide_comm.fsdp.early import EarlyReduce
    from tide_comm.fsdp.group import TideGroup
    from tide_comm.fsdp.overlap import Overlap

MAX_TAILS = 1
"""Reduce-scatters in flight when the next is launched: as FSDP2 keeps one input buffer."""


class Attachment:
    """Created by attach. The host has no device streams, so what FSDP2 would queue behind a reduce-scatter is kept here as a tail.

    Tails run in order, when too many wait and at the end of backward: at points that do not depend on timing. A tail may communicate
    (HSDP's all-reduce, hooks), as may units on stock in between, and ranks that do it in different orders wait for each other for ever.
    """

    def __init__(self) -> None:
        self.groups: list[TideGroup] = []
        self.domains: list[Domain] = []
        self.bound: dict[TideGroup, Launched] = {}
        self._tails: deque[tuple[Callable[[], Any], Launched]] = deque()
        self._handles: list[Any] = []
        self._reading: list[Launched] = []
        self._in_backward = False
        self.early: EarlyReduce | None = None
        """The group whose reduce-scatter has started in parts; one at a time."""
        self._order: dict[TideGroup, None] = {}
        self.overlaps: list[Overlap] = []
        _live.add(self)

    def watch(self, part: nn.Module) -> None:
        """At the end of a forward, groups that stay unsharded wait for their own pushes: an optimizer may write the shards next."""
        self._handles.append(part.register_forward_hook(lambda *unused: self.settle()))

    def settle(self) -> None:
        for launched in self.bound.values():
            launched.wait("sent")

    def used_in_forward(self, group: TideGroup) -> None:
        """Forward has waited for a group."""
        self._order.setdefault(group)

    def take_order(self) -> list[TideGroup]:
        """Groups in the order in which forward has used them since the last call."""
        order, self._order = list(self._order), {}
        return order

    def before_reduce(self) -> None:
        """Run all tails but MAX_TAILS; make sure that the rest runs when backward ends.

        Not those that happen to be done: a tail may be a blocking all-reduce (HSDP), and ranks that ran it at different points between
        other collectives (of tensor or expert parallelism, or of a group on stock) would wait for each other in a circle.
        """
        while len(self._tails) > MAX_TAILS:
            self._run_first()
        try:
            Variable._execution_engine.queue_callback(self._end_of_backward)
            self._in_backward = True
        except RuntimeError:
            # post_backward was called by hand: nothing would run the tail later.
            self._in_backward = False

    def add_tail(self, tail: Callable[[], Any], launched: Launched) -> None:
        """Keep a tail for later; `before_reduce` came before."""
        self._tails.append((tail, launched))
        self._reading.append(launched)
        if not self._in_backward:
            self.finish_reductions()

    def finish_reductions(self) -> None:
        """Every reduce-scatter launched so far is in `.grad`."""
        while self._tails:
            self._run_first()

    def _run_first(self) -> None:
        tail, _ = self._tails.popleft()
        tail()

    def complete_reductions(self) -> None:
        """And no gradient is held any more, also where pushes to a slow peer end after the own sums: as with FSDP2 after a backward."""
        self.finish_reductions()
        for launched in self._reading:
            launched.wait("grads_read")
        self._reading.clear()

    def _end_of_backward(self) -> None:
        self.complete_reductions()
        for domain in self.domains:
            domain.reconcile(self.groups)
            domain.engine.backward_ended()
        self.settle()

    def detach(self) -> None:
        """Collective: everything back to stock, the arenas closed. Harmless when it was done before."""
        self.finish_reductions()
        for handle in self._handles:
            handle.remove()
        for overlap in self.overlaps:
            overlap.remove()
        for group in self.groups:
            group.detach()
        for domain in self.domains:
            if domain.device.type != "cpu":
                torch.cuda.synchronize(domain.device)
            # Not dist.barrier: a group of two backends would run it on GPUs.
            exchange_over(domain.process_group)(None)
            domain.engine.close()
        self._handles, self.groups, self.domains, self.overlaps, self._order = [], [], [], [], {}

    def close(self) -> None:
        for domain in self.domains:
            domain.engine.close()


_live: weakref.WeakSet[Attachment] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for attachment in list(_live):
        attachment.close()
