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
import os
import pathlib
import sys
from collections.abc import Iterator

import allreduce
import systems
import turns

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
                team = systems.Team(dataclasses.replace(turns.LONGHAUL, name=name), place)
            stack.callback(team.kill)
            variants += [allreduce.Variant(team, variant) for variant in args.variants]
        for system in RIVALS:
            if args.no_rivals or system.why_not():
                continue
            team = systems.Team(system, place)
            stack.callback(team.kill)
            variants.append(allreduce.Variant(team, "in-place"))
        yield stack.enter_context(turns.all_idle(variants))


def texts(rows: list[turns.Row]) -> list[tuple[str, str]]:
    there = {row["variant"]: row["median_s"] for row in rows if row["system"] == "there"}

    def ratio(row: turns.Row) -> str:
        base = there.get(row["variant"], there.get("arena"))
        return f" {row['median_s'] / base:>8.2f}" if base else ""

    return [(f"{row['system']:<8} {row['variant']:<8}", ratio(row)) for row in rows]


def main() -> int:
    parser = turns.flags(__doc__, peers="2,3,4,8", sizes="256,4K,64K,1M,4M,16M,64M")
    parser.add_argument("--against", type=pathlib.Path, required=True, help="another checkout that is built (has out/)")
    parser.add_argument(
        "--variants",
        type=lambda text: text.split(","),
        default=["arena"],
        help="arena, out-of-place, plain, mesh, ring or sixteen (default arena)",
    )
    parser.add_argument("--no-rivals", action="store_true", help="leave gloo and Open MPI out")
    args = turns.parse(parser)
    unknown = set(args.variants) - {*turns.LONGHAUL.variants, *turns.LONGHAUL.more_variants}
    if unknown:
        parser.error(f"--variants: no {' '.join(sorted(unknown))}")
    if not (args.against / "out" / "bin").is_dir():
        parser.error(
            f"--against={args.against}: no {args.against / 'out' / 'bin'}; build that checkout with tools/build"
        )
    return turns.run(args, started, texts, "build    variant ", "  x there")


if __name__ == "__main__":
    sys.exit(main())
