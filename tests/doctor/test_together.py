"""What is printed: for one machine, for many, under torchrun, as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.doctor.trees import cluster_machine, laptop
from tide_comm.doctor import __main__ as command
from tide_comm.doctor import together
from tide_comm.doctor.examine import Examination, check
from tide_comm.doctor.facts import Facts
from tide_comm.doctor.show import WIDTH, differences, machine_lines, together_lines

ROOT = Path(__file__).parents[2]


def machine(host: str, part: str = "", **changes: Any) -> Examination:
    facts: Facts = cluster_machine(host=host)
    return check(replace(facts, **{part: replace(getattr(facts, part), **changes)}) if part else facts)


def test_one_machine() -> None:
    text = "\n".join(machine_lines(machine("a", "system", environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})))
    assert "warn     CUDA_DEVICE_MAX_CONNECTIONS  1" in text
    assert "so:     streams share" in text and "mend:   unset CUDA_DEVICE_MAX_CONNECTIONS" in text
    assert all(len(line) <= WIDTH for line in text.splitlines())
    few = machine_lines(check(laptop(), ("network: no answer",)))
    assert len(few) < 22 and "could not be read: network: no answer" in few


def test_the_odd_machine_is_named() -> None:
    machines = [machine("a"), machine("b", "driver", version="570.1", cuda=12080), machine("c")]
    driver = differences(machines)[0]
    assert str(driver) == "machine b: 570.1 (driver) where the others have 580.159.04"
    lines = together_lines(machines)
    assert lines[0] == "tide doctor on 3 machines: a, b, c"
    assert any("[a, c] 580.159.04" in line for line in lines) and any("[b] 570.1" in line for line in lines)
    assert "DIFFERS  machine b: 570.1 (driver) where the others have 580.159.04" in lines
    assert "What TIDE will do on a, c" in lines and "What TIDE will do on b" in lines
    assert together.together_data(machines)["exit_code"] == 1


def test_two_machines_have_no_majority_and_equal_names_are_told_apart() -> None:
    machines = [machine("a"), machine("a", "software", nccl=22907, nccl_installed="")]
    (nccl,) = differences(machines)
    assert str(nccl) == "NCCL differs: a#0: 2.31.2; a#1: 2.29.7"


def test_what_may_differ_is_not_told() -> None:
    machines = [machine("a"), machine("b", "system", shm_bytes=2**40)]
    assert differences(machines) == []
    lines = together_lines(machines)
    assert "All machines are alike in what must be." in lines
    assert not any("[a]" in line and "multicast" in line for line in lines)


def test_rails_must_be_alike() -> None:
    facts = cluster_machine(host="b")
    swapped = [
        replace(line, device=f"mlx5_{j}") for line, j in zip(facts.network.lines, (1, 0, 2, 3, 4, 5, 6, 7), strict=True)
    ]
    other = check(replace(facts, network=replace(facts.network, lines=tuple(swapped))))
    assert [d.name for d in differences([machine("a"), other, machine("c")])] == ["rail alignment"]


def test_json_and_arguments(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(together, "examine", lambda: check(laptop()))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert command.main(["--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["host"] == "laptop" and said["exit_code"] == 0
    assert {"name", "found", "needed", "status", "consequence", "mend", "compare"} == set(said["findings"][0])
    assert command.main([]) == 0 and "What TIDE will do here" in capsys.readouterr().out
    assert command.main(["--what"]) == 2


def test_ranks_that_do_not_come(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(mine: Any) -> Any:
        raise RuntimeError("timed out\nmuch more")

    monkeypatch.setattr(together, "examine", lambda: check(laptop()))
    monkeypatch.setattr(together, "gather_examinations", fail)
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1", "LOCAL_RANK": "0"}
    assert together.run(environment=environment) == 1
    said = capsys.readouterr().out
    assert said.startswith("laptop: the other machines could not be asked: timed out\n") and "/dev/shm" in said


def test_only_a_machines_first_rank_reads(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def examine() -> Any:
        raise AssertionError("read")

    monkeypatch.setattr(together, "examine", examine)
    monkeypatch.setattr(together, "gather_examinations", lambda mine: [check(laptop())] if mine is None else [])
    environment = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1", "LOCAL_RANK": "1"}
    assert together.run(environment=environment) == 0 and capsys.readouterr().out == ""


GATHER = """
import sys
from dataclasses import replace
from tests.doctor.trees import cluster_machine
from tide_comm.doctor import together
from tide_comm.doctor.examine import check
import os
facts = cluster_machine(host="ab"[int(os.environ["RANK"])])
if facts.system.host == "b":
    facts = replace(facts, driver=replace(facts.driver, version="570.1"))
together.examine = lambda: check(facts)
sys.exit(together.run())
"""


def test_two_machines_over_gloo(tmp_path: Path) -> None:
    """Rank 0 prints one table, both end with the same code."""
    from torch.distributed import TCPStore

    # Bound by the parent: no other process can take the port in between.
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    common = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", GATHER],
            env={**common, "RANK": str(rank), "LOCAL_RANK": "0"},
            stdout=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert said[1] == "" and "tide doctor on 2 machines: a, b" in said[0]
    assert "DIFFERS  driver differs: a: 580.159.04; b: 570.1" in said[0]
