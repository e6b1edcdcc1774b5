"""What test_torch_dist.py runs at each rank: the same program over a group "longhaul" and over one of gloo.

Each case is a function of a process group, which returns tensors. The program runs every case with both groups and
compares what they return. python torch_dist_cases.py STORE SOCKET,SOCKET,... [CASE...]
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
import torch_dist_ranks as ranks
from torch import nn

import longhaul as lh
import longhaul.torch  # registers the backend

# Any: torch declares little of what is used here.
dist: Any = torch.distributed
Tensors = Any
CASES: dict[str, Callable[[Any], Tensors]] = {}
_made = itertools.count()


def case(run: Callable[[Any], Tensors]) -> Callable[[Any], Tensors]:
    CASES[run.__name__] = run
    return run


def _with(run: Callable[..., Tensors], given: Any, group: Any) -> Tensors:
    return run(group, *given)


def each(*arguments: Any) -> Callable[[Callable[..., Tensors]], Callable[..., Tensors]]:
    """A case for each argument."""

    def add(run: Callable[..., Tensors]) -> Callable[..., Tensors]:
        for argument in arguments:
            name = "_".join(
                str(part).replace("torch.", "").replace("RedOpType.", "").lower()
                for part in (argument if isinstance(argument, tuple) else (argument,))
            )
            given = argument if isinstance(argument, tuple) else (argument,)
            CASES[f"{run.__name__}_{name}"] = functools.partial(_with, run, given)
        return run

    return add


def rows(group: Any, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Other numbers at each rank."""
    torch.manual_seed(100 + group.rank())
    values = torch.randn(*shape) * 10
    return values.to(dtype)


Op = dist.ReduceOp

# ------------------------------------------------------------------ collectives


@each(
    *itertools.product((torch.float32, torch.int64), (Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX)),
    (torch.float64, Op.SUM),
    (torch.float16, Op.SUM),
    (torch.bfloat16, Op.SUM),
    (torch.int32, Op.BAND),
    (torch.int32, Op.BOR),
    (torch.uint8, Op.BXOR),
    (torch.int8, Op.SUM),
)
def all_reduce(group, dtype, op):
    values = rows(group, 5, 7, dtype=torch.float32).abs().to(dtype)
    dist.all_reduce(values, op, group=group)
    return values


@each((), (0,), (1,), (3, 0), (1000, 3))
def all_reduce_of_shape(group, *shape):
    values = torch.full(shape, group.rank() + 1.5)
    dist.all_reduce(values, group=group)
    return values


@case
def all_reduce_complex(group):
    values = torch.complex(rows(group, 8), rows(group, 8))
    dist.all_reduce(values, group=group)
    return torch.view_as_real(values)


@case
def all_reduce_not_contiguous(group):
    whole = rows(group, 6, 8)
    dist.all_reduce(whole[:, ::2], group=group) if group.name() == "longhaul" else _gloo_strided(whole, group)
    return whole


def _gloo_strided(whole, group):
    part = whole[:, ::2].contiguous()
    dist.all_reduce(part, group=group)
    whole[:, ::2] = part


@case
def all_reduce_async_two_on_one_tensor(group):
    values = rows(group, 50000)
    works = [dist.all_reduce(values, group=group, async_op=True)]
    if group.name() != "longhaul":
        works[0].wait()  # gloo would mix them up
    works.append(dist.all_reduce(values, group=group, async_op=True))
    for work in works:
        work.wait()
    return values


@case
def all_reduce_coalesced(group):
    values = [rows(group, 4), rows(group, 3, 3)]
    dist.all_reduce_coalesced(values, group=group)
    return values


@case
def all_reduce_sparse(group):
    dense = torch.zeros(6, 3)
    dense[group.rank()] = 2.0
    dense[5] = group.rank()
    values = dense.to_sparse(1)
    dist.all_reduce(values, group=group)
    return values.to_dense()


@case
def all_reduce_leaf_that_requires_grad(group):
    values = rows(group, 4).requires_grad_()
    with torch.no_grad():
        dist.all_reduce(values, group=group)
    return values.detach()


@each(0, 1, 2)
def broadcast(group, root):
    values = rows(group, 17)
    dist.broadcast(values, group_src=root, group=group)
    return values


@each(0, 2)
def reduce(group, root):
    values = rows(group, 9)
    dist.reduce(values, group_dst=root, group=group)
    return values if group.rank() == root else torch.zeros(1)


@each(torch.float32, torch.bool, torch.int8)
def all_gather(group, dtype):
    outputs = [torch.empty(4, 3, dtype=dtype) for _ in range(group.size())]
    dist.all_gather(outputs, rows(group, 4, 3).to(dtype), group=group)
    return outputs


@case
def all_gather_side_by_side(group):
    whole = torch.empty(group.size(), 5)
    dist.all_gather(list(whole.unbind()), rows(group, 5), group=group)
    return whole


@case
def all_gather_complex(group):
    outputs = [torch.empty(4, dtype=torch.complex64) for _ in range(group.size())]
    dist.all_gather(outputs, torch.complex(rows(group, 4), rows(group, 4)), group=group)
    return [torch.view_as_real(output) for output in outputs]


@case
def all_gather_not_contiguous(group):
    outputs = [torch.empty(4, 3).t() for _ in range(group.size())]
    if group.name() == "longhaul":
        dist.all_gather(outputs, rows(group, 4, 3).t(), group=group)
    else:
        plain = [torch.empty(3, 4) for _ in outputs]
        dist.all_gather(plain, rows(group, 4, 3).t().contiguous(), group=group)
        outputs = plain
    return outputs


@case
def all_gather_into_tensor(group):
    output = torch.empty(group.size() * 4, 3)
    dist.all_gather_into_tensor(output, rows(group, 4, 3), group=group)
    return output


@case
def all_gather_old_name(group):
    output = torch.empty(group.size() * 4)
    group._allgather_base(output, rows(group, 4)).wait()
    return output


@case
def gather(group):
    outputs = [torch.empty(6) for _ in range(group.size())] if group.rank() == 1 else None
    dist.gather(rows(group, 6), outputs, group_dst=1, group=group)
    return outputs or torch.zeros(1)


@case
def scatter(group):
    output = torch.empty(6)
    inputs = list(rows(group, group.size(), 6).unbind()) if group.rank() == 2 else None
    dist.scatter(output, inputs, group_src=2, group=group)
    return output


@each(Op.SUM, Op.MAX)
def reduce_scatter(group, op):
    output = torch.empty(4)
    dist.reduce_scatter(output, [rows(group, 4) + i for i in range(group.size())], op, group=group)
    return output


@case
def reduce_scatter_tensor(group):
    output = torch.empty(2, 3)
    dist.reduce_scatter_tensor(output, rows(group, 2 * group.size(), 3), group=group)
    return output


@case
def all_to_all_single(group):
    output = torch.empty(group.size() * 2, 3)
    dist.all_to_all_single(output, rows(group, group.size() * 2, 3), group=group)
    return output


@case
def all_to_all_single_uneven(group):
    rank, size = group.rank(), group.size()
    gives = [rank + i for i in range(size)]
    output = torch.empty(sum(gives), 2)
    dist.all_to_all_single(output, rows(group, sum(gives), 2), gives, gives, group=group)
    return output


@case
def send_and_recv(group):
    rank, size = group.rank(), group.size()
    got = torch.empty(5)
    ops = [
        dist.P2POp(dist.isend, rows(group, 5), group=group, group_peer=(rank + 1) % size),
        dist.P2POp(dist.irecv, got, group=group, group_peer=(rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return got


@case
def send_with_tags_in_another_order(group):
    first, second = torch.empty(3), torch.empty(3)
    if group.rank() == 0:
        works = [dist.isend(rows(group, 3) + tag, group=group, group_dst=1, tag=tag) for tag in (7, 8)]
    elif group.rank() == 1:
        works = [dist.irecv(tensor, group=group, group_src=0, tag=tag) for tensor, tag in ((second, 8), (first, 7))]
    else:
        return torch.zeros(1)
    for work in works:
        work.wait()
    return [first, second] if group.rank() == 1 else torch.zeros(1)


@case
def barrier(group):
    dist.barrier(group=group)
    return dist.barrier(group=group, async_op=True).wait() and torch.ones(1)


@case
def futures(group):
    values = rows(group, 4)
    future = dist.all_reduce(values, group=group, async_op=True).get_future()
    return future.then(lambda ended: ended.value()[0] * 2).wait()


@case
def coalescing_manager(group):
    values = [rows(group, 3), rows(group, 5)]
    with dist._coalescing_manager(group=group, async_ops=True) as manager:
        for value in values:
            dist.all_reduce(value, group=group)
    manager.wait()
    return values


# ------------------------------------------------------------------ objects


def _number(value) -> torch.Tensor:
    return torch.tensor([float(part) for part in value])


@case
def all_gather_object(group):
    got: list[Any] = [None] * group.size()
    dist.all_gather_object(got, {"rank": group.rank(), "text": "x" * group.rank()}, group=group)
    return _number([each["rank"] + len(each["text"]) for each in got])


@case
def gather_object(group):
    got: Any = [None] * group.size() if group.rank() == 0 else None
    dist.gather_object([group.rank()] * 3, got, group_dst=0, group=group)
    return _number([each[0] for each in got]) if got else torch.zeros(1)


@case
def broadcast_object_list(group):
    got: list[Any] = [{"a": 5, "rank": group.rank()}, None]
    dist.broadcast_object_list(got, group_src=1, group=group)
    return _number([got[0]["rank"], got[0]["a"]])


@case
def scatter_object_list(group):
    got = [None]
    dist.scatter_object_list(got, [10, 20, 30] if group.rank() == 0 else None, group_src=0, group=group)
    return _number(got)


@case
def send_object_list(group):
    got = [group.rank(), "abc"]
    if group.rank() == 0:
        dist.send_object_list(got, group=group, group_dst=2)
    elif group.rank() == 2:
        dist.recv_object_list(got, group=group, group_src=0)
    return _number([got[0]])


# ------------------------------------------------------------------ functional collectives


@case
def functional_all_reduce(group):
    from torch.distributed import _functional_collectives as functional

    return functional.all_reduce(rows(group, 5), "avg" if group.name() == "longhaul" else "sum", group) * (
        group.size() if group.name() == "longhaul" else 1
    )


@case
def functional_all_gather_and_reduce_scatter(group):
    from torch.distributed import _functional_collectives as functional

    gathered = functional.all_gather_tensor(rows(group, 4, 2), 0, group)
    return [gathered + 0, functional.reduce_scatter_tensor(gathered, "sum", 0, group) + 0]


@case
def functional_coalesced(group):
    from torch.distributed import _functional_collectives as functional

    values = [rows(group, 4), rows(group, 2, 3)]
    reduced = functional.all_reduce_coalesced(values, "sum", group)
    gathered = functional.all_gather_into_tensor_coalesced(values, group)
    return [value + 0 for value in (*reduced, *gathered)]


@case
def functional_all_to_all_and_broadcast(group):
    from torch.distributed import _functional_collectives as functional

    moved = functional.all_to_all_single(rows(group, group.size() * 2), None, None, group)
    return [moved + 0, functional.broadcast(rows(group, 3), 1, group) + 0]


@case
def autograd_of_all_to_all(group):
    from torch.distributed import _functional_collectives as functional

    values = rows(group, group.size() * 2).requires_grad_()
    moved = functional.all_to_all_single_autograd(values, None, None, group)
    (moved * (group.rank() + 1)).sum().backward()
    return values.grad


@case
def compiled_all_reduce(group):
    from torch.distributed import _functional_collectives as functional

    @torch.compile(backend="aot_eager")
    def both(values):
        return functional.all_reduce(values * 2, "sum", group) + 1

    return both(rows(group, 6))


# ------------------------------------------------------------------ DDP


class Net(nn.Module):
    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(12, 20)
        self.second = nn.Linear(20, 4)
        self.unused = nn.Linear(3, 3) if unused else None

    def forward(self, x: Any) -> Any:
        return self.second(torch.relu(self.first(x)))


def train(group, model, optimizer, steps):
    for step in range(steps):
        torch.manual_seed(10 * step + group.rank())
        optimizer.zero_grad()
        model(torch.randn(8, 12)).square().mean().backward()
        optimizer.step()


def trained(group, *, steps=3, hook=None, unused=False, accumulate=False, **options):
    torch.manual_seed(1)
    model = nn.parallel.DistributedDataParallel(Net(unused), process_group=group, bucket_cap_mb=0.0005, **options)
    if hook is not None:
        model.register_comm_hook(hook[0](group) if callable(hook[0]) else hook[0], hook[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        torch.manual_seed(10 * step + group.rank())
        optimizer.zero_grad()
        with model.no_sync() if accumulate and step % 2 == 0 else contextlib.nullcontext():
            model(torch.randn(8, 12)).square().mean().backward()
        if not (accumulate and step % 2 == 0):
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@case
def ddp(group):
    return trained(group)


@case
def ddp_static_graph(group):
    return trained(group, static_graph=True)


@case
def ddp_unused_parameters(group):
    return trained(group, unused=True, find_unused_parameters=True)


@case
def ddp_bucket_views(group):
    return trained(group, gradient_as_bucket_view=True)


@case
def ddp_no_sync(group):
    return trained(group, accumulate=True, steps=4)


@case
def ddp_average_hook(group):
    if group.name() == "longhaul":
        return trained(group, hook=(lambda group: group, lh.torch.ddp_average_hook))
    return trained(group)


@case
def ddp_hook_that_waits_for_another_op(group):
    def hook(state, bucket):
        def again(ended):
            values = ended.value()[0] / group.size()
            dist.all_reduce(torch.ones(1), group=group, async_op=True).get_future().wait()
            return values

        return dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future().then(again)

    return trained(group, hook=(None, hook))


@case
def ddp_fp16_hook(group):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return trained(group, hook=(lambda group: group, default_hooks.fp16_compress_hook))


@case
def ddp_power_sgd_hook(group):
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    def state(group):
        return powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)

    return trained(group, steps=5, hook=(state, powerSGD_hook.powerSGD_hook))


@case
def ddp_join(group):
    torch.manual_seed(1)
    model = nn.parallel.DistributedDataParallel(Net(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with model.join():
        train(group, model, optimizer, 2 + group.rank())
    return [parameter.detach() for parameter in model.parameters()]


@case
def zero_redundancy_optimizer(group):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(1)
    model = nn.parallel.DistributedDataParallel(Net(), process_group=group)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, process_group=group, lr=0.01)
    train(group, model, optimizer, 2)
    return [parameter.detach() for parameter in model.parameters()]


@case
def sync_batch_norm_stands_in(group):
    """SyncBatchNorm is for GPUs only; its collectives are these two."""
    sums = rows(group, 2, 5)
    gathered = [torch.empty_like(sums) for _ in range(group.size())]
    dist.all_gather(gathered, sums, group)
    return torch.stack(gathered).sum(0)


# ------------------------------------------------------------------ meshes


def mesh_of(group, dims=1):
    from torch.distributed.device_mesh import DeviceMesh

    if dims == 1:
        return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("data",))
    backend = "gloo" if group.name() != "longhaul" else "longhaul"
    alone = [dist.new_group([rank], backend=backend) for rank in range(group.size())][group.rank()]
    return DeviceMesh.from_group(
        [alone, group],
        "cpu",
        mesh=torch.arange(group.size()).view(1, -1),
        mesh_dim_names=("replicate", "shard"),
    )


def fully_sharded(group, dims=1, steps=3, prepare=None, **options):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    model = Net()
    mesh = mesh_of(group, dims)
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    if prepare is not None:
        prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        torch.manual_seed(10 * step + group.rank())
        optimizer.zero_grad()
        model(torch.randn(8, 12)).float().square().mean().backward()
        optimizer.step()
    return model, [_full(parameter) for parameter in model.parameters()]


def _full(tensor: Any) -> Any:
    return tensor.full_tensor().detach()


@case
def fsdp2(group):
    return fully_sharded(group)[1]


@case
def fsdp2_two_dimensions(group):
    return fully_sharded(group, 2)[1]


@case
def fsdp2_mixed_precision(group):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return fully_sharded(group, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))[1]


@case
def fsdp2_divide_factor(group):
    return fully_sharded(group, prepare=lambda model: model.set_gradient_divide_factor(2.0))[1]


@case
def fsdp2_no_reshard(group):
    return fully_sharded(group, reshard_after_forward=False)[1]


@case
def fsdp1(group):
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(1)
    model = FullyShardedDataParallel(Net(), process_group=group, device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(2):
        torch.manual_seed(10 * step + group.rank())
        optimizer.zero_grad()
        model(torch.randn(8, 12)).square().mean().backward()
        optimizer.step()
    with FullyShardedDataParallel.summon_full_params(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


@case
def dtensor_redistribute(group):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(3)
    mesh = mesh_of(group)
    whole = distribute_tensor(torch.randn(7, 9), mesh, [Shard(0)])
    return [whole.redistribute(mesh, [Shard(1)]).to_local(), whole.redistribute(mesh, [Replicate()]).to_local()]


@case
def dtensor_product(group):
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    torch.manual_seed(3)
    mesh = mesh_of(group)
    left = distribute_tensor(torch.randn(6, 9), mesh, [Shard(1)])
    right = distribute_tensor(torch.randn(9, 5), mesh, [Shard(0)])
    product: Any = left @ right
    assert isinstance(product.placements[0], Partial)
    return [product.redistribute(mesh, [Replicate()]).to_local(), product.redistribute(mesh, [Shard(0)]).to_local()]


@case
def tensor_parallel(group):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(1)
    model = Net()
    model.first = nn.Linear(12, 21)
    model.second = nn.Linear(21, 4)
    parallel = parallelize_module(model, mesh_of(group), {"first": ColwiseParallel(), "second": RowwiseParallel()})
    torch.manual_seed(5)
    output = parallel(torch.randn(8, 12))
    output.square().mean().backward()
    return [output.detach(), *(_full(parameter.grad) for parameter in parallel.parameters())]


@each(False, True)
def checkpoint(group, in_background):
    dcp = dist.checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    model, _ = fully_sharded(group)
    where: list[Any] = [tempfile.mkdtemp() if group.rank() == 0 else None]
    dist.broadcast_object_list(where, group_src=0, group=group)
    state = get_model_state_dict(model)
    if in_background:
        dcp.async_save(state, checkpoint_id=where[0], process_group=group).result()
    else:
        dcp.save(state, checkpoint_id=where[0], process_group=group)
    other, _ = fully_sharded(group, steps=1)
    loaded: Any = get_model_state_dict(other)
    dcp.load(loaded, checkpoint_id=where[0], process_group=group)
    return [value.full_tensor().detach() for value in loaded.values()]


@case
def pipeline(group):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.manual_seed(1)
    layers = [nn.Linear(12, 12) for _ in range(group.size())]
    stage = PipelineStage(layers[group.rank()], group.rank(), group.size(), torch.device("cpu"), group=group)
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    torch.manual_seed(5)
    inputs, wanted = torch.randn(8, 12), torch.randn(8, 12)
    if group.rank() == 0:
        schedule.step(inputs)
    elif group.rank() == group.size() - 1:
        schedule.step(target=wanted, losses=[])
    else:
        schedule.step()
    return [parameter.grad for parameter in layers[group.rank()].parameters()]


@case
def model_averaging(group):
    from torch.distributed.algorithms.model_averaging import utils

    torch.manual_seed(group.rank())
    model = Net()
    utils.average_parameters(model.parameters(), group)
    return [parameter.detach() for parameter in model.parameters()]


# ------------------------------------------------------------------ subgroups


def some_of(group, ranks):
    return dist.new_group(ranks, backend="gloo" if group.name() != "longhaul" else "longhaul")


@case
def subgroups(group):
    """Two sets that overlap, and ops of both at a time."""
    first, second = some_of(group, [0, 1]), some_of(group, [1, 2])
    works, values = [], []
    for part in (first, second):
        if part is not dist.GroupMember.NON_GROUP_MEMBER:
            values.append(rows(group, 6))
            works.append(dist.all_reduce(values[-1], group=part, async_op=True))
    for work in works:
        work.wait()
    return values


@case
def subgroup_with_roots(group):
    part = some_of(group, [0, 2])
    if part is dist.GroupMember.NON_GROUP_MEMBER:
        return torch.zeros(1)
    values = rows(group, 4)
    dist.broadcast(values, 2, group=part)
    gathered = [torch.empty(3) for _ in range(2)]
    dist.all_gather(gathered, rows(group, 3), group=part)
    return [values, *gathered]


@case
def subgroups_alike(group):
    """Two groups of the same ranks do not mix up their ops."""
    first, second = some_of(group, [0, 1, 2]), some_of(group, [0, 1, 2])
    values, others = rows(group, 5), rows(group, 5) + 1
    order = [(values, first), (others, second)]
    works = [dist.all_reduce(tensor, group=part, async_op=True) for tensor, part in order[:: 1 if group.rank() else -1]]
    for work in works:
        work.wait()
    return [values, others]


# ------------------------------------------------------------------ the program


def at_rank(rank: int, size: int, store: str, only: list[str]) -> dict[str, str | None]:
    """What was wrong in each case; None: nothing."""
    dist.init_process_group("longhaul", init_method=f"file://{store}", rank=rank, world_size=size)
    gloo = dist.new_group(backend="gloo")
    ours = dist.group.WORLD
    problems: dict[str, str | None] = {}
    for name, run in CASES.items():
        if only and name not in only:
            continue
        began = time.monotonic()
        problems[name] = None
        try:
            got, wanted = run(ours), run(gloo)
            torch.testing.assert_close(got, wanted)
        except Exception:
            problems[name] = traceback.format_exc()
        print(f"{name}: {time.monotonic() - began:.2f} s", file=sys.stderr, flush=True)
    dist.destroy_process_group()
    return problems


def main() -> None:
    store, sockets, only = sys.argv[1], sys.argv[2].split(","), sys.argv[3:]
    warnings.filterwarnings("ignore")
    ranks.import_slow_parts()

    def run(rank: int) -> object:
        return at_rank(rank, len(sockets), store, only)

    print(json.dumps(ranks.forked(run, sockets)), flush=True)


if __name__ == "__main__":
    main()
