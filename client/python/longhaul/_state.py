"""Shared state: named tensors that all members of a group keep equal, bit by bit."""

from __future__ import annotations

import contextlib
import ctypes
import enum
import functools
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from . import _digest, _native
from ._arena import Client
from ._errors import DeadlineExceeded, Error, FailedPrecondition, InvalidArgument, check, number_of
from ._state_tensor import Memory, StateTensor, tensor_of
from ._sync_info import SyncInfo
from ._waiting import Waiting


class Holder(Protocol):
    """The member whose sync uses a State."""

    @property
    def client(self) -> Client: ...

    @property
    def member_id(self) -> int:
        """Unique in the run. Raises Evicted if the member was removed."""

    def settle_if_out(self) -> None:
        """Calls State.abandon() if the member has left or was removed."""


class Registration:
    """A State as it is registered with one peerd. A new one is made when a tensor has moved to other memory."""

    def __init__(self, client: Client, tensors: list[StateTensor], allow_unequal: frozenset[str]) -> None:
        self.client = client
        self.addresses = [tensor.address() for tensor in tensors]
        # By number of the tensor: the copy in shared memory, for tensors on a GPU or with gaps.
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
                    tensor.check_writable()
                    self.staged[i] = client.alloc(tensor.nbytes)
                    tensor.pin(client, self.staged[i])
                    entry.flags |= _native.STAGED
                    address = ctypes.addressof(self.staged[i])
                entry.data = address
            keep.append((shape, entry.name))
            table[i] = entry
        client.sweep()  # frees memory that the new registration may need
        self.handle = ctypes.c_void_p()
        weakref.finalize(self, _free_state, client, self.handle).atexit = False
        check(
            _native.library().lh_state_new(client.handle, table, len(tensors), ctypes.byref(self.handle)),
            f"state of {len(tensors)} tensors",
        )

    def touch(self, index: int) -> None:
        """Says that the tensor may have changed since the last sync."""
        check(_native.library().lh_state_touch(self.handle, index), "touch")

    def changes(self, index: int) -> Iterator[tuple[int, int]]:
        """The ranges (begin, end), in bytes, of the tensor that the last sync received from other members."""
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
    # A sync may still use the state, even if State and Comm are gone. Then a later sweep frees it.
    client.let_go(functools.partial(_is_freed, handle))
    client.sweep()  # frees the memory that the state used


def _is_freed(handle: ctypes.c_void_p) -> bool:
    status: int = _native.library().lh_state_free(handle)
    return status != _native.FAILED_PRECONDITION


class Phase(enum.Enum):
    """Who may use the tensors of a State. Only the methods named here change the phase.

    own --prepare()--> prepared --unprepare()--> own
    own, prepared, held --begin_sync()--> in sync --unbegin_sync()--> as before
    in sync --end_sync()--> own; or held, if the member is in the background
    held --end_sync(), after a take--> own; or held, if the take was refused
    in sync, held --abandon()--> own
    """

    OWN = "the trainer may use the tensors"
    PREPARED = "as OWN, and peerd has hashed the tensors: the next sync reads only those named by touch()"
    IN_SYNC = "a sync uses the tensors; before it they may have been HELD"
    HELD = "nobody may write: peerd compares the tensors with what it fetches in the background"


class State:
    """Named tensors that all members of a group keep equal, and the revision of their contents.

        state = lh.State({"w": w, "m": m})
        with comm.step(state) as step:
            ...  # w and m are equal at all members here; leaving the block raises state.revision by one

    tensors: a mapping from name to numpy array or torch tensor. dtype: int8 to int64, uint8 to uint64, float16,
        bfloat16, float32, float64 or bool. Any shape, also no elements; contiguous or not; torch tensors also on a GPU.
        All members declare the same names, dtypes and shapes in the same order. A sync writes into these tensors.
        Tensors from `longhaul.empty` are used in place. Other tensors are copied to memory shared with peerd and back,
        which takes as much memory again.
    revision: the number of what the tensors hold now. Any number at the first sync of a group. At each later sync at
        most one more per step boundary than at the sync before; the highest wins, and lower ones are brought to it.
        `Comm.step` counts for you.
    allow_unequal: names of tensors that members need not have equal, such as the state of a random generator. A
        newcomer that fetches the state gets them once, with the other tensors; in the background not before its input
        counts. A newcomer whose other tensors are equal already keeps its own.
    hash: "always": each sync reads and hashes all tensors. "on_change": each sync reads only the tensors named by
        touch() since the last sync; then every member must name every change.

    Raises InvalidArgument if a tensor, a name or an option cannot be used, TypeError for what is not a tensor.

    One sync at a time uses a State. During a sync nobody may write to the tensors. A sync and an op cannot use the same
    tensor at the same time: the later one raises FailedPrecondition. The library cannot see this for tensors that are
    on a GPU or not contiguous.
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
            raise InvalidArgument("a state needs at least one tensor")
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
        self._changing = False  # inside the block of a step
        self.revision = revision
        # In the phases IN_SYNC and HELD: the member whose sync it is.
        self._member: weakref.ref[Holder] | None = None
        self._before_sync = Phase.OWN
        self._touched = set(range(len(self._tensors)))
        self._synced_hash: str | None = None

    @property
    def tensors(self) -> Mapping[str, Any]:
        """The tensors by name, in the order in which they were declared."""
        return MappingProxyType({tensor.name: tensor.value for tensor in self._tensors})

    @property
    def allow_unequal(self) -> frozenset[str]:
        """The names of the tensors that members need not have equal."""
        return self._allow_unequal

    @property
    def revision(self) -> int:
        """The number of what the tensors hold now.

        `Comm.step` raises it by one at the end of its block, and a sync sets it. You may set it, too, outside a sync:
        raises FailedPrecondition during a sync and while `held`, InvalidArgument unless it is from 0 to 2**63.
        """
        return self._revision

    @revision.setter
    def revision(self, value: int) -> None:
        self._check_free("setting the revision")
        self._revision = number_of(value, "revision", _native.REVISION_MAX)

    @property
    def hash(self) -> str | None:
        """The hash of the state that the last sync agreed on; None before the first sync."""
        return self._synced_hash

    @property
    def held(self) -> bool:
        """True while peerd fetches the state in the background. Do not write to the tensors then (`Step.take`)."""
        return self._phase is Phase.HELD

    def touch(self, *names: str) -> None:
        """With hash="on_change", or after join(state=...): says that these tensors may have changed. No names: all.

        Raises InvalidArgument for an unknown name. Raises FailedPrecondition during a sync and while `held`, because
        nobody may change the tensors then.
        """
        self._check_free("touch")
        for name in names:
            if name not in self._numbers:
                raise InvalidArgument(f"touch: {name!r} is no tensor of the state")
        self._touched.update([self._numbers[name] for name in names] or range(len(self._tensors)))

    def compute_hash(self) -> str:
        """Reads the tensors and returns the hash of what they hold now, 32 hexadecimal digits.

        A sync reports the same hash for the same contents. Needs the package xxhash.
        """
        self._look_again()
        return _digest.of_state(self._entries(), self._digests())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes tensors, revision and hash to a safetensors file. The file appears complete or not at all.

        Until then it lies in a directory beside it, `.<name>.unfinished-...`. What a process that died has left there is
        removed by the next save() to the same path. Threads, processes and hosts may save to one path: the last one
        counts. The mode of the file follows the umask.

        Call it between two steps, after the block of `with comm.step(state)`: there revision and contents belong
        together. Inside the block save() is refused: the tensors change there, and the revision only rises at the end.
        No op on the tensors may be in flight.

        Needs the packages safetensors and xxhash. Raises FailedPrecondition inside the block, during a sync and while
        `held`, OSError if the file cannot be written, InvalidArgument if a tensor was converted or resized since the
        State was made.
        """
        from . import _checkpoint

        self._check_outside("save")
        self._look_again()
        _checkpoint.save(path, self._revision, self._tensors, self._entries(), self._digests())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Fills the tensors and the revision from a file that save() wrote.

        The file must hold exactly the tensors of this state, with the same dtypes and shapes, and its checksum must be
        right. Otherwise, or if a tensor cannot be written, raises InvalidArgument, which names the first thing that is
        wrong; the state is unchanged then.
        Raises OSError if the file cannot be read, FailedPrecondition during a sync and while `held`. Needs the packages
        safetensors and xxhash.
        """
        from . import _checkpoint

        self._check_free("load")
        self._look_again()
        self._check_writable()
        self.revision = _checkpoint.load(path, self._tensors, self._entries())
        self.touch()
        self._written(None)

    def __repr__(self) -> str:
        size = sum(tensor.nbytes for tensor in self._tensors)
        return f"<State revision={self._revision} tensors={len(self._tensors)} bytes={size} hash={self._synced_hash}>"

    # ------------------------------------------------------------------ for subclasses

    def _refresh(self) -> Iterable[int]:
        """Called before the tensors are read: a subclass looks its tensors up again, and fills those that it owns.

        Returns the numbers of the tensors that it has changed. May raise InvalidArgument; then nothing is read.
        """
        return ()

    def _written(self, info: SyncInfo | None) -> None:
        """Called after tensors were written from elsewhere. info: the sync that wrote them; None: it was load()."""

    def _look_again(self) -> None:
        """Calls _refresh(), unless the tensors are in a sync or held: then nobody may write to them."""
        if self._phase in (Phase.OWN, Phase.PREPARED):
            self._touched.update(self._refresh())

    # ------------------------------------------------------------------ for members

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """The block of a step: the trainer changes the tensors, and the revision rises after it."""
        self._changing = True
        try:
            yield
        finally:
            self._changing = False

    def register(self, client: Client) -> Registration:
        """The registration of this state with the peerd of `client`. Makes a new one if a tensor has moved."""
        self._look_again()
        addresses = [tensor.place() for tensor in self._tensors]
        registration = self._registration
        if self._phase in (Phase.IN_SYNC, Phase.HELD) and registration is not None:
            return registration
        if registration is None or registration.client is not client or registration.addresses != addresses:
            self.unprepare()
            # Drop the old registration first, so that its memory is free for the new one.
            self._registration = registration = None
            self._registration = registration = Registration(client, self._tensors, self._allow_unequal)
            self.touch()
        return registration

    def prepare(self, client: Client, deadline: _native.Deadline) -> None:
        """Copies and hashes all tensors ahead of a sync. The next sync through this client reads only touched ones."""
        self._check_free("prepare")
        client.sweep()
        registration = self.register(client)
        for number, memory in registration.staged.items():
            self._tensors[number].read(memory)
        op = ctypes.c_void_p()
        try:
            check(_native.library().lh_state_prepare_start(registration.handle, ctypes.byref(op)), "preparing a state")
            waiting = Waiting("preparing a state")
            status = _native.wait(op, deadline, lambda: waiting.look(lambda: "peerd hashes it"))
            if status == _native.DEADLINE_EXCEEDED:
                raise DeadlineExceeded("preparing a state: peerd has not hashed it in time; give a longer timeout")
            check(status, "preparing a state")
        finally:
            _native.library().lh_op_free(op)
        self._touched.clear()
        self._phase = Phase.PREPARED

    def unprepare(self) -> None:
        """Takes prepare() back: the next sync reads all tensors."""
        if self._phase is Phase.PREPARED:
            self._phase = Phase.OWN

    def begin_sync(self, member: Holder, options: _native.SyncOptions) -> None:
        """Copies what must be copied before a sync of `member`, and fills `options`. The phase becomes IN_SYNC."""
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
        self._member, self._before_sync = weakref.ref(member), self._phase
        self._phase = Phase.IN_SYNC

    def unbegin_sync(self, member: Holder) -> None:
        """Takes begin_sync() back, however far it came: the sync was not asked for after all."""
        if self._phase is Phase.IN_SYNC and self._member is not None and self._member() is member:
            self._phase = self._before_sync

    def end_sync(self, info: _native.SyncInfoStruct, problem: Error | None) -> SyncInfo | None:
        """Ends a sync or a take. `info` is valid also if it failed. Returns what the sync did; None: it failed."""
        registration = self._registration
        assert registration is not None
        if info.background:
            self._phase = Phase.HELD
            if problem is not None:
                return None
            self._touched.clear()
            return SyncInfo(self._revision, "", 0, 0, info.seconds, False, background=True)
        self._phase = Phase.OWN
        # All tensors count as changed until they are written below: an interrupt may come in the middle.
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
        result = SyncInfo(info.revision, self._synced_hash, info.bytes, info.sources, info.seconds, bool(info.resumed))
        self._written(result)
        return result

    def abandon(self) -> None:
        """The member has left or was removed during a sync: the tensors are the trainer's again, and unchanged."""
        if self._phase not in (Phase.IN_SYNC, Phase.HELD):
            return
        self._phase = Phase.OWN
        self.touch()

    def _check_free(self, what: str, asking: Holder | None = None) -> None:
        """Raises FailedPrecondition during a sync and while held, except for the member that it is held for."""
        if self._phase not in (Phase.IN_SYNC, Phase.HELD):
            return
        member = None if self._member is None else self._member()
        if member is None:
            self.abandon()
        else:
            member.settle_if_out()
        if self._phase is Phase.IN_SYNC:
            raise FailedPrecondition(f"{what}: a sync of this state goes on; wait for its end first")
        if self._phase is Phase.HELD and asking is None:
            raise FailedPrecondition(
                f"{what}: peerd fetches this state in the background; call take() until it is True first"
            )
        if self._phase is Phase.HELD and asking is not member:
            raise FailedPrecondition(
                f"{what}: peerd fetches this state for another member; that member has to call take() first"
            )

    def _check_outside(self, what: str) -> None:
        """Raises FailedPrecondition during a sync, while held, and inside the block of a step."""
        self._check_free(what)
        if self._changing:
            raise FailedPrecondition(
                f"{what}: this is inside the block of `with comm.step(state)`, where the tensors change and the revision "
                f"is still {self._revision}; {what} after the block"
            )

    def _check_declared(self) -> None:
        for tensor in self._tensors:
            tensor.check_declared()

    def _check_writable(self) -> None:
        """Before the tensors are written from elsewhere: raises InvalidArgument if one of them cannot be."""
        self._check_declared()
        for tensor in self._tensors:
            tensor.check_writable()

    def _entries(self) -> list[_digest.Entry]:
        return [
            _digest.Entry(tensor.name, tensor.dtype, tensor.shape, tensor.nbytes, tensor.name in self._allow_unequal)
            for tensor in self._tensors
        ]

    def _digests(self) -> list[bytes]:
        return [_digest.of_tensor(tensor.host()) for tensor in self._tensors]
