"""A trainer of bench/training.py on hivemind: `hivemind.Optimizer` with local updates.

Each step updates the local weights. After `target_batch_size` samples of all peers together the weights are averaged.
hivemind has no outer optimizer with local updates. Settings: matchmaking_time=3 (its guide says 3 to 5 s for small
local runs), and otherwise all defaults.
"""

from __future__ import annotations

import logging
from typing import Any

import hivemind
import training_worker


class CountingOptimizer(hivemind.Optimizer):  # type: ignore[misc]
    """Counts the steps that are thrown away when this peer takes the state of another one. Changes nothing else."""

    trainer: training_worker.Trainer
    waiting = 0  #: local steps that are not part of any average yet
    caught_up = False
    newcomer = True

    def load_state_from_peers(self, **options: Any) -> None:
        self.trainer.lost(self.waiting, "newcomer" if self.newcomer else "discarded")
        self.waiting = 0
        self.caught_up = True
        super().load_state_from_peers(**options)


class Averages(logging.Handler):
    """Hears from hivemind's log how the rounds end, because its API does not tell."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.sizes: list[int] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith("Averaged parameters with "):
            self.sizes.append(int(text.split()[3]))


def main() -> None:
    args = training_worker.arguments(__doc__)
    trainer = training_worker.Trainer(args)
    averages = Averages()
    logging.getLogger("hivemind.optim.state_averager").addHandler(averages)
    dht = hivemind.DHT(initial_peers=[args.address], host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
    optimizer = CountingOptimizer(
        dht=dht,
        run_id="training",
        target_batch_size=args.hosts * args.sync_every * args.batch,
        batch_size_per_step=args.batch,
        optimizer=trainer.optimizer,
        use_local_updates=True,
        matchmaking_time=3.0,
        verbose=True,
    )
    trainer.optimizer, optimizer.trainer = optimizer, trainer
    while True:
        epoch = optimizer.local_epoch
        optimizer.waiting += 1
        trainer.inner_step()
        if optimizer.local_epoch != epoch and not optimizer.caught_up:
            training_worker.say("sync")  # the exchange runs in the background; the next step waits for its end
        optimizer.caught_up = False
        sizes, averages.sizes = averages.sizes, []
        # An average of one is no exchange. The steps wait for the next one.
        if sizes and max(sizes) > 1:
            optimizer.newcomer = False
            trainer.outer_done(optimizer.local_epoch, optimizer.waiting, max(sizes))
            optimizer.waiting = 0


if __name__ == "__main__":
    main()
