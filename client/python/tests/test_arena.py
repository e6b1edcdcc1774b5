"""Memory shared with peerd."""

from __future__ import annotations

import ctypes
import gc

import numpy as np
import pytest
import torch

import longhaul as lh
from longhaul._arena import arena_of
from longhaul.testing import LocalCluster

MIB = 1 << 20


@pytest.fixture(scope="module")
def small(cluster: LocalCluster) -> LocalCluster:
    """A peer whose trainers may share 256 MiB."""
    cluster.add_peer(["--arena_limit=%d" % (256 * MIB)])
    return cluster


def test_shape_and_dtype_are_as_asked(cluster: LocalCluster) -> None:
    path = cluster.socket(0)
    array = lh.empty((3, 5), "int16", peerd=path)
    assert array.shape == (3, 5)
    assert array.dtype == np.dtype("int16")
    assert array.ctypes.data % 64 == 0
    assert lh.empty(7, peerd=path).dtype == np.float32
    assert lh.empty((), peerd=path).shape == ()
    assert lh.empty((0, 4), peerd=path).shape == (0, 4)
    tensor = lh.torch.empty(3, 5, dtype=torch.bfloat16, peerd=path)
    assert (tensor.shape, tensor.dtype) == ((3, 5), torch.bfloat16)
    assert tensor.data_ptr() % 64 == 0
    assert lh.torch.empty((2, 2), peerd=path).dtype == torch.float32
    assert lh.torch.empty(0, peerd=path).numel() == 0


@pytest.mark.parametrize("dtype", ["complex64", "U3"])
def test_a_dtype_that_no_op_takes_is_refused(cluster: LocalCluster, dtype: str) -> None:
    with pytest.raises(lh.InvalidArgument, match="float32"):
        lh.empty(3, dtype, peerd=cluster.socket(0))


def test_numpy_without_bfloat16_is_told_so(cluster: LocalCluster) -> None:
    with pytest.raises(lh.InvalidArgument, match="ml_dtypes"):
        lh.empty(3, "bfloat16", peerd=cluster.socket(0))


def test_memory_is_given_back_with_the_last_view(small: LocalCluster) -> None:
    path = small.socket(len(small.peers) - 1)
    for _ in range(5):  # 5 x 100 MiB would not fit
        array = lh.empty(100 * MIB, "uint8", peerd=path)
        array[::4096] = 1
        view = array[10:20].reshape(2, 5)
        del array
        gc.collect()
        view[:] = 3
        assert (view == 3).all()
        tensor = lh.torch.empty(50 * MIB, dtype=torch.uint8, peerd=path)
        kept = tensor[100:].view(-1)
        del tensor
        kept[0] = 1
        del view, kept


def test_the_limit_of_peerd_is_named(small: LocalCluster) -> None:
    path = small.socket(len(small.peers) - 1)
    with pytest.raises(lh.Unavailable, match="limit"):
        lh.empty(300 * MIB, "uint8", peerd=path)
    lh.empty(10 * MIB, "uint8", peerd=path)  # the connection still works


def test_views_outlive_the_communicator(cluster: LocalCluster) -> None:
    comm = lh.join("short", peerd=cluster.socket(0))
    array = comm.empty(1000)
    comm.leave(timeout=30)
    del comm
    gc.collect()
    array[:] = 5
    assert array.sum() == 5000


def test_what_is_due_before_memory_is_freed_is_done_before(cluster: LocalCluster) -> None:
    client = arena_of(cluster.socket(0))
    memory = client.alloc(MIB)
    address = ctypes.addressof(memory)
    there: list[int] = []

    def ask() -> None:
        there.append(ctypes.addressof(client.alloc(MIB)))  # the block itself would be the first that is free

    client.before_free(address, "first", ask)
    client.before_free(address, "second", lambda: there.append(0))
    assert client.is_held(address) and client.is_held(address, "first") and not client.is_held(address, "third")
    del memory
    assert there.pop(0) == 0 and len(there) == 1 and there[0] != address and not client.is_held(address)
    assert ctypes.addressof(client.alloc(MIB)) == address
