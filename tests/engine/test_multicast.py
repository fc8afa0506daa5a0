"""The multicast probe's decisions, with a stand-in for the child: nothing here makes a multicast object on any machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import exchange_for, in_threads

from tide_comm.engine.cuda import library
from tide_comm.engine.cuda.multicast import (
    Multicast,
    ask_child,
    child_command,
    decide,
    decide_together,
    off_by_environment,
)
from tide_comm.errors import TideError

CSRC = Path(__file__).parents[2] / "tide_comm" / "csrc"
OFF = [
    {"NCCL_NVLS_ENABLE": "0"},
    {"NCCL_NVLS_ENABLE": "00"},
    {"NCCL_NVLS_ENABLE": "no"},
    {"NCCL_NVLS_ENABLE": "-1"},
    {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"},
    {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "true"},
    {"NVSHMEM_DISABLE_NVLS": "1"},
    {"NCCL_NVLS_ENABLE": "1", "NVSHMEM_DISABLE_NVLS": "yes"},
]
ON: list[dict[str, str]] = [
    {},
    {"NCCL_NVLS_ENABLE": "2"},
    {"NCCL_NVLS_ENABLE": ""},
    {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "0", "NVSHMEM_DISABLE_NVLS": "False"},
]


def never(device: int) -> bool:
    raise AssertionError("the device must not be asked")


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.parametrize("env", OFF)
def test_the_environment_comes_first(env: dict[str, str]) -> None:
    """Also before a configuration that asks for multicast."""
    found = decide("on", 0, env, never, python("raise AssertionError"))
    name, value = list(env.items())[-1]
    assert found == Multicast(False, f"switched off by {name}={value}")


@pytest.mark.parametrize("env", ON)
def test_what_the_environment_permits(env: dict[str, str]) -> None:
    assert off_by_environment(env) == ""


def test_then_the_configuration_and_the_device(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    child = python(f"open({str(touched)!r}, 'w')")
    assert decide("off", 0, {}, never, child).reason == 'multicast = "off"'
    assert decide("auto", 3, {}, lambda d: False, child).reason == "device 3 says that it has no multicast"

    def no_driver(device: int) -> bool:
        raise TideError("no driver")

    assert decide("auto", 0, {}, no_driver, child) == Multicast(False, "no driver")
    assert not touched.exists()


def test_what_the_child_does() -> None:
    def ask(code: str) -> Multicast:
        return decide("auto", 0, {}, lambda device: True, python(code), 20.0)

    assert ask("print('multicast works')").allowed
    assert ask("print('x'); print('cuMulticastCreate: error 801'); exit(1)") == Multicast(
        False, "the probe failed: cuMulticastCreate: error 801"
    )
    assert ask("exit(3)").reason == "the probe failed: nothing was said"
    crashed = ask("import os; print('so far', flush=True); os.abort()")
    assert crashed == Multicast(False, "the probe was ended by SIGABRT (so far)")


def test_a_child_that_hangs_is_killed_with_its_own_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = (
        "import os, subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{p.pid}}'); time.sleep(60)"
    )
    started = time.monotonic()
    assert ask_child(python(code), 1.5) == "the probe did not end within 1.5 s"
    assert time.monotonic() - started < 6
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}/cmdline").exists() and running(pid) for pid in pids.read_text().split()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_if_one_rank_may_not_none_may() -> None:
    mine = [Multicast(True, "works"), Multicast(False, "hangs"), Multicast(False, "crashes")]
    exchange, found = exchange_for(3), [None] * 3

    def main(rank: int) -> None:
        found[rank] = decide_together("auto", 0, exchange(rank), lambda: mine[rank], lambda device: f"gpu {rank}")

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert found == [Multicast(False, "rank 1: hangs")] * 3
    alone = exchange_for(1)(0)
    assert decide_together("auto", 0, alone, lambda: mine[0], str) == mine[0]


def test_ranks_that_share_a_gpu_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS"):
        monkeypatch.delenv(name, raising=False)

    def ask(rank: int, exchange: Any) -> Multicast:
        return decide_together("auto", 0, exchange, lambda: pytest.fail("asked"), lambda device: f"gpu {rank % 2}")

    assert in_threads(3, ask) == [Multicast(False, "ranks 0 and 2 share a GPU")] * 3


def test_where_it_is_switched_off_not_even_the_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")

    def ask(rank: int, exchange: Any) -> Multicast:
        return decide_together("auto", 0, exchange, None, lambda device: pytest.fail("asked"))

    assert in_threads(2, ask) == [Multicast(False, "rank 0: switched off by NCCL_NVLS_ENABLE=0")] * 2


@pytest.mark.skipif(
    any(Path("/dev").glob("nvidia*")), reason="variables are taken away here: never where there is a GPU"
)
@pytest.mark.skipif(not library.path().exists(), reason="needs the compiled library")
@pytest.mark.parametrize("env", OFF)
def test_the_c_code_looks_at_the_environment_too(env: dict[str, str]) -> None:
    clean = {k: v for k, v in os.environ.items() if "NVLS" not in k and "MULTICAST" not in k}
    done = subprocess.run(child_command(0), env={**clean, **env}, capture_output=True, text=True, timeout=60)
    name, value = list(env.items())[-1]
    assert (done.returncode, done.stdout.strip()) == (1, f"{name}={value}"), done.stderr


def test_the_c_code_checks_before_it_resolves_anything() -> None:
    """By reading it: every call of the driver's goes through the table, whose first statement is the check; only this file names them."""
    text = (CSRC / "multicast.cu").read_text()
    table = text[text.index("static const Multicast *allowed() {") :].splitlines()
    assert table[1].strip() == "if (off_by_environment()) return nullptr;"
    probe = text[text.index("int tide_multicast_probe(int device) {") :].splitlines()
    assert probe[1].strip() == "if (off_by_environment()) return 100;"
    entries = text[text.index('extern "C" {') :].split("\nint tide_multicast_")[2:]
    assert len(entries) == 9
    for entry in entries[:-1]:
        body = [line.strip() for line in entry.splitlines()[1:3]]
        giving_back = entry.startswith(("unmap(", "free("))
        assert body == [f"const Multicast *m = {'used' if giving_back else 'allowed'}();", "if (!m) return 100;"], entry
    names = ("create", "addDevice", "bindMem", "unbind", "granularity")
    assert {text.count(f"m->{name}(") for name in names} == {1} and text.count('find("cuMulticast') == 5
    assert not [p.name for p in CSRC.glob("*.[ch]*") if p.name != "multicast.cu" and "cuMulticast" in p.read_text()]


@pytest.mark.skipif(not library.path().exists(), reason="needs the compiled library")
@pytest.mark.parametrize("env", OFF)
def test_no_call_goes_through_where_it_is_switched_off(env: dict[str, str]) -> None:
    """In a process of its own, with made-up handles: a call that went through would not return its code and reason."""
    code = (
        "from tide_comm.engine.cuda import library; m = library.load()\n"
        "calls = [m.tide_multicast_bytes(2, 1), m.tide_multicast_create(2, 1), m.tide_multicast_import(0),"
        "m.tide_multicast_add(1, 0), m.tide_multicast_bind(1, 1, 1), m.tide_multicast_map(1, 0, 2, 1),"
        "m.tide_multicast_unmap(1, 1), m.tide_multicast_free(1, 0, 1, 1)]\n"
        "print([c if isinstance(c, int) else c[0] for c in calls], m.tide_error())"
    )
    clean = {k: v for k, v in os.environ.items() if "NVLS" not in k and "MULTICAST" not in k}
    done = subprocess.run(
        python(code),
        env={**clean, **env, "PYTHONPATH": str(CSRC.parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    name, value = list(env.items())[-1]
    assert done.stdout.strip() == f"{[100] * 8} {name}={value}", done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.skipif(
    not off_by_environment(os.environ), reason="only where multicast is switched off: nothing is made there"
)
def test_on_a_gpu_where_it_is_switched_off() -> None:
    assert decide("on", 0).reason.startswith("switched off by ")
    done = subprocess.run(child_command(0), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (1, off_by_environment(os.environ)), done.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_sum_kernel_has_a_variant_in_which_the_switch_adds(tmp_path: Path) -> None:
    ptx = tmp_path / "kernels.ptx"
    command = [
        "nvcc",
        "-std=c++17",
        "-fmad=false",
        "-arch=compute_90",
        "-ptx",
        "-o",
        str(ptx),
        str(CSRC / "kernels.cu"),
    ]
    subprocess.run(command, check=True, timeout=300)
    kernels = [k for k in ptx.read_text().split(".entry ")[1:] if "reduce_kernel" in k.split("(")[0]]
    for kernel in kernels:
        switch = "Multimem" in kernel.split("(")[0]
        for vector in ("add.v4.f32", "add.f32"):
            assert (f"multimem.ld_reduce.relaxed.sys.global.{vector}" in kernel) is switch
    # fp32 and bf16 results, each for few and for many bases.
    assert sum("Multimem" in k.split("(")[0] for k in kernels) == 4
