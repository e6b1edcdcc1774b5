"""Ops and states of tensors on a GPU. Most tests use a fake device; those marked `gpu` need a real one."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from conftest import Members, wait_until
from fake_copier import DeviceTensor, FakeCopier

import longhaul as lh
from longhaul.testing import LocalCluster
from longhaul.torch import _copier
from longhaul.torch._buckets import buckets_of
from longhaul.torch._copier import DOWN, UP
from longhaul.torch._exchange import DeviceCopier

PATIENCE_S = 60.0


@pytest.fixture
def device() -> Iterator[FakeCopier]:
    with FakeCopier() as copier:
        yield copier


def ramp(rank: int, count: int = 1000) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) + 1000 * rank


def both(pair: Members, call: Callable[[lh.Comm], object]) -> None:
    pair.all(call, PATIENCE_S)


# ---------------------------------------------------------------------------- ops


@pytest.mark.parametrize("count", [0, 1, 1000, 300_000])
def test_a_device_tensor_is_reduced_in_place(pair: Members, device: FakeCopier, count: int) -> None:
    def call(comm: lh.Comm) -> None:
        mine = device.tensor(ramp(comm.rank, count))
        info = comm.all_reduce(mine, timeout=PATIENCE_S)
        assert info.world_size == 2 and info.staged
        assert torch.equal(device.read(mine), ramp(0, count) + ramp(1, count))

    both(pair, call)


def test_a_large_tensor_is_copied_in_pieces(pair: Members, device: FakeCopier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_copier, "PIECE_BYTES", 1 << 20)

    def call(comm: lh.Comm) -> None:
        mine = device.tensor(ramp(comm.rank, 600_000))
        comm.all_reduce(mine, timeout=PATIENCE_S)
        assert torch.equal(device.read(mine), ramp(0, 600_000) + ramp(1, 600_000))

    both(pair, call)
    for lane in (DOWN, UP):
        sizes = [size for name, size in device.log if name == lane]
        assert sorted(sizes) == sorted(2 * [1 << 20, 1 << 20, 2_400_000 - (2 << 20)])


def test_with_out_the_input_stays_as_it_is(pair: Members, device: FakeCopier) -> None:
    def call(comm: lh.Comm) -> None:
        mine, out = device.tensor(ramp(comm.rank)), device.tensor(torch.zeros(1000))
        comm.all_reduce(mine, "avg", out=out, timeout=PATIENCE_S)
        assert torch.equal(device.read(mine), ramp(comm.rank))
        assert torch.equal(device.read(out), (ramp(0) + ramp(1)) / 2)
        host = torch.zeros(1000)
        comm.all_reduce(mine, out=host, timeout=PATIENCE_S)
        assert torch.equal(host, ramp(0) + ramp(1))

    both(pair, call)


Op = Callable[[lh.Comm, torch.Tensor, torch.Tensor], object]
OPS: dict[str, tuple[Op, int, int]] = {  # the op, and the elements of its tensor and its out
    "reduce": (lambda comm, tensor, out: comm.reduce(tensor, 1, timeout=60), 8, 8),
    "reduce to out": (lambda comm, tensor, out: comm.reduce(tensor, 0, out=out, timeout=60), 8, 8),
    "reduce_scatter": (lambda comm, tensor, out: comm.reduce_scatter(tensor, out=out, timeout=60), 8, 4),
    "all_gather": (lambda comm, tensor, out: comm.all_gather(tensor, out=out, timeout=60), 4, 8),
    "broadcast": (lambda comm, tensor, out: comm.broadcast(tensor, 1, timeout=60), 8, 8),
    "gather": (lambda comm, tensor, out: comm.gather(tensor, 1, out=out, timeout=60), 4, 8),
    "scatter": (lambda comm, tensor, out: comm.scatter(tensor, 1, out=out, timeout=60), 8, 4),
    "all_to_all": (lambda comm, tensor, out: comm.all_to_all(tensor, out=out, timeout=60), 8, 8),
    "unequal all_to_all": (
        lambda comm, tensor, out: comm.all_to_all(
            tensor, out=out, counts=[[3, 5], [5, 3]][comm.rank], out_counts=[[3, 5], [5, 3]][comm.rank], timeout=60
        ),
        8,
        8,
    ),
    "send and recv": (
        lambda comm, tensor, out: comm.send(tensor, 1, timeout=60) if comm.rank == 0 else comm.recv(out, 0, timeout=60),
        8,
        8,
    ),
}


@pytest.mark.parametrize("name", OPS)
def test_an_op_does_the_same_on_the_device_as_on_the_cpu(pair: Members, device: FakeCopier, name: str) -> None:
    op, count, out_count = OPS[name]

    def call(comm: lh.Comm) -> None:
        tensor, out = ramp(comm.rank, count), torch.zeros(out_count)
        on_device = device.tensor(tensor), device.tensor(out)
        op(comm, tensor, out)
        op(comm, *on_device)
        assert torch.equal(device.read(on_device[0]), tensor)
        assert torch.equal(device.read(on_device[1]), out)

    both(pair, call)


def test_a_list_may_mix_dtypes_sizes_and_the_cpu(pair: Members, device: FakeCopier) -> None:
    shapes = [(3,), (0,), (4, 5), (100_000,), (1,)]
    dtypes = [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32, torch.int64]

    def call(comm: lh.Comm) -> None:
        values = [
            torch.full(shape, comm.rank + i + 1, dtype=dtype)
            for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
        ]
        mine = [device.tensor(value) for value in values[:-1]] + values[-1:]
        assert comm.all_reduce(mine, timeout=PATIENCE_S).world_size == 2
        for i, tensor in enumerate(mine):
            read = device.read(tensor) if isinstance(tensor, DeviceTensor) else tensor
            assert torch.equal(read, torch.full(shapes[i], 2 * i + 3, dtype=dtypes[i]))

    both(pair, call)
    assert len(device.log) == 2 * 2 * 3  # each way, at both members: the large tensor, and the small ones of each dtype


# ---------------------------------------------------------------------------- order


def test_the_op_waits_for_what_computes_its_tensor_and_the_caller_does_not(pair: Members, device: FakeCopier) -> None:
    def call(comm: lh.Comm) -> None:
        mine = device.tensor(torch.zeros(1000))
        with device.held("stream"):
            device.run(lambda: mine.as_subclass(torch.Tensor).copy_(ramp(comm.rank)))
            work = comm.all_reduce(mine, async_op=True)
            assert not work.done() and device.log == []
            with pytest.raises(lh.DeadlineExceeded) as late:
                work.wait(0)
            assert late.value.work is work
            ready.wait(PATIENCE_S)  # the block of both members ends only now
        work.wait(PATIENCE_S)
        assert torch.equal(device.read(mine), ramp(0) + ramp(1))

    ready = threading.Barrier(2)
    both(pair, call)


def test_the_stream_of_the_caller_goes_on_when_the_result_is_there(pair: Members, device: FakeCopier) -> None:
    seen: list[torch.Tensor] = []

    def call(comm: lh.Comm) -> None:
        mine = device.tensor(ramp(comm.rank))
        work = comm.all_reduce(mine, async_op=True)
        work.wait(PATIENCE_S)  # though the copy to the device is held back
        assert work.done()
        device.run(lambda: seen.append(mine.as_subclass(torch.Tensor).clone()))
        assert torch.equal(mine.as_subclass(torch.Tensor), ramp(comm.rank)) and seen == []
        ready.wait(PATIENCE_S)

    ready = threading.Barrier(2)
    with device.held(UP):
        both(pair, call)
    device.now().wait()
    assert len(seen) == 2 and all(torch.equal(each, ramp(0) + ramp(1)) for each in seen)


def test_each_stream_that_asks_waits_for_the_result(device: FakeCopier) -> None:
    # done() and a second wait() may come from another stream than the first wait(): each has its stream wait.
    followed: list[object] = []
    follow = device.follow

    def record(mark: _copier.Mark) -> None:
        followed.append(mark)
        follow(mark)

    device.follow = record  # type: ignore[method-assign]
    with LocalCluster(peers=1) as cluster, lh.join("alone", peerd=cluster.socket(0)) as comm:
        work = comm.all_reduce(device.tensor(ramp(0)), async_op=True)
        for ask in (lambda: work.wait(PATIENCE_S), work.done, lambda: work.wait(PATIENCE_S)):
            before = len(followed)
            assert ask()
            assert len(followed) > before
    assert len(set(map(id, followed))) == 1


def test_a_block_of_host_memory_is_not_written_before_the_last_result_has_left_it(
    pair: Members, device: FakeCopier
) -> None:
    # As if the second op were asked for in another stream than the first one: nothing else orders it.
    follow, device.follow = device.follow, lambda mark: None  # type: ignore[method-assign]

    def call(comm: lh.Comm) -> None:
        first, second = device.tensor(ramp(comm.rank, 500_000)), device.tensor(torch.ones(500_000))
        comm.all_reduce(first, timeout=PATIENCE_S)
        work = comm.all_reduce(second, async_op=True)  # in the same block of host memory
        assert not work.done()
        ready.wait(PATIENCE_S)
        if comm.rank == 0:
            gate.close()
        work.wait(PATIENCE_S)
        device.settle()
        assert torch.equal(device.read(first), ramp(0, 500_000) + ramp(1, 500_000))
        assert torch.equal(device.read(second), torch.full((500_000,), 2.0))

    ready = threading.Barrier(2)
    with contextlib.ExitStack() as gate:
        gate.enter_context(device.held(UP))
        both(pair, call)
    device.follow = follow  # type: ignore[method-assign]
    assert len(device.pinned) == 2  # one block at each member


def test_a_step_boundary_waits_for_ops_that_have_not_started(pair: Members, device: FakeCopier) -> None:
    first, second = pair.comms
    mine = device.tensor(ramp(0))
    with device.held("stream"):
        work = first.all_reduce(mine, async_op=True)
        with pytest.raises(lh.DeadlineExceeded, match="begin_step: ops on GPU tensors"):
            first.begin_step(0)
        with pytest.raises(lh.DeadlineExceeded, match="leave: ops on GPU tensors"):
            first.leave(0)
    other = second.all_reduce(ramp(1), async_op=True)
    both(pair, lambda comm: comm.begin_step(PATIENCE_S))
    assert work.wait(PATIENCE_S).world_size == other.wait(PATIENCE_S).world_size == 2


# ---------------------------------------------------------------------------- completion


def test_callbacks_futures_and_coroutines_find_the_result_in_the_tensor(pair: Members, device: FakeCopier) -> None:
    def call(comm: lh.Comm) -> None:
        seen: list[torch.Tensor] = []
        done = threading.Event()
        with device.held("stream"):
            mine = device.tensor(ramp(comm.rank))
            work = comm.all_reduce(mine, async_op=True)
            work.add_done_callback(lambda _: seen.append(mine.as_subclass(torch.Tensor).clone()))
            work.add_done_callback(lambda _: done.set())
        assert done.wait(PATIENCE_S)
        assert torch.equal(seen[0], ramp(0) + ramp(1))
        work.add_done_callback(lambda _: seen.append(mine.as_subclass(torch.Tensor).clone()))  # at once
        assert torch.equal(seen[1], ramp(0) + ramp(1))
        mine = device.tensor(ramp(comm.rank))
        assert comm.all_reduce(mine, async_op=True).future().result(PATIENCE_S).world_size == 2
        assert torch.equal(mine.as_subclass(torch.Tensor), ramp(0) + ramp(1))

        async def waits() -> lh.OpInfo:
            return await comm.all_reduce(mine, "avg", async_op=True)

        assert asyncio.run(waits()).world_size == 2

    both(pair, call)


def test_a_late_callback_waits_for_the_copy_to_the_device(cluster: LocalCluster, device: FakeCopier) -> None:
    with lh.join("late", peerd=cluster.socket(0)) as comm:
        with device.held(UP):
            work = comm.all_reduce(device.tensor(ramp(0)), async_op=True)
            work.wait(PATIENCE_S)
            asked = threading.Thread(target=lambda: seen.append(work.future().result(PATIENCE_S)))
            seen: list[lh.OpInfo] = []
            asked.start()
            asked.join(0.05)
            assert seen == []
        asked.join(PATIENCE_S)
        assert len(seen) == 1


def test_wait_any_waits_for_ops_on_device_tensors_too(pair: Members, device: FakeCopier) -> None:
    def call(comm: lh.Comm) -> None:
        with device.held("stream"):
            works = [comm.all_reduce(device.tensor(ramp(comm.rank)), tag=1, async_op=True)]
            with pytest.raises(lh.DeadlineExceeded):
                lh.wait_any(works, 0.01)
            works.append(comm.all_reduce(ramp(comm.rank), tag=2, async_op=True))
            assert lh.wait_any(works, PATIENCE_S) is works[1]
            ready.wait(PATIENCE_S)
        assert lh.wait_any(works[:1], PATIENCE_S) is works[0]

    ready = threading.Barrier(2)
    both(pair, call)


def test_the_result_of_a_dropped_work_arrives(pair: Members, device: FakeCopier) -> None:
    mine = [device.tensor(ramp(comm.rank)) for comm in pair.comms]
    for comm, tensor in zip(pair.comms, mine, strict=True):
        comm.all_reduce(tensor, async_op=True)
    gc.collect()

    def arrived() -> bool:
        for comm in pair.comms:
            comm._client.sweep()  # as each further op does
        return all(torch.equal(tensor.as_subclass(torch.Tensor), ramp(0) + ramp(1)) for tensor in mine)

    wait_until(arrived)


# ---------------------------------------------------------------------------- failures


def test_a_cancelled_op_leaves_the_tensors_alone(pair: Members, device: FakeCopier) -> None:
    mine = device.tensor(ramp(0))
    comm = pair.comms[0]
    with device.held("stream"):
        work = comm.all_reduce(mine, async_op=True)
        work.cancel()  # before it is at peerd: it goes there first, so that the other member hears of it
    with pytest.raises(lh.Aborted, match="cancelled all-reduce tag 0"):
        work.wait(PATIENCE_S)
    with pytest.raises(lh.Aborted, match="cancelled all-reduce tag 0"):
        pair.comms[1].all_reduce(ramp(1), timeout=PATIENCE_S)
    work = comm.all_reduce(mine, tag=1, async_op=True)
    wait_until(lambda: work._op.handle is not None)
    work.cancel()
    with pytest.raises(lh.Aborted):
        work.wait(PATIENCE_S)
    assert torch.equal(device.read(mine), ramp(0))
    assert [lane for lane, _ in device.log] == [DOWN, DOWN]
    with pytest.raises(lh.Aborted):  # the other member's part of the second op
        pair.comms[1].all_reduce(ramp(1), tag=1, timeout=PATIENCE_S)


def test_what_peerd_refuses_is_told_by_wait(pair: Members, device: FakeCopier) -> None:
    works = [pair.comms[0].all_reduce(device.tensor(ramp(0)), tag=3, async_op=True) for _ in range(2)]
    with pytest.raises(lh.InvalidArgument, match="tag 3"):
        works[1].wait(PATIENCE_S)
    pair.comms[1].all_reduce(ramp(1), tag=3, timeout=PATIENCE_S)
    works[0].wait(PATIENCE_S)


@pytest.mark.parametrize("lane", [DOWN, UP])
def test_a_failure_of_the_gpu_is_told(pair: Members, device: FakeCopier, lane: str) -> None:
    mine = device.tensor(ramp(0))
    if lane == DOWN:
        device.fails = "an illegal memory access"
        with pytest.raises(lh.FailedPrecondition, match="illegal memory access"):
            pair.comms[0].all_reduce(mine, timeout=PATIENCE_S)
    else:
        start = device.start_up

        def broken(*arguments: object) -> None:
            raise RuntimeError("an illegal memory access")

        device.start_up = broken  # type: ignore[assignment,method-assign]
        works = [
            comm.all_reduce(device.tensor(ramp(0)) if comm.rank else ramp(0), async_op=True) for comm in pair.comms
        ]
        works[0].wait(PATIENCE_S)
        with pytest.raises(lh.FailedPrecondition, match="illegal memory access"):
            works[1].wait(PATIENCE_S)
        device.start_up = start  # type: ignore[method-assign]


def test_no_op_while_a_graph_is_captured(pair: Members, device: FakeCopier) -> None:
    comm = pair.comms[0]
    work = comm.all_reduce(device.tensor(ramp(0)), async_op=True)
    (bucket,) = buckets_of(comm._client, [ramp(0)], 1 << 20)
    pinned = len(device.pinned)
    device.capture = True
    for call in (
        lambda: comm.all_reduce(device.tensor(ramp(0, 900_000)), tag=1, timeout=PATIENCE_S),
        lambda: lh.torch.empty(1000, pin_memory=True),
        lambda: work.wait(PATIENCE_S),
        lambda: _copier.BucketCopier().pack(bucket, [device.tensor(ramp(0))]),
        lambda: _copier.BucketCopier().unpack(bucket, [device.tensor(ramp(0))]),
    ):
        with pytest.raises(lh.FailedPrecondition, match="CUDA graph is being captured"):
            call()
    assert not work.done() and len(device.pinned) == pinned  # CUDA would end the capture
    device.capture = False
    pair.comms[1].all_reduce(ramp(1), timeout=PATIENCE_S)
    work.wait(PATIENCE_S)


def test_tensors_that_no_op_can_use_are_refused(pair: Members, device: FakeCopier) -> None:
    comm = pair.comms[0]
    with pytest.raises(lh.InvalidArgument, match="tensor is on meta; ops take tensors on the CPU and on CUDA"):
        comm.all_reduce(torch.empty(3, device="meta"))
    nowhere = device.tensor(ramp(0))
    nowhere.__class__ = type("Elsewhere", (DeviceTensor,), {"on": torch.device("cuda", 7)})
    with pytest.raises(lh.FailedPrecondition, match=r"cuda:7, and torch.cuda.is_available\(\) is False"):
        comm.all_reduce(nowhere)
    with pytest.raises(lh.InvalidArgument, match="not contiguous"):
        comm.all_reduce(device.tensor(torch.ones(4, 4)).t())
    whole = device.tensor(ramp(0))
    with pytest.raises(lh.InvalidArgument, match="share memory on cuda:0"):
        comm.all_reduce([whole[:600], whole[500:]])
    with FakeCopier(1) as other, pytest.raises(lh.InvalidArgument, match="on cuda:0 and on cuda:1"):
        comm.all_reduce([device.tensor(ramp(0)), other.tensor(ramp(0))])
    assert device.log == []


# ---------------------------------------------------------------------------- pinned memory


def test_blocks_are_kept_pinned_and_are_unpinned_before_they_are_freed(
    cluster: LocalCluster, device: FakeCopier
) -> None:
    def reduce(comm: lh.Comm, *counts: int) -> list[int]:
        """Reduces tensors of these lengths at the same time. Returns the sizes of all pinned blocks, in MiB."""
        values = [device.tensor(ramp(0, count)) for count in counts]
        works = [comm.all_reduce(value, tag=tag, async_op=True) for tag, value in enumerate(values)]
        for work in works:
            work.wait(PATIENCE_S)
        return sorted(size >> 20 for size in device.pinned.values())

    with lh.join("pinned", peerd=cluster.socket(0)) as comm:
        assert reduce(comm, 500_000) == [2]
        assert reduce(comm, 100, 100_000) == [2, 2, 2]  # blocks for small and middle-sized tensors
        for _ in range(3):
            assert reduce(comm, 2_000_000) == [2, 2, 2, 8]
            assert reduce(comm, 500_000) == [2, 2, 2, 8]
        assert reduce(comm, *600 * [100]) in ([2, 2, 2, 8], [2, 2, 2, 2, 8])  # hundreds of small ops share a block
        for counts in ((4_000_000, 4_000_000), 3 * (1_500_000,), (3_000_000, 1_000_000)):
            assert sum(reduce(comm, *counts)) <= 2 * 32 + 6  # twice the most at one time, and the blocks for small ones
    del comm
    gc.collect()
    wait_until(lambda: not device.pinned)


def test_ops_work_where_memory_cannot_be_pinned(pair: Members, device: FakeCopier) -> None:
    device.refuses = True
    both(pair, lambda comm: comm.all_reduce(device.tensor(ramp(comm.rank)), timeout=PATIENCE_S))
    assert not device.pinned


def test_empty_gives_pinned_tensors(cluster: LocalCluster, device: FakeCopier) -> None:
    small = lh.torch.empty(3, 4, dtype=torch.bfloat16, peerd=cluster.socket(0), pin_memory=True)
    large = lh.torch.empty(1 << 20, peerd=cluster.socket(0), pin_memory=True)
    assert small.shape == (3, 4) and device.pinned == {small.data_ptr(): 1 << 20, large.data_ptr(): 4 << 20}
    del small, large
    gc.collect()
    assert not device.pinned


def test_pinned_memory_needs_cuda(cluster: LocalCluster) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(lh.FailedPrecondition, match="is_available"):
        lh.torch.empty(3, peerd=cluster.socket(0), pin_memory=True)


# ---------------------------------------------------------------------------- buckets


def test_copies_of_three_buckets_and_the_network_overlap(pair: Members, device: FakeCopier) -> None:
    """The order of a loop that averages gradients in two buckets: nothing waits for the copy to the device."""

    def call(comm: lh.Comm) -> None:
        tensors = [device.tensor(ramp(comm.rank, 300_000)) for _ in range(2)]
        buckets = buckets_of(comm._client, tensors, 1 << 20)
        copier = _copier.BucketCopier()
        copier.pack(buckets[0], tensors[:1])
        work = comm.all_reduce(buckets[0].flat, async_op=True)
        copier.pack(buckets[1], tensors[1:])  # beside the op
        work.wait(PATIENCE_S)
        packed.wait(PATIENCE_S)  # the members share the lanes, which wait for what is held back
        copier.unpack(buckets[0], tensors[:1])  # held back
        comm.all_reduce(buckets[1].flat, timeout=PATIENCE_S)
        copier.unpack(buckets[1], tensors[1:])
        (again,) = copier.start_pack(buckets[0], [device.tensor(torch.ones(300_000))])  # after the held copy
        assert torch.equal(buckets[0].flat, ramp(0, 300_000) + ramp(1, 300_000))
        assert [lane for lane, _ in device.log] == 4 * [DOWN]
        ready.wait(PATIENCE_S)
        if comm.rank == 0:
            gate.close()
        again.wait()
        assert torch.equal(buckets[0].flat, torch.ones(300_000))
        for tensor in tensors:
            assert torch.equal(device.read(tensor), ramp(0, 300_000) + ramp(1, 300_000))

    packed = threading.Barrier(2, timeout=PATIENCE_S)
    ready = threading.Barrier(2, timeout=PATIENCE_S)
    with contextlib.ExitStack() as gate:
        gate.enter_context(device.held(UP))
        both(pair, call)


def test_a_bucket_may_have_another_dtype(cluster: LocalCluster, device: FakeCopier) -> None:
    with lh.join("wire", peerd=cluster.socket(0)) as comm:
        tensors = [device.tensor(ramp(0, 10)), device.tensor(torch.ones(2, 3)), device.tensor(torch.ones(0))]
        (bucket,) = buckets_of(comm._client, tensors, 1 << 20, dtype=torch.bfloat16)
        _copier.BucketCopier().pack(bucket, tensors)
        assert torch.equal(bucket.views[0], ramp(0, 10).bfloat16())
        bucket.flat.mul_(2)
        _copier.BucketCopier().unpack(bucket, tensors)
        assert torch.equal(device.read(tensors[0]), 2 * ramp(0, 10))
        assert torch.equal(device.read(tensors[1]), torch.full((2, 3), 2.0))


def test_an_op_on_a_bucket_waits_for_the_gpu_and_the_caller_does_not(pair: Members, device: FakeCopier) -> None:
    def call(comm: lh.Comm) -> None:
        copier = DeviceCopier()
        tensors = [device.tensor(torch.zeros(10)), ramp(comm.rank, 5), device.tensor(ramp(comm.rank, 300_000))]
        (bucket,) = buckets_of(comm._client, tensors, 4 << 20)  # of tensors on two devices
        with device.held("stream"):
            device.run(lambda: tensors[0].as_subclass(torch.Tensor).add_(1))
            work = copier.all_reduce(comm, bucket, tensors, "sum", tag=5)
            assert not work.done()
            ready.wait(PATIENCE_S)
        info = work.wait(PATIENCE_S)
        assert info.world_size == 2 and not info.staged
        copier.unpack(bucket, tensors)
        assert torch.equal(device.read(tensors[0]), torch.full((10,), 2.0))
        assert torch.equal(tensors[1], ramp(0, 5) + ramp(1, 5))
        assert torch.equal(device.read(tensors[2]), ramp(0, 300_000) + ramp(1, 300_000))
        host = [ramp(comm.rank, 10), ramp(comm.rank, 5), ramp(comm.rank, 300_000)]
        assert copier.all_reduce(comm, bucket, host, "sum").wait(PATIENCE_S).world_size == 2
        assert torch.equal(bucket.views[2], ramp(0, 300_000) + ramp(1, 300_000))

    ready = threading.Barrier(2, timeout=PATIENCE_S)
    both(pair, call)


def test_a_bucket_is_pinned_once_for_all_devices(cluster: LocalCluster, device: FakeCopier) -> None:
    with lh.join("pinned", peerd=cluster.socket(0)) as comm, FakeCopier(1) as other:
        copier = _copier.BucketCopier()
        tensors = [device.tensor(ramp(0, 300_000)), other.tensor(ramp(1, 300_000))]
        (bucket,) = buckets_of(comm._client, tensors, 4 << 20)
        copier.pack(bucket, tensors)
        assert torch.equal(bucket.flat, torch.cat([ramp(0, 300_000), ramp(1, 300_000)]))
        assert list(device.pinned.values()) == [2_400_000] and not other.pinned
        bucket.flat.add_(1)
        copier.unpack(bucket, tensors)
        del bucket
        for number, tensor in enumerate(tensors):
            assert torch.equal((device, other)[number].read(tensor), ramp(number, 300_000) + 1)
        wait_until(lambda: not device.pinned)


def test_a_bucket_serves_the_tensors_that_it_was_made_for(cluster: LocalCluster, device: FakeCopier) -> None:
    with lh.join("buckets", peerd=cluster.socket(0)) as comm:
        (bucket,) = buckets_of(comm._client, [ramp(0)], 1 << 20)
        with pytest.raises(lh.InvalidArgument, match="is on meta"):
            _copier.BucketCopier().pack(bucket, [torch.empty(1000, device="meta")])
        with pytest.raises(lh.InvalidArgument, match="lengths differ"):
            _copier.BucketCopier().pack(bucket, [device.tensor(ramp(0, 5))])


# ---------------------------------------------------------------------------- states


def test_states_of_device_tensors_go_through_pinned_memory(pair: Members, device: FakeCopier) -> None:
    def call(comm: lh.Comm) -> None:
        large = device.tensor(ramp(comm.rank, 300_000))
        gaps = device.tensor(torch.full((4, 6), float(comm.rank)))
        state = lh.State({"large": large, "gaps": gaps.t()}, revision=0)
        state.touch()
        if comm.rank == 0:
            state.revision = 1
        comm.sync_state(state, timeout=PATIENCE_S)
        device.settle()
        assert torch.equal(device.read(large), ramp(0, 300_000))
        assert torch.equal(device.read(gaps), torch.zeros(4, 6))
        assert 1_200_000 in device.pinned.values()

    both(pair, call)


# ---------------------------------------------------------------------------- the calls of CUDA


class Cuda:
    """Stands for torch.cuda: writes down the calls of the real copier. Its device is the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.code = 0
        self._events = 0
        names = iter(("down", "up", "second down", "second up"))
        self._current = self._stream("current")
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: self._stream(next(names)))
        monkeypatch.setattr(torch.cuda, "Event", self._event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self._current)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self.calls.append(f"{stream} uses"))

    def _stream(self, name: str) -> object:
        def call(what: str) -> None:
            self.calls.append(f"{name} {what}")

        stream = type("Stream", (), {"__str__": lambda stream: name})()
        stream.wait_event = lambda event: call(f"waits for {event.number}")
        stream.synchronize = lambda: call("ends")
        return stream

    def _event(self, *, blocking: bool) -> object:
        self._events += 1
        event = type("Event", (), {"number": self._events})()
        event.record = lambda stream: self.calls.append(f"{stream} marks {event.number}")
        event.synchronize = lambda: self.calls.append(f"the host waits for {event.number}")
        assert blocking
        return event

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append(f"pin {nbytes} {flags}")
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append("unpin")
        return 0


def test_the_real_copier_orders_its_streams_with_events(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    copier = _copier.CudaCopier(torch.device("cpu"))
    with lh.join("cuda", peerd=cluster.socket(0)) as comm:
        tensors = [torch.ones(300_000), torch.full((2, 3), 2.0)]
        (bucket,) = buckets_of(comm._client, tensors, 4 << 20)
        copier.start_pack_part(bucket, bucket.flat, tensors).wait()
        assert torch.equal(bucket.views[1], tensors[1])
        bucket.flat.mul_(3)
        copier.unpack_part(bucket, bucket.flat, tensors)
        assert torch.equal(tensors[0], torch.full((300_000,), 3.0)) and torch.equal(tensors[1], torch.full((2, 3), 6.0))
        copier.start_pack_part(bucket, bucket.flat, tensors)
        bucket_bytes = bucket.nbytes
        del bucket
    assert cuda.calls == [
        f"pin {bucket_bytes} 0",
        *["current marks 1", "down waits for 1", "down uses", "down uses", "down marks 2", "the host waits for 2"],
        *["current marks 3", "up waits for 3", "up uses", "up uses", "up marks 4", "current waits for 4"],
        *["current marks 5", "down waits for 5", "down waits for 4", "down uses", "down uses", "down marks 6"],
        *["down ends", "up ends", "unpin"],
    ]


def test_memory_is_unpinned_when_all_devices_have_done_their_copies(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = Cuda(monkeypatch)
    first, second = (_copier.CudaCopier(torch.device("cpu")) for _ in range(2))
    with lh.join("cuda", peerd=cluster.socket(0)) as comm:
        (bucket,) = buckets_of(comm._client, [torch.ones(300_000)], 4 << 20)
        first.unpack_part(bucket, bucket.flat, [torch.ones(300_000)])
        second.unpack_part(bucket, bucket.flat, [torch.ones(300_000)])
        cuda.calls.clear()
        del bucket
    assert cuda.calls == ["second down ends", "second up ends", "down ends", "up ends", "unpin"]


def test_memory_that_cuda_does_not_pin_is_used_all_the_same(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = Cuda(monkeypatch)
    cuda.code = 2
    copier = _copier.CudaCopier(torch.device("cpu"))
    with lh.join("cuda", peerd=cluster.socket(0)) as comm:
        tensors = [torch.ones(300_000)]
        (bucket,) = buckets_of(comm._client, tensors, 4 << 20)
        copier.start_pack_part(bucket, bucket.flat, tensors).wait()
        assert torch.equal(bucket.flat, tensors[0])
        del bucket
    assert "CUDA refuses to pin 1200000 bytes of shared memory (cudaError 2)" in caplog.text
    assert "unpin" not in cuda.calls


# ---------------------------------------------------------------------------- a real GPU

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch.cuda.is_available() is False")


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("count", [1, 1000, 40_000_000])
def test_cuda_tensors_are_reduced(pair: Members, dtype: torch.dtype, count: int) -> None:
    def call(comm: lh.Comm) -> None:
        host = torch.randint(0, 100, (count,), generator=torch.Generator().manual_seed(comm.rank)).to(dtype)
        mine = host.cuda()
        comm.all_reduce(mine, timeout=PATIENCE_S)
        comm.all_reduce(host, timeout=PATIENCE_S)
        assert torch.equal(mine.cpu(), host)

    both(pair, call)


@pytest.mark.gpu
@gpu
def test_a_list_of_cuda_tensors_is_reduced(pair: Members) -> None:
    def call(comm: lh.Comm) -> None:
        host = [torch.full((size,), float(comm.rank + 1)) for size in (3, 0, 5000, 1_000_000, 7)]
        mine, out = [tensor.cuda() for tensor in host], [torch.zeros_like(tensor, device="cuda") for tensor in host]
        comm.all_reduce(mine, out=out, timeout=PATIENCE_S)
        for before, tensor, result in zip(host, mine, out, strict=True):
            assert torch.equal(tensor.cpu(), before) and torch.equal(result.cpu(), torch.full_like(before, 3))

    both(pair, call)


@pytest.mark.gpu
@gpu
def test_cuda_ops_are_ordered_with_the_stream_of_the_caller(pair: Members) -> None:
    def call(comm: lh.Comm) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            mine = torch.zeros(10_000_000, device="cuda")
            for turn in range(5):
                torch.cuda._sleep(50_000_000)  # the kernels before the op are still waiting when the op is asked for
                mine.fill_(comm.rank + turn)
                work = comm.all_reduce(mine, async_op=True)
                work.wait(PATIENCE_S)
                assert torch.equal((mine + 1).cpu(), torch.full((10_000_000,), 2.0 + 2 * turn))

    both(pair, call)


@pytest.mark.gpu
@gpu
def test_cuda_buckets_are_pinned_and_converted(pair: Members) -> None:
    def call(comm: lh.Comm) -> None:
        tensors = [torch.full((1000 * i + 1,), float(i), device="cuda") for i in range(60)]
        copier = _copier.BucketCopier()
        (bucket,) = buckets_of(comm._client, tensors, 64 << 20, dtype=torch.bfloat16)
        copier.pack(bucket, tensors)
        assert bucket.flat.is_pinned()
        comm.all_reduce(bucket.flat, timeout=PATIENCE_S)
        copier.unpack(bucket, tensors)
        for i, tensor in enumerate(tensors):
            assert torch.equal(tensor.cpu(), torch.full((1000 * i + 1,), 2.0 * i))

    both(pair, call)


@pytest.mark.gpu
@gpu
def test_states_of_cuda_tensors_are_synced(pair: Members) -> None:
    def call(comm: lh.Comm) -> None:
        tensors = {"w": torch.full((1_000_000,), float(comm.rank), device="cuda"), "t": torch.ones(3, 4).cuda().t()}
        state = lh.State(tensors, revision=1 - comm.rank)
        comm.sync_state(state, timeout=PATIENCE_S)
        assert torch.equal(tensors["w"].cpu(), torch.zeros(1_000_000))

    both(pair, call)


@pytest.mark.gpu
@gpu
def test_a_cuda_graph_that_is_captured_is_noticed(pair: Members) -> None:
    mine = torch.ones(1000, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(lh.FailedPrecondition, match="captured"):
        pair.comms[0].all_reduce(mine)


def test_gradients_on_a_device_are_averaged(pair: Members, device: FakeCopier) -> None:
    def call(comm: lh.Comm) -> None:
        parameters = [torch.nn.Parameter(device.tensor(torch.zeros(count))) for count in (1000, 7)]
        for parameter in parameters:
            parameter.grad = device.tensor(ramp(comm.rank, len(parameter)))
        info = lh.torch.average_gradients(parameters, comm, timeout=PATIENCE_S)
        assert info.complete and info.lost == 0
        for parameter in parameters:
            assert parameter.grad is not None
            count = len(parameter)
            assert torch.equal(device.read(parameter.grad), (ramp(0, count) + ramp(1, count)) / 2)

    both(pair, call)
