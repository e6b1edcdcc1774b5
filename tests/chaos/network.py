"""Makes one fault of the network after another, and shows what each costs.

  tests/chaos/network                          a sample, as tools/check runs it: a few faults
  tests/chaos/network --faults=200             the suite: worlds of 3 to 6 hosts, every kind again and again
  tests/chaos/network --kinds="black hole"     one kind of fault

There are four kinds of worlds: with IPv4 addresses; with IPv6 addresses only; with hosts behind an address translation
(DNAT), whose peerds have --advertise; and with TLS to the coordinator. In each world hosts train, and every result tells whose inputs are in
it (trainer.py). A fault is made, lasts, and is undone. Then all hosts have to train together again before the next
fault.

The run fails if a result is wrong, if members differ, if something hangs, if a host does not come back, or if a member
is removed without cause. For each kind of fault the table at the end says how long other members were without a
finished op, how many members were removed, and how many of these the fault was not done to.

Exit codes: 0 all checks held, 1 a check failed, 2 bad usage, 77 namespaces cannot be used here (the output says why).
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
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
NETWORKS = ("ipv4", "ipv6", "nat", "tls")


@dataclasses.dataclass
class Cost:
    """The cost of all faults of one kind."""

    times: int = 0
    gaps: list[float] = dataclasses.field(default_factory=list)  #: seconds without a finished op
    removed: int = 0  #: members that trained before the fault, and were removed
    reachable: int = 0  #: how many of these were at hosts that the fault was not done to


def behind_nat(world: World, host: Host) -> list[str]:
    """Lets others reach the host's data port only by another port number. Returns the flags that peerd then needs."""
    host.run("nft", "add", "table", "ip", "nat")
    host.run("nft", "add", "chain", "ip", "nat", "in", "{ type nat hook prerouting priority -100 ; }")
    host.run("nft", "add", "rule", "ip", "nat", "in", "tcp", "dport", str(NAT_PORT), "redirect", "to", f":{DATA_PORT}")
    world.drop(f'oifname "{host.port}" tcp dport {DATA_PORT}')
    return [f"--advertise={host.address}:{NAT_PORT}"]


def smallest(kind: type[Fault]) -> int:
    """The size of the smallest world in which the fault leaves out at least one host."""
    return 3 if kind.hosts_needed < 2 else kind.hosts_needed + 1


def make(fleet: Fleet, kind: type[Fault], base: list[Host], seed: float) -> Record:
    """Makes a fault, undoes it after its time, and waits until all hosts train together again."""
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
    """Makes the faults of a plan in one world. Adds to `costs`; returns the problems."""
    problems: list[str] = []
    with World(logs, args.detect_ms, ipv6=network == "ipv6", tls=network == "tls") as world:
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
    """The worlds and their faults: (network, hosts, [(kind, seed)]). No kind occurs over once more than another."""
    todo: list[type[Fault]] = []
    while len(todo) < args.faults:
        todo += rng.sample(args.kinds, len(args.kinds))
    todo = todo[: args.faults]
    worlds: list[tuple[str, int, list[tuple[type[Fault], float]]]] = []
    turn = itertools.count()
    while todo:
        network, size = NETWORKS[next(turn) % len(NETWORKS)], rng.randint(3, 6)
        # Behind a NAT peerd advertises an address, and keeps it when the host's own address changes.
        unfit = (NewAddress,) if network == "nat" else ()
        fit = [kind for kind in todo if smallest(kind) <= size and kind not in unfit and kind.network in ("", network)][
            :FAULTS_A_WORLD
        ]
        for kind in fit:
            todo.remove(kind)
        if fit:
            worlds.append((network, size, [(kind, rng.random()) for kind in fit]))
    return worlds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=12, help="how many faults to make (default 12)")
    parser.add_argument("--seed", type=int, help="default: a random one")
    parser.add_argument("--kinds", help=f"kinds, separated by semicolons, out of: {'; '.join(KINDS)} (default all)")
    parser.add_argument("--detect-ms", type=int, default=1500)
    parser.add_argument(
        "--think", type=float, default=0.05, help="seconds that a step pretends to compute (default 0.05)"
    )
    parser.add_argument(
        "--max-log2", type=int, default=16, help="the largest op has 2**N elements of 8 bytes (default 16)"
    )
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
        parser.error(f"{args.logs} exists already: the logs of two runs would look like one; give another directory")
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
