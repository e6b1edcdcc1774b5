"""Turns: ops that all members of a group start, or none of them, whatever exception a member meets in between."""

from __future__ import annotations

import contextlib
import re
import threading
import weakref
from collections.abc import Mapping
from typing import Any, TypeAlias

from . import _native
from ._errors import Aborted, DeadlineExceeded, Error, InvalidArgument
from ._work import AnyOp, Op

# A Comm. Its module depends on this one.
Comm: TypeAlias = Any

# How peerd names what a member offers that gives up (Collectives.give_up). No exchange of this package offers the like.
_OFFER = re.compile(r"member (m\d+) offered (?:min of|all-gather,) bool x 1\b")


class Turn:
    """One member's part in ops that belong together: one for each tag, and each started by all members.

    If a member gave up such ops without a word, its next ops of these tags would meet those that the others have started
    now. So each turn ends in one of two ways:
    - close(): all ops have an outcome.
    - abandon(): what was started goes on; its inputs are whole, so it is right at the members that get its result. The
      rest is owed. A member that leaves owes nothing, and the others go on without it. If it goes on, its next op or
      boundary comes after pay(): for each op that is owed, it starts one that fits no other. peerd refuses calls that
      differ at all their members, whoever is first, so the others hear of it (given_up()), and all are at the same op
      again. Until then they wait for this member, as for any that is late.

    An op starts when the C library has it, which an exception may keep the caller from hearing of. So each op is noted in
    a list of belonging(), before the call that starts it.

    kinds: the name of the collective by tag. before: the turn that this member had before this one. Its ops have these
    tags, too, so they end before pay() starts any. Not thread-safe, but for pay().
    """

    def __init__(self, comm: Comm, kinds: Mapping[int, str], before: Turn | None = None) -> None:
        self._group = weakref.ref(comm)
        self._comm: Comm | None = comm
        self._kinds = dict(kinds)
        self._before = before
        self._begun: dict[int, list[AnyOp]] = {tag: [] for tag in kinds}
        self._owed: list[int] = []  # tags
        # What may still be in flight after abandon(). Weak, as an op in flight lives until its outcome by itself, and its
        # member must not live for us.
        self._left: list[weakref.ref[AnyOp]] = []

    @property
    def comm(self) -> Comm | None:
        """The group of the turn; None: the turn is over."""
        return self._comm

    def is_of(self, comm: Comm) -> bool:
        return self._group() is comm

    def belonging(self, tag: int) -> list[AnyOp]:
        """For the option `begun` of the op with this tag."""
        return self._begun[tag]

    def op_of(self, tag: int) -> AnyOp | None:
        """The op with this tag, if it has started."""
        return next(filter(_is_at_peerd, self._begun.get(tag, ())), None)

    def may_have_written(self, tag: int) -> bool:
        """Whether an op in place has, or may still have, its result in its tensor. One that failed has not."""
        op = self.op_of(tag)
        return op is not None and not isinstance(op.outcome, Error)

    def close(self) -> None:
        """All ops have ended, and the caller has what it wanted of them."""
        self._comm = self._before = None
        self._begun.clear()

    def abandon(self) -> None:
        """Gives up the turn, and waits for nothing. Does nothing if it is over. A call that was interrupted may be repeated."""
        comm = self._comm
        if comm is None:
            return
        started = [op for tag in self._kinds if (op := self.op_of(tag)) is not None]
        self._owed = [tag for tag in self._kinds if self.op_of(tag) is None]
        if self not in comm._collectives.owed:
            comm._collectives.owed.append(self)
        for op in started:
            op.abandon()
        self._left = [weakref.ref(op) for op in started]
        self._comm = None
        self._begun.clear()

    def pay(self) -> None:
        """Starts what is owed, once the turn before has ended. Any thread; a call that was interrupted may be repeated."""
        comm = self._group()
        if comm is None:
            return
        with paying:
            if self._before is not None and self._before.is_of(comm):
                self._before.pay()
                self._before.settle(_native.Deadline(None))
            self._before = None
            while self._owed:
                tag = self._owed[-1]
                ops = self._begun.setdefault(tag, [])
                if self.op_of(tag) is None:
                    with contextlib.suppress(Error):  # a member that is out owes the others nothing
                        comm._collectives.give_up(comm, self._kinds[tag], tag, ops)
                for op in ops:
                    op.abandon()
                self._left += [weakref.ref(op) for op in ops]
                self._owed.pop()
            self._begun.clear()

    @property
    def is_settled(self) -> bool:
        """Whether no op of the turn is in flight, and none is owed."""
        if self._comm is not None or self._owed:
            return False
        return all(op is None or op.outcome is not None for op in (each() for each in self._left))

    def settle(self, deadline: _native.Deadline) -> None:
        """After pay(): waits until no op of the turn is in flight. Its buffers and tags are free then.

        They end as soon as the others come to the turn. Raises DeadlineExceeded.
        """
        while self._left:
            op = self._left[-1]()
            if op is not None and _is_at_peerd(op) and not op.wait(deadline):
                raise DeadlineExceeded(
                    f"{op.what}: the round before was given up by an exception, and not all other members have come to it "
                    "yet; make the same call again to go on waiting"
                )
            self._left.pop()

    def end(self, deadline: _native.Deadline) -> None:
        """Before the next turn with these tags: abandon() if the turn is not over, pay() and settle()."""
        self.abandon()
        self.pay()
        self.settle(deadline)


# Held by those who pay, and may wait meanwhile. Reentrant, because Collectives.pay() holds it, too.
paying = threading.RLock()


def _is_at_peerd(op: AnyOp) -> bool:
    # An op on tensors of a GPU gets there by a thread of its own.
    return op.handle is not None and op.handle.value is not None if isinstance(op, Op) else True


def given_up(problem: Any, what: str) -> Aborted | None:
    """The error to raise in place of `problem`, if it says that another member has abandoned its turn.

    what: the exchange, and what has become of the caller's tensors.
    """
    found = _OFFER.search(str(problem)) if isinstance(problem, InvalidArgument) else None
    if found is None:
        return None
    return GivenUp(
        f"{what}: member {found[1]} gave up this round because of an exception there; the next round is as usual"
    )


class GivenUp(Aborted):
    """Another member has abandoned its turn: go on as after the end of the round, and do not start its ops again."""
