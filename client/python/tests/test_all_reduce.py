"""What all_reduce computes, which tensors it takes, and when the tensors are free again."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Members, wait_for_open_ops, wait_until

import longhaul as lh
from longhaul._work import AnyOp
from longhaul.testing import LocalCluster

NUMPY = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64"]
OPS = {
    "sum": lambda rows: rows.sum(0),
    "avg": lambda rows: rows.sum(0) / len(rows),
    "prod": lambda rows: rows.prod(0),
    "min": lambda rows: rows.min(0),
    "max": lambda rows: rows.max(0),
}


def rows(members: int, count: int) -> np.ndarray:
    """Small integers: exact in every dtype and op. For three members, the sum of a column is a multiple of 3."""
    base = np.arange(count) % 3 + 1
    return np.stack([np.roll(base, member) if count % 3 == 0 else base for member in range(members)])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", NUMPY)
def test_every_dtype_and_op_is_exact(three: Members, dtype: str, op: str) -> None:
    data = rows(3, 999)

    def reduce(comm: lh.Comm) -> np.ndarray:
        tensor = comm.empty(999, dtype)
        tensor[:] = data[comm.rank]
        info = comm.all_reduce(tensor, op, timeout=30)
        assert info.world_size == 3
        assert info.members == comm.members
        assert not info.staged
        return tensor

    expected = OPS[op](data).astype(dtype)
    for result in three.all(reduce):
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("arena", [True, False])
def test_torch_tensors_are_reduced(cluster: LocalCluster, pair: Members, dtype: torch.dtype, arena: bool) -> None:
    def reduce(comm: lh.Comm) -> tuple[torch.Tensor, lh.OpInfo]:
        if arena:
            tensor = lh.torch.empty(40, 25, dtype=dtype, peerd=cluster.socket(comm.rank))
        else:
            tensor = torch.empty(40, 25, dtype=dtype)
        tensor.fill_(comm.rank + 1)
        return tensor, comm.all_reduce(tensor, "sum", timeout=30)

    # Member i uses peer i, and has rank i.
    for tensor, info in pair.all(reduce):
        assert tensor.shape == (40, 25)
        assert bool((tensor == 3).all())
        assert info.staged is not arena


@pytest.mark.parametrize("arena", [True, False])
@pytest.mark.parametrize("count", [1, 5, 1000, 1_000_003, 3_000_017])
def test_out_of_place_leaves_the_source(pair: Members, arena: bool, count: int) -> None:
    def reduce(comm: lh.Comm) -> np.ndarray:
        make = comm.empty if arena else np.empty
        source, target = make(count, "float32"), make(count, "float32")
        source[:] = comm.rank + 1
        target[:] = -1
        comm.all_reduce(source, "sum", out=target, timeout=60)
        assert (source == comm.rank + 1).all()
        return target

    for target in pair.all(reduce):
        assert (target == 3).all()


def test_a_view_of_a_larger_array_is_reduced_alone(pair: Members) -> None:
    def reduce(comm: lh.Comm) -> np.ndarray:
        whole = comm.empty((4, 100))
        whole[:] = 1
        comm.all_reduce(whole[1:3], "sum", timeout=30)
        return whole

    for whole in pair.all(reduce):
        assert whole.sum(1).tolist() == [100, 200, 200, 100]


def test_tensors_are_of_any_alignment_outside_the_arena(pair: Members) -> None:
    def reduce(comm: lh.Comm) -> None:
        tensor = np.frombuffer(bytearray(4001), np.float32, 1000, offset=1)
        assert not tensor.flags.aligned
        tensor[:] = comm.rank + 1
        assert comm.all_reduce(tensor, timeout=30).staged
        assert (tensor == 3).all()
        within = np.frombuffer(comm.empty(4001, "uint8"), np.float32, 1000, offset=1)
        with pytest.raises(lh.InvalidArgument, match="not aligned.*pass a copy"):
            comm.all_reduce(within)

    pair.all(reduce)


def test_tags_may_be_started_in_any_order(three: Members) -> None:
    def reduce(comm: lh.Comm) -> list[float]:
        tensors = [comm.empty(10_000) for _ in range(12)]
        order = list(range(12))
        order = order[comm.rank * 4 :] + order[: comm.rank * 4]
        works = {}
        for tag in order:
            tensors[tag][:] = tag
            works[tag] = comm.all_reduce(tensors[tag], tag=tag, async_op=True)
        for work in works.values():
            work.wait(timeout=60)
        assert all(work.done() for work in works.values())
        return [float(tensor[0]) for tensor in tensors]

    assert three.all(reduce) == [[3.0 * tag for tag in range(12)]] * 3


def test_info_says_what_happened(pair: Members) -> None:
    def reduce(comm: lh.Comm) -> lh.OpInfo:
        work = comm.all_reduce(comm.empty(1 << 20), async_op=True)
        info = work.wait(60)
        assert work.info == info
        assert work.wait(0) == info  # as often as you like
        return info

    for info in pair.all(reduce):
        assert info.world_size == 2
        assert info.epoch == pair.comms[0].epoch
        assert info.retries == 0
        # A ring of two sends half of the tensor twice.
        assert info.bytes_sent == info.bytes_received == 4 << 20
        assert 0 <= info.seconds_wait <= info.seconds


def test_a_wait_that_times_out_leaves_the_op_going(pair: Members) -> None:
    first, second = pair.comms
    tensor = np.ones(1000, np.float32)
    with pytest.raises(lh.DeadlineExceeded) as late:
        first.all_reduce(tensor, timeout=0.1)
    work = late.value.work
    assert work is not None
    assert not work.done()
    with pytest.raises(lh.FailedPrecondition):
        _ = work.info
    with pytest.raises(lh.DeadlineExceeded):
        work.wait(timeout=0)
    second.all_reduce(np.ones(1000, np.float32), timeout=30)
    assert work.wait(timeout=30).world_size == 2
    assert (tensor == 2).all()


def test_an_op_that_nobody_waits_for_keeps_its_tensor(pair: Members) -> None:
    first, second = pair.comms
    for tag in range(5):  # the op before may still be in flight at this member
        tensor = first.empty(100_000)
        tensor[:] = 1
        first.all_reduce(tensor, tag=tag, async_op=True)  # the Work is dropped
        del tensor
        gc.collect()
        other = first.empty(100_000)  # must not get the memory of the op in flight
        other[:] = 77
        result = second.empty(100_000)
        result[:] = 2
        second.all_reduce(result, tag=tag, timeout=30)
        assert (result == 3).all()
        assert (other == 77).all()


def test_an_op_that_nobody_waits_for_tells_the_log_that_it_failed(
    pair: Members, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = pair.comms

    def swept(op: AnyOp) -> bool:
        first._client.sweep()  # as the next call does
        return op.outcome is not None

    work = first.all_reduce(np.ones(11, np.float32), async_op=True)
    refused = first.all_reduce(np.ones(12, np.float32), async_op=True)._op  # the tag is in flight; the Work is dropped
    wait_until(lambda: swept(refused))
    assert "float32 x 12, tag 0: all-reduce tag 0 refused: this member has an op with this tag in flight" in caplog.text
    assert "nobody waits for this op" in caplog.text
    cancelled = work._op
    work.cancel()
    del work
    wait_until(lambda: swept(cancelled))
    with pytest.raises(lh.Aborted):
        second.all_reduce(np.ones(11, np.float32), timeout=60)
    assert "float32 x 11, tag 0: " not in caplog.text, "every call of the member tells that others have ended the op"


def test_members_that_differ_are_told_both_offers(pair: Members) -> None:
    def reduce(comm: lh.Comm) -> str:
        with pytest.raises(lh.InvalidArgument) as refused:
            comm.all_reduce(np.ones(10 + comm.rank, np.float32), timeout=30)
        return str(refused.value)

    for text in pair.all(reduce):
        assert "10" in text
        assert "11" in text


@pytest.mark.parametrize(
    "tensor, named",
    [
        (np.ones((4, 4), np.float32).T, "contiguous"),
        (np.ones(8, np.float32)[::2], "contiguous"),
        (np.ones(3, np.complex64), "complex64"),
        (np.ones(3, ">f4"), "dtype"),
        (np.frombuffer(b"12345678", np.float32), "read-only"),
        (np.ma.masked_array(np.ones(3, np.float32), [False, True, False]), "filled"),
        (torch.ones(4, 4).t(), "contiguous"),
        (torch.ones(3, dtype=torch.complex64), "complex64"),
        (torch.ones(3, device="meta"), "meta"),
        (torch.eye(3).to_sparse(), "to_dense"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_tensor_that_cannot_be_sent_is_refused_with_what_to_do(pair: Members, tensor: Any, named: str) -> None:
    with pytest.raises(lh.InvalidArgument, match=named):
        pair.comms[0].all_reduce(tensor)


@pytest.mark.parametrize(
    "arguments, error, named",
    [
        ({"op": "mean"}, lh.InvalidArgument, "avg"),
        ({"on_fault": "panic"}, lh.InvalidArgument, "retry"),
        ({"tag": -1}, lh.InvalidArgument, "tag"),
        ({"tag": 1 << 64}, lh.InvalidArgument, "tag"),
        ({"tag": "x"}, lh.InvalidArgument, "tag is 'x'"),
        ({"tag": True}, lh.InvalidArgument, "tag is True"),
        ({"tag": 1.0}, lh.InvalidArgument, "tag is 1.0"),
        ({"min_world": None}, lh.InvalidArgument, "min_world is None"),
        ({"out": np.ma.masked_array(np.ones(3, np.float32), [False, True, False])}, lh.InvalidArgument, "filled"),
        ({"out": np.ones(4, np.float32)}, lh.InvalidArgument, "same dtype and shape"),
        ({"out": np.ones(3, np.float64)}, lh.InvalidArgument, "same dtype and shape"),
        ({"timeout": -1}, ValueError, "timeout"),
        ({"timeout": 1, "async_op": True}, lh.InvalidArgument, "wait"),
        ({"out": [1, 2, 3]}, lh.InvalidArgument, "out must be one tensor, too"),
        ({"weight": -1.0}, lh.InvalidArgument, "weight is -1"),
        ({"weight": "x"}, lh.InvalidArgument, "weight is 'x'"),
        ({"weight": 1.0, "op": "max"}, lh.InvalidArgument, "reduce is max, not sum or avg with weights"),
        ({"order": "rang"}, lh.InvalidArgument, "any, rank"),
        ({"order": "rank", "algorithm": "ring"}, lh.InvalidArgument, "algorithm is ring"),
        ({"participants": []}, lh.InvalidArgument, "participants is empty"),
        ({"participants": [1 << 63]}, lh.InvalidArgument, "is no member of the group"),
        ({"root": 1}, TypeError, "root"),
    ],
)
def test_a_wrong_argument_is_refused_with_what_to_do(
    pair: Members, arguments: dict[str, Any], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        pair.comms[0].all_reduce(np.ones(3, np.float32), **arguments)


def test_survivors_redo_an_op_in_flight(cluster: LocalCluster) -> None:
    with LocalCluster(peers=1, coordinator=cluster.coordinator) as victim:
        members = Members([cluster.socket(0), cluster.socket(1), victim.socket(0)])
        doomed = members.comms.pop()  # kept: a communicator that nobody has any more leaves
        survivors = members.comms
        works = [comm.all_reduce(np.full(50_000, 1 + i, np.float32), async_op=True) for i, comm in enumerate(survivors)]
        wait_for_open_ops(cluster.peers[:2])
        victim.kill_peer(0)
        for work in works:
            info = work.wait(timeout=60)
            assert info.world_size == 2
            assert info.members == survivors[0].members
        assert [comm.world_size for comm in survivors] == [2, 2]
        with pytest.raises(lh.Unavailable):
            doomed.begin_step(timeout=60)
        members.close()


def test_on_fault_abort_gives_the_inputs_back(cluster: LocalCluster) -> None:
    with LocalCluster(peers=1, coordinator=cluster.coordinator) as victim:
        members = Members([cluster.socket(0), cluster.socket(1), victim.socket(0)])
        doomed = members.comms.pop()  # kept: a communicator that nobody has any more leaves
        survivors = members.comms
        tensors = [np.full(50_000, 1 + i, np.float32) for i in range(2)]
        works = [
            comm.all_reduce(tensor, on_fault="abort", async_op=True)
            for comm, tensor in zip(survivors, tensors, strict=True)
        ]
        # The ops must be announced before the death. Later ones belong to the epoch without the victim.
        wait_for_open_ops(cluster.peers[:2])
        victim.kill_peer(0)
        for work in works:
            with pytest.raises(lh.Aborted):
                work.wait(timeout=60)
        with pytest.raises(lh.Unavailable):
            doomed.begin_step(timeout=60)
        for i, tensor in enumerate(tensors):
            assert (tensor == 1 + i).all()
        members.close()


def test_two_members_of_a_host_may_not_write_to_memory_that_both_have_in_an_op(cluster: LocalCluster) -> None:
    members = Members([cluster.socket(0), cluster.socket(0), cluster.socket(1)])
    try:
        first, second, third = members.comms
        memory = first.empty(3000, "float32")
        memory[:] = 1
        works = [
            first.all_reduce(memory[:1000], out=memory[1000:2000], async_op=True),
            third.all_reduce(np.full(1000, 3, "float32"), async_op=True),
        ]
        wait_for_open_ops([cluster.peers[0]])
        with pytest.raises(lh.InvalidArgument, match="the source of member .* the target of member") as refused:
            second.all_reduce(memory[1999:2999], out=second.empty(1000, "float32"), timeout=30)
        for comm in (first, second):
            assert f"m{comm.member_id}" in str(refused.value)
        # The others do not wait for it in this op.
        for work in works:
            with pytest.raises(lh.InvalidArgument, match=f"of member m{second.member_id} was refused there"):
                work.wait(30)
        memory[:] = 1
        works = [
            first.all_reduce(memory[:1000], out=memory[1000:2000], async_op=True),
            second.all_reduce(memory[2000:], async_op=True),
            third.all_reduce(np.full(1000, 3, "float32"), async_op=True),
        ]
        for work in works:
            assert work.wait(30).world_size == 3
        np.testing.assert_array_equal(memory, np.repeat([1, 5, 5], 1000).astype("float32"))
    finally:
        members.close()


def test_ops_beyond_the_limit_of_peerd_wait_their_turn(pair: Members) -> None:
    """Thousands of ops at once, each member with its own order of waiting; a boundary and a leave come behind them."""

    def many(comm: lh.Comm) -> None:
        tensors = [comm.empty(1) for _ in range(3000)]
        works = []
        for tag, tensor in enumerate(tensors):
            tensor[:] = tag
            works.append(comm.all_reduce(tensor, op="sum", tag=tag, async_op=True))
        step = comm.begin_step(60)
        assert step.world_size == 2
        for work in works if comm.rank == 0 else reversed(works):
            work.wait(60)
        assert all(tensor[0] == 2 * tag for tag, tensor in enumerate(tensors))

    pair.all(many, timeout=120)
