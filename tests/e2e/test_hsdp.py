"""HSDP: each shard is averaged over the same hosts as the others of its host, whenever a host dies.

The trainers are threads here: FSDP inside a host is left out, and so are its waits, which makes more orders of events
possible. client/examples/hsdp is run with FSDP.

LONGHAUL_HSDP_KILLS: how many hosts are killed (6; the acceptance test has 50). LONGHAUL_SEED: of where and how.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from trainers import PATIENCE_S, until

import longhaul as lh
from longhaul.testing import LocalCluster

KILLS = int(os.environ.get("LONGHAUL_HSDP_KILLS", "6"))
SEED = int(os.environ.get("LONGHAUL_SEED", "1"))
EXAMPLE = pathlib.Path(__file__).parents[2] / "client" / "examples" / "hsdp" / "two_hosts.py"
HOSTS = 3
COUNT = 1000


@dataclasses.dataclass
class Trainer:
    """One trainer. Its tensor is the sum of what the hosts gave in all steps: bit `slot` of each step's sum is a host."""

    hsdp: lh.torch.HSDP
    slot: int
    weights: torch.Tensor
    state: lh.State
    began: threading.Event  # the step boundary is passed: the block of the step runs
    gate: threading.Event  # the first op of a step waits for it
    ended: threading.Event  # the first op of a step has ended, or failed

    def step(self) -> int:
        """One step. Returns which hosts are in its result, as bits."""
        tries = 0
        mine = torch.full((COUNT,), float(1 << self.slot))
        result = torch.empty_like(mine)

        def add() -> list[lh.OpInfo]:
            nonlocal tries
            tries += 1
            if tries > 1:
                return [self.hsdp.comm.all_reduce(mine, "sum", out=result, timeout=PATIENCE_S)]
            self.began.set()
            assert self.gate.wait(PATIENCE_S)
            try:
                return [self.hsdp.comm.all_reduce(mine, "sum", out=result, timeout=PATIENCE_S)]
            finally:
                self.ended.set()

        with self.hsdp.step(self.state, timeout=PATIENCE_S):
            self.hsdp.until_agreed(add)
            assert bool((result == result[0]).all())
            self.weights += result
        return int(result[0])


class Run:
    """Hosts of one run, each with `shards` trainers."""

    def __init__(
        self, cluster: LocalCluster, pool: ThreadPoolExecutor, name: str, shards: int, seed: int = SEED
    ) -> None:
        self.cluster, self.pool, self.name, self.shards = cluster, pool, name, shards
        self.random = random.Random(seed)
        self.hosts: dict[int, list[Trainer]] = {}  # by slot

    def come(self, slots: dict[int, int], hosts: int | None = None) -> list[Future[Trainer]]:
        """Starts the trainers of new hosts. slots: the number of the peerd of each host, by slot."""
        tokens = {slot: self.random.randrange(1 << 31) for slot in slots}

        def join(slot: int, shard: int) -> Trainer:
            socket = self.cluster.socket(slots[slot])
            hsdp = lh.torch.HSDP(
                self.name,
                hosts=hosts,
                peerd=socket,
                shard=shard,
                shards=self.shards,
                token=tokens[slot],
                timeout=PATIENCE_S,
            )
            weights = torch.zeros(COUNT, dtype=torch.float64)
            state = lh.State({"weights": weights})
            began, gate, ended = threading.Event(), threading.Event(), threading.Event()
            gate.set()
            return Trainer(hsdp, slot, weights, state, began, gate, ended)

        return [self.pool.submit(join, slot, shard) for slot in slots for shard in range(self.shards)]

    def add(self, futures: list[Future[Trainer]]) -> None:
        for future in futures:
            trainer = future.result(2 * PATIENCE_S)
            self.hosts.setdefault(trainer.slot, []).append(trainer)

    def start_step(self, slots: Iterable[int] | None = None) -> dict[int, list[Future[int]]]:
        """Starts a step at all trainers of these hosts. None: of all hosts."""
        chosen = self.hosts if slots is None else slots
        return {slot: [self.pool.submit(each.step) for each in self.hosts[slot]] for slot in chosen}

    def check_step(self, futures: dict[int, list[Future[int]]]) -> int:
        """The hosts in a step's results, as bits. Checks that they are the same at all trainers."""
        results = {future.result(2 * PATIENCE_S) for each in futures.values() for future in each}
        assert len(results) == 1, f"shards were summed over other hosts: {results}"
        return results.pop()

    def bits(self) -> int:
        return sum(1 << slot for slot in self.hosts)

    def check_weights(self, expected: int) -> None:
        for trainers in self.hosts.values():
            for trainer in trainers:
                assert bool((trainer.weights == expected).all()), (trainer.slot, trainer.weights[0], expected)

    def leave(self) -> None:
        trainers = [trainer for each in self.hosts.values() for trainer in each]
        list(self.pool.map(lambda trainer: trainer.hsdp.leave(PATIENCE_S), trainers))


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(40) as opened:
        yield opened


def redone(run: Run, slots: list[int]) -> list[int]:
    return [trainer.hsdp.redone for slot in slots for trainer in run.hosts[slot]]


def admitted(newcomers: list[Future[Trainer]], step: dict[int, list[Future[int]]]) -> bool:
    """Waits until the newcomers are admitted: True. Or until the step of the others has ended without them: False."""
    everything = [future for each in step.values() for future in each]

    def done(futures: Iterable[Future[Any]]) -> bool:
        return all(future.done() for future in futures)

    until(lambda: done(newcomers) or done(everything), "newcomers are admitted, or the others' step ends")
    return done(newcomers)


def step_of_all(run: Run, newcomers: list[Future[Trainer]]) -> int:
    """Steps until the newcomers are in, and one step with them. Returns the sum of the results' bits."""
    total = 0
    old = run.start_step()
    while not admitted(newcomers, old):
        total += run.check_step(old)
        old = run.start_step()
    run.add(newcomers)
    return total + run.check_step({**old, **run.start_step(slot for slot in run.hosts if slot not in old)})


@dataclasses.dataclass
class Kill:
    """One host goes, after the op of the early shard has ended and before the op of the late shard can end."""

    how: str
    victim: int
    early: int
    late: int
    holder: int  # the survivor whose late shard begins only afterwards
    victim_started: bool  # whether the victim's late shard has begun its op


def kill_of(number: int, random_: random.Random) -> Kill:
    how = ("missed", "leaves", "racing")[number % 3]
    victim, holder, _ = random_.sample(range(HOSTS), HOSTS)
    early, late = random_.sample(range(2), 2)
    return Kill(how, victim, early, late, holder, random_.random() < 0.5 and how != "leaves")


def remove(run: Run, kill: Kill, peers: dict[int, int]) -> None:
    """Removes the victim. Its peerd dies, or one of its trainers leaves, which takes the whole cohort along."""
    if kill.how == "leaves":
        run.hosts[kill.victim][kill.late].hsdp.comm.leave(PATIENCE_S)
    else:
        run.cluster.kill_peer(peers[kill.victim])
    if kill.how == "racing":
        return
    survivors = [slot for slot in run.hosts if slot != kill.victim]
    late = [run.hosts[slot][kill.late].hsdp.comm for slot in survivors]
    until(lambda: all(comm.world_size == len(survivors) for comm in late), "the victim is removed")


def step_with_kill(run: Run, kill: Kill, peers: dict[int, int]) -> int:
    """A step in which a host goes. Returns the bits of its results, which are equal at all survivors."""
    survivors = [slot for slot in run.hosts if slot != kill.victim]
    held = [run.hosts[kill.holder][kill.late], *([] if kill.victim_started else [run.hosts[kill.victim][kill.late]])]
    for trainers in run.hosts.values():
        for trainer in trainers:
            trainer.began.clear()
            trainer.ended.clear()
    for trainer in held:
        trainer.gate.clear()
    before = redone(run, survivors)
    futures = run.start_step()
    for trainers in run.hosts.values():
        assert trainers[kill.early].ended.wait(PATIENCE_S)
        assert trainers[kill.late].began.wait(PATIENCE_S)  # a leave() before it would end the sync of the boundary
    remove(run, kill, peers)
    for trainer in held:
        trainer.gate.set()
    for future in futures.pop(kill.victim):
        with pytest.raises((lh.Evicted, lh.Unavailable, lh.FailedPrecondition)):
            future.result(2 * PATIENCE_S)
    bits = run.check_step(futures)
    changes = {after - count for after, count in zip(redone(run, survivors), before)}
    assert len(changes) == 1, "some redid the step and others did not"
    if kill.how != "racing":
        # The early shard had three hosts, and the late one two.
        assert changes == {1}
        assert bits == sum(1 << slot for slot in survivors)
    elif changes == {0}:
        assert bits == run.bits()
    return bits


def test_shards_use_the_same_hosts_although_hosts_die_between_their_ops(pool: ThreadPoolExecutor) -> None:
    """Acceptance: with 50 kills, all shards use the same hosts in every step, or all redo it."""
    with LocalCluster(peers=HOSTS) as cluster:
        run = Run(cluster, pool, "hsdp", shards=2)
        peers = {slot: slot for slot in range(HOSTS)}
        run.add(run.come(peers, hosts=HOSTS))
        total = run.check_step(run.start_step())
        assert total == run.bits()
        for number in range(KILLS):
            kill = kill_of(number, run.random)
            total += step_with_kill(run, kill, peers)
            del run.hosts[kill.victim]
            run.check_weights(total)
            if kill.how != "leaves":
                peers[kill.victim] = cluster.add_peer()
            total += step_of_all(run, run.come({kill.victim: peers[kill.victim]}))
            run.check_weights(total)
        run.leave()


def test_eight_trainers_per_host(pool: ThreadPoolExecutor) -> None:
    with LocalCluster(peers=2) as cluster:
        run = Run(cluster, pool, "eight", shards=8)
        run.add(run.come({0: 0, 1: 1}, hosts=2))
        assert run.check_step(run.start_step()) == 3
        cluster.kill_peer(1)
        for trainer in run.hosts.pop(1):
            with pytest.raises((lh.Evicted, lh.Unavailable)):
                trainer.step()
        assert run.check_step(run.start_step()) == 1
        total = 4 + step_of_all(run, run.come({1: cluster.add_peer()}))
        run.check_weights(total)
        run.leave()


class Pair:
    """One host with two trainers, whose shards are members of two groups."""

    def __init__(self, cluster: LocalCluster, pool: ThreadPoolExecutor, name: str) -> None:
        self.pool = pool

        def join(shard: int) -> lh.torch.HSDP:
            return lh.torch.HSDP(name, peerd=cluster.socket(0), shard=shard, shards=2, token=7, host="one host")

        self.trainers = list(pool.map(join, range(2)))

    def each(self, call: Callable[[lh.torch.HSDP], Any]) -> list[Any]:
        """The result of the call at each trainer, or its error."""

        def outcome(trainer: lh.torch.HSDP) -> Any:
            try:
                return call(trainer)
            except lh.Error as problem:
                return problem

        return list(self.pool.map(outcome, self.trainers))


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(peers=1) as opened:
        yield opened


@pytest.fixture
def pair(cluster: LocalCluster, pool: ThreadPoolExecutor, request: pytest.FixtureRequest) -> Iterator[Pair]:
    opened = Pair(cluster, pool, request.node.name[:60])
    yield opened
    opened.each(lambda hsdp: hsdp.leave(PATIENCE_S))


def test_all_redo_a_round_whose_op_failed_at_one_shard(pair: Pair) -> None:
    tries = [0, 0]

    def ops(hsdp: lh.torch.HSDP) -> list[lh.OpInfo]:
        tries[hsdp.shard] += 1
        # The first op of shard 1 needs more members than there are.
        return [hsdp.comm.barrier(min_world=2 if hsdp.shard == 1 and tries[1] == 1 else 0)]

    infos = pair.each(lambda hsdp: hsdp.until_agreed(lambda: ops(hsdp)))
    assert [info.world_size for (info,) in infos] == [1, 1]
    assert tries == [2, 2]
    assert [hsdp.redone for hsdp in pair.trainers] == [1, 1]


def test_an_error_of_all_shards_is_raised_at_once(pair: Pair) -> None:
    outcomes = pair.each(lambda hsdp: hsdp.until_agreed(lambda: [hsdp.comm.barrier(min_world=2)]))
    assert [type(outcome) for outcome in outcomes] == [lh.TooFewMembers] * 2
    assert [hsdp.redone for hsdp in pair.trainers] == [0, 0]


def test_redos_end(pair: Pair) -> None:
    """One shard fails for ever. Every trainer gives up at the same time, each with its own error."""
    outcomes = pair.each(lambda hsdp: hsdp.until_agreed(lambda: [hsdp.comm.barrier(min_world=2 * hsdp.shard)]))
    assert [type(outcome) for outcome in outcomes] == [lh.Aborted, lh.TooFewMembers]
    assert len({hsdp.redone for hsdp in pair.trainers}) == 1


def test_ops_of_one_shard_that_differ_are_no_agreement(pair: Pair) -> None:
    (whole, _) = pair.each(lambda hsdp: hsdp.comm.barrier())
    assert pair.each(lambda hsdp: hsdp.agree([hsdp.comm.barrier(), hsdp.comm.barrier()])) == [True, True]
    nobody = whole._replace(members=())
    mixed = pair.each(lambda hsdp: hsdp.agree([hsdp.comm.barrier(), *([nobody] if hsdp.shard else [])]))
    assert mixed == [False, False]
    assert [type(outcome) for outcome in pair.each(lambda hsdp: hsdp.agree([]))] == [lh.InvalidArgument] * 2


def test_gradients_are_written_when_all_shards_agree(pair: Pair) -> None:
    """Also of parameters without elements at this shard, without a gradient, and frozen ones; weights weigh."""

    def average(hsdp: lh.torch.HSDP) -> list[Any]:
        model = torch.nn.ParameterList([torch.ones(3), torch.ones(2, 2), torch.ones(5), torch.ones(0)])
        model[0].grad = torch.full((3,), 2.0)
        model[2].requires_grad = False
        info = hsdp.average_gradients(model, weight=3.0)
        again = hsdp.average_gradients(model, weight=3.0)
        return [info.world_size, again.world_size, [None if p.grad is None else p.grad.sum().item() for p in model]]

    assert pair.each(average) == [[1, 1, [6.0, 0.0, None, 0.0]]] * 2


def test_shards_of_different_revisions_are_refused(pair: Pair) -> None:
    def step(hsdp: lh.torch.HSDP) -> None:
        with hsdp.step(lh.State({"w": torch.ones(3)}, revision=3 + hsdp.shard)):
            raise AssertionError("the block runs")

    outcomes = pair.each(step)
    assert [type(outcome) for outcome in outcomes] == [lh.StateMismatch] * 2
    assert "shard 1 is at revision 4" in str(outcomes[1])


@pytest.mark.parametrize("kind", [MemoryError, KeyboardInterrupt])
def test_a_trainer_with_an_exception_of_its_own_starts_no_further_op(
    cluster: LocalCluster, pool: ThreadPoolExecutor, kind: type[BaseException]
) -> None:
    """Its next op would be the one that the other shard waits for."""
    alone = Pair(cluster, pool, f"exception-{kind.__name__}")

    def fails() -> list[lh.OpInfo]:
        raise kind

    def call(hsdp: lh.torch.HSDP) -> None:
        model = torch.nn.ParameterList([torch.ones(3)])
        if hsdp.shard == 0:
            hsdp.average_gradients(model)
            return
        with pytest.raises(kind):
            hsdp.until_agreed(fails)
        match = "until_agreed ended with an exception at this trainer"
        with pytest.raises(lh.FailedPrecondition, match=match):
            hsdp.average_gradients(model)
        with pytest.raises(lh.FailedPrecondition, match=match):
            hsdp.agree([])
        with pytest.raises(lh.FailedPrecondition, match=match), hsdp.step():
            pass
        hsdp._leave(PATIENCE_S)

    other, own = alone.each(call)
    assert own is None and isinstance(other, lh.Evicted)


def test_a_shard_without_elements_takes_part(pair: Pair) -> None:
    def average(hsdp: lh.torch.HSDP) -> int:
        model = torch.nn.ParameterList([torch.ones(1 - hsdp.shard)])
        return hsdp.average_gradients(model).world_size

    assert pair.each(average) == [1, 1]


def test_wrong_arguments_are_named(cluster: LocalCluster) -> None:
    join = functools.partial(lh.torch.HSDP, "wrong", peerd=cluster.socket(0), timeout=PATIENCE_S)
    with pytest.raises(lh.InvalidArgument, match="init_process_group"):
        join()
    with pytest.raises(lh.InvalidArgument, match="all three"):
        join(shard=0, shards=2)
    wrongs: tuple[dict[str, Any], ...] = (
        {"shard": 2},
        {"shards": 0},
        {"shards": 33},
        {"token": 1 << 31},
        {"token": -1},
    )
    for wrong in wrongs:
        with pytest.raises(lh.InvalidArgument):
            join(**{"shard": 0, "shards": 2, "token": 1, **wrong})


def test_a_host_with_too_few_trainers_says_so(cluster: LocalCluster) -> None:
    with pytest.raises(lh.DeadlineExceeded, match="its 2 trainers"):
        lh.torch.HSDP("alone", peerd=cluster.socket(0), shard=0, shards=2, token=1, timeout=0.5)


def test_the_example_survives_the_death_of_a_host(tmp_path: pathlib.Path) -> None:
    """FSDP2 inside each of two hosts. One is killed and comes back; the script compares the bits in every step."""
    ended = subprocess.run(
        [sys.executable, str(EXAMPLE), "--steps=8", f"--logs={tmp_path}"], capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for shard in (0, 1):
        first, back = (
            [json.loads(line) for line in (tmp_path / f"host{host}-trainer{shard}.jsonl").read_text().splitlines()]
            for host in (0, 2)
        )
        # Host 0 has made every step once, at times with the other host and at times alone. The other one is back.
        assert [said["step"] for said in first] == list(range(1, len(first) + 1))
        assert {said["hosts"] for said in first} == {1, 2}
        assert [(said["step"], said["hash"]) for said in first[-len(back) :]] == [(s["step"], s["hash"]) for s in back]
        assert back[-1]["hosts"] == 2
    assert first[-1]["loss"] < first[0]["loss"]
