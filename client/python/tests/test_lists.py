"""Ops on lists of tensors: one op with one tag and one outcome."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

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


def test_arrays_may_be_used_while_a_thread_imports_torch(pair: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))  # what the import has made first
    for make in (lambda: np.ones(5, np.float32), lambda: [np.ones(5, np.float32), np.ones(7, np.float32)]):
        pair.all(lambda comm, make=make: comm.all_reduce(make(), timeout=30))  # type: ignore[misc]
    lh.State({"w": np.ones(5, np.float32)})


def swap_memory(tensor: np.ndarray) -> None:
    """Has the array forget its memory, which something else may get then."""
    memory = np.full(tensor.shape, 2, tensor.dtype).tobytes()
    tensor.__setstate__((1, tensor.shape, tensor.dtype, False, memory))  # type: ignore[arg-type]


# What may happen between two calls with one list. Each keeps the list and its tensors the same objects, but for the first.
CHANGES: dict[str, Callable[[list[Any]], object]] = {
    "another tensor in the list": lambda mine: mine.__setitem__(1, mine[1] + 1),
    "one tensor more": lambda mine: mine.append(mine[0] + 1),
    "numpy: longer": lambda mine: mine[1].resize(70_000, refcheck=False),
    "numpy: shorter": lambda mine: mine[1].resize(3, refcheck=False),
    "numpy: other memory": lambda mine: swap_memory(mine[1]),
    "torch: longer": lambda mine: mine[1].resize_(70_000).fill_(3),
    "torch: shorter": lambda mine: mine[1].resize_(3),
    "torch: other memory": lambda mine: mine[1].set_(torch.full((9,), 4.0)),
    "torch: other data": lambda mine: setattr(mine[1], "data", torch.full((9,), 4.0)),
    "torch: another dtype": lambda mine: setattr(mine[1], "data", torch.full((9,), 4, dtype=torch.int16)),
    "torch: a new storage": lambda mine: (
        mine[1].untyped_storage().resize_(1 << 20),
        mine[1].resize_(1 << 18).fill_(5),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_list_that_is_passed_again_is_looked_at_anew(pair: Members, change: str) -> None:
    def call(comm: lh.Comm) -> None:
        make = np.ones if change.startswith("numpy") else torch.ones
        mine: list[Any] = [make(5), make(7), make(1000)]
        for _ in range(2):
            comm.all_reduce(mine, timeout=30)
        CHANGES[change](mine)
        before = [np.asarray(tensor).copy() for tensor in mine]
        comm.all_reduce(mine, timeout=30)
        for tensor, values in zip(mine, before, strict=True):
            np.testing.assert_array_equal(np.asarray(tensor), 2 * values)

    pair.all(call)


def test_a_list_that_is_passed_again_may_be_refused(cluster: LocalCluster) -> None:
    ways: list[tuple[str, Any, Callable[[Any], object]]] = [
        ("is not contiguous", torch.ones(3, 4), lambda tensor: tensor.t_()),
        ("has no memory", torch.ones(5), lambda tensor: tensor.untyped_storage().resize_(0)),
        ("requires grad", torch.ones(5), lambda tensor: tensor.requires_grad_()),
        ("complex64", torch.ones(5), lambda tensor: setattr(tensor, "data", torch.ones(5, dtype=torch.complex64))),
        ("is on meta", torch.ones(5), lambda tensor: torch.utils.swap_tensors(tensor, torch.ones(5, device="meta"))),
        ("is read-only", np.ones(5), lambda array: array.setflags(write=False)),
    ]
    with lh.join("changes", peerd=cluster.socket(0)) as comm:
        for text, tensor, change in ways:
            mine = [type(tensor)(3), tensor]
            comm.all_reduce(mine, timeout=30)
            change(tensor)
            with pytest.raises(lh.InvalidArgument, match=rf"tensor\[1\].*{text}"):
                comm.all_reduce(mine, timeout=30)


def test_a_list_of_arrays_that_are_only_read_may_be_read_only(pair: Members) -> None:
    def call(comm: lh.Comm) -> None:
        mine = [np.frombuffer(np.full(5, i, np.float32).tobytes(), np.float32) for i in range(3)]
        out = [np.zeros(5, np.float32) for _ in mine]
        comm.all_reduce(mine, out=out, timeout=30)
        np.testing.assert_array_equal(out, [[2.0 * i] * 5 for i in range(3)])

    pair.all(call)


def test_members_whose_lists_differ_are_refused(pair: Members) -> None:
    def call(comm: lh.Comm) -> None:
        whole = np.arange(12, dtype=np.float32)
        for other in (whole, [whole[:4], whole[4:]]):
            with pytest.raises(lh.InvalidArgument):
                comm.all_reduce([whole[:5], whole[5:]] if comm.rank else other, timeout=30)
        np.testing.assert_array_equal(whole, np.arange(12))

    pair.all(call)


def mixed(comm: lh.Comm | None, rank: int, times: int = 1) -> list[np.ndarray]:
    """Small and large tensors of several dtypes; some in shared memory, if a comm is given. Each a row of parts."""
    made = []
    for i, (dtype, count) in enumerate(
        [("float32", 3), ("int64", 40_000), ("float32", 0), ("float64", 7), ("int64", 5), ("float32", 100_000)]
    ):
        values = (np.arange(count * times) % 5 + i + 10 * rank).astype(dtype)
        if comm is not None and i % 2 and count:
            shared = comm.empty(values.shape, dtype)
            shared[:] = values
            values = shared
        made.append(values)
    return made


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("arena", [True, False])
def test_a_list_may_mix_dtypes_places_and_sizes(three: Members, arena: bool, in_place: bool) -> None:
    expected = [np.sum(same, axis=0) for same in zip(*(mixed(None, rank) for rank in range(3)), strict=True)]

    def call(comm: lh.Comm) -> None:
        mine = mixed(comm if arena else None, comm.rank)
        out = None if in_place else [np.zeros_like(tensor) for tensor in mine]
        comm.all_reduce(mine, out=out, timeout=30)
        for got, wanted in zip(out or mine, expected, strict=True):
            np.testing.assert_array_equal(got, wanted)
        if out is not None:
            for tensor, before in zip(mine, mixed(None, comm.rank), strict=True):
                np.testing.assert_array_equal(tensor, before)

    three.all(call)


@pytest.mark.parametrize("arena", [True, False])
def test_every_collective_takes_a_list(three: Members, arena: bool) -> None:
    parts_of = [mixed(None, rank) for rank in range(3)]
    sums = [np.sum(same, axis=0) for same in zip(*parts_of, strict=True)]
    wholes = [np.concatenate(same) for same in zip(*parts_of, strict=True)]

    def equal(got: list[np.ndarray], wanted: list[np.ndarray]) -> None:
        for each, expected in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(each, expected)

    def call(comm: lh.Comm) -> None:
        mine = mixed(comm if arena else None, comm.rank)
        root = comm.rank == 1
        empty = [np.zeros_like(tensor) for tensor in mine]
        big = [np.zeros_like(tensor) for tensor in wholes]
        comm.all_gather(mine, out=big, timeout=30)
        equal(big, wholes)
        comm.reduce(mine, 1, out=empty if root else None, timeout=30)
        if root:
            equal(empty, sums)
        big = [np.zeros_like(tensor) for tensor in wholes]
        comm.gather(mine, 1, out=big if root else None, timeout=30)
        if root:
            equal(big, wholes)
        comm.scatter(wholes if root else None, 1, out=empty, timeout=30)
        equal(empty, parts_of[comm.rank])
        comm.reduce_scatter(wholes, out=empty, timeout=30)
        equal(empty, [3 * tensor for tensor in parts_of[comm.rank]])
        comm.all_to_all(wholes, out=big, timeout=30)
        equal(big, [np.tile(tensor, 3) for tensor in parts_of[comm.rank]])
        if comm.rank == 0:
            comm.send(mine, to=2, timeout=30)
        elif comm.rank == 2:
            comm.recv(mine, source=0, timeout=30)
            equal(mine, parts_of[0])
        comm.broadcast(mine, 1, timeout=30)
        equal(mine, parts_of[1])

    three.all(call)


def test_a_list_that_cannot_be_is_refused_before_it_starts(cluster: LocalCluster) -> None:
    alone = Members([cluster.socket(0)])
    comm = alone.comms[0]
    ones = np.ones(8, np.float32)
    refusals: list[tuple[str, Callable[[], object]]] = [
        ("list of tensors is empty", lambda: comm.all_reduce([])),
        ("dtype is int64, not a float with weights", lambda: comm.all_reduce([ones, np.ones(8, int)], weight=1.0)),
        ("counts is given for a list", lambda: comm.all_gather([ones], out=[ones.copy()], counts=[8])),
        ("slices 0 and 1 share memory", lambda: comm.all_reduce([ones[:5], ones[4:]])),
        ("slices 0 and 0 share memory", lambda: comm.all_reduce([ones[:5]], out=[ones[2:7]])),
        ("out must be a list of as many", lambda: comm.all_reduce([ones], out=ones)),
        ("out must be one tensor", lambda: comm.all_reduce(ones, out=[ones])),
        (r"out\[0\] is float32 \[4\]", lambda: comm.all_reduce([ones], out=[ones[:4].copy()])),
        (r"tensor\[1\] .* is not contiguous", lambda: comm.all_reduce([ones, np.ones((4, 4), np.float32)[:, 1]])),
    ]
    for text, call in refusals:
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
    other.all_reduce([np.zeros(3, np.float32), np.zeros(10, np.float32)], tag=9, timeout=30)
    work.wait(30)


@pytest.mark.parametrize("hosts", [(0, 1, 2), (0, 0, 1)], ids=["apart", "shared_host"])
@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "send"])
def test_lists_that_differ_name_the_tensor(cluster: LocalCluster, hosts: tuple[int, ...], name: str) -> None:
    members = Members([cluster.socket(host) for host in hosts])
    right = [(5, np.float32), (0, np.int8), (70_000, np.float32), (3, np.int64)]
    cases: list[tuple[list[tuple[int, Any]], str]] = [
        ([(5, np.float32), (0, np.int8), (70_001, np.float32), (3, np.int64)], r"tensor\[2\] is float32 x 7000[01] "),
        ([(5, np.float32), (0, np.int8), (70_000, np.float32), (3, np.uint64)], r"tensor\[3\] is u?int64 x 3 "),
        (
            [(0, np.int8), (5, np.float32), (70_000, np.float32), (3, np.int64)],
            r"tensor\[0\] is (int8 x 0|float32 x 5) ",
        ),
        (right[:3], "[34] tensors there, and [34] here: the first 3 tensors are equal"),
        (right[1:], r"[34] tensors there, and [34] here: tensor\[0\] is "),
        (right[:2] * 300, r"(4|600) tensors there, and (4|600) here: tensor\[2\] is "),
    ]
    bad = members.comms[1]
    for tag, (wrong, text) in enumerate(cases):
        works = []
        for comm in members.comms[: 2 if name == "send" else 3]:
            tensors = [np.zeros(count, dtype) for count, dtype in (wrong if comm is bad else right)]
            more: dict[str, Any] = {"tag": tag, "async_op": True}
            call = name
            if name in ("all_gather", "reduce_scatter"):
                wholes = [np.zeros(3 * each.size, each.dtype) for each in tensors]
                more["out"] = wholes if name == "all_gather" else tensors
                tensors = tensors if name == "all_gather" else wholes
            elif name == "send":
                call = "recv" if comm is bad else "send"
                more["source_member" if comm is bad else "to_member"] = members.comms[comm is not bad].member_id
            works.append(getattr(comm, call)(tensors, **more))
        for work in works:
            with pytest.raises(lh.InvalidArgument, match=text) as problem:
                work.wait(60)
            assert "list " not in str(problem.value).replace("a list", "")
    # Only a part of a long list is told.
    counts = [1 + i % 2 for i in range(2000)]
    works = [
        comm.all_reduce([np.zeros(count, np.float32) for count in [*counts, 1 + (comm is bad)]], async_op=True)
        for comm in members.comms
    ]
    for work in works:
        with pytest.raises(lh.InvalidArgument, match=r"the first \d+ tensors are equal, and a later one differs"):
            work.wait(60)
    members.close()
