"""What a member reports: to logging.getLogger("longhaul"), and as numbers for Comm.stats().

Levels: INFO for what is as it should be (joins, changes of the group, the end), WARNING for what a fault has cost (an op
that was redone, an eviction, a rejoin). Python prints warnings to stderr unless the program configures logging.
"""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from ._errors import Aborted, Error, Evicted

if TYPE_CHECKING:
    from ._op_info import OpInfo
    from ._sync_info import SyncInfo
    from ._world import MemberInfo, World

logger = logging.getLogger("longhaul")

# Ops whose numbers are added up later, all at once. Each holds a tuple of member ids.
_FRESH_MAX = 256

_NAMES = (
    *("ops", "ops_failed", "ops_aborted", "retries", "bytes_sent", "bytes_received", "seconds_ops", "seconds_ops_wait"),
    *("steps", "seconds_steps", "syncs", "syncs_failed", "bytes_synced", "seconds_syncs"),
    *("rejoins", "evictions"),
)


class Counters:
    """Numbers that only rise. Any thread. The members that lh.run() makes one after the other share one object."""

    def __init__(self) -> None:
        # Reentrant: a finalizer on the same thread may see the end of an op.
        self._lock = threading.RLock()
        self._folding = False
        self._numbers = dict.fromkeys(_NAMES, 0.0)
        self._fresh: collections.deque[tuple[str, OpInfo]] = collections.deque()

    def op(self, kind: str, info: OpInfo) -> None:
        """An op has ended well. Called for each op, so it hardly does anything."""
        self._fresh.append((kind, info))
        if len(self._fresh) >= _FRESH_MAX:
            self._fold()

    def add(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._numbers[name] = self._numbers.get(name, 0.0) + amount

    def read(self) -> dict[str, float]:
        with self._lock:
            self._fold()
            return dict(self._numbers)

    def _fold(self) -> None:
        with self._lock:
            if self._folding:  # a finalizer interrupts this very function
                return
            self._folding = True
            try:
                fresh = [self._fresh.popleft() for _ in range(len(self._fresh))]
                for kind, count in collections.Counter(kind for kind, _ in fresh).items():
                    self.add(**{f"ops_{kind}": count})
                infos = [info for _, info in fresh]
                self.add(
                    ops=len(infos),
                    retries=sum([info.retries for info in infos]),
                    bytes_sent=sum([info.bytes_sent for info in infos]),
                    bytes_received=sum([info.bytes_received for info in infos]),
                    seconds_ops=sum([info.seconds for info in infos]),
                    seconds_ops_wait=sum([info.seconds_wait for info in infos]),
                )
            finally:
                self._folding = False


class Record:
    """What one member counts and logs. Any thread."""

    def __init__(self, run: str, group: int) -> None:
        self.counters = Counters()
        self.run, self.group = run, group
        self._where = f"run {run} group {group}"
        self._told = False  # of the eviction
        # Since begin_block(): how many ops have failed, and what the first one said.
        self.failures = 0
        self.first_failure = ""
        self._world: World | None = None
        self._members: tuple[int, ...] | None = None

    # ------------------------------------------------------------------ ops

    def op_ended(self, kind: str, what: str, info: OpInfo) -> None:
        """what: the op, for people. Empty: as kind."""
        self.counters.op(kind, info)
        if info.retries:
            logger.warning(
                "%s: a fault interrupted %s, which was redone (%d retries): %d members are in the result (%s), epoch %d",
                *(self._where, what or kind, info.retries, info.world_size, _ids(info.members), info.epoch),
            )

    def begin_block(self) -> None:
        """The block of a step begins: failures are counted anew."""
        self.failures = 0

    def op_failed(self, problem: Error) -> None:
        if self.failures == 0:
            self.first_failure = str(problem)
        self.failures += 1
        self.counters.add(ops_failed=1, ops_aborted=isinstance(problem, Aborted))
        self.failed(problem)

    def failed(self, problem: Error) -> None:
        """A call of this member ended with an error. Reports an eviction, once."""
        if not isinstance(problem, Evicted) or self._told:
            return
        self._told = True
        self.counters.add(evictions=1)
        logger.warning("%s: %s was removed: %s", self._where, self._me(), problem)

    # ------------------------------------------------------------------ syncs

    def synced(self, info: SyncInfo) -> None:
        self.counters.add(syncs=1, bytes_synced=info.bytes, seconds_syncs=info.seconds)
        if info.bytes:
            logger.info(
                "%s: %s fetched %d bytes of revision %d from %d members in %.3f s",
                *(self._where, self._me(), info.bytes, info.revision, info.sources, info.seconds),
            )

    def sync_failed(self, problem: Error) -> None:
        self.counters.add(syncs_failed=1)
        self.failed(problem)

    # ------------------------------------------------------------------ the group

    def joined(self, world: World, members: Callable[[], tuple[int, ...]]) -> None:
        self._world = world
        if logger.isEnabledFor(logging.INFO):
            self._members = _asked(members)
            logger.info(
                "%s: joined as m%d, rank %d of %d, epoch %d%s",
                *(self._where, world.member_id, world.rank, world.world_size, world.epoch),
                ", in the background" if world.background else "",
            )

    def changed(
        self, world: World, members: Callable[[], tuple[int, ...]], member: Callable[[int], MemberInfo]
    ) -> None:
        """A step begins in another epoch than the one before. Asks peerd who came and who went."""
        self._world = world
        if not logger.isEnabledFor(logging.INFO):
            self._members = None
            return
        before, now = self._members, _asked(members)
        self._members = now
        if now is None or before == now:
            return  # the first step after the join, or another order of the links
        came = [] if before is None else [each for each in now if each not in before]
        gone = [] if before is None else [each for each in before if each not in now]
        logger.info(
            "%s: epoch %d has %d members%s%s",
            *(self._where, world.epoch, world.world_size),
            *(f"; came: {_named(came, member)}" if came else "", f"; gone: {_named(gone, member)}" if gone else ""),
        )

    def left(self) -> None:
        logger.info("%s: %s has left", self._where, self._me())

    def stats(self, world: World | None) -> dict[str, float]:
        """world: as of now; None: the member is out, and the last one known counts."""
        world = self._world = world or self._world
        numbers = self.counters.read()
        if world is not None:
            numbers |= {"epoch": float(world.epoch), "world_size": float(world.world_size)}
        return numbers

    def _me(self) -> str:
        return "this member" if self._world is None else f"m{self._world.member_id}"


def _ids(members: Sequence[int]) -> str:
    shown = ", ".join(f"m{each}" for each in members[:16])
    return shown if len(members) <= 16 else f"{shown} and {len(members) - 16} more"


def _asked(members: Callable[[], tuple[int, ...]]) -> tuple[int, ...] | None:
    try:
        return members()
    except Error:  # peerd has gone, for instance; the call that needs it will say so
        return None


def _named(members: Iterable[int], member: Callable[[int], MemberInfo]) -> str:
    names = []
    for each in members:
        try:
            info = member(each)
            names.append(f"m{each} ({info.name} on {info.host})")
        except Error:
            names.append(f"m{each}")
    return ", ".join(names)
