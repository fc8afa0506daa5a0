"""Sound and unsound jobs: names, types, values and combinations, from TOML and from overrides."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchtitan_tide import job_check
from torchtitan_tide.errors import ConfigError, did_you_mean
from torchtitan_tide.overrides import parse, to_arguments

ROOT = Path(__file__).parents[1]
LLAMA = str(ROOT / "train_configs/llama3_debug.toml")


@pytest.mark.parametrize("name", ["llama3_debug", "qwen3_moe_debug"])
def test_shipped_configs_are_sound(name: str) -> None:
    job = job_check.check(str(ROOT / f"train_configs/{name}.toml"), [], world_size=4)
    assert job.config.tide.comm == "tide"
    assert job.config.job.custom_config_module == "torchtitan_tide.job_config"


def test_llama3_debug_names_every_key_of_the_section() -> None:
    from tide_comm.config import TideConfig
    from torchtitan_tide.toml_file import read_toml

    section = read_toml(LLAMA)["tide"]
    assert list(section) == TideConfig.field_names()
    assert TideConfig(**section) == TideConfig()


@pytest.mark.parametrize(
    ("override", "value"),
    [
        (["--tide.all_gather=false"], False),
        (["--tide.all-gather", "false"], False),
        (["--tide.no-all-gather"], False),
        (["--tide.no_all_gather"], False),
        (["--tide.all_gather"], True),
        (["--tide.all_gather=false", "--tide.all_gather=true"], True),
    ],
)
def test_forms_of_a_switch(override: list[str], value: bool) -> None:
    assert job_check.check(LLAMA, override, world_size=4).config.tide.all_gather is value


def test_arguments_make_torchtitan_build_the_same_config() -> None:
    from torchtitan.config import ConfigManager

    overrides = [
        "--tide.comm=stock",
        "--tide.no-all-gather",
        "--training.steps",
        "7",
        "--optimizer.lr=1e-3",
        "--training.max_norm=2",
        "--debug.seed=None",
        "--checkpoint.load_step=-1",
        "--checkpoint.exclude_from_loading=optimizer,lr_scheduler",
        "--metrics.disable-color-printing",
    ]
    job = job_check.check(LLAMA, overrides, world_size=4)
    built = ConfigManager().parse_args(job.arguments)
    assert built.to_dict() == {**job.config.to_dict(), "job": built.to_dict()["job"]}
    assert (built.training.steps, built.optimizer.lr, built.debug.seed) == (7, 1e-3, None)
    assert built.checkpoint.exclude_from_loading == ["optimizer", "lr_scheduler"]
    assert built.tide.all_gather is False and built.metrics.disable_color_printing is True


def test_a_config_for_torchtitan_alone_gets_the_section(tmp_path: Path) -> None:
    file = tmp_path / "plain.toml"
    file.write_text('[model]\nhf_assets_path = "python_manual"\n[training]\ndataset = "python_manual"\n')
    job = job_check.check(str(file), ["--tide.memory_mode=slot_reuse"], world_size=2)
    assert job.config.tide.memory_mode == "slot_reuse"


TOML_MISTAKES = [
    ("[trainig]\nsteps = 3", "unknown section [trainig]", 'did you mean "training"?'),
    ("[tide]\nmemory_mod = 'in_place'", "unknown key tide.memory_mod", 'did you mean "tide.memory_mode"?'),
    ("[training]\nstep = 3", "unknown key training.step", 'did you mean "training.steps"?'),
    ("[training.dataloader]\nworkers = 3", "training.dataloader.workers", '"training.dataloader.num_workers"?'),
    ("[training]\nsteps = 'ten'", "training.steps = 'ten'", "takes a whole number"),
    ("[training]\nsteps = 1.5", "training.steps = 1.5", "takes a whole number"),
    ("[training]\nsteps = true", "training.steps = True", "takes a whole number"),
    ("[training]\nsteps = 0", "training.steps = 0", ">= 1"),
    ("[training]\nlocal_batch_size = -2", "training.local_batch_size = -2", ">= 1"),
    ("[optimizer]\nlr = '1e-3'", "optimizer.lr = '1e-3'", "takes a number"),
    ("[optimizer]\nname = 'AdmW'", "optimizer.name = 'AdmW'", '"AdamW"?'),
    ("[metrics]\nenable_wandb = 1", "metrics.enable_wandb = 1", "takes true or false"),
    ("[model]\nconverters = 'float8'", "model.converters = 'float8'", "takes a list of strings"),
    ("[training]\ndtype = 'float16'", "training.dtype = 'float16'", '"bfloat16" | "float32"'),
    ("training = 3", "training = 3", "takes a section [training]"),
    ("[tide]\ncomm = 'tied'", "tide.comm = 'tied'", '"stock" | "symm_mem" | "tide"'),
    ("[tide]\nall_gather = 'no'", "tide.all_gather = 'no'", "takes true or false"),
    ("[tide]\nstage_bytes = -1", "tide.stage_bytes = -1", ">= 0"),
    ("[tide]\nstage_bytes = 1e6", "tide.stage_bytes = 1000000.0", "takes a whole number"),
    ("[tide]\ninbox_batch = 0", "tide.inbox_batch = 0", ">= 1"),
    ("[tide]\nmemory_mode = 'slot_reuse'\nall_gather = false", "tide.memory_mode", "all_gather = false"),
    ("[tide]\nall_gather = false\nreduce_scatter = false", "tide.comm", '"stock"'),
    ("[model]\nname = 'lama3'", "model.name = 'lama3'", '"llama3"?'),
    ("[model]\nflavor = 'tide_debu'", "model.flavor = 'tide_debu'", '"tide_debug"?'),
    ("[model]\nhf_assets_path = './nowhere'", "model.hf_assets_path = './nowhere'", "no such folder"),
    ("[training]\ndataset = 'pyton_manual'", "training.dataset = 'pyton_manual'", '"python_manual"?'),
    ("[training]\ndataset = 'text_folder'", "training.dataset", "needs training.dataset_path"),
    ("[training]\ndataset = 'text_folder'\ndataset_path = '/nowhere'", "training.dataset_path", "no such folder"),
    ("[training]\nglobal_batch_size = 9", "training.global_batch_size = 9", "multiple of"),
    ("[parallelism]\ndata_parallel_shard_degree = 3", "[parallelism] with 4 ranks", "dp_shard(3)"),
    ("[parallelism]\ndata_parallel_replicate_degree = 4", 'tide.comm = "tide"', "nothing is sharded"),
    ("[job]\ncustom_config_module = 'no_such_module'", "job.custom_config_module", "no_such_module"),
]


@pytest.mark.parametrize(("toml", "found", "hint"), TOML_MISTAKES, ids=[m[0].replace("\n", " ") for m in TOML_MISTAKES])
def test_mistakes_in_toml(tmp_path: Path, toml: str, found: str, hint: str) -> None:
    defaults = {"model": "hf_assets_path = 'python_manual'", "training": "dataset = 'python_manual'"}
    for section, line in defaults.items():
        key = line.split(" =")[0]
        if section == toml:
            continue
        if f"[{section}]\n" in toml:
            toml = toml if f"\n{key} =" in toml else toml.replace(f"[{section}]\n", f"[{section}]\n{line}\n")
        elif not toml.startswith(section):
            toml += f"\n[{section}]\n{line}"
    file = tmp_path / "job.toml"
    file.write_text(toml)
    with pytest.raises(ConfigError) as error:
        job_check.check(str(file), [], world_size=4)
    message = str(error.value)
    assert found in message and hint in message
    assert "\n" not in message


OVERRIDE_MISTAKES = [
    (["--tide.memory_mod=in_place"], 'did you mean "tide.memory_mode"?'),
    (["--steps=3"], 'did you mean "training.steps"?'),
    (["--training.steps=ten"], "takes a whole number"),
    (["--training.steps"], "needs a value (a whole number)"),
    (["--training.steps", "--tide.comm=stock"], "needs a value"),
    (["--tide.comm=tied"], '"stock" | "symm_mem" | "tide"'),
    (["--tide.all_gather=perhaps"], "takes true or false"),
    (["--tide.no-all-gather=true"], "takes no value"),
    (["tide.comm=stock"], "--section.key=value"),
    (["--job.config_file=other.toml"], "first argument"),
    (["--tide.slots=1"], "at least 2"),
]


@pytest.mark.parametrize(("override", "hint"), OVERRIDE_MISTAKES, ids=[" ".join(m[0]) for m in OVERRIDE_MISTAKES])
def test_mistakes_in_overrides(override: list[str], hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        job_check.check(LLAMA, override, world_size=4)
    assert hint in str(error.value)
    assert "\n" not in str(error.value)


def test_symm_mem_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="needs CUDA GPUs"):
        job_check.check(LLAMA, ["--tide.comm=symm_mem"], world_size=4)


def test_one_rank_has_nothing_to_communicate() -> None:
    with pytest.raises(ConfigError, match="at least two ranks"):
        job_check.check(LLAMA, [], world_size=1)
    assert job_check.check(LLAMA, ["--tide.comm=stock"], world_size=1).config.tide.comm == "stock"


def test_more_ranks_than_documents() -> None:
    with pytest.raises(ConfigError, match="too few for 4096 data-parallel ranks"):
        job_check.check(LLAMA, [], world_size=4096)


def test_overrides_round_trip() -> None:
    options = {"a.flag": bool, "a.n": int | None, "a.names": list[str], "a.x": float | int}
    values = parse(["--a.no-flag", "--a.n", "3", "--a.names=x,y", "--a.x=2.5"], options)
    assert values == {"a.flag": False, "a.n": 3, "a.names": ["x", "y"], "a.x": 2.5}
    assert parse(to_arguments(values, options), options) == values


def test_nearest_name_looks_past_the_section() -> None:
    assert did_you_mean("local_batch_siz", ["training.local_batch_size", "x.y"]).endswith(
        '"training.local_batch_size"?'
    )
    assert did_you_mean("zzz", ["aaa", "bbb"]) == "; takes aaa, bbb"
