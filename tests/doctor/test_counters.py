"""Counters of network lines: what is read, what has risen, what is not readable and why."""

from __future__ import annotations

import time
from pathlib import Path

from tests.doctor.trees import add_line
from tide_comm.doctor import counters
from tide_comm.doctor.counters import LineCounters, difference_lines, read_all
from torchtitan_tide.network import NetworkWatch

ETHTOOL = """NIC statistics:
     rx_packets: 9000
     rx_prio3_pause: 7
     rx_prio3_pause_duration: 70
     tx_prio3_pause: 1
     rx_discards_phy: 2
     rx_prio3_buf_discard: 4
"""
ROCE = {
    "hw_counters/np_ecn_marked_roce_packets": 10,
    "hw_counters/np_cnp_sent": 10,
    "hw_counters/rp_cnp_handled": 0,
    "hw_counters/out_of_sequence": 0,
    "hw_counters/roce_adp_retrans": 5,
    "counters/port_xmit_data": 2**28,
    "counters/port_rcv_data": 0,
}


def silent(interface: str) -> str:
    raise OSError("ethtool is not installed")


def bump(root: Path, name: str, counter: str, value: int) -> None:
    (root / "sys/class/infiniband" / name / "ports/1" / counter).write_text(f"{value}\n")


def test_what_rose_in_between(tmp_path: Path) -> None:
    add_line(tmp_path, "mlx5_0", "pci0000:00/0000:01:00.0", "Ethernet", counters=ROCE, interface="ens1")
    add_line(tmp_path, "mlx5_1", "pci0000:00/0000:02:00.0", counters={"counters/port_xmit_wait": 3})
    before = read_all(tmp_path, lambda interface: ETHTOOL)
    assert [line.name for line in before] == ["mlx5_0", "mlx5_1"] and not any(line.problem for line in before)
    assert before[0].values["rx_prio3_pause"] == 7 and "rx_packets" not in before[0].values
    bump(tmp_path, "mlx5_0", "hw_counters/np_ecn_marked_roce_packets", 30)
    bump(tmp_path, "mlx5_0", "hw_counters/roce_adp_retrans", 6)
    bump(tmp_path, "mlx5_0", "counters/port_xmit_data", 2 * 2**28)
    after = read_all(tmp_path, lambda interface: ETHTOOL.replace("rx_prio3_pause: 7", "rx_prio3_pause: 9"))
    assert difference_lines(before, after) == [
        "network line mlx5_0 (1.00 GiB sent, 0.00 GiB received): pause: rx_prio3_pause +2; "
        "ECN: np_ecn_marked_roce_packets +20; retransmitted: roce_adp_retrans +1",
        "network lines without pause, ECN marks, retransmissions or drops: mlx5_1",
    ]


def test_what_is_not_readable_says_why(tmp_path: Path) -> None:
    add_line(tmp_path, "mlx5_0", "pci0000:00/0000:01:00.0", "Ethernet", counters=ROCE, interface="ens1")
    add_line(tmp_path, "mlx5_1", "pci0000:00/0000:02:00.0")
    add_line(tmp_path, "mlx5_2", "pci0000:00/0000:03:00.0", counters={"counters/port_xmit_wait": 3})
    bad = tmp_path / "sys/class/infiniband/mlx5_2/ports/1/counters/port_xmit_wait"
    bad.write_text("N/A (no PMA)")
    before = read_all(tmp_path, silent)
    lines = difference_lines(before, read_all(tmp_path, silent))
    assert lines[0] == "network line mlx5_0: nothing else rose; not readable: pause: ethtool is not installed"
    assert lines[1] == (
        "network line mlx5_1: counters not readable: sys/class/infiniband/mlx5_1/ports/1 shows no counters"
    )
    assert "mlx5_2: counters not readable: counters/port_xmit_wait: " in lines[2] and len(lines) == 3
    assert read_all(tmp_path / "nowhere") == []


def test_lines_come_and_go_and_counters_start_anew() -> None:
    before = [LineCounters("gone", {"np_cnp_sent": 1}), LineCounters("same", {"np_cnp_sent": 9, "out_of_sequence": 1})]
    after = [LineCounters("same", {"np_cnp_sent": 2, "out_of_sequence": 1}), LineCounters("new", {"np_cnp_sent": 1})]
    assert difference_lines(before, after) == [
        "network line new: counters not readable: it was not there before the run",
        "network lines without pause, ECN marks, retransmissions or drops: same",
        "network line gone: gone since the run began",
    ]


def test_every_counter_has_a_kind() -> None:
    for name in ("rx_prio3_pause", "tx_global_pause_duration", "rx_pause_ctrl_phy"):
        assert counters.kind(name) == "pause" and counters._ETHTOOL.findall(f"  {name}: 5") == [(name, "5")]
    assert counters.kind("rx_discards_phy") == "dropped" and counters.kind("port_xmit_data") == ""


def test_each_machine_tells_of_its_own_lines_once() -> None:
    readings = [[LineCounters("mlx5_0", {"np_cnp_sent": 1})], [LineCounters("mlx5_0", {"np_cnp_sent": 4})]]
    watch = NetworkWatch(lambda: readings.pop(0), {"LOCAL_RANK": "0"})
    assert watch.lines() == [], "nothing was read before"
    watch.start()
    assert watch.lines() == ["network line mlx5_0: ECN: np_cnp_sent +3"]
    other = NetworkWatch(lambda: readings.pop(0), {"LOCAL_RANK": "1"})
    other.start()
    assert other.lines() == []


def test_without_lines_only_several_machines_are_told() -> None:
    for world, said in (("8", 0), ("16", 1)):
        watch = NetworkWatch(list, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": world})
        watch.start()
        assert len(watch.lines()) == said


def test_a_card_that_does_not_answer_is_not_waited_for() -> None:
    watch = NetworkWatch(lambda: time.sleep(30) or [], {}, limit_s=0.1)
    watch.start()
    assert watch.lines() == ["network counters not readable: no answer within 0.1 s"]
