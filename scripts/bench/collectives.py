"""All-gather and reduce-scatter of one block of each model: TIDE against NCCL with FSDP2's copies, PyTorch's symmetric memory, and the same
bytes by copy engines alone, which is the limit. All ranks at once, so both ways over the link.

PYTHONPATH=. torchrun --nproc-per-node 2 scripts/bench/collectives.py [--models llama,qwen3,wan] [--param-dtype fp32,bf16]
    [--partial-blocks 16,64,132,264] [--piece-mib 16,64] [--ring 4] [--out FILE.json]

Each figure is the median of `--rounds` rounds in which all cases of a model take turns; a round launches a case `reps` times back to back
between two CUDA events in the caller's stream, after two launches that let ranks meet. `reps` follows from the bytes alone, so that
ranks agree. TIDE's and FSDP2's all-gathers run one ahead of their consumer, as in training; FSDP2's reduce-scatters wait for the one
before, as FSDP2 does. Results of TIDE are compared with NCCL's.

rows
  nccl           the collective alone: bf16 all-gather, fp32 reduce-scatter, flat buffers
  fsdp           the same with what FSDP2 does around it: casts and copy-in, split_with_sizes_copy; chunk_cat into fp32
  symm_mem       the all-gather from symmetric memory, zero-CTA policy; symm_mem fsdp: with FSDP2's copies; `copy_engines` says from a
                 profile whether copy engines gathered
  tide           the whole program with waits and signals; RS b blocks, p MiB: thread blocks of a sum, bytes of a piece
  copies         the program's peer copies alone

columns: us a launch; GB/s: bytes to the other ranks / time, one way (reduce-scatters: bf16 for TIDE, fp32 for NCCL); host us a launch;
to fsdp: time / the "fsdp" row's; to copies: time / the "copies" row's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from collectives_stock import StockGather, StockReduce
from collectives_tide import TideCollectives
from job import (
    about,
    agreed,
    common_options,
    exchange,
    join,
    leave,
    lists,
    meet,
    say,
    sum_options,
    write,
    zero_cta_group,
)
from shapes import DEBUG, DTYPES, SIZES, block_layout

from tide_comm.plan.layout import GroupLayout
from torchtitan_tide import gpu_profile

MOVED_BYTES = 8 << 30
"""Moved in about one round of a case."""

Case = Callable[[int], None]
"""Launches so many times and orders the caller's stream behind all of them."""


class Table:
    """Cases of one model and their figures."""

    def __init__(self, device: torch.device, rounds: int, debug: bool) -> None:
        self.device, self.rounds, self.debug = device, rounds, debug
        self.cases: dict[str, tuple[Case, int]] = {}
        self.rows: dict[str, dict[str, Any]] = {}

    def add(self, name: str, link_bytes: int, make: Callable[[], Case]) -> None:
        """`link_bytes`: to the other ranks, a launch. Collective; a case that cannot be made is a row with its error."""
        case, error = agreed(make)
        if error:
            self.rows[name] = {"error": error}
            return
        self.rows[name] = {"link_bytes": link_bytes, "us": [], "host_us": []}
        self.cases[name] = (case, 2 if self.debug else max(6, min(40, MOVED_BYTES // max(link_bytes, 1))))

    def run(self) -> None:
        for _ in range(self.rounds):
            for name in list(self.cases):
                meet(self.device)
                took, error = agreed(lambda name=name: self._timed(*self.cases[name]))
                if error:
                    self.rows[name] = {"error": error}
                    del self.cases[name]
                    continue
                slowest = [max(t) for t in zip(*exchange(took), strict=True)]
                self.rows[name]["us"].append(slowest[0])
                self.rows[name]["host_us"].append(slowest[1])

    def _timed(self, case: Case, reps: int) -> tuple[float, float]:
        """(us, host us) a launch."""
        case(2)
        cuda = self.device.type == "cuda"
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if cuda else []
        if cuda:
            marks[0].record()
        started = time.perf_counter()
        case(reps)
        host = (time.perf_counter() - started) * 1e6 / reps
        if not cuda:
            return host, host
        marks[1].record()
        torch.cuda.synchronize()
        return marks[0].elapsed_time(marks[1]) * 1e3 / reps, host

    def profile(self, name: str) -> None:
        """Add whether copy engines moved a case's bytes."""
        if name not in self.cases or self.device.type != "cuda":
            return
        found, error = agreed(lambda: self._profiled(self.cases[name][0]))
        row = self.rows[name]
        row["copy_engines"] = error or gpu_profile.copy_engines_ran(found)
        row["profile"] = found

    def _profiled(self, case: Case) -> dict[str, float]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            case(2)
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            return gpu_profile.gather_engines(json.loads(path.read_text())["traceEvents"])

    def finish(self, against: str, limit: str) -> dict[str, dict[str, Any]]:
        """Medians and ratios. `against`, `limit`: rows to divide by."""
        for row in self.rows.values():
            if row.get("us"):
                row["rounds_us"], row["us"] = row["us"], statistics.median(row["us"])
                row["host_us"] = statistics.median(row["host_us"])
                row["gb_per_s"] = row["link_bytes"] / row["us"] / 1e3
        for row in self.rows.values():
            for key, other in (("to_fsdp", against), ("to_copies", limit)):
                base = self.rows.get(other, {}).get("us")
                row[key] = row["us"] / base if row.get("us") and base else None
        return self.rows


def everywhere(check: Callable[[], bool | str]) -> bool | str:
    """True if a check holds on all ranks, else the first rank's words for what does not. Collective."""
    found, error = agreed(check)
    return error or next((words for words in exchange(found) if words is not True), True)


def shown(title: str, rows: dict[str, dict[str, Any]]) -> None:
    if dist.get_rank():
        return
    print(title)
    for name, row in rows.items():
        if "us" not in row:
            print(f"  {name:28} {row.get('error', 'not run')}")
            continue
        ratios = "".join(f"  {k} {row[k]:.3f}" for k in ("to_fsdp", "to_copies") if row[k] is not None)
        notes = "".join(f"  {k} {row[k]}" for k in ("copy_engines", "matches") if k in row)
        print(
            f"  {name:28} {row['us']:8.0f} us {row['gb_per_s']:6.1f} GB/s  host {row['host_us']:5.0f} us{ratios}{notes}"
        )


def gathers(
    options: argparse.Namespace, device: torch.device, layout: GroupLayout, symm: Any, windows: dict[str, Any]
) -> dict[str, Any]:
    """The all-gathers of a group. `windows`: buffers in symmetric memory by model, kept for its other dtype and never given back, so that
    no window is registered over memory that was another's."""
    table = Table(device, options.rounds, options.debug)
    tide = TideCollectives(layout, device, options.piece_mib[-1] << 20, options.ring)
    nbytes = tide.gather_bytes()
    stock = StockGather(layout, tide.masters, device)
    table.add("nccl", nbytes, lambda: stock.collective)
    table.add("fsdp", nbytes, lambda: stock.run)
    if symm is not None:
        from_windows, error = agreed(lambda: StockGather(layout, tide.masters, device, symm, windows.get(layout.name)))
        if from_windows is None:
            table.rows["symm_mem"] = {"error": error}
        else:
            windows[layout.name] = from_windows.outputs
            table.add("symm_mem", nbytes, lambda: from_windows.collective)
            table.add("symm_mem fsdp", nbytes, lambda: from_windows.run)
    table.add("tide", nbytes, lambda: tide.gather)
    table.add("copies", nbytes, lambda: tide.gather_copies)
    table.run()
    if "tide" in table.cases and "fsdp" in table.cases:
        table.rows["tide"]["matches"] = everywhere(lambda: tide.gathered_like(stock.unsharded))
    for name in ("symm_mem", "tide"):
        table.profile(name)
    tide.close()
    return table.finish("fsdp", "copies")


def reduces(options: argparse.Namespace, device: torch.device, layout: GroupLayout) -> dict[str, Any]:
    """The reduce-scatters of a group, over all pieces and blocks."""
    table = Table(device, options.rounds, options.debug)
    arenas: list[TideCollectives] = []
    stock: StockReduce | None = None
    for mib in options.piece_mib:
        nbytes = 512 if options.debug else mib << 20
        tide = TideCollectives(layout, device, nbytes, options.ring, arenas[0].grads if arenas else None, gathers=False)
        arenas.append(tide)
        if stock is None:
            stock = StockReduce(layout, tide.grads, device)
            table.add("nccl", stock.link_bytes, lambda s=stock: s.collective)
            table.add("fsdp", stock.link_bytes, lambda s=stock: s.run)
        for blocks in options.partial_blocks:
            name = f"tide {blocks} blocks, {mib} MiB"
            table.add(name, tide.reduce_bytes(), lambda tide=tide, b=blocks: tide.reduce(b))
    table.add("copies", arenas[-1].reduce_bytes(), lambda: arenas[-1].reduce_copies)
    table.run()
    names = [name for name in table.cases if name.startswith("tide")]
    for name in names:
        table.cases[name][0](1)
        meet(device)
        of = arenas[options.piece_mib.index(int(name.split()[-2]))]
        table.rows[name]["matches"] = everywhere(lambda of=of: of.reduced_like(stock.out) if stock else False)
    for tide in arenas:
        tide.close()
    return table.finish("fsdp", "copies")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SIZES))
    parser.add_argument(
        "--param-dtype", default="fp32,bf16", help="what the optimizer updates: fp32 is cast by the all-gather"
    )
    sum_options(parser, "16,64,132,264", 5)
    parser.add_argument("--no-symm", action="store_true", help="leave symmetric memory out")
    common_options(parser)
    options = parser.parse_args()
    lists(parser, options, models=SIZES, param_dtype=DTYPES)
    return options


def main() -> None:
    options = parsed()
    device = join(options.debug)
    symm, error = None, "left out"
    if not options.no_symm:
        symm, error = agreed(lambda: zero_cta_group(device))
        say(f"symmetric memory: {error or 'there'}")
    found: dict[str, Any] = about(device, options) | {"symm_mem_error": error, "models": {}}
    windows: dict[str, Any] = {}
    for model in options.models:
        mine: dict[str, Any] = {"all_gather": {}, "reduce_scatter": {}}
        found["models"][model] = mine
        sizes = (DEBUG if options.debug else SIZES)[model]
        for dtype in options.param_dtype:
            layout = block_layout(model, sizes, dist.get_world_size(), DTYPES[dtype])
            rows, error = agreed(lambda layout=layout: gathers(options, device, layout, symm, windows))
            mine["all_gather"][dtype] = rows or {"all": {"error": error}}
            shown(f"{model}, all-gather, {dtype} parameters", mine["all_gather"][dtype])
            write(options.out, found)
        layout = block_layout(model, sizes, dist.get_world_size(), "float32")
        rows, error = agreed(lambda layout=layout: reduces(options, device, layout))
        mine["reduce_scatter"] = rows or {"all": {"error": error}}
        shown(f"{model}, reduce-scatter of bf16 gradients into fp32", mine["reduce_scatter"])
        write(options.out, found)
        say(f"{model} done")
    leave(device, abruptly=symm is not None)


if __name__ == "__main__":
    main()
