"""The published figures, each with how the same is computed from measured cells.

From an account of "The Endgame of FSDP Communication: Layout-Aware Collectives on Copy Engines, RDMA, and NVSwitch": 8 machines of 8 GPUs,
bf16 communication, fp32 sums. What it gives as a range is a range here. Wherever cells are missing, `Missing` says which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Key = tuple[str, str, str]


class Missing(Exception):
    """A figure cannot be computed; the message says what is missing."""


class Measured:
    """Records by (model, size, row). `unusable`: cells that ran but are not what their row says, with the reason. `loss_gaps`: of `tide
    parity`, by run. `collectives`: what scripts/bench/reduce_scatter.py wrote."""

    def __init__(
        self,
        records: Mapping[Key, dict[str, Any]],
        unusable: Mapping[Key, str] | None = None,
        loss_gaps: Mapping[str, float] | None = None,
        collectives: Mapping[str, Any] | None = None,
    ) -> None:
        self.records, self.unusable = records, unusable or {}
        self.loss_gaps, self.collectives = loss_gaps or {}, collectives or {}

    def get(self, model: str, size: str, row: str, what: str) -> float:
        """A record's number. Raises `Missing`."""
        record = self.records.get((model, size, row))
        if record is None:
            raise Missing(f"{model} {size} {row} {self.unusable.get((model, size, row), 'not run')}")
        value = record.get(what)
        if value is None and record.get("profile"):
            value = record["profile"].get(what)
        if value is None:
            raise Missing("n/a without a GPU")
        return float(value)

    def pairs(self, model: str | None, one: str, other: str) -> list[tuple[str, str]]:
        """(model, size) for which both rows were measured. Raises `Missing` if there are none."""
        found = [
            (m, s) for m, s, r in self.records if r == one and model in (None, m) and (m, s, other) in self.records
        ]
        if not found:
            raise Missing(f"{model or 'any model'}: {one} and {other} not run at one size")
        return found

    def step(self, model: str, size: str, row: str) -> float:
        return self.get(model, size, row, "step_ms")

    def saved(self, model: str, size: str, row: str = "tide", base: str = "stock") -> float:
        """Share of the base's step time that a row saves."""
        return 1 - self.step(model, size, row) / self.step(model, size, base)


def _span(values: list[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def _largest_saving(m: Measured) -> str:
    pairs = m.pairs(None, "tide", "stock")
    model, size = max(pairs, key=lambda pair: m.saved(*pair))
    return f"{m.saved(model, size):.1%} ({model} {size}, best of {len(pairs)})"


def _llama_seconds(m: Measured) -> str:
    return (
        _span([(m.step("llama", s, "stock") - m.step("llama", s, "tide")) / 1e3 for s in ("16K", "24K", "32K")], ".3f")
        + " s"
    )


def _llama_times_symm(m: Measured) -> str:
    ratios = []
    for size in ("16K", "24K", "32K"):
        symm_ms = m.step("llama", size, "stock") - m.step("llama", size, "symm_mem")
        if symm_ms <= 0:
            raise Missing(f"SymmMem saved nothing at {size}")
        ratios.append((m.step("llama", size, "stock") - m.step("llama", size, "tide")) / symm_ms)
    return _span(ratios, ".1f") + " times"


def _qwen_over_symm(m: Measured) -> str:
    return _span([m.saved("qwen", size, "tide", "symm_mem") for _, size in m.pairs("qwen", "tide", "symm_mem")], ".1%")


def _part_of_saving(m: Measured, row: str) -> float:
    whole = m.step("llama", "24K", "stock") - m.step("llama", "24K", "tide")
    part = m.step("llama", "24K", "stock") - m.step("llama", "24K", row)
    if whole <= 0:
        raise Missing("TIDE saved nothing to divide")
    return part / whole


def _gib(m: Measured, model: str, size: str, row: str, base: str) -> str:
    return f"{m.get(model, size, row, 'peak_gib') - m.get(model, size, base, 'peak_gib'):+.2f} GiB"


def _copies(m: Measured) -> str:
    copies_ms = m.get("llama", "8K", "stock", "layout_ms")
    return f"{copies_ms / 1e3:.3f} s, {copies_ms / m.step('llama', '8K', 'stock'):.1%}"


def _both(m: Measured, what: str, form: str, scale: float) -> str:
    return " -> ".join(format(m.get("llama", "8K", row, what) * scale, form) for row in ("stock", "tide"))


def _loss(m: Measured) -> str:
    if not m.loss_gaps:
        raise Missing("tide parity not run into this folder (scripts/reproduce/loss.sh)")
    return ", ".join(f"{name} {gap:.2%}" for name, gap in m.loss_gaps.items())


@dataclass(frozen=True)
class Figure:
    """One published figure: its table, what it is, the published value, how it is computed from cells."""

    table: str
    what: str
    published: str
    measure: Callable[[Measured], str]


def _collectives(what: str, form: str, *rows: str) -> Callable[[Measured], str]:
    def measure(m: Measured) -> str:
        if not m.collectives:
            raise Missing("scripts/reproduce/collectives.sh not run into this folder")
        found = [m.collectives["rows"].get(row, {}).get(what) for row in rows]
        values = " / ".join("n/a" if value is None else format(value, form) for value in found)
        return f"{values} ({m.collectives['ranks']} ranks, {m.collectives['mib']:g} MiB)"

    return measure


def _not_measured(m: Measured) -> str:
    raise Missing("not measured by this project")


FIGURES = (
    Figure("step_time", "largest saving of step time against stock", "27.1%", _largest_saving),
    Figure("step_time", "Llama 16K to 32K: saved a step", "0.51 to 0.54 s", _llama_seconds),
    Figure("step_time", "Llama 16K to 32K: saving, in SymmMem's", "1.9 to 2.4 times", _llama_times_symm),
    Figure("step_time", "Llama 32K: saving", "3.1%", lambda m: f"{m.saved('llama', '32K'):.1%}"),
    Figure("step_time", "Wan 31.2K: saving", "1.4%", lambda m: f"{m.saved('wan', '31.2K'):.1%}"),
    Figure("step_time", "Qwen3: saving against SymmMem", "4.3% to 6.0%", _qwen_over_symm),
    Figure("sm_time", "Llama 8K, stock: copies between layouts", "0.33 s, 6.4%", _copies),
    Figure(
        "sm_time",
        "Llama 8K: SM time of communication, stock -> TIDE, SM s",
        "78 -> 3.8",
        lambda m: _both(m, "comm_sm_ms", ".1f", 1e-3),
    ),
    Figure(
        "sm_time",
        "Llama 8K: a communication kernel is resident, stock -> TIDE",
        "89% -> 8%",
        lambda m: _both(m, "resident", ".0%", 1),
    ),
    Figure(
        "ablation",
        "Llama 24K: of the saving, by the all-gather alone",
        "50%",
        lambda m: f"{_part_of_saving(m, 'tide_ag'):.0%}",
    ),
    Figure(
        "ablation",
        "Llama 24K: of the saving, by the reduce-scatter alone",
        "58%",
        lambda m: f"{_part_of_saving(m, 'tide_rs'):.0%}",
    ),
    Figure(
        "ablation",
        "Llama 24K: both parts together",
        "108%",
        lambda m: f"{_part_of_saving(m, 'tide_ag') + _part_of_saving(m, 'tide_rs'):.0%}",
    ),
    Figure(
        "memory",
        "Llama 24K: In-Place against SymmMem",
        "-4.7 GiB",
        lambda m: _gib(m, "llama", "24K", "tide", "symm_mem"),
    ),
    Figure(
        "memory", "Llama 24K: In-Place against stock", "+1.9 GiB", lambda m: _gib(m, "llama", "24K", "tide", "stock")
    ),
    Figure(
        "memory",
        "Wan: Slot-Reuse against stock",
        "-1.0 to -1.4 GiB",
        lambda m: _gib(m, "wan", "31.2K", "tide_slot_reuse", "stock"),
    ),
    Figure("loss", "Qwen3, 1,000 steps: largest gap of the averaged loss", "TIDE 0.73%, stock again 1.12%", _loss),
    Figure(
        "collectives",
        "2 machines, 32 MiB outputs: reduce-scatter in ms, TIDE / SymmMem",
        "2.12 / 1.27",
        _collectives("alone_ms", ".2f", "tide", "symm_mem"),
    ),
    Figure(
        "collectives",
        "8 machines, 32 MiB: the same, NCCL / NCCL with 4 blocks / TIDE",
        "6.75 / 26.35 / 6.96",
        _collectives("alone_ms", ".2f", "stock", "stock, 4 blocks", "tide"),
    ),
    Figure(
        "collectives",
        "... a multiply of 256 x 8192 x 8192 beside it slowed",
        "69% / 2.7% / 2.9%",
        _collectives("slowed", ".1%", "stock", "stock, 4 blocks", "tide"),
    ),
    Figure("collectives", "memory-bound kernel slowed while peers pull / push", "46.7% / 12.1%", _not_measured),
    Figure("collectives", "switches' pauses without pacing", "9 times", _not_measured),
)
SAVED = {("llama", "32K"): 0.031, ("wan", "31.2K"): 0.014}
"""Published savings of single cells, for plots."""
