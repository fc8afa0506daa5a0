"""TorchTitan's models on its meshes: the same losses as with stock communication, to the bit, and what has no CPU run attaches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.titan.launch import CONFIG, MESHES, job, mesh_overrides, run, same
from torchtitan_tide import cpu
from torchtitan_tide import plan as plan_command
from torchtitan_tide.errors import ConfigError

ONE_RANK = "its shard group has one rank: nothing to communicate"

RUN = {
    ("llama3", "tide_debug"): ["fsdp", "hsdp", "tp", "pp", "pp_interleaved"],
    ("llama3_ft", "tide_debug"): ["fsdp"],
    ("llama4", "tide_debug"): ["fsdp", "hsdp", "tp", "pp", "ep", "ep_tp", "ep_etp", "ep_hsdp"],
    ("qwen3", "tide_debug"): ["fsdp", "hsdp", "tp"],
    ("qwen3", "tide_debug_moe"): ["fsdp", "hsdp", "tp", "ep", "ep_tp", "ep_etp", "ep_hsdp"],
    ("deepseek_v3", "tide_debug"): ["fsdp", "hsdp", "tp", "pp", "ep", "ep_tp", "ep_etp", "ep_hsdp"],
    ("gpt_oss", "tide_debug"): ["fsdp", "hsdp", "tp", "ep", "ep_tp", "ep_etp", "ep_hsdp"],
}
"""What trains on CPU. Not there: context parallelism (no CPU form in PyTorch), pipelines of qwen3 and gpt_oss (none in TorchTitan)."""


def check_report(result: dict[str, Any], mesh: str) -> None:
    """Every group is on TIDE, but for experts whose shard group has one rank. Experts over fewer ranks have an arena of their own."""
    left = {(name.rpartition(".")[2], reason) for name, comm, reason in result["report"] if comm != "tide"}
    if mesh == "ep":
        assert not left and result["arenas"] == 2
    elif mesh in ("ep_etp", "ep_hsdp"):
        assert left == {("experts", ONE_RANK)} and result["arenas"] == 1
    else:
        assert not left and result["arenas"] == 1


QUICK = [
    ("qwen3", "tide_debug_moe", "fsdp"),
    ("qwen3", "tide_debug_moe", "ep"),
    ("llama3", "tide_debug", "tp"),
    ("llama3", "tide_debug", "pp_interleaved"),
]
"""qwen3's experts as in the paper, in their block's group, and on a mesh of their own."""


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    jobs = [job(*case, comm, "--tide.strict") for case in QUICK for comm in ("stock", "tide")]
    return run(jobs, tmp_path_factory.mktemp("quick"))


@pytest.mark.parametrize("i", range(len(QUICK)), ids=["-".join(case) for case in QUICK])
def test_same_losses_as_stock(quick: list[dict[str, Any]], i: int) -> None:
    stock, tide = quick[2 * i : 2 * i + 2]
    same(stock, tide)
    check_report(tide, QUICK[i][2])
    parts = {name.split(".")[0] for name, _, _ in tide["report"] if name.startswith("part")}
    assert parts == ({"part0", "part1"} if QUICK[i][2] == "pp_interleaved" else set()), "stages share an arena"


@pytest.mark.slow
@pytest.mark.parametrize(("model", "flavor"), list(RUN))
def test_every_model_on_every_mesh(tmp_path: Path, model: str, flavor: str) -> None:
    meshes = RUN[model, flavor]
    jobs = [job(model, flavor, mesh, comm) for mesh in meshes for comm in ("stock", "tide")]
    jobs += [
        job(model, flavor, meshes[-1], "tide", "--tide.memory_mode=slot_reuse", "--activation_checkpoint.mode=full")
    ]
    results = run(jobs, tmp_path)
    for i, mesh in enumerate(meshes):
        print(model, flavor, mesh)
        same(*results[2 * i : 2 * i + 2])
        check_report(results[2 * i + 1], mesh)
    same(results[-3], results[-1])


MODELS = [m for m in dict.fromkeys(model for model, _ in RUN) if m != "llama3_ft"]


@pytest.mark.parametrize("mesh", [mesh for mesh in MESHES if mesh != "pp_interleaved"])
@pytest.mark.parametrize("model", MODELS)
def test_shipped_debug_models_attach(model: str, mesh: str) -> None:
    """On the meta device: TorchTitan's own debug flavors on 2 x 4 GPUs, all groups on TIDE."""
    options = [f"--model.name={model}", *mesh_overrides(mesh), "--tide.gpus_per_machine=0"]
    options.append("--model.flavor=" + ("debugmodel_moe" if model == "qwen3" else "debugmodel"))
    if refused := REFUSED.get((model, mesh)):
        with pytest.raises(ConfigError, match=refused):
            plan_command.plan_job(CONFIG, options, 2, 4)
        return
    plan = plan_command.plan_job(CONFIG, options, 2, 4)
    assert {(group.comm, group.reason) for group in plan.groups} == {("tide", "")}
    # With EP over the ranks of TP the experts' mesh has the ranks of the others'.
    assert len(plan.arenas) == (2 if mesh in ("ep", "ep_etp", "ep_hsdp") and model != "llama3" else 1)


REFUSED = {
    ("qwen3", "pp"): "does not support pipeline",
    ("gpt_oss", "pp"): "does not support pipeline",
    ("gpt_oss", "cp"): "CP support for gpt-oss model is still in progress",
}
"""By TorchTitan 0.2.2 itself."""


def test_models_without_fsdp2_are_refused() -> None:
    cpu.prepare()
    from torchtitan_tide import job_check

    for name in ("simple_fsdp.llama3", "simple_fsdp.deepseek_v3", "autoparallel.llama3", "compiler_toolkit.llama3"):
        with pytest.raises(ConfigError, match="shards without FSDP2"):
            job_check.check(CONFIG, [f"--model.name={name}"], world_size=4)
    with pytest.raises(ConfigError, match="nothing is sharded"):
        job_check.check(CONFIG, ["--parallelism.data_parallel_replicate_degree=4"], world_size=4)
    with pytest.raises(ConfigError, match="its own trainer|own trainer"):
        job_check.check(CONFIG, ["--model.name=llama3_ft", "--fault_tolerance.enable"], world_size=4)
