"""An exception at any line of a round, at one member or at all, leaves the next rounds exact, and nobody waits."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import Members
from injected import KINDS, Injector

import longhaul as lh
from longhaul.testing import LocalCluster

SECONDS = 2.0  # so long one test of the default check tries lines

SHAPES = [(3,), (5, 2), (), (40,), (0,), (7,)]
SMALL_MB = 64 / (1 << 20)  # several buckets


class Round:
    """One round of one member, with numbers that tell the round and the members whose gradients are in an average."""

    def __init__(self, comm: lh.Comm) -> None:
        self.comm = comm
        self.model = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES)

    def value(self, number: int, rank: int) -> float:
        return float(3**rank * (number % 64 + 1))

    def set_gradients(self, number: int) -> None:
        for i, parameter in enumerate(self.model):
            parameter.grad = torch.full(parameter.shape, self.value(number, self.comm.rank) * (i + 1))

    def check(self, number: int, size: int) -> None:
        mean = sum(self.value(number, rank) for rank in range(size)) / size
        for i, parameter in enumerate(self.model):
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, torch.full(parameter.shape, mean * (i + 1)), rtol=1e-6, atol=0)

    def run(self, number: int) -> None:
        raise NotImplementedError


class Averaged(Round):
    within = ("_average",)

    def run(self, number: int) -> None:
        self.set_gradients(number)
        lh.torch.average_gradients(self.model, self.comm, bucket_cap_mb=SMALL_MB, timeout=60)


class Weighted(Round):
    within = ("_average",)

    def run(self, number: int) -> None:
        self.set_gradients(number)
        lh.torch.average_gradients(
            self.model, self.comm, weight=2.0, bucket_cap_mb=SMALL_MB, gradient_as_bucket_view=True, timeout=60
        )


class Hooked(Round):
    within = ("_finish", "_hook")

    def __init__(self, comm: lh.Comm) -> None:
        super().__init__(comm)
        self.averager = lh.torch.GradientAverager(
            self.model, comm, bucket_cap_mb=SMALL_MB, first_bucket_mb=SMALL_MB, weight=1.0
        )

    def run(self, number: int) -> None:
        for parameter in self.model:
            parameter.grad = None
        value = self.value(number, self.comm.rank)
        try:
            torch.stack([(value * (i + 1) * each).sum() for i, each in enumerate(self.model)]).sum().backward()
        except BaseException:
            self.averager.abandon()
            raise
        self.averager.finish(60)


class Trials:
    """Rounds of a group, some of them with an exception. All members know all numbers, so they do the same."""

    def __init__(self, members: Members, make: Callable[[lh.Comm], Any], boundaries: bool) -> None:
        self._members = members
        self._rounds = {comm.member_id: made for comm, made in zip(members.comms, members.all(make), strict=True)}
        self._boundaries = boundaries
        self._number = 0

    def lines(self) -> int:
        """How many lines a round without an exception executes, and a few more."""
        injectors = self._once(dict.fromkeys(self._rounds))
        return max(each.lines for each in injectors.values()) + 3

    def try_at(self, at: dict[int, int], kind: type[BaseException]) -> list[str]:
        """A round with an exception after `at` lines, by member, then three without. Returns where it was raised."""
        injectors = self._once({member: at.get(member) for member in self._rounds}, kind)
        for _ in range(3):
            self._once(dict.fromkeys(self._rounds))
        return [each.place for each in injectors.values() if each.place]

    def _once(self, at: dict[int, int | None], kind: type[BaseException] = RuntimeError) -> dict[int, Injector]:
        number = self._number = self._number + 1
        injected = any(each is not None for each in at.values())

        def call(comm: lh.Comm) -> Injector:
            mine = self._rounds[comm.member_id]
            if self._boundaries:
                comm.begin_step(60)
            injector = Injector(at[comm.member_id], kind, mine.within)
            problem = injector.run(lambda: mine.run(number))
            if problem is None:
                mine.check(number, len(self._rounds))
            else:
                assert injected, f"round {number} is without an exception, and raised {problem!r}"
                assert injector.place or isinstance(problem, lh.Aborted), repr(problem)
            return injector

        return dict(zip(self._rounds, self._members.all(call, timeout=120), strict=True))


def sockets(cluster: LocalCluster, hosts: tuple[int, ...]) -> list[str]:
    return [cluster.socket(host) for host in hosts]


def some(trials: Trials, ids: list[int]) -> Iterator[tuple[dict[int, int], type[BaseException]]]:
    """Random lines, at one member or at all, for a while."""
    seed = int(os.environ.get("LONGHAUL_SEED", random.randrange(1 << 32)))
    print(f"LONGHAUL_SEED={seed}")  # shown if the test fails
    rng = random.Random(seed)
    lines = trials.lines()
    end = time.monotonic() + SECONDS
    tried = 0
    while tried < 10 or time.monotonic() < end:
        who = ids if rng.random() < 0.3 else [rng.choice(ids)]
        yield {member: rng.randrange(lines) for member in who}, rng.choice(KINDS)
        tried += 1


def all_of(trials: Trials, ids: list[int]) -> Iterator[tuple[dict[int, int], type[BaseException]]]:
    """Each line, at one member and at all."""
    for line in range(trials.lines()):
        yield {ids[line % len(ids)]: line}, KINDS[line % len(KINDS)]
        yield dict.fromkeys(ids, line), KINDS[line % len(KINDS)]


@pytest.mark.parametrize("chosen", [some, pytest.param(all_of, marks=pytest.mark.full)])
@pytest.mark.parametrize("boundaries", [False, True], ids=["alone", "boundaries"])
@pytest.mark.parametrize("hosts", [(0, 1), (0, 0, 1)], ids=["pair", "shared_host"])
@pytest.mark.parametrize("make", [Averaged, Weighted, Hooked])
def test_the_rounds_after_an_exception_are_exact(
    cluster: LocalCluster,
    make: Callable[[lh.Comm], Any],
    hosts: tuple[int, ...],
    boundaries: bool,
    chosen: Callable[[Trials, list[int]], Iterator[tuple[dict[int, int], type[BaseException]]]],
) -> None:
    members = Members(sockets(cluster, hosts))
    trials = Trials(members, make, boundaries)
    places: set[str] = set()
    for at, kind in chosen(trials, [comm.member_id for comm in members.comms]):
        places.update(trials.try_at(at, kind))
    assert places
    members.close()
