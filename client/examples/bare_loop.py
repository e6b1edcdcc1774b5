"""The shortest training loop that survives faults: each step averages the gradients of all members.

    python bare_loop.py [--steps=100] [--members=2]

The members learn handwritten digits (scikit-learn). Start the program on as many hosts as you like, at any time. A
newcomer gets the weights of the others at its first step. If a member dies, the others go on with its last step.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

import longhaul as lh


def main() -> None:
    parser = argparse.ArgumentParser(description="Learns handwritten digits together with other hosts.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--members", type=int, default=None, help="begin with this many members; default: alone")
    options = parser.parse_args()

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(digits.target)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = lh.torch.State(model=model, optimizers=optimizer)  # what all members hold equal

    comm = lh.join("bare-loop", timeout=None, members=options.members)
    torch.manual_seed(comm.member_id)  # other images at each member
    while state.revision < options.steps:
        with comm.step(state) as step:  # newcomers come in here, and get the state
            chosen = torch.randint(len(images), (32,))
            loss = F.cross_entropy(model(images[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            lh.torch.average_gradients(model, comm)  # over all members that are alive
            optimizer.step()
    right = (model(images).argmax(1) == labels).float().mean()
    print(f"{state.revision} steps, {step.world_size} members, {right:.1%} right, state {state.compute_hash()}")
    comm.leave()


if __name__ == "__main__":
    main()
