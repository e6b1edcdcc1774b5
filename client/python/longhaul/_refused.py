"""Calls that were refused at this member: the other members, who wait for them, are told.

In place of a refused call this member starts an op under the same name that fits nobody, and uses no memory of the call:
a barrier of more members than a group can have, or a send or receive of nothing. So the op ends with InvalidArgument at
all members that make the call, also later. The member itself has its error already, and waits for nothing.
"""

from __future__ import annotations

import ctypes
from typing import Any

from . import _native
from ._arena import Client
from ._errors import DeadlineExceeded
from ._log import Record
from ._work import Op

#: Rank and member id of the partner of a send or receive. One of them is None.
Partner = tuple[int | None, int | None]
#: Tag, kind and partner or participants of a stand-in.
Name = tuple[int, str, tuple[int | None, ...]]


class _StandIn(Op):
    """An op in place of a refused call. If nobody has it any more, it ends: a member does not leave before its ops."""

    def __del__(self) -> None:
        if self.handle.value is not None:
            _native.library().lh_op_cancel(self.handle)


class Refused:
    """The refused calls of one member that others may still make. Any thread."""

    def __init__(self, client: Client, record: Record) -> None:
        self._client = client
        self._record = record
        self._open: dict[Name, _StandIn] = {}

    def add(self, handle: ctypes.c_void_p, kind: str, options: Any, name: Name) -> None:
        """Starts a stand-in. If one of this name is in flight and does not end soon, the others owe a call to that one."""
        before = self._open.get(name)
        if (
            before is not None
            and _native.wait(before.handle, _native.Deadline(1), before.look) == _native.DEADLINE_EXCEEDED
        ):
            return
        op = _StandIn(self._client, self._record)
        op.what = f"telling the others of a refused {kind}, tag {name[0]}"
        status = getattr(_native.library(), f"lh_{kind}_start")(handle, ctypes.byref(options), ctypes.byref(op.handle))
        if status == _native.OK:
            self._open[name] = op

    def make_way(self, tag: int, deadline: _native.Deadline) -> None:
        """This member makes another call under the tag: members that have not made the refused one meet this call.

        Raises DeadlineExceeded.
        """
        for name in [name for name in self._open if name[0] == tag]:
            self._end(name, deadline if deadline.left() is not None else _native.Deadline(30))

    def end(self, deadline: _native.Deadline) -> None:
        for name in list(self._open):
            self._end(name, deadline)

    def _end(self, name: Name, deadline: _native.Deadline) -> None:
        op = self._open.pop(name, None)
        if op is None or _ended(op):
            return
        _native.library().lh_op_cancel(op.handle)
        if _native.wait(op.handle, deadline, op.look) == _native.DEADLINE_EXCEEDED:
            self._open.setdefault(name, op)
            raise DeadlineExceeded(
                f"a call with tag {name[0]} was refused at this member, and the other members are not told yet, because "
                "the coordinator does not answer; use another tag, or call again"
            )


def _ended(op: Op) -> bool:
    finished = ctypes.c_int()
    status = _native.library().lh_op_test(op.handle, ctypes.byref(finished))
    return status != _native.OK or bool(finished.value)
