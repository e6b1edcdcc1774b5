"""A trainer of bench/training.py on torchft: `torchft.local_sgd.DiLoCo` over gloo.

Settings: those of torchft's own example for DiLoCo (synchronous quorum, the inner optimizer in the user's state), and
otherwise all defaults. One replica group for each host, with one rank. The pseudo-gradients travel in one bucket.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import training_worker
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft import Manager, ProcessGroupGloo
from torchft.local_sgd import DiLoCo


class CountingManager(Manager):  # type: ignore[misc]
    """Remembers whether the last round was committed. Changes nothing."""

    committed: bool | None = None

    def should_commit(self, *args: Any, **options: Any) -> bool:
        self.committed = super().should_commit(*args, **options)
        return self.committed


def main() -> None:
    args = training_worker.arguments(__doc__)
    logging.basicConfig(level=logging.INFO)
    trainer = training_worker.Trainer(args)
    healed = False

    def load(state: dict[str, Any]) -> None:
        nonlocal healed
        healed = True
        trainer.model.load_state_dict(state["model"])
        trainer.optimizer.load_state_dict(state["inner"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = CountingManager(
        pg=ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=lambda: {"model": trainer.model.state_dict(), "inner": trainer.optimizer.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=f"http://{args.address}",
        replica_id=f"host_{args.host}",
        hostname="127.0.0.1",
    )
    outer = training_worker.outer_optimizer(trainer.model.parameters())
    with DiLoCo(manager, [trainer.model], trainer.optimizer, outer, args.sync_every, use_bucketization=True):
        while True:
            for step in range(args.sync_every):
                trainer.inner_step(last=step == args.sync_every - 1)
            counted = args.sync_every
            if healed or not manager.committed:
                trainer.lost(args.sync_every, "newcomer" if healed else "discarded")
                counted = 0
            if manager.committed:
                trainer.outer_done(manager.current_step(), counted, manager.num_participants())
            healed = False


if __name__ == "__main__":
    torch.manual_seed(1)
    main()
