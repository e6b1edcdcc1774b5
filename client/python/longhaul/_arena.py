"""Connections to peerd, and tensors in memory shared with it."""

from __future__ import annotations

import collections
import ctypes
import functools
import math
import operator
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Union

from . import _native
from ._errors import InvalidArgument, check, error

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

PathLike = Union[str, "os.PathLike[str]"]
Shape = Union[int, Sequence[int]]


class Client:
    """A connection to a peerd, with its arena. Closed when no communicator and no tensor uses it."""

    def __init__(self, path: str | None, deadline: _native.Deadline) -> None:
        lib = _native.library()
        options = _native.OpenOptions()
        options.socket_path = None if path is None else os.fsencode(path)
        self.path = path
        self.handle = ctypes.c_void_p()
        # What could not be let go yet: tensors of abandoned ops, which still own them; states in a sync; memory that
        # a state or an op names. Each tries, and says whether it is gone now.
        self.leftovers: collections.deque[Callable[[], bool]] = collections.deque()
        # Not at exit: the end of the process closes the connection, and threads may still use it.
        weakref.finalize(self, lib.lh_close, self.handle).atexit = False
        slice_ms = round(1000 * _native.SLICE_S)
        while True:
            left = deadline.left()
            options.timeout_ms = slice_ms if left is None else min(slice_ms, round(1000 * left))
            status = lib.lh_open(ctypes.byref(options), ctypes.byref(self.handle))
            if status == _native.OK:
                break
            if status not in (_native.UNAVAILABLE, _native.DEADLINE_EXCEEDED) or deadline.passed():
                raise error(status, "connecting to peerd")
            # A peerd that answers slowly gets longer at each try.
            slice_ms = min(2 * slice_ms, 2000)

    def alive(self) -> bool:
        """Whether the connection stands, as far as can be told without waiting."""
        status: int = _native.library().lh_client_check(self.handle)
        return status == _native.OK

    def alloc(self, size: int) -> ctypes.Array[ctypes.c_char]:
        """`size` bytes (1 or more) of arena, 64-byte aligned; freed when the last view of them dies."""
        self.sweep()
        data = ctypes.c_void_p()
        try:
            status = _native.library().lh_alloc(self.handle, size, ctypes.byref(data))
            check(status, f"allocating {size} bytes shared with peerd")
            assert data.value is not None
            memory = (ctypes.c_char * size).from_address(data.value)
            weakref.finalize(memory, _free, self, data).atexit = False
        except BaseException:
            _free(self, data)
            raise
        return memory

    def let_go(self, attempt: Callable[[], bool]) -> None:
        """Tries now, and at each sweep until it says that it is done."""
        if not attempt():
            self.leftovers.append(attempt)

    def sweep(self) -> None:
        """Lets go of what could not be let go before.

        Finalizers come here, too, in any thread and between any two instructions of another sweep. So there is no
        lock, which the interrupted one might hold: whoever has taken one out has it alone.
        """
        again = bool(self.leftovers)
        while again:
            again = False  # memory may be free once what used it is gone
            for _ in range(len(self.leftovers)):
                try:
                    attempt = self.leftovers.popleft()
                except IndexError:
                    break
                if attempt():
                    again = True
                else:
                    self.leftovers.append(attempt)


def _free(client: Client, data: ctypes.c_void_p) -> None:
    """Once, however often it is called."""
    block = ctypes.c_void_p(data.value)
    data.value = None
    # A state and its tensors may be garbage together, and be collected in any order.
    client.let_go(functools.partial(_is_freed, client.handle, block))


def _is_freed(handle: ctypes.c_void_p, block: ctypes.c_void_p) -> bool:
    status: int = _native.library().lh_free(handle, block)
    return status != _native.FAILED_PRECONDITION


# Of the tables below; never held while anything is waited for. Reentrant, since a finalizer may come here.
_lock = threading.RLock()
_clients: weakref.WeakValueDictionary[str | None, Client] = weakref.WeakValueDictionary()
_latest: weakref.ref[Client] | None = None


def _forget() -> None:
    """In a child of fork(): the connections are its parent's, and a thread of that may have held the lock."""
    global _lock, _clients, _latest
    _lock = threading.RLock()
    _clients = weakref.WeakValueDictionary()
    _latest = None


os.register_at_fork(after_in_child=_forget)


def client_of(peerd: PathLike | None, deadline: _native.Deadline) -> tuple[Client, bool]:
    """The process's connection to this peerd, and whether it was made just now.

    One that is dead is replaced: its peerd may have been started anew.
    """
    global _latest
    path = (os.environ.get("LONGHAUL_SOCKET") or None) if peerd is None else os.fspath(peerd)
    # One connection, whichever way the socket is named: memory of another one would be copied.
    key = None if path is None else os.path.abspath(path)
    made: Client | None = None
    while True:
        with _lock:
            client = _clients.get(key)
            if client is None or not client.alive():
                client = made
            if client is not None:
                # If two threads have connected at once, both use what the first one made.
                _clients[key] = client
                _latest = weakref.ref(client)
                return client, client is made
        # Each waits for its own peerd, for its own time.
        made = Client(path, deadline)


def arena_of(peerd: PathLike | None) -> Client:
    """The connection to this peerd; for None the one used last, else the default path."""
    latest = None if peerd is not None or _latest is None else _latest()
    if latest is not None:
        if latest.alive():
            return latest
        peerd = latest.path
    return client_of(peerd, _native.Deadline(10))[0]


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
