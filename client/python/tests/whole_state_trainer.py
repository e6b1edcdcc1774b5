"""A trainer with all that a training state may hold. Run as a program by test_torch_state.py, one process per member."""

from __future__ import annotations

import json
import pathlib
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy
import torch

import longhaul as lh

STEPS_TOGETHER = 3
STEPS_IN_ALL = 8
TIMEOUT = 200


class Model(torch.nn.Module):
    """Tied weights, BatchNorm, dropout, and a layer in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.drop = torch.nn.Dropout(0.3)
        self.small = torch.nn.Linear(6, 6, dtype=torch.bfloat16)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.norm(self.embed(tokens)))
        logits: torch.Tensor = self.head(hidden + self.small(hidden.bfloat16()).float())
        return logits


class Loader:
    """Batches of shuffled tokens, from a position that can be saved."""

    def __init__(self) -> None:
        self.epoch = 0
        self.position = 0

    def batch(self) -> torch.Tensor:
        order = torch.randperm(32, generator=torch.Generator().manual_seed(self.epoch))
        chosen = order[self.position : self.position + 8]
        self.position += 8
        if self.position == 32:
            self.epoch, self.position = self.epoch + 1, 0
        return chosen % 11

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.epoch, self.position = values["epoch"], values["position"]


class Trainer:
    """seed: of the first weights and of the generators; each member brings its own."""

    def __init__(self, seed: int, revision: int) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
        self.model = Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=100)
        self.loader = Loader()
        self.state = lh.torch.State(
            self.model, self.optimizer, self.scheduler, {"loader": self.loader}, rng="shared", revision=revision
        )

    def train(self) -> None:
        tokens = self.loader.batch()
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.model(tokens), tokens).backward()
        self.optimizer.step()
        self.scheduler.step()

    def end(self, digests: list[str]) -> None:
        """The whole state, and the next random number, which no tensor shows."""
        digests.append(f"{self.state.compute_hash()} {torch.rand(1).item()!r} {self.optimizer.param_groups[0]['lr']!r}")


def started(steps_before: int) -> pathlib.Path:
    """The file that says that the founder has done its steps alone."""
    return pathlib.Path(sys.argv[2], f"started-{steps_before}")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def uninterrupted(steps_before: int, digests: list[str]) -> None:
    trainer = Trainer(seed=1, revision=1)
    for _ in range(STEPS_IN_ALL):
        trainer.train()
    trainer.end(digests)


def founder(steps_before: int, digests: list[str]) -> None:
    """Trains alone, then together with the joiner, and leaves."""
    trainer = Trainer(seed=1, revision=1)
    comm = lh.join(f"whole-{steps_before}")
    comm.begin_step(TIMEOUT)  # the boundary of its join
    for _ in range(steps_before):
        with comm.step(trainer.state, TIMEOUT):
            trainer.train()
    started(steps_before).touch()  # an earlier joiner would take part in one of these steps
    wait_until(lambda: comm.pending > 0)
    for _ in range(STEPS_TOGETHER):
        with comm.step(trainer.state, TIMEOUT) as step:
            assert step.world_size == 2
            trainer.train()
    comm.leave()


def joiner(steps_before: int, digests: list[str]) -> None:
    trainer = Trainer(seed=2, revision=0)
    trainer.train()  # what it brings is of no use to the others
    wait_until(started(steps_before).exists)
    comm = lh.join(f"whole-{steps_before}", timeout=TIMEOUT, state=trainer.state)
    while trainer.state.revision < 1 + STEPS_IN_ALL:
        with comm.step(trainer.state, TIMEOUT):
            trainer.train()
    trainer.end(digests)
    comm.leave()


if __name__ == "__main__":
    torch.set_num_threads(1)
    found: list[str] = []
    for before in (0, 2):
        {"uninterrupted": uninterrupted, "founder": founder, "joiner": joiner}[sys.argv[1]](before, found)
    print(json.dumps(found))
