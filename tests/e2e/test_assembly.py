"""Trainers that start together: `lh.join(members=N)` returns at all of them in the first epoch, with N members."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from trainers import Trainer, all_do, trainers_of, until

from longhaul.testing import LocalCluster, find_binary

MEMBERS = 4
SEEDS = 100


@pytest.fixture(scope="module")
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def cluster(stack: ExitStack) -> LocalCluster:
    return stack.enter_context(LocalCluster(peers=MEMBERS))


@pytest.fixture
def trainers() -> Iterator[list[Trainer]]:
    with ExitStack() as stack:
        yield trainers_of(stack, MEMBERS)


def waiting(cluster: LocalCluster, count: int) -> bool:
    """Whether the coordinator says that `count` of the members have come."""
    command = [str(find_binary("lhctl")), f"--coordinator={cluster.admin}", "status"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    return f"{count} of {MEMBERS} members have come" in said


@pytest.mark.parametrize("named", [True, False])
def test_all_begin_in_epoch_one_whoever_starts_first(
    cluster: LocalCluster, trainers: list[Trainer], named: bool
) -> None:
    ranks = set()
    for seed in range(SEEDS // 2):
        order = list(range(MEMBERS))
        random.Random(seed).shuffle(order)
        for i in order:
            called = f"host-{MEMBERS - i}" if named else None
            trainers[i].start(
                "join", socket=cluster.socket(i), run=f"start-{named}-{seed}", called=called, members=MEMBERS
            )
        worlds = [trainer.finish() for trainer in trainers]
        assert [(world.get("epoch"), world.get("size")) for world in worlds] == [(1, MEMBERS)] * MEMBERS, (seed, worlds)
        ranks.add(tuple(world["rank"] for world in worlds))
        for trainer in trainers:
            trainer.start("leave")
        for trainer in trainers:
            assert "error" not in trainer.finish()
    # The same trainers at the same peers have the same ranks each time.
    assert len(ranks) == 1
    if named:
        assert ranks == {(3, 2, 1, 0)}


def test_the_others_say_who_is_missing(cluster: LocalCluster, trainers: list[Trainer]) -> None:
    run = "one-is-killed"
    all_do(trainers, "forget")  # they have started, which takes long on a busy machine
    for i, trainer in enumerate(trainers[:3]):
        trainer.start("join", socket=cluster.socket(i), run=run, called=f"host-{i}", members=MEMBERS, timeout=6)
    until(lambda: waiting(cluster, 3), "three trainers wait")
    trainers[1].kill()
    until(lambda: waiting(cluster, 2), "the coordinator has heard of the death")
    for i in (0, 2):
        answer = trainers[i].finish()
        assert answer["error"] == "DeadlineExceeded", answer
        assert "of 4 members have come" in answer["text"], answer
        assert f"host-{i} at " in answer["text"].split("came and left again")[0], answer
        assert "host-1 at " in answer["text"].split("came and left again")[1], answer
    # The next try, with all of them, begins as if nothing had been.
    trainers[1] = Trainer()
    try:
        for i, trainer in enumerate(trainers):
            trainer.start("join", socket=cluster.socket(i), run=run, members=MEMBERS)
        for trainer in trainers:
            assert trainer.finish()["size"] == MEMBERS
    finally:
        trainers[1].kill()


def test_other_numbers_are_refused(cluster: LocalCluster, trainers: list[Trainer]) -> None:
    run = "numbers-differ"
    trainers[0].start("join", socket=cluster.socket(0), run=run, members=MEMBERS)
    until(lambda: waiting(cluster, 1), "the first trainer waits")
    answer = trainers[1].do_wrong("join", socket=cluster.socket(1), run=run, members=2)
    assert answer["error"] == "FailedPrecondition", answer
    assert "waits for 2 members, and those that have come wait for 4" in answer["text"], answer
    assert "members is 0" in trainers[1].do_wrong("join", socket=cluster.socket(1), run=run, members=0)["text"]
    assert "members is 1025" in trainers[1].do_wrong("join", socket=cluster.socket(1), run=run, members=1025)["text"]
