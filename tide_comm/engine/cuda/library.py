"""The compiled part, `_cuda` (csrc/bindings.cpp). Importing this needs neither a GPU nor `_cuda`.

`python -m tide_comm.engine.cuda.library` says whether it is there, and why not.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from tide_comm.errors import TideError

MODULE = "tide_comm.engine.cuda._cuda"
NOTE = "_not_built.txt"
"""What the build leaves beside this file, with the reason, if it compiled nothing (cmake/CMakeLists.txt)."""


def path() -> Path:
    """The module's file, or where it would be."""
    files = [Path(__file__).with_name("_cuda" + suffix) for suffix in EXTENSION_SUFFIXES]
    return next((file for file in files if file.exists()), files[0])


@cache
def load() -> Any:
    """The module. Raises `TideError` with the reason if it is not there or does not load."""
    try:
        return importlib.import_module(MODULE)
    except ModuleNotFoundError:
        reason = _why_missing(Path(__file__).parent)
    except ImportError as error:
        reason = f"does not load ({error})"
    raise TideError(
        f"the CUDA engine {reason}; with nvcc 13 in PATH install TIDE again, or run scripts/build_cuda.sh in its source"
    )


def _why_missing(folder: Path) -> str:
    others = ", ".join(sorted(p.name for p in folder.glob("_cuda.*.so")))
    if others:
        return f"was compiled for another Python ({others})"
    note = folder / NOTE
    if note.exists():
        return f"was not compiled: {note.read_text().strip()}"
    return f"was not compiled ({folder} has no _cuda)"


def check(code: int, what: str) -> None:
    """Raises `TideError` unless `code` is 0."""
    if code:
        raise TideError(f"{what}: {load().tide_error()}")


def state() -> str:
    """One line: which CUDA engine there is."""
    try:
        module = load()
    except TideError as error:
        return f"CUDA engine: no, host engine only. {error}"
    return f"CUDA engine: {module.built} ({Path(module.__file__).name})"


if __name__ == "__main__":
    print(state())
