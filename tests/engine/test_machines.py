"""What programs over many machines compute: bytes of the layout, sums of `reference_sum`, to the bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sequential import Sequential
from test_host_engine import chunks

from tide_comm.engine.base import ArenaSpec, Buffers
from tide_comm.plan.all_gather import all_gather, vacate
from tide_comm.plan.layout import GroupLayout, ParamLayout
from tide_comm.plan.program import Area, Region
from tide_comm.plan.reduce_scatter import reduce_scatter
from tide_comm.plan.reference import reference_sum
from tide_comm.plan.slices import InboxSpec, StageSpec, seat_bytes_of, shard_elements
from tide_comm.plan.topology import Topology


def spec_for(layout: GroupLayout, topology: Topology, batch: int, piece_bytes: int = 4096, ring: int = 2) -> ArenaSpec:
    inbox = None
    if topology.machines > 1:
        inbox = InboxSpec(seat_bytes_of([layout], topology), batch, topology.lanes)
    stage = StageSpec(piece_bytes, ring, topology.lanes)
    return ArenaSpec(topology, layout.shard_bytes, layout.slot_bytes, 2, stage, inbox)


def reduced(
    layout: GroupLayout,
    topology: Topology,
    grads: list[list[torch.Tensor]],
    spec: ArenaSpec,
    scale: float,
    launches: int = 3,
) -> list[list[torch.Tensor]]:
    """OUT of every rank, by launch; gradients double from launch to launch."""
    world, indices = topology.world, list(range(len(layout.params)))
    dtype = str(grads[0][0].dtype).removeprefix("torch.")
    programs = [
        reduce_scatter(layout, topology, r, spec.stage, indices, dtype, "float32", inbox=spec.inbox)
        for r in range(world)
    ]
    engine, found = Sequential(spec), []
    for launch in range(launches):
        outs = [torch.full((shard_elements(layout, indices),), float("nan")) for _ in range(world)]
        held = [[g * 2**launch for g in grads[r]] for r in range(world)]
        buffers = [Buffers(grads=list(held[r]), out=outs[r], scale=scale) for r in range(world)]
        engine.run(programs, -1, buffers)
        found.append(outs)
    return found


def expect_sums(
    layout: GroupLayout, topology: Topology, grads: list[list[torch.Tensor]], outs: list[torch.Tensor], scale: float
) -> None:
    for rank, out in enumerate(outs):
        offset = 0
        for p, param in enumerate(layout.params):
            parts = [chunks(param, g[p])[rank].reshape(-1) for g in grads]
            want = reference_sum(parts, topology, topology.machine_of(rank)) * torch.tensor(scale)
            valid = param.valid(rank)
            assert torch.equal(out[offset : offset + valid], want[:valid]), f"rank {rank}, gradient {p}"
            offset += param.chunk


@st.composite
def cases(draw: st.DrawFn) -> tuple[GroupLayout, Topology]:
    machines, lanes = draw(
        st.sampled_from([(2, 1), (3, 1), (5, 1), (2, 2), (3, 2), (4, 2), (2, 4), (3, 3), (7, 2), (9, 1), (2, 8)])
    )
    world = machines * lanes
    order = draw(st.permutations(range(world)))
    tables = {
        "machine by machine": Topology.regular(machines, lanes).table,
        "lane by lane": tuple(tuple(range(m, world, machines)) for m in range(machines)),
        "any": tuple(tuple(order[m * lanes : (m + 1) * lanes]) for m in range(machines)),
    }
    topology = Topology(tables[draw(st.sampled_from(sorted(tables)))])
    params = []
    for i in range(draw(st.integers(1, 3))):
        dim = draw(st.sampled_from([0, 0, 1]))
        shape = [draw(st.integers(1, 3 * world)), draw(st.integers(1, 3))]
        if dim:
            shape = [draw(st.integers(1, 3)), world * draw(st.integers(1, 2))]
        params.append(
            ParamLayout(f"p{i}", tuple(shape), draw(st.sampled_from(["float32", "bfloat16"])), "bfloat16", world, dim)
        )
    return GroupLayout("g", tuple(params), world), topology


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.integers(1, 9), st.integers(8, 64), st.integers(1, 3), st.sampled_from(["float32", "bfloat16"]))
def test_sums_equal_the_reference(case: tuple, batch: int, piece: int, ring: int, dtype: str) -> None:
    layout, topology = case
    torch.manual_seed(0)
    grads = [[torch.randn(p.shape).to(getattr(torch, dtype)) for p in layout.params] for _ in range(topology.world)]
    spec = spec_for(layout, topology, batch, piece * topology.lanes * 4, ring)
    for launch, outs in enumerate(reduced(layout, topology, grads, spec, 1 / 3)):
        expect_sums(layout, topology, [[g * 2**launch for g in mine] for mine in grads], outs, 1 / 3)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.sampled_from([0, 1, 40, 300, 8 << 20]))
def test_gathered_bytes_equal_the_layout(case: tuple, head_bytes: int) -> None:
    layout, topology = case
    torch.manual_seed(0)
    world = topology.world
    full = [torch.randn(p.shape).to(getattr(torch, p.param_dtype)) for p in layout.params]
    spec = spec_for(layout, topology, 8)
    engine = Sequential(spec)
    masters = [
        [chunks(p, f)[rank].reshape(-1).contiguous() for p, f in zip(layout.params, full, strict=True)]
        for rank in range(world)
    ]
    for rank in range(world):
        for p, param in enumerate(layout.params):
            if param.in_shard:
                region = layout.shard(p, 0)
                view(engine, rank, spec.start(Area.SHARD), region).copy_(masters[rank][p].view(torch.uint8))
    gather = [all_gather(layout, topology, rank, 0, head_bytes) for rank in range(world)]
    free = [vacate(topology, rank) for rank in range(world)]
    for step in range(3):
        slot = step % 2
        for rank in range(world):
            engine.memory[rank][spec.start(Area.SLOT, slot) :][: layout.slot_bytes].fill_(0xFF)
        engine.run(gather, slot, [Buffers(params=m) for m in masters])
        for rank in range(world):
            for p, param in enumerate(layout.params):
                at = Region(Area.SLOT, layout.slot_offsets[p], param.numel * 2)
                got = view(engine, rank, spec.start(Area.SLOT, slot), at).view(torch.bfloat16).view(param.shape)
                assert torch.equal(got, full[p].bfloat16()), f"rank {rank}, step {step}, parameter {p}"
        engine.run(free, slot, [Buffers()] * world)


def view(engine: Sequential, rank: int, start: int, region: Region) -> torch.Tensor:
    return engine.memory[rank][start + region.offset :][: region.nbytes]


@pytest.mark.parametrize("machines, lanes", [(8, 8), (64, 1), (1, 8), (16, 4)])
@pytest.mark.parametrize("large", [0, 1, -1])
def test_small_contributions_are_not_lost(machines: int, lanes: int, large: int) -> None:
    """64 contributions, one of 1.0 and 63 of 2^-9: 1.123046875. Sums in bf16 stay at 1.0."""
    topology = Topology.regular(machines, lanes)
    world = topology.world
    layout = GroupLayout("g", (ParamLayout("w", (world, 3), "bfloat16", "bfloat16", world),), world)
    count = 64 if world == 64 else world
    grads = [[torch.full((world, 3), 2.0**-9, dtype=torch.bfloat16)] for _ in range(world)]
    grads[large % world][0].fill_(1.0)
    (outs,) = reduced(layout, topology, grads, spec_for(layout, topology, 8), 1.0, launches=1)
    want = 1.0 + (count - 1) * 2.0**-9
    assert want == 1.123046875 or world != 64
    assert all(torch.equal(out, torch.full((3,), want)) for out in outs)
