"""Kills one of three hosts at many points of 16 concurrent in-place ops. No value may be wrong, and nothing may hang.

Each op at each survivor has to be the exact sum over one set of members. The set is the same at both survivors, and has
the size that OpInfo names.
"""

from __future__ import annotations

import os
from contextlib import ExitStack

import pytest
from trainers import Trainer, all_do, kill_at_many_points, trainers_of

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
