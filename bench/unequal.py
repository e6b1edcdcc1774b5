#!/usr/bin/env python3
"""Measures all-reduce between hosts whose access links differ, beside the best time that these links allow.

    tools/build && .venv/bin/python bench/unequal.py
    .venv/bin/python bench/unequal.py equal half --hosts=4 --delay=20ms --mib=16

Every host has one access link, which all its traffic shares, up and down. tests/wan joins the hosts. A case says what
share of the access rate the slow hosts have: `equal`, `70`, `half`, `quarter` (the last host), `two-half` (the last two),
`asymmetric` (the last host sends a fifth of what it receives). In `change`, the last host falls to half in the middle of
a run, and recovers later.

`bound_s` is the least time over all divisions of the tensor into shares (see coordinator/solver/share_solver.h), without
latencies and packet headers. Target: an op takes at most 1.15 times the bound and four one-way latencies where all hosts
are equal, and 1.25 times where they are not, and at most 1 % of the bytes are sent again.

Each case prints one line of JSON. `valid` is false if the emulator itself did not keep up (tests/wan/README.md); then
ignore the figures. Needs root. The exit code is 1 if a target is missed in a valid case, and 77 if this machine cannot
run the program.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import platform
import statistics
import sys
import tempfile
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "wan"), str(ROOT / "tests" / "chaos")]

import wan as wide  # noqa: E402
from testbed import Wan, why_not  # noqa: E402
from workers import MIB, Failure  # noqa: E402

# Case: the shares of the access rate that the last hosts have, (up, down).
CASES: dict[str, list[tuple[float, float]]] = {
    "equal": [],
    "70": [(0.7, 0.7)],
    "half": [(0.5, 0.5)],
    "quarter": [(0.25, 0.25)],
    "two-half": [(0.5, 0.5), (0.5, 0.5)],
    "asymmetric": [(0.2, 1.0)],
}
CHANGE = "change"
EQUAL_TARGET, UNEQUAL_TARGET, REPEATED_TARGET = 1.15, 1.25, 0.01
RING_INTERVAL_S = 20


def bound(rates_mbit: list[tuple[float, float]], mib: int) -> float:
    """The least seconds of an all-reduce, if each host sends and receives (1 + (N-2) share) times the tensor."""
    rates = [min(rate) * 1e6 / 8 / (mib * MIB) for rate in rates_mbit]  # tensors a second
    n = len(rates)
    if n == 2:
        return 1 / min(rates)
    low, high = 1 / min(rates), n / min(rates)
    for _ in range(60):
        middle = (low + high) / 2
        enough = sum((middle * rate - 1) / (n - 2) for rate in rates) >= 1
        low, high = (low, middle) if enough else (middle, high)
    return high


def access(rate: tuple[float, float], queue: str) -> dict[str, str]:
    return {"up": f"{rate[0]:g}mbit", "down": f"{rate[1]:g}mbit", "queue": queue}


class World:
    """Hosts behind access links, and their trainers."""

    def __init__(
        self, hosts: int, delay: str, rates: list[tuple[float, float]], args: argparse.Namespace
    ) -> None:
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
        self.team = wide.Team(self.wan, self.stack)

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
    seconds, algorithm = wide.op_seconds(world.team, args.ops, 0)
    sent, again = (now - then for now, then in zip(sent_again(world), before))
    least = bound(world.rates, mib)
    median = statistics.median(seconds)
    target = EQUAL_TARGET if case == "equal" else UNEQUAL_TARGET
    return {
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
        "times_bound_and_latencies": round(median / (least + 4 * one_way), 3),
        "target": target,
        "repeated": round(again / sent, 5) if sent else None,
        "met": median <= target * (least + 4 * one_way) and again <= REPEATED_TARGET * sent,
        **judge.verdict(),
        "lanes_used": wide.lanes_used(world.wan),
    }


def main() -> int:
    names = [*CASES, CHANGE]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="*", default=names, help=f"cases to run, out of: {', '.join(names)} (default all)")
    number_list = lambda text: [int(n) for n in text.split(",")]  # noqa: E731
    parser.add_argument("--hosts", type=number_list, default=[4, 8], help="numbers of hosts (default 4,8)")
    parser.add_argument("--delay", type=lambda t: t.split(","), default=["20ms", "80ms"], help="one way")
    parser.add_argument("--mbit", type=number_list, default=[100], help="access rates (default 100)")
    parser.add_argument("--mib", type=number_list, default=[16, 64], help="sizes of the tensor in MiB (default 16,64)")
    parser.add_argument("--ops", type=int, default=5, help="ops of a case that count (default 5)")
    parser.add_argument("--warm-ops", type=int, default=12, help="ops before them (default 12)")
    parser.add_argument("--queue", default="50ms", help="length of the queue in front of each rate (default 50ms)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=pathlib.Path, help="add the lines to this file too")
    parser.add_argument("--log-dir", type=pathlib.Path, help="keep the daemons' logs here")
    parser.add_argument("--peerd-flag", action="append", default=[], help="a further flag for every peerd")
    args = parser.parse_args()
    if set(args.case) - set(names) or min(args.hosts) < 3:
        parser.error(f"give cases out of {', '.join(names)}, and --hosts of at least 3")
    if reason := why_not():
        print(f"unequal: skipped: {reason}", file=sys.stderr)
        return 77
    print(
        f"{platform.node()}: {os.cpu_count()} CPUs, Linux {platform.release()}, load {os.getloadavg()[0]:.1f}",
        file=sys.stderr,
    )
    missed = False
    for hosts in args.hosts:
        for delay in args.delay:
            for mbit in args.mbit:
                for case in args.case:
                    shares = [(1.0, 1.0)] * hosts
                    slow = CASES[case]
                    shares[hosts - len(slow) :] = slow
                    rates = [(up * mbit, down * mbit) for up, down in shares]
                    world = World(hosts, delay, rates, args)
                    with world.stack:
                        for mib in args.mib:
                            line = {"bench": "unequal", **measure(world, case, delay, mib, args)}
                            print(json.dumps(line), flush=True)
                            if args.json:
                                with open(args.json, "a") as sink:
                                    print(json.dumps(line), file=sink)
                            missed |= line["valid"] and not line["met"]
    return missed


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failure as failure:
        print(f"unequal: {failure}", file=sys.stderr)
        sys.exit(1)
