"""Becoming a member."""

from __future__ import annotations

import ctypes
from typing import Literal

from . import _native
from ._arena import Client, PathLike, client_of
from ._comm import Comm
from ._errors import DeadlineExceeded, InvalidArgument, Unavailable, check, code_of, number_of
from ._member import Member
from ._state import State
from ._sync import check_state


def join(
    run: str = "default",
    group: int = 0,
    peerd: PathLike | None = None,
    timeout: float | None = 60,
    *,
    cohort: tuple[str, int] | None = None,
    step_deadline: float | None = None,
    on_fault: str = "retry",
    name: str | None = None,
    join_mode: Literal["blocking", "background"] = "blocking",
    state: State | None = None,
) -> Comm:
    """Becomes a member of a group of a run, through the peerd on this host.

    Returns at once where nobody is admitted yet; otherwise when the others reach their next step
    boundary (`Comm.begin_step`).

    run: 1 to 64 of [A-Za-z0-9._-], the same at all trainers of the run.
    group: members of one group combine their tensors; with sharded models shard k is group k.
    peerd: path of its socket; None: $LONGHAUL_SOCKET, else /run/longhaul/peerd.sock, else
        $XDG_RUNTIME_DIR/longhaul/peerd.sock.
    timeout: seconds until admission, the wait for peerd included; None waits for ever.
    cohort: (name, size) of the members on this host that belong together, usually one in each of
        several groups, each in a process or thread of its own: the shards of one host. All of them
        give the same name and size; none is admitted before all have asked, and when one leaves,
        dies or is removed, all are. None: stands alone.
    step_deadline: seconds that this member may come to a step boundary after the first one of the
        others did, before it is removed (its next call raises Evicted); None: they wait for ever.
    on_fault: of all_reduce() calls that do not say: "retry" or "abort".
    name: of the member, in logs and `lhctl`: 1 to 64 of [A-Za-z0-9._-]; None: the process id. With
        `--keep-state` of peerd, the next member of this name goes on where this one was.
    join_mode: "blocking": the others wait in the first sync of shared state until this member has it.
        "background": they do not. It takes part in all ops in the background, which means that it gets the
        result and its input is left out, while the state is fetched (`Step.background`, `Step.take`); its
        input is in results from a later step boundary on. The same where nobody is there yet.
    state: what the first `Comm.step` or `Comm.sync_state` will bring. It is copied and hashed before
        the others hear of this member: from its admission on they wait for it. Until that first call
        has returned, the tensors are not written to, or named by `State.touch`.

    Raises Unavailable (peerd or coordinator cannot be reached; the message names which and where),
    DeadlineExceeded (not admitted in time), InvalidArgument.
    """
    options = _join_options(run, group, cohort, step_deadline, on_fault, name, join_mode)
    if state is not None:
        check_state(state)
    deadline = _native.Deadline(timeout)
    client, fresh = client_of(peerd, deadline)
    try:
        return _join(client, options, run, group, deadline, state)
    except Unavailable:
        if fresh or client.alive():
            raise
    # The connection was an old one, and its peerd went away just now; it may be back.
    client, _ = client_of(peerd, deadline)
    return _join(client, options, run, group, deadline, state)


def _join_options(
    run: str,
    group: int,
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
    options.timeout_ms = _native.FOREVER  # join() keeps the time
    if cohort is not None:
        try:
            name, size = cohort
            options.cohort = name.encode()
            options.cohort_size = size if 0 < size < 1 << 32 else 0
        except (AttributeError, TypeError, ValueError):
            raise InvalidArgument(f"{what}: cohort is {cohort!r}; give (name, size)") from None
        if not name:
            raise InvalidArgument(f"{what}: cohort is {cohort!r}; give it a name")
    if step_deadline is not None:
        if not 0.001 <= step_deadline <= 86400:
            raise InvalidArgument(f"{what}: step_deadline is {step_deadline!r}; give seconds up to a day, or None")
        options.step_deadline_ms = round(1000 * step_deadline)
    options.on_fault = code_of(_native.ON_FAULT, on_fault, "on_fault")
    options.mode = code_of(_native.JOIN_MODES, join_mode, "join_mode")
    if name is not None:
        if not name:
            raise InvalidArgument(f"{what}: name is empty; leave it out, or give one")
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
    if state is None:
        return _admitted(client, options, run, group, deadline)
    state.prepare(client, deadline)
    try:
        return _admitted(client, options, run, group, deadline)
    except BaseException:
        # It is written to again before the next try.
        state.unprepare()
        raise


def _admitted(client: Client, options: _native.JoinOptions, run: str, group: int, deadline: _native.Deadline) -> Comm:
    lib = _native.library()
    what = f"joining run {run} group {group}"
    member = Member(client)
    op = ctypes.c_void_p()
    try:
        check(
            lib.lh_join_start(client.handle, ctypes.byref(options), ctypes.byref(member.handle), ctypes.byref(op)),
            what,
        )
        status = _native.wait(op, deadline)
        if status == _native.DEADLINE_EXCEEDED:
            raise DeadlineExceeded(
                f"{what}: not admitted in time; the members admit newcomers where they call begin_step()"
            )
        check(status, what)
    except BaseException:
        member.free()  # withdraws the wish
        raise
    finally:
        lib.lh_op_free(op)
    return Comm(member, run, group)
