"""Ops on tensors of a GPU: a copy to host memory, the op, and a copy back."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import threading
from collections.abc import Callable
from typing import Any, Protocol

from . import _native
from ._arena import Client
from ._errors import DeadlineExceeded, Error, FailedPrecondition
from ._op_info import OpInfo
from ._work import AnyOp, Op

Future = concurrent.futures.Future


class Staged(Protocol):
    """The tensors of an op in host memory: longhaul.torch._staging.Staged.

    begin() starts to copy the inputs there and returns a mark, whose wait() returns when the op may start. land() starts
    to copy the results back and returns a mark; None: the results stay in host memory.
    """

    copier: Any

    def begin(self, what: str) -> Any: ...
    def land(self) -> Any: ...


class Starter:
    """A thread that starts ops when their tensors are in host memory, one after the other.

    So the call that asks for an op does not wait for the GPU. The device copies tensors in the order of the calls.
    """

    def __init__(self) -> None:
        # The thread begins with the first call, and ends with this object.
        self._executor = concurrent.futures.ThreadPoolExecutor(1, "longhaul-gpu")
        self._waiting: set[Future[None]] = set()

    def submit(self, call: Callable[[], None]) -> Future[None]:
        future = self._executor.submit(call)
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        return future

    def flush(self, what: str, deadline: _native.Deadline) -> None:
        """Waits until all ops that were asked for have been started. Raises DeadlineExceeded."""
        for future in list(self._waiting):
            if not _ended(future, deadline):
                raise DeadlineExceeded(
                    f"{what}: ops on GPU tensors wait for the GPU to compute their tensors, and start before this call; "
                    f"call {what}() again to go on waiting"
                )


def _ended(future: Future[None], deadline: _native.Deadline) -> bool:
    try:
        future.result(deadline.left())
    except concurrent.futures.TimeoutError:
        return future.done()
    return True


class DeviceOp:
    """Does for a Work what Op does, for an op on tensors of a GPU.

    copy to host --start in the thread of the Starter--> op at peerd --wait(), poll() or a callback--> copy to device

    The outcome is known once the op at peerd has ended well and the copy to the device is queued. The streams of those
    who wait or poll then wait for this copy. A result is written only if the op has ended well.
    """

    def __init__(
        self,
        client: Client,
        what: str,
        staged: Staged,
        start: Callable[[], Op],
        starter: Starter,
        begun: list[AnyOp] | None = None,
    ) -> None:
        self.client = client
        self.what = what
        self.outcome: OpInfo | Error | None = None
        self._copier = staged.copier
        self._staged: Staged | None = staged
        self._start: Callable[[], Op] | None = start
        self._op: Op | None = None  # the op at peerd
        self._problem: Error | None = None  # why there is none
        self._cancelled = False
        self._landed: Any = None  # the mark of the copy to the device
        # Held for moments, but also by a thread that a finalizer interrupts: poll() only tries to take it.
        self._lock = threading.Lock()
        arrived = staged.begin(what)
        if begun is not None:
            begun.append(self)
        self._begun = starter.submit(lambda: self._begin(arrived))

    @property
    def handle(self) -> ctypes.c_void_p | None:
        """The op in the C library; None: it is not at peerd yet, or never will be."""
        return None if self._op is None else self._op.handle

    def _begin(self, arrived: Any) -> None:
        """In the thread of the Starter: starts the op when its tensors are in host memory."""
        start, self._start = self._start, None
        assert start is not None
        try:
            arrived.wait()
            self._op = start()
        except Error as problem:
            self._problem = problem
        except Exception as problem:
            self._problem = self._failed(problem)
        if self._cancelled and self._op is not None:
            with contextlib.suppress(Error):
                self._op.cancel()

    def _failed(self, problem: Exception) -> Error:
        return FailedPrecondition(
            f"{self.what}: the GPU failed ({problem}); a process cannot use it after that: correct the cause and start the "
            "program again"
        )

    def _settle(self) -> None:
        """With the lock, once the op at peerd has ended, or could not start: starts the copy to the device."""
        staged = self._staged
        if self.outcome is not None or staged is None:
            return
        outcome: OpInfo | Error | None = self._problem
        if self._op is not None:
            outcome = self._op.outcome
        assert outcome is not None
        if isinstance(outcome, OpInfo):
            try:
                self._landed = staged.land()
            except RuntimeError as problem:
                outcome = self._failed(problem)
            else:
                outcome = outcome._replace(staged=outcome.staged or self._landed is not None)
        self._staged = None
        self.outcome = outcome

    def poll(self) -> bool:
        """Whether there is an outcome. If so, the caller's stream waits for the result."""
        # During the capture of a graph nothing may be queued. Another call does it later.
        if self._copier.capturing():
            return False
        if self.outcome is None:
            if not self._begun.done() or (self._op is not None and not self._op.poll()):
                return False
            if not self._lock.acquire(blocking=False):
                return False
            try:
                self._settle()
            finally:
                self._lock.release()
        self._follow()
        return True

    def look(self) -> None:
        """As Op.look(). Nothing is said of a wait for the GPU."""
        if self._op is not None:
            self._op.look()

    def wait(self, deadline: _native.Deadline) -> bool:
        """Waits for an outcome; then the caller's stream waits for the result. False: there is none by the deadline."""
        self._copier.check_usable(self.what)
        if self.outcome is None:
            if not _ended(self._begun, deadline):
                return False
            if self._op is not None and not self._op.wait(deadline):
                return False
            with self._lock:
                self._settle()
        self._follow()
        return True

    def _follow(self) -> None:
        if self._landed is not None:
            self._copier.follow(self._landed)

    def arrive(self) -> None:
        """Once there is an outcome: the host waits until the result is in the tensors."""
        if self._landed is not None:
            with contextlib.suppress(RuntimeError):  # the next use of the GPU tells
                self._landed.wait()

    def watch(self, call: Callable[[], None]) -> None:
        """Calls `call` in a thread of Longhaul once the result is in the tensors, or the op has failed."""

        def end() -> None:
            with self._lock:
                self._settle()
            self.arrive()
            call()

        def begun(_: Future[None]) -> None:
            if self._op is None:
                end()
            else:
                self.client.watcher.watch(self.client, self._op.poll, end)

        self._begun.add_done_callback(begun)

    def cancel(self) -> None:
        self._cancelled = True
        if self._op is not None and self.outcome is None:
            self._op.cancel()

    def abandon(self) -> None:
        """Nobody will wait for the op. It goes on; its tensors stay alive until its outcome."""
        if self.outcome is None:
            self.client.leftovers.append(self.poll)
