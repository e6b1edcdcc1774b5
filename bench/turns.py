"""Measures variants of an all-reduce in turns, and prints a row for each: what peerd_flags.py and versions.py share.

All clusters of a world size start and stay up, and their variants take turns, round by round. A row has the median, the
tenth and the ninetieth percentile of the time of one op, for the slowest member, and the CPU time of all processes per
op. Behind these a program prints its own ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import allreduce
import figures
import machine
import systems
from workers import Failure

from longhaul.bench import sizes_of, text_of

Row = dict[str, Any]
# Starts the clusters of a world size, and gives their variants. The path is where logs go.
Started = Callable[[int, argparse.Namespace, pathlib.Path], AbstractContextManager[list[allreduce.Variant]]]
# For each row of a size, the text in front of the figures and the text behind them.
Texts = Callable[[list[Row]], list[tuple[str, str]]]

LONGHAUL = next(system for system in systems.SYSTEMS if system.name == "longhaul")


@contextlib.contextmanager
def all_idle(variants: list[allreduce.Variant]) -> Iterator[list[allreduce.Variant]]:
    """The variants, whose processes have been started and have done nothing yet. Closes them at the end."""
    teams = dict.fromkeys(variant.team for variant in variants)
    for team in teams:
        team.note_idle()
    yield variants
    for team in teams:
        team.close()


def flags(description: str | None, peers: str, sizes: str) -> argparse.ArgumentParser:
    """A parser of the flags that all programs have, with these defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=allreduce.numbers, default=peers, help=f"world sizes (default {peers})")
    parser.add_argument("--sizes", type=sizes_of, default=sizes, help=f"bytes of the tensor (default {sizes})")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each variant (default 7)")
    parser.add_argument("--round-seconds", type=float, default=0.3, help="about how long a turn lasts (default 0.3)")
    allreduce.add_quiet(parser)
    parser.add_argument("--json", type=pathlib.Path, help="write all figures to this file")
    parser.add_argument("--log-dir", type=pathlib.Path, help="keep the daemons' logs here")
    parser.add_argument("--peerd-flag", action="append", default=[], help="a further flag for every peerd")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    args = parser.parse_args()
    if min(args.peers) < 2 or args.rounds < 1:
        parser.error("give at least 2 --peers and at least 1 of --rounds")
    return args


def _measure(
    size: int, args: argparse.Namespace, variants: list[allreduce.Variant], texts: Texts, result: dict[str, Any]
) -> None:
    for nbytes in sorted(args.sizes):
        why = allreduce.too_large(variants, nbytes)
        if why:
            print(f"{size:>5} {why}", flush=True)
            continue
        result["busy_elsewhere"].append({"peers": size, "bytes": nbytes, "share": allreduce.quiet(args.quiet_within_s)})
        all_samples = allreduce.measure(variants, nbytes, args)
        rows = [
            figures.row_of(size, nbytes, variant.team.system.name, variant.name, samples)
            for variant, samples in zip(variants, all_samples)
        ]
        result["rows"] += rows
        for row, (name, ratios) in zip(rows, texts(rows)):
            milliseconds = " ".join(f"{row[key] * 1e3:>9.3f}" for key in ("median_s", "p10_s", "p90_s"))
            cpu = row["cpu_s_per_op"] * 1e3
            print(f"{size:>5} {text_of(nbytes):>8} {name} {milliseconds} {cpu:>9.3f}{ratios}", flush=True)


def run(args: argparse.Namespace, started: Started, texts: Texts, name_head: str, ratio_head: str) -> int:
    """Measures all world sizes and sizes. Returns the exit code. The heads are those of what `texts` gives."""
    program = pathlib.Path(sys.argv[0]).stem
    result: dict[str, Any] = {
        "command": [f"bench/{program}.py", *sys.argv[1:]],
        "machine": machine.describe(),
        "busy_elsewhere": [],
        "rows": [],
    }
    allreduce.introduce(result["machine"], "loopback")
    columns = " ".join(f"{column:>9}" for column in ("median ms", "p10 ms", "p90 ms", "CPU ms"))
    print(f"peers     size {name_head} {columns}{ratio_head}", flush=True)
    code = 0
    try:
        with contextlib.ExitStack() as stack:
            temporary = tempfile.TemporaryDirectory(prefix="lhb-logs-", dir="/tmp")
            logs = args.log_dir or pathlib.Path(stack.enter_context(temporary))
            for size in args.peers:
                with started(size, args, logs) as variants:
                    _measure(size, args, variants, texts, result)
    except Failure as failure:
        print(f"{program}: {failure}", file=sys.stderr)
        result["failure"] = str(failure)
        code = 1
    allreduce.conclude(result, args.json)
    return code
