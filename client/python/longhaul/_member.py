"""One member in the C library: its handle, and the calls that everything else builds on."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable

from . import _native
from ._arena import Client
from ._errors import DeadlineExceeded, FailedPrecondition, error
from ._log import Record
from ._waiting import GroupWait
from ._world import StepWorld, World


# The argument `client` keeps the client alive until this has run: lh_close() would free the communicator, too.
def _free_comm(client: Client, handle: ctypes.c_void_p) -> None:
    _native.library().lh_comm_free(handle)


def _free_request(client: Client, handle: ctypes.c_void_p) -> None:
    _native.library().lh_op_free(handle)


class Request:
    """A boundary or a sync that peerd is asked for. Its outcome stays as long as this object: no exception hides it."""

    def __init__(self, client: Client) -> None:
        self.handle = ctypes.c_void_p()
        weakref.finalize(self, _free_request, client, self.handle).atexit = False

    @property
    def is_sent(self) -> bool:
        return self.handle.value is not None


class Member:
    """The handle of one member. If it is garbage-collected before leave(), the member leaves, and nobody waits."""

    def __init__(self, client: Client, record: Record) -> None:
        self.client = client
        self.record = record
        self.handle = ctypes.c_void_p()
        self.left = False
        # By name of the call: waits that a call has begun, and its next call goes on with.
        self._waits: dict[str, GroupWait] = {}
        #: The boundary that begin_step() has asked for. Its caller sets None once it has what it wanted of it.
        self.boundary: Request | None = None
        # Calling free() frees the handle at once; the member leaves then.
        self.free = weakref.finalize(self, _free_comm, client, self.handle)
        self.free.atexit = False

    def check_joined(self) -> None:
        """Raises FailedPrecondition if this member has left."""
        if self.left:
            raise FailedPrecondition("this communicator has left its group; join again")

    def check(self, status: int, what: str) -> None:
        """Raises the error of a call of the C library, unless it is OK."""
        if status != _native.OK:
            problem = error(status, what)
            self.record.failed(problem)
            raise problem

    def world(self) -> World:
        """The group as peerd last reported it. Raises Evicted, with the reason, if this member was removed."""
        self.check_joined()
        info = _native.WorldInfo()
        self.check(_native.library().lh_world(self.handle, ctypes.byref(info)), "world")
        return World(
            info.epoch,
            info.rank,
            info.size,
            info.pending,
            info.member_id,
            bool(info.background),
            info.boundary,
            StepWorld(info.step_epoch, info.step_rank, info.step_size),
        )

    def members(self) -> tuple[int, ...]:
        """The ids of all members of the current epoch, in rank order. Asks peerd, at most 30 s."""
        return self._members_of(_native.library().lh_members)

    def step_members(self) -> tuple[int, ...]:
        """The ids of the members at this member's last step boundary, those that have gone since included.

        Otherwise as members().
        """
        return self._members_of(_native.library().lh_step_members)

    def _members_of(self, call: Callable[..., int]) -> tuple[int, ...]:
        self.check_joined()
        capacity = 64
        while True:
            ids = (ctypes.c_uint64 * capacity)()
            count = ctypes.c_uint32()
            self.check(call(self.handle, ids, capacity, ctypes.byref(count)), "members")
            if count.value <= capacity:
                return tuple(ids[: count.value])
            capacity = count.value

    def is_out(self) -> bool:
        """Whether this member has left, was removed, or has lost its peerd."""
        info = _native.WorldInfo()
        return self.left or _native.library().lh_world(self.handle, ctypes.byref(info)) != _native.OK

    def in_slices(self, call: Callable[[ctypes.c_void_p, int], int], what: str, deadline: _native.Deadline) -> None:
        """Makes a waiting call of the C library in short slices, so that Ctrl-C can interrupt it.

        `call` must go on waiting when it is called again. Raises DeadlineExceeded at the deadline.
        """
        self.client.watcher.check_may_wait(what)
        status = call(self.handle, deadline.slice_ms())
        while status == _native.DEADLINE_EXCEEDED:
            self.look(what)
            if deadline.passed():
                break
            status = call(self.handle, deadline.slice_ms())
        if status == _native.DEADLINE_EXCEEDED:
            raise DeadlineExceeded(f"{what}: not done in time; it goes on; call {what}() again to go on waiting")
        self.waited(what)
        self.check(status, what)

    def begin_step(self, deadline: _native.Deadline) -> None:
        """Waits until a step boundary is passed. A further call has the same outcome, until `boundary` is None.

        Raises DeadlineExceeded at the deadline; the next call goes on waiting.
        """
        self.client.watcher.check_may_wait("begin_step")
        request = self.boundary = self.boundary or Request(self.client)
        status = _native.OK
        if not request.is_sent:
            status = _native.library().lh_begin_step_start(self.handle, ctypes.byref(request.handle))
        if status == _native.OK:
            status = _native.wait(request.handle, deadline, lambda: self.look("begin_step"))
        if status == _native.DEADLINE_EXCEEDED:
            raise DeadlineExceeded("begin_step: not done in time; it goes on; call begin_step() again to go on waiting")
        self.waited("begin_step")
        if status != _native.OK:
            problem = error(status, "begin_step")
            self.record.failed(problem)
            self.boundary = None
            raise problem

    def look(self, what: str) -> None:
        """The call `what` waits. If it has for long, alone or with the calls before, a line says what for."""
        wait = self._waits.get(what)
        if wait is None:
            wait = self._waits[what] = GroupWait(self.client, self.record.run, self.record.group, what)
        wait.look()

    def waited(self, what: str) -> None:
        """The wait of the call `what` is over."""
        self._waits.pop(what, None)
