"""A member in the library: its handle, and what all that it does is based on."""

from __future__ import annotations

import ctypes
import dataclasses
import weakref
from collections.abc import Callable

from . import _native
from ._arena import Client
from ._errors import DeadlineExceeded, FailedPrecondition, check


@dataclasses.dataclass(frozen=True)
class World:
    """The members of one group at one time."""

    epoch: int  #: number of the agreed membership; rises with every change
    rank: int  #: of this member, 0 to world_size - 1
    world_size: int  #: members
    pending: int  #: members that wait, and that the next step boundary may admit
    member_id: int  #: of this member, unique in the run
    background: bool = False  #: this member's input is not in results yet


# It is given the client so that that is closed after all that belongs to it, whatever order the
# garbage collector takes.
def _free_comm(client: Client, handle: ctypes.c_void_p) -> None:
    _native.library().lh_comm_free(handle)


class Member:
    """What is dropped without leave() leaves as well, without waiting."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.handle = ctypes.c_void_p()
        self.left = False
        # Called, it leaves at once.
        self.free = weakref.finalize(self, _free_comm, client, self.handle)
        self.free.atexit = False

    def check_joined(self) -> None:
        if self.left:
            raise FailedPrecondition("this communicator has left its group; join again")

    def world(self) -> World:
        """As last heard from peerd, all of one moment. Raises Evicted with the reason."""
        self.check_joined()
        info = _native.WorldInfo()
        check(_native.library().lh_world(self.handle, ctypes.byref(info)), "world")
        return World(info.epoch, info.rank, info.size, info.pending, info.member_id, bool(info.background))

    def is_out(self) -> bool:
        info = _native.WorldInfo()
        return self.left or _native.library().lh_world(self.handle, ctypes.byref(info)) != _native.OK

    def in_slices(self, call: Callable[[ctypes.c_void_p, int], int], what: str, deadline: _native.Deadline) -> None:
        """A call of the library that goes on where it was when its time ran out."""
        status = call(self.handle, deadline.slice_ms())
        while status == _native.DEADLINE_EXCEEDED and not deadline.passed():
            status = call(self.handle, deadline.slice_ms())
        if status == _native.DEADLINE_EXCEEDED:
            raise DeadlineExceeded(f"{what}: not done in time; it goes on, call {what}() again to wait for it")
        check(status, what)
