"""What a trace of the host engine shows: when gradients are released, and when the next all-gather may start."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from tide_comm.engine.base import ArenaSpec, Buffers
from tide_comm.engine.host.trace import Span
from tide_comm.plan.all_gather import all_gather, vacate
from tide_comm.plan.layout import GroupLayout, ParamLayout
from tide_comm.plan.reduce_scatter import reduce_scatter
from tide_comm.plan.slices import InboxSpec, StageSpec, seat_bytes_of, shard_elements
from tide_comm.plan.topology import Topology

TOPOLOGY = Topology.regular(2, 2)
LAYOUT = GroupLayout("block", (ParamLayout("w", (64, 8), "float32", "bfloat16", 4),), 4)
STAGE = StageSpec(4096, 2, 2)
SPEC = ArenaSpec(TOPOLOGY, 0, LAYOUT.slot_bytes, 1, STAGE, InboxSpec(seat_bytes_of([LAYOUT], TOPOLOGY), 8, 2))
LATE_S = 0.4


def step(late: tuple[int, ...], reuse: bool, folder: Path) -> list[list[Span]]:
    """One reduce-scatter and the all-gather after it into the same slot; the ranks in `late` reduce LATE_S after the others."""

    def body(rank, engine):
        params = Buffers(params=[torch.zeros(16 * 8)])
        engine.launch(all_gather(LAYOUT, TOPOLOGY, rank), 0, params).wait("arrived")
        grads = Buffers(grads=[torch.zeros(64, 8).bfloat16()], out=torch.zeros(shard_elements(LAYOUT, [0])))
        program = reduce_scatter(
            LAYOUT, TOPOLOGY, rank, STAGE, [0], "bfloat16", "float32", from_slot=reuse, inbox=SPEC.inbox
        )
        if not reuse:
            engine.launch(vacate(TOPOLOGY, rank), 0)
        if rank in late:
            time.sleep(LATE_S)
        reduced = engine.launch(program, 0 if reuse else -1, grads)
        if reuse:
            engine.launch(vacate(TOPOLOGY, rank, reduced_from=True), 0)
        gathered = engine.launch(all_gather(LAYOUT, TOPOLOGY, rank), 0, params)
        # What arrived are the others' pushes: this rank's own may still be under way.
        reduced.wait("done"), gathered.wait("arrived"), gathered.wait("sent")
        return engine.trace

    results = run_ranks(SPEC, body)
    for result in results:
        if isinstance(result, Exception):
            raise result
    for rank in range(4):
        (written,) = folder.glob(f"tide_trace_rank{rank}_*.json")
        events = json.loads(written.read_text())["traceEvents"]
        assert {e["name"] for e in events if e["ph"] == "M"} == {"thread_name", "process_name"}
        assert all(e["dur"] >= 0 for e in events if e["ph"] == "X")
        written.unlink()
    # Now that engines have ended: a stream notes an operation after it, which others may have seen before.
    return [list(trace.spans) for trace in results]


def last(spans: list[Span], stream: str, word: str) -> Span:
    found = [s for s in spans if s.stream == stream and word in s.what.lower()]
    assert found, (stream, word, sorted({(s.stream, s.what) for s in spans}))
    return found[-1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIDE_TRACE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("reuse", [False, True])
def test_gradients_are_released_when_they_are_read_not_when_the_network_is_done(reuse: bool, folder: Path) -> None:
    """Machine 1 comes late: machine 0 has read its gradients long before its sums are complete."""
    spans = step((2, 3), reuse, folder)
    for rank in (0, 1):
        read = last(spans[rank], "sum", "slot_read" if reuse else "grads_read")
        done = last(spans[rank], "final", "done")
        assert done.end_us - read.end_us > LATE_S * 0.5e6


@pytest.mark.parametrize("reuse", [False, True])
def test_the_next_all_gather_starts_before_or_after_the_reading(reuse: bool, folder: Path) -> None:
    """Lane 1 reduces late, so lane 0's gradients are read late. In-Place their slot has been vacated before: lane 1 pushes into it at once.
    With Slot-Reuse they stand in it: lane 1's pushes wait until lane 0 has read them."""
    spans = step((0, 2), reuse, folder)
    read = last(spans[1], "sum", "slot_read" if reuse else "grads_read")
    pushed = last(spans[1], "push", "copy")
    if reuse:
        assert pushed.start_us > last(spans[0], "sum", "slot_read").end_us
    else:
        assert read.end_us - pushed.end_us > LATE_S * 0.5e6
