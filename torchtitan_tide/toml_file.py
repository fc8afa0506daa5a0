"""Reading a TOML file, with one line for what is wrong with it. Imports neither torch nor torchtitan."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from torchtitan_tide.errors import ConfigError


def read_toml(path: str) -> dict[str, Any]:
    """Tables of a TOML file. Raises `ConfigError` when it is missing, unreadable or malformed."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib  # type: ignore[no-redef]
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        folder = Path(path).parent
        # Stems alone: the suffix that all have in common would make any name look near.
        files = {found.stem: str(folder / found.name) for found in folder.glob("*.toml")} if folder.is_dir() else {}
        near = difflib.get_close_matches(Path(path).stem, files, n=1)
        raise ConfigError(f"{path}: no such file" + (f'; did you mean "{files[near[0]]}"?' if near else "")) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
