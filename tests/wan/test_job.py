"""Wan as a job: the plan of A14B, and mistakes that are told before anything starts."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from torchtitan_tide import cpu

cpu.prepare()

from torchtitan_tide import job_check, specs  # noqa: E402
from torchtitan_tide.errors import ConfigError  # noqa: E402
from torchtitan_tide.plan import plan_job  # noqa: E402

CONFIGS = Path(__file__).parents[2] / "train_configs"
A14B = str(CONFIGS / "wan2.2_t2v_a14b.toml")
DEBUG = str(CONFIGS / "wan_debug.toml")


def test_the_plan_of_a14b_on_64_gpus_has_41_groups() -> None:
    plan = plan_job(A14B, [], machines=8, gpus=8)
    # Blocks are alike, so the plan tells them in one row.
    found = [(group.tensors, len(group.names)) for group in plan.groups]
    assert sorted(found) == [(15, 1), (27, 40)]
    assert all(group.all_gather and group.reduce_scatter for group in plan.groups)


@pytest.mark.parametrize(
    "override, message",
    [
        ("--parallelism.tensor_parallel_degree=2", "tensor_parallel_degree = 2: wan takes 1"),
        ("--parallelism.pipeline_parallel_degree=2", "pipeline_parallel_degree = 2"),
        ("--wan.shift=0", "wan.shift = 0.0: takes a number > 0"),
        ("--wan.text_drop=1.5", "wan.text_drop = 1.5: takes a share"),
        ("--wan.expert=both", "wan.expert"),
        ("--wan.empty_text=nowhere.npy", "no such file"),
        ("--training.dataset=c4", "training.dataset = 'c4': unknown"),
        ("--training.dataset_path=nowhere", "'nowhere': no such folder"),
        ("--validation.enable", "validation.steps = -1: wan takes"),
        ("--job.custom_config_module=torchtitan_tide.job_config", "torchtitan_tide.models.wan.job_config"),
        ("--checkpoint.enable --checkpoint.initial_load_in_hf", "no such folder"),
    ],
)
def test_mistakes_are_told_in_a_line(tmp_path: Path, override: str, message: str) -> None:
    from tests.wan.test_data import fill

    config = tmp_path / "wan.toml"
    module = "torchtitan_tide.models.wan.job_config"
    text = f'[job]\ncustom_config_module = "{module}"\n[model]\nname = "wan"\nflavor = "t2v_a14b"\n'
    (tmp_path / "data").mkdir()
    fill(tmp_path / "data", "wan_parquet", [2])
    config.write_text(text + f'[training]\ndataset = "wan_parquet"\ndataset_path = "{tmp_path / "data"}"\n')
    job_check.check(str(config), [], 4)
    with pytest.raises(ConfigError, match=message):
        job_check.check(str(config), override.split(), 4)


def test_the_debug_configuration_is_sound() -> None:
    from torchtitan.protocols.train_spec import get_train_spec

    job_check.check(DEBUG, [], 4, here=False)
    specs.register("wan")
    assert "tide_debug" in get_train_spec("wan").model_args and get_train_spec("wan").parallelize_fn.tide


def test_train_sh_installs_the_extras_that_a_configuration_names(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    train = shutil.copy(CONFIGS.parent / "scripts" / "train.sh", tmp_path / "scripts")
    stub = 'tide_fail() { echo "$1"; exit 2; }\nsetup_env() { echo "extras: [$1]"; exit 0; }\n'
    (tmp_path / "scripts" / "setup_env.sh").write_text(stub)

    def extras(config: Path, asked: str) -> str:
        env = {**os.environ, "TIDE_EXTRAS": asked}
        run = subprocess.run(["bash", train, str(config)], env=env, capture_output=True, text=True, check=True)
        return run.stdout.strip()

    assert extras(CONFIGS / "wan_debug.toml", "") == "extras: [photos]"
    assert extras(CONFIGS / "wan_debug.toml", "wandb") == "extras: [photos,wandb]"
    assert extras(CONFIGS / "llama3_debug.toml", "wandb") == "extras: [wandb]"
    assert extras(CONFIGS / "llama3_debug.toml", "") == "extras: []"
