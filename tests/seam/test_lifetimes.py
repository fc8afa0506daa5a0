"""How long memory is held: gradients until they are read, slots until they are vacated, whatever the timing."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed.fsdp._fully_shard._fsdp_param_group as param_group
from torch.multiprocessing.reductions import StorageWeakRef

from tests.seam import steps
from tests.seam.harness import Run
from tests.seam.launch import Job, Outcome, Place, run, values
from tests.seam.models import FP32, Net, sharded
from tests.seam.refusals import REFUSALS
from tide_comm.config import TideConfig

HERE = "tests.seam.test_lifetimes"
MODES = ("in_place", "slot_reuse")
DELAYED = ("fp32", "uneven", "accumulate synced", "prefetch two", "no reshard", "ema")
WRITING = ("write after evaluation", "data fp32", "load fp32")
ASLEEP_S = 2.0
STEPS = 8


def build(mode: str, slots: int = 0, **kwargs: Any) -> Run:
    from tide_comm import attach

    torch.manual_seed(0)
    model = sharded(**kwargs)
    report = attach(model, TideConfig(memory_mode=mode, slots=slots))  # type: ignore[arg-type]
    made = Run(Place(torch.distributed.get_rank(), torch.distributed.get_world_size(), None), "tide", model)  # type: ignore[arg-type]
    made.report, made.optim = report, steps.LocalAdam(model)
    return made


class Watch:
    """Notes the storages of the gradients that FSDP2 hands to each reduce-scatter, and calls `after(k)` when it has returned."""

    def __init__(self, after: Any) -> None:
        self.calls: list[list[tuple[StorageWeakRef, int]]] = []
        inner = param_group.foreach_reduce

        def foreach_reduce(fsdp_params: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls.append([(StorageWeakRef(g.untyped_storage()), g.nbytes) for g in grads])
            result = inner(fsdp_params, grads, *args, **kwargs)
            del grads
            after(len(self.calls) - 1)
            return result

        param_group.foreach_reduce = foreach_reduce

    def alive(self, call: int) -> int:
        """Bytes of gradients that are still held."""
        return sum(nbytes for ref, nbytes in self.calls[call] if not ref.expired())


def gradients_with_a_peer_asleep(place: Place, mode: str) -> dict[str, Any]:
    """Rank 1 sleeps before its backward. Nothing is gathered in backward, so rank 0 reduces its first group alone."""
    made = build(mode, reshard_after_forward=False)
    steps.plain(made, 0)
    seen: dict[str, Any] = {}

    def after(call: int) -> None:
        if call or place.rank:
            return
        until = time.monotonic() + ASLEEP_S / 2
        while watch.alive(0) and time.monotonic() < until:
            time.sleep(0.01)
        seen["alive while the peer sleeps"] = watch.alive(0)

    loss = steps.loss_of(made, 1)
    watch = Watch(after)
    if place.rank == 1:
        time.sleep(ASLEEP_S)
    loss.backward()
    seen["alive after backward"] = sum(watch.alive(c) for c in range(len(watch.calls)))
    seen["first group"] = sum(nbytes for _, nbytes in watch.calls[0])
    return seen


def gradients_during_backward(place: Place, mode: str) -> dict[str, Any]:
    """At most two groups' gradients are held: the one that has just been reduced and the one before it."""
    made = build(mode, model=Net(blocks=5))
    older: list[int] = []

    def note(until: int) -> None:
        # Peers read at their own pace: what is held for longer than they need shows because it stays.
        deadline = time.monotonic() + 2.0
        while (held := sum(watch.alive(c) for c in range(until))) and time.monotonic() < deadline:
            time.sleep(0.001)
        older.append(held)

    watch = Watch(lambda call: note(call - 1))
    for step in range(3):
        steps.plain(made, step)
        note(len(watch.calls))
    return {"older": older, "calls": len(watch.calls)}


def use_after_free(place: Place, mode: str) -> dict[str, str]:
    """What happens to a parameter that is used after its unit was resharded: stock's own error, on both sides."""
    errors = {}
    for side in ("stock", "tide"):
        made = build(mode) if side == "tide" else Run(place, side, sharded())
        held: list[torch.Tensor] = []
        layer = made.model.blocks[0].up
        handle = layer.register_forward_hook(lambda module, *unused, held=held: held.append(module.weight))
        steps.loss_of(made, 0)
        handle.remove()
        assert held[0].shape == (16, 8), "a forward sees the unsharded parameter"
        try:
            errors[side] = f"no error: {held[0].as_strided((16, 8), (8, 1)).float().sum()}"
        except RuntimeError as error:
            errors[side] = str(error).splitlines()[0]
    return errors


def slots_after_steps(place: Place, mode: str) -> dict[str, Any]:
    """Between steps no group holds a slot but those that stay unsharded; dropped all-gathers have given theirs back."""
    made = build(mode, slots=5, model=Net(blocks=4))
    blocks = list(made.model.blocks)
    blocks[0].set_modules_to_forward_prefetch([blocks[1]])
    holders = []
    for step in range(6):
        made.model.skip = (1,) if step % 2 else ()
        steps.plain(made, step)
        (domain,) = made.report.attachment.domains
        holders.append(sorted(domain.ledger.holder.values()))
    return {"holders": holders, "stats": made.report.stats()}


def views_of_shards(place: Place, mode: str) -> dict[str, bool]:
    """What is held from before the first forward, as TorchTitan's checkpoints hold a state dict, is the parameters for good."""
    made = build(mode, policy=FP32)
    before = {name: param.detach() for name, param in made.model.named_parameters()}
    initial = {name: view.to_local().clone() for name, view in before.items()}

    def current() -> bool:
        now = dict(made.model.named_parameters())
        return all(torch.equal(view.to_local(), now[name].to_local()) for name, view in before.items())

    steps.plain(made, 0)
    seen = {"trained": any(not torch.equal(before[n].to_local(), initial[n]) for n in before), "a step": current()}
    made.report.detach()
    seen["detached"] = current()
    steps.plain(made, 1)
    seen["a step on stock"] = current()
    return seen


def slow_pushes(place: Place, scenario: str, mode: str) -> dict[str, Any]:
    """Rank 0 pushes the last block slowly: pushes are under way when its own forward is done and parameters are written."""
    from tests.seam.harness import compare
    from tide_comm.engine.host.engine import HostEngine
    from tide_comm.plan.program import Copy

    inner = HostEngine._carry_out

    def carry_out(engine: HostEngine, op: Any, launch: Any) -> None:
        if isinstance(op, Copy) and launch.program.name == "all_gather blocks.2":
            time.sleep(0.02)
        inner(engine, op, launch)

    HostEngine._carry_out = carry_out if place.rank == 0 else inner  # type: ignore[method-assign]
    try:
        return compare(place, scenario, mode, steps=STEPS)
    finally:
        HostEngine._carry_out = inner  # type: ignore[method-assign]


def early_and_late(place: Place) -> dict[str, Any]:
    """Ranks 0 and 3 find every reduction done at once, ranks 1 and 2 none: whoever ran tails by what is done would wait in a circle."""
    from tests.seam.harness import compare
    from tide_comm.engine.host.engine import HostLaunch

    def reached(launched: HostLaunch, point: str) -> bool:
        if place.rank in (0, 3):
            launched.wait(point)
        return place.rank in (0, 3)

    inner = HostLaunch.reached
    HostLaunch.reached = reached  # type: ignore[method-assign]
    try:
        return compare(place, "hybrid, one unit on stock", steps=STEPS)
    finally:
        HostLaunch.reached = inner  # type: ignore[method-assign]


JOBS = {
    2: [
        *(Job(f"asleep {m}", f"{HERE}:gradients_with_a_peer_asleep", {"mode": m}) for m in MODES),
        *(Job(f"backward {m}", f"{HERE}:gradients_during_backward", {"mode": m}) for m in MODES),
        *(Job(f"use after free {m}", f"{HERE}:use_after_free", {"mode": m}, {"TIDE_POISON": "1"}) for m in MODES),
        *(Job(f"slots {m}", f"{HERE}:slots_after_steps", {"mode": m}, {"TIDE_POISON": "1"}) for m in MODES),
        *(
            Job(f"slow {n}", f"{HERE}:slow_pushes", {"scenario": n, "mode": "in_place"}, {"TIDE_POISON": "1"})
            for n in WRITING
        ),
        *(Job(f"views {m}", f"{HERE}:views_of_shards", {"mode": m}) for m in MODES),
    ],
    3: [
        Job(
            f"delays {name} {mode}",
            "tests.seam.harness:compare",
            {"scenario": name, "mode": mode, "steps": STEPS},
            {"TIDE_POISON": "1", "TIDE_DELAYS": str(seed)},
        )
        for seed, (name, mode) in enumerate((n, m) for n in DELAYED for m in MODES)
    ],
    4: [Job("early and late", f"{HERE}:early_and_late")],
}


@pytest.fixture(scope="module")
def results() -> dict[str, list[Outcome]]:
    return {name: outcomes for world, jobs in JOBS.items() for name, outcomes in run(world, jobs).items()}


def test_slot_reuse_frees_gradients_without_any_peer(results: dict[str, list[Outcome]]) -> None:
    waiting, _ = values(results["asleep slot_reuse"])
    assert waiting["first group"] > 0
    assert waiting["alive while the peer sleeps"] == 0


def test_in_place_keeps_gradients_until_they_are_read(results: dict[str, list[Outcome]]) -> None:
    waiting, _ = values(results["asleep in_place"])
    assert waiting["alive while the peer sleeps"] > 0, "a copy was made somewhere, or gradients are dropped unread"


@pytest.mark.parametrize("mode", MODES)
def test_no_gradient_outlives_backward(mode: str, results: dict[str, list[Outcome]]) -> None:
    for value in values(results[f"asleep {mode}"]):
        assert value["alive after backward"] == 0
    for value in values(results[f"backward {mode}"]):
        assert value["calls"] == 3 * 6
        assert not any(value["older"]), value["older"]


@pytest.mark.parametrize("mode", MODES)
def test_use_after_free_is_stocks_error(mode: str, results: dict[str, list[Outcome]]) -> None:
    for value in values(results[f"use after free {mode}"]):
        REFUSALS["use after free"].check(value["tide"])
        assert value["tide"] == value["stock"]


@pytest.mark.parametrize("mode", MODES)
def test_dropped_prefetches_give_their_slots_back(mode: str, results: dict[str, list[Outcome]]) -> None:
    for value in values(results[f"slots {mode}"]):
        assert all(len(held) <= 1 for held in value["holders"]), value["holders"]
        assert value["stats"].get("all_gathers_stock", 0) == 0


@pytest.mark.parametrize("name", [job.name for job in JOBS[3]])
def test_delays_change_no_bit(name: str, results: dict[str, list[Outcome]]) -> None:
    for rank, value in enumerate(values(results[name])):
        assert value["difference"] == "", f"rank {rank}: {value['difference']}"
        assert value["stats"]["all_gathers"] > 0 and value["stats"]["reduce_scatters"] > 0


@pytest.mark.parametrize("name", WRITING)
def test_writes_wait_for_own_pushes(name: str, results: dict[str, list[Outcome]]) -> None:
    for rank, value in enumerate(values(results[f"slow {name}"])):
        assert value["difference"] == "", f"rank {rank}: {value['difference']}"


def test_all_reduces_keep_their_order(results: dict[str, list[Outcome]]) -> None:
    for rank, value in enumerate(values(results["early and late"])):
        assert value["difference"] == "", f"rank {rank}: {value['difference']}"


@pytest.mark.parametrize("mode", MODES)
def test_views_of_shards_stay_views(mode: str, results: dict[str, list[Outcome]]) -> None:
    for value in values(results[f"views {mode}"]):
        assert all(value.values()), value


def test_tails_run_at_the_same_points_whatever_is_done() -> None:
    """A tail may be HSDP's all-reduce. Ranks that ran it earlier or later between other blocking collectives would block each other."""
    from tide_comm.fsdp.attachment import Attachment

    class Done:
        def reached(self, point: str) -> bool:
            return True

        def wait(self, point: str) -> None:
            pass

    attachment, order = Attachment(), []
    for k in range(3):
        attachment.before_reduce()
        attachment._in_backward = True  # there is no backward here that would run them
        attachment.add_tail(lambda k=k: order.append(k), Done())  # type: ignore[misc, arg-type]
        assert order == list(range(k - 1))
    attachment.finish_reductions()
    assert order == [0, 1, 2]
