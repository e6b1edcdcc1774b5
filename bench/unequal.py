#!/usr/bin/env python3
"""Measures all-reduce between hosts whose access links differ, beside the best time that these links allow.

    tools/build && .venv/bin/python bench/unequal.py
    .venv/bin/python bench/unequal.py equal half --hosts=4 --delay=20ms --mib=16
    .venv/bin/python bench/unequal.py half --hivemind     # hivemind's averager, too
    .venv/bin/python bench/unequal.py half --tcp=4        # the same bytes over plain TCP, too

Every host has one access link, which all its traffic shares, up and down. tests/wan joins the hosts. A case says what
share of the access rate the slow hosts have: `equal`, `70`, `half`, `quarter` (the last host), `two-70`, `two-half`,
`two-quarter` (the last two), `asymmetric` (the last host sends a fifth of what it receives). In `change`, the last host
falls to half in the middle of an op, and recovers in the middle of a later one. bench/README.md explains the fields of
the output.

`bound_s` is the least time over all divisions of the tensor into shares (see coordinator/solver/share_solver.h), without
latencies and packet headers. Target: an op takes at most 1.15 times the bound and four one-way latencies where all hosts
are equal, and 1.25 times where they are not, and at most 1 % of the bytes are sent again. After a change, ops reach 1.25
times the new bound and latencies within ten seconds or five ops, whichever is longer; no op is repeated, and every value
is exact.

With --broadcast, the op is a broadcast from the first host. Its bound is the slower one of what the first host can send
and what the slowest other host can receive; two latencies are allowed.

With --hivemind, hivemind's averager then reduces as many bytes in the same world (bench/unequal_hivemind.py). Aim: half
of its time. It is installed into a virtual environment of its own, as for bench/training.py.

With --tcp=N, each host then sends every other host the bytes of an all-reduce by the best shares over N plain TCP
connections, all at once and without waiting for anything (bench/unequal_tcp.py). `of_tcp` is Longhaul's time divided by
that time: what TCP itself needs for these bytes on these links, warm and from one op to the next.

Each case prints one line of JSON. `valid` is false if the emulator itself did not keep up (tests/wan/README.md); then
ignore the figures. Needs root. The exit code is 1 if a target is missed in a valid case, and 77 if this machine cannot
run the program.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "wan"), str(ROOT / "tests" / "chaos")]

import training  # noqa: E402
import unequal_hivemind  # noqa: E402
import unequal_tcp  # noqa: E402
import wan as wide  # noqa: E402
from testbed import Wan, why_not  # noqa: E402
from workers import MIB, Failure, finish_all, work  # noqa: E402

# Case: the shares of the access rate that the last hosts have, (up, down).
CASES: dict[str, list[tuple[float, float]]] = {
    "equal": [],
    "70": [(0.7, 0.7)],
    "half": [(0.5, 0.5)],
    "quarter": [(0.25, 0.25)],
    "two-70": [(0.7, 0.7), (0.7, 0.7)],
    "two-half": [(0.5, 0.5), (0.5, 0.5)],
    "two-quarter": [(0.25, 0.25), (0.25, 0.25)],
    "asymmetric": [(0.2, 1.0)],
}
CHANGE = "change"
CHANGED_SHARE = 0.5
# After a change, ops may take longer than the target for so long: as many seconds or ops, whichever is longer.
ADAPT_SECONDS, ADAPT_OPS = 10.0, 5
EQUAL_TARGET, UNEQUAL_TARGET, REPEATED_TARGET = 1.15, 1.25, 0.01
HIVEMIND_TARGET = 0.5
RING_INTERVAL_S = 20


def bound(rates_mbit: list[tuple[float, float]], mib: int) -> float:
    """The least seconds of an all-reduce, if each host sends and receives (1 + (N-2) share) times the tensor."""
    return best_division(rates_mbit, mib)[0]


def best_division(rates_mbit: list[tuple[float, float]], mib: int) -> tuple[float, list[float]]:
    """The least seconds of an all-reduce, and shares that need no more."""
    rates = [min(rate) * 1e6 / 8 / (mib * MIB) for rate in rates_mbit]  # tensors a second
    n = len(rates)
    if n == 2:
        return 1 / min(rates), [0.5, 0.5]
    low, high = 1 / min(rates), n / min(rates)
    for _ in range(60):
        middle = (low + high) / 2
        enough = sum((middle * rate - 1) / (n - 2) for rate in rates) >= 1
        low, high = (low, middle) if enough else (middle, high)
    most = [high * rate - 1 for rate in rates]
    return high, [one / sum(most) for one in most]


def broadcast_bound(rates_mbit: list[tuple[float, float]], mib: int) -> float:
    """The least seconds of a broadcast from the first host: it sends the tensor once, and others receive it once."""
    slowest = min(rates_mbit[0][0], *(down for _, down in rates_mbit[1:]))
    return mib * MIB * 8 / (slowest * 1e6)


def access(rate: tuple[float, float], queue: str) -> dict[str, str]:
    return {"up": f"{rate[0]:g}mbit", "down": f"{rate[1]:g}mbit", "queue": queue}


@dataclasses.dataclass
class Op:
    """An op at all trainers. Times are those of the monotonic clock."""

    seconds: float  #: at the slowest trainer
    began: float
    ended: float
    algorithm: str
    retries: int  #: how often a fault interrupted the op
    wrong: int  #: values that were not exact


class Worker(wide.Worker):
    def choose(self, algorithm: str) -> None:
        self.algorithm = algorithm

    def prepare(self, mib: int, rank: int, size: int) -> None:
        super().prepare(mib, rank, size)
        # Position, rank and op decide each value. All sums are whole numbers that float32 holds.
        self.pattern = (self.np.arange(mib * MIB // 4) % 251).astype("float32")
        self.rank, self.size = rank, size
        # The members' ranks need not be in the order of the hosts.
        ranks = self.np.zeros(size)
        ranks[rank] = self.comm.rank
        self.comm.all_reduce(ranks, timeout=self.PATIENCE_S)
        self.root = int(ranks[0])

    def broadcast_op(self) -> tuple[float, str]:
        self.tensor[:] = self.pattern if self.rank == 0 else 0
        self.comm.begin_step(self.PATIENCE_S)
        began = time.monotonic()
        info = self.comm.broadcast(self.tensor, root=self.root, timeout=self.PATIENCE_S)
        took = time.monotonic() - began
        if not (self.tensor == self.pattern).all():
            raise Failure(f"rank {self.rank}: a wrong value")
        return took, info.algorithm

    def checked_op(self, number: int) -> dict[str, Any]:
        self.np.add(self.pattern, number % 1000 + self.rank, out=self.tensor)
        self.comm.begin_step(self.PATIENCE_S)
        began = time.monotonic()
        info = self.comm.all_reduce(self.tensor, algorithm=self.algorithm, timeout=self.PATIENCE_S)
        ended = time.monotonic()
        right = self.pattern * self.size + (self.size * (number % 1000) + self.size * (self.size - 1) // 2)
        wrong = int(self.np.count_nonzero(self.tensor != right))
        return {
            "seconds": ended - began,
            "began": began,
            "ended": ended,
            "algorithm": info.algorithm,
            "retries": info.retries,
            "wrong": wrong,
        }


class Team(wide.Team):
    def start_checked(self) -> None:
        self.ops += 1
        for trainer in self.trainers:
            trainer.start("checked_op", number=self.ops)

    def finish_checked(self) -> Op:
        each = finish_all(self.trainers)
        return Op(
            seconds=max(one["seconds"] for one in each),
            began=max(one["began"] for one in each),
            ended=max(one["ended"] for one in each),
            algorithm=each[0]["algorithm"],
            retries=max(one["retries"] for one in each),
            wrong=sum(one["wrong"] for one in each),
        )

    def checked_op(self) -> Op:
        self.start_checked()
        return self.finish_checked()


class World:
    """Hosts behind access links, and their trainers."""

    def __init__(self, hosts: int, delay: str, rates: list[tuple[float, float]], args: argparse.Namespace) -> None:
        self.rates = rates
        self.args = args
        self.stack = contextlib.ExitStack()
        scenario = {
            "hosts": hosts,
            "links": [{"between": "*", "and": "*", "delay": delay}],
            "access": {f"h{i}": access(rate, args.queue) for i, rate in enumerate(rates)},
        }
        logs = args.log_dir or pathlib.Path(
            self.stack.enter_context(tempfile.TemporaryDirectory(prefix="lh-bench-unequal-"))
        )
        self.wan = self.stack.enter_context(
            Wan(logs, scenario, seed=args.seed, tick_us=wide.TICK_US, peerd_flags=args.peerd_flag)
        )
        self.wan.start_coordinator([f"--ring-interval-s={RING_INTERVAL_S}"])
        for host in self.wan.hosts:
            host.start_peerd()
        self.team = Team(self.wan, self.stack, __file__)
        if args.broadcast:
            self.team.order = "broadcast_op"
        for trainer in self.team.trainers:
            trainer.do("choose", algorithm=args.algorithm)

    def change(self, host: int, rate: tuple[float, float]) -> None:
        self.rates[host] = rate
        self.wan.access(f"h{host}", **access(rate, self.args.queue))


def sent_again(world: World) -> tuple[float, float]:
    """(bytes that data lanes sent, bytes of these that they sent again) of all hosts, since they began."""
    names = ("longhaul_peerd_sent_bytes_total", "longhaul_peerd_repeated_bytes_total")
    sent, again = (sum(host.metric(name) for host in world.wan.hosts) for name in names)
    return sent, again


def measure(world: World, case: str, delay: str, mib: int, args: argparse.Namespace) -> dict[str, Any]:
    one_way = float(delay.removesuffix("ms")) / 1000
    world.team.prepare(mib)
    for _ in range(args.warm_ops):
        world.team.op()
    judge, before = wide.Judge(world.wan), sent_again(world)
    cpu, began = world.team.cpu_seconds(), time.monotonic()
    seconds, algorithm = wide.op_seconds(world.team, args.ops, 0)
    cpu, took = world.team.cpu_seconds() - cpu, time.monotonic() - began
    sent, again = (now - then for now, then in zip(sent_again(world), before))
    least = broadcast_bound(world.rates, mib) if args.broadcast else bound(world.rates, mib)
    latencies = (2 if args.broadcast else 4) * one_way
    median = statistics.median(seconds)
    target = EQUAL_TARGET if case == "equal" else UNEQUAL_TARGET
    return {
        "op": "broadcast" if args.broadcast else "all-reduce",
        "case": case,
        "hosts": len(world.rates),
        "delay": delay,
        "mib": mib,
        "access_mbit": [f"{up:g}/{down:g}" for up, down in world.rates],
        "algorithm": algorithm,
        "op_s": round(median, 3),
        "op_all_s": [round(each, 3) for each in seconds],
        "bound_s": round(least, 3),
        "times_bound": round(median / least, 3),
        "times_bound_and_latencies": round(median / (least + latencies), 3),
        "target": target,
        "repeated": round(again / sent, 5) if sent else None,
        "met": median <= target * (least + latencies) and again <= REPEATED_TARGET * sent,
        "processors": round(cpu / took, 2),
        **judge.verdict(),
        "lanes_used": wide.lanes_used(world.wan),
    }


def beside_hivemind(world: World, python: str, delay: str, mib: int, ops: int, ours: dict[str, Any]) -> dict[str, Any]:
    """What hivemind adds to our line."""
    least = bound(world.rates, mib) + 4 * float(delay.removesuffix("ms")) / 1000
    rates = [min(rate) for rate in world.rates]
    theirs = unequal_hivemind.measure(world.wan, python, rates, mib, ops, wide.Judge)
    ratio = ours["op_s"] / theirs["op_s"]
    return {
        "hivemind": {"version": training.RIVALS["hivemind"].partition("==")[2], **theirs},
        "of_hivemind": round(ratio, 3),
        "of_hivemind_best": round(least / theirs["op_s"], 3),
        "of_hivemind_target": HIVEMIND_TARGET,
        "of_hivemind_met": ratio <= HIVEMIND_TARGET,
    }


def beside_tcp(world: World, delay: str, mib: int, args: argparse.Namespace, ours: dict[str, Any]) -> dict[str, Any]:
    """What plain TCP adds to our line."""
    least, shares = best_division(world.rates, mib)
    latencies = 4 * float(delay.removesuffix("ms")) / 1000
    flows, congestion = args.tcp, args.tcp_congestion
    theirs = unequal_tcp.measure(world.wan, shares, mib, args.ops, args.warm_ops, flows, congestion, wide.Judge)
    return {
        "tcp": theirs,
        "of_tcp": round(ours["op_s"] / theirs["op_s"], 3),
        "tcp_times_bound_and_latencies": round(theirs["op_s"] / (least + latencies), 3),
    }


def adapted(seconds: Sequence[float], within: float) -> int | None:
    """The first op of two in a row that take at most `within` seconds. The op during the change, the first, is none."""
    for i, pair in enumerate(itertools.pairwise(seconds[1:]), start=1):
        if max(pair) <= within:
            return i
    return None


def after_change(
    world: World, host: int, rate: tuple[float, float], one_way: float, mib: int, usual: float, ops_max: int
) -> tuple[dict[str, Any], list[Op]]:
    """Changes a rate in the middle of an op. Then does ops until they have adapted, or `ops_max` ops.

    usual: the seconds of an op before the change.
    """
    world.team.start_checked()
    time.sleep(usual / 2)
    changed = time.monotonic()
    world.change(host, rate)
    ops = [world.team.finish_checked()]
    within = UNEQUAL_TARGET * (bound(world.rates, mib) + 4 * one_way)
    while (first := adapted([op.seconds for op in ops], within)) is None and len(ops) < ops_max:
        ops.append(world.team.checked_op())
    seconds = None if first is None else max(0.0, ops[first].began - changed)
    return {
        "access_mbit": f"{rate[0]:g}/{rate[1]:g}",
        "bound_s": round(bound(world.rates, mib), 3),
        "within_s": round(within, 3),
        "ops": [
            {"op_s": round(op.seconds, 3), "ended_s": round(op.ended - changed, 2), "algorithm": op.algorithm}
            for op in ops
        ],
        "ops_until": first,
        "seconds_until": seconds if seconds is None else round(seconds, 2),
        "met": first is not None and seconds is not None and (seconds <= ADAPT_SECONDS or first <= ADAPT_OPS),
    }, ops


def measure_change(world: World, delay: str, mib: int, args: argparse.Namespace) -> dict[str, Any]:
    one_way = float(delay.removesuffix("ms")) / 1000
    host = len(world.rates) - 1
    full = world.rates[host]
    world.team.prepare(mib)
    for _ in range(args.warm_ops):
        world.team.op()
    judge = wide.Judge(world.wan)
    ops = [world.team.checked_op() for _ in range(args.ops)]
    usual = statistics.median(op.seconds for op in ops)
    before = {
        "bound_s": round(bound(world.rates, mib), 3),
        "op_s": round(usual, 3),
        "op_all_s": [round(op.seconds, 3) for op in ops],
        "algorithm": ops[-1].algorithm,
    }
    slow = (full[0] * CHANGED_SHARE, full[1] * CHANGED_SHARE)
    fall, during = after_change(world, host, slow, one_way, mib, usual, args.change_ops)
    recovery, later = after_change(world, host, full, one_way, mib, during[-1].seconds, args.change_ops)
    ops += during + later
    exact, redone = not any(op.wrong for op in ops), sum(op.retries for op in ops)
    return {
        "case": CHANGE,
        "hosts": len(world.rates),
        "delay": delay,
        "mib": mib,
        "access_mbit": [f"{up:g}/{down:g}" for up, down in world.rates],
        "before": before,
        "fall": fall,
        "recovery": recovery,
        "target_s": ADAPT_SECONDS,
        "target_ops": ADAPT_OPS,
        "exact": exact,
        "redone": redone,
        "met": fall["met"] and recovery["met"] and exact and redone == 0,
        **judge.verdict(),
        "lanes_used": wide.lanes_used(world.wan),
    }


def main() -> int:
    names = [*CASES, CHANGE]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "case", nargs="*", default=names, help=f"cases to run, out of: {', '.join(names)} (default all)"
    )
    number_list = lambda text: [int(n) for n in text.split(",")]  # noqa: E731
    parser.add_argument("--hosts", type=number_list, default=[4, 8], help="numbers of hosts (default 4,8)")
    parser.add_argument("--delay", type=lambda t: t.split(","), default=["20ms", "80ms"], help="one way")
    parser.add_argument("--mbit", type=number_list, default=[100], help="access rates (default 100)")
    parser.add_argument("--mib", type=number_list, default=[16, 64], help="sizes of the tensor in MiB (default 16,64)")
    parser.add_argument("--ops", type=int, default=5, help="ops of a case that count (default 5)")
    parser.add_argument(
        "--warm-ops", type=int, default=24, help="ops before them, in which hosts measure their links (default 24)"
    )
    parser.add_argument(
        "--change-ops", type=int, default=12, help="ops at most after a change, until they have adapted (default 12)"
    )
    parser.add_argument("--hivemind", action="store_true", help="hivemind's averager, too (not in `change`)")
    parser.add_argument("--tcp", type=int, default=0, help="so many plain connections a pair, too (not in `change`)")
    parser.add_argument("--tcp-congestion", default="cubic", help="for --tcp (default cubic)")
    parser.add_argument("--broadcast", action="store_true", help="a broadcast in place of an all-reduce")
    parser.add_argument("--venv", type=pathlib.Path, default=ROOT / "out" / "bench" / "venv", help="for hivemind")
    parser.add_argument("--queue", default="50ms", help="length of the queue in front of each rate (default 50ms)")
    parser.add_argument("--algorithm", choices=["auto", "ring", "mesh"], default="auto", help="of all-reduce")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=pathlib.Path, help="add the lines to this file too")
    parser.add_argument("--log-dir", type=pathlib.Path, help="keep the daemons' logs here")
    parser.add_argument("--peerd-flag", action="append", default=[], help="a further flag for every peerd")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(Worker())
        return 0
    if set(args.case) - set(names) or min(args.hosts) < 3:
        parser.error(f"give cases out of {', '.join(names)}, and --hosts of at least 3")
    if args.broadcast and (args.hivemind or args.tcp or CHANGE in args.case):
        parser.error(f"--broadcast is not for --hivemind, --tcp and {CHANGE}; give other cases")
    if reason := why_not():
        print(f"unequal: skipped: {reason}", file=sys.stderr)
        return 77
    print(
        f"{platform.node()}: {os.cpu_count()} CPUs, Linux {platform.release()}, load {os.getloadavg()[0]:.1f}",
        file=sys.stderr,
    )
    python = str(training.make_venv(args.venv, [training.RIVALS["hivemind"]])) if args.hivemind else ""
    missed = False
    for hosts in args.hosts:
        for delay in args.delay:
            for mbit in args.mbit:
                for case in args.case:
                    shares = [(1.0, 1.0)] * hosts
                    slow = CASES.get(case, [])
                    shares[hosts - len(slow) :] = slow
                    rates = [(up * mbit, down * mbit) for up, down in shares]
                    world = World(hosts, delay, rates, args)
                    with world.stack:
                        for mib in args.mib:
                            if case == CHANGE:
                                line = measure_change(world, delay, mib, args)
                            else:
                                line = measure(world, case, delay, mib, args)
                            line = {"bench": "unequal", **line}
                            if args.hivemind and case != CHANGE:
                                line |= beside_hivemind(world, python, delay, mib, args.ops, line)
                                missed |= line["valid"] and line["hivemind"]["valid"] and not line["of_hivemind_met"]
                            if args.tcp and case != CHANGE:
                                line |= beside_tcp(world, delay, mib, args, line)
                            print(json.dumps(line), flush=True)
                            if args.json:
                                with open(args.json, "a") as sink:
                                    print(json.dumps(line), file=sink)
                            # A slow machine is no excuse for wrong values.
                            missed |= (line["valid"] and not line["met"]) or not line.get("exact", True)
    return missed


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failure as failure:
        print(f"unequal: {failure}", file=sys.stderr)
        sys.exit(1)
