#!/usr/bin/env python3
"""Measures all-reduces of several sizes over a very long path, in one-way latencies. bench/wan.py has it as `sizes`.

Links have 200 ms round trip and 500 Mbit/s, and flows have no rate of their own. All trainers begin each op at the same
time, so the time of an op contains no waiting for another trainer. For each size there are --ops ops in a row, and
--idle-ops ops that each follow --idle-s seconds without any op. Each size prints one line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "wan"), str(ROOT / "tests" / "chaos")]

import workers  # noqa: E402
from testbed import Wan, uniform  # noqa: E402

ONE_WAY_S = 0.1
RATE_MBIT = 500
SIZES = "4096,16384,65536,262144,1048576,67108864"
RING_INTERVAL_S = 5
# The time in which all trainers hear when an op begins.
NOTICE_S = 0.05
# Ops of this size come first. They are busy enough for peers to measure their links, and to find the number of lanes.
FIRST_BYTES = 16 << 20
# --congestion: peerd chooses.
AUTO = "auto"


class Worker(workers.Member):
    """A trainer with one tensor in the arena, of which each op takes a part."""

    def prepare(self, most: int) -> None:
        self.tensor = self.comm.empty(most // 4, "float32")
        self.tensor.fill(0)

    def boundary(self) -> None:
        self.comm.begin_step(self.PATIENCE_S)

    def op(self, size: int, at: float) -> tuple[float, str]:
        part = self.tensor[: size // 4]
        part.fill(1)
        time.sleep(max(0.0, at - time.monotonic()))
        began = time.monotonic()
        info = self.comm.all_reduce(part, timeout=self.PATIENCE_S)
        took = time.monotonic() - began
        if not (part == info.world_size).all():
            raise workers.Failure(f"a wrong sum of {size} bytes")
        return took, info.algorithm


class Team:
    """The trainers of a world."""

    def __init__(self, wan: Wan, stack: contextlib.ExitStack) -> None:
        self.trainers = stack.enter_context(workers.team(__file__, len(wan.hosts)))
        workers.meet(self.trainers, [host.socket for host in wan.hosts], "bench-wan-sizes")

    def all(self, order: str, **arguments: Any) -> list[Any]:
        for trainer in self.trainers:
            trainer.start(order, **arguments)
        return workers.finish_all(self.trainers)

    def op(self, size: int) -> tuple[float, str]:
        """Does an op. Returns its seconds at the slowest trainer, and the algorithm."""
        slowest: tuple[float, str] = max(self.all("op", size=size, at=time.monotonic() + NOTICE_S))
        return slowest


def set_up(wan: Wan, args: argparse.Namespace) -> None:
    """Sets the kernels of all hosts by --sysctl, and the congestion control. Call it before peerds start."""
    for setting in args.sysctl:
        for host in wan.hosts:
            host.run("sysctl", "-qw", setting)
    if args.congestion != AUTO:
        wan.peerd_flags = (*wan.peerd_flags, f"--congestion={args.congestion}")


def ideal_s(size: int, hosts: int) -> float:
    """Four latencies (announce, two phases, done), and the bytes that each host sends at the rate of one link."""
    return 4 * ONE_WAY_S + 2 * (hosts - 1) / hosts * size * 8 / (RATE_MBIT * 1e6)


def target_s(size: int, hosts: int, idle: bool) -> float:
    if size <= 64 << 10:
        return 1.5 * ONE_WAY_S
    if size <= 1 << 20:
        return 4 * ONE_WAY_S
    return (1.4 if idle else 1.15) * ideal_s(size, hosts)


def measure(args: argparse.Namespace, judge: Any, emit: Any) -> bool:
    """judge, emit: Judge and emit() of bench/wan.py. Returns whether all targets are met."""
    met = True
    sizes = [int(size) for size in args.sizes.split(",")]
    for hosts in args.hosts:
        loss = {"loss": args.loss} if args.loss else {}
        links = uniform(hosts, delay=f"{int(ONE_WAY_S * 1000)}ms", rate=f"{RATE_MBIT}mbit", queue=args.queue, **loss)
        with contextlib.ExitStack() as stack:
            logs = args.log_dir or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lh-bench-")))
            flags = [f"--lanes={args.lanes[0]}", "--probe-interval-s=0", *args.peerd_flag]
            wan = stack.enter_context(
                Wan(logs / f"sizes-{hosts}", links, seed=args.seed, tick_us=1000, peerd_flags=flags)
            )
            set_up(wan, args)
            wan.start_coordinator([f"--ring-interval-s={RING_INTERVAL_S}"])
            for host in wan.hosts:
                host.start_peerd()
            team = Team(wan, stack)
            team.all("prepare", most=max(*sizes, FIRST_BYTES))
            for _ in range(args.warm_ops):
                team.op(FIRST_BYTES)
                team.all("boundary")
            for size in sizes:
                judged = judge(wan)
                ops = [team.op(size) for _ in range(args.ops)]
                first = []
                for _ in range(args.idle_ops):
                    time.sleep(args.idle_s)
                    first.append(team.op(size))
                now = statistics.median(seconds for seconds, _ in ops)
                idle = statistics.median(seconds for seconds, _ in first) if first else 0.0
                line = {
                    "case": "sizes",
                    "hosts": hosts,
                    "bytes": size,
                    "loss": args.loss or "0",
                    "algorithm": ops[-1][1],
                    "op_s": round(now, 3),
                    "latencies": round(now / ONE_WAY_S, 2),
                    "op_all_s": [round(seconds, 3) for seconds, _ in ops],
                    "idle_op_s": round(idle, 3),
                    "idle_latencies": round(idle / ONE_WAY_S, 2),
                    "target_s": round(target_s(size, hosts, False), 3),
                    "idle_target_s": round(target_s(size, hosts, True), 3),
                    "met": now <= target_s(size, hosts, False) and idle <= target_s(size, hosts, True),
                    **judged.verdict(),
                }
                met &= emit(line, args)["met"]
    return met


if __name__ == "__main__":
    workers.work(Worker())
    sys.exit(0)
