"""What a user sees of a mistake: one line on stderr, exit code 2, no traceback, nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from torchtitan_tide import check

ROOT = Path(__file__).parents[1]
LLAMA = str(ROOT / "train_configs/llama3_debug.toml")
CHECK = ["-m", "torchtitan_tide.check"]
TRAIN = ["-m", "torchtitan_tide.train"]
CLI = ["-m", "torchtitan_tide.cli", "check"]


def start(arguments: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "NGPU", "NNODES")}
    env.update({"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache"), "NGPU": "2", **environment})
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=120
    )


def check_here(
    arguments: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """The check within this process, for variants of what another test starts: most of a start is imports."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "NGPU", "NNODES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"XDG_CACHE_HOME": str(folder / "cache"), "NGPU": "2", **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(folder)
    capsys.readouterr()
    code = check.main(arguments)
    out, err = capsys.readouterr()
    return subprocess.CompletedProcess(arguments, code, out, err)


def assert_one_line(done: subprocess.CompletedProcess[str], hint: str, folder: Path, kept: list[str]) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert hint in done.stderr
    assert sorted(os.listdir(folder)) == kept


def test_missing_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "llama.toml").write_text("")
    assert_one_line(start([*CHECK, "lama.toml"], tmp_path), '"llama.toml"?', tmp_path, ["llama.toml"])


@pytest.mark.parametrize(
    ("name", "content", "hint"),
    [
        ("broken.toml", b"[training\nsteps = 3", "not valid TOML"),
        ("binary.toml", b"\xff\xfe\x00", "not valid TOML"),
        ("twice.toml", b"[tide]\ncomm = 'tide'\ncomm = 'stock'", "not valid TOML"),
    ],
)
def test_malformed_file(tmp_path: Path, name: str, content: bytes, hint: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert_one_line(start([*CHECK, name], tmp_path), hint, tmp_path, [name])


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "job.toml").mkdir()
    assert_one_line(start([*CHECK, "job.toml"], tmp_path), "cannot be read", tmp_path, ["job.toml"])


def test_no_arguments(tmp_path: Path) -> None:
    assert_one_line(start(CHECK, tmp_path), "usage", tmp_path, [])


def test_bad_ngpu(tmp_path: Path) -> None:
    assert_one_line(start([*CHECK, LLAMA], tmp_path, NGPU="two"), "NGPU=two", tmp_path, [])


@pytest.mark.parametrize("ngpu", ["0", "-1"])
def test_other_bad_ngpu(
    tmp_path: Path, ngpu: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = check_here([LLAMA], tmp_path, monkeypatch, capsys, NGPU=ngpu)
    assert_one_line(done, f"NGPU={ngpu}", tmp_path, [])


BAD_OVERRIDE = [LLAMA, "--tide.memory_mod=in_place"]


def test_bad_override(tmp_path: Path) -> None:
    assert_one_line(start([*CLI, *BAD_OVERRIDE], tmp_path), 'did you mean "tide.memory_mode"?', tmp_path, [])


def test_bad_override_of_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = check_here(BAD_OVERRIDE, tmp_path, monkeypatch, capsys)
    assert_one_line(done, 'did you mean "tide.memory_mode"?', tmp_path, [])


def test_train_entry_tells_it_once(tmp_path: Path) -> None:
    """The ranks check again, for those who start torchrun themselves; only rank 0 speaks."""
    arguments = [*TRAIN, "--job.config_file", LLAMA, "--training.steps=no"]

    def rank(number: str) -> subprocess.CompletedProcess[str]:
        return start(arguments, tmp_path, WORLD_SIZE="2", RANK=number, LOCAL_RANK=number)

    with ThreadPoolExecutor() as together:
        ranks = list(together.map(rank, ("0", "1")))
    assert_one_line(ranks[0], "takes a whole number", tmp_path, [])
    assert (ranks[1].returncode, ranks[1].stderr) == (2, "")


def test_train_script_without_a_file(tmp_path: Path) -> None:
    script = ["bash", str(ROOT / "scripts/train.sh")]
    done = subprocess.run([*script, "lama.toml"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert_one_line(done, "lama.toml: no such file", tmp_path, [])
    done = subprocess.run([*script, "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    for word in ("NGPU", "NNODES", "NODE_RANK", "MASTER_ADDR", "TIDE_ENV"):
        assert word in done.stdout
