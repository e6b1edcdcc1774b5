"""LocalSGD, DiLoCo, AsyncDiLoCo and StreamingDiLoCo: against their references, with newcomers, and with deaths."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import diloco_reference as reference
import pytest
import torch
from conftest import Members, wait_until

import longhaul as lh
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


class Trainer:
    """A model, its inner optimizer and its data: the same at each run."""

    def __init__(self, number: int) -> None:
        torch.set_num_threads(1)  # of this thread: with the same number everywhere, results are the same bits
        self.model = copy.deepcopy(MODEL)
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self._data = torch.Generator().manual_seed(number)
        self._teacher = torch.randn(12, 5, generator=torch.Generator().manual_seed(99))

    def inner_step(self) -> None:
        x = torch.randn(16, 12, generator=self._data)
        self.inner.zero_grad()
        torch.nn.functional.mse_loss(self.model(x), torch.sin(x @ self._teacher)).backward()
        self.inner.step()


def nesterov(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def dampened(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Its first step differs from one with a momentum of zeros."""
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.8, dampening=0.3)


def adam(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def plain(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


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


@pytest.mark.parametrize("make_outer", [dampened, adam, adagrad, plain])
@pytest.mark.parametrize("kind", ["DiLoCo", "StreamingDiLoCo"])
def test_any_outer_optimizer(kind: str, make_outer: MakeOptimizer, pair: Members) -> None:
    histories = pair.all(lambda comm: train(comm, comm.rank, kind, make_outer))
    want = list(itertools.islice(rounds_of(kind, [worker(0), worker(1)], make_outer), ROUNDS))
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

    def old(comm: lh.Comm) -> History:
        trainer, history = Trainer(comm.rank), {}
        with make(kind, comm, trainer, make_outer) as diloco:
            while diloco.round < ROUNDS:
                if diloco.round == JOINS_AT - 1:
                    wait_until(lambda: comm.pending == 1)
                trainer.inner_step()
                history.setdefault(diloco.round, global_values(diloco))
                assert diloco.sync.bytes == 0
        return history

    def new() -> History:
        trainer, history = Trainer(2), {}
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.fill_(3)
        diloco = make(kind, None, trainer, make_outer)
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
