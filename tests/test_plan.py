"""`tide plan`: real models on machines that are not here, what falls back, and mistakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from torchtitan_tide import cli
from torchtitan_tide import plan as plan_command
from torchtitan_tide.cli import overrides_last
from torchtitan_tide.errors import ConfigError

ROOT = Path(__file__).parents[1]
DEBUG = str(ROOT / "train_configs/llama3_debug.toml")
MIB, GIB = 2**20, 2**30


def toml(folder: Path, name: str, flavor: str) -> str:
    """A job that names a model alone: tokenizer and data are not of this machine."""
    file = folder / "job.toml"
    file.write_text(f'[model]\nname = "{name}"\nflavor = "{flavor}"\nhf_assets_path = "/nowhere"\n')
    return str(file)


def tide(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, "-m", "torchtitan_tide.cli", "plan", *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=180)


def tide_here(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> int:
    """The same within this process: starting one takes longer than a plan. Exit code."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["tide", "plan", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def planned(config: str, machines: int, gpus: int, *overrides: str) -> Any:
    return plan_command.plan_job(config, list(overrides), machines, gpus)


def alike(plan: Any) -> list[tuple[int, int]]:
    """(number of groups, tensors of each) of each row."""
    return [(len(group.names), group.tensors) for group in plan.groups]


def test_debug_model_on_2_x_2(tmp_path: Path) -> None:
    done = tide(tmp_path, DEBUG, "--machines", "2", "--tide.head_bytes=0", "--gpus=2", "--json", "plan.json")
    assert done.returncode == 0, done.stderr
    assert "6 of 6 groups on TIDE" in done.stdout and "layers.0 .. layers.3" in done.stdout
    for word in ("rail MiB", "operations", "kernels", "reduce-scatter", "SLOT", "INBOX", "stock FSDP2", "together"):
        assert word in done.stdout
    data = json.loads((tmp_path / "plan.json").read_text())
    assert (data["machines"], data["gpus"], data["config"]["head_bytes"]) == (2, 2, 0)
    assert [(g["tensors"], g["comm"], g["reason"]) for g in data["groups"]] == [(n, "tide", "") for n in (1, 9, 2)]
    block = data["groups"][1]
    assert block["rounds"] == [
        {"machines": 1, "pieces": 9, "puts": 9, "head_puts": 0, "bytes_put": 98432, "head_bytes": 0}
    ]
    assert block["all_gather"]["bytes_on_rail"] * 4 == block["bytes_unsharded"]
    (arena,) = data["arenas"]
    assert (arena["ranks"], arena["machines"], arena["lanes"]) == ([0, 1, 2, 3], 2, 2)
    # Twice for all groups but the last, which stays unsharded after forward.
    rail = [g["all_gather"]["bytes_on_rail"] for g in data["groups"]]
    assert data["per_step"]["bytes_on_rail"]["all_gather"] == 2 * (rail[0] + 4 * rail[1]) + rail[2]
    assert sorted(os.listdir(tmp_path)) == ["plan.json"]


def test_with_multicast_bytes_leave_once_and_batches_are_waves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--machines", "3", "--gpus=2", "--json", "plan.json", "--tide.multicast=on")
    assert tide_here(monkeypatch, tmp_path, DEBUG, *options, "--tide.multicast-max-bytes=20000") == 0
    block = json.loads((tmp_path / "plan.json").read_text())["groups"][1]
    assert block["all_gather"]["copies_to_all"] > 0 < block["all_gather"]["copies"], "pieces of both kinds"
    assert 0 < block["all_gather"]["bytes_to_all"] < block["all_gather"]["bytes_to_mates"]["1"]
    assert block["reduce_scatter"]["inbox_batches"] == 2 and block["reduce_scatter"]["clears"] == 1
    assert "2 x 2" in capsys.readouterr().out


def test_llama_70b_on_128_x_8_within_seconds(tmp_path: Path) -> None:
    config = toml(tmp_path, "llama3", "70B")
    start = time.monotonic()
    done = tide(tmp_path, config, "--machines", "128", "--gpus", "8")
    assert time.monotonic() - start < 60  # about 10 on two busy cores, most of it imports
    assert done.returncode == 0, done.stderr
    assert "82 of 82 groups" in done.stdout and "1+2+4+8+16+32+64" in done.stdout


def test_llama_70b_on_8_x_8(tmp_path: Path) -> None:
    plan = planned(toml(tmp_path, "llama3", "70B"), 8, 8)
    assert alike(plan) == [(1, 1), (80, 9), (1, 2)]
    gathers, partials = (nbytes / GIB for nbytes in plan.per_step(lambda shape: shape.bytes_on_rail))
    assert gathers == pytest.approx(28.5, abs=0.05) and partials == pytest.approx(28.8, abs=0.06)
    block = plan.groups[1]
    assert [r.machines for r in block.rounds] == [1, 2, 4]
    # Each round's head ends inside a piece at most: 9 pieces a machine.
    assert [r.puts - r.pieces for r in block.rounds] == [1, 1, 1]
    assert block.all_gather.bytes_on_rail == 7 * block.bytes_unsharded // 64
    assert block.reduce_scatter.copies <= 128
    assert "over the rail 28.53 GiB all-gather and 28.75 GiB reduce-scatter" in str(plan)
    (arena,) = plan.arenas
    assert arena.slots == 3 and arena.memory_bytes["SLOT"] == 3 * 2006 * 2**20
    assert arena.stock_memory_bytes["reduce-scatter input"] == 2 * plan.groups[2].bytes_unsharded


def test_slot_reuse_takes_no_slot_more(tmp_path: Path) -> None:
    """A third one would take what the mode saves; `slots` asks for it."""
    path = toml(tmp_path, "qwen3", "30B-A3B")
    wanted = ((), ("--tide.memory_mode=slot_reuse",), ("--tide.memory_mode=slot_reuse", "--tide.slots=4"))
    made = [planned(path, 1, 8, *options).arenas[0].slots for options in wanted]
    assert made == [3, 3, 4]


@pytest.mark.parametrize("memory_mode", ["in_place", "slot_reuse"])
def test_qwen_30b_on_8_x_8(tmp_path: Path, memory_mode: str) -> None:
    plan = planned(toml(tmp_path, "qwen3", "30B-A3B"), 8, 8, f"--tide.memory_mode={memory_mode}")
    assert alike(plan) == [(1, 1), (48, 12), (1, 2)]
    gathers, partials = (nbytes / GIB for nbytes in plan.per_step(lambda shape: shape.bytes_on_rail))
    assert gathers == pytest.approx(12.4, abs=0.05) and partials == pytest.approx(12.4, abs=0.05)
    assert plan.groups[1].reduce_scatter.copies <= 152
    assert plan.groups[1].reduce_scatter.casts == (memory_mode == "slot_reuse")


def test_experts_have_a_shard_group_of_their_own(tmp_path: Path) -> None:
    """8 experts' ranks a machine: each expert shard group has one rank on every machine."""
    plan = planned(toml(tmp_path, "qwen3", "30B-A3B"), 8, 8, "--parallelism.expert_parallel_degree=8")
    assert [(a.machines, a.lanes, len(a.ranks)) for a in plan.arenas] == [(8, 8, 64), (8, 1, 8)]
    assert alike(plan) == [(1, 1), (48, 9), (1, 2), (48, 3)]
    experts = plan.groups[3]
    assert experts.arena == 1 and experts.names[0] == "layers.0.moe.experts"
    assert experts.all_gather.bytes_to_mates == {} and experts.all_gather.bytes_on_rail == 126 * 2**20
    assert "of the 8 ranks 0, 8, .." in str(plan)


def test_shard_groups_of_hsdp_and_tensor_parallelism(tmp_path: Path) -> None:
    config = toml(tmp_path, "llama3", "8B")
    (arena,) = planned(config, 8, 8, "--parallelism.data_parallel_replicate_degree=4").arenas
    assert (arena.machines, arena.lanes, arena.ranks) == (2, 8, tuple(range(16)))
    (arena,) = planned(config, 4, 8, "--parallelism.tensor_parallel_degree=4").arenas
    assert (arena.machines, arena.lanes, arena.ranks) == (4, 2, tuple(range(0, 32, 4)))
    (arena,) = planned(config, 1, 8, "--tide.gpus_per_machine=2").arenas
    assert (arena.machines, arena.lanes) == (4, 2)
    plan = planned(config, 3, 8, "--parallelism.data_parallel_replicate_degree=2")
    assert plan.arenas[0].machines == 0 and not plan.arenas[0].memory_bytes
    for group in plan.groups:
        assert group.comm == "stock" and "machines differ in size: [8, 4]" in group.reason
        assert group.all_gather is None and group.reduce_scatter is None


def test_pipeline_stages_keep_their_groups_unsharded(tmp_path: Path) -> None:
    config = toml(tmp_path, "llama3", "8B")
    plan = planned(config, 2, 8, "--parallelism.pipeline_parallel_degree=4", "--training.local_batch_size=4")
    assert alike(plan) == [(1, 1), (8, 9)]
    assert {group.all_gathers_per_step for group in plan.groups} == {1}
    (arena,) = plan.arenas
    assert arena.ranks == tuple(range(4)) and arena.slots == 9
    assert arena.stock_memory_bytes["unsharded"] >= sum(len(g.names) * g.bytes_unsharded for g in plan.groups)


def test_rows_of_groups_that_fall_back(tmp_path: Path) -> None:
    plan = planned(DEBUG, 2, 2, "--tide.max_group_params=5", "--tide.strict")
    rows = [(g.comm, g.reason) for g in plan.groups]
    assert rows == [("tide", ""), ("stock", "9 trainable tensors, more than max_group_params = 5"), ("tide", "")]
    text = str(plan)
    assert "2 of 6 groups on TIDE" in text and "strict = true: the job would not start, 4 groups" in text
    assert [g.comm for g in planned(DEBUG, 2, 2, "--tide.comm=symm_mem").groups] == ["symm_mem"] * 3
    assert planned(DEBUG, 1, 4, "--training.enable_cpu_offload").groups[0].reason == "CPU offload"
    assert "10 GPUs a machine, more than 8" in planned(DEBUG, 1, 10).groups[0].reason


def test_one_collective_alone() -> None:
    plan = planned(DEBUG, 2, 2, "--tide.all_gather=false")
    assert all(g.all_gather is None and g.reduce_scatter is not None for g in plan.groups)
    assert plan.arenas[0].memory_bytes["SLOT"] == 0 and "all-gather outputs" not in plan.arenas[0].stock_memory_bytes
    plan = planned(DEBUG, 2, 2, "--tide.reduce_scatter=false", "--compile.enable", "--activation_checkpoint.mode=full")
    assert all(g.reduce_scatter is None and g.all_gather is not None for g in plan.groups)
    assert "INBOX" not in plan.arenas[0].memory_bytes


def test_memory_says_what_stage_is(tmp_path: Path) -> None:
    config = toml(tmp_path, "llama3", "8B")
    plan = planned(config, 1, 2)
    (arena,) = plan.arenas
    # The widest slot is the output's, 1004 MiB with the norm beside it and as the arena aligns it.
    assert (arena.stage_places, arena.stage_place_bytes) == (3, 83 * MIB)
    assert arena.memory_bytes["STAGE"] == 250 * MIB, "an area is a multiple of 2 MiB"
    assert "STAGE, 3 places of 83.00 MiB " in str(plan)
    plan = planned(config, 1, 2, f"--tide.stage_bytes={96 * MIB}")
    assert plan.arenas[0].memory_bytes["STAGE"] == 96 * MIB
    assert "STAGE, 3 places of 32.00 MiB by stage_bytes " in str(plan)
    assert plan.groups[1].reduce_scatter.kernels == 7, "208 MiB in pieces of 32"


def test_a_plan_changes_nothing_of_the_spec_and_leaves_no_process_group() -> None:
    import torch.distributed as dist
    from torchtitan.protocols.train_spec import get_train_spec

    args = get_train_spec("llama3").model_args["tide_debug"]
    before = args.max_seq_len
    planned(DEBUG, 2, 2, "--training.seq_len=64")
    assert args.max_seq_len == before and not dist.is_initialized()


MISTAKES = [
    ((2, 2), ["--model.flavor=tide_debu"], 'did you mean "tide_debug"?'),
    ((3, 8), ["--parallelism.data_parallel_shard_degree=16"], "[parallelism] with 24 ranks"),
    ((1, 1), [], "nothing is sharded with 1 ranks"),
    ((0, 8), [], "--machines 0: takes a whole number >= 1"),
    ((2, -1), [], "--gpus -1: takes a whole number >= 1"),
    ((10**9, 8), [], "takes at most"),
    ((2, 2), ["--tide.memory_mod=in_place"], 'did you mean "tide.memory_mode"?'),
    ((2, 2), ["--tide.stage_bytes=31"], "tide.stage_bytes = 31: takes 0 (a rule) or at least 32 with 2 x 2 GPUs"),
    ((2, 2), ["--training.seq_len=255", "--parallelism.tensor_parallel_degree=2"], "must be divisible"),
    ((2, 2), ["--model.converters=no_such_converter"], "'no_such_converter' is unknown"),
]


@pytest.mark.parametrize(("size", "overrides", "hint"), MISTAKES, ids=[m[2] for m in MISTAKES])
def test_mistakes_are_one_line(
    size: tuple[int, int], overrides: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan_command.run(DEBUG, *size, None, tuple(overrides)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert hint in err


def test_mistakes_at_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--machines", "2", "--gpus", "2", "--json", "no/such/folder.json")
    assert tide_here(monkeypatch, tmp_path, DEBUG, *options) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "error: --json no/such/folder.json: cannot be written: No such file or directory\n"
    assert tide_here(monkeypatch, tmp_path, DEBUG, "--machines", "2") == 2
    assert "--gpus" in capsys.readouterr().err


def test_missing_file() -> None:
    with pytest.raises(ConfigError, match="no such file"):
        planned("nowhere.toml", 2, 2)


def test_overrides_go_behind_the_commands_own_options() -> None:
    mixed = ["plan", "--machines", "2", "a.toml", "--tide.x", "3", "--gpus=4", "--no-y", "--json", "f"]
    assert overrides_last(mixed) == [
        *["plan", "--machines", "2", "a.toml", "--gpus=4", "--json", "f"],
        *["--", "--tide.x", "3", "--no-y"],
    ]
    assert overrides_last(["check", "a.toml", "--gpus=4"]) == ["check", "a.toml", "--", "--gpus=4"]
    for plain in ([], ["--help"], ["plan", "--help"], ["check", "a.toml"]):
        assert overrides_last(plain) == plain
