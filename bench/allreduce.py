#!/usr/bin/env python3
"""All-reduce of Longhaul beside gloo (through torch.distributed), on this machine, in one run.

    tools/build && .venv/bin/python bench/allreduce.py
    .venv/bin/python bench/allreduce.py --peers=2 --sizes=256,64M --json=result.json

For each world size: a Longhaul cluster with one peerd and one trainer process a member, and as many
gloo processes. Float32 sums. Variants take turns, round by round, so that whatever else the machine
does meets them alike; only one runs at a time. Every variant's sum is checked before it is timed.

A row gives the median time of one op: per process over all its timed ops, then the slowest process.
`ratio` is gloo's time over ours: above 1 we are faster. gloo reduces in place only; both of ours are
compared with that. CPU is user and system time of all processes of a variant, peerds included.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import platform
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

VARIANTS = ("ours, in place", "ours, out of place", "gloo")
# A process that says nothing for so long has failed.
PATIENCE_S = 120
ITERATIONS_MAX = 1000


# ---------------------------------------------------------------------------- workers


class Ours:
    """A trainer of Longhaul, with tensors in the arena."""

    def __init__(self, args: argparse.Namespace) -> None:
        import longhaul as lh

        self.comm = lh.join(run="bench", peerd=args.socket, timeout=PATIENCE_S)
        # Members are admitted at step boundaries, which all of them pass together.
        while self.comm.world_size < args.size:
            self.comm.begin_step(timeout=PATIENCE_S)
            time.sleep(0.01)

    def prepare(self, variant: str, count: int) -> None:
        self.source = self.comm.empty((count,), "float32")
        self.out = self.comm.empty((count,), "float32") if variant == "ours, out of place" else None

    def fill(self, value: float) -> None:
        self.source.fill(value)
        if self.out is not None:
            self.out.fill(-1)

    def op(self) -> None:
        self.comm.all_reduce(self.source, out=self.out)

    def result_is(self, value: float) -> bool:
        return bool((self.source if self.out is None else self.out).min() == value) and bool(
            (self.source if self.out is None else self.out).max() == value
        )

    def close(self) -> None:
        self.comm.leave(timeout=PATIENCE_S)


class Gloo:
    def __init__(self, args: argparse.Namespace) -> None:
        import torch
        import torch.distributed

        self.torch = torch
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{args.rendezvous}", rank=args.rank, world_size=args.size
        )

    def prepare(self, variant: str, count: int) -> None:
        self.tensor = self.torch.empty(count, dtype=self.torch.float32)

    def fill(self, value: float) -> None:
        self.tensor.fill_(value)

    def op(self) -> None:
        self.torch.distributed.all_reduce(self.tensor)

    def result_is(self, value: float) -> bool:
        return bool((self.tensor == value).all())

    def close(self) -> None:
        self.torch.distributed.destroy_process_group()


def answer(value: Any) -> None:
    print(json.dumps(value), flush=True)


def work(args: argparse.Namespace) -> None:
    """Carries out orders from standard input, one JSON line each, with one JSON line as the answer."""
    system = Ours(args) if args.worker == "ours" else Gloo(args)
    answer("ready")
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "prepare":
            system.prepare(order["variant"], order["count"])
            system.fill(args.rank + 1)
            system.op()
            right = system.result_is(args.size * (args.size + 1) / 2)
            system.fill(0)  # sums of zeros stay ordinary numbers, however often
            answer("right" if right else "wrong")
        elif order["do"] == "round":
            seconds = []
            for _ in range(order["warm"]):
                system.op()
            for _ in range(order["iterations"]):
                begin = time.perf_counter()
                system.op()
                seconds.append(time.perf_counter() - begin)
            answer(seconds)
    system.close()


# ---------------------------------------------------------------------------- the bench


class Failure(Exception):
    pass


class Team:
    """The processes of one system at one world size. They take orders together."""

    def __init__(self, name: str, size: int, flags: list[list[str]], other_pids: list[int]) -> None:
        self.name = name
        self.size = size
        self.other_pids = other_pids
        self.processes: list[subprocess.Popen[bytes]] = []
        # gloo would look the host's name up and might find an address that is not its own.
        environment = dict(os.environ, GLOO_SOCKET_IFNAME=os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
        for rank in range(size):
            command = [sys.executable, str(pathlib.Path(__file__).resolve()), f"--worker={name}"]
            command += [f"--rank={rank}", f"--size={size}", *flags[rank]]
            self.processes.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            )

    def answers(self) -> list[Any]:
        """One line of each process."""
        lines: list[bytes] = [b""] * self.size
        deadline = time.monotonic() + PATIENCE_S
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self.processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while selector.get_map():
                ready = selector.select(max(0, deadline - time.monotonic()))
                if not ready:
                    late = sorted(key.data for key in selector.get_map().values())
                    raise Failure(f"{self.name} world of {self.size}: ranks {late} silent for {PATIENCE_S} s")
                for key, _ in ready:
                    piece = os.read(key.fd, 1 << 20)
                    if not piece:
                        code = self.processes[key.data].wait()
                        raise Failure(
                            f"{self.name} world of {self.size}: rank {key.data} ended with {code} (its errors are above)"
                        )
                    lines[key.data] += piece
                    if piece.endswith(b"\n"):
                        selector.unregister(key.fileobj)
        return [json.loads(line) for line in lines]

    def order(self, **order: Any) -> list[Any]:
        line = json.dumps(order).encode() + b"\n"
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # answers() tells who ended and how
                process.stdin.write(line)
                process.stdin.flush()
        return self.answers()

    def cpu_seconds(self) -> float:
        ticks = 0
        for pid in [process.pid for process in self.processes] + self.other_pids:
            # After the name, which may contain anything: state is field 0, utime 11, stime 12.
            fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


@dataclasses.dataclass
class Samples:
    """Of one variant at one world size and tensor size."""

    seconds: list[list[float]]  # by rank
    iterations: int = 1
    ops: int = 0
    cpu: float = 0

    def quantile(self, q: float) -> float:
        """Of the slowest process, in seconds."""
        return max(sorted(of_rank)[int(q * (len(of_rank) - 1))] for of_rank in self.seconds)

    def median(self) -> float:
        return max(statistics.median(of_rank) for of_rank in self.seconds)


@contextlib.contextmanager
def teams(size: int, args: argparse.Namespace) -> Iterator[dict[str, Team]]:
    import longhaul as lh

    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="longhaul-bench-"))
        cluster = stack.enter_context(
            lh.testing.LocalCluster(
                peers=size, binaries=args.binaries, log_dir=args.log_dir, peerd_flags=args.peerd_flag
            )
        )
        sockets = [[f"--socket={cluster.socket(rank)}"] for rank in range(size)]
        rendezvous = [[f"--rendezvous={directory}/gloo"]] * size
        ours = Team("ours", size, sockets, [peer.pid for peer in cluster.peers])
        stack.callback(ours.kill)
        gloo = Team("gloo", size, rendezvous, [])
        stack.callback(gloo.kill)
        for team in (ours, gloo):
            team.answers()
        yield {"ours, in place": ours, "ours, out of place": ours, "gloo": gloo}
        for team in (ours, gloo):
            team.close()


def one_round(team: Team, samples: Samples, warm: int) -> None:
    before = team.cpu_seconds()
    results = team.order(do="round", warm=warm, iterations=samples.iterations)
    samples.cpu += team.cpu_seconds() - before
    samples.ops += warm + samples.iterations
    for of_rank, result in zip(samples.seconds, results):
        of_rank += result


def measure(team_of: dict[str, Team], size: int, nbytes: int, args: argparse.Namespace) -> dict[str, Samples]:
    samples_of: dict[str, Samples] = {}
    for variant in VARIANTS:
        team = team_of[variant]
        # The tensors of a variant stay where they are while the other variants have their turns.
        samples_of[variant] = Samples([[] for _ in range(size)])
        prepare(team, variant, nbytes)
        trial = Samples([[] for _ in range(size)], iterations=3)
        one_round(team, trial, warm=2)
        wanted = round(args.round_seconds / max(trial.median(), 1e-6))
        samples_of[variant].iterations = min(max(wanted, 2), ITERATIONS_MAX)
    prepared = {"ours": "ours, out of place", "gloo": "gloo"}
    for turn in range(args.rounds):
        for i in range(len(VARIANTS)):
            variant = VARIANTS[(turn + i) % len(VARIANTS)]
            team = team_of[variant]
            if prepared[team.name] != variant:
                prepare(team, variant, nbytes)
                prepared[team.name] = variant
            # The first op of a round waits for the slowest process to hear of it.
            one_round(team, samples_of[variant], warm=2)
    return samples_of


def prepare(team: Team, variant: str, nbytes: int) -> None:
    verdicts = team.order(do="prepare", variant=variant, count=nbytes // 4)
    if set(verdicts) != {"right"}:
        wrong = [rank for rank, verdict in enumerate(verdicts) if verdict != "right"]
        raise Failure(f"{variant}, world of {team.size}, {nbytes} bytes: wrong sum at ranks {wrong}")


def text_of(nbytes: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def bytes_of(text: str) -> int:
    factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper(), 1)
    nbytes = int(text if factor == 1 else text[:-1]) * factor
    if nbytes <= 0 or nbytes % 4:
        raise argparse.ArgumentTypeError(f"{text}: whole float32s, at least one")
    return nbytes


def rows_of(size: int, nbytes: int, samples_of: dict[str, Samples]) -> list[dict[str, Any]]:
    gloo = samples_of["gloo"]
    rows = []
    for variant, samples in samples_of.items():
        rows.append(
            {
                "peers": size,
                "bytes": nbytes,
                "variant": variant,
                "median_ms": 1e3 * samples.median(),
                "p10_ms": 1e3 * samples.quantile(0.1),
                "p90_ms": 1e3 * samples.quantile(0.9),
                "gloo_median_ms": 1e3 * gloo.median(),
                "ratio": gloo.median() / samples.median(),
                "cpu_ms_per_op": 1e3 * samples.cpu / samples.ops,
                "timed_ops": len(samples.seconds[0]),
            }
        )
    return rows


HEAD = f"{'peers':>5} {'tensor':>8} {'variant':<18} {'median ms':>10} {'p10':>8} {'p90':>8} {'ratio':>6} {'CPU ms/op':>10} {'ops':>6}"


def line_of(row: dict[str, Any]) -> str:
    ratio = "" if row["variant"] == "gloo" else f"{row['ratio']:.2f}"
    return (
        f"{row['peers']:>5} {text_of(row['bytes']):>8} {row['variant']:<18} {row['median_ms']:>10.3f} "
        f"{row['p10_ms']:>8.3f} {row['p90_ms']:>8.3f} {ratio:>6} {row['cpu_ms_per_op']:>10.3f} {row['timed_ops']:>6}"
    )


def bench(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    print(f"{platform.node()}: {os.cpu_count()} CPUs, Linux {platform.release()}, load {os.getloadavg()[0]:.1f}")
    print(HEAD, flush=True)
    for size in args.peers:
        with teams(size, args) as team_of:
            for nbytes in args.sizes:
                new = rows_of(size, nbytes, measure(team_of, size, nbytes, args))
                rows += new
                print("\n".join(line_of(row) for row in new), flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    def sizes(text: str) -> list[int]:
        return [bytes_of(part) for part in text.split(",")]

    parser.add_argument("--peers", type=numbers, default="2,3,4", help="world sizes (default 2,3,4)")
    parser.add_argument(
        "--sizes", type=sizes, default="256,4K,1M,16M,64M", help="bytes of the tensor (default 256,4K,1M,16M,64M)"
    )
    parser.add_argument("--rounds", type=int, default=7, help="turns of each variant (default 7)")
    parser.add_argument("--round-seconds", type=float, default=0.3, help="about how long a turn lasts (default 0.3)")
    parser.add_argument("--json", type=pathlib.Path, help="write the rows to this file too")
    parser.add_argument("--binaries", help="directory of the daemons (default: see longhaul.testing.find_binary)")
    parser.add_argument("--log-dir", help="keep the daemons' logs here")
    parser.add_argument("--peerd-flag", action="append", default=[], help="a further flag for every peerd")
    for hidden in ("--worker", "--socket", "--rendezvous"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    for hidden in ("--rank", "--size"):
        parser.add_argument(hidden, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return 0
    if min(args.peers) < 2 or args.rounds < 1:
        parser.error("--peers from 2, --rounds from 1")
    try:
        rows = bench(args)
    except Failure as failure:
        print(f"allreduce: {failure}", file=sys.stderr)
        return 1
    if args.json:
        args.json.write_text(json.dumps({"host": platform.node(), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
