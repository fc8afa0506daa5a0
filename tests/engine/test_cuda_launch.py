"""What the CUDA engine hands to its executor, and what its watchdog says, without a GPU."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest
import stub_cuda
import torch

from tide_comm.engine.base import ArenaSpec, Buffers
from tide_comm.engine.cuda import compile as compiled
from tide_comm.engine.cuda.engine import CudaEngine
from tide_comm.engine.cuda.records import KINDS, driver_calls
from tide_comm.errors import TideError
from tide_comm.plan import names
from tide_comm.plan.all_gather import all_gather, vacate
from tide_comm.plan.layout import GroupLayout, ParamLayout
from tide_comm.plan.reduce_scatter import reduce_scatter
from tide_comm.plan.slices import StageSpec
from tide_comm.plan.topology import Topology

PAIR = Topology.regular(1, 2)
LAYOUT = GroupLayout("block", (ParamLayout("w", (64, 8), "float32", "bfloat16", 2, 0),), 2)
SPEC = ArenaSpec(PAIR, LAYOUT.shard_bytes, LAYOUT.slot_bytes, 2, StageSpec(4096, 4, 2))
OTHER = "rank 1 (machine 0, lane 1)"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> CudaEngine:
    return stub_cuda.make(monkeypatch, SPEC)


def gather(engine: CudaEngine, slot: int = 0, tag: int = 5) -> np.ndarray:
    engine.launch(all_gather(LAYOUT, PAIR, 0), slot, Buffers(params=[torch.zeros(32 * 8)]), tag)
    return engine.library.launches[-1][0]


def look(engine: CudaEngine) -> str:
    """What the watchdog raises about things that have been under way for a second."""
    for under in {id(under): under for under, _ in engine.issued.values()}.values():
        under.since -= 1.0
    try:
        engine._watch.look()
    except TideError as error:
        return str(error)
    return ""


def word(engine: CudaEngine, name: str, key: int, slot: int, value: int, rank: int = 0) -> None:
    engine.arena.memory[rank][SPEC.words[name, key, slot] :][:4].view(torch.int32)[0] = value  # type: ignore


def tag(engine: CudaEngine, source: int, slot: int, value: int) -> None:
    engine.arena.memory[0][SPEC.slot_tag(source, slot) :][:4].view(torch.int32)[0] = value  # type: ignore


def test_tags_of_an_all_gather_share_calls_with_words(engine: CudaEngine) -> None:
    ops = gather(engine, slot=1)
    kinds = [KINDS[op["kind"]] for op in ops]
    agree = kinds.index("agree")
    assert ops[agree]["dst"] == SPEC.slot_tag(1, 1) and ops[agree]["dst_base"] == 0 and ops[agree]["aux"] == -1
    assert kinds[agree - 1] == "wait" and ops[agree - 1]["stream"] == ops[agree]["stream"]
    post = next(i for i, op in enumerate(ops) if KINDS[op["kind"]] == "write" and op["aux"] == -1)
    assert ops[post]["dst"] == SPEC.slot_tag(0, 1) and ops[post]["dst_base"] == 1
    assert kinds[post - 1] == "wait" and kinds[post + 1] == "copy"
    # begin, after, after, cast, own_done, after | vacant and tag, copy, arrived, sent | arrived and tag, after, arrived
    assert driver_calls(ops) == 13 and len(ops) == 15


def test_values_count_on_from_launch_to_launch(engine: CudaEngine) -> None:
    for launch in range(3):
        ops = gather(engine)
        values = engine.library.launches[-1][1]
        by_kind = {KINDS[op["kind"]]: int(values[op["aux"]]) for op in ops if op["kind"] in (2, 3) and op["aux"] >= 0}
        assert by_kind == {"write": launch + 1, "wait": launch + 1}
        engine.launch(vacate(PAIR, 0), 0)


def test_a_llama_block_at_two_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Driver calls of the launches whose host time docs/benchmarks.md shows."""
    dim, hidden = 8192, 28672
    shapes = [(dim,), (dim,), (dim, dim), (dim // 4, dim), (dim, dim), (hidden, dim), (hidden, dim), (dim, hidden)]
    layout = GroupLayout("b", tuple(ParamLayout(f"p{i}", s, "float32", "bfloat16", 2) for i, s in enumerate(shapes)), 2)
    stage = StageSpec(64 << 20, 4, 2)
    spec = ArenaSpec(PAIR, 0, layout.slot_bytes, 2, stage)
    calls = {}
    for how, change in (("as written", lambda program, ring: program), ("tightened", compiled.tighten)):
        monkeypatch.setattr(compiled, "tighten", change)
        words = compiled.WordTable(spec)
        numbers = {name: i for i, name in enumerate(("compute", *vars(names).values())) if isinstance(name, str)}
        for program in (
            all_gather(layout, PAIR, 0),
            vacate(PAIR, 0),
            reduce_scatter(layout, PAIR, 0, stage, list(range(8)), "bfloat16", "float32"),
        ):
            made = compiled.Compiled(program, spec, lambda table: 0, numbers.__getitem__, poison=False)
            calls[program.name.split()[0], how] = driver_calls(made.for_slot(0, words, lambda key: 0).ops)
    assert calls == {
        ("all_gather", "as written"): 27,
        ("all_gather", "tightened"): 25,
        ("vacate", "as written"): 5,
        ("vacate", "tightened"): 5,
        ("reduce_scatter", "as written"): 85,
        ("reduce_scatter", "tightened"): 61,
    }


def test_what_comes_in_time_is_no_failure(engine: CudaEngine) -> None:
    gather(engine)
    assert look(engine) == ""
    assert engine._watch._last_heard[1].startswith("all_gather block")


def test_ranks_that_gather_different_groups(engine: CudaEngine) -> None:
    gather(engine, slot=1, tag=5)
    engine.library.busy = set(range(8))
    assert look(engine) == "", "nothing has arrived: tags say nothing yet"
    tag(engine, 1, 1, 6)
    word(engine, "arrived", 1, 1, 1)
    error = look(engine)
    for part in ("all_gather block in slot 1", OTHER, "rank 0 (machine 0, lane 0)", "0x6, expected 0x5", "disagree"):
        assert part in error, error
    tag(engine, 1, 1, 5)
    assert look(engine) == ""


def test_a_peer_that_never_comes(engine: CudaEngine) -> None:
    gather(engine)
    engine.timeout_s = 1.5
    engine.library.busy = {number for number, (_, point) in engine.issued.items() if point == "arrived"}
    word(engine, "vacant", 1, 0, 0)
    assert look(engine) == ""
    error = look(engine)
    for part in ("timeout_s = 1.5", "all_gather block: point 'arrived' in slot 0", f"word 'arrived' from {OTHER}"):
        assert part in error, error
    assert "(at 0, needs 1)" in error and "last heard: all_gather block: point 'sent'" in error


def test_a_gpu_that_does_not_answer(engine: CudaEngine) -> None:
    gather(engine)
    engine.library.busy, engine.library.answers, engine.timeout_s = set(range(8)), False, 0.5
    assert "the GPU cannot be asked" in look(engine)


def test_a_dead_peer(engine: CudaEngine) -> None:
    gather(engine)
    engine.library.busy = set(range(8))
    engine.arena.dead = 1  # type: ignore
    error = look(engine)
    assert re.match(re.escape(f"{OTHER} has died"), error), error
    assert (
        f"rank 0 (machine 0, lane 0) waited for all_gather block: point 'sent' in slot 0: word 'arrived' from {OTHER}"
        in error
    )


def test_a_peer_that_left(engine: CudaEngine) -> None:
    gather(engine)
    engine.library.busy = set(range(8))
    engine.arena.left = [1]  # type: ignore
    assert f"{OTHER} has left" in look(engine)
    word(engine, "arrived", 1, 0, 1)
    tag(engine, 1, 0, 5)
    assert look(engine) == "", "what it owed has come"


def test_a_launch_under_way_for_a_moment_is_left_alone(engine: CudaEngine) -> None:
    gather(engine)
    engine.library.busy = set(range(8))
    peeks = []
    engine.library.tide_peek = lambda *args: peeks.append(args) or 0
    engine._watch.look()
    assert not peeks and time.monotonic() > 0


def test_points_know_their_stream(engine: CudaEngine) -> None:
    gather(engine)
    assert engine.stream_of(all_gather(LAYOUT, PAIR, 0), "arrived") == names.ARRIVE
