#!/usr/bin/env python3
"""Measures all-reduce with each codec beside the same op in float32, on slow links and on none.

    tools/build && .venv/bin/python bench/wan_codecs.py
    .venv/bin/python bench/wan_codecs.py --hosts=4 --mbit=200 --delay=20ms --mib=64 --codecs=int8,int4
    .venv/bin/python bench/wan_codecs.py --mbit=0        # hosts without a limit to their rate

tests/wan joins the hosts. Each has one access link of `--mbit` up and down. Ops of all codecs take turns, so that other
work of the machine affects all alike. `sent` is what data lanes sent for an op, headers and repeats included, as a share
of what they sent in float32. `times` is how many times faster the op is than in float32. Target: at most 27 % of the
bytes and 3.4 times for int8, 14 % and 6.5 times for int4 at 200 Mbit/s.

Prints one line of JSON for each codec. `valid` is false if the emulator itself did not keep up (tests/wan/README.md);
then ignore the figures. Needs root. The exit code is 1 if a target is missed in a valid run, and 77 if this machine
cannot run the program.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "wan"), str(ROOT / "tests" / "chaos")]

import wan as wide  # noqa: E402
from testbed import Wan, uniform, why_not  # noqa: E402
from workers import MIB, Failure, finish_all, work  # noqa: E402

CODECS = ("none", "bf16", "int8", "int4")
# Codec: the most bytes, as a share of float32's, and the least speed, as a multiple of float32's.
TARGETS = {"int8": (0.27, 3.4), "int4": (0.14, 6.5)}
RING_INTERVAL_S = 20


class Worker(wide.Worker):
    def prepare(self, mib: int, rank: int, size: int) -> None:
        super().prepare(mib, rank, size)
        self.values = self.np.random.default_rng(rank).standard_normal(mib * MIB // 4, dtype="float32")

    def coded_op(self, codec: str) -> tuple[float, str, int]:
        """Returns the seconds, the algorithm, and a digest of the result."""
        self.tensor[:] = self.values
        quantize = None if codec == "none" else codec
        self.comm.begin_step(self.PATIENCE_S)
        began = time.monotonic()
        info = self.comm.all_reduce(self.tensor, quantize=quantize, timeout=self.PATIENCE_S)
        took = time.monotonic() - began
        bits = self.tensor.view("uint32")
        return took, info.algorithm, int(self.np.bitwise_xor.reduce(bits)) ^ int(bits.sum(dtype="uint64"))


def sent(wan: Wan) -> float:
    """Bytes that data lanes have sent, at all hosts."""
    return sum(host.metric("longhaul_peerd_sent_bytes_total") for host in wan.hosts)


def op(wan: Wan, team: wide.Team, codec: str) -> tuple[float, str, float]:
    """Returns the seconds at the slowest trainer, the algorithm, and the bytes on the wire."""
    before = sent(wan)
    for trainer in team.trainers:
        trainer.start("coded_op", codec=codec)
    each = finish_all(team.trainers)
    if len({digest for _, _, digest in each}) != 1:
        raise Failure(f"{codec}: the results of the trainers differ")
    return max(took for took, _, _ in each), each[0][1], sent(wan) - before


def measure(args: argparse.Namespace) -> bool:
    links = dict(uniform(args.hosts, delay=args.delay))
    if args.mbit:
        rate = f"{args.mbit}mbit"
        links["access"] = {f"h{i}": {"up": rate, "down": rate, "queue": args.queue} for i in range(args.hosts)}
    with contextlib.ExitStack() as stack:
        logs = args.log_dir or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lh-bench-codecs-")))
        wan = stack.enter_context(Wan(logs, links, seed=1, tick_us=wide.TICK_US, peerd_flags=args.peerd_flag))
        wan.start_coordinator([f"--ring-interval-s={RING_INTERVAL_S}"])
        for host in wan.hosts:
            host.start_peerd()
        team = wide.Team(wan, stack, __file__)
        team.prepare(args.mib)
        for _ in range(args.warm_ops):
            op(wan, team, "none")
        judge = wide.Judge(wan)
        seen: dict[str, list[tuple[float, str, float]]] = {codec: [] for codec in args.codecs}
        for _ in range(args.ops):
            for codec in args.codecs:
                seen[codec].append(op(wan, team, codec))
        verdict = judge.verdict()
    plain_s = statistics.median(took for took, _, _ in seen["none"])
    plain_bytes = statistics.median(each for _, _, each in seen["none"])
    met = True
    for codec in args.codecs:
        seconds = statistics.median(took for took, _, _ in seen[codec])
        share = statistics.median(each for _, _, each in seen[codec]) / plain_bytes
        line: dict[str, Any] = {
            "bench": "wan_codecs",
            "codec": codec,
            "hosts": args.hosts,
            "delay": args.delay,
            "mbit": args.mbit,
            "mib": args.mib,
            "algorithm": seen[codec][-1][1],
            "op_s": round(seconds, 3),
            "op_all_s": [round(took, 3) for took, _, _ in seen[codec]],
            "times": round(plain_s / seconds, 2),
            "sent": round(share, 4),
            **verdict,
        }
        if codec in TARGETS and args.mbit:
            most, least = TARGETS[codec]
            line |= {"target_sent": most, "target_times": least}
            line["met"] = share <= most and plain_s / seconds >= least
            met &= line["met"] or not verdict["valid"]
        print(json.dumps(line), flush=True)
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4, help="default 4")
    parser.add_argument("--mbit", type=int, default=200, help="rate of each host's access link; 0: none (default 200)")
    parser.add_argument("--delay", default="20ms", help="one-way delay (default 20ms)")
    parser.add_argument("--queue", default="50ms", help="longest queue of an access link (default 50ms)")
    parser.add_argument("--mib", type=int, default=64, help="MiB of float32 (default 64)")
    parser.add_argument("--codecs", type=lambda text: text.split(","), default=list(CODECS), help=",".join(CODECS))
    parser.add_argument("--ops", type=int, default=3, help="ops of each codec that count (default 3)")
    parser.add_argument("--warm-ops", type=int, default=10, help="ops before, in which lanes are found (default 10)")
    parser.add_argument("--log-dir", type=pathlib.Path, help="keep logs there")
    parser.add_argument(
        "--peerd-flag", action="append", default=[], help="pass this flag to every peerd; may be repeated"
    )
    args = parser.parse_args()
    if unknown := set(args.codecs) - set(CODECS):
        parser.error(f"no codec {' '.join(sorted(unknown))}: there are {' '.join(CODECS)}")
    args.codecs = ["none", *(codec for codec in args.codecs if codec != "none")]
    if reason := why_not():
        print(f"wan_codecs: {reason}", file=sys.stderr)
        return 77
    return 0 if measure(args) else 1


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        work(Worker())
        sys.exit(0)
    try:
        sys.exit(main())
    except Failure as failure:
        print(f"wan_codecs: {failure}", file=sys.stderr)
        sys.exit(1)
