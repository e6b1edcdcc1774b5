"""Kills one of four hosts at several points of concurrent in-place ops by the mesh: no wrong value, and no hang."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from trainers import kill_at_many_points, trainers_of

from longhaul.testing import LocalCluster


@pytest.mark.full
def test_survivors_of_mesh_ops_agree_on_exact_sums() -> None:
    with LocalCluster(peers=3) as cluster, ExitStack() as stack:
        survivors = trainers_of(stack, 3)
        for answers in kill_at_many_points(
            cluster, survivors, "mesh", ops=8, count=400_000, points=4, seed=7, algorithm="mesh"
        ):
            for answer in answers:
                assert {op["algorithm"] for op in answer} == {"mesh"}
