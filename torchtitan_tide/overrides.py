"""Command-line overrides: `--section.key value`, `--section.key=value` and flags.

TorchTitan's own parser (tyro) takes booleans as flags only and answers a mistake with a page. Reading the overrides
here gives one line, and lets `--tide.all_gather=false` work beside `--tide.no-all-gather`.
"""

from __future__ import annotations

from typing import Any

from torchtitan_tide.errors import ConfigError, did_you_mean
from torchtitan_tide.hints import FALSE, TRUE, convert, describe


def parse(args: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """Values by dotted name, typed by `options` (see `hints.flatten`); the last of a name wins.

    Raises `ConfigError` on an unknown option (naming the nearest), a missing value or one of the wrong type.
    """
    values: dict[str, Any] = {}
    i = 0
    while i < len(args):
        arg = args[i]
        i += 1
        if not arg.startswith("--"):
            raise ConfigError(f"override {arg!r}: takes the form --section.key=value")
        given, has_value, text = arg[2:].partition("=")
        name, negated = _name(given, options)
        hint = options[name]
        if hint is bool:
            if negated and has_value:
                raise ConfigError(f"override {arg!r}: the flag --{given} takes no value")
            if not has_value and not negated and i < len(args) and args[i].lower() in TRUE + FALSE:
                has_value, text = "=", args[i]
                i += 1
            values[name] = convert(name, text, bool) if has_value else not negated
            continue
        if not has_value:
            if i == len(args) or args[i].startswith("--"):
                raise ConfigError(f"override --{given}: needs a value ({describe(hint)})")
            text = args[i]
            i += 1
        values[name] = convert(name, text, hint)
    return values


def _name(given: str, options: dict[str, Any]) -> tuple[str, bool]:
    """The option that `given` means, and whether it is the negative form of a flag (--section.no-key)."""
    name = given.replace("-", "_")
    if name in options:
        return name, False
    section, _, key = name.rpartition(".")
    positive = f"{section}.{key[3:]}"
    if key.startswith("no_") and options.get(positive) is bool:
        return positive, True
    raise ConfigError(f"override --{given}: no such option{did_you_mean(name, options)}")


def to_arguments(values: dict[str, Any], options: dict[str, Any]) -> list[str]:
    """The overrides in the one form that TorchTitan's parser takes for certain."""
    arguments = []
    for name, value in values.items():
        section, _, key = name.rpartition(".")
        if options[name] is bool:
            arguments.append(f"--{name}" if value else f"--{section}.no-{key.replace('_', '-')}")
        elif isinstance(value, list):
            arguments.append(f"--{name}={','.join(value)}")
        else:
            arguments.append(f"--{name}={value}")
    return arguments


def merge(values: dict[str, Any], tables: dict[str, Any]) -> None:
    """Set the overrides in `tables`, the nested tables of a TOML file."""
    for name, value in values.items():
        *sections, key = name.split(".")
        table = tables
        for section in sections:
            table = table.setdefault(section, {})
        table[key] = value
