"""Two hosts with two trainers each, on this machine. One host is killed while they train, and comes back.

Each host has a longhaul-peerd of its own. Without arguments it takes about half a minute.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

from longhaul.testing import LocalCluster

TRAINERS = 2  # per host
HOSTS = 2
PATIENCE_S = 300


def trainer(socket: str, output: pathlib.Path, args: argparse.Namespace) -> None:
    """The process of one trainer. What torchrun would set is in `args`."""
    os.environ["LONGHAUL_SOCKET"] = socket
    for number, path in ((1, output), (2, output.with_suffix(".log"))):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    import train  # here, because this is the only process that needs it

    train.train(args)


class Host:
    """The trainers of one host. Their output goes to files."""

    def __init__(self, cluster: LocalCluster, peer: int, steps: int, logs: pathlib.Path) -> None:
        self.cluster, self.peer = cluster, peer
        self.outputs = [logs / f"host{peer}-trainer{rank}.jsonl" for rank in range(TRAINERS)]
        self.processes = []
        # Importing torch takes seconds. The fork server does it once, and each trainer is a fork of it.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed.fsdp"])
        for rank, output in enumerate(self.outputs):
            output.touch()
            args = argparse.Namespace(
                hosts=HOSTS, steps=steps, rank=rank, world_size=TRAINERS, rendezvous=f"file://{logs}/host{peer}"
            )
            process = context.Process(target=trainer, args=(cluster.socket(peer), output, args), daemon=True)
            process.start()
            self.processes.append(process)

    def said(self, rank: int) -> list[dict[str, Any]]:
        """What a trainer has reported, a line per step."""
        lines = self.outputs[rank].read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def last(self) -> dict[str, Any]:
        said = self.said(0)
        return said[-1] if said else {"step": 0, "hosts": 0}

    def kill(self) -> None:
        self.cluster.kill_peer(self.peer)
        for process in self.processes:
            process.kill()
            process.join()

    def check(self) -> None:
        """Raises RuntimeError if a trainer failed."""
        for process, output in zip(self.processes, self.outputs):
            if process.exitcode not in (None, 0):
                raise RuntimeError(f"a trainer failed:\n{output.with_suffix('.log').read_text()[-3000:]}")

    def ended(self) -> bool:
        return all(process.exitcode is not None for process in self.processes)


def until(hosts: list[Host], condition: Callable[[], bool]) -> None:
    """Waits until the condition holds. Raises RuntimeError if a trainer fails, or it takes too long."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        for host in hosts:
            host.check()
        if time.monotonic() > deadline:
            raise RuntimeError(f"the trainers hang: {[host.last() for host in hosts]}")
        time.sleep(0.02)


def run(steps: int, logs: pathlib.Path) -> list[Host]:
    """Runs the story. Returns the host that lived through it, the one that was killed, and the one that came back."""
    with LocalCluster(peers=HOSTS, log_dir=logs) as cluster:
        first, second = (Host(cluster, peer, steps, logs) for peer in range(HOSTS))
        until([first, second], lambda: second.last()["step"] >= 3)
        second.kill()
        print(f"host 1 is killed after step {second.last()['step']}", flush=True)
        until([first], lambda: first.last()["hosts"] == 1)
        print(f"host 0 goes on alone: {first.last()}", flush=True)
        third = Host(cluster, cluster.add_peer(), steps, logs)
        until([first, third], lambda: third.last()["step"] > 0)
        print(f"host 1 is back: {third.last()}", flush=True)
        until([first, third], lambda: first.ended() and third.ended())
        first.check()
        third.check()
        return [first, second, third]


def check(first: Host, *others: Host) -> None:
    """Raises RuntimeError unless each shard had the same bits on all hosts in every step."""
    for rank in range(TRAINERS):
        hashes = {said["step"]: said["hash"] for said in first.said(rank)}
        for host in others:
            for said in host.said(rank):
                # The killed host may have ended a step without the other one.
                if hashes[said["step"]] != said["hash"]:
                    raise RuntimeError(f"shard {rank} differs in step {said['step']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps, at least (default %(default)s)")
    parser.add_argument("--logs", type=pathlib.Path, help="directory for what the trainers write")
    args = parser.parse_args()
    logs = args.logs or pathlib.Path(tempfile.mkdtemp(prefix="longhaul-hsdp-"))
    hosts = run(args.steps, logs)
    check(*hosts)
    losses = [said["loss"] for said in hosts[0].said(0)]
    print(f"{len(losses)} steps, loss {losses[0]:.3f} -> {losses[-1]:.3f}; the hosts were equal in every step")


if __name__ == "__main__":
    main()
