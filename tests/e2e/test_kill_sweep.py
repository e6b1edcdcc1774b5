"""Kills one of three hosts at many points of 16 concurrent in-place ops. No value may be wrong, and nothing may hang.

Each op at each survivor has to be the exact sum over one set of members. The set is the same at both survivors, and has
the size that OpInfo names.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import random
import signal
import time
from contextlib import ExitStack
from typing import Any

import collectives
import pytest
from trainers import Trainer, all_do, assemble, kill_at_many_points, trainers_of, until

from longhaul.testing import LocalCluster

# In all: LONGHAUL_KILL_POINTS=100 takes some minutes.
POINTS = int(os.environ.get("LONGHAUL_KILL_POINTS", "12"))
SEED = int(os.environ.get("LONGHAUL_SEED", "1"))


@pytest.mark.parametrize(
    "victim_part, flags",
    [
        # The trainer of a peerd that dies is in the other sweep below, and in tests/chaos/matrix.
        pytest.param("peerd", [], id="peerd", marks=pytest.mark.full),
        pytest.param("host", [], id="host"),
        pytest.param("host", ["--io=epoll"], id="host-epoll"),
    ],
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


# Ops of random collectives in all: LONGHAUL_SWEEP_OPS=2400 takes some minutes.
SWEEP_OPS = int(os.environ.get("LONGHAUL_SWEEP_OPS", "200"))
ROUND_OPS = 40


def test_survivors_agree_on_every_collective_whenever_a_host_is_killed() -> None:
    """Random ops of all kinds. Each result is that over exactly OpInfo.members. Ops that cannot go on end Aborted at all.

    Three members at two hosts survive a fourth one, which never starts some ops. A survivor starts some only when the
    host is dead. There are three kinds of rounds:
    started: All have started all other ops when the host dies. In most of these rounds a member has cancelled some.
    starting: The host dies while the members start the ops.
    stopped: The host's peer starts its ops and stops before the others start theirs. So large ops are left half done,
        and small ones have the input of the dead.
    """
    rng = random.Random(SEED)
    span = 0.0
    seen: collections.Counter[str] = collections.Counter()
    with LocalCluster(peers=2) as cluster, ExitStack() as stack:
        *survivors, victim = trainers_of(stack, 4, torch=True)
        holder = survivors[-1]
        rounds = max(1, SWEEP_OPS // ROUND_OPS)
        for point in range(-1, rounds):
            peer = cluster.add_peer()
            trainers = [*survivors, victim]
            assemble(trainers, [cluster.socket(i) for i in (0, 1, 1, peer)], f"sweep-{point}")
            ids = [trainer.do("member")["member"] for trainer in trainers]
            kind = ("stopped", "starting", "started")[point % 3]
            plan = Plan(rng, None if point < 0 else ids[-1], kind)
            seed = f"{SEED}/{point}"
            late = list(range(ROUND_OPS)) if kind != "started" else sorted(plan.held | plan.cancelled)
            world = all_do(trainers, "random_specs", seed=seed, ops=ROUND_OPS, late=late)[0]["world"]
            specs = collectives.random_specs(seed, ROUND_OPS, world, late)
            begin = time.monotonic()
            for trainer in reversed(trainers):
                left_out = {holder: plan.held, victim: plan.missed}.get(trainer, set())
                tags = [tag for tag in range(ROUND_OPS) if tag not in left_out]
                trainer.start("start_random", tags=rng.sample(tags, len(tags)))
                if kind == "stopped" and trainer is victim:
                    assert "error" not in (answer := victim.finish()), answer
                    there = sum(ids[-1] in specs[tag].ids and len(specs[tag].ids) > 1 for tag in tags)
                    until(lambda: cluster.peers[peer].metric("longhaul_peerd_ops_open") >= there, "READY")  # noqa: B023
                    cluster.peers[peer].process.send_signal(signal.SIGSTOP)
            if kind != "starting":
                for trainer in trainers if kind == "started" else survivors:
                    assert "error" not in (answer := trainer.finish()), answer
            if kind == "started":
                cancel(plan, rng, specs, trainers, ids)
            if plan.dead is not None:
                time.sleep(span * rng.random())
                cluster.kill_peer(peer)
                for trainer in trainers if kind == "starting" else ():
                    answer = trainer.finish()
                    assert "error" not in answer or (trainer, answer["error"]) == (victim, "Unavailable"), answer
                if rng.random() < 0.15:
                    victim.kill()
                    (victim,) = trainers_of(stack, 1, torch=True)
                else:
                    victim.do("forget")
                holder.do("start_random", tags=sorted(plan.held))
            answers = all_do(survivors if plan.dead else trainers, "wait_random", timeout=120)
            if plan.dead is None:
                span = time.monotonic() - begin
            for spec in specs:
                ops = {id: answer["ops"][str(spec.tag)] for id, answer in zip(ids, answers) if id in spec.ids}
                if ops:
                    problem = plan.problem(spec, ops)
                    assert problem is None, f"seed {seed}, late {late}, {plan}: {problem}\n{spec}\n{ops}"
                    first = next(iter(ops.values()))
                    dead = "" if plan.dead is None or plan.dead in first.get("members", ()) else " without the dead"
                    outcome = first.get("error") or ("OK" + dead if plan.dead in spec.ids else "OK")
                    seen[f"{spec.kind} {outcome}"] += 1
                    seen["ops"] += 1
                    seen["ops redone after all had started them"] += first.get("retries", 0) > 0
                    seen["ops with the input of the dead"] += plan.dead in first.get("members", ())
            all_do(survivors if plan.dead else trainers, "leave")
            cluster.kill_peer(peer)
    print("\n".join(f"{name}: {count}" for name, count in sorted(seen.items())))
    # Each kind has been seen to end well without the dead member, or to be aborted because of it. Fewer ops are too few
    # for that.
    assert seen["ops redone after all had started them"] > 0 and seen["ops with the input of the dead"] > 0, seen
    if SWEEP_OPS >= 1000:
        for kind in collectives.KINDS:
            assert seen[f"{kind} OK"] > 0 and seen[f"{kind} Aborted"] > 0, seen
            if kind not in (*collectives.FOR_A_WORLD, "send"):
                assert seen[f"{kind} OK without the dead"] > 0, seen


def cancel(
    plan: Plan, rng: random.Random, specs: list[collectives.Spec], trainers: list[Trainer], ids: list[int]
) -> None:
    """A member cancels some ops of the plan. The last but one member holds ops back, and the last one is to die."""
    number = rng.choice((0, 0, 1, 3))
    missed = plan.missed if number == 3 else set()
    plan.cancelled = {tag for tag in plan.cancelled - missed if ids[number] in specs[tag].ids}
    trainers[number].do("start_random", tags=[], cancel=sorted(plan.cancelled))
    if number == 0 and rng.random() < 0.5:
        # Nobody can be done with these. So they are cancelled for sure, also at the member that starts them later.
        plan.certain = {tag for tag in plan.cancelled & plan.held if ids[2] in specs[tag].ids}
        trainers[0].do("wait_random", tags=sorted(plan.certain))


@dataclasses.dataclass
class Plan:
    """What happens in a round, and what may come of it."""

    rng: dataclasses.InitVar[random.Random]
    dead: int | None
    kind: str
    held: set[int] = dataclasses.field(default_factory=set)
    missed: set[int] = dataclasses.field(default_factory=set)
    cancelled: set[int] = dataclasses.field(default_factory=set)
    certain: set[int] = dataclasses.field(default_factory=set)  # cancelled, and ended so before the host died

    def __post_init__(self, rng: random.Random) -> None:
        everything = range(ROUND_OPS)
        if self.kind == "started":
            self.cancelled = set(rng.sample(everything, rng.choice((0, 2, 5))))
        if self.dead is not None:
            self.held = set(rng.sample(everything, 10)) | set(list(self.cancelled)[:1])
            self.missed = set(rng.sample(everything, 15))

    def problem(self, spec: collectives.Spec, ops: dict[int, dict[str, Any]]) -> str | None:
        """What is wrong with the outcomes of the survivors that took part."""
        first = next(iter(ops.values()))
        for op in ops.values():
            if op["wrong"] is not None:
                return str(op["wrong"])
            if (op.get("error"), op.get("members")) != (first.get("error"), first.get("members")):
                return "the outcomes differ"
        died = self.dead in spec.ids
        left = [id for id in spec.ids if id != self.dead]
        needed = self.dead in (spec.root, spec.to)
        broken = died and (needed or spec.kind in collectives.FOR_A_WORLD)
        if spec.tag in self.certain:
            return None if first.get("error") in ("Aborted", "TooFewMembers") else "it was cancelled"
        if "error" not in first:
            good = [list(spec.ids)] if not died else [left] if spec.tag in self.missed else [list(spec.ids), left]
            if first["members"] not in good or (broken and first["members"] != list(spec.ids)):
                return f"members are none of {good}"
            return "it cannot end well" if broken and spec.tag in self.missed else None
        if first["error"] == "TooFewMembers":
            few = spec.min_world > len(left)
            weightless = spec.weights is not None and 0 in (
                collectives.weight_of(spec, spec.ids),
                collectives.weight_of(spec, left) if died else 1,
            )
            return None if few or weightless else "there are enough members"
        if first["error"] != "Aborted":
            return "an error that must not be"
        frozen = self.dead is not None or bool(self.cancelled)
        if spec.tag in self.cancelled or (spec.on_fault == "abort" and frozen):
            return None
        if not broken:
            return "there is no cause to abort it"
        for op in ops.values():
            if needed and f"m{self.dead}" not in op["text"]:
                return "the text does not name the dead member"
        return None


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
