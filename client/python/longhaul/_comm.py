"""Members of a group, as the caller has them."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from . import _native
from ._all_reduce import AllReduces
from ._arena import Shape, empty_numpy
from ._errors import Error, Unavailable, check
from ._member import Member, World
from ._state import OnProgress, State, SyncInfo
from ._sync import Syncs
from ._work import OpInfo, Work

if TYPE_CHECKING:
    import numpy.typing as npt

_Self = TypeVar("_Self", bound="Comm")


@dataclasses.dataclass(frozen=True)
class Step:
    """The world that a step runs in; members may only be removed while it lasts."""

    epoch: int
    rank: int
    world_size: int
    changed: bool  #: the epoch is another one than at the boundary before
    sync: SyncInfo | None = None  #: what became of the state that was given to step()
    #: This member's input is not in results yet. A state given to step() is fetched meanwhile: hands off its
    #: tensors until take().
    background: bool = False
    _take: Callable[[float | None], bool] | None = dataclasses.field(default=None, repr=False, compare=False)

    def take(self, timeout: float | None = 0.0) -> bool:
        """Whether the tensors of the state are this member's, and hold what all agreed on at this step.

        True where there was nothing to fetch. In the background: waits until they are there, at most
        `timeout` seconds (None: for ever), and takes them back. Who then changes them as the others do
        contributes from the next step on; leaving the block raises `state.revision` for them as well.
        """
        return True if self._take is None else self._take(timeout)


class Comm:
    """One member of one group. Made by `join`; leaves at the end of a `with` block.

    A Comm that is dropped without leave() leaves as well, without waiting.
    """

    def __init__(self, member: Member, run: str, group: int) -> None:
        self._client = member.client
        self._member = member
        self._syncs = Syncs(member)
        self._all_reduces = AllReduces(member.client, member.handle)
        self._epoch_of_step = 0
        self.run = run
        self.group = group

    # ------------------------------------------------------------------ the world

    def world(self) -> World:
        """The world as last heard from peerd, all of one moment. Raises Evicted with the reason."""
        return self._member.world()

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
    def background(self) -> bool:
        """This member's input is not in results yet (`join_mode`)."""
        return self.world().background

    @property
    def members(self) -> tuple[int, ...]:
        """Ids of the members of the current epoch in rank order."""
        self._member.check_joined()
        capacity = 64
        while True:
            ids = (ctypes.c_uint64 * capacity)()
            count = ctypes.c_uint32()
            check(_native.library().lh_members(self._member.handle, ids, capacity, ctypes.byref(count)), "members")
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
        self._member.check_joined()
        self._syncs.check_begin_step()
        deadline = _native.Deadline(timeout)
        self._syncs.end_take(deadline)
        self._member.in_slices(_native.library().lh_begin_step, "begin_step", deadline)
        return self._passed()

    def _passed(self) -> Step:
        world = self.world()
        changed = world.epoch != self._epoch_of_step
        self._epoch_of_step = world.epoch
        return Step(world.epoch, world.rank, world.world_size, changed, background=world.background)

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
        info = self._syncs.sync(state, strategy, _native.Deadline(timeout), progress, at_step=True)
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
        again and again, FailedPrecondition (an op in flight uses one of the tensors, for instance), Evicted,
        Unavailable. After an error the tensors are as they were, also where this member's own peerd died.
        """
        return self._syncs.sync(state, strategy, _native.Deadline(timeout), progress, at_step=False)

    def kept_revision(self, state: State) -> int | None:
        """The revision of what peerd has kept (`--keep-state`) of a member of this name, of the same tensors.

        None: nothing. The first sync fills the state from it if `state.revision` is lower, and the
        strategy is not "send". Who knows that need not load a checkpoint first.
        """
        return self._syncs.kept_revision(state)

    def take_state(self, state: State, timeout: float | None = 0.0) -> bool:
        """After a sync that returned `background`: whether the state's tensors are this member's again.

        Waits until they hold what the group agreed on last, at most `timeout` seconds (None: for ever), or until
        that has changed at all who had it; `state.revision` is that of what they hold then. They stay this member's up to its next sync.
        Raises FailedPrecondition where nothing is fetched.
        """
        return self._syncs.take_state(state, timeout)

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
            "prod", "min", "max". A sum is taken in the tensor's dtype, that of "avg", too: beyond 65504 it is
            infinite in float16; divide before, or use bfloat16 or float32. "min" and "max" give NaN where
            any member has NaN, and take -0 for less than +0.
        out: where the result goes, of the same shape and dtype, not overlapping; None: in place.
            An op that raises may have written to it: it may hold anything then.
        tag: names the op among those in flight on this communicator, 0 to 2**64 - 1. Members match
            by tag, so tags may be started in any order. A second op of a tag in flight ends with
            InvalidArgument, which wait() raises; the first goes on.
        on_fault: when a member dies, or leaves without having started the op, "retry" redoes the op among the survivors, "abort" ends it
            with Aborted at all of them, also at those that start it later; start it again at all
            of them, or at none. Both leave the tensor intact until the outcome. None: as given to join().
        min_world: with fewer members than this in the op it ends with TooFewMembers at all of them,
            tensors intact; 0 or 1: the last member completes alone. Equal at all members.
        algorithm: how the bytes travel; "auto" chooses by size and links. "oneshot": everybody's tensor to
            everybody at once, at most 4096 bytes. "mesh": everybody adds up one part and gives it to
            all, in twice the latency of the longest way; in groups of at most 16 hosts that all reach
            each other, elsewhere it is the ring. "ring": sums pass from host to host. Equal at all members;
            `OpInfo.algorithm` says which it was.
        async_op: return a Work at once instead of waiting. At most 1024 ops of a member are in flight; one more
            ends with Unavailable.
        timeout: seconds to wait; None for ever. Not with async_op.

        Raises FailedPrecondition if a sync owns the tensor (`State`). Raises InvalidArgument (naming both
        offers, if the members' calls differ), Aborted, TooFewMembers, Evicted: the tensor is as before
        (not `out`, see there). DeadlineExceeded: the op goes on, and is in `.work`.
        Unavailable: peerd itself stopped or died, and the others may have the result. The tensor is as
        before, unless the op was in place on one from `longhaul.empty`: its original lay in peerd, and
        it may be overwritten in part. Join again, take the state of the others (`Comm.step` with a
        State, or a checkpoint) and compute the tensor anew; or give `out=` where it has to outlive peerd.
        """
        self._member.check_joined()
        return self._all_reduces.run(self, tensor, op, out, tag, on_fault, min_world, algorithm, async_op, timeout)

    # ------------------------------------------------------------------ memory

    def empty(self, shape: Shape, dtype: npt.DTypeLike = "float32") -> npt.NDArray[Any]:
        """A numpy array in memory shared with this communicator's peerd; see `longhaul.empty`."""
        return empty_numpy(self._client, shape, dtype)

    # ------------------------------------------------------------------ the end

    def leave(self, timeout: float | None = None) -> None:
        """Leaves the group when this member's ops in flight have ended; the others go on without it.

        timeout: seconds; None waits for ever. Calling it again does nothing.
        """
        member = self._member
        if member.left:
            return
        try:
            member.in_slices(_native.library().lh_leave, "leave", _native.Deadline(timeout))
        except Unavailable:
            self._syncs.settle()
            raise
        member.left = True
        self._syncs.settle()

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
        if self._member.left:
            return f"<Comm run={self.run} group={self.group}: left>"
        try:
            return f"<Comm run={self.run} group={self.group}: {self.world()}>"
        except Error as problem:
            return f"<Comm run={self.run} group={self.group}: {problem}>"
