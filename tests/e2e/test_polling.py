"""Peerd polls while ops are open. A member that is late must not keep the processors of the others busy."""

from __future__ import annotations

import pathlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import longhaul as lh
from longhaul.testing import LocalCluster

# It measures processor time, and a peerd that polls cannot take what others have.
pytestmark = pytest.mark.alone

# How long the late member is late, and how much of it all others together may compute. A peerd that polls all the time
# takes a whole processor, or what it can get of one.
LATE_S = 2.0
BUSY_S = 0.25 * LATE_S
PATIENCE_S = 60


def cpu_seconds(pid: int) -> float:
    tasks = pathlib.Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def test_waiting_for_a_late_member_takes_no_processor_time() -> None:
    ready = threading.Barrier(3)
    late = threading.Event()

    def member(socket: str, is_late: bool) -> float:
        """Returns the processor time that this thread took for the op with the late member."""
        with lh.join("late", peerd=socket, members=2) as comm:
            tensor = np.ones(64, np.float32)
            comm.all_reduce(tensor)  # from now on peerds expect ops
            ready.wait(PATIENCE_S)
            if is_late:
                assert late.wait(PATIENCE_S)
            before = time.thread_time()
            comm.all_reduce(tensor)
            took = time.thread_time() - before
            assert tensor[0] == 4
            ready.wait(PATIENCE_S)
            return took

    with LocalCluster(peers=2) as cluster, ThreadPoolExecutor() as pool:
        members = [pool.submit(member, peer.socket, i == 1) for i, peer in enumerate(cluster.peers)]
        ready.wait(PATIENCE_S)
        before = sum(cpu_seconds(peer.pid) for peer in cluster.peers)
        time.sleep(LATE_S)
        busy = sum(cpu_seconds(peer.pid) for peer in cluster.peers) - before
        late.set()
        ready.wait(PATIENCE_S)
        took = members[0].result()
    assert busy < BUSY_S
    assert took < BUSY_S
