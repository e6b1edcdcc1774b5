"""Tests of faults that hang or corrupt other systems, with real processes on loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from trainers import HELD, assemble, check, kill_at_many_points, post, release, trainers_of

from longhaul.testing import LocalCluster, find_binary

SEED = int(os.environ.get("LONGHAUL_SEED", "1"))
COUNT = 300_000


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def sockets(cluster: LocalCluster, peers: list[int]) -> list[str]:
    return [cluster.socket(peer) for peer in peers]


@pytest.mark.full
def test_forty_ops_in_flight_and_a_death_none_is_reported_done_that_was_not(stack: ExitStack) -> None:
    """In PCCL 29 to 32 of 40 ops of an all-reduce-multiple-with-retry were never done, but reported as done."""
    cluster = stack.enter_context(LocalCluster(peers=2))
    for _ in kill_at_many_points(
        cluster, trainers_of(stack, 2), "forty", ops=40, count=100_000, points=5, seed=SEED, kill_trainer=False
    ):
        pass  # kill_at_many_points() checks them


@pytest.mark.full
def test_a_death_in_one_group_neither_aborts_nor_delays_the_other(stack: ExitStack) -> None:
    """In PCCL a death in one peer group deadlocks the other."""
    cluster = stack.enter_context(LocalCluster(peers=5))
    zero = trainers_of(stack, 3)
    one = trainers_of(stack, 3)
    # Both groups have members at hosts 0 and 1. Host 2 has only a member of group 0, and host 3 only one of group 1.
    assemble(zero, sockets(cluster, [0, 1, 2]), "groups", group=0)
    assemble(one, sockets(cluster, [0, 1, 3]), "groups", group=1)
    # Both groups have ops in flight when host 2 dies.
    post(zero, 16, COUNT, holder=zero[1])
    post(one, 16, COUNT, holder=one[0])
    cluster.kill_peer(2)
    release(one[0])
    for answer in check(one, 16 + HELD, [0, 1, 2]):
        assert all(op["retries"] == 0 for op in answer)
    release(zero[1])
    for answer in check(zero[:2], 16 + HELD, [0, 1]):
        assert all(op["participants"] == [0, 1] for op in answer[16:])
    for trainer in one:
        trainer.start("begin_step")
    for trainer in one:
        assert trainer.finish().get("size") == 3


@pytest.mark.parametrize("phase", ["idle", "op", "boundary"])
def test_a_frozen_peer_is_left_behind_and_told_so_when_it_wakes(stack: ExitStack, phase: str) -> None:
    """In PCCL a frozen peer hangs all others for ever."""
    cluster = stack.enter_context(LocalCluster(peers=3))
    trainers = trainers_of(stack, 3)
    assemble(trainers, sockets(cluster, [0, 1, 2]), "frozen")
    post(trainers, 2, COUNT)
    check(trainers, 2, [0, 1, 2])
    frozen = cluster.peers[2]
    ops = 8
    if phase == "idle":
        os.kill(frozen.pid, signal.SIGSTOP)
        post(trainers, ops, COUNT)
    elif phase == "op":
        post(trainers, ops, COUNT, holder=trainers[0])
        ops += HELD
        os.kill(frozen.pid, signal.SIGSTOP)
        release(trainers[0])
    else:
        for trainer in trainers:
            trainer.start("begin_step")
        os.kill(frozen.pid, signal.SIGSTOP)
        for trainer in trainers[:2]:
            assert "error" not in trainer.finish()
        post(trainers[:2], ops, COUNT)
    check(trainers[:2], ops, [0, 1])
    os.kill(frozen.pid, signal.SIGCONT)
    answer = trainers[2].finish()
    # The frozen member's calls end: with Evicted, or, if the freeze came after the outcome, like those of the others.
    for op in answer.get("ops", []):
        assert op.get("error") in (None, "Evicted"), op
        assert "error" not in op or op["intact"], op
    if phase == "boundary":
        assert "size" in answer or answer["error"] == "Evicted", answer
    # The frozen member can come back.
    trainers[2].do("forget")
    trainers[2].start("join", socket=cluster.socket(2), run="frozen", timeout=60)
    for trainer in trainers[:2]:
        trainer.start("begin_step_until", size=3)
    for trainer in trainers:
        assert "error" not in trainer.finish()


def why(cluster: LocalCluster) -> str:
    command = [str(find_binary("lhctl")), f"--coordinator={cluster.admin}", "why"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_a_boundary_that_meets_an_op_is_a_wait_that_lhctl_names(stack: ExitStack) -> None:
    """One member waits at a boundary and the other one in an op. Neither can go on, and `lhctl why` says why."""
    cluster = stack.enter_context(LocalCluster(peers=2))
    trainers = trainers_of(stack, 2)
    assemble(trainers, sockets(cluster, [0, 1]), "mixed")
    members = [trainer.do("world") for trainer in trainers]
    assert members[0]["members"] == members[1]["members"]
    ids = [trainer.do("member")["member"] for trainer in trainers]
    trainers[0].start("begin_step")
    trainers[1].start("all_reduce", count=1000, timeout=120)
    deadline = time.monotonic() + 60
    while True:
        text = why(cluster)
        if f"m{ids[1]}" in text and "m%d" % ids[0] in text:
            break
        assert time.monotonic() < deadline, f"lhctl why does not name who waits for whom: {text}"
        time.sleep(0.1)
    # Either missing call would help. Here the member in the op ends, and the one at the boundary goes on alone.
    trainers[1].kill()
    answer = trainers[0].finish()
    assert answer.get("size") == 1, answer
