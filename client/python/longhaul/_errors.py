"""Errors by status. What each means for the caller is in its docstring; the message says what to do."""

from __future__ import annotations

import operator
import re
from typing import Any, Protocol

from . import _native


class Pending(Protocol):
    """An op that goes on: a longhaul.Work."""

    def wait(self, timeout: float | None = None) -> Any: ...

    def done(self) -> bool: ...

    @property
    def info(self) -> Any: ...


class Error(Exception):
    """What every error of this package is. `status` is the number of the C library."""

    status = -1


class InvalidArgument(Error, ValueError):
    """The call is wrong, or the members' calls do not fit together. Nothing was changed, except that
    the `out=` of an op that all members refuse may hold anything."""

    status = 1


class FailedPrecondition(Error):
    """Something has to be done first; the message names it."""

    status = 2


class Unavailable(Error):
    """Peerd or the coordinator cannot be reached, or memory is used up; the same call may work later."""

    status = 3


class Aborted(Error):
    """The op ended without a result and its source is unchanged. Look at the world, then call again."""

    status = 4


class DeadlineExceeded(Error, TimeoutError):
    """Not done in time.

    `work`: the op, which goes on and still owns its tensors; wait for it again with `work.wait()`.
    None where nothing goes on.
    """

    status = 5
    work: Pending | None = None


class TooFewMembers(Error):
    """The world is smaller than the call demands."""

    status = 6


class Evicted(Error):
    """This member was removed from its group; the message says why. Join again."""

    status = 7


class StateMismatch(Error):
    """The members' shared states cannot be brought together."""

    status = 8


class Internal(Error):
    """A bug of Longhaul; please report the message."""

    status = 9


_BY_STATUS: dict[int, type[Error]] = {
    kind.status: kind
    for kind in (
        InvalidArgument,
        FailedPrecondition,
        Unavailable,
        Aborted,
        DeadlineExceeded,
        TooFewMembers,
        Evicted,
        StateMismatch,
        Internal,
    )
}


# What the library's texts tell to call, in the words of this package.
_CALLS = {
    "lh_open": "longhaul.join",
    "lh_join": "longhaul.join",
    "lh_alloc": "longhaul.empty",
    "lh_leave": "leave",
    "lh_op_wait": "wait",
    "lh_state_take": "take_state",
}


def error(status: int, what: str) -> Error:
    """The error for a status that this thread's last call into the library returned."""
    lib = _native.library()
    text = lib.lh_last_error().decode(errors="replace") or lib.lh_strerror(status).decode()
    text = re.sub(r"\b(lh_\w+)(?=\(\))", lambda call: _CALLS.get(call[1], call[1]), text)
    return _BY_STATUS.get(status, Internal)(f"{what}: {text}")


def check(status: int, what: str) -> None:
    if status != 0:
        raise error(status, what)


def number_of(value: Any, name: str, most: int) -> int:
    """The number, from 0 to `most`; InvalidArgument for any other, and for what is none."""
    try:
        # True is an index, too, and never meant.
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number <= most:
        raise InvalidArgument(f"{name} is {value!r}; give a number from 0 to {most}")
    return number


def code_of(table: dict[str, int], value: str, name: str) -> int:
    """The number of an option in the library; InvalidArgument names those that there are."""
    try:
        return table[value]
    except (KeyError, TypeError):
        raise InvalidArgument(f"{name} is {value!r}; give one of {', '.join(table)}") from None
