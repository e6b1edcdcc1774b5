"""A trainer of bench/training.py on Longhaul: DiLoCo, with an all-reduce for each round.

Settings: all defaults. The inner optimizer stays with its host: a newcomer begins with a new one.
"""

from __future__ import annotations

import torch
import training_worker
from torch.nn.utils import vector_to_parameters

import longhaul as lh


def main() -> None:
    args = training_worker.arguments(__doc__)
    trainer = training_worker.Trainer(args)
    start = trainer.flat()
    weights = torch.nn.Parameter(lh.torch.empty(len(start), peerd=args.address).copy_(start))
    momentum = lh.torch.empty(len(start), peerd=args.address).zero_()
    weights.grad = lh.torch.empty(len(start), peerd=args.address)
    outer = training_worker.outer_optimizer([weights])
    outer.state[weights]["momentum_buffer"] = momentum
    state = lh.State({"weights": weights, "momentum": momentum})

    # The number of members has a meaning at the first start alone: then all hosts begin together.
    comm = lh.join("training", peerd=args.address, timeout=None, members=args.hosts, state=state)
    while True:
        with comm.step(state):
            vector_to_parameters(weights.detach().clone(), trainer.model.parameters())
            for _ in range(args.sync_every):
                trainer.inner_step()
            torch.sub(weights.detach(), trainer.flat(), out=weights.grad)
            work = comm.all_reduce(weights.grad, "avg", async_op=True)
            training_worker.say("sync")
            info = work.wait()
            outer.step()
        counts = comm.member_id in info.members
        if not counts:
            trainer.lost(args.sync_every, "discarded")
        trainer.outer_done(state.revision, args.sync_every if counts else 0, info.world_size, weights)


if __name__ == "__main__":
    main()
