"""Measures what a newcomer with a large shared state costs the other members: blocking, and in the background.

    .venv/bin/python bench/background_join.py [--mib 1024] [--rate BYTES_PER_SECOND]

Two trainers make steps. In a step they think (asleep, as if a GPU computed), reduce a tensor, and sync a state of which
a little has changed. After a while a third trainer joins without the state. Each way to join prints one line of JSON:
the others' time of a step before the join, and while the newcomer is in the background (or, blocking, in its first
sync); how long the join took; and how busy the processors were.

All trainers run on one host, so the newcomer's transfer takes processor time from the others. --rate bounds what each
source sends, as a link would (`longhaul-peerd --state-rate`).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from typing import Any

import numpy as np

import longhaul as lh
from longhaul.testing import LocalCluster

CHURN = 1 << 20  # elements that each step changes


def busy_seconds() -> float:
    """The busy and the total time of all processors since the host started."""
    with open("/proc/stat") as stat:
        fields = [int(field) for field in stat.readline().split()[1:]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def model(mib: int, fill: float) -> tuple[lh.State, np.ndarray]:
    large = lh.empty(max(mib - 4, 1) << 18, dtype="float32")
    small = lh.empty(CHURN, dtype="float32")
    large[:] = fill
    small[:] = fill
    return lh.State({"large": large, "small": small}, hash="on_change"), small


def train(socket: str, options: argparse.Namespace, mode: str | None, results: Any) -> None:
    """A trainer. mode None: a veteran; otherwise a newcomer. Puts its steps, each (when, seconds), and its times."""
    os.environ["LONGHAUL_SOCKET"] = socket
    state, small = model(options.mib, 1.0 if mode is None else 0.0)
    gradient = lh.empty(options.op_mib << 18, dtype="float32")
    steps: list[tuple[float, float]] = []
    told: dict[str, float] = {}
    with lh.join("bench", 0, socket, 300, join_mode=mode or "blocking", state=state) as comm:  # type: ignore[arg-type]
        told["joined"] = time.monotonic()
        together = 0
        while together < options.steps:
            began = time.monotonic()
            with comm.step(state, 600) as step:
                if mode is not None and not step.background and "contributes" not in told:
                    told["contributes"] = time.monotonic()
                time.sleep(options.think)
                gradient[:] = 1.0
                gradient[0] = mode is not None
                comm.all_reduce(gradient, op="avg", timeout=600)
                together += bool(gradient[0])
                # Take only what is there by the end of the op.
                if step.take():
                    small += 1
                    state.touch("small")
            steps.append((began, time.monotonic() - began))
        results.put({"mode": mode, "steps": steps, **told})
        comm.sync_state(state, timeout=600)


def measure(options: argparse.Namespace, mode: str) -> dict[str, Any]:
    flags = [f"--keep-state={3 * options.mib << 20}"]
    if options.rate:
        flags.append(f"--state-rate={options.rate}")
    context = multiprocessing.get_context("spawn")
    with LocalCluster(peers=3, peerd_flags=flags) as cluster:
        results = context.Queue()

        def start(peer: int, how: str | None) -> Any:
            process = context.Process(target=train, args=(cluster.socket(peer), options, how, results))
            process.start()
            return process

        processes = [start(0, None), start(1, None)]
        time.sleep(options.before)
        busy, began = busy_seconds(), time.monotonic()
        processes.append(start(2, mode))
        told = [results.get(timeout=900) for _ in processes]
        busy, wall = busy_seconds() - busy, time.monotonic() - began
        for process in processes:
            process.join(60)
    newcomer = next(one for one in told if one["mode"] is not None)
    veteran = next(one for one in told if one["mode"] is None)
    # From the admission to the first step outside of the background. The newcomer makes its own memory before.
    since, until = newcomer["joined"], newcomer["contributes"]
    before = [seconds for at, seconds in veteran["steps"] if began - options.before / 2 < at < began]
    during = [seconds for at, seconds in veteran["steps"] if at + seconds > since and at < until]
    return {
        "join_mode": mode,
        "state_mib": options.mib,
        "rate": options.rate,
        "processors": os.cpu_count(),
        "steps_before": len(before),
        "step_before_ms": round(1000 * statistics.median(before), 1),
        "steps_during": len(during),
        "step_during_ms": round(1000 * statistics.median(during), 1),
        "step_during_mean_ms": round(1000 * statistics.mean(during), 1),
        "step_during_max_ms": round(1000 * max(during), 1),
        "rise_percent": round(100 * (statistics.median(during) / statistics.median(before) - 1), 1),
        "caught_up_s": round(until - since, 2),
        "processors_busy": round(busy / wall, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the state in MiB")
    parser.add_argument("--op_mib", type=int, default=4, help="MiB that a step reduces")
    parser.add_argument("--think", type=float, default=0.25, help="seconds that a step sleeps")
    parser.add_argument("--before", type=float, default=20, help="seconds before the newcomer joins")
    parser.add_argument("--steps", type=int, default=3, help="steps to which the newcomer contributes")
    parser.add_argument("--rate", type=int, default=0, help="largest rate of a source in bytes/s; 0: no limit")
    options = parser.parse_args()
    for mode in ("background", "blocking"):
        print(json.dumps(measure(options, mode)), flush=True)


if __name__ == "__main__":
    main()
