"""The exceptions of this package, one for each status of the C library. The message says what to do."""

from __future__ import annotations

import operator
import re
from typing import Any, Protocol

from . import _native


class Pending(Protocol):
    """An op that is still in flight. In practice a longhaul.Work."""

    def wait(self, timeout: float | None = None) -> Any: ...

    def done(self) -> bool: ...

    @property
    def info(self) -> Any: ...


class Error(Exception):
    """Base class of all errors of this package. `status` is the lh_status of the C library."""

    status = -1
    # The C library has made it. It tells the other members of what they wait for.
    _from_library = False


class InvalidArgument(Error, ValueError):
    """An argument is wrong, or the members' calls do not match. Correct the call.

    Nothing was changed, with one exception: if the members' all-reduce calls differ, `out` may hold anything.
    """

    status = 1


class FailedPrecondition(Error):
    """Something else must be done first. The message says what."""

    status = 2


class Unavailable(Error):
    """peerd, the coordinator or this host cannot be reached, or memory is used up. The message says which.

    The same call may succeed later. If peerd died, join again.
    """

    status = 3


class Aborted(Error):
    """The op or sync ended without a result, and what it was to send is unchanged. Start it again at all members, or none.

    docs/concepts.md, "What tensors hold if an op does not end well", says what holds for each kind.
    """

    status = 4


class DeadlineExceeded(Error, TimeoutError):
    """The call did not finish within its timeout. What it began goes on; only join() gives up.

    `work`: set by all_reduce() and Work.wait(). The op that goes on, and still uses its tensors: call `work.wait()`.
    None for all other calls: make the same call again to go on waiting.
    """

    status = 5
    work: Pending | None = None


class TooFewMembers(Error):
    """Fewer members contribute to the op than its `min_world`, or none does: all left are in the background.

    The input is unchanged.
    """

    status = 6


class Evicted(Error):
    """This member was removed from its group. The message says why. Join again to come back."""

    status = 7


class StateMismatch(Error):
    """This member's state does not fit the states of the other members. The message says what differs.

    The member stays in the group, and the others wait for it in their next op: leave, correct the state, join again.
    """

    status = 8


class Internal(Error):
    """A bug of Longhaul. Please report the message."""

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


# The texts of the C library name C functions. This maps them to the calls of this package.
_CALLS = {
    "lh_open": "longhaul.join",
    "lh_join": "longhaul.join",
    "lh_alloc": "longhaul.empty",
    "lh_leave": "leave",
    "lh_begin_step": "step",
    "lh_op_wait": "wait",
    "lh_state_take": "take_state",
}


def error(status: int, what: str) -> Error:
    """The exception for `status`, which this thread's last call of the C library returned. what: begins the message."""
    lib = _native.library()
    text = lib.lh_last_error().decode(errors="replace") or lib.lh_strerror(status).decode()
    text = re.sub(r"\b(lh_\w+)(?=\(\))", lambda call: _CALLS.get(call[1], call[1]), text)
    problem = _BY_STATUS.get(status, Internal)(f"{what}: {text}")
    problem._from_library = True
    return problem


def check(status: int, what: str) -> None:
    """Raises error() unless the status is LH_OK."""
    if status != 0:
        raise error(status, what)


def number_of(value: Any, name: str, most: int | None = None, *, least: int = 0) -> int:
    """Returns `value` as an int from `least` to `most`. Raises InvalidArgument for anything else."""
    try:
        # operator.index() takes True and False, but nobody means them as numbers here.
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or (most is not None and number > most):
        wanted = f", {least} or more" if most is None else f" from {least} to {most}"
        raise InvalidArgument(f"{name} is {value!r}; give a whole number{wanted}")
    return number


def code_of(table: dict[str, int], value: str, name: str) -> int:
    """Looks up an option by name. Raises InvalidArgument, which lists all names, if there is none."""
    try:
        return table[value]
    except (KeyError, TypeError):
        raise InvalidArgument(f"{name} is {value!r}; give one of {', '.join(table)}") from None
