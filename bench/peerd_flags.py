#!/usr/bin/env python3
"""Measures what an all-reduce costs with one flag of peerd beside another, in one run.

    tools/build && .venv/bin/python bench/peerd_flags.py io            # --io=uring beside --io=epoll
    .venv/bin/python bench/peerd_flags.py encryption                   # --lane-encryption=off beside require
    .venv/bin/python bench/peerd_flags.py io --peers=2 --sizes=256,64M --json=result.json

For each world size two clusters start, one with each flag, and stay up. Each has one peerd per member and trainers in
C, whose ops work in place on tensors of lh_alloc(). The clusters take turns, round by round. Every sum is checked
before it is timed.

A row has the median, the tenth and the ninetieth percentile of the time of one op, for the slowest member, and the CPU
time of all processes of the cluster per op. `x time` and `x CPU` say how many times as much the second flag needs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import allreduce
import figures
import machine
import systems
from workers import Failure

from longhaul.bench import sizes_of, text_of

# What is compared: the two values of a flag, and what a peerd with this value writes into its log ("": nothing).
FLAGS = {
    "io": {"uring": ("--io=uring", "io_uring of Linux"), "epoll": ("--io=epoll", "epoll of Linux")},
    "encryption": {"clear": ("--lane-encryption=off", ""), "sealed": ("--lane-encryption=require", "")},
}


def expect_words(size: int, name: str, words: str, logs: pathlib.Path) -> None:
    """Failure: a peerd of this cluster does not do what its flag says."""
    for log in sorted(logs.glob("peerd-*.log")):
        if words not in log.read_text():
            raise Failure(f"a peerd of the world of {size} does not run with {name}: see {log}")


@contextlib.contextmanager
def started(size: int, args: argparse.Namespace, logs: pathlib.Path) -> Iterator[list[allreduce.Variant]]:
    """The variants of both clusters."""
    system = next(system for system in systems.SYSTEMS if system.name == "longhaul")
    with contextlib.ExitStack() as stack:
        variants = []
        for name, (flag, words) in FLAGS[args.flag].items():
            where = logs / f"{size}-{name}"
            place = stack.enter_context(systems.loopback(size, str(where), [flag, *args.peerd_flag]))
            expect_words(size, name, words, where)
            team = systems.Team(dataclasses.replace(system, name=name), place)
            stack.callback(team.kill)
            variants.append(allreduce.Variant(team, "arena"))
        for variant in variants:
            variant.team.note_idle()
        yield variants
        for variant in variants:
            variant.team.close()


def compare(size: int, args: argparse.Namespace, logs: pathlib.Path, result: dict[str, Any]) -> None:
    with started(size, args, logs) as variants:
        for nbytes in sorted(args.sizes):
            why = allreduce.too_large(variants, nbytes)
            if why:
                print(f"{size:>5} {why}", flush=True)
                continue
            result["busy_elsewhere"].append({"peers": size, "bytes": nbytes, "share": allreduce.quiet()})
            all_samples = allreduce.measure(variants, nbytes, args)
            rows = [
                figures.row_of(size, nbytes, variant.team.system.name, "arena", samples)
                for variant, samples in zip(variants, all_samples)
            ]
            result["rows"] += rows
            for row in rows:
                ratios = ""
                if row is not rows[0]:
                    time, cpu = (row[key] / rows[0][key] for key in ("median_s", "cpu_s_per_op"))
                    ratios = f" {time:>7.2f} {cpu:>7.2f}"
                milliseconds = " ".join(f"{row[key] * 1e3:>9.3f}" for key in ("median_s", "p10_s", "p90_s"))
                cpu = row["cpu_s_per_op"] * 1e3
                print(
                    f"{size:>5} {text_of(nbytes):>8} {row['system']:<6} {milliseconds} {cpu:>9.3f}{ratios}", flush=True
                )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("flag", choices=FLAGS, help="what to compare")
    parser.add_argument("--peers", type=allreduce.numbers, default="2,3,4", help="world sizes (default 2,3,4)")
    sizes = "256,4K,64K,1M,16M,64M"
    parser.add_argument("--sizes", type=sizes_of, default=sizes, help=f"bytes of the tensor (default {sizes})")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each flag (default 7)")
    parser.add_argument("--round-seconds", type=float, default=0.3, help="about how long a turn lasts (default 0.3)")
    parser.add_argument("--json", type=pathlib.Path, help="write all figures to this file")
    parser.add_argument("--log-dir", type=pathlib.Path, help="keep the daemons' logs here")
    parser.add_argument("--peerd-flag", action="append", default=[], help="a further flag for every peerd")
    args = parser.parse_args()
    if min(args.peers) < 2 or args.rounds < 1:
        parser.error("give at least 2 --peers and at least 1 of --rounds")
    about = machine.describe()
    result: dict[str, Any] = {
        "command": ["bench/peerd_flags.py", *sys.argv[1:]],
        "machine": about,
        "busy_elsewhere": [],
        "rows": [],
    }
    print(
        f"{about['cpu']}, {about['processors']} processors, Linux {about['kernel']}, load {os.getloadavg()[0]:.1f}; loopback"
    )
    columns = ("median ms", "p10 ms", "p90 ms", "CPU ms")
    print(f"peers     size flag   {' '.join(f'{column:>9}' for column in columns)}  x time   x CPU", flush=True)
    code = 0
    try:
        with contextlib.ExitStack() as stack:
            temporary = tempfile.TemporaryDirectory(prefix="lhb-logs-", dir="/tmp")
            logs = args.log_dir or pathlib.Path(stack.enter_context(temporary))
            for size in args.peers:
                compare(size, args, logs, result)
    except Failure as failure:
        print(f"peerd_flags: {failure}", file=sys.stderr)
        result["failure"] = str(failure)
        code = 1
    busy = max((one["share"] for one in result["busy_elsewhere"]), default=0)
    print(
        f"other programs used up to {busy:.0%} of the processors"
        + (": too much to compare times" if busy > allreduce.QUIET else "")
    )
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
