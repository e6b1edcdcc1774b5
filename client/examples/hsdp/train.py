"""One trainer of a host. The trainers of a host share a small GPT by FSDP2; hosts average their gradients by Longhaul.

Start it on each host, at any time, beside a longhaul-peerd ($LONGHAUL_SOCKET is the path of its socket):

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node=2 --max-restarts=100 train.py --hosts=2

It trains until `--steps` steps are made and `--hosts` hosts take part. Each trainer writes a JSON line per step. If a
trainer dies, all trainers of its host end, torchrun starts them again, and they get the state of the other hosts.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import longhaul as lh

# The model of the other example.
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "demo"))
from model import GPT, batch, read_text


def sharded_model() -> GPT:
    """The model, divided among the trainers of this host. Its first parameters are the same on all hosts."""
    model = GPT()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This trainer's part of a tensor that FSDP has divided."""
    assert isinstance(tensor, DTensor)
    return tensor.to_local().detach()


def state_of(model: torch.nn.Module, optimizer: torch.optim.SGD) -> lh.State:
    """What the same shard of all hosts has in common: this trainer's part of the parameters and of their momentum."""
    tensors = {}
    for name, parameter in model.named_parameters():
        # The optimizer would make the momentum in its first step. The state needs it before.
        momentum = optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        tensors.update({name: local(parameter), f"momentum.{name}": local(momentum)})
    return lh.State(tensors)


def train(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=args.rendezvous, rank=args.rank, world_size=args.world_size)
    text, _ = read_text()
    model = sharded_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = state_of(model, optimizer)
    hosts = 0  # in the last step
    with lh.torch.HSDP("hsdp", hosts=args.hosts, timeout=None) as hsdp:
        while state.revision < args.steps or hosts < args.hosts:
            with hsdp.step(state) as step:  # hosts come in here; from here on each shard is the same on all hosts
                # Other passages in each step, on each host and at each trainer.
                seed = (state.revision * 1000 + step.rank) * hsdp.shards + hsdp.shard
                loss = model.loss(*batch(text, torch.Generator().manual_seed(seed)))
                optimizer.zero_grad()
                loss.backward()
                hosts = hsdp.average_gradients(model).world_size
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            said = {"step": state.revision, "shard": hsdp.shard, "loss": loss.item(), "hosts": hosts}
            print(json.dumps({**said, "redone": hsdp.redone, "hash": step.sync.hash if step.sync else ""}), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2, help="how many hosts begin and end together (%(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="steps, at least (%(default)s)")
    parser.add_argument("--rendezvous", default="env://", help="of torch.distributed (%(default)s: as torchrun says)")
    parser.add_argument("--rank", type=int, default=-1, help="without torchrun: number of this trainer on its host")
    parser.add_argument("--world-size", type=int, default=-1, help="without torchrun: number of trainers of this host")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
