#!/usr/bin/env python3
"""Measures what a sync of a state costs on one host if nothing, some of it, or all of it differs.

Use this if you change how states are stored or compared.

    tools/build && .venv/bin/python bench/sync_cost.py --mib=256 --rounds=5
    .venv/bin/python bench/sync_cost.py --against=../other/checkout --json=result.json

Two members, each with a peerd of its own, sync a state in the arena, and then a state in plain numpy arrays. Each line
has the median time of whole calls of `comm.sync_state(state)` at the member that fetches (for "equal": at either
member), and how much the arena's memory grew meanwhile. `--against` names a second built checkout. Then both run in
turns, and the program prints the ratio of the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent.parent
MIB = 1 << 20
PLACES = ("arena", "numpy")
# The share of the chunks that differs.
PARTS = {"equal": 0.0, "sixteenth": 1 / 16, "all": 1.0}


def shared_bytes() -> int:
    """The shared memory of this machine. It includes all arenas, which are memfds."""
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Shmem:"))


class Peak(threading.Thread):
    """Watches by how much the shared memory grows at most."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._begin = shared_bytes()
        self._over = threading.Event()
        self._bytes = 0

    def run(self) -> None:
        while not self._over.wait(0.005):
            self._bytes = max(self._bytes, shared_bytes() - self._begin)

    def end(self) -> int:
        self._over.set()
        self.join()
        return self._bytes


def timed(comm: Any, state: Any) -> float:
    begin = time.monotonic()
    comm.sync_state(state, timeout=120)
    return time.monotonic() - begin


def measure(mib: int) -> dict[str, float]:
    """Measures one round. Runs in a process of its own."""
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    import longhaul as lh
    from longhaul.testing import LocalCluster

    out: dict[str, float] = {}
    size = mib * MIB
    with LocalCluster(peers=2) as cluster, ThreadPoolExecutor(2) as pool:
        first = lh.join("cost", peerd=cluster.socket(0))
        joining = pool.submit(lh.join, "cost", 0, cluster.socket(1), 60)
        while first.world_size < 2:
            first.begin_step(60)
        comms = [first, joining.result(60)]
        comms[1].begin_step(60)  # the boundary that admitted it
        revision = 0
        for place in PLACES:
            arrays = [
                lh.empty(size, "uint8", peerd=cluster.socket(i)) if place == "arena" else np.empty(size, np.uint8)
                for i in range(2)
            ]
            for array in arrays:
                array[:] = 1
            states = [lh.State({"w": array}, revision) for array in arrays]
            for name, part in ("warm", 1.0), *PARTS.items():
                # If two states of one revision differ, the one with the lower digest wins, and the other member
                # fetches.
                for state in states:
                    state.revision = revision
                revision += 1
                arrays[1][: int(part * mib) * MIB] += 1
                peak = Peak()
                peak.start()
                seconds = list(pool.map(timed, comms, states))
                grown = peak.end()
                assert (arrays[0] == arrays[1]).all()
                if name == "warm":
                    continue
                out[f"{place} {name}"] = max(seconds)
                out[f"{place} {name} MiB"] = grown / MIB
        for comm in comms:
            comm.leave()
    return out


def run(tree: pathlib.Path, mib: int) -> dict[str, float]:
    env = dict(os.environ, PYTHONPATH=str(tree / "client" / "python"))
    command = [sys.executable, __file__, f"--mib={mib}", "--one"]
    result: dict[str, float] = json.loads(subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE).stdout)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of the state in MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", type=pathlib.Path, help="another checkout that is built (has out/)")
    parser.add_argument("--json", type=pathlib.Path, help="write all figures to this file")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.mib)))
        return 0
    trees = {"here": HERE} | ({"there": args.against.resolve()} if args.against else {})
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for _ in range(args.rounds):
        for name, tree in trees.items():
            seen[name].append(run(tree, args.mib))
    medians: dict[str, Any] = {}
    for key in seen["here"][0]:
        medians[key] = {name: statistics.median(each[key] for each in rounds) for name, rounds in seen.items()}
        line = f"{key:22}" + "".join(f"  {name} {value:8.3f}" for name, value in medians[key].items())
        if args.against:
            line += f"  ratio {medians[key]['here'] / max(medians[key]['there'], 1e-9):.2f}"
        print(line)
    if args.json:
        args.json.write_text(json.dumps({"mib": args.mib, "rounds": seen, "medians": medians}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
