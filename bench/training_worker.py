"""What the trainers of all systems in bench/training.py share: the model, the data, the pace, and what they report.

A trainer writes JSON lines to standard output. All times are those of the monotonic clock, which is one for all
processes of a machine.

| event | when |
| --- | --- |
| `ready` | the model and the text are loaded; the trainer has not joined yet |
| `sync` | the inner steps of a round are done, and the exchange with the other trainers begins |
| `outer` | an outer step is done. `steps`: inner steps of this trainer that count in it. `size`: trainers in it |
| `lost` | inner steps of this trainer will never count. `why`: `discarded`, or `newcomer`: made before it took part |
|  | both: `seconds`: the time that these steps took, without the steps of the optimizers |
| `end` | the last one. `loss`: of the weights after the last outer step, on text that no trainer learns from |

When the line `stop` comes on standard input, a thread evaluates the weights and ends the process. So no system can
delay the end of a run.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import pathlib
import sys
import threading
import time
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "client" / "examples" / "demo"))
import model

OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9


def outer_optimizer(parameters: Any) -> torch.optim.SGD:
    """The outer optimizer of DiLoCo (https://arxiv.org/abs/2311.08105)."""
    return torch.optim.SGD(parameters, lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)


def say(event: str, **facts: object) -> None:
    # One write, because lines of two threads must not mix.
    os.write(1, json.dumps({"event": event, "time": time.monotonic(), **facts}).encode() + b"\n")


def arguments(description: str | None) -> argparse.Namespace:
    """The arguments that the trainers of all systems take."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--address", required=True, help="where the system's coordinating program listens")
    parser.add_argument("--host", type=int, required=True, help="the number of this host")
    parser.add_argument("--life", type=int, required=True, help="how often this host has been started before")
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--sync-every", type=int, required=True)
    parser.add_argument("--step-ms", type=float, required=True)
    parser.add_argument("--batch", type=int, required=True)
    return parser.parse_args()


class Trainer:
    """The inner part of a trainer: AdamW steps, each of the same length in time."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        model.BATCH = args.batch
        self.step_s = args.step_ms / 1000
        # A host that comes back reads other passages than before, because it does not know which ones it has read.
        self.local = model.Local(args.host + 1000 * args.life, 10**6)
        self.model = self.local.model
        self.optimizer: Any = self.local.optimizer
        self._busy_s = 0.0  # in inner steps since the last `outer` or `lost`
        self._judge = copy.deepcopy(self.model)
        self._lock = threading.Lock()
        self._good, self._round = self.flat(), 0
        threading.Thread(target=self._stop, daemon=True).start()
        say("ready")

    def flat(self) -> torch.Tensor:
        return parameters_to_vector(self.model.parameters()).detach().clone()

    def inner_step(self, last: bool = False) -> None:
        """One AdamW step. last: the exchange with the others begins in the step of the optimizer."""
        begin = time.monotonic()
        loss = self.model.loss(*model.batch(self.local.text, self.local.passages))
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        time.sleep(max(0.0, begin + self.step_s - time.monotonic()))
        self._busy_s += time.monotonic() - begin
        if last:
            say("sync")
        self.optimizer.step()
        self.local.schedule.step()

    def outer_done(self, number: int, steps: int, size: int, flat: torch.Tensor | None = None) -> None:
        """Reports an outer step. flat: all parameters after it; None: those of the model."""
        say("outer", round=number, steps=steps, size=size, seconds=self._busy_s if steps else 0.0)
        self._busy_s = 0.0
        good = self.flat() if flat is None else flat.detach().clone()
        with self._lock:
            self._good, self._round = good, number

    def lost(self, steps: int, why: str) -> None:
        """Reports that the inner steps since the last outer step will never count."""
        say("lost", steps=steps, why=why, seconds=self._busy_s)
        self._busy_s = 0.0

    def _stop(self) -> None:
        # Not through sys.stdin: this thread would hold its lock, and a child that hivemind forks closes sys.stdin.
        heard = b""
        while b"stop\n" not in heard:
            piece = os.read(0, 64)
            if not piece:
                return
            heard += piece
        with self._lock:
            good, number = self._good, self._round
        vector_to_parameters(good, self._judge.parameters())
        model.BATCH = 16
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            losses = [self._judge.loss(*model.batch(self.local.judged_by, generator)).item() for _ in range(8)]
        say("end", loss=sum(losses) / len(losses), round=number)
        os._exit(0)
