"""Shared state: tensors that are to hold the same bits at all members."""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol, Union

from . import _digest, _native
from ._arena import Client
from ._errors import DeadlineExceeded, Error, FailedPrecondition, InvalidArgument, check, number_of
from ._state_tensor import Memory, StateTensor, tensor_of


class Holder(Protocol):
    """The member that a State is in a sync of."""

    @property
    def client(self) -> Client: ...

    def settle_if_out(self) -> None:
        """Calls abandon() if that member is out."""


@dataclasses.dataclass(frozen=True)
class SyncInfo:
    """What a sync ended with."""

    revision: int  #: of the state that all members hold now
    hash: str  #: of its contents, 32 hexadecimal digits; the same at all members
    bytes: int  #: received by this member; 0: it had the state
    sources: int  #: members that sent some of them
    seconds: float  #: from the call to its end, at peerd
    resumed: bool  #: the tensors were filled from what peerd had kept of a member of this name, before
    #: This member is in the background: the state is fetched while it goes on, and
    #: nobody touches its tensors until take() has given them back. The other fields say nothing.
    background: bool = False


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far this member is with fetching what differs."""

    bytes_done: int
    bytes_total: int
    bytes_per_second: int  #: of late
    sources: int  #: members that are asked


OnProgress = Union[bool, Callable[[Progress], None]]


class Registration:
    """A state as one peerd knows it: until a tensor has moved, or the State is gone."""

    def __init__(self, client: Client, tensors: list[StateTensor], allow_unequal: frozenset[str]) -> None:
        self.client = client
        self.addresses = [tensor.address() for tensor in tensors]
        # Where those that are staged lie in the arena, by number.
        self.staged: dict[int, Memory] = {}
        table = (_native.TensorStruct * len(tensors))()
        keep = []
        for i, tensor in enumerate(tensors):
            entry = _native.TensorStruct()
            entry.name = tensor.name.encode()
            entry.dtype = _native.STATE_DTYPES[tensor.dtype]
            entry.dims = len(tensor.shape)
            shape = (ctypes.c_uint64 * max(1, len(tensor.shape)))(*tensor.shape)
            entry.shape = ctypes.cast(shape, ctypes.POINTER(ctypes.c_uint64))
            if tensor.name in allow_unequal:
                entry.flags |= _native.ALLOW_UNEQUAL
            if tensor.nbytes > 0:
                address = self.addresses[i]
                if address is None:
                    self.staged[i] = client.alloc(tensor.nbytes)
                    entry.flags |= _native.STAGED
                    address = ctypes.addressof(self.staged[i])
                entry.data = address
            keep.append((shape, entry.name))
            table[i] = entry
        client.sweep()  # for the room
        self.handle = ctypes.c_void_p()
        weakref.finalize(self, _free_state, client, self.handle).atexit = False
        check(
            _native.library().lh_state_new(client.handle, table, len(tensors), ctypes.byref(self.handle)),
            f"state of {len(tensors)} tensors",
        )

    def touch(self, index: int) -> None:
        check(_native.library().lh_state_touch(self.handle, index), "touch")

    def changes(self, index: int) -> Iterator[tuple[int, int]]:
        """Ranges of bytes of the tensor that came from others in the last sync."""
        offset = ctypes.c_uint64()
        count = ctypes.c_uint64()
        while True:
            check(
                _native.library().lh_state_next_change(self.handle, index, ctypes.byref(offset), ctypes.byref(count)),
                "changes of a state",
            )
            if count.value == 0:
                return
            yield offset.value, offset.value + count.value
            offset.value += count.value


def _free_state(client: Client, handle: ctypes.c_void_p) -> None:
    # A sync may use it, and goes on without the State and its Comm.
    client.let_go(functools.partial(_is_freed, handle))
    client.sweep()  # what was in it


def _is_freed(handle: ctypes.c_void_p) -> bool:
    status: int = _native.library().lh_state_free(handle)
    return status != _native.FAILED_PRECONDITION


class Phase(enum.Enum):
    """Whose the tensors of a State are. All changes are made by the methods named here.

    own --prepare()--> prepared --unprepare()--> own
    own, prepared, held --begin_sync()--> in sync
    in sync --end_sync()--> own; or held, if the member is in the background
    held --end_sync(), of a take--> own; or held, if it was refused
    in sync, held --abandon()--> own
    """

    OWN = "the trainer's"
    PREPARED = "the trainer's, and hashed by peerd: the next sync reads what touch() names"
    IN_SYNC = "a sync goes on, maybe one of tensors that were held"
    HELD = "to be left as they are: peerd compares what it fetches in the background with them"


class State:
    """Named tensors that are to hold the same bits at all members, and their revision.

        state = lh.State({"w": w, "m": m})
        with comm.step(state) as step:
            ...  # all members hold the same w and m here; leaving the block raises state.revision

    tensors: name to numpy array or torch tensor (also on a GPU, with gaps, of no elements), of
        (u)int8 to (u)int64, float16, bfloat16, float32, float64 or bool. All members declare the
        same names, dtypes and shapes in the same order. A sync writes into these tensors. Those
        from `longhaul.empty` are hashed and filled where they are; others are copied to memory
        shared with peerd and back, for which there has to be room.
    revision: of what they hold now. Any at the first sync of a group; from then on one more at each.
    allow_unequal: names of tensors that are not compared, such as a random generator's state. A newcomer
        that fetches gets them with the rest, once; one that has all that is compared keeps its own.
    hash: "always" reads all tensors at each sync. "on_change" reads those that were named by
        touch() since the last one: all changes have to be named, at every member.

    One sync at a time uses a State. Nobody writes to its tensors while one is on, and none begins while
    an op uses one of them: both raise FailedPrecondition where the library sees it, which it does not for
    tensors on a GPU or with gaps.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any],
        revision: int = 0,
        *,
        allow_unequal: Iterable[str] = (),
        hash: str = "always",
    ) -> None:
        if not tensors:
            raise InvalidArgument("a state has at least one tensor")
        if len(tensors) > _native.STATE_TENSORS_MAX:
            raise InvalidArgument(f"{len(tensors)} tensors; a state has at most {_native.STATE_TENSORS_MAX}")
        if hash not in _native.HASH_MODES:
            raise InvalidArgument(f"hash is {hash!r}; give one of {', '.join(_native.HASH_MODES)}")
        self._tensors = [tensor_of(name, value) for name, value in tensors.items()]
        self._numbers = {tensor.name: i for i, tensor in enumerate(self._tensors)}
        self._allow_unequal = frozenset([allow_unequal] if isinstance(allow_unequal, str) else allow_unequal)
        for name in self._allow_unequal:
            if name not in self._numbers:
                raise InvalidArgument(f"allow_unequal names {name!r}, which is no tensor of the state")
        self._mode = _native.HASH_MODES[hash]
        self._registration: Registration | None = None
        self._phase = Phase.OWN
        self.revision = revision
        # In sync, or held: for which member.
        self._member: weakref.ref[Holder] | None = None
        self._touched = set(range(len(self._tensors)))
        self._synced_hash: str | None = None

    @property
    def tensors(self) -> Mapping[str, Any]:
        """The tensors by name, in order."""
        return MappingProxyType({tensor.name: tensor.value for tensor in self._tensors})

    @property
    def allow_unequal(self) -> frozenset[str]:
        return self._allow_unequal

    @property
    def revision(self) -> int:
        """Of what the tensors hold. Raised by one at the end of a step; set by a sync, or by you.

        Setting it raises FailedPrecondition while the tensors are not yours: in a sync, and while `held`.
        """
        return self._revision

    @revision.setter
    def revision(self, value: int) -> None:
        self._check_free("setting the revision")
        self._revision = number_of(value, "revision", _native.REVISION_MAX)

    @property
    def hash(self) -> str | None:
        """What the last sync agreed on; None before the first."""
        return self._synced_hash

    @property
    def held(self) -> bool:
        """What others agreed on is fetched in the background: nobody writes to these tensors until take() has
        brought it."""
        return self._phase is Phase.HELD

    def touch(self, *names: str) -> None:
        """With hash="on_change": these tensors may have changed; without names, all of them.

        Raises FailedPrecondition in a sync, and while the state is `held`: nobody changes the tensors then.
        """
        self._check_free("touch")
        for name in names:
            if name not in self._numbers:
                raise InvalidArgument(f"touch: {name!r} is no tensor of the state")
        for number in [self._numbers[name] for name in names] or range(len(self._tensors)):
            self._touched.add(number)

    def compute_hash(self) -> str:
        """The hash of what the tensors hold now, read by this process; equal to what a sync says of the same
        contents. Needs the package xxhash."""
        return _digest.of_state(self._entries(), self._digests())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes tensors, revision and hash to a safetensors file, which appears as a whole or not at all.

        Needs the packages safetensors and xxhash. Raises FailedPrecondition for a state in a sync, OSError if
        the file cannot be written.
        """
        from . import _checkpoint

        self._check_free("save")
        _checkpoint.save(path, self._revision, self._tensors, self._entries(), self._digests())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Fills the tensors and the revision from a file that save() wrote.

        All tensors of the state have to be in it, of the same dtypes and shapes, and no others; what was
        read has to have the hash that was saved. Otherwise raises InvalidArgument with the first thing
        that is wrong, and nothing has changed. Raises OSError if the file cannot be read.
        """
        from . import _checkpoint

        self._check_free("load")
        self._check_declared()
        self.revision = _checkpoint.load(path, self._tensors, self._entries())
        self.touch()

    def __repr__(self) -> str:
        size = sum(tensor.nbytes for tensor in self._tensors)
        return f"<State revision={self._revision} tensors={len(self._tensors)} bytes={size} hash={self._synced_hash}>"

    # ------------------------------------------------------------------ for members

    def register(self, client: Client) -> Registration:
        """What the peerd of this client knows of it."""
        self._check_declared()
        addresses = [tensor.address() for tensor in self._tensors]
        registration = self._registration
        if self._phase in (Phase.IN_SYNC, Phase.HELD) and registration is not None:
            return registration
        if registration is None or registration.client is not client or registration.addresses != addresses:
            self.unprepare()
            # Gives back what the old one holds first.
            self._registration = registration = None
            self._registration = registration = Registration(client, self._tensors, self._allow_unequal)
            self.touch()
        return registration

    def prepare(self, client: Client, deadline: _native.Deadline) -> None:
        """Has all tensors staged and hashed: the next sync through this client reads what touch() names."""
        self._check_free("prepare")
        client.sweep()
        registration = self.register(client)
        for number, memory in registration.staged.items():
            self._tensors[number].read(memory)
        op = ctypes.c_void_p()
        try:
            check(_native.library().lh_state_prepare_start(registration.handle, ctypes.byref(op)), "preparing a state")
            status = _native.wait(op, deadline)
            if status == _native.DEADLINE_EXCEEDED:
                raise DeadlineExceeded("preparing a state: peerd did not hash it in time")
            check(status, "preparing a state")
        finally:
            _native.library().lh_op_free(op)
        self._touched.clear()
        self._phase = Phase.PREPARED

    def unprepare(self) -> None:
        """The next sync reads everything, as if there had been no prepare()."""
        if self._phase is Phase.PREPARED:
            self._phase = Phase.OWN

    def begin_sync(self, member: Holder, options: _native.SyncOptions) -> None:
        """Makes everything ready for a sync of this member."""
        self._check_free("sync", member)
        held = self._phase is Phase.HELD
        registration = self.register(member.client)
        mode = _native.HASH_MODES["on_change"] if self._phase is Phase.PREPARED else self._mode
        for number in self._touched:
            registration.touch(number)
        for number, memory in registration.staged.items():
            if not held and (mode == _native.HASH_MODES["always"] or number in self._touched):
                self._tensors[number].read(memory)
        options.state = registration.handle.value
        options.revision = self._revision
        options.hash = mode
        self._phase = Phase.IN_SYNC
        self._member = weakref.ref(member)

    def end_sync(self, info: _native.SyncInfoStruct, problem: Error | None) -> SyncInfo | None:
        """A sync or a take is over; of one that failed the library says what is known all the same."""
        registration = self._registration
        assert registration is not None
        if info.background:
            self._phase = Phase.HELD
            if problem is not None:
                return None
            self._touched.clear()
            return SyncInfo(self._revision, "", 0, 0, info.seconds, False, background=True)
        self._phase = Phase.OWN
        # Until all is written below: who is interrupted there does not know what the tensors hold.
        self.touch()
        if problem is not None:
            return None
        for number, memory in registration.staged.items():
            ranges = list(registration.changes(number))
            if ranges:
                self._tensors[number].write(memory, ranges)
        self._touched.clear()
        self._revision = info.revision
        self._synced_hash = f"{info.hash_high:016x}{info.hash_low:016x}"
        return SyncInfo(info.revision, self._synced_hash, info.bytes, info.sources, info.seconds, bool(info.resumed))

    def abandon(self) -> None:
        """Its member is out: what was fetched for it is nobody's, and the tensors are as they were."""
        if self._phase not in (Phase.IN_SYNC, Phase.HELD):
            return
        self._phase = Phase.OWN
        self.touch()

    def _check_free(self, what: str, asking: Holder | None = None) -> None:
        """Raises FailedPrecondition if the tensors are not the trainer's, nor held for this member."""
        if self._phase not in (Phase.IN_SYNC, Phase.HELD):
            return
        member = None if self._member is None else self._member()
        if member is None:
            self.abandon()
        else:
            member.settle_if_out()
        if self._phase is Phase.IN_SYNC:
            raise FailedPrecondition(f"{what}: a sync of this state goes on; wait for its end")
        if self._phase is Phase.HELD and asking is None:
            raise FailedPrecondition(f"{what}: the state is fetched into in the background; take() it first")
        if self._phase is Phase.HELD and asking is not member:
            raise FailedPrecondition(f"{what}: the state is fetched into for another member; that one has to take() it")

    def _check_declared(self) -> None:
        for tensor in self._tensors:
            tensor.check_declared()

    def _entries(self) -> list[_digest.Entry]:
        return [
            _digest.Entry(tensor.name, tensor.dtype, tensor.shape, tensor.nbytes, tensor.name in self._allow_unequal)
            for tensor in self._tensors
        ]

    def _digests(self) -> list[bytes]:
        return [_digest.of_tensor(tensor.host()) for tensor in self._tensors]


class Bar:
    """One line on stderr that says how far a transfer is."""

    def __init__(self) -> None:
        self._shown = False

    def __call__(self, progress: Progress) -> None:
        total = max(1, progress.bytes_total)
        done = min(progress.bytes_done, total)
        filled = 24 * done // total
        left = (total - done) / progress.bytes_per_second if progress.bytes_per_second else 0.0
        line = (
            f"state [{'#' * filled}{'.' * (24 - filled)}] {100 * done // total:3d} % of {_size(total)}, "
            f"{_size(progress.bytes_per_second)}/s from {progress.sources}, {left:.0f} s left"
        )
        # On a terminal the line is overwritten; in a log there is one at the end.
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{line:<78}")
            sys.stderr.flush()
        self._line = line
        self._shown = True

    def close(self) -> None:
        if not self._shown:
            return
        sys.stderr.write("\n" if sys.stderr.isatty() else self._line + "\n")
        self._shown = False


def _size(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
