#!/usr/bin/env python3
"""Measures what a step boundary costs on this machine, and of which parts. The coordinator is near: on loopback.

    tools/build && .venv/bin/python bench/boundary.py
    .venv/bin/python bench/boundary.py --members=1,3 --steps=500 --json=result.json

Each member is a process with a peerd of its own. All members step back to back, and nobody changes a tensor. A row has
medians over members, in ms:
  step      a call of begin_step(), or the way into the block of `with comm.step(state)`
  python    the part of it that is spent in Python, outside of the C library
  hash      what a peerd measures for its hash pass
  trainer, peerd, coordinator   processor time of one such process in one step
If the processor times of all processes together come near to `step` times the number of processors, the machine is the
limit. bench/control_floor shows what the round trip alone costs on the same machine.

The exit code is 1 if begin_step() with three members takes 0.3 ms or more.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import machine

PATIENCE_S = 60
WARM_UP = 20
BEGIN_STEP_MS_MAX = 0.3

# Name of a row: what the state has. None: begin_step() without a state.
STATES: dict[str, tuple[int, int] | str | None] = {
    "begin_step": None,
    "1 tensor, 64 KiB": (1, 64 << 10),
    "210 tensors, 5.5 MB": (210, 5_500_000),
    "1 tensor, 100 MB": (1, 100_000_000),
    "lh.torch.State, 0.46 M": "torch",
}


def make_state(lh: Any, comm: Any, content: tuple[int, int] | str) -> Any:
    if not isinstance(content, str):
        count, size = content
        tensors = {f"t{i}": comm.empty(size // 4 // count, "float32") for i in range(count)}
        for tensor in tensors.values():
            tensor[...] = 1
        return lh.State(tensors, revision=0)
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [torch.nn.TransformerEncoderLayer(96, 4, 384, batch_first=True) for _ in range(4)]
    model = torch.nn.Sequential(torch.nn.Embedding(65, 96), *layers, torch.nn.Linear(96, 65))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(2, 8, dtype=torch.long)).sum().backward()
    optimizer.step()
    return lh.torch.State(model, optimizer)


def be_member(name: str, socket: str, members: int, steps: int) -> None:
    """One trainer. Says "ready", waits for a line, measures, prints its figures, and waits for another line."""
    import longhaul as lh
    from longhaul import _member, _sync

    native = 0.0

    def timed(owner: Any, method: str) -> None:
        inner = getattr(owner, method)

        def outer(*args: Any, **options: Any) -> Any:
            nonlocal native
            begun = time.perf_counter()
            try:
                return inner(*args, **options)
            finally:
                native += time.perf_counter() - begun

        setattr(owner, method, outer)

    timed(_member.Member, "begin_step")
    timed(_sync.Syncs, "_ask")
    timed(_sync.Syncs, "_wait_for_sync")
    comm = lh.join("boundary", peerd=socket, timeout=PATIENCE_S, members=members)
    comm.begin_step(PATIENCE_S)
    content = STATES[name]
    state = None if content is None else make_state(lh, comm, content)

    def step() -> float:
        begun = time.perf_counter()
        if state is None:
            comm.begin_step(PATIENCE_S)
            return time.perf_counter() - begun
        with comm.step(state, PATIENCE_S):
            return time.perf_counter() - begun

    for _ in range(WARM_UP):
        step()
    print("ready", flush=True)
    sys.stdin.readline()
    native = 0.0
    cpu = time.process_time()
    taken = [step() for _ in range(steps)]
    figures = {
        "step": 1000 * statistics.median(taken),
        "python": 1000 * (sum(taken) - native) / steps,
        "trainer": 1000 * (time.process_time() - cpu) / steps,
    }
    print(json.dumps(figures), flush=True)
    sys.stdin.readline()
    comm.leave(PATIENCE_S)


def hashed(cluster: Any) -> list[float]:
    return [peer.metric("longhaul_peerd_state_hash_seconds_sum") for peer in cluster.peers]


def measure(name: str, members: int, steps: int, store: str) -> dict[str, Any]:
    from longhaul.testing import LocalCluster

    with tempfile.TemporaryDirectory() as directory:
        flags = [f"--store=sqlite:{directory}/store.db"] if store == "sqlite" else ["--store=memory"]
        with LocalCluster(peers=members, coordinator_flags=flags) as cluster:
            pids = [cluster.coordinator_pid, *(peer.pid for peer in cluster.peers)]
            command = [sys.executable, __file__, f"--member={name}", f"--members={members}", f"--steps={steps}"]
            trainers = [
                subprocess.Popen(
                    [*command, f"--socket={cluster.socket(i)}"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for i in range(members)
            ]

            def hear(trainer: Any) -> str:
                line: str = trainer.stdout.readline()
                if not line:
                    raise RuntimeError("a trainer has ended early; its error is above")
                return line

            def tell(trainer: Any) -> None:
                trainer.stdin.write("\n")
                trainer.stdin.flush()

            try:
                for trainer in trainers:
                    hear(trainer)
                before, hashed_before = [machine.cpu_seconds([pid]) for pid in pids], hashed(cluster)
                for trainer in trainers:
                    tell(trainer)
                seen = [json.loads(hear(trainer)) for trainer in trainers]
                used = [1000 * (machine.cpu_seconds([pid]) - was) / steps for pid, was in zip(pids, before)]
                for trainer in trainers:
                    tell(trainer)
                for trainer in trainers:
                    trainer.wait(PATIENCE_S)
                hashing = [1000 * (now - was) / steps for now, was in zip(hashed(cluster), hashed_before)]
            finally:
                for trainer in trainers:
                    trainer.kill()
    row: dict[str, Any] = {key: statistics.median(each[key] for each in seen) for key in seen[0]}
    row |= {"hash": statistics.median(hashing), "peerd": statistics.median(used[1:]), "coordinator": used[0]}
    return {"state": name, "members": members, "store": store, "steps": steps} | row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", default="1,3", help="numbers of members (default 1,3)")
    parser.add_argument("--steps", type=int, default=500, help="steps of a row; a tenth for 100 MB (default 500)")
    parser.add_argument("--store", choices=("memory", "sqlite"), default="memory", help="of the coordinator")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file")
    parser.add_argument("--member", help=argparse.SUPPRESS)
    parser.add_argument("--socket", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.member:
        be_member(args.member, args.socket, int(args.members), args.steps)
        return 0
    columns = ("step", "python", "hash", "trainer", "peerd", "coordinator")
    print(f"{os.cpu_count()} processors, store {args.store}; medians in ms")
    print(f"{'members':>7} {'state':>24}" + "".join(f"{column:>12}" for column in columns))
    rows = []
    for members in map(int, args.members.split(",")):
        for name in STATES:
            steps = max(args.steps // 10, 20) if "100 MB" in name else args.steps
            row = measure(name, members, steps, args.store)
            rows.append(row)
            print(f"{members:>7} {name:>24}" + "".join(f"{row[column]:12.3f}" for column in columns), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"machine": platform.platform(), "rows": rows}, indent=2) + "\n")
    late = [row for row in rows if row["state"] == "begin_step" and row["members"] == 3]
    if any(row["step"] >= BEGIN_STEP_MS_MAX for row in late):
        print(f"target missed: begin_step() takes {late[0]['step']:.2f} ms, wanted below 0.3", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
