"""One trainer of the demo: DiLoCo with whoever is in the group.

Every round: a step boundary, where newcomers come in; some local AdamW steps; then the members
average how far each has moved (the pseudo-gradient), and all make the same outer step.

Says what happens as JSON lines on stdout. LONGHAUL_SOCKET names the peerd of its host.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time

import model
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import longhaul as lh

# Tags name the ops that are in flight together; here one follows the other.
ROLL_CALL, GRADIENT, STATE = 0, 1, 2
NOBODY = 2**62


class Outer:
    """What all members have in common: parameters and the momentum of the outer optimizer.

    Both lie in one tensor, so that they are handed on and hashed as one.
    """

    def __init__(self, start: torch.Tensor) -> None:
        count = start.numel()
        self.state = lh.torch.empty(2 * count)
        self.state[:count] = start
        self.state[count:] = 0
        self.parameters = torch.nn.Parameter(self.state[:count])
        # Shared with peerd: it is sent from where it is.
        self.gradient = lh.torch.empty(count)
        self.optimizer = torch.optim.SGD([self.parameters], lr=0.7, momentum=0.9, nesterov=True)
        self.optimizer.state[self.parameters]["momentum_buffer"] = self.state[count:]
        # One element more tells whether anybody filled it.
        self.copy = lh.torch.empty(2 * count + 1, dtype=torch.int32)

    def step(self) -> None:
        self.parameters.grad = self.gradient
        self.optimizer.step()

    def digest(self) -> str:
        return hashlib.sha256(self.state.numpy().tobytes()).hexdigest()


def say(event: str, **facts: object) -> None:
    print(json.dumps({"event": event, "time": time.monotonic(), **facts}), flush=True)


def roll_call(comm: lh.Comm, ready: bool, done: int) -> tuple[int, bool, int, int]:
    """World size, whether all members have the state, the id of one that has, and the round.

    By a collective: what a member knows about the world may be older at one than at another, but the
    result of an op is the same everywhere. So all members take the same decision.
    """
    mine = torch.tensor([int(ready), comm.member_id if ready else NOBODY, -done])
    info = comm.all_reduce(mine, "min", tag=ROLL_CALL)
    everybody, holder, round_ = mine.tolist()
    return info.world_size, bool(everybody), holder, -round_


def share_state(comm: lh.Comm, outer: Outer, holder: int, ready: bool) -> bool:
    """Hands the state to those that lack it, as a sum in which all but one are zero. Whether it came.

    It is summed as integers, which keeps every bit. The holder may die meanwhile: then the survivors
    see a sum of zeros and try again with another one.
    """
    if comm.member_id == holder:
        outer.copy[:-1] = outer.state.view(torch.int32)
        outer.copy[-1] = 1
    else:
        outer.copy.zero_()
    info = comm.all_reduce(outer.copy, "sum", tag=STATE)
    if outer.copy[-1] != 1:
        return False
    received = outer.copy[:-1].view(torch.float32)
    if not ready:
        outer.state.copy_(received)
        say("received", bytes=outer.state.nbytes, seconds=info.seconds - info.seconds_wait)
    elif not torch.equal(outer.state.view(torch.int32), outer.copy[:-1]):
        raise SystemExit("the members' parameters differ")
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", default="demo")
    parser.add_argument("--seed", type=int, default=0, help="which passages of the text it learns from")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--local-steps", type=int, default=20)
    parser.add_argument("--start-with", type=int, default=3, help="members that the first round waits for")
    parser.add_argument("--newcomer", action="store_true", help="gets the parameters from the others")
    parser.add_argument("--alone", action="store_true", help="only local steps, as many in all")
    args = parser.parse_args()
    torch.set_num_threads(1)
    local = model.Local(args.seed, args.rounds * args.local_steps)
    if args.alone:
        first = local.judge()
        for done in range(1, args.rounds + 1):
            local.train(args.local_steps)
            say("alone", round=done, first=first, loss=local.judge() if done == args.rounds else None)
        return

    comm = lh.join(args.run, timeout=None)
    outer = Outer(parameters_to_vector(local.model.parameters()).detach())
    ready = not args.newcomer
    done = 0
    say("joined", member=comm.member_id, epoch=comm.epoch, loss=local.judge())
    while True:
        comm.begin_step()
        size, everybody, holder, done = roll_call(comm, ready, done)
        if holder == NOBODY:
            raise SystemExit("nobody here has the parameters; start this trainer without --newcomer")
        if not everybody:
            ready |= share_state(comm, outer, holder, ready)
            continue
        if done == args.rounds:
            break
        if done == 0 and size < args.start_with:
            time.sleep(0.05)  # the boundary waits for members, not for those that have not come yet
            continue
        vector_to_parameters(outer.parameters.detach().clone(), local.model.parameters())
        local.train(args.local_steps)
        torch.sub(
            outer.parameters.detach(), parameters_to_vector(local.model.parameters()).detach(), out=outer.gradient
        )
        work = comm.all_reduce(outer.gradient, "avg", tag=GRADIENT, async_op=True)
        say("started", round=done + 1)
        info = work.wait()
        say("finished", round=done + 1)
        outer.step()
        done += 1
        loss = None
        if comm.rank == 0:  # one of them tells
            vector_to_parameters(outer.parameters.detach().clone(), local.model.parameters())
            loss = local.judge()
        say(
            "round",
            round=done,
            loss=loss,
            size=info.world_size,
            epoch=info.epoch,
            retries=info.retries,
            bytes=outer.gradient.nbytes,
            seconds=info.seconds - info.seconds_wait,
        )
    vector_to_parameters(outer.parameters.detach().clone(), local.model.parameters())
    say("end", digest=outer.digest(), loss=local.judge(), size=size)
    comm.leave()


if __name__ == "__main__":
    main()
