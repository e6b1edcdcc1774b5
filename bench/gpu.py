#!/usr/bin/env python3
"""Measures an all-reduce of tensors on GPUs as a share of the speed of the same op on pinned host memory.

    tools/build && .venv/bin/python bench/gpu.py --bytes=1G

Two trainers at two peerds of this machine, one bfloat16 sum in place. Each trainer uses a GPU of its own if there are
two. The two ways take turns; the median of the rounds counts, each time until the result is in the tensor. The aim is
a share of at least 0.8. `--fake` uses a piece of host memory in the place of a GPU: to try the program, not to measure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import machine
import torch

import longhaul as lh
from longhaul.bench import bytes_of, text_of
from longhaul.testing import LocalCluster

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "client" / "python" / "tests"))
from fake_copier import FakeCopier

PATIENCE_S = 300.0
AIM = 0.8
WAYS = ("pinned host memory", "GPU")


def device_of(number: int, fake: bool, stack: contextlib.ExitStack) -> tuple[torch.Tensor, Callable[[], None]]:
    """A tensor of no elements on the device of a trainer, and a function that waits for all work of the device."""
    if fake:
        device = stack.enter_context(FakeCopier())
        return device.tensor(torch.empty(0, dtype=torch.bfloat16)), device.settle
    torch.cuda.set_device(number % torch.cuda.device_count())
    return torch.empty(0, dtype=torch.bfloat16, device="cuda"), torch.cuda.synchronize


def member(number: int, socket: str, count: int, rounds: int, fake: bool) -> dict[str, list[float]]:
    """Runs all rounds as one member. Returns the seconds of each way."""
    with contextlib.ExitStack() as stack:
        empty, synchronize = device_of(number, fake, stack)
        comm = stack.enter_context(lh.join("bench", peerd=socket, members=2, timeout=PATIENCE_S))
        pinned = lh.torch.empty(count, dtype=torch.bfloat16, peerd=socket, pin_memory=True)
        tensors = dict(zip(WAYS, (pinned, empty.new_empty(count)), strict=True))
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for turn in range(rounds + 2):
            for way, tensor in tensors.items():
                tensor.fill_(1 + comm.rank)
                synchronize()
                comm.barrier(tag=1 << 32, timeout=PATIENCE_S)
                begin = time.perf_counter()
                comm.all_reduce(tensor, timeout=PATIENCE_S)
                synchronize()
                if turn >= 2:  # the first rounds pin memory, and warm up
                    seconds[way].append(time.perf_counter() - begin)
                if float(tensor[0]) != 3 or float(tensor[-1]) != 3:
                    sys.exit(f"{way}: the sum is wrong: {tensor[0]} and {tensor[-1]}, not 3")
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", default="1G", help="of the tensor, such as 64M or 1G")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--fake", action="store_true", help="without a GPU; the figures mean nothing")
    parser.add_argument("--json", type=pathlib.Path, help="a file for the figures")
    options = parser.parse_args()
    if not options.fake and not torch.cuda.is_available():
        sys.exit("torch.cuda.is_available() is False: run this where CUDA works, or try the program with --fake")
    nbytes = bytes_of(options.bytes)
    spawn = multiprocessing.get_context("spawn")
    with LocalCluster(peers=2) as cluster, ProcessPoolExecutor(2, mp_context=spawn) as pool:
        runs = [pool.submit(member, i, cluster.socket(i), nbytes // 2, options.rounds, options.fake) for i in range(2)]
        first, second = (run.result() for run in runs)
    medians = {
        way: statistics.median(max(times) for times in zip(first[way], second[way], strict=True)) for way in WAYS
    }
    share = medians[WAYS[0]] / medians[WAYS[1]]
    facts = machine.describe()
    gpu = "no GPU (--fake)" if options.fake else f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    print(f"{facts['cpu']}, {facts['processors']} processors, Linux {facts['kernel']}, {gpu}")
    print(f"all-reduce of {text_of(nbytes)} of bfloat16, two trainers, in place")
    for way, median in medians.items():
        print(f"{way:>20} {median * 1e3:9.2f} ms   {nbytes / median / 1e9:7.2f} GB/s")
    print(f"share: {share:.2f} (aim: {AIM})")
    if options.json is not None:
        figures = {"bytes": nbytes, "gpu": gpu, "machine": facts, "seconds": medians, "share": share}
        options.json.write_text(json.dumps(figures, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
