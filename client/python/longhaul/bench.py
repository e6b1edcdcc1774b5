"""Measures all-reduce between members, on this machine or between the hosts of a real run.

    python -m longhaul.bench                              # starts two peerds and two members on loopback
    python -m longhaul.bench --peers=4 --sizes=4K,64M --json=result.json
    python -m longhaul.bench --peers=4 --sizes=16K,1M --algorithm=mesh
    python -m longhaul.bench --run=bench --world-size=3   # start this on each of three hosts that run longhaul-peerd

Every op is a float32 sum in place. A time is that of a whole call of `comm.all_reduce(x)`, as a trainer sees it. Each
member takes the median, the 10th and the 90th percentile of its calls; a row shows the largest value that any member
has. The first sum of each row is checked. `way` is the algorithm that was used.

Bandwidths are defined as in nccl-tests. algbw = bytes of the tensor / time. busbw = algbw * 2 (N - 1) / N: the rate at
which each of the N members sends, and receives. Compare busbw with the speed of a link, for any N.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import longhaul as lh
from longhaul._native import ALGORITHMS

MEMORIES = ("arena", "plain")
# The members exchange their times through all-reduces of this tag. The measured ops have tag 0.
_TAG_OF_TALK = 1 << 40
_ITERATIONS_MAX = 10_000


class Failure(Exception):
    """The measurement cannot go on. The text says why, and what to do."""


# ---------------------------------------------------------------------------- figures


def wire_bytes(world: int, nbytes: int) -> float:
    """The fewest bytes that each of `world` members must send to all-reduce a tensor of `nbytes` bytes."""
    return 2 * (world - 1) / world * nbytes


def algorithm_bandwidth(nbytes: int, seconds: float) -> float:
    """Bytes per second, as nccl-tests defines algbw."""
    return nbytes / seconds


def bus_bandwidth(world: int, nbytes: int, seconds: float) -> float:
    """Bytes per second, as nccl-tests defines busbw for all-reduce."""
    return wire_bytes(world, nbytes) / seconds


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile (q from 0 to 1): the smallest value such that a share of q of all values is not larger."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def bytes_of(text: str) -> int:
    """Parses a size such as '256', '4K', '64M' or '1G' into bytes. For argparse."""
    factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper(), 1)
    try:
        nbytes = int(text if factor == 1 else text[:-1]) * factor
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: give for instance 256, 4K or 64M") from None
    if nbytes <= 0 or nbytes % 4:
        raise argparse.ArgumentTypeError(f"{text}: the elements are float32, so give a multiple of 4 bytes, at least 4")
    return nbytes


def sizes_of(text: str) -> list[int]:
    """Parses sizes such as '4K,64M'. For argparse."""
    return [bytes_of(part) for part in text.split(",")]


def text_of(nbytes: int) -> str:
    """A size as text, such as '4 KiB'."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


@dataclasses.dataclass(frozen=True)
class Row:
    """The figures of one tensor size in one kind of memory. Times in seconds, bandwidths in bytes per second."""

    world_size: int
    bytes: int
    memory: str
    algorithm: str  # that was used
    ops: int  # timed calls of each member
    median_s: float
    p10_s: float
    p90_s: float

    @property
    def algbw(self) -> float:
        return algorithm_bandwidth(self.bytes, self.median_s)

    @property
    def busbw(self) -> float:
        return bus_bandwidth(self.world_size, self.bytes, self.median_s)

    def json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "algbw": self.algbw, "busbw": self.busbw}

    def line(self) -> str:
        return (
            f"{text_of(self.bytes):>9} {self.memory:<6} {self.algorithm:<7} {self.ops:>6} {1e3 * self.median_s:>10.3f} {1e3 * self.p10_s:>9.3f} "
            f"{1e3 * self.p90_s:>9.3f} {self.algbw / 1e9:>11.3f} {self.busbw / 1e9:>11.3f}"
        )


HEAD = f"{'tensor':>9} {'memory':<6} {'way':<7} {'ops':>6} {'median ms':>10} {'p10':>9} {'p90':>9} {'algbw GB/s':>11} {'busbw GB/s':>11}"


# ---------------------------------------------------------------------------- a member


def gather(comm: lh.Comm, size: int, timeout: float) -> None:
    """Passes step boundaries until `size` members are there. Raises Failure: too many members, or too few in time."""
    deadline = time.monotonic() + timeout
    while (there := comm.begin_step(timeout).world_size) < size:
        if time.monotonic() > deadline:
            raise Failure(f"only {there} of {size} members joined in {timeout:g} s: start the bench on the other hosts")
        time.sleep(0.01)
    if there > size:
        raise Failure(f"run {comm.run} has {there} members, not {size}: give another --run or --world-size")


def measure(comm: lh.Comm, nbytes: int, memory: str, algorithm: str, seconds: float, timeout: float) -> Row:
    """Measures one row. All members must call it with the same arguments.

    Raises Failure if a sum is wrong, or if the number of members changed.
    """
    import numpy as np

    size = comm.world_size

    def checked(info: lh.OpInfo) -> lh.OpInfo:
        if info.world_size != size:
            raise Failure(f"the group has {info.world_size} members now, not {size}: run the bench again")
        return info

    def reduce() -> lh.OpInfo:
        return checked(comm.all_reduce(tensor, algorithm=algorithm, timeout=timeout))

    def agree(values: Sequence[float]) -> list[float]:
        """For each of the values, the largest that any member has."""
        mine = np.array(values, "float64")
        checked(comm.all_reduce(mine, "max", tag=_TAG_OF_TALK, timeout=timeout))
        return [float(value) for value in mine]

    def times(iterations: int) -> list[float]:
        taken = []
        for _ in range(iterations):
            begin = time.perf_counter()
            reduce()
            taken.append(time.perf_counter() - begin)
        return taken

    count = nbytes // 4
    tensor = comm.empty(count, "float32") if memory == "arena" else np.empty(count, "float32")
    tensor.fill(comm.rank + 1)
    way = reduce().algorithm
    right = size * (size + 1) / 2
    if (tensor != right).any():
        raise Failure(
            f"wrong sum of {text_of(nbytes)}: {tensor[tensor != right][0]} instead of {right}; report this bug"
        )
    tensor.fill(0)  # repeated sums of other numbers would grow to infinity
    trial = agree([statistics.median(times(3))])[0]
    iterations = min(max(round(seconds / max(trial, 1e-6)), 5), _ITERATIONS_MAX)
    taken = times(iterations)
    median, p10, p90 = agree([statistics.median(taken), quantile(taken, 0.1), quantile(taken, 0.9)])
    return Row(size, nbytes, memory, way, iterations, median, p10, p90)


def machine() -> dict[str, Any]:
    """What a reader of the figures must know of this machine."""
    return {
        "node": platform.node(),
        "machine": platform.machine(),
        "processors": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "longhaul": lh.__version__,
    }


def take_part(args: argparse.Namespace) -> None:
    """Joins the run, measures together with the other members, and prints the rows unless --quiet."""
    rows = []
    with lh.join(run=args.run, group=args.group, peerd=args.peerd, timeout=args.timeout) as comm:
        gather(comm, args.world_size, args.timeout)
        if not args.quiet:
            print(f"{comm.world_size} members, float32 sums in place, times of whole calls at the slowest member")
            print(HEAD, flush=True)
        for nbytes in args.sizes:
            for memory in args.memory:
                rows.append(measure(comm, nbytes, memory, args.algorithm, args.seconds, args.timeout))
                if not args.quiet:
                    print(rows[-1].line(), flush=True)
    if args.json:
        result = {"machine": machine(), "rows": [row.json() for row in rows]}
        args.json.write_text(json.dumps(result, indent=1) + "\n")


# ---------------------------------------------------------------------------- on this machine


def on_this_machine(args: argparse.Namespace) -> int:
    """Starts daemons, and one process for each member. Only the first one prints. Returns the exit code."""
    from .testing import LocalCluster, start_tethered

    with LocalCluster(peers=args.peers) as cluster:
        members: list[subprocess.Popen[bytes]] = []
        try:
            for i in range(args.peers):
                command = [sys.executable, "-m", "longhaul.bench", "--run=bench", f"--peerd={cluster.socket(i)}"]
                command += [f"--world-size={args.peers}", f"--seconds={args.seconds}", f"--timeout={args.timeout}"]
                command += [f"--sizes={','.join(map(str, args.sizes))}", f"--memory={','.join(args.memory)}"]
                command += [f"--algorithm={args.algorithm}"]
                if i > 0 or args.quiet:
                    command.append("--quiet")
                if i == 0 and args.json:
                    command.append(f"--json={args.json}")
                members.append(start_tethered(command))
            # A member that fails has printed why. Stop the others then, because they would wait for it.
            while any(member.poll() is None for member in members) and not any(member.poll() for member in members):
                time.sleep(0.02)
            return int(any(member.poll() != 0 for member in members))
        finally:
            for member in members:
                member.kill()
                member.wait()


def _memories(text: str) -> list[str]:
    parts = text.split(",")
    if not parts or not set(parts) <= set(MEMORIES):
        raise argparse.ArgumentTypeError(f"{text}: give {' or '.join(MEMORIES)}, or both with a comma")
    return parts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m longhaul.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peers", type=int, help="start this many members on this machine, each with a peerd of its own (default 2)"
    )
    parser.add_argument(
        "--run",
        help="measure between running peerds: name of the run; the same for all members, and used by nobody else",
    )
    parser.add_argument("--group", type=int, default=0, help="with --run: number of the group (default 0)")
    parser.add_argument("--peerd", help="with --run: path of the socket of peerd (default: as longhaul.join)")
    parser.add_argument("--world-size", type=int, help="with --run: number of members to wait for")
    parser.add_argument(
        "--sizes",
        type=sizes_of,
        default="256,4K,1M,16M,64M",
        help="sizes of the tensor in bytes (default 256,4K,1M,16M,64M)",
    )
    parser.add_argument(
        "--memory",
        type=_memories,
        default="arena",
        help="where the tensor lies: arena (longhaul.empty), plain (numpy.empty), or arena,plain (default arena)",
    )
    parser.add_argument(
        "--algorithm", choices=list(ALGORITHMS), default="auto", help="how the bytes travel (default auto)"
    )
    parser.add_argument("--seconds", type=float, default=1, help="about how long to measure each row (default 1)")
    parser.add_argument(
        "--timeout", type=float, default=120, help="seconds to wait for members, or for an op (default 120)"
    )
    parser.add_argument(
        "--json",
        type=pathlib.Path,
        help="write the figures to this file: times in seconds, bandwidths in bytes per second",
    )
    parser.add_argument("--quiet", action="store_true", help="print no table")
    args = parser.parse_args(arguments)
    if args.run is None:
        unused = [name for name in ("peerd", "world_size") if getattr(args, name) is not None]
        if unused or args.group:
            parser.error(f"--{(unused or ['group'])[0].replace('_', '-')} needs --run")
        args.peers = 2 if args.peers is None else args.peers
        if args.peers < 2:
            parser.error("--peers: give at least 2")
    else:
        if args.peers is not None:
            parser.error("--peers starts its own daemons; leave it out with --run")
        if args.world_size is None or args.world_size < 2:
            parser.error("--run needs --world-size of at least 2")
    try:
        if args.run is None:
            return on_this_machine(args)
        take_part(args)
        return 0
    except (Failure, lh.Error, OSError, RuntimeError) as problem:
        print(f"longhaul.bench: {problem}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
