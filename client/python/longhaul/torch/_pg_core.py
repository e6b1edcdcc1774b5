"""What a process group "longhaul" is made of: the members behind its ranks, its tags, its ops and its errors."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import os
import re
import secrets
import socket
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import _work as lh_work
from .._comm import Comm
from .._errors import Aborted, DeadlineExceeded, Error, Evicted, InvalidArgument, TooFewMembers, Unavailable
from .._join import join
from .._op_info import OpInfo
from . import _pg_work
from ._pg_options import Options
from ._pg_tensors import Plan, place_of
from ._pg_work import SLICE_S, Flight, Work, raise_again

# How long destroy_process_group() waits until this member has left. It goes on leaving afterwards.
_LEAVE_S = 10.0

_COUNTER_BITS = 20


def fingerprint(*parts: object, bits: int) -> int:
    """A number of so many bits that is the same at all ranks."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - bits)


class Joined:
    """A communicator of a fixed world, and the ids of its members in the order of their ranks.

    Several process groups may use it: that for which it was joined, and its subgroups. Any thread.
    """

    def __init__(self, comm: Comm, ids: tuple[int, ...], rank: int) -> None:
        self.comm = comm
        self.ids = ids
        self.rank = rank
        #: By place of a tensor: the ops with async_op=True that write there.
        self.written: dict[int, list[tuple[int, int, Flight]]] = {}
        #: Why ops of all groups that use it raise; None: they do not.
        self.ended: str | None = None
        self._lock = threading.Lock()
        self._leaving = False

    def leave(self, *, wait: bool) -> None:
        """Leaves, now or in the background. A second call does nothing."""
        with self._lock:
            if self._leaving:
                return
            self._leaving = True
        if wait:
            self._leave()
        else:
            threading.Thread(target=self._leave, name="longhaul-torch-leave", daemon=True).start()

    def _leave(self) -> None:
        with contextlib.suppress(Error):
            self.comm.leave(timeout=_LEAVE_S)


# By name of the group: how often this process has joined it without a store.
_joins: dict[str, int] = {}


def assemble(store: Any, rank: int, size: int, seconds: float, name: str) -> Joined:
    """Joins with all ranks of a new group: rank 0 names the run in torch's store; with $LONGHAUL_RUN, no store is used."""
    run = os.environ.get("LONGHAUL_RUN")
    group = 0
    if run:
        count = _joins[name] = _joins.get(name, 0) + 1
        group = fingerprint(name, count, bits=32)
    else:
        # The store may outlive this group and have the run of a former one: count how often this rank has been here.
        round_number = store.add(f"longhaul/rounds/{rank}", 1)
        key = f"longhaul/run/{round_number}"
        if rank == 0:
            store.set(key, f"torch-{secrets.token_hex(8)}")
        run = store.get(key).decode()
    return enter(run, group, rank, size, seconds, f"process group {name}")


def enter(run: str, group: int, rank: int, size: int, seconds: float, what: str) -> Joined:
    """Joins with `size` ranks. Raises DistBackendError."""
    width = len(str(size - 1))
    try:
        comm = join(run, group, timeout=seconds, members=size, name=f"{rank:0{width}d}", on_fault="retry")
        ids = comm._member.step_members()
        world = comm.world()
    except InvalidArgument:
        raise
    except DeadlineExceeded as problem:
        raise dist.DistBackendError(f"{what}: Timed out waiting for {size} ranks: {problem}") from None
    except Error as problem:
        raise dist.DistBackendError(f"{what}: rank {rank} of {size} cannot join: {problem}") from None
    if len(ids) != size or ids.index(world.member_id) != rank:
        comm.leave(timeout=_LEAVE_S)
        raise dist.DistBackendError(
            f"{what}: run {run} has other members already, so this member is number {ids.index(world.member_id)} of "
            f"{len(ids)} and not rank {rank} of {size}; give LONGHAUL_RUN a name of its own for each job"
        )
    return Joined(comm, ids, rank)


@dataclasses.dataclass
class Call:
    """One call of a collective.

    name: of the method of Comm. build: makes what is passed to it; its TypeError and ValueError are told to the other
    ranks. sync: wait for the end. redo: survivors of a fault go on, with on_fault="retry". partner: rank in the group
    of the other end of a send or receive. tag: None: the next one of the group.
    """

    name: str
    build: Callable[[], Plan]
    sync: bool = False
    seconds: float | None = None
    redo: bool = False
    partner: int | None = None
    tag: int | None = None


class Core:
    """The state of one process group. Any thread. It lives as long as the group or one of its ops."""

    def __init__(self, name: str, seconds: float, options: Options, first_size: int = 0) -> None:
        self.name = name
        self.seconds = seconds
        self.options = options
        self.joined: Joined | None = None
        self.ids: tuple[int, ...] = ()
        self.rank = 0
        #: What the last op did that ended well.
        self.info: OpInfo | None = None
        #: The last error of an op.
        self.error: Exception | None = None
        #: The error of `group.check()`.
        self.deferred: Exception | None = None
        # Why no further op can be started; None: none has been in the way.
        self._ended: str | None = "process group is not configured yet; call reconfigure() first"
        self._more: dict[str, Any] = {}
        self._hash = 0
        self._counter = itertools.count()
        self._partners: dict[tuple[int, int, int], itertools.count[int]] = {}
        self._owns = False
        self._first_size = first_size
        self._used: set[object] = set()
        #: What stands for this group in reconfigure().
        self.handle = f"longhaul:{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"
        self._flights: set[Flight] = set()
        self._lock = threading.RLock()

    # ------------------------------------------------------------------ members

    def use(self, joined: Joined, ranks: Sequence[int] | None, name: str | None = None) -> None:
        """Begins with these members. ranks: those of the group within the world; None: all, and the group owns them."""
        self.joined = joined
        self._owns = ranks is None
        self.name = self.name if name is None else name
        self.ids = joined.ids if ranks is None else tuple(joined.ids[rank] for rank in ranks)
        self.rank = self.ids.index(joined.ids[joined.rank])
        self._more = {} if ranks is None else {"participants": self.ids}
        self._hash = fingerprint(self.name, bits=64 - _COUNTER_BITS) << _COUNTER_BITS
        self._counter = itertools.count()
        self._partners = {}
        self._ended = None
        self.error = self.deferred = self.info = None

    @property
    def size(self) -> int:
        return len(self.ids) or self._first_size

    def reconfigure(self, uuid: object, handles: Iterable[str], seconds: float) -> None:
        """Goes on with the processes of these handles. Ops in flight end with an error. Raises DistBackendError."""
        ordered = list(handles) if isinstance(handles, (list, tuple)) else sorted(handles)
        if self.handle not in ordered or len(set(ordered)) != len(ordered):
            raise InvalidArgument(
                f"reconfigure: handles are {ordered}; give each process once, this one ({self.handle}) among them"
            )
        if uuid in self._used:
            raise InvalidArgument(f"reconfigure: uuid {uuid!r} was already used; give a new one each time")
        self._used.add(uuid)
        text = f"process group {self.name} was reconfigured"
        old, self.joined = self.joined, None
        if old is not None:
            old.ended = text
        self._ended = text
        self.end_ops(lambda what: dist.DistBackendError(f"{what}: {text}"))
        if old is not None and self._owns:
            old.leave(wait=False)
        self._ended = f"process group {self.name} has no members, because reconfigure() failed; call it with a new uuid"
        digest = hashlib.blake2b(repr((uuid, ordered)).encode(), digest_size=12).hexdigest()
        rank, size, what = ordered.index(self.handle), len(ordered), f"reconfigure of process group {self.name}"
        try:
            joined = enter(f"torch-{digest}", 0, rank, size, seconds, what)
        except dist.DistBackendError as problem:
            here, _, left = str(problem).partition(" have come:")[2].partition(";")
            # A rank that gave up at its own time-out has come, too.
            come = re.findall(r"(\d+) at ", here) + re.findall(r"(\d+) at [^,;]* \(it gave up\)", left)
            missing = [handle for i, handle in enumerate(ordered) if i not in {rank, *map(int, come)}]
            if "Timed out waiting" not in str(problem) or not missing:
                raise
            raise dist.DistBackendError(f"{problem}; missing: {', '.join(missing)}") from None
        self.use(joined, None)

    def leave(self, *, wait: bool) -> None:
        """The group is given up by this rank."""
        joined = self.joined
        self.stop(f"process group {self.name} was destroyed")
        if joined is not None and self._owns:
            joined.leave(wait=wait)

    def abort(self) -> None:
        """Ends all ops of this rank at once, and leaves in the background."""
        text = f"process group {self.name} was aborted"
        self.stop(text)
        self.end_ops(lambda what: dist.DistBackendError(f"{what}: {text}"), leave=self._owns)

    def end_ops(self, problem: Callable[[str], Exception], *, leave: bool = False) -> None:
        """Ends the ops of this rank in flight with problem(what). In the background they are cancelled."""
        with self._lock:
            flights = list(self._flights)
        for flight in flights:
            flight.end(lambda flight=flight: self._failed(problem(flight.what)))  # type: ignore[misc]
        joined = self.joined if leave else None
        if flights or joined is not None:
            threading.Thread(target=_give_up, args=(flights, joined), name="longhaul-torch-leave", daemon=True).start()

    def stop(self, why: str) -> None:
        """No further op starts."""
        if self._ended is None:
            self._ended = why

    # ------------------------------------------------------------------ ops

    def _next_tag(self) -> int:
        return self._hash | (next(self._counter) & ((1 << _COUNTER_BITS) - 1))

    def tag_between(self, source: int, to: int, tag: int) -> int:
        """The tag of the next message of one rank to another one, with a tag of torch.

        Only these two ranks call, so the counter is their own.
        """
        key = (source, to, tag)
        counter = self._partners.get(key)
        if counter is None:
            counter = self._partners.setdefault(key, itertools.count())
        between = fingerprint(self.name, "between", key, bits=64 - _COUNTER_BITS) << _COUNTER_BITS
        return between | (next(counter) & ((1 << _COUNTER_BITS) - 1))

    def run(self, call: Call) -> Work:
        """Starts an op, and waits for it if it is to be so. Raises its error then; wrong arguments always raise."""
        joined, more = self._begin(call)
        if joined is None:
            return Work(None, call.build().result)
        try:
            plan = call.build()
        except (TypeError, ValueError) as problem:
            self._refuse(joined, call, more, problem)
            raise
        for tensor in (*plan.reads, *plan.writes) if joined.written else ():
            _wait_for_writers(joined, tensor)
        method = getattr(joined.comm, plan.method or call.name)
        what = f"{call.name} of process group {self.name}"
        seconds = self.seconds if call.seconds is None else call.seconds
        try:
            if call.sync:
                info = method(*plan.arguments, **plan.options, **more, timeout=min(SLICE_S, seconds))
                for each in plan.after:
                    each()
                self.info = info
                return Work(None, plan.result)
            work = method(*plan.arguments, **plan.options, **more, async_op=True)
        except DeadlineExceeded as late:
            assert isinstance(late.work, lh_work.Work)
            work = late.work
        except InvalidArgument as problem:
            if not problem._from_library:
                raise
            self.tell(self.failure(joined, what, problem))
            return Work(None, plan.result)
        except Error as problem:
            self.tell(self.failure(joined, what, problem))
            return Work(None, plan.result)
        flight = self._fly(joined, what, work, plan, seconds)
        if call.sync:
            flight.wait()
            return Work(None, plan.result)
        return Work(flight, plan.result, -1 if call.partner is None else call.partner)

    def _begin(self, call: Call) -> tuple[Joined | None, dict[str, Any]]:
        """Gives the op its place in the order. None: errors are deferred, and the op does nothing."""
        joined = self.joined
        ended = self._ended if joined is None else self._ended or joined.ended
        if ended is not None or joined is None:
            self.tell(dist.DistBackendError(f"{call.name}: {ended}"))
            return None, {}
        if self.deferred is not None:
            return None, {}
        more = dict(self._more)
        if call.partner is None:
            if not (call.redo and self.options.on_fault == "retry"):
                more["min_world"] = len(self.ids)
        else:
            more.clear()
        more["tag"] = self._next_tag() if call.tag is None else call.tag
        return joined, more

    def _refuse(self, joined: Joined, call: Call, more: dict[str, Any], why: Exception) -> None:
        """A call was refused here. The other ranks have made it, so they hear of it instead of waiting."""
        partner = None if call.partner is None else (None, self.ids[call.partner])
        with contextlib.suppress(Error, TypeError):
            joined.comm._collectives.refuse(call.name, more, partner, why)

    def _fly(self, joined: Joined, what: str, work: lh_work.Work, plan: Plan, seconds: float) -> Flight:
        flight = Flight(self, joined, what, work, plan.after, plan.result, seconds)
        for tensor in plan.writes:
            key, begin, end = place_of(tensor)
            joined.written.setdefault(key, []).append((begin, end, flight))
            flight.writes.append(key)
        with self._lock:
            self._flights.add(flight)
        if self._ended is not None or joined.ended is not None:
            ended = f"{what}: {self._ended or joined.ended}"
            flight.end(lambda: self._failed(dist.DistBackendError(ended)))  # abort() may have missed it
        _pg_work.service.start()
        return flight

    def landed(self, flight: Flight, info: OpInfo | None) -> None:
        if info is not None:
            self.info = info
        with self._lock:
            self._flights.discard(flight)
        written = flight.joined.written
        for key in flight.writes:
            left = [each for each in written.get(key, ()) if each[2] is not flight]
            if left:
                written[key] = left
            else:
                written.pop(key, None)

    # ------------------------------------------------------------------ errors

    def tell(self, problem: Exception) -> None:
        """Raises the error, or keeps the first one for check()."""
        if self.options.errors == "defer":
            self.deferred = self.deferred or problem
        else:
            raise_again(problem)

    def _failed(self, problem: Exception) -> Exception:
        self.error = problem
        return problem

    def failure(self, joined: Joined, what: str, problem: Error) -> Exception:
        """The error for a program of torch. It looks for the words "Connection closed by peer" and "Timed out waiting"."""
        if isinstance(problem, (Unavailable, Evicted)):
            text = f"{what}: Connection closed by peer: {problem}"
            if joined.comm.is_out():
                self._stop_of(joined, f"process group {self.name} has ended: Connection closed by peer: {problem}")
            return self._failed(dist.DistBackendError(text))
        if not isinstance(problem, (Aborted, TooFewMembers)):
            return self._failed(dist.DistBackendError(f"{what}: {problem}"))
        gone = self._gone(joined)
        if gone:
            text = f"Connection closed by peer: {gone}"
            if self.options.on_fault != "retry":
                self._stop_of(joined, f"process group {self.name} has ended: {text}")
            return self._failed(dist.DistBackendError(f"{what}: {text}; {problem}"))
        # Another rank has cancelled it, and the order of ops is lost.
        text = f"another rank gave up an op, after its time-out or by abort(): {problem}"
        self._stop_of(joined, f"process group {self.name} has ended: {text}")
        return self._failed(dist.DistBackendError(f"{what}: {text}"))

    def timed_out(self, joined: Joined, what: str, seconds: float) -> Exception:
        text = f"Timed out waiting {seconds:g} s for {what}"
        self._stop_of(joined, f"process group {self.name} has ended: {text}")
        return self._failed(dist.DistBackendError(f"{text}; the op was cancelled, and the group has ended"))

    def _stop_of(self, joined: Joined, why: str) -> None:
        """stop(), unless the group has other members by now."""
        if self.joined is joined:
            self.stop(why)

    def _gone(self, joined: Joined) -> str:
        """The ranks of the group that are no members any more, as a text. Asks peerd."""
        texts = []
        try:
            present = set(joined.comm.members)
            for rank, number in enumerate(self.ids):
                if number not in present:
                    texts.append(f"rank {rank} ({_described(joined.comm, number)}) is gone")
        except Error as problem:
            texts.append(str(problem))
        return ", ".join(texts)


def _described(comm: Comm, number: int) -> str:
    with contextlib.suppress(Error):
        member = comm.member(number)
        return f"member m{number} named {member.name}, host {member.host}"
    return f"member m{number}"


def _wait_for_writers(joined: Joined, tensor: torch.Tensor) -> None:
    """Waits until no op in flight writes to the tensor. Its own error does not matter here."""
    key, begin, end = place_of(tensor)
    for other_begin, other_end, flight in list(joined.written.get(key, ())):
        if begin < other_end and other_begin < end:
            flight.join()


def _give_up(flights: Sequence[Flight], joined: Joined | None) -> None:
    for flight in flights:
        with contextlib.suppress(Error):
            flight.work.cancel()
    if joined is not None:
        joined.leave(wait=True)


def release(core: Core) -> None:
    """For a finalizer of the group: a group that is dropped leaves."""
    _pg_work.service.release()
    core.leave(wait=False)


def held(group: object, core: Core) -> weakref.finalize[Any, Any]:
    """Has the group counted among those of the process until it is destroyed or dropped."""
    _pg_work.service.hold()
    finalizer = weakref.finalize(group, release, core)
    finalizer.atexit = False
    return finalizer
