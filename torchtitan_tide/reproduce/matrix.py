"""What is measured: models x tokens x communication, and which of these cells each published table needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchtitan_tide.errors import ConfigError, did_you_mean
from torchtitan_tide.measure.session import Training

ROWS: dict[str, tuple[str, ...]] = {
    "stock": ("--tide.comm=stock",),
    "symm_mem": ("--tide.comm=symm_mem",),
    "tide": ("--tide.comm=tide", "--tide.memory_mode=in_place"),
    "tide_slot_reuse": ("--tide.comm=tide", "--tide.memory_mode=slot_reuse"),
    "tide_ag": ("--tide.comm=tide", "--tide.memory_mode=in_place", "--tide.reduce_scatter=false"),
    "tide_rs": ("--tide.comm=tide", "--tide.memory_mode=in_place", "--tide.all_gather=false"),
}
"""Who communicates: FSDP2, FSDP2 over PyTorch's symmetric memory, TIDE in both memory modes, each half of TIDE alone."""
GPU_ROWS = ("symm_mem",)


@dataclass(frozen=True)
class Size:
    """Tokens a GPU and step. `name`: of the published size that this one stands for."""

    name: str
    tokens: int
    overrides: tuple[str, ...]

    @property
    def label(self) -> str:
        """The published name, and what was really taken where that is something else."""
        published = round(float(self.name.rstrip("K")) * 1000)
        same = abs(self.tokens - published) < 0.05 * published
        return self.name if same else f"{self.tokens} for {self.name}"


@dataclass(frozen=True)
class Model:
    key: str
    title: str
    config: str
    sizes: tuple[Size, ...]


def _text_sizes(tokens: Mapping[str, int]) -> tuple[Size, ...]:
    """One sequence a GPU, as long as there are tokens."""
    return tuple(
        Size(name, n, (f"--training.seq_len={n}", "--training.local_batch_size=1")) for name, n in tokens.items()
    )


_K = {f"{n}K": n * 1024 for n in (8, 16, 24, 32)}
_WAN_SIZE = ("--training.local_batch_size=1",)
FULL = (
    Model("llama", "Llama-3.1 70B", "train_configs/llama3.1_70b.toml", _text_sizes(_K)),
    Model("qwen", "Qwen3-30B-A3B", "train_configs/qwen3_30b_a3b.toml", _text_sizes(_K)),
    Model("wan", "Wan2.2 T2V-A14B", "train_configs/wan2.2_t2v_a14b.toml", (Size("31.2K", 31200, _WAN_SIZE),)),
)
"""For 64 GPUs. Which token counts Qwen3 was published with is not known here; it gets Llama's."""
DEBUG = (
    Model("llama", "llama3_debug", "train_configs/llama3_debug.toml", _text_sizes({"8K": 32, "24K": 96})),
    Model("qwen", "qwen3_moe_debug", "train_configs/qwen3_moe_debug.toml", _text_sizes({"8K": 32})),
    Model("wan", "wan_debug", "train_configs/wan_debug.toml", (Size("31.2K", 72, _WAN_SIZE),)),
)
"""The same roles, a thousandth of the size, for a CPU: they show that everything runs, and nothing about speed."""


def overrides_for(model: str, overrides: Sequence[str]) -> list[str]:
    """The user's overrides for a model: `--wan:training.dataset_path=x` is `--training.dataset_path=x` for wan, and nothing for others.

    Raises `ConfigError` for a model that is unknown.
    """
    found = []
    for override in overrides:
        key, colon, rest = override.removeprefix("--").partition(":")
        if not colon or "=" in key:
            found.append(override)
            continue
        known = [m.key for m in FULL]
        if key not in known or "=" not in rest:
            raise ConfigError(f"override {override!r}: takes --MODEL:section.key=value, models {', '.join(known)}")
        if key == model:
            found.append(f"--{rest}")
    return found


@dataclass(frozen=True)
class Cell:
    """One training: a model at a size with one kind of communication."""

    model: Model
    size: Size
    row: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.model.key, self.size.name, self.row

    @property
    def name(self) -> str:
        return f"{self.model.key}-{self.size.name}-{self.row}"

    def training(self, warmup: int, steps: int, overrides: Sequence[str]) -> Training:
        """The cell's training; the user's `overrides` come before the cell's own."""
        own = (*overrides_for(self.model.key, overrides), *self.size.overrides, *ROWS[self.row])
        return Training(self.name, self.model.config, own, ("steps", str(warmup), str(steps)))


@dataclass(frozen=True)
class Table:
    """A published table: `picks` are (model, size, rows); None: all of them."""

    title: str
    picks: tuple[tuple[str | None, str | None, tuple[str, ...]], ...]


TABLES = {
    "step_time": Table("Step time", ((None, None, ("stock", "symm_mem", "tide")),)),
    "sm_time": Table("SM time and residency of communication", (("llama", "8K", ("stock", "symm_mem", "tide")),)),
    "ablation": Table(
        "One collective replaced at a time", (("llama", "24K", ("stock", "tide", "tide_ag", "tide_rs")),)
    ),
    "memory": Table(
        "Peak memory",
        tuple(
            (m, s, ("stock", "symm_mem", "tide", "tide_slot_reuse")) for m, s in (("llama", "24K"), ("wan", "31.2K"))
        ),
    ),
}


def chosen(text: str, valid: Sequence[str], option: str) -> tuple[str, ...]:
    """The names in a comma-separated list; all for "all". Raises `ConfigError`."""
    if text == "all":
        return tuple(valid)
    names = tuple(filter(None, text.split(",")))
    for name in names:
        if name not in valid:
            raise ConfigError(f"{option} {text}: {name!r} is unknown{did_you_mean(name, valid)}")
    if not names:
        raise ConfigError(f"{option} {text!r}: takes names separated by commas, or all")
    return names


def with_configs(models: Sequence[Model], text: str) -> tuple[Model, ...]:
    """The models with other TOML files: `text` is "llama=FILE,wan=FILE". Raises `ConfigError`."""
    files: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        key, equals, path = part.partition("=")
        if not equals or key not in {m.key for m in models}:
            raise ConfigError(f"--configs {text}: takes MODEL=FILE,..., models {', '.join(m.key for m in models)}")
        files[key] = path
    return tuple(Model(m.key, m.title, files.get(m.key, m.config), m.sizes) for m in models)


def cells_of(
    tables: Sequence[str],
    models: Sequence[Model],
    sizes: Sequence[str] | None = None,
    rows: Sequence[str] = tuple(ROWS),
) -> list[Cell]:
    """The cells that the tables need, each once, a model and size together, rows in the order of `ROWS`."""
    wanted = {cell.key for table in tables for cell in _of_table(TABLES[table], models)}
    return [
        Cell(model, size, row)
        for model in models
        for size in model.sizes
        for row in ROWS
        if (model.key, size.name, row) in wanted and row in rows and (sizes is None or size.name in sizes)
    ]


def _of_table(table: Table, models: Sequence[Model]) -> Iterator[Cell]:
    for model_key, size_name, rows in table.picks:
        for model in models:
            for size in model.sizes:
                if model_key in (None, model.key) and size_name in (None, size.name):
                    for row in rows:
                        yield Cell(model, size, row)
