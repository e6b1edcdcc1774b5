"""What a call says while it waits: what for, after a while, and then from time to time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from ._log import logger

# Seconds until a call says what it waits for, if that is a peerd that does not serve yet, and otherwise; then again and
# again.
PEERD_S = 5.0
FIRST_S = 10.0
EVERY_S = 60.0


class Waiting:
    """A wait, be it one call or several that go on with it. All calls of this package that block have one. One thread.

    what: begins the lines, for instance "run demo group 0: begin_step". now: gives seconds; for tests.
    """

    def __init__(self, what: str, first: float | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._now = now
        self._begun = now()
        self._due = self._begun + (FIRST_S if first is None else first)

    def look(self, why: Callable[[], str]) -> None:
        """Called again and again during the wait, at least every few seconds. Asks `why` only if a line is due."""
        now = self._now()
        if now < self._due:
            return
        self._due = now + EVERY_S
        logger.warning("%s has waited for %.0f s: %s", self._what, now - self._begun, why())


class Asked(Protocol):
    """Who says why a group waits. In practice a Client."""

    def why(self, run: str, group: int) -> str: ...


class GroupWait:
    """A wait for other members of a group, or for its coordinator: peerd is asked what it is for. One thread."""

    def __init__(self, client: Asked, run: str, group: int, what: str) -> None:
        self._client, self._run, self._group = client, run, group
        self._waiting = Waiting(f"run {run} group {group}: {what}")

    def look(self) -> None:
        """As Waiting.look()."""
        self._waiting.look(self._why)

    def _why(self) -> str:
        return self._client.why(self._run, self._group)
