"""Plays a scenario on stock FSDP2 and on TIDE in the same process and compares what came out, to the bit."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor

from tests.seam.launch import Place
from tide_comm.config import TideConfig
from tide_comm.plan.reference import reference_sum
from tide_comm.plan.topology import Topology


class Machines:
    """How the job that runs divides the host: GPUs a machine, 0: not at all."""

    gpus = 0


def topology_of(group: Any) -> Topology:
    """The machines of a process group as `gpus_per_machine` emulates them."""
    ranks = dist.get_process_group_ranks(group)
    return Topology.from_hosts([rank // Machines.gpus if Machines.gpus else 0 for rank in ranks])


class ReferenceReduceScatter(ReduceScatter):
    """Gathers everybody's input with gloo and sums it as `reference_sum` does: in fp32, one multiply, one rounding."""

    def __init__(self) -> None:
        self.calls = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> None:
        self.calls += 1
        world = group.size()
        everybody = [torch.empty_like(input_tensor) for _ in range(world)]
        dist.all_gather(everybody, input_tensor, group=group)
        mine = [x.view(world, -1)[group.rank()] for x in everybody]
        topology = self.topology(group)
        total = reference_sum(mine, topology, topology.machine_of(group.rank()))
        output_tensor.copy_(total * torch.tensor(scale_of(op, world), dtype=torch.float32))

    def topology(self, group: Any) -> Topology:
        return topology_of(group)


class ReversedReduceScatter(ReferenceReduceScatter):
    """The same sum in another order: what the comparison has to notice."""

    def topology(self, group: Any) -> Topology:
        return Topology((tuple(reversed(range(group.size()))),))


class CountingAllGather(DefaultAllGather):
    """Stock's all-gather, counted."""

    calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().__call__(*args, **kwargs)


def scale_of(op: Any, world: int) -> float:
    """The factor that a reduce op stands for."""
    kind, factor = (op, 1.0) if isinstance(op, dist.ReduceOp.RedOpType) else op.__getstate__()
    kinds = {dist.ReduceOp.AVG: 1.0 / world, dist.ReduceOp.SUM: 1.0, dist.ReduceOp.PREMUL_SUM: factor}
    return float(kinds[kind])


def groups_of(model: nn.Module) -> list[Any]:
    """FSDP2's parameter groups that have parameters, in module order."""
    states = {id(s): s for m in model.modules() if isinstance(m, FSDPModule) for s in [m._get_fsdp_state()]}
    return [g for s in states.values() for g in s._fsdp_param_groups if g.fsdp_params]


def sum_by_reference(model: nn.Module, comm: type[ReferenceReduceScatter] = ReferenceReduceScatter) -> None:
    """Let every group that reduces with gloo reduce with `comm`: gloo sums in an order of its own."""
    for group in groups_of(model):
        if type(group._reduce_scatter_comm) is DefaultReduceScatter:
            group._reduce_scatter_comm = comm()


@dataclass
class Trace:
    """What a run has shown, by label, in order."""

    seen: dict[str, torch.Tensor | None] = field(default_factory=dict)

    def note(self, label: str, tensor: torch.Tensor | None) -> None:
        assert label not in self.seen, f"{label} noted twice"
        self.seen[label] = None if tensor is None else local(tensor).detach().clone()

    def kind(self, word: str) -> list[torch.Tensor]:
        """All tensors whose label ends with `word`."""
        return [t for label, t in self.seen.items() if t is not None and label.endswith(word)]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def first_difference(want: Trace, got: Trace) -> str:
    """The first label, and the first index in it, at which two runs differ in a bit; "" if they do not."""
    if list(want.seen) != list(got.seen):
        extra = [k for k in want.seen if k not in got.seen] + [k for k in got.seen if k not in want.seen]
        return f"the runs show different things: {extra[:5]}"
    for label, a in want.seen.items():
        b = got.seen[label]
        if a is None or b is None:
            if a is not b:
                return f"{label}: {'nothing' if b is None else 'something'} where stock has {'nothing' if a is None else 'something'}"
            continue
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"{label}: {tuple(b.shape)} {b.dtype}, stock has {tuple(a.shape)} {a.dtype}"
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
        differ = (a.contiguous().view(bits) != b.contiguous().view(bits)).flatten().nonzero().flatten()
        if len(differ):
            i = int(differ[0])
            pair = f"{b.flatten()[i].item()!r}, stock has {a.flatten()[i].item()!r}"
            return f"{label}[{i}] is {pair} ({len(differ)} of {a.numel()} elements differ)"
    return ""


@dataclass
class Run:
    """One side of a scenario while it plays."""

    place: Place
    side: str
    model: nn.Module
    trace: Trace = field(default_factory=Trace)
    report: Any = None
    optim: Any = None
    notes: dict[str, Any] = field(default_factory=dict)
    """Whatever a scenario keeps between steps, or hands to its test under "out"."""

    def batch(self, step: int, k: int = 0, rows: int = 5, width: int = 6) -> torch.Tensor:
        """A batch of this rank's own."""
        generator = torch.Generator().manual_seed(10_000 * self.place.rank + 100 * step + k)
        return torch.randn(rows, width, generator=generator)

    def note_loss(self, step: int, loss: torch.Tensor, k: int = 0) -> None:
        self.trace.note(f"step {step}: loss {k}", loss)

    def note_grads(self, step: int, word: str = "grad") -> None:
        for name, param in self.model.named_parameters():
            self.trace.note(f"step {step}: {name}.{word}", param.grad)

    def note_params(self, when: str) -> None:
        for name, param in self.model.named_parameters():
            self.trace.note(f"{when}: {name}.param", param)


@dataclass(frozen=True)
class Scenario:
    """A model and what is done with it; the same on both sides."""

    name: str
    build: Callable[[Place], nn.Module]
    step: Callable[[Run, int], None]
    optimizer: Callable[[nn.Module], Any]
    ready: Callable[[Run], None] = lambda run: None
    """After attach, before the optimizer is made."""
    steps: int = 20
    config: Mapping[str, Any] = field(default_factory=dict)
    modes: tuple[str, ...] = ("in_place", "slot_reuse")
    worlds: tuple[int, ...] = (2, 4)
    core: bool = False
    """On four ranks in the quick run too."""
    three: bool = False
    """On three ranks as well."""
    stock: Mapping[str, str] = field(default_factory=dict)
    """Groups that stay on stock, by name, and a part of the reason."""
    stock_all_gathers: bool | None = False
    """Whether some all-gathers of TIDE groups run on stock; None: not checked."""
    copies: bool | None = True
    """Whether Slot-Reuse copies gradients; None: not checked."""
    topic: str = ""
    row: str = ""
    """Its line in docs/semantics.md, which variants share; "": none."""
    why: str = ""
    """For that line: which all-gathers run on stock, and why, where `stock_all_gathers` is not False."""


def play(scenario: Scenario, place: Place, side: str, mode: str = "in_place") -> Run:
    """Play one side: "reference" and "reversed" (stock FSDP2, summed here), "gloo" (stock FSDP2 as it is) or "tide"."""
    torch.manual_seed(0)
    run = Run(place, side, scenario.build(place))
    if side == "tide":
        from tide_comm import attach

        config = {"gpus_per_machine": Machines.gpus, **scenario.config}
        run.report = attach(run.model, TideConfig(memory_mode=mode, **config))
    for group in groups_of(run.model):
        if type(group._all_gather_comm) is DefaultAllGather and side != "tide":
            group._all_gather_comm = CountingAllGather()
    if side != "gloo":
        sum_by_reference(run.model, ReversedReduceScatter if side == "reversed" else ReferenceReduceScatter)
    scenario.ready(run)
    run.optim = scenario.optimizer(run.model)
    run.notes["tag"] = f"{scenario.name} {mode}"
    run.note_params("before step 0")
    for step in range(scenario.steps):
        scenario.step(run, step)
    run.note_params(f"after step {scenario.steps - 1}")
    return run


_references: dict[tuple[str, int, int], tuple[Trace, list[tuple[int, int]]]] = {}


def reference_of(scenario: Scenario, place: Place) -> tuple[Trace, list[tuple[int, int]]]:
    """Stock's trace, and all-gathers and reduce-scatters a group; played once a process."""
    key = (scenario.name, scenario.steps, Machines.gpus)
    if key not in _references:
        run = play(scenario, place, "reference")
        counts = [
            (getattr(g._all_gather_comm, "calls", 0), getattr(g._reduce_scatter_comm, "calls", 0))
            for g in groups_of(run.model)
        ]
        _references[key] = run.trace, counts
    return _references[key]


def compare(
    place: Place,
    scenario: str,
    mode: str = "in_place",
    side: str = "tide",
    gpus: int = 0,
    config: Mapping[str, Any] | None = None,
    steps: int = 0,
) -> dict[str, Any]:
    """A job: play `scenario` on stock and on `side`; where they differ first, and what ran. `gpus`: emulate machines of so many ranks;
    `config` is added to the scenario's; `steps`: instead of the scenario's."""
    from tests.seam.scenarios import SCENARIOS

    chosen = SCENARIOS[scenario]
    chosen = replace(chosen, config={**chosen.config, **(config or {})}, steps=steps or chosen.steps)
    Machines.gpus = gpus
    want, counts = reference_of(chosen, place)
    run = play(chosen, place, side, mode)
    result: dict[str, Any] = {
        "difference": first_difference(want, run.trace),
        "counts": counts,
        "losses": [float(t) for label, t in want.seen.items() if ": loss" in label and t is not None],
        "largest_grad": max((float(t.abs().max()) for t in want.kind("grad") if t.numel()), default=0.0),
        "out": run.notes.get("out"),
    }
    if side == "gloo":
        result["largest_error"] = max(
            float((a.float() - b.float()).abs().max() / (a.float().abs().max() + 1e-3))
            for a, b in zip(want.seen.values(), run.trace.seen.values(), strict=True)
            if a is not None and b is not None and a.numel()
        )
    if run.report is not None:
        result["printed"] = str(run.report)
        result["stats"] = run.report.stats()
        result["rows"] = [(g.name, g.comm, g.reason, dict(g.stats)) for g in run.report.groups]
        run.report.detach()
    del run
    gc.collect()
    return result
