"""Tests of lhctl beside a group that trains: doctor, links and top."""

from __future__ import annotations

import json
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from test_io import REFUSING

import longhaul as lh
from longhaul.testing import LocalCluster, find_binary

PEERS = 3
COUNT = 1 << 20
PATIENCE_S = 120


class Group:
    """Members at all peers of a cluster, whose trainers make ops until the block ends."""

    def __init__(self) -> None:
        # Peers measure a link when its traffic keeps it busy, or by a probe each second.
        self.cluster = LocalCluster(peers=PEERS, peerd_flags=["--probe-interval-s=1"])
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(PEERS)
        self._trainers = [self._pool.submit(self._train, number) for number in range(PEERS)]

    def _train(self, number: int) -> None:
        comm = lh.join("demo", peerd=self.cluster.socket(number), timeout=PATIENCE_S)
        # All members see at the same boundary that all are there.
        while comm.begin_step().world_size < PEERS:
            pass
        tensor = comm.empty(COUNT)
        # The first trainer tells the others in an op when to stop, so that no op lacks a member.
        while True:
            tensor[:] = 1 if number == 0 and self._stop.is_set() else 0
            comm.all_reduce(tensor, timeout=PATIENCE_S)
            if tensor[0] > 0:
                break
        comm.leave()

    def end(self) -> None:
        self._stop.set()
        for trainer in self._trainers:
            trainer.result(PATIENCE_S)
        self._pool.shutdown()
        self.cluster.stop()

    def lhctl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(find_binary("lhctl")), f"--coordinator={self.cluster.admin}", *arguments],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    def json(self, *arguments: str) -> dict[str, Any]:
        result = self.lhctl(*arguments, "--json")
        assert result.returncode == 0, result.stderr
        answer: dict[str, Any] = json.loads(result.stdout)
        return answer


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    started = Group()
    try:
        until = time.monotonic() + PATIENCE_S
        while sum(run["members"] for run in started.json("runs")["runs"]) < PEERS:
            assert time.monotonic() < until, "the group was not formed"
        yield started
    finally:
        started.end()


def diagnose(result: subprocess.CompletedProcess[str]) -> dict[str, dict[str, str]]:
    report = json.loads(result.stdout)
    assert result.returncode == (1 if report["wrong"] else 0), result.stdout
    return {check["check"]: check for check in report["checks"]}


def test_doctor_looks_at_the_peerd_of_this_host(group: Group) -> None:
    peer = group.cluster.peers[1]
    found = diagnose(group.lhctl("doctor", "--json", f"--pid={peer.pid}"))
    for check in ("peerd", "data port", "coordinator", "admin", "members", "reached by", "timeouts"):
        assert found[check]["verdict"] == "ok", found[check]
    assert f"process {peer.pid}" in found["peerd"]["seen"]
    assert peer.listen in found["data port"]["seen"]
    assert group.cluster.coordinator in found["coordinator"]["seen"]
    assert "2 of 2 data ports of other members" in found["members"]["seen"]
    assert "demo/0 with 2" in found["reached by"]["seen"]
    assert "lo has" in found["mtu"]["seen"]
    assert f"process {peer.pid}" in found["nofile"]["seen"]


def test_doctor_names_what_refuses_io_uring(group: Group, tmp_path: pathlib.Path) -> None:
    # lhctl runs under a seccomp filter, as peerd would in a container. peerd itself is not under it.
    program = tmp_path / "lhctl"
    program.write_text(REFUSING.format(python=sys.executable, errno=1, number=425, real=str(find_binary("lhctl"))))
    program.chmod(0o755)
    result = subprocess.run([str(program), "doctor", "--json", "--pid=0"], capture_output=True, text=True)
    found = diagnose(result)["io_uring"]
    assert found["verdict"] == "advice"
    assert "a seccomp filter refuses io_uring" in found["seen"]
    assert "deploy/docker/seccomp-peerd.json" in found["do"]


def test_doctor_finds_a_peerd_that_hangs_and_one_without_a_coordinator(group: Group) -> None:
    peer = group.cluster.peers[group.cluster.add_peer(["--coordinator=127.0.0.1:1"])]
    found = diagnose(group.lhctl("doctor", "--json", f"--pid={peer.pid}"))
    assert found["peerd"]["verdict"] == "wrong"
    assert "no coordinator serves this peer" in found["peerd"]["seen"]
    assert found["coordinator"]["verdict"] == "wrong"
    assert "127.0.0.1:1: Connection refused" in found["coordinator"]["seen"]

    peer.process.send_signal(signal.SIGSTOP)
    found = diagnose(group.lhctl("doctor", "--json", f"--pid={peer.pid}"))
    assert found["peerd"]["verdict"] == "wrong"
    assert "does not answer" in found["peerd"]["seen"]
    peer.process.kill()
    peer.process.wait()

    result = group.lhctl("doctor", f"--pid={peer.pid}")
    assert (result.returncode, result.stdout) == (2, "")
    assert f"--pid={peer.pid}: no such process" in result.stderr


def test_links_are_shown_once_they_are_measured(group: Group) -> None:
    until = time.monotonic() + PATIENCE_S
    while True:
        links = group.json("links", "demo")["groups"][0]
        rated = [link for link in links["links"] if link["link"]["bytes_per_second"] != "0"]
        if len(rated) >= 1:
            break
        assert time.monotonic() < until, links
    peers = [peer["peer"] for peer in links["peers"]]
    assert len(peers) == PEERS
    for link in links["links"]:
        assert link["from"] in peers and link["to"] in peers and link["from"] != link["to"]
    assert links["blocked"] == []

    lines = group.lhctl("links").stdout.splitlines()
    assert lines[0].startswith("demo/0, epoch "), lines
    assert lines[2].split()[:3] == ["MIB/S", "TO", "HOST"]
    assert lines[2].split()[3:] == peers
    for number, line in enumerate(lines[3:6]):
        cells = line.split()
        assert cells[0] == peers[number] and cells[2 + number] == "-", line
    assert group.lhctl("links", "nowhere").returncode == 1


def test_top_shows_what_moves(group: Group) -> None:
    until = time.monotonic() + PATIENCE_S
    while True:
        result = group.lhctl("top", "demo", "--once")
        assert result.returncode == 0, result.stderr
        assert "\x1b" not in result.stdout
        lines = result.stdout.splitlines()
        assert lines[0].startswith("coordinator "), lines
        titles, row = lines[2].split(), lines[3].split()
        assert titles[:7] == ["GROUP", "EPOCH", "MEMBERS", "PENDING", "REVISION", "OPEN", "OPS/S"]
        assert row[0] == "demo/0" and row[2:4] == [str(PEERS), "0"], row
        peers = [line.split() for line in lines[6 : 6 + PEERS]]
        assert [peer[0] for peer in peers] == ["demo/0"] * PEERS
        assert all(peer[3] == "attached" for peer in peers), lines
        # Ops may be slower than one in a second.
        if float(row[6]) > 0 and all(float(peer[5]) > 0 for peer in peers):
            break
        assert time.monotonic() < until, lines
    assert all(line.endswith("working") for line in lines[6 : 6 + PEERS]), lines
    assert group.lhctl("top", "nowhere", "--once").returncode == 1
