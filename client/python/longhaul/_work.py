"""Ops in flight: how to wait for them, and what they did."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

from . import _native
from ._arena import Client
from ._errors import Aborted, DeadlineExceeded, Error, Evicted, FailedPrecondition, InvalidArgument, check, error
from ._log import Record, logger
from ._op_info import OpInfo, op_info
from ._waiting import GroupWait
from ._watcher import run_callback

# Two threads may see the end of an op at the same time, and one of them counts it. Reentrant: so may a finalizer.
_settling = threading.RLock()


class Op:
    """One op in the C library. Keeps its tensors alive until the outcome.

    It is made before the call that starts the op; _native explains why. If the op ended within that call, the next
    op uses this object again.
    """

    def __init__(self, client: Client, record: Record) -> None:
        self.handle = ctypes.c_void_p()
        self.kind = self.what = "all_reduce"
        self.record = record
        self.client = client
        # None while the object waits to be used. The owner (the Comm) stays alive as long as the op.
        self.owner: object = None
        self.tensors: tuple[Any, ...] | None = None
        self.written: Sequence[int] = ()  # addresses of tensors, as in Client.written
        self.outcome: OpInfo | Error | None = None
        self._wait: GroupWait | None = None
        weakref.finalize(self, _free_op, client, self.handle).atexit = False

    def poll(self) -> bool:
        """Whether there is an outcome."""
        if self.outcome is None:
            finished = ctypes.c_int()
            check(_native.library().lh_op_test(self.handle, ctypes.byref(finished)), self.what)
            if finished.value:
                # Does not block: there is an outcome.
                self._settle(_native.library().lh_op_wait(self.handle, 0))
        return self.outcome is not None

    def wait(self, deadline: _native.Deadline) -> bool:
        """Waits for an outcome. False: there is none by the deadline."""
        if self.outcome is None:
            status = _native.wait(self.handle, deadline, self.look)
            if status == _native.DEADLINE_EXCEEDED:
                return False
            self._settle(status)
        return True

    def look(self) -> None:
        """Somebody waits for the op. If for long, a line says what for."""
        if self._wait is None:
            self._wait = GroupWait(self.client, self.record.run, self.record.group, self.what)
        self._wait.look()

    def _settle(self, status: int) -> None:
        outcome: OpInfo | Error
        if status != _native.OK:
            outcome = error(status, self.what)
        else:
            info = _native.OpInfoStruct()
            check(_native.library().lh_op_info(self.handle, ctypes.byref(info)), self.what)
            outcome = op_info(info)
        with _settling:
            if self.outcome is not None:
                return
            self.outcome = outcome
        self._wait = None
        self.tensors = None
        for address in self.written:
            self.client.written.pop(address, None)
        self.written = ()
        if isinstance(outcome, Error):
            self.record.op_failed(outcome)
        else:
            self.record.op_ended(self.kind, self.what, outcome)

    def arrive(self) -> None:
        """Once poll() was True: waits until the result is in the tensors. It is, if they are in host memory."""

    def watch(self, call: Callable[[], None]) -> None:
        """Calls `call` in a thread of Longhaul once there is an outcome."""
        self.client.watcher.watch(self.client, self.poll, call)

    def cancel(self) -> None:
        if self.outcome is None:
            check(_native.library().lh_op_cancel(self.handle), self.what)

    def abandon(self) -> None:
        """Nobody will wait for the op. If it is in flight, the client keeps its tensors alive until its outcome."""
        if self.outcome is None and self.handle.value is not None and self.owner is not None:
            self.client.leftovers.append(self.poll)

    def failure(self, status: int) -> Error:
        """The error with which the op has ended. Records it."""
        problem = error(status, self.what)
        self.record.op_failed(problem)
        return problem


# The argument `client` keeps the client alive until this has run: lh_close() would free the op, too.
def _free_op(client: Client, handle: ctypes.c_void_p) -> None:
    _native.library().lh_op_free(handle)


class AnyOp(Protocol):
    """What a Work needs of its op: an Op, or the op on tensors of a GPU that has an Op inside (_device_op.DeviceOp)."""

    what: str
    client: Client
    outcome: OpInfo | Error | None

    @property
    def handle(self) -> ctypes.c_void_p | None: ...
    def poll(self) -> bool: ...
    def look(self) -> None: ...
    def wait(self, deadline: _native.Deadline) -> bool: ...
    def arrive(self) -> None: ...
    def watch(self, call: Callable[[], None]) -> None: ...
    def cancel(self) -> None: ...
    def abandon(self) -> None: ...


def result_of(op: AnyOp) -> OpInfo:
    """What the op did. Raises the error of the op if it failed, FailedPrecondition if it has no outcome yet."""
    if op.outcome is None:
        raise FailedPrecondition(f"{op.what}: has no outcome yet; call wait() first")
    if isinstance(op.outcome, Error):
        # A copy: the op lives on, and would keep alive what the traceback refers to, such as a whole trainer.
        raise copy.copy(op.outcome)
    return op.outcome


def abandon(op: AnyOp) -> None:
    op.abandon()


def _drop(op: AnyOp) -> None:
    """The Work is gone. If the op is in flight, the client keeps its tensors alive, and says so if it fails."""
    if op.outcome is None:
        op.client.leftovers.append(lambda: _end_unheard(op))


def _end_unheard(op: AnyOp) -> bool:
    told = op.outcome is not None  # by another Work of the op
    if not op.poll():
        return False
    # Aborted and Evicted are no news: every call of the member tells them.
    if not told and isinstance(op.outcome, Error) and not isinstance(op.outcome, Aborted | Evicted):
        logger.warning("%s; nobody waits for this op, and others may wait for it", op.outcome)
    return True


def wait_any(works: Sequence[Work], timeout: float | None = None) -> Work:
    """Waits until one of the ops has an outcome, good or bad, and returns the first such Work of the sequence.

    The ops may be of any members of this process at one peerd. timeout: seconds; None: no limit.
    Raises DeadlineExceeded if none has an outcome in time; InvalidArgument for no ops, or ops of two peerds.
    """
    deadline = _native.Deadline(timeout)
    for work in works:
        if work.done():
            return work
    if not works:
        raise InvalidArgument("wait_any: there are no ops to wait for")
    works[0]._op.client.watcher.check_may_wait("wait_any")
    lib = _native.library()
    client = works[0]._op.client
    index = ctypes.c_uint32()
    while True:
        flying = [(work, handle) for work in works if (handle := work._op.handle) is not None]
        handles = (ctypes.c_void_p * len(flying))(*[handle for _, handle in flying])
        # The others wait for a GPU. Look at them often.
        slice_ms = deadline.slice_ms() if len(flying) == len(works) else 1
        status = _native.DEADLINE_EXCEEDED
        if flying:
            status = lib.lh_wait_any(client.handle, handles, len(flying), slice_ms, ctypes.byref(index))
        else:
            time.sleep(0.001)
        if status not in (_native.OK, _native.DEADLINE_EXCEEDED):
            raise error(status, "wait_any")
        asked = [flying[index.value][0]] if status == _native.OK else works if len(flying) < len(works) else []
        for work in asked:
            if work.done():
                return work
        works[0]._op.look()
        if deadline.passed():
            raise DeadlineExceeded(f"wait_any: none of {len(works)} ops has an outcome after {timeout} s; all go on")


class Work:
    """An op in flight, from `Comm.all_reduce(async_op=True)`, for instance.

    The tensors belong to the op until it has an outcome: neither read nor write them. A Work may be dropped without
    waiting: the op goes on and keeps its tensors alive; if it fails, the next call says so in the log. Any thread may
    call any method.

    Tensors on a GPU: wait(), and done() if it returns True, make the current stream of the calling thread wait for the
    result; the thread itself does not. Call one of them for each stream that uses the result.
    """

    def __init__(self, op: AnyOp) -> None:
        self._op = op
        weakref.finalize(self, _drop, op).atexit = False

    def wait(self, timeout: float | None = None) -> OpInfo:
        """Waits for the outcome. Every further call gives the same outcome again.

        timeout: seconds; None: no limit. Ctrl-C ends the wait, not the op.
        Raises DeadlineExceeded if there is no outcome in time: the op goes on; call wait() again. Raises
        FailedPrecondition in a callback of another op, unless this op has an outcome: no callback may wait. Raises the
        error of the op if it failed; `Comm.all_reduce` says which errors there are, and what the tensors hold then.
        """
        op = self._op
        if op.outcome is None and not op.poll():
            op.client.watcher.check_may_wait(op.what)
        if not op.wait(_native.Deadline(timeout)):
            late = DeadlineExceeded(
                f"{self._op.what}: no outcome after {timeout} s; the op goes on and uses its tensors; call wait() again"
            )
            late.work = self
            raise late
        return self.info

    def done(self) -> bool:
        """Whether the op has an outcome, good or bad. Does not wait for other members."""
        return self._op.poll()

    def cancel(self) -> None:
        """Asks for the end of the op. Does not wait: wait() tells the outcome.

        Usually the op ends with Aborted at all members, with their inputs unchanged, also at those that start it later,
        until their next step boundary. If it was almost done, it may still end well, at all members. Members may
        cancel it at the same time: that is one end. So a member that gets Aborted and starts the op again meets the
        others that do so. If the op has an outcome already, nothing happens. If it waits in this process behind 1024
        others, it goes to peerd first.

        A cancelled op delays all ops of the group that are in flight, by a few round trips to the coordinator.
        """
        self._op.cancel()

    @property
    def info(self) -> OpInfo:
        """What the op did. Raises the error of the op if it failed, FailedPrecondition if it has no outcome yet."""
        return result_of(self._op)

    def add_done_callback(self, call: Callable[[Work], object]) -> None:
        """Calls `call(work)` once the op has an outcome: in a thread of Longhaul, or here if it has one already.

        The result is in the tensor by then. Callbacks run one after the other, so they must not wait: a wait for an
        op, a boundary or a sync raises FailedPrecondition there. An exception of a callback is logged ("longhaul"). The
        thread starts with the first callback, and ends when it has had nothing to watch for a second.
        """
        op = self._op
        if op.poll():
            op.arrive()
            run_callback(call, self)
        else:
            op.watch(lambda: run_callback(call, self))

    def future(self) -> concurrent.futures.Future[OpInfo]:
        """A future of the outcome: its result() is what wait() returns or raises.

        Its cancel() does nothing; that of the Work ends the op.
        """
        future: concurrent.futures.Future[OpInfo] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()

        def done(work: Work) -> None:
            try:
                future.set_result(work.info)
            except Error as problem:
                future.set_exception(problem)

        self.add_done_callback(done)
        return future

    def __await__(self) -> Generator[Any, None, OpInfo]:
        """`info = await work` in a coroutine: the loop runs on meanwhile. Cancelling the await does not end the op."""
        import asyncio  # takes a while, and few programs need it

        if self._op.poll():
            return self.info
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def done(work: Work) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result(None))

        self.add_done_callback(done)
        yield from future
        return self.info

    def __repr__(self) -> str:
        outcome = self._op.outcome
        return f"<Work {self._op.what}: {'in flight' if outcome is None else outcome}>"
