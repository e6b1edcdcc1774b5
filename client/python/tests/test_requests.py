"""What collectives ask of peerd, and what is refused before. The peerd of these tests is a script."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from conftest import wait_until
from scripted_peerd import ABORTED, Request, ScriptedPeerd

import longhaul as lh

ME = 7  # the id of the scripted member; it is alone, with rank 0
SHARED = 1 << 18


class Held:
    """A comm whose ops are not answered until the test says so."""

    def __init__(self) -> None:
        self.peerd = ScriptedPeerd(op=lambda request: None)
        self.comm = lh.join("held", peerd=self.peerd.path, timeout=30)
        self.comm.begin_step()

        self.ops = 0

    def ask(self, name: str, *arguments: Any, **options: Any) -> Request:
        """Starts an op, ends it, and returns what peerd has heard."""
        work = getattr(self.comm, name)(*arguments, async_op=True, **options)
        request = self.next("OP")
        request.answer(status=ABORTED)
        with pytest.raises(lh.Aborted):
            work.wait(30)
        return request

    def next(self, name: str) -> Request:
        """The newest request, of this name. Waits until it has come."""
        heard = self.peerd.heard
        wait_until(lambda: heard.count("OP") + heard.count("CANCEL") > self.ops)
        self.ops += 1
        assert heard[-1] == name
        return self.peerd.requests[-1]


@pytest.fixture
def held() -> Iterator[Held]:
    made = Held()
    with made.peerd:
        yield made


def numbers(request: Request, count: int) -> tuple[int, ...]:
    return struct.unpack_from(f"<{count}Q", request.table())


@pytest.mark.parametrize("name, kind", [("all_reduce", 1), ("broadcast", 4), ("reduce", 6)])
def test_options_reach_peerd(held: Held, name: str, kind: int) -> None:
    options: dict[str, Any] = {} if name == "broadcast" else {"weight": 2.5, "order": "rank"}
    op = held.ask(name, np.ones(5, np.float16), tag=3, min_world=2, on_fault="abort", algorithm="mesh", **options).op
    wanted = {"kind": kind, "count": 5, "dtype": 8, "tag": 3, "min_world": 2, "on_fault": 1, "algorithm": 2, "list": 0}
    assert {key: op[key] for key in wanted} == wanted
    assert (op["weighted"], op["weight"], op["order"]) == ((1, 2.5, 1) if options else (0, 0, 0))


def test_participants_are_any_iterable(held: Held) -> None:
    request = held.ask("barrier", participants=iter((9, ME, 8)))
    assert request.op["participants"] == 3
    assert numbers(request, 3) == (ME, 8, 9)


def test_unequal_parts(held: Held) -> None:
    whole, part = np.zeros(4, np.float32), np.zeros(3, np.float32)
    for name, tensor, out in (("reduce_scatter", whole, part), ("scatter", whole, part)):
        request = held.ask(name, tensor, out=out, counts=[3, 1])
        op = request.op
        assert (op["unequal"], op["count"], op["world"], op["gives"], op["gets"]) == (1, 0, 2, 2, 1)
        assert numbers(request, 3) == (3, 1, 3)
    for name in ("all_gather", "gather"):
        request = held.ask(name, part, out=whole, counts=(3, 1))
        assert numbers(request, 3) == (3, 3, 1)
    request = held.ask("all_to_all", whole, out=part, counts=[4, 0], out_counts=[1, 2])
    assert numbers(request, 4) == (4, 0, 1, 2)


def test_the_whole_tells_the_world_and_an_empty_one_does_not(held: Held) -> None:
    assert held.ask("all_gather", np.zeros(2), out=np.zeros(6)).op["world"] == 3
    assert held.ask("all_gather", np.zeros(0), out=np.zeros(0)).op["world"] == 1
    assert held.ask("all_to_all", np.zeros(6), out=np.zeros(6)).op["count"] == 6


def test_a_list_of_torch_tensors_and_one_of_arrays_are_cut_alike(held: Held) -> None:
    made = [(3, "float32"), (SHARED, "float64"), (0, "int16"), (2, "float32"), (1, "bool")]
    arrays = [np.zeros(count, dtype) for count, dtype in made]
    tensors = [torch.from_numpy(array.copy()) for array in arrays]
    first = held.ask("all_reduce", arrays, "max")
    second = held.ask("all_reduce", tensors, "max")
    third = held.ask("all_reduce", tensors, "max", out=arrays)
    assert first.op["list"] == second.op["list"] == third.op["list"] != 0
    assert first.op["pieces"] == second.op["pieces"] == 4
    pieces = [struct.unpack_from("<QQQQQQQB7x", second.table(), 64 * i) for i in range(4)]
    assert [(piece[0], piece[7]) for piece in pieces] == [(5, 10), (SHARED, 11), (0, 3), (1, 12)]


def refused(held: Held, error: type[Exception], match: str, name: str, *arguments: Any, **options: Any) -> None:
    """A call is not sent: peerd hears only that it was refused, and why."""
    with pytest.raises(error, match=match) as problem:
        getattr(held.comm, name)(*arguments, **options)
    request = held.next("OP")
    op = request.op
    assert (op["source_region"], op["target_region"], op["list"]) == (0, 0, 0)
    why = request.table()[: int(op["refusal"])].decode()
    assert why and str(problem.value).startswith(why)
    request.answer()


def test_a_list_of_tensors_that_cannot_be_sent_says_which_one(held: Held) -> None:
    ones = torch.ones(3)
    for text, bad in (
        ("complex64", torch.ones(3, dtype=torch.complex64)),
        ("contiguous", torch.ones(4, 4).t()),
        ("meta", torch.ones(3, device="meta")),
        ("to_dense", torch.eye(3).to_sparse()),
        ("to_dense", torch.eye(3).to_sparse_csr()),
        ("lazy view", torch.ones(3, dtype=torch.complex64).conj().imag[::1].contiguous()._neg_view()),
    ):
        refused(held, lh.InvalidArgument, rf"tensor\[1\].*{text}", "all_reduce", [ones, bad, ones])
    refused(held, TypeError, r"tensor\[1\] is a str", "all_reduce", [ones, "x"])
    refused(held, TypeError, "weight", "broadcast", ones, weight=2.0)
    assert held.peerd.heard.count("OP") == 8  # the refused calls


def test_cancel_names_the_op(held: Held) -> None:
    work = held.comm.all_reduce(np.ones(3, np.float32), async_op=True)
    request = held.next("OP")
    work.cancel()
    assert struct.unpack_from("<Q", held.next("CANCEL").body) == (request.call,)
    assert not work.done()
    request.answer(b"cancelled", status=ABORTED)
    with pytest.raises(lh.Aborted, match="cancelled"):
        work.wait(30)
    work.cancel()  # it has an outcome: nothing happens
    assert held.peerd.heard.count("CANCEL") == 1


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_in_shared_memory(held: Held, dtype: str) -> None:
    tensor = lh.torch.empty(6, dtype=getattr(torch, dtype), peerd=held.peerd.path)
    op = held.ask("broadcast", tensor).op
    assert op["dtype"] == {"float8_e4m3fn": 13, "float8_e5m2": 14}[dtype]
    assert op["source_offset"] == op["target_offset"]
    with pytest.raises(lh.InvalidArgument, match="ml_dtypes"):
        lh.empty(3, dtype, peerd=held.peerd.path)
