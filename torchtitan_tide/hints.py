"""Type hints of configuration fields: which values they take, from TOML and from the command line."""

from __future__ import annotations

import types
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torchtitan_tide.errors import ConfigError, did_you_mean

TRUE, FALSE = ("true", "1", "yes"), ("false", "0", "no")


def field_types(cls: type) -> dict[str, Any]:
    """Types of a dataclass's fields; also of the classes that TorchTitan makes by merging."""
    hints = get_type_hints(cls)
    # A merged class holds real types in its fields; only a class with postponed annotations holds strings.
    return {f.name: hints[f.name] if isinstance(f.type, str) else f.type for f in fields(cls)}


def flatten(cls: type, prefix: str = "") -> dict[str, Any]:
    """All options of a nested configuration dataclass: dotted name -> type."""
    found: dict[str, Any] = {}
    for name, hint in field_types(cls).items():
        if is_dataclass(hint) and isinstance(hint, type):
            found.update(flatten(hint, f"{prefix}{name}."))
        else:
            found[prefix + name] = hint
    return found


def choices(hint: Any) -> list[Any]:
    """The members of a union, narrowest first; otherwise the hint itself."""
    if get_origin(hint) in (Union, types.UnionType):
        order = [type(None), bool, int, float]
        return sorted(get_args(hint), key=lambda h: order.index(h) if h in order else len(order) + (h is str))
    return [hint]


def describe(hint: Any) -> str:
    """What a hint takes, in words."""
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", type(None): "None"}
    parts = []
    for choice in choices(hint):
        if get_origin(choice) is Literal:
            parts.append(" | ".join(f'"{value}"' for value in get_args(choice)))
        elif get_origin(choice) is list:
            inner = get_args(choice)[0]
            parts.append("a list of lists of strings" if get_origin(inner) is list else "a list of strings")
        else:
            parts.append(words.get(choice, str(choice)))
    return " or ".join(parts)


def matches(value: Any, hint: Any) -> bool:
    """Whether a TOML value is of the type `hint`; a whole number is also a number, a bool is not."""
    return any(_matches_one(value, choice) for choice in choices(hint))


def _matches_one(value: Any, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return any(value == taken and type(value) is type(taken) for taken in get_args(hint))
    if get_origin(hint) is list:
        return isinstance(value, list) and all(matches(item, get_args(hint)[0]) for item in value)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def convert(name: str, text: str, hint: Any) -> Any:
    """`text` of the command line as a value of the type `hint`. Raises `ConfigError`, naming what it takes."""
    for choice in choices(hint):
        try:
            return _convert_one(text, choice)
        except ValueError:
            continue
    raise ConfigError(f"{name} = {text!r}: takes {describe(hint)}")


def _convert_one(text: str, hint: Any) -> Any:
    if get_origin(hint) is Literal:
        for value in get_args(hint):
            if text == str(value):
                return value
        raise ValueError(text)
    if hint is type(None):
        if text not in ("None", "none"):
            raise ValueError(text)
        return None
    if hint is bool:
        if text.lower() not in TRUE + FALSE:
            raise ValueError(text)
        return text.lower() in TRUE
    if hint in (int, float):
        return hint(text)
    if hint is str:
        return text
    if get_origin(hint) is list and get_args(hint) == (str,):
        # As TorchTitan: A,B,C.
        return text.split(",")
    raise ValueError(text)


def check_tables(cls: type, tables: dict[str, Any], where: str, prefix: str = "") -> None:
    """Raise `ConfigError` at the first section, key or value of a TOML file's `tables` that `cls` does not take.

    TorchTitan checks names only; a string where a number belongs would fail much later, in the training loop.
    """
    hints = field_types(cls)
    for key, value in tables.items():
        name, hint = prefix + key, hints.get(key)
        if key not in hints:
            shown = f"section [{name}]" if isinstance(value, dict) else f"key {name}"
            names = [prefix + valid for valid in hints] if prefix else hints
            raise ConfigError(f"{where}: unknown {shown}{did_you_mean(name, names)}")
        if is_dataclass(hint) and isinstance(hint, type):
            if not isinstance(value, dict):
                raise ConfigError(f"{where}: {name} = {value!r}: takes a section [{name}]")
            check_tables(hint, value, where, f"{name}.")
        elif not matches(value, hint):
            raise ConfigError(f"{where}: {name} = {value!r}: takes {describe(hint)}")
