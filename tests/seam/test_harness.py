"""The comparison itself: stock against stock is equal to the bit, and a sum in another order is noticed."""

from __future__ import annotations

import pytest
import torch

from tests.seam.harness import Trace, first_difference
from tests.seam.launch import Job, run, values

COMPARE = "tests.seam.harness:compare"
STEPS = 8


@pytest.fixture(scope="module")
def results() -> dict:
    jobs = [
        Job("same", COMPARE, {"scenario": "reshard", "side": "reference", "steps": STEPS}),
        Job("reversed", COMPARE, {"scenario": "fp32", "side": "reversed", "steps": STEPS}),
        Job("gloo", COMPARE, {"scenario": "reshard", "side": "gloo", "steps": STEPS}),
        Job("raises", "tests.seam.test_harness:fail_on_rank_one"),
        Job("hangs", "tests.seam.test_harness:hang_on_rank_one", timeout_s=3),
        Job("goes on", COMPARE, {"scenario": "uneven", "side": "reference", "steps": STEPS}),
    ]
    return run(4, jobs)


def fail_on_rank_one(place) -> int:
    if place.rank == 1:
        raise ValueError("planted")
    return place.rank


def hang_on_rank_one(place) -> int:
    import time

    if place.rank == 1:
        time.sleep(1000)
    return place.rank


def test_stock_equals_stock(results: dict) -> None:
    for value in values(results["same"]):
        assert value["difference"] == ""
        assert value["largest_grad"] > 0
        assert len(set(value["losses"])) == STEPS


def test_another_order_is_noticed(results: dict) -> None:
    assert any(".grad[" in v["difference"] for v in values(results["reversed"]))


def test_gloo_equals_the_reference_to_rounding(results: dict) -> None:
    assert all(v["largest_error"] < 1e-3 for v in values(results["gloo"]))


def test_a_failing_rank_is_reported_and_the_next_job_runs(results: dict) -> None:
    assert "planted" in results["raises"][1].error and not results["raises"][0].error
    assert "hung" in results["hangs"][1].error and "hang_on_rank_one" in results["hangs"][1].error
    assert all(v["difference"] == "" for v in values(results["goes on"]))


def trace(**seen: torch.Tensor | None) -> Trace:
    return Trace(dict(seen))


def test_first_difference_names_label_and_index() -> None:
    zero, minus = torch.zeros(3), torch.tensor([0.0, 0.0, -0.0])
    assert first_difference(trace(a=zero), trace(a=zero.clone())) == ""
    assert first_difference(trace(a=zero), trace(a=minus)).startswith("a[2] is -0.0, stock has 0.0")
    assert "different things" in first_difference(trace(a=zero), trace(b=zero))
    assert "nothing" in first_difference(trace(a=zero), trace(a=None))
    assert "bfloat16" in first_difference(trace(a=zero), trace(a=zero.bfloat16()))
    nan = torch.tensor([float("nan")])
    assert first_difference(trace(a=nan), trace(a=nan.clone())) == ""
    assert first_difference(trace(a=nan), trace(a=torch.zeros(1)))
