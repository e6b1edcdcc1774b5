#!/usr/bin/env python3
"""Measures an all-reduce of a list of small tensors beside one tensor of the same bytes, and beside an op for each.

    tools/build && .venv/bin/python bench/lists.py --tensors=1000 --bytes=4K

Two members at two peerds. The ways take turns; the median of the rounds counts. Only one tensor is in memory shared with
peerd; all others are copied. The same lists are passed in each round. The aim: a list takes at most 1.5 times as long as
one tensor.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import machine
import numpy as np
import torch

import longhaul as lh
from longhaul.bench import bytes_of, text_of
from longhaul.testing import LocalCluster

PATIENCE_S = 120.0


def ways(comm: lh.Comm, count: int, elements: int) -> dict[str, Callable[[], object]]:
    """The ways to reduce the same bytes, as one member."""
    whole = torch.ones(count * elements)
    shared = comm.empty(count * elements)
    shared[:] = 1
    parts = [torch.ones(elements) for _ in range(count)]
    arrays = [np.ones(elements, np.float32) for _ in range(count)]

    def each() -> None:
        works = [comm.all_reduce(part, tag=tag, async_op=True) for tag, part in enumerate(parts)]
        for work in works:
            work.wait(PATIENCE_S)

    return {
        "one tensor": lambda: comm.all_reduce(whole, timeout=PATIENCE_S),
        "a shared tensor": lambda: comm.all_reduce(shared, timeout=PATIENCE_S),
        "a list of tensors": lambda: comm.all_reduce(parts, timeout=PATIENCE_S),
        "a list of arrays": lambda: comm.all_reduce(arrays, timeout=PATIENCE_S),
        "an op for each": each,
    }


def member(socket: str, count: int, elements: int, rounds: int) -> dict[str, list[float]]:
    """Runs all rounds as one member. Returns the seconds of each way."""
    torch.set_num_threads(1)
    comm = lh.join("bench", peerd=socket, members=2, timeout=PATIENCE_S)
    mine = ways(comm, count, elements)
    seconds: dict[str, list[float]] = {way: [] for way in mine}
    for turn in range(rounds + 2):
        for way, call in mine.items():
            call()  # what comes before a way must not count: an op for each leaves other memory in the caches
            comm.barrier(tag=1 << 32, timeout=PATIENCE_S)
            begin = time.perf_counter()
            call()
            if turn >= 2:  # the first rounds warm up
                seconds[way].append(time.perf_counter() - begin)
    comm.leave(timeout=PATIENCE_S)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--bytes", default="4K", help="of each tensor, such as 4K")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    elements = bytes_of(options.bytes) // 4
    facts = machine.describe()
    print(f"{facts['cpu']}, {facts['processors']} processors, Linux {facts['kernel']}")
    spawn = multiprocessing.get_context("spawn")
    with LocalCluster(peers=2) as cluster, ProcessPoolExecutor(2, mp_context=spawn) as pool:
        runs = [pool.submit(member, cluster.socket(i), options.tensors, elements, options.rounds) for i in range(2)]
        first, second = (run.result() for run in runs)
    seconds = {way: [max(times) for times in zip(first[way], second[way], strict=True)] for way in first}
    medians = {way: statistics.median(taken) for way, taken in seconds.items()}
    print(f"{options.tensors} tensors of {text_of(4 * elements)}, two members, in place")
    for way, median in medians.items():
        print(f"{way:>18} {median * 1e3:9.2f} ms   {median / medians['one tensor']:6.2f} x one tensor")
    print(f"a list is {medians['an op for each'] / medians['a list of tensors']:.1f} x as fast as an op for each")


if __name__ == "__main__":
    main()
