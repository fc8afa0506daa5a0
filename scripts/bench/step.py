"""A training step of FSDP2: stock, TIDE, each half of TIDE, and the same work without communication ("the limit"), in one run.

PYTHONPATH=. torchrun --nproc-per-node 2 scripts/bench/step.py [--blocks 4] [--tokens 2048] [--param-dtype fp32|bf16] [--out FILE.json]

The model is a stack of Llama-70B-shaped blocks (RoPE, embedding and head left out: they move no weights of a block), each one FSDP2 unit:
bf16 communication, fp32 reduction, resharded after the forward, implicit prefetching as TorchTitan leaves it, fused AdamW. Every row runs
the same model on the same data with the same policies; rows take turns `--rounds` times, so that a slower minute is not one row's alone.
TIDE is attached and detached between rows.

columns
  step         median over steps of the slower rank, between CUDA events in the caller's stream (host clock on the CPU)
  peak         what PyTorch's allocator held at most in the timed steps, plus TIDE's arena, of the rank with most
  host         median time of the host in a step
  SM comm      sum over communication kernels (NCCL's and TIDE's) of min(blocks, SMs of the GPU) x duration in one profiled step of rank 0,
               in SM-milliseconds: at most so many SMs are held, for so long; NCCL: its part of that
  SM layout    the same for FSDP2's copies between layouts (chunk_cat, split_with_sizes_copy), which TIDE does not need
  resident     share of that step in which a communication kernel is on the GPU
  exposed      that step's time in which something communicates and no kernel of the model or the optimizer runs
  copies       copy engines busy; hidden: while such a kernel ran

"none" attaches TIDE, trains a step, and from then on carries out only what a rank does for itself: casts of its own parameters, sums of
its own gradients. No link traffic, no waits for peers; slots keep what was gathered before, so that multiplies see real numbers.

Two ranks on ONE GPU: NCCL refuses that unless NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.31); ranks then share its SMs and memory, so only
that it runs can be seen there, not how fast anything is. Hosts whose multicast must not be used: NCCL_NVLS_ENABLE=0.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_profile
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tide_comm import TideConfig, attach
from tide_comm.engine.base import Launched
from tide_comm.plan.program import Agree, Area, Copy, Op, Post, Program, Reduce, Region, Segment, Signal, Wait

ROWS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "tide": {},
    "tide_early": {"early_reduce": True},
    "tide_all": {"early_reduce": True, "early_gather": True},
    "tide_ag": {"reduce_scatter": False},
    "tide_rs": {"all_gather": False, "memory_mode": "in_place"},
    "none": {},
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
GIB = 1024**3
LIMIT_BLOCKS = 264
"""Of the limit's one sum a group: as wide as it is fast."""


class Block(nn.Module):
    """TorchTitan's tensors of a Llama block; 8 query heads share a key and a value."""

    def __init__(self, dim: int, hidden: int, head: int) -> None:
        super().__init__()
        self.dim, self.head = dim, head
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.wq, self.wo = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.wk, self.wv = nn.Linear(dim, dim // 8, bias=False), nn.Linear(dim, dim // 8, bias=False)
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.attention_norm(x)
        q, k, v = (w(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.wo(attended.transpose(1, 2).flatten(2))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


def without_peers(program: Program) -> Program:
    """What a rank does of a program for itself, with its sums in one kernel."""
    ops: list[Op] = []
    sums: list[Reduce] = [op for op in program.ops if isinstance(op, Reduce)]
    for op in program.ops:
        if isinstance(op, Reduce):
            if op is not sums[0]:
                continue
            own = tuple(
                Segment(tuple(s for s in seg.sources if isinstance(s, Region) and s.area is not Area.STAGE), seg.dst)
                for one in sums
                for seg in one.segments
            )
            op = replace(op, segments=own, blocks=LIMIT_BLOCKS)
        elif isinstance(op, (Wait, Signal, Post, Agree, Copy)):
            continue
        ops.append(op)
    return replace(program, ops=tuple(ops), arrivals={}, stage_pieces=0)


class Alone:
    """In an engine's place: launches only what needs no peer."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._known: dict[int, tuple[Program, Program]] = {}

    def launch(self, program: Program, *args: Any, **kwargs: Any) -> Launched:
        if id(program) not in self._known:
            self._known[id(program)] = (program, without_peers(program))
        return self.engine.launch(self._known[id(program)][1], *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


class Bench:
    """One model, one optimizer; `measure` runs a row."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device = options, device
        self.cuda = device.type == "cuda"
        dtype = DTYPES[options.param_dtype]
        with torch.device("meta"):
            model = nn.Sequential(
                *(Block(options.dim, options.hidden, options.head) for _ in range(options.blocks))
            ).to(dtype)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for block in model:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        model.to_empty(device=device)
        torch.manual_seed(1 + dist.get_rank())
        with torch.no_grad():
            for p in model.parameters():
                shard = p.to_local()  # type: ignore[attr-defined]
                shard.normal_(std=0.02)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        torch.manual_seed(100 + dist.get_rank())
        self.x = torch.randn(1, options.tokens, options.dim, device=device, dtype=torch.bfloat16)
        self.times: dict[str, list[float]] = defaultdict(list)
        self.host: dict[str, list[float]] = defaultdict(list)
        self.found: dict[str, dict[str, Any]] = defaultdict(dict)

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, None)

    def step(self) -> torch.Tensor:
        loss = self.model(self.x).float().pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def measure(self, row: str, profile: bool) -> None:
        """Attach, warm up, time, detach. Collective."""
        report = self._attach(row)
        for _ in range(self.options.warmup):
            self.step()
        self.synchronize()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        times, host, loss = self._timed()
        found = self.found[row]
        found["loss"] = float(loss)
        if not torch.isfinite(loss):
            raise SystemExit(f"{row}: the loss is {float(loss)}")
        peak = torch.cuda.max_memory_allocated() if self.cuda else 0
        arena = sum(report.memory.values()) if report is not None else 0
        if report is not None:
            on_stock = report.stats().get("all_gathers_stock", 0) + report.stats().get("reduce_scatters_stock", 0)
            if on_stock or any(g.comm != "tide" for g in report.groups):
                raise SystemExit(f"{row}: some collectives ran on stock communication\n{report}")
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, (times, host, peak, arena))
        # The slower rank counts: the limit has nothing that makes ranks wait for each other.
        self.times[row] += [max(t) for t in zip(*(e[0] for e in everybody), strict=True)]
        self.host[row] += [max(t) for t in zip(*(e[1] for e in everybody), strict=True)]
        found["peak_torch_gib"] = max(e[2] for e in everybody) / GIB
        found["arena_gib"] = max(e[3] for e in everybody) / GIB
        if profile and self.cuda:
            found.update(self._profiled(row))
        if report is not None:
            report.detach()

    def _attach(self, row: str) -> Any:
        self.synchronize()
        if self.cuda:
            torch.cuda.empty_cache()  # the arena comes from beside PyTorch's allocator
        wanted = ROWS[row]
        if wanted is None:
            return None
        config: dict[str, Any] = {"memory_mode": self.options.mode, "strict": True, **wanted}
        if self.options.partial_blocks:
            config["partial_blocks"] = self.options.partial_blocks
        report = attach(self.model, TideConfig(**config))
        if config.get("early_gather"):
            report.overlap(self.optimizer)
        if row == "none":
            self.step()
            self.synchronize()
            assert report.attachment is not None
            for domain in report.attachment.domains:
                replaced: Any = domain
                replaced.engine = Alone(domain.engine)
        return report

    def _timed(self) -> tuple[list[float], list[float], torch.Tensor]:
        """Milliseconds of each step and of the host in it. Steps follow one another, as in training."""
        marks, host, clock = [self._mark()], [], [time.perf_counter()]
        loss = torch.zeros(())
        for _ in range(self.options.steps):
            loss = self.step()
            marks.append(self._mark())
            clock.append(time.perf_counter())
            host.append((clock[-1] - clock[-2]) * 1e3)
        self.synchronize()
        pairs = zip(marks, marks[1:], strict=False)
        times = [a.elapsed_time(b) for a, b in pairs] if self.cuda else host
        return times, host, loss

    def _mark(self) -> Any:
        if not self.cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _profiled(self, row: str) -> dict[str, float]:
        """What one step spent on communication (gpu_profile.py)."""
        self.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            self.step()
            torch.cuda.synchronize()
        self.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            text = path.read_text()
        events = json.loads(text)["traceEvents"]
        if self.options.traces and dist.get_rank() == 0:
            self.options.traces.mkdir(parents=True, exist_ok=True)
            with gzip.open(self.options.traces / f"{row}_{self.options.tokens}.json.gz", "wt") as file:
                file.write(text)
        sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        return gpu_profile.summary(events, sms)

    def results(self) -> dict[str, dict[str, Any]]:
        rows: dict[str, dict[str, Any]] = {}
        medians = {row: statistics.median(times) for row, times in self.times.items()}
        for row, found in self.found.items():
            rows[row] = {
                "step_ms": medians[row],
                "min_ms": min(self.times[row]),
                "max_ms": max(self.times[row]),
                "to_stock": medians[row] / medians["stock"] if "stock" in medians else None,
                "to_limit": medians[row] / medians["none"] if "none" in medians else None,
                "host_ms": statistics.median(self.host[row]),
                "steps_ms": self.times[row],
                "peak_gib": found["peak_torch_gib"] + found["arena_gib"],
                **found,
            }
        return rows


def table_of(rows: dict[str, dict[str, Any]], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("row")
    columns = {
        "step ms": ("step_ms", ".2f"),
        "min": ("min_ms", ".2f"),
        "max": ("max_ms", ".2f"),
        "to stock": ("to_stock", ".3f"),
        "to limit": ("to_limit", ".3f"),
        "peak GiB": ("peak_gib", ".2f"),
        "of it arena": ("arena_gib", ".2f"),
        "host ms": ("host_ms", ".1f"),
        "SM comm ms": ("comm_sm_ms", ".1f"),
        "NCCL": ("nccl_sm_ms", ".1f"),
        "SM layout ms": ("layout_sm_ms", ".1f"),
        "resident": ("resident", ".1%"),
        "exposed ms": ("exposed_ms", ".1f"),
        "copies ms": ("copies_ms", ".1f"),
        "hidden": ("copies_hidden_ms", ".1f"),
    }
    for name in columns:
        table.add_column(name, justify="right")
    for row, found in rows.items():
        cells = ["-" if found.get(key) is None else format(found[key], form) for key, form in columns.values()]
        table.add_row(row, *cells)
    return table


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048, help="a rank and step")
    parser.add_argument("--dim", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=28672)
    parser.add_argument("--head", type=int, default=128, help="size of a head")
    parser.add_argument("--param-dtype", choices=list(DTYPES), default="fp32", help="what the optimizer updates")
    parser.add_argument("--mode", choices=["in_place", "slot_reuse"], default="in_place")
    parser.add_argument("--rows", default=",".join(ROWS), help=f"of {', '.join(ROWS)}")
    parser.add_argument("--partial-blocks", type=int, default=0, help="thread blocks of a sum; 0: TideConfig's default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="timed steps a row and round")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--no-profile", action="store_true", help="leave out the SM columns")
    parser.add_argument("--out", type=Path, help="where all figures go, as JSON")
    parser.add_argument(
        "--traces", type=Path, help="folder for the profiled step of each row (Chrome trace, gzip, rank 0)"
    )
    parser.add_argument("--debug", action="store_true", help="tiny sizes on the CPU, to see that it runs")
    options = parser.parse_args()
    if options.debug:
        vars(options).update(blocks=2, tokens=8, dim=64, hidden=96, head=8, rounds=1, steps=2, warmup=1)
    options.rows = options.rows.split(",")
    if unknown := [row for row in options.rows if row not in ROWS]:
        parser.error(f"--rows takes {', '.join(ROWS)}; got {', '.join(unknown)}")
    return options


def main() -> None:
    options = parsed()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    local = int(os.environ["LOCAL_RANK"])
    if options.debug:
        device = torch.device("cpu")
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    else:
        device = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(device)
        # Figures travel over gloo, so that only the rows' own work is on the GPU.
        dist.init_process_group("cpu:gloo,cuda:nccl")
    bench = Bench(options, device)
    for round_ in range(options.rounds):
        for row in options.rows:
            bench.measure(row, profile=round_ == options.rounds - 1 and not options.no_profile)
    if dist.get_rank() == 0:
        rows = bench.results()
        machine = torch.cuda.get_device_name(device) if bench.cuda else "CPU"
        gpus = f", {min(torch.cuda.device_count(), dist.get_world_size())} GPUs" if bench.cuda else ""
        title = (
            f"{options.blocks} blocks of {options.dim} x {options.hidden}, {options.tokens} tokens, {options.param_dtype}, "
            f"{options.mode}; {dist.get_world_size()} ranks, {machine}{gpus}, PyTorch {torch.__version__}"
        )
        Console(width=None if sys.stdout.isatty() else 200).print(table_of(rows, title))
        if options.out:
            settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
            about = {"machine": machine, "ranks": dist.get_world_size(), "torch": torch.__version__}
            options.out.write_text(json.dumps({"options": settings, **about, "rows": rows}, indent=1) + "\n")
    bench.synchronize()
    sys.stdout.flush()
    if bench.cuda and torch.cuda.device_count() < dist.get_world_size():
        os._exit(0)  # where ranks share a GPU the end of NCCL's group may wait for ever
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
