"""The model against diffusers' `WanTransformer3DModel`, with the same weights, in fp32 on the CPU."""

from __future__ import annotations

import pytest
import torch

from torchtitan_tide import cpu

cpu.prepare()
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("condition_channels", [0, 20], ids=["t2v", "i2v"])
def test_forward_and_all_gradients_equal_diffusers(condition_channels: int) -> None:
    reason = "diffusers is not installed; scripts/test.sh with TIDE_EXTRAS=wan installs it"
    diffusers = pytest.importorskip("diffusers", reason=reason)
    from torchtitan_tide.models.wan.args import WanModelArgs
    from torchtitan_tide.models.wan.model import WanModel
    from torchtitan_tide.models.wan.names import to_diffusers

    torch.set_num_threads(1)
    torch.manual_seed(0)
    args = WanModelArgs(
        dim=128, ffn_dim=256, n_heads=2, n_layers=2, text_dim=64, text_len=32, condition_channels=condition_channels
    )
    ours = WanModel(args)
    with torch.no_grad():
        ours.init_weights()
        for parameter in ours.parameters():
            # No bias stays 0, no norm 1, and the head, which starts at 0, lets gradients through.
            parameter.add_(torch.randn_like(parameter) * 0.05)
    theirs = diffusers.WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=64,
        in_channels=16 + condition_channels,
        out_channels=16,
        text_dim=64,
        freq_dim=256,
        ffn_dim=256,
        num_layers=2,
    )
    theirs.load_state_dict({to_diffusers(name): value for name, value in ours.state_dict().items()}, strict=True)

    latents, text = torch.randn(2, 16, 3, 8, 12), torch.randn(2, 32, 64)
    condition = torch.randn(2, condition_channels, 3, 8, 12) if condition_channels else None
    t, target = torch.tensor([137.0, 893.0]), torch.randn(2, 16, 3, 8, 12)
    given = latents if condition is None else torch.cat([latents, condition], dim=1)
    found = ours(latents, t, text, condition)
    expected = theirs(given, t, text, return_dict=False)[0]
    forward_error = _relative(found, expected)

    torch.nn.functional.mse_loss(found, target).backward()
    torch.nn.functional.mse_loss(expected, target).backward()
    expected_gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    errors = {}
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None and parameter.grad.norm() > 0, name
        errors[name] = _relative(parameter.grad, expected_gradients.pop(to_diffusers(name)))
    assert not expected_gradients
    worst = max(errors, key=lambda name: errors[name])
    print(f"forward {forward_error:.1e}, worst gradient {errors[worst]:.1e} ({worst})")
    assert forward_error <= 1e-5
    assert errors[worst] <= 1e-4, worst


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()
