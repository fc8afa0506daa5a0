"""Counters of network lines that show congestion: pause, ECN, retransmissions, packets out of order. Before and after a run.

Sources: /sys/class/infiniband/<device>/ports/<n>/{counters,hw_counters}, where names are fixed by the kernel's drivers (mlx5, and rxe's for
trials), and the statistics of the network interface of a RoCE port as `ethtool -S` gives them. Nothing here needs root, but containers
often lack /sys/class/infiniband.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ETHTOOL_LIMIT_S = 3.0

KINDS: dict[str, tuple[str, ...]] = {
    "pause": (),
    "without credit": ("port_xmit_wait",),
    "ECN": ("np_ecn_marked_roce_packets", "np_cnp_sent", "rp_cnp_handled"),
    "retransmitted": (
        "roce_adp_retrans",
        "roce_adp_retrans_to",
        "local_ack_timeout_err",
        "packet_seq_err",
        "rnr_nak_retry_err",
        "retry_exceeded_err",
    ),
    "out of order": ("out_of_sequence", "out_of_seq_request", "rcvd_seq_err"),
    "dropped": ("out_of_buffer", "port_xmit_discards"),
    "errors": ("port_rcv_errors", "symbol_error", "link_downed"),
}
"""What each counter of an RDMA port tells of. `port_xmit_wait`: ticks in which data waited for the receiver (InfiniBand). Pause frames are
counted by the network interface."""
_TRAFFIC = {"port_xmit_data": 4, "port_rcv_data": 4}
"""Bytes a count (they count words of 4 bytes)."""
_PAUSE = r"(?:rx|tx)(?:_prio\d)?_(?:global_)?pause(?:_ctrl_phy|_duration|_transition)?"
_ETHTOOL = re.compile(rf"^\s*({_PAUSE}|rx_discards_phy|tx_discards_phy|rx_out_of_buffer): (\d+)$", re.MULTILINE)
"""Names as mlx5's; other drivers' differ and are left out."""


@dataclass(frozen=True)
class LineCounters:
    """One reading of one line. `problem`: why there is none, or why a part of it is missing; "" if all was read."""

    name: str
    values: Mapping[str, int] = field(default_factory=dict)
    problem: str = ""


def ports(root: Path = Path("/")) -> list[tuple[str, int]]:
    """(device, port) of all RDMA ports; [] where there are none or sysfs does not show them."""
    found = []
    try:
        for device in sorted((root / "sys/class/infiniband").iterdir()):
            numbers = [p.name for p in (device / "ports").iterdir()] if (device / "ports").is_dir() else []
            found += [(device.name, int(n)) for n in sorted(numbers) if n.isdigit()]
    except OSError:
        pass
    return found


def interfaces(root: Path, device: str, port: int) -> tuple[str, ...]:
    """Network interfaces of an RDMA port: `ethtool` asks for those. An interface's `dev_port` counts from 0."""
    folder = root / "sys/class/infiniband" / device / "device/net"
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return ()
    return tuple(n for n in names if _text(folder / n / "dev_port") in ("", str(port - 1)))


def ask_ethtool(interface: str) -> str:
    """What `ethtool -S` prints. Raises `OSError` with the reason where it does not answer."""
    try:
        done = subprocess.run(
            ["ethtool", "-S", interface],
            capture_output=True,
            text=True,
            timeout=ETHTOOL_LIMIT_S,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        raise OSError("ethtool is not installed") from None
    except subprocess.TimeoutExpired:
        raise OSError(f"ethtool -S {interface} did not answer") from None
    if done.returncode:
        raise OSError(f"ethtool -S {interface}: {(done.stderr.strip() or 'failed').splitlines()[-1]}")
    return done.stdout


def read_line(root: Path, device: str, port: int, ethtool: Callable[[str], str] = ask_ethtool) -> LineCounters:
    """All known counters of one port that can be read."""
    name = device if port == 1 else f"{device}:{port}"
    base = root / "sys/class/infiniband" / device / "ports" / str(port)
    values: dict[str, int] = {}
    problems: list[str] = []
    refused = ""
    for counter in (*(c for known in KINDS.values() for c in known), *_TRAFFIC):
        for folder in ("hw_counters", "counters"):
            try:
                values[counter] = int((base / folder / counter).read_text())
                break
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                refused = f"{folder}/{counter}: {getattr(error, 'strerror', None) or error}"
    if refused:
        problems.append(refused)
    elif not values:
        problems.append(f"sys/class/infiniband/{device}/ports/{port} shows no counters")
    if _text(base / "link_layer") == "Ethernet":
        for interface in interfaces(root, device, port):
            try:
                values.update((key, int(value)) for key, value in _ETHTOOL.findall(ethtool(interface)))
            except OSError as error:
                problems.append(f"pause: {error}")
    return LineCounters(name, values, "; ".join(problems))


def read_all(root: Path = Path("/"), ethtool: Callable[[str], str] = ask_ethtool) -> list[LineCounters]:
    return [read_line(root, device, port, ethtool) for device, port in ports(root)]


def kind(counter: str) -> str:
    """One of `KINDS`; "" for mere traffic."""
    if "pause" in counter:
        return "pause"
    if "discards" in counter or counter == "rx_out_of_buffer":
        return "dropped"
    return next((name for name, known in KINDS.items() if counter in known), "")


def difference_lines(before: Sequence[LineCounters], after: Sequence[LineCounters]) -> list[str]:
    """One line a network line: what has risen in between, by kind, and what could not be read. [] where there are no lines.

    Counters are the port's: what other processes and jobs on this machine sent is in them too.
    """
    earlier = {line.name: line for line in before}
    out, quiet = [], []
    for line in after:
        was = earlier.get(line.name)
        if was is None or not line.values or not was.values:
            problem = line.problem or (was.problem if was else "it was not there before the run")
            out.append(f"network line {line.name}: counters not readable: {problem}")
            continue
        # Counters of the InfiniBand port's first kind are 32 bits wide and stop or start anew; a fall says nothing.
        risen = {
            c: line.values[c] - was.values[c] for c in line.values if line.values[c] > was.values.get(c, line.values[c])
        }
        parts = []
        for name in KINDS:
            of_kind = [f"{c} +{n}" for c, n in risen.items() if kind(c) == name]
            if of_kind:
                parts.append(f"{name}: {', '.join(of_kind)}")
        sent, received = (risen.get(c, 0) * width / 2**30 for c, width in _TRAFFIC.items())
        traffic = f" ({sent:.2f} GiB sent, {received:.2f} GiB received)" if sent or received else ""
        note = f"; not readable: {line.problem}" if line.problem else ""
        if parts or note:
            out.append(f"network line {line.name}{traffic}: {'; '.join(parts) or 'nothing else rose'}{note}")
        else:
            quiet.append(line.name + traffic)
    if quiet:
        out.append(f"network lines without pause, ECN marks, retransmissions or drops: {', '.join(quiet)}")
    out += [f"network line {name}: gone since the run began" for name in earlier if name not in {a.name for a in after}]
    return out


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
