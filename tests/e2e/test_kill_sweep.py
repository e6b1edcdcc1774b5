"""Kill one of three hosts at many points of 16 concurrent in-place ops: never a wrong value, never a hang.

Each op at each survivor must equal the exact sum over one set of members, the same set at both survivors and of the
size that OpInfo names.
"""

from __future__ import annotations

import os
import random
import time

import pytest
from trainers import Trainer, all_do

from longhaul.testing import LocalCluster

OPS = 16
COUNT = 500_000
POINTS = int(os.environ.get("LONGHAUL_KILL_POINTS", "24"))
SEED = int(os.environ.get("LONGHAUL_SEED", "1"))


def check_survivors(answers: list[dict], members: int) -> int:
    """Returns how many ops were completed without the victim."""
    without = 0
    for tag in range(OPS):
        ops = [answer["ops"][tag] for answer in answers]
        for op in ops:
            assert "error" not in op, f"tag {tag}: {op}"
            assert op["participants"] is not None, f"tag {tag}: no set of members has this sum: {op}"
            assert op["world_size"] == len(op["participants"]), f"tag {tag}: {op}"
        assert ops[0]["participants"] == ops[1]["participants"], f"tag {tag}: survivors differ: {ops}"
        assert set(ops[0]["participants"]) >= {0, 1}, f"tag {tag}: a survivor is missing: {ops}"
        without += len(ops[0]["participants"]) < members
    return without


@pytest.mark.parametrize("victim_part", ["peerd", "host"])
def test_survivors_agree_on_exact_sums_whenever_a_peer_is_killed(victim_part: str) -> None:
    rng = random.Random(SEED)
    points = POINTS // 2
    survivors = [Trainer(), Trainer()]
    redone = 0
    try:
        with LocalCluster(peers=2) as cluster:
            span = 0.0
            for point in range(-1, points):
                run = f"sweep-{victim_part}-{point + 1}"
                peer = cluster.add_peer()
                victim = Trainer()
                trainers = [*survivors, victim]
                try:
                    for bit, trainer in enumerate(trainers):
                        # One after the other: nobody is admitted, so each joins through a boundary of the others.
                        if bit == 0:
                            trainer.do("join", socket=cluster.socket(0), run=run)
                            continue
                        trainer.start("join", socket=cluster.socket(1 if bit == 1 else peer), run=run)
                        for other in trainers[:bit]:
                            other.start("begin_step_until", size=bit + 1)
                        for other in [*trainers[:bit], trainer]:
                            result = other.finish()
                            assert "error" not in result, result
                    for bit, trainer in enumerate(trainers):
                        trainer.do("prepare", bit=bit, ops=OPS, count=COUNT)
                    begin = time.monotonic()
                    for trainer in trainers:
                        trainer.start("run_ops", members=3)
                    if point < 0:
                        # No kill: how long the ops take here spreads the points over them.
                        answers = [trainer.finish() for trainer in trainers]
                        span = max(0.05, time.monotonic() - begin)
                        assert check_survivors(answers[:2], 3) == 0
                    else:
                        delay = span * (point + rng.random()) / points
                        time.sleep(max(0.0, begin + delay - time.monotonic()))
                        cluster.kill_peer(peer)
                        if victim_part == "host":
                            victim.kill()
                        answers = [trainer.finish() for trainer in survivors]
                        redone += check_survivors(answers, 3) > 0
                    for trainer in survivors:
                        trainer.start("leave")
                    for trainer in survivors:
                        assert "error" not in trainer.finish()
                finally:
                    victim.kill()
                    if point < 0:
                        cluster.kill_peer(peer)
        # Somewhere on the way the kill has to hit ops in flight, or the sweep shows nothing.
        assert redone > 0, "no kill hit an op in flight"
    finally:
        for trainer in survivors:
            trainer.close()


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
