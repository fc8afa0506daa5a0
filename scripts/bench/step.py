"""A training step of FSDP2: stock, PyTorch's symmetric memory, TIDE, each half of TIDE, and the same work without communication ("the
limit"), in one run.

PYTHONPATH=. torchrun --nproc-per-node 2 scripts/bench/step.py [--model llama|qwen3|wan] [--tokens 2048,8192] [--checkpoint none|full]
    [--param-dtype fp32|bf16] [--blocks 4] [--stage-mib 384] [--clocks] [--out FILE.json]

The model is a stack of blocks (blocks.py), each one FSDP2 unit: bf16 communication, fp32 reduction, resharded after the forward, implicit
prefetching as TorchTitan leaves it, fused AdamW; `--checkpoint full` wraps each block as TorchTitan does. Every row runs the same model on
the same data with the same policies. Rows take turns: after `--heat` seconds of steps, each of `--rounds` rounds runs every row for
`--warmup` untimed and `--steps` timed steps without a pause in between, every second round in reverse order, so that the clock's drift is
not one row's alone. TIDE stays attached (rows.py); rows say who communicates.

columns
  step         median over steps of the slower rank, between CUDA events in the caller's stream (host clock on the CPU)
  to stock     median over rounds of the row's step (median of the round) / stock's in the same round; to limit: the same with "none"
  peak         what PyTorch's allocator held at most in the timed steps, plus TIDE's arena, of the rank with most; the JSON has it by area
  host         median time of the host in a step
  SM comm      sum over communication kernels (NCCL's and TIDE's) of min(blocks, SMs of the GPU) x duration in one profiled step of rank 0,
               in SM-milliseconds: at most so many SMs are held, for so long; NCCL, sums, casts (and own copies): its parts
  SM layout    the same for FSDP2's copies between layouts (chunk_cat, split_with_sizes_copy), which TIDE does not need
  SM copy-in   the same for FSDP2's casts of shards and copies into the all-gather's buffer
  resident     share of that step in which a communication kernel is on the GPU
  exposed      that step's time in which something communicates and no kernel of the model or the optimizer runs
  copies       copy engines busy; hidden: while such a kernel ran
  CE           whether copy engines gathered: large copies to the peer ran and no all-gather kernel of NCCL's
  SM MHz, W    with --clocks: median over nvidia-smi's samples (every 20 ms) within timed steps; the lowest clock and the highest power of
               any rank's GPU
  power-capped share of these samples in which the power limit held the clock down, of the GPU with most

Rows: tide_early is TIDE with `early_reduce`, tide_all also with `early_gather`; tide_ag and tide_rs are its halves, the other half stock's.
"none" is TIDE doing only what a rank does for itself: casts of its own parameters, sums of its own gradients. No link traffic, no waits for
peers; slots keep what was gathered before, so that multiplies see real numbers.

Two ranks on ONE GPU: NCCL refuses that unless NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.31); ranks then share its SMs and memory, so only
that it runs can be seen there, not how fast anything is. Hosts whose multicast must not be used: NCCL_NVLS_ENABLE=0
TORCH_SYMM_MEM_DISABLE_MULTICAST=1.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from blocks import BLOCKS
from clocks import RanksClocks
from gradients import Gradients
from job import about, agreed, common_options, exchange, join, leave, meet, say, write
from rows import GIB, ROWS, Switch
from shapes import DEBUG, SIZES, mib_of
from step_table import show
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tide_comm import TideConfig
from tide_comm.engine.cuda.multicast import gpu_id
from torchtitan_tide import gpu_profile

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Bench:
    """One model, one optimizer; `slot` runs a row once."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device = options, device
        self.cuda = device.type == "cuda"
        sizes = (DEBUG if options.debug else SIZES)[options.model]
        self.dim, self.block_mib = sizes.dim, mib_of(options.model, sizes)
        with torch.device("meta"):
            blocks = [BLOCKS[options.model](sizes) for _ in range(options.blocks)]
            if options.checkpoint == "full":
                blocks = [checkpoint_wrapper(b, preserve_rng_state=False) for b in blocks]
            model = nn.Sequential(*blocks).to(DTYPES[options.param_dtype])
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for block in model:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        model.to_empty(device=device)
        torch.manual_seed(1 + dist.get_rank())
        with torch.no_grad():
            for name, p in model.named_parameters():
                shard = p.to_local()  # type: ignore[attr-defined]
                shard.fill_(1.0) if "norm" in name and name.endswith("weight") else shard.normal_(std=0.02)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        self.switch = Switch(model, self.optimizer, device)
        self.gradients = Gradients(list(model.parameters()), lambda: self.loss().backward(), self.optimizer.zero_grad)
        self.broken: dict[str, str] = {}
        """Rows that failed, with the error."""
        self.clocks: RanksClocks | None = None
        self._make_means()

    def _make_means(self) -> None:
        rows = [ROWS[row] for row in self.options.rows]
        if any(row.gather == "symm_mem" for row in rows):
            _, error = agreed(self.switch.make_symm)
            self._break([r for r in self.options.rows if ROWS[r].gather == "symm_mem"], error)
        if any(row.uses_tide for row in rows):
            config: dict[str, Any] = {"memory_mode": self.options.mode, "strict": True, "timeout_s": 60.0}
            if self.options.partial_blocks:
                config["partial_blocks"] = self.options.partial_blocks
            config["stage_bytes"] = self.options.stage_mib << 20
            _, error = agreed(lambda: self.switch.make_tide(TideConfig(**config)))
            self._break([r for r in self.options.rows if ROWS[r].uses_tide], error)

    def _break(self, rows: list[str], error: str) -> None:
        if error:
            self.broken |= dict.fromkeys(rows, error)
            say(f"left out from here on: {', '.join(rows)}: {error}")

    @property
    def rows(self) -> list[str]:
        return [row for row in self.options.rows if row not in self.broken]

    def set_tokens(self, tokens: int) -> None:
        self.tokens = tokens
        torch.manual_seed(100 + dist.get_rank())
        self.x = torch.randn(1, tokens, self.dim, device=self.device, dtype=torch.bfloat16)
        self.slots: dict[str, list[dict[str, Any]]] = {row: [] for row in self.options.rows}
        self.found: dict[str, dict[str, Any]] = {row: {} for row in self.options.rows}
        self.timed: dict[str, list[tuple[float, float]]] = {row: [] for row in self.options.rows}

    def loss(self) -> torch.Tensor:
        return self.model(self.x).float().pow(2).mean()

    def step(self) -> torch.Tensor:
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def heat(self) -> None:
        """Every row once, then steps for about `--heat` seconds, so that the clock is what it will be. Ranks agree on how many."""
        for work in (self._compare, self._try):
            for row in self.rows:
                _, error = agreed(lambda work=work, row=row: work(row))
                self._break([row], error)
        self.gradients.stock = []
        if not self.rows:
            return
        row = self.rows[0]
        self.switch.to(ROWS[row])
        meet(self.device)
        started = time.perf_counter()
        self.step()
        meet(self.device)
        took = max(exchange(time.perf_counter() - started))
        for _ in range(min(200, int(self.options.heat / took))):
            self.step()
        meet(self.device)

    def _compare(self, row: str) -> None:
        """Raises `RuntimeError` if the row's gradients are not stock's."""
        if ROWS[row].alone:
            return
        self.switch.to(ROWS[row])
        if row == "stock":
            self.gradients.take_stock()
            self.found[row]["gradient_difference"] = self.gradients.spread
        elif (difference := self.gradients.compare()) is not None:
            self.found[row]["gradient_difference"] = difference

    def _try(self, row: str) -> None:
        """A first step. Before the limit's, one that gathers: its slots keep that."""
        before = self.switch.on_stock()
        for wanted in dict.fromkeys((replace(ROWS[row], alone=False), ROWS[row])):
            self.switch.to(wanted)
            loss = self.step()
        if not torch.isfinite(loss):
            raise RuntimeError(f"the loss is {float(loss)}")
        if self.switch.on_stock() > before:
            raise RuntimeError(f"some collectives ran on stock communication\n{self.switch.report}")

    def slot(self, row: str) -> None:
        """A row's turn. Collective; a row that fails is left out from here on."""
        gc.collect()
        meet(self.device)
        mine, error = agreed(lambda: self._turn(row))
        self._break([row], error)
        if error:
            self.optimizer.zero_grad()
            return
        self.timed[row].append(mine["timed"])
        everybody = exchange(mine)
        # The slower rank counts: the limit has nothing that makes ranks wait for each other.
        self.slots[row].append(
            {
                "step_ms": [max(t) for t in zip(*(e["step_ms"] for e in everybody), strict=True)],
                "host_ms": [max(t) for t in zip(*(e["host_ms"] for e in everybody), strict=True)],
            }
        )
        self.found[row] |= {
            "loss": mine["loss"],
            "peak_torch_gib": max(e["peak"] for e in everybody) / GIB,
            "memory_gib": self.switch.memory(ROWS[row], max(e["peak"] for e in everybody)),
        }

    def _turn(self, row: str) -> dict[str, Any]:
        self.switch.to(ROWS[row])
        for _ in range(self.options.warmup):
            self.step()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        before = self.switch.on_stock()
        marks, host = [self._mark()], [time.perf_counter()]
        loss = torch.zeros(())
        for _ in range(self.options.steps):
            loss = self.step()
            marks.append(self._mark())
            host.append(time.perf_counter())
        if self.cuda:
            torch.cuda.synchronize()
        end = time.time()
        if self.switch.on_stock() > before:
            raise RuntimeError("some collectives ran on stock communication")
        host_ms = [(b - a) * 1e3 for a, b in zip(host, host[1:], strict=False)]
        pairs = zip(marks, marks[1:], strict=False)
        step_ms = [a.elapsed_time(b) for a, b in pairs] if self.cuda else host_ms
        peak = torch.cuda.max_memory_allocated() if self.cuda else 0
        timed = (end - sum(step_ms) / 1e3, end)  # the host was ahead of the first mark
        return {"step_ms": step_ms, "host_ms": host_ms, "timed": timed, "loss": float(loss), "peak": peak}

    def _mark(self) -> Any:
        if not self.cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def profile(self, row: str) -> None:
        """Add what one step spent on communication (gpu_profile.py). Collective."""
        found, error = agreed(lambda: self._profiled(row))
        if error:
            say(f"profile of {row}: {error}")
            self.found[row]["profile_error"] = error
        elif dist.get_rank() == 0:
            found["copy_engines"] = gpu_profile.copy_engines_ran(found)
            self.found[row].update(found)

    def _profiled(self, row: str) -> dict[str, Any]:
        self.switch.to(ROWS[row])
        self.step()
        meet(self.device)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            self.step()
            torch.cuda.synchronize()
        if dist.get_rank():
            return {}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            text = path.read_text()
        if self.options.traces:
            self.options.traces.mkdir(parents=True, exist_ok=True)
            name = f"{self.options.model}_{self.tokens}_{row}.json.gz"
            with gzip.open(self.options.traces / name, "wt", compresslevel=3) as file:
                file.write(text)
        sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        return gpu_profile.summary(json.loads(text)["traceEvents"], sms)

    def results(self) -> dict[str, dict[str, Any]]:
        rows: dict[str, dict[str, Any]] = {}
        for row in self.options.rows:
            slots = self.slots[row]
            if row in self.broken and not slots:
                rows[row] = {"error": self.broken[row]}
                continue
            if not slots:
                continue
            times = [t for slot in slots for t in slot["step_ms"]]
            found = self.found[row]
            arena = sum(self.switch.areas(ROWS[row]).values()) / GIB
            rows[row] = {
                "step_ms": statistics.median(times),
                "min_ms": min(times),
                "max_ms": max(times),
                "to_stock": self._ratio(row, "stock"),
                "to_limit": self._ratio(row, "none"),
                "host_ms": statistics.median(t for slot in slots for t in slot["host_ms"]),
                "rounds_ms": [slot["step_ms"] for slot in slots],
                "peak_gib": found["peak_torch_gib"] + arena,
                "arena_gib": arena,
                **found,
                **({"error": self.broken[row]} if row in self.broken else {}),
            }
        return rows

    def _ratio(self, row: str, other: str) -> float | None:
        """Median over rounds of a row's median step / another row's."""
        pairs = zip(self.slots[row], self.slots.get(other, []), strict=False)
        ratios = [statistics.median(a["step_ms"]) / statistics.median(b["step_ms"]) for a, b in pairs]
        return statistics.median(ratios) if ratios else None


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SIZES), default="llama")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--tokens", default="2048", help="a rank and step; several with commas")
    parser.add_argument("--checkpoint", choices=["none", "full"], default="none", help="activation checkpointing")
    parser.add_argument("--param-dtype", choices=list(DTYPES), default="fp32", help="what the optimizer updates")
    parser.add_argument("--mode", choices=["in_place", "slot_reuse"], default="in_place")
    parser.add_argument("--rows", default=",".join(ROWS), help=f"of {', '.join(ROWS)}")
    parser.add_argument("--partial-blocks", type=int, default=0, help="thread blocks of a sum; 0: TideConfig's default")
    parser.add_argument("--stage-mib", type=int, default=0, help="most MiB of STAGE, all places; 0: TideConfig's rule")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=2, help="timed steps a row and round")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them")
    parser.add_argument(
        "--heat", type=float, default=6.0, help="seconds of steps before the first round of each --tokens"
    )
    parser.add_argument("--clocks", action="store_true", help="read clocks and power beside the steps (nvidia-smi)")
    parser.add_argument("--no-profile", action="store_true", help="leave out the SM columns")
    parser.add_argument(
        "--traces", type=Path, help="folder for the profiled step of each row (Chrome trace, gzip, rank 0)"
    )
    common_options(parser)
    options = parser.parse_args()
    if options.debug:
        vars(options).update(blocks=2, tokens="8", rounds=2, steps=1, warmup=1, heat=0.0)
    options.rows = options.rows.split(",")
    options.tokens = [int(t) for t in str(options.tokens).split(",")]
    if unknown := [row for row in options.rows if row not in ROWS]:
        parser.error(f"--rows takes {', '.join(ROWS)}; got {', '.join(unknown)}")
    return options


def run(bench: Bench, tokens: int) -> dict[str, dict[str, Any]]:
    """All rounds at one number of tokens."""
    options = bench.options
    bench.set_tokens(tokens)
    bench.heat()
    gc.collect()
    gc.freeze()  # what is left to collect between turns is little, and quick
    for round_ in range(options.rounds):
        for row in bench.rows[:: -1 if round_ % 2 else 1]:
            bench.slot(row)
    if bench.clocks is not None:
        for row in options.rows:
            bench.found[row] |= bench.clocks.over(bench.timed[row])
    if bench.cuda and not options.no_profile:
        for row in bench.rows:
            bench.profile(row)
    return bench.results()


def main() -> None:
    options = parsed()
    device = join(options.debug)
    gc.disable()  # collected between turns
    say(f"making {options.blocks} blocks of {options.model}")
    bench = Bench(options, device)
    found: dict[str, Any] = about(device, options) | {"block_mib": bench.block_mib, "tokens": {}}
    if options.clocks:
        gpu = f"GPU-{gpu_id(device)}" if bench.cuda else ""
        bench.clocks = RanksClocks(gpu, exchange)
        found["clocks"] = bench.clocks.what
        say(f"clocks and power: {bench.clocks.what}")
    for tokens in options.tokens:
        rows = run(bench, tokens)
        found["tokens"][str(tokens)] = rows
        write(options.out, found)
        if dist.get_rank() == 0:
            show(rows, found, tokens)
            say(f"{tokens} tokens done")
    if bench.clocks is not None:
        bench.clocks.close()
    gc.unfreeze()
    gc.enable()
    # After symmetric memory or a failure an orderly end may warn or wait.
    abruptly = bench.cuda and (bench.switch.symm is not None or bool(bench.broken))
    if not abruptly:
        bench.switch.close()
    leave(device, abruptly)


if __name__ == "__main__":
    main()
