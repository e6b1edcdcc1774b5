"""Trainings in which one rank is killed. test_torch_dist.py reads what the others say.

python torch_dist_faults.py DIRECTORY SOCKET,SOCKET,... SCENARIO:SEED...
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch_dist_ranks as ranks
from torch import nn

import longhaul as lh
import longhaul.torch  # registers the backend


class Victim:
    """One rank of the seed's choice, which dies at a moment of its choice: call() counts, and one call is the last."""

    def __init__(self, seed: int, size: int, least: int, calls: int, note: pathlib.Path) -> None:
        chosen = random.Random(seed)
        self.rank = chosen.randrange(size)
        self._left = chosen.randrange(least, calls)
        self._note = note

    def call(self) -> None:
        if dist.get_rank() != self.rank:
            return
        if self._left == 0:
            self._note.write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1

    def seconds(self) -> float:
        """Since its death."""
        return time.monotonic() - float(self._note.read_text())


def watched(model: nn.Module, victim: Victim) -> nn.Module:
    """The victim may die before each layer's forward, and when each gradient is there."""
    for layer in model.children():
        layer.register_forward_pre_hook(lambda *_: victim.call())
    for parameter in model.parameters():
        parameter.register_hook(lambda _: victim.call())
    return model


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4))


def step(model: nn.Module, number: int) -> None:
    torch.manual_seed(100 * number + dist.get_rank())
    model.zero_grad()
    model(torch.randn(8, 16)).square().mean().backward()


def abort(group: Any, victim: Victim) -> Any:
    """DDP with on_fault="abort": the error of each survivor, and how long after the death it came."""
    model = nn.parallel.DistributedDataParallel(watched(net(), victim), bucket_cap_mb=0.002)
    try:
        for number in range(4):
            step(model, number)
        dist.barrier()  # the death came when all gradients were averaged
    except Exception as problem:
        late = victim.seconds()
        again = None
        try:
            dist.all_reduce(torch.ones(1))
        except Exception as second:
            again = str(second)
        return {"kind": type(problem).__name__, "text": str(problem), "seconds": late, "again": again}
    return "no error"


def retry(group: Any, victim: Victim) -> Any:
    """DDP with on_fault="retry" and the hook: gradients are means over those that are left."""
    numbers = nn.Parameter(torch.zeros(5))

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.numbers = numbers

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            victim.call()
            return self.numbers * x

    model = nn.parallel.DistributedDataParallel(Product(), broadcast_buffers=False)
    model.register_comm_hook(None, lh.torch.ddp_average_hook)
    numbers.register_hook(lambda _: victim.call())
    wrong: list[Any] = []
    sizes: list[int] = []
    while sizes.count(2) < 10:
        model.zero_grad()
        model(torch.full((5,), 2.0 ** (3 * dist.get_rank()))).sum().backward()
        members = group.info().members
        mean = sum(2.0 ** (3 * group.member_ids.index(member)) for member in members) / len(members)
        sizes.append(len(members))
        assert numbers.grad is not None
        if not torch.equal(numbers.grad, torch.full((5,), mean)):
            wrong.append([numbers.grad.tolist(), mean])
    dist.barrier()
    return {"wrong": wrong, "sizes": sizes, "size": dist.get_world_size()}


def defer(group: Any, victim: Victim) -> Any:
    """FSDP2 with errors="defer", replicated over all ranks: check() raises, and the module goes on."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    model = net()
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    watched(model, victim)
    replicas: Any = mesh.get_group("replicate")
    found = []
    for number in range(6):
        step(model, number)  # raises nothing
        try:
            replicas.check()
            found.append("")
        except dist.DistBackendError as problem:
            found.append(str(problem))
    return found


def outside(group: Any, victim: Victim) -> Any:
    """A death outside a subgroup: all ops of the subgroup go on."""
    left = [rank for rank in range(dist.get_world_size()) if rank != victim.rank]
    part = dist.new_group(left)
    if dist.get_rank() == victim.rank:
        dist.barrier()
        for _ in range(100):
            victim.call()
    dist.barrier()
    dead = False
    done = 0
    while done < 200 or not dead:
        values = torch.full((1000,), 1.0)
        dist.all_reduce(values, group=part)
        assert values[0] == len(left), values[0]
        dead = dead or len(group._core.joined.comm.members) == len(left)
        done += 1
        if done < 200:
            continue
        # Both ranks leave the loop at the same op.
        seen = torch.tensor([float(dead)])
        dist.all_reduce(seen, dist.ReduceOp.MIN, group=part)
        dead = bool(seen[0])
    return "well"


def mesh(group: Any, victim: Victim) -> Any:
    """FSDP2 in a world of gloo, with replicas over longhaul: steps before the death, and the error after it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    names = ("replicate", "shard")
    both = init_device_mesh(
        "cpu", (dist.get_world_size(), 1), mesh_dim_names=names, backend_override={"replicate": "longhaul"}
    )
    replicas: Any = both.get_group("replicate")
    model = net()
    fully_shard(model, mesh=both)
    watched(model, victim)
    done = 0
    try:
        while done < 10:
            step(model, done)
            done += 1
    except Exception as problem:
        return {"name": replicas.name(), "world": dist.get_backend(), "done": done, "text": str(problem)}
    return "no error"


# The options, and which calls of the victim may be its last. DDP exchanges its buckets' order before its second step, by a
# broadcast, which is not redone.
SCENARIOS: dict[str, tuple[Callable[[Any, Victim], Any], Any, int, int]] = {
    "abort": (abort, {}, 0, 30),
    "retry": (retry, {"on_fault": "retry"}, 4, 12),
    "defer": (defer, {"errors": "defer"}, 0, 15),
    "outside": (outside, {}, 0, 50),
    "mesh": (mesh, None, 4, 20),
}


def tried(scenario: str, seed: int, directory: pathlib.Path, sockets: list[str]) -> Any:
    directory.mkdir()
    run, options, least, calls = SCENARIOS[scenario]
    victim = Victim(seed, len(sockets), least, calls, directory / "died")

    def at_rank(rank: int) -> Any:
        dist.init_process_group(
            "gloo" if options is None else "longhaul",
            init_method=f"file://{directory}/store",
            rank=rank,
            world_size=len(sockets),
            pg_options=None if options is None else lh.torch.Options(**options),
        )
        result = run(dist.group.WORLD, victim)
        dist.destroy_process_group()
        return result

    return {"victim": victim.rank, "results": ranks.forked(at_rank, sockets)}


def main() -> None:
    directory, sockets = pathlib.Path(sys.argv[1]), sys.argv[2].split(",")
    warnings.filterwarnings("ignore")
    ranks.import_slow_parts()

    found: dict[str, Any] = {}
    for which in sys.argv[3:]:
        scenario, seed = which.split(":")
        found[which] = tried(scenario, int(seed), directory / which.replace(":", "-"), sockets)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
