"""The syncs of one member: the sync that is in flight, and the state that peerd fetches in the background."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from collections.abc import Callable
from typing import Any

from . import _native
from ._arena import Client
from ._errors import DeadlineExceeded, Error, FailedPrecondition, check, code_of, error
from ._member import Member, Request
from ._progress import Shown
from ._state import State
from ._sync_info import OnProgress, Progress, SyncInfo

# How often a sync is tried. If a transfer fails, the sync ends for all members, and all try again at once.
_SYNC_TRIES = 5


@dataclasses.dataclass
class _OpenSync:
    """A sync that has no outcome yet, or whose outcome its caller has not got yet.

    It may outlive the call that began it, if that call timed out or was interrupted.
    """

    state: State
    called_as_step: bool  # the caller used step(), not sync_state()
    at_step: bool  # this member has not passed the step boundary yet
    request: Request
    tries: int = 0  # that have failed
    result: SyncInfo | None = None  # it ended well, and the state has what it brought


def check_state(state: Any) -> None:
    """Raises TypeError unless it is a State."""
    if not isinstance(state, State):
        raise TypeError(f"state is a {type(state).__name__}; pass a longhaul.State")


class Syncs:
    """The syncs of one member."""

    def __init__(self, member: Member) -> None:
        self._member = member
        # The sync that the next call goes on with. At most one.
        self._open: list[_OpenSync] = []
        # The state that peerd fetches in the background.
        self._held: State | None = None
        # peerd has not answered a take yet. Until it does, nobody knows whether the trainer may use the tensors.
        self._taking = False
        #: Whether the last sync got an outcome from the coordinator, or ended before anything was sent.
        self.answered = False

    @property
    def client(self) -> Client:
        return self._member.client

    @property
    def member_id(self) -> int:
        return self._member.world().member_id

    @property
    def _is_begun(self) -> bool:
        """Whether there is a sync that the others know of."""
        return any(opened.request.is_sent or opened.tries > 0 for opened in self._open)

    def check_begin_step(self) -> None:
        """Raises FailedPrecondition if a sync is in flight: it must be waited for, not begin_step().

        The same if a sync has an outcome that its caller has not got.
        """
        if self._is_begun:
            (opened,) = self._open
            again = "step() with it" if opened.called_as_step else "sync_state()"
            raise FailedPrecondition(f"begin_step: a sync of {opened.state!r} goes on; call {again} again")

    def kept_revision(self, state: State) -> int | None:
        """See Comm.kept_revision()."""
        self._member.check_joined()
        check_state(state)
        revision = ctypes.c_uint64()
        registration = state.register(self._member.client)
        check(
            _native.library().lh_kept_revision(self._member.handle, registration.handle, ctypes.byref(revision)),
            "kept_revision",
        )
        return None if revision.value == _native.NO_REVISION else revision.value

    def take_state(self, state: State, timeout: float | None) -> bool:
        """See Comm.take_state()."""
        self._member.check_joined()
        check_state(state)
        if self._held is not state:
            raise FailedPrecondition(f"take of {state!r}: peerd fetches nothing into it in the background")
        if self._is_begun:
            raise FailedPrecondition(f"take of {state!r}: a sync of it goes on; wait for its end first")
        if not state.held:
            return True
        deadline = _native.Deadline(timeout)
        self._member.client.sweep()
        while True:
            status = self._take(state, deadline.slice_ms())
            if status == _native.DEADLINE_EXCEEDED:
                self._member.look("take_state")
            else:
                self._member.waited("take_state")
            if status != _native.DEADLINE_EXCEEDED or deadline.passed():
                return status == _native.OK

    def _take(self, state: State, wait_ms: int) -> int:
        """One call of lh_state_take(). OK: the tensors hold the state. DEADLINE_EXCEEDED, ABORTED: not yet.

        Raises all other errors.
        """
        info = _native.SyncInfoStruct()
        handle = state.register(self._member.client).handle
        status: int = _native.library().lh_state_take(self._member.handle, handle, wait_ms, ctypes.byref(info))
        self._taking = status == _native.DEADLINE_EXCEEDED and not info.background
        # DEADLINE_EXCEEDED: peerd still fetches. ABORTED: the sources have changed the state; more comes with the next
        # step.
        if status in (_native.DEADLINE_EXCEEDED, _native.ABORTED):
            return status
        problem = None if status == _native.OK else error(status, f"take of {state!r}")
        state.end_sync(info, problem)
        if problem is not None:
            self._held = state if info.background else None
            self._member.record.failed(problem)
            raise problem
        return status

    def end_take(self, deadline: _native.Deadline) -> None:
        """If peerd has not answered a take, waits for the answer. Raises DeadlineExceeded."""
        while self._taking and self._held is not None:
            self._take(self._held, deadline.slice_ms())
            self._member.look("take_state")
            if self._taking and deadline.passed():
                raise DeadlineExceeded(
                    f"take of {self._held!r}: peerd does not answer; look at the log of peerd, or call again"
                )

    def settle_if_out(self) -> None:
        """Calls settle() if this member has left, was removed, or lost its peerd."""
        if self._member.is_out():
            self.settle()

    def settle(self) -> None:
        """For a member that is out: collects the outcome of its sync if there is one, and gives up the rest."""
        if self._is_begun:
            (opened,) = self._open
            if opened.request.is_sent and opened.result is None:
                with contextlib.suppress(DeadlineExceeded):
                    status = self._wait_for_sync(opened, _native.Deadline(0), None)
                    info = _native.SyncInfoStruct()
                    check(_native.library().lh_sync_info(opened.request.handle, ctypes.byref(info)), "sync")
                    opened.state.end_sync(info, None if status == _native.OK else self._error_of(opened, status))
                # Without an outcome, the tensors are as they were.
                opened.state.abandon()
            self._open.clear()
        if self._held is not None:
            self._held.abandon()
        self._held = None
        self._taking = False

    def sync(
        self, state: State, strategy: str, deadline: _native.Deadline, progress: OnProgress, at_step: bool
    ) -> SyncInfo:
        """Makes the state equal at all members; see Comm.sync_state(). at_step: passes a step boundary as well."""
        self.answered = False
        self._member.check_joined()
        check_state(state)
        self._member.client.watcher.check_may_wait("sync")
        self.end_take(deadline)
        # An op that nobody waits for uses its tensors until a sweep sees its end.
        self._member.client.sweep()
        bar = Shown()
        on_progress = bar if progress is True else progress or None
        try:
            opened = self._opened(state, at_step)
            while opened.result is None:
                if not opened.request.is_sent:
                    self._ask(opened, strategy)
                status = self._wait_for_sync(opened, deadline, on_progress)
                info = _native.SyncInfoStruct()
                check(_native.library().lh_sync_info(opened.request.handle, ctypes.byref(info)), "sync")
                self.answered = True
                problem = None if status == _native.OK else self._error_of(opened, status)
                self._held = state if info.background else None
                result = state.end_sync(info, problem)
                if problem is None:
                    opened.result = result
                    break
                passed = bool(info.passed) or not opened.at_step
                self._member.record.sync_failed(problem)
                if status != _native.ABORTED or not passed or opened.tries + 1 == _SYNC_TRIES:
                    self._open.clear()
                    raise problem
                opened.at_step = False
                opened.tries, opened.request = opened.tries + 1, Request(self.client)
            assert opened.result is not None
            return opened.result
        finally:
            bar.close()

    def take(self) -> SyncInfo | None:
        """The result of sync(), for the last statement of its caller. Until then, a further call has the same result."""
        if self._open and self._open[0].result is not None:
            self._member.record.synced(self._open[0].result)
        return self._open.pop().result if self._open else None

    def _opened(self, state: State, at_step: bool) -> _OpenSync:
        """The sync that this call goes on with, or a new one."""
        if not self._is_begun:
            self._open[:] = [_OpenSync(state, at_step, at_step, Request(self.client))]
        (opened,) = self._open
        if opened.state is not state or opened.called_as_step != at_step:
            raise FailedPrecondition(
                f"sync of {state!r}: a sync of {opened.state!r} goes on; "
                f"call {'step()' if opened.called_as_step else 'sync_state()'} with that state again first"
            )
        return opened

    def _ask(self, opened: _OpenSync, strategy: str) -> None:
        """Begins the sync. If the library refuses that, raises the error, and nothing has begun."""
        lib = _native.library()
        call = lib.lh_begin_step_sync_start if opened.at_step else lib.lh_sync_state_start
        options = _native.SyncOptions()
        options.strategy = code_of(_native.STRATEGIES, strategy, "strategy")
        try:
            opened.state.begin_sync(self, options)
            status = call(self._member.handle, ctypes.byref(options), ctypes.byref(opened.request.handle))
            if status != _native.OK:
                problem = error(status, f"sync of {opened.state!r}")
                self._member.record.sync_failed(problem)
                raise problem
        except BaseException:
            if not opened.request.is_sent:
                opened.state.unbegin_sync(self)
            raise

    def _error_of(self, opened: _OpenSync, status: int) -> Error:
        # The text is of the wait; lh_sync_info() was called since.
        _native.library().lh_op_wait(opened.request.handle, 0)
        return error(status, f"sync of {opened.state!r}")

    def _wait_for_sync(
        self, opened: _OpenSync, deadline: _native.Deadline, on_progress: Callable[[Progress], None] | None
    ) -> int:
        """Waits for the sync. Returns its status; raises DeadlineExceeded."""
        what = "step" if opened.called_as_step else "sync_state"
        told: Progress | None = None

        def look() -> None:
            nonlocal told
            self._member.look(what)
            if on_progress is not None:
                progress = self._progress()
                if progress.bytes_total > 0 and progress != told:
                    told = progress
                    on_progress(progress)

        status = _native.wait(opened.request.handle, deadline, look)
        if status == _native.DEADLINE_EXCEEDED:
            raise DeadlineExceeded(
                f"sync of {opened.state!r}: not done in time; the sync goes on and uses the tensors; "
                "call again to wait for it"
            )
        self._member.waited(what)
        return status

    def _progress(self) -> Progress:
        heard = _native.ProgressStruct()
        check(_native.library().lh_sync_progress(self._member.handle, ctypes.byref(heard)), "progress")
        return Progress(heard.bytes_done, heard.bytes_total, heard.bytes_per_second, heard.sources)
