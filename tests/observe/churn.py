"""A trainer for the tests of this directory: trains on one shared state until it is told to end.

    churn.py SOCKET RUN MEGABYTES

Ends with 0 on SIGTERM, at the next step. If its peerd dies, it ends with an error.
"""

from __future__ import annotations

import signal
import sys

import numpy as np

import longhaul as lh


def main() -> None:
    socket, run, megabytes = sys.argv[1:]
    ending = []
    signal.signal(signal.SIGTERM, lambda *_: ending.append(True))
    weights = lh.empty(int(megabytes) * 250_000, dtype="float32", peerd=socket)
    weights[:] = 1
    gradient = lh.empty(250_000, dtype="float32", peerd=socket)
    state = lh.State({"weights": weights})
    comm = lh.join(run, peerd=socket, timeout=None, state=state, name=f"trainer-{sys.argv[1].rsplit('/', 1)[-1]}")
    while not ending:
        with comm.step(state):
            gradient[:] = 1e-6
            comm.all_reduce(gradient, op="avg")
            weights[: gradient.size] -= np.asarray(gradient)
    comm.leave()


try:
    main()
except lh.Unavailable as error:
    sys.exit(f"this trainer ends: {error}")
