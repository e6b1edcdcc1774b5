"""Tests of the flight recorder with real processes: files after crashes and faults, `lhctl dump`, `lhctl trace`."""

from __future__ import annotations

import json
import pathlib
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import longhaul as lh
from longhaul.testing import LocalCluster, find_binary

DEADLINE = 60.0
TAGS = [11, 12, 13, 14, 15]


def lhctl(*arguments: str, code: int = 0) -> str:
    done = subprocess.run([str(find_binary("lhctl")), *arguments], capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == code, f"lhctl {arguments}: {done.returncode}\n{done.stdout[-2000:]}{done.stderr}"
    return done.stdout if code == 0 else done.stderr


def wait_for_file(directory: pathlib.Path, pattern: str) -> pathlib.Path:
    deadline = time.monotonic() + DEADLINE
    while not (files := sorted(directory.glob(pattern))):
        assert time.monotonic() < deadline, f"no {pattern} in {sorted(directory.iterdir())}"
        time.sleep(0.05)  # the file comes from another process, which gives no other sign
    return files[0]


def join_all(cluster: LocalCluster, run: str) -> list[lh.Comm]:
    """One member at each peer, all in one epoch."""

    def join(i: int) -> lh.Comm:
        comm = lh.join(run, peerd=cluster.socket(i), timeout=DEADLINE)
        while comm.begin_step().world_size < len(cluster.peers):
            pass
        return comm

    with ThreadPoolExecutor(len(cluster.peers)) as pool:
        return list(pool.map(join, range(len(cluster.peers))))


def reduce_all(comms: list[lh.Comm], tags: list[int], count: int = 4096) -> None:
    """All members make one op for each tag, one after the other."""
    tensors = [comm.empty(count) for comm in comms]
    for tag in tags:
        works = [comm.all_reduce(x, tag=tag, async_op=True) for comm, x in zip(comms, tensors)]
        for work in works:
            assert work.wait(timeout=DEADLINE).world_size == len(comms)


def ops_of(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The slices of ops, by the name of the process, in the order of their times."""
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    ops: dict[str, list[dict[str, Any]]] = {}
    for event in sorted(
        (e for e in trace["traceEvents"] if e.get("cat") == "op" and e["ph"] == "X"), key=lambda e: e["ts"]
    ):
        ops.setdefault(names[event["pid"]], []).append(event)
    return ops


def check_trace(trace: dict[str, Any], peers: int, slack_us: float) -> None:
    """Every op of TAGS is at all peers, in order, and the slices of one op overlap."""
    ops = ops_of(trace)
    assert len(ops) == peers, ops.keys()
    for name, slices in ops.items():
        assert [int(s["args"]["tag"]) for s in slices] == TAGS, name
        assert all(s["args"]["outcome"] == "ok" for s in slices)
        assert all(s["args"]["world_size"] == peers for s in slices)
    for same in zip(*ops.values()):
        begin = max(s["ts"] for s in same)
        end = min(s["ts"] + s["dur"] for s in same)
        assert begin <= end + slack_us, f"tag {same[0]['args']['tag']}: {same}"


@pytest.fixture
def dumps(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "dumps"


@pytest.fixture
def cluster(dumps: pathlib.Path) -> Iterator[LocalCluster]:
    flags = [f"--dump-dir={dumps}"]
    with LocalCluster(peers=3, peerd_flags=flags, coordinator_flags=flags) as started:
        yield started


def test_a_crash_leaves_a_recording(cluster: LocalCluster, dumps: pathlib.Path) -> None:
    comms = join_all(cluster, "crash")
    reduce_all(comms, TAGS)
    for peer in cluster.peers:
        peer.process.send_signal(signal.SIGABRT)
        assert peer.process.wait(DEADLINE) == -signal.SIGABRT
    files = [dumps / f"longhaul-peerd.{peer.pid}.crash.lhrec" for peer in cluster.peers]
    for file, peer in zip(files, cluster.peers):
        assert file.exists(), peer.log.read_text()[-2000:]
        text = lhctl("dump", f"--file={file}")
        assert "SIGABRT" in text
        recording = json.loads(lhctl("dump", f"--file={file}", "--json"))
        assert recording["pid"] == peer.pid
        assert [int(op["tag"]) for op in recording["ops"]] == TAGS
        assert all(op["outcome"] == "ok" and op["bytes"] == 4096 * 4 for op in recording["ops"])
        assert "epoch" in {event["kind"] for event in recording["events"]}
    # All files together are one timeline: here all clocks are one.
    trace = json.loads(lhctl("trace", "crash/0", "--file=" + ",".join(map(str, files))))
    check_trace(trace, peers=3, slack_us=0)
    assert lhctl("trace", "another", "--file=" + str(files[0])).count('"X"') == 0
    assert "not a recording" in lhctl("dump", f"--file={cluster.peers[0].log}", code=1)
    assert "cannot read" in lhctl("dump", "--file=/no/such/file", code=1)


def test_a_fault_leaves_recordings_of_the_survivors(cluster: LocalCluster, dumps: pathlib.Path) -> None:
    comms = join_all(cluster, "fault")
    reduce_all(comms, TAGS)
    cluster.kill_peer(2)
    reduce_all(comms[:2], [21])
    for i in (0, 1):
        file = wait_for_file(dumps, f"longhaul-peerd.{cluster.peers[i].pid}.fault-1.lhrec")
        recording = json.loads(lhctl("dump", f"--file={file}", "--json"))
        assert recording["cause"].startswith("fault over")
        assert "fault" in {event["kind"] for event in recording["events"]}
        assert any("freezes ops" in event["text"] for event in recording["events"])
    file = wait_for_file(dumps, f"longhaul-coordinator.{cluster.coordinator_pid}.fault-1.lhrec")
    recording = json.loads(lhctl("dump", f"--file={file}", "--json"))
    assert recording["process"] == "coordinator"
    assert "fault" in {event["kind"] for event in recording["events"]}


def test_dump_and_trace_of_running_processes(cluster: LocalCluster) -> None:
    assert cluster.admin is not None
    comms = join_all(cluster, "live")
    reduce_all(comms, TAGS)
    coordinator = f"--coordinator={cluster.admin}"
    trace = json.loads(lhctl(coordinator, "trace", "live"))
    assert trace["metadata"]["not_answered"] == []
    # All processes are on one host, so the clocks are one, and the bounds have to say no less.
    clocks = trace["metadata"]["clocks"]
    assert len(clocks) == 4
    for clock in clocks:
        assert abs(clock["offset_us"]) <= clock["error_us"], clock
    check_trace(trace, peers=3, slack_us=2 * max(clock["error_us"] for clock in clocks))
    arrows = [event for event in trace["traceEvents"] if event["ph"] == "s"]
    # An arrow is left out where the clocks are not known well enough to draw it forwards.
    assert 0 < len(arrows) <= 2 * len(TAGS)

    names = [clock["process"] for clock in clocks]
    assert names.count("coordinator") == 1
    for name in names:
        peer = [] if name == "coordinator" else [name]
        recording = json.loads(lhctl(coordinator, "dump", *peer, "--json"))
        assert recording["process"] == name
        tags = [int(op["tag"]) for op in recording["ops"]]
        assert tags == (TAGS if peer else [])
        assert recording["events"]
        few = json.loads(lhctl(coordinator, "dump", *peer, "--json", "--last=2"))
        assert [int(op["tag"]) for op in few["ops"]] == tags[-2:]
        assert len(few["events"]) == 2
    assert "no peer p1" in lhctl(coordinator, "dump", "p1", code=1)
    assert "write it as in" in lhctl(coordinator, "dump", "nonsense", code=1)
    assert "lhctl runs" in lhctl(coordinator, "trace", "another", code=1)


def test_a_long_recording_comes_whole(cluster: LocalCluster) -> None:
    comms = join_all(cluster, "long")
    reduce_all(comms, list(range(1, 601)), count=16)
    trace = json.loads(lhctl(f"--coordinator={cluster.admin}", "trace", "long/0"))
    for slices in ops_of(trace).values():
        assert [int(s["args"]["tag"]) for s in slices] == list(range(1, 601))


def test_a_peer_that_hangs_is_named_and_the_rest_is_shown(cluster: LocalCluster) -> None:
    comms = join_all(cluster, "hang")
    reduce_all(comms, TAGS)
    command = [str(find_binary("lhctl")), f"--coordinator={cluster.admin}", "trace", "hang", "--timeout-ms=300"]
    cluster.peers[1].process.send_signal(signal.SIGSTOP)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    finally:
        cluster.peers[1].process.send_signal(signal.SIGCONT)
    assert done.returncode == 1
    assert "no recording of p" in done.stderr
    trace = json.loads(done.stdout)
    assert len(trace["metadata"]["not_answered"]) == 1
    assert len(ops_of(trace)) == 2
