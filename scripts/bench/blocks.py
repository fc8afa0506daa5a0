"""The three models' blocks as modules, one FSDP2 unit each, with the parameters of `shapes.py` in its order.

Left out is what moves no weights of a block: RoPE, embeddings, heads. Qwen3's routing is balanced by construction (token t takes experts
k*t, ..., k*t + k - 1, modulo their number), as TorchTitan's `debug_force_load_balance`, so that every step and row has the same work; gates
come from the router. Experts run through `torch._grouped_mm` on GPUs (bf16) and a batched multiply elsewhere.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from shapes import Sizes
from torch import nn


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, head: int, causal: bool) -> torch.Tensor:
    """(batch, tokens, features) each; fewer heads of k and v are shared by queries."""
    q, k, v = (x.unflatten(-1, (-1, head)).transpose(1, 2) for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa).transpose(1, 2).flatten(2)


def linear(inner: int, outer: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(inner, outer, bias=bias)


class LlamaBlock(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.head = s.head
        self.wq, self.wk, self.wv = linear(s.dim, s.queries), linear(s.dim, s.kv), linear(s.dim, s.kv)
        self.wo = linear(s.queries, s.dim)
        self.w1, self.w2, self.w3 = linear(s.dim, s.hidden), linear(s.hidden, s.dim), linear(s.dim, s.hidden)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(s.dim), nn.RMSNorm(s.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.attention_norm(x)
        x = x + self.wo(attention(self.wq(h), self.wk(h), self.wv(h), self.head, causal=True))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Experts(nn.Module):
    """Three stacked tensors, as TorchTitan's `GroupedExperts`."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(s.experts, s.hidden, s.dim))
        self.w2 = nn.Parameter(torch.empty(s.experts, s.dim, s.hidden))
        self.w3 = nn.Parameter(torch.empty(s.experts, s.hidden, s.dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: (experts, tokens of each, dim)."""
        experts, each, dim = x.shape
        if not x.is_cuda:
            h = F.silu(x @ self.w1.mT) * (x @ self.w3.mT)
            return h @ self.w2.mT
        ends = torch.arange(1, experts + 1, device=x.device, dtype=torch.int32) * each
        flat = x.reshape(experts * each, dim)
        h = F.silu(torch._grouped_mm(flat, self.w1.mT, offs=ends)) * torch._grouped_mm(flat, self.w3.mT, offs=ends)
        return torch._grouped_mm(h, self.w2.mT, offs=ends).view(experts, each, dim)


class Qwen3Block(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.s = s
        self.wq, self.wk, self.wv = linear(s.dim, s.queries), linear(s.dim, s.kv), linear(s.dim, s.kv)
        self.wo = linear(s.queries, s.dim)
        self.q_norm, self.k_norm = nn.RMSNorm(s.head), nn.RMSNorm(s.head)
        self.experts, self.router = Experts(s), linear(s.dim, s.experts)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(s.dim), nn.RMSNorm(s.dim)

    def _normed(self, x: torch.Tensor, norm: nn.Module) -> torch.Tensor:
        return norm(x.unflatten(-1, (-1, self.s.head))).flatten(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.attention_norm(x)
        q, k = self._normed(self.wq(h), self.q_norm), self._normed(self.wk(h), self.k_norm)
        x = x + self.wo(attention(q, k, self.wv(h), self.s.head, causal=True))
        return x + self._mixture(self.ffn_norm(x))

    def _mixture(self, x: torch.Tensor) -> torch.Tensor:
        """Needs tokens * top_k to be a multiple of the number of experts."""
        tokens, dim = x.shape[1], x.shape[2]
        flat = x.reshape(tokens, dim)
        s = self.s
        chosen = torch.arange(tokens * s.top_k, device=x.device).view(tokens, s.top_k) % s.experts
        gates = F.softmax(self.router(flat).float(), dim=-1).gather(1, chosen)
        gates = (gates / gates.sum(-1, keepdim=True)).to(x.dtype)
        order = torch.argsort(chosen.flatten(), stable=True)
        sorted_tokens = flat[order // s.top_k]
        out = self.experts(sorted_tokens.view(s.experts, -1, dim)).reshape(-1, dim)
        weighted = out * gates.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(flat).index_add(0, order // s.top_k, weighted).view_as(x)


class WanAttention(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.head = s.head
        self.q, self.k, self.v, self.o = (linear(s.dim, s.dim, bias=True) for _ in range(4))
        self.norm_q, self.norm_k = nn.RMSNorm(s.dim), nn.RMSNorm(s.dim)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        q, k = self.norm_q(self.q(x)), self.norm_k(self.k(context))
        return self.o(attention(q, k, self.v(context), self.head, causal=False))


class WanBlock(nn.Module):
    """`forward` makes its own text and time embedding (zeros plus a constant): they belong to no block."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.s = s
        self.modulation = nn.Parameter(torch.empty(1, 6, s.dim))
        self.self_attn, self.cross_attn = WanAttention(s), WanAttention(s)
        self.norm3 = nn.LayerNorm(s.dim)
        self.ffn = nn.Sequential(
            linear(s.dim, s.hidden, bias=True), nn.GELU(approximate="tanh"), linear(s.hidden, s.dim, bias=True)
        )

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (self.s.dim,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        e = (self.modulation + 0.1).unbind(1)
        text = x[:, : self.s.text]  # as many tokens as a prompt has; what they say costs nothing
        h = self._norm(x) * (1 + e[1]) + e[0]
        x = x + self.self_attn(h, h) * e[2]
        x = x + self.cross_attn(self.norm3(x), text)
        return x + self.ffn(self._norm(x) * (1 + e[4]) + e[3]) * e[5]


BLOCKS = {"llama": LlamaBlock, "qwen3": Qwen3Block, "wan": WanBlock}
