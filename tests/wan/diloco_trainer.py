"""The trainer of test_wan_diloco.py: a class of the DiLoCo family, with inner steps that sleep.

Writes to --result, as JSON, how long each round after the first one took, and for how long the trainer waited in it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import time

import torch

import longhaul as lh
from longhaul.torch import AsyncDiLoCo, DiLoCo, StreamingDiLoCo

FRAGMENTS = 2
TURN = 30  # inner steps for each fragment
SYNC_EVERY = FRAGMENTS * TURN
DELAY = TURN - 1


def make(kind: str, comm: lh.Comm, model: torch.nn.Sequential) -> DiLoCo | StreamingDiLoCo:
    if kind == "StreamingDiLoCo":
        return StreamingDiLoCo(
            comm,
            model,
            None,
            sync_every=SYNC_EVERY,
            model_fragments=list(model),
            fragment_sync_delay=DELAY,
            fragment_update_alpha=0.5,
        )
    if kind == "AsyncDiLoCo":
        return AsyncDiLoCo(comm, model, None, sync_every=SYNC_EVERY)
    return DiLoCo(comm, model, None, sync_every=SYNC_EVERY)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument("--kind", required=True)
    parser.add_argument("--result", type=pathlib.Path, required=True)
    parser.add_argument("--side", type=int, required=True, help="each of the fragments is a matrix with so many rows")
    parser.add_argument("--step-s", type=float, required=True, help="seconds of an inner step")
    parser.add_argument("--rounds", type=int, required=True)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(args.side, args.side, bias=False) for _ in range(FRAGMENTS)])
    with lh.join(args.kind, peerd=args.socket, members=2, timeout=300) as comm, make(args.kind, comm, model) as diloco:
        ends: list[tuple[float, float]] = []  # of each round: the time, and for how long it has waited until then
        while diloco.round < args.rounds + 1:
            time.sleep(args.step_s)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.999)
            diloco.step()
            if diloco.round > len(ends):
                ends.append((time.monotonic(), diloco.seconds_blocked))
        assert diloco.info is not None and diloco.info.world_size == 2 and diloco.sync is not None
        rounds = [(end[0] - begin[0], end[1] - begin[1]) for begin, end in itertools.pairwise(ends)]
        found = {"rounds": rounds, "hash": diloco.sync.hash}
    args.result.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
