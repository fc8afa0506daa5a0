"""Reading a TOML file, with one line for what is wrong with it. Imports neither torch nor torchtitan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchtitan_tide.errors import ConfigError, did_you_mean


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
        names = [str(folder / found.name) for found in folder.glob("*.toml")] if folder.is_dir() else []
        raise ConfigError(f"{path}: no such file{did_you_mean(path, names) if names else ''}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
