"""All-reduce between hosts whose access links differ: shares follow the links, and no value is wrong when an owner dies.

The emulated links make the moments that the tests need: nothing gets more than its rate, so on any machine an op lasts
at least as long as the slowest host needs to send its input once.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from testbed import Wan, why_not
from trainers import PATIENCE_S, Trainer, all_do, check, trainers_of, until

pytestmark = [pytest.mark.alone, pytest.mark.skipif(bool(why_not()), reason=why_not() or "never")]

POINTS = int(os.environ.get("LONGHAUL_UNEQUAL_KILLS", "1"))
SEED = int(os.environ.get("LONGHAUL_SEED", "1"))
COUNT = 1 << 19  # elements of a tensor: 2 MiB
SLOWEST = "h3"
SLOW = {"up": "16mbit", "down": "40mbit", "queue": "50ms"}
FAST = {"up": "80mbit", "down": "80mbit", "queue": "50ms"}

UNEQUAL = {
    "hosts": 4,
    "links": [{"between": "*", "and": "*", "delay": "10ms"}],
    "access": {
        "h0": FAST,
        "h1": FAST,
        "h2": {"up": "56mbit", "down": "56mbit", "queue": "50ms"},
        SLOWEST: SLOW,
    },
}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def started(stack: ExitStack, logs: pathlib.Path) -> Wan:
    wan = stack.enter_context(Wan(logs, UNEQUAL))
    wan.start_coordinator(["--ring-interval-s=20"])
    for host in wan.hosts:
        host.start_peerd()
    return wan


def assembled(stack: ExitStack, wan: Wan, run: str) -> list[Trainer]:
    trainers = trainers_of(stack, 4)
    for host, trainer in zip(wan.hosts, trainers):
        trainer.start("assemble", socket=host.socket, run=run, size=4)
    for trainer in trainers:
        assert "error" not in trainer.finish()
    for bit, trainer in enumerate(trainers):
        trainer.do("prepare", bit=bit, ops=2, count=COUNT)
    return trainers


def shares(wan: Wan, run: str) -> list[float]:
    """What each host owns of a tensor, in the order of wan.hosts; empty: not all are in the ring."""
    ring: dict[str, Any] = json.loads(wan.lhctl("ring", run, "--json"))
    of = {peer["peer"]: peer.get("share", 0.0) for peer in ring["rings"][0]["peers"]}
    ids = [host.peer_id() for host in wan.hosts]
    return [of[peer] for peer in ids] if set(ids) <= set(of) else []


def ops_until(wan: Wan, run: str, trainers: list[Trainer], reached: Callable[[list[float]], bool]) -> list[float]:
    """Does ops and steps until the shares are as wanted. Every value has to be exact, and no op may be redone."""
    deadline = time.monotonic() + 2 * PATIENCE_S
    while True:
        for bit, trainer in enumerate(trainers):
            trainer.do("prepare", bit=bit, ops=2, count=COUNT)
        for trainer in trainers:
            trainer.start("run_ops", members=len(trainers), algorithm="mesh")
        answers = check(trainers, 2, list(range(len(trainers))))
        assert all(op["retries"] == 0 for answer in answers for op in answer), answers
        all_do(trainers, "begin_step")
        now = shares(wan, run)
        if now and reached(now):
            return now
        assert time.monotonic() < deadline, f"shares {now}\n{wan.lhctl('links')}"


def sent_by_slowest(wan: Wan) -> int:
    return sum(wan.counters(SLOWEST, host.name).get("delivered_bytes", 0) for host in wan.hosts if host.name != SLOWEST)


def slowest_owns_nothing(now: list[float]) -> bool:
    """Its input alone takes longer than anything that the other three do, so these own about equal parts."""
    return now[3] < 0.02 and min(now[:3]) > 0.2


def test_a_slow_host_owns_nothing_and_gets_a_share_when_it_is_fast(stack: ExitStack, tmp_path: pathlib.Path) -> None:
    wan = started(stack, tmp_path)
    trainers = assembled(stack, wan, "unequal")
    ops_until(wan, "unequal", trainers, slowest_owns_nothing)
    why = wan.lhctl("why", "unequal")
    assert f"peer {wan.hosts[3].peer_id()} (" in why and "sets the pace" in why, why
    wan.access(SLOWEST, **FAST)
    # Now h2 is the slowest host. The best shares are 31, 31, 7 and 31 %.
    ops_until(wan, "unequal", trainers, lambda now: now[3] > 0.2 and now[2] < 0.2)
    wan.access(SLOWEST, **SLOW)
    ops_until(wan, "unequal", trainers, slowest_owns_nothing)
    # All of that without an epoch that stopped ops.
    assert {event["kind"] for event in wan.events()} & {"death", "evict", "link_lost"} == set()


@pytest.mark.parametrize("point", range(POINTS))
def test_no_value_is_wrong_when_the_owner_of_the_largest_share_dies(
    stack: ExitStack, tmp_path: pathlib.Path, point: int
) -> None:
    rng = random.Random(SEED * 1000 + point)
    wan = started(stack, tmp_path)
    trainers = assembled(stack, wan, "owner")
    now = ops_until(wan, "owner", trainers, slowest_owns_nothing)
    victim = now.index(max(now))
    survivors = [trainer for i, trainer in enumerate(trainers) if i != victim]
    ops = 4
    for bit, trainer in enumerate(trainers):
        trainer.do("prepare", bit=bit, ops=ops, count=COUNT)
    before = sent_by_slowest(wan)
    for trainer in trainers:
        trainer.start("run_ops", members=len(trainers), algorithm="mesh")
    # A host sends only what others have announced, so now an op is in flight everywhere. For the rest of its 8 MiB the
    # slowest host needs 3 s at least, whatever the machine: nothing gets more than its rate.
    until(lambda: sent_by_slowest(wan) > before + (1 << 20), "the slowest host sends its input")
    time.sleep(rng.uniform(0, 1.5))
    peerd = wan.hosts[victim].peerd
    assert peerd is not None
    peerd.kill()
    answers = check(survivors, ops, [i for i in range(4) if i != victim])
    assert any(op["retries"] > 0 for op in answers[0]), answers[0]
