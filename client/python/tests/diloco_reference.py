"""What LocalSGD, DiLoCo, SparseLoCo, AsyncDiLoCo and StreamingDiLoCo compute, without a network.

There are N workers, one after the other. Written for reading. A worker is a model, its inner optimizer and its data. Each function yields the global parameters
after each round. Then the caller may add workers at the end of the list; they begin with what a newcomer gets.
"""

from __future__ import annotations

import copy
import math
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


class ErrorFeedback:
    """What a worker of SparseLoCo sends (arXiv:2508.15706): e = beta * e + Delta; sent = Q(TopK(e)); e = e - sent.

    Of each chunk, the k elements with the largest magnitudes; of equal ones, the first. Each becomes its sign times the
    mean of the smaller half of these magnitudes, or of the larger half: those below the mean of all, and the others.
    """

    def __init__(self, k: int, chunk: int, beta: float) -> None:
        self.k = k
        self.chunk = chunk
        self.beta = beta
        self.errors: dict[tuple[int, tuple[int, ...]], list[float]] = {}

    def sent(self, worker: Worker, progress: Values, numbers: Sequence[int]) -> Values:
        """What stands for the progress of these parameters. The worker's error remembers the rest."""
        delta = torch.cat([progress[number].flatten() for number in numbers]).tolist()
        key = (id(worker), tuple(numbers))
        before = self.errors.get(key, [0.0] * len(delta))
        error = [self.beta * old + new for old, new in zip(before, delta)]
        sent = [0.0] * len(delta)
        for begin in range(0, len(error), self.chunk):
            end = min(begin + self.chunk, len(error))
            count = math.ceil(self.k * (end - begin) / self.chunk)
            best = sorted(range(begin, end), key=lambda i: (-abs(error[i]), i))[:count]
            mean = sum(abs(error[i]) for i in best) / count
            for half in ([i for i in best if abs(error[i]) >= mean], [i for i in best if abs(error[i]) < mean]):
                for i in half:
                    sent[i] = math.copysign(sum(abs(error[j]) for j in half) / len(half), error[i])
        self.errors[key] = [e - s for e, s in zip(error, sent)]
        result = list(progress)
        left = torch.tensor(sent)
        for number in numbers:
            part, left = left[: progress[number].numel()], left[progress[number].numel() :]
            result[number] = part.view(progress[number].shape)
        return result


def sparseloco(workers: list[Worker], alpha: float, sync_every: int, feedback: ErrorFeedback) -> Iterator[Values]:
    """SparseLoCo: the mean of what the workers send, times alpha, is the outer step. There is no momentum."""
    shared = workers[0].values()
    while True:
        for worker in workers:
            worker.steps(sync_every)
        numbers = range(len(shared))
        sent = [feedback.sent(worker, difference(shared, worker.values()), numbers) for worker in workers]
        shared = [value - alpha * mean for value, mean in zip(shared, average(sent))]
        yield shared
        for worker in workers:
            worker.set(shared)


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
    feedback: ErrorFeedback | None = None,
) -> Iterator[Values]:
    """fragments: the numbers of the parameters of each fragment. feedback: what stands for a worker's progress."""
    shared = Global(workers[0].values(), make_outer)
    turn = sync_every // len(fragments)
    while True:
        for numbers in fragments:
            for worker in workers:
                worker.steps(turn - delay)
            of_workers = [difference(shared.values(), worker.values()) for worker in workers]
            if feedback is not None:
                of_workers = [feedback.sent(worker, own, numbers) for worker, own in zip(workers, of_workers)]
            progress = average(of_workers)
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
