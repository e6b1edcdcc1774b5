#!/usr/bin/env python3
"""Measures what averaging the gradients of a model costs beside one flat all-reduce, and what overlap with backward saves.

    tools/build && .venv/bin/python bench/gradients.py

Two members at two peerds on this machine, each with one thread. All ways take turns within each round, and the median of
the rounds counts; a round's time is that of the slower member. "CPU" is the processor time of the member's thread,
which other programs on the machine change little. Two parts:

- "tensors": 1,000 gradients of 4 KiB beside one flat op of the same bytes. The flat tensor is once ordinary memory, as
  gradients are, and once memory shared with peerd, where nothing is copied.
- "overlap": steps of a model with hooks beside backward and averaging one after the other. Backward waits (sleeps) in
  each layer, as the processor does for a GPU. The members are joined by an emulated link of --rate (tests/wan, needs
  root); with --rate=none by loopback, where members and daemons compete for the same processors.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import machine
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "wan"), str(ROOT / "tests" / "chaos")]

from testbed import Wan, uniform, why_not  # noqa: E402

import longhaul as lh  # noqa: E402
from longhaul.testing import LocalCluster  # noqa: E402

PATIENCE_S = 120.0
CAP_MB = 0.5  # of the overlap part: several buckets of a few layers each
Ways = dict[str, Callable[[], object]]
Prepared = dict[str, tuple[Callable[[], object], Callable[[], object]]]  # what comes before a call, and the call
Times = tuple[float, float]  # of one call: seconds, and seconds of CPU
Rounds = dict[str, list[Times]]  # by way


FLAT = "one flat op, ordinary memory"


def nothing() -> None:
    pass


class Model:
    """Parameters without a model, and gradients for them."""

    def __init__(self, count: int, elements: int) -> None:
        self.parameters = [torch.nn.Parameter(torch.zeros(elements)) for _ in range(count)]
        self._gradients = [torch.ones(elements) for _ in range(count)]

    def by_hand(self, comm: lh.Comm) -> None:
        """One op on all gradients, which are flattened before and written back after it."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        flat = torch.nn.utils.parameters_to_vector(gradients)
        comm.all_reduce(flat, "avg", timeout=PATIENCE_S)
        begin = 0
        for gradient in gradients:
            gradient.copy_(flat[begin : begin + gradient.numel()].view_as(gradient))
            begin += gradient.numel()

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
        listed, flattened = Model(count, elements), Model(count, elements)
        self.ways: Prepared = {
            FLAT: (nothing, lambda: comm.all_reduce(self._flat, "avg", timeout=PATIENCE_S)),
            "one flat op, shared memory": (nothing, lambda: comm.all_reduce(self._shared, "avg", timeout=PATIENCE_S)),
            "one op on the list": (
                listed.backward,
                lambda: comm.all_reduce([p.grad for p in listed.parameters], "avg", timeout=PATIENCE_S),
            ),
            "flattened by hand, one op, written back": (flattened.backward, lambda: flattened.by_hand(comm)),
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
        self._averager = lh.torch.GradientAverager(self._parameters, comm, bucket_cap_mb=CAP_MB)

    def _backward(self) -> None:
        x = self._x
        for layer in self._layers:
            x = layer(Slow.apply(x, self._seconds))  # type: ignore[no-untyped-call]
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
            lh.torch.average_gradients(self._parameters, self._comm, bucket_cap_mb=CAP_MB, timeout=PATIENCE_S)

        def after() -> None:
            backward()
            average()

        return {
            "backward alone": backward,
            "averaging alone": average,
            "backward, then averaging": after,
            "with hooks": hooks,
        }


def timed(comm: lh.Comm, call: Callable[[], object]) -> Times:
    comm.barrier(tag=1, timeout=PATIENCE_S)
    begin, begin_cpu = time.perf_counter(), time.thread_time()
    call()
    return time.perf_counter() - begin, time.thread_time() - begin_cpu


def tensors(comm: lh.Comm, options: argparse.Namespace) -> Prepared:
    return Tensors(comm, options.tensors, options.bytes // 4).ways


def overlap(comm: lh.Comm, options: argparse.Namespace) -> Prepared:
    ways = Overlap(comm, options.layers, options.width, options.sleep_ms / 1e3).ways()
    return {name: (nothing, call) for name, call in ways.items()}


def member(socket: str, part: Callable[[lh.Comm, argparse.Namespace], Prepared], options: argparse.Namespace) -> Rounds:
    """Runs all rounds of one part as one member. Returns the times of each way."""
    torch.set_num_threads(1)
    comm = lh.join("bench", peerd=socket, members=2, timeout=PATIENCE_S)
    ways = part(comm, options)
    rounds: Rounds = {name: [] for name in ways}
    for turn in range(options.rounds + 2):
        for name, (prepare, call) in ways.items():
            prepare()
            times = timed(comm, call)
            if turn >= 2:  # the first rounds warm up
                rounds[name].append(times)
    comm.leave(timeout=PATIENCE_S)
    return rounds


@contextlib.contextmanager
def loopback() -> Iterator[list[str]]:
    """The sockets of two peerds on loopback."""
    with LocalCluster(peers=2) as cluster:
        yield [cluster.socket(i) for i in range(2)]


@contextlib.contextmanager
def link(rate: str, delay: str) -> Iterator[list[str]]:
    """The sockets of two peerds that an emulated link joins."""
    with tempfile.TemporaryDirectory(prefix="lh-bench-") as logs:
        with Wan(pathlib.Path(logs), uniform(2, rate=rate, delay=delay)) as wan:
            wan.start_coordinator()
            for host in wan.hosts:
                host.start_peerd()
            yield [host.socket for host in wan.hosts]


def measured(sockets: list[str], part: Callable[..., Prepared], options: argparse.Namespace) -> list[Rounds]:
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        started = [pool.submit(member, socket, part, options) for socket in sockets]
        return [run.result() for run in started]


def show(runs: list[Rounds], reference: str) -> None:
    def medians(of: int) -> dict[str, float]:
        return {
            name: statistics.median(max(each[of] for each in turn) for turn in zip(*(run[name] for run in runs)))
            for name in runs[0]
        }

    seconds, cpu = medians(0), medians(1)
    print(f"| way | ms | x {reference} | CPU ms |\n| --- | --- | --- | --- |")
    for name in seconds:
        print(
            f"| {name} | {seconds[name] * 1e3:.2f} | {seconds[name] / seconds[reference]:.2f} | {cpu[name] * 1e3:.2f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--bytes", type=int, default=4096, help="of each tensor")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--sleep-ms", type=float, default=10, help="of backward for each layer")
    parser.add_argument("--rate", default="200mbit", help="of the link of the overlap part; none: loopback")
    parser.add_argument("--delay", default="1ms", help="of that link, one way")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    if options.rate != "none" and why_not():
        sys.exit(f"no emulated link: {why_not()}; give --rate=none")
    facts = machine.describe()
    busy = machine.busy_elsewhere(2)
    print(f"{facts['cpu']}, {facts['processors']} processors, Linux {facts['kernel']}, {facts['versions']}")
    print(f"before the run, other programs used {busy:.0%} of the processors")
    with loopback() as sockets:
        runs = measured(sockets, tensors, options)
    print(f"\n{options.tensors} gradients of {options.bytes} bytes, two members on loopback\n")
    show(runs, FLAT)
    with loopback() if options.rate == "none" else link(options.rate, options.delay) as sockets:
        runs = measured(sockets, overlap, options)
    where = "loopback" if options.rate == "none" else f"{options.rate}, {options.delay} one way"
    print(f"\n{options.layers} layers of {options.width} x {options.width}, {options.sleep_ms} ms in each; {where}\n")
    show(runs, "backward, then averaging")


if __name__ == "__main__":
    main()
