"""All that TorchTitan 0.2.2 needs on a machine without an accelerator, in one place.

TorchTitan asks for a device module (`torch.cuda`) at import and calls functions on it that `torch.cpu` lacks; its MoE
layers and attention use kernels that exist on GPUs only. `prepare()` gives it a CPU device module, before it is
imported; `prepare_moe()` and `prepare_attention()` give the models CPU forms of those kernels. Nothing happens
where there is an accelerator.
"""

from __future__ import annotations

import functools
import os
import platform
import resource
import sys
import warnings
from collections.abc import Iterable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

_EXPECTED_WARNINGS = (
    "DTensor random operators may not have complete support on cpu",
    r"DTensor manual_seed\(\) may not have complete support on cpu",
    "'set_vital' is deprecated",
    "Set timeout is now only supported for either nccl or gloo",
)


def has_accelerator() -> bool:
    """Whether TorchTitan finds a device of its own here (CUDA, XPU, ...)."""
    return torch._utils._get_available_device_type() is not None


class CpuDeviceModule(ModuleType):
    """`torch.cpu` with the functions of `torch.cuda` that TorchTitan calls."""

    def __init__(self) -> None:
        super().__init__("torchtitan_tide.cpu.device")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    @staticmethod
    def current_device() -> int:
        """Always 0: all ranks of a host share one CPU device."""
        return 0

    @staticmethod
    def set_device(device: object) -> None:
        """Nothing to set: a CPU device has no index that matters."""

    @staticmethod
    def device_count() -> int:
        """Always 1."""
        return 1

    @staticmethod
    def get_device_name(device: object = None) -> str:
        """The processor's name."""
        return f"CPU ({platform.processor() or platform.machine()})"

    @staticmethod
    def get_device_properties(device: object = None) -> SimpleNamespace:
        """`total_memory`: the host's memory in bytes."""
        return SimpleNamespace(total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    @staticmethod
    def memory_stats(device: object = None) -> dict[str, int]:
        """The process's peak resident bytes, under the allocator's names."""
        unit_bytes = 1 if sys.platform == "darwin" else 1024
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
        return {"active_bytes.all.peak": peak_bytes, "reserved_bytes.all.peak": peak_bytes}

    @staticmethod
    def reset_peak_memory_stats(device: object = None) -> None:
        """Nothing: the system's peak cannot be reset."""

    @staticmethod
    def empty_cache() -> None:
        """Nothing: there is no cache."""


class _ProfilerOnCpu(ModuleType):
    """`torch.profiler`, whose `profile` leaves out the activity of an accelerator that is not there (None)."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.profiler, name)

    @staticmethod
    def profile(*, activities: Iterable[Any], **rest: Any) -> torch.profiler.profile:
        return torch.profiler.profile(activities=[a for a in activities if a is not None], **rest)


class _TorchForProfiling(ModuleType):
    """`torch`, as TorchTitan's profiling module needs it on CPU."""

    profiler = _ProfilerOnCpu("torch.profiler")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def prepare() -> bool:
    """Let TorchTitan run on CPU where there is no accelerator; call it before anything imports torchtitan.

    Returns whether the CPU is used. Raises `RuntimeError` when torchtitan was imported before.
    """
    if has_accelerator():
        return False
    imported = sys.modules.get("torchtitan.tools.utils")
    if imported is not None:
        if imported.device_type != "cpu":
            raise RuntimeError("torchtitan_tide.cpu.prepare() must run before torchtitan is imported")
        return True
    found = (torch._utils._get_available_device_type, torch._utils._get_device_module)
    module = CpuDeviceModule()
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda device_type: module  # type: ignore[assignment]
    try:
        # Every other module of TorchTitan takes its device from here, as names bound at import.
        import torchtitan.tools.utils
    finally:
        torch._utils._get_available_device_type, torch._utils._get_device_module = found
    import torchtitan.tools.profiling

    torchtitan.tools.profiling.torch = _TorchForProfiling("torch")  # type: ignore[attr-defined]
    # No figure of an A100 as the peak of a CPU: model FLOPS utilisation reads 0.
    torchtitan.tools.utils.get_peak_flops = lambda device_name: float("inf")
    for message in _EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    return True


class _TorchForMoe(ModuleType):
    """`torch`, whose `histc` also counts whole numbers on CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def histc(input: torch.Tensor, bins: int, min: int, max: int) -> torch.Tensor:
        """Counts of the expert numbers 0 .. bins-1: int64, shape (bins,)."""
        return torch.bincount(input, minlength=bins)


def prepare_moe() -> None:
    """Give TorchTitan's MoE layers the CPU forms of what they call; nothing where there is an accelerator."""
    if has_accelerator():
        return
    from torchtitan.models.moe import kernels, moe, utils

    if not isinstance(moe.torch, _TorchForMoe):
        moe.torch = _TorchForMoe("torch")  # type: ignore[attr-defined]
        utils.generate_permute_indices = functools.partial(kernels.generate_permute_indices, use_cpu=True)


def prepare_attention() -> None:
    """Give TorchTitan's attention CPU forms; nothing where there is an accelerator.

    FlexAttention gets a plain one, because PyTorch's has neither a backward nor a log-sum-exp on CPU. SDPA of DTensors
    that are sharded by heads (tensor parallelism) runs on each rank's own heads, because DTensor does not know PyTorch's CPU kernel.
    """
    if has_accelerator():
        return
    from torch.nn.attention.flex_attention import create_block_mask
    from torchtitan.models import attention

    # Uncompiled: a mask is made once a step, and compiling it takes a C++ compiler.
    attention._compiled_create_block_mask = create_block_mask
    attention.FlexAttentionWrapper.forward = _attention_under_mask  # type: ignore[assignment]
    wrapper = attention.ScaledDotProductAttentionWrapper
    if not hasattr(wrapper.forward, "stock"):
        wrapper.forward = _sdpa_by_heads(wrapper.forward)  # type: ignore[method-assign]


def _sdpa_by_heads(stock: Any) -> Any:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    def forward(self: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        # Context parallelism shards tokens, which are not independent: that keeps PyTorch's error.
        if isinstance(q, DTensor) and all(p in (Shard(1), Replicate()) for p in q.placements):
            local = stock(self, *(x.to_local() for x in (q, k, v)), **options)  # type: ignore[attr-defined]
            return DTensor.from_local(local, q.device_mesh, q.placements, run_check=False)
        return stock(self, q, k, v, **options)

    forward.stock = stock  # type: ignore[attr-defined]
    return forward


def _attention_under_mask(
    self: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    score_mod: None = None,
    block_mask: Any = None,
    scale: float | None = None,
    return_lse: bool = False,
    enable_gqa: bool = False,
) -> Any:
    """`FlexAttentionWrapper.forward` over the full score matrix, in fp32; q, k, v: (batch, heads, tokens, head dim)."""
    from torch.nn.attention.flex_attention import create_mask

    if enable_gqa:
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
    scores = (q @ k.transpose(-2, -1)).float() * (q.size(-1) ** -0.5 if scale is None else scale)
    if block_mask is not None:
        shape = (block_mask.kv_num_blocks.size(0), block_mask.kv_num_blocks.size(1), q.size(2), k.size(2))
        scores = scores.masked_fill(~create_mask(block_mask.mask_mod, *shape, device=str(q.device)), float("-inf"))
    output = scores.softmax(dim=-1).to(v.dtype) @ v
    return (output, scores.logsumexp(dim=-1)) if return_lse else output
