"""Flavors added to TorchTitan's models.

`tide_debug*`: small, for two CPU cores and a minute or two; a language model's vocabulary follows the tokenizer. `tide_shaped`: the
model that is measured, cut down to a few of its blocks; every FSDP group that is left is one of the whole model's.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

DEBUG_PREFIX = "tide_debug"
SHAPED = "tide_shaped"
SHAPED_BLOCKS = 4


def own_flavors(model: str) -> dict[str, Any]:
    """Flavors to add to those of `model`, new at each call; none for a model that has none of this project's."""
    make = _MAKERS.get(model)
    return make() if make is not None else {}


def _shaped(whole: Any) -> Any:
    """A model's sizes with few blocks. Copied in depth: TorchTitan changes nested sizes in place."""
    return dataclasses.replace(copy.deepcopy(whole), n_layers=SHAPED_BLOCKS)


def _llama3() -> dict[str, Any]:
    from torchtitan.models.llama3 import TransformerModelArgs, llama3_args

    return {
        "tide_debug": TransformerModelArgs(
            dim=128, n_layers=4, n_heads=4, n_kv_heads=2, vocab_size=2048, multiple_of=64, rope_theta=500000
        ),
        SHAPED: _shaped(llama3_args["70B"]),
    }


def _llama4() -> dict[str, Any]:
    from torchtitan.models.llama4 import TransformerModelArgs
    from torchtitan.models.moe import MoEArgs

    # Every second block has experts, as in the larger flavors that interleave.
    return {
        "tide_debug": TransformerModelArgs(
            dim=128,
            n_layers=4,
            n_heads=4,
            n_kv_heads=2,
            vocab_size=2048,
            multiple_of=64,
            rope_theta=500000,
            moe_args=MoEArgs(num_experts=8),
        )
    }


def _qwen3() -> dict[str, Any]:
    from torchtitan.models.moe import MoEArgs
    from torchtitan.models.qwen3 import Qwen3ModelArgs, qwen3_args

    dense = Qwen3ModelArgs(
        vocab_size=2048, head_dim=32, dim=128, n_layers=3, n_heads=4, n_kv_heads=2, hidden_dim=384, qk_norm=True
    )
    routing = MoEArgs(
        num_experts=8, num_shared_experts=0, top_k=2, score_func="softmax", route_norm=True, score_before_experts=False
    )
    moe = dataclasses.replace(dense, moe_enabled=True, moe_inter_dim=128, moe_args=routing)
    return {"tide_debug": dense, "tide_debug_moe": moe, SHAPED: _shaped(qwen3_args["30B-A3B"])}


def _deepseek_v3() -> dict[str, Any]:
    from torchtitan.models.deepseek_v3 import DeepSeekV3ModelArgs
    from torchtitan.models.moe import MoEArgs

    routing = MoEArgs(
        num_experts=8, num_shared_experts=1, top_k=2, score_func="softmax", route_norm=False, score_before_experts=False
    )
    return {
        "tide_debug": DeepSeekV3ModelArgs(
            vocab_size=2048,
            dim=128,
            inter_dim=384,
            moe_inter_dim=64,
            n_layers=3,
            n_dense_layers=1,
            n_heads=4,
            moe_args=routing,
            q_lora_rank=64,
            kv_lora_rank=64,
            qk_nope_head_dim=32,
            qk_rope_head_dim=16,
            v_head_dim=32,
            mscale=0.70,
        )
    }


def _gpt_oss() -> dict[str, Any]:
    from torchtitan.models.gpt_oss import GptOssModelArgs
    from torchtitan.models.moe import MoEArgs

    routing = MoEArgs(
        num_experts=8,
        num_shared_experts=0,
        score_func="softmax",
        route_norm=True,
        gate_bias=True,
        score_before_experts=False,
        top_k=2,
    )
    return {
        "tide_debug": GptOssModelArgs(
            vocab_size=2048,
            dim=128,
            moe_inter_dim=128,
            n_layers=3,
            moe_args=routing,
            head_dim=32,
            n_heads=4,
            n_kv_heads=2,
            sliding_window_size=32,
        )
    }


def _flux() -> dict[str, Any]:
    from torchtitan.models.flux import FluxModelArgs
    from torchtitan.models.flux.model.autoencoder import AutoEncoderParams

    # The widths of the text encoders that tests make: T5 64, CLIP 32.
    autoencoder = AutoEncoderParams(
        resolution=64,
        in_channels=3,
        ch=32,
        out_ch=3,
        ch_mult=(1, 1, 1, 1),
        num_res_blocks=1,
        z_channels=16,
        scale_factor=0.3611,
        shift_factor=0.1159,
    )
    return {
        "tide_debug": FluxModelArgs(
            vec_in_dim=32,
            context_in_dim=64,
            hidden_size=128,
            num_heads=4,
            depth=2,
            depth_single_blocks=2,
            axes_dim=(8, 12, 12),
            autoencoder_params=autoencoder,
        )
    }


_MAKERS = {
    "llama3": _llama3,
    "llama3_ft": _llama3,
    "llama4": _llama4,
    "qwen3": _qwen3,
    "deepseek_v3": _deepseek_v3,
    "gpt_oss": _gpt_oss,
    "flux": _flux,
}
