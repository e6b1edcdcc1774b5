"""Gradient averaging: the averages are exact over the members that OpInfo names, whatever happens to members meanwhile."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from conftest import Members, wait_for_open_ops, wait_until

import longhaul as lh
from longhaul.testing import LocalCluster
from longhaul.torch._buckets import Bucket
from longhaul.torch._exchange import GradientExchange, HostCopier
from longhaul.torch._memory import local_part

SHAPES = [(3, 4), (5,), (), (7, 2, 2), (300,), (0, 3), (1,), (2, 4), (4,), (0,), (6,), (1, 4), (5, 4)]
SMALL_MB = 64 / (1 << 20)  # buckets of 64 bytes, so that there are several


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]


def set_gradients(of: list[torch.nn.Parameter], value: float) -> None:
    """Gradient i is value * (i + 1). Its memory is in another order than that of its parameter."""
    for i, parameter in enumerate(of):
        reversed_ = torch.full(parameter.shape[::-1], value * (i + 1), dtype=parameter.dtype)
        parameter.grad = reversed_.permute(list(range(parameter.dim()))[::-1])


def grad(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def exchange(averager: lh.torch.GradientAverager) -> GradientExchange:
    assert averager._exchange is not None
    return averager._exchange


def code(member: int) -> float:
    """A gradient that tells who gave it: sums of these are different for all sets of members."""
    return float(2 ** (member % 16))


def givers(average: float, count: int, ids: list[int]) -> set[int]:
    """Whose gradients are in an average over `count` members."""
    total = average * count
    assert abs(total - round(total)) < 1e-3, average
    return {member for member in ids if round(total) & int(code(member))}


class Chain(torch.nn.Module):
    """Linear layers. `between` is called in backward after the layers behind it, with the number of the layer."""

    def __init__(self, layers: int = 3, width: int = 8, between: Callable[[int], object] | None = None) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(layers))
        self.unused = torch.nn.Linear(width, 2)
        self.between = between
        generator = torch.Generator().manual_seed(1)  # members are threads, and share the default generator
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, std=0.3, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if self.between is not None and x.requires_grad:
                x.register_hook(lambda _, number=number: self.between(number))
        return x


def batch(comm: lh.Comm, number: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * comm.rank + number)
    return torch.randn(4, 8, generator=generator)


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def assert_equal_at_all(results: list[list[torch.Tensor]]) -> None:
    for result in results[1:]:
        assert len(result) == len(results[0])
        for mine, first in zip(result, results[0], strict=True):
            assert torch.equal(mine, first)


# ------------------------------------------------------------------ average_gradients


@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize("cap", [25, SMALL_MB])
def test_gradients_become_their_averages(three: Members, cap: float, view: bool) -> None:
    def call(comm: lh.Comm) -> None:
        mine = parameters()
        for turn in range(3):
            set_gradients(mine, code(comm.rank) + turn)
            info = lh.torch.average_gradients(mine, comm, bucket_cap_mb=cap, gradient_as_bucket_view=view, timeout=60)
            for i, parameter in enumerate(mine):
                expected = torch.full(parameter.shape, (7 + 3 * turn) * (i + 1) / 3)
                torch.testing.assert_close(grad(parameter), expected, rtol=1e-6, atol=0)
            assert info.members == comm.members and info.complete and info.lost == 0
            assert info.world_size == 3 and info.weight is None
            assert (len(info.infos) > 1) == (cap != 25)

    three.all(call)


def test_a_gradient_that_is_a_view_of_its_bucket_is_averaged_again(pair: Members) -> None:
    def call(comm: lh.Comm) -> None:
        mine = parameters()
        set_gradients(mine, 1)
        lh.torch.average_gradients(mine, comm, timeout=60)
        for parameter in mine:
            grad(parameter).add_(comm.rank)
        lh.torch.average_gradients(mine, comm, timeout=60)
        for i, parameter in enumerate(mine):
            assert torch.equal(grad(parameter), torch.full(parameter.shape, i + 1.5))

    pair.all(call)


def test_dtypes_may_be_mixed(pair: Members) -> None:
    def call(comm: lh.Comm) -> None:
        kinds = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32)
        mine = [parameter for kind in kinds for parameter in parameters(kind)]
        set_gradients(mine, 2.0 * comm.rank)
        lh.torch.average_gradients(mine, comm, timeout=60)
        for i, parameter in enumerate(mine):
            assert torch.equal(grad(parameter), torch.full(parameter.shape, i + 1.0, dtype=parameter.dtype))

    pair.all(call)


def test_weights_count(three: Members) -> None:
    def call(comm: lh.Comm) -> None:
        mine = parameters()
        set_gradients(mine, code(comm.rank))
        info = lh.torch.average_gradients(mine, comm, weight=comm.rank, timeout=60)  # 0, 1, 2
        assert info.weight == 3 and info.lost == 0
        for i, parameter in enumerate(mine):
            torch.testing.assert_close(grad(parameter), torch.full(parameter.shape, (2 + 8) * (i + 1) / 3))
        set_gradients(mine, 1)
        with pytest.raises(lh.TooFewMembers):
            lh.torch.average_gradients(mine, comm, weight=0, timeout=60)
        assert float(grad(mine[0])[0, 0]) == 1  # unchanged

    three.all(call)


def test_a_missing_gradient_counts_as_zeros_and_gets_the_average(pair: Members) -> None:
    def call(comm: lh.Comm) -> None:
        mine = parameters()
        set_gradients(mine, 2)
        if comm.rank == 1:
            mine[1].grad = None
        lh.torch.average_gradients(mine, comm, timeout=60)
        assert torch.equal(grad(mine[1]), torch.full((5,), 2.0))

    pair.all(call)


def test_bfloat16_on_the_wire_leaves_the_dtype_of_the_gradient(pair: Members) -> None:
    def call(comm: lh.Comm) -> list[torch.Tensor]:
        mine = [torch.nn.Parameter(torch.zeros(10_000))]
        values = torch.rand(10_000, generator=torch.Generator().manual_seed(comm.rank))
        sent = []
        for wire in (None, torch.bfloat16):
            mine[0].grad = values.clone()
            info = lh.torch.average_gradients(mine, comm, wire_dtype=wire, timeout=60)
            sent.append(info.infos[0].bytes_sent)
        assert 0.4 < sent[1] / sent[0] < 0.6
        assert grad(mine[0]).dtype == torch.float32
        assert torch.equal(grad(mine[0]), grad(mine[0]).bfloat16().float())
        return [values, grad(mine[0])]

    (one, average), (other, same) = pair.all(call)
    torch.testing.assert_close(average, (one + other) / 2, rtol=2**-7, atol=1e-2)
    assert torch.equal(average, same)


def test_bad_input_is_refused(pair: Members) -> None:
    comm = pair.comms[0]
    mine = parameters()
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    for model, options, text in (
        ([], {}, "nothing to average"),
        ([torch.nn.Parameter(torch.zeros(2), requires_grad=False)], {}, "nothing to average"),
        ([torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))], {}, "complex64"),
        (mine, {"wire_dtype": torch.int8}, "wire_dtype is torch.int8"),
        (mine, {"bucket_cap_mb": 0}, "bucket_cap_mb is 0"),
        (embedding, {}, "sparse"),
    ):
        with pytest.raises(lh.InvalidArgument, match=text):
            lh.torch.average_gradients(model, comm, timeout=60, **options)
    for nothing in (3, torch.zeros(2)):
        with pytest.raises(TypeError, match="pass a torch.nn.Module"):
            lh.torch.average_gradients(nothing, comm, timeout=60)  # type: ignore[arg-type]
    with pytest.raises(lh.InvalidArgument, match="first_bucket_mb"):
        lh.torch.GradientAverager(mine, comm, first_bucket_mb=-1)


def test_a_call_after_a_timeout_waits_for_the_same_ops(pair: Members) -> None:
    one, other = pair.comms
    mine, theirs = parameters(), parameters()
    set_gradients(mine, 1)
    set_gradients(theirs, 3)
    with pytest.raises(lh.DeadlineExceeded, match="make the same call again"):
        lh.torch.average_gradients(mine, one, bucket_cap_mb=SMALL_MB, timeout=0.05)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(lh.torch.average_gradients, theirs, other, bucket_cap_mb=SMALL_MB, timeout=60)
        info = lh.torch.average_gradients(mine, one, bucket_cap_mb=SMALL_MB, timeout=60)
        assert info.members == late.result(60).members
    for parameters_ in (mine, theirs):
        assert torch.equal(grad(parameters_[1]), torch.full((5,), 4.0))


def test_nothing_keeps_a_model_or_a_member_alive(cluster: LocalCluster) -> None:
    members = Members([cluster.socket(0)])
    model = Chain()
    averager = lh.torch.GradientAverager(model, members.comms[0])
    model(batch(members.comms[0])).sum().backward()
    averager.finish(60)
    lh.torch.average_gradients(model, members.comms[0], timeout=60)
    gone: list[weakref.ref[Any]] = [weakref.ref(each) for each in (model, averager, members.comms[0])]
    del averager
    members.close()
    members.comms.clear()
    gc.collect()
    assert [each() is None for each in gone] == [False, True, True]
    del model
    gc.collect()
    assert gone[0]() is None


def test_the_local_part_of_a_dtensor_is_averaged(pair: Members, tmp_path: object) -> None:
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for hooks in (False, True):
            models = [Chain() for _ in pair.comms]
            for model in models:
                fully_shard(model, mesh=mesh)
            averagers = [lh.torch.GradientAverager(*each) for each in zip(models, pair.comms)] if hooks else []
            for model, comm in zip(models, pair.comms, strict=True):
                model(batch(comm)).square().sum().backward()
            sums = [
                (local_part(grad(one)) + local_part(grad(other))) / 2
                for one, other in zip(models[0].layers.parameters(), models[1].layers.parameters(), strict=True)
            ]
            if hooks:
                assert all(any(averager._arrived) for averager in averagers)  # FSDP2 calls the hooks
                pair.all(lambda comm: averagers[pair.comms.index(comm)].finish(60))  # noqa: B023
            else:
                pair.all(lambda comm: lh.torch.average_gradients(models[pair.comms.index(comm)], comm, timeout=60))  # noqa: B023
            for model in models:
                for parameter, expected in zip(model.layers.parameters(), sums, strict=True):
                    torch.testing.assert_close(local_part(grad(parameter)), expected)
    finally:
        dist.destroy_process_group()


# ------------------------------------------------------------------ the averager


@pytest.mark.parametrize("cap", [25, SMALL_MB])
def test_hooks_give_what_the_function_gives(three: Members, cap: float) -> None:
    def call(comm: lh.Comm) -> list[torch.Tensor]:
        model, same = Chain(), Chain()
        with lh.torch.GradientAverager(model, comm, bucket_cap_mb=cap, first_bucket_mb=cap) as averager:
            for turn in range(3):
                for each in (model, same):
                    each.zero_grad()
                    each(batch(comm, turn)).square().sum().backward()
                lh.torch.average_gradients(same, comm, timeout=60)
                info = averager.finish(60)
                assert info.complete and len(info.members) == 3
                for mine, right in zip(gradients(model), gradients(same)):
                    torch.testing.assert_close(mine, right)  # not equal: in other buckets, sums are in another order
        model.zero_grad()
        model(batch(comm)).sum().backward()
        assert exchange(averager).comm is None  # closed: no hook, no op
        lh.torch.average_gradients(model, comm, timeout=60)
        return gradients(model)

    assert_equal_at_all(three.all(call))


def test_ops_start_while_backward_still_runs(cluster: LocalCluster, pair: Members) -> None:
    begun = threading.Barrier(2)

    def call(comm: lh.Comm) -> None:
        def between(number: int) -> None:
            if number == 0:  # the layers behind the first one have their gradients
                begun.wait(60)
                wait_until(lambda: len(exchange(averager)._works) >= 2)
                wait_until(lambda: all(work.done() for work in exchange(averager)._works.values()))

        model = Chain(between=between)
        averager = lh.torch.GradientAverager(model, comm, bucket_cap_mb=SMALL_MB, first_bucket_mb=SMALL_MB)
        model(batch(comm)).sum().backward()
        averager.finish(60)

    pair.all(call)


def test_no_sync_adds_up_gradients(pair: Members) -> None:
    def call(comm: lh.Comm) -> list[torch.Tensor]:
        model = Chain()
        averager = lh.torch.GradientAverager(model, comm, bucket_cap_mb=SMALL_MB)
        for turn in range(2):
            model.zero_grad(set_to_none=turn == 0)
            with averager.no_sync():
                for number in range(2):
                    model(batch(comm, number)).square().sum().backward()
            model(batch(comm, 2)).square().sum().backward()
            averager.finish(60)
        return gradients(model)

    results = pair.all(call)
    assert_equal_at_all(results)
    expected = Chain()
    for comm in pair.comms:
        for number in range(3):
            (expected(batch(comm, number)).square().sum() / 2).backward()
    for mine, right in zip(results[0], gradients(expected)):
        torch.testing.assert_close(mine, right)


def test_a_second_backward_without_finish_is_refused(pair: Members) -> None:
    def call(comm: lh.Comm) -> None:
        model = Chain()
        averager = lh.torch.GradientAverager(model, comm, weight=1)
        model(batch(comm)).sum().backward()
        with pytest.raises(lh.FailedPrecondition, match=r"call finish\(\)"):
            model(batch(comm)).sum().backward()
        with pytest.raises(lh.FailedPrecondition, match=r"call finish\(\)"), averager.no_sync():
            pass
        with pytest.raises(lh.FailedPrecondition, match=r"call finish\(\)"):
            averager.weight = 2
        assert averager.finish(60).weight == 2
        averager.weight = 2
        model.zero_grad()
        model(batch(comm)).sum().backward()
        assert averager.finish(60).weight == 4

    pair.all(call)


def test_after_a_backward_that_raised_finish_sends_the_rest(pair: Members) -> None:
    def call(comm: lh.Comm) -> list[torch.Tensor]:
        def between(number: int) -> None:
            if number == 0 and comm.rank == 1:
                raise ValueError("a bad batch")

        model = Chain(between=between)
        averager = lh.torch.GradientAverager(model, comm, bucket_cap_mb=SMALL_MB, first_bucket_mb=SMALL_MB)
        try:
            model(batch(comm)).sum().backward()
        except ValueError:
            assert comm.rank == 1
        info = averager.finish(60)
        assert info.complete and info.members == comm.members
        model.between = None
        for _ in range(2):  # and the next rounds are as usual
            model.zero_grad()
            model(batch(comm)).sum().backward()
            averager.finish(60)
        return gradients(model)

    assert_equal_at_all(pair.all(call))


def test_a_member_without_data_finishes_without_backward(pair: Members) -> None:
    def call(comm: lh.Comm) -> list[torch.Tensor]:
        model = Chain()
        averager = lh.torch.GradientAverager(model, comm, weight=1 - comm.rank)
        alone = gradients(model)
        if comm.rank == 0:
            model(batch(comm)).sum().backward()
            alone = gradients(model)
        averager.finish(60)
        if comm.rank == 0:
            for mine, average in zip(alone, gradients(model)):
                torch.testing.assert_close(mine, average)
        return gradients(model)

    assert_equal_at_all(pair.all(call))


def test_a_sparse_gradient_ends_backward_and_the_round(cluster: LocalCluster) -> None:
    members = Members([cluster.socket(0)])
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    averager = lh.torch.GradientAverager(embedding, members.comms[0])
    with pytest.raises(lh.InvalidArgument, match="sparse"):
        embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(lh.InvalidArgument, match="sparse"):
        averager.finish(60)
    embedding.weight.grad = grad(embedding.weight).to_dense()
    averager.finish(60)
    members.close()


# ------------------------------------------------------------------ exceptions in a round; all lines: test_exceptions_in_rounds


def test_after_gradients_that_cannot_be_written_the_next_round_is_a_new_one(pair: Members) -> None:
    def call(comm: lh.Comm) -> None:
        parameter = torch.nn.Parameter(torch.zeros(4))
        parameter.grad = torch.full((1,), float(comm.rank + 1)).expand(4)
        with pytest.raises(RuntimeError, match="single memory location"):
            lh.torch.average_gradients([parameter], comm, timeout=60)
        parameter.grad = torch.full((4,), 200.0 * (comm.rank + 1))
        lh.torch.average_gradients([parameter], comm, timeout=60)
        assert grad(parameter).tolist() == [300] * 4

    pair.all(call)


def test_a_member_that_gives_up_a_round_is_named_to_the_others(pair: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    first = pair.comms[0].member_id
    pack = HostCopier._pack

    def out_of_memory(self: HostCopier, bucket: Bucket, tensors: list[torch.Tensor]) -> None:
        if any(float(each.flatten()[0]) == 11 for each in tensors):
            raise MemoryError
        pack(self, bucket, tensors)

    monkeypatch.setattr(HostCopier, "_pack", out_of_memory)

    def call(comm: lh.Comm) -> None:
        mine = [torch.nn.Parameter(torch.zeros(20)) for _ in range(2)]
        values = [[1.0, 2.0], [10.0, 11.0]] if comm.member_id == first else [[3.0, 4.0], [30.0, 31.0]]

        def average(number: int) -> None:
            for i, parameter in enumerate(mine):
                parameter.grad = torch.full((20,), values[i][number])
            lh.torch.average_gradients(mine, comm, bucket_cap_mb=SMALL_MB, timeout=60)

        average(0)
        assert [float(grad(each)[0]) for each in mine] == [2, 20]
        if comm.member_id == first:
            with pytest.raises(MemoryError):
                average(1)
        else:
            with pytest.raises(lh.Aborted, match=f"none was changed: member m{first} gave up this round"):
                average(1)
            assert [float(grad(each)[0]) for each in mine] == [4, 31]
        average(0)
        assert [float(grad(each)[0]) for each in mine] == [2, 20]

    pair.all(call)


@pytest.mark.parametrize("layer", [0, 2], ids=["with_ops", "before_all_ops"])
def test_a_backward_that_raised_may_be_abandoned(pair: Members, layer: int) -> None:
    def call(comm: lh.Comm) -> list[torch.Tensor]:
        def between(number: int) -> None:
            if number == layer and comm.rank == 1:
                raise ValueError("a bad batch")

        model = Chain(between=between)
        averager = lh.torch.GradientAverager(model, comm, bucket_cap_mb=SMALL_MB, first_bucket_mb=SMALL_MB)
        if comm.rank == 1:
            with pytest.raises(ValueError, match="bad batch"):
                model(batch(comm)).sum().backward()
            averager.abandon()
        else:
            model(batch(comm)).sum().backward()
            with pytest.raises(lh.Aborted, match="gave up this round"):
                averager.finish(60)
        model.between = None
        for _ in range(2):  # and the next rounds are as usual
            model.zero_grad()
            model(batch(comm)).sum().backward()
            averager.finish(60)
        return gradients(model)

    assert_equal_at_all(pair.all(call))


# ------------------------------------------------------------------ clipping and AMP


def test_all_members_clip_alike(three: Members) -> None:
    def call(comm: lh.Comm) -> list[torch.Tensor]:
        model = Chain()
        (model(batch(comm)).square().sum() * (comm.rank + 1)).backward()
        lh.torch.average_gradients(model, comm, timeout=60)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert norm > 0.5
        return [norm, *gradients(model)]

    assert_equal_at_all(three.all(call))


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_an_overflow_at_one_member_makes_all_skip_the_step(pair: Members, wire: torch.dtype | None) -> None:
    def call(comm: lh.Comm) -> list[torch.Tensor]:
        model = Chain()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scales = []
        for turn in range(2):
            before = [parameter.detach().clone() for parameter in model.parameters()]
            optimizer.zero_grad()
            loss = model(batch(comm, turn)).square().sum()
            if turn == 0 and comm.rank == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            lh.torch.average_gradients(model, comm, wire_dtype=wire, timeout=60)  # before unscale_
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(torch.tensor(scaler.get_scale()))
            same = all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
            assert same == (turn == 0)
        assert scales[0] == 512
        return [*scales, *(parameter.detach() for parameter in model.parameters())]

    assert_equal_at_all(pair.all(call))


# ------------------------------------------------------------------ members come and go


def test_averages_are_exact_when_a_member_joins_late(cluster: LocalCluster) -> None:
    members = Members([cluster.socket(0), cluster.socket(1)])
    models = {comm.member_id: parameters() for comm in members.comms}

    def step(comm: lh.Comm) -> tuple[int, ...]:
        comm.begin_step(60)
        mine = models.setdefault(comm.member_id, parameters())
        set_gradients(mine, code(comm.member_id))
        info = lh.torch.average_gradients(mine, comm, timeout=60)
        assert info.complete and info.lost == 0 and info.world_size == len(info.members)
        average = float(grad(mine[1])[0]) / 2
        assert givers(average, len(info.members), list(comm.members)) == set(info.members)
        return info.members

    before = set(members.all(step))
    members.add(cluster.socket(2))
    after = set(members.all(step))
    assert [len(each) for each in (*before, *after)] == [2, 3]
    members.close()


@pytest.fixture
def mortal() -> Iterator[tuple[LocalCluster, Members]]:
    """Three members at a cluster of their own."""
    with LocalCluster(peers=3) as started:
        members = Members([started.socket(i) for i in range(3)])
        yield started, members
        members.close()


def test_averages_are_exact_after_deaths_within_a_step(mortal: tuple[LocalCluster, Members]) -> None:
    """One member dies between the ops of two buckets; later another one dies before it has started any."""
    cluster, members = mortal
    ids = list(members.comms[0].members)
    models = [parameters() for _ in members.comms]
    averagers = [
        lh.torch.GradientAverager(model, comm, bucket_cap_mb=SMALL_MB, first_bucket_mb=SMALL_MB)
        for model, comm in zip(models, members.comms)
    ]

    def backward(number: int, layers: slice = slice(None)) -> None:
        mine = models[number]
        member = members.comms[number].member_id
        torch.stack([(code(member) * parameter).sum() for parameter in mine[layers]]).sum().backward()

    # The victim's backward gets as far as the last layers, and the others' ends.
    backward(2, slice(4, None))
    started = set(exchange(averagers[2])._works)
    for number in (0, 1):
        backward(number)
    count = len(exchange(averagers[0]).buckets)
    assert 0 < len(started) < count
    for averager in averagers[:2]:
        works = exchange(averager)._works
        wait_until(lambda works=works: all(works[bucket].done() for bucket in started))  # type: ignore[misc]
        assert not any(work.done() for bucket, work in works.items() if bucket not in started)
    cluster.kill_peer(2)
    with ThreadPoolExecutor(2) as pool:
        infos = [each.result(60) for each in [pool.submit(averager.finish, 60) for averager in averagers[:2]]]
    for number, info in enumerate(infos):
        assert not info.complete and info.members == tuple(id for id in ids if id != ids[2]) and info.world_size == 3
        assert 0 < info.lost < 1 / 3  # some buckets have all three
        for bucket, op in zip(exchange(averagers[number]).buckets, info.infos, strict=True):
            for place in bucket.numbers:
                gradient = grad(exchange_parameter(models[number], place))
                if gradient.numel():
                    average = float(gradient.flatten()[0])
                    assert givers(average, op.world_size, ids) == set(op.members)
        assert {op.world_size for bucket, op in enumerate(info.infos) if bucket in started} == {3}
        assert {op.world_size for bucket, op in enumerate(info.infos) if bucket not in started} == {2}
    assert_equal_at_all([[grad(each) for each in model] for model in models[:2]])

    # Two are left. One of them dies before it has started an op of the next step.
    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(comm.begin_step, 60) for comm in members.comms[:2]]:
            each.result(60)
        set_gradients(models[0], code(ids[0]))
        waiting = pool.submit(lh.torch.average_gradients, models[0], members.comms[0], timeout=60)
        wait_for_open_ops([cluster.peers[0]])
        cluster.kill_peer(1)
        info = waiting.result(60)
    assert info.complete and info.members == (members.comms[0].member_id,)
    assert info.lost == 0.5 and info.world_size == 2
    assert float(grad(models[0][0])[0, 0]) == code(ids[0])

    # The survivor of a lost peerd joins again, with the averager it has.
    averagers[1].comm = comm = rejoin(members, cluster)
    set_gradients(models[0], 1)
    set_gradients(models[1], 3)
    with ThreadPoolExecutor(2) as pool:
        ended = [pool.submit(averagers[number].finish, 60) for number in (0, 1)]
        assert all(each.result(60).members == comm.members for each in ended)
    assert float(grad(models[0][0])[0, 0]) == float(grad(models[1][0])[0, 0]) == 2


def rejoin(members: Members, cluster: LocalCluster) -> lh.Comm:
    """A member of a dead peerd joins again through that of the first member."""
    members.comms[1:] = []
    members.add(cluster.socket(0))
    return members.comms[1]


def exchange_parameter(model: list[torch.nn.Parameter], place: int) -> torch.nn.Parameter:
    """An averager holds the parameters in reverse order."""
    return model[::-1][place]
