"""Ops and states on objects of the buffer protocol and of DLPack, and a process that has neither numpy nor torch."""

from __future__ import annotations

import array
import ctypes
import gc
import os
import subprocess
import sys
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Members

import longhaul as lh
from longhaul import _buffer
from longhaul._tensor import elements_of
from longhaul.testing import LocalCluster


class Foreign:
    """A tensor of another framework: all that it has is DLPack. modern: it knows DLPack 1.0."""

    def __init__(self, tensor: Any, modern: bool = False, device: int = 1) -> None:
        self.tensor = tensor
        self.modern = modern
        self.device = device

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device, 0)

    def __dlpack__(self, **options: Any) -> Any:
        if options and not self.modern:
            raise TypeError(f"unexpected {options}")
        return self.tensor.__dlpack__(**options)


# ------------------------------------------------------------------ what is found


@pytest.mark.parametrize(
    "value, dtype, shape",
    [
        (array.array("f", [1, 2]), "float32", (2,)),
        (array.array("d", [1, 2]), "float64", (2,)),
        (array.array("l", [1]), f"int{8 * ctypes.sizeof(ctypes.c_long)}", (1,)),
        (array.array("Q"), "uint64", (0,)),
        (bytearray(b"abc"), "uint8", (3,)),
        (memoryview(bytearray(24)).cast("d", (3, 1)), "float64", (3, 1)),
        (memoryview(bytearray(8)).cast("c"), "uint8", (8,)),
        ((ctypes.c_double * 3)(), "float64", (3,)),
        (((ctypes.c_int16 * 3) * 2)(), "int16", (2, 3)),
        ((ctypes.c_long * 3)(), f"int{8 * ctypes.sizeof(ctypes.c_long)}", (3,)),
        ((ctypes.c_bool * 2)(), "bool", (2,)),
        (ctypes.c_float(), "float32", ()),
    ],
    ids=lambda value: str(value).split(" at 0x")[0][:30],
)
def test_the_elements_of_a_buffer(value: Any, dtype: str, shape: tuple[int, ...]) -> None:
    found = elements_of(value, "tensor", written=True)
    assert (found.dtype, found.shape) == (dtype, shape)
    assert found.count == np.prod(shape, dtype=int)
    if found.count:
        assert found.address == np.asarray(value).__array_interface__["data"][0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(6, dtype=torch.float32).view(2, 3),
        lambda: torch.ones(5, dtype=torch.bfloat16),
        lambda: torch.ones(5, dtype=torch.bool),
        lambda: torch.ones(4, dtype=torch.float16)[1:],
        lambda: torch.tensor(3, dtype=torch.int64),
        lambda: torch.empty(0, 4),
        lambda: torch.ones(3, 1, 2).transpose(0, 1).contiguous(),
        lambda: np.arange(6, dtype=np.uint16).reshape(3, 2),
    ],
)
@pytest.mark.parametrize("modern", [False, True])
def test_the_elements_of_dlpack(make: Any, modern: bool) -> None:
    tensor = make()
    found = elements_of(Foreign(tensor, modern), "tensor", written=True)
    own = elements_of(tensor, "tensor", written=True)
    assert (found.dtype, found.shape, found.count) == (own.dtype, own.shape, own.count)
    if own.count:
        assert found.address == own.address


def test_float8_of_dlpack() -> None:
    for code, dtype in ((10, "float8_e4m3fn"), (12, "float8_e5m2")):
        assert _buffer._DLPACK_DTYPES[(code, 8)] == dtype


def test_the_memory_of_dlpack_lives_as_long_as_the_op_needs_it() -> None:
    array_ = np.arange(5, dtype=np.float32)
    watch = weakref.ref(array_)
    found = elements_of(Foreign(array_), "tensor", written=True)
    del array_
    gc.collect()
    assert watch() is not None
    del found
    gc.collect()
    assert watch() is None, "the capsule that nobody consumed has let go of it"


# ------------------------------------------------------------------ what is refused


class Broken(Foreign):
    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor


@pytest.mark.parametrize(
    "value, text",
    [
        (b"bytes", "read-only bytes; pass a writable buffer"),
        (memoryview(bytearray(8))[::2], r"strides \(2,\)\) is not contiguous"),
        (memoryview(bytearray(8)).cast("P"), "format 'P', which no op takes"),
        ((ctypes.c_float.__ctype_be__ * 2)(), "byte order of another machine"),
        (Foreign(torch.ones(3, 4).t()), r"strides \(1, 4\)\) is not contiguous"),
        (Foreign(torch.ones(3, dtype=torch.complex64)), r"DLPack dtype \(code 5, 64 bits, 1 lanes\)"),
        (Foreign(torch.ones(3), device=2), r"on a device \(CUDA\); copy it to host memory"),
        (Foreign(torch.ones(3), device=99), "DLPack device type 99"),
        (Foreign(torch.ones(3, requires_grad=True)), r"Foreign.__dlpack__\(\) failed: .*grad"),
        (Broken("no capsule"), "gives no DLPack capsule, but 'no capsule'"),
    ],
    ids=lambda value: str(value).split(" at 0x")[0][:40],
)
def test_what_cannot_be_used_is_named(value: Any, text: str) -> None:
    with pytest.raises(lh.InvalidArgument, match=text):
        elements_of(value, "tensor", written=True)
    with pytest.raises(lh.InvalidArgument, match=f"state tensor 'x'.*{text}"):
        lh.State({"x": value})


@pytest.mark.parametrize("value", ["text", 3, [1.0], None])
def test_what_is_no_tensor_is_a_type_error(value: Any) -> None:
    with pytest.raises(TypeError, match="pass a numpy array, a torch tensor, or another object with DLPack"):
        elements_of(value, "tensor", written=True)


def test_a_tensor_that_cannot_change_may_be_read_and_not_written() -> None:
    frozen = np.ones(3, np.float32)
    frozen.flags.writeable = False
    value = Foreign(frozen, modern=True)
    assert elements_of(value, "tensor", written=False).count == 3
    with pytest.raises(lh.InvalidArgument, match="cannot be written; give out="):
        elements_of(value, "tensor", written=True)


def test_tensors_of_jax_are_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    class Array(Foreign):
        pass

    monkeypatch.setattr(Array, "__module__", "jaxlib.xla_extension")  # jax says nothing of it in old DLPack
    value = Array(torch.ones(3))
    assert elements_of(value, "tensor", written=False).count == 3
    with pytest.raises(lh.InvalidArgument, match="is a Array, which cannot be written; give out="):
        elements_of(value, "tensor", written=True)


# ------------------------------------------------------------------ ops and states


def test_an_op_mixes_numpy_torch_buffers_and_dlpack(pair: Members) -> None:
    values: list[list[Any]] = [
        [array.array("f", [1, 2, 3]), bytearray([1, 2]), Foreign(torch.full((2,), 5.0, dtype=torch.bfloat16))],
        [np.array([10, 20, 30], np.float32), np.array([3, 4], np.uint8), torch.full((2,), 6.0, dtype=torch.bfloat16)],
    ]

    def reduce(comm: lh.Comm) -> None:
        comm.all_reduce(values[comm.rank], timeout=60)
        one = array.array("d", [comm.rank + 1.0])
        out = Foreign(np.zeros(1))
        comm.all_reduce(one, out=out, timeout=60)
        assert (list(one), list(out.tensor)) == ([comm.rank + 1.0], [3.0])

    pair.all(reduce)
    for floats, small, halves in values:
        assert list(floats) == [11, 22, 33]
        assert list(small) == [4, 6]
        assert getattr(halves, "tensor", halves).tolist() == [11, 11]


def test_a_state_mixes_them_too(pair: Members) -> None:
    tensors: list[dict[str, Any]] = [
        {"a": array.array("f", [1, 2]), "b": bytearray(4), "c": Foreign(torch.zeros(3))},
        {"a": np.array([5, 6], np.float32), "b": np.array([7, 8, 9, 10], np.uint8), "c": torch.full((3,), 4.0)},
    ]
    assert pair.comms[0].rank == 0

    def sync(comm: lh.Comm) -> str:
        state = lh.State(tensors[comm.rank], revision=comm.rank)
        assert state.tensors["a"] is tensors[comm.rank]["a"]
        digest = comm.sync_state(state, timeout=60).hash
        assert state.compute_hash() == digest
        return digest

    assert len(set(pair.all(sync))) == 1
    assert list(tensors[0]["a"]) == [5, 6]
    assert list(tensors[0]["b"]) == [7, 8, 9, 10]
    assert tensors[0]["c"].tensor.tolist() == [4, 4, 4]


def test_shared_memory_without_numpy_is_a_memoryview(cluster: LocalCluster) -> None:
    with lh.join("views", peerd=cluster.socket(0)) as comm:
        view = lh.empty_buffer((2, 3), "int32", peerd=cluster.socket(0))
        for i in range(2):
            for j in range(3):
                view[i, j] = 10 * i + j
        assert not comm.all_reduce(view, timeout=60).staged, "it travels without a copy"
        assert np.asarray(view).tolist() == [[0, 1, 2], [10, 11, 12]]
        assert not comm.all_reduce(view.cast("B"), op="max", timeout=60).staged
        flat = lh.empty_buffer(4, peerd=cluster.socket(0))
        assert (flat.format, flat.shape) == ("f", (4,))
    with pytest.raises(lh.InvalidArgument, match="'bfloat16' is not possible in a memoryview"):
        lh.empty_buffer(3, "bfloat16")
    with pytest.raises(lh.InvalidArgument, match="has no elements"):
        lh.empty_buffer((3, 0))


def test_everything_works_without_numpy_and_torch(cluster: LocalCluster) -> None:
    code = """
import sys
sys.modules['numpy'] = sys.modules['torch'] = None
import array, threading
import longhaul as lh

results = []

def member(number, socket):
    def train(comm):
        gradient = lh.empty_buffer(1000, peerd=socket)
        weights = array.array('d', [float(number)] * 100)
        state = lh.State({'weights': weights, 'step': bytearray(8)}, revision=number)
        with comm.step(state, timeout=60):
            for i in range(1000):
                gradient[i] = number + 1
            info = comm.all_reduce(gradient, op='avg', timeout=60)
            work = comm.all_reduce([weights, bytearray(b'ab')], tag=1, async_op=True)
            work.wait(60)
        results.append((gradient[999], weights[99], info.world_size, state.hash, comm.stats()['ops']))
    lh.run(train, 'bare', peerd=socket, members=2)

threads = [threading.Thread(target=member, args=each) for each in enumerate(sys.argv[1:3])]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(100)
print(results)
assert len(results) == 2 and results[0] == results[1]
assert results[0][:3] == (1.5, 2.0, 2)
assert not any(name.split('.')[0] in ('numpy', 'torch') and module for name, module in sys.modules.items())
"""
    ended = subprocess.run(
        [sys.executable, "-c", code, cluster.socket(0), cluster.socket(1)],
        env=dict(os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stdout
