"""The compiled module: what it gives, that it needs no GPU to import, and what is said where it is not."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tide_comm.engine.cuda import library
from tide_comm.engine.cuda.records import OP, SEGMENT
from tide_comm.errors import TideError

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "tide_comm" / "csrc"
NO_GPU = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}

try:
    library.load()
    NOT_BUILT = ""
except TideError as error:
    NOT_BUILT = str(error)
built = pytest.mark.skipif(bool(NOT_BUILT), reason=NOT_BUILT)


def declared() -> set[str]:
    return set(re.findall(r"\b(tide_\w+)\(", (CSRC / "api.h").read_text()))


def test_every_function_is_declared_bound_and_known() -> None:
    bound = re.findall(r'def\("(tide_\w+)"', (CSRC / "bindings.cpp").read_text())
    assert sorted(bound) == sorted(declared())
    sources = "".join(p.read_text() for p in (ROOT / "tide_comm" / "engine" / "cuda").glob("*.py"))
    called = set(re.findall(r"(?:library|load\(\))\.(tide_\w+)", sources))
    assert called and called <= declared()


@built
def test_module_has_every_function() -> None:
    """Fails if the module is older than api.h: scripts/build_cuda.sh makes it again."""
    assert {name for name in dir(library.load()) if name.startswith("tide_")} == declared()


@built
def test_imports_without_a_gpu() -> None:
    code = "import sys; from tide_comm.engine.cuda import library; m = library.load(); print(m.tide_engine_create(0), m.tide_error())"
    done = subprocess.run([sys.executable, "-c", code], env=NO_GPU, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    if not torch.cuda.is_available():
        assert done.stdout.startswith("(1, None) the CUDA driver has no cuMemCreate"), done.stdout


@built
def test_arrays_are_taken_as_they_are() -> None:
    """What the engine hands over is accepted; anything whose memory is not one run is refused, and so is no engine at all."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    name = ctypes.c_char_p(b"nb_handle")  # nanobind's own for void *
    engine = new(8, name, None)
    too_many = np.zeros(2000, np.uint64)

    def launch(engine: object, bases: object) -> int:
        ops, streams, words = np.zeros(3, OP), np.zeros(16, np.uint64), np.zeros(0, np.uint32)
        code: int = library.load().tide_launch(engine, ops, streams, bases, words, 0.5, 2**32 - 1, np.zeros(2, SEGMENT))
        return code

    # Refused before the engine is looked at.
    assert launch(engine, too_many) == 1
    assert library.load().tide_error().startswith("too many addresses: 2000 bases")
    for wrong in (too_many[::2], [1, 2], None):
        with pytest.raises(TypeError):
            launch(engine, wrong)
    with pytest.raises(TypeError):
        launch(None, too_many)


def test_absent_module_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "has no _cuda" in library._why_missing(tmp_path)
    (tmp_path / library.NOTE).write_text("no nvcc was found\n")
    assert library._why_missing(tmp_path) == "was not compiled: no nvcc was found"
    (tmp_path / "_cuda.cpython-39-x86_64-linux-gnu.so").touch()
    assert library._why_missing(tmp_path) == "was compiled for another Python (_cuda.cpython-39-x86_64-linux-gnu.so)"

    monkeypatch.setattr(library, "MODULE", "tide_comm.engine.cuda._not_there")
    monkeypatch.setattr(library, "_why_missing", lambda folder: "was not compiled: no nvcc was found")
    library.load.cache_clear()
    try:
        with pytest.raises(
            TideError, match="was not compiled: no nvcc was found; with nvcc 13 .* scripts/build_cuda.sh"
        ):
            library.load()
        assert library.state().startswith("CUDA engine: no, host engine only. the CUDA engine was not compiled")
    finally:
        library.load.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["no nvcc", "broken nvcc"])
def test_install_without_nvcc(case: str, tmp_path: Path) -> None:
    """pip succeeds with the host engine alone. Needs the package index, like every build that pip isolates."""
    env = {
        k: v
        for k, v in os.environ.items()
        if k not in ("CUDACXX", "CUDA_HOME", "CUDA_PATH", "PYTHONPATH", "CMAKE_ARGS")
    }
    if case == "broken nvcc":
        env["CUDACXX"] = "/not/there/nvcc"
        reason = "/not/there/nvcc is not there or cannot compile"
    else:
        reason = "no nvcc was found in PATH"
        folders = [Path(p) for p in env["PATH"].split(os.pathsep) if p] + [
            Path("/usr/local/bin"),
            Path("/usr/bin"),
            Path("/bin"),
        ]
        hidden = {str(p) for p in [*folders, Path("/usr/local/cuda/bin")] if (p / "nvcc").exists()}
        env["CMAKE_ARGS"] = f"-DCMAKE_IGNORE_PATH={';'.join(sorted(hidden))}"
    # Only what a build takes: a build must not see what lies in this checkout.
    source, target = tmp_path / "source", tmp_path / "target"
    skip = shutil.ignore_patterns("*.so", "_not_built.txt", "__pycache__", "CMake[CFI]*", ".*", "build")
    for name in ("cmake", "tide_comm", "torchtitan_tide"):
        shutil.copytree(ROOT / name, source / name, ignore=skip)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "install", "-v", "--no-deps", "--target", str(target), str(source)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    said = " ".join((done.stdout + done.stderr).split())
    assert f"TIDE without its CUDA engine, for the CPU only: {reason}" in said
    told = subprocess.run(
        [sys.executable, "-m", "tide_comm.engine.cuda.library"],
        cwd=tmp_path,
        env={**env, "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
    ).stdout
    assert told.startswith(f"CUDA engine: no, host engine only. the CUDA engine was not compiled: {reason}")
