"""A live Prometheus scrapes a cluster under churn: each panel has data, alerts fire in staged faults and clear.

The default run is short: some alerts, on loopback. `pytest -m churn` (tools/check churn) stages all of them over five
minutes, on hosts in network namespaces. LONGHAUL_SCREENSHOTS=DIR with it keeps pictures of panels.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from live import PATIENCE_S, Prometheus, draw, until
from test_prometheus import alerts
from testbed import COORDINATOR, Wan, uniform, why_not
from world import HTTP_PORT, Host, Process

from longhaul.testing import LocalCluster, start_tethered

pytestmark = pytest.mark.alone

CHURN = pathlib.Path(__file__).with_name("churn.py")
PICTURES = os.environ.get("LONGHAUL_SCREENSHOTS")
MINUTES = 5
FAKETIME = next(pathlib.Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed; it is in Debian's package prometheus"
)


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as opened:
        yield opened


@needs_prometheus
def test_every_panel_has_data_while_members_join_die_and_freeze(
    stack: contextlib.ExitStack, tmp_path: pathlib.Path
) -> None:
    flags = ["--detect-ms=1000", f"--store=sqlite:{tmp_path}/coordinator.db"]
    probing = ["--probe-interval-s=1"]  # the ops may be too small to measure the links
    cluster = stack.enter_context(LocalCluster(peers=4, coordinator_flags=flags, peerd_flags=probing, log_dir=tmp_path))
    prometheus = Prometheus(tmp_path)
    stack.callback(prometheus.close)

    def train(peer: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(CHURN), cluster.socket(peer), "demo", "8", "--compute-ms=20"]
        trainer = start_tethered(command, stdin=subprocess.DEVNULL)
        stack.callback(trainer.wait)
        stack.callback(trainer.kill)
        return trainer

    def members(count: int) -> None:
        query = "sum (longhaul_coordinator_members)"
        until(lambda: prometheus.value(query) == count, f"{count} members")

    assert cluster.http is not None
    peers = {peer: cluster.peers[peer].http for peer in range(4)}
    prometheus.scrape("longhaul-coordinator", [cluster.http])
    prometheus.scrape("longhaul-peerd", list(peers.values()))
    trainers = {peer: train(peer) for peer in range(4)}
    members(4)
    until(lambda: (prometheus.value("sum (longhaul_coordinator_votes_total)") or 0) > 20, "they train")

    # A member leaves; later another one comes for it.
    trainers[0].send_signal(signal.SIGTERM)
    assert trainers[0].wait(60) == 0
    members(3)

    # A host dies, and another one takes its place.
    cluster.kill_peer(3)
    members(2)
    prometheus.fires("LonghaulMemberMissing", "LonghaulPeerUnreachable")
    new = cluster.add_peer()
    peers[new] = cluster.peers[new].http
    del peers[3]
    prometheus.scrape("longhaul-peerd", list(peers.values()))
    trainers[new], trainers[0] = train(new), train(0)
    members(4)
    prometheus.clears("LonghaulMemberMissing", "LonghaulPeerUnreachable")

    # A trainer freezes: all wait for it, at the boundary or in an op.
    stalled = {"LonghaulTrainingStalled", "LonghaulOpStalled"}
    trainers[1].send_signal(signal.SIGSTOP)
    until(lambda: bool(stalled & prometheus.firing()), f"one of {stalled} fires")
    trainers[1].send_signal(signal.SIGCONT)
    prometheus.clears(*stalled)

    # The coordinator freezes.
    os.kill(cluster.coordinator_pid, signal.SIGSTOP)
    try:
        prometheus.fires("LonghaulCoordinatorUnreachable")
    finally:
        os.kill(cluster.coordinator_pid, signal.SIGCONT)
    try:
        prometheus.clears("LonghaulCoordinatorUnreachable")
    except AssertionError:
        print((tmp_path / "coordinator.log").read_text()[-4000:])
        raise

    # No link was lost without a death, and nothing measured a better ring.
    without = {"repair|ring"}

    def unexplained() -> list[str]:
        return [what for what, expr in prometheus.empty().items() if not any(reason in expr for reason in without)]

    until(lambda: not unexplained(), lambda: "data for\n" + "\n".join(unexplained()))
    prometheus.check_rules()


class Slow:
    """Stops one thread of a process again and again, as a slow disk would, until the block ends."""

    SEIZE, INTERRUPT, CONTINUE, DETACH = 0x4206, 0x4207, 7, 17
    ALL_CHILDREN = 0x40000000  # __WALL
    STOPPED_S, RUNNING_S = 0.5, 0.05

    def __init__(self, pid: int, thread: str) -> None:
        tasks = pathlib.Path(f"/proc/{pid}/task").iterdir()
        (self.tid,) = (int(task.name) for task in tasks if (task / "comm").read_text().strip() == thread)
        self.ended = threading.Event()
        self.problem = ""
        # Only the thread that began may trace.
        self.thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()
        assert not self.problem, self.problem

    def _run(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)

        def trace(request: int) -> None:
            if libc.ptrace(request, self.tid, None, None) != 0:
                raise OSError(ctypes.get_errno(), f"ptrace {request:#x}")

        try:
            trace(self.SEIZE)
            while not self.ended.wait(self.RUNNING_S):
                trace(self.INTERRUPT)
                os.waitpid(self.tid, self.ALL_CHILDREN)
                self.ended.wait(self.STOPPED_S)
                trace(self.CONTINUE)
            trace(self.INTERRUPT)
            os.waitpid(self.tid, self.ALL_CHILDREN)
            trace(self.DETACH)
        except OSError as problem:
            self.problem = f"the thread cannot be slowed down: {problem}"


class Site:
    """Hosts h0, h1 and h2 train; h3 has low limits of memory; the clock of h4 can be set. h3 and h4 do not train."""

    TRAINING = 3
    STEP_AGE = 'max (longhaul_coordinator_group_step_age_seconds{run="demo"})'

    def __init__(self, stack: contextlib.ExitStack, logs: pathlib.Path) -> None:
        self.wan = stack.enter_context(
            Wan(logs, uniform(5, delay="5ms", rate="100mbit"), detect_ms=1000, peerd_flags=["--probe-interval-s=1"])
        )
        self.wan.start_coordinator()
        self.clock = logs / "clock"
        self.set_clock(0)
        for host in self.wan.hosts:
            self.start_peerd(host)
        self.prometheus = Prometheus(
            logs,
            inside=lambda: self.wan.inside(COORDINATOR),
            command=[shutil.which("ip") or "ip", "netns", "exec", self.wan.coordinator_namespace],
        )
        stack.callback(self.prometheus.close)
        self.prometheus.scrape("longhaul-coordinator", [f"{self.wan.address(COORDINATOR)}:29601"])
        self.prometheus.scrape("longhaul-peerd", [f"{host.address}:{HTTP_PORT}" for host in self.wan.hosts])
        self.trainers: dict[Host, Process] = {}
        for host in self.wan.hosts[: self.TRAINING]:
            self.train(host)
        self.members(self.TRAINING)

    def start_peerd(self, host: Host) -> None:
        if host.number == 3:
            # A little more than what the trainer of hungry() takes.
            host.start_peerd(["--scratch-limit=4200000", "--arena-limit=22000000"])
        elif host.number == 4:
            faked = {
                "LD_PRELOAD": str(FAKETIME),
                "FAKETIME_TIMESTAMP_FILE": str(self.clock),
                "FAKETIME_NO_CACHE": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            }
            with pytest.MonkeyPatch.context() as patch:
                for name, value in faked.items():
                    patch.setenv(name, value)
                host.start_peerd()
        else:
            host.start_peerd()

    def set_clock(self, ahead_s: int) -> None:
        new = self.clock.with_suffix(".new")
        new.write_text(f"{ahead_s:+d}s\n")
        new.replace(self.clock)

    def start(self, host: Host, run: str, *arguments: str) -> Process:
        log = self.wan.logs / f"{host.name}.{run}.log"
        return host.start([sys.executable, str(CHURN), host.socket, run, *arguments], log)

    def train(self, host: Host) -> None:
        self.trainers[host] = self.start(host, "demo", "2", "--op-megabytes=0.2", "--compute-ms=20", "--again")

    def hungry(self, host: Host) -> Process:
        return self.start(host, "hungry", "8", "--op-megabytes=4", "--algorithm=ring")

    def freeze(self, host: Host) -> None:
        """Stops the trainer of a host in its step, so that the others wait for it in an op."""

        def stopped_in_step() -> bool:
            self.trainers[host].signal(signal.SIGSTOP)
            until(lambda: (self.prometheus.value(self.STEP_AGE) or 0) > 2, "no step passes")
            if (self.prometheus.value("sum (longhaul_peerd_ops_open)") or 0) > 0:
                return True
            # It stands at the boundary.
            self.trainers[host].signal(signal.SIGCONT)
            until(lambda: (self.prometheus.value(self.STEP_AGE) or 0) < 2, "steps pass again")
            return False

        until(stopped_in_step, f"the trainer of {host.name} stands still in its step")

    def members(self, count: int) -> None:
        """Waits until the run has so many members."""
        query = 'sum (longhaul_coordinator_group_members{run="demo"})'
        until(lambda: self.prometheus.value(query) == count, f"the run has {count} members")

    def evict(self, host: Host) -> None:
        """Evicts the trainer of a host, once it is a member."""

        def evicted() -> bool:
            peer = host.peer_id()
            groups = self.wan.status()["groups"]
            found = [m["member"] for g in groups if g["run"] == "demo" for m in g["members"] if m["peer"] == peer]
            if not found:
                return False
            self.wan.lhctl("evict", f"demo/0/{found[0]}")
            return True

        def tried() -> bool:
            with contextlib.suppress(LookupError):
                return evicted()
            return False

        until(tried, f"the trainer of {host.name} is a member again")


@needs_prometheus
@pytest.mark.churn
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "never")
@pytest.mark.skipif(FAKETIME is None, reason="libfaketime is not installed; it is in Debian's package faketime")
def test_each_alert_fires_in_a_staged_fault_and_clears(stack: contextlib.ExitStack, tmp_path: pathlib.Path) -> None:
    site = Site(stack, tmp_path)
    wan, prometheus = site.wan, site.prometheus
    h0, h1, h2, h3, _ = wan.hosts
    seen: set[str] = set()

    def fires(*names: str) -> None:
        prometheus.fires(*names)
        seen.update(names)

    # A trainer stands still, and a clock is wrong.
    site.set_clock(60)
    site.freeze(h2)
    fires("LonghaulOpStalled", "LonghaulTrainingStalled", "LonghaulClockSkew")
    site.trainers[h2].signal(signal.SIGCONT)
    site.set_clock(0)
    prometheus.clears("LonghaulOpStalled", "LonghaulTrainingStalled", "LonghaulClockSkew")

    # A host has too little memory, and packets get lost.
    hungry = [site.hungry(host) for host in (h0, h3)]
    fires("LonghaulArenaNearLimit", "LonghaulScratchNearLimit")
    for trainer in hungry:
        trainer.signal(signal.SIGTERM)
    for other in (h0, h2):
        wan.link("h1", other.name, loss="8%")
    fires("LonghaulLinkDegraded")
    for other in (h0, h2):
        wan.link("h1", other.name, loss="0%")
    prometheus.clears("LonghaulArenaNearLimit", "LonghaulScratchNearLimit", "LonghaulLinkDegraded")
    assert [trainer.wait(60) for trainer in hungry] == [0, 0]

    # A host dies, and comes back.
    assert h2.peerd is not None
    h2.peerd.kill()
    fires("LonghaulMemberMissing", "LonghaulPeerUnreachable")
    site.trainers[h2].kill()
    site.start_peerd(h2)
    site.train(h2)
    site.members(site.TRAINING)
    prometheus.clears("LonghaulMemberMissing", "LonghaulPeerUnreachable")

    # Members are removed again and again, until nine removals fall into one window.
    deadline = time.monotonic() + PATIENCE_S
    while "LonghaulRepairLoop" not in prometheus.firing() and time.monotonic() < deadline:
        site.evict(h1)
        site.evict(h2)
    fires("LonghaulRepairLoop")
    site.members(site.TRAINING)
    prometheus.clears("LonghaulRepairLoop")

    # Two hosts lose their path. When it works again, the one that comes back has its straight link.
    wan.down("h1", "h2")
    wan.down("h2", "h1")
    fires("LonghaulPathBlocked")
    wan.up("h1", "h2")
    wan.up("h2", "h1")
    site.trainers[h2].signal(signal.SIGTERM)
    assert site.trainers[h2].wait(60) == 0
    site.train(h2)
    site.members(site.TRAINING)
    prometheus.clears("LonghaulPathBlocked")

    # The coordinator is slow, and then away.
    assert wan.coordinator is not None
    with Slow(wan.coordinator.pid, "lh-loop"):
        fires("LonghaulCoordinatorSlow")
    prometheus.clears("LonghaulCoordinatorSlow")
    wan.coordinator.signal(signal.SIGSTOP)
    fires("LonghaulCoordinatorUnreachable")
    wan.coordinator.signal(signal.SIGCONT)
    prometheus.clears("LonghaulCoordinatorUnreachable")
    # The site has no TLS; its files are staged in tests/e2e/test_tls.py.
    unstaged = {alert["alert"] for alert in alerts()} - seen
    assert unstaged == {"LonghaulTlsFilesRefused"}, "alerts that no fault was staged for"

    # Members come and go until the time is over.
    rng = random.Random(19)
    while time.time() < prometheus.begin + 60 * MINUTES:
        host = rng.choice(wan.hosts[: site.TRAINING])
        how = rng.choice([signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP])
        site.trainers[host].signal(how)
        if how == signal.SIGSTOP:
            until(lambda: (prometheus.value(site.STEP_AGE) or 0) > 2, "the others wait")
            site.trainers[host].signal(signal.SIGCONT)
        else:
            site.members(site.TRAINING - 1)
            site.trainers[host].wait(60)
            site.train(host)
        site.members(site.TRAINING)

    empty = prometheus.empty()
    if PICTURES is not None:
        chosen = {
            "run": ["Members", "Where the time of a step goes", "Goodput", "Waiting for a step"],
            "faults": ["Alerts", "Members removed", "Epochs", "Time of a fault, at the peers"],
            "links": ["Sent", "Sent again by TCP", "Round trips of each peer", "Near a limit"],
        }
        for board, titles in chosen.items():
            draw(prometheus, board, titles, pathlib.Path(PICTURES) / f"dashboard-{board}.png")
    assert not empty, "no data:\n" + "\n".join(empty)
    prometheus.check_rules()
