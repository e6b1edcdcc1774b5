"""Ops on lists of tensors: one op with one tag and one outcome."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import Members

import longhaul as lh
from longhaul.testing import LocalCluster

SHAPES = [(3,), (0,), (4, 5), (1,), (70_000,), (2, 0), (1000,)]


def tensors(rank: int, arena: lh.Comm | None = None) -> list[np.ndarray]:
    made = []
    for i, shape in enumerate(SHAPES):
        values = np.full(shape, 10 * rank + i + 1, np.float32)
        if arena is not None and values.size:
            shared = arena.empty(shape, "float32")
            shared[:] = values
            values = shared
        made.append(values)
    return made


@pytest.mark.parametrize("arena", [False, True])
def test_every_tensor_of_a_list_is_reduced(three: Members, arena: bool) -> None:
    def call(comm: lh.Comm) -> None:
        mine = tensors(comm.rank, comm if arena else None)
        out = [np.zeros_like(tensor) for tensor in mine]
        info = comm.all_reduce(mine, out=out, timeout=30)
        assert info.world_size == 3 and info.staged
        for i, (tensor, before) in enumerate(zip(mine, tensors(comm.rank), strict=True)):
            np.testing.assert_array_equal(tensor, before)
            np.testing.assert_array_equal(out[i], np.full(SHAPES[i], 30 + 3 * (i + 1)))
        comm.all_reduce(tuple(mine), "avg", timeout=30)
        for i, tensor in enumerate(mine):
            np.testing.assert_array_equal(tensor, np.full(SHAPES[i], 11 + i))

    three.all(call)


def test_a_list_is_broadcast(three: Members) -> None:
    def call(comm: lh.Comm) -> None:
        mine = [torch.full(shape, float(comm.rank), dtype=torch.bfloat16) for shape in SHAPES]
        comm.broadcast(mine, 1, timeout=30)
        for tensor in mine:
            assert torch.equal(tensor, torch.ones_like(tensor))

    three.all(call)


def test_a_list_of_65536_tensors_is_one_op(pair: Members) -> None:
    def call(comm: lh.Comm) -> None:
        whole = np.arange(65536 * 3, dtype=np.int64)
        mine = [whole[3 * i : 3 * i + 3] for i in range(65536)]
        assert comm.all_reduce(mine, timeout=60).world_size == 2
        np.testing.assert_array_equal(whole, 2 * np.arange(65536 * 3))

    pair.all(call)


def test_an_asynchronous_list_keeps_its_tensors_alive(pair: Members) -> None:
    works = [comm.all_reduce([np.ones(5, np.float32), np.ones(7, np.float32)], async_op=True) for comm in pair.comms]
    for work in works:
        assert work.wait(30).world_size == 2


def test_members_that_cut_the_same_elements_differently_get_the_same_sums(pair: Members) -> None:
    """What travels are elements: how a member cuts them is its own matter."""

    def call(comm: lh.Comm) -> None:
        whole = np.arange(12, dtype=np.float32)
        comm.all_reduce([whole[:5], whole[5:]] if comm.rank else whole, timeout=30)
        np.testing.assert_array_equal(whole, 2 * np.arange(12))

    pair.all(call)


def test_a_list_that_cannot_be_is_refused_before_it_starts(cluster: LocalCluster) -> None:
    alone = Members([cluster.socket(0)])
    comm = alone.comms[0]
    ones = np.ones(8, np.float32)
    for text, call in (
        ("list of tensors is empty", lambda: comm.all_reduce([])),
        ("no elements", lambda: comm.all_reduce([ones[:0]])),
        (r"tensor\[1\] is float64, tensor\[0\] is float32", lambda: comm.all_reduce([ones, np.ones(8)])),
        ("slices 0 and 1 share memory", lambda: comm.all_reduce([ones[:5], ones[4:]])),
        ("slices 0 and 0 share memory", lambda: comm.all_reduce([ones[:5]], out=[ones[2:7]])),
        ("out must be a list of as many", lambda: comm.all_reduce([ones], out=ones)),
        (r"out\[0\] is float32 \[4\]", lambda: comm.all_reduce([ones], out=[ones[:4].copy()])),
        (r"tensor\[1\] .* is not contiguous", lambda: comm.all_reduce([ones, np.ones((4, 4), np.float32)[:, 1]])),
    ):
        with pytest.raises(lh.InvalidArgument, match=text):
            call()
    alone.close()


def test_a_list_and_a_state_in_a_sync_do_not_share_memory(pair: Members) -> None:
    comm, other = pair.comms
    part = np.zeros(64, np.float32)
    state = lh.State({"other": np.zeros(8, np.float32), "part": part}, revision=0)
    work = comm.all_reduce([np.zeros(3, np.float32), part[10:20]], tag=9, async_op=True)
    with pytest.raises(lh.FailedPrecondition, match='tag 9 in flight uses tensor "part"'):
        comm.sync_state(state, timeout=30)
    other.all_reduce(np.zeros(13, np.float32), tag=9, timeout=30)
    work.wait(30)
