"""Kills one of three hosts at many points of 16 concurrent in-place ops. No value may be wrong, and nothing may hang.

Each op at each survivor has to be the exact sum over one set of members. The set is the same at both survivors, and has
the size that OpInfo names.
"""

from __future__ import annotations

import collections
import os
import random
import time
from contextlib import ExitStack
from typing import Any

import pytest
from trainers import Trainer, all_do, assemble, kill_at_many_points, trainers_of

from longhaul.testing import LocalCluster

POINTS = int(os.environ.get("LONGHAUL_KILL_POINTS", "24"))
SEED = int(os.environ.get("LONGHAUL_SEED", "1"))


@pytest.mark.parametrize(
    "victim_part, flags",
    [("peerd", []), ("host", []), ("host", ["--io=epoll"])],
    ids=["peerd", "host", "host-epoll"],
)
def test_survivors_agree_on_exact_sums_whenever_a_peer_is_killed(victim_part: str, flags: list[str]) -> None:
    with LocalCluster(peers=2, peerd_flags=flags) as cluster, ExitStack() as stack:
        for _ in kill_at_many_points(
            cluster,
            trainers_of(stack, 2),
            f"sweep-{victim_part}",
            ops=16,
            count=500_000,
            points=POINTS // 2,
            seed=SEED,
            kill_trainer=victim_part == "host",
        ):
            pass  # kill_at_many_points() checks them


# Collectives of five kinds, how many of them a survivor starts only when the host is dead, and how many the host never
# starts. Among the latter are broadcasts from each of the three members.
MIXED, MIXED_HELD, MIXED_MISSED = 40, 10, 15


def test_survivors_agree_on_every_collective_whenever_a_host_is_killed() -> None:
    """Each result is that over exactly OpInfo.members. Ops that cannot go on are aborted at all, with intact inputs."""
    rng = random.Random(SEED)
    span = 0.0
    seen: collections.Counter[str] = collections.Counter()
    with LocalCluster(peers=2) as cluster, ExitStack() as stack:
        survivors = trainers_of(stack, 2)
        for point in range(-1, POINTS):
            peer = cluster.add_peer()
            with ExitStack() as inner:
                victim = trainers_of(inner, 1)[0]
                trainers = [*survivors, victim]
                assemble(trainers, [cluster.socket(i) for i in (0, 1, peer)], f"mixed-{point}")
                begin = time.monotonic()
                for trainer in trainers:
                    held = {survivors[-1]: MIXED_HELD, victim: MIXED_MISSED}.get(trainer, 0) if point >= 0 else 0
                    trainer.start("post_mixed", upto=MIXED - held, count=150_001)
                members = [trainer.finish()["member"] for trainer in trainers]
                if point < 0:
                    answers = all_do(trainers, "wait_mixed")
                    span = time.monotonic() - begin
                else:
                    time.sleep(span * (point + rng.random()) / POINTS)
                    cluster.kill_peer(peer)
                    victim.kill()
                    survivors[-1].start("post_mixed", upto=MIXED, count=150_001)
                    assert "error" not in survivors[-1].finish()
                    answers = all_do(survivors, "wait_mixed")
                check_mixed(answers, dead=None if point < 0 else members[-1], seen=seen)
                all_do(survivors, "leave")
            cluster.kill_peer(peer)
    # Each kind has been seen to end well without the dead member, or to be aborted because of it.
    for kind in ("all_gather", "all_reduce", "barrier", "broadcast"):
        assert seen[f"{kind} of 2"] > 0, seen
    assert seen["reduce_scatter Aborted"] > 0 and seen["broadcast Aborted"] > 0, seen


def check_mixed(answers: list[dict[str, Any]], dead: int | None, seen: collections.Counter[str]) -> None:
    for ops in zip(*(answer["ops"] for answer in answers), strict=True):
        first = ops[0]
        for op in ops:
            assert op["intact"], op
            assert (op.get("error"), op.get("members")) == (first.get("error"), first.get("members")), ops
            if "error" not in op:
                assert op["right"], op
                continue
            assert op["error"] == "Aborted" and dead is not None, op
            assert op["kind"] == "reduce_scatter" or (op["kind"] == "broadcast" and op["root"] == dead), op
        seen[f"{first['kind']} {first.get('error') or 'of ' + str(len(first['members']))}"] += 1


def test_worlds_of_one_to_four_give_exact_sums() -> None:
    trainers: list[Trainer] = []
    try:
        with LocalCluster(peers=4) as cluster:
            for size in range(1, 5):
                trainers.append(Trainer())
                trainers[-1].start("join", socket=cluster.socket(size - 1), run="grow")
                for other in trainers[:-1]:
                    other.start("begin_step_until", size=size)
                for trainer in trainers:
                    assert "error" not in trainer.finish()
                for count in (1, 3, 1024, 1025, 100_003):
                    for result in all_do(trainers, "all_reduce", count=count, value=2.0):
                        assert result["world_size"] == size
                        assert result["same"]
                        assert result["first"] == 2.0 * size
    finally:
        for trainer in trainers:
            trainer.close()
