"""Counts, shapes and dtypes of the Wan2.2 transformer."""

from __future__ import annotations

import pytest
import torch

from torchtitan_tide import cpu

cpu.prepare()

from torchtitan_tide.models.wan.args import WanModelArgs, flavors  # noqa: E402
from torchtitan_tide.models.wan.layers import rope_split, rope_table, rotate  # noqa: E402
from torchtitan_tide.models.wan.model import WanModel, time_features  # noqa: E402
from torchtitan_tide.models.wan.names import to_diffusers, to_original  # noqa: E402


def small(**changes: int) -> WanModelArgs:
    sizes = {"dim": 64, "ffn_dim": 128, "n_heads": 2, "n_layers": 2, "text_dim": 32, "text_len": 8, "freq_dim": 64}
    return WanModelArgs(**{**sizes, **changes})  # type: ignore[arg-type]


def ready(args: WanModelArgs) -> WanModel:
    torch.manual_seed(0)
    model = WanModel(args)
    with torch.no_grad():
        model.init_weights()
        model.head.head.weight.normal_(std=0.1)
    return model


@pytest.mark.parametrize("flavor, count", [("t2v_a14b", 14_288_491_584), ("i2v_a14b", 14_288_901_184)])
def test_parameters_are_those_of_a14b(flavor: str, count: int) -> None:
    with torch.device("meta"):
        model = WanModel(flavors()[flavor])
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert len(model.blocks) == 40
    assert {len(list(block.parameters())) for block in model.blocks} == {27}
    assert sum(not name.startswith("blocks.") for name, _ in model.named_parameters()) == 15


def test_tokens_of_the_paper_and_shaped_blocks() -> None:
    with torch.device("meta"):
        model = WanModel(flavors()["tide_shaped"])
        latents, text = torch.empty(1, 16, 20, 60, 104), torch.empty(1, 512, 4096)
        tokens = model.patch_embedding(latents).flatten(2).shape[2]
        velocity = model(latents, torch.empty(1), text)
    assert tokens == 31_200
    assert velocity.shape == latents.shape
    with torch.device("meta"):
        full = WanModel(flavors()["t2v_a14b"])
    assert [p.shape for p in model.blocks[1].parameters()] == [p.shape for p in full.blocks[39].parameters()]


def test_flops_a_token_of_a14b() -> None:
    args = flavors()["t2v_a14b"]
    with torch.device("meta"):
        model = WanModel(args)
    _, flops = args.get_nparams_and_flops(model, 31_200)
    per_layer = 6 * 5120**2 + 2 * 5120 * 13824 + 2 * 5120**2 * 512 // 31_200 + 2 * 5120 * (31_200 + 512)
    assert flops == 6 * 40 * per_layer


def test_a_fresh_head_gives_zero_and_gradients_to_itself_alone() -> None:
    model = WanModel(small())
    with torch.no_grad():
        model.init_weights()
    out = model(torch.randn(1, 16, 2, 4, 4), torch.tensor([500.0]), torch.randn(1, 8, 32))
    (out - 1).square().mean().backward()
    assert out.abs().max() == 0
    moving = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert moving == {"head.head.weight", "head.head.bias"}


def test_the_text_is_padded_with_zeros() -> None:
    model = ready(small())
    latents, t, text = torch.randn(1, 16, 2, 4, 4), torch.tensor([500.0]), torch.randn(1, 5, 32)
    padded = torch.cat([text, torch.zeros(1, 3, 32)], dim=1)
    torch.testing.assert_close(model(latents, t, text), model(latents, t, padded), rtol=0, atol=0)


def test_timesteps_stay_exact_in_a_bf16_model() -> None:
    assert torch.tensor(893.0).bfloat16() == 892
    model = ready(small())
    latents, text = torch.randn(1, 16, 2, 4, 4), torch.randn(1, 8, 32)
    seen = {}
    model.time_embedding[1].register_forward_hook(lambda module, given, out: seen.update(dtype=out.dtype))
    exact = model(latents, torch.tensor([893.0]), text)
    rounded = model(latents, torch.tensor([892.0]), text)
    half = model.bfloat16()(latents, torch.tensor([893.0]), text)
    assert seen["dtype"] == torch.float32 and half.dtype == torch.bfloat16
    assert (half - exact).norm() < (half - rounded).norm()


def test_rotation_by_hand() -> None:
    assert rope_split(128) == (44, 42, 42)
    table = rope_table((2, 2, 3), 12, 10000.0, torch.device("cpu"))
    assert table.shape == (2, 12, 1, 6) and table.dtype == torch.float32
    # Token 11 is frame 1, row 1, column 2; pairs: 2 of frames, 2 of rows, 2 of columns, at frequencies 1 and 1/100.
    angles = torch.tensor([1, 0.01, 1, 0.01, 2, 0.02], dtype=torch.float64)
    torch.testing.assert_close(table[0, 11, 0], angles.cos().float())
    x = torch.tensor([1.0, 0.0]).repeat(6).view(1, 1, 1, 12)
    turned = rotate(x, table[:, 11:12])
    torch.testing.assert_close(turned.flatten()[:2], torch.tensor([angles[0].cos(), angles[0].sin()]).float())


def test_time_features_by_hand() -> None:
    found = time_features(torch.tensor([100.0]), 4)
    expected = torch.tensor([[100.0, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(found, torch.cat([expected.cos(), expected.sin()], -1).float())


def test_names_go_both_ways() -> None:
    with torch.device("meta"):
        names = [name for name, _ in WanModel(small()).named_parameters()]
    assert len(names) == 69
    theirs = [to_diffusers(name) for name in names]
    assert [to_original(name) for name in theirs] == names
    assert len(set(theirs)) == 69
    assert to_diffusers("blocks.7.cross_attn.o.weight") == "blocks.7.attn2.to_out.0.weight"
    assert to_diffusers("blocks.0.self_attn.norm_q.weight") == "blocks.0.attn1.norm_q.weight"
    assert to_diffusers("head.modulation") == "scale_shift_table"
    with pytest.raises(KeyError):
        to_original("blocks.0.attn1.other.weight")


@pytest.mark.parametrize(
    "latents, text, condition, message",
    [
        ((1, 15, 2, 4, 4), (1, 8, 32), None, "16, frames"),
        ((1, 16, 2, 5, 4), (1, 8, 32), None, "multiples of the patch"),
        ((1, 16, 2, 4, 4), (1, 9, 32), None, "up to 8"),
        ((1, 16, 2, 4, 4), (1, 8, 32), (1, 20, 2, 4, 4), "takes 0"),
    ],
)
def test_shapes_that_do_not_fit(latents: tuple, text: tuple, condition: tuple | None, message: str) -> None:
    with torch.device("meta"):
        model = WanModel(small())
        extra = None if condition is None else torch.empty(condition)
        with pytest.raises(ValueError, match=message):
            model(torch.empty(latents), torch.empty(1), torch.empty(text), extra)
