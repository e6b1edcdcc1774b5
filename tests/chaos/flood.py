"""Strangers flood every port while members train: do the members notice?

A cluster of three peers on this machine makes all-reduces of 1 MiB in a loop, with a step boundary after every ten, and
checks every value. Attackers hold up to 1,000 connections to all ports of all daemons: the coordinator's for peers, for
operators and for HTTP, and each peerd's data port, HTTP port and Unix socket. They send random, truncated and oversized
bytes, one byte a second, bytes without end, or nothing; they read no answers, close one half, close at once, and reset
(attackers.py).

Attackers cost processor time, and so does the kernel's share of each connection. On a small machine that alone slows
the members down. So the number of connections and bytes in a second is bounded, and there are three kinds of time, in
turns, round after round: *quiet*; *control*, in which the same attackers do the same at ports of a process that only
accepts and reads; and *flood*. flood / control tells what the daemons do about strangers. flood / quiet also has the
attackers' own cost.

The run fails if a member sees an error or a wrong value; if a member is removed; if a daemon ends, or
uses more memory than MEMORY_MIB above what it had, or keeps descriptors; if it logs more than LOG_LINES_PER_S, or does
not count refusals; if a port serves nobody afterwards; or if flood / control is below --ratio.

Modes: clear: without TLS, and lanes on loopback are in clear; sealed: TLS at the coordinator's gRPC ports, join tokens,
and --lane-encryption=require.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import multiprocessing
import os
import pathlib
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

from attackers import KINDS, Counts, Target, attack, sink

import longhaul as lh
from longhaul.testing import LocalCluster, find_binary

PEERS = 3
COUNT = 1 << 18  # float32: 1 MiB
OPS_PER_STEP = 10
PATIENCE_S = 120
# The most that a daemon may use above what it used before the flood. Peerd: 256 callers in a handshake, 64 clients
# without HELLO and 64 HTTP connections with a stack each. The coordinator: buffers of gRPC, at most LIMIT connections.
MEMORY_MIB = {"coordinator": 128, "peerd": 48}
# Descriptors that a daemon may have more than before, once the flood is over for SETTLE_S.
FILES = 16
SETTLE_S = 60
# Each kind of refusal has its own limit, between one line a second and one a minute.
LOG_LINES_PER_S = 8
LOG_LINES = 200

SPAWN = multiprocessing.get_context("spawn")


class Failed(Exception):
    pass


# ---------------------------------------------------------------------- members


def train(number: int, socket: str, ops: Any, stop: Any, problems: Any) -> None:
    """A member. ops: counts finished ops, in a place for each member. stop: not 0: the members end together."""
    try:
        comm = lh.join("flood", peerd=socket, timeout=PATIENCE_S)
        while comm.begin_step(timeout=PATIENCE_S).world_size < PEERS:
            pass
        members = comm.members
        tensor = comm.empty(COUNT)
        step = 0
        while True:
            for tag in range(OPS_PER_STEP):
                tensor[:] = (1 << number) + step % 64 + tag
                tensor[0] = stop.value if number == 0 else 0
                info = comm.all_reduce(tensor, timeout=PATIENCE_S)
                right = (1 << PEERS) - 1 + PEERS * (step % 64 + tag)
                if info.world_size != PEERS or not (tensor[1:] == right).all():
                    raise Failed(f"step {step}, op {tag}: {info}, {tensor[:8]} instead of {right}")
                ops[number] += 1
                if tensor[0] > 0:
                    comm.leave(timeout=PATIENCE_S)
                    return
            comm.begin_step(timeout=PATIENCE_S)
            step += 1
            if comm.members != members:
                raise Failed(f"step {step}: members {comm.members} after {members}")
    except BaseException as problem:
        problems.put(f"member {number}: {type(problem).__name__}: {problem}")
        raise


class Members:
    def __init__(self, cluster: LocalCluster) -> None:
        self.ops = SPAWN.RawArray("Q", PEERS)
        self.stop = SPAWN.RawValue("i", 0)
        self.problems: Any = SPAWN.Queue()
        self.processes = [
            SPAWN.Process(target=train, args=(i, cluster.socket(i), self.ops, self.stop, self.problems), daemon=True)
            for i in range(PEERS)
        ]
        for process in self.processes:
            process.start()

    def done(self) -> int:
        return int(min(self.ops))

    def check(self) -> None:
        for process in self.processes:
            if not process.is_alive():
                raise Failed(f"a member ended with {process.exitcode}: {self.problem()}")

    def problem(self) -> str:
        with contextlib.suppress(Exception):
            return str(self.problems.get(timeout=1))
        return "no reason"

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def end(self) -> None:
        self.stop.value = 1
        for process in self.processes:
            process.join(PATIENCE_S)
            if process.exitcode != 0:
                raise Failed(f"a member ended with {process.exitcode}: {self.problem()}")


# ---------------------------------------------------------------------- daemons


def run(program: str, *arguments: object) -> str:
    command = [str(find_binary(program)), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    if done.returncode != 0:
        raise Failed(f"{command}: {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


class Cluster:
    """The daemons of a mode, and what is measured of them."""

    def __init__(self, mode: str, logs: pathlib.Path, files: int) -> None:
        self.logs = logs
        self.operator: list[str] = []
        ca = logs / "ca"
        flags: list[str] = []
        self.peer_flags = peer_flags = list[str]()
        sealed = mode == "sealed"
        if sealed:
            run("lhctl", "ca", "init", ca)
            run("lhctl", "ca", "issue", ca, "--name=coordinator", "--role=coordinator", "--host=127.0.0.1")
            run("lhctl", "ca", "issue", ca, "--name=operator", "--role=operator")
            names = {
                name: [f"--tls-cert={ca}/{name}.crt", f"--tls-key={ca}/{name}.key"]
                for name in ("coordinator", "operator")
            }
            trust = f"--tls-ca={ca}/ca.crt"
            flags = [*names["coordinator"], trust, "--auth=token", "--admin=0.0.0.0:0"]
            self.operator = [*names["operator"], trust]
            peer_flags += [trust, "--lane-encryption=require"]
        self.local = LocalCluster(peers=0, log_dir=logs, coordinator_flags=flags)
        try:
            self.admin = str(self.local.admin).replace("0.0.0.0", "127.0.0.1")
            if sealed:
                token = json.loads(self.lhctl("token", "create", "--json", "--run=flood"))["token"]
                path = logs / "token"
                path.touch(0o600)
                path.write_text(token + "\n")
                peer_flags.append(f"--token-file={path}")
            for _ in range(PEERS):
                self.local.add_peer(peer_flags)
        except BaseException:
            self.local.stop()
            raise
        self.pids = {"coordinator": self.local.coordinator_pid}
        self.pids |= {f"peerd-{i}": peer.pid for i, peer in enumerate(self.local.peers)}
        self.http = {"coordinator": str(self.local.http)}
        self.http |= {f"peerd-{i}": peer.http for i, peer in enumerate(self.local.peers)}
        if files:
            for pid in self.pids.values():
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (files, files))
        grpc = "tls" if sealed else "grpc"
        self.targets = [
            Target("coordinator --listen", grpc, address(self.local.coordinator)),
            Target("coordinator --admin", grpc, address(self.admin)),
            Target("coordinator --http", "http", address(self.http["coordinator"])),
        ]
        for i, peer in enumerate(self.local.peers):
            self.targets += [
                Target(f"peerd-{i} --listen", "lane", address(peer.listen)),
                Target(f"peerd-{i} --http", "http", address(peer.http)),
                Target(f"peerd-{i} --socket", "ipc", peer.socket),
            ]

    def lhctl(self, *arguments: str) -> str:
        return run("lhctl", f"--coordinator={self.admin}", *self.operator, *arguments)

    def memory_mib(self) -> dict[str, float]:
        found = {}
        for name, pid in self.pids.items():
            (kib,) = re.findall(r"VmRSS:\s+(\d+) kB", pathlib.Path(f"/proc/{pid}/status").read_text())
            found[name] = int(kib) / 1024
        return found

    def files(self) -> dict[str, int]:
        return {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in self.pids.items()}

    def processor_s(self, others: dict[str, int]) -> dict[str, float]:
        """Seconds of processor time of the daemons, and of other processes."""
        found = {}
        for name, pid in (self.pids | others).items():
            fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            found[name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return found

    def metrics(self, daemon: str) -> dict[str, float]:
        with urllib.request.urlopen(f"http://{self.http[daemon]}/metrics", timeout=PATIENCE_S) as page:
            text = page.read().decode()
        found: dict[str, float] = {}
        for name, value in re.findall(r"^(\w+)(?:{[^}]*})? (\S+)$", text, re.MULTILINE):
            found[name] = found.get(name, 0) + float(value)
        return found

    def log_lines(self) -> dict[str, int]:
        return {name: (self.logs / f"{name}.log").read_text(errors="replace").count("\n") for name in self.pids}


class Watch(threading.Thread):
    """Takes the largest memory and number of descriptors of each daemon, and how long /healthz takes to answer."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(daemon=True)
        self.cluster = cluster
        self.memory = cluster.memory_mib()
        self.files = cluster.files()
        self.health_s: list[float] = []
        self.flooded = False
        self.over = threading.Event()
        self.start()

    def run(self) -> None:
        asked = threading.Thread(target=self.ask, daemon=True)
        asked.start()
        while not self.over.wait(0.2):
            with contextlib.suppress(OSError, ValueError):
                self.memory = {name: max(self.memory[name], now) for name, now in self.cluster.memory_mib().items()}
                self.files = {name: max(self.files[name], now) for name, now in self.cluster.files().items()}

    def ask(self) -> None:
        while not self.over.wait(0.5):
            if not self.flooded:
                continue
            for at in self.cluster.http.values():
                begun = time.monotonic()
                try:
                    with urllib.request.urlopen(f"http://{at}/healthz", timeout=10) as page:
                        page.read()
                    self.health_s.append(time.monotonic() - begun)
                except OSError:
                    self.health_s.append(float("inf"))

    def stop(self) -> None:
        self.over.set()


# ---------------------------------------------------------------------- the run


@dataclasses.dataclass
class Gang:
    """The processes of the attackers and of the sink."""

    pipes: list[Any]
    control: list[Target]
    pids: dict[str, int]

    def run(self, targets: list[Target], seconds: float, more: bool) -> list[Counts]:
        for pipe in self.pipes:
            pipe.send((targets, seconds, more))
        return [pipe.recv() for pipe in self.pipes]


@contextlib.contextmanager
def gang_of(targets: list[Target], options: argparse.Namespace, directory: str) -> Iterator[Gang]:
    ours, its = SPAWN.Pipe()
    drain = SPAWN.Process(target=sink, args=(its, len(targets), directory), daemon=True)
    drain.start()
    ports, paths = ours.recv()
    control = [
        dataclasses.replace(target, address=paths[i] if isinstance(target.address, str) else ("127.0.0.1", ports[i]))
        for i, target in enumerate(targets)
    ]
    pipe, far = SPAWN.Pipe()
    arguments = (far, options.kinds.split(","), options.connections, options.connects, options.bytes, options.seed)
    attackers = SPAWN.Process(target=attack, args=arguments, daemon=True)
    attackers.start()
    try:
        yield Gang([pipe], control, {"attackers": int(attackers.pid or 0), "sink": int(drain.pid or 0)})
    finally:
        pipe.send(None)
        ours.send(None)


def speed(members: Members, work: Any) -> tuple[float, Any]:
    """Ops in a second while `work` runs, and what it returns."""
    ops, begun = members.done(), time.monotonic()
    result = work()
    passed = time.monotonic() - begun
    members.check()
    return (members.done() - ops) / passed, result


def flood(mode: str, options: argparse.Namespace, logs: pathlib.Path) -> dict[str, Any]:
    """One run. Returns what it measured. Failed: it says why."""
    directory = tempfile.mkdtemp(prefix="lhf-", dir="/tmp")
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        cluster = Cluster(mode, logs, options.files)
        stack.callback(cluster.local.stop)
        targets = [target for target in cluster.targets if re.search(options.targets, target.name)]
        gang = stack.enter_context(gang_of(targets, options, directory))
        members = Members(cluster.local)
        stack.callback(members.kill)
        deadline = time.monotonic() + PATIENCE_S
        while members.done() < 20:
            members.check()
            if time.monotonic() > deadline:
                raise Failed("the members do not begin")
            time.sleep(0.05)
        window = options.seconds / options.rounds
        ramp = min(options.connections / options.connects, window)
        time.sleep(ramp)
        before = {name: cluster.metrics(name) for name in cluster.pids}
        memory, files, lines = cluster.memory_mib(), cluster.files(), cluster.log_lines()
        watch = Watch(cluster)
        stack.callback(watch.stop)
        speeds: dict[str, list[float]] = {"quiet": [], "control": [], "flood": []}
        counts: dict[str, list[Counts]] = {"control": [], "flood": []}
        pids = gang.pids | {f"member-{i}": int(process.pid or 0) for i, process in enumerate(members.processes)}
        used: dict[str, dict[str, float]] = {kind: dict.fromkeys(cluster.pids | pids, 0.0) for kind in counts}
        begun = time.monotonic()
        for _ in range(options.rounds):
            speeds["quiet"].append(speed(members, lambda: time.sleep(window / 2))[0])
            for kind, where in (("control", gang.control), ("flood", targets)):
                watch.flooded = kind == "flood"
                gang.run(where, ramp, more=True)
                cpu = cluster.processor_s(pids)
                rate, (count,) = speed(members, functools.partial(gang.run, where, window, more=False))
                for name, now in cluster.processor_s(pids).items():
                    used[kind][name] += now - cpu[name]
                speeds[kind].append(rate)
                counts[kind].append(count)
            watch.flooded = False
        wall = time.monotonic() - begun
        settled = settle(cluster, files)
        members.check()
        served = after_the_flood(cluster)
        members.end()
        watch.stop()
        after = {name: cluster.metrics(name) for name in cluster.pids}
        means = {kind: statistics.mean(rates) for kind, rates in speeds.items()}
        report = {
            "mode": mode,
            "ops_per_s": {kind: [round(rate, 1) for rate in rates] for kind, rates in speeds.items()},
            "mean": {kind: round(mean, 1) for kind, mean in means.items()},
            "flood/control": ratio(speeds["flood"], speeds["control"]),
            "flood/quiet": ratio(speeds["flood"], speeds["quiet"]),
            "attackers": {kind: total(some, window) for kind, some in counts.items()},
            "memory_mib": {name: [round(memory[name]), round(watch.memory[name])] for name in memory},
            "files": {name: [files[name], watch.files[name], settled[0][name]] for name in files},
            "settled_s": round(settled[1], 1),
            "log_lines": {name: now - lines[name] for name, now in cluster.log_lines().items()},
            "processors": {
                kind: {name: round(s / options.seconds, 3) for name, s in of.items()} for kind, of in used.items()
            },
            "health": health(watch.health_s),
            "served": served,
            "counted": counted(before, after),
        }
        verdict(report, options, wall)
        return report


def ratio(some: list[float], others: list[float]) -> float:
    """The median over rounds: what else the machine does changes from round to round."""
    return round(statistics.median(a / b for a, b in zip(some, others)), 3)


def total(counts: list[Counts], window: float) -> dict[str, float]:
    seconds = window * len(counts)
    return {
        "connections_per_s": round(sum(count.opened for count in counts) / seconds),
        "failed_per_s": round(sum(count.failed for count in counts) / seconds),
        "cut_per_s": round(sum(count.cut for count in counts) / seconds),
        "mb_per_s": round(sum(count.sent for count in counts) / seconds / 1e6, 2),
        "held": round(statistics.mean(count.held for count in counts)),
        "held_max": max(count.held_max for count in counts),
    }


def health(seconds: list[float]) -> dict[str, Any]:
    answered = [s for s in seconds if s < float("inf")]
    return {
        "asked": len(seconds),
        "answered": len(answered),
        "median_s": round(statistics.median(answered), 3) if answered else None,
        "max_s": round(max(answered), 3) if answered else None,
    }


def settle(cluster: Cluster, files: dict[str, int]) -> tuple[dict[str, int], float]:
    """Waits until the daemons have closed what the attackers left. Returns descriptors, and how long it took."""
    begun = time.monotonic()
    while True:
        now = cluster.files()
        passed = time.monotonic() - begun
        if all(now[name] <= files[name] + FILES for name in files) or passed > SETTLE_S:
            return now, passed
        time.sleep(0.1)


def after_the_flood(cluster: Cluster) -> dict[str, float]:
    """Uses every port, also as a newcomer. Returns how long each use took."""
    took = {}
    begun = time.monotonic()
    for name in cluster.http:
        cluster.metrics(name)
    took["http"] = time.monotonic() - begun
    begun = time.monotonic()
    cluster.lhctl("status")
    took["admin"] = time.monotonic() - begun
    begun = time.monotonic()
    number = cluster.local.add_peer(cluster.peer_flags)
    comm = lh.join("flood", group=1, peerd=cluster.local.socket(number), timeout=PATIENCE_S)
    comm.leave(timeout=PATIENCE_S)
    took["newcomer"] = time.monotonic() - begun
    return {name: round(seconds, 2) for name, seconds in took.items()}


COUNTERS = {
    "coordinator": ("longhaul_coordinator_callers_refused_total",),
    "peerd": (
        "longhaul_peerd_handshakes_refused_total",
        "longhaul_peerd_requests_refused_total",
        "longhaul_peerd_trainers_refused_total",
    ),
}


def counted(before: dict[str, dict[str, float]], after: dict[str, dict[str, float]]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for name, now in after.items():
        found[name] = {
            counter.removeprefix("longhaul_").removesuffix("_total"): int(now[counter] - before[name][counter])
            for counter in COUNTERS[name.split("-")[0]]
        }
        if name != "coordinator":
            counter = "longhaul_peerd_op_retries_total"
            found[name]["op_retries"] = int(now[counter] - before[name][counter])
    return found


def verdict(
    report: dict[str, Any],
    options: argparse.Namespace,
    wall: float,
) -> None:
    """Adds "failures" to the report."""
    failures = []
    for name, (start, most) in report["memory_mib"].items():
        allowed = MEMORY_MIB[name.split("-")[0]]
        if most > start + allowed:
            failures.append(f"{name} used {most} MiB after {start} MiB; allowed are {allowed} more")
    for name, (start, _, end) in report["files"].items():
        if end > start + FILES:
            failures.append(f"{name} has {end} descriptors {SETTLE_S} s after the flood, and had {start} before")
    for name, lines in report["log_lines"].items():
        if lines > LOG_LINES + LOG_LINES_PER_S * wall:
            failures.append(f"{name} logged {lines} lines in {wall:.0f} s")
    for name, counters in report["counted"].items():
        for counter, rise in counters.items():
            if not options.targets and rise == 0 and name != "coordinator" and counter != "op_retries":
                failures.append(f"{name} did not count {counter}")
        if counters.get("op_retries"):
            failures.append(f"{name} made {counters['op_retries']} ops again")
    if report["flood/control"] < options.ratio:
        failures.append(f"flood / control is {report['flood/control']}, less than {options.ratio}")
    report["failures"] = failures


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--seconds", type=float, default=60, help="of flood, in each mode")
    made.add_argument("--rounds", type=int, default=10, help="into how many parts the flood is split")
    made.add_argument("--connections", type=int, default=1000, help="at a time")
    made.add_argument("--connects", type=float, default=500, help="new connections in a second")
    made.add_argument("--bytes", type=float, default=4e6, help="bytes in a second")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--mode", choices=("clear", "sealed"), action="append", help="default: both")
    made.add_argument("--targets", default="", help="attack only targets whose names match this regular expression")
    made.add_argument("--kinds", default=",".join(KINDS), help="what connections do (attackers.py)")
    made.add_argument("--ratio", type=float, default=0.5, help="the least flood / control")
    made.add_argument("--files", type=int, default=0, help="the most descriptors of each daemon; 0: as they start")
    made.add_argument("--logs", type=pathlib.Path, help="where logs stay")
    return made


def main() -> int:
    options = parser().parse_args()
    failed = False
    for mode in options.mode or ("clear", "sealed"):
        with contextlib.ExitStack() as stack:
            if options.logs is not None:
                logs = options.logs / mode
                shutil.rmtree(logs, ignore_errors=True)
                logs.mkdir(parents=True)
            else:
                logs = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lhf-")))
            try:
                report = flood(mode, options, logs)
            except Failed as problem:
                print(f"{mode}: FAILED: {problem}", flush=True)
                failed = True
                continue
            print(json.dumps(report, indent=1), flush=True)
            failed |= bool(report["failures"])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
