"""The rows of step.py, and how one model goes from one to the next between two steps.

TIDE is attached once, and a row says who communicates from there on: FSDP2's own objects, PyTorch's symmetric memory or TIDE. So rows can
take turns every second, without making an arena each time, and all of TIDE's rows share one engine and its streams. In a row where stock
gathers, parameters are FSDP2's own class again and shards have left the arena, as after `detach`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_collectives as collectives
from job import zero_cta_group
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from tide_comm import TideConfig, attach
from tide_comm.engine.base import Launched
from tide_comm.fsdp import describe
from tide_comm.fsdp.early import EarlyReduce
from tide_comm.fsdp.params import TideParam, move_shard_out, shard_window
from tide_comm.plan.program import Agree, Area, Cast, Copy, Op, Post, Program, Reduce, Region, Segment, Signal, Wait

GIB = 1024**3
LIMIT_BLOCKS = 264
"""Of the limit's one sum a group: as wide as it is fast."""
REDUCE_AREAS = ("STAGE", "PARTIAL", "INBOX", "SCRATCH")
GATHER_AREAS = ("SHARD", "SLOT")


@dataclass(frozen=True)
class Row:
    """Who communicates. `early`: `early_reduce`; `overlap`: `early_gather`; `alone`: TIDE without its peers, the limit."""

    gather: Literal["stock", "symm_mem", "tide"] = "stock"
    reduce: Literal["stock", "tide"] = "stock"
    early: bool = False
    overlap: bool = False
    alone: bool = False

    @property
    def uses_tide(self) -> bool:
        return "tide" in (self.gather, self.reduce)


ROWS = {
    "stock": Row(),
    "symm_mem": Row(gather="symm_mem"),
    "tide": Row("tide", "tide"),
    "tide_early": Row("tide", "tide", early=True),
    "tide_all": Row("tide", "tide", early=True, overlap=True),
    "tide_ag": Row("tide"),
    "tide_rs": Row(reduce="tide"),
    "none": Row("tide", "tide", alone=True),
}


def without_peers(program: Program) -> Program:
    """What a rank does of a program for itself, with its sums in one kernel, and its casts."""
    ops: list[Op] = []
    sums: list[Reduce] = [op for op in program.ops if isinstance(op, Reduce)]
    casts: list[Cast] = [op for op in program.ops if isinstance(op, Cast)]
    for op in program.ops:
        if isinstance(op, Cast):
            if op is not casts[0]:
                continue
            op = replace(op, parts=tuple(part for one in casts for part in one.parts))
        elif isinstance(op, Reduce):
            if op is not sums[0]:
                continue
            own = tuple(
                Segment(tuple(s for s in seg.sources if isinstance(s, Region) and s.area is not Area.STAGE), seg.dst)
                for one in sums
                for seg in one.segments
            )
            op = replace(op, segments=own, blocks=LIMIT_BLOCKS)
        elif isinstance(op, (Wait, Signal, Post, Agree, Copy)):
            continue
        ops.append(op)
    return replace(program, ops=tuple(ops), arrivals={}, stage_pieces=0)


class Alone:
    """In an engine's place: launches only what needs no peer."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._known: dict[int, tuple[Program, Program]] = {}

    def launch(self, program: Program, *args: Any, **kwargs: Any) -> Launched:
        if id(program) not in self._known:
            self._known[id(program)] = (program, without_peers(program))
        return self.engine.launch(self._known[id(program)][1], *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


class SymmMemGather(collectives.AllGather):
    """FSDP2's all-gather from symmetric memory, on a communicator of its own with the zero-CTA policy: what `set_symm_mem_for_comm` does
    when the job's own communicator has that policy, which would change the stock row as well."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.inner, self.process_group = collectives.SymmMemAllGather(process_group, "NCCL"), process_group

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.inner.allocate(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        return self.inner(output_tensor, input_tensor, self.process_group, async_op)


class Switch:
    """A model with FSDP2 units, on TIDE or not. Collective: all ranks go to the same rows in the same order, between steps."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.device, self.optimizer = device, optimizer
        self.units = describe.units_of([model])
        self.model = model
        self.stock = [(u.group._all_gather_comm, u.group._reduce_scatter_comm) for u in self.units]
        self.symm: SymmMemGather | None = None
        self.report: Any = None

    def make_symm(self) -> None:
        """Raises where symmetric memory is not to be had."""
        self.symm = SymmMemGather(zero_cta_group(self.device))

    def make_tide(self, config: TideConfig) -> None:
        """Attach. Raises `TideError` where TIDE cannot take every group."""
        self.mode = config.memory_mode
        self.report = attach(self.model, config)
        attachment = self.report.attachment
        self.tides, self.domains = attachment.groups, attachment.domains
        self.engines = [(domain.engine, Alone(domain.engine)) for domain in self.domains]
        self.tide_comms = [(t.group._all_gather_comm, t.group._reduce_scatter_comm) for t in self.tides]
        self.to(Row())

    def to(self, row: Row) -> None:
        """From here on `row` communicates. Raises `RuntimeError` if its means were not made."""
        if row.gather == "symm_mem" and self.symm is None or row.uses_tide and self.report is None:
            raise RuntimeError("what this row communicates with could not be made")
        if self.report is not None:
            self._set_tide(row)
        for unit, (gather, reduce) in zip(self.units, self.stock, strict=True):
            if row.gather != "tide":
                unit.group._all_gather_comm = gather if row.gather == "stock" or self.symm is None else self.symm
            if row.reduce != "tide":
                unit.group._reduce_scatter_comm = reduce

    def _set_tide(self, row: Row) -> None:
        config = self.report.config
        config.early_reduce = row.early
        # Slot-Reuse reads gradients from slots, which only TIDE's all-gather fills.
        config.memory_mode = self.mode if row.gather == "tide" else "in_place"
        attachment = self.report.attachment
        for overlap in attachment.overlaps:
            overlap.remove()
        attachment.overlaps.clear()
        attachment.take_order()
        if row.overlap:
            self.report.overlap(self.optimizer)
        for domain, (engine, alone) in zip(self.domains, self.engines, strict=True):
            domain.engine = alone if row.alone else engine
        for tide, (gather, reduce) in zip(self.tides, self.tide_comms, strict=True):
            group: Any = tide.group
            group._to_sharded()
            if tide.gathered is not None:
                group._all_gather_result = None  # launched ahead by the row before, and nobody has waited for it
            tide.give_back_unused()
            tide.early.detach()
            group._all_gather_comm, group._reduce_scatter_comm = gather, reduce
            for i, param in enumerate(tide.params):
                param.__class__ = TideParam
                if row.gather == "tide":
                    continue
                if tide.layout.params[i].in_shard and self._in_arena(tide, i):
                    move_shard_out(param)
                param.__class__ = FSDPParam
            vars(group).pop("_reset_iter_state", None)
            if row.uses_tide:
                vars(group)["_reset_iter_state"] = tide.reset
            tide.early = EarlyReduce(tide)

    @staticmethod
    def _in_arena(tide: Any, index: int) -> bool:
        data = tide.params[index]._sharded_param_data
        return data.numel() > 0 and data.data_ptr() == shard_window(tide, index).data_ptr()

    def close(self) -> None:
        """Detach."""
        if self.report is not None:
            self.to(ROWS["tide"])  # detach takes back what a row with both halves has
            self.report.detach()
            self.report = None

    def areas(self, row: Row) -> dict[str, int]:
        """Bytes by area of the arena that `attach` would make for this row alone."""
        if self.report is None or not row.uses_tide:
            return {}
        unused = (() if row.gather == "tide" else GATHER_AREAS) + (() if row.reduce == "tide" else REDUCE_AREAS)
        return {name: size for name, size in self.report.memory.items() if name not in unused}

    def memory(self, row: Row, peak: int) -> dict[str, float]:
        """Where the row's peak lies, in GiB: the arena's areas, and PyTorch's part (`peak` bytes) by what it is for."""
        shards = sum(p.to_local().nbytes for p in self.model.parameters())  # type: ignore[attr-defined]
        state = sum(
            v.to_local().nbytes
            for s in self.optimizer.state.values()
            for v in s.values()
            if hasattr(v, "to_local") and v.numel() > 1
        )
        areas = self.areas(row)
        in_torch = 0 if areas.get("SHARD", 0) > 0 else shards
        rest = max(0, peak - in_torch - state)
        named = {"parameters": in_torch, "optimizer": state, "activations, gradients, buffers": rest}
        return {name: nbytes / GIB for name, nbytes in (named | areas).items()}

    def on_stock(self) -> int:
        """Collectives so far that TIDE left to FSDP2."""
        if self.report is None:
            return 0
        stats = self.report.stats()
        return stats.get("all_gathers_stock", 0) + stats.get("reduce_scatters_stock", 0)

    def whole(self) -> str:
        """Why a group's reduce-scatter does not start early in this row, or ""."""
        return next((tide.early.why_whole for tide in self.tides if tide.early.why_whole), "")
