#!/usr/bin/env python3
"""Measures what averaging the gradients of a model costs beside one flat all-reduce, and what overlap with backward saves.

    tools/build && .venv/bin/python bench/gradients.py

Two members at two peerds on this machine, each with one thread. All ways take turns within each round, and the median of
the rounds counts; a round's time is that of the slower member. Two parts:

- "tensors": 1,000 gradients of 4 KiB beside one flat op of the same bytes. The flat tensor is once ordinary memory, as
  gradients are, and once memory shared with peerd, where nothing is copied.
- "overlap": a step of a model in which backward takes long enough to hide communication. Backward waits (sleeps) between
  layers, as the processor does for a GPU, because members and daemons share this machine's processors.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import machine
import torch

import longhaul as lh
from longhaul.testing import LocalCluster

PATIENCE_S = 120.0
Ways = dict[str, Callable[[], object]]


FLAT = "one flat op, ordinary memory"


def nothing() -> None:
    pass


class Model:
    """Parameters without a model, and gradients for them."""

    def __init__(self, count: int, elements: int) -> None:
        self.parameters = [torch.nn.Parameter(torch.zeros(elements)) for _ in range(count)]
        self._gradients = [torch.ones(elements) for _ in range(count)]

    def backward(self) -> None:
        """What a backward after zero_grad(set_to_none=True) leaves: gradients that lie anywhere."""
        for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
            parameter.grad = gradient


class Tensors:
    """Averages many small gradients in several ways. Each way has parameters and buckets of its own."""

    def __init__(self, comm: lh.Comm, count: int, elements: int) -> None:
        self._comm, self._count, self._elements = comm, count, elements
        self._flat = torch.ones(count * elements)
        self._shared = lh.torch.empty(count * elements).fill_(1)
        listed = Model(count, elements)
        #: For each way: what happens before it, and the call that is measured.
        self.ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            FLAT: (nothing, lambda: comm.all_reduce(self._flat, "avg", timeout=PATIENCE_S)),
            "one flat op, shared memory": (nothing, lambda: comm.all_reduce(self._shared, "avg", timeout=PATIENCE_S)),
            "one op on the list": (
                listed.backward,
                lambda: comm.all_reduce([p.grad for p in listed.parameters], "avg", timeout=PATIENCE_S),
            ),
            "average_gradients": self._function(view=False),
            "average_gradients, views": self._function(view=True),
            "average_gradients, views kept": self._function(view=True, kept=True),
            "GradientAverager.finish": self._averager(view=False),
            "GradientAverager.finish, views": self._averager(view=True),
        }

    def _function(self, view: bool, kept: bool = False) -> tuple[Callable[[], object], Callable[[], object]]:
        model = Model(self._count, self._elements)
        model.backward()
        return (
            nothing if kept else model.backward,
            lambda: lh.torch.average_gradients(
                model.parameters, self._comm, gradient_as_bucket_view=view, timeout=PATIENCE_S
            ),
        )

    def _averager(self, view: bool) -> tuple[Callable[[], object], Callable[[], object]]:
        # No backward runs, so no hook does: finish() sends everything, and there is nothing to overlap with.
        model = Model(self._count, self._elements)
        averager = lh.torch.GradientAverager(model.parameters, self._comm, gradient_as_bucket_view=view)
        return model.backward, lambda: averager.finish(PATIENCE_S)


class Slow(torch.autograd.Function):
    """Passes values on; its backward takes some seconds more, in which the processor is free."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Overlap:
    """Steps of a model of several layers."""

    def __init__(self, comm: lh.Comm, layers: int, width: int, seconds: float) -> None:
        self._comm, self._seconds = comm, seconds
        self._layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(layers))
        self._parameters = list(self._layers.parameters())
        self._x = torch.randn(4, width)
        self._averager = lh.torch.GradientAverager(self._parameters, comm, bucket_cap_mb=4)

    def _backward(self) -> None:
        x = self._x
        for layer in self._layers:
            x = layer(Slow.apply(x, self._seconds))
        for parameter in self._parameters:
            parameter.grad = None
        x.sum().backward()

    def ways(self) -> Ways:
        def hooks() -> None:
            self._backward()
            self._averager.finish(PATIENCE_S)

        def backward() -> None:
            with self._averager.no_sync():
                self._backward()

        def average() -> None:
            lh.torch.average_gradients(self._parameters, self._comm, bucket_cap_mb=4, timeout=PATIENCE_S)

        def after() -> None:
            backward()
            average()

        return {
            "backward alone": backward,
            "averaging alone": average,
            "backward, then averaging": after,
            "with hooks": hooks,
        }


def timed(comm: lh.Comm, call: Callable[[], object]) -> float:
    comm.barrier(tag=1, timeout=PATIENCE_S)
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def member(socket: str, options: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Runs all rounds as one member. Returns the seconds of each way."""
    torch.set_num_threads(1)
    comm = lh.join("bench", peerd=socket, members=2, timeout=PATIENCE_S)
    tensors = Tensors(comm, options.tensors, options.bytes // 4)
    small: dict[str, list[float]] = {name: [] for name in tensors.ways}
    for turn in range(options.rounds + 2):
        for name, (prepare, call) in tensors.ways.items():
            prepare()
            seconds = timed(comm, call)
            if turn >= 2:  # the first rounds warm up
                small[name].append(seconds)
    overlap = Overlap(comm, options.layers, options.width, options.sleep_ms / 1e3).ways()
    large: dict[str, list[float]] = {name: [] for name in overlap}
    for turn in range(options.rounds + 2):
        for name, call in overlap.items():
            seconds = timed(comm, call)
            if turn >= 2:
                large[name].append(seconds)
    comm.leave(timeout=PATIENCE_S)
    return small, large


def show(runs: list[dict[str, list[float]]], reference: str) -> None:
    medians = {
        name: statistics.median(max(pair) for pair in zip(*(run[name] for run in runs), strict=True))
        for name in runs[0]
    }
    print(f"| way | ms | x {reference} |\n| --- | --- | --- |")
    for name, median in medians.items():
        print(f"| {name} | {median * 1e3:.2f} | {median / medians[reference]:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--bytes", type=int, default=4096, help="of each tensor")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--sleep-ms", type=float, default=10, help="of backward for each layer")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    facts = machine.describe()
    busy = machine.busy_elsewhere(2)
    print(f"{facts['cpu']}, {facts['processors']} processors, Linux {facts['kernel']}, {facts['versions']}")
    print(f"before the run, other programs used {busy:.0%} of the processors")
    spawn = multiprocessing.get_context("spawn")
    with LocalCluster(peers=2) as cluster, ProcessPoolExecutor(2, mp_context=spawn) as pool:
        started = [pool.submit(member, cluster.socket(i), options) for i in range(2)]
        runs = [run.result() for run in started]
    print(f"\n{options.tensors} gradients of {options.bytes} bytes, two members\n")
    show([run[0] for run in runs], FLAT)
    print(f"\n{options.layers} layers of {options.width} x {options.width}, {options.sleep_ms} ms of sleep in each\n")
    show([run[1] for run in runs], "backward, then averaging")


if __name__ == "__main__":
    main()
