"""What a call says while it waits: what for, after a while, and then from time to time."""

from __future__ import annotations

import time
from collections.abc import Callable

from ._log import logger

# Seconds until a call says what it waits for, if that is a peerd that does not serve yet, and otherwise; then again and
# again.
PEERD_S = 5.0
FIRST_S = 10.0
EVERY_S = 60.0


class Waiting:
    """One call that waits. All calls of this package that block have one. One thread.

    what: begins the lines, for instance "run demo group 0: begin_step". now: gives seconds; for tests.
    """

    def __init__(self, what: str, first: float = FIRST_S, now: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._now = now
        self._begun = now()
        self._due = self._begun + first

    def look(self, why: Callable[[], str]) -> None:
        """Called again and again while the call waits, at least every few seconds. Asks `why` only if a line is due."""
        now = self._now()
        if now < self._due:
            return
        self._due = now + EVERY_S
        logger.warning("%s has waited for %.0f s: %s", self._what, now - self._begun, why())
