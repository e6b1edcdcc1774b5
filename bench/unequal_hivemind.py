"""hivemind's averager between the hosts of bench/unequal.py.

Each host has one process with a DHT peer and a `hivemind.DecentralizedAverager`, in the network namespace of the host.
All of them form one group. Each is told the rate of its access link as its bandwidth, so hivemind divides the tensor
into unequal parts. Tensors are float32 without compression.

An op is timed as Longhaul's are: all processes have found their group and wait. Then all begin at once, and the slowest
one counts. hivemind's search for a group, which takes seconds, does not count. So its waits are shorter here than its
defaults. All other settings are its defaults.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import machine
from workers import MIB, PATIENCE_S, Failure, Trainer, finish_all

# How long each process waits for others that want to be in its group.
MATCHMAKING_S = 3.0
GROUP_WITHIN_S = 150.0


class Worker:
    """The side of the averager. Its methods are the orders."""

    def open(self, address: str, peers: list[str], mbit: float, mib: int, rank: int, size: int) -> str:
        """Starts the averager. Returns an address for the `peers` of others."""
        import hivemind
        import torch

        self.rank, self.size, self.ops = rank, size, 0
        self.tensor = torch.zeros(mib * MIB // 4)
        self.dht = hivemind.DHT(initial_peers=peers, host_maddrs=[f"/ip4/{address}/tcp/0"], start=True)
        self.averager = hivemind.DecentralizedAverager(
            [self.tensor],
            self.dht,
            start=True,
            prefix="bench",
            target_group_size=size,
            min_group_size=size,
            min_matchmaking_time=MATCHMAKING_S,
            request_timeout=MATCHMAKING_S / 2,
            bandwidth=mbit,
        )
        return str(next(each for each in self.dht.get_visible_maddrs() if f"/ip4/{address}/" in str(each)))

    def seek(self) -> None:
        """Finds the group, and waits there."""
        from hivemind.averaging.control import AveragingStage

        self.ops += 1
        with self.averager.get_tensors() as (tensor,):
            tensor.fill_(self.rank + self.ops % 1000)
        self.step = self.averager.step(timeout=GROUP_WITHIN_S, require_trigger=True, wait=False)
        deadline = time.monotonic() + GROUP_WITHIN_S
        while self.step.stage != AveragingStage.AWAITING_TRIGGER:
            if self.step.done() or time.monotonic() > deadline:
                raise Failure(f"rank {self.rank} found no group of {self.size}")
            time.sleep(0.01)

    def op(self) -> float:
        """Averages. Returns the seconds."""
        began = time.monotonic()
        self.step.allow_allreduce()
        members = self.step.result(timeout=PATIENCE_S)
        took = time.monotonic() - began
        with self.averager.get_tensors() as (tensor,):
            # A mean of small whole numbers, rounded.
            off = float((tensor - (self.ops % 1000 + (self.size - 1) / 2)).abs().max())
        if len(members) != self.size or off > 1e-3:
            raise Failure(f"rank {self.rank}: averaged with {len(members)} of {self.size}, {off} from the mean")
        return took


class Averager(Trainer):
    """The process of a host, and the processes that hivemind starts. They are one session."""

    def __init__(self, python: str, namespace: str, log: pathlib.Path) -> None:
        with open(log, "ab") as sink:
            super().__init__(__file__, namespace, python, stderr=sink, start_new_session=True)

    def pids(self) -> list[int]:
        listed = subprocess.run(["ps", "-o", "pid=", "-s", str(self.process.pid)], capture_output=True, text=True)
        return [int(pid) for pid in listed.stdout.split()]

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        super().kill()


@contextlib.contextmanager
def averagers(wan: Any, python: str, rates_mbit: Sequence[float], mib: int) -> Iterator[list[Averager]]:
    with contextlib.ExitStack() as stack:
        team: list[Averager] = []
        peers: list[str] = []
        for host, mbit in zip(wan.hosts, rates_mbit):
            averager = Averager(python, host.namespace, wan.logs / f"{host.name}.hivemind.log")
            stack.callback(averager.kill)
            order = {"mbit": mbit, "mib": mib, "rank": len(team), "size": len(wan.hosts)}
            peers.append(averager.do("open", address=host.address, peers=peers, **order))
            team.append(averager)
        yield team


def together(team: Sequence[Averager], what: str) -> list[Any]:
    for averager in team:
        averager.start(what)
    return finish_all(team)


def op_seconds(team: Sequence[Averager], ops: int, warm: int) -> tuple[list[float], float]:
    """Returns the seconds of each counted op at the slowest process, and the processor seconds of all processes."""
    seconds, cpu = [], 0.0
    for number in range(warm + ops):
        together(team, "seek")
        pids = [pid for averager in team for pid in averager.pids()]
        before = machine.cpu_seconds(pids)
        took = max(together(team, "op"))
        if number >= warm:
            seconds.append(took)
            cpu += machine.cpu_seconds(pids) - before
    return seconds, cpu


def measure(wan: Any, python: str, rates_mbit: Sequence[float], mib: int, ops: int, judge: Any) -> dict[str, Any]:
    """The figures of hivemind for a line of bench/unequal.py. judge: makes a wan.Judge, which begins when it is made."""
    with averagers(wan, python, rates_mbit, mib) as team:
        verdict = judge(wan)
        seconds, cpu = op_seconds(team, ops, warm=1)
        judged = verdict.verdict()
    return {
        "op_s": round(statistics.median(seconds), 3),
        "op_all_s": [round(each, 3) for each in seconds],
        # Near the number of processors: the machine is the limit and not the links.
        "processors": round(cpu / sum(seconds), 2),
        **judged,
    }


def main() -> None:
    worker = Worker()
    for line in sys.stdin:
        order = json.loads(line)
        try:
            value = getattr(worker, order.pop("do"))(**order)
        except Exception as problem:  # hivemind raises many kinds
            value = {"error": f"hivemind: {type(problem).__name__}: {problem}"}
        print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
