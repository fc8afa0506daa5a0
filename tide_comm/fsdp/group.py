"""One FSDP2 parameter group on TIDE: what happens at its all-gather, its free and its reduce-scatter."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.fsdp._fully_shard._fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from tide_comm.engine.base import Buffers, Launched
from tide_comm.errors import TideError
from tide_comm.fsdp import params as windows
from tide_comm.fsdp.comms import Tail, TideAllGather, TideReduceScatter
from tide_comm.fsdp.describe import comm_dtype, dtype_name
from tide_comm.fsdp.domain import Domain
from tide_comm.fsdp.early import EarlyReduce
from tide_comm.fsdp.reduction import Reduction, Settings, joined, on_stream
from tide_comm.plan.all_gather import all_gather, vacate
from tide_comm.plan.layout import GroupLayout
from tide_comm.plan.program import Area, Program
from tide_comm.plan.reduce_scatter import reduce_scatter
from tide_comm.plan.slices import shard_elements

if TYPE_CHECKING:
    from tide_comm.fsdp.attachment import Attachment

GRAD_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
REDUCE_DTYPES = (torch.bfloat16, torch.float32)


class Gathered:
    """Stands in for FSDP2's AllGatherResult, of which stock code reads the event and the work."""

    all_gather_event = None
    all_gather_work = None

    def __init__(self, launched: Launched) -> None:
        self.launched = launched


class TideGroup:
    """Owns the group's place in the arena. `slot` is the slot it holds, from the launch of its all-gather to the vacating."""

    def __init__(
        self, attachment: Attachment, domain: Domain, group: FSDPParamGroup, layout: GroupLayout, shard_base: int
    ) -> None:
        self.attachment = attachment
        self.domain = domain
        self.group = group
        self.layout = layout
        self.shard_base = shard_base
        self.stats: Counter[str] = Counter()
        self.slot: int | None = None
        self.gathered: Gathered | None = None
        self.kept_for_reduce = False
        self.index: dict[FSDPParam, int] = {p: i for i, p in enumerate(group.fsdp_params)}
        self._programs: dict[Any, Program] = {}
        config = domain.config
        if config.all_gather:
            self.params = [windows.adopt(p, self, i) for i, p in enumerate(group.fsdp_params)]
            group._all_gather_comm = TideAllGather(self)
        if config.reduce_scatter:
            group._reduce_scatter_comm = TideReduceScatter(self)
        vars(group)["_reset_iter_state"] = self.reset  # shadows the class's
        self.early = EarlyReduce(self)
        rank, topology = domain.rank, domain.topology
        at_once = domain.multicast_bytes
        self._all_gather = all_gather(layout, topology, rank, shard_base, config.head_bytes, at_once)
        self._vacate = vacate(topology, rank)
        self._vacate_reduced = vacate(topology, rank, reduced_from=True)

    # All-gather

    def unshard(self, stream: Any) -> Gathered | None:
        """Launch the all-gather; None if stock has to run it (all slots held, or the group is resharded to a smaller mesh).

        `stream` is FSDP2's stream for copies into an all-gather. It is behind the optimizer, but not behind compute that is still queued,
        so that all-gathers run ahead.
        """
        if self.group.fsdp_params[0].sharded_state != ShardedState.SHARDED:
            self.stats["all_gathers_stock"] += 1
            return None
        self.domain.reconcile(self.attachment.groups)
        self._check_dtypes()
        slot = self.domain.ledger.acquire(self.layout.name)
        if slot is None:
            self.stats["all_gathers_stock"] += 1
            return None
        moved = 0
        for i, param in enumerate(self.params):
            if self.layout.params[i].in_shard and self.layout.params[i].chunk:
                moved += windows.move_shard(param, windows.shard_window(self, i))
        self.stats["shards_moved"] += moved
        buffers = Buffers(params=[p._sharded_param_data for p in self.params])
        self.slot = slot
        with on_stream(stream, self.domain.device, behind_current=moved > 0):
            launched = self.domain.engine.launch(self._all_gather, slot, buffers, self.domain.ledger.hash)
        self.gathered = Gathered(launched)
        self.stats["all_gathers"] += 1
        self.stats["bytes_gathered"] += self.layout.bytes_unsharded
        return self.gathered

    def _check_dtypes(self) -> None:
        for param, layout in zip(self.params, self.layout.params, strict=True):
            got = dtype_name(param._sharded_param_data.dtype)
            if got != layout.param_dtype or dtype_name(comm_dtype(param)) != layout.comm_dtype:
                raise TideError(
                    f"{self.layout.name}.{layout.name} is {got} now and was {layout.param_dtype} when TIDE was attached: "
                    "change dtypes before attach, or detach and attach again"
                )

    def wait_for_unshard(self, gathered: Gathered) -> None:
        """Order compute behind the arrival, and bind every parameter to its place in the slot."""
        gathered.launched.wait("arrived")
        self.gathered = None
        if self.group._training_state == TrainingState.FORWARD:
            self.attachment.used_in_forward(self)
        assert self.slot is not None
        for i, param in enumerate(self.params):
            layout = self.layout.params[i]
            window = self.domain.engine.window(Area.SLOT, self.slot, self.layout.slot_offsets[i], layout.slot_bytes)
            windows.bind_to_slot(param, window, comm_dtype(param))
        self.attachment.bound[self] = gathered.launched

    def on_param_freed(self) -> None:
        """The last parameter of the group was freed: the slot is vacated, or kept for the gradients (Slot-Reuse)."""
        if any(p.tide_bound for p in self.params):
            return
        self.attachment.bound.pop(self, None)
        group, config = self.group, self.domain.config
        self.kept_for_reduce = (
            config.memory_mode == "slot_reuse"
            and config.reduce_scatter
            and group._training_state == TrainingState.POST_BACKWARD
            and group.reduce_grads
        )
        if not self.kept_for_reduce:
            self._give_back(self._vacate)

    def _give_back(self, program: Program) -> None:
        assert self.slot is not None
        self.domain.engine.launch(program, self.slot)
        self.domain.ledger.release(self.slot)
        self.slot, self.kept_for_reduce = None, False

    def give_back_unused(self) -> None:
        """An all-gather that FSDP2 dropped without waiting for it, or a slot kept for gradients that never came."""
        if self.kept_for_reduce:
            self._give_back(self._vacate)
        elif self.gathered is not None and self.group._all_gather_result is not self.gathered:
            launched, self.gathered = self.gathered.launched, None
            launched.wait("arrived")
            self._give_back(self._vacate)

    # Reduce-scatter

    def reduce(self, fsdp_params: list[FSDPParam], grads: list[torch.Tensor], settings: Settings) -> Tail | None:
        """Launch the reduce-scatter of these gradients, or what is left of it (`early_reduce`); None if stock has to run it. `grads` is
        emptied."""
        early = self.early.take()
        indices = tuple(self.index[p] for p in fsdp_params)
        dtypes = {g.dtype for g in grads}
        begun = early
        if early is not None:
            self._check_early(early, indices, dtypes, settings)
        elif len(dtypes) == 1:
            begun = self.begin_reduction(indices, grads[0].dtype, settings)
        if begun is None:
            self.stats["reduce_scatters_stock"] += 1
            self.domain.reconcile([self])
            return None
        from_slot = self.kept_for_reduce and all(self.layout.params[i].comm_dtype == begun.grad_dtype for i in indices)
        if self.kept_for_reduce and not from_slot:
            self.stats["slot_reuse_skipped"] += 1
            self._give_back(self._vacate)
        sizes = [g.size() for g in grads]
        nbytes = sum(g.nbytes for g in grads)
        left = {i: g for i, g in zip(indices, grads, strict=True) if i not in begun.started}
        grads.clear()
        pieces = [begun]
        complete = begun.out_params == indices
        rest = None
        if left and not complete:
            rest = self.begin_reduction(tuple(left), getattr(torch, begun.grad_dtype), settings)
        if rest is not None:
            pieces.append(rest)
        if left:
            self.launch_reduction(pieces[-1], tuple(left), list(left.values()), from_slot)
        left.clear()
        if not complete:
            # A gradient never came: OUT has room for it, and FSDP2 expects none.
            begun = joined(pieces, self.layout, indices)
        if from_slot:
            self._give_back(self._vacate_reduced)
            if self.domain.device.type != "cpu":
                # The copies are freed at once: compute waits for one short kernel here. The host engine lets go by itself.
                begun.launches[-1].wait("grads_read")
        self.stats["reduce_scatters"] += 1
        self.stats["bytes_reduced"] += nbytes
        self.stats["grads_copied_bytes" if from_slot else "grads_read_in_place_bytes"] += nbytes
        return Tail(begun.launched, begun.held, begun.out, sizes, begun.grad_dtype)

    def begin_reduction(
        self, out_params: tuple[int, ...], grad_dtype: torch.dtype, settings: Settings
    ) -> Reduction | None:
        """Room for the reduced shards of these parameters; None if TIDE does not take the dtypes."""
        out_dtype, stream = settings.out_dtype(grad_dtype), settings.reduce_scatter_stream
        if grad_dtype not in GRAD_DTYPES or out_dtype not in REDUCE_DTYPES:
            return None
        scale = settings.scale(grad_dtype, self.domain.device, self.domain.topology.world)
        with on_stream(stream, self.domain.device):
            # The memory may be that of an earlier group's OUT, which FSDP2's tail still reads on this stream: it casts it or adds it to a
            # gradient. With deterministic algorithms on, PyTorch also fills it here.
            out = torch.empty(shard_elements(self.layout, out_params), dtype=out_dtype, device=self.domain.device)
            ready = None if self.domain.device.type == "cpu" else stream.record_event()
        return Reduction(settings, out_params, dtype_name(grad_dtype), out, scale, ready)

    def launch_reduction(
        self, begun: Reduction, indices: tuple[int, ...], grads: list[torch.Tensor], from_slot: bool = False
    ) -> None:
        """Launch the reduce-scatter of some of `begun`'s parameters."""
        held: list[torch.Tensor | None] = [None] * len(self.layout.params)
        for i, grad in zip(indices, grads, strict=True):
            held[i] = grad if grad.is_contiguous() else grad.contiguous()
            self.stats["grads_made_contiguous_bytes"] += 0 if grad.is_contiguous() else grad.nbytes
        program = self._reduce_program(indices, begun, from_slot)
        tag = self.domain.ledger.note(f"reduce_scatter {indices} {begun.grad_dtype}", self.layout.name)
        buffers = Buffers(grads=held, out=begun.out, scale=begun.scale, out_ready=begun.ready)
        slot = self.slot if from_slot and self.slot is not None else -1
        begun.launches.append(self.domain.engine.launch(program, slot, buffers, tag))
        begun.held.append(held)
        begun.started.update(indices)

    def _check_early(
        self, early: Reduction, indices: tuple[int, ...], dtypes: set[torch.dtype], settings: Settings
    ) -> None:
        """What parts were started with still holds when FSDP2 reduces the group. Raises `TideError` if not."""
        found = sorted(map(dtype_name, dtypes))
        what = ""
        if found != [early.grad_dtype]:
            what = f"gradients are {', '.join(found)} and parts were sent as {early.grad_dtype}"
        elif gone := sorted(early.started - set(indices)):
            what = f"gradients of {', '.join(self.layout.params[i].name for i in gone)} were sent and are gone"
        elif early.settings != settings:
            what = f"the reduction was {early.settings} when parts were sent and is {settings}"
        if what:
            raise TideError(f"{self.layout.name}: {what}. Set early_reduce = false")

    def _reduce_program(self, indices: tuple[int, ...], begun: Reduction, from_slot: bool) -> Program:
        out_params = begun.out_params if begun.out_params != indices else ()
        key = (indices, out_params, begun.grad_dtype, begun.out.dtype, from_slot)
        if key not in self._programs:
            domain = self.domain
            self._programs[key] = reduce_scatter(
                self.layout,
                domain.topology,
                domain.rank,
                domain.spec.stage,
                indices,
                begun.grad_dtype,
                dtype_name(begun.out.dtype),
                from_slot,
                domain.config.partial_blocks,
                domain.spec.inbox,
                domain.config.final_blocks,
                out_params,
            )
        return self._programs[key]

    def reset(self) -> None:
        """FSDP2's recovery from a forward or backward that raised. Nothing runs when such a backward ends, so tails still wait here; stock
        has these gradients in `.grad` by now."""
        self.early.abandon()
        self.attachment.complete_reductions()
        FSDPParamGroup._reset_iter_state(self.group)

    def detach(self) -> None:
        """Back to stock: parameters sharded, shards in private memory, communication objects FSDP2's own."""
        self.early.detach()
        if self.gathered is not None:
            self.group._all_gather_result = None  # launched ahead, and nobody has waited for it
        self.group._to_sharded()
        self.give_back_unused()
        if self.domain.config.all_gather:
            for i, param in enumerate(self.params):
                if self.layout.params[i].in_shard:
                    windows.move_shard_out(param)
                windows.release(param)
            self.group._all_gather_comm = collectives.DefaultAllGather()
        if self.domain.config.reduce_scatter:
            self.group._reduce_scatter_comm = collectives.DefaultReduceScatter()
        del vars(self.group)["_reset_iter_state"]
