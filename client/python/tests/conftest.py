"""What the tests share: a cluster, and members of one group in threads of this process."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

import longhaul as lh
from longhaul.testing import LocalCluster, Peer

T = TypeVar("T")
_runs = itertools.count()


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"did not happen in {seconds} s"
        time.sleep(0.02)


def wait_for_open_ops(peers: list[Peer], count: int = 1) -> None:
    """Until each of the peers has that many ops in flight: what happens next hits them."""
    for peer in peers:
        wait_until(lambda peer=peer: peer.metric("longhaul_peerd_ops_open") >= count)  # type: ignore[misc]


class Members:
    """Members of one group, one through each of some peers, driven by threads."""

    def __init__(self, sockets: list[str], timeout: float = 60) -> None:
        self.run = f"test-{next(_runs)}"
        self._pool = ThreadPoolExecutor(max_workers=8)
        self.comms: list[lh.Comm] = []
        for socket in sockets:
            self.add(socket, timeout)

    def add(self, socket: str, timeout: float = 60) -> None:
        """One more member; the others take it in at step boundaries."""
        joining = self._pool.submit(lh.join, self.run, peerd=socket, timeout=timeout)
        size = len(self.comms) + 1

        def admit(comm: lh.Comm) -> None:
            while comm.world_size < size:
                comm.begin_step(timeout)

        self.all(admit)
        self.comms.append(joining.result(timeout))
        # Where the others are now: behind the boundary that admitted it.
        self.comms[-1].begin_step(timeout)

    def all(self, call: Callable[[lh.Comm], T], timeout: float = 60) -> list[T]:
        """call(comm) at all members at once; what they return, or the first error."""
        started = [self._pool.submit(call, comm) for comm in self.comms]
        return [each.result(timeout) for each in started]

    def close(self) -> None:
        for comm in self.comms:
            try:
                comm.leave(timeout=10)
            except lh.Error:
                pass  # a test may have taken its peer away
        self._pool.shutdown()


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """Three peers for tests that leave them as they are."""
    with LocalCluster(peers=3) as started:
        yield started


@pytest.fixture
def pair(cluster: LocalCluster) -> Iterator[Members]:
    members = Members([cluster.socket(0), cluster.socket(1)])
    yield members
    members.close()


@pytest.fixture
def three(cluster: LocalCluster) -> Iterator[Members]:
    members = Members([cluster.socket(i) for i in range(3)])
    yield members
    members.close()
