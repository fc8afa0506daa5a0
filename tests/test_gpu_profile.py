"""What is made of a profiled step, on a made-up trace."""

from __future__ import annotations

import pytest

from torchtitan_tide import gpu_profile


def kernel(name: str, ts: float, dur: float, blocks: int) -> dict:
    return {"cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": {"grid": [blocks, 1, 1]}}


def test_summary() -> None:
    events = [
        kernel("gemm", 0, 1000, 500),
        kernel("ncclDevKernel_AllGather", 500, 1000, 32),  # 500 us beside the multiply, 500 us alone
        kernel("void tide::reduce_kernel<...>", 2000, 500, 64),
        kernel("split_with_sizes_copy_out", 2500, 100, 1000),
        kernel("adamw", 2600, 400, 500),
        {"cat": "gpu_memcpy", "name": "Memcpy PtoP", "ts": 2800, "dur": 600},
        {"cat": "cpu_op", "name": "nccl:all_gather", "ts": 0, "dur": 9999},
    ]
    found = gpu_profile.summary(events, sms=132)
    assert found["nccl_sm_ms"] == 32.0
    assert found["sum_sm_ms"] == 32.0 and found["cast_sm_ms"] == 0
    assert found["comm_sm_ms"] == 64.0
    assert found["layout_sm_ms"] == pytest.approx(13.2), "no more than the GPU has"
    assert found["layout_ms"] == pytest.approx(0.1) and found["span_ms"] == 3.4
    assert found["resident"] == pytest.approx(1500 / 3400)
    assert (found["copies_ms"], found["copies_hidden_ms"]) == (0.6, 0.2)
    assert found["exposed_ms"] == pytest.approx(0.5 + 0.5 + 0.4)


def test_nothing_on_the_gpu() -> None:
    assert gpu_profile.summary([], 132)["resident"] == 0.0


def test_union() -> None:
    assert gpu_profile.union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert gpu_profile.outside([(0, 4)], [(1, 2), (3, 9)]) == 2
