"""Values of a section of a TOML file changed, all else as it stands: comments, order, line ends."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan_tide.errors import ConfigError
from torchtitan_tide.toml_file import read_toml


def check_target(source: str, target: str) -> None:
    """Told before anything takes long: raises `ConfigError` unless `target` is a new file, or `source` itself, and can be written."""
    path = Path(target)
    folder = path.resolve().parent
    if path.exists() and not (Path(source).exists() and path.samefile(source)):
        raise ConfigError(f"--write {target}: is there already; takes a new file, or {source} itself")
    if not folder.is_dir():
        raise ConfigError(f"--write {target}: no such folder: {folder}")
    if not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise ConfigError(f"--write {target}: cannot be written: Permission denied")


def with_values(source: str, target: str, section: str, values: Mapping[str, Any]) -> None:
    """Write `source` to `target` (which may be `source`) with these values in `section`, which is made if it is not there.

    Raises `ConfigError` if it cannot be read or written. Nothing is left half written.
    """
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    before = read_toml(source)
    with open(source, encoding="utf-8", newline="") as file:
        text = file.read()
    try:
        document = tomlkit.parse(text)
        if section not in document:
            document[section] = tomlkit.table()
        table: Any = document[section]
        for name, value in values.items():
            table[name] = value
        changed = tomlkit.dumps(document)
    except TOMLKitError as error:
        raise ConfigError(f"{source}: its [{section}] cannot be changed: {error}") from None
    _replace(target, changed, like=source)
    # tomlkit keeps text and tables side by side: what counts is what the next reader finds.
    wanted = {**before, section: {**before.get(section, {}), **values}}
    if read_toml(target) != wanted:
        raise ConfigError(
            f"--write {target}: was written, but does not hold {dict(values)} in [{section}]; set them by hand"
        )


def _replace(target: str, text: str, like: str) -> None:
    """Through a file beside it. A link stays a link: what it points to is replaced."""
    path = Path(target).resolve()
    try:
        handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
                file.write(text)
            shutil.copymode(like, beside)
            os.replace(beside, path)
        except OSError:
            os.unlink(beside)
            raise
    except OSError as error:
        raise ConfigError(f"--write {target}: cannot be written: {error.strerror}") from None
