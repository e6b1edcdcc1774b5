"""Ops in flight: waiting for them, and what they did."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any, NamedTuple

from . import _native
from ._arena import Client
from ._errors import DeadlineExceeded, Error, FailedPrecondition, check, error


class OpInfo(NamedTuple):
    """What one op did."""

    world_size: int  #: members whose tensors are in the result: those not in the background
    epoch: int  #: the epoch of the attempt that counted
    retries: int  #: attempts beyond the first
    staged: bool  #: a tensor was not in memory shared with peerd, and was copied
    bytes_sent: int  #: payload over the network, from this host
    bytes_received: int
    seconds: float  #: from start to outcome, at peerd
    seconds_wait: float  #: of these, until every member had started the op
    algorithm: str = "auto"  #: of that attempt: "oneshot", "mesh", "ring"; "local": nothing crossed the network


def op_info(info: _native.OpInfoStruct) -> OpInfo:
    return OpInfo(
        info.world_size,
        info.epoch,
        info.retries,
        bool(info.staged),
        info.bytes_sent,
        info.bytes_received,
        info.seconds,
        info.seconds_wait,
        _native.ALGORITHM_NAMES[info.algorithm],
    )


class Op:
    """An op in the library, with the tensors it owns until its outcome.

    Made before the call that starts it: see _native.wait(). One that came to nothing is used for the next.
    """

    def __init__(self, client: Client) -> None:
        self.handle = ctypes.c_void_p()
        self.what = "all_reduce"
        self.client = client
        # Neither while it waits for its use. The owner lives as long as it goes on.
        self.owner: object = None
        self.tensors: tuple[Any, ...] | None = None
        self.outcome: OpInfo | Error | None = None
        weakref.finalize(self, _free_op, client, self.handle).atexit = False

    def poll(self) -> bool:
        """Whether there is an outcome."""
        if self.outcome is None:
            finished = ctypes.c_int()
            check(_native.library().lh_op_test(self.handle, ctypes.byref(finished)), self.what)
            if finished.value:
                # Has its outcome: does not block.
                self._settle(_native.library().lh_op_wait(self.handle, 0))
        return self.outcome is not None

    def wait(self, deadline: _native.Deadline) -> bool:
        """Whether there is an outcome in time."""
        if self.outcome is None:
            status = _native.wait(self.handle, deadline)
            if status == _native.DEADLINE_EXCEEDED:
                return False
            self._settle(status)
        return True

    def _settle(self, status: int) -> None:
        if status != _native.OK:
            self.outcome = error(status, self.what)
        else:
            info = _native.OpInfoStruct()
            check(_native.library().lh_op_info(self.handle, ctypes.byref(info)), self.what)
            self.outcome = op_info(info)
        self.tensors = None

    def info(self) -> OpInfo:
        """What the op did. Raises its error, or FailedPrecondition before there is an outcome."""
        if self.outcome is None:
            raise FailedPrecondition(f"{self.what}: has no outcome yet; call wait() first")
        if isinstance(self.outcome, Error):
            raise self.outcome
        return self.outcome


# It is given the client so that that is closed after all that belongs to it, whatever order the
# garbage collector takes.
def _free_op(client: Client, handle: ctypes.c_void_p) -> None:
    _native.library().lh_op_free(handle)


def abandon(op: Op) -> None:
    """Nobody waits for it: if it was started it goes on, and keeps its tensors."""
    if op.outcome is None and op.handle.value is not None and op.owner is not None:
        op.client.leftovers.append(op.poll)


class Work:
    """An op in flight. Its tensors belong to it until there is an outcome: neither read nor write them.

    A Work may be dropped without waiting; the op goes on and keeps its tensors alive.
    """

    def __init__(self, op: Op) -> None:
        self._op = op
        weakref.finalize(self, abandon, op).atexit = False

    def wait(self, timeout: float | None = None) -> OpInfo:
        """Waits for the outcome.

        timeout: seconds; None waits for ever (Ctrl-C ends the wait, not the op).
        Raises DeadlineExceeded if there is none yet: the op goes on, wait again. Raises Aborted,
        TooFewMembers, InvalidArgument or Evicted if that is the outcome: the tensors are as before.
        Raises Unavailable if peerd itself stopped or died: see `Comm.all_reduce` for what a tensor
        from `longhaul.empty` holds then. Once there is an outcome every further call gives it again.
        """
        if not self._op.wait(_native.Deadline(timeout)):
            late = DeadlineExceeded(
                f"{self._op.what}: no outcome after {timeout} s; it goes on and owns its tensors: wait() again"
            )
            late.work = self
            raise late
        return self.info

    def done(self) -> bool:
        """Whether there is an outcome, good or bad. Never blocks."""
        return self._op.poll()

    @property
    def info(self) -> OpInfo:
        """What the op did. Raises its error, or FailedPrecondition before there is an outcome."""
        return self._op.info()

    def __repr__(self) -> str:
        outcome = self._op.outcome
        return f"<Work {self._op.what}: {'in flight' if outcome is None else outcome}>"
