"""The host engine against the layout and `reference_sum`, to the bit, with random layouts, rings and delays."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import run_ranks

from tide_comm.engine.base import ArenaSpec, Buffers
from tide_comm.engine.host.words import SharedWord, at_least
from tide_comm.errors import TideError
from tide_comm.plan.all_gather import all_gather, vacate
from tide_comm.plan.layout import GroupLayout, ParamLayout
from tide_comm.plan.program import Area
from tide_comm.plan.reduce_scatter import reduce_scatter
from tide_comm.plan.reference import reference_sum
from tide_comm.plan.slices import StageSpec, shard_elements
from tide_comm.plan.topology import Topology


def spec_for(
    layout: GroupLayout, topology: Topology, slots: int = 2, piece_bytes: int = 256, ring: int = 2
) -> ArenaSpec:
    return ArenaSpec(
        topology, layout.shard_bytes, layout.slot_bytes, slots, StageSpec(piece_bytes, ring, topology.lanes)
    )


def chunks(param: ParamLayout, full: torch.Tensor) -> list[torch.Tensor]:
    """FSDP2's padded chunks of a full tensor, by rank."""
    size = list(param.shape)
    size[param.dim] = param.chunk_dim
    pieces = []
    for piece in torch.chunk(full, param.world, dim=param.dim) if full.numel() else ():
        padded = torch.zeros(size, dtype=full.dtype)
        padded.narrow(param.dim, 0, piece.size(param.dim)).copy_(piece)
        pieces.append(padded)
    while len(pieces) < param.world:
        pieces.append(torch.zeros(size, dtype=full.dtype))
    return pieces


@st.composite
def layouts(draw: st.DrawFn) -> tuple[GroupLayout, Topology]:
    world = draw(st.integers(2, 4))
    order = draw(st.permutations(range(world)))
    params = []
    for i in range(draw(st.integers(1, 4))):
        dim = draw(st.sampled_from([0, 0, 1]))
        shape = [draw(st.integers(1, 9)), draw(st.integers(1, 5))]
        if dim:
            shape[1] *= world
        dtype = draw(st.sampled_from(["float32", "bfloat16"]))
        params.append(ParamLayout(f"p{i}", tuple(shape), dtype, "bfloat16", world, dim))
    return GroupLayout("g", tuple(params), world), Topology((tuple(order),))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    case=layouts(),
    ring=st.integers(1, 4),
    piece_bytes=st.integers(1, 20),
    delays=st.integers(0, 3),
    reuse=st.booleans(),
)
def test_step_equals_layout_and_reference_sum(case, ring, piece_bytes, delays, reuse):
    layout, topology = case
    spec = spec_for(layout, topology, piece_bytes=piece_bytes * 16, ring=ring)
    torch.manual_seed(0)
    full = [torch.randn(p.shape).to(getattr(torch, p.param_dtype)) for p in layout.params]
    grads = [[torch.randn(p.shape).bfloat16() for p in layout.params] for _ in range(layout.world)]
    indices = list(range(len(layout.params)))

    def body(rank, engine):
        gathered = all_gather(layout, topology, rank)
        program = reduce_scatter(layout, topology, rank, spec.stage, indices, "bfloat16", "float32", from_slot=reuse)
        masters = [chunks(p, f)[rank].reshape(-1).contiguous() for p, f in zip(layout.params, full, strict=True)]
        for p, param in enumerate(layout.params):
            if param.in_shard:
                region = layout.shard(p, 0)
                window = engine.window(Area.SHARD, -1, region.offset, region.nbytes)
                torch.empty(0, dtype=masters[p].dtype).set_(window, 0, masters[p].shape).copy_(masters[p])
        seen = []
        for step in range(3):
            slot = step % 2
            launched = engine.launch(gathered, slot, Buffers(params=masters), tag=step)
            launched.wait("arrived")
            for p, param in enumerate(layout.params):
                window = engine.window(Area.SLOT, slot, layout.slot_offsets[p], param.slot_bytes)
                unsharded = torch.empty(0, dtype=torch.bfloat16).set_(window, 0, (param.slot_bytes // 2,))
                seen.append(unsharded[: param.numel].view(param.shape).clone())
            out = torch.full((shard_elements(layout, indices),), float("nan"))
            if not reuse:
                engine.launch(vacate(topology, rank), slot)
            held = [g * (step + 1) for g in grads[rank]]
            reduced = engine.launch(program, slot if reuse else -1, Buffers(grads=held, out=out, scale=0.25), tag=step)
            if reuse:
                engine.launch(vacate(topology, rank, reduced_from=True), slot)
            reduced.wait("done")
            reduced.wait("grads_read")
            assert held == [], "gradients must be let go at grads_read"
            seen.append(out)
        return seen

    os.environ["TIDE_POISON"] = "1"
    if delays:
        os.environ["TIDE_DELAYS"] = str(delays)
    try:
        results = run_ranks(spec, body)
    finally:
        os.environ.pop("TIDE_POISON"), os.environ.pop("TIDE_DELAYS", None)
    for rank, seen in enumerate(results):
        if isinstance(seen, Exception):
            raise seen
        for step in range(3):
            at = step * (len(layout.params) + 1)
            for p in indices:
                assert torch.equal(seen[at + p], full[p].bfloat16()), f"rank {rank}, step {step}, parameter {p}"
            offset = 0
            for p, param in enumerate(layout.params):
                parts = [chunks(param, g[p] * (step + 1))[rank].reshape(-1) for g in grads]
                want = reference_sum(parts, topology, 0) * 0.25
                valid = param.valid(rank)
                got = seen[at + len(layout.params)][offset : offset + valid]
                assert torch.equal(got, want[:valid]), f"rank {rank}, step {step}, gradient {p}"
                offset += param.chunk


LAYOUT = GroupLayout("block", (ParamLayout("w", (64, 8), "float32", "bfloat16", 2, 0),), 2)
PAIR = Topology.regular(1, 2)


def test_launch_returns_before_the_peer_has_come():
    """A launch is asynchronous: rank 0's returns at once although rank 1 starts much later."""

    def body(rank, engine):
        if rank == 1:
            time.sleep(0.5)
        start = time.monotonic()
        launched = engine.launch(all_gather(LAYOUT, PAIR, rank), 0, Buffers(params=[torch.zeros(32 * 8)]))
        took = time.monotonic() - start
        early = launched.reached("arrived")
        launched.wait("arrived")
        return took, early

    (took, early), _ = run_ranks(spec_for(LAYOUT, PAIR), body)
    assert took < 0.3 and not early


def test_a_wait_for_a_peer_that_never_comes_times_out_and_says_what_it_waited_for():
    def body(rank, engine):
        if rank == 1:
            time.sleep(2.5)
            return None
        launched = engine.launch(all_gather(LAYOUT, PAIR, rank), 0, Buffers(params=[torch.zeros(32 * 8)]))
        launched.wait("arrived")

    error = run_ranks(spec_for(LAYOUT, PAIR), body, timeout_s=1.0)[0]
    assert isinstance(error, TideError)
    for part in ("timeout_s = 1", "all_gather block", "'arrived'", "rank 1 (machine 0, lane 1)"):
        assert part in str(error)


def test_ranks_that_run_different_collectives_are_told_so():
    def body(rank, engine):
        launched = engine.launch(all_gather(LAYOUT, PAIR, rank), 0, Buffers(params=[torch.zeros(32 * 8)]), tag=rank)
        launched.wait("arrived")

    errors = run_ranks(spec_for(LAYOUT, PAIR), body)
    assert all(isinstance(e, TideError) and "disagree" in str(e) for e in errors)


def test_engines_end_their_threads():
    before = threading.active_count()
    run_ranks(spec_for(LAYOUT, PAIR), lambda rank, engine: engine.launch(vacate(PAIR, rank), 0).wait("vacated"))
    assert threading.active_count() == before


@pytest.mark.parametrize(
    "value, target, reached", [(0, 0, True), (0, 1, False), (2, 0xFFFFFFFF, True), (0xFFFFFFFF, 2, False)]
)
def test_words_compare_cyclically(value, target, reached):
    assert at_least(value, target) is reached


def test_a_word_wakes_a_sleeping_waiter():
    cell = torch.zeros(16, dtype=torch.int32)
    word = SharedWord(cell.data_ptr())
    threading.Timer(0.2, word.set, args=(5,)).start()
    start = time.monotonic()
    assert word.wait(5, 10.0, lambda: None)
    assert time.monotonic() - start < 2
    assert not word.wait(6, 0.1, lambda: None)
