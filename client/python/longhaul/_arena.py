"""Connections to peerd, and tensors in memory shared with it."""

from __future__ import annotations

import ctypes
import math
import operator
import os
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Union

from . import _native
from ._errors import InvalidArgument, check, error

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ._comm import Op

PathLike = Union[str, "os.PathLike[str]"]
Shape = Union[int, Sequence[int]]


class Client:
    """A connection to a peerd, with its arena. Closed when no communicator and no tensor uses it."""

    def __init__(self, path: str | None, deadline: _native.Deadline) -> None:
        lib = _native.library()
        options = _native.OpenOptions()
        options.socket_path = None if path is None else os.fsencode(path)
        handle = ctypes.c_void_p()
        slice_ms = round(1000 * _native.SLICE_S)
        while True:
            left = deadline.left()
            options.timeout_ms = slice_ms if left is None else min(slice_ms, round(1000 * left))
            status = lib.lh_open(ctypes.byref(options), ctypes.byref(handle))
            if status == _native.OK:
                break
            if status not in (_native.UNAVAILABLE, _native.DEADLINE_EXCEEDED) or deadline.passed():
                raise error(status, "connecting to peerd")
            # A peerd that answers slowly gets longer at each try.
            slice_ms = min(2 * slice_ms, 1000)
        self.path = path
        self.handle = handle
        # Ops that nobody waits for any more. They still own their tensors.
        self.abandoned: list[Op] = []
        # Memory that is garbage and that a state still names, until that is freed.
        self.refused: list[ctypes.c_void_p] = []
        # Not at exit: the end of the process closes the connection, and threads may still use it.
        weakref.finalize(self, lib.lh_close, handle).atexit = False

    def alloc(self, size: int) -> ctypes.Array[ctypes.c_char]:
        """`size` bytes (1 or more) of arena, 64-byte aligned; freed when the last view of them dies."""
        lib = _native.library()
        self.sweep()
        data = ctypes.c_void_p()
        check(lib.lh_alloc(self.handle, size, ctypes.byref(data)), f"allocating {size} bytes shared with peerd")
        assert data.value is not None
        memory = (ctypes.c_char * size).from_address(data.value)
        weakref.finalize(memory, _free, self, data).atexit = False
        return memory

    def sweep(self) -> None:
        """Lets go of the tensors of abandoned ops that have ended."""
        if self.abandoned:
            self.abandoned[:] = [op for op in self.abandoned if not op.poll()]

    def free_refused(self) -> None:
        """Frees what a state used that is gone now."""
        refused, self.refused = self.refused, []
        for data in refused:
            _free(self, data)


def _free(client: Client, data: ctypes.c_void_p) -> None:
    # A state and its tensors may be garbage together, and be collected in any order.
    if _native.library().lh_free(client.handle, data) == _native.FAILED_PRECONDITION:
        client.refused.append(data)


_lock = threading.Lock()
_clients: weakref.WeakValueDictionary[str | None, Client] = weakref.WeakValueDictionary()
_latest: weakref.ref[Client] | None = None


def client_of(peerd: PathLike | None, deadline: _native.Deadline, fresh: bool = False) -> tuple[Client, bool]:
    """The process's connection to this peerd, and whether it was made just now.

    fresh: one that is older does not count; it has turned out to be dead.
    """
    global _latest
    path = (os.environ.get("LONGHAUL_SOCKET") or None) if peerd is None else os.fspath(peerd)
    # One connection, whichever way the socket is named: memory of another one would be copied.
    key = None if path is None else os.path.abspath(path)
    with _lock:
        known = None if fresh else _clients.get(key)
        client = known or Client(path, deadline)
        _clients[key] = client
        _latest = weakref.ref(client)
        return client, known is None


def arena_of(peerd: PathLike | None) -> Client:
    """The connection to this peerd; for None the one used last, else the default path."""
    latest = None if peerd is not None or _latest is None else _latest()
    return latest or client_of(peerd, _native.Deadline(10))[0]


def shape_of(shape: Shape) -> tuple[int, ...]:
    try:
        dimensions: Sequence[int] = (operator.index(shape),)  # type: ignore[arg-type]
    except TypeError:
        dimensions = tuple(operator.index(size) for size in shape)  # type: ignore[union-attr]
    if any(size < 0 for size in dimensions):
        raise InvalidArgument(f"shape {tuple(dimensions)} has a negative dimension")
    return tuple(dimensions)


def empty_numpy(client: Client, shape: Shape, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    try:
        import numpy as np
    except ImportError:
        raise ImportError("longhaul.empty makes numpy arrays: install numpy, or use longhaul.torch.empty") from None
    try:
        kind: np.dtype[Any] = np.dtype(dtype)
    except TypeError:
        if dtype == "bfloat16":
            raise InvalidArgument(
                "numpy has no bfloat16 of its own: pass ml_dtypes.bfloat16, or use longhaul.torch.empty"
            ) from None
        raise
    if kind.name not in _native.DTYPES or not kind.isnative:
        raise InvalidArgument(f"dtype {kind} cannot be reduced; give one of {', '.join(_native.DTYPES)}")
    dimensions = shape_of(shape)
    count = math.prod(dimensions)
    if count == 0:
        return np.empty(dimensions, kind)
    return np.frombuffer(client.alloc(count * kind.itemsize), dtype=kind).reshape(dimensions)  # type: ignore[call-overload,no-any-return]


def empty(shape: Shape, dtype: npt.DTypeLike = "float32", *, peerd: PathLike | None = None) -> npt.NDArray[Any]:
    """A numpy array in memory shared with peerd: collectives on it copy nothing.

    shape: an int or a sequence of ints. dtype: (u)int8 to (u)int64, float16, float32, float64, or
    ml_dtypes.bfloat16. The content is undefined. The memory is given back when the array and all
    views of it are gone.

    peerd: the socket of the peerd to share with; None: the one that this process joined through
    last, else the default one as for `join`. Collectives through another peerd copy the array.

    Raises InvalidArgument for a dtype that cannot be reduced; Unavailable if peerd cannot be
    reached or its arena limit is used up (the message says which).
    """
    return empty_numpy(arena_of(peerd), shape, dtype)
