"""A small GPT learns the sources of Python's standard library under DiLoCo.

    python gpt_diloco.py [--method=diloco|sparse|async|streaming] [--rounds=20] [--sync-every=30] [--members=3]

Each member makes `--sync-every` steps of its own, then the members exchange what they have learned. With "sparse" they
exchange less than a hundredth of the bytes. With "async" and "streaming" nobody waits for the exchange. Start it on as
many hosts as you like, at any time.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

import torch
from torch.nn import functional as F

import longhaul as lh

sys.path.insert(0, str(pathlib.Path(__file__).parent / "demo"))
from model import GPT, batch, read_text


def method_of(
    name: str, comm: lh.Comm, model: GPT, inner: torch.optim.Optimizer, sync_every: int
) -> lh.torch.DiLoCo | lh.torch.StreamingDiLoCo:
    if name == "diloco":
        return lh.torch.DiLoCo(comm, model, inner, sync_every=sync_every)
    if name == "sparse":
        return lh.torch.DiLoCo(comm, model, inner, sync_every=sync_every, compress=lh.torch.TopK())
    if name == "async":
        return lh.torch.AsyncDiLoCo(comm, model, inner, sync_every=sync_every)
    rest = torch.nn.ModuleList([model.characters, model.positions, model.norm, model.head])
    fragments = [*model.blocks, rest]
    sync_every -= sync_every % len(fragments)
    turn = sync_every // len(fragments)
    return lh.torch.StreamingDiLoCo(
        comm, model, inner, sync_every=sync_every, model_fragments=fragments, fragment_sync_delay=turn // 2
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small GPT together with other hosts.")
    parser.add_argument("--method", choices=["diloco", "sparse", "async", "streaming"], default="diloco")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--sync-every", type=int, default=32, help="steps of a member between two exchanges")
    parser.add_argument("--members", type=int, default=None, help="begin with this many members; default: alone")
    options = parser.parse_args()

    learn, judge = read_text()
    model = GPT()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    comm = lh.join(f"gpt-{options.method}", timeout=None, members=options.members)
    passages = torch.Generator().manual_seed(comm.member_id)  # other passages at each member
    with method_of(options.method, comm, model, inner, options.sync_every) as rounds:
        seen = -1
        while rounds.round < options.rounds:
            inputs, targets = batch(learn, passages)
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            inner.zero_grad()
            loss.backward()
            inner.step()  # the last step of a round exchanges
            if rounds.round != seen:
                seen = rounds.round
                print(f"round {seen}  loss {loss:.3f}  members {comm.world_size}", flush=True)
    inputs, targets = batch(judge, torch.Generator().manual_seed(1))
    with torch.no_grad():
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    print(
        f"end: loss {loss:.3f} on other text, waited {rounds.seconds_blocked:.1f} s, state {rounds.state.compute_hash()}"
    )
    comm.leave()


if __name__ == "__main__":
    main()
