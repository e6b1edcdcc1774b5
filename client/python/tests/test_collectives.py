"""Reduce-scatter, all-gather, broadcast and barrier: results, shapes that are refused, and what a death does to them."""

from __future__ import annotations

from collections.abc import Iterator
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
    for text, call in (
        ("as many as out for each member", lambda: comm.reduce_scatter(six, out=four)),
        ("as many as tensor for each member", lambda: comm.all_gather(six, out=four)),
        ("same dtype", lambda: comm.all_gather(six, out=np.zeros(12))),
        ("no elements", lambda: comm.all_gather(none, out=four)),
        ("no elements", lambda: comm.broadcast(none)),
        ("root is rank 2, and the group has 2 members", lambda: comm.broadcast(six, 2)),
        ("no member", lambda: comm.broadcast(six, root_member=0)),
        ("LH_MESH", lambda: comm.all_gather(six, out=np.zeros(12, np.float32), algorithm="mesh")),
        ("at most 4096 bytes", lambda: comm.broadcast(np.zeros(2000, np.float32), algorithm="oneshot")),
    ):
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
        assert comm.reduce_scatter(np.ones(3 * count, np.float32), out=out, timeout=30).world_size == 3
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
