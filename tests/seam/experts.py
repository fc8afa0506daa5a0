"""A block of a mixture of experts, its experts as a list of modules (as Hugging Face had them until transformers 4) or stacked."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Expert(nn.Module):
    """Hugging Face's names."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class StackedExperts(nn.Module):
    """Three tensors (experts, out, in) in place of three a module; `experts[i](x)` becomes `experts(i, x)`."""

    def __init__(self, experts: nn.ModuleList) -> None:
        super().__init__()
        for name in ("gate_proj", "up_proj", "down_proj"):
            weights = [getattr(expert, name).weight.detach() for expert in experts]
            self.register_parameter(name, nn.Parameter(torch.stack(weights)))

    def forward(self, i: int, x: torch.Tensor) -> torch.Tensor:
        hidden = F.silu(F.linear(x, self.gate_proj[i])) * F.linear(x, self.up_proj[i])
        return F.linear(hidden, self.down_proj[i])


class MoEBlock(nn.Module):
    """As many tensors as a block of Qwen3-30B-A3B: 9, and 3 for each of 128 experts. Each expert gets what the gate gives it."""

    def __init__(self, dim: int = 8, hidden: int = 4, experts: int = 128, stacked: bool = False) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(dim) for _ in range(4))
        self.mix = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.gate = nn.Linear(dim, experts, bias=False)
        listed = nn.ModuleList(Expert(dim, hidden) for _ in range(experts))
        self.experts = StackedExperts(listed) if stacked else listed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x
        for norm, mix in zip(self.norms, self.mix, strict=True):
            h = h + mix(norm(h))
        shares = self.gate(h).softmax(dim=-1)
        for i in range(shares.size(-1)):
            given = self.experts(i, h) if isinstance(self.experts, StackedExperts) else self.experts[i](h)
            x = x + shares[:, i : i + 1] * given
        return x
