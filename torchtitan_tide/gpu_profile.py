"""What a profiled step spent on communication: from the events of a Chrome trace of torch.profiler. Needs no TorchTitan."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

KINDS = {
    "nccl_sm_ms": ("nccl",),
    "sum_sm_ms": ("tide::reduce_kernel",),
    "cast_sm_ms": ("tide::cast_kernel",),
    "layout_sm_ms": ("chunk_cat", "split_with_sizes"),
    "copy_in_sm_ms": ("CopyFunctor",),
}
"""SM milliseconds by kind, and the parts of kernels' names that belong to it. `cast_kernel` also copies own pieces where nothing is cast;
CopyFunctor is `_foreach_copy_`, with which FSDP2 casts its shards and copies them into the all-gather's buffer."""
COMM = ("nccl_sm_ms", "sum_sm_ms", "cast_sm_ms")
LARGE_BYTES = 1 << 20
"""Smaller peer copies are signals, not data."""
Interval = tuple[float, float]


def kind_of(name: str) -> str | None:
    """The kind of a kernel that communicates or moves layouts; None for the model's and the optimizer's."""
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), None)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Sequence[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def outside(intervals: Sequence[Interval], others: Sequence[Interval]) -> float:
    """How much of `intervals` lies in none of `others`; both as `union` gives them."""
    both = length(union([*intervals, *others]))
    return both - length(others)


def summary(events: Iterable[dict[str, Any]], sms: int) -> dict[str, float]:
    """Of one step on a GPU with `sms` multiprocessors:

    - SM milliseconds by kind of kernel: min(blocks, sms) x duration, summed;
    - `comm_sm_ms`, all kinds that communicate; `resident`, the share of the step in which one of them is on the GPU;
    - `layout_ms`, FSDP2's copies between layouts on the GPU, `span_ms`, from the first to the end of the last of all events;
    - `copies_ms`, copy engines busy; `copies_hidden_ms`, while another kernel ran;
    - `exposed_ms`: something communicates and no kernel of the model or the optimizer runs;
    - what `gather_engines` reads.
    """
    events = list(events)
    spent = dict.fromkeys(KINDS, 0.0)
    comm: list[Interval] = []
    work: list[Interval] = []
    copies: list[Interval] = []
    layout: list[Interval] = []
    for event in events:
        if event.get("cat") == "gpu_memcpy":
            copies.append((event["ts"], event["ts"] + event["dur"]))
        if event.get("cat") != "kernel":
            continue
        interval = (event["ts"], event["ts"] + event["dur"])
        kind = kind_of(event["name"])
        if kind is None:
            work.append(interval)
            continue
        x, y, z = event["args"]["grid"]
        spent[kind] += min(x * y * z, sms) * event["dur"] / 1e3
        (comm if kind in COMM else layout).append(interval)
    everything = union([*comm, *work, *copies, *layout])
    span = everything[-1][1] - everything[0][0] if everything else 0.0
    resident, working, copying = union(comm), union(work), union(copies)
    return spent | {
        "comm_sm_ms": sum(spent[kind] for kind in COMM),
        "layout_ms": length(union(layout)) / 1e3,
        "span_ms": span / 1e3,
        "resident": length(resident) / span if span else 0.0,
        "copies_ms": length(copying) / 1e3,
        "copies_hidden_ms": (length(copying) - outside(copying, working)) / 1e3,
        "exposed_ms": outside(union([*comm, *copies]), working) / 1e3,
        **gather_engines(events),
    }


def gather_engines(events: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Who gathered: `gather_kernels` of NCCL; copies of at least LARGE_BYTES to a peer (number, ms and bytes); copies on the own GPU."""
    found = dict.fromkeys(
        ("gather_kernels", "peer_copies", "peer_copies_ms", "peer_copies_bytes", "own_copies_ms"), 0.0
    )
    for event in events:
        name, cat = event.get("name", ""), event.get("cat")
        if cat == "kernel" and "nccl" in name and "AllGather" in name:
            found["gather_kernels"] += 1
        elif cat == "gpu_memcpy":
            nbytes = event.get("args", {}).get("bytes", 0)
            if "PtoP" in name and nbytes >= LARGE_BYTES:
                found["peer_copies"] += 1
                found["peer_copies_ms"] += event["dur"] / 1e3
                found["peer_copies_bytes"] += nbytes
            elif "DtoD" in name:
                found["own_copies_ms"] += event["dur"] / 1e3
    return found


def copy_engines_ran(found: dict[str, float]) -> str:
    """ "yes", "no" or "partly": whether an all-gather went through copy engines, from `gather_engines`."""
    if not found["peer_copies"]:
        return "no"
    return "partly" if found["gather_kernels"] else "yes"


def profiled(step: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Carry out `step` under the profiler and return its `summary`. Before it nothing may be under way on the GPU, nor on the peers'."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return summary(events, torch.cuda.get_device_properties(device).multi_processor_count)
