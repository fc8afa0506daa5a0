"""`tide tune` as users start it: ranks on a CPU, the files it writes, mistakes in one line; and the groups of other meshes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tide_comm.config import TideConfig
from torchtitan_tide import job_check
from torchtitan_tide.cli import overrides_last
from torchtitan_tide.toml_file import read_toml
from torchtitan_tide.tune import groups_of_job, run

ROOT = Path(__file__).parents[2]
DEBUG = str(ROOT / "train_configs/llama3_debug.toml")
NAMES = ["partial_blocks", "final_blocks", "inbox_batch", "head_bytes"]


def tide(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "NNODES")}
    # Behind it what was there: packages may come from folders.
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env |= {"PYTHONPATH": paths, "XDG_CACHE_HOME": str(folder / "cache"), "NGPU": "2", **environment}
    command = [sys.executable, "-m", "torchtitan_tide.cli", "tune", *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=180)


def test_two_machines_of_two(tmp_path: Path) -> None:
    options = ["--tide.gpus_per_machine=2", "--tide.multicast=on", "--write", "tuned.toml", "--out=tuned.json"]
    done = tide(tmp_path, DEBUG, *options, NGPU="4")
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "tuned.json").read_text())
    assert (data["device"], data["ranks"], data["config"]["gpus_per_machine"]) == ("cpu", 4, 2)
    assert list(data["values"]) == [*NAMES, "multicast_max_bytes"]
    assert {"stage_bytes", "early_reduce, early_part_bytes"} == set(data["not_measured"])
    assert data["stock"] == {} and any("mean nothing for GPUs" in note for note in data["notes"])
    assert any(note.startswith("multicast: yes (host engine") for note in data["notes"])
    for name, setting in data["settings"].items():
        assert [len(g["names"]) for g in setting["groups"]] == [1, 1, 4]
        assert str(setting["chosen"]) in setting["step_s"] and str(setting["before"]) in setting["step_s"]
        for value, turns in setting["step_s"].items():
            # On a CPU a step is what its launches take alone: the slower rank's, which both have.
            groups = [[g["launches_per_step"] * s for s in g["times_s"][value]["alone"]] for g in setting["groups"]]
            assert turns == pytest.approx([sum(turn) for turn in zip(*groups, strict=True)])
        assert f"{name} = {setting['chosen']}" in done.stdout
    written = read_toml(str(tmp_path / "tuned.toml"))
    assert written["tide"] == {**read_toml(DEBUG)["tide"], **data["values"]}, "overrides are not written"
    TideConfig(**written["tide"])
    for words in ("chosen", "turn to turn", "layers.0 .. layers.3 (4)", "[tide]", "written to tuned.toml"):
        assert words in done.stdout
    assert "[tide] head_bytes = 0, 8 MiB: norm, output, group 1 of 3" in done.stderr
    assert "[tide] multicast_max_bytes = 1 B, 64 MiB (0): norm, output, group 1 of 3" in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["tuned.json", "tuned.toml"]


@pytest.mark.gpu2
@pytest.mark.parametrize("gpus_per_machine", [0, 1])
def test_two_gpus(tmp_path: Path, gpus_per_machine: int) -> None:
    options = [f"--tide.gpus_per_machine={gpus_per_machine}", "--write", "tuned.toml", "--out", "tuned.json"]
    done = tide(tmp_path, DEBUG, *options, NCCL_NVLS_ENABLE="0")
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "tuned.json").read_text())
    assert (data["device"], data["ranks"]) == ("cuda", 2)
    assert list(data["values"]) == (NAMES if gpus_per_machine else NAMES[:1])
    why = "machines of one GPU" if gpus_per_machine else "rank 0: switched off by NCCL_NVLS_ENABLE=0"
    assert data["not_measured"]["multicast_max_bytes"] == f"multicast: no ({why})"
    assert any("emulated" in note for note in data["notes"]) == bool(gpus_per_machine)
    for group in data["settings"]["partial_blocks"]["groups"]:
        assert group["counts"] == "beside multiplies" and group["multiplies"] >= 1
        for kinds in group["times_s"].values():
            assert set(kinds) == {"alone", "beside multiplies", "the multiplies"}
            assert all(0 < s < 1 for turns in kinds.values() for s in turns)
            assert all(
                both >= own for both, own in zip(kinds["beside multiplies"], kinds["the multiplies"], strict=True)
            )
    assert read_toml(str(tmp_path / "tuned.toml"))["tide"] == {**read_toml(DEBUG)["tide"], **data["values"]}


def test_no_group_on_tide_is_one_line(tmp_path: Path) -> None:
    """Found by the ranks together; torchrun adds nothing."""
    done = tide(tmp_path, DEBUG, "--tide.max_group_params=0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: no group is on TIDE") and done.stderr.count("\n") == 1
    assert "more than max_group_params = 0" in done.stderr


MISTAKES = [
    (["--tide.comm=stock"], {}, 'tide.comm = "stock": tide tune measures TIDE\'s collectives; takes "tide"'),
    (["--tide.partial_block=3"], {}, 'did you mean "tide.partial_blocks"?'),
    (["--training.seq_len=no"], {}, "takes a whole number"),
    ([], {"NNODES": "2"}, "start on every machine torchrun --nnodes 2"),
    ([], {"NGPU": "1"}, "nothing is sharded with 1 ranks"),
]


@pytest.mark.parametrize(("overrides", "environment", "hint"), MISTAKES, ids=[m[2][:30] for m in MISTAKES])
def test_mistakes_are_one_line(
    overrides: list[str],
    environment: dict[str, str],
    hint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("WORLD_SIZE", "RANK", "NNODES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"NGPU": "2", **environment}.items():
        monkeypatch.setenv(name, value)
    assert run(DEBUG, None, None, tuple(overrides)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert hint in err


def test_files_are_looked_at_before_anything_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = tmp_path / "there.toml"
    there.write_text("")
    for write, out, hint in (
        (str(there), None, "is there already; takes a new file, or "),
        (None, str(tmp_path / "no" / "file.json"), "takes a file in a folder that is there"),
        (None, str(tmp_path), "takes a file in a folder that is there"),
    ):
        assert run(DEBUG, write, out, ()) == 2
        assert hint in capsys.readouterr().err
    assert run("nowhere.toml", None, None, ()) == 2
    assert "no such file" in capsys.readouterr().err


def groups(world: int, rank: int, *overrides: str) -> dict[tuple[int, ...], Any]:
    config = job_check.check(DEBUG, list(overrides), world, here=False).config
    return groups_of_job(config, world, rank)


def test_groups_largest_first_and_each_kind_once() -> None:
    (cases,) = groups(4, 3).values()
    assert [len(case.names) for case in cases] == [1, 1, 4]
    sizes = [case.layout.bytes_unsharded for case in cases]
    assert sizes == sorted(sizes, reverse=True)
    block = cases[2]
    assert block.title == "layers.0 .. layers.3 (4)" and block.gathers_per_step == 2
    assert (block.grad_dtype, block.reduce_dtype, len(block.trainable)) == ("bfloat16", "float32", 9)
    assert cases[0].gathers_per_step == 1  # the last group stays unsharded after forward


def test_a_ranks_own_shard_groups() -> None:
    replicas = [groups(4, rank, "--parallelism.data_parallel_replicate_degree=2") for rank in range(4)]
    assert [list(theirs) for theirs in replicas] == [[(0, 1)], [(0, 1)], [(2, 3)], [(2, 3)]]
    stages = ["--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=4"]
    first, last = groups(4, 0, *stages), groups(4, 3, *stages)
    assert list(first) == [(0, 1)] and list(last) == [(2, 3)]
    names = [{name for case in next(iter(theirs.values())) for name in case.names} for theirs in (first, last)]
    assert not names[0] & names[1] and len(names[0] | names[1]) == 6


def test_a_groups_own_options_and_overrides() -> None:
    mixed = ["tune", "a.toml", "--tide.x", "3", "--write", "f", "--out=g"]
    assert overrides_last(mixed) == ["tune", "a.toml", "--write", "f", "--out=g", "--", "--tide.x", "3"]
