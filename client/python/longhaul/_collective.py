"""Collectives of one member: checks the arguments, starts the op, and waits for it unless async_op is set."""

from __future__ import annotations

import array
import ctypes
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Union

from . import _native
from ._arena import Client
from ._device_op import DeviceOp, Staged, Starter
from ._errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, code_of, number_of
from ._member import Member
from ._op_info import OpInfo, op_info
from ._quant import set_quantize
from ._tensor import Elements, elements_of, numbers, plain_tensors
from ._work import Op, Work, abandon, result_of

Counts = Sequence[int]

_MEMBER_ID_MAX = (1 << 64) - 1
_LENGTH_MAX = (1 << 48) - 1


# Where tensors are: their elements, or their addresses. An address of 0 belongs to a tensor without elements.
_Places = Union[list[Elements], "array.array[int]", None]


def _addresses(places: _Places) -> Iterable[int]:
    if places is None:
        return ()
    if isinstance(places, array.array):
        return filter(None, places)
    return [each.address for each in places if each.count]


class _Of(NamedTuple):
    """What an op is of: a text for errors, what has to stay alive meanwhile, and what the op reads and writes.

    staged: the tensors on a GPU.
    """

    text: str
    owners: tuple[Any, ...]
    reads: _Places = None
    writes: _Places = None
    staged: Staged | None = None


#: Gives the sources and targets that are on a GPU their addresses.
_Stage = Callable[[list[Elements] | None, list[Elements] | None], Staged | None]


# ------------------------------------------------------------------ options


def _set_participants(options: Any, value: Iterable[int] | None) -> None:
    if value is None:
        return
    ids = [number_of(each, "a member id of participants", _MEMBER_ID_MAX) for each in value]
    if not ids:
        raise InvalidArgument("participants is empty; give the ids of the members that take part, or None for all")
    options.participants = (ctypes.c_uint64 * len(ids))(*ids)
    options.participant_count = len(ids)


def _set_weight(options: Any, value: float | None) -> None:
    if value is None:
        return
    try:
        options.weight = ctypes.pointer(ctypes.c_double(value))
    except TypeError:
        raise InvalidArgument(f"weight is {value!r}; give a number, 0 or more, or None") from None


def _set_order(options: Any, value: str) -> None:
    options.order = code_of(_native.ORDERS, value, "order")


def _set_min_world(options: Any, value: int) -> None:
    options.min_world = number_of(value, "min_world", (1 << 32) - 1)


def _set_algorithm(options: Any, value: str) -> None:
    options.algorithm = code_of(_native.ALGORITHMS, value, "algorithm")


# Options that only some collectives have: those whose options struct has a field of this name.
_SETTERS: dict[str, Callable[[Any, Any], None]] = {
    "participants": _set_participants,
    "weight": _set_weight,
    "order": _set_order,
    "min_world": _set_min_world,
    "algorithm": _set_algorithm,
    "quantize": set_quantize,
}


# ------------------------------------------------------------------ tensors


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _side(value: Any, name: str, written: bool) -> list[Elements]:
    """The elements of a tensor, or of those of a list."""
    if not _is_list(value):
        return [elements_of(value, name, written)]
    if not value:
        raise InvalidArgument("the list of tensors is empty; give at least one tensor")
    return [elements_of(each, f"{name}[{i}]", written) for i, each in enumerate(value)]


def _check_lists(tensor: Any, out: Any, tensor_name: str, out_name: str) -> None:
    count = len(tensor) if _is_list(tensor) else None
    if count != (len(out) if _is_list(out) else None):
        said = "one tensor" if count is None else f"a list of {count}"
        raise InvalidArgument(
            f"{tensor_name} is {said}; {out_name} must be "
            + ("one tensor, too" if count is None else "a list of as many")
        )


def _at(name: str, index: int, several: bool) -> str:
    return f"{name}[{index}]" if several else name


def _check_alike(sources: list[Elements], targets: list[Elements], several: bool) -> None:
    for i, (source, target) in enumerate(zip(sources, targets)):
        if (target.shape, target.dtype) != (source.shape, source.dtype):
            name, out_name = _at("tensor", i, several), _at("out", i, several)
            raise InvalidArgument(
                f"{out_name} is {target.dtype} {list(target.shape)}, {name} is {source.dtype} {list(source.shape)}; "
                "pass an out of the same dtype and shape"
            )


def _set_slices(
    options: Any,
    sources: array.array[int] | None,
    targets: array.array[int] | None,
    counts: array.array[int],
    dtypes: array.array[int],
) -> None:
    # The fields of lh_slice, one after the other: for thousands of tensors this takes a fifth of the time of a loop.
    fields = array.array("Q", bytes(ctypes.sizeof(_native.Slice) * len(counts)))
    if sources is not None:
        fields[0::4] = sources
    if targets is not None:
        fields[1::4] = targets
    fields[2::4] = counts
    fields[3::4] = dtypes  # and lh_slice.zero
    options.slices = (_native.Slice * len(counts)).from_buffer(fields)
    options.slice_count = len(counts)


def _set_tensors(
    stage: _Stage,
    options: Any,
    several: bool,
    sources: list[Elements] | None,
    targets: list[Elements] | None,
    counts: list[int],
) -> _Of:
    """Fills in the tensors. counts: the elements of each; in parts: of one part."""
    known = sources or targets or []
    owners = tuple(each.owner for side in (sources, targets) if side is not None for each in side)
    staged = stage(sources, targets)
    if several:
        _set_slices(
            options,
            None if sources is None else numbers([each.address for each in sources]),
            None if targets is None else numbers([each.address for each in targets]),
            numbers(counts),
            numbers([_native.DTYPES[each.dtype] for each in known]),
        )
        return _Of(f" of {len(known)} tensors", owners, sources, targets, staged)
    if sources is not None:
        options.source = sources[0].address
    if targets is not None:
        options.target = targets[0].address
    options.count = counts[0]
    options.dtype = _native.DTYPES[known[0].dtype]
    return _Of(f" of {known[0].dtype} x {known[0].count}", owners, sources, targets, staged)


def _alike(stage: _Stage, options: Any, tensor: Any, out: Any, *, source: bool = True, target: bool = True) -> _Of:
    """Fills in tensors whose results are like them. out None: in place. source, target: what this member needs."""
    several = _is_list(tensor)
    if out is not None and target:
        _check_lists(tensor, out, "tensor", "out")
    elif several:
        plain = plain_tensors(tensor, target)
        if plain is not None:
            addresses, counts, dtypes = plain
            reads, writes = addresses if source else None, addresses if target else None
            _set_slices(options, reads, writes, counts, dtypes)
            return _Of(f" of {len(tensor)} tensors", tuple(tensor), reads, writes)
    sources = _side(tensor, "tensor", written=target and out is None)
    targets = None
    if target and out is None:
        targets = sources
    elif target:
        targets = _side(out, "out", written=True)
        _check_alike(sources, targets, several)
    return _set_tensors(stage, options, several, sources if source else None, targets, [each.count for each in sources])


def _set_errors(options: Any, tensor: Any, error: Any, of: _Of) -> _Of:
    """Fills in the errors of a quantized op. tensor: its input."""
    if error is None:
        return of
    _check_lists(tensor, error, "tensor", "error")
    several = _is_list(tensor)
    errors = _side(error, "error", written=True)
    for i, (source, each) in enumerate(zip(_side(tensor, "tensor", written=False), errors)):
        name, error_name = _at("tensor", i, several), _at("error", i, several)
        if each.dtype != "float32" or each.count != source.count:
            raise InvalidArgument(
                f"{error_name} is {each.dtype} with {each.count} elements, {name} has {source.count}; "
                "an error is float32 and has as many elements as its tensor"
            )
        if each.copier is not None:
            raise InvalidArgument(f"{error_name} is on a GPU; keep errors in host memory")
    addresses = [each.address for each in errors]
    if several:
        options.errors = (ctypes.c_void_p * len(errors))(*addresses)
    else:
        options.error = addresses[0]
    owners = (*of.owners, *(each.owner for each in errors))
    writes: _Places = numbers([*_addresses(of.writes), *filter(None, addresses)])
    return of._replace(owners=owners, writes=writes)


def _lengths(counts: Counts, name: str) -> list[int]:
    return [number_of(each, f"{name}[{i}]", _LENGTH_MAX) for i, each in enumerate(counts)]


def _check_counts(counts: list[int], whole: Elements, counts_name: str, whole_name: str) -> None:
    if sum(counts) != whole.count:
        raise InvalidArgument(
            f"{counts_name} has {sum(counts)} elements in all, {whole_name} has {whole.count}; they need the same number"
        )


def _world_of(
    wholes: list[Elements], parts: list[Elements], whole_name: str, part_name: str, several: bool
) -> int | None:
    """The number of equal parts in each whole. None: no part has an element, so the number may be any."""
    world = None
    for i, (whole, part) in enumerate(zip(wholes, parts)):
        w, p = _at(whole_name, i, several), _at(part_name, i, several)
        if whole.dtype != part.dtype:
            raise InvalidArgument(f"{w} is {whole.dtype}, {p} is {part.dtype}; they need the same dtype")
        fits = whole.count == 0 if part.count == 0 else whole.count > 0 and whole.count % part.count == 0
        here = whole.count // part.count if fits and part.count else world
        if not fits or (world is not None and here != world):
            raise InvalidArgument(
                f"{w} has {whole.count} elements, {p} has {part.count}; "
                f"{w} needs as many as {p} for each member of the group"
            )
        world = here
    return world


def _check_one(several: bool) -> None:
    if several:
        raise InvalidArgument(
            "counts is given for a list; the parts of a list are equal, so pass one tensor, or no counts"
        )


def _c_numbers(values: list[int]) -> ctypes.Array[ctypes.c_uint64]:
    return (ctypes.c_uint64 * len(values))(*values)


def _name_member(options: Any, field: str, rank: int | None, member: int | None, name: str | None = None) -> None:
    """Fills in a root or partner. name: what the arguments are called."""
    name = name or field
    if member is not None:
        number = number_of(member, f"{name}_member", _MEMBER_ID_MAX)
        if number == 0:
            raise InvalidArgument(f"{name}_member is 0, which is no member; give an id from comm.members")
        setattr(options, f"{field}_member", number)
    elif rank is None:
        raise InvalidArgument(f"give {name}, a rank, or {name}_member, a member id")
    setattr(options, field, number_of(rank or 0, name, (1 << 32) - 1))


class Collectives:
    """Starts collectives of one member. Any thread.

    The methods do what the methods of Comm with the same name document. `owner` (the Comm) stays alive while the op is
    in flight. `more` are the options that all or several collectives have.
    """

    def __init__(self, member: Member) -> None:
        self._client: Client = member.client
        self._handle = member.handle
        self._member = member
        self._record = member.record
        # Op objects for reuse: their operation ended within the call that started it.
        self._spare: list[Op] = []
        # For ops on tensors of a GPU: host memory by copier (longhaul.torch._staging.Pools), and a thread.
        self._pools: dict[Any, Any] = {}
        self._starter = Starter()

    def all_reduce(self, owner: object, tensor: Any, op: str, out: Any, more: dict[str, Any]) -> OpInfo | Work:
        options = _native.AllReduceOptions()
        options.op = code_of(_native.REDUCE_OPS, op, "op")
        of = _alike(self._stage, options, tensor, out)
        of = _set_errors(options, tensor, more.pop("error", None), of)
        return self._start("all_reduce", owner, options, of, **more)

    def reduce(
        self, owner: object, tensor: Any, root: int, op: str, root_member: int | None, out: Any, more: dict[str, Any]
    ) -> OpInfo | Work:
        options = _native.ReduceOptions()
        options.op = code_of(_native.REDUCE_OPS, op, "op")
        of = _alike(self._stage, options, tensor, out, target=self._is_root(options, root, root_member))
        return self._start("reduce", owner, options, of, **more)

    def reduce_scatter(
        self, owner: object, tensor: Any, op: str, out: Any, counts: Counts | None, more: dict[str, Any]
    ) -> OpInfo | Work:
        options = _native.ReduceScatterOptions()
        options.op = code_of(_native.REDUCE_OPS, op, "op")
        error = more.pop("error", None)
        of = self._parts(options, (tensor, "tensor"), (out, "out"), counts, more)
        of = _set_errors(options, tensor, error, of)
        return self._start("reduce_scatter", owner, options, of, **more)

    def all_gather(
        self, owner: object, tensor: Any, out: Any, counts: Counts | None, more: dict[str, Any]
    ) -> OpInfo | Work:
        options = _native.AllGatherOptions()
        of = self._parts(options, (out, "out"), (tensor, "tensor"), counts, more)
        return self._start("all_gather", owner, options, of, **more)

    def broadcast(
        self, owner: object, tensor: Any, root: int, root_member: int | None, out: Any, more: dict[str, Any]
    ) -> OpInfo | Work:
        options = _native.BroadcastOptions()
        _name_member(options, "root", root, root_member)
        return self._start("broadcast", owner, options, _alike(self._stage, options, tensor, out), **more)

    def gather(
        self,
        owner: object,
        tensor: Any,
        root: int,
        root_member: int | None,
        out: Any,
        counts: Counts | None,
        more: dict[str, Any],
    ) -> OpInfo | Work:
        options = _native.GatherOptions()
        if not self._is_root(options, root, root_member):
            out = None
        elif out is None:
            raise InvalidArgument("out is None; this member is the root of the gather, so it needs an out")
        of = self._parts(options, (out, "out"), (tensor, "tensor"), counts, more)
        return self._start("gather", owner, options, of, **more)

    def scatter(
        self,
        owner: object,
        tensor: Any,
        root: int,
        root_member: int | None,
        out: Any,
        counts: Counts | None,
        more: dict[str, Any],
    ) -> OpInfo | Work:
        options = _native.ScatterOptions()
        if not self._is_root(options, root, root_member):
            tensor = None
        elif tensor is None:
            raise InvalidArgument("tensor is None; this member is the root of the scatter, so it needs a tensor")
        of = self._parts(options, (tensor, "tensor"), (out, "out"), counts, more)
        return self._start("scatter", owner, options, of, **more)

    def all_to_all(
        self,
        owner: object,
        tensor: Any,
        out: Any,
        counts: Counts | None,
        out_counts: Counts | None,
        more: dict[str, Any],
    ) -> OpInfo | Work:
        options = _native.AllToAllOptions()
        several = _is_list(tensor)
        _check_lists(tensor, out, "tensor", "out")
        sources = _side(tensor, "tensor", written=False)
        targets = _side(out, "out", written=True)
        if (counts is None) != (out_counts is None):
            raise InvalidArgument("give counts and out_counts, or neither")
        for i, (source, target) in enumerate(zip(sources, targets)):
            if source.dtype != target.dtype or (counts is None and source.count != target.count):
                name, out_name = _at("tensor", i, several), _at("out", i, several)
                raise InvalidArgument(
                    f"{name} is {source.dtype} x {source.count}, {out_name} is {target.dtype} x {target.count}; they need "
                    "the same dtype and number of elements"
                )
        if counts is not None and out_counts is not None:
            _check_one(several)
            gives, gets = _lengths(counts, "counts"), _lengths(out_counts, "out_counts")
            _check_counts(gives, sources[0], "counts", "tensor")
            _check_counts(gets, targets[0], "out_counts", "out")
            if len(gives) != len(gets) or not gives:
                raise InvalidArgument(
                    f"counts has {len(gives)} lengths, out_counts has {len(gets)}; give one for each member in both"
                )
            options.world = len(gives)
            options.counts = _c_numbers(gives)
            options.target_counts = _c_numbers(gets)
            of = _set_tensors(self._stage, options, several, sources, targets, [0])
            return self._start("all_to_all", owner, options, of, **more)
        options.world = world = self._world(more)
        for i, source in enumerate(sources):
            if source.count % world:
                raise InvalidArgument(
                    f"{_at('tensor', i, several)} has {source.count} elements, and {world} members take part; "
                    "it needs a part of the same length for each"
                )
        of = _set_tensors(
            self._stage, options, several, sources, targets, [source.count // world for source in sources]
        )
        return self._start("all_to_all", owner, options, of, **more)

    def send(
        self, owner: object, tensor: Any, to: int | None, to_member: int | None, more: dict[str, Any]
    ) -> OpInfo | Work:
        options = _native.SendOptions()
        _name_member(options, "to", to, to_member)
        return self._start("send", owner, options, _alike(self._stage, options, tensor, None, target=False), **more)

    def recv(
        self, owner: object, tensor: Any, source: int | None, source_member: int | None, more: dict[str, Any]
    ) -> OpInfo | Work:
        options = _native.RecvOptions()
        _name_member(options, "from", source, source_member, "source")
        return self._start("recv", owner, options, _alike(self._stage, options, tensor, None, source=False), **more)

    def barrier(self, owner: object, more: dict[str, Any]) -> OpInfo | Work:
        return self._start("barrier", owner, _native.BarrierOptions(), _Of("", ()), **more)

    def reduce_numbers(
        self, owner: object, values: ctypes.Array[ctypes.c_uint64], op: str, tag: int, timeout: float | None
    ) -> OpInfo:
        """Reduces a small array of numbers in place."""
        elements = [Elements(ctypes.addressof(values), len(values), "uint64", (len(values),), values)]
        options = _native.AllReduceOptions()
        options.op = _native.REDUCE_OPS[op]
        of = _set_tensors(self._stage, options, False, elements, elements, [len(values)])
        info = self._start("all_reduce", owner, options, of, tag=tag, timeout=timeout)
        assert isinstance(info, OpInfo)
        return info

    def _note_written(self, op: Op, of: _Of) -> None:
        op.written = tuple(_addresses(of.writes))
        self._client.written.update(dict.fromkeys(op.written, op))

    def _check_not_written(self, name: str, of: _Of) -> None:
        """Raises FailedPrecondition if an op in flight writes one of the tensors.

        It finds tensors that begin at the same place. Whoever gives an op a part of another op's tensor is on their own.
        """
        written = self._client.written
        for address in itertools.chain(_addresses(of.reads), _addresses(of.writes)):
            other = written.get(address)
            if other is not None and not other.poll():
                raise FailedPrecondition(
                    f"{name}{of.text}: an op in flight ({other.what}) writes the same tensor; wait for that op first, or "
                    "give this one another tensor"
                )

    def _stage(self, sources: list[Elements] | None, targets: list[Elements] | None) -> Staged | None:
        """Gives tensors of a GPU places in host memory. None: all are in host memory already."""
        for side in (sources, targets):
            if side is not None and any(each.copier is not None for each in side):
                break
        else:
            return None
        from .torch._staging import place  # not needed for CPU tensors

        return place(self._client, self._pools, sources, targets)

    def _is_root(self, options: Any, root: int, root_member: int | None) -> bool:
        """Names the root. Returns whether this member is the root."""
        _name_member(options, "root", root, root_member)
        world = self._member.world()
        if root_member is not None:
            return options.root_member == world.member_id  # type: ignore[no-any-return]
        if options.root != world.rank:
            return False
        # Ranks may change before the C library looks. The id stays.
        options.root_member = world.member_id
        return True

    def _world(self, more: dict[str, Any]) -> int:
        """The number of members that take part."""
        participants = more.get("participants")
        if participants is None:
            return self._member.world().world_size
        more["participants"] = ids = tuple(participants)
        return len(set(ids).intersection(self._member.members())) or 1

    def _parts(
        self, options: Any, whole: tuple[Any, str], part: tuple[Any, str], counts: Counts | None, more: dict[str, Any]
    ) -> _Of:
        """Fills in a tensor with a part for each member, and one part. The whole is None if this member needs none."""
        (whole_value, whole_name), (part_value, part_name) = whole, part
        several = _is_list(part_value)
        parts = _side(part_value, part_name, written=part_name == "out")
        wholes = None
        if whole_value is not None:
            _check_lists(part_value, whole_value, part_name, whole_name)
            wholes = _side(whole_value, whole_name, written=whole_name == "out")
        world = None
        if counts is not None:
            _check_one(several)
            lengths = _lengths(counts, "counts")
            if wholes is not None:
                if wholes[0].dtype != parts[0].dtype:
                    _world_of(wholes, parts, whole_name, part_name, several)
                _check_counts(lengths, wholes[0], "counts", whole_name)
            world = len(lengths)
            options.counts = _c_numbers(lengths or [0])
        elif wholes is not None:
            world = _world_of(wholes, parts, whole_name, part_name, several)
        options.world = world or self._world(more)
        sources, targets = (parts, wholes) if part_name == "tensor" else (wholes, parts)
        return _set_tensors(self._stage, options, several, sources, targets, [each.count for each in parts])

    def _start(
        self,
        name: str,
        owner: object,
        options: Any,
        of: _Of,
        *,
        async_op: bool = False,
        timeout: float | None = None,
        tag: int = 0,
        on_fault: str | None = None,
        after: Staged | None = None,
        **more: Any,
    ) -> OpInfo | Work:
        """Fills in the options that all collectives have, and calls lh_<name>(), or lh_<name>_start() if async_op.

        after: not for users: the op is on host memory that a GPU fills, and starts when that is done.
        """
        if async_op and timeout is not None:
            raise InvalidArgument("timeout has no meaning with async_op=True; pass the timeout to wait()")
        if not async_op:
            self._client.watcher.check_may_wait(name)
        deadline = _native.Deadline(timeout)
        options.tag = number_of(tag, "tag", (1 << 64) - 1)
        options.on_fault = _native.AS_JOINED if on_fault is None else code_of(_native.ON_FAULT, on_fault, "on_fault")
        for option, value in more.items():
            if option not in _SETTERS or not hasattr(options, option):
                raise TypeError(f"{name}() got an unexpected keyword argument {option!r}")
            _SETTERS[option](options, value)
        self._client.sweep()
        if self._client.written:
            self._check_not_written(name, of)
        if after is not None:
            of = of._replace(staged=after)
        if of.staged is not None:
            return self._start_staged(name, owner, options, of, async_op, timeout)
        started = self._new_op(name, owner, of.owners)
        lib = _native.library()
        handle = ctypes.byref(started.handle)
        try:
            if async_op:
                status = getattr(lib, f"lh_{name}_start")(self._handle, ctypes.byref(options), handle)
            else:
                info = _native.OpInfoStruct()
                wait_ms = deadline.slice_ms()
                status = getattr(lib, f"lh_{name}")(
                    self._handle, ctypes.byref(options), wait_ms, ctypes.byref(info), handle
                )
                if status == _native.OK:
                    started.owner = started.tensors = None
                    self._spare.append(started)
                    result = op_info(info)
                    self._record.op_ended(name, "", result)
                    return result
            started.what = f"{name}{of.text}, tag {tag}"
            if started.handle.value is None:
                raise started.failure(status)
            if async_op:
                self._note_written(started, of)
                return Work(started)
            if started.wait(deadline):
                return result_of(started)
        except BaseException:
            abandon(started)
            raise
        raise _late(Work(started), started.what, timeout)

    def _new_op(self, name: str, owner: object, tensors: tuple[Any, ...]) -> Op:
        try:
            op = self._spare.pop()
        except IndexError:
            op = Op(self._client, self._record)
        op.kind = name
        op.owner = owner
        op.tensors = tensors
        return op

    def _start_staged(
        self, name: str, owner: object, options: Any, of: _Of, async_op: bool, timeout: float | None
    ) -> OpInfo | Work:
        """Starts an op on tensors of a GPU: first their copy to host memory, then, in another thread, the op itself."""
        staged, deadline = of.staged, _native.Deadline(timeout)
        assert staged is not None
        what = f"{name}{of.text}, tag {options.tag}"

        def start() -> Op:
            op = self._new_op(name, owner, (*of.owners, staged))
            op.what = what
            try:
                status = getattr(_native.library(), f"lh_{name}_start")(
                    self._handle, ctypes.byref(options), ctypes.byref(op.handle)
                )
                if op.handle.value is None:
                    raise op.failure(status)
            except BaseException:
                abandon(op)
                raise
            return op

        work = Work(DeviceOp(self._client, what, staged, start, self._starter))
        if async_op:
            return work
        if work._op.wait(deadline):
            return work.info
        raise _late(work, what, timeout)

    def flush(self, what: str, deadline: _native.Deadline) -> None:
        """Waits until all ops that were asked for are at peerd. Ops on tensors of a GPU get there when it has them."""
        self._starter.flush(what, deadline)

    def end(self) -> None:
        """The member has left: frees the memory that it kept for further ops."""
        self._pools.clear()


def _late(work: Work, what: str, timeout: float | None) -> DeadlineExceeded:
    late = DeadlineExceeded(
        f"{what}: no outcome after {timeout} s; the op goes on and uses its tensors; call wait() of this error's .work"
    )
    late.work = work
    return late
