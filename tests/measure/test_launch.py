"""Commands of measured trainings, their end, and what is said of those that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from torchtitan_tide.errors import ConfigError
from torchtitan_tide.measure.launch import TemplateLauncher, reason_of, run_logged
from torchtitan_tide.measure.nodes import NodesLauncher
from torchtitan_tide.measure.options import LaunchOptions

ENTRY = ["-m", "torchtitan_tide.measure.entry"]


def test_the_default_is_torchrun_here() -> None:
    command = TemplateLauncher(3).command(["steps", "a b"])
    assert command[0] == sys.executable and "--nproc-per-node 3" in " ".join(command)
    assert command[-4:] == [*ENTRY, "steps", "a b"]


def test_a_template_is_split_as_by_a_shell() -> None:
    launcher = TemplateLauncher(8, "srun -N 2 bash -c 'torchrun --master-port {port} --x ${{N}} {entry}' {ranks}")
    command = launcher.command(["steps", "a b"])
    inner = "torchrun --master-port 29600 --x ${N} -m torchtitan_tide.measure.entry steps 'a b'"
    assert command == ["srun", "-N", "2", "bash", "-c", inner, "8"]


def test_each_training_of_a_template_has_a_port_of_its_own(tmp_path: Path) -> None:
    launcher = TemplateLauncher(1, "echo {port} {entry}")
    for _ in range(2):
        launcher.run(["x"], tmp_path / "log", 10)
    assert "29601 -m" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("template", ["torchrun", "torchrun {entry} {host}", "torchrun {entry", "{entry} {}"])
def test_a_template_that_cannot_be_is_told(template: str) -> None:
    with pytest.raises(ConfigError, match="--launcher"):
        TemplateLauncher(1, template)


def test_output_and_exit_code(tmp_path: Path) -> None:
    code = run_logged([sys.executable, "-c", "import sys; print('out'); sys.exit(3)"], tmp_path / "log", 20)
    assert code == 3 and "\nout\n" in (tmp_path / "log").read_text()
    assert run_logged([str(tmp_path / "none")], tmp_path / "log", 20) == 127
    assert "No such file" in (tmp_path / "log").read_text()


def test_what_takes_too_long_is_ended_with_all_it_started(tmp_path: Path) -> None:
    script = f"sleep 60 & echo $! > {tmp_path}/pid; wait"
    began = time.monotonic()
    assert run_logged(["bash", "-c", script], tmp_path / "log", 1) == -9
    assert time.monotonic() - began < 15
    child = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and _lives(child):
        time.sleep(0.05)
    assert not _lives(child)


def test_a_command_that_is_asked_to_end_ends_its_training(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from torchtitan_tide.measure.launch import ending_on_sigterm, run_logged\n"
        "with ending_on_sigterm():\n"
        f"    run_logged(['bash', '-c', 'echo $$ > {tmp_path}/pid; exec sleep 60'], Path('{tmp_path}/log'), 50)\n"
    )
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": root}, cwd=root)
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child = int((tmp_path / "pid").read_text())
    process.terminate()
    assert process.wait(30) == 143
    while time.monotonic() < deadline and _lives(child):
        time.sleep(0.05)
    assert not _lives(child)


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


LOG = """\
[rank0]:[titan] 2026 - INFO - building
[rank1]:Traceback (most recent call last):
[rank1]:  File "x.py", line 1
[rank1]:torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB
[rank0]:RuntimeError: Connection closed by peer
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: failed
"""


def test_the_first_complaint_is_the_reason() -> None:
    assert reason_of(LOG, 1, 60).startswith("torch.OutOfMemoryError: CUDA out of memory")
    assert reason_of("error: a.toml: no such file\n" + LOG, 2, 60) == "a.toml: no such file"
    assert reason_of("all fine\nSegmentation fault\n\n", 139, 60) == "exit code 139: Segmentation fault"
    assert "longer than 60 s" in reason_of(LOG, -9, 60)
    assert "no output" in reason_of("", 1, 60)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (LaunchOptions(ranks=-1), "--ranks -1"),
        (LaunchOptions(ranks=1, limit_s=0), "--limit-s 0"),
        (LaunchOptions(ranks=1, machines=2), "--node-rank 0 to 1"),
        (LaunchOptions(ranks=1, machines=2, node_rank=2, master_addr="here"), "--node-rank 0 to 1"),
    ],
)
def test_options_that_cannot_be_are_told(options: LaunchOptions, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        options.start()


# Several machines, here as threads over one store


class Machines:
    """What `machines` machines run; `codes[machine]`: exit codes of its trainings."""

    def __init__(self, port: int, codes: Sequence[Sequence[int]]) -> None:
        self.commands: list[list[list[str]]] = [[] for _ in codes]
        self.told: list[str] = []
        self.codes = codes
        self.port = port
        self.threads = [threading.Thread(target=self._follow, args=(i,), daemon=True) for i in range(1, len(codes))]

    def launcher(self, machine: int) -> NodesLauncher:
        def run_one(command: Sequence[str], log: Path, limit_s: float) -> int:
            log.write_text(f"log of {machine}")
            self.commands[machine].append(list(command))
            return self.codes[machine][len(self.commands[machine]) - 1]

        return NodesLauncher(4, len(self.codes), machine, "127.0.0.1", self.port, run_one)

    def _follow(self, machine: int) -> None:
        self.launcher(machine).follow(self.told.append)


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_machines_run_what_the_first_one_announces(tmp_path: Path) -> None:
    machines = Machines(free_port(), [[0, 0, 1], [0, 7, 1], [0, 0, 1]])
    for thread in machines.threads:
        thread.start()
    leader = machines.launcher(0)
    codes = [leader.run([f"training {i}"], tmp_path / "log", 30) for i in range(3)]
    leader.close()
    for thread in machines.threads:
        thread.join(10)
        assert not thread.is_alive()
    assert codes == [0, 7, 1], "a failure on any machine is one"
    for i, commands in enumerate(zip(*machines.commands, strict=True)):
        for machine, command in enumerate(commands):
            assert command[-3:] == [*ENTRY, f"training {i}"]
            assert command[command.index("--node-rank") + 1] == str(machine)
            assert command[command.index("--master-port") + 1] == str(machines.port + 1 + i)
    assert any("exit code 7" in line and "log of 1" in line for line in machines.told)


def test_a_machine_that_goes_away_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtitan_tide.measure.nodes.PATIENCE_S", 0.5)
    machines = Machines(free_port(), [[0], [0]])
    gone = threading.Thread(target=lambda: machines.launcher(1), daemon=True)
    gone.start()
    leader = machines.launcher(0)
    gone.join()
    with pytest.raises(ConfigError, match="machine 1 has not answered"):
        leader.run(["x"], tmp_path / "log", 1)


def test_machines_without_a_leader_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtitan_tide.measure.nodes.START_S", 0.5)
    with pytest.raises(ConfigError, match="do not meet"):
        NodesLauncher(1, 2, 1, "127.0.0.1", free_port())


def test_the_environment_of_a_torchrun_around_is_not_inherited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    run_logged([sys.executable, "-c", "import os; print(os.environ)"], tmp_path / "log", 20)
    text = (tmp_path / "log").read_text()
    assert "'RANK'" not in text and os.environ["RANK"] == "5"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["command on each", "launcher"])
def test_two_real_machines(how: str, tmp_path: Path) -> None:
    """Two "machines" of one rank on this host, through the command line."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "torchtitan_tide.cli", "reproduce", "--debug", "--tables", "sm_time", "--rows"]
    command += ["stock,tide", "--warmup", "1", "--steps", "1", "--machines", "2", "--ranks", "1", "--limit-s", "200"]
    if how == "launcher":
        # A stand-in for srun: runs its command for both nodes at once.
        srun = tmp_path / "srun"
        srun.write_text('#!/usr/bin/env bash\nfor i in 0 1; do SLURM_NODEID=$i "$@" & done\nwait %1 && wait %2\n')
        srun.chmod(0o755)
        inner = "{python} -m torch.distributed.run --nnodes 2 --node-rank $SLURM_NODEID --master-addr 127.0.0.1 \\\n"
        inner += f"--master-port {free_port()} --nproc-per-node {{ranks}} --role rank --tee 3 {{entry}}"
        commands = [[*command, "--launcher", f"{srun} bash -c '{inner}'"]]
    else:
        address = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        commands = [[*command, *address, "--node-rank", str(i)] for i in range(2)]
    commands = [[*words, "--out", str(tmp_path / f"out{i}")] for i, words in enumerate(commands)]
    running = [subprocess.Popen(words, cwd=root, env=env, stdout=subprocess.PIPE, text=True) for words in commands]
    try:
        outputs = [process.communicate(timeout=500)[0] for process in running]
    finally:
        for process in running:
            process.terminate()
    assert [process.returncode for process in running] == [0] * len(running), outputs
    cells = json.loads((tmp_path / "out0/reproduce.json").read_text())["cells"]
    assert [(cell["row"], cell["state"]) for cell in cells] == [("stock", "done"), ("tide", "done")]
    assert all(cell["record"]["about"]["ranks"] == 2 for cell in cells)
    assert all(cell["record"]["about"]["ranks_a_machine"] == 1 for cell in cells)
    assert not (tmp_path / "out1").exists(), "the second machine only follows"
