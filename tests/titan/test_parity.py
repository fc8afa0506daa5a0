"""TorchTitan's Llama and Qwen3 MoE, with weights that transformers wrote, against transformers: logits and all gradients, on the CPU.

In fp32 throughout both agree to rounding: 1e-5 relative, by norm, and 5e-5 for gradients. TorchTitan's grouped multiplication of
experts computes in bf16 whatever the model's dtype: 5e-3 for logits there, and 2e-2 for gradients, which pass through it in every layer.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from torchtitan_tide import cpu

cpu.prepare()

from tests.titan import hugging  # noqa: E402

pytest.importorskip("transformers", reason="transformers is not installed (extra: dev)")
pytest.importorskip("safetensors", reason="safetensors is not installed (extra: dev)")

CASES = {
    "llama3": ("llama3", False, 1e-5, 5e-5),
    "qwen3": ("qwen3", False, 1e-5, 5e-5),
    "qwen3-grouped": ("qwen3", True, 5e-3, 2e-2),
}
"""Model, experts in one grouped multiplication, and what logits and gradients may differ by."""


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_transformers(tmp_path: Path, case: str) -> None:
    model, grouped, logits_bound, gradients_bound = CASES[case]
    torch.set_num_threads(1)
    args = hugging.args_of(model, vocab_size=300, max_seq_len=64)
    if model == "qwen3":
        args.moe_args.use_grouped_mm = grouped
    reference = hugging.theirs(model, args)
    files = hugging.save(reference, tmp_path)
    assert len(set(files.values())) > 3, "several files"
    found = hugging.ours(model, args, tmp_path)
    assert sum(p.numel() for p in found.parameters()) == sum(p.numel() for p in reference.parameters())

    tokens = torch.randint(0, 300, (2, 64), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(-1, dims=1)
    outputs = {"ours": found(tokens), "theirs": reference(tokens).logits}
    for logits in outputs.values():
        torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()).backward()
    error = relative(outputs["ours"], outputs["theirs"])

    gradients = named_gradients(model, args, found)
    expected = named_gradients(model, args, twin(model, args, reference, tmp_path / "gradients"))
    assert gradients.keys() == expected.keys() and len(gradients) == sum(1 for _ in found.parameters())
    errors = {name: relative(gradients[name], expected[name]) for name in gradients}
    assert all(gradient.norm() > 0 for gradient in expected.values())
    worst = max(errors, key=lambda name: errors[name])
    print(f"{case}: logits {error:.1e}, worst gradient {errors[worst]:.1e} ({worst})")
    assert error <= logits_bound
    assert errors[worst] <= gradients_bound, worst


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def named_gradients(model: str, args: object, module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def twin(model: str, args: object, reference: torch.nn.Module, folder: Path) -> torch.nn.Module:
    """TorchTitan's model whose `.grad` are transformers': gradients take the way of weights, through a checkpoint."""
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(parameter.grad)
    hugging.save(reference, folder)
    carrier = hugging.ours(model, args, folder)
    for parameter in carrier.parameters():
        parameter.grad = parameter.detach().clone()
    return carrier


def test_the_index_names_the_files_that_are_saved(tmp_path: Path) -> None:
    """A model that began with weights in many files is saved in as many, each tensor in the file of the index."""
    args = hugging.args_of("llama3", vocab_size=300)
    files = hugging.save(hugging.theirs("llama3", args), tmp_path)
    mapping = hugging.adapter_of("llama3", args, tmp_path).fqn_to_index_mapping
    assert mapping == {name: int(file.split("-")[1]) for name, file in files.items()}
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
