"""Which settings are tuned, over which values, and the rule that chooses.

**The rule.** What counts is the time of a step's launches of the collective that the setting belongs to, over all groups, of the slowest
rank. Each value is measured in several turns, and its time is the middle one's. Values within `SLACK` of the fastest are as good as it, or
within as much as the same value differs from turn to turn, where that is more (`slack`). Of those

- where a larger value spends something (SMs that multiplies need, memory), the smallest is chosen;
- where it spends nothing, the configuration's own value stays if it is among them, else the fastest is taken: a change must gain something;
- where turns differ by more than `SLACK`, the own value stays if it is among them, in either case: nothing speaks for another one.

Settings are tuned one after another, each with the values chosen before it. Values that make the same programs are one value.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tide_comm.config import TideConfig
from tide_comm.fsdp.rails import MULTICAST_BYTES

SLACK = 0.03
"""A relative difference that is not worth SMs, memory or a change of the configuration."""
KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True)
class Setting:
    """One field of `TideConfig` that is tuned. `values`: what is tried, with the configuration's own."""

    name: str
    what: str
    values: tuple[int, ...]
    collective: Literal["all_gather", "reduce_scatter"]
    spends: str = ""
    """What a larger value spends; "": nothing."""
    in_bytes: bool = False
    sizes_arena: bool = False
    """Each value needs an arena of its own."""
    at_once: bool = False
    """Only programs for multicast depend on it."""
    zero: int = 0
    """The value that a 0 stands for."""

    def candidates(self, config: TideConfig) -> tuple[int, ...]:
        """Ascending by what they mean, the configuration's own among them, and no other that means the same."""
        own = self.of(config)
        others = {value for value in self.values if self.meant(value) != self.meant(own)}
        return tuple(sorted({*others, own}, key=self.meant))

    def meant(self, value: int) -> int:
        """The value itself, or what 0 stands for."""
        return value or self.zero

    def of(self, config: TideConfig) -> int:
        """The configuration's value."""
        value: int = getattr(config, self.name)
        return value

    def set_in(self, config: TideConfig, value: int) -> TideConfig:
        """The configuration with another value."""
        changed: dict[str, Any] = {self.name: value}
        return replace(config, **changed)

    def why_off(self, config: TideConfig) -> str:
        """Why the configuration never uses it, or ""."""
        return "" if getattr(config, self.collective) else f"{self.collective} = false"

    def text(self, value: int) -> str:
        """For people: bytes in a unit that suits them."""
        meant = self.meant(value)
        if not self.in_bytes or not meant:
            return str(value)
        unit, size = ("MiB", MIB) if meant >= MIB else ("KiB", KIB) if meant >= KIB else ("B", 1)
        return f"{meant / size:g} {unit}" + (" (0)" if not value else "")


SETTINGS = (
    Setting(
        "partial_blocks",
        "thread blocks of the within-machine sum",
        (16, 32, 64, 132, 264),
        "reduce_scatter",
        "SMs that multiplies need",
    ),
    Setting(
        "final_blocks",
        "thread blocks of the last step of the reduce-scatter",
        (2, 4, 8, 16, 32, 64),
        "reduce_scatter",
        "SMs that multiplies need",
    ),
    Setting(
        "inbox_batch",
        "source machines a batch of the reduce-scatter",
        (1, 2, 4, 8),
        "reduce_scatter",
        "memory for two inboxes",
        sizes_arena=True,
    ),
    Setting(
        "head_bytes",
        "head of a round of the all-gather, confirmed by the receiver; 0: no pacing",
        (0, 1 * MIB, 8 * MIB, 32 * MIB),
        "all_gather",
        in_bytes=True,
    ),
    Setting(
        "multicast_max_bytes",
        "largest piece that goes to all GPUs of a machine by one write; 1 B: none does",
        # No piece of 1 byte lies at the 16 bytes that such a write takes, and 0 has a meaning of its own.
        (1, 256 * KIB, 2 * MIB, 16 * MIB, 64 * MIB, 256 * MIB),
        "all_gather",
        in_bytes=True,
        at_once=True,
        zero=MULTICAST_BYTES,
    ),
)

NOT_TUNED = {
    "early_reduce, early_part_bytes": "what they gain depends on when a backward pass hands out its gradients, and no model runs here: "
    "compare the rows tide and tide_early of scripts/bench/step.py",
    "stage_bytes": "it trades memory for SM time (steps were as long with pieces of 64, 128 and 256 MiB), and a job knows what "
    "memory it has left: tide plan shows what STAGE takes",
}
"""Why not, by name."""


def slack(turns_s: Mapping[int, Sequence[float]]) -> float:
    """How much slower than the fastest is as good as it: `SLACK`, or the range over its turns of the value where that is middling, if that
    is more. `turns_s`: seconds by value and turn."""
    ranges = [(max(turns) - min(turns)) / statistics.median(turns) for turns in turns_s.values()]
    return max(SLACK, statistics.median(ranges))


def choose(setting: Setting, turns_s: Mapping[int, Sequence[float]], own: int) -> int:
    """The value that the rule (above) takes. `turns_s`: seconds by value and turn, of at least one value; `own`: the configuration's."""
    times_s = {value: statistics.median(turns) for value, turns in turns_s.items()}
    limit_s = min(times_s.values()) * (1 + slack(turns_s))
    as_good = sorted(value for value, taken_s in times_s.items() if taken_s <= limit_s)
    if setting.spends and not (own in as_good and slack(turns_s) > SLACK):
        return as_good[0]
    return own if own in as_good else min(times_s, key=lambda value: (times_s[value], value))


def one_for_all_alike(keys: Mapping[int, Hashable], own: int) -> dict[int, int]:
    """Each value's stand-in: values with equal keys are one, shown as the configuration's own if it is among them, else as the smallest."""
    alike: dict[Hashable, list[int]] = {}
    for value, key in keys.items():
        alike.setdefault(key, []).append(value)
    return {value: own if own in alike[key] else min(alike[key]) for value, key in keys.items()}


def numbered(things: Iterable[object]) -> list[int]:
    """A number for each, the same for those that are equal. For what can be compared and not hashed cheaply."""
    seen: list[object] = []
    numbers = []
    for thing in things:
        found = next((i for i, other in enumerate(seen) if other == thing), len(seen))
        if found == len(seen):
            seen.append(thing)
        numbers.append(found)
    return numbers
