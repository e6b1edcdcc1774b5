#!/usr/bin/env python3
"""Measures what faults cost: a death, a silence, a coordinator that keeps dying, and memory over many ops and members.

    tools/build && .venv/bin/python bench/faults.py
    .venv/bin/python bench/faults.py kill --kills=100 --json=result.json
    .venv/bin/python bench/faults.py coordinator --minutes=2
    .venv/bin/python bench/faults.py memory --ops=100000 --cycles=1000

kill: one of four peers gets SIGKILL at a random time of a 64 MiB all-reduce. A sample is the time from the death to the
end of the op at one survivor. The median time of an op without a fault is subtracted, because the op begins anew and
cannot end sooner. A second row does not subtract it. A kill that misses the op is repeated. silence: the same with
SIGSTOP. The others notice nothing but silence. Target: below detect_ms + 500 ms. coordinator: the coordinator (SQLite
store) gets SIGKILL and is restarted every 5 s under load. Meanwhile a member joins and leaves again and again. An op
that fails ends the measurement. memory: resident memory of coordinator, peerds and trainers, over ops that each have a
tag of their own, and over members that come and go. `growth` compares the last tenth with the first tenth after the
warm-up.

Exit code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import random
import re
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from workers import MIB, Failure, Member, Trainer, finish_all, meet, team, work

# An op, a boundary or the start of a program has failed if it takes longer.
PATIENCE_S = Member.PATIENCE_S


# ---------------------------------------------------------------------------- workers


def resident(pid: int) -> int:
    """The resident memory of this process in bytes, with the arena."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0])


class Worker(Member):
    """A trainer with a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.source: Any = None

    def op(self, socket: str, count: int, value: float) -> dict[str, Any]:
        if self.source is None or self.source.size != count:
            self.source = self.lh.empty(count, "float32", peerd=socket)
        self.source.fill(value)
        begin = time.monotonic()
        info = self.comm.all_reduce(self.source, timeout=PATIENCE_S)
        end = time.monotonic()
        low, high = float(self.source.min()), float(self.source.max())
        if low != high:
            raise Failure(f"the sum is {low} to {high}")
        return {"begin": begin, "end": end, "sum": low, "world": info.world_size, "retries": info.retries}

    def ops(self, first: int, count: int, elements: int, window: int) -> dict[str, Any]:
        """Does many small ops, each with a tag of its own, and so many in flight at once."""
        wrong = retries = 0
        flying: list[Any] = []

        def collect() -> None:
            nonlocal wrong, retries
            tensor, work = flying.pop(0)
            info = work.wait(timeout=PATIENCE_S)
            retries += info.retries
            wrong += bool((tensor != info.world_size).any())

        for tag in range(first, first + count):
            tensor = self.comm.empty(elements, "float32")
            tensor.fill(1)
            flying.append((tensor, self.comm.all_reduce(tensor, tag=tag, async_op=True)))
            if len(flying) >= window:
                collect()
        while flying:
            collect()
        return {"wrong": wrong, "retries": retries}

    def steps(self, seconds: float, count: int) -> dict[str, Any]:
        """Passes boundaries and does ops for some time. An op tells all members that the time is over."""
        steps = retries = wrong = 0
        slowest = 0.0
        joined = 0
        size = self.comm.world_size
        until = time.monotonic() + seconds
        more = self.np.ones(1, "float32")
        source = self.comm.empty(count, "float32")
        while True:
            step = self.comm.begin_step(timeout=PATIENCE_S)
            joined += max(0, step.world_size - size)
            size = step.world_size
            begin = time.monotonic()
            source.fill(1)
            info = self.comm.all_reduce(source, tag=1, timeout=PATIENCE_S)
            retries += info.retries
            wrong += bool((source != info.world_size).any())
            slowest = max(slowest, time.monotonic() - begin)
            more[0] = 1 if time.monotonic() < until else 0
            info = self.comm.all_reduce(more, op="min", tag=2, timeout=PATIENCE_S)
            retries += info.retries
            steps += 1
            if more[0] == 0:
                return {"steps": steps, "retries": retries, "wrong": wrong, "slowest": slowest, "joined": joined}
            time.sleep(0.02)

    def visit(self, socket: str, run: str, count: int) -> dict[str, Any]:
        """Joins a group whose members do steps(), takes part in one step, and leaves; again and again."""
        begin = time.monotonic()
        self.comm = self.lh.join(run=run, peerd=socket, timeout=PATIENCE_S)
        took = time.monotonic() - begin
        self.comm.begin_step(timeout=PATIENCE_S)
        source = self.comm.empty(count, "float32")
        source.fill(1)
        info = self.comm.all_reduce(source, tag=1, timeout=PATIENCE_S)
        more = self.np.ones(1, "float32")
        self.comm.all_reduce(more, op="min", tag=2, timeout=PATIENCE_S)
        self.comm.leave(timeout=PATIENCE_S)
        self.comm = None
        return {"seconds": took, "right": bool((source == info.world_size).all()), "over": bool(more[0] == 0)}

    def cycles(self, socket: str, run: str, count: int) -> None:
        """Joins and leaves a group without other members, again and again."""
        for _ in range(count):
            comm = self.lh.join(run=run, peerd=socket, timeout=PATIENCE_S)
            comm.all_reduce(self.np.ones(16, "float32"), timeout=PATIENCE_S)
            comm.leave(timeout=PATIENCE_S)

    def leave(self) -> None:
        if self.comm is not None:
            self.comm.leave(timeout=PATIENCE_S)
            self.comm = None


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


# ---------------------------------------------------------------------------- deaths


def deaths(args: argparse.Namespace, silence: bool) -> dict[str, Any]:
    """Again and again one of `peers` dies in the middle of an op, and a new one takes its place."""
    import longhaul as lh

    rng = random.Random(args.seed)
    count = args.mib * MIB // 4
    wanted = args.silences if silence else args.kills
    calm: list[float] = []
    after_death: list[float] = []
    missed = 0
    with (
        lh.testing.LocalCluster(peers=args.peers - 1, log_dir=args.log_dir) as cluster,
        team(__file__, args.peers - 1) as stay,
    ):
        done = 0
        while done < wanted:
            run = f"death-{done}-{missed}"
            number = cluster.add_peer()
            victim = Trainer(__file__)
            try:
                everybody = [*stay, victim]
                sockets = [cluster.socket(i) for i in range(args.peers - 1)] + [cluster.socket(number)]
                meet(everybody, sockets, run)
                # Ops without a fault. The first one warms up the tensors.
                for turn in range(3):
                    for trainer, path in zip(everybody, sockets):
                        trainer.start("op", socket=path, count=count, value=1)
                    ops = finish_all(everybody)
                    if any(op["sum"] != args.peers for op in ops):
                        raise Failure(f"wrong sums without a fault: {ops}")
                    if turn:
                        last = max(op["begin"] for op in ops)
                        calm += [op["end"] - last for op in ops]
                for trainer, path in zip(everybody, sockets):
                    trainer.start("op", socket=path, count=count, value=1)
                # Filling the tensors takes time, too. A kill before or after the op does not count.
                time.sleep(args.fill_s + rng.uniform(0.1, 0.9) * statistics.median(calm))
                died = time.monotonic()
                os.kill(cluster.peers[number].pid, signal.SIGSTOP if silence else signal.SIGKILL)
                ops = finish_all(stay)
                for op in ops:
                    if op["sum"] != op["world"]:
                        raise Failure(f"the sum is {op['sum']} in a world of {op['world']}")
                if len({op["world"] for op in ops}) > 1:
                    raise Failure(f"the survivors disagree on the world: {ops}")
                hit = max(op["begin"] for op in ops) < died < min(op["end"] for op in ops)
                if hit and ops[0]["world"] == args.peers - 1:
                    after_death += [op["end"] - died for op in ops]
                    done += 1
                else:
                    missed += 1
                    if missed > 3 * wanted + 20:
                        raise Failure(f"{missed} kills missed the op, {done} hit it")
                for trainer in stay:
                    trainer.start("leave")
                finish_all(stay)
            finally:
                victim.kill()
                cluster.kill_peer(number)
    fault_free = statistics.median(calm)
    costs = [1e3 * (seconds - fault_free) for seconds in after_death]
    limit = (1500 + 500, 1500 + 500) if silence else (250, 500)
    return {
        "what": "silence (SIGSTOP)" if silence else "death (SIGKILL)",
        "faults": done,
        "missed": missed,
        "samples": len(costs),
        "op_ms": 1e3 * fault_free,
        "median_ms": statistics.median(costs),
        "p99_ms": quantile(costs, 0.99),
        "max_ms": max(costs),
        "whole_median_ms": 1e3 * statistics.median(after_death),
        "whole_p99_ms": 1e3 * quantile(after_death, 0.99),
        "target_median_ms": limit[0],
        "target_p99_ms": limit[1],
        "met": statistics.median(costs) < limit[0] and quantile(costs, 0.99) < limit[1],
    }


# ---------------------------------------------------------------------------- the coordinator


class Coordinator:
    """A coordinator with a SQLite store and a port of its own, which can be killed and started again."""

    def __init__(self, directory: pathlib.Path) -> None:
        from longhaul.testing import find_binary

        self.directory = directory
        # The port was free a moment ago. It has to be the same after each restart, so the system cannot choose it.
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = "127.0.0.1:%d" % probe.getsockname()[1]
        self.command = [
            str(find_binary("longhaul-coordinator")),
            f"--listen={self.address}",
            "--admin=127.0.0.1:0",
            "--http=127.0.0.1:0",
            f"--store=sqlite:{directory}/coordinator.db",
            f"--ready-file={directory}/ready.json",
        ]
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        from longhaul.testing import start_tethered

        ready = self.directory / "ready.json"
        ready.unlink(missing_ok=True)
        with open(self.directory / "coordinator.log", "ab") as log:
            self.process = start_tethered(self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + PATIENCE_S
        while not ready.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                # The log is deleted with its directory, so the error quotes it.
                end = (self.directory / "coordinator.log").read_text(errors="replace")[-500:]
                raise Failure(f"the coordinator did not start; its log ends: {end}")
            time.sleep(0.005)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def restarts(args: argparse.Namespace) -> dict[str, Any]:
    import longhaul as lh

    visits: list[dict[str, Any]] = []
    count = 64 << 10
    kills = 0
    with tempfile.TemporaryDirectory(prefix="longhaul-faults-") as name, team(__file__, 4) as trainers:
        coordinator = Coordinator(pathlib.Path(name))
        try:
            with lh.testing.LocalCluster(peers=4, coordinator=coordinator.address, log_dir=args.log_dir) as cluster:
                meet(trainers[:3], [cluster.socket(i) for i in range(3)], "restarts")
                seconds = 60 * args.minutes
                for trainer in trainers[:3]:
                    trainer.start("steps", seconds=seconds, count=count)
                begin = time.monotonic()
                next_kill = begin + 5
                visiting = False
                while time.monotonic() < begin + seconds - 5:
                    if not visiting:
                        trainers[3].start("visit", socket=cluster.socket(3), run="restarts", count=count)
                        visiting = True
                    assert trainers[3].process.stdout is not None
                    with selectors.DefaultSelector() as selector:
                        selector.register(trainers[3].process.stdout, selectors.EVENT_READ)
                        if selector.select(max(0, min(next_kill, begin + seconds) - time.monotonic())):
                            visits.append(trainers[3].finish())
                            visiting = False
                    if time.monotonic() >= next_kill:
                        coordinator.kill()
                        kills += 1
                        coordinator.start()
                        next_kill = time.monotonic() + 5
                if visiting:
                    visits.append(trainers[3].finish())
                results = finish_all(trainers[:3])
        finally:
            coordinator.kill()
    redone = sum(result["retries"] for result in results)
    wrong = sum(result["wrong"] for result in results) + sum(not visit["right"] for visit in visits)
    return {
        "what": "coordinator killed and started again",
        "kills": kills,
        "steps": results[0]["steps"],
        "ops_redone": redone,
        "ops_wrong": wrong,
        "slowest_op_s": max(result["slowest"] for result in results),
        "joins": len(visits),
        "join_median_s": statistics.median(visit["seconds"] for visit in visits),
        "join_max_s": max(visit["seconds"] for visit in visits),
        "met": redone == 0 and wrong == 0 and len(visits) > 0,
    }


# ---------------------------------------------------------------------------- memory


def growth(samples: list[int]) -> float:
    """The last tenth compared with the first tenth after the warm-up. The warm-up is the first fifth."""
    behind = samples[len(samples) // 5 :]
    tenth = max(1, len(behind) // 10)
    return statistics.median(behind[-tenth:]) / statistics.median(behind[:tenth]) - 1


def memory(args: argparse.Namespace) -> dict[str, Any]:
    import longhaul as lh

    ops: dict[str, list[int]] = {"coordinator": [], "peerd": [], "trainer": []}
    cycles: dict[str, list[int]] = {"coordinator": [], "peerd": [], "trainer": []}
    rounds = 50
    with lh.testing.LocalCluster(peers=2, log_dir=args.log_dir) as cluster, team(__file__, 2) as trainers:

        def sample(into: dict[str, list[int]]) -> None:
            into["coordinator"].append(resident(cluster.coordinator_pid))
            into["peerd"].append(sum(resident(peer.pid) for peer in cluster.peers))
            into["trainer"].append(sum(resident(trainer.process.pid) for trainer in trainers))

        meet(trainers, [cluster.socket(i) for i in range(2)], "memory")
        each = max(1, args.ops // rounds)
        for turn in range(rounds):
            for trainer in trainers:
                trainer.start("ops", first=1 + turn * each, count=each, elements=256, window=16)
            for result in finish_all(trainers):
                if result["wrong"]:
                    raise Failure(f"{result['wrong']} wrong results")
            sample(ops)
        for trainer in trainers:
            trainer.start("leave")
        finish_all(trainers)
        each = max(1, args.cycles // rounds)
        for _ in range(rounds):
            # Each has a run of its own, so that neither waits for a boundary of the other.
            for i, trainer in enumerate(trainers):
                trainer.start("cycles", socket=cluster.socket(i), run=f"cycle-{i}", count=each)
            finish_all(trainers)
            sample(cycles)
    found = {
        f"{part}_{phase}": growth(samples)
        for phase, table in (("ops", ops), ("cycles", cycles))
        for part, samples in table.items()
    }
    return {
        "what": "memory",
        "ops": args.ops,
        "cycles": 2 * args.cycles,
        **{f"growth_{name}": value for name, value in found.items()},
        **{f"mib_{part}": samples[-1] / MIB for part, samples in cycles.items()},
        "met": all(value < 0.10 for value in found.values()),
    }


# ---------------------------------------------------------------------------- the bench

PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "kill": lambda args: deaths(args, silence=False),
    "silence": lambda args: deaths(args, silence=True),
    "coordinator": restarts,
    "memory": memory,
}


def text_of(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="*", help=f"parts to run, out of: {', '.join(PARTS)} (default all)")
    parser.add_argument("--peers", type=int, default=4, help="kill, silence: peers, of which one dies (default 4)")
    parser.add_argument("--mib", type=int, default=64, help="kill, silence: size of the op in MiB (default 64)")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--silences", type=int, default=20)
    parser.add_argument("--fill-s", type=float, default=0.03, help="about how long an op starts after its order")
    parser.add_argument("--minutes", type=float, default=2, help="coordinator: minutes (default 2)")
    parser.add_argument("--ops", type=int, default=100_000, help="memory: number of ops (default 100000)")
    parser.add_argument("--cycles", type=int, default=500, help="memory: joins and leaves of each of two (default 500)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file too")
    parser.add_argument("--log-dir", help="keep the daemons' logs here")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(Worker())
        return 0
    unknown = [part for part in args.part if part not in PARTS]
    if unknown:
        parser.error(f"no part {unknown[0]}; there are: {', '.join(PARTS)}")
    print(f"{platform.node()}: {os.cpu_count()} CPUs, Linux {platform.release()}, load {os.getloadavg()[0]:.1f}")
    results = []
    for part in args.part or PARTS:
        try:
            result = PARTS[part](args)
        except Failure as failure:
            result = {"what": part, "failure": str(failure), "met": False}
        results.append({"part": part, **result})
        print(f"\n{part}: {'met' if result['met'] else 'MISSED'}")
        for name, value in result.items():
            print(f"  {name:<20} {text_of(value)}", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"host": platform.node(), "results": results}, indent=1) + "\n")
    return 0 if all(result["met"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
