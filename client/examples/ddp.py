"""Training as with DistributedDataParallel, on hosts that come and go.

    python ddp.py [--epochs=2] [--members=2]

The exchange of the gradients overlaps with backward. All that a run consists of is in the shared state: the model with
its BatchNorm, AdamW, the schedule and the position in the data. A member that comes late or returns continues where
the others are. The sampler divides the rest of the data anew when the members change.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

import longhaul as lh


def model_of_digits() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(16 * 64, 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Learns handwritten digits together with other hosts.")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16, help="images of each member in a step")
    parser.add_argument("--members", type=int, default=None, help="begin with this many members; default: alone")
    options = parser.parse_args()

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    model = model_of_digits()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=50, gamma=0.5)
    sampler = lh.torch.ElasticSampler(images, seed=0, batch_size=options.batch)
    # The statistics of BatchNorm come from each member's own images, so each member keeps its own.
    state = lh.torch.State(
        model=model, optimizers=optimizer, schedulers=schedule, objects={"sampler": sampler}, buffers="member"
    )

    def train(comm: lh.Comm) -> None:
        with lh.torch.GradientAverager(model, comm) as averager:
            while sampler.epoch < options.epochs:
                with comm.step(state) as step:  # newcomers come in here, and get the state
                    chosen = sampler.take(step)  # this member's part of the next images
                    loss = F.cross_entropy(model(images[chosen]), labels[chosen])
                    optimizer.zero_grad()
                    loss.backward()  # exchanges gradients as they come
                    averager.finish()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    schedule.step()
        print(f"{state.revision} steps, {step.world_size} members, loss {loss:.3f}, state {state.compute_hash()}")

    lh.run(train, "ddp", state=state, members=options.members)


if __name__ == "__main__":
    main()
