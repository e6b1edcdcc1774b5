"""Kill one of four hosts at several points of concurrent in-place mesh ops: never a wrong value, never a hang."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack

from trainers import all_do, trainers_of

from longhaul.testing import LocalCluster

OPS = 8
COUNT = 400_000
POINTS = 4


def test_survivors_of_mesh_ops_agree_on_exact_sums() -> None:
    rng = random.Random(7)
    redone = 0
    with LocalCluster(peers=3) as cluster, ExitStack() as stack:
        survivors = trainers_of(stack, 3)
        span = 0.0
        for point in range(-1, POINTS):
            peer = cluster.add_peer()
            with ExitStack() as victims:
                trainers = [*survivors, *trainers_of(victims, 1)]
                for i, trainer in enumerate(trainers):
                    trainer.start("assemble", socket=cluster.socket(i if i < 3 else peer), run=f"mesh-{point}", size=4)
                for trainer in trainers:
                    assert "error" not in trainer.finish()
                for bit, trainer in enumerate(trainers):
                    trainer.do("prepare", bit=bit, ops=OPS, count=COUNT)
                begin = time.monotonic()
                for trainer in trainers:
                    trainer.start("run_ops", members=4, algorithm="mesh")
                if point < 0:
                    # No kill: how long the ops take here spreads the points over them.
                    answers = [trainer.finish() for trainer in trainers]
                    span = time.monotonic() - begin
                else:
                    time.sleep(max(0.0, begin + span * (point + rng.random()) / POINTS - time.monotonic()))
                    cluster.kill_peer(peer)
                    trainers[3].kill()
                    answers = [trainer.finish() for trainer in survivors]
            for tag in range(OPS):
                ops = [answer["ops"][tag] for answer in answers]
                taken = ops[0].get("participants")
                assert taken is not None and set(taken) >= {0, 1, 2}, f"tag {tag}: {ops}"
                for op in ops:
                    assert op["participants"] == taken, f"tag {tag}: survivors differ: {ops}"
                    assert op["world_size"] == len(taken), f"tag {tag}: {op}"
                    assert op["algorithm"] == "mesh", f"tag {tag}: {op}"
                assert point >= 0 or len(taken) == 4
                redone += len(taken) < 4
            all_do(survivors, "leave")
            cluster.kill_peer(peer)
    # Somewhere on the way the kill has to hit ops in flight, or this shows nothing.
    assert redone > 0, "no kill hit an op in flight"
