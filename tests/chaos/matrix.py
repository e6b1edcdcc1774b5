"""Makes every kind of death in every phase. Shows that nothing hangs, no value is wrong, and no healthy member goes.

  tests/chaos/matrix                     a sample: every phase and every fault, in a world of three
  tests/chaos/matrix --full              all phases x faults x worlds of 2, 3, 4 and 8
  tests/chaos/matrix --phases=commit --faults=kill --worlds=4 --rounds=20

A case strikes one member, the victim, in one phase of its group's work. All other members are healthy. A reset of lanes
and a cancel harm nobody, so there the victim counts as healthy, too. A case holds if

- the calls of the healthy members end soon and well,
- each result is the exact sum over one set of members, the same set at all members, with all healthy members in it,
- the ops of other kinds beside it (a few in each case, in rotation) give the result over exactly OpInfo.members at all
  members, or end Aborted at all, if a death may have this effect on that kind, or they were cancelled; inputs are
  intact, and targets of a reduce-scatter that was aborted,
- afterwards the healthy members make up the world,
- the victim's own calls end, too,
- after a sync all healthy members have the same state, and a member had offered it.

Timing decides which phase is hit: a fault comes at an offset into an op of known length, or at random within the first
milliseconds of a join, a leave or a sync. The coordinator's events and the ops' own counters tell what was really hit;
each case ends with a line that says so.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import os
import pathlib
import random
import signal
import sys
import tempfile
import time
from typing import Any

from trainers import Trainer
from world import PATIENCE_S, World, host_drop, run, why_not

PHASES = ("idle", "pending", "preparing", "start", "reduce-scatter", "all-gather", "commit", "sync", "leave")
DEATHS = ("kill", "stop", "partition", "reset")
# A cancel ends the ops beside the large one, in the phases in which they are in flight.
FAULTS = (*DEATHS, "cancel")
IN_FLIGHT = ("start", "reduce-scatter", "all-gather", "commit")
SKIPPED = 77
# With so much state a transfer takes about as long as the time within which the fault comes.
STATE_MIB = 192
# The kinds of Beside in tests/e2e/worker.py. Each case has some of them, all in the end.
KINDS = (
    "reduce_scatter",
    "all_gather",
    "send",
    "broadcast",
    "weighted",
    "all_to_all",
    "reduce",
    "pair",
    "gather",
    "scatter",
    "barrier",
)
KINDS_A_CASE = 4
# A death never ends these.
NEVER_ABORTED = ("barrier", "weighted", "pair")


@dataclasses.dataclass(frozen=True)
class Case:
    phase: str
    fault: str
    world: int

    def __str__(self) -> str:
        return f"{self.phase} x {self.fault} x {self.world}"


def sample() -> list[Case]:
    """Each phase with two deaths, each death in at least four phases, and each possible cancel."""
    deaths = [Case(phase, DEATHS[(i + j) % 4], 3) for i, phase in enumerate(PHASES) for j in (0, 2 if i < 4 else 1)]
    return deaths + [Case(phase, "cancel", 3) for phase in IN_FLIGHT]


def full(worlds: list[int]) -> list[Case]:
    cases = [Case(phase, fault, world) for world in worlds for phase in PHASES for fault in FAULTS]
    return [case for case in cases if case.fault != "cancel" or case.phase in IN_FLIGHT]


class Bad(Exception):
    pass


class Bench:
    """Hosts and trainers that play one case after the other. Each case is a run of its own."""

    def __init__(self, world: World, size: int, args: argparse.Namespace, rng: random.Random) -> None:
        self.world = world
        self.args = args
        self.rng = rng
        self.count = args.mib * (1 << 20) // 4
        self.trainers: list[Trainer] = []
        self.cases = 0
        self.ids: dict[int, int] = {}  # the member id of each trainer in the case
        self.beside: dict[str, Any] | None = None  # what run_ops does beside the large op
        #: how often an op of each kind ended well, and how often Aborted
        self.outcomes: collections.Counter[tuple[str, str]] = collections.Counter()
        self.all_stay = True  # no member goes, so no op may be aborted, unless it was cancelled
        self.cancelled = False
        #: an op of all of these cannot end well, because one has cancelled it and another one had not called it
        self.certain: set[int] = set()
        #: times of an op without faults: from the last member's start to the outcome, and from our order to that start
        self.op_seconds = 0.0
        self.lead_seconds = 0.0
        # There is one trainer more than the world needs: the newcomer.
        for _ in range(size + 1):
            world.add_host().start_peerd()
            self.trainers.append(Trainer())

    def close(self) -> None:
        for trainer in self.trainers:
            trainer.kill()

    # ------------------------------------------------------------------ a case

    def assemble(self, size: int, run_name: str) -> None:
        for i in range(size):
            self.trainers[i].start("assemble", socket=self.world.hosts[i].socket, run=run_name, size=size)
        for i in range(size):
            answer = self.good(i, self.trainers[i].finish(self.args.patience), "assemble")
            self.ids[i] = answer["member"]

    def good(self, i: int, answer: dict[str, Any], what: str) -> dict[str, Any]:
        if "error" in answer:
            raise Bad(f"{what} at {i}: {answer['error']}: {answer['text']}")
        return answer

    def prepare(self, members: list[int]) -> None:
        for i in members:
            self.trainers[i].start("prepare", bit=i, ops=1, count=self.count)
        for i in members:
            self.good(i, self.trainers[i].finish(self.args.patience), "prepare")

    def post(self, members: list[int]) -> None:
        for i in members:
            self.trainers[i].start(
                "run_ops",
                members=len(self.trainers),
                timeout=self.args.patience,
                beside=self.beside,
                cancels=self.cancelled,
            )

    def collect(self, members: list[int], healthy: list[int], what: str) -> dict[int, dict[str, Any]]:
        """Checks the op at each of `members`, which are all healthy, and returns its outcomes."""
        all_answers = {i: self.good(i, self.trainers[i].finish(self.args.patience + 10), what) for i in members}
        self.check_beside({i: answer["beside"] for i, answer in all_answers.items()}, what)
        answers = {i: answer["ops"][0] for i, answer in all_answers.items()}
        for i, op in answers.items():
            if "error" in op:
                raise Bad(f"{what} at {i}: {op['error']}: {op['text']}")
            if op["participants"] is None:
                raise Bad(f"{what} at {i}: the result is not the sum over any set of members")
            if len(op["participants"]) != op["world_size"]:
                raise Bad(f"{what} at {i}: {op['participants']} took part, OpInfo says {op['world_size']}")
            if not set(op["participants"]) >= set(healthy):
                raise Bad(f"{what} at {i}: a healthy member is missing: {op['participants']}, healthy {healthy}")
        if len({tuple(op["participants"]) for op in answers.values()}) > 1:
            raise Bad(f"{what}: members have different sums: {answers}")
        return answers

    def counts(self) -> str:
        """How many ops of each kind were made beside the large ones."""
        return ", ".join(
            f"{kind} {self.outcomes[kind, 'ok']} ok {self.outcomes[kind, 'aborted']} aborted" for kind in KINDS
        )

    def choose_beside(self, trainers: list[int]) -> None:
        """Chooses the kinds of the next ops beside the large one. `trainers`: the members that may be in them."""
        first = self.cases * KINDS_A_CASE
        count = self.count // 16
        while any(count % small == 0 for small in (2, 3, 5, 7)):
            count -= 1
        self.beside = {
            "kinds": [KINDS[(first + i) % len(KINDS)] for i in range(KINDS_A_CASE)],
            "ids": [self.ids[i] for i in trainers],
            "count": count,
            "turn": self.rng.randrange(2 * len(trainers)),
        }

    def check_beside(self, answers: dict[int, dict[str, dict[str, Any]]], what: str) -> None:
        """Checks the ops of Beside at healthy members."""
        for name in sorted({name for answer in answers.values() for name in answer}):
            ops = {i: answer[name] for i, answer in answers.items() if name in answer}
            kind = "send" if name.startswith("send") else name
            for i, op in ops.items():
                if not op["intact"]:
                    raise Bad(
                        f"{what}, {name} at {i}: the input, or the target of a reduce-scatter, is not what it was"
                    )
                if "error" in op:
                    never = (kind in NEVER_ABORTED or self.all_stay) and not self.cancelled
                    if op["error"] != "Aborted" or never:
                        raise Bad(f"{what}, {name} at {i}: {op['error']}: {op['text']}")
                elif not op["right"]:
                    raise Bad(f"{what}, {name} at {i}: the result is not the one over {op['members']}")
                elif self.ids[i] not in op["members"]:
                    raise Bad(f"{what}, {name} at {i}: the member is not among {op['members']}")
            if len({str(op.get("members", "Aborted")) for op in ops.values()}) > 1:
                raise Bad(f"{what}, {name}: members have different outcomes: {ops}")
            if self.certain and self.certain <= set(ops) and not all("error" in op for op in ops.values()):
                raise Bad(f"{what}, {name}: it was cancelled before all had called it, and ended well: {ops}")
            self.outcomes[kind, "ok" if "members" in next(iter(ops.values())) else "aborted"] += 1

    def collect_synced(self, healthy: list[int]) -> str:
        """Checks the sync at each healthy member. Returns a text that says how many bytes moved."""
        answers = {i: self.trainers[i].finish(self.args.patience + 10) for i in healthy}
        for i, answer in answers.items():
            self.good(i, answer, "sync")
            if answer["odd"] is None:
                raise Bad(f"sync at {i}: the state is not one that a member offered: {answer}")
        if len({(answer["hash"], answer["odd"]) for answer in answers.values()}) > 1:
            raise Bad(f"members have different states after a sync: {answers}")
        return " ".join(f"{a['bytes'] >> 20} MiB from {a['sources']}" for a in answers.values() if a["bytes"]) or "none"

    def calibrate(self, size: int) -> None:
        self.assemble(size, f"calibrate-{size}")
        everybody = list(range(size))
        seconds = []
        leads = []
        for _ in range(4):
            self.prepare(everybody)
            posted = time.monotonic()
            self.post(everybody)
            ops = self.collect(everybody, everybody, "calibration").values()
            seconds.append(min(op["seconds"] - op["wait"] for op in ops))
            leads.append(max(op["at"] for op in ops) - posted - seconds[-1])
        self.op_seconds = sorted(seconds[1:])[1]
        self.lead_seconds = sorted(leads[1:])[1]
        print(f"world of {size}: the op takes {self.op_seconds:.3f} s, from {self.lead_seconds:.3f} s after the order")
        self.forget(everybody)

    def forget(self, members: list[int]) -> None:
        for i in members:
            self.trainers[i].start("forget")
        for i in members:
            self.trainers[i].finish(self.args.patience)

    def strike(self, case: Case, victim: int) -> None:
        host = self.world.hosts[victim]
        assert host.peerd is not None
        if case.fault == "cancel":
            member = victim
            if case.phase == "start":  # the victim has not posted its ops, so another member cancels them
                member = (victim + 1) % case.world
                self.certain = {member, victim}
            os.kill(self.trainers[member].pid, signal.SIGUSR1)
        elif case.fault == "kill":
            host.peerd.signal(signal.SIGKILL)
        elif case.fault == "stop":
            host.peerd.signal(signal.SIGSTOP)
        elif case.fault == "partition":
            self.world.drop(*host_drop(host))
        elif case.phase in ("pending", "idle") and self.rng.random() < 0.5:
            run(["ip", "netns", "exec", host.namespace, "ss", "-KHtn", "dst", self.world.coordinator_address])
        else:
            lanes = host.connections()
            share = self.rng.choice([0.01, 0.5, 1])
            host.reset(self.rng.sample(lanes, min(len(lanes), max(1, round(share * len(lanes))))))

    def mend(self, case: Case, victim: int) -> None:
        host = self.world.hosts[victim]
        assert host.peerd is not None
        if case.fault == "kill":
            host.peerd.wait(PATIENCE_S)
            host.start_peerd()
        elif case.fault == "stop":
            host.peerd.signal(signal.SIGCONT)
        elif case.fault == "partition":
            self.world.undrop(*host_drop(host))

    def run(self, case: Case) -> str:
        """Plays a case and returns what it hit. Bad: the case did not hold."""
        self.cases += 1
        size = case.world
        name = f"case-{self.cases}"
        self.beside = None
        self.assemble(size, name)
        members = list(range(size))
        newcomer = size
        joins = case.phase in ("pending", "preparing")
        # In a join the victim may be the newcomer or a member.
        victim = self.rng.choice([newcomer, self.rng.randrange(size)]) if joins else self.rng.randrange(size)
        everybody = [*members, newcomer] if joins else members
        healthy = [i for i in everybody if i != victim or case.fault in ("reset", "cancel")]
        busy_victim = False  # the victim's last call has not ended yet
        self.all_stay = case.fault in ("reset", "cancel") and case.phase != "leave"
        self.cancelled, self.certain = case.fault == "cancel", set()
        if not joins:
            self.choose_beside(members)
        self.prepare(members)
        try:
            struck = time.time()
            if case.phase == "idle":
                self.strike(case, victim)
                if self.rng.random() < 0.5:
                    time.sleep(self.args.detect_ms / 1000 + 0.5)
            elif case.phase in ("pending", "preparing"):
                host = self.world.hosts[newcomer]
                self.trainers[newcomer].start(
                    "join", socket=host.socket, run=name, timeout=5 if newcomer not in healthy else self.args.patience
                )
                self.wait_pending(name, 1)
                if case.phase == "pending":
                    struck = time.time()
                    self.strike(case, victim)
                # Members meet at boundaries until the newcomer is in. If it may fail to join, they meet once.
                target = size + 1 if case.fault == "reset" else 0
                for i in members:
                    if target:
                        self.trainers[i].start("begin_step_until", size=target)
                    else:
                        self.trainers[i].start("begin_step")
                if case.phase == "preparing":
                    time.sleep(self.rng.uniform(0, 0.02))
                    struck = time.time()
                    self.strike(case, victim)
                for i in members:
                    if i in healthy:
                        self.good(i, self.trainers[i].finish(self.args.patience), "begin_step")
                if newcomer in healthy:
                    # If a member died, the newcomer may have to wait for the next boundary.
                    others = [i for i in members if i in healthy]
                    self.admit(newcomer, others, name)
                busy_victim = victim not in healthy
            elif case.phase == "sync":
                odd = self.rng.randrange(size)
                for i in members:
                    self.trainers[i].start("prepare_state", mib=STATE_MIB, odd=i == odd)
                for i in members:
                    self.good(i, self.trainers[i].finish(self.args.patience), "prepare_state")
                for i in members:
                    self.trainers[i].start("sync", timeout=self.args.patience)
                time.sleep(self.rng.uniform(0, 0.25))
                struck = time.time()
                self.strike(case, victim)
                synced = self.collect_synced(healthy)
                busy_victim = victim not in healthy
            elif case.phase == "leave":
                self.trainers[victim].start("leave", timeout=self.args.patience)
                time.sleep(self.rng.uniform(0, 0.01))
                struck = time.time()
                self.strike(case, victim)
                healthy = [i for i in members if i != victim]
                busy_victim = True
            else:
                posting = [i for i in members if i != victim] if case.phase == "start" else members
                self.post(posting)
                share = {"start": 1.5, "reduce-scatter": 0.25, "all-gather": 0.75}.get(
                    case.phase, self.rng.uniform(0.9, 1.1)
                )
                time.sleep(max(0.0, self.lead_seconds + self.op_seconds * share + self.rng.uniform(-0.005, 0.005)))
                struck = time.time()
                self.strike(case, victim)
                if case.phase == "start" and victim in healthy:
                    if case.fault == "cancel":
                        self.wait_committed(name, struck)  # now the victim is owed the end of these ops
                    self.post([victim])
                busy_victim = victim not in healthy and case.phase != "start"
            survivors = list(healthy)
            if newcomer in survivors:
                self.prepare([newcomer])
                self.ids[newcomer] = self.trainers[newcomer].do("member")["member"]
            if joins:
                # The newcomer has never heard of a member that died before it came.
                self.choose_beside(survivors)
            if case.phase in ("idle", "pending", "preparing", "sync", "leave"):
                self.post(survivors)
            answers = self.collect(survivors, healthy, "the op")
            # Afterwards an op has to work among the healthy members.
            self.cancelled, self.certain = False, set()
            self.prepare(survivors)
            self.choose_beside(survivors)
            self.post(survivors)
            after = self.collect(survivors, healthy, "the op afterwards")
            self.mend(case, victim)
            if busy_victim:
                answer = self.trainers[victim].finish(self.args.patience + 10)
                self.check_victim(case, answer, answers)
            hit = self.what_was_hit(case, name, struck, answers, victim)
            if case.phase == "sync":
                hit = f"moved: {synced}; {hit}"
            if case.fault not in ("reset", "cancel") or case.phase == "leave":
                for op in after.values():
                    if set(op["participants"]) - set(healthy) and case.fault == "kill":
                        raise Bad(f"a dead member takes part: {op}")
        except BaseException:
            with contextlib.suppress(Exception):
                self.world.dump(f"case {case}, run {name}, victim {victim}")
                self.mend(case, victim)
            raise
        self.forget(everybody)
        return hit

    def check_victim(self, case: Case, answer: dict[str, Any], answers: dict[int, dict[str, Any]]) -> None:
        """Checks an op of the victim. If it ended well, its result has to be the one of the other members."""
        for op in answer.get("ops", []):
            if "error" in op:
                if op["error"] == "Aborted" or (case.fault != "kill" and not op["intact"]):
                    raise Bad(f"the victim's op: {op}")
            elif op["participants"] != next(iter(answers.values()))["participants"]:
                raise Bad(f"the victim has another sum: {op}, the others {answers}")

    def admit(self, newcomer: int, others: list[int], name: str) -> None:
        """Lets the other members pass boundaries until the waiting newcomer is admitted."""
        deadline = time.monotonic() + self.args.patience
        while time.monotonic() < deadline:
            members = self.members(name)
            if f"h{newcomer}" in members.values():
                self.good(newcomer, self.trainers[newcomer].finish(self.args.patience), "join")
                return
            for i in others:
                if i != newcomer:
                    self.trainers[i].start("begin_step")
            for i in others:
                if i != newcomer:
                    self.good(i, self.trainers[i].finish(self.args.patience), "begin_step")
        raise Bad("the healthy newcomer did not get in")

    def members(self, name: str) -> dict[str, str]:
        """Maps each admitted member of a run to its host."""
        found = {}
        for group in self.world.status()["groups"]:
            if group["run"] == name:
                hosts = {peer["peer"]: peer["endpoint"].split(":")[0] for peer in group["ring"]}
                for member in group["members"]:
                    if member["joined"] != "0" and member["peer"] in hosts:
                        number = int(hosts[member["peer"]].split(".")[-1]) - 10
                        found[member["member"]] = f"h{number}"
        return found

    def wait_pending(self, name: str, count: int) -> None:
        deadline = time.monotonic() + self.args.patience
        while time.monotonic() < deadline:
            for group in self.world.status()["groups"]:
                if group["run"] == name and sum(member["joined"] == "0" for member in group["members"]) >= count:
                    return
            time.sleep(0.01)
        raise Bad("the newcomer was never pending")

    def wait_committed(self, name: str, since: float) -> None:
        """Waits for an epoch that is committed after that time."""
        deadline = time.monotonic() + self.args.patience
        while time.monotonic() < deadline:
            for event in self.world.events():
                late = int(event["time_us"]) / 1e6 > since
                if late and event.get("run") == name and event["kind"] == "commit":
                    return
            time.sleep(0.01)
        raise Bad("no epoch was committed after a cancel")

    def what_was_hit(
        self, case: Case, name: str, struck: float, answers: dict[int, dict[str, Any]], victim: int
    ) -> str:
        ops = list(answers.values())
        found = []
        if case.phase in ("reduce-scatter", "all-gather", "commit", "start"):
            if victim not in ops[0]["participants"]:
                found.append("op redone without it" if max(op["retries"] for op in ops) else "op begun without it")
            elif max(op["retries"] for op in ops):
                found.append("op redone with it")
            else:
                found.append("op not disturbed")
        preparing = False
        later = []
        for event in self.world.events():
            if event.get("run") != name:
                continue
            before = int(event["time_us"]) / 1e6 <= struck
            if before and event["kind"] in ("prepare", "commit", "abort"):
                preparing = event["kind"] == "prepare"
            elif not before and event["kind"] in ("prepare", "commit", "abort", "death", "evict", "leave", "link_lost"):
                later.append(event["kind"])
        if preparing:
            found.append("in a preparation")
        counts = collections.Counter(later)
        found.append("then " + (" ".join(f"{kind}:{n}" for kind, n in counts.items()) or "nothing"))
        return ", ".join(found)


def play(cases: list[Case], args: argparse.Namespace, logs: pathlib.Path) -> int:
    """Plays all cases. Returns how many failed."""
    rng = random.Random(args.seed)
    failed = 0
    for size in sorted({case.world for case in cases}):
        todo = [case for case in cases if case.world == size for _ in range(args.rounds)]
        while todo:
            # After a failure a new world begins, so that a hanging process cannot harm the next case.
            with World(logs / f"world-{size}", args.detect_ms) as world, contextlib.ExitStack() as stack:
                world.start_coordinator()
                bench = Bench(world, size, args, rng)
                stack.callback(bench.close)
                bench.calibrate(size)
                while todo:
                    case = todo.pop(0)
                    began = time.monotonic()
                    try:
                        hit = bench.run(case)
                    except (Bad, AssertionError, RuntimeError) as problem:
                        failed += 1
                        print(f"FAILED {case!s:<32} {problem}", flush=True)
                        print(f"       dump in {world.logs}/dump.txt", flush=True)
                        break
                    print(f"held   {case!s:<32} {time.monotonic() - began:5.1f} s  {hit}", flush=True)
                print("beside: " + bench.counts(), flush=True)
    return failed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="play all cases")
    parser.add_argument("--phases", help=f"play these phases, comma-separated, out of: {', '.join(PHASES)}")
    parser.add_argument("--faults", help=f"play these faults, comma-separated, out of: {', '.join(FAULTS)}")
    parser.add_argument("--worlds", default="2,3,4,8", help="sizes of worlds, for --full, --phases and --faults")
    parser.add_argument("--rounds", type=int, default=1, help="play each case so many times")
    parser.add_argument("--seed", type=int, default=int(os.environ.get("LONGHAUL_SEED", "1")))
    parser.add_argument("--mib", type=int, default=32, help="size of the op in MiB")
    parser.add_argument("--detect-ms", type=int, default=1000)
    parser.add_argument("--patience", type=float, default=40, help="a wait of so many seconds is a hang")
    parser.add_argument("--logs", type=pathlib.Path, help="where logs go (default: a new directory in /tmp)")
    args = parser.parse_args(arguments)
    cases = sample()
    if args.full or args.phases or args.faults:
        phases = args.phases.split(",") if args.phases else PHASES
        faults = args.faults.split(",") if args.faults else FAULTS
        cases = full([int(size) for size in args.worlds.split(",")])
        cases = [case for case in cases if case.phase in phases and case.fault in faults]
    if not cases:
        parser.error("there is no case with these phases, faults and worlds")
    reason = why_not()
    if reason:
        print(f"skipped: {reason}")
        return SKIPPED
    logs = args.logs or pathlib.Path(tempfile.mkdtemp(prefix="longhaul-matrix-", dir="/tmp"))
    print(f"seed {args.seed}, {len(cases) * args.rounds} cases, logs in {logs}", flush=True)
    failed = play(cases, args, logs)
    print(f"{len(cases) * args.rounds} cases, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
