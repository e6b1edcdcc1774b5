"""One fault of the network after another, and what each costs.

  tests/chaos/network                          a sample, as tools/check runs it: a few faults, one seed
  tests/chaos/network --faults=200             the suite: worlds of 3 to 6 hosts, every kind again and again
  tests/chaos/network --kinds="black hole"     one kind

A world has IPv4 addresses, or IPv6 addresses only, or hosts behind an address translation (DNAT) whose peerds have
--advertise. In each hosts train (trainer.py: every result tells whose inputs are in it). A fault is made, lasts and is undone;
then all hosts have to train together again before the next one. A fault fails the run if a result is wrong, if members
differ, if something hangs, if a host does not come back, or if a member is removed that nothing excuses. The table says,
by kind of fault, how long the others were without a finished op, how many members were removed, and how many of these
could have been reached.

Exit codes: 0 all held, 1 something did not, 2 bad usage, 77 namespaces cannot be used here (the reason is printed).
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import pathlib
import random
import statistics
import sys
import tempfile
import time

import verdict as verdicts
from chaos import Failed, Fleet
from faults import Fault, Record
from network_faults import KINDS, NewAddress
from world import DATA_PORT, Host, World, endpoint, why_not

SKIPPED = 77
FAULTS_A_WORLD = 7
NAT_PORT = 39700
NETWORKS = ("ipv4", "ipv6", "nat")


@dataclasses.dataclass
class Cost:
    """What the faults of one kind have cost."""

    times: int = 0
    gaps: list[float] = dataclasses.field(default_factory=list)  #: seconds without a finished op
    removed: int = 0  #: members that had been there before
    reachable: int = 0  #: of these, those that the fault was not done to


def behind_nat(world: World, host: Host) -> list[str]:
    """The data port is reached by another number only. Flags for peerd."""
    host.run("nft", "add", "table", "ip", "nat")
    host.run("nft", "add", "chain", "ip", "nat", "in", "{ type nat hook prerouting priority -100 ; }")
    host.run("nft", "add", "rule", "ip", "nat", "in", "tcp", "dport", str(NAT_PORT), "redirect", "to", f":{DATA_PORT}")
    world.drop(f'oifname "{host.port}" tcp dport {DATA_PORT}')
    return [f"--advertise={host.address}:{NAT_PORT}"]


def smallest(kind: type[Fault]) -> int:
    """How many hosts a world needs so that somebody is left whom the fault is not done to."""
    return 3 if kind.hosts_needed < 2 else kind.hosts_needed + 1


def make(fleet: Fleet, kind: type[Fault], base: list[Host], seed: float) -> Record:
    """Makes the fault, waits until it is over, and until all train together again."""
    rng = random.Random(seed)
    count = len(base) if kind.hosts_needed < 0 else kind.hosts_needed
    fault = kind(fleet, rng.sample(base, count), rng)
    record = fault.make()
    fleet.records.append(record)
    fleet.say(record.what)
    due = time.monotonic() + fault.lasts
    while time.monotonic() < due:
        fleet.watch()
        time.sleep(0.05)
    fault.undo()
    record.end = time.monotonic()
    print(json.dumps(record.__dict__), file=fleet.timeline, flush=True)
    fleet.wait_all_step(base, 2, len(base), f"after: {record.what}")
    return record


def one_world(
    args: argparse.Namespace,
    logs: pathlib.Path,
    network: str,
    size: int,
    plan: list[tuple[type[Fault], float]],
    costs: dict[str, Cost],
) -> list[str]:
    """A world and its faults. Adds to the costs by kind, returns the problems."""
    problems: list[str] = []
    with World(logs, args.detect_ms, ipv6=network == "ipv6") as world:
        fleet = Fleet(world, args)
        world.start_coordinator()
        for _ in range(size):
            host = world.add_host()
            anywhere = "::" if network == "ipv6" else "0.0.0.0"
            flags = behind_nat(world, host) if network == "nat" else []
            host.start_peerd([f"--listen={endpoint(anywhere, DATA_PORT)}", *flags])
        base = list(world.hosts)
        for host in base:
            fleet.start_trainers(host)
        try:
            fleet.wait_all_step(base, 3, size, "at the start")
            fleet.say(f"{size} hosts train ({network})")
            for kind, seed in plan:
                make(fleet, kind, base, seed)
        except (Failed, RuntimeError) as problem:
            problems.append(str(problem))
            fleet.say(f"FAILED: {problem}; dumping to {world.dump(str(problem))}")
    result = verdicts.judge(logs, fleet.records, args.detect_ms / 1000)
    problems += result.problems
    for record in fleet.records:
        costs[record.kind].times += 1
    for name, gaps in verdicts.stalls(result.lines, fleet.records).items():
        costs[name].gaps += gaps
    trained = {host.name for host in base}
    for line in result.of("removed"):
        cause = next((one for one in reversed(fleet.records) if one.begin <= line.fields["t"]), None)
        if cause is None or line.host not in trained:
            continue
        costs[cause.kind].removed += 1
        costs[cause.kind].reachable += line.host not in cause.hosts
    return problems


def table(costs: dict[str, Cost]) -> str:
    rows = [f"{'fault':<26} {'times':>5}  {'without an op: median':>21} {'worst':>8}  {'removed':>7} {'reachable':>9}"]
    for kind, cost in sorted(costs.items()):
        median = f"{statistics.median(cost.gaps):.2f} s" if cost.gaps else "-"
        worst = f"{max(cost.gaps):.2f} s" if cost.gaps else "-"
        rows.append(f"{kind:<26} {cost.times:>5}  {median:>21} {worst:>8}  {cost.removed:>7} {cost.reachable:>9}")
    return "\n".join(rows)


def plans(args: argparse.Namespace, rng: random.Random) -> list[tuple[str, int, list[tuple[type[Fault], float]]]]:
    """Worlds, and what befalls each: every kind as often as any other, give or take one."""
    todo: list[type[Fault]] = []
    while len(todo) < args.faults:
        todo += rng.sample(args.kinds, len(args.kinds))
    todo = todo[: args.faults]
    worlds: list[tuple[str, int, list[tuple[type[Fault], float]]]] = []
    while todo:
        network, size = NETWORKS[len(worlds) % len(NETWORKS)], rng.randint(3, 6)
        # An address that is advertised is not derived anew.
        unfit = (NewAddress,) if network == "nat" else ()
        fit = [kind for kind in todo if smallest(kind) <= size and kind not in unfit][:FAULTS_A_WORLD]
        for kind in fit:
            todo.remove(kind)
        if fit:
            worlds.append((network, size, [(kind, rng.random()) for kind in fit]))
    return worlds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=12, help="how many (default 12)")
    parser.add_argument("--seed", type=int, help="default: a random one")
    parser.add_argument("--kinds", help=f"of {'; '.join(KINDS)}; separated by semicolons (default all)")
    parser.add_argument("--detect-ms", type=int, default=1500)
    parser.add_argument("--think", type=float, default=0.05, help="computation of a step, in seconds (default 0.05)")
    parser.add_argument("--max-log2", type=int, default=16, help="largest op: 2**this elements of 8 bytes (default 16)")
    parser.add_argument("--patience", type=float, default=60, help="a wait of so many seconds is a hang (default 60)")
    parser.add_argument("--logs", type=pathlib.Path, help="where logs go (default: a new directory in /tmp)")
    args = parser.parse_args()
    args.seed = int.from_bytes(os.urandom(4), "little") if args.seed is None else args.seed
    wanted = [name.strip() for name in args.kinds.split(";")] if args.kinds else list(KINDS)
    unknown = [name for name in wanted if name not in KINDS]
    if unknown:
        parser.error(f"no fault {unknown[0]!r}; there are: {'; '.join(KINDS)}")
    reason = why_not()
    if reason:
        print(f"skipped: {reason}")
        return SKIPPED
    args.kinds = [KINDS[name] for name in wanted]
    args.groups = 1
    if args.logs and args.logs.exists():
        parser.error(f"{args.logs} is there already: logs of two runs would be taken for one")
    logs = args.logs or pathlib.Path(tempfile.mkdtemp(prefix="longhaul-network-", dir="/tmp"))
    print(f"seed {args.seed}, {args.faults} faults, logs in {logs}", flush=True)
    problems: list[str] = []
    costs: dict[str, Cost] = collections.defaultdict(Cost)
    for number, (network, size, plan) in enumerate(plans(args, random.Random(args.seed))):
        found = one_world(args, logs / f"world{number}", network, size, plan, costs)
        problems += [f"world {number}: {text}" for text in found]
    print("\n" + table(costs))
    for text in problems:
        print(f"PROBLEM {text}")
    print(f"{'FAILED' if problems else 'held'}: seed {args.seed}, logs in {logs}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
