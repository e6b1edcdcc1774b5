"""Turns: ops that all members of a group start, or none of them, whatever exception a member meets in between."""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from . import _native
from ._errors import Aborted, DeadlineExceeded, Error, InvalidArgument
from ._work import AnyOp, Op

if TYPE_CHECKING:
    from ._comm import Comm

# How peerd names what a member offers that gives up (Collectives.give_up). No exchange of this package offers the like.
_OFFER = re.compile(r"member (m\d+) offered (?:min of|all-gather,) bool x 1\b")


class Turn:
    """One member's part in ops that belong together: one for each tag, and each started by all members.

    If a member gave up such ops without a word, its next ops of these tags would meet those that the others have started
    now. So each ends in one of two ways:
    - close(): all have an outcome.
    - abandon(): for each op that this member has not started, it starts one that fits no other. peerd refuses calls that
      differ at all their members, whoever is first, so the others hear of it (given_up()) and all are at the same op
      again. What was started goes on: its inputs are whole, so it is right at the members that get its result.

    An op starts when the C library has it, which an exception may keep the caller from hearing of. So each op is noted in
    a list of belonging(), before the call that starts it.

    kinds: the name of the collective by tag. before: the turn that this member had before this one. Its ops have these
    tags, too, so they end before abandon() starts any. Not thread-safe.
    """

    def __init__(self, comm: Comm, kinds: Mapping[int, str], before: Turn | None = None) -> None:
        self._group = weakref.ref(comm)
        self._comm: Comm | None = comm
        self._kinds = dict(kinds)
        self._before = before
        self._begun: dict[int, list[AnyOp]] = {tag: [] for tag in kinds}
        self._left: list[weakref.ref[AnyOp]] = []  # what may still be in flight after abandon()

    @property
    def comm(self) -> Comm | None:
        """The group of the turn; None: the turn is over."""
        return self._comm

    def is_of(self, comm: Comm) -> bool:
        return self._group() is comm

    def belonging(self, tag: int) -> list[AnyOp]:
        """For the option `begun` of the op with this tag."""
        return self._begun[tag]

    def has_started(self, tag: int) -> bool:
        return any(map(_is_at_peerd, self._begun[tag]))

    def may_have_written(self, tag: int) -> bool:
        """Whether an op in place has, or may still have, its result in its tensor. One that failed has not."""
        return any(_is_at_peerd(op) and not isinstance(op.outcome, Error) for op in self._begun[tag])

    def close(self) -> None:
        """All ops have ended, and the caller has what it wanted of them."""
        self._comm = self._before = None
        self._begun.clear()

    def abandon(self) -> None:
        """Gives up the turn. Does nothing if it is over. Waits for the turn before this one only.

        If an exception interrupts it, the next call goes on.
        """
        comm = self._comm
        if comm is None:
            return
        if self._before is not None and self._before.is_of(comm):
            self._before.abandon()
            self._before.settle(_native.Deadline(None))
        for tag, kind in self._kinds.items():
            if not self.has_started(tag):
                with contextlib.suppress(Error):  # a member that is out owes the others nothing
                    comm._collectives.give_up(comm, kind, tag, self._begun[tag])
        # By weak references: an op in flight lives until its outcome, and its member must not live for us.
        self._left = [weakref.ref(op) for ops in self._begun.values() for op in ops]
        for ops in self._begun.values():
            for op in ops:
                op.abandon()
        self.close()

    @property
    def is_settled(self) -> bool:
        """Whether no op of the turn is in flight."""
        return self._comm is None and all(
            op is None or op.outcome is not None for op in (each() for each in self._left)
        )

    def settle(self, deadline: _native.Deadline) -> None:
        """Waits until no op of an abandoned turn is in flight: their buffers and tags are free then.

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
