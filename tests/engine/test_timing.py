"""Times of launches and waits: intervals, the host engine's clock, and the CUDA engine's events without a GPU."""

from __future__ import annotations

import time
from typing import Any

import pytest
import stub_cuda
import torch
from ranks import run_ranks

from tide_comm.engine.base import ArenaSpec, Buffers
from tide_comm.engine.cuda import timing
from tide_comm.engine.cuda.engine import CudaEngine
from tide_comm.engine.timing import Timings, covered_s, timed_point
from tide_comm.plan.all_gather import all_gather, vacate
from tide_comm.plan.layout import GroupLayout, ParamLayout
from tide_comm.plan.reduce_scatter import reduce_scatter
from tide_comm.plan.slices import StageSpec, shard_elements
from tide_comm.plan.topology import Topology

PAIR = Topology.regular(1, 2)
LAYOUT = GroupLayout("block", (ParamLayout("w", (64, 8), "float32", "bfloat16", 2),), 2)
STAGE = StageSpec(4096, 4, 2)
SPEC = ArenaSpec(PAIR, LAYOUT.shard_bytes, LAYOUT.slot_bytes, 2, STAGE)
LATE_S = 0.2


@pytest.mark.parametrize(
    ("intervals", "seconds"),
    [
        ([], 0),
        ([(1, 2)], 1),
        ([(3, 4), (1, 2)], 2),
        ([(1, 3), (2, 4)], 3),
        ([(1, 9), (2, 3), (4, 5)], 8),
        ([(-2, -1), (-1, 1)], 3),
    ],
)
def test_overlapping_time_counts_once(intervals: list[tuple[float, float]], seconds: float) -> None:
    assert covered_s(intervals) == seconds


def test_only_collectives_are_timed() -> None:
    assert timed_point(all_gather(LAYOUT, PAIR, 0)) == "arrived"
    assert timed_point(reduce_scatter(LAYOUT, PAIR, 0, STAGE, [0], "bfloat16", "float32")) == "done"
    assert timed_point(vacate(PAIR, 0)) == ""


def test_the_host_engine_times_launches_and_the_callers_waits() -> None:
    """Rank 1 comes late: rank 0's all-gather is under way for as long, and rank 0 waits for all of it."""

    def body(rank: int, engine: Any) -> tuple[Timings, Timings, Timings]:
        params = Buffers(params=[torch.zeros(32 * 8)])
        engine.launch(all_gather(LAYOUT, PAIR, rank), 0, params).wait("arrived")
        engine.launch(vacate(PAIR, rank), 0)
        before = engine.timings()
        engine.time_launches(True)
        if rank == 1:
            time.sleep(LATE_S)
        engine.launch(all_gather(LAYOUT, PAIR, rank), 0, params).wait("arrived")
        engine.launch(vacate(PAIR, rank), 0)
        gathering = engine.timings()
        grads = Buffers(grads=[torch.zeros(64, 8).bfloat16()], out=torch.zeros(shard_elements(LAYOUT, [0])))
        engine.launch(reduce_scatter(LAYOUT, PAIR, rank, STAGE, [0], "bfloat16", "float32"), -1, grads).wait("done")
        return before, gathering, engine.timings()

    results = run_ranks(SPEC, body)
    assert not any(isinstance(result, Exception) for result in results), results
    for before, gathering, reducing in results:
        assert before == Timings()
        assert len(gathering.launches) == len(reducing.launches) == 1
        assert 0 < reducing.communication_s < 10
    late, in_time = results[1][1], results[0][1]
    assert in_time.communication_s > 0.9 * LATE_S and in_time.waited_s > 0.9 * LATE_S
    assert late.communication_s < in_time.communication_s
    assert in_time.waited_s <= in_time.communication_s + 0.05


class Event:
    """A CUDA event that lies at `now` seconds of a GPU that is `reached` so far."""

    now = 0.0
    reached = float("inf")

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self, stream: Any = None) -> None:
        self.at, self.stream = Event.now, stream

    def query(self) -> bool:
        return self.at <= Event.reached

    def elapsed_time(self, later: Event) -> float:
        assert self.query() and later.query(), "would raise"
        return (later.at - self.at) * 1e3


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> CudaEngine:
    monkeypatch.setattr(timing.torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "now", 5.0)
    monkeypatch.setattr(Event, "reached", float("inf"))
    monkeypatch.setattr(timing.time, "monotonic", lambda: 100.0)
    made = stub_cuda.make(monkeypatch, SPEC)
    monkeypatch.setattr(made, "torch_stream", lambda name: name)
    return made


def gather(engine: CudaEngine) -> Any:
    return engine.launch(all_gather(LAYOUT, PAIR, 0), 0, Buffers(params=[torch.zeros(32 * 8)]), 5)


def reduce(engine: CudaEngine) -> Any:
    grads = Buffers(grads=[torch.zeros(64, 8).bfloat16()], out=torch.zeros(shard_elements(LAYOUT, [0])))
    return engine.launch(reduce_scatter(LAYOUT, PAIR, 0, STAGE, [0], "bfloat16", "float32"), -1, grads)


def test_the_cuda_engine_records_nothing_unless_asked(engine: CudaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing.torch.cuda, "Event", None)
    gather(engine).wait("arrived")
    reduce(engine).wait("done")
    engine.backward_ended()
    assert engine.timings() == Timings()


def test_the_cuda_engine_times_a_sample(engine: CudaEngine) -> None:
    engine.time_launches(True)
    Event.now = 6.0
    gathered = gather(engine)
    Event.now = 6.5
    gathered.wait("arrived")
    engine.launch(vacate(PAIR, 0), 0)
    Event.now = 7.0
    reduce(engine).wait("done")
    Event.now = 9.0
    engine.backward_ended()
    engine.backward_ended()
    found = engine.timings()
    assert found.launches == [(101.0, 101.0), (102.0, 102.0)]
    # At "done" FSDP2's own stream waits; compute stands still from the last reduce-scatter's launch to backward's end.
    assert found.waits == [(101.5, 101.5), (102.0, 104.0)]
    engine.time_launches(False)
    gather(engine).wait("arrived")
    assert engine.timings() == Timings()


def test_what_the_gpu_has_not_reached_is_read_later(engine: CudaEngine) -> None:
    engine.time_launches(True)
    Event.now = 6.0
    gathered = gather(engine)
    Event.now = 8.0
    gathered.wait("arrived")
    Event.reached = 7.0
    assert engine.timings() == Timings([(101.0, 101.0)], [])
    engine.time_launches(False)
    Event.reached = 9.0
    assert engine.timings() == Timings([], [(103.0, 103.0)])
    assert engine.timings() == Timings()
