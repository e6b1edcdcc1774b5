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
import pathlib
import sys
from collections.abc import Iterator

import allreduce
import systems
import turns
from workers import Failure

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
    with contextlib.ExitStack() as stack:
        variants = []
        for name, (flag, words) in FLAGS[args.flag].items():
            where = logs / f"{size}-{name}"
            place = stack.enter_context(systems.loopback(size, str(where), [flag, *args.peerd_flag]))
            expect_words(size, name, words, where)
            team = systems.Team(dataclasses.replace(turns.LONGHAUL, name=name), place)
            stack.callback(team.kill)
            variants.append(allreduce.Variant(team, "arena"))
        yield stack.enter_context(turns.all_idle(variants))


def texts(rows: list[turns.Row]) -> list[tuple[str, str]]:
    def ratios(row: turns.Row) -> str:
        if row is rows[0]:
            return ""
        time, cpu = (row[key] / rows[0][key] for key in ("median_s", "cpu_s_per_op"))
        return f" {time:>7.2f} {cpu:>7.2f}"

    return [(f"{row['system']:<6}", ratios(row)) for row in rows]


def main() -> int:
    parser = turns.flags(__doc__, peers="2,3,4", sizes="256,4K,64K,1M,16M,64M")
    parser.add_argument("flag", choices=FLAGS, help="what to compare")
    return turns.run(turns.parse(parser), started, texts, "flag  ", "  x time   x CPU")


if __name__ == "__main__":
    sys.exit(main())
