"""How much a multiply slows down beside each collective that runs without pause, beside NCCL's, and beside the same copies alone.

PYTHONPATH=. torchrun --nproc-per-node 2 scripts/bench/beside.py [--model llama] [--param-dtype fp32,bf16] [--partial-blocks 16,64,264]
    [--piece-mib 16,64] [--ring 4] [--out FILE.json]

256 x 8192 x 8192 in bf16 reads 134 MB in about 50 us: it is bound by memory. 2048 x 8192 x 28672 is bound by arithmetic and holds every SM
for about 1.4 ms. Each round measures a multiply alone, then beside the case, so that both see the same clock; the figure is the median
ratio. How often a multiply and a collective run is fixed by sizes before anything is timed: a count that followed from a rank's own times
could differ between ranks, and the one with more would wait for ever. Multiplies start when two launches of the case have ended, so that
ranks have met.

rows: as in collectives.py. With fp32 parameters an all-gather casts its own shards, in a kernel that competes with the multiply; with bf16
ones TIDE's kernel only copies them into the slot, and FSDP2 has one copy less.

columns: slowdown of either multiply; "short" after it: the case had ended before the multiplies in some round, so that the figure is too
low.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from collectives_stock import StockGather, StockReduce
from collectives_tide import TideCollectives
from job import about, agreed, common_options, exchange, join, leave, lists, meet, say, sum_options, write
from shapes import DEBUG, DTYPES, SIZES, block_layout

Case = Callable[[int], None]
LINK_BYTES_PER_MS = 390e6
"""What copies reach on NVLink 4 (18 links); other cases are slower, so they last longer."""
SLOWEST = 3.0
"""Cases run for this multiple of the multiplies' time alone."""
LEAD_MS = 6.0
"""What the host may need to issue a case."""


@dataclass(frozen=True)
class Multiply:
    """m x k times k x n, `count` times in a measurement; `nominal_ms` in all on an H200, for fixing counts."""

    m: int
    k: int
    n: int
    count: int
    nominal_ms: float

    @property
    def name(self) -> str:
        return f"{self.m}x{self.k}x{self.n}"


MULTIPLIES = (Multiply(256, 8192, 8192, 300, 15.0), Multiply(2048, 8192, 28672, 12, 17.0))
DEBUG_MULTIPLIES = (Multiply(8, 16, 16, 3, 0.0), Multiply(16, 16, 32, 2, 0.0))


class Beside:
    """One multiply and its measurements."""

    def __init__(self, multiply: Multiply, device: torch.device) -> None:
        self.multiply, self.device, self.cuda = multiply, device, device.type == "cuda"
        self.a = torch.randn(multiply.m, multiply.k, device=device, dtype=torch.bfloat16)
        self.b = torch.randn(multiply.n, multiply.k, device=device, dtype=torch.bfloat16)
        self.caller = torch.cuda.Stream(device, priority=-1) if self.cuda else None
        """The stream that waits for collectives; multiplies are on another."""

    def reps(self, link_bytes: int) -> int:
        """Launches of a case beside the multiplies, equal on all ranks."""
        if not self.cuda:
            return 4
        return 3 + math.ceil((self.multiply.nominal_ms * SLOWEST + LEAD_MS) * LINK_BYTES_PER_MS / link_bytes)

    def _multiplies(self) -> tuple[Any, Any]:
        marks = self._event(), self._event()
        marks[0].record()
        for _ in range(self.multiply.count):
            F.linear(self.a, self.b)
        marks[1].record()
        return marks

    def _event(self) -> Any:
        return torch.cuda.Event(enable_timing=True) if self.cuda else HostEvent()

    def alone(self) -> float:
        """Milliseconds."""
        start, end = self._multiplies()
        if self.cuda:
            torch.cuda.synchronize()
        return start.elapsed_time(end)

    def beside(self, case: Case, reps: int) -> tuple[float, bool]:
        """(ms, whether the case lasted as long)."""
        over = self._event()
        with torch.cuda.stream(self.caller) if self.cuda else nullcontext():
            case(2)
            met = self._event()
            met.record()
            # The rest comes after the multiplies have been issued: thousands of queued operations would make the host wait.
            case(reps // 3)
        if self.cuda:
            torch.cuda.current_stream().wait_event(met)
        start, end = self._multiplies()
        with torch.cuda.stream(self.caller) if self.cuda else nullcontext():
            case(reps - reps // 3)
            over.record()
        if self.cuda:
            torch.cuda.synchronize()
        return start.elapsed_time(end), not self.cuda or end.elapsed_time(over) >= 0

    def measure(self, case: Case, link_bytes: int, rounds: int) -> dict[str, Any]:
        """Of the slower rank."""
        reps = self.reps(link_bytes)
        ratios, alone_us, long_enough = [], [], True
        for _ in range(rounds):
            meet(self.device)
            alone = self.alone()
            meet(self.device)
            measured, error = agreed(lambda: self.beside(case, reps))
            if error:
                return {"error": error}
            ms, enough = measured
            everybody = exchange((ms / alone, enough, alone))
            ratios.append(max(ratio for ratio, _, _ in everybody))
            long_enough = long_enough and all(enough for _, enough, _ in everybody)
            alone_us.append(max(a for _, _, a in everybody) * 1e3 / self.multiply.count)
        found = {"slowdown": statistics.median(ratios), "rounds": ratios, "reps": reps}
        return found | {"alone_us": statistics.median(alone_us), "lasted": long_enough}


class HostEvent:
    """On the CPU."""

    def record(self) -> None:
        self.at_s = time.perf_counter()

    def elapsed_time(self, other: HostEvent) -> float:
        return (other.at_s - self.at_s) * 1e3


def cases_of(options: argparse.Namespace, device: torch.device) -> tuple[dict[str, tuple[Case, int]], list[Any]]:
    """Cases by name with their bytes over the link, and the arenas behind them. Collective."""
    sizes, world = (DEBUG if options.debug else SIZES)[options.model], dist.get_world_size()
    arenas: list[TideCollectives] = []
    cases: dict[str, tuple[Case, int]] = {}

    def arena(dtype: str, mib: int, gathers: bool) -> TideCollectives:
        layout = block_layout(options.model, sizes, world, DTYPES[dtype])
        shared = arenas[0].grads if arenas else None
        nbytes = 512 if options.debug else mib << 20
        arenas.append(TideCollectives(layout, device, nbytes, options.ring, shared, gathers))
        return arenas[-1]

    for dtype in options.param_dtype:
        tide = arena(dtype, min(options.piece_mib), True)
        stock, nbytes = StockGather(tide.layout, tide.masters, device), tide.gather_bytes()
        cases.setdefault("all-gather nccl", (stock.collective, nbytes))
        cases[f"all-gather fsdp, {dtype}"] = (stock.run, nbytes)
        cases[f"all-gather tide, {dtype}"] = (tide.gather, nbytes)
        cases[f"all-gather copies, {dtype}"] = (tide.gather_copies, nbytes)
    reduce = StockReduce(tide.layout, tide.grads, device)
    cases["reduce-scatter nccl"] = (reduce.collective, reduce.link_bytes)
    cases["reduce-scatter fsdp"] = (reduce.run, reduce.link_bytes)
    for mib in options.piece_mib:
        tide = arena(options.param_dtype[0], mib, False)
        for blocks in options.partial_blocks:
            cases[f"reduce-scatter tide {blocks} blocks, {mib} MiB"] = (tide.reduce(blocks), tide.reduce_bytes())
    cases["reduce-scatter copies"] = (tide.reduce_copies, tide.reduce_bytes())
    return cases, arenas


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SIZES), default="llama", help="whose block is communicated")
    parser.add_argument("--param-dtype", default="fp32,bf16", help="what the optimizer updates; of the all-gathers")
    sum_options(parser, "16,64,264", 3)
    common_options(parser)
    options = parser.parse_args()
    lists(parser, options, param_dtype=DTYPES)
    return options


def main() -> None:
    options = parsed()
    device = join(options.debug)
    found: dict[str, Any] = about(device, options) | {"cases": {}}
    made, error = agreed(lambda: cases_of(options, device))
    if error:
        write(options.out, found | {"error": error})
        raise SystemExit(error)
    cases, arenas = made
    multiplies = [Beside(m, device) for m in (DEBUG_MULTIPLIES if options.debug else MULTIPLIES)]
    for one in multiplies:
        for _ in range(3):
            one.alone()
    for name, (case, link_bytes) in cases.items():
        row = found["cases"][name] = {"link_bytes": link_bytes}
        for one in multiplies:
            row[one.multiply.name] = one.measure(case, link_bytes, options.rounds)
        cells = [
            f"{key} {r['slowdown']:.3f}x{'' if r['lasted'] else ' short'}" if "slowdown" in r else f"{key} {r['error']}"
            for key, r in row.items()
            if isinstance(r, dict)
        ]
        say(f"{name:40} {'   '.join(cells)}")
        write(options.out, found)
    for arena in arenas:
        arena.close()
    leave(device)


if __name__ == "__main__":
    main()
