"""The communicator: what a program does as one member of one group."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from . import _native
from ._arena import Shape, empty_numpy
from ._collective import Collectives, Counts, LaidOutFor
from ._errors import (
    Error,
    FailedPrecondition,
    InvalidArgument,
    StateMismatch,
    Unavailable,
    check,
    number_of,
)
from ._log import Counters, logger
from ._member import Member
from ._op_info import OpInfo
from ._state import State
from ._sync import Syncs, check_state
from ._sync_info import OnProgress, SyncInfo
from ._work import Work
from ._world import MemberInfo, World

if TYPE_CHECKING:
    import numpy.typing as npt
    from typing_extensions import Unpack

    from ._options import (
        GatherStart,
        GatherWait,
        OpStart,
        OpWait,
        QuantizedStart,
        QuantizedWait,
        ReduceStart,
        ReduceWait,
        SendStart,
        SendWait,
    )

#: Default tag of `Comm.agree`: the highest.
AGREE_TAG = (1 << 64) - 1

_Self = TypeVar("_Self", bound="Comm")


@dataclasses.dataclass
class _Standing:
    """Where a state stands at one member, for steps with sync="on_change"."""

    #: `World.boundary` at its last good sync; None: it has had none.
    boundary: int | None = None
    #: This member has passed a boundary, and the sync that belongs to it has no good end yet: the next call goes on
    #: with that sync, as a step or alone. None: no sync is owed.
    owed: Literal["step", "sync"] | None = None
    #: Why the tensors may differ from those of the other members, who will not compare them; None: they do not.
    apart: str | None = None


@dataclasses.dataclass(frozen=True)
class Step:
    """The group at the boundary with which a step began: the same at all members that passed it, but for `rank`.

    Members may be removed during the step, and `Comm.world()` shows that. None is added.
    """

    epoch: int  #: number of the agreed members and links; rises with every change of them
    rank: int  #: of this member, 0 to world_size - 1
    world_size: int  #: all members of the epoch, those in the background included
    #: The epoch differs from that of this member's last step. The members may still be the same: an epoch also changes
    #: when a lost link is routed through another host, for instance.
    changed: bool
    sync: SyncInfo | None = None  #: what the sync did; None if step() was given no state
    #: This member's input is not in the results yet. peerd fetches the state meanwhile. Do not write to the tensors of
    #: the state until take() returns True.
    background: bool = False
    _take: Callable[[float | None], bool] | None = dataclasses.field(default=None, repr=False, compare=False)
    _repeat: Callable[[], None] | None = dataclasses.field(default=None, repr=False, compare=False)

    def take(self, timeout: float | None = 0.0) -> bool:
        """Takes the state that peerd fetched in the background. True: its tensors hold the state of this step.

        The tensors of `allow_unequal` come later, at the boundary where this member's input starts to count.

        Returns True at once if this member is not in the background. Otherwise waits up to `timeout` seconds (None: no
        limit) until the state is complete, and writes it to the tensors. False: not complete yet; do not write to the
        tensors.

        After True, change the tensors in this block as the other members do. Then this member's input is in the results
        from the next step on, and leaving the block raises `state.revision` by one. Errors: as Comm.take_state().
        """
        return True if self._take is None else self._take(timeout)

    def repeat(self) -> None:
        """Says that this block has not trained its step: its end leaves `state.revision` as it is.

        Call it where the block caught an exception and the tensors are as at its beginning. The next block is the same
        step again. Every member must decide alike: an op ends with the same error at all members that are left.
        """
        if self._repeat is not None:
            self._repeat()


@dataclasses.dataclass
class _Passed:
    """A boundary that this member has passed, while the block of its step has not begun.

    An exception may keep the block from beginning, while the other members go on. Then the next call begins it.
    state, sync: of step(); None and "" for begin_step().
    """

    state: State | None
    sync: str
    step: Step


class Comm:
    """One member of one group. Made by `join`.

    As a context manager it calls leave() at the end of the block. If the garbage collector frees a Comm before leave(),
    the member leaves, too, and nobody waits for that.

    Threads: any thread may call any method. All methods and properties of the group, so all but leave() and empty(),
    raise FailedPrecondition after leave(), Evicted if this member was removed, and Unavailable if peerd stopped or
    died.
    """

    def __init__(self, member: Member, run: str, group: int) -> None:
        self._client = member.client
        self._member = member
        self._syncs = Syncs(member)
        self._collectives = Collectives(member)
        self._epoch_of_step = 0
        self._passed: list[_Passed] = []  # at most one
        self._standings: weakref.WeakKeyDictionary[State, _Standing] = weakref.WeakKeyDictionary()
        self.run = run
        self.group = group
        with contextlib.suppress(Error):  # the next call says what is wrong
            member.record.joined(member.world(), member.members)

    # ------------------------------------------------------------------ the world

    def world(self) -> World:
        """The group as peerd last reported it, all values of one moment. Does not wait.

        Raises Evicted, with the reason, if this member was removed.
        """
        return self._member.world()

    @property
    def world_size(self) -> int:
        """The number of members of the current epoch, those in the background included."""
        return self.world().world_size

    @property
    def rank(self) -> int:
        """The rank of this member: 0 to world_size - 1. It may change with the epoch."""
        return self.world().rank

    @property
    def epoch(self) -> int:
        """The number of the agreed members and links. It rises with every change."""
        return self.world().epoch

    @property
    def member_id(self) -> int:
        """The id of this member. It is unique in the run and never changes."""
        return self.world().member_id

    @property
    def pending(self) -> int:
        """The number of newcomers that wait for admission, as peerd last reported it."""
        return self.world().pending

    @property
    def background(self) -> bool:
        """True while this member's input is left out of the results (`join_mode="background"`)."""
        return self.world().background

    @property
    def members(self) -> tuple[int, ...]:
        """The ids of all members of the current epoch, in rank order. Asks peerd, at most 30 s."""
        return self._member.members()

    def member(self, id: int) -> MemberInfo:
        """What is known of a member of the group: its name, host, cohort and rank. Asks peerd, at most 30 s.

        id: as in `members` and `OpInfo.members`. Former members are known for a long time: at least the last 4096
        members of the group since this member was admitted. Raises InvalidArgument if no such member is known.
        """
        self._member.check_joined()
        info = _native.MemberInfoStruct()
        number = number_of(id, "id", (1 << 64) - 1)
        check(_native.library().lh_member(self._member.handle, number, ctypes.byref(info)), f"member {number}")
        return MemberInfo(
            info.member_id,
            info.name.decode(),
            info.host.decode(),
            info.cohort.decode() or None,
            info.rank if info.current else None,
            info.peer_id,
        )

    def agree(self, infos: Iterable[OpInfo], *, tag: int = AGREE_TAG, timeout: float | None = None) -> bool:
        """Whether the ops of all members of this group had the same hosts. One small op of this group.

        For sharded models: the shards of a host are members of different groups, and a fault may hit the op of one
        group and not that of another. Give the shards of a host a group of their own. After a round, each shard calls
        agree() of that group with the infos of its ops, in the order that all shards use. True, at all shards: their ops
        had the same hosts. False, at all: some had others, so their results do not belong together.

        tag: as for all_reduce. timeout, errors: as for all_reduce.
        """
        hosts = b"".join(info.hosts.to_bytes(8, "little") for info in infos)
        digest = int.from_bytes(hashlib.blake2b(hosts, digest_size=8).digest(), "little")
        everybody = (1 << 64) - 1
        numbers = (ctypes.c_uint64 * 2)(digest, everybody - digest)
        self._collectives.reduce_numbers(self, numbers, "min", tag, timeout)
        return numbers[0] == everybody - numbers[1]  # the least and the greatest digest are equal

    # ------------------------------------------------------------------ completion

    def fileno(self) -> int:
        """A descriptor for select, poll or an event loop: readable when an op of this process may have ended.

        Then call take_events(), and after that `Work.done()` of each op of interest. All members of the process at one
        peerd share the descriptor. It belongs to Longhaul: do not read or close it. Raises Unavailable if peerd has gone.
        """
        return self._client.fileno()

    def take_events(self) -> None:
        """Makes fileno() unreadable until an op ends after this call. Does not wait."""
        self._client.take_events()

    def start_helper(self) -> None:
        """Starts a thread that copies results back to tensors that are not in memory shared with peerd, as they come.

        Without it, such a copy happens in `Work.wait` or `Work.done`. Each wait takes some 10 us longer with it. The
        members of the process at one peerd share the thread. A second call does nothing.
        """
        self._client.start_helper()

    # ------------------------------------------------------------------ step boundaries

    def begin_step(self, timeout: float | None = None) -> Step:
        """Step boundary: waits until every member has called it, and admits the newcomers that wait.

        Every member must call it at the same point of its program. All members return in the same epoch.

        A newcomer was admitted at such a boundary. Therefore its first call returns at once and stands for the boundary
        that admitted it. So all members run the same loop, with the boundary at the top. An op or sync_state() that a
        newcomer calls before that raises FailedPrecondition there, and the others hear nothing of it: they are in their
        loop. Only members that begin together, as the first of the group, may start with something else.

        To begin with n members, use `join(members=n)`. To wait for n members later, test what this call returns:
        `while comm.begin_step().world_size < n: pass`.

        An exception, such as Ctrl-C, may keep this call from returning although the other members have passed the
        boundary. Then the next call returns the step of that boundary. The same holds for step() until its block begins,
        and for sync_state(): make the same call again.

        timeout: seconds; None: no limit. Raises DeadlineExceeded if not all members have come; this member still counts
        as standing at the boundary, and the next call waits at the same one. Raises FailedPrecondition if step() with a
        state began the wait at this boundary. Raises Evicted, with the reason, if this member was removed or its peerd
        drains.
        """
        self._member.check_joined()
        self._pass(None, "", _native.Deadline(timeout))
        self._settle_step()
        return self._passed.pop().step

    def _pass(self, state: State | None, sync: str, deadline: _native.Deadline) -> _Passed:
        """Passes a boundary, unless this member has passed one and has not begun the block."""
        if not self._stands(state, sync):
            self._syncs.check_begin_step()
            begun = time.monotonic()
            self._syncs.end_take(deadline)
            self._collectives.pay()
            self._collectives.flush("begin_step", deadline)
            self._member.begin_step(deadline)
            self._note_passed(state, sync, None, time.monotonic() - begun)
        return self._passed[0]

    def _stands(self, state: State | None, sync: str) -> bool:
        """Whether this member stands behind a boundary without having begun the block. Raises if another call has to."""
        for passed in self._passed:
            if passed.state is not state or passed.sync != sync:
                call = "begin_step()" if passed.state is None else f"step({passed.state!r}, sync={passed.sync!r})"
                raise FailedPrecondition(f"this member has passed the boundary of {call}: call that again first")
        return bool(self._passed)

    def _note_passed(self, state: State | None, sync: str, info: SyncInfo | None, seconds: float) -> None:
        """seconds: how long this member waited at the boundary. 0: a sync counts them."""
        world = self.world()
        at = world.step  # a member may have gone since the boundary, and then `world` differs from member to member
        changed = at.epoch != self._epoch_of_step
        step = Step(at.epoch, at.rank, at.world_size, changed, info, background=world.background)
        self._passed.append(_Passed(state, sync, step))
        self._member.record.counters.add(steps=1, seconds_steps=seconds)
        if changed:
            self._member.record.changed(world, self._member.members, self.member)

    def _settle_step(self) -> None:
        """Before the block of a step begins, with the next statement: forgets how this member came to it."""
        self._epoch_of_step = self._passed[0].step.epoch
        self._member.boundary = None
        self._syncs.take()

    def admit(self, timeout: float | None = None) -> Step:
        """The same as begin_step()."""
        return self.begin_step(timeout)

    @contextlib.contextmanager
    def step(
        self,
        state: State | None = None,
        timeout: float | None = None,
        *,
        strategy: str = "popular",
        sync: Literal["always", "on_change"] = "always",
        progress: OnProgress = False,
    ) -> Iterator[Step]:
        """One training step: `with comm.step(state) as step:`. Calls begin_step(), then runs the block.

        With a state, it also syncs the state, in one round trip to the coordinator. When the block begins, the tensors
        of the state are equal at all members, newcomers included. `step.sync` says what was fetched. A block that ends
        without an exception raises `state.revision` by one, unless it called `step.repeat()`. If an op of the block has
        failed and the exception was caught in the block, a warning is logged ("longhaul").

        A block that ends with an exception leaves `state.revision` as it is. Then step(state) may be called again: the
        sync gives this member the tensors of the others, if they have finished the step.

        A member in the background does not wait for the state: `step.background` is True, and `step.take()` gives the
        state when it is complete. A block without a take() that returned True leaves `state.revision` as it is.

        sync: "always": each step syncs. "on_change": a step reads and compares the tensors only if newcomers were
            admitted since the last sync, or there was none; `step.sync` is None otherwise. Newcomers get the state as
            with "always". Tensors that differ at a member for another reason stay different and unseen until then. Give
            the same value at all members in each step.

        timeout, strategy, progress and errors: as sync_state(). After DeadlineExceeded call step(state) again. With
        "on_change" raises FailedPrecondition if this member's tensors may differ from the others': an earlier block
        ended with an exception, or an earlier sync with an error of this member alone. Then leave() and join again, or
        call sync_state(state) at all members.
        """
        if sync not in ("always", "on_change"):
            raise InvalidArgument(f"step: sync is {sync!r}; give 'always' or 'on_change'")
        if state is None:
            yield self.begin_step(timeout)
            return
        deadline = _native.Deadline(timeout)
        passed = (self._step_and_sync if sync == "always" else self._step_on_change)(
            state, strategy, deadline, progress
        )
        self._settle_step()
        repeats: list[bool] = []
        waits = passed.step.sync is not None and passed.step.sync.background
        take = (lambda timeout: self.take_state(state, timeout)) if waits else None
        passed.step = dataclasses.replace(passed.step, _take=take, _repeat=lambda: repeats.append(True))
        record = self._member.record
        record.begin_block()
        try:
            with state.changing():
                yield self._passed.pop().step
            if state.held or repeats:
                return
            state.revision += 1
        except BaseException as problem:
            if not self._passed:  # the block had begun
                self._standing(
                    state
                ).apart = f"the block of the step of revision {state.revision} ended with {type(problem).__name__}"
            raise
        if record.failures:
            logger.warning(
                "%d ops failed in the block of a step, and state.revision rises to %d; call step.repeat() in a block "
                "that did not train its step; the first failure: %s",
                record.failures,
                state.revision,
                record.first_failure,
            )

    def _standing(self, state: State) -> _Standing:
        return self._standings.setdefault(state, _Standing())

    def _step_and_sync(
        self, state: State, strategy: str, deadline: _native.Deadline, progress: OnProgress, sync: str = "always"
    ) -> _Passed:
        """A step boundary with a sync."""
        if not self._stands(state, sync):
            if self._member.boundary is not None and self._member.boundary.is_sent:
                raise FailedPrecondition("step: begin_step() waits at this boundary; call it again")
            self._collectives.pay()
            self._collectives.flush("step", deadline)
            info = self._sync(state, strategy, deadline, progress, at_step=True)
            if not info.background:
                self._standing(state).boundary = self.world().boundary
            self._note_passed(state, sync, info, 0.0)
        return self._passed[0]

    def _step_on_change(self, state: State, strategy: str, deadline: _native.Deadline, progress: OnProgress) -> _Passed:
        """A step boundary, with a sync if newcomers were admitted since the last sync. All members must decide alike.

        1. `World.boundary` is the same at all members. The epoch is not: a fault right after the boundary may have made a
           later one, here and not yet at another member. Members that have synced this state since they joined did so
           at the same boundaries, so the numbers that they compare with are equal, too. A newcomer has none, and its
           admission has changed the number of the others. So all members sync, or none.
        2. A sync that has no outcome, or was aborted, is owed by all members. Each goes on with it in its next call,
           and not at the next boundary, where the others would not come.
        3. A member whose sync alone was refused, or whose block ended with an exception, may hold other tensors than
           the others, who will not compare them. It must not go on: `apart`.
        """
        check_state(state)
        self._member.check_joined()
        standing = self._standing(state)
        if standing.apart is not None:
            raise FailedPrecondition(
                f"step of {state!r} with sync='on_change': {standing.apart}, so its tensors may differ from those of "
                "the other members, who do not compare them now; leave() and join again, or call sync_state() with it "
                "at all members"
            )
        if standing.owed is None and self._member.world().background:
            standing.owed = "step"  # it comes out of the background only by what it offers at a boundary
        if standing.owed == "step":
            passed = self._step_and_sync(state, strategy, deadline, progress, "on_change")
            standing.owed = None
            return passed
        passed = self._pass(state, "on_change", deadline)
        if self.world().boundary != standing.boundary:
            standing.owed = "sync"
            info = self._sync(state, strategy, deadline, progress, at_step=False)
            passed.step = dataclasses.replace(passed.step, sync=info)
            standing.boundary = self.world().boundary
        return passed

    def _sync(
        self, state: State, strategy: str, deadline: _native.Deadline, progress: OnProgress, at_step: bool
    ) -> SyncInfo:
        """A sync, and what its end says about the state at this member."""
        try:
            info = self._syncs.sync(state, strategy, deadline, progress, at_step)
        except (StateMismatch, InvalidArgument) as problem:
            # If the library refused the call, nothing has been sent, and the sync is still to be made. That holds for
            # FailedPrecondition, too; where other members cause it, it comes again with the next call.
            if self._syncs.answered:
                self._standing(state).apart = f"its last sync ended with {type(problem).__name__} at this member"
            raise
        if not info.background:
            standing = self._standing(state)
            standing.owed = standing.apart = None
        return info

    # ------------------------------------------------------------------ shared state

    def sync_state(
        self,
        state: State,
        strategy: str = "popular",
        *,
        timeout: float | None = None,
        progress: OnProgress = False,
    ) -> SyncInfo:
        """Makes the tensors of a state equal at all members, bit by bit. Every member must call it.

        The members vote by revision and hash. Members whose tensors differ from the chosen state fetch the chunks
        (1 MiB) that differ, and check each one. If all tensors are equal already, no tensor bytes move.

        strategy: "popular": among the members with the highest revision, the state that most of them have is chosen.
            Either all members use "popular", or none. "receive": this member's state is never chosen. "send": this
            member's tensors never change; StateMismatch if another state is chosen. Without "popular" only states
            of senders are chosen.
        timeout: seconds; None: no limit. After DeadlineExceeded the sync goes on and uses the tensors. Call again to
            wait for it.
        progress: True shows a bar on stderr while this member fetches, by tqdm if it is installed. Or a function that
            gets a Progress.

        After an error the tensors are as they were, also if this member's own peerd died. Raises
        StateMismatch: this member's state does not fit the others' states. The message names the first difference, or
            the revision to load. The others go on, and wait for this member in their next op: leave(), correct the
            state, and join again.
        Aborted: the transfer failed, five times in a row.
        FailedPrecondition: an op in flight uses one of the tensors, for instance; the message says what to do.
        InvalidArgument: some members use "popular" and others do not.
        Evicted, Unavailable: as in all methods.
        """
        self._collectives.pay()
        owed = self._standing(state).owed if isinstance(state, State) else None
        info = self._sync(state, strategy, _native.Deadline(timeout), progress, at_step=False)
        if not info.background:
            self._standing(state).boundary = self.world().boundary
        if owed == "sync":  # the step that owed it goes on at the next boundary, as at the other members
            self._member.boundary = None
            self._passed.clear()
        return self._syncs.take() or info

    def kept_revision(self, state: State) -> int | None:
        """The revision of the state that peerd kept when a former member of the same name died; None: peerd kept none.

        peerd keeps states with `--keep-state`. The kept state counts only if its tensors have the same names, dtypes
        and shapes. The first sync fills the tensors from it if `state.revision` is lower and the strategy is not
        "send". Then this member need not load a checkpoint.
        """
        return self._syncs.kept_revision(state)

    def take_state(self, state: State, timeout: float | None = 0.0) -> bool:
        """For a member in the background: takes the state that peerd fetched. True: the tensors hold it.

        Waits up to `timeout` seconds (None: no limit) until the state that the group agreed on last is complete. Then
        writes it to the tensors and sets `state.revision`. From then on the tensors belong to this member until its
        next step() or sync_state(). False: the state is not complete, or its sources have changed it meanwhile and it
        comes with the next step. Do not write to the tensors then. While this call waits, the other members wait for
        this one at their next step or op: give a short timeout.

        Raises FailedPrecondition if nothing is fetched into this state, or an op in flight uses one of its tensors.
        """
        return self._syncs.take_state(state, timeout)

    # ------------------------------------------------------------------ ops

    # What an op does after a fault, and the options of all ops, are documented at all_reduce().

    @overload
    def all_reduce(
        self, tensor: Any, op: str = "sum", *, out: Any = None, **options: Unpack[QuantizedWait]
    ) -> OpInfo: ...
    @overload
    def all_reduce(
        self, tensor: Any, op: str = "sum", *, out: Any = None, **options: Unpack[QuantizedStart]
    ) -> Work: ...
    def all_reduce(self, tensor: Any, op: str = "sum", *, out: Any = None, **options: Any) -> OpInfo | Work:
        """All-reduce: combines the tensors of all members, element by element. All get the same bits.

        tensor: this member's input: a contiguous numpy array or torch tensor, of any shape, also without elements.
            dtype: bool, int8 to int64, uint8 to uint64, float16, bfloat16, float32 or float64. The number of elements,
            the dtype and `op` must be the same at all members. Tensors from `longhaul.empty` and `longhaul.torch.empty`
            are sent and received without a copy. Or a list or tuple of up to 1048576 tensors, whose dtypes may differ:
            it is one op, with one outcome. All members give lists with the same dtypes and numbers of elements. Tensors
            of a list from 256 KiB on that are in shared memory travel from where they are; the others are packed, sent
            together, and unpacked. Torch tensors are on the CPU or on one CUDA device; those on a GPU are copied through
            pinned host memory, after what the current stream has queued.
        op: "sum", "avg", "prod", "min" or "max". "avg" is the sum divided by the number of members whose tensors are in
            it (`OpInfo.world_size`), or by the sum of their weights; integers are rounded towards zero. Sums of float16
            and bfloat16 are computed in float32, and rounded once. "min" and "max" give NaN where any member has NaN,
            and treat -0 as less than +0. bool: "sum" and "max" are true where any member has true, "min" where all have
            it; "avg" and "prod" are refused.
        out: where the result goes. Same dtype and shape as `tensor`, and no overlap with it. None: in place. If the op
            raises, `out` may hold anything. For a list, a list.

        Options of all-reduce, reduce and reduce-scatter:
        weight: a float, 0 or more: the tensor is multiplied by it, for instance by the number of tokens behind a
            gradient. "avg" divides by the sum of all weights; if that is 0, the op ends with TooFewMembers. For "sum"
            and "avg" of floats. Either all members give a weight, or none. None: no weight.
        order: "any": inputs are added in the fastest order. "rank": the result depends on the inputs, the ranks, and
            which ranks share a host; not on the algorithm, the links or the time. Members that share a host are added
            up first, at the place of the first of them. Not with "ring", nor for groups without a mesh. Same at all
            members.

        Options of all-reduce, reduce-scatter, all-gather and broadcast:
        quantize: how elements travel between hosts: None: as they are; "bf16", "int8", "int4", or a `Quant`, which
            explains them and "auto". Same at all members. For float32, float16 and bfloat16; with "sum" and "avg". All
            members get the same bits. Sums are computed in float32. Nothing is encoded within a host, and nothing in an
            op of at most 4096 bytes unless `algorithm` is "mesh" or "ring", or `counts` is given. An element errs by at
            most half a scale of its block each time it is encoded: once in the input of each host, and once in the sum
            (reduce-scatter: not in the sum; all-gather and broadcast: once). "ring" encodes each partial sum, whose
            scales are larger. So "auto" takes the mesh to reduce, where there is one, up to 64 MiB of encoded bytes. A
            block with a NaN or an infinity arrives as NaN everywhere (`OpInfo.blocks_not_finite`).
            docs/quantization.md tells more.

        Option of all-reduce and reduce-scatter:
        error: error feedback, with quantize: a float32 array in host memory with as many elements as `tensor`; for a
            list, a list. It is added to the tensor (after `weight`). If the op ends well, it becomes what this member's
            input, and the sums that its host encodes, have lost: pass it to the same op of the next step. Begin with
            zeros. If the op raises, it is unchanged. It is a part of the trainer's state: keep it in checkpoints.
            Members on one host share one error, which the first of them that has one gets; those of the others become
            0. The error of a member of weight 0 or in the background is not sent. If no member on its host gives an
            input, the loss of the sums that the host encodes is added to the first error there. Each member decides
            whether it keeps an error.

        Options of all ops:
        participants: the ids of the members that take part (`members`), this one among them; only they call it, all
            with the same set. Ids of members that have died may stay in it: the set keeps its name. Ops of different
            sets never meet, also with the same tag. None: all members. Not for send() and recv().
        tag: 0 to 2**64 - 1, names the op among those in flight on this communicator. Members match their calls by tag,
            so they may start ops in any order. If an op with this tag is in flight, the new op ends with
            InvalidArgument, and the old one goes on.
        on_fault: what happens if the op is interrupted because a member dies, is removed, or leaves without having
            started the op, or because two hosts lose their link. "retry": the members that are left redo the op.
            "abort": the op ends with Aborted at all of them, also at those that start it later; then start it again at
            all members, or at none. None: as given to join(). Same at all members.
        min_world: the op ends with TooFewMembers if fewer members contribute. 0 or 1: a single member gets its own
            input back. If all members are in the background, the op ends with TooFewMembers in any case. Same at all
            members. Not for send() and recv().
        algorithm: how the bytes travel. Same at all members; `OpInfo.algorithm` says what was used. Not for barrier().
            "auto": Longhaul chooses by tensor size and link measurements.
            "oneshot": each host sends its whole tensor to every other host. At most 4096 bytes.
            "mesh": each host adds up one part of the tensor and sends that part to every other host. It takes two times
            the longest latency. It needs a group of at most 64 hosts that all reach each other; else "ring" is used.
            "auto" never takes it above 64 MiB.
            "ring": sums pass from host to host around a ring. Not for gather, scatter, all-to-all, send and receive.
        async_op: True: return a Work at once. A member has at most 1024 ops at peerd. Further ones wait in this
            process until earlier ones have ended and a call reads that, such as `Work.done` or a wait of any op. So
            with more than 1024 in flight, start them in about the same order at all members: if the first 1024 of two
            members had no op in common, both would wait for ever.
        timeout: seconds to wait; None: no limit. Not with async_op.

        Until the op has its outcome, the tensors belong to it: neither read nor write them. `Work` says how a CUDA
        stream gets the result.

        Raises, with `tensor` unchanged (docs/concepts.md, "What tensors hold if an op does not end well", says what
        holds for each kind and for `out`):
        InvalidArgument: an argument is wrong, or the members' calls differ; then the message names both.
        FailedPrecondition: a sync uses the tensor. Tensors on a GPU: a CUDA graph is being captured, or the GPU failed.
        Aborted: see on_fault; or a member cancelled the op (`Work.cancel`).
        TooFewMembers: see min_world and weight.
        Evicted: this member was removed.
        Unavailable: memory is used up, or too many ops are in flight.

        Raises also:
        DeadlineExceeded: the op goes on; wait for it with `.work` of the error.
        Unavailable: peerd stopped or died. The others may have the result. `tensor` is unchanged, with one exception:
            an op in place on a tensor from `longhaul.empty` may leave it partly overwritten, because peerd had the
            original. Join again, get the state of the others (`Comm.step` with a State, or a checkpoint), and compute
            the tensor again. A tensor that must survive the death of peerd needs `out=`, or is on a GPU.
        """
        self._member.check_joined()
        return self._collectives.all_reduce(self, tensor, op, out, options)

    @overload
    def reduce(
        self,
        tensor: Any,
        root: int = 0,
        op: str = "sum",
        *,
        root_member: int | None = None,
        out: Any = None,
        **options: Unpack[ReduceWait],
    ) -> OpInfo: ...
    @overload
    def reduce(
        self,
        tensor: Any,
        root: int = 0,
        op: str = "sum",
        *,
        root_member: int | None = None,
        out: Any = None,
        **options: Unpack[ReduceStart],
    ) -> Work: ...
    def reduce(
        self,
        tensor: Any,
        root: int = 0,
        op: str = "sum",
        *,
        root_member: int | None = None,
        out: Any = None,
        **options: Any,
    ) -> OpInfo | Work:
        """Reduce: combines the tensors of all members, element by element. One member, the root, gets the result.

        tensor, op: as in all_reduce().
        root, root_member: the root, as in broadcast().
        out: at the root: where the result goes; None: in place. Not used at other members, whose `tensor` is unchanged.
        The other arguments and the errors are those of all_reduce().

        If a member dies, the others redo the op. Raises Aborted if the root is gone, whatever on_fault says; the message
        names it.
        """
        self._member.check_joined()
        return self._collectives.reduce(self, tensor, root, op, root_member, out, options)

    @overload
    def reduce_scatter(
        self,
        tensor: Any,
        op: str = "sum",
        *,
        out: Any,
        counts: Counts | None = None,
        world: LaidOutFor = None,
        **options: Unpack[QuantizedWait],
    ) -> OpInfo: ...
    @overload
    def reduce_scatter(
        self,
        tensor: Any,
        op: str = "sum",
        *,
        out: Any,
        counts: Counts | None = None,
        world: LaidOutFor = None,
        **options: Unpack[QuantizedStart],
    ) -> Work: ...
    def reduce_scatter(
        self,
        tensor: Any,
        op: str = "sum",
        *,
        out: Any,
        counts: Counts | None = None,
        world: LaidOutFor = None,
        **options: Any,
    ) -> OpInfo | Work:
        """Reduce-scatter: combines the tensors of all members, element by element. Each member gets its part.

        tensor: this member's input: as many elements as `out` for each member that takes part, in rank order. Part i of
            the result goes to the member of rank i.
        out: where this member's part of the result goes. The same dtype as `tensor`. May be a part of `tensor`. It is
            written only if the op ends well. (In memory from longhaul.empty, if this member's own peerd dies, it may be
            partly overwritten.)
        counts: for parts of unequal lengths: the elements of each part in rank order, the same at all members. `out` is
            as long as this member's part. Lengths may be 0. Not for a list. None: all parts are equal.
        world: for how many members `tensor` and `out` are laid out: a number, or a Step or OpInfo that knows it. None:
            for those of this member's last step boundary. Tensors for fewer end the op with Aborted then, because the
            others may not have heard of the death. Members in the background count.
        Lists: `tensor` and `out` are lists of as many tensors, and each tensor is in parts.
        The other arguments and the errors are those of all_reduce().

        Raises Aborted, with `tensor` unchanged, if a member that `tensor` is laid out for is gone, whatever on_fault
        says. Then look at the new world, and start it again with tensors of the new size: after a step boundary, or with
        `world=comm.world_size`.
        """
        self._member.check_joined()
        return self._collectives.in_parts("reduce_scatter", self, tensor, out, counts, world, options, op=op)

    @overload
    def all_gather(
        self,
        tensor: Any,
        *,
        out: Any,
        counts: Counts | None = None,
        world: LaidOutFor = None,
        **options: Unpack[GatherWait],
    ) -> OpInfo: ...
    @overload
    def all_gather(
        self,
        tensor: Any,
        *,
        out: Any,
        counts: Counts | None = None,
        world: LaidOutFor = None,
        **options: Unpack[GatherStart],
    ) -> Work: ...
    def all_gather(
        self, tensor: Any, *, out: Any, counts: Counts | None = None, world: LaidOutFor = None, **options: Any
    ) -> OpInfo | Work:
        """All-gather: puts the tensors of all members side by side. All get the same bits.

        tensor: this member's part: the same number of elements and dtype at all members. Any dtype of all_reduce(), and
            float8_e4m3fn and float8_e5m2. May be a part of `out`. Or a list.
        out: where the result goes: as many elements as `tensor` for each member that takes part. For a list, a list.
        counts: for parts of unequal lengths: the elements of each part in rank order; `tensor` is as long as this
            member's part. Lengths may be 0. Not for a list. None: all parts are equal.
        world: as in reduce_scatter().
        The other arguments and the errors are those of all_reduce().

        The parts come in the order of `OpInfo.members`, without gaps. If a member dies, the others redo the op
        without its part: `out` then holds `OpInfo.world_size` parts, and what follows them means nothing. The same
        holds for members in the background. If the op raises, `out` may hold anything, and `tensor` is unchanged, also
        as a part of `out`.
        """
        self._member.check_joined()
        return self._collectives.in_parts("all_gather", self, tensor, out, counts, world, options)

    @overload
    def broadcast(
        self,
        tensor: Any,
        root: int = 0,
        *,
        root_member: int | None = None,
        out: Any = None,
        **options: Unpack[GatherWait],
    ) -> OpInfo: ...
    @overload
    def broadcast(
        self,
        tensor: Any,
        root: int = 0,
        *,
        root_member: int | None = None,
        out: Any = None,
        **options: Unpack[GatherStart],
    ) -> Work: ...
    def broadcast(
        self, tensor: Any, root: int = 0, *, root_member: int | None = None, out: Any = None, **options: Any
    ) -> OpInfo | Work:
        """Broadcast: copies the tensor of one member, the root, to all members.

        tensor: the same number of elements and dtype at all members. Only that of the root is sent. Any dtype of
            all_reduce(), and float8_e4m3fn and float8_e5m2. Or a list.
        root: the rank of the root in the present epoch. Ranks change when a member leaves; see root_member.
        root_member: the member id of the root, from `members`. None: `root` names it.
        out: where the result goes. Same dtype and shape as `tensor`, and no overlap with it. None: `tensor`.
        The other arguments and the errors are those of all_reduce().

        If a member dies, the others redo the op. Raises Aborted if the root is gone, whatever on_fault says; the message
        names it. If the op raises, the tensor of the root is unchanged. At the other members the result goes to
        `out`, or to `tensor` without one: that may hold anything then.
        """
        self._member.check_joined()
        return self._collectives.broadcast(self, tensor, root, root_member, out, options)

    @overload
    def gather(
        self,
        tensor: Any,
        root: int = 0,
        *,
        root_member: int | None = None,
        out: Any = None,
        counts: Counts | None = None,
        world: LaidOutFor = None,
        **options: Unpack[OpWait],
    ) -> OpInfo: ...
    @overload
    def gather(
        self,
        tensor: Any,
        root: int = 0,
        *,
        root_member: int | None = None,
        out: Any = None,
        counts: Counts | None = None,
        world: LaidOutFor = None,
        **options: Unpack[OpStart],
    ) -> Work: ...
    def gather(
        self,
        tensor: Any,
        root: int = 0,
        *,
        root_member: int | None = None,
        out: Any = None,
        counts: Counts | None = None,
        world: LaidOutFor = None,
        **options: Any,
    ) -> OpInfo | Work:
        """Gather: puts the tensors of all members side by side at one member, the root.

        tensor: this member's part, as in all_gather(). At the root it may be a part of `out`.
        root, root_member: the root, as in broadcast().
        out: at the root: where the result goes, as in all_gather(). Not used at other members.
        counts: for parts of unequal lengths. At the root: the elements of each part in rank order. All members give it,
            or none; at other members any sequence will do, also (). Not for a list. None: all parts are equal.
        world: as in reduce_scatter().
        The other arguments and the errors are those of all_reduce(); no "ring".

        If a member dies, the others redo the op without its part, as in all_gather(). Raises Aborted if the root is
        gone, whatever on_fault says; the message names it.
        """
        self._member.check_joined()
        return self._collectives.in_parts("gather", self, tensor, out, counts, world, options, root=(root, root_member))

    @overload
    def scatter(
        self,
        tensor: Any = None,
        root: int = 0,
        *,
        root_member: int | None = None,
        out: Any,
        counts: Counts | None = None,
        world: LaidOutFor = None,
        **options: Unpack[OpWait],
    ) -> OpInfo: ...
    @overload
    def scatter(
        self,
        tensor: Any = None,
        root: int = 0,
        *,
        root_member: int | None = None,
        out: Any,
        counts: Counts | None = None,
        world: LaidOutFor = None,
        **options: Unpack[OpStart],
    ) -> Work: ...
    def scatter(
        self,
        tensor: Any = None,
        root: int = 0,
        *,
        root_member: int | None = None,
        out: Any,
        counts: Counts | None = None,
        world: LaidOutFor = None,
        **options: Any,
    ) -> OpInfo | Work:
        """Scatter: gives each member its part of the tensor of one member, the root.

        tensor: at the root: as many elements as `out` for each member that takes part, in rank order. Any dtype of
            all_gather(). Or a list. Not used at other members.
        root, root_member: the root, as in broadcast().
        out: where this member's part goes. At the root it may be a part of `tensor`. For a list, a list.
        counts: for parts of unequal lengths, as in gather().
        world: as in reduce_scatter().
        The other arguments and the errors are those of all_reduce(); no "ring".

        Raises Aborted, with `tensor` unchanged, if the root or a member that `tensor` is laid out for is gone, whatever
        on_fault says. If the op raises, `out` may hold anything.
        """
        self._member.check_joined()
        return self._collectives.in_parts(
            "scatter", self, tensor, out, counts, world, options, root=(root, root_member)
        )

    @overload
    def all_to_all(
        self,
        tensor: Any,
        *,
        out: Any,
        counts: Counts | None = None,
        out_counts: Counts | None = None,
        world: LaidOutFor = None,
        **options: Unpack[OpWait],
    ) -> OpInfo: ...
    @overload
    def all_to_all(
        self,
        tensor: Any,
        *,
        out: Any,
        counts: Counts | None = None,
        out_counts: Counts | None = None,
        world: LaidOutFor = None,
        **options: Unpack[OpStart],
    ) -> Work: ...
    def all_to_all(
        self,
        tensor: Any,
        *,
        out: Any,
        counts: Counts | None = None,
        out_counts: Counts | None = None,
        world: LaidOutFor = None,
        **options: Any,
    ) -> OpInfo | Work:
        """All-to-all: each member gives each member a part.

        tensor: a part for each member that takes part, in rank order. Any dtype of all_gather(). Or a list.
        out: where the parts go: part i is from the member of rank i. As many elements as `tensor`. It may be `tensor`.
            For a list, a list.
        counts, out_counts: for parts of unequal lengths: the elements of each part of `tensor`, and of `out`. What a
            member gives another one is what that one gets. All members give both, or none does. Lengths may be 0. Not
            for a list.
        world: as in reduce_scatter(). `tensor` is cut into so many parts.
        The other arguments and the errors are those of all_reduce(); no "ring". At most 256 members.

        Raises Aborted, with `tensor` unchanged, if a member that `tensor` is laid out for is gone, whatever on_fault
        says. If the op raises, an `out` apart from `tensor` may hold anything. The parts from members in the background
        mean nothing.
        """
        self._member.check_joined()
        return self._collectives.all_to_all(self, tensor, out, counts, out_counts, world, options)

    @overload
    def send(
        self, tensor: Any, to: int | None = None, *, to_member: int | None = None, **options: Unpack[SendWait]
    ) -> OpInfo: ...
    @overload
    def send(
        self, tensor: Any, to: int | None = None, *, to_member: int | None = None, **options: Unpack[SendStart]
    ) -> Work: ...
    def send(
        self, tensor: Any, to: int | None = None, *, to_member: int | None = None, **options: Any
    ) -> OpInfo | Work:
        """Sends a tensor to one other member, which calls recv(). Ends when that one has the tensor.

        tensor: as many elements, and the same dtype, as at the receiver. Any dtype of all_gather(). Or a list.
        to: the rank of the receiver in the present epoch. Ranks change when a member leaves; see to_member.
        to_member: the member id of the receiver, from `members`.
        tag, on_fault, algorithm (no "ring"), async_op, timeout and the errors are those of all_reduce(). Two members may
        send to each other at the same time, also with one tag.

        Raises Aborted if the receiver is gone, whatever on_fault says; the message names it.
        """
        self._member.check_joined()
        return self._collectives.send(self, tensor, to, to_member, options)

    @overload
    def recv(
        self, tensor: Any, source: int | None = None, *, source_member: int | None = None, **options: Unpack[SendWait]
    ) -> OpInfo: ...
    @overload
    def recv(
        self, tensor: Any, source: int | None = None, *, source_member: int | None = None, **options: Unpack[SendStart]
    ) -> Work: ...
    def recv(
        self, tensor: Any, source: int | None = None, *, source_member: int | None = None, **options: Any
    ) -> OpInfo | Work:
        """Receives a tensor from one other member, which calls send().

        tensor: where the tensor goes. If the op raises, it may hold anything.
        source: the rank of the sender in the present epoch. source_member: its member id.
        The rest is as for send(); the tag is that of the sender.
        """
        self._member.check_joined()
        return self._collectives.recv(self, tensor, source, source_member, options)

    @overload
    def barrier(self, **options: Unpack[OpWait]) -> OpInfo: ...
    @overload
    def barrier(self, **options: Unpack[OpStart]) -> Work: ...
    def barrier(self, **options: Any) -> OpInfo | Work:
        """Barrier: ends when every member of the group, or of the participants, has started it.

        It admits no newcomers; step() does. The arguments and the errors are those of all_reduce().
        """
        self._member.check_joined()
        return self._collectives.barrier(self, options)

    # ------------------------------------------------------------------ numbers

    def _share_counters(self, counters: Counters) -> None:
        """For longhaul.run: stats() goes on from these numbers. Before the first op."""
        self._member.record.counters = counters

    def is_out(self) -> bool:
        """Whether this member has left, was removed, or has lost its peerd. Does not wait."""
        return self._member.is_out()

    def stats(self) -> dict[str, float]:
        """What this member has done since it joined, as a plain dict of floats. Does not wait, and never raises.

            for name, value in comm.stats().items():
                writer.add_scalar(f"longhaul/{name}", value, state.revision)  # TensorBoard

        These numbers only rise. In a function called by `longhaul.run` they go on over its rejoins.
        ops, ops_<kind>: ops that ended well, in all and by kind: "ops_all_reduce". A kind is there once it was used.
        ops_failed, ops_aborted: ops that ended with an error; those of them that ended Aborted.
        retries: how often faults interrupted these ops, the sum of `OpInfo.retries`.
        bytes_sent, bytes_received: the sums of `OpInfo.bytes_sent` and `OpInfo.bytes_received`: of tensors, by peerd.
        seconds_ops, seconds_ops_wait: the sums of `OpInfo.seconds` and `OpInfo.seconds_wait` (until all members had
            started the op). Ops that overlap count each for itself.
        steps: boundaries that this member has passed. seconds_steps: seconds that it waited there, without syncs.
        syncs, syncs_failed, seconds_syncs: syncs of a state. bytes_synced: bytes that this member received in them.
        rejoins, evictions: how often `longhaul.run` joined again, and how often the member was removed.

        These are as of now, or when the member was last in: epoch, world_size.
        """
        try:
            world = self._member.world()
        except Error:
            world = None
        return self._member.record.stats(world)

    # ------------------------------------------------------------------ memory

    def empty(self, shape: Shape, dtype: npt.DTypeLike = "float32") -> npt.NDArray[Any]:
        """Creates a numpy array in memory shared with the peerd of this communicator; see `longhaul.empty`."""
        return empty_numpy(self._client, shape, dtype)

    # ------------------------------------------------------------------ the end

    def leave(self, timeout: float | None = None) -> None:
        """Leaves the group when this member's ops in flight have ended. The others go on without it.

        timeout: seconds; None: no limit. After DeadlineExceeded the member is still leaving; call again to wait for it.
        A call after the member has left does nothing.
        """
        member = self._member
        if member.left:
            return
        deadline = _native.Deadline(timeout)
        # Without pay(): the others go on without this member, and no op of its own may keep it here.
        self._collectives.flush("leave", deadline)
        try:
            member.in_slices(_native.library().lh_leave, "leave", deadline)
        except Unavailable:
            self._syncs.settle()
            raise
        member.left = True
        member.record.left()
        self._syncs.settle()
        self._collectives.end()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.leave()
            return
        # The exception of the block counts, not an error of leave(). Leave, so that the others do not wait.
        with contextlib.suppress(Error):
            self.leave(timeout=5)

    def __repr__(self) -> str:
        if self._member.left:
            return f"<Comm run={self.run} group={self.group}: left>"
        try:
            return f"<Comm run={self.run} group={self.group}: {self.world()}>"
        except Error as problem:
            return f"<Comm run={self.run} group={self.group}: {problem}>"
