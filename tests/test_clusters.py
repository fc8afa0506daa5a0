"""Start files for clusters, as far as they can be tried without one."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SBATCH = ROOT / "scripts/slurm/train.sbatch"

SRUN = """#!/usr/bin/env bash
# Two nodes, one after the other.
while [[ $1 == --* ]]; do shift; done
for node in 0 1; do SLURM_NODEID=$node "$@" || exit $?; done
"""
PYTHON = """#!/usr/bin/env bash
echo "doctor on node $SLURM_NODEID: $*"
exit "${DOCTOR_SAYS:-0}"
"""
TRAIN = """#!/usr/bin/env bash
echo "train on $NODE_RANK of $NNODES at $MASTER_ADDR:$MASTER_PORT: $*"
"""


SCRIPTS = sorted(
    str(p.relative_to(ROOT / "scripts")) for p in (ROOT / "scripts").rglob("*.s*") if p.suffix in (".sh", ".sbatch")
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_sound_bash(script: str) -> None:
    done = subprocess.run(["bash", "-n", str(ROOT / "scripts" / script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def slurm(tmp_path: Path) -> Path:
    """A folder like the project's, with stand-ins for Slurm, Python and the training."""
    files = {
        "bin/srun": SRUN,
        "bin/scontrol": '#!/usr/bin/env bash\necho "$*" >&2\nprintf "%s\\n" first second\n',
        "bin/fake_python": PYTHON,
        "scripts/train.sh": TRAIN,
        "scripts/setup_env.sh": 'setup_env() { PYTHON=fake_python; echo "set up"; }\n',
        "job.toml": "",
    }
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    return tmp_path


def sbatch(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # Slurm runs a copy from its spool folder.
    copy = folder / "bin/slurm_script"
    shutil.copy(SBATCH, copy)
    env = {
        **os.environ,
        "PATH": f"{folder}/bin:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "1234567",
        **environment,
    }
    return subprocess.run(["bash", str(copy), *arguments], env=env, cwd="/", capture_output=True, text=True, timeout=60)


def test_slurm_starts_the_doctor_and_then_the_training_on_each_node(slurm: Path) -> None:
    done = sbatch(slurm, "job.toml", "--training.steps=5 6")
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[0] == "set up" and len(said) == 5
    assert "--node-rank 1" in said[2] and "--master-port 29135 --nproc-per-node 1 -m tide_comm.doctor" in said[2]
    assert said[3:] == [f"train on {n} of 2 at first:29134: job.toml --training.steps=5 6" for n in (0, 1)]


def test_slurm_stops_where_the_doctor_does_unless_told_not_to(slurm: Path) -> None:
    done = sbatch(slurm, "job.toml", DOCTOR_SAYS="1")
    assert done.returncode == 1 and "train on" not in done.stdout and "TIDE_DOCTOR=off" in done.stderr
    done = sbatch(slurm, "job.toml", DOCTOR_SAYS="1", TIDE_DOCTOR="off")
    assert done.returncode == 0 and "doctor" not in done.stdout and done.stdout.count("train on") == 2


def test_slurm_in_containers_sets_up_nothing_outside(slurm: Path) -> None:
    done = sbatch(slurm, "job.toml", SRUN_ARGS="--container-image=x --mpi=none", TIDE_DOCTOR="off")
    assert done.returncode == 0 and "set up" not in done.stdout and done.stdout.count("train on") == 2


@pytest.mark.parametrize("arguments", [(), ("--help",), ("nowhere.toml",)])
def test_slurm_usage(slurm: Path, arguments: tuple[str, ...]) -> None:
    done = sbatch(slurm, *arguments)
    assert done.returncode == 2 and done.stderr.startswith("usage: sbatch") and not done.stdout


def test_the_kubernetes_example_fits_together() -> None:
    yaml: Any = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all((ROOT / "examples/kubernetes/train.yaml").read_text())
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    env = {e["name"]: e["value"] for e in container["env"]}
    assert (service["kind"], job["kind"], spec["completionMode"]) == ("Service", "Job", "Indexed")
    assert spec["completions"] == spec["parallelism"] == int(env["NNODES"])
    name = job["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    # An Indexed Job's pods are called <job>-<index>.
    assert env["MASTER_ADDR"] == f"{name}-0.{pod['subdomain']}"
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    assert next(v for v in pod["volumes"] if v["name"] == "shm")["emptyDir"]["medium"] == "Memory"
    script = container["args"][0]
    done = subprocess.run(["bash", "-n", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "NODE_RANK=$JOB_COMPLETION_INDEX" in script and "exec scripts/train.sh /config/train.toml" in script
