#!/usr/bin/env python3
"""Measures all-reduce of Longhaul, gloo and Open MPI in one run on this machine, and what the machine would allow.

    tools/build && .venv/bin/python bench/allreduce.py
    .venv/bin/python bench/allreduce.py --peers=2 --sizes=4K,64M --json=result.json
    .venv/bin/python bench/allreduce.py --where=namespaces --systems=longhaul,gloo/torch

For each world size all systems start and stay up; they sleep between their turns. Longhaul has one peerd per member,
with one trainer process in C and one in Python; each rival has as many processes. All sum float32 tensors. Variants
take turns, round by round, so that other work of the machine affects all alike. Every variant's sum is checked before
it is timed.

`longhaul`, `gloo` and `openmpi` are called from C or C++; `longhaul/python` and `gloo/torch` are called from Python.

Variants of Longhaul: `arena` works in place on tensors of lh_alloc() (in Python longhaul.empty). Only in C,
`out-of-place` has source and target there, and `plain` works in place on memory of malloc(). Only if --variants names
them, `mesh` and `ring` work like `arena` by that algorithm, and `sixteen` reduces sixteenths in sixteen ops at once.
Rivals work in place. A rival that is not installed is named and left out.

A row has the time of one op: over all timed ops of a process, for the slowest process. Bandwidths are in GB/s, as
nccl-tests defines them. CPU is that of all processes of a system, daemons included, per 10^9 bytes on the wire; these
bytes are 2 (N - 1) / N x tensor x N. Memory is the highest resident memory, less that of the idle processes. `x gloo`
and `x MPI` say how many times faster Longhaul is than the better gloo and than Open MPI. `limit` is the computed least
time divided by the measured time (bench/README.md).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import figures
import limits
import machine
import systems
from workers import Failure

from longhaul.bench import sizes_of, text_of

ITERATIONS_MAX = 1000
# If other programs use a larger share of the processors, times cannot be compared.
QUIET = 0.05


@dataclasses.dataclass(frozen=True)
class Variant:
    """One kind of row, and the team of processes that carries it out."""

    team: systems.Team
    name: str

    def __str__(self) -> str:
        return f"{self.team.system.name} {self.name}"

    def prepare(self, nbytes: int) -> None:
        answers = self.team.order(f"prepare {self.name} {nbytes // 4}")
        wrong = [rank for rank, right in enumerate(answers) if right is not True]
        if wrong:
            raise Failure(f"{self}, world of {self.team.size}, {text_of(nbytes)}: wrong sum at ranks {wrong}")

    def release(self) -> None:
        self.team.order(f"release {self.name}")

    def round(self, samples: figures.Samples) -> None:
        before = self.team.cpu_seconds()
        seconds = self.team.order(f"round {self.name} {samples.warm} {samples.iterations}")
        samples.add_round(seconds, self.team.cpu_seconds() - before)


def calibrate(variant: Variant, nbytes: int, round_seconds: float) -> figures.Samples:
    """How many ops make a round, and how much memory they take."""
    variant.team.forget_peak()
    variant.prepare(nbytes)
    trial = figures.Samples(iterations=3, warm=2)
    variant.round(trial)
    peak = variant.team.peak_bytes()
    variant.release()
    wanted = round(round_seconds / max(trial.median(), 1e-6))
    return figures.Samples(
        iterations=min(max(wanted, 1), ITERATIONS_MAX),
        # The first op of a round waits until the slowest process gets the order. Small ops need a few more to warm up.
        warm=2 if wanted > 3 else 1,
        memory_bytes=peak,
    )


def measure(variants: list[Variant], nbytes: int, args: argparse.Namespace) -> list[figures.Samples]:
    """Measures one size of tensor: all variants, in turns."""
    all_samples = [calibrate(variant, nbytes, args.round_seconds) for variant in variants]
    for variant in variants:
        # From here on a variant keeps its tensors while other variants have their turns.
        variant.prepare(nbytes)
    for turn in range(args.rounds):
        for i in range(len(variants)):
            at = (turn + i) % len(variants)
            variants[at].round(all_samples[at])
    for variant in variants:
        variant.release()
    return all_samples


def too_large(variants: list[Variant], nbytes: int) -> str:
    """Returns why this size is left out; an empty text means that it is measured."""
    # Each variant has a tensor, and one variant has two. The variant at its turn needs at most two more to work.
    need = nbytes * (len(variants) + 3) * max(variant.team.size for variant in variants)
    free = machine.meminfo("MemAvailable")
    if need <= free:
        return ""
    return (
        f"{text_of(nbytes)} left out: {len(variants)} variants need {need / 1e9:.0f} GB, {free / 1e9:.0f} GB are free"
    )


@contextlib.contextmanager
def started(
    size: int, chosen: list[systems.System], args: argparse.Namespace
) -> Iterator[tuple[systems.Place, list[Variant]]]:
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(systems.PLACES[args.where](size, args.log_dir, args.peerd_flag))
        teams = []
        for system in chosen:
            teams.append(systems.Team(system, place))
            stack.callback(teams[-1].kill)
        for team in teams:
            team.note_idle()
        variants = [Variant(team, name) for team in teams for name in team.system.chosen(args.variants)]
        yield place, variants
        for team in teams:
            team.close()


def add_quiet(parser: argparse.ArgumentParser) -> None:
    """Adds the flag whose value quiet() takes."""
    parser.add_argument(
        "--quiet-within-s", type=float, default=30, help="seconds to wait for a quiet machine, at most (default 30)"
    )


def quiet(within_s: float) -> float:
    """Waits for a while until other programs use little of the processors. Returns the share that they use."""
    deadline = time.monotonic() + within_s
    while (busy := machine.busy_elsewhere(0.5)) > QUIET and time.monotonic() < deadline:
        pass
    return busy


def bench(chosen: list[systems.System], args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Measures all sizes, and adds figures to the result as they come."""
    print(figures.HEAD, flush=True)
    for size in args.peers:
        with started(size, chosen, args) as (place, variants):
            if not systems.why_no_line() and not args.no_limits:
                for streams in (1, size):
                    result["line"].append(systems.line_rate(place, streams))
                    rate = result["line"][-1]["rate"] / 1e9
                    print(
                        f"{size:>5} {'':>8} {'iperf3':<15} {f'{streams} stream(s)':<13} {'':>38} {rate:>7.3f}",
                        flush=True,
                    )
            for nbytes in sorted(args.sizes):
                why = too_large(variants, nbytes)
                if why:
                    result["left_out"].append(f"{size} peers, {why}")
                    print(f"{size:>5} {why}", flush=True)
                    continue
                busy = quiet(args.quiet_within_s)
                result["busy_elsewhere"].append({"peers": size, "bytes": nbytes, "share": busy})
                limited = nbytes >= figures.LIMIT_FROM_BYTES and not args.no_limits
                rates = [limits.measure(nbytes)] if limited else []
                all_samples = measure(variants, nbytes, args)
                if limited:
                    # Measured before and after: a disturbance of the machine must not make the limit too easy.
                    rates = [figures.better(rates[0], limits.measure(nbytes))]
                    result["rates"].append({"peers": size, **dataclasses.asdict(rates[0])})
                rows = [
                    figures.row_of(size, nbytes, variant.team.system.name, variant.name, samples, *rates)
                    for variant, samples in zip(variants, all_samples)
                ]
                figures.compare(rows)
                result["rows"] += rows
                print("\n".join(figures.line_of(row) for row in rows), flush=True)


def numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: give numbers such as 2,4") from None


def introduce(about: dict[str, Any], where: str) -> None:
    """Prints on which machine the figures are measured. about: from machine.describe()."""
    load = os.getloadavg()[0]
    print(f"{about['cpu']}, {about['processors']} processors, Linux {about['kernel']}, load {load:.1f}; {where}")


def conclude(result: dict[str, Any], path: pathlib.Path | None) -> None:
    """Prints what other programs used while the figures were measured. Writes all figures to the path, if one is given."""
    busy = max((one["share"] for one in result["busy_elsewhere"]), default=0)
    print(
        f"other programs used up to {busy:.0%} of the processors"
        + (": too much to compare times" if busy > QUIET else "")
    )
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [system.name for system in systems.SYSTEMS]
    parser.add_argument("--peers", type=numbers, default="2,3,4,8", help="world sizes (default 2,3,4,8)")
    sizes = "256,4K,64K,1M,16M,64M,256M"
    parser.add_argument("--sizes", type=sizes_of, default=sizes, help=f"bytes of the tensor (default {sizes})")
    parser.add_argument("--where", choices=list(systems.PLACES), default="loopback", help="hosts (default loopback)")
    parser.add_argument(
        "--systems", type=lambda text: text.split(","), default=names, help=f"default {','.join(names)}"
    )
    parser.add_argument(
        "--variants", type=lambda text: text.split(","), help="measure only these, for instance arena,in-place"
    )
    parser.add_argument("--rounds", type=int, default=7, help="turns of each variant (default 7)")
    parser.add_argument("--round-seconds", type=float, default=0.3, help="about how long a turn lasts (default 0.3)")
    add_quiet(parser)
    parser.add_argument("--no-limits", action="store_true", help="measure neither the machine's limits nor the line")
    parser.add_argument("--json", type=pathlib.Path, help="write all figures to this file")
    parser.add_argument("--log-dir", help="keep the daemons' logs here")
    parser.add_argument("--peerd-flag", action="append", default=[], help="a further flag for every peerd")
    args = parser.parse_args()
    if min(args.peers) < 2 or args.rounds < 1:
        parser.error("give at least 2 --peers and at least 1 of --rounds")
    unknown = set(args.systems) - set(names)
    if unknown:
        parser.error(f"no system {' '.join(sorted(unknown))}: there are {' '.join(names)}")
    chosen = [system for system in systems.SYSTEMS if system.name in args.systems]
    known = {name for system in chosen for name in system.variants + system.more_variants}
    if not set(args.variants or []) <= known:
        parser.error(f"--variants={','.join(args.variants)}: there are {' '.join(sorted(known))}")
    missing = [why for why in [*(system.why_not() for system in chosen), systems.why_no_line()] if why]
    chosen = [system for system in chosen if not system.why_not()]

    result: dict[str, Any] = {
        "schema": 1,
        "begin": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": ["bench/allreduce.py", *sys.argv[1:]],
        "where": args.where,
        "machine": machine.describe(),
        "missing": missing,
        "left_out": [],
        "busy_elsewhere": [],
        "rates": [],
        "line": [],
        "rows": [],
    }
    introduce(result["machine"], args.where)
    for why in missing:
        print(f"not installed, left out: {why}")
    code = 0
    try:
        bench(chosen, args, result)
    except Failure as failure:
        print(f"allreduce: {failure}", file=sys.stderr)
        result["failure"] = str(failure)
        code = 1
    conclude(result, args.json)
    return code


if __name__ == "__main__":
    sys.exit(main())
