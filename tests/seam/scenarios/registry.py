"""The scenarios by name, and how one is added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.seam import steps
from tests.seam.harness import Scenario
from tests.seam.launch import Place
from tests.seam.models import sharded

SCENARIOS: dict[str, Scenario] = {}


def device() -> str:
    """What meshes are made of: the GPU where the scenarios play on GPUs (cuda_ranks.py)."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def add(
    name: str, build: Callable[[Place], nn.Module] | None = None, topic: str = "", row: str = "", **kwargs: Any
) -> Scenario:
    """`row` is what a user would call it; scenarios with the same row are variants of one line in docs/semantics.md."""
    kwargs.setdefault("step", steps.plain)
    kwargs.setdefault("optimizer", steps.LocalAdam)
    scenario = Scenario(name, build or (lambda place: sharded()), topic=topic, row=row, **kwargs)
    assert name not in SCENARIOS
    SCENARIOS[name] = scenario
    return scenario


def under(topic: str) -> Any:
    """`add` for one topic, the row first."""
    return lambda row, name, build=None, **kwargs: add(name, build, topic=topic, row=row, **kwargs)
