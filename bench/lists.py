#!/usr/bin/env python3
"""Measures an all-reduce of a list of small tensors beside one tensor of the same bytes, and beside an op for each.

    tools/build && .venv/bin/python bench/lists.py --tensors=1000 --bytes=4K

Two members in one process, at two peerds. The three ways take turns; the median of the rounds counts. None of the
tensors is in memory shared with peerd, so all are copied.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import machine
import torch

import longhaul as lh
from longhaul.bench import bytes_of, text_of
from longhaul.testing import LocalCluster

PATIENCE_S = 120.0


def ways(comm: lh.Comm, count: int, elements: int) -> dict[str, Callable[[], object]]:
    """The three ways to reduce the same bytes, as one member."""
    whole = torch.ones(count * elements)
    parts = [torch.ones(elements) for _ in range(count)]

    def each() -> None:
        works = [comm.all_reduce(part, tag=tag, async_op=True) for tag, part in enumerate(parts)]
        for work in works:
            work.wait(PATIENCE_S)

    return {
        "one tensor": lambda: comm.all_reduce(whole, timeout=PATIENCE_S),
        "a list": lambda: comm.all_reduce(parts, timeout=PATIENCE_S),
        "an op for each": each,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--bytes", default="4K", help="of each tensor, such as 4K")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    elements = bytes_of(options.bytes) // 4
    torch.set_num_threads(1)
    facts = machine.describe()
    print(f"{facts['cpu']}, {facts['processors']} processors, Linux {facts['kernel']}")
    with LocalCluster(peers=2) as cluster, ThreadPoolExecutor(2) as pool:
        joins = [
            pool.submit(lh.join, "bench", peerd=cluster.socket(i), members=2, timeout=PATIENCE_S) for i in range(2)
        ]
        comms = [join.result() for join in joins]
        both = [ways(comm, options.tensors, elements) for comm in comms]
        seconds: dict[str, list[float]] = {way: [] for way in both[0]}
        for turn in range(options.rounds + 2):
            for way, taken in seconds.items():
                begin = time.perf_counter()
                for done in [pool.submit(mine[way]) for mine in both]:
                    done.result()
                if turn >= 2:
                    taken.append(time.perf_counter() - begin)
        for comm in comms:
            comm.leave(timeout=PATIENCE_S)
    medians = {way: statistics.median(taken) for way, taken in seconds.items()}
    print(f"{options.tensors} tensors of {text_of(4 * elements)}, two members, in place")
    for way, median in medians.items():
        print(f"{way:>15} {median * 1e3:9.2f} ms   {median / medians['one tensor']:6.2f} x one tensor")
    print(f"a list is {medians['an op for each'] / medians['a list']:.1f} x as fast as an op for each")


if __name__ == "__main__":
    main()
