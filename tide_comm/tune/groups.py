"""A model's parameter groups as plain data: what is needed to move their bytes without the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from tide_comm.fsdp import describe
from tide_comm.fsdp.attach import facts_of
from tide_comm.fsdp.planned import alike_key, trainable_of
from tide_comm.fsdp.verdict import GroupFacts
from tide_comm.plan.layout import GroupLayout

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class GroupCase:
    """Parameter groups that are alike in all but name; one stands for all of them."""

    names: tuple[str, ...]
    layout: GroupLayout
    trainable: tuple[int, ...]
    """Indices of the parameters that get gradients."""
    reduce_dtype: str | None
    gathers_per_step: int
    """Of one of the groups, with one microbatch: two where it is resharded after forward."""
    facts: GroupFacts
    """Without what depends on machines: those fields are 0 or ""."""

    @property
    def title(self) -> str:
        return self.names[0] if len(self.names) == 1 else f"{self.names[0]} .. {self.names[-1]} ({len(self.names)})"

    @property
    def grad_dtype(self) -> str | None:
        """Gradients come in the dtype that was gathered; None where that is not one dtype, and nothing to reduce is measured."""
        dtypes = {self.layout.params[p].comm_dtype for p in self.trainable}
        return dtypes.pop() if len(dtypes) == 1 and self.reduce_dtype else None

    @property
    def fingerprint(self) -> str:
        """Everything that must be alike on all ranks, readable."""
        params = ", ".join(
            f"{p.name} {list(p.shape)} {p.param_dtype}->{p.comm_dtype} dim {p.dim}" for p in self.layout.params
        )
        return f"{self.title}: reduce {self.reduce_dtype}; gathers {self.gathers_per_step}; trained {self.trainable}; {params}"


def cases_of(parts: Sequence[nn.Module]) -> dict[Ranks, list[GroupCase]]:
    """The distinct groups of a model (or its pipeline stages) with real FSDP2 groups, by the ranks that share them, largest first.

    The model may be on the meta device over a fake process group. Raises `TideError` if there is no FSDP2 module.
    """
    found: dict[Ranks, list[GroupCase]] = {}
    for ranks, units in sorted(describe.units_by_ranks(describe.units_of(parts)).items()):
        alike: dict[Any, GroupCase] = {}
        for unit in units:
            layout = describe.layout_of(unit, len(ranks))
            facts = facts_of(unit, layout, None, "", len(ranks), 0)
            key = alike_key(unit, layout), replace(facts, name="")
            if key in alike:
                alike[key] = replace(alike[key], names=(*alike[key].names, unit.name))
                continue
            gathers = 1 if unit.keeps_slot else 2
            alike[key] = GroupCase(
                (unit.name,), layout, trainable_of(unit), describe.reduce_dtype(unit), gathers, facts
            )
        found[ranks] = sorted(alike.values(), key=lambda case: -case.layout.bytes_unsharded)
    return found
