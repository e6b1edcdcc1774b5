"""Tests of faults that end or corrupt runs of other systems. These need network namespaces."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from trainers import HELD, Trainer, assemble, check, post, release, trainers_of
from world import DATA_PORT, World, pair_drop, why_not

pytestmark = [pytest.mark.alone, pytest.mark.skipif(bool(why_not()), reason=why_not() or "never")]

COUNT = 500_000


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def hosts_of(stack: ExitStack, tmp_path: pathlib.Path, count: int, detect_ms: int = 1500) -> World:
    world = stack.enter_context(World(tmp_path, detect_ms))
    world.start_coordinator()
    for _ in range(count):
        world.add_host().start_peerd()
    return world


def join_all(world: World, trainers: list[Trainer]) -> None:
    assemble(trainers, [host.socket for host in world.hosts], "rivals")


def end_ops(trainers: list[Trainer], ops: int) -> list[list[dict]]:
    """Waits for the ops. Checks that every result is the exact sum over all trainers' inputs."""
    everybody = list(range(len(trainers)))
    answers = check(trainers, ops, everybody)
    assert all(op["participants"] == everybody for answer in answers for op in answer), answers
    return answers


def one_round(trainers: list[Trainer]) -> list[list[dict]]:
    post(trainers, 4, COUNT)
    return end_ops(trainers, 4)


def assert_nobody_was_removed(world: World) -> None:
    assert {event["kind"] for event in world.events()} & {"death", "evict"} == set()


def pass_boundary(trainers: list[Trainer]) -> None:
    """Each trainer begins a step; the world is these trainers afterwards."""
    for trainer in trainers:
        trainer.start("begin_step")
    for trainer in trainers:
        answer = trainer.finish()
        assert answer.get("size") == len(trainers), answer


def test_a_newcomer_whose_port_is_closed_is_refused_by_its_address_and_disturbs_nobody(
    stack: ExitStack, tmp_path: pathlib.Path
) -> None:
    """In PCCL both healthy peers are removed."""
    world = hosts_of(stack, tmp_path, 3)
    trainers = trainers_of(stack, 3)
    join_all(world, trainers[:2])
    # Nobody can connect to the newcomer's data port. All other packets reach the newcomer.
    world.drop(f'oifname "{world.hosts[2].port}" tcp dport {DATA_PORT}')
    trainers[2].start("join", socket=world.hosts[2].socket, run="rivals", timeout=60)
    refused: dict | None = None
    deadline = time.monotonic() + 60
    while refused is None and time.monotonic() < deadline:
        pass_boundary(trainers[:2])
        for ops in one_round(trainers[:2]):
            assert all(op["retries"] == 0 for op in ops)
        if not trainers[2].idle():
            refused = trainers[2].finish()
    assert refused is not None, "the newcomer was never refused"
    assert refused.get("error") is not None, refused
    assert f"{world.hosts[2].address}:{DATA_PORT}" in refused["text"], refused
    removed = [event for event in world.events() if event["kind"] in ("death", "evict") and event["run"] == "rivals"]
    assert len(removed) <= 1, removed  # at most the newcomer itself


def test_of_four_nobody_is_lost_when_a_pair_cannot_talk(stack: ExitStack, tmp_path: pathlib.Path) -> None:
    """In PCCL four peers with one blocked pair lose a healthy member."""
    world = hosts_of(stack, tmp_path, 4)
    trainers = trainers_of(stack, 4)
    join_all(world, trainers)
    one_round(trainers)
    for first, second in ((0, 1), (0, 2), (1, 3)):
        rules = pair_drop(world.hosts[first], world.hosts[second])
        world.drop(*rules)
        for _ in range(3):
            one_round(trainers)
            pass_boundary(trainers)
        world.undrop(*rules)
    one_round(trainers)


def test_of_three_the_third_carries_for_a_pair_that_cannot_talk(stack: ExitStack, tmp_path: pathlib.Path) -> None:
    """Every ring of three has all pairs. So tensors and control frames of the pair go through the third host."""
    world = hosts_of(stack, tmp_path, 3)
    trainers = trainers_of(stack, 3)
    join_all(world, trainers)
    one_round(trainers)
    rules = pair_drop(world.hosts[0], world.hosts[1])
    # The silence falls on ops in flight.
    post(trainers, 8, COUNT, holder=trainers[1])
    world.drop(*rules)
    release(trainers[1])
    end_ops(trainers, 8 + HELD)
    for _ in range(3):
        one_round(trainers)
        pass_boundary(trainers)
    assert world.hosts[2].metric("longhaul_peerd_tunnels") >= 1
    assert world.hosts[2].metric("longhaul_peerd_bytes_carried_total") > 0
    assert_nobody_was_removed(world)


def test_of_three_a_pair_that_cannot_talk_from_the_start_meets(stack: ExitStack, tmp_path: pathlib.Path) -> None:
    world = hosts_of(stack, tmp_path, 3)
    world.drop(*pair_drop(world.hosts[0], world.hosts[2]))
    trainers = trainers_of(stack, 3)
    join_all(world, trainers)
    one_round(trainers)


def test_a_pair_that_cannot_talk_from_the_start_meets_in_one_world_of_four(
    stack: ExitStack, tmp_path: pathlib.Path
) -> None:
    world = hosts_of(stack, tmp_path, 4)
    world.drop(*pair_drop(world.hosts[0], world.hosts[3]))
    trainers = trainers_of(stack, 4)
    join_all(world, trainers)
    one_round(trainers)


@pytest.mark.parametrize("one_way", [False, True], ids=["both-ways", "one-way"])
def test_a_silence_shorter_than_detect_ms_is_no_fault(stack: ExitStack, tmp_path: pathlib.Path, one_way: bool) -> None:
    # After a silence TCP may wait as long again before it sends again. So detect_ms is much longer than the silence.
    world = hosts_of(stack, tmp_path, 3, detect_ms=8000)
    trainers = trainers_of(stack, 3)
    join_all(world, trainers)
    one_round(trainers)
    rules = pair_drop(world.hosts[0], world.hosts[1], one_way)
    # The silence falls on ops in flight.
    post(trainers, 8, COUNT, holder=trainers[1])
    world.drop(*rules)
    release(trainers[1])
    time.sleep(0.8)
    world.undrop(*rules)
    end_ops(trainers, 8 + HELD)
    assert_nobody_was_removed(world)


def test_lanes_that_are_reset_cost_no_member(stack: ExitStack, tmp_path: pathlib.Path) -> None:
    world = hosts_of(stack, tmp_path, 3)
    trainers = trainers_of(stack, 3)
    join_all(world, trainers)
    for share in (1, 2, 1000):
        post(trainers, 8, COUNT, holder=trainers[1])
        victim = world.hosts[0]
        victim.reset(victim.connections()[:share])
        release(trainers[1])
        end_ops(trainers, 8 + HELD)
    assert_nobody_was_removed(world)


def test_a_trainer_that_asks_for_much_memory_does_not_silence_its_peer(
    stack: ExitStack, tmp_path: pathlib.Path
) -> None:
    """The kernel takes seconds to clear some GiB of new memory. This must not happen in the peer's reactor."""
    world = hosts_of(stack, tmp_path, 3, detect_ms=1000)
    trainers = trainers_of(stack, 3)
    join_all(world, trainers)
    one_round(trainers)
    trainers[2].start("allocate", socket=world.hosts[2].socket, mib=3072)
    answer = trainers[2].finish()
    assert "error" not in answer, answer
    one_round(trainers)
    one_round(trainers)
    assert_nobody_was_removed(world)


def test_a_trainer_that_dies_with_much_memory_does_not_silence_its_peer(
    stack: ExitStack, tmp_path: pathlib.Path
) -> None:
    """The peer is the last to release the memory, and freeing some GiB takes more than a second."""
    world = hosts_of(stack, tmp_path, 3, detect_ms=1000)
    trainers = trainers_of(stack, 3)
    join_all(world, trainers)
    one_round(trainers)
    (rich,) = trainers_of(stack, 1)
    rich.do("allocate", timeout=300, socket=world.hosts[2].socket, mib=2048, fill=True)
    post(trainers, 16, COUNT, holder=trainers[1])
    rich.kill()
    release(trainers[1])
    end_ops(trainers, 16 + HELD)
    one_round(trainers)
    assert_nobody_was_removed(world)
