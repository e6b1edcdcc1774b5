"""What a newcomer calls between its join and its loop: a mistake ends the newcomer only."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from conftest import wait_until
from test_run import evict

import longhaul as lh
from longhaul.testing import LocalCluster

Call = Callable[..., Any]
PATIENCE_S = 60


def a_state() -> lh.State:
    return lh.State({"w": np.zeros(10, np.float32)})


# By name: what members that begin together may call between join and the loop.
TOGETHER: dict[str, Call] = {
    "barrier": lambda comm, **options: comm.barrier(**options),
    "barrier with a tag of its own": lambda comm, **options: comm.barrier(tag=9, **options),
    "barrier of a set": lambda comm, **options: comm.barrier(participants=comm.members, **options),
    "all_reduce": lambda comm, **options: comm.all_reduce(np.ones(3, np.float32), **options),
    "all_reduce as in the loop": lambda comm, **options: comm.all_reduce(np.ones(4, np.float32), **options),
    "all_gather": lambda comm, **options: comm.all_gather(np.ones(1), out=np.ones(comm.world_size), **options),
    "reduce_scatter": lambda comm, **options: comm.reduce_scatter(np.ones(comm.world_size), out=np.ones(1), **options),
    "broadcast": lambda comm, **options: comm.broadcast(np.ones(3), **options),
    "agree": lambda comm, **options: comm.agree([], **options),
    "sync_state": lambda comm, **options: comm.sync_state(a_state(), **options),
}
# What a newcomer may get wrong as well.
ALONE: dict[str, Call] = {
    "send": lambda comm, **options: comm.send(np.ones(3), to=0, **options),
    "recv": lambda comm, **options: comm.recv(np.ones(3), source=0, **options),
    "what the library refuses": lambda comm, **options: comm.all_reduce(
        np.ones(4, np.float32), order="rank", algorithm="ring", **options
    ),
    "what the package refuses": lambda comm, **options: comm.all_reduce(
        np.ones(4, np.float32), algorithm="none", **options
    ),
}
# These have no async_op.
WAITS = {"agree", "sync_state"}


class Trainers:
    """Two members that begin together with a call, and are then in their loop."""

    def __init__(self, cluster: LocalCluster, run: str, loop: str, first: Call | None, asynchronous: bool) -> None:
        self.loop = loop
        self.steps = [0, 0]
        self._goes_on = threading.Event()  # not set: the second one stays in its block
        self._goes_on.set()
        self._held = threading.Event()
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(2)

        def train(number: int) -> None:
            with lh.join(run, peerd=cluster.socket(number), members=2) as comm:
                if first is not None:
                    first(comm, timeout=PATIENCE_S)
                    if asynchronous:
                        first(comm, async_op=True).wait(PATIENCE_S)
                state = a_state()
                while not self._stop.is_set():
                    one_step(comm, self.loop, state, lambda: self._block(number))
                    self.steps[number] += 1

        self._training = [self._pool.submit(train, number) for number in (0, 1)]

    def _block(self, number: int) -> None:
        if number == 1 and not self._goes_on.is_set():
            self._held.set()
            assert self._goes_on.wait(PATIENCE_S)

    @contextmanager
    def held(self) -> Iterator[None]:
        """One of them is in a block meanwhile, and the other one waits for it."""
        self._held.clear()
        self._goes_on.clear()
        assert self._held.wait(PATIENCE_S)
        yield
        self._goes_on.set()

    def go_on(self) -> None:
        """Waits until both have made further steps. Raises what ended one of them."""
        before = list(self.steps)
        wait_until(
            lambda: (
                any(each.done() for each in self._training)
                or all(now > then + 2 for now, then in zip(self.steps, before))
            )
        )
        assert not any(each.done() for each in self._training), [each.exception() for each in self._training]

    def end(self) -> None:
        self._stop.set()
        self._goes_on.set()
        self._pool.shutdown()
        for each in self._training:
            each.result()


def one_step(comm: lh.Comm, loop: str, state: lh.State, block: Callable[[], None] = lambda: None) -> None:
    if loop == "step(state)":
        with comm.step(state, timeout=PATIENCE_S):
            block()
            comm.all_reduce(np.ones(4, np.float32), timeout=PATIENCE_S)
    else:
        comm.begin_step(PATIENCE_S)
        block()
        comm.all_reduce(np.ones(4, np.float32), timeout=PATIENCE_S)


@pytest.mark.parametrize("loop", ["step(state)", "begin_step()"])
@pytest.mark.parametrize("name", [*TOGETHER, *ALONE])
def test_a_call_before_its_first_boundary_ends_the_newcomer_only(cluster: LocalCluster, name: str, loop: str) -> None:
    call = {**TOGETHER, **ALONE}[name]
    run = f"newcomer-{[*TOGETHER, *ALONE].index(name)}-{loop[0]}"
    ways: list[dict[str, Any]] = [{"timeout": PATIENCE_S}]
    if name not in WAITS:
        ways.append({"async_op": True})
    trainers = Trainers(cluster, run, loop, TOGETHER.get(name), len(ways) == 2)
    try:
        trainers.go_on()
        for way in ways:
            # It asks for admission while the others are in a block. lh.run() does not try again.
            with ThreadPoolExecutor(1) as pool:
                with trainers.held():
                    train = functools.partial(call, **way)
                    ended = pool.submit(lh.run, train, run, peerd=cluster.socket(2), members=2)
                if name == "what the package refuses":
                    with pytest.raises(lh.InvalidArgument, match="algorithm is 'none'"):
                        ended.result(PATIENCE_S)
                else:
                    with pytest.raises(lh.FailedPrecondition, match=r"no step boundary yet: call step\(\) first"):
                        ended.result(PATIENCE_S)
            trainers.go_on()
        # One that catches the error, and begins with the boundary, is a member like the others.
        with lh.join(run, peerd=cluster.socket(2), timeout=PATIENCE_S) as comm:
            state = a_state()
            with pytest.raises(lh.Error):
                call(comm, **ways[-1])
            for _ in range(3):
                one_step(comm, loop, state)
        trainers.go_on()
    finally:
        trainers.end()


@contextmanager
def beginners(cluster: LocalCluster, run: str, count: int) -> Iterator[Callable[[Callable[[lh.Comm], Any]], list[Any]]]:
    """Members that are admitted together. Gives a function that runs a call at all of them, each in its thread."""
    with ThreadPoolExecutor(count) as pool:
        joining = [pool.submit(lh.join, run, peerd=cluster.socket(i), members=count) for i in range(count)]
        comms = [each.result(PATIENCE_S) for each in joining]
        yield lambda call: [each.result(PATIENCE_S) for each in [pool.submit(call, comm) for comm in comms]]
        for each in [pool.submit(comm.leave, PATIENCE_S) for comm in comms]:
            each.result(PATIENCE_S)


def test_members_that_begin_together_anew_may_call_ops_before_the_loop(cluster: LocalCluster) -> None:
    """Also if the group has had other members, so that its epochs are not the first ones."""
    for _ in range(2):
        with beginners(cluster, "anew", 2) as at_all:
            at_all(lambda comm: comm.barrier(timeout=PATIENCE_S))
            for _ in range(3):
                at_all(lambda comm: one_step(comm, "begin_step()", a_state()))


@pytest.mark.parametrize("alone", [True, False])
def test_a_member_that_lost_its_place_is_a_newcomer_if_others_are_there(cluster: LocalCluster, alone: bool) -> None:
    run = f"lost-{alone:d}"
    entered: list[lh.Comm] = []

    def train(comm: lh.Comm) -> None:
        comm.barrier(timeout=PATIENCE_S)
        entered.append(comm)
        if len(entered) == 1:
            evict(cluster, comm)
            one_step(comm, "begin_step()", a_state())
            one_step(comm, "begin_step()", a_state())

    with ThreadPoolExecutor(2) as pool:
        members = 1 if alone else 2
        training = pool.submit(lh.run, train, run, peerd=cluster.socket(0), members=members, backoff=0.01)
        if alone:
            training.result(PATIENCE_S)
            assert len(entered) == 2
            return
        with lh.join(run, peerd=cluster.socket(1), members=2) as other:
            other.barrier(timeout=PATIENCE_S)
            while not training.done():
                one_step(other, "begin_step()", a_state())
            with pytest.raises(lh.FailedPrecondition, match="no step boundary yet"):
                training.result()
            one_step(other, "begin_step()", a_state())
            assert other.world_size == 1
    assert len(entered) == 1


def of_a_set(comm: lh.Comm) -> None:
    members = comm.members
    if comm.rank < 2:
        comm.barrier(participants=members[:2], timeout=PATIENCE_S)


def to_a_neighbour(comm: lh.Comm) -> None:
    if comm.rank == 0:
        comm.send(np.ones(3), to=1, timeout=PATIENCE_S)
    elif comm.rank == 1:
        comm.recv(np.ones(3), source=0, timeout=PATIENCE_S)


def refused_at_one(comm: lh.Comm) -> None:
    with pytest.raises(lh.InvalidArgument):
        comm.all_gather(np.ones(2), out=np.ones(6 if comm.rank else 5), timeout=PATIENCE_S)


@pytest.mark.parametrize("loop", ["step(state)", "begin_step()"])
@pytest.mark.parametrize("first", [of_a_set, to_a_neighbour, refused_at_one])
def test_what_some_members_start_before_the_loop_moves_no_boundary(
    cluster: LocalCluster, first: Callable[[lh.Comm], None], loop: str
) -> None:
    with beginners(cluster, f"some-{first.__name__}-{loop[0]}", 3) as at_all:
        at_all(first)

        def train(comm: lh.Comm) -> None:
            state = a_state()
            for _ in range(3):
                one_step(comm, loop, state)

        at_all(train)
