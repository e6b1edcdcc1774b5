#!/usr/bin/env python3
"""Measures reduce-scatter, all-gather and broadcast beside gloo (torch.distributed), on loopback.

    tools/build && .venv/bin/python bench/collectives.py --sizes=64M --worlds=2,4

Each world has one cluster of Longhaul and one process group of gloo, in the same processes. The two take turns, op by
op, behind a barrier. The time of an op is that of the slowest member. Size is that of the whole tensor in bytes. The
last column is the share of what the machine could do at best (figures.one_phase_seconds), measured before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import figures
import limits
import machine

KINDS = ("reduce_scatter", "all_gather", "broadcast")
PATIENCE_S = 120.0


def member(rank: int, world: int, socket: str, store: str, size: int, rounds: int) -> dict[str, list[list[float]]]:
    """Runs all ops as one member. Returns the seconds of each op: kind -> [of Longhaul, of gloo]."""
    import torch
    import torch.distributed as dist

    import longhaul as lh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    comm = lh.join("bench", peerd=socket, members=world, timeout=PATIENCE_S)
    count = size // 4 // world
    whole = lh.torch.empty(count * world, peerd=socket).fill_(1.0)
    part = lh.torch.empty(count, peerd=socket).fill_(1.0)
    theirs, their_part = torch.ones(count * world), torch.ones(count)
    calls: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "reduce_scatter": (
            lambda: comm.reduce_scatter(whole, out=part, timeout=PATIENCE_S),
            lambda: dist.reduce_scatter_tensor(their_part, theirs),
        ),
        "all_gather": (
            lambda: comm.all_gather(part, out=whole, timeout=PATIENCE_S),
            lambda: dist.all_gather_into_tensor(theirs, their_part),
        ),
        "broadcast": (
            lambda: comm.broadcast(whole, timeout=PATIENCE_S),
            lambda: dist.broadcast(theirs, 0),
        ),
    }
    seconds: dict[str, list[list[float]]] = {kind: [[], []] for kind in KINDS}
    for turn in range(rounds + 2):
        for kind, sides in calls.items():
            for tensor in (whole, part, theirs, their_part):
                tensor.fill_(1.0)
            for side, call in enumerate(sides):
                comm.barrier(timeout=PATIENCE_S)
                begin = time.perf_counter()
                call()
                took = time.perf_counter() - begin
                if turn >= 2:  # the first rounds warm up
                    seconds[kind][side].append(took)
            # What was computed: sums of ones, or ones.
            expected = float(world) if kind == "reduce_scatter" else 1.0
            mine, other = (part, their_part) if kind == "reduce_scatter" else (whole, theirs)
            assert bool((mine == expected).all()) and bool((other == expected).all()), f"{kind}: wrong result"
    comm.leave(timeout=PATIENCE_S)
    dist.destroy_process_group()
    return seconds


def measure(world: int, size: int, rounds: int) -> dict[str, tuple[float, float]]:
    """The median seconds of each kind: kind -> (of Longhaul, of gloo)."""
    from longhaul.testing import LocalCluster

    with tempfile.TemporaryDirectory() as folder, LocalCluster(peers=world) as cluster:
        workers = [
            subprocess.Popen(
                [
                    *(sys.executable, "-W", "ignore::FutureWarning", __file__, "--member", str(rank), str(world)),
                    *(cluster.socket(rank), f"{folder}/store", str(size), str(rounds)),
                ],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            )
            for rank in range(world)
        ]
        try:
            answers = [json.loads(worker.communicate(timeout=900)[0] or "null") for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    if None in answers:
        raise SystemExit("a member failed; its error is above")
    return {
        kind: tuple(
            statistics.median(max(of) for of in zip(*(answer[kind][side] for answer in answers), strict=True))
            for side in (0, 1)
        )
        for kind in KINDS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default="2,4", help="numbers of members, such as 2,4")
    parser.add_argument("--sizes", default="64M", help="bytes of the whole tensor, such as 1M,64M")
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds; the median counts")
    options = parser.parse_args()
    from longhaul.bench import sizes_of, text_of

    facts = machine.describe()
    print(f"{facts['cpu']}, {facts['processors']} processors, Linux {facts['kernel']}")
    print(
        f"{'world':>5} {'size':>6} {'kind':>14} {'longhaul ms':>12} {'gloo ms':>9} {'gloo/longhaul':>13} {'of limit':>9}"
    )
    for world in (int(text) for text in options.worlds.split(",")):
        for size in sizes_of(options.sizes):
            rates = limits.measure(size)
            measured = measure(world, size, options.rounds)
            rates = figures.better(rates, limits.measure(size))
            for kind, (ours, theirs) in measured.items():
                limit = figures.one_phase_seconds(world, size, rates, kind == "reduce_scatter")
                print(
                    f"{world:5} {text_of(size):>6} {kind:>14} {ours * 1e3:12.2f} {theirs * 1e3:9.2f} "
                    f"{theirs / ours:13.2f} {limit / ours:9.0%}",
                    flush=True,
                )


if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "client" / "python"))
    if sys.argv[1:2] == ["--member"]:
        rank, world, socket, store, size, rounds = sys.argv[2:]
        print(json.dumps(member(int(rank), int(world), socket, store, int(size), int(rounds))))
    else:
        main()
