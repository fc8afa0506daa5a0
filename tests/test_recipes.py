"""Every file of train_configs on 64 GPUs: it loads, its model is built and sharded, TIDE carries every group. And what recipes promise."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor import Shard

from torchtitan_tide import cpu

cpu.prepare()

from tests import recipe_memory  # noqa: E402
from tests.recipe_memory import CONFIGS, planned  # noqa: E402
from torchtitan_tide import job_check  # noqa: E402
from torchtitan_tide import plan as plan_command  # noqa: E402
from torchtitan_tide.toml_file import read_toml  # noqa: E402

FILES = sorted(CONFIGS.glob("*.toml"))
RECIPES = {
    # name: (parameters, groups outside blocks + alike blocks, tensors of a block, replicas of the hybrid variant)
    "llama3.1_70b": (70_553_706_496, 2 + 80, 9, 2),
    "qwen3_30b_a3b": (30_532_122_624, 2 + 48, 12, 4),
    "wan2.2_t2v_a14b": (14_288_491_584, 1 + 40, 27, 8),
}


def shard_groups(plan: Any) -> list[tuple[int, int]]:
    return [(arena.machines, arena.lanes) for arena in plan.arenas]


def names(plan: Any) -> list[str]:
    return [name for group in plan.groups for name in group.names]


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_every_group_is_on_tide_on_64_gpus(file: Path) -> None:
    config = job_check.check(str(file), [], 64, here=False).config
    plan = planned(file.stem)
    assert {(group.comm, group.reason) for group in plan.groups} == {("tide", "")}
    assert all(group.all_gather and group.reduce_scatter for group in plan.groups)
    replicas = config.parallelism.data_parallel_replicate_degree
    assert shard_groups(plan) == [(8 // replicas, 8)], "replicas are whole machines"
    assert (config.training.mixed_precision_param, config.training.mixed_precision_reduce) == ("bfloat16", "float32")
    recipe = RECIPES.get(file.stem.removesuffix("-hsdp"))
    if recipe is None:
        assert "debug" in file.stem
        return
    _, groups, tensors, hybrid = recipe
    assert len(names(plan)) == len(set(names(plan))) == groups
    assert max((len(group.names), group.tensors) for group in plan.groups) == (
        groups - 2 + ("wan" in file.stem),
        tensors,
    )
    assert replicas == (hybrid if file.stem.endswith("-hsdp") else 1)
    assert config.activation_checkpoint.mode == "full"


@pytest.mark.parametrize("name", RECIPES)
def test_a_hybrid_variant_differs_in_nothing_else(name: str) -> None:
    plain, hybrid = (read_toml(str(CONFIGS / f"{stem}.toml")) for stem in (name, f"{name}-hsdp"))
    assert hybrid["job"].pop("dump_folder") == plain["job"].pop("dump_folder") + "-hsdp"
    for tables in (plain, hybrid):
        del tables["job"]["description"], tables["parallelism"]["data_parallel_replicate_degree"]
    assert hybrid == plain


@pytest.mark.parametrize("name", RECIPES)
def test_parameters_are_the_papers_models(name: str) -> None:
    assert sum(math.prod(shape) for shape in shapes(name).values()) == RECIPES[name][0]


@pytest.mark.parametrize("tokens", [8192, 16384, 24576, 32768])
@pytest.mark.parametrize("name", ["llama3.1_70b", "qwen3_30b_a3b"])
def test_token_counts_are_one_switch(name: str, tokens: int) -> None:
    config = job_check.check(str(CONFIGS / f"{name}.toml"), [f"--training.seq_len={tokens}"], 64, here=False).config
    assert config.training.seq_len * config.training.local_batch_size == tokens


def test_a_wan_video_of_the_paper() -> None:
    """77 frames make 20 of latents (the first alone, then by four), 8 x 8 pixels make one, a token is 2 x 2 of them."""
    from torchtitan_tide.models.wan.noise import LATENTS

    assert LATENTS == (16, 1 + 76 // 4, 480 // 8, 832 // 8)
    tables = read_toml(str(CONFIGS / "wan2.2_t2v_a14b.toml"))
    assert tables["training"]["seq_len"] == math.prod(LATENTS[1:]) // 4 == 31_200


MODELS = {"llama3": "llama3.1_70b", "qwen3": "qwen3_30b_a3b", "wan": "wan2.2_t2v_a14b"}


@pytest.mark.parametrize("name", MODELS.values())
def test_shaped_groups_are_those_of_the_whole_model(name: str) -> None:
    """On 64 and on 2 GPUs: the same groups but for the number of blocks, tensor by tensor."""
    for machines, gpus in ((8, 8), (1, 2)):
        whole = planned(name, machines, gpus)
        shaped = planned(name, machines, gpus, "--model.flavor=tide_shaped")
        for group, small in zip(whole.groups, shaped.groups, strict=True):
            for field in ("tensors", "bytes_unsharded", "padding_bytes", "all_gather", "reduce_scatter", "rounds"):
                assert getattr(group, field) == getattr(small, field), (name, field)
            assert set(small.names) <= set(group.names)
        blocks = [group for group in shaped.groups if "0" in group.names[0].split(".")]
        assert [len(group.names) for group in blocks] == [2 if "wan" in name else 4]
    assert shapes(name, "tide_shaped").items() <= shapes(name).items()


def shapes(name: str, flavor: str = "") -> dict[str, tuple[int, ...]]:
    """Parameters of a recipe's model, or of another flavor of it, by name."""
    import torch
    from torchtitan.protocols.train_spec import get_train_spec

    overrides = [f"--model.flavor={flavor}"] if flavor else []
    config = job_check.check(str(CONFIGS / f"{name}.toml"), overrides, 64, here=False).config
    spec = get_train_spec(config.model.name)
    with torch.device("meta"):
        model = spec.model_cls(spec.model_args[config.model.flavor])
    return {key: tuple(value.shape) for key, value in model.named_parameters()}


@pytest.mark.parametrize("model", MODELS)
def test_blocks_that_benchmarks_measure_are_these(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """scripts/bench has tables of its own, to do without TorchTitan."""
    monkeypatch.syspath_prepend(str(CONFIGS.parent / "scripts" / "bench"))
    import shapes as benchmarks

    found = shapes(MODELS[model], "tide_shaped")
    block = [shape for name, shape in found.items() if name.split(".")[:2] in (["layers", "1"], ["blocks", "1"])]
    measured = "llama" if model == "llama3" else model
    assert sorted(block) == sorted(benchmarks.shapes_of(measured, benchmarks.SIZES[measured]))


def test_qwens_experts_with_and_without_expert_parallelism() -> None:
    """Without it experts are sharded by number over all GPUs, in their block's group; with it they have groups of their own."""
    file = str(CONFIGS / "qwen3_30b_a3b.toml")
    plan = planned("qwen3_30b_a3b", 8, 8, "--parallelism.expert_parallel_degree=8")
    assert {(group.comm, group.reason) for group in plan.groups} == {("tide", "")}
    assert [(len(group.names), group.tensors) for group in plan.groups] == [(1, 1), (48, 9), (1, 2), (48, 3)]
    assert [(a.machines, a.lanes) for a in plan.arenas] == [(8, 8), (8, 1)]
    with plan_command.fake_process_group(64):
        (model,) = plan_command._build(job_check.check(file, ["--model.flavor=tide_shaped"], 64, here=False).config, 64)
        experts = model.layers["0"].moe.experts.w1
        # Two experts whole, not a slice of each: TorchTitan shards another dimension with expert parallelism only.
        assert experts.placements == (Shard(0),) and experts.to_local().shape == (2, 768, 2048)


def test_readmes_overrides_of_recipes_exist() -> None:
    """Each line "... --section.key=value" at the head of a recipe is a job that can be checked."""
    seen = 0
    for file in FILES:
        for line in file.read_text().split("\n[")[0].splitlines():
            if "... --" not in line:
                continue
            given = [
                word for word in line.split("# ")[-2 if line.count("# ") > 1 else -1].split() if word.startswith("--")
            ]
            job_check.check(str(file), given, 64, here=False)
            seen += len(given)
    assert seen >= 10


def test_extras_that_files_name_exist() -> None:
    known = read_toml(str(CONFIGS.parent / "pyproject.toml"))["project"]["optional-dependencies"]
    named = {
        extra.strip()
        for file in FILES
        for line in file.read_text().splitlines()
        if line.startswith("# extras:")
        for extra in line.partition(":")[2].split(",")
    }
    assert named == {"weights", "wan", "photos"} and named <= set(known)


def test_the_documents_table_is_up_to_date() -> None:
    text = recipe_memory.PATH.read_text()
    assert text == recipe_memory.with_table(text), "run python -m tests.recipe_memory"


def test_the_documents_stacked_experts_are_the_seams() -> None:
    import inspect

    from tests.seam.experts import StackedExperts

    assert f"```python\n{inspect.getsource(StackedExperts)}```" in recipe_memory.PATH.read_text()


def test_memory_of_a_recipe_by_hand() -> None:
    """Llama-3.1 70B, 8192 tokens a GPU: 70.55e9 x 16 / 64 bytes, 80 inputs of 8192 x 8192 in bf16, logits and gradient of 128,256."""
    found = {
        use: round(nbytes / recipe_memory.GIB, 2)
        for use, nbytes in recipe_memory.memory_bytes("llama3.1_70b", 8192).items()
    }
    assert found == {"states": 16.43, "arena": 7.84, "gradients": 3.19, "inputs": 10.0, "working": 3.91}
