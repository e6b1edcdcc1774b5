"""Runs real processes in network namespaces under random faults, and checks every result.

  tests/chaos/run --minutes=2 --seed=7 --hosts=4     what tools/check runs
  tests/chaos/run --minutes=60 --hosts=8             the soak

Starts a coordinator (SQLite store), and a peerd and trainers on each host. Then it

1. lets the hosts train without faults for a while,
2. makes faults at random times,
3. waits until all hosts train together again, and lets them train without faults once more.

Goodput compares the second part with the first and the third. The seed, which is printed first, decides kinds, hosts
and times of the faults. It does not decide what the programs do meanwhile.

Exit codes: 0 all checks held; 1 a check failed (the output lists the problems, the log directory holds logs and
dump.txt); 2 bad usage; 77 namespaces cannot be used here (the output says why).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import random
import signal
import sys
import tempfile
import time

import verdict as verdicts
from faults import KINDS, Fault, Record
from trainer import main as trainer_main
from world import PATIENCE_S, Host, World, why_not

SKIPPED = 77


class Failed(Exception):
    pass


class Fleet:
    """The hosts of a run, and the faults that are being done to them."""

    def __init__(self, world: World, args: argparse.Namespace) -> None:
        self.world = world
        self.args = args
        self.begin = time.monotonic()
        self.records: list[Record] = []
        #: for each fault that lasts: the time at which it is to be undone, the fault, and its record
        self.active: list[tuple[float, Fault, Record]] = []
        self.gone: set[str] = set()
        self.timeline = open(world.logs / "faults.jsonl", "w")

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.begin:8.2f}  {text}", flush=True)

    def start_trainers(self, host: Host) -> None:
        for group in range(self.args.groups):
            host.start_trainer(
                f"g{group}",
                trainer_main,
                [
                    f"--socket={host.socket}",
                    f"--group={group}",
                    f"--seed={self.args.seed}",
                    f"--log={self.world.logs}/{host.name}.g{group}.jsonl",
                    f"--patience={self.args.patience}",
                    f"--think={self.args.think}",
                    f"--max-log2={self.args.max_log2}",
                ],
            )

    def ended(self, host: Host) -> bool:
        """Sends peerd SIGTERM, once, so that it drains. Returns whether peerd has ended."""
        assert host.peerd is not None
        if host.name not in self.gone:
            self.gone.add(host.name)
            host.peerd.signal(signal.SIGTERM)
        return not host.peerd.alive

    def end_host(self, host: Host) -> None:
        assert host.peerd is not None
        self.ended(host)
        code = host.peerd.wait(PATIENCE_S)
        if code != 0:
            raise Failed(f"peerd of {host.name} ended with {code} after SIGTERM; its log is {host.peerd_log}")
        for trainer in host.trainers.values():
            trainer.signal(signal.SIGTERM)
        host.kill_trainers()

    # ------------------------------------------------------------------ faults

    def free_hosts(self) -> list[Host]:
        busy = {name for _, _, record in self.active for name in record.hosts}
        return [host for host in self.world.hosts if host.name not in busy | self.gone]

    def make_one(self, rng: random.Random) -> None:
        kind = KINDS[rng.choice(self.args.kinds)]
        pick = [rng.random() for _ in range(2)]
        seed = rng.random()
        free = self.free_hosts()
        if kind.hosts_needed and len(free) - kind.hosts_needed < self.args.spare:
            return
        if kind.hosts_needed == 0 and any(type(fault) is kind for _, fault, _ in self.active):
            return
        chosen: list[Host] = []
        for share in pick[: kind.hosts_needed]:
            chosen.append(free.pop(int(share * len(free))))
        fault = kind(self, chosen, random.Random(seed))
        record = fault.make()
        self.records.append(record)
        self.say(record.what)
        self.active.append((time.monotonic() + fault.lasts, fault, record))

    def undo_due(self, everything: bool = False) -> None:
        now = time.monotonic()
        # The coordinator comes back first: a host that drains needs it.
        for entry in sorted(self.active, key=lambda entry: (entry[1].kind != "kill coordinator", entry[0])):
            due, fault, record = entry
            if not everything and (due > now or not fault.over()):
                continue
            fault.undo()
            record.end = time.monotonic()
            self.active.remove(entry)
            print(json.dumps(record.__dict__), file=self.timeline, flush=True)

    # ------------------------------------------------------------------ watching

    def watch(self) -> None:
        """Raises Failed if a program has ended by itself."""
        killed = {name for _, fault, record in self.active if "kill" in fault.kind for name in record.hosts}
        draining = {name for _, fault, record in self.active if fault.kind == "drain" for name in record.hosts}
        for host in self.world.hosts:
            if host.name in self.gone or host.name in killed:
                continue
            if host.peerd is not None and not host.peerd.alive and host.name not in draining:
                raise Failed(f"peerd of {host.name} ended with {host.peerd.returncode}: see {host.peerd_log}")
            for name, trainer in host.trainers.items():
                if not trainer.alive:
                    raise Failed(f"trainer {name} of {host.name} ended with {trainer.returncode}")
        coordinator = self.world.coordinator
        if not any(fault.kind == "kill coordinator" for _, fault, _ in self.active) and coordinator is not None:
            if not coordinator.alive:
                raise Failed(f"the coordinator ended with {coordinator.returncode}")

    def stay_calm(self) -> tuple[float, float]:
        """Makes no faults for a while. Returns when this began and when it ended."""
        begin = time.monotonic()
        self.say(f"{self.args.calm:.0f} s without faults")
        while time.monotonic() < begin + self.args.calm:
            self.watch()
            time.sleep(0.1)
        return begin, begin + self.args.calm

    def wait_all_step(self, hosts: list[Host], steps: int, world_size: int, what: str) -> None:
        """Waits until every trainer of these hosts has made `steps` more steps in a world of `world_size` members."""
        wanted = {(host, group): steps for host in hosts for group in range(self.args.groups)}
        offsets: dict[tuple[Host, int], int] = {}
        deadline = time.monotonic() + 2 * self.args.patience
        first = True
        while wanted:
            for key in list(wanted):
                path = self.world.logs / f"{key[0].name}.g{key[1]}.jsonl"
                data = path.read_bytes() if path.exists() else b""
                complete = data.rfind(b"\n") + 1
                if first:
                    offsets[key] = complete
                fresh = data[offsets[key] : complete]
                offsets[key] = complete
                for line in fresh.splitlines():
                    with contextlib.suppress(ValueError):
                        fields = json.loads(line)
                        if fields["k"] == "step" and fields["ws"] == world_size and key in wanted:
                            wanted[key] -= 1
                            if wanted[key] == 0:
                                del wanted[key]
            first = False
            self.watch()
            if time.monotonic() > deadline:
                missing = [f"{host.name} group {group}" for host, group in wanted]
                raise Failed(f"{what}: no {steps} steps in a world of {world_size} at {', '.join(missing)}")
            time.sleep(0.1)


def chaos(args: argparse.Namespace, logs: pathlib.Path) -> bool:
    rng = random.Random(args.seed)
    problems: list[str] = []
    with World(logs, args.detect_ms, args.peerd_flag) as world:
        fleet = Fleet(world, args)
        world.start_coordinator()
        for _ in range(args.hosts):
            world.add_host().start_peerd()
        base = list(world.hosts)
        for host in base:
            fleet.start_trainers(host)
        calm: list[tuple[float, float]] = []
        storm = (0.0, 0.0)
        try:
            fleet.wait_all_step(base, 3, args.hosts, "at the start")
            fleet.say(f"{args.hosts} hosts train")
            calm.append(fleet.stay_calm())
            begin = time.monotonic()
            storm = (begin, begin + 60 * args.minutes)
            next_fault = begin
            while time.monotonic() < storm[1]:
                fleet.undo_due()
                fleet.watch()
                if time.monotonic() >= next_fault:
                    fleet.make_one(rng)
                    next_fault = max(next_fault + rng.expovariate(1 / args.every), time.monotonic())
                time.sleep(0.02)
            fleet.say("no more faults")
            while fleet.active:
                fleet.undo_due()
                time.sleep(0.05)
            left = [host for host in world.hosts if host.name not in fleet.gone]
            fleet.wait_all_step(left, 3, len(left), "after the last fault")
            # The reference is measured twice: the machine may be faster or slower by now, and faults may have left
            # something behind that slows down training.
            calm.append(fleet.stay_calm())
        except (Failed, RuntimeError) as problem:
            problems.append(str(problem))
            fleet.say(f"FAILED: {problem}; dumping to {world.dump(str(problem))}")
        for host in world.hosts:
            for trainer in host.trainers.values():
                trainer.signal(signal.SIGCONT)
                trainer.signal(signal.SIGTERM)
        deadline = time.monotonic() + (5 if problems else PATIENCE_S)
        for host in world.hosts:
            for name, trainer in host.trainers.items():
                with contextlib.suppress(Exception):
                    if trainer.wait(max(0.1, deadline - time.monotonic())) == 0:
                        continue
                if not problems:
                    problems.append(f"trainer {name} of {host.name} did not leave: {trainer.returncode}")
                    world.dump(problems[-1])
        events = world.events()
        if storm[1] == 0.0:
            storm = (fleet.begin, time.monotonic())
            calm = calm or [storm]
    result = verdicts.judge(logs, fleet.records, args.detect_ms / 1000)
    problems += result.problems
    figures = verdicts.goodput(result.lines, fleet.records, calm, storm, args.detect_ms / 1000)
    print()
    print(verdicts.table(result, fleet.records, events, figures))
    if figures.net < args.least_goodput and not problems:
        problems.append(f"goodput {figures.net:.1%} is below {args.least_goodput:.0%}")
    if not any(line.fields["k"] == "step" for line in result.lines):
        problems.append("no trainer made a step, so nothing was tested")
    for text in problems:
        print(f"PROBLEM {text}")
    print(f"{'FAILED' if problems else 'held'}: seed {args.seed}, logs in {logs}")
    return not problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2, help="minutes with faults (default 2)")
    parser.add_argument("--seed", type=int, help="default: a random one")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--groups", type=int, default=1, help="groups, each with a trainer on every host")
    parser.add_argument("--every", type=float, default=3, help="mean seconds between faults (default 3)")
    parser.add_argument("--spare", type=int, default=2, help="at any time so many hosts are left alone (default 2)")
    parser.add_argument("--kinds", help=f"kinds of faults, comma-separated, out of: {', '.join(KINDS)} (default all)")
    parser.add_argument(
        "--calm", type=float, default=10, help="seconds without faults before, and again after (default 10)"
    )
    parser.add_argument(
        "--think", type=float, default=0.1, help="seconds that a step pretends to compute (default 0.1)"
    )
    parser.add_argument(
        "--max-log2", type=int, default=20, help="the largest op has 2**N elements of 8 bytes (default 20)"
    )
    parser.add_argument("--detect-ms", type=int, default=1500)
    parser.add_argument("--patience", type=float, default=60, help="a wait of so many seconds is a hang (default 60)")
    parser.add_argument("--least-goodput", type=float, default=0, help="fail if goodput is less; 0.95 is 95 %%")
    parser.add_argument("--peerd-flag", action="append", default=[], help="a further flag for every peerd")
    parser.add_argument("--logs", type=pathlib.Path, help="where logs go (default: a new directory in /tmp)")
    args = parser.parse_args()
    if args.seed is None:
        args.seed = int.from_bytes(os.urandom(4), "little")
    args.kinds = [kind.strip() for kind in args.kinds.split(",")] if args.kinds else list(KINDS)
    unknown = [kind for kind in args.kinds if kind not in KINDS]
    if unknown:
        parser.error(f"no fault {unknown[0]!r}; there are: {', '.join(KINDS)}")
    if args.hosts <= args.spare:
        parser.error("--hosts has to be more than --spare")
    reason = why_not()
    if reason:
        print(f"skipped: {reason}")
        return SKIPPED
    if args.logs and args.logs.exists():
        for old in args.logs.glob("*.*"):
            if old.suffix in (".log", ".jsonl", ".stderr", ".txt"):
                old.unlink()
    logs = args.logs or pathlib.Path(tempfile.mkdtemp(prefix="longhaul-chaos-", dir="/tmp"))
    print(f"seed {args.seed}, {args.hosts} hosts, {args.minutes:g} minutes, logs in {logs}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    return 0 if chaos(args, logs) else 1


if __name__ == "__main__":
    sys.exit(main())
