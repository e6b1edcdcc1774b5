"""What LocalSGD, DiLoCo, AsyncDiLoCo and StreamingDiLoCo compute: N workers, one after the other, without a network.

Written for reading. A worker is a model, its inner optimizer and its data. Each function yields the global parameters
after each round. Then the caller may add workers at the end of the list; they begin with what a newcomer gets.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence

import torch

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
Values = list[torch.Tensor]


class Worker:
    """inner_step: makes one inner step of the model."""

    def __init__(self, model: torch.nn.Module, inner_step: Callable[[], None]) -> None:
        self.parameters = list(model.parameters())
        self.inner_step = inner_step

    def values(self) -> Values:
        return [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def set(self, values: Values) -> None:
        for parameter, value in zip(self.parameters, values):
            parameter.copy_(value)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.inner_step()


class Global:
    """The global parameters, and the outer optimizer."""

    def __init__(self, start: Values, make_outer: MakeOptimizer) -> None:
        self.parameters = [torch.nn.Parameter(value.clone()) for value in start]
        self.outer = make_outer(self.parameters)

    def values(self) -> Values:
        return [parameter.detach().clone() for parameter in self.parameters]

    def outer_step(self, gradients: dict[int, torch.Tensor]) -> None:
        for number, parameter in enumerate(self.parameters):
            parameter.grad = gradients.get(number)
        self.outer.step()

    def preview(self, gradients: Values) -> Values:
        """What the global parameters would be after an outer step."""
        twin = copy.deepcopy(self)
        twin.outer_step(dict(enumerate(gradients)))
        return twin.values()


def average(of_workers: Sequence[Values]) -> Values:
    return [torch.stack(each).sum(0) / len(each) for each in zip(*of_workers)]


def difference(a: Values, b: Values) -> Values:
    return [x - y for x, y in zip(a, b)]


def local_sgd(workers: list[Worker], sync_every: int) -> Iterator[Values]:
    while True:
        for worker in workers:
            worker.steps(sync_every)
        shared = average([worker.values() for worker in workers])
        yield shared
        for worker in workers:
            worker.set(shared)


def diloco(workers: list[Worker], make_outer: MakeOptimizer, sync_every: int) -> Iterator[Values]:
    shared = Global(workers[0].values(), make_outer)
    while True:
        for worker in workers:
            worker.steps(sync_every)
        progress = [difference(shared.values(), worker.values()) for worker in workers]
        shared.outer_step(dict(enumerate(average(progress))))
        yield shared.values()
        for worker in workers:
            worker.set(shared.values())


def async_diloco(workers: list[Worker], make_outer: MakeOptimizer, sync_every: int) -> Iterator[Values]:
    """The first round changes nothing yet."""
    shared = Global(workers[0].values(), make_outer)
    starts = [worker.values() for worker in workers]
    on_its_way: Values | None = None
    while True:
        for worker in workers:
            worker.steps(sync_every)
        if on_its_way is not None:
            shared.outer_step(dict(enumerate(on_its_way)))
        progress = [difference(start, worker.values()) for start, worker in zip(starts, workers)]
        starts = [shared.preview(own) for own in progress]
        for worker, start in zip(workers, starts):
            worker.set(start)
        on_its_way = average(progress)
        yield shared.values()
        for newcomer in workers[len(starts) :]:
            newcomer.set(shared.values())
            starts.append(shared.values())


def streaming_diloco(
    workers: list[Worker],
    make_outer: MakeOptimizer,
    sync_every: int,
    fragments: list[list[int]],
    delay: int,
    alpha: float,
) -> Iterator[Values]:
    """fragments: the numbers of the parameters of each fragment."""
    shared = Global(workers[0].values(), make_outer)
    turn = sync_every // len(fragments)
    while True:
        for numbers in fragments:
            for worker in workers:
                worker.steps(turn - delay)
            progress = average([difference(shared.values(), worker.values()) for worker in workers])
            for worker in workers:
                worker.steps(delay)
            shared.outer_step({number: progress[number] for number in numbers})
            for worker in workers:
                values = worker.values()
                for number in numbers:
                    new = shared.parameters[number].detach()
                    values[number] = torch.lerp(new, values[number], alpha)
                worker.set(values)
        known = len(workers)
        yield shared.values()
        for newcomer in workers[known:]:
            newcomer.set(shared.values())
