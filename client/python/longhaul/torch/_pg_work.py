"""Ops of a process group in flight: the works that torch gets, their futures, and the threads that watch them."""

from __future__ import annotations

import contextlib
import copy
import datetime
import heapq
import itertools
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .. import _work as lh_work
from .._errors import DeadlineExceeded, Error
from .._op_info import OpInfo

#: A wait looks so often whether the group was aborted.
SLICE_S = 0.1
# How long a cancelled op may take to end, before its waiter gets the error.
_CANCEL_S = 0.5
# A thread of the pool that had nothing to do for so long ends.
_IDLE_S = 1.0


class Owner(Protocol):
    """What a flight needs of its group. In practice a Core."""

    def landed(self, flight: Flight, info: OpInfo | None) -> None: ...
    def failure(self, joined: Any, what: str, problem: Error) -> Exception: ...
    def timed_out(self, joined: Any, what: str, seconds: float) -> Exception: ...
    def tell(self, problem: Exception) -> None: ...


class Flight:
    """An op that has been started. Whoever sees its end first copies the results to where they belong. Any thread.

    joined: the members of the group when it started. after: what to do when it has ended well. result: the tensors with
    the results. seconds: the time-out of the op.
    """

    def __init__(
        self,
        owner: Owner,
        joined: Any,
        what: str,
        work: lh_work.Work,
        after: Sequence[Callable[[], object]],
        result: list[torch.Tensor],
        seconds: float,
    ) -> None:
        self.owner = owner
        self.joined = joined
        self.what = what
        self.work = work
        self.result = result
        self.seconds = seconds
        self.deadline = time.monotonic() + seconds
        #: None: in flight. True: ended well.
        self.outcome: bool | Exception | None = None
        self.writes: list[int] = []  # keys of the table of tensors that are written
        self._after = after
        self._lock = threading.Lock()
        self._watched = False
        self._late: float | None = None  # the time-out that has passed
        self._futures: list[torch.futures.Future[Any]] = []

    def poll(self) -> bool:
        """Whether there is an outcome. Does not wait for other ranks."""
        if self.outcome is None and self.work.done():
            self._settle()
        return self.outcome is not None

    def wait(self, seconds: float | None = None) -> None:
        """Waits for the outcome, and raises its error. After `seconds`, or the time-out of the op, the op is cancelled."""
        self.join(seconds)
        if isinstance(self.outcome, Exception):
            self.owner.tell(self.outcome)

    def join(self, seconds: float | None = None) -> None:
        """wait() that raises nothing."""
        deadline = self.deadline if seconds is None else time.monotonic() + seconds
        while self.outcome is None:
            left = deadline - time.monotonic()
            if left <= 0:
                self.time_out(self.seconds if seconds is None else seconds)
                return
            try:
                self.work.wait(min(left, SLICE_S))
            except DeadlineExceeded:
                continue
            except Error:
                pass  # _settle() reads it
            self._settle()

    def time_out(self, seconds: float | None = None) -> None:
        """The time of the op is over: cancels it. It may still end well."""
        late = self._late = self.seconds if seconds is None else seconds
        with contextlib.suppress(Error):
            self.work.cancel()
            self.work.wait(_CANCEL_S)
            self._settle()
        self.end(lambda: self.owner.timed_out(self.joined, self.what, late))

    def end(self, problem: Callable[[], Exception]) -> None:
        """Gives it an outcome, unless it has one."""
        with self._lock:
            if self.outcome is not None:
                return
            self.outcome = problem()
        self._landed(None)

    def _settle(self) -> None:
        """The op has an outcome."""
        info = None
        with self._lock:
            if self.outcome is not None:
                return
            try:
                info = self.work.info
                for call in self._after:
                    call()
                self.outcome = True
            except Error as problem:
                if self._late is None:
                    self.outcome = self.owner.failure(self.joined, self.what, problem)
                else:  # this rank has cancelled it
                    self.outcome = self.owner.timed_out(self.joined, self.what, self._late)
            except Exception as problem:
                self.outcome = problem
        self._landed(info)

    def _landed(self, info: OpInfo | None) -> None:
        self._after = ()
        self.owner.landed(self, info)
        futures, self._futures = self._futures, []
        for future in futures:
            # Callbacks of the program run in the thread that completes the future, and may wait for other ops there.
            pool.submit(lambda future=future: future.set_result(None))  # type: ignore[misc]

    def watch(self) -> None:
        """Sees to it that the op gets its outcome though nobody waits for it."""
        with self._lock:
            watched, self._watched = self._watched, True
        if not watched:
            self.work.add_done_callback(lambda _: self._settle())

    def future(self) -> torch.futures.Future[Any]:
        """A future of the result, which is completed by itself.

        The error comes out of a callback of an inner future: Future.set_exception() makes DDP crash.
        """
        devices: list[Any] = sorted({t.device for t in self.result if not t.is_cpu}, key=str)
        base: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
        with self._lock:
            flying = self.outcome is None
            if flying:
                self._futures.append(base)
        if not flying:
            base.set_result(None)
            return base.then(self._value)
        future = base.then(self._value)
        self.watch()
        service.watch(self)
        return future

    def _value(self, _: object) -> list[torch.Tensor]:
        if isinstance(self.outcome, Exception):
            self.owner.tell(self.outcome)
        return self.result


class Work(dist.Work):
    """What a collective of a process group "longhaul" returns.

    If it is dropped in flight, the result still arrives in the tensors. flight None: the op has ended well.
    """

    def __init__(self, flight: Flight | None, result: list[torch.Tensor], source: int = -1) -> None:
        super().__init__()
        self._flight = flight
        self._result = result
        self._source = source

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Waits for the outcome. timeout: then the op is cancelled, and the group has ended. None or 0: the op's own."""
        flight = self._flight
        if flight is not None:
            flight.wait(timeout.total_seconds() if timeout else None)
            if not _on_cpu(self._result):
                flight.work.done()  # makes the current stream wait for the result
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._flight is None or self._flight.poll()

    def is_success(self) -> bool:
        return self._flight is None or (self._flight.poll() and self._flight.outcome is True)

    def exception(self) -> Any:
        if self._flight is None or not self._flight.poll():
            return None
        return self._flight.outcome if isinstance(self._flight.outcome, Exception) else None

    def result(self) -> list[torch.Tensor]:
        """The tensors with the results, once the op has ended."""
        if self._flight is not None:
            self._flight.wait()
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """A future whose value is the list of the tensors with the results."""
        if self._flight is not None:
            return self._flight.future()
        devices: list[Any] = sorted({t.device for t in self._result if not t.is_cpu}, key=str)
        future: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
        future.set_result(self._result)
        return future

    def source_rank(self) -> int:
        return self._source

    def _source_rank(self) -> int:
        return self._source

    def __del__(self) -> None:
        flight = self._flight
        # The queue may be filled in a finalizer, where starting a thread or taking a lock could stand still.
        if flight is not None and flight.outcome is None and service is not None:
            service.watch(flight)


class Works(dist.Work):
    """Several works as one: of ops that were started between _start_coalescing() and _end_coalescing()."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all([work.is_completed() for work in self._works])

    def is_success(self) -> bool:
        return all([work.is_success() for work in self._works])

    def result(self) -> list[torch.Tensor]:
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> torch.futures.Future[Any]:
        futures = [work.get_future() for work in self._works]
        return torch.futures.collect_all(futures).then(
            lambda all_of_them: [tensor for future in all_of_them.value() for tensor in future.value()]
        )


def _on_cpu(tensors: Sequence[torch.Tensor]) -> bool:
    return all(tensor.is_cpu for tensor in tensors)


def raise_again(problem: Exception) -> None:
    """Raises an error that others may raise, too: a copy, whose traceback is its own."""
    raise copy.copy(problem)


class Pool:
    """Threads for callbacks of the program. As many as are busy, since a callback may wait for others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._idle = 0

    def submit(self, call: Callable[[], object]) -> None:
        with self._lock:
            self._calls.put(call)
            if self._idle > 0:
                self._idle -= 1
                return
        threading.Thread(target=self._run, name="longhaul-torch-callback", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                call = self._calls.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._calls.empty() and self._idle > 0:
                        self._idle -= 1
                        return
                continue
            try:
                call()
            except Exception:
                logging.getLogger("longhaul").exception("a callback of a future failed")
            del call
            with self._lock:
                self._idle += 1


class Service:
    """One thread for all groups of the process: takes over works that were dropped, and ends those that are late.

    It lives while a group is there that has started an op with async_op.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may call release() in the middle of another method
        self._flights: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        self._users = 0
        self._thread: threading.Thread | None = None

    def hold(self) -> None:
        """A group begins."""
        with self._lock:
            self._users += 1

    def release(self) -> None:
        """A group has ended."""
        with self._lock:
            self._users -= 1
            if self._users <= 0:
                self._flights.put(None)

    def start(self) -> None:
        """Called before the first work that may be dropped."""
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    thread = threading.Thread(target=self._run, name="longhaul-torch", daemon=True)
                    thread.start()
                    self._thread = thread

    def watch(self, flight: Flight) -> None:
        """Any thread, also in a finalizer."""
        self._flights.put(flight)

    def _run(self) -> None:
        due: list[tuple[float, int, weakref.ref[Flight]]] = []
        numbers = itertools.count()
        prune_at = 256
        while True:
            try:
                wait_s = max(0.0, due[0][0] - time.monotonic()) if due else None
                flight = self._flights.get(timeout=wait_s)
            except queue.Empty:
                late = heapq.heappop(due)[2]()
                if late is not None and not late.poll():
                    pool.submit(late.time_out)
                continue
            if flight is None:
                with self._lock:
                    if self._users <= 0 and self._flights.empty():
                        self._thread = None
                        return
                continue
            flight.watch()
            heapq.heappush(due, (flight.deadline, next(numbers), weakref.ref(flight)))
            if len(due) > prune_at:
                due = [each for each in due if (left := each[2]()) is not None and left.outcome is None]
                heapq.heapify(due)
                prune_at = max(256, 2 * len(due))
            del flight


pool = Pool()
service = Service()


def _forget() -> None:
    """Runs in a child of fork(), where the threads of the parent are not."""
    global pool, service
    pool, service = Pool(), Service()


os.register_at_fork(after_in_child=_forget)
