"""Is it worth averaging gradients in FSDP2's all-reduce hook, once per FSDP unit, rather than once after backward?

Two hosts with two trainers each train a stack of linear layers, all on this machine. Each layer is an FSDP unit with 4
MiB of parameters. Three ways take turns, step by step:
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
import statistics
import tempfile
import time
from typing import Any

from longhaul.testing import LocalCluster

HOSTS, TRAINERS = 2, 2
WARM_UP = 5  # steps that do not count
WAYS = ("none", "after", "hook")


def trainer(socket: str, rendezvous: str, rank: int, steps: int, units: int, answers: Any) -> None:
    os.environ["LONGHAUL_SOCKET"] = socket
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    import longhaul as lh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=TRAINERS)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(units)))
    mesh = init_device_mesh("cpu", (TRAINERS,))
    for each in (*model, model):
        fully_shard(each, mesh=mesh)
    x = torch.randn(8, 1024)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    with lh.torch.HSDP("bench", hosts=HOSTS) as hsdp:

        def in_hook(gradient: torch.Tensor) -> None:
            hsdp.comm.all_reduce(gradient, "avg")

        for step in range(-WARM_UP, steps):
            for way in WAYS:
                for each in model:
                    assert isinstance(each, FSDPModule)
                    each.set_all_reduce_hook(in_hook if way == "hook" else lambda gradient: None)
                model.zero_grad()
                hsdp.comm.barrier()
                begin = time.monotonic()
                model(x).square().mean().backward()
                if way == "after":
                    hsdp.average_gradients(model)
                if step >= 0:
                    seconds[way].append(time.monotonic() - begin)
    if rank == 0:
        answers.put(seconds)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps of each way (default %(default)s)")
    parser.add_argument("--units", type=int, default=8, help="layers (default %(default)s)")
    args = parser.parse_args()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.fsdp"])
    answers = context.Queue()
    with LocalCluster(peers=HOSTS) as cluster, tempfile.TemporaryDirectory() as directory:
        for host in range(HOSTS):
            for rank in range(TRAINERS):
                arguments = (cluster.socket(host), f"file://{directory}/{host}", rank, args.steps, args.units, answers)
                context.Process(target=trainer, args=arguments, daemon=True).start()
        for _ in range(HOSTS):
            seconds = answers.get(timeout=3600)
    for way in WAYS:
        print(
            f"{way:6} {1000 * statistics.median(seconds[way]):7.1f} ms  ({len(seconds[way])} steps, {args.units} FSDP units)"
        )


if __name__ == "__main__":
    main()
