"""A trainer for the tests of this directory: trains on one shared state until it is told to end.

    churn.py SOCKET RUN MEGABYTES [--op-megabytes=1] [--compute-ms=0] [--algorithm=auto] [--again]

MEGABYTES is the size of the shared state. --again: join again after an eviction. Ends with 0 on SIGTERM, at the next
step. If its peerd dies, it ends with an error.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time

import numpy as np

import longhaul as lh


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("socket")
    parser.add_argument("run")
    parser.add_argument("megabytes", type=float)
    parser.add_argument("--op-megabytes", type=float, default=1)
    parser.add_argument("--compute-ms", type=float, default=0)
    parser.add_argument("--algorithm", default="auto")
    parser.add_argument("--again", action="store_true")
    asked = parser.parse_args()
    ending = []
    signal.signal(signal.SIGTERM, lambda *_: ending.append(True))
    weights = lh.empty(int(asked.megabytes * 250_000), dtype="float32", peerd=asked.socket)
    weights[:] = 1
    gradient = lh.empty(int(asked.op_megabytes * 250_000), dtype="float32", peerd=asked.socket)
    state = lh.State({"weights": weights})
    name = f"trainer-{asked.socket.rsplit('/', 1)[-1]}"
    while not ending:
        comm = lh.join(asked.run, peerd=asked.socket, timeout=None, state=state, name=name)
        try:
            while not ending:
                with comm.step(state):
                    time.sleep(asked.compute_ms / 1000)  # stands for the work of a real trainer
                    gradient[:] = 1e-6
                    comm.all_reduce(gradient, op="avg", algorithm=asked.algorithm)
                    weights[: gradient.size] -= np.asarray(gradient)[: weights.size]
            comm.leave()
        except lh.Evicted:
            if not asked.again:
                raise


try:
    main()
except lh.Unavailable as error:
    sys.exit(f"this trainer ends: {error}")
