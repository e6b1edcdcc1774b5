#!/usr/bin/env python3
"""Measures all-reduce and iperf3 across wide-area links in one run. tests/wan joins the hosts.

    tools/build && .venv/bin/python bench/wan.py
    .venv/bin/python bench/wan.py clean --hosts=3 --lanes=64 --congestion=bbr

clean: links with 80 ms round trip, 500 Mbit/s, and 25 Mbit/s for each flow. Target: an op of 64 MiB gets 0.90 of what
iperf3 gets with 64 flows, and 10 times what it gets with one. loss: the same, and 0.1 % of the segments are lost at
random (--loss). Target: 0.80 of iperf3 with 64 flows and the same congestion control. slow_lane: like clean with 16
lanes per link. Then one lane of one link gets 5 % of its rate. Target: the op takes at most 1.10 times as long. ring:
see bench/ring.py. sizes: see bench/wan_sizes.py; it runs only if you name it.

With --congestion=auto, peerd chooses the congestion control by what it measures, and iperf3 takes the default of the
hosts' systems. --sysctl=net.ipv4.tcp_congestion_control=cubic sets that (the name must be in this machine's
net.ipv4.tcp_allowed_congestion_control).

With --one-way=100ms --flow-mbit=0 the links are those of `sizes`, where 10 times one flow is no target.

The rate of an op is what each host sends for it, 2 (N-1) / N of the tensor, divided by the time of the whole call at
the slowest trainer (median of --ops). iperf3 counts payload, too, without its first seconds. It runs twice: on one link
alone, to which the target refers (`iperf3_mbit`); and on all links of the ring at once, as an op uses them
(`iperf3_ring_mbit`: the slowest link). If the two differ, the machine is the limit and not the links.

Each case prints one line of JSON. `valid` is false if the emulator itself did not keep up (tests/wan/README.md); then
ignore the figures. Needs root and iperf3. The exit code is 1 if a target is missed, and 77 if this machine cannot run
the program.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "wan"), str(ROOT / "tests" / "chaos")]

import machine  # noqa: E402
import ring  # noqa: E402
import wan_sizes  # noqa: E402
import workers  # noqa: E402
from testbed import Wan, uniform, why_not  # noqa: E402
from wan_sizes import AUTO  # noqa: E402
from workers import MIB, Failure, Member, finish_all, meet, work  # noqa: E402
from world import DATA_PORT, Host, Process  # noqa: E402

IPERF_PORT = 5201
IPERF_FLOWS = 64
# The first seconds of iperf3 do not count. In them all flows reach their speed.
IPERF_OMIT_S = 3
ONE_WAY = "40ms"
RATE_MBIT = 500
FLOW_MBIT = 25
LOSS = "0.1%"
SLOW_SHARE = 0.05
SLOW_LANES = 16
# The emulator may be late by this much at most, a fraction of the delay.
LATE_P99_US_MAX = 5000
# A short interval: the coordinator tells peers what links cost soon after it was measured.
RING_INTERVAL_S = 20
# A fortieth of the delay. A longer tick leaves more of the processors to the hosts.
TICK_US = 1000


# ---------------------------------------------------------------------------- iperf3


def start_server(host: Host) -> Process:
    server = host.start(
        ["iperf3", "-s", "-1", "-p", str(IPERF_PORT), "--forceflush"], host.world.logs / f"{host.name}.iperf3.log"
    )
    deadline = time.monotonic() + 30
    while f":{IPERF_PORT} " not in host.run("ss", "-Hltn"):
        if not server.alive or time.monotonic() > deadline:
            raise Failure(f"iperf3 -s does not listen at {host.name}; see {host.world.logs}")
        time.sleep(0.01)
    return server


def iperf(pairs: Sequence[tuple[Host, Host]], flows: int, congestion: str, seconds: int) -> list[float]:
    """Runs iperf3 on all pairs at once. Returns the Mbit/s of payload that each received."""
    servers = [start_server(target) for _, target in pairs]
    clients = []
    for source, target in pairs:
        command = ["iperf3", "-c", target.address, "-p", str(IPERF_PORT), "-P", str(flows), "-J"]
        command += ["-t", str(seconds), "-O", str(IPERF_OMIT_S)]
        if congestion != AUTO:
            command += ["-C", congestion]
        clients.append(
            subprocess.Popen(
                ["ip", "netns", "exec", source.namespace, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        )
    rates = []
    for client in clients:
        out, err = client.communicate(timeout=seconds + IPERF_OMIT_S + 60)
        report = json.loads(out or b"{}")
        if "end" not in report or "error" in report:
            raise Failure(f"iperf3: {report.get('error') or err.decode(errors='replace').strip()}")
        rates.append(report["end"]["sum_received"]["bits_per_second"] / 1e6)
    for server in servers:
        server.wait()
    return rates


# ---------------------------------------------------------------------------- our side


class Worker(Member):
    """A trainer with one tensor in the arena."""

    algorithm = "auto"

    def prepare(self, mib: int, rank: int, size: int) -> None:
        self.tensor = self.comm.empty(mib * MIB // 4, "float32")
        self.tensor.fill(rank + 1)
        self.comm.all_reduce(self.tensor, timeout=self.PATIENCE_S)
        if not (self.tensor == size * (size + 1) / 2).all():
            raise Failure(f"rank {rank} of {size}: a wrong sum")
        self.tensor.fill(0)  # sums of zeros stay ordinary numbers, however often

    def op(self) -> tuple[float, str]:
        self.comm.begin_step(self.PATIENCE_S)  # at a boundary peers learn what was measured of links
        began = time.monotonic()
        info = self.comm.all_reduce(self.tensor, algorithm=self.algorithm, timeout=self.PATIENCE_S)
        return time.monotonic() - began, info.algorithm


class Team:
    """The trainers of a world. All get the same orders. program: their program, with a worker that is a Worker."""

    order = "op"  #: the worker's method that does an op

    def __init__(self, wan: Wan, stack: contextlib.ExitStack, program: str = __file__) -> None:
        self.pids = [host.peerd.pid for host in wan.hosts if host.peerd is not None]
        self.trainers = stack.enter_context(workers.team(program, len(wan.hosts)))
        self.pids += [trainer.process.pid for trainer in self.trainers]
        self.ops = 0
        meet(self.trainers, [host.socket for host in wan.hosts], "bench-wan")

    def prepare(self, mib: int) -> None:
        for rank, trainer in enumerate(self.trainers):
            trainer.start("prepare", mib=mib, rank=rank, size=len(self.trainers))
        finish_all(self.trainers)

    def op(self) -> tuple[float, str]:
        """Does an op. Returns its seconds at the slowest trainer, and the algorithm."""
        self.ops += 1
        for trainer in self.trainers:
            trainer.start(self.order)
        slowest: tuple[float, str] = max(finish_all(self.trainers))
        return slowest

    def cpu_seconds(self) -> float:
        return machine.cpu_seconds(self.pids)


@contextlib.contextmanager
def assembled(hosts: int, lanes: str, args: argparse.Namespace) -> Iterator[tuple[Wan, Team]]:
    settings = {"delay": args.one_way, "rate": f"{RATE_MBIT}mbit", "queue": args.queue}
    if args.flow_mbit:
        settings |= {"flow_rate": f"{args.flow_mbit}mbit", "flow_queue": args.queue}
    links = uniform(hosts, **settings)
    with contextlib.ExitStack() as stack:
        logs = args.log_dir or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lh-bench-wan-")))
        flags = [f"--lanes={lanes}", "--probe-interval-s=0", *args.peerd_flag]
        wan = stack.enter_context(
            Wan(logs / f"{hosts}-{lanes}", links, seed=args.seed, tick_us=TICK_US, peerd_flags=flags)
        )
        wan_sizes.set_up(wan, args)
        wan.start_coordinator([f"--ring-interval-s={RING_INTERVAL_S}"])
        for host in wan.hosts:
            host.start_peerd()
        team = Team(wan, stack)
        team.prepare(args.mib)
        yield wan, team


def op_seconds(team: Team, ops: int, warm: int) -> tuple[list[float], str]:
    """The seconds of each counted op at the slowest trainer, and the ops' algorithm.

    The warm-up ops do not count, and neither do the ops before a change of the algorithm.
    """
    for _ in range(warm):
        team.op()
    seconds: list[float] = []
    algorithm = ""
    while len(seconds) < ops:
        took, now = team.op()
        if now != algorithm:
            seconds, algorithm = [], now
        seconds.append(took)
    return seconds, algorithm


def lanes_used(wan: Wan) -> list[int]:
    """How many data lanes each host sends on, over all its links."""
    return [int(host.metric("longhaul_peerd_lanes_used")) for host in wan.hosts]


def lanes_of(wan: Wan) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Flows that carried tensors since the last reset, by direction."""
    found = {}
    for src in wan.hosts:
        for dst in wan.hosts:
            if src is dst:
                continue
            flows = [
                flow for flow in wan.flows(src.name, dst.name) if DATA_PORT in (flow["src_port"], flow["dst_port"])
            ]
            # A flow with acknowledgements and control frames alone has a few percent of this.
            busy = [flow for flow in flows if flow["delivered_bytes"] > MIB // 2]
            if busy:
                found[src.name, dst.name] = busy
    return found


def tcp_of(wan: Wan) -> dict[str, Any]:
    """What the kernel says (`ss -ti`) about all lanes that sent tensors, since their connections began."""
    lanes: list[dict[str, float]] = []
    for host in wan.hosts:
        for line in host.run("ss", "-HtinO", "state", "established").splitlines():
            if f":{DATA_PORT}" not in line:
                continue
            numbers = {
                key: float(value)
                for key, value in re.findall(
                    r"\b(cwnd|bytes_sent|bytes_retrans|busy|rwnd_limited|sndbuf_limited)[:](\d+)", line
                )
            }
            if numbers.get("bytes_sent", 0) > MIB:
                lanes.append(numbers)
    busy = sum(lane.get("busy", 0) for lane in lanes)
    sent = sum(lane["bytes_sent"] for lane in lanes)
    if not lanes or not busy:
        return {"lanes": len(lanes)}
    return {
        "lanes": len(lanes),
        "cwnd_median": statistics.median(lane.get("cwnd", 0) for lane in lanes),
        "retransmitted": round(sum(lane.get("bytes_retrans", 0) for lane in lanes) / sent, 5),
        "limited_by_receiver": round(sum(lane.get("rwnd_limited", 0) for lane in lanes) / busy, 3),
        "limited_by_send_buffer": round(sum(lane.get("sndbuf_limited", 0) for lane in lanes) / busy, 3),
    }


class Judge:
    """Judges whether the emulator kept up from now until verdict()."""

    def __init__(self, wan: Wan) -> None:
        self.wan = wan
        wan.reset_counters()
        self.before = wan.validity()
        self.began = time.monotonic()

    def verdict(self) -> dict[str, Any]:
        now = self.wan.validity()
        share = (now["cpu_s"] - self.before["cpu_s"]) / (time.monotonic() - self.began)
        lost = now["refused"] + now["unread"] - self.before["unread"]
        return {
            "valid": now["late_p99_us"] <= LATE_P99_US_MAX and lost == 0 and share < 0.9,
            "late_p99_us": now["late_p99_us"],
            "not_taken": lost,
            "emulator_cpu": round(share, 2),
        }


def emit(line: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    line = {"bench": "wan", "mib": args.mib, **line, "congestion": args.congestion}
    text = json.dumps(line)
    print(text, flush=True)
    if args.json:
        with open(args.json, "a") as sink:
            print(text, file=sink)
    return line


# ---------------------------------------------------------------------------- cases


def beside_iperf(case: str, wan: Wan, team: Team, lanes: str, args: argparse.Namespace) -> dict[str, Any]:
    hosts = len(wan.hosts)
    ring = [(host, wan.hosts[(i + 1) % hosts]) for i, host in enumerate(wan.hosts)]
    judge = Judge(wan)
    many = iperf(ring[:1], IPERF_FLOWS, args.congestion, args.iperf_seconds)[0]
    one = iperf(ring[:1], 1, args.congestion, args.iperf_seconds)[0]
    all_at_once = iperf(ring, IPERF_FLOWS, args.congestion, args.iperf_seconds)
    iperf_verdict = judge.verdict()
    judge = Judge(wan)
    cpu, ops = team.cpu_seconds(), team.ops
    seconds, algorithm = op_seconds(team, args.ops, args.warm_ops)
    cpu = (team.cpu_seconds() - cpu) / (team.ops - ops)
    verdict = judge.verdict()
    shares = [[flow["delivered_bytes"] for flow in flows] for flows in lanes_of(wan).values()]
    median = statistics.median(seconds)
    sent_mbit = 2 * (hosts - 1) / hosts * args.mib * MIB * 8 / 1e6
    got = sent_mbit / median
    target = 0.9 if case == "clean" else 0.8
    met = got >= target * many and (case != "clean" or args.flow_mbit == 0 or got >= 10 * one)
    return {
        "case": case,
        "hosts": hosts,
        "lanes": lanes,
        "algorithm": algorithm,
        "op_s": round(median, 3),
        "op_all_s": [round(each, 3) for each in seconds],
        "op_mbit": round(got, 1),
        "iperf3_mbit": round(many, 1),
        "iperf3_ring_mbit": round(min(all_at_once), 1),
        "iperf3_one_flow_mbit": round(one, 1),
        "of_iperf3": round(got / many, 3),
        "of_iperf3_ring": round(got / min(all_at_once), 3),
        "over_one_flow": round(got / one, 1),
        "target": target,
        "met": met,
        **verdict,
        "iperf3_valid": iperf_verdict["valid"],
        "iperf3_late_p99_us": iperf_verdict["late_p99_us"],
        "cpu_s_per_op": round(cpu, 2),
        # For each link: what its least busy lane carried, as a share of what its busiest lane carried.
        "laziest_lane": [round(min(share) / max(share), 3) for share in shares],
        "lanes_used": lanes_used(wan),
        "tcp": tcp_of(wan),
    }


def slow_lane(wan: Wan, team: Team, args: argparse.Namespace) -> dict[str, Any]:
    judge = Judge(wan)
    seconds, algorithm = op_seconds(team, args.ops, args.warm_ops)
    before = statistics.median(seconds)
    (src, dst), flows = sorted(lanes_of(wan).items())[0]
    if len(flows) != SLOW_LANES:
        raise Failure(f"{src} to {dst}: {len(flows)} lanes carried something, expected {SLOW_LANES}")
    victim = flows[len(flows) // 2]
    wan.set_flow_rate(src, dst, victim["src_port"], victim["dst_port"], f"{args.flow_mbit * SLOW_SHARE * 1000:.0f}kbit")
    wan.reset_counters()
    seconds, algorithm_after = op_seconds(team, args.ops, 1)
    if algorithm_after != algorithm:
        raise Failure(f"the algorithm changed from {algorithm} to {algorithm_after}: raise --warm-ops")
    after = statistics.median(seconds)
    now = {flow["src_port"]: flow["delivered_bytes"] for flow in lanes_of(wan).get((src, dst), [])}
    others = [count for port, count in now.items() if port != victim["src_port"]]
    verdict = judge.verdict()
    return {
        "case": "slow_lane",
        "hosts": len(wan.hosts),
        "lanes": SLOW_LANES,
        "algorithm": algorithm,
        "op_before_s": round(before, 3),
        "op_s": round(after, 3),
        "op_all_s": [round(each, 3) for each in seconds],
        "times": round(after / before, 3),
        "target": 1.1,
        "met": after <= 1.1 * before,
        **verdict,
        "slow_lane_share": round(now.get(victim["src_port"], 0) / statistics.median(others), 3) if others else None,
    }


def bench(args: argparse.Namespace) -> bool:
    print(
        f"{platform.node()}: {os.cpu_count()} CPUs, Linux {platform.release()}, load {os.getloadavg()[0]:.1f}",
        file=sys.stderr,
    )
    met = True
    for hosts in args.hosts:
        for lanes in args.lanes if {"clean", "loss"} & set(args.case) else []:
            with assembled(hosts, lanes, args) as (wan, team):
                if "clean" in args.case:
                    met &= emit(beside_iperf("clean", wan, team, lanes, args), args)["met"]
                if "loss" in args.case:
                    for a in wan.hosts:
                        for b in wan.hosts:
                            if a is not b:
                                wan.set(a.name, b.name, loss=args.loss or LOSS)
                    met &= emit(beside_iperf("loss", wan, team, lanes, args), args)["met"]
        if "slow_lane" in args.case:
            with assembled(hosts, str(SLOW_LANES), args) as (wan, team):
                met &= emit(slow_lane(wan, team, args), args)["met"]
    if "sizes" in args.case:
        met &= wan_sizes.measure(args, Judge, emit)
    if "ring" in args.case:
        met &= emit(ring.measure(args, Judge), args)["met"]
    return met


def main() -> int:
    cases = ["clean", "loss", "slow_lane", "ring"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "case", nargs="*", default=cases, help=f"out of: {', '.join(cases)}, sizes (default all but sizes)"
    )
    parser.add_argument(
        "--hosts",
        type=lambda text: [int(n) for n in text.split(",")],
        default="3,4",
        help="numbers of hosts (default 3,4)",
    )
    parser.add_argument(
        "--lanes",
        type=lambda text: text.split(","),
        default="auto",
        help="peerd's --lanes, for instance 16,64 (default auto)",
    )
    parser.add_argument(
        "--one-way", default=ONE_WAY, help=f"clean, loss, slow_lane: the delay of a link (default {ONE_WAY})"
    )
    parser.add_argument(
        "--flow-mbit",
        type=int,
        default=FLOW_MBIT,
        help=f"clean, loss, slow_lane: the rate of one flow; 0: that of the link (default {FLOW_MBIT})",
    )
    parser.add_argument("--congestion", default="cubic", help="for lanes and iperf3, or auto (default cubic)")
    parser.add_argument(
        "--sysctl", action="append", default=[], metavar="NAME=VALUE", help="a setting of the hosts' kernels"
    )
    parser.add_argument("--loss", help=f"share of the segments that is lost (default {LOSS}%; sizes: none)")
    parser.add_argument("--mib", type=int, default=64, help="size of the tensor in MiB (default 64)")
    parser.add_argument("--ops", type=int, default=5, help="ops of a case that count (default 5)")
    parser.add_argument(
        "--warm-ops",
        type=int,
        default=12,
        help="ops before them, in which peers find the algorithm and the number of lanes (default 12)",
    )
    parser.add_argument("--iperf-seconds", type=int, default=6, help="counted seconds of an iperf3 run (default 6)")
    parser.add_argument("--queue", default="50ms", help="length of the queue in front of each rate (default 50ms)")
    parser.add_argument("--sizes", default=wan_sizes.SIZES, help=f"sizes: bytes of ops (default {wan_sizes.SIZES})")
    parser.add_argument("--idle-s", type=float, default=30, help="sizes: the pause before an op (default 30)")
    parser.add_argument("--idle-ops", type=int, default=1, help="sizes: ops after a pause, of each size (default 1)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the losses (default 1)")
    parser.add_argument("--json", type=pathlib.Path, help="add the lines to this file too")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--log-dir", type=pathlib.Path, help="keep the daemons' logs here")
    parser.add_argument("--peerd-flag", action="append", default=[], help="a further flag for every peerd")
    args = parser.parse_args()
    if args.worker:
        work(Worker())
        return 0
    if set(args.case) - {*cases, "sizes"} or min(args.hosts) < 2:
        parser.error(f"give cases out of {', '.join(cases)}, sizes, and --hosts of at least 2")
    if args.flow_mbit == 0 and "slow_lane" in args.case:
        parser.error("slow_lane slows one flow down: give the rate of the others by --flow-mbit")
    if args.congestion == AUTO and "ring" in args.case:
        parser.error("ring compares worlds of one congestion control: give it by --congestion")
    reason = why_not() or ("" if shutil.which("iperf3") else "iperf3 is missing: apt-get install iperf3")
    if reason:
        print(f"wan: skipped: {reason}", file=sys.stderr)
        return 77
    try:
        return 0 if bench(args) else 1
    except Failure as failure:
        print(f"wan: {failure}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
