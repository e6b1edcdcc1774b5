#!/usr/bin/env python3
"""Trains the demo's GPT under DiLoCo with each codec, and compares the losses at equal steps.

    tools/build && .venv/bin/python bench/codec_loss.py
    .venv/bin/python bench/codec_loss.py --rounds=20 --sync-every=30 --seeds=1,2,3 --methods=fp32,int8

Two members on one machine train on the sources of Python's standard library. All methods begin with the same parameters
and see the same passages, given by the seed. `fp32`: pseudo-gradients as they are. `int8`, `int4`: quantized. `int4+ef`:
with error feedback. `topk+ef`: 64 of 4096 elements, with error feedback and SGD without momentum (lh.torch.TopK). The
loss is the mean over passages that nobody trains with. Target: int8 and int4+ef within 1 % of fp32's loss or below it,
topk+ef within 3 %, as a mean over the seeds.

Prints one line of JSON for each run, and one for each method. The exit code is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
from typing import Any

import torch
from torch.nn import functional as F

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "client" / "examples" / "demo"))

from model import GPT, batch, read_text  # noqa: E402

import longhaul as lh  # noqa: E402
from longhaul.testing import LocalCluster  # noqa: E402

METHODS = ("fp32", "int8", "int4", "int4+ef", "topk+ef")
#: How far the loss may be above that of fp32.
TARGETS = {"int8": 0.01, "int4+ef": 0.01, "topk+ef": 0.03}
MEMBERS = 2
JUDGED_BATCHES = 40


def options_of(method: str) -> dict[str, Any]:
    if method == "topk+ef":
        return {"compress": lh.torch.TopK()}
    if method == "int4+ef":
        return {"quantize": lh.torch.ErrorFeedback("int4")}
    return {"quantize": None if method == "fp32" else method}


def worker(peerd: str, run: str, method: str, seed: int, rounds: int, sync_every: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    learn, judge = read_text()
    model = GPT()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    comm = lh.join(run, peerd=peerd, members=MEMBERS, timeout=120)
    passages = torch.Generator().manual_seed(1000 * seed + comm.rank)
    with lh.torch.DiLoCo(comm, model, inner, sync_every=sync_every, **options_of(method)) as diloco:
        for _ in range(rounds * sync_every):
            inputs, targets = batch(learn, passages)
            inner.zero_grad()
            F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
            inner.step()
        state = diloco.state.compute_hash()
    losses = []
    text = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _ in range(JUDGED_BATCHES):
            inputs, targets = batch(judge, text)
            losses.append(F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item())
    comm.leave()
    print(json.dumps({"loss": statistics.mean(losses), "state": str(state)}), flush=True)


def run(cluster: LocalCluster, method: str, seed: int, args: argparse.Namespace) -> float:
    """Trains once. Returns the loss."""
    command = [sys.executable, __file__, "--worker"]
    name = f"codec-loss-{method.replace('+', '-')}-{seed}"
    members = [
        subprocess.Popen(
            [*command, cluster.socket(i), name, method, str(seed), str(args.rounds), str(args.sync_every)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(MEMBERS)
    ]
    ends = []
    for member in members:
        out, _ = member.communicate()
        if member.returncode != 0:
            raise SystemExit(f"codec_loss: a member of {name} failed ({member.returncode})")
        ends.append(json.loads(out.splitlines()[-1]))
    if len({end["state"] for end in ends}) != 1:
        raise SystemExit(f"codec_loss: the members of {name} end with different states")
    loss: float = ends[0]["loss"]
    line = {"bench": "codec_loss", "method": method, "seed": seed, "loss": round(loss, 4)}
    print(json.dumps({**line, "rounds": args.rounds, "sync_every": args.sync_every}), flush=True)
    return loss


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="outer steps (default 20)")
    parser.add_argument("--sync-every", type=int, default=30, help="steps of a member in a round (default 30)")
    parser.add_argument(
        "--seeds", type=lambda text: [int(each) for each in text.split(",")], default=[1, 2, 3], help="default 1,2,3"
    )
    parser.add_argument("--methods", type=lambda text: text.split(","), default=list(METHODS), help=",".join(METHODS))
    args = parser.parse_args()
    if unknown := set(args.methods) - set(METHODS):
        parser.error(f"no method {' '.join(sorted(unknown))}: there are {' '.join(METHODS)}")
    losses: dict[str, list[float]] = {}
    with LocalCluster(peers=MEMBERS) as cluster:
        for seed in args.seeds:
            for method in dict.fromkeys(["fp32", *args.methods]):
                losses.setdefault(method, []).append(run(cluster, method, seed, args))
    met = True
    for method, each in losses.items():
        above = statistics.mean(loss / plain - 1 for loss, plain in zip(each, losses["fp32"]))
        line = {"bench": "codec_loss", "method": method, "loss": round(statistics.mean(each), 4)}
        line["above_fp32"] = round(above, 4)
        if method in TARGETS:
            line |= {"target": TARGETS[method], "met": above <= TARGETS[method]}
            met &= above <= TARGETS[method]
        print(json.dumps(line), flush=True)
    return 0 if met else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], sys.argv[3], sys.argv[4], *map(int, sys.argv[5:8]))
        sys.exit(0)
    sys.exit(main())
