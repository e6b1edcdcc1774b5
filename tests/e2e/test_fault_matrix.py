"""Deaths and cancels in every phase, with ops of every kind. What a source and a target may hold then is checked, too.

The first test runs a sample of tests/chaos/matrix: every phase of a group's work and every kind of death, in a world of
three. The variable LONGHAUL_FAULT_MATRIX gives the matrix other arguments, for instance "--full".

The others start ops of every kind that takes a tensor, by every algorithm, quantized and not, with source and target
apart, equal, or one in the other. Then comes a fault. After each outcome, every member compares all bits of its tensors
with the table in docs/concepts.md.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
import pathlib
import random
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from collectives import DIRECT, IN_PARTS, KINDS, QUANTIZED, ROOTED, Spec, Started
from trainers import until

import longhaul as lh
from longhaul.testing import LocalCluster

MATRIX = pathlib.Path(__file__).parents[1] / "chaos" / "matrix"
SKIPPED = 77
SEED = int(os.environ.get("LONGHAUL_SEED", "1"))


@pytest.mark.alone
def test_no_fault_in_any_phase_harms_a_healthy_member(tmp_path: pathlib.Path) -> None:
    arguments = os.environ.get("LONGHAUL_FAULT_MATRIX", "").split()
    done = subprocess.run([str(MATRIX), f"--logs={tmp_path}", *arguments], capture_output=True, text=True)
    if done.returncode == SKIPPED:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failed" in done.stdout


# ------------------------------------------------------------------ sources and targets

# A fault, and the phase of the ops in which it comes:
# posted: one member has not called the ops yet. Data moves among the others as far as possible.
# moving: all have called the ops. A peer stops at some moment, and the others go on as far as they can. So some ops are
#     left in the middle, and some are complete at some members, or have ended.
# done: the peer of one member stops when it has announced the ops, and before the others call them. So a small op, whose
#     inputs travel with READY, is complete at all others, and not settled. Of a large one, the others do what they can.
FAULTS = ("cancel", "death")
PHASES = ("posted", "done", "moving", "moving")
# Where source and target are: apart; the same tensor, or one in the other at its own place; or at another place.
PLACES = ("apart", "in place", "elsewhere")
ELEMENTS = 384 << 10  # of the largest tensor: some segments for each part
SAMPLE = 30  # ops of a round in the default check


@dataclasses.dataclass(frozen=True)
class Row:
    kind: str
    algorithm: str
    quantize: str
    place: str
    arena: str = "all"


def rows() -> list[Row]:
    made = []
    for kind, algorithm, quantize, place in itertools.product(
        KINDS, ("mesh", "ring", "oneshot"), ("", "bf16", "int8"), PLACES
    ):
        possible = (
            kind != "barrier"
            and not (algorithm == "ring" and kind in DIRECT)
            and not (quantize and (kind not in QUANTIZED or algorithm == "oneshot"))
            and not (kind == "send" and place != "apart")
            and not (place == "elsewhere" and (kind not in IN_PARTS or kind == "all_to_all"))
        )
        if possible:
            made.append(Row(kind, algorithm, quantize, place))
    # Memory that is not shared with peerd.
    made += [Row(kind, "auto", "", "in place", "none") for kind in KINDS if kind not in ("send", "barrier")]
    return made


def shuffled(rng: random.Random) -> list[Row]:
    """All rows, of each kind in turn."""
    by_kind: dict[str, list[Row]] = {}
    for row in rows():
        by_kind.setdefault(row.kind, []).append(row)
    for some in by_kind.values():
        rng.shuffle(some)
    return [row for turn in itertools.zip_longest(*by_kind.values()) for row in turn if row is not None]


def spec_of(rng: random.Random, row: Row, ids: tuple[int, ...], victim: int, tag: int) -> Spec:
    root, to = rng.choice(ids), 0
    if row.kind == "send":
        root, to = rng.sample((victim, rng.choice([each for each in ids if each != victim])), 2)
    parts = len(ids) if row.kind in IN_PARTS else 1
    return Spec(
        kind=row.kind,
        world=ids,
        ids=tuple(each for each in ids if each in (root, to)) if row.kind == "send" else ids,
        root=root if row.kind in ROOTED or row.kind == "send" else 0,
        to=to,
        counts=((100 if row.algorithm == "oneshot" else ELEMENTS) // parts,),
        algorithm=row.algorithm,
        quantize=row.quantize,
        in_place=row.place != "apart",
        shift=1 if row.place == "elsewhere" else 0,
        arena=row.arena,
        on_fault=rng.choice(("retry", "abort")),
        tag=tag,
    )


@dataclasses.dataclass
class Member:
    comm: lh.Comm
    started: dict[int, Started] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.id = self.comm.member_id  # also when its peerd has died

    def start(self, specs: Sequence[Spec]) -> None:
        for spec in specs:
            if self.id in spec.ids:
                self.started[spec.tag] = Started(self.comm, spec, self.id)

    def outcome(self, spec: Spec, peerd_died: bool = False) -> dict[str, Any] | None:
        """None: this member does not take part."""
        started = self.started.get(spec.tag)
        if started is None:
            return None
        try:
            info = started.work.wait(120)
        except lh.Error as error:
            assert not isinstance(error, lh.DeadlineExceeded), (spec, error)
            return {"error": type(error).__name__, "text": str(error), "wrong": started.harmed(peerd_died)}
        return {"members": info.members, "wrong": started.wrong(info)}


def settle(cluster: LocalCluster, peers: Sequence[int]) -> None:
    """Waits until no more data arrives at these peers, as far as a short look can tell."""

    def received() -> list[float]:
        return [cluster.peers[i].metric("longhaul_peerd_received_bytes_total") for i in peers]

    before = received()
    for _ in range(200):
        time.sleep(0.03)
        if before == (before := received()):
            return


class Round:
    """Three members, and the ops of one round. One more peer stops or dies in it."""

    def __init__(self, cluster: LocalCluster, name: str, rng: random.Random, chosen: Sequence[Row]) -> None:
        self.cluster, self.name, self.rng, self.chosen = cluster, name, rng, chosen
        self.victim = cluster.add_peer()
        self.process = cluster.peers[self.victim].process
        peers = [0, 1, self.victim]

        def join(i: int) -> Member:
            return Member(lh.join(name, peerd=cluster.socket(i), members=len(peers), timeout=60))

        with ThreadPoolExecutor(len(peers)) as pool:
            *self.healthy, self.last = pool.map(join, peers)
        ids = self.last.comm.members
        self.specs = [spec_of(rng, row, ids, self.last.id, tag) for tag, row in enumerate(chosen)]

    def start_at_once(self) -> None:
        """Lets all ops begin at the same moment, so that a fault finds many of them in the middle."""
        first, second = self.healthy
        first.start(self.specs)
        self.announced(0, first)
        holder = self.cluster.peers[0].process
        holder.send_signal(signal.SIGSTOP)
        second.start(self.specs)
        self.last.start(self.specs)
        holder.send_signal(signal.SIGCONT)

    def announced(self, peer: int, member: Member) -> None:
        """Waits until the peer has the ops of its member."""
        metric = self.cluster.peers[peer].metric
        until(lambda: metric("longhaul_peerd_ops_open") >= len(member.started), "ops are open")

    def calibrate(self) -> float:
        """Returns how long the ops take without a fault, once all have called them."""
        self.start_at_once()
        begin = time.monotonic()
        members = (*self.healthy, self.last)
        for started in (started for member in members for started in member.started.values()):
            started.work.wait(120)
        span = time.monotonic() - begin
        for spec in self.specs:
            for outcome in (member.outcome(spec) for member in members):
                assert outcome is None or ("members" in outcome and outcome["wrong"] is None), (spec, outcome)
        return span

    def play(self, fault: str, phase: str, span: float) -> None:
        if phase == "done":
            self.last.start(self.specs)
            self.announced(self.victim, self.last)
            self.process.send_signal(signal.SIGSTOP)
        if phase != "moving":
            for member in self.healthy:
                member.start(self.specs)
        else:
            self.start_at_once()
            time.sleep(span * self.rng.random())
            self.process.send_signal(signal.SIGSTOP)
        settle(self.cluster, (0, 1))
        if fault == "death":
            self.cluster.kill_peer(self.victim)
            return
        cancelled = [work.work for member in self.healthy for work in member.started.values()]
        for work in self.rng.sample(cancelled, len(cancelled)):
            work.cancel()
        self.process.send_signal(signal.SIGCONT)
        if phase == "posted":
            # The last member is owed the end of these ops, once they have ended at the others.
            for spec in self.specs:
                for member in self.healthy:
                    member.outcome(spec)
            self.last.start(self.specs)

    def outcomes(self, fault: str, phase: str) -> Iterator[tuple[str, str]]:
        """What was seen: the outcome of each op."""
        for row, spec in zip(self.chosen, self.specs):
            ops = {each.id: each.outcome(spec) for each in self.healthy}
            last = self.last.outcome(spec, peerd_died=fault == "death")
            if fault == "cancel":
                ops[self.last.id] = last
            all_there = [op for op in ops.values() if op is not None]
            about = f"{self.name}: {row}\n{spec}\n{ops}, at the peer that stopped or died: {last}"
            assert last is None or last["wrong"] is None, about
            assert all(op["wrong"] is None for op in all_there), about
            ended = {op.get("error") or "OK" for op in all_there}
            assert len({(op.get("error"), op.get("members")) for op in all_there}) <= 1, about
            assert ended <= {"OK", "Aborted"}, about
            one_way = row.kind in ("broadcast", "send")
            assert not any(one_way and "the source is unchanged" in op.get("text", "") for op in all_there), about
            if fault == "cancel":  # all are there
                assert not any("root" in op.get("text", "") for op in all_there), about
            if fault == "cancel" and phase == "posted":
                assert ended == {"Aborted"}, about
            yield f"{row.kind} {fault}", " ".join(ended)
            if row.algorithm == "oneshot" and (fault, phase) == ("death", "done"):
                yield "in the result", str(any(self.last.id in op.get("members", ()) for op in all_there))

    def end(self) -> None:
        for member in self.healthy:
            member.comm.leave()
        self.cluster.kill_peer(self.victim)


def matrix(seeds: int, sample: int | None) -> None:
    seen: collections.Counter[str] = collections.Counter()
    # Peers are stopped for a while, which must not pass for a death.
    with LocalCluster(peers=2, coordinator_flags=["--detect-ms=10000"]) as cluster:
        for seed in range(SEED, SEED + seeds):
            rng = random.Random(seed)
            first = Round(cluster, f"{seed}", rng, shuffled(rng)[:sample])
            span = first.calibrate()
            first.end()
            for fault, phase in itertools.product(FAULTS, PHASES):
                chosen = shuffled(rng)[: sample if phase == "moving" else None]
                played = Round(cluster, f"{seed}-{len(cluster.peers)}-{fault}-{phase}", rng, chosen)
                played.play(fault, phase, span)
                seen.update(f"{what}: {outcome}" for what, outcome in played.outcomes(fault, phase))
                played.end()
    print("\n".join(f"{name}: {count}" for name, count in sorted(seen.items())))
    for kind in KINDS:
        assert kind == "barrier" or seen[f"{kind} cancel: Aborted"] > 0, seen
    # If all survivors were done with an op, they keep the result, with the input of the dead.
    assert seen["in the result: True"] > 0, seen


def test_sources_and_targets_hold_what_is_promised_after_every_fault() -> None:
    matrix(seeds=1, sample=SAMPLE)


@pytest.mark.full
def test_sources_and_targets_hold_what_is_promised_for_every_row_of_the_matrix() -> None:
    matrix(seeds=int(os.environ.get("LONGHAUL_MATRIX_SEEDS", "5")), sample=None)
