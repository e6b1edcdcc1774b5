#!/usr/bin/env python3
"""Measures the all-reduce of two builds of Longhaul, with gloo and Open MPI beside them, in one run.

Use this if you change what an op does, and want to know whether it became faster.

    tools/build && .venv/bin/python bench/versions.py --against=../other/checkout
    .venv/bin/python bench/versions.py --against=../other/checkout --peers=2,4 --sizes=256,1M --json=result.json

`--against` names a second built checkout (its out/ is used). For each world size two clusters start, one of each build,
and stay up, as do the rivals. Each cluster has one peerd per member and trainers in C, whose ops work in place on
tensors of lh_alloc(). All take turns, round by round, so that other work of the machine affects all alike. Every sum
is checked before it is timed.

A row has the median, the tenth and the ninetieth percentile of the time of one op, for the slowest member, and the CPU
time of all processes per op. `x there` is the time divided by that of the other build. `sixteen` reduces sixteenths of
the tensor in sixteen ops at once.
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

LONGHAUL = next(system for system in systems.SYSTEMS if system.name == "longhaul")
RIVALS = [system for system in systems.SYSTEMS if system.name in ("gloo", "openmpi")]


@contextlib.contextmanager
def programs_of(tree: pathlib.Path) -> Iterator[None]:
    """Inside, clusters and trainers start with the programs of this checkout."""
    before = os.environ.get("LONGHAUL_BIN"), os.environ.get("LONGHAUL_LIBRARY")
    os.environ["LONGHAUL_BIN"] = str(tree / "out" / "bin")
    os.environ["LONGHAUL_LIBRARY"] = str(tree / "out" / "lib" / "liblonghaul.so.0")
    try:
        yield
    finally:
        for name, value in zip(("LONGHAUL_BIN", "LONGHAUL_LIBRARY"), before):
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def started(size: int, args: argparse.Namespace, logs: pathlib.Path) -> Iterator[list[allreduce.Variant]]:
    """The variants of both builds, and those of the rivals."""
    trees = {"there": args.against.resolve(), "here": systems.ROOT}
    with contextlib.ExitStack() as stack:
        variants = []
        for name, tree in trees.items():
            with programs_of(tree):
                place = stack.enter_context(systems.loopback(size, str(logs / f"{size}-{name}"), args.peerd_flag))
                team = systems.Team(dataclasses.replace(LONGHAUL, name=name), place)
            stack.callback(team.kill)
            variants += [allreduce.Variant(team, variant) for variant in args.variants]
        for system in RIVALS:
            if args.no_rivals or system.why_not():
                continue
            team = systems.Team(system, place)
            stack.callback(team.kill)
            variants.append(allreduce.Variant(team, "in-place"))
        teams = dict.fromkeys(variant.team for variant in variants)
        for team in teams:
            team.note_idle()
        yield variants
        for team in teams:
            team.close()


def compare(size: int, args: argparse.Namespace, logs: pathlib.Path, result: dict[str, Any]) -> None:
    with started(size, args, logs) as variants:
        for nbytes in sorted(args.sizes):
            why = allreduce.too_large(variants, nbytes)
            if why:
                print(f"{size:>5} {why}", flush=True)
                continue
            result["busy_elsewhere"].append({"peers": size, "bytes": nbytes, "share": allreduce.quiet()})
            all_samples = allreduce.measure(variants, nbytes, args)
            there: dict[str, float] = {}
            for variant, samples in zip(variants, all_samples):
                row = figures.row_of(size, nbytes, variant.team.system.name, variant.name, samples)
                result["rows"].append(row)
                if row["system"] == "there":
                    there[variant.name] = row["median_s"]
                milliseconds = " ".join(f"{row[key] * 1e3:>9.3f}" for key in ("median_s", "p10_s", "p90_s"))
                base = there.get(variant.name, there.get("arena"))
                ratio = f"{row['median_s'] / base:>8.2f}" if base else ""
                cpu = row["cpu_s_per_op"] * 1e3
                print(
                    f"{size:>5} {text_of(nbytes):>8} {row['system']:<8} {variant.name:<8} {milliseconds} {cpu:>9.3f} {ratio}",
                    flush=True,
                )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=pathlib.Path, required=True, help="another checkout that is built (has out/)")
    parser.add_argument("--peers", type=allreduce.numbers, default="2,3,4,8", help="world sizes (default 2,3,4,8)")
    sizes = "256,4K,64K,1M,4M,16M,64M"
    parser.add_argument("--sizes", type=sizes_of, default=sizes, help=f"bytes of the tensor (default {sizes})")
    parser.add_argument(
        "--variants",
        type=lambda text: text.split(","),
        default=["arena"],
        help="arena, out-of-place, plain, mesh, ring or sixteen (default arena)",
    )
    parser.add_argument("--no-rivals", action="store_true", help="leave gloo and Open MPI out")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each variant (default 7)")
    parser.add_argument("--round-seconds", type=float, default=0.3, help="about how long a turn lasts (default 0.3)")
    parser.add_argument("--json", type=pathlib.Path, help="write all figures to this file")
    parser.add_argument("--log-dir", type=pathlib.Path, help="keep the daemons' logs here")
    parser.add_argument("--peerd-flag", action="append", default=[], help="a further flag for every peerd")
    args = parser.parse_args()
    if min(args.peers) < 2 or args.rounds < 1:
        parser.error("give at least 2 --peers and at least 1 of --rounds")
    unknown = set(args.variants) - {*LONGHAUL.variants, *LONGHAUL.more_variants}
    if unknown:
        parser.error(f"--variants: no {' '.join(sorted(unknown))}")
    if not (args.against / "out" / "bin").is_dir():
        parser.error(
            f"--against={args.against}: no {args.against / 'out' / 'bin'}; build that checkout with tools/build"
        )
    about = machine.describe()
    result: dict[str, Any] = {
        "command": ["bench/versions.py", *sys.argv[1:]],
        "machine": about,
        "busy_elsewhere": [],
        "rows": [],
    }
    print(
        f"{about['cpu']}, {about['processors']} processors, Linux {about['kernel']}, load {os.getloadavg()[0]:.1f}; loopback"
    )
    columns = ("median ms", "p10 ms", "p90 ms", "CPU ms")
    print(f"peers     size build    variant  {' '.join(f'{column:>9}' for column in columns)}  x there", flush=True)
    code = 0
    try:
        with contextlib.ExitStack() as stack:
            temporary = tempfile.TemporaryDirectory(prefix="lhb-logs-", dir="/tmp")
            logs = args.log_dir or pathlib.Path(stack.enter_context(temporary))
            for size in args.peers:
                compare(size, args, logs, result)
    except Failure as failure:
        print(f"versions: {failure}", file=sys.stderr)
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
