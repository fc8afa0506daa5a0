"""A TOML file with values changed: comments, order and line ends stay, and nothing is written over unasked."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchtitan_tide.errors import ConfigError
from torchtitan_tide.toml_file import read_toml
from torchtitan_tide.toml_write import check_target, with_values

ROOT = Path(__file__).parents[2]
DEBUG = ROOT / "train_configs/llama3_debug.toml"


def test_a_copy_differs_in_the_values_alone(tmp_path: Path) -> None:
    copy = str(tmp_path / "tuned.toml")
    with_values(str(DEBUG), copy, "tide", {"partial_blocks": 132, "head_bytes": 0})
    before, after = DEBUG.read_text().splitlines(), Path(copy).read_text().splitlines()
    changed = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    assert len(changed) == 2
    for (was, now), start in zip(changed, ("head_bytes = 0 ", "partial_blocks = 132 "), strict=True):
        assert now.startswith(start) and now.split("#")[1] == was.split("#")[1]
    assert read_toml(copy)["tide"] == {**read_toml(str(DEBUG))["tide"], "partial_blocks": 132, "head_bytes": 0}
    assert os.listdir(tmp_path) == ["tuned.toml"]


def test_in_place_and_again(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_bytes(b"# mine\r\n[tide]\r\nfinal_blocks = 4   # few\r\n\r\n[model]\r\nname = 'x'\r\n")
    file.chmod(0o640)
    link = tmp_path / "link.toml"
    link.symlink_to(file)
    check_target(str(link), str(link))
    for _ in range(2):
        with_values(str(link), str(link), "tide", {"final_blocks": 16, "inbox_batch": 2})
    assert link.is_symlink() and file.stat().st_mode & 0o777 == 0o640
    text = file.read_bytes()
    assert b"# mine\r\n[tide]\r\nfinal_blocks = 16   # few\r\ninbox_batch = 2" in text
    assert read_toml(str(file)) == {"tide": {"final_blocks": 16, "inbox_batch": 2}, "model": {"name": "x"}}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[model]\nname = 'x'  # no [tide]\n",
        "tide = { comm = 'tide' }\n",
        "tide.comm = 'tide'\n[model]\nname = 'x'\n",
    ],
)
def test_other_ways_to_write_a_section(tmp_path: Path, text: str) -> None:
    file = tmp_path / "job.toml"
    file.write_text(text)
    before = read_toml(str(file))
    with_values(str(file), str(file), "tide", {"final_blocks": 16})
    assert read_toml(str(file)) == {**before, "tide": {**before.get("tide", {}), "final_blocks": 16}}


def test_where_it_may_not_go(tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text("")
    with pytest.raises(ConfigError, match="is there already; takes a new file, or .*llama3_debug.toml itself"):
        check_target(str(DEBUG), str(other))
    with pytest.raises(ConfigError, match="no such folder"):
        check_target(str(DEBUG), str(tmp_path / "none" / "x.toml"))
    check_target(str(DEBUG), str(tmp_path / "new.toml"))
    check_target(str(DEBUG), str(DEBUG))
