"""A thread that calls back when ops have ended."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections.abc import Callable
from typing import Any, Protocol

from ._errors import FailedPrecondition

# The thread ends after it has had nothing to watch for this long.
_IDLE_MS = 1000


class Client(Protocol):
    """What a Watcher needs of a client."""

    def native_fileno(self) -> int: ...
    def take_for_callbacks(self) -> bool: ...


def run_callback(call: Callable[[Any], object], argument: Any) -> None:
    """Calls call(argument), and logs its exception."""
    try:
        call(argument)
    except Exception:
        logging.getLogger("longhaul").exception("a callback of an op failed")


class Watcher:
    """Watches ops of one client. Any thread may call watch()."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: list[tuple[Callable[[], bool], Callable[[], None]]] = []
        self._thread: threading.Thread | None = None
        self.ident: int | None = None  # of the thread while it runs
        self._wake = -1  # the end of a pipe: the thread looks at _watched when something is written to it

    def watch(self, client: Client, ended: Callable[[], bool], call: Callable[[], None]) -> None:
        """Calls `call` in the thread once ended() is true. `ended` must not wait or raise.

        client: the owner of this Watcher. A reference from here would be a cycle, and keep the client open.
        """
        fd = client.native_fileno()
        with self._lock:
            self._watched.append((ended, call))
            if self._thread is None:
                read_end, self._wake = os.pipe()
                os.set_blocking(self._wake, False)
                self._thread = threading.Thread(
                    target=self._run, args=(client, fd, read_end), name="longhaul-callbacks", daemon=True
                )
                self._thread.start()
            self._poke()

    def look(self) -> None:
        """Has the thread look at what it watches: somebody else has taken the event that would have told it."""
        with self._lock:
            if self._thread is not None:
                self._poke()

    def _poke(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes the thread as well
            os.write(self._wake, b"x")

    def check_may_wait(self, what: str) -> None:
        """Raises FailedPrecondition in the thread of the callbacks: while it waits, it sees the end of no other op."""
        if threading.get_ident() == self.ident:
            raise FailedPrecondition(
                f"{what}: this is a callback of an op, and all other callbacks would wait with it; start another op with "
                "async_op=True and a callback of its own, or wait in another thread"
            )

    def _run(self, client: Client, fd: int, read_end: int) -> None:
        self.ident = threading.get_ident()
        lives = True
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        poller.register(read_end, select.POLLIN)
        while True:
            ready = poller.poll(_IDLE_MS)
            if any(number == read_end for number, _ in ready):
                os.read(read_end, 4096)
            if lives and not client.take_for_callbacks():
                poller.unregister(fd)  # peerd has gone, so every op has ended; the descriptor stays readable
                lives = False
            with self._lock:
                watched = list(self._watched)
            # Ask for each op once, so that its callbacks run in their order.
            outcomes = {ask: ask() for ask in dict.fromkeys(ask for ask, _ in watched)}
            ended = [pair for pair in watched if outcomes[pair[0]]]
            for _, call in ended:
                call()
            with self._lock:
                if ended:
                    gone = {id(pair) for pair in ended}
                    self._watched = [pair for pair in self._watched if id(pair) not in gone]
                if not self._watched and not ready:
                    self._thread = self.ident = None
                    os.close(read_end)
                    os.close(self._wake)
                    return
