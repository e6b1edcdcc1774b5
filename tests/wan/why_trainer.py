"""The trainer of test_why.py: steps with several ops in flight at once. Files in --control make it late.

    hold_op      while the file exists, it does not start the ops of a step
    hold_vote    while the file exists, it does not come to a step boundary
    slow         while the file exists, it waits ten seconds before the ops of each step

Writes the number of steps that it has made to --steps.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import signal
import sys
import time

import numpy as np

import longhaul as lh

OPS = 4
SLOW_S = 10.0


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument("--control", type=pathlib.Path, required=True)
    parser.add_argument("--steps", type=pathlib.Path, required=True)
    parser.add_argument("--mib", type=int, default=4, help="size of an op")
    parser.add_argument("--state-mib", type=int, default=0, help="size of the shared state; 0: none")
    parser.add_argument("--newcomer", action="store_true", help="begins with another state")
    parser.add_argument("--patience", type=float, default=300)
    args = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    comm = lh.join(run="why", peerd=args.socket, timeout=args.patience)
    tensors = [comm.empty(args.mib << 18, "float32") for _ in range(OPS)]
    for tensor in tensors:
        tensor[:] = 0
    state = None
    if args.state_mib:
        # A newcomer has to fetch all of it.
        state = lh.State({"weights": np.full(args.state_mib << 20, 0 if args.newcomer else 7, np.uint8)})

    def hold(name: str, most: float = float("inf")) -> None:
        end = time.monotonic() + most
        while (args.control / name).exists() and time.monotonic() < end:
            time.sleep(0.01)

    made = 0
    while True:
        hold("hold_vote")
        with comm.step(state, args.patience) if state else contextlib.nullcontext():
            if not state:
                comm.begin_step(args.patience)
            hold("hold_op")
            hold("slow", SLOW_S)
            works = [comm.all_reduce(tensor, tag=tag, async_op=True) for tag, tensor in enumerate(tensors)]
            for work in works:
                work.wait(timeout=args.patience)
        made += 1
        args.steps.write_text(str(made))


if __name__ == "__main__":
    main()
