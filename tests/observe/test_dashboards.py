"""A live Prometheus scrapes a cluster under churn: each panel has data, alerts fire in staged faults and clear.

The default run is short: some alerts, on loopback. `pytest -m churn` (tools/check churn) stages all of them over five
minutes, on hosts in network namespaces. LONGHAUL_SCREENSHOTS=DIR with it keeps pictures of panels.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from live import Prometheus, until

from longhaul.testing import LocalCluster, start_tethered

CHURN = pathlib.Path(__file__).with_name("churn.py")
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
    cluster = stack.enter_context(LocalCluster(peers=4, coordinator_flags=flags))
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

    # A trainer freezes: all wait for it.
    trainers[1].send_signal(signal.SIGSTOP)
    prometheus.fires("LonghaulTrainingStalled")
    trainers[1].send_signal(signal.SIGCONT)
    prometheus.clears("LonghaulTrainingStalled")

    # The coordinator freezes.
    os.kill(cluster.coordinator_pid, signal.SIGSTOP)
    try:
        prometheus.fires("LonghaulCoordinatorUnreachable")
    finally:
        os.kill(cluster.coordinator_pid, signal.SIGCONT)
    prometheus.clears("LonghaulCoordinatorUnreachable")

    # No link was lost without a death, and nothing measured a better ring.
    without = {"repair|ring"}
    empty = prometheus.empty()
    unexplained = [what for what, expr in empty.items() if not any(reason in expr for reason in without)]
    assert not unexplained, "no data:\n" + "\n".join(unexplained)
    prometheus.check_rules()
