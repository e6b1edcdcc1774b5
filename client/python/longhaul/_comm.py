"""Members and their ops."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, overload

from . import _native
from ._arena import Client, PathLike, Shape, client_of, empty_numpy
from ._errors import DeadlineExceeded, Error, FailedPrecondition, InvalidArgument, Unavailable, check, error
from ._state import Bar, OnProgress, Progress, State, SyncInfo
from ._tensor import elements_of

if TYPE_CHECKING:
    import numpy.typing as npt

_Self = TypeVar("_Self", bound="Comm")

# A transfer that fails fails for all of a sync, who are told to go on at once: this often.
_SYNC_TRIES = 5


@dataclasses.dataclass(frozen=True)
class World:
    """The members of one group at one time."""

    epoch: int  #: number of the agreed membership; rises with every change
    rank: int  #: of this member, 0 to world_size - 1
    world_size: int  #: members
    pending: int  #: members that wait for the next step boundary
    member_id: int  #: of this member, unique in the run
    weight: int = 1  #: of this member's input; 0: it joined in the background and does not count yet


class OpInfo(NamedTuple):
    """What one op did."""

    world_size: int  #: members whose tensors are in the result: those of weight 1
    epoch: int  #: the epoch of the attempt that counted
    retries: int  #: attempts beyond the first
    staged: bool  #: a tensor was not in memory shared with peerd, and was copied
    bytes_sent: int  #: payload over the network, from this host
    bytes_received: int
    seconds: float  #: from start to outcome, at peerd
    seconds_wait: float  #: of these, until every member had started the op
    algorithm: str = "auto"  #: of that attempt: "oneshot", "mesh", "ring"; "local": nothing crossed the network


def _op_info(info: _native.OpInfoStruct) -> OpInfo:
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


@dataclasses.dataclass(frozen=True)
class Step:
    """The world that a step runs in; members may only be removed while it lasts."""

    epoch: int
    rank: int
    world_size: int
    changed: bool  #: the epoch is another one than at the boundary before
    sync: SyncInfo | None = None  #: what became of the state that was given to step()
    weight: int = 1  #: of this member's input in this step
    _take: Callable[[float | None], bool] | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def background(self) -> bool:
        """The state is fetched while this member takes part with weight 0: hands off its tensors until take()."""
        return self.sync is not None and self.sync.background

    def take(self, timeout: float | None = 0.0) -> bool:
        """Whether the tensors of the state are this member's, and hold what all agreed on at this step.

        True where there was nothing to fetch. In the background: waits until they are there, at most
        `timeout` seconds (None: for ever), and takes them back. Who then changes them as the others do counts
        from the next step on; leaving the block raises `state.revision` for them as well.
        """
        return True if self._take is None else self._take(timeout)


@dataclasses.dataclass
class _OpenSync:
    """A sync that has no outcome yet."""

    state: State
    called_as_step: bool
    at_step: bool  # its boundary is not behind this member yet
    options: _native.SyncOptions


class Op:
    """An op in the library, with the tensors it owns until its outcome.

    Made before the call that starts it: see _native.wait(). One that came to nothing is used for the next.
    """

    def __init__(self, comm: Comm) -> None:
        self.handle = ctypes.c_void_p()
        self.what = "all_reduce"
        # Neither while it waits for its use.
        self.comm: Comm | None = None
        self.tensors: tuple[Any, ...] | None = None
        self.outcome: OpInfo | Error | None = None
        weakref.finalize(self, _free_op, comm._client, self.handle).atexit = False

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
            self.outcome = _op_info(info)
        self.tensors = None

    def info(self) -> OpInfo:
        """What the op did. Raises its error, or FailedPrecondition before there is an outcome."""
        if self.outcome is None:
            raise FailedPrecondition(f"{self.what}: has no outcome yet; call wait() first")
        if isinstance(self.outcome, Error):
            raise self.outcome
        return self.outcome


# These are given the client so that it is closed after all that belongs to it, whatever order the
# garbage collector takes.
def _free_op(client: Client, handle: ctypes.c_void_p) -> None:
    _native.library().lh_op_free(handle)


def _free_comm(client: Client, handle: ctypes.c_void_p) -> None:
    _native.library().lh_comm_free(handle)


def _abandon(op: Op) -> None:
    """Nobody waits for it: if it was started it goes on, and keeps its tensors."""
    if op.outcome is None and op.handle.value is not None and op.comm is not None:
        op.comm._client.leftovers.append(op.poll)


class Work:
    """An op in flight. Its tensors belong to it until there is an outcome: neither read nor write them.

    A Work may be dropped without waiting; the op goes on and keeps its tensors alive.
    """

    def __init__(self, op: Op) -> None:
        self._op = op
        weakref.finalize(self, _abandon, op).atexit = False

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


def _code(table: dict[str, int], value: str, name: str) -> int:
    try:
        return table[value]
    except (KeyError, TypeError):
        raise InvalidArgument(f"{name} is {value!r}; give one of {', '.join(table)}") from None


def _check_state(state: Any) -> None:
    if not isinstance(state, State):
        raise TypeError(f"state is a {type(state).__name__}; pass a longhaul.State")


class Comm:
    """One member of one group. Made by `join`; leaves at the end of a `with` block.

    A Comm that is dropped without leave() leaves as well, without waiting.
    """

    def __init__(self, client: Client, run: str, group: int) -> None:
        self._client = client
        self._handle = ctypes.c_void_p()
        # Ops that have ended within the call that started them.
        self._spare: list[Op] = []
        self._left = False
        self._epoch_of_step = 0
        # A sync whose call ended before it did: the next such call waits for it.
        self._open_sync: _OpenSync | None = None
        # In the background: what is fetched into.
        self._held: State | None = None
        # Peerd has not said whose its tensors are: it owes the answer to a take.
        self._taking = False
        self.run = run
        self.group = group
        # Called, it leaves at once.
        self._free = weakref.finalize(self, _free_comm, client, self._handle)
        self._free.atexit = False

    # ------------------------------------------------------------------ the world

    def world(self) -> World:
        """The world as last heard from peerd, all of one moment. Raises Evicted with the reason."""
        self._check_joined()
        info = _native.WorldInfo()
        check(_native.library().lh_world(self._handle, ctypes.byref(info)), "world")
        return World(info.epoch, info.rank, info.size, info.pending, info.member_id, info.weight)

    @property
    def world_size(self) -> int:
        """Members of the current epoch."""
        return self.world().world_size

    @property
    def rank(self) -> int:
        """Of this member in the current epoch, 0 to world_size - 1. Changes with the epoch."""
        return self.world().rank

    @property
    def epoch(self) -> int:
        """Number of the agreed membership; rises with every change."""
        return self.world().epoch

    @property
    def member_id(self) -> int:
        """Of this member, unique in the run and never changing."""
        return self.world().member_id

    @property
    def pending(self) -> int:
        """Members that wait for the next step boundary, as last heard."""
        return self.world().pending

    @property
    def weight(self) -> int:
        """Of this member's input: 1; 0 while it is in the background (`join_mode`)."""
        return self.world().weight

    @property
    def members(self) -> tuple[int, ...]:
        """Ids of the members of the current epoch in rank order."""
        self._check_joined()
        capacity = 64
        while True:
            ids = (ctypes.c_uint64 * capacity)()
            count = ctypes.c_uint32()
            check(_native.library().lh_members(self._handle, ids, capacity, ctypes.byref(count)), "members")
            if count.value <= capacity:
                return tuple(ids[: count.value])
            capacity = count.value

    # ------------------------------------------------------------------ step boundaries

    def begin_step(self, timeout: float | None = None) -> Step:
        """Step boundary: waits for every member, admits those that wait, returns in the common epoch.

        Every member has to call it at the same point of its program. A new member has come in at
        such a point of the others: unless it has started an op since join(), its first call is
        the boundary that admitted it and returns at once. So the same loop fits all of them, with
        the boundary at its top or at its end.
        timeout: seconds; None waits for ever. Raises DeadlineExceeded when somebody is late (this
        member then still counts as standing at the boundary: call again), Evicted with the reason
        when this member was removed or its host drains.
        """
        self._check_joined()
        opened = self._open_sync
        if opened is not None:
            again = "step() with it" if opened.called_as_step else "sync_state()"
            raise FailedPrecondition(f"begin_step: a sync of {opened.state!r} goes on; call {again} again")
        deadline = _native.Deadline(timeout)
        self._end_take(deadline)
        self._in_slices(_native.library().lh_begin_step, "begin_step", deadline)
        return self._passed()

    def _passed(self) -> Step:
        world = self.world()
        changed = world.epoch != self._epoch_of_step
        self._epoch_of_step = world.epoch
        return Step(world.epoch, world.rank, world.world_size, changed, weight=world.weight)

    def admit(self, timeout: float | None = None) -> Step:
        """The admission of those that wait, by itself; today the same as begin_step()."""
        return self.begin_step(timeout)

    @contextlib.contextmanager
    def step(
        self,
        state: State | None = None,
        timeout: float | None = None,
        *,
        strategy: str = "popular",
        progress: OnProgress = False,
    ) -> Iterator[Step]:
        """`with comm.step() as step:` - begin_step(), then the block, in the world that `step` names.

        With a state, all members hold the same bits in its tensors when the block begins, newcomers
        included, at the price of one call; `step.sync` tells what was moved. A block that is left
        without an exception raises `state.revision` by one.

        A member that joined in the background does not wait: `step.background` says so, and
        `step.take()` gives the state. A block in which it did not take it leaves `state.revision` as it is.

        strategy, progress and errors: as for sync_state().
        """
        if state is None:
            yield self.begin_step(timeout)
            return
        info = self._sync(state, strategy, _native.Deadline(timeout), progress, at_step=True)
        taken = (lambda timeout: self.take_state(state, timeout)) if info.background else None
        yield dataclasses.replace(self._passed(), sync=info, _take=taken)
        if not state.held:
            state.revision += 1

    # ------------------------------------------------------------------ shared state

    def sync_state(
        self,
        state: State,
        strategy: str = "popular",
        *,
        timeout: float | None = None,
        progress: OnProgress = False,
    ) -> SyncInfo:
        """Brings the state's tensors to the same bits at all members. Every member has to call it.

        The members vote by revision and hash; those that differ fetch what differs from those that
        do not, chunk by chunk, each chunk checked. Nothing moves where all are equal.
        strategy: "popular" takes the state that most of those with the highest revision have; all
            members have to use it, or none. "receive" takes what others have, "send" never changes.
        timeout: seconds; None waits for ever. After DeadlineExceeded the sync goes on and owns the
            tensors: call again to wait for it.
        progress: True shows a bar on stderr while this member fetches, or a function of a Progress.

        Raises StateMismatch if this member's state cannot be brought together with the others' (the
        message names the first difference, or the revision to load), Aborted if transfers fail
        again and again, FailedPrecondition, Evicted, Unavailable. After an error that leaves
        `state.torn`, the tensors hold nothing of use until a sync ends well.
        """
        return self._sync(state, strategy, _native.Deadline(timeout), progress, at_step=False)

    def kept_revision(self, state: State) -> int | None:
        """The revision of what peerd has kept (`--keep-state`) of a member of this name, of the same tensors.

        None: nothing. The first sync fills the state from it if `state.revision` is lower, and the
        strategy is not "send". Who knows that need not load a checkpoint first.
        """
        self._check_joined()
        _check_state(state)
        revision = ctypes.c_uint64()
        registration = state.register(self._client)
        check(
            _native.library().lh_kept_revision(self._handle, registration.handle, ctypes.byref(revision)),
            "kept_revision",
        )
        return None if revision.value == _native.NO_REVISION else revision.value

    def take_state(self, state: State, timeout: float | None = 0.0) -> bool:
        """After a sync that returned `background`: whether the state's tensors are this member's again.

        Waits until they hold what the group agreed on last, at most `timeout` seconds (None: for ever), or until
        that has changed at all who had it; `state.revision` is that of what they hold then. They stay this member's up to its next sync.
        Raises FailedPrecondition where nothing is fetched.
        """
        self._check_joined()
        _check_state(state)
        if self._held is not state:
            raise FailedPrecondition(f"take of {state!r}: nothing is fetched into it in the background")
        if self._open_sync is not None:
            raise FailedPrecondition(f"take of {state!r}: a sync of it goes on; wait for its end")
        if not state.held:
            return True
        deadline = _native.Deadline(timeout)
        while True:
            status = self._take(state, deadline.slice_ms())
            if status != _native.DEADLINE_EXCEEDED or deadline.passed():
                return status == _native.OK

    def _take(self, state: State, wait_ms: int) -> int:
        """OK: the tensors are this member's; DEADLINE_EXCEEDED, ABORTED: not yet. Raises other errors."""
        info = _native.SyncInfoStruct()
        handle = state.register(self._client).handle
        status: int = _native.library().lh_state_take(self._handle, handle, wait_ms, ctypes.byref(info))
        self._taking = status == _native.DEADLINE_EXCEEDED and not info.background
        # Not here yet; or those who have it have changed it before it was, and the next step brings more.
        if status in (_native.DEADLINE_EXCEEDED, _native.ABORTED):
            return status
        problem = None if status == _native.OK else error(status, f"take of {state!r}")
        state.end_sync(info, problem)
        if problem is not None:
            self._held = state if info.background else None
            raise problem
        return status

    def _end_take(self, deadline: _native.Deadline) -> None:
        """Waits for the answer that peerd owes, if it does."""
        while self._taking and self._held is not None:
            self._take(self._held, deadline.slice_ms())
            if self._taking and deadline.passed():
                raise DeadlineExceeded(f"take of {self._held!r}: peerd does not answer; look at its log, or call again")

    def _settle_if_out(self) -> None:
        """If this member is out: its sync does not go on, and nothing is fetched for it any more."""
        info = _native.WorldInfo()
        if self._left or _native.library().lh_world(self._handle, ctypes.byref(info)) != _native.OK:
            self._settle()

    def _settle(self) -> None:
        opened = self._open_sync
        if opened is not None:
            with contextlib.suppress(DeadlineExceeded):
                status, info = self._wait_for_sync(opened, _native.Deadline(0), None)
                opened.state.end_sync(info, None if status == _native.OK else error(status, "sync"))
            self._open_sync = None
            # Of one without an outcome nobody will say how far it came.
            opened.state.abandon()
        if self._held is not None:
            self._held.abandon()
        self._held = None
        self._taking = False

    def _sync(
        self, state: State, strategy: str, deadline: _native.Deadline, progress: OnProgress, at_step: bool
    ) -> SyncInfo:
        self._check_joined()
        _check_state(state)
        self._end_take(deadline)
        bar = Bar()
        on_progress = bar if progress is True else progress or None
        called_as_step = at_step
        try:
            for tries in range(_SYNC_TRIES):
                if self._open_sync is None:
                    options = _native.SyncOptions()
                    options.strategy = _code(_native.STRATEGIES, strategy, "strategy")
                    state.begin_sync(self, options)
                    self._open_sync = _OpenSync(state, called_as_step, at_step, options)
                opened = self._open_sync
                if opened.state is not state or opened.called_as_step != called_as_step:
                    raise FailedPrecondition(
                        f"sync of {state!r}: another one goes on, of {opened.state!r}: wait for its end first"
                    )
                at_step = opened.at_step
                status, info = self._wait_for_sync(opened, deadline, on_progress)
                problem = None if status == _native.OK else error(status, f"sync of {state!r}")
                result = state.end_sync(info, problem)
                self._held = state if info.background else None
                if problem is None:
                    assert result is not None
                    return result
                passed = bool(info.passed) or not at_step
                if status != _native.ABORTED or not passed or tries + 1 == _SYNC_TRIES:
                    raise problem
                at_step = False
        finally:
            bar.close()
        raise AssertionError("unreachable")

    def _wait_for_sync(
        self, opened: _OpenSync, deadline: _native.Deadline, on_progress: Callable[[Progress], None] | None
    ) -> tuple[int, _native.SyncInfoStruct]:
        """Begins it or finds it, whichever; its status and what is known of it."""
        lib = _native.library()
        call = lib.lh_begin_step_sync if opened.at_step else lib.lh_sync_state
        info = _native.SyncInfoStruct()
        told: Progress | None = None
        while True:
            status: int = call(self._handle, ctypes.byref(opened.options), deadline.slice_ms(), ctypes.byref(info))
            if status != _native.DEADLINE_EXCEEDED:
                self._open_sync = None
                return status, info
            if on_progress is not None:
                progress = self._progress()
                if progress.bytes_total > 0 and progress != told:
                    told = progress
                    on_progress(progress)
            if deadline.passed():
                raise DeadlineExceeded(
                    f"sync of {opened.state!r}: not done in time; it goes on and owns the tensors: "
                    "call again to wait for it"
                )

    def _progress(self) -> Progress:
        heard = _native.ProgressStruct()
        check(_native.library().lh_sync_progress(self._handle, ctypes.byref(heard)), "progress")
        return Progress(heard.bytes_done, heard.bytes_total, heard.bytes_per_second, heard.sources)

    # ------------------------------------------------------------------ ops

    @overload
    def all_reduce(
        self,
        tensor: Any,
        op: str = "sum",
        *,
        out: Any = None,
        tag: int = 0,
        on_fault: str | None = None,
        min_world: int = 0,
        algorithm: str = "auto",
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> OpInfo: ...

    @overload
    def all_reduce(
        self,
        tensor: Any,
        op: str = "sum",
        *,
        out: Any = None,
        tag: int = 0,
        on_fault: str | None = None,
        min_world: int = 0,
        algorithm: str = "auto",
        async_op: Literal[True],
        timeout: float | None = None,
    ) -> Work: ...

    def all_reduce(
        self,
        tensor: Any,
        op: str = "sum",
        *,
        out: Any = None,
        tag: int = 0,
        on_fault: str | None = None,
        min_world: int = 0,
        algorithm: str = "auto",
        async_op: bool = False,
        timeout: float | None = None,
    ) -> OpInfo | Work:
        """Reduces the members' tensors; every member gets the same bits.

        tensor: a numpy array or torch CPU tensor, contiguous, of any shape; (u)int8 to (u)int64,
            float16, bfloat16, float32 or float64. Number of elements (1 or more), dtype and op must
            be equal at all members. Tensors from `longhaul.empty` travel without a copy.
        op: "sum", "avg" (the sum divided by the world size, for integers rounded towards zero),
            "prod", "min", "max".
        out: where the result goes, of the same shape and dtype, not overlapping; None: in place.
        tag: names the op among those in flight on this communicator, 0 to 2**64 - 1. Members match
            by tag, so tags may be started in any order.
        on_fault: when a member dies, "retry" redoes the op among the survivors, "abort" ends it
            with Aborted at all of them, also at those that start it later; start it again at all
            of them, or at none. Both leave the tensor intact until the outcome. None: as given to join().
        min_world: with fewer members than this in the op it ends with TooFewMembers at all of them,
            tensors intact; 0 or 1: the last member completes alone. Equal at all members.
        algorithm: how the bytes travel; "auto" chooses by size and links. "oneshot": everybody's tensor to
            everybody at once, at most 4096 bytes. "mesh": everybody adds up one part and gives it to
            all, in twice the latency of the longest way; in groups of at most 16 hosts that all reach
            each other, elsewhere it is the ring. "ring": sums pass from host to host. Equal at all members;
            `OpInfo.algorithm` says which it was.
        async_op: return a Work at once instead of waiting.
        timeout: seconds to wait; None for ever. Not with async_op.

        Raises InvalidArgument (naming both offers, if the members' calls differ), Aborted,
        TooFewMembers, Evicted: the tensor is as before. DeadlineExceeded: the op goes on, and is in `.work`.
        Unavailable: peerd itself stopped or died, and the others may have the result. The tensor is as
        before, unless the op was in place on one from `longhaul.empty`: its original lay in peerd, and
        it may be overwritten in part. Join again, take the state of the others (`Comm.step` with a
        State, or a checkpoint) and compute the tensor anew; or give `out=` where it has to outlive peerd.
        """
        self._check_joined()
        if async_op and timeout is not None:
            raise InvalidArgument("timeout with async_op=True has no meaning; give it to wait()")
        deadline = _native.Deadline(timeout)
        source = elements_of(tensor, "tensor", written=out is None)
        target = source if out is None else elements_of(out, "out", written=True)
        if (target.shape, target.dtype) != (source.shape, source.dtype):
            raise InvalidArgument(
                f"out is {target.dtype} {list(target.shape)}, tensor is {source.dtype} {list(source.shape)}: make them alike"
            )
        if source.count == 0:
            raise InvalidArgument(f"tensor has no elements (shape {list(source.shape)}); there is nothing to reduce")
        if not 0 <= tag < 1 << 64:
            raise InvalidArgument(f"tag is {tag}; give a number from 0 to 2**64 - 1")
        options = _native.AllReduceOptions()
        options.source = source.address
        options.target = target.address
        options.count = source.count
        options.dtype = _native.DTYPES[source.dtype]
        options.op = _code(_native.REDUCE_OPS, op, "op")
        options.tag = tag
        options.on_fault = _native.AS_JOINED if on_fault is None else _code(_native.ON_FAULT, on_fault, "on_fault")
        if not 0 <= min_world < 1 << 32:
            raise InvalidArgument(f"min_world is {min_world}; give a number of members, or 0")
        options.min_world = min_world
        options.algorithm = _code(_native.ALGORITHMS, algorithm, "algorithm")
        self._client.sweep()
        try:
            started = self._spare.pop()
        except IndexError:
            started = Op(self)
        started.comm = self
        started.tensors = (source.owner, target.owner)
        lib = _native.library()
        handle = ctypes.byref(started.handle)
        try:
            if async_op:
                status = lib.lh_all_reduce_start(self._handle, ctypes.byref(options), handle)
            else:
                info = _native.OpInfoStruct()
                wait_ms = deadline.slice_ms()
                status = lib.lh_all_reduce(self._handle, ctypes.byref(options), wait_ms, ctypes.byref(info), handle)
                if status == _native.OK:
                    started.comm = started.tensors = None
                    self._spare.append(started)
                    return _op_info(info)
            started.what = f"all_reduce of {source.dtype} x {source.count}, tag {tag}"
            if started.handle.value is None:
                raise error(status, started.what)
            if async_op:
                return Work(started)
            if started.wait(deadline):
                return started.info()
        except BaseException:
            _abandon(started)
            raise
        late = DeadlineExceeded(
            f"{started.what}: no outcome after {timeout} s; it goes on and owns its tensors: wait for it with this error's .work"
        )
        late.work = Work(started)
        raise late

    # ------------------------------------------------------------------ memory

    def empty(self, shape: Shape, dtype: npt.DTypeLike = "float32") -> npt.NDArray[Any]:
        """A numpy array in memory shared with this communicator's peerd; see `longhaul.empty`."""
        return empty_numpy(self._client, shape, dtype)

    # ------------------------------------------------------------------ the end

    def leave(self, timeout: float | None = None) -> None:
        """Leaves the group when this member's ops in flight have ended; the others go on without it.

        timeout: seconds; None waits for ever. Calling it again does nothing.
        """
        if self._left:
            return
        try:
            self._in_slices(_native.library().lh_leave, "leave", _native.Deadline(timeout))
        except Unavailable:
            self._settle()
            raise
        self._left = True
        self._settle()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.leave()
            return
        # What went wrong in the block is the news; the others should not wait for this member.
        with contextlib.suppress(Error):
            self.leave(timeout=5)

    def __repr__(self) -> str:
        if self._left:
            return f"<Comm run={self.run} group={self.group}: left>"
        try:
            return f"<Comm run={self.run} group={self.group}: {self.world()}>"
        except Error as problem:
            return f"<Comm run={self.run} group={self.group}: {problem}>"

    def _check_joined(self) -> None:
        if self._left:
            raise FailedPrecondition("this communicator has left its group; join again")

    def _in_slices(self, call: Callable[[ctypes.c_void_p, int], int], what: str, deadline: _native.Deadline) -> None:
        """A call of the library that goes on where it was when its time ran out."""
        status = call(self._handle, deadline.slice_ms())
        while status == _native.DEADLINE_EXCEEDED and not deadline.passed():
            status = call(self._handle, deadline.slice_ms())
        if status == _native.DEADLINE_EXCEEDED:
            raise DeadlineExceeded(f"{what}: not done in time; it goes on, call {what}() again to wait for it")
        check(status, what)


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
        "background": they do not. It takes part in all ops with weight 0, which means that it gets the
        result and its input is left out, while the state is fetched (`Step.background`, `Step.take`); it
        counts from a later step boundary on. The same where nobody is there yet.
    state: what the first `Comm.step` or `Comm.sync_state` will bring. It is copied and hashed before
        the others hear of this member: from its admission on they wait for it. Until that first call
        has returned, the tensors are not written to, or named by `State.touch`.

    Raises Unavailable (peerd or coordinator cannot be reached; the message names which and where),
    DeadlineExceeded (not admitted in time), InvalidArgument.
    """
    options = _join_options(run, group, cohort, step_deadline, on_fault, name, join_mode)
    if state is not None:
        _check_state(state)
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
    if not 0 <= group < 1 << 32:
        raise InvalidArgument(f"{what}: give a group from 0 to 2**32 - 1")
    options = _native.JoinOptions()
    options.run = run.encode()
    options.group = group
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
    options.on_fault = _code(_native.ON_FAULT, on_fault, "on_fault")
    options.mode = _code(_native.JOIN_MODES, join_mode, "join_mode")
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
    comm = Comm(client, run, group)
    op = ctypes.c_void_p()
    try:
        check(
            lib.lh_join_start(client.handle, ctypes.byref(options), ctypes.byref(comm._handle), ctypes.byref(op)),
            what,
        )
        status = _native.wait(op, deadline)
        if status == _native.DEADLINE_EXCEEDED:
            raise DeadlineExceeded(
                f"{what}: not admitted in time; the members admit newcomers where they call begin_step()"
            )
        check(status, what)
    except BaseException:
        comm._free()  # withdraws the wish
        raise
    finally:
        lib.lh_op_free(op)
    return comm
