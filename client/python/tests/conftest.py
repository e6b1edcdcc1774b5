"""What the tests share: a cluster, and members of one group in threads of this process."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, TypeVar

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
    """Waits until each peer has `count` ops in flight or more. What the test does next hits these ops."""
    for peer in peers:
        wait_until(lambda peer=peer: peer.metric("longhaul_peerd_ops_open") >= count)  # type: ignore[misc]


class Gated:
    """A communicator whose call number `at` of one method does not start before `gate` is set."""

    def __init__(self, comm: lh.Comm, method: str, at: int, gate: threading.Event) -> None:
        self._comm = comm
        self._method = method
        self._at = at
        self._gate = gate
        self.started = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._comm, name)
        return self._call if name == self._method else found

    def _call(self, *arguments: Any, **options: Any) -> Any:
        if self.started == self._at:
            assert self._gate.wait(60)
        self.started += 1
        return getattr(self._comm, self._method)(*arguments, **options)


class Members:
    """Members of one group, one for each socket. Threads of a pool make their calls."""

    def __init__(self, sockets: list[str], timeout: float = 60) -> None:
        self.run = f"test-{next(_runs)}"
        self._pool = ThreadPoolExecutor(max_workers=8)
        self.comms: list[lh.Comm] = []
        for socket in sockets:
            self.add(socket, timeout)

    def add(self, socket: str, timeout: float = 60) -> None:
        """Adds a member. The members that are there pass step boundaries until it is admitted."""
        joining = self._pool.submit(lh.join, self.run, peerd=socket, timeout=timeout)
        size = len(self.comms) + 1

        def admit(comm: lh.Comm) -> None:
            while comm.world_size < size:
                comm.begin_step(timeout)

        self.all(admit)
        self.comms.append(joining.result(timeout))
        # The new member passes the boundary that admitted it, as the others have done.
        self.comms[-1].begin_step(timeout)

    def all(self, call: Callable[[lh.Comm], T], timeout: float = 60) -> list[T]:
        """Runs call(comm) for all members at once. Returns their results, or raises the first error."""
        started = [self._pool.submit(call, comm) for comm in self.comms]
        ended, late = wait(started, timeout, FIRST_EXCEPTION)
        for each in ended:
            each.result()  # the error of one, for which the others may wait
        assert not late, f"{len(late)} of {len(started)} members go on after {timeout} s"
        return [each.result() for each in started]

    def close(self) -> None:
        for comm in self.comms:
            try:
                comm.leave(timeout=10)
            except lh.Error:
                pass  # the test may have killed its peer
        self._pool.shutdown()


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """Three peers, for tests that neither stop a peer nor change it."""
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
