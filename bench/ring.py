"""Compares the ring that the coordinator chooses by measured links with the best ring (`bench/wan.py ring`).

Six hosts have different links in each direction. Their trainers step and reduce without a pause. In one world hosts
join in the worst order, and the coordinator orders the ring anew. In another world they join in the best order, which
brute force over the scenario's table finds, and the ring stays. The result is the goodput of the same ops in both
worlds.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "wan"), str(ROOT / "tests" / "chaos")]

from testbed import Wan, scenarios, settings_of  # noqa: E402
from workers import MIB, Failure, Member, Trainer, finish_all, work  # noqa: E402

SCENARIO = "six_hosts_asymmetric"
# The share of the scenario's rates that is used: hosts, daemons and the emulation share a few processors.
SHARE = 0.4
RING_INTERVAL_S = 20
PROBE_INTERVAL_S = 2
# The ring counts as found if it has not changed for this long.
QUIET_S = 45
FOUND_WITHIN_S = 400
TARGET = 0.95
TICK_US = 1000
MIB_OF_AN_OP = 8
SECONDS = 20

Table = dict[tuple[int, int], float]  # Mbit/s from host to host


def scaled(scenario: dict[str, Any], share: float) -> dict[str, Any]:
    """The scenario with all rates multiplied by `share`."""
    links = []
    for rule in scenario["links"]:
        rate = rule.get("rate", "0")
        links.append({**rule, "rate": f"{float(rate[:-4]) * share:g}mbit"} if rate.endswith("mbit") else rule)
    return {**scenario, "links": links}


def table_of(scenario: dict[str, Any]) -> Table:
    hosts = range(scenario["hosts"])
    return {(a, b): float(settings_of(scenario, f"h{a}", f"h{b}")["rate"][:-4]) for a in hosts for b in hosts if a != b}


def slowest(table: Table, ring: Sequence[int]) -> float:
    return min(table[ring[i], ring[(i + 1) % len(ring)]] for i in range(len(ring)))


def rings(table: Table) -> list[tuple[int, ...]]:
    """All rings, the best one first."""
    hosts = sorted({a for a, _ in table})
    found = [(hosts[0], *rest) for rest in itertools.permutations(hosts[1:])]
    return sorted(found, key=lambda ring: (-slowest(table, ring), ring))


class RingWorker(Member):
    """A trainer that steps and reduces for some time, and notes when each step ends."""

    def join(self, peerd: str, run: str) -> None:
        self.comm = self.lh.join(run=run, peerd=peerd, timeout=self.PATIENCE_S)

    def boundary(self) -> None:
        self.comm.begin_step(timeout=self.PATIENCE_S)

    def admit(self, size: int) -> None:
        """Passes boundaries until so many members are there."""
        while self.comm.world_size < size:
            self.boundary()

    def prepare(self, mib: int) -> None:
        self.tensor = self.comm.empty(mib * MIB // 4, "float32")
        self.tensor.fill(0)

    def steps(self, seconds: float) -> dict[str, Any]:
        """Makes steps until a member's time is over. Returns the end and the epoch of each step, and all retries."""
        began = time.monotonic()
        ends: list[float] = []
        epochs: list[int] = []
        retries = 0
        while True:
            step = self.comm.begin_step(timeout=self.PATIENCE_S)
            # A member whose time is over says so in its input. So all members stop after the same step.
            self.tensor[0] = time.monotonic() - began >= seconds
            self.tensor[1] = 1
            # Ask for the ring: hosts so far apart would choose the mesh.
            info = self.comm.all_reduce(self.tensor, algorithm="ring", timeout=self.PATIENCE_S)
            if self.tensor[1] != step.world_size:
                raise Failure(f"a wrong sum: {self.tensor[1]} of {step.world_size} members")
            ends.append(time.monotonic())
            epochs.append(step.epoch)
            retries += info.retries
            if self.tensor[0] > 0:
                return {"ends": ends, "epochs": epochs, "retries": retries}


class Crew:
    """A world and its trainers. Its first ring has the hosts in this order."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        logs: pathlib.Path,
        scenario: dict[str, Any],
        order: Sequence[int],
        coordinator: Sequence[str],
        peerd: Sequence[str],
        mib: int,
    ) -> None:
        self.wan = stack.enter_context(Wan(logs, scenario, tick_us=TICK_US, peerd_flags=peerd))
        self.wan.start_coordinator(coordinator)
        self.trainers: list[Trainer] = []
        for place, number in enumerate(order):
            host = self.wan.hosts[number]
            host.start_peerd()
            self.trainers.append(Trainer(__file__))
            stack.callback(self.trainers[-1].kill)
            self.trainers[-1].start("join", peerd=host.socket, run="bench-ring")
            self._admit(place)
        for trainer in self.trainers:
            trainer.start("prepare", mib=mib)
        finish_all(self.trainers)

    def _admit(self, place: int) -> None:
        """Admits the last trainer alone. The first ring has the order in which members were admitted."""
        for trainer in self.trainers[:-1]:
            trainer.start("admit", size=place + 1)
        self.trainers[-1].finish()
        finish_all(self.trainers[:-1])
        self.trainers[-1].do("boundary")  # the boundary that admitted it

    def steps(self, seconds: float) -> list[dict[str, Any]]:
        for trainer in self.trainers:
            trainer.start("steps", seconds=seconds)
        return finish_all(self.trainers)

    def ring(self) -> list[int]:
        numbers = {host.address: host.number for host in self.wan.hosts}
        group = self.wan.status()["groups"][0]
        return [numbers[peer["endpoint"].rsplit(":", 1)[0]] for peer in group["ring"]]

    def changes(self) -> list[str]:
        return [event["text"] for event in self.wan.events() if event["text"].startswith("ring ordered anew")]

    def faults(self) -> dict[str, Any]:
        kinds = [event["kind"] for event in self.wan.events()]
        return {
            "removed": sum(kind in ("death", "evict", "leave") for kind in kinds),
            "links_lost": kinds.count("link_lost"),
            "ops_repeated": sum(host.metric("longhaul_peerd_op_retries_total") for host in self.wan.hosts),
            "ops_failed": sum(host.metric("longhaul_peerd_ops_total") for host in self.wan.hosts)
            - sum(host.metric('longhaul_peerd_ops_total{outcome="ok"}') for host in self.wan.hosts),
        }


def step_seconds(steps: list[dict[str, Any]]) -> list[float]:
    """The seconds of each step except the first, at the slowest trainer."""
    ends = [max(each) for each in zip(*(member["ends"] for member in steps))]
    return [after - before for before, after in itertools.pairwise(ends)]


def goodput(mib: int, hosts: int, seconds: float) -> float:
    """How many Mbit/s each host sends if an op takes this long."""
    return 2 * (hosts - 1) / hosts * mib * MIB * 8 / 1e6 / seconds


def measure(args: argparse.Namespace, judge: Callable[[Wan], Any]) -> dict[str, Any]:
    scenario = scaled(dict(scenarios()[SCENARIO]), SHARE)
    table = table_of(scenario)
    best, worst = rings(table)[0], rings(table)[-1]
    hosts = scenario["hosts"]
    peerd = [f"--congestion={args.congestion}", *args.peerd_flag]
    with contextlib.ExitStack() as stack:
        logs = args.log_dir or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lh-bench-ring-")))
        flags = [f"--ring-interval-s={RING_INTERVAL_S}"]
        probes = [f"--probe-interval-s={PROBE_INTERVAL_S}"]
        with contextlib.ExitStack() as chosen_stack:
            crew = Crew(chosen_stack, logs / "chosen", scenario, worst, flags, [*probes, *peerd], MIB_OF_AN_OP)
            began = crew.ring()
            alone = statistics.median(step_seconds(crew.steps(10)))
            gaps: list[float] = []
            quiet_since = started = time.monotonic()
            changes: list[str] = []
            found_s = 0.0
            while time.monotonic() - quiet_since < QUIET_S and time.monotonic() - started < FOUND_WITHIN_S:
                gaps += step_seconds(crew.steps(5))
                now = crew.changes()
                if len(now) > len(changes):
                    changes = now
                    quiet_since = time.monotonic()
                    found_s = quiet_since - started
            chosen = crew.ring()
            verdict = judge(crew.wan)
            seconds = step_seconds(crew.steps(SECONDS))
            chosen_verdict = verdict.verdict()
            faults = crew.faults()
            gaps += seconds
        with contextlib.ExitStack() as best_stack:
            crew = Crew(
                best_stack,
                logs / "best",
                scenario,
                best,
                ["--ring-interval-s=0"],
                ["--probe-interval-s=0", *peerd],
                MIB_OF_AN_OP,
            )
            forced = crew.ring()
            crew.steps(5)
            verdict = judge(crew.wan)
            best_seconds = step_seconds(crew.steps(SECONDS))
            best_verdict = verdict.verdict()
    if slowest(table, forced) != slowest(table, best):
        raise Failure(f"the ring {forced} is not the best one, {best}")
    ours, theirs = statistics.median(seconds), statistics.median(best_seconds)
    ratio = theirs / ours
    return {
        "case": "ring",
        "mib": MIB_OF_AN_OP,
        "scenario": SCENARIO,
        "rates_times": SHARE,
        "hosts": hosts,
        "ring_before": began,
        "ring_chosen": chosen,
        "ring_best": list(best),
        "slowest_mbit": {
            "before": slowest(table, began),
            "chosen": slowest(table, chosen),
            "best": slowest(table, best),
        },
        "changes": changes,
        "found_s": round(found_s, 1),
        "before_mbit": round(goodput(MIB_OF_AN_OP, hosts, alone), 1),
        "chosen_mbit": round(goodput(MIB_OF_AN_OP, hosts, ours), 1),
        "best_mbit": round(goodput(MIB_OF_AN_OP, hosts, theirs), 1),
        "of_best": round(ratio, 3),
        "target": TARGET,
        "met": ratio >= TARGET and not any(faults.values()),
        # All steps: with the old ring, during changes, and with the new ring. The first step after a pause is left out.
        "steps": len(gaps),
        "step_s_before": round(alone, 3),
        "step_s": round(ours, 3),
        "longest_step_s": round(max(gaps), 3),
        **faults,
        "valid": chosen_verdict["valid"] and best_verdict["valid"],
        "late_p99_us": max(chosen_verdict["late_p99_us"], best_verdict["late_p99_us"]),
        "emulator_cpu": max(chosen_verdict["emulator_cpu"], best_verdict["emulator_cpu"]),
    }


if __name__ == "__main__":
    if sys.argv[1:] != ["--worker"]:
        print(f"run {json.dumps('bench/wan.py ring')}", file=sys.stderr)
        sys.exit(2)
    work(RingWorker())
