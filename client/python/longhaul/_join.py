"""join(): how a program becomes a member of a group."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Mapping
from typing import Any, Literal

from . import _native
from ._arena import Client, client_of
from ._comm import Comm
from ._errors import (
    DeadlineExceeded,
    Error,
    FailedPrecondition,
    InvalidArgument,
    Unavailable,
    check,
    code_of,
    error,
    number_of,
)
from ._log import Record
from ._member import Member
from ._programs import PathLike
from ._state import State
from ._sync import check_state
from ._waiting import GroupWait


def join(
    run: str = "default",
    group: int = 0,
    peerd: PathLike | None = None,
    timeout: float | None = 60,
    *,
    members: int | None = None,
    coordinator: str | None = None,
    cohort: tuple[str, int] | None = None,
    step_deadline: float | None = None,
    on_fault: str = "retry",
    name: str | None = None,
    join_mode: Literal["blocking", "background"] = "blocking",
    state: State | None = None,
) -> Comm:
    """Joins a group of a run, through the peerd on this host or a private one. Returns the new member.

    With `members`, programs that start together wait for each other here, and begin as one group. Without it, the
    first member of a group is admitted at once. A later one is admitted when all members stand at a step boundary
    (`Comm.begin_step` or `Comm.step`); until then this call waits. So join each member in a thread or process of its
    own: while this call waits, no other member of the same thread reaches a boundary.

    run: name of the run, 1 to 64 of [A-Za-z0-9._-]. The same at all trainers of the run.
    group: members of one group combine their tensors. With a sharded model, shard k is group k.
    peerd: path of the socket of peerd. None: $LONGHAUL_SOCKET, else /run/longhaul/peerd.sock, else
        $XDG_RUNTIME_DIR/longhaul/peerd.sock.
    coordinator: host:port of the coordinator, or several with commas between them. Starts a peerd for this process
        alone, which ends when the process ends: a host with one trainer needs no daemon. Further joins of the process
        with the same coordinator use the same peerd. Its flags come from the environment, as LONGHAUL_PEERD_LISTEN;
        without it, the data port is any free one. A coordinator on another host needs LONGHAUL_PEERD_TLS_CA, or
        LONGHAUL_PEERD_INSECURE=true in a private network; LONGHAUL_PEERD_TOKEN_FILE names a file with a join token.
        None: if there is neither $LONGHAUL_SOCKET nor a peerd at a default path, $LONGHAUL_COORDINATOR does the same;
        else no peerd is started.
    timeout: seconds until admission, the wait for peerd included; None: no limit. A newcomer waits until the others have
        ended their step, so give more than their longest step takes, or None. At the timeout the request to join
        is withdrawn. If no coordinator serves peerd for 10 s (`--coordinator-timeout-ms` of peerd), the join ends with
        Unavailable earlier.
    members: if the group has no members, wait until this many have joined with the same number (1 to 1024). All of
        them are admitted at once: `world_size` is `members` for all when this call returns, and the epoch is the
        first of the group. The ranks follow the names. Members without `name` stand behind the others, in the order of
        the ids of their peerds. A join without `members` waits until the group has formed. If the group has members,
        for instance when a program comes back after a crash, `members` has no meaning. None: do not wait for others.
    cohort: (name, size) of a set of members on this host that belong together, usually one in each of several groups,
        such as the shards of one host. Each of them joins from its own process or thread, with the same name and size
        (at most 64). None is admitted before all have asked to join. When one of them leaves, dies or is removed, all
        are removed. None: no cohort.
    step_deadline: this member is removed if it has not come to a step boundary or a sync this many seconds (0.001 to
        86400) after the first of the members. Its next call raises Evicted. None: the others wait for it without limit.
    on_fault: "retry" or "abort", for all_reduce() calls that do not say; see `Comm.all_reduce`.
    name: name of the member, in logs and `lhctl`: 1 to 64 of [A-Za-z0-9._-]. None: the process id. If peerd runs with
        `--keep-state`, the next member of the same name can take over the state of this one (`Comm.kept_revision`).
    join_mode: "blocking": all members wait in this member's first sync until it has the shared state.
        "background": the others train on. This member comes to every step and calls every op: it gets the results, and
        its input is left out. peerd fetches the state meanwhile (`Step.background`, `Step.take`). The input of this
        member is in the results from a later step boundary on. For the first member of a group both modes are the same.
    state: the state of this member's first `Comm.step` or `Comm.sync_state`. It is copied and hashed before the join,
        so that the others need not wait for that. From this call to the end of that first sync, name every tensor
        that you write to with `State.touch`.

    Raises
    DeadlineExceeded: not admitted in time. With `members`, the message says who has come, and who has left again.
    FailedPrecondition: other joins wait for another number of `members`; or no try can help before something else is
        done: a setting of a private peerd is wrong or its program is missing, the user may not use peerd, or peerd has
        not enough memory for `state`. The message says what.
    Unavailable: peerd or the coordinator cannot be reached, the other members cannot reach this host, peerd drains, or
        peerd has 64 members already. The message says which.

    While peerd cannot be reached, a warning says so after 5 s and then once a minute (`logging.getLogger("longhaul")`).
    InvalidArgument: an argument is wrong.
    Evicted: removed before admission; the message says why.
    """
    options = _join_options(run, group, members, cohort, step_deadline, on_fault, name, join_mode)
    if state is not None:
        check_state(state)
    deadline = _native.Deadline(timeout)
    if coordinator is not None:
        if peerd is not None:
            raise InvalidArgument("join: peerd and coordinator are both given; give one of them")
    client, fresh = client_of(peerd, deadline, coordinator)
    try:
        return _join(client, options, run, group, deadline, state)
    except Unavailable:
        if fresh or client.alive():
            raise
    # The connection was made earlier, and its peerd has gone. Connect again: peerd may have been restarted.
    client, _ = client_of(peerd, deadline, coordinator)
    return _join(client, options, run, group, deadline, state)


def _join_options(
    run: str,
    group: int,
    members: int | None,
    cohort: tuple[str, int] | None,
    step_deadline: float | None,
    on_fault: str,
    name: str | None,
    join_mode: str,
) -> _native.JoinOptions:
    what = f"joining run {run} group {group}"
    options = _native.JoinOptions()
    options.run = run.encode()
    options.group = number_of(group, f"{what}: group", (1 << 32) - 1)
    options.timeout_ms = _native.FOREVER  # Request.comm() waits with its own deadline
    if members is not None:
        options.members = number_of(members, f"{what}: members", _native.MEMBERS_MAX)
        if members == 0:
            raise InvalidArgument(f"{what}: members is 0; give the number of members to wait for, or None")
    if cohort is not None:
        try:
            cohort_name, size = cohort
            options.cohort = cohort_name.encode()
            options.cohort_size = size if 0 < size < 1 << 32 else 0
        except (AttributeError, TypeError, ValueError):
            raise InvalidArgument(f"{what}: cohort is {cohort!r}; give a tuple (name, size)") from None
        if not cohort_name:
            raise InvalidArgument(f"{what}: cohort is {cohort!r}; the name must not be empty")
    if step_deadline is not None:
        if not 0.001 <= step_deadline <= 86400:
            raise InvalidArgument(
                f"{what}: step_deadline is {step_deadline!r}; give seconds from 0.001 to 86400, or None"
            )
        options.step_deadline_ms = round(1000 * step_deadline)
    options.on_fault = code_of(_native.ON_FAULT, on_fault, "on_fault")
    options.mode = code_of(_native.JOIN_MODES, join_mode, "join_mode")
    if name is not None:
        if not name:
            raise InvalidArgument(f"{what}: name is empty; leave name out, or give a name")
        options.name = name.encode()
    return options


def _join(
    client: Client,
    options: _native.JoinOptions,
    run: str,
    group: int,
    deadline: _native.Deadline,
    state: State | None,
) -> Comm:
    if state is not None:
        try:
            state.prepare(client, deadline)
        except Unavailable as problem:
            if not client.alive():
                raise
            # The memory or a limit of a peerd that is there: nothing changes by itself.
            raise FailedPrecondition(*problem.args) from None
    try:
        return Request(client, options, run, group).comm(deadline)
    except BaseException:
        if state is not None:
            # The caller may write to the tensors before the next try, so hash them again then.
            state.unprepare()
        raise


def _why_withdrawn(op: ctypes.c_void_p) -> str:
    if _native.library().lh_op_wait(op, 0) in (_native.OK, _native.DEADLINE_EXCEEDED):
        return "the join was withdrawn"
    return str(error(_native.DEADLINE_EXCEEDED, "").args[0]).removeprefix(": ")


class Request:
    """A request to join a group, which waits for admission. Made by one thread, which then calls comm() or withdraw()."""

    def __init__(self, client: Client, options: _native.JoinOptions, run: str, group: int) -> None:
        self._run, self._group = run, group
        self._what = f"joining run {run} group {group}"
        self._member = Member(client, Record(run, group))
        self._op = ctypes.c_void_p()
        try:
            check(
                _native.library().lh_join_start(
                    client.handle, ctypes.byref(options), ctypes.byref(self._member.handle), ctypes.byref(self._op)
                ),
                self._what,
            )
        except BaseException:
            self.withdraw()
            raise

    def comm(self, deadline: _native.Deadline) -> Comm:
        """Waits for the admission. If it fails, or does not come by the deadline, the request is withdrawn."""
        try:
            wait = GroupWait(self._member.client, self._run, self._group, "join")
            status = _native.wait(self._op, deadline, wait.look)
            if status == _native.DEADLINE_EXCEEDED:
                # peerd's answer to the withdrawn request says what the member waited for.
                _native.library().lh_leave(self._member.handle, 1000)
                why = _why_withdrawn(self._op)
                if "step boundary" in why:
                    why += (
                        "; the others reach it once in each of their steps: give a timeout longer than a step, or None"
                    )
                raise DeadlineExceeded(f"{self._what}: not admitted in time; {why}")
            check(status, self._what)
        except BaseException:
            self.withdraw()
            raise
        self._free_op()
        return Comm(self._member, self._run, self._group)

    def withdraw(self) -> None:
        """Takes the request back. A second call does nothing."""
        self._member.free()
        self._free_op()

    def _free_op(self) -> None:
        op, self._op = self._op, ctypes.c_void_p()
        _native.library().lh_op_free(op)


def join_groups(
    run: str, groups: Mapping[int, int | None], peerd: PathLike | None, timeout: float | None, **options: Any
) -> list[Comm]:
    """Joins several groups of one run at once, in one thread, as members of one cohort.

    groups: by number, what join() calls `members`. peerd, timeout, options and errors: as for join(). If one join fails,
    the others are withdrawn.
    """
    deadline = _native.Deadline(timeout)
    filled = {
        group: _join_options(run, group, members, **{**_DEFAULTS, **options}) for group, members in groups.items()
    }
    client, _ = client_of(peerd, deadline)
    requests: list[Request] = []
    comms: list[Comm] = []
    try:
        for group, each in filled.items():
            requests.append(Request(client, each, run, group))
        for request in requests:
            comms.append(request.comm(deadline))
    except BaseException:
        for request in requests[len(comms) :]:
            request.withdraw()
        for comm in comms:
            with contextlib.suppress(Error):
                comm.leave(timeout=5)
        raise
    return comms


# The options of a join that join_groups() need not be given.
_DEFAULTS: dict[str, Any] = {
    "cohort": None,
    "step_deadline": None,
    "on_fault": "retry",
    "name": None,
    "join_mode": "blocking",
}
