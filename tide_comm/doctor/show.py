"""Findings as text: one machine's, or many machines' in one table with those that differ named."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tide_comm.doctor.examine import Examination
from tide_comm.doctor.facts import Finding, Status

WIDTH = 118
_MARKS: dict[Status, str] = {"ok": "ok", "warn": "warn", "missing": "MISSING", "not_here": "-"}
_MARK, _NAME = 9, 29
"""Columns' widths; a name may be as long as CUDA_DEVICE_MAX_CONNECTIONS."""


def _folded(text: str, indent: int, first: str = "") -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=first or " " * indent, subsequent_indent=" " * indent, break_on_hyphens=False
    ) or [first.rstrip()]


def finding_lines(finding: Finding, where: str = "") -> list[str]:
    """A line for what was found; where something is wrong, also what is needed, what follows and how to mend it."""
    head = f"{_MARKS[finding.status]:<{_MARK}}{finding.name:<{_NAME}}"
    indent = _MARK + _NAME
    lines = _folded(f"{where}{finding.found}", indent, head)
    if finding.status in ("warn", "missing"):
        for label, text in (("needed", finding.needed), ("so", finding.consequence), ("mend", finding.mend)):
            if text:
                lines += _folded(text, indent + 8, f"{'':<{indent}}{label + ':':<8}")
    elif finding.consequence and finding.status == "ok":
        lines += _folded(finding.consequence, indent + 8, f"{'':<{indent}}{'so:':<8}")
    return lines


def _not_here(findings: Sequence[Finding]) -> list[str]:
    """What does not apply, in a few lines."""
    because: dict[str, list[str]] = {}
    for finding in findings:
        because.setdefault(finding.found, []).append(finding.name)
    return [
        line
        for found, names in because.items()
        for line in _folded(f"{', '.join(names)}: {found}", _MARK, f"{'-':<{_MARK}}")
    ]


def machine_lines(examination: Examination) -> list[str]:
    """The answer for one machine."""
    lines = [f"tide doctor on {examination.host}"]
    for finding in examination.findings:
        if finding.status != "not_here":
            lines += finding_lines(finding)
    lines += _not_here([f for f in examination.findings if f.status == "not_here"])
    lines += [f"could not be read: {problem}" for problem in examination.problems]
    return [*lines, "", *outcome_lines(examination)]


def outcome_lines(examination: Examination) -> list[str]:
    lines = ["What TIDE will do here"]
    for line in examination.outcome.lines:
        lines += _folded(line, 4, "  - ")
    return lines


# Several machines


@dataclass(frozen=True)
class Difference:
    """One check whose `compare` is not alike everywhere. `odd`: machine -> its value; `common`: the others', "" without a majority."""

    name: str
    odd: dict[str, str]
    common: str

    def __str__(self) -> str:
        each = [f"{machine}: {value or 'none'}" for machine, value in self.odd.items()]
        if not self.common:
            return f"{self.name} differs: {'; '.join(each)}"
        return f"machine {'; '.join(each)} ({self.name}) where the others have {self.common}"


def named(examinations: Sequence[Examination]) -> list[str]:
    """A name a machine: the host's, with its number where several have the same."""
    hosts = [e.host for e in examinations]
    return [host if hosts.count(host) == 1 else f"{host}#{i}" for i, host in enumerate(hosts)]


def differences(examinations: Sequence[Examination]) -> list[Difference]:
    """What is not alike, odd machines named: a value that more than half have is taken for right."""
    names = named(examinations)
    found = []
    for i, finding in enumerate(examinations[0].findings):
        values = [e.findings[i].compare for e in examinations]
        if len(set(values)) == 1:
            continue
        common, count = Counter(values).most_common(1)[0]
        majority = count * 2 > len(values) and common
        odd = {n: v for n, v in zip(names, values, strict=True) if not (majority and v == common)}
        found.append(Difference(finding.name, odd, common if majority else ""))
    return found


def together_lines(examinations: Sequence[Examination]) -> list[str]:
    """One table for all machines: a row a check, several where machines found different things."""
    names = named(examinations)
    lines = [f"tide doctor on {len(names)} machines: {', '.join(names)}"]
    quiet = []
    for i in range(len(examinations[0].findings)):
        rows: dict[Finding, list[str]] = {}
        for name, examination in zip(names, examinations, strict=True):
            rows.setdefault(examination.findings[i], []).append(name)
        if all(finding.status == "not_here" for finding in rows):
            quiet.append(next(iter(rows)))
            continue
        for finding, machines in sorted(rows.items(), key=lambda row: -len(row[1])):
            lines += finding_lines(finding, "" if len(rows) == 1 else f"[{', '.join(machines)}] ")
    lines += _not_here(quiet)
    lines += [f"{n}: could not be read: {p}" for n, e in zip(names, examinations, strict=True) for p in e.problems]
    lines.append("")
    different = differences(examinations)
    lines += [f"DIFFERS  {text}" for text in map(str, different)] or ["All machines are alike in what must be."]
    outcomes: dict[tuple[str, ...], list[str]] = {}
    for name, examination in zip(names, examinations, strict=True):
        outcomes.setdefault(examination.outcome.lines, []).append(name)
    for said, machines in outcomes.items():
        lines += ["", f"What TIDE will do on {', '.join(machines)}"]
        lines += [line for text in said for line in _folded(text, 4, "  - ")]
    return lines
