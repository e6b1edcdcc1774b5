"""All collectives but all-reduce: results, shapes that are refused, options, and what a death does to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Members, wait_for_open_ops, wait_until
from test_all_reduce import NUMPY, OPS, rows

import longhaul as lh
from longhaul.testing import LocalCluster

# One-shot, one segment, many segments.
COUNTS = [1, 3, 501, 1025, 1 << 18]
SMALL, LARGE = 12, 1 << 18


@pytest.fixture
def four(cluster: LocalCluster) -> Iterator[Members]:
    """Four members at three peers; the ranks at one peer are not consecutive."""
    members = Members([cluster.socket(i) for i in (0, 1, 0, 2)])
    yield members
    members.close()


def part_of(comm: lh.Comm, count: int, dtype: Any = np.float32) -> np.ndarray:
    """What the member of this rank has: small integers."""
    return ((np.arange(count) + 3 * comm.rank) % 7 + comm.rank).astype(dtype)


def parts(members: Members, count: int, dtype: Any = np.float32) -> np.ndarray:
    return np.concatenate([part_of(comm, count, dtype) for comm in sorted(members.comms, key=lambda comm: comm.rank)])


def new(comm: lh.Comm, arena: bool, values: np.ndarray) -> np.ndarray:
    tensor = comm.empty(values.shape, values.dtype.name) if arena else np.empty_like(values)
    tensor[:] = values
    return tensor


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", NUMPY)
def test_reduce_scatter_is_exact_in_every_dtype_and_op(three: Members, dtype: str, op: str) -> None:
    data = rows(3, 3 * 501)

    def call(comm: lh.Comm) -> tuple[int, np.ndarray]:
        tensor, out = new(comm, True, data[comm.rank].astype(dtype)), comm.empty(501, dtype)
        info = comm.reduce_scatter(tensor, op, out=out, timeout=30)
        assert info.members == comm.members
        np.testing.assert_array_equal(tensor, data[comm.rank].astype(dtype))
        return comm.rank, out

    expected = OPS[op](data).astype(dtype)
    for rank, out in three.all(call):
        np.testing.assert_array_equal(out, expected[501 * rank : 501 * (rank + 1)])


@pytest.mark.parametrize("arena", [True, False])
@pytest.mark.parametrize("count", COUNTS)
def test_reduce_scatter_of_members_that_share_hosts(four: Members, count: int, arena: bool) -> None:
    whole = [np.roll(np.arange(4 * count) % 5, rank).astype(np.int64) for rank in range(4)]

    def call(comm: lh.Comm) -> tuple[int, np.ndarray]:
        tensor, out = new(comm, arena, whole[comm.rank]), new(comm, arena, np.zeros(count, np.int64))
        comm.reduce_scatter(tensor, out=out, timeout=30)
        np.testing.assert_array_equal(tensor, whole[comm.rank])
        return comm.rank, out

    for rank, out in four.all(call):
        np.testing.assert_array_equal(out, np.stack(whole).sum(0)[count * rank : count * (rank + 1)])


@pytest.mark.parametrize("arena", [True, False])
@pytest.mark.parametrize("count", COUNTS)
def test_all_gather_puts_the_parts_in_rank_order(four: Members, count: int, arena: bool) -> None:
    def call(comm: lh.Comm) -> np.ndarray:
        tensor, out = new(comm, arena, part_of(comm, count)), new(comm, arena, np.zeros(4 * count, np.float32))
        info = comm.all_gather(tensor, out=out, timeout=30)
        assert info.members == comm.members and info.staged != arena
        np.testing.assert_array_equal(tensor, part_of(comm, count))
        return out

    for out in four.all(call):
        np.testing.assert_array_equal(out, parts(four, count))


@pytest.mark.parametrize("arena", [True, False])
@pytest.mark.parametrize("count", COUNTS)
def test_broadcast_from_every_root(four: Members, count: int, arena: bool) -> None:
    for root in range(4):
        expected = next(part_of(comm, count) for comm in four.comms if comm.rank == root)

        def call(comm: lh.Comm, root: int = root, expected: np.ndarray = expected) -> None:
            tensor = new(comm, arena, part_of(comm, count))
            out = new(comm, arena, np.zeros(count, np.float32))
            comm.broadcast(tensor, root_member=comm.members[root], out=out, timeout=30)
            np.testing.assert_array_equal(tensor, part_of(comm, count))
            np.testing.assert_array_equal(out, expected)
            comm.broadcast(tensor, root, timeout=30)
            np.testing.assert_array_equal(tensor, expected)

        four.all(call)


@pytest.mark.parametrize("arena", [True, False])
@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_a_part_may_lie_in_the_whole(three: Members, count: int, arena: bool) -> None:
    def call(comm: lh.Comm) -> None:
        mine = slice(count * comm.rank, count * (comm.rank + 1))
        whole = new(comm, arena, np.zeros(3 * count, np.float32))
        whole[mine] = part_of(comm, count)
        comm.all_gather(whole[mine], out=whole, timeout=30)
        np.testing.assert_array_equal(whole, parts(three, count))
        comm.reduce_scatter(whole, out=whole[mine], timeout=30)
        expected = parts(three, count)
        expected[mine] *= 3
        np.testing.assert_array_equal(whole, expected)

    three.all(call)


def test_a_shard_of_a_torch_parameter(three: Members) -> None:
    def call(comm: lh.Comm) -> None:
        grad = torch.full((3, 40, 25), float(comm.rank + 1), dtype=torch.bfloat16)
        shard = torch.empty(40, 25, dtype=torch.bfloat16)
        comm.reduce_scatter(grad, "avg", out=shard, timeout=30)
        assert torch.equal(shard, torch.full((40, 25), 2.0, dtype=torch.bfloat16))
        comm.all_gather(shard, out=grad, timeout=30)
        assert torch.equal(grad, torch.full((3, 40, 25), 2.0, dtype=torch.bfloat16))

    three.all(call)


def test_one_member_alone(cluster: LocalCluster) -> None:
    alone = Members([cluster.socket(0)])
    comm = alone.comms[0]
    for count in (SMALL, LARGE):
        tensor, out = part_of(comm, count), np.zeros(count, np.float32)
        for call in (comm.reduce_scatter, comm.all_gather, comm.broadcast):
            out[:] = 0
            assert call(tensor, out=out, timeout=30).algorithm == "local"
            np.testing.assert_array_equal(out, tensor)
    assert comm.barrier(timeout=30).world_size == 1
    alone.close()


def test_a_barrier_ends_when_everybody_has_come(three: Members) -> None:
    first = [comm.barrier(tag=5, async_op=True) for comm in three.comms[:2]]
    for work in [comm.barrier(tag=6, async_op=True) for comm in three.comms]:
        work.wait(30)
    assert not any(work.done() for work in first)
    three.comms[2].barrier(tag=5, timeout=30)
    for work in first:
        assert work.wait(30).world_size == 3


def test_shapes_that_do_not_fit_are_refused_before_anything_starts(pair: Members) -> None:
    comm = pair.comms[0]
    six, four, none = np.zeros(6, np.float32), np.zeros(4, np.float32), np.zeros(0, np.float32)
    refusals: list[tuple[str, Callable[[], object]]] = [
        ("as many as out for each member", lambda: comm.reduce_scatter(six, out=four)),
        ("as many as tensor for each member", lambda: comm.all_gather(six, out=four)),
        ("same dtype", lambda: comm.all_gather(six, out=np.zeros(12))),
        ("as many as tensor for each member", lambda: comm.all_gather(none, out=four)),
        ("root is rank 2, and the group has 2 members", lambda: comm.broadcast(six, 2)),
        ("no member", lambda: comm.broadcast(six, root_member=0)),
        ("algorithm is ring", lambda: comm.all_to_all(six, out=six, algorithm="ring")),
        ("algorithm is ring", lambda: comm.send(six, to=1 - comm.rank, algorithm="ring")),
        ("counts has 5 elements in all, tensor has 6", lambda: comm.reduce_scatter(six, out=four, counts=[4, 1])),
        ("counts and out_counts, or neither", lambda: comm.all_to_all(six, out=six, counts=[3, 3])),
        ("same dtype and number of elements", lambda: comm.all_to_all(six, out=four)),
        ("a part of the same length for each", lambda: comm.all_to_all(six[:5], out=np.zeros(5, np.float32))),
        ("needs an out", lambda: comm.gather(six, root=comm.rank)),
        ("needs a tensor", lambda: comm.scatter(root=comm.rank, out=six)),
        ("cannot send to itself", lambda: comm.send(six, to=comm.rank)),
        ("give to, a rank, or to_member", lambda: comm.send(six)),
        ("can only be moved", lambda: comm.all_reduce(torch.zeros(3).to(torch.float8_e5m2))),
        ("not sum, min or max for bool", lambda: comm.reduce(np.zeros(3, bool), op="avg")),
        ("at most 4096 bytes", lambda: comm.broadcast(np.zeros(2000, np.float32), algorithm="oneshot")),
    ]
    for text, call in refusals:
        with pytest.raises(lh.InvalidArgument, match=text):
            call()


def test_calls_of_different_kinds_are_refused_and_name_both(pair: Members) -> None:
    def call(comm: lh.Comm) -> str:
        tensor, out = np.zeros(8, np.float32), np.zeros(4, np.float32)
        with pytest.raises(lh.InvalidArgument) as refused:
            if comm.rank == 0:
                comm.reduce_scatter(tensor, out=out, timeout=30)
            else:
                comm.all_gather(out, out=tensor, timeout=30)
        return str(refused.value)

    for text in pair.all(call):
        assert "reduce-scatter, sum of float32 x 4" in text and "all-gather, float32 x 4" in text


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_members_that_name_different_roots_or_worlds_all_end_aborted(four: Members, count: int) -> None:
    def call(comm: lh.Comm) -> list[str]:
        tensor, expected = part_of(comm, count), part_of(comm, count)
        texts = []
        with pytest.raises(lh.Aborted) as aborted:
            comm.broadcast(tensor, comm.rank % 2, out=np.zeros(count, np.float32), timeout=30)
        texts.append(str(aborted.value))
        with pytest.raises(lh.Aborted) as aborted:
            comm.all_gather(tensor, out=np.zeros((4 + comm.rank % 2) * count, np.float32), timeout=30)
        texts.append(str(aborted.value))
        with pytest.raises(lh.Aborted) as aborted:
            comm.reduce_scatter(np.zeros(5 * count), out=np.zeros(count), timeout=30)
        assert "laid out for 5 members, and 4 take part" in str(aborted.value)
        np.testing.assert_array_equal(tensor, expected)
        return texts

    for broadcast, gather in four.all(call):
        assert "root" in broadcast, broadcast
        assert "world" in gather or "laid out" in gather, gather


# ------------------------------------------------------------------ roots and partners


@pytest.mark.parametrize("arena", [True, False])
@pytest.mark.parametrize("count", COUNTS)
def test_reduce_gather_and_scatter_with_every_root(four: Members, count: int, arena: bool) -> None:
    whole = parts(four, count)
    total = np.sum([part_of(comm, count) for comm in four.comms], axis=0)

    def call(comm: lh.Comm) -> None:
        for root in range(4):
            name: dict[str, Any] = {"root": root} if count % 2 else {"root_member": comm.members[root]}
            mine = new(comm, arena, part_of(comm, count))
            out = new(comm, arena, np.zeros(count, np.float32))
            comm.reduce(mine, out=out if comm.rank == root else None, timeout=30, **name)
            np.testing.assert_array_equal(mine, part_of(comm, count))
            np.testing.assert_array_equal(out, total if comm.rank == root else 0)
            all_parts = new(comm, arena, np.zeros(4 * count, np.float32))
            info = comm.gather(mine, out=all_parts if comm.rank == root else None, timeout=30, **name)
            assert info.members == comm.members
            np.testing.assert_array_equal(all_parts, whole if comm.rank == root else 0)
            all_parts[:] = whole if comm.rank == root else -1
            comm.scatter(all_parts if comm.rank == root else None, out=out, timeout=30, **name)
            np.testing.assert_array_equal(out, part_of(comm, count))
            comm.reduce(mine, timeout=30, **name)
            np.testing.assert_array_equal(mine, total if comm.rank == root else part_of(comm, count))

    four.all(call)


@pytest.mark.parametrize("arena", [True, False])
@pytest.mark.parametrize("count", COUNTS)
def test_all_to_all_turns_rows_into_columns(four: Members, count: int, arena: bool) -> None:
    def call(comm: lh.Comm) -> None:
        tensor = new(comm, arena, np.repeat(np.arange(4) + 10 * comm.rank, count).astype(np.int32))
        out = new(comm, arena, np.zeros(4 * count, np.int32))
        expected = np.repeat(10 * np.arange(4) + comm.rank, count)
        comm.all_to_all(tensor, out=out, timeout=30)
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(tensor, np.repeat(np.arange(4) + 10 * comm.rank, count))
        comm.all_to_all(tensor, out=tensor, timeout=30)
        np.testing.assert_array_equal(tensor, expected)

    four.all(call)


@pytest.mark.parametrize("arena", [True, False])
@pytest.mark.parametrize("count", [0, *COUNTS])
def test_a_ring_exchange_of_sends_and_receives(four: Members, count: int, arena: bool) -> None:
    def call(comm: lh.Comm) -> None:
        right, left = (comm.rank + 1) % 4, (comm.rank - 1) % 4
        mine = new(comm, arena and count > 0, part_of(comm, count))
        got = new(comm, arena and count > 0, np.zeros(count, np.float32))
        # Partners by rank and by id name the same member.
        sending = comm.send(mine, to_member=comm.members[right], async_op=True)
        info = comm.recv(got, source=left, timeout=30)
        assert set(info.members) == {comm.members[left], comm.member_id}
        assert sending.wait(30).world_size == 2
        np.testing.assert_array_equal(got, (np.arange(count) + 3 * left) % 7 + left)

    four.all(call)


def test_two_members_exchange_tensors_with_one_tag(pair: Members) -> None:
    def call(comm: lh.Comm) -> None:
        mine, got = np.full(LARGE, comm.rank, np.int32), np.zeros(LARGE, np.int32)
        sending = comm.send(mine, 1 - comm.rank, tag=3, async_op=True)
        comm.recv(got, 1 - comm.rank, tag=3, timeout=30)
        sending.wait(30)
        assert (got == 1 - comm.rank).all()

    pair.all(call)


# ------------------------------------------------------------------ participants


def test_disjoint_sets_reduce_at_the_same_time_with_the_same_tag(four: Members) -> None:
    def call(comm: lh.Comm) -> None:
        ids = comm.members
        mine = [ids[comm.rank % 2], ids[comm.rank % 2 + 2]]
        for count in (SMALL, LARGE):
            tensor = np.full(count, comm.rank + 1, np.float32)
            info = comm.all_reduce(tensor, participants=mine[:: 1 if comm.rank < 2 else -1], tag=5, timeout=30)
            assert info.members == tuple(mine)
            assert (tensor == (4 if comm.rank % 2 == 0 else 6)).all()
        gathered = np.zeros(2 * SMALL, np.float32)
        comm.all_gather(part_of(comm, SMALL), out=gathered, participants=mine, timeout=30)
        expected = [(np.arange(SMALL) + 3 * rank) % 7 + rank for rank in (comm.rank % 2, comm.rank % 2 + 2)]
        np.testing.assert_array_equal(gathered, np.concatenate(expected))
        out = np.zeros(SMALL, np.float32)
        comm.scatter(gathered, root_member=mine[0], out=out, participants=mine, timeout=30)
        np.testing.assert_array_equal(out, part_of(comm, SMALL))
        comm.barrier(participants=mine, timeout=30)

    four.all(call)


def test_a_set_keeps_its_name_when_one_of_it_has_died(four: Members) -> None:
    gone = four.comms[1]
    ids = [comm.member_id for comm in four.comms[:3]]
    without(four, gone)
    left = [four.comms[0], four.comms[1]]
    wait_until(lambda: all(comm.world_size == 3 for comm in left))
    tensors = [np.full(SMALL, 2.0, np.float32) for _ in left]
    works = [
        comm.all_reduce(tensor, participants=ids, async_op=True) for comm, tensor in zip(left, tensors, strict=True)
    ]
    for work, tensor in zip(works, tensors, strict=True):
        assert work.wait(30).world_size == 2
        assert (tensor == 4).all()


# ------------------------------------------------------------------ unequal parts

UNEQUAL = [3, 0, 70_000, 5]


@pytest.mark.parametrize("arena", [True, False])
def test_parts_of_unequal_lengths(four: Members, arena: bool) -> None:
    begins = np.cumsum([0, *UNEQUAL])
    whole = (np.arange(begins[-1]) % 11).astype(np.float32)

    def call(comm: lh.Comm) -> None:
        mine = whole[begins[comm.rank] : begins[comm.rank + 1]]
        shared = arena and len(mine) > 0

        def full(values: np.ndarray) -> np.ndarray:
            return new(comm, arena, values)

        out = new(comm, shared, np.zeros_like(mine))
        comm.reduce_scatter(full(whole), "avg", out=out, counts=UNEQUAL, timeout=30)
        np.testing.assert_array_equal(out, mine)
        everything = full(np.zeros_like(whole))
        comm.all_gather(new(comm, shared, mine), out=everything, counts=UNEQUAL, timeout=30)
        np.testing.assert_array_equal(everything, whole)
        root = comm.rank == 2
        everything[:] = 0
        comm.gather(
            new(comm, shared, mine), 2, out=everything if root else None, counts=UNEQUAL if root else (), timeout=30
        )
        np.testing.assert_array_equal(everything, whole if root else 0)
        out[:] = 0
        comm.scatter(full(whole) if root else None, 2, out=out, counts=UNEQUAL if root else (), timeout=30)
        np.testing.assert_array_equal(out, mine)

    four.all(call)


def test_all_to_all_of_unequal_parts(four: Members) -> None:
    lengths = [[(3 * giver + getter) % 4 * 1000 for getter in range(4)] for giver in range(4)]

    def call(comm: lh.Comm) -> None:
        gives = lengths[comm.rank]
        gets = [lengths[giver][comm.rank] for giver in range(4)]
        tensor = np.repeat(np.arange(4) + 10 * comm.rank, gives).astype(np.int64)
        out = np.zeros(sum(gets), np.int64)
        comm.all_to_all(tensor, out=out, counts=gives, out_counts=gets, timeout=30)
        np.testing.assert_array_equal(out, np.repeat(10 * np.arange(4) + comm.rank, gets))

    four.all(call)


def test_lengths_that_contradict_each_other_are_refused_at_all(pair: Members) -> None:
    def call(comm: lh.Comm) -> None:
        counts = [2, 4] if comm.rank else [3, 3]
        with pytest.raises(lh.InvalidArgument):
            comm.all_gather(
                np.zeros(counts[comm.rank], np.float32), out=np.zeros(6, np.float32), counts=counts, timeout=30
            )

    pair.all(call)


# ------------------------------------------------------------------ weights, order, dtypes


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_weights_multiply_and_divide(three: Members, count: int, dtype: str) -> None:
    weights = [2.0, 0.0, 6.0]
    values = [1.0, 100.0, 5.0]

    def call(comm: lh.Comm) -> None:
        tensor = np.full(count, values[comm.rank], dtype)
        assert comm.all_reduce(tensor, "avg", weight=weights[comm.rank], timeout=30).world_size == 3
        np.testing.assert_array_equal(tensor, np.full(count, 32 / 8, dtype))
        tensor[:] = values[comm.rank]
        comm.reduce(tensor, 1, "sum", weight=weights[comm.rank], timeout=30)
        np.testing.assert_array_equal(tensor, np.full(count, 32 if comm.rank == 1 else values[comm.rank], dtype))
        out = np.zeros(count, dtype)
        comm.reduce_scatter(np.full(3 * count, values[comm.rank], dtype), "avg", out=out, weight=weights[comm.rank])
        np.testing.assert_array_equal(out, np.full(count, 4, dtype))
        with pytest.raises(lh.TooFewMembers):
            comm.all_reduce(out, "avg", weight=0.0, timeout=30)
        np.testing.assert_array_equal(out, np.full(count, 4, dtype))

    three.all(call)


def test_a_weight_at_one_member_only_is_refused_at_all(pair: Members) -> None:
    def call(comm: lh.Comm) -> None:
        with pytest.raises(lh.InvalidArgument, match="weighted"):
            comm.all_reduce(np.ones(3, np.float32), weight=1.0 if comm.rank else None, timeout=30)

    pair.all(call)


@pytest.mark.parametrize("algorithm", ["auto", "oneshot", "mesh"])
def test_rank_order_gives_the_same_bits_with_every_algorithm(three: Members, algorithm: str) -> None:
    values = np.random.default_rng(1).standard_normal((3, 1000)).astype(np.float32)
    expected = (values[0] + values[1]) + values[2]

    def call(comm: lh.Comm) -> None:
        tensor = values[comm.rank].copy()
        info = comm.all_reduce(tensor, order="rank", algorithm=algorithm, timeout=30)
        assert info.algorithm != "ring"
        np.testing.assert_array_equal(tensor, expected)

    three.all(call)


@pytest.mark.parametrize("count", [SMALL, 100_000])
def test_bools_are_or_and_and(three: Members, count: int) -> None:
    rows_of = np.random.default_rng(2).random((3, count)) < 0.5

    def call(comm: lh.Comm) -> None:
        for op, expected in (("sum", rows_of.any(0)), ("max", rows_of.any(0)), ("min", rows_of.all(0))):
            tensor = torch.from_numpy(rows_of[comm.rank].copy())
            comm.all_reduce(tensor, op, timeout=30)
            np.testing.assert_array_equal(tensor.numpy(), expected)

    three.all(call)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("count", [SMALL, 300_000])
def test_float8_is_moved_bit_by_bit(pair: Members, dtype: torch.dtype, count: int) -> None:
    def bits(rank: int) -> torch.Tensor:
        return ((torch.arange(count) * 7 + rank) % 256).to(torch.uint8)

    def call(comm: lh.Comm) -> None:
        mine = bits(comm.rank).view(dtype)
        out = torch.zeros(2 * count, dtype=torch.uint8).view(dtype)
        comm.all_gather(mine, out=out, timeout=30)
        assert torch.equal(out.view(torch.uint8), torch.cat([bits(0), bits(1)]))
        comm.broadcast(mine, 1, timeout=30)
        assert torch.equal(mine.view(torch.uint8), bits(1))

    pair.all(call)


def test_tensors_without_elements(three: Members) -> None:
    def call(comm: lh.Comm) -> None:
        none = np.zeros((3, 0), np.float32)
        assert comm.all_reduce(none, timeout=30).world_size == 3
        comm.broadcast(none, 1, timeout=30)
        comm.reduce(none, 2, timeout=30)
        comm.all_to_all(none, out=none.copy(), timeout=30)
        comm.all_gather(none, out=none.copy(), timeout=30)
        comm.reduce_scatter(none, out=none.copy(), timeout=30)
        comm.gather(none, out=none.copy(), timeout=30)
        comm.scatter(none, out=none.copy(), timeout=30)

    three.all(call)


# ------------------------------------------------------------------ cancel


def cancelled(work: lh.Work) -> None:
    with pytest.raises(lh.Aborted, match="cancel"):
        work.wait(30)


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_a_cancelled_op_ends_at_all_members_also_at_those_that_start_it_later(three: Members, count: int) -> None:
    tensors = [np.full(count, 3.0, np.float32) for _ in three.comms]
    started = [three.comms[i].all_reduce(tensors[i], tag=1, async_op=True) for i in (0, 1)]
    started[0].cancel()
    for work in started:
        cancelled(work)
    cancelled(three.comms[2].all_reduce(tensors[2], tag=1, async_op=True))
    for tensor in tensors:
        assert (tensor == 3).all()
    started[0].cancel()  # it is over: nothing happens
    three.all(lambda comm: comm.all_reduce(np.ones(count, np.float32), tag=1, timeout=30))


def test_a_late_cancel_changes_nothing_or_everything(three: Members) -> None:
    tensors = [np.full(LARGE, 1.0 + i, np.float32) for i in range(3)]
    works = [comm.all_reduce(tensor, tag=2, async_op=True) for comm, tensor in zip(three.comms, tensors, strict=True)]
    works[1].cancel()
    ends = []
    for i, work in enumerate(works):
        try:
            work.wait(30)
            ends.append("good")
            assert (tensors[i] == 6).all()
        except lh.Aborted:
            ends.append("aborted")
            assert (tensors[i] == 1 + i).all()
    assert len(set(ends)) == 1, ends


# ------------------------------------------------------------------ deaths


def without(members: Members, gone: lh.Comm) -> None:
    """The member leaves while the others wait for it in an op."""
    members.comms.remove(gone)
    gone.leave(timeout=30)


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_an_all_gather_goes_on_without_the_part_of_a_member_that_leaves(four: Members, count: int) -> None:
    gone = four.comms[1]
    whole = {comm: np.full(4 * count, -1, np.float32) for comm in four.comms}
    mine = {comm: part_of(comm, count) for comm in four.comms}
    waiting = [comm for comm in four.comms if comm is not gone]
    works = [comm.all_gather(mine[comm], out=whole[comm], async_op=True) for comm in waiting]
    without(four, gone)
    for comm, work in zip(waiting, works, strict=True):
        info = work.wait(30)
        by_id = {each.member_id: mine[each] for each in waiting}
        assert set(info.members) == set(by_id)
        np.testing.assert_array_equal(whole[comm][: 3 * count], np.concatenate([by_id[i] for i in info.members]))


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_a_broadcast_goes_on_without_another_member_and_ends_without_its_root(four: Members, count: int) -> None:
    root, gone = four.comms[3], four.comms[1]
    root_id = root.member_id
    expected = part_of(root, count)

    def start() -> list[tuple[lh.Work, np.ndarray]]:
        started = []
        for comm in four.comms:
            if comm in (gone, root) and comm.member_id == leaver:
                continue
            tensor = expected.copy() if comm is root else np.zeros(count, np.float32)
            started.append((comm.broadcast(tensor, root_member=root_id, async_op=True), tensor))
        return started

    leaver = gone.member_id
    works = start()
    without(four, gone)
    for work, tensor in works:
        assert work.wait(30).world_size == 3
        np.testing.assert_array_equal(tensor, expected)
    leaver = root_id
    works = start()
    without(four, root)
    for work, _ in works:
        with pytest.raises(lh.Aborted, match=f"its root, member m?{root_id}.* does not take part"):
            work.wait(30)


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_a_reduce_scatter_ends_aborted_when_its_world_shrinks(four: Members, count: int) -> None:
    gone = four.comms[1]
    waiting = [comm for comm in four.comms if comm is not gone]
    tensors = [np.arange(4 * count, dtype=np.float32) for _ in waiting]
    outs = [np.full(count, 7, np.float32) for _ in waiting]
    works = [
        comm.reduce_scatter(tensor, out=out, async_op=True)
        for comm, tensor, out in zip(waiting, tensors, outs, strict=True)
    ]
    without(four, gone)
    for work, tensor, out in zip(works, tensors, outs, strict=True):
        with pytest.raises(lh.Aborted, match="laid out for 4 members, and 3 take part"):
            work.wait(30)
        np.testing.assert_array_equal(tensor, np.arange(4 * count))
        assert (out == 7).all()

    # With the new world it is a new op.
    def again(comm: lh.Comm) -> None:
        out = np.zeros(count, np.float32)
        assert comm.reduce_scatter(np.ones(3 * count, np.float32), out=out, world=3, timeout=30).world_size == 3
        assert (out == 3).all()

    four.all(again)


def test_a_peer_that_dies_takes_its_parts_along() -> None:
    with LocalCluster(peers=3) as cluster:
        members = Members([cluster.socket(i) for i in range(3)])
        dead = members.comms.pop(1)
        outs = [np.zeros(3 * LARGE, np.float32) for _ in members.comms]
        gathers = [
            comm.all_gather(part_of(comm, LARGE), out=out, tag=1, async_op=True)
            for comm, out in zip(members.comms, outs, strict=True)
        ]
        scatters = [
            comm.reduce_scatter(np.ones(3 * LARGE, np.float32), out=np.zeros(LARGE, np.float32), tag=2, async_op=True)
            for comm in members.comms
        ]
        barriers = [comm.barrier(tag=3, async_op=True) for comm in members.comms]
        wait_for_open_ops([cluster.peers[0], cluster.peers[2]], 3)
        first = [part_of(comm, LARGE) for comm in members.comms]
        cluster.kill_peer(1)
        for work, out in zip(gathers, outs, strict=True):
            assert work.wait(60).world_size == 2
            np.testing.assert_array_equal(out[: 2 * LARGE], np.concatenate(first))
        for work in scatters:
            with pytest.raises(lh.Aborted):
                work.wait(60)
        for work in barriers:
            assert work.wait(60).world_size == 2
        wait_until(lambda: all(comm.world_size == 2 for comm in members.comms))
        members.comms.append(dead)
        members.close()


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_what_a_departure_does_to_ops_with_roots_and_partners(four: Members, count: int) -> None:
    gone, root = four.comms[1], four.comms[0]
    root_id, gone_id = root.member_id, gone.member_id
    waiting = [comm for comm in four.comms if comm is not gone]
    mine = {comm: part_of(comm, count) for comm in waiting}
    whole = np.zeros(4 * count, np.float32)
    gathers, reduces, aborts = [], [], []
    for comm in waiting:
        out = whole if comm is root else None
        gathers.append(comm.gather(mine[comm], root_member=root_id, out=out, tag=1, async_op=True))
        reduces.append(comm.reduce(mine[comm].copy(), root_member=root_id, tag=2, async_op=True))
        source = np.zeros(4 * count, np.float32)
        part = np.zeros(count, np.float32)
        aborts.append(comm.all_to_all(source, out=source.copy(), tag=3, async_op=True))
        given = source if comm is root else None
        aborts.append(comm.scatter(given, root_member=root_id, out=part, tag=4, async_op=True))
        if comm is root:
            to_gone = comm.send(part.copy(), to_member=gone_id, tag=5, async_op=True)
        else:
            aborts.append(comm.broadcast(part.copy(), root_member=gone_id, tag=6, async_op=True))
    aborts.append(root.broadcast(np.zeros(count, np.float32), root_member=gone_id, tag=6, async_op=True))
    without(four, gone)
    infos = [work.wait(30) for work in gathers]
    assert all(info.members == infos[0].members and info.world_size == 3 for info in infos)
    by_id = {comm.member_id: mine[comm] for comm in waiting}
    np.testing.assert_array_equal(whole[: 3 * count], np.concatenate([by_id[i] for i in infos[0].members]))
    assert all(work.wait(30).world_size == 3 for work in reduces)
    for work in aborts:
        with pytest.raises(lh.Aborted):
            work.wait(30)
    with pytest.raises(lh.Aborted, match=f"m?{gone_id}"):
        to_gone.wait(30)


# ------------------------------------------------------------------ more ops than peerd takes of a member

OPS_AT_PEERD = 1024  # further ones of a member wait in its process


@pytest.mark.parametrize("hosts", [(0, 1), (0, 0)], ids=["apart", "shared_host"])
@pytest.mark.parametrize("by", ["rank", "member"])
@pytest.mark.parametrize("before", [OPS_AT_PEERD - 2, OPS_AT_PEERD, OPS_AT_PEERD + 300])
def test_ops_of_all_names_under_one_tag_at_the_limit(
    cluster: LocalCluster, hosts: tuple[int, ...], by: str, before: int
) -> None:
    """Two members send to each other, and call an op of all and one of a set, all under one tag.

    The first one has the limit of ops in flight before that, while the other has room, which calls those ops afterwards.
    The other one hears of calls that are refused.
    """
    members = Members([cluster.socket(host) for host in hosts])
    one, two = np.ones(1, np.float32), np.ones(2, np.float32)

    def calls(comm: lh.Comm, other: lh.Comm, tag: int, good: bool) -> list[lh.Work]:
        of = (lambda name: {f"{name}_member": other.member_id}) if by == "member" else (lambda name: {name: other.rank})
        ids = [each.member_id for each in members.comms]
        wrong: Any = one if good else "no tensor"
        asked: list[Callable[[], Any]] = [
            lambda: comm.send(wrong, **of("to"), tag=tag, async_op=True),
            lambda: comm.recv(wrong.copy() if good else wrong, **of("source"), tag=tag, async_op=True),
            lambda: comm.all_reduce(wrong.copy() if good else wrong, tag=tag, async_op=True),
            lambda: comm.all_gather(wrong, out=two.copy(), participants=ids, tag=tag, async_op=True),
            lambda: comm.all_gather(wrong, out=one.copy(), participants=ids[:1], tag=tag, async_op=True),
        ]
        if comm is not members.comms[0]:
            asked.pop()  # an op of the other one alone
        if good:
            return [call() for call in asked]
        for call in asked[:4]:
            with pytest.raises((lh.InvalidArgument, TypeError)):
                call()
        return []

    def ahead(comm: lh.Comm) -> list[lh.Work]:
        return [comm.all_reduce(one.copy(), tag=tag, async_op=True) for tag in range(before)]

    a, b = members.comms
    tag = 1 << 40
    works: list[lh.Work] = []
    refused: list[lh.Work] = []
    for first, second in ((a, b), (b, a)):
        works += ahead(first)
        works += calls(first, second, tag, True)
        calls(first, second, tag + 1, False)
        refused += calls(second, first, tag + 1, True)[:4]
        works += calls(second, first, tag, True)
        works += ahead(second)
        for work in works:
            assert work.wait(60).world_size <= 2
        for work in refused:
            with pytest.raises(lh.InvalidArgument, match=f"of member m{first.member_id} was refused there"):
                work.wait(60)
        works, refused, tag = [], [], tag + 2
    members.close()
