"""Is it worth averaging gradients in FSDP2's all-reduce hook, once per FSDP unit, rather than once after backward?

Two hosts with two trainers each train the GPT of the demo, all on this machine. Three ways take turns:
  none    no average across hosts
  after   HSDP.average_gradients() after backward: one op for all units, and one agree()
  hook    FSDPModule.set_all_reduce_hook(): one op per FSDP unit, inside backward; no agree(), so no redo
Prints the median of the seconds that forward, backward and average take at shard 0 of host 0.

    PYTHONPATH=client/python .venv/bin/python bench/fsdp_hook.py
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

from longhaul.testing import LocalCluster

EXAMPLES = pathlib.Path(__file__).parents[1] / "client" / "examples"
HOSTS, TRAINERS = 2, 2
WAYS = ("none", "after", "hook")


def trainer(socket: str, rendezvous: str, rank: int, rounds: int, steps: int, answers: Any) -> None:
    os.environ["LONGHAUL_SOCKET"] = socket
    sys.path[:0] = [str(EXAMPLES / "demo"), str(EXAMPLES / "hsdp")]
    import torch
    import torch.distributed as dist
    import train
    from model import batch, read_text
    from torch.distributed.fsdp import FSDPModule

    import longhaul as lh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=TRAINERS)
    text, _ = read_text()
    model = train.sharded_model()
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    passages = torch.Generator().manual_seed(rank)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    with lh.torch.HSDP("bench", hosts=HOSTS) as hsdp:

        def in_hook(gradient: torch.Tensor) -> None:
            hsdp.comm.all_reduce(gradient, "avg")

        for _ in range(rounds):
            for way in WAYS:
                for unit in units:
                    unit.set_all_reduce_hook(in_hook if way == "hook" else lambda gradient: None)
                for _ in range(steps):
                    hsdp.comm.barrier()
                    model.zero_grad()
                    begin = time.monotonic()
                    model.loss(*batch(text, passages)).backward()  # type: ignore[no-untyped-call]
                    if way == "after":
                        hsdp.average_gradients(model)
                    seconds[way].append(time.monotonic() - begin)
    if rank == 0:
        answers.put((len(units), seconds))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="turns of each way (default %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="steps of a turn (default %(default)s)")
    args = parser.parse_args()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.fsdp"])
    answers = context.Queue()
    with LocalCluster(peers=HOSTS) as cluster, tempfile.TemporaryDirectory() as directory:
        for host in range(HOSTS):
            for rank in range(TRAINERS):
                arguments = (cluster.socket(host), f"file://{directory}/{host}", rank, args.rounds, args.steps, answers)
                context.Process(target=trainer, args=arguments, daemon=True).start()
        for _ in range(HOSTS):
            units, seconds = answers.get(timeout=3600)
    for way in WAYS:
        print(
            f"{way:6} {1000 * statistics.median(seconds[way]):7.1f} ms  ({len(seconds[way])} steps, {units} FSDP units)"
        )


if __name__ == "__main__":
    main()
