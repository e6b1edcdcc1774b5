"""One trainer of the demo. It trains by DiLoCo together with all members of the group.

Each round has three parts:
1. A step boundary. Newcomers join here, and get the parameters and the momentum of the others.
2. Local AdamW steps.
3. An all-reduce. It averages how far each member's parameters have moved (the pseudo-gradient). Then all members make
   the same outer step.

The trainer reports what happens as JSON lines on stdout. $LONGHAUL_SOCKET is the path of the socket of its peerd.
After SIGTERM it finishes the round and leaves, so that no all-reduce of the others is redone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import sys
import threading
import time

import model
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import longhaul as lh


class Outer:
    """What all members keep equal: the parameters, and the momentum of the outer optimizer."""

    def __init__(self, start: torch.Tensor) -> None:
        count = start.numel()
        # In memory shared with peerd, so that nothing is copied.
        self.parameters = torch.nn.Parameter(lh.torch.empty(count).copy_(start))
        self.momentum = lh.torch.empty(count).zero_()
        self.gradient = lh.torch.empty(count)
        self.optimizer = torch.optim.SGD([self.parameters], lr=0.7, momentum=0.9, nesterov=True)
        self.optimizer.state[self.parameters]["momentum_buffer"] = self.momentum
        # The revision of the state is the number of finished rounds.
        self.state = lh.State({"parameters": self.parameters, "momentum": self.momentum})

    def step(self) -> None:
        self.parameters.grad = self.gradient
        self.optimizer.step()

    def digest(self) -> str:
        both = torch.cat([self.parameters.detach(), self.momentum])
        return hashlib.sha256(both.numpy().tobytes()).hexdigest()


def say(event: str, **facts: object) -> None:
    print(json.dumps({"event": event, "time": time.monotonic(), **facts}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", default="demo")
    parser.add_argument("--seed", type=int, default=0, help="chooses the passages that this trainer learns from")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--local-steps", type=int, default=20)
    parser.add_argument(
        "--start-with", type=int, default=0, help="wait for this many members before the first round; 0: do not wait"
    )
    parser.add_argument("--alone", action="store_true", help="train without a group: the same number of local steps")
    args = parser.parse_args()
    # Without a handler, SIGTERM would do nothing to process 1 of a container.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    torch.set_num_threads(1)
    local = model.Local(args.seed, args.rounds * args.local_steps)
    if args.alone:
        first = local.judge()
        for done in range(1, args.rounds + 1):
            local.train(args.local_steps)
            say("alone", round=done, first=first, loss=local.judge() if done == args.rounds else None)
        return

    outer = Outer(parameters_to_vector(local.model.parameters()).detach())
    comm = lh.join(args.run, timeout=None, members=args.start_with or None, state=outer.state)
    leaving = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: leaving.set())
    say("joined", member=comm.member_id, epoch=comm.epoch, loss=local.judge())
    while outer.state.revision < args.rounds and not leaving.is_set():
        with comm.step(outer.state) as step:  # all members have equal parameters and momentum here
            if step.sync and step.sync.bytes:
                say("received", bytes=step.sync.bytes, seconds=step.sync.seconds)
            one_round(comm, local, outer, outer.state.revision + 1, args.local_steps)
    say("end", digest=outer.digest(), loss=local.judge())
    comm.leave()


def one_round(comm: lh.Comm, local: model.Local, outer: Outer, number: int, steps: int) -> None:
    vector_to_parameters(outer.parameters.detach().clone(), local.model.parameters())
    local.train(steps)
    torch.sub(outer.parameters.detach(), parameters_to_vector(local.model.parameters()).detach(), out=outer.gradient)
    work = comm.all_reduce(outer.gradient, "avg", async_op=True)
    say("started", round=number)
    info = work.wait()
    say("finished", round=number)
    outer.step()
    vector_to_parameters(outer.parameters.detach().clone(), local.model.parameters())
    say(
        "round",
        round=number,
        loss=local.judge() if comm.rank == 0 else None,  # one member reports the loss
        size=info.world_size,
        epoch=info.epoch,
        retries=info.retries,
        bytes=outer.gradient.nbytes,
        seconds=info.seconds - info.seconds_wait,
    )


if __name__ == "__main__":
    main()
