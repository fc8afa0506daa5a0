"""`TideConfig`: every switch of TIDE, as keyword arguments and as the `[tide]` section of a TOML file."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args, get_origin, get_type_hints


class TideConfigError(ValueError):
    """A value of `TideConfig` that cannot be used; names the field, what it got and what it takes."""


MAX_BATCH = 8
"""Sources that one sum of the CUDA engine adds."""


@dataclass
class TideConfig:
    """What TIDE replaces and how. The same dataclass is the `[tide]` section of a TOML file.

    Raises `TideConfigError` on a wrong type, a value out of range or an impossible combination.
    """

    comm: Literal["stock", "symm_mem", "tide"] = "tide"
    """Who communicates: FSDP2 as it is, FSDP2 with PyTorch's symmetric memory, or TIDE."""
    all_gather: bool = True
    """Replace the all-gather."""
    reduce_scatter: bool = True
    """Replace the reduce-scatter."""
    memory_mode: Literal["in_place", "slot_reuse"] = "in_place"
    """Where gradients are read: where autograd left them, or from the slot just vacated (frees them at once)."""
    head_bytes: int = 8 * 1024 * 1024
    """Bytes of the head of a round's put list, which the receiver confirms; 0: no pacing."""
    inbox_batch: int = 8
    """Source machines a batch of the reduce-scatter; two inboxes alternate."""
    partial_blocks: int = 64
    """Thread blocks of the within-machine sum. Of two GPUs' copies 16 add less than the link brings."""
    final_blocks: int = 4
    """Thread blocks of the last step of the reduce-scatter."""
    early_reduce: bool = False
    """Start a group's reduce-scatter in parts, while autograd still hands out the rest of its gradients."""
    early_part_bytes: int = 128 * 1024 * 1024
    """Least bytes of gradients in such a part."""
    early_gather: bool = False
    """Training loops that TIDE starts call `Report.overlap`: the first units gather while the optimizer still updates the rest."""
    stage_bytes: int = 0
    """Most bytes of STAGE, all its places together, in each arena; 0: a rule (`fsdp.domain.stage_for`). Fewer bytes are more and smaller
    pieces: more launches, and sums take more SM time."""
    slots: int = 0
    """Slots for unsharded parameters; 0: as many as the model's order needs."""
    gpus_per_machine: int = 0
    """GPUs a machine; 0: found. A smaller number emulates machines on one host."""
    rail: Literal["auto", "nccl", "loopback", "shm"] = "auto"
    """What carries bytes between machines."""
    multicast: Literal["auto", "on", "off"] = "auto"
    """Whether one write reaches all GPUs of a machine, and one read adds what stands on all of them. "on" is an error where GPUs do not
    have it; on CPUs it runs the same programs with copies."""
    multicast_max_bytes: int = 0
    """Bytes of a rank's piece of a parameter, above which it is copied to each GPU by itself; 0: 64 MiB. `tide tune` measures it."""
    max_group_params: int = 256
    """A group with more trainable tensors stays on stock communication."""
    strict: bool = False
    """Fail when a group is left on stock communication."""
    timeout_s: float = 300.0
    """Longest wait for a peer, in seconds."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            self._check_type(name, hint, getattr(self, name))
        for name in (
            "head_bytes",
            "stage_bytes",
            "slots",
            "gpus_per_machine",
            "multicast_max_bytes",
            "max_group_params",
        ):
            self._check(name, getattr(self, name) >= 0, "a number >= 0")
        for name in ("inbox_batch", "partial_blocks", "final_blocks", "early_part_bytes"):
            self._check(name, getattr(self, name) >= 1, "a number >= 1")
        self._check(
            "inbox_batch", self.inbox_batch <= MAX_BATCH, f"a number <= {MAX_BATCH}: a kernel adds so many at a time"
        )
        # How many it takes at least depends on the machines (fsdp.domain.stage_for); less than this is too little for any.
        self._check("stage_bytes", self.stage_bytes == 0 or self.stage_bytes >= 16, "0 (a rule) or at least 16")
        self._check("slots", self.slots != 1, "0 (found) or at least 2: one slot is computed on while another fills")
        self._check("timeout_s", self.timeout_s > 0, "a number of seconds > 0")
        if self.comm == "tide":
            if self.memory_mode == "slot_reuse" and self.reduce_scatter:
                self._check(
                    "memory_mode", self.all_gather, '"in_place" when all_gather = false: without it there are no slots'
                )
            if not (self.all_gather or self.reduce_scatter):
                self._check("comm", False, '"stock" when both all_gather and reduce_scatter are false')

    def _check_type(self, name: str, hint: object, value: object) -> None:
        if get_origin(hint) is Literal:
            choices = get_args(hint)
            self._check(name, value in choices, " | ".join(f'"{c}"' for c in choices))
        elif hint is bool:
            self._check(name, isinstance(value, bool), "true or false")
        elif hint is int:
            self._check(name, isinstance(value, int) and not isinstance(value, bool), "a whole number")
        elif hint is float:
            ok = isinstance(value, (int, float)) and not isinstance(value, bool)
            self._check(name, ok, "a number")

    def _check(self, name: str, ok: bool, takes: str) -> None:
        if not ok:
            raise TideConfigError(f"tide.{name} = {getattr(self, name)!r}: takes {takes}")

    @classmethod
    def field_names(cls) -> list[str]:
        """Names of all fields, in order."""
        return [f.name for f in fields(cls)]
