"""LocalSGD, DiLoCo, AsyncDiLoCo and StreamingDiLoCo: against their references, with newcomers, and with deaths."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import diloco_reference as reference
import pytest
import torch
from conftest import Gated, Members, wait_for_open_ops, wait_until
from fake_copier import FakeCopier
from stand_ins import Delegating, Lookahead

import longhaul as lh
import longhaul._arena
from longhaul.testing import LocalCluster
from longhaul.torch import AsyncDiLoCo, DiLoCo, LocalSGD, StreamingDiLoCo

ROUNDS = 5
SYNC_EVERY = 6
FRAGMENTS = [[0, 1], [2, 3]]
DELAY, ALPHA = 2, 0.25
KINDS = ["LocalSGD", "DiLoCo", "AsyncDiLoCo", "StreamingDiLoCo"]
# How far a class may be from its reference, if members may be summed in another order than in the reference.
TOLERANCE = 1e-6

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
History = dict[int, reference.Values]


# Members are threads of this process, which would disturb each other's use of the global random generator.
torch.manual_seed(7)
MODEL = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.Tanh(), torch.nn.Linear(24, 5))
TEACHER = 0.3 * torch.randn(12, 5)


class Trainer:
    """A model, its inner optimizer and its data: the same at each run."""

    def __init__(self, number: int) -> None:
        torch.set_num_threads(1)  # of this thread: with the same number everywhere, results are the same bits
        self.model = copy.deepcopy(MODEL)
        self.inner: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self._data = torch.Generator().manual_seed(number)

    def loss(self, samples: int, data: torch.Generator) -> torch.Tensor:
        x = torch.randn(samples, 12, generator=data)
        y = torch.sin(x @ TEACHER) + 0.5 * torch.randn(samples, 5, generator=data)
        return torch.nn.functional.mse_loss(self.model(x), y)

    def inner_step(self) -> None:
        self.inner.zero_grad()
        self.loss(32, self._data).backward()
        self.inner.step()

    def schedule(self, number: int, rounds: int) -> None:
        """Sets the learning rate. It is a function of the shared round, so newcomers need no other state."""
        self.inner.param_groups[0]["lr"] = 3e-3 * (1 - number / rounds)

    def judge(self) -> float:
        """The loss on data that nobody trains with."""
        with torch.no_grad():
            return self.loss(4096, torch.Generator().manual_seed(12345)).item()


def nesterov(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def gentle(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """For runs so short that a momentum of 0.9 would not come to rest."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.6, nesterov=True)


def dampened(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Its first step differs from one with a momentum of zeros."""
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.8, dampening=0.3)


def adam(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def plain(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def grouped(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    groups = [{"params": parameters[::2], "weight_decay": 0.01}, {"params": parameters[1::2], "lr": 0.3}]
    return torch.optim.SGD(groups, lr=0.7, momentum=0.5, nesterov=True)


def adagrad(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Has its state before the first step."""
    return torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.5)


def make(
    kind: str, comm: lh.Comm | None, trainer: Trainer, make_outer: MakeOptimizer = nesterov, **options: Any
) -> Any:
    """The class under test, over the model of a trainer."""
    if kind == "LocalSGD":
        return LocalSGD(comm, trainer.model, trainer.inner, sync_every=SYNC_EVERY, **options)
    arguments = (comm, trainer.model, trainer.inner, make_outer(list(trainer.model.parameters())))
    if kind == "StreamingDiLoCo":
        return StreamingDiLoCo(
            *arguments,
            sync_every=SYNC_EVERY,
            model_fragments=[trainer.model[0], trainer.model[2]],
            fragment_sync_delay=DELAY,
            fragment_update_alpha=ALPHA,
            **options,
        )
    return {"DiLoCo": DiLoCo, "AsyncDiLoCo": AsyncDiLoCo}[kind](*arguments, sync_every=SYNC_EVERY, **options)


def rounds_of(
    kind: str, workers: list[reference.Worker], make_outer: MakeOptimizer = nesterov
) -> Iterator[reference.Values]:
    """The reference of a class."""
    if kind == "LocalSGD":
        return reference.local_sgd(workers, SYNC_EVERY)
    if kind == "StreamingDiLoCo":
        return reference.streaming_diloco(workers, make_outer, SYNC_EVERY, FRAGMENTS, DELAY, ALPHA)
    return {"DiLoCo": reference.diloco, "AsyncDiLoCo": reference.async_diloco}[kind](workers, make_outer, SYNC_EVERY)


def worker(number: int) -> reference.Worker:
    trainer = Trainer(number)
    return reference.Worker(trainer.model, trainer.inner_step)


def global_values(diloco: Any) -> reference.Values:
    """The global parameters, in the order of the model's parameters."""
    return [value.detach().clone() for fragment in diloco._fragments for value in fragment.globals]


def train(comm: lh.Comm, number: int, kind: str, make_outer: MakeOptimizer = nesterov, **options: Any) -> History:
    """What a member does: it trains up to round ROUNDS. Returns the global parameters after each round."""
    trainer = Trainer(number)
    history: History = {}
    with make(kind, comm, trainer, make_outer, **options) as diloco:
        while diloco.round < ROUNDS:
            trainer.inner_step()
            if diloco.round > max(history, default=0):
                history[diloco.round] = global_values(diloco)
                assert diloco.sync.bytes == 0, "the members have computed different bits"
    return history


def check(kind: str, histories: list[History], want: list[reference.Values], exact: bool) -> None:
    """Members are equal bit by bit; they equal the reference, too, if the order of the sums cannot differ."""
    assert any(not torch.equal(a, b) for a, b in zip(want[0], want[-1])), "nothing was trained"
    for history in histories:
        for number, values in history.items():
            for got, first, right in zip(values, histories[0][number], want[number - 1]):
                assert torch.equal(got, first), f"{kind}: members differ in round {number}"
                torch.testing.assert_close(got, right, rtol=0, atol=0 if exact else TOLERANCE)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_reference(kind: str, count: int, cluster: LocalCluster) -> None:
    members = Members([cluster.socket(i) for i in range(count)])
    try:
        histories = members.all(lambda comm: train(comm, comm.rank, kind))
    finally:
        members.close()
    assert all(len(history) == ROUNDS for history in histories)
    want = list(itertools.islice(rounds_of(kind, [worker(number) for number in range(count)]), ROUNDS))
    check(kind, histories, want, exact=count == 2)


@pytest.mark.parametrize("make_outer", [dampened, adam, adagrad, plain, grouped])
@pytest.mark.parametrize("kind", ["AsyncDiLoCo", "StreamingDiLoCo"])
def test_any_outer_optimizer(kind: str, make_outer: MakeOptimizer, pair: Members) -> None:
    histories = pair.all(lambda comm: train(comm, comm.rank, kind, make_outer))
    want = list(itertools.islice(rounds_of(kind, [worker(0), worker(1)], make_outer), ROUNDS))
    check(kind, histories, want, exact=True)


@pytest.mark.parametrize("kind", ["AsyncDiLoCo", "StreamingDiLoCo"])
def test_several_outer_optimizers(kind: str, pair: Members) -> None:
    def several(parameters: list[torch.nn.Parameter]) -> Any:
        return [nesterov(parameters[:2]), nesterov(parameters[2:])]

    histories = pair.all(lambda comm: train(comm, comm.rank, kind, several))
    want = list(itertools.islice(rounds_of(kind, [worker(0), worker(1)]), ROUNDS))
    check(kind, histories, want, exact=True)


@pytest.mark.parametrize("options", [{"use_bucketization": False}, {"bucket_cap_mb": 0.001}, {"pin_memory": True}])
def test_buckets_change_no_bit(options: dict[str, Any], pair: Members) -> None:
    histories = pair.all(lambda comm: train(comm, comm.rank, "DiLoCo", **options))
    want = list(itertools.islice(rounds_of("DiLoCo", [worker(0), worker(1)]), ROUNDS))
    check("DiLoCo", histories, want, exact=True)


JOINS_AT = 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_newcomer(kind: str, cluster: LocalCluster) -> None:
    """A third member comes in at the end of round 1. With AsyncDiLoCo, that is before the first outer step."""
    members = Members([cluster.socket(0), cluster.socket(1)])
    make_outer = dampened
    begun = threading.Barrier(3)  # the newcomer must not come at the boundary of round 0 already

    def old(comm: lh.Comm) -> History:
        trainer = Trainer(comm.rank)
        history: History = {}
        with make(kind, comm, trainer, make_outer) as diloco:
            begun.wait(60)
            while diloco.round < ROUNDS:
                if diloco.round == JOINS_AT - 1:
                    wait_until(lambda: comm.pending == 1)
                trainer.inner_step()
                history.setdefault(diloco.round, global_values(diloco))
                assert diloco.sync.bytes == 0
        return history

    def new() -> History:
        trainer = Trainer(2)
        history: History = {}
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.fill_(3)
        diloco = make(kind, None, trainer, make_outer)
        begun.wait(60)
        with lh.join(members.run, peerd=cluster.socket(2), state=diloco.state) as diloco.comm, diloco:
            assert diloco.round == JOINS_AT and diloco.sync.bytes > 0
            while diloco.round < ROUNDS:
                history.setdefault(diloco.round, global_values(diloco))
                trainer.inner_step()
            history.setdefault(diloco.round, global_values(diloco))
        return history

    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(new)
        try:
            histories = [*members.all(old), joining.result(60)]
        finally:
            members.close()
    workers = [worker(0), worker(1)]
    rounds = rounds_of(kind, workers, make_outer)
    want = [next(rounds) for _ in range(JOINS_AT)]
    workers.append(worker(2))
    want += [next(rounds) for _ in range(ROUNDS - JOINS_AT)]
    for history in histories:
        history.pop(0, None)
    assert histories[2].keys() == set(range(JOINS_AT, ROUNDS + 1))
    check(kind, histories, want, exact=False)


def die_in_flight(cluster: LocalCluster, kind: str) -> None:
    doomed = cluster.add_peer()
    members = Members([cluster.socket(0), cluster.socket(1), cluster.socket(doomed)])
    gate = threading.Event()

    def rounds(comm: lh.Comm) -> History | lh.Error:
        late = comm.rank == 1
        try:
            return train(Gated(comm, "all_reduce", 1, gate) if late else comm, comm.rank, kind)  # type: ignore[arg-type]
        except lh.Error as problem:
            return problem

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(members.all, rounds)
        try:
            wait_for_open_ops([cluster.peers[0], cluster.peers[doomed]])
            cluster.kill_peer(doomed)
        finally:
            gate.set()
        first, second, dead = running.result(120)
    members.close()
    assert isinstance(dead, lh.Unavailable), dead
    assert isinstance(first, dict) and isinstance(second, dict), (first, second)
    assert first.keys() == second.keys() == set(range(1, ROUNDS + 1))
    for number, values in first.items():
        assert all(map(torch.equal, values, second[number])), f"{kind}: members differ in round {number}"


def test_a_host_dies_while_an_op_is_in_flight() -> None:
    """The others go on, equal bit by bit. The dead host's trainer gets an error."""
    with LocalCluster(peers=2) as cluster:
        for kind in KINDS:
            die_in_flight(cluster, kind)


class Churn:
    """A group of three, in which hosts die and others join, at moments that a seed chooses.

    The group does not train past a fault before that fault has happened: members wait at round `open_until`.
    """

    GAP = 4  # rounds from fault to fault
    TAIL = 20  # rounds after the last one

    def __init__(self, cluster: LocalCluster, kind: str, faults: int, rounds: int) -> None:
        self._cluster = cluster
        self._kind = kind
        self._faults = faults
        self._run = f"churn-{kind}-{faults}"
        self._rounds = rounds
        self._open_until = self.GAP + 3
        self._inside: dict[int, Any] = {}  # by number: what trains now
        self._dead: set[int] = set()
        self._peer_of: dict[int, int] = {}
        self.hashes: dict[int, set[str]] = {}  # by round
        self.worlds: set[int] = set()

    def member(self, number: int, together: int | None) -> float | None:
        """Trains to the end and returns the loss; None if its host was killed."""
        try:
            socket = self._cluster.socket(self._peer_of[number])
            with lh.join(self._run, peerd=socket, timeout=120, members=together, name=f"n{number:03}") as comm:
                return self._train(comm, number)
        except lh.Unavailable:
            assert number in self._dead
            return None

    def _train(self, comm: lh.Comm, number: int) -> float:
        trainer = Trainer(number)
        with make(self._kind, comm, trainer, gentle) as diloco:
            self._inside[number] = diloco
            seen = diloco.round
            while diloco.round < self._rounds:
                wait_until(lambda: diloco.round < self._open_until, 120)
                trainer.schedule(diloco.round, self._rounds)
                trainer.inner_step()
                if diloco.round > seen:
                    seen = diloco.round
                    assert diloco.sync.bytes == 0, "the members have computed different bits"
                    self.hashes.setdefault(seen, set()).add(diloco.state.hash)
                    self.worlds.add(comm.world_size)
        return trainer.judge()

    def _alive(self) -> list[int]:
        return [number for number in list(self._inside) if number not in self._dead]

    def _round(self) -> int:
        """The latest round that a member has come to."""
        return max((int(self._inside[number].round) for number in self._alive()), default=0)

    def _wait_for_round(self, number: int) -> None:
        wait_until(lambda: self._round() >= number, 120)

    def _admit(self, newcomer: int) -> None:
        """Lets the group go on once the newcomer stands at the door, and waits until it is inside."""
        member = self._inside[self._alive()[0]].comm
        wait_until(lambda: member.pending > 0 or newcomer in self._inside, 120)
        self._open_until += self.GAP
        wait_until(lambda: newcomer in self._inside, 120)

    def train(self, seed: int) -> list[float]:
        """Trains with all faults. Returns the losses of those that are left."""
        chance = random.Random(seed)
        with ThreadPoolExecutor(8) as pool:
            running = []
            for number in range(3):
                self._peer_of[number] = self._cluster.add_peer()
                running.append(pool.submit(self.member, number, 3))
            for fault in range(self._faults):
                newcomer = 3 + fault
                self._peer_of[newcomer] = self._cluster.add_peer()
                self._wait_for_round(self.GAP * (fault + 1))
                time.sleep(chance.uniform(0, 0.05))
                # In half of the cases the newcomer asks first, and the boundary that admits it may meet the death.
                if chance.random() < 0.5:
                    running.append(pool.submit(self.member, newcomer, None))
                victim = chance.choice(self._alive())
                self._dead.add(victim)
                self._cluster.kill_peer(self._peer_of[victim])
                if len(running) == newcomer:
                    running.append(pool.submit(self.member, newcomer, None))
                self._admit(newcomer)
            self._open_until = self._rounds
            losses = [each.result(300) for each in running]
        assert len(running) == 3 + self._faults and len(self._dead) == self._faults
        return [loss for loss in losses if loss is not None]


# LONGHAUL_DILOCO_FAULTS=20 pytest client/python/tests/test_diloco.py -k churn    20 kills and joins for each class
FAULTS = int(os.environ.get("LONGHAUL_DILOCO_FAULTS", "3"))


def loss_without_faults(kind: str, rounds: int) -> float:
    """That of the reference, with three workers. A group without faults equals it."""
    trainers = [Trainer(number) for number in range(3)]
    workers = [reference.Worker(trainer.model, trainer.inner_step) for trainer in trainers]
    of_reference = rounds_of(kind, workers, gentle)
    for number in range(rounds):
        for trainer in trainers:
            trainer.schedule(number, rounds)
        values = next(of_reference)
    workers[0].set(values)
    return trainers[0].judge()


@pytest.mark.parametrize("kind", KINDS)
def test_churn(kind: str) -> None:
    rounds = Churn.GAP * (FAULTS + 1) + Churn.TAIL
    with LocalCluster(peers=0) as cluster:
        churn = Churn(cluster, kind, FAULTS, rounds)
        losses = churn.train(20231108)
    first, without = Trainer(0).judge(), loss_without_faults(kind, rounds)
    print(f"{kind}: loss {first:.4f} at first; {without:.4f} without faults, {losses[0]:.4f} with {FAULTS}")
    assert len(losses) == 3 and len(set(losses)) == 1
    assert all(len(hashes) == 1 for hashes in churn.hashes.values()), "members differ"
    assert churn.hashes.keys() == set(range(1, rounds + 1))
    assert without < 0.8 * first
    assert abs(losses[0] / without - 1) < 0.02


def test_an_aborted_op_is_started_again(pair: Members) -> None:
    gate = threading.Event()

    def cancels(comm: lh.Comm) -> History:
        counted: Any = Gated(comm, "all_reduce", -1, gate)
        trainer = Trainer(comm.rank)
        history: History = {}
        with make("AsyncDiLoCo", counted, trainer) as diloco:
            while diloco.round < ROUNDS:
                trainer.inner_step()
                if diloco.round not in history and diloco.round > 0:
                    history[diloco.round] = global_values(diloco)
                    if diloco.round == 1:
                        work = diloco._fragments[0]._work
                        work.cancel()
                        with pytest.raises(lh.Aborted):
                            work.wait(60)
                        gate.set()  # not before: an op that is almost done would still end well
        assert counted.started > ROUNDS + 1, "no op was started again"
        return history

    def late(comm: lh.Comm) -> History:
        gated: Any = Gated(comm, "all_reduce", 1, gate)
        return train(gated, comm.rank, "AsyncDiLoCo")

    histories = pair.all(lambda comm: (cancels if comm.rank == 0 else late)(comm))
    want = list(itertools.islice(rounds_of("AsyncDiLoCo", [worker(0), worker(1)]), ROUNDS))
    check("AsyncDiLoCo", histories, want, exact=True)


def test_only_newcomers_are_left(cluster: LocalCluster) -> None:
    """AsyncDiLoCo: the member whose pseudo-gradient an op has died before it started the op. Nothing is updated."""
    members = Members([cluster.socket(0)])
    gate, begun = threading.Event(), threading.Event()

    def old(comm: lh.Comm) -> None:
        gated: Any = Gated(comm, "all_reduce", 1, gate)
        trainer = Trainer(0)
        with contextlib.suppress(AssertionError), make("AsyncDiLoCo", gated, trainer):
            begun.set()
            wait_until(lambda: comm.pending == 1)
            for _ in range(SYNC_EVERY):
                trainer.inner_step()

    def new() -> tuple[reference.Values, reference.Values]:
        begun.wait(60)
        trainer = Trainer(1)
        with lh.join(members.run, peerd=cluster.socket(1)) as comm, make("AsyncDiLoCo", comm, trainer) as diloco:
            start = global_values(diloco)
            members.comms[0].leave(60)  # it leaves without having started the op
            while diloco.round < 2:
                trainer.inner_step()
            assert diloco.info is None and not diloco.state.tensors["outer.made"].any(), "there was an outer step"
            return start, global_values(diloco)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(old, members.comms[0])
        start, end = pool.submit(new).result(60)
        gate.set()
        assert isinstance(first.exception(60), lh.FailedPrecondition)  # it has left
    assert all(map(torch.equal, start, end))


def test_joins_again_with_the_same_object(pair: Members) -> None:
    """A member leaves in the middle of a round, and comes back with its communicator replaced."""

    def stays(comm: lh.Comm) -> Any:
        trainer = Trainer(0)
        with make("AsyncDiLoCo", comm, trainer) as diloco:
            while diloco.round < ROUNDS:
                if diloco.round == 2:
                    wait_until(lambda: comm.pending == 1 or comm.world_size == 2)
                trainer.inner_step()
        assert diloco.info.world_size == 2
        return diloco.state.compute_hash()

    def comes_back(comm: lh.Comm) -> Any:
        trainer = Trainer(1)
        diloco = make("AsyncDiLoCo", comm, trainer)
        with contextlib.suppress(KeyboardInterrupt), comm, diloco:
            while diloco.round < 1:
                trainer.inner_step()
            trainer.inner_step()
            raise KeyboardInterrupt
        with lh.join(pair.run, peerd=comm._client.path, state=diloco.state) as diloco.comm, diloco:
            while diloco.round < ROUNDS:
                trainer.inner_step()
        return diloco.state.compute_hash()

    hashes = pair.all(lambda comm: (stays if comm.rank == 0 else comes_back)(comm))
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("kind", KINDS)
def test_made_without_a_communicator_it_connects_to_nobody(
    kind: str, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a member that comes back alone goes on in its round."""
    monkeypatch.setenv("LONGHAUL_SOCKET", "/nonexistent/peerd.sock")
    monkeypatch.setattr(longhaul._arena, "_latest", None)
    trainer = Trainer(0)
    diloco = make(kind, None, trainer)
    rounds: list[int] = []

    def train_to(end: int, comm: lh.Comm) -> None:
        diloco.comm = comm
        with diloco:
            rounds.append(diloco.round)
            while diloco.round < end:
                trainer.inner_step()

    for end in (2, 4):
        run = functools.partial(train_to, end)
        lh.run(run, f"alone-{kind}", peerd=cluster.socket(0), state=diloco.state)
    assert rounds == [0, 3 if kind == "AsyncDiLoCo" else 2]  # AsyncDiLoCo: the end of a block counts as a round
    want = list(itertools.islice(rounds_of(kind, [worker(0)]), 2))
    assert any(not torch.equal(value, first) for value, first in zip(global_values(diloco), want[0]))


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_that_delegates(kind: str, pair: Members) -> None:
    """As accelerate's, which has no hooks: as inner and as outer optimizer it is the one inside it."""

    def call(comm: lh.Comm) -> History:
        trainer = Trainer(comm.rank)
        trainer.inner = Delegating(trainer.inner)
        history: History = {}
        outer = Delegating(nesterov([*trainer.model.parameters()]))
        with make(kind, comm, trainer, lambda _: outer) as diloco:
            while diloco.round < ROUNDS:
                trainer.inner_step()
                if diloco.round > max(history, default=0):
                    history[diloco.round] = global_values(diloco)
        return history

    histories = pair.all(call)
    check(kind, histories, list(itertools.islice(rounds_of(kind, [worker(0), worker(1)]), ROUNDS)), exact=True)


def test_an_outer_optimizer_with_another_one_inside_is_refused(cluster: LocalCluster) -> None:
    trainer = Trainer(0)
    with pytest.raises(lh.InvalidArgument, match="Lookahead cannot be the outer optimizer: it has a SGD inside"):
        DiLoCo(None, trainer.model, None, Lookahead(nesterov([*trainer.model.parameters()])), sync_every=1)


@pytest.mark.parametrize("kind", KINDS)
def test_after_an_error_was_caught_the_round_goes_on(kind: str, pair: Members) -> None:
    """One member gets it in the middle of what it does at the end of a round, and makes the next inner step."""

    def call(comm: lh.Comm) -> reference.Values:
        trainer = Trainer(comm.rank)
        raised = 0
        with make(kind, comm, trainer) as diloco:
            apply = diloco._apply

            def fails(fragment: Any) -> None:
                nonlocal raised
                if raised < 2 and comm.rank == 0:
                    raised += 1
                    diloco._fragments[0].globals[0].zero_()
                    raise MemoryError
                apply(fragment)

            diloco._apply = fails
            while diloco.round < ROUNDS:
                with contextlib.suppress(MemoryError):
                    trainer.inner_step()
                assert diloco.sync.bytes == 0, "the members have other bits"
        assert raised == 2 * (1 - comm.rank)
        return global_values(diloco)

    first, second = pair.all(call)
    assert all(map(torch.equal, first, second))


def test_what_is_refused(cluster: LocalCluster) -> None:
    trainer = Trainer(0)
    model, inner = trainer.model, trainer.inner
    with lh.join("refused", peerd=cluster.socket(0)) as comm:
        stranger = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=1.0)
        half = torch.optim.SGD(model[0].parameters(), lr=1.0)
        twice = [nesterov(list(model.parameters())), nesterov(list(model.parameters()))]
        lbfgs = torch.optim.LBFGS(model.parameters())
        fragments = [model[0], model[2]]
        wrong: list[tuple[str, Callable[[], Any]]] = [
            ("sync_every is 0", lambda: DiLoCo(comm, model, inner, sync_every=0)),
            ("sync_every is 1.5", lambda: LocalSGD(comm, model, inner, sync_every=1.5)),  # type: ignore[arg-type]
            ("quantize is 8", lambda: DiLoCo(comm, model, inner, sync_every=1, quantize=8)),  # type: ignore[arg-type]
            ("codecs that may be chosen", lambda: DiLoCo(comm, model, inner, sync_every=1, quantize="auto")),
            (
                "give one of the two",
                lambda: DiLoCo(comm, model, inner, sync_every=1, quantize="int8", compress=lh.torch.TopK()),
            ),
            ("backup_device is cuda", lambda: DiLoCo(comm, model, inner, sync_every=1, backup_device="cuda")),
            ("bucket_cap_mb is 0", lambda: DiLoCo(comm, model, inner, sync_every=1, bucket_cap_mb=0)),
            ("not one of the model's", lambda: DiLoCo(comm, model, inner, stranger, sync_every=1)),
            ("2 of 4 parameters", lambda: DiLoCo(comm, model, inner, half, sync_every=1)),
            ("in two outer optimizers", lambda: DiLoCo(comm, model, inner, twice, sync_every=1)),
            ("LBFGS cannot be the outer optimizer", lambda: DiLoCo(comm, model, inner, lbfgs, sync_every=1)),
            ("no parameter", lambda: DiLoCo(comm, torch.nn.Tanh(), None, sync_every=1)),
            (
                "give a multiple",
                lambda: StreamingDiLoCo(comm, model, inner, sync_every=5, model_fragments=fragments),
            ),
            (
                "turn of 3 inner steps",
                lambda: StreamingDiLoCo(
                    comm, model, inner, sync_every=6, model_fragments=fragments, fragment_sync_delay=3
                ),
            ),
            (
                "fragment_update_alpha is 2",
                lambda: StreamingDiLoCo(
                    comm, model, inner, sync_every=6, model_fragments=fragments, fragment_update_alpha=2
                ),
            ),
            (
                "leaves out 2 parameters of the model, the first is 2.weight",
                lambda: StreamingDiLoCo(comm, model, inner, sync_every=6, model_fragments=[model[0]]),
            ),
            (
                "model_fragments[1] has no trained parameter",
                lambda: StreamingDiLoCo(comm, model, inner, sync_every=6, model_fragments=[model, model[0]]),
            ),
        ]
        for text, call in wrong:
            with pytest.raises(lh.InvalidArgument, match=re.escape(text)):
                call()
        outside = DiLoCo(None, model, inner, sync_every=1)
        with pytest.raises(lh.FailedPrecondition, match="set `comm`"):
            outside.__enter__()
        with pytest.raises(lh.FailedPrecondition, match="outside the block"):
            outside.step()
        outside.comm = comm
        with outside, pytest.raises(lh.FailedPrecondition, match="open already"):
            outside.__enter__()


def test_without_a_hook_and_evaluation(cluster: LocalCluster) -> None:
    trainer = Trainer(0)
    with lh.join("no-hook", peerd=cluster.socket(0)) as comm:
        with AsyncDiLoCo(comm, trainer.model, None, sync_every=2) as diloco:
            for _ in range(5):
                trainer.inner_step()
                diloco.step()
            own = [parameter.detach().clone() for parameter in trainer.model.parameters()]
            with diloco.global_parameters():
                assert all(map(torch.equal, global_values(diloco), trainer.model.parameters()))
            assert all(map(torch.equal, own, trainer.model.parameters()))
            assert diloco.round == 2
        assert all(map(torch.equal, global_values(diloco), trainer.model.parameters()))
        assert diloco.info is not None and diloco.info.world_size == 1


def test_buckets_are_pinned_where_cuda_is(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    model = torch.nn.Linear(1000, 1000)
    with FakeCopier() as device, lh.join("pinned-buckets", peerd=cluster.socket(0)) as comm:
        with LocalSGD(comm, model, None, sync_every=1, pin_memory=True) as local:
            assert list(device.pinned.values()) == [4_004_000] * 2  # what is global, and what goes out
            local.step()
        del local
        gc.collect()
        wait_until(lambda: not device.pinned)
