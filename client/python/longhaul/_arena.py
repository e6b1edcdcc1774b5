"""Connections to peerd, and numpy arrays in memory shared with peerd (the arena)."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import math
import operator
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from . import _native
from ._errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, Unavailable, check, error
from ._programs import PathLike, private_socket, serves
from ._waiting import PEERD_S, Waiting
from ._watcher import Watcher

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Shape = int | Sequence[int]

# How long peerd may take to say why a group waits. It gives the coordinator a second.
_WHY_MS = 3000
_WHY_BYTES = 1024


class Client:
    """A connection to a peerd, and the memory shared with it.

    It closes when no communicator, no tensor in its memory and no op refers to it any more. Any thread.
    """

    def __init__(self, path: str | None, timeout: float) -> None:
        """Tries once to connect. Raises Unavailable or DeadlineExceeded if no peerd answers."""
        lib = _native.library()
        options = _native.OpenOptions()
        options.socket_path = None if path is None else os.fsencode(path)
        self.path = path
        self.handle = ctypes.c_void_p()
        self.watcher = Watcher()
        # What fileno() gives to the program, once it has asked.
        self._events: select.epoll | None = None
        self._taken = -1
        self._helped = False
        # Functions that free something which is still in use: the tensors of ops that nobody waits for, states in a
        # sync, and memory that an op or a state uses. Each function tries again and returns True once it is freed.
        self.leftovers: collections.deque[Callable[[], bool]] = collections.deque()
        # By address: the op in flight that writes the tensor there. Only ops with async_op=True.
        self.written: dict[int, Any] = {}
        # By address of a block from alloc(): what to call before the block is freed.
        self._before_free: dict[int, list[tuple[object, Callable[[], None]]]] = {}
        # Not at exit: threads may still use the connection then, and the end of the process closes it anyway.
        weakref.finalize(self, lib.lh_close, self.handle).atexit = False
        options.timeout_ms = round(1000 * timeout)
        check(lib.lh_open(ctypes.byref(options), ctypes.byref(self.handle)), "connecting to peerd")

    def native_fileno(self) -> int:
        """The descriptor of the C library. Only the watcher reads it: whoever takes an event takes it from all others."""
        fd = ctypes.c_int()
        check(_native.library().lh_event_fd(self.handle, ctypes.byref(fd)), "fileno")
        return fd.value

    def fileno(self) -> int:
        """A descriptor for the program: that of the C library, and one that is set for what the watcher has taken."""
        native = self.native_fileno()
        with _lock:
            if self._events is None:
                self._taken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                weakref.finalize(self, os.close, self._taken).atexit = False
                self._events = select.epoll()
                self._events.register(native, select.EPOLLIN)
                self._events.register(self._taken, select.EPOLLIN)
            return self._events.fileno()

    def take_events(self) -> None:
        """For the program: makes fileno() unreadable until something ends. If peerd has gone, it stays readable."""
        if self._taken >= 0:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._taken)
        _native.library().lh_event_take(self.handle)
        self.watcher.look()

    def take_for_callbacks(self) -> bool:
        """For the watcher: the same for native_fileno(). False: peerd has gone, and it stays readable."""
        status: int = _native.library().lh_event_take(self.handle)
        if self._taken >= 0:
            os.eventfd_write(self._taken, 1)
        return status == _native.OK

    def start_helper(self) -> None:
        if not self._helped:
            self._helped = True
            threading.Thread(target=_help, args=(weakref.ref(self),), name="longhaul-helper", daemon=True).start()

    def alive(self) -> bool:
        """Whether the connection to peerd is open, as far as the library can tell without waiting."""
        status: int = _native.library().lh_client_check(self.handle)
        return status == _native.OK

    def why(self, run: str, group: int) -> str:
        """Why members of the group wait, as peerd and the coordinator see it: one sentence. Takes 3 s at most."""
        text = ctypes.create_string_buffer(_WHY_BYTES)
        status = _native.library().lh_why(self.handle, run.encode(), group, _WHY_MS, text, len(text))
        if status != _native.OK:
            return str(error(status, "peerd was asked why"))
        return text.value.decode(errors="replace") or "nobody knows why"

    def alloc(self, size: int) -> ctypes.Array[ctypes.c_char]:
        """Allocates `size` bytes (1 or more) of shared memory, aligned to 64 bytes.

        The memory is freed when the last view of it is gone.
        """
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

    def before_free(self, address: int, owner: object, call: Callable[[], None]) -> None:
        """Has `call` called once, before the block from alloc() that begins at `address` is freed; the last call first.

        For memory that a device has pinned: it has to be unpinned while it is still there.
        """
        self._before_free.setdefault(address, []).append((owner, call))

    def is_held(self, address: int, owner: object = None) -> bool:
        """Whether before_free() was called for the block that begins at `address`, by `owner` if one is given."""
        return any(owner is None or each is owner for each, _ in self._before_free.get(address, ()))

    def unhold(self, address: int) -> None:
        """Makes the calls of before_free()."""
        for _, call in reversed(self._before_free.pop(address, [])):
            call()

    def let_go(self, attempt: Callable[[], bool]) -> None:
        """Calls `attempt` now and at each sweep() until it returns True."""
        if not attempt():
            self.leftovers.append(attempt)

    def sweep(self) -> None:
        """Tries again to free what was in use before.

        Finalizers call this, too: on any thread, also in the middle of another sweep on the same thread. A lock would
        deadlock then, so there is none. popleft() is atomic, and gives each function to one sweep only.
        """
        again = bool(self.leftovers)
        while again:
            again = False  # a freed state or op may make memory free, so look again after each success
            for _ in range(len(self.leftovers)):
                try:
                    attempt = self.leftovers.popleft()
                except IndexError:
                    break
                if attempt():
                    again = True
                else:
                    self.leftovers.append(attempt)


def _help(reference: weakref.ref[Client]) -> None:
    """Copies results of the client as they come, until the client is gone."""
    while (client := reference()) is not None:
        if _native.library().lh_help(client.handle, 1000) != _native.DEADLINE_EXCEEDED:
            return
        del client


def _free(client: Client, data: ctypes.c_void_p) -> None:
    """Frees memory from alloc(). A second call does nothing."""
    block = ctypes.c_void_p(data.value)
    data.value = None
    if block.value is not None:
        client.unhold(block.value)
    # The garbage collector may free a tensor before the state that uses it. Then lh_free() refuses, until a sweep.
    client.let_go(functools.partial(_is_freed, client.handle, block))


def _is_freed(handle: ctypes.c_void_p, block: ctypes.c_void_p) -> bool:
    status: int = _native.library().lh_free(handle, block)
    return status != _native.FAILED_PRECONDITION


# Guards the tables below. Never held while waiting. Reentrant, because a finalizer may need it on the same thread.
_lock = threading.RLock()
_clients: weakref.WeakValueDictionary[str | None, Client] = weakref.WeakValueDictionary()
_latest: weakref.ref[Client] | None = None


def _forget() -> None:
    """Runs in a child of fork(). The connections belong to the parent, and a thread of the parent may hold the lock."""
    global _lock, _clients, _latest
    _lock = threading.RLock()
    _clients = weakref.WeakValueDictionary()
    _latest = None


os.register_at_fork(after_in_child=_forget)


def default_path() -> str | None:
    """The path of the socket if the caller names none; None: the library tries its default paths.

    $LONGHAUL_SOCKET; else, on a host without a peerd at a default path, that of a private peerd for
    $LONGHAUL_COORDINATOR, which this call starts.
    """
    named = os.environ.get("LONGHAUL_SOCKET")
    coordinator = os.environ.get("LONGHAUL_COORDINATOR")
    if named or not coordinator:
        return named or None
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    paths = ["/run/longhaul/peerd.sock", *([f"{runtime}/longhaul/peerd.sock"] if runtime else [])]
    if any(os.path.exists(path) for path in paths):
        return None
    return private_socket(coordinator)


def client_of(
    peerd: PathLike | None, deadline: _native.Deadline, coordinator: str | None = None
) -> tuple[Client, bool]:
    """Gives this process's connection to a peerd, and whether this call made it.

    A dead connection is replaced, because its peerd may have been restarted. peerd: path of the socket; None: as
    default_path() says. coordinator: the peerd is the private one for this coordinator. Raises Unavailable if no peerd
    answers by the deadline, FailedPrecondition if none can: something else must be done first.
    """
    timeout = _native.SLICE_S
    waiting = Waiting("connecting to peerd", first=PEERD_S)
    while True:
        # Anew at each try: a private peerd that has died gets a successor. It may be dying now, since a process closes
        # its sockets before the system reports its end.
        if coordinator is not None:
            path: str | None = private_socket(coordinator)
        else:
            path = default_path() if peerd is None else os.fspath(peerd)
        # One connection for every spelling of a path: a tensor from another connection would be copied.
        key = None if path is None else os.path.abspath(path)
        with _lock:
            known = _clients.get(key)
            if known is not None and known.alive():
                return _use(key, known), False
        left = deadline.left()
        # Connect without the lock: other threads may wait for other peerds.
        tried = timeout if left is None else min(timeout, left)
        begun = time.monotonic()
        try:
            made = Client(path, tried)
        except (DeadlineExceeded, Unavailable) as problem:
            # The library uses up its time unless no further try can help, for instance if the user may not connect.
            if time.monotonic() - begun < tried / 2:
                raise FailedPrecondition(*problem.args) from None
            if deadline.passed():
                raise
            text = str(problem)
            waiting.look(lambda text=text: text)  # type: ignore[misc]
            # Wait longer at each try: a loaded peerd may need more than one slice to answer.
            timeout = min(2 * timeout, 2.0)
            continue
        with _lock:
            # Two threads may have connected at the same time. Both use the connection that was stored first.
            known = _clients.get(key)
            client = known if known is not None and known.alive() else made
            _use(key, client)
        if path is not None:
            serves(path, client)
        return client, client is made


def _use(key: str | None, client: Client) -> Client:
    """Notes the connection of a path as the latest one. The caller holds the lock."""
    global _latest
    _clients[key] = client
    _latest = weakref.ref(client)
    return client


def arena_of(peerd: PathLike | None) -> Client:
    """The connection to a peerd. None: the connection used last, else the default path. Waits at most 10 s."""
    latest = None if peerd is not None or _latest is None else _latest()
    if latest is not None:
        if latest.alive():
            return latest
        peerd = latest.path
    return client_of(peerd, _native.Deadline(10))[0]


def shape_of(shape: Shape) -> tuple[int, ...]:
    """The dimensions of a shape. Raises InvalidArgument for a negative one, TypeError for what is not an int."""
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
        raise ImportError(
            "longhaul.empty makes numpy arrays: install numpy, or use longhaul.torch.empty or longhaul.empty_buffer"
        ) from None
    try:
        kind: np.dtype[Any] = np.dtype(dtype)
    except TypeError:
        if isinstance(dtype, str) and dtype in _native.DTYPES:
            raise InvalidArgument(
                f"numpy has no {dtype} of its own: pass ml_dtypes.{dtype}, or use longhaul.torch.empty"
            ) from None
        raise
    if kind.name not in _native.DTYPES or not kind.isnative:
        raise InvalidArgument(f"dtype {kind} is not possible; give one of {', '.join(_native.DTYPES)}")
    dimensions = shape_of(shape)
    count = math.prod(dimensions)
    if count == 0:
        return np.empty(dimensions, kind)
    return np.frombuffer(client.alloc(count * kind.itemsize), dtype=kind).reshape(dimensions)  # type: ignore[call-overload,no-any-return]


def empty(shape: Shape, dtype: npt.DTypeLike = "float32", *, peerd: PathLike | None = None) -> npt.NDArray[Any]:
    """Creates a numpy array in memory shared with peerd. An all-reduce of it copies nothing.

    shape: an int or a sequence of ints.
    dtype: bool, int8 to int64, uint8 to uint64, float16, float32, float64; or bfloat16, float8_e4m3fn or float8_e5m2 of
        ml_dtypes.
    peerd: path of the socket of the peerd to share the memory with. None: the peerd that this
        process used last; if there is none, the default of `join`. An all-reduce through another
        peerd copies the array.

    The content is undefined. The memory is freed when the array and all its views are gone.

    Raises InvalidArgument for another dtype, or a negative dimension. Raises
    Unavailable if peerd does not answer within 10 s, or if its arena limit or the memory of the
    host is used up; the message says which.
    """
    return empty_numpy(arena_of(peerd), shape, dtype)


# Formats of memoryview, which has no other of the dtypes.
_FORMATS = {
    **{"bool": "?", "int8": "b", "int16": "h", "int32": "i", "int64": "q"},
    **{"uint8": "B", "uint16": "H", "uint32": "I", "uint64": "Q", "float32": "f", "float64": "d"},
}


def empty_buffer(shape: Shape, dtype: str = "float32", *, peerd: PathLike | None = None) -> memoryview:
    """Creates a memoryview of memory shared with peerd, for programs without numpy and torch. An op on it copies nothing.

    shape: an int or a sequence of ints, all at least 1. dtype: "bool", "int8" to "int64", "uint8" to "uint64", "float32"
        or "float64". The elements are read and written as `buffer[i]` and `buffer[i, j]`.
    peerd: as for empty().

    The content is undefined. The memory is freed when the memoryview and all its views are gone. Other libraries wrap it
    without a copy, as `numpy.asarray(buffer)`. Errors: as for empty().
    """
    if dtype not in _FORMATS:
        raise InvalidArgument(
            f"dtype {dtype!r} is not possible in a memoryview; give one of {', '.join(_FORMATS)}, or use longhaul.empty"
        )
    dimensions = shape_of(shape)
    if 0 in dimensions:
        raise InvalidArgument(f"shape {dimensions} has no elements, which a memoryview cannot have; use longhaul.empty")
    memory = arena_of(peerd).alloc(math.prod(dimensions) * _native.ITEM_BYTES[dtype])
    view: memoryview = memoryview(memory).cast("B").cast(_FORMATS[dtype], dimensions)  # type: ignore[call-overload]
    return view
