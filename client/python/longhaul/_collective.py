"""Collectives of one member: checks the arguments, starts the op, and waits for it unless async_op is set."""

from __future__ import annotations

import array
import contextlib
import ctypes
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from . import _native
from ._arena import Client
from ._device_op import DeviceOp, Staged, Starter
from ._errors import Aborted, DeadlineExceeded, Error, FailedPrecondition, InvalidArgument, code_of, number_of
from ._member import Member
from ._op_info import OpInfo, op_info
from ._quant import set_quantize
from ._tensor import Elements, Tensors, tensors_of
from ._turn import Turn, paying
from ._work import AnyOp, Op, Work, abandon, result_of

Counts = Sequence[int]


class Sized(Protocol):
    """A Step, a World or an OpInfo."""

    @property
    def world_size(self) -> int: ...


#: The members that the tensors of an op in parts are laid out for: their number, or what knows it.
LaidOutFor = int | Sized | None
#: Rank and member id of the partner of a send or receive. One of them is None.
Partner = tuple[int | None, int | None]

_NUMBER_MAX = (1 << 64) - 1


class _Of(NamedTuple):
    """What an op is of: a text for errors, what has to stay alive meanwhile, and the addresses that it reads and writes.

    staged: the tensors on a GPU.
    """

    text: str
    owners: tuple[Any, ...]
    reads: Sequence[int] = ()
    writes: Sequence[int] = ()
    staged: Staged | None = None


# ------------------------------------------------------------------ options


def _options(name: str, op: str | None = None) -> Any:
    options: Any = _native.COLLECTIVES[name]()
    if op is not None:
        options.op = code_of(_native.REDUCE_OPS, op, "op")
    return options


def _set_participants(options: Any, value: Iterable[int] | None) -> None:
    if value is None:
        return
    ids = [number_of(each, "a member id of participants", _NUMBER_MAX) for each in value]
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


def _check_lists(tensor: Any, out: Any, tensor_name: str, out_name: str) -> None:
    count, out_count = (len(each) if isinstance(each, (list, tuple)) else None for each in (tensor, out))
    if count != out_count:
        said = "one tensor" if count is None else f"a list of {count}"
        raise InvalidArgument(
            f"{tensor_name} is {said}; {out_name} must be "
            + ("one tensor, too" if count is None else "a list of as many")
        )


def _first(differs: Iterable[bool]) -> int:
    """The number of the first tensor that differs. There is one."""
    return next(i for i, each in enumerate(differs) if each)


def _alike(tensor: Any, out: Any) -> tuple[Tensors, Tensors]:
    """A tensor, and where a result like it goes. out None: in place."""
    if out is None:
        sources = tensors_of(tensor, "tensor", written=True)
        return sources, sources
    _check_lists(tensor, out, "tensor", "out")
    sources, targets = tensors_of(tensor, "tensor", written=False), tensors_of(out, "out", written=True)
    shapes, out_shapes = sources.shapes, targets.shapes
    if sources.dtypes != targets.dtypes or shapes != out_shapes:
        i = _first(map(operator.ne, zip(sources.dtypes, shapes), zip(targets.dtypes, out_shapes)))
        raise InvalidArgument(
            f"{targets.name_of(i)} is {targets.dtypes[i]} {list(out_shapes[i])}, {sources.name_of(i)} is "
            f"{sources.dtypes[i]} {list(shapes[i])}; pass an out of the same dtype and shape"
        )
    return sources, targets


def _errors_of(tensor: Any, error: Any, sources: Tensors) -> Tensors | None:
    """The errors of a quantized op. sources: its input, `tensor`."""
    if error is None:
        return None
    _check_lists(tensor, error, "tensor", "error")
    errors = tensors_of(error, "error", written=True)
    if errors.counts != sources.counts or set(errors.dtypes) != {"float32"}:
        i = _first(
            dtype != "float32" or count != own
            for dtype, count, own in zip(errors.dtypes, errors.counts, sources.counts)
        )
        raise InvalidArgument(
            f"{errors.name_of(i)} is {errors.dtypes[i]} with {errors.counts[i]} elements, {sources.name_of(i)} has "
            f"{sources.counts[i]}; an error is float32 and has as many elements as its tensor"
        )
    if errors.elements is not None:
        i = _first(each.copier is not None for each in errors.elements)
        raise InvalidArgument(f"{errors.name_of(i)} is on a GPU; keep errors in host memory")
    return errors


def _numbers(values: Iterable[int]) -> array.array[int]:
    return array.array("Q", values)


def _set_slices(options: Any, sources: Tensors | None, targets: Tensors | None, counts: list[int]) -> None:
    # The fields of lh_slice, one after the other: for thousands of tensors this takes a fifth of the time of a loop.
    fields = _numbers(bytes(ctypes.sizeof(_native.Slice) * len(counts)))
    known = sources or targets
    assert known is not None
    first = _numbers(known.addresses)
    if sources is not None:
        fields[0::4] = first
    if targets is not None:
        fields[1::4] = first if targets is known else _numbers(targets.addresses)
    fields[2::4] = _numbers(counts)
    kinds = set(known.dtypes)
    codes = _numbers(map(_native.DTYPES.__getitem__, kinds if len(kinds) == 1 else known.dtypes))
    fields[3::4] = codes * len(counts) if len(kinds) == 1 else codes  # and lh_slice.zero
    options.slices = (_native.Slice * len(counts)).from_buffer(fields)
    options.slice_count = len(counts)


def _lengths(counts: Counts, name: str) -> list[int]:
    return [number_of(each, f"{name}[{i}]", _NUMBER_MAX) for i, each in enumerate(counts)]


def _check_counts(counts: list[int], whole: Tensors, counts_name: str) -> None:
    if sum(counts) != whole.counts[0]:
        raise InvalidArgument(
            f"{counts_name} has {sum(counts)} elements in all, {whole.name} has {whole.counts[0]}; they need the same "
            "number"
        )


def _check_dtypes(wholes: Tensors, parts: Tensors) -> None:
    if wholes.dtypes != parts.dtypes:
        i = _first(map(operator.ne, wholes.dtypes, parts.dtypes))
        raise InvalidArgument(
            f"{wholes.name_of(i)} is {wholes.dtypes[i]}, {parts.name_of(i)} is {parts.dtypes[i]}; they need the same dtype"
        )


def _world_of(wholes: Tensors, parts: Tensors) -> int | None:
    """The number of equal parts in each whole. None: no part has an element, so the number may be any."""
    _check_dtypes(wholes, parts)
    world = next((whole // part for whole, part in zip(wholes.counts, parts.counts) if part), None)
    due = [part * (world or 0) for part in parts.counts]
    if wholes.counts != due or world == 0:
        i = _first(
            whole != right or (part > 0 and whole == 0) for whole, right, part in zip(wholes.counts, due, parts.counts)
        )
        w, p = wholes.name_of(i), parts.name_of(i)
        raise InvalidArgument(
            f"{w} has {wholes.counts[i]} elements, {p} has {parts.counts[i]}; "
            f"{w} needs as many as {p} for each member of the group"
        )
    return world


def _given(world: LaidOutFor) -> int | None:
    """The number of members that the caller names."""
    if world is None:
        return None
    return number_of(getattr(world, "world_size", world), "world", _native.MEMBERS_MAX, least=1)


def _check_one(tensors: Tensors) -> None:
    if tensors.several:
        raise InvalidArgument(
            "counts is given for a list; the parts of a list are equal, so pass one tensor, or no counts"
        )


def _c_numbers(values: list[int]) -> ctypes.Array[ctypes.c_uint64]:
    return (ctypes.c_uint64 * len(values))(*values)


def _name_member(options: Any, field: str, rank: int | None, member: int | None, name: str | None = None) -> None:
    """Fills in a root or partner. name: what the arguments are called."""
    name = name or field
    if member is not None:
        number = number_of(member, f"{name}_member", _NUMBER_MAX)
        if number == 0:
            raise InvalidArgument(f"{name}_member is 0, which is no member; give an id from comm.members")
        setattr(options, f"{field}_member", number)
    elif rank is None:
        raise InvalidArgument(f"give {name}, a rank, or {name}_member, a member id")
    setattr(options, field, number_of(rank or 0, name, (1 << 32) - 1))


class _Call:
    """One call, by which the other members know it. If it is refused here, they do not wait for it.

    partner: rank and member id, of a send or receive.
    """

    __slots__ = ("_calls", "_more", "_name", "_partner")

    def __init__(self, calls: Collectives, name: str, more: dict[str, Any], partner: Partner | None = None) -> None:
        self._calls = calls
        self._name = name
        self._more = more
        self._partner = partner

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, problem: BaseException | None, _: object) -> None:
        # InvalidArgument is a ValueError.
        if isinstance(problem, (TypeError, ValueError)) and not getattr(problem, "_from_library", False):
            with contextlib.suppress(Error, TypeError):  # it names no op
                self._calls.refuse(self._name, self._more, self._partner, problem)


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
        #: Turns that were abandoned. The next op or boundary of this member comes after what they owe.
        self.owed: list[Turn] = []

    def pay(self) -> None:
        """Starts what this member owes the others, in order."""
        while self.owed:
            with paying:
                if self.owed:
                    self.owed[0].pay()
                    del self.owed[0]

    def all_reduce(self, owner: object, tensor: Any, op: str, out: Any, more: dict[str, Any]) -> OpInfo | Work:
        with _Call(self, "all_reduce", more):
            options = _options("all_reduce", op)
            sources, targets = _alike(tensor, out)
            errors = _errors_of(tensor, more.pop("error", None), sources)
            return self._start("all_reduce", owner, options, self._fill(options, sources, targets, errors), **more)

    def reduce(
        self, owner: object, tensor: Any, root: int, op: str, root_member: int | None, out: Any, more: dict[str, Any]
    ) -> OpInfo | Work:
        with _Call(self, "reduce", more):
            options = _options("reduce", op)
            targets = None
            if self._is_root(options, root, root_member):
                sources, targets = _alike(tensor, out)
            else:
                sources = tensors_of(tensor, "tensor", written=False)
            return self._start("reduce", owner, options, self._fill(options, sources, targets), **more)

    def broadcast(
        self, owner: object, tensor: Any, root: int, root_member: int | None, out: Any, more: dict[str, Any]
    ) -> OpInfo | Work:
        with _Call(self, "broadcast", more):
            options = _options("broadcast")
            _name_member(options, "root", root, root_member)
            return self._start("broadcast", owner, options, self._fill(options, *_alike(tensor, out)), **more)

    def in_parts(
        self,
        name: str,
        owner: object,
        tensor: Any,
        out: Any,
        counts: Counts | None,
        world: LaidOutFor,
        more: dict[str, Any],
        *,
        op: str | None = None,
        root: tuple[int, int | None] | None = None,
    ) -> OpInfo | Work:
        """Collectives whose tensor, or out, has a part for each member, while the other one is a part.

        root: rank and member id. Only the root has the whole then.
        """
        with _Call(self, name, more):
            options = _options(name, op)
            gathers = name.endswith("gather")
            part_name, part, whole_name, whole = (
                ("tensor", tensor, "out", out) if gathers else ("out", out, "tensor", tensor)
            )
            if root is not None and not self._is_root(options, *root):
                whole = None
            elif root is not None and whole is None:
                raise InvalidArgument(
                    f"{whole_name} is None; this member is the root of the {name}, so it needs "
                    + ("an out" if gathers else "a tensor")
                )
            parts = tensors_of(part, part_name, written=not gathers)
            wholes = found = None
            if whole is not None:
                _check_lists(part, whole, part_name, whole_name)
                wholes = tensors_of(whole, whole_name, written=gathers)
            if counts is not None:
                _check_one(parts)
                lengths = _lengths(counts, "counts")
                if wholes is not None:
                    _check_dtypes(wholes, parts)
                    _check_counts(lengths, wholes, "counts")
                    found = len(lengths)
                options.counts = _c_numbers(lengths or [0])
            elif wholes is not None:
                found = _world_of(wholes, parts)
            options.world = self._layout(name, more, _given(world), found)
            errors = None
            if wholes is not None and hasattr(options, "error"):
                errors = _errors_of(tensor, more.pop("error", None), wholes)
            sources, targets = (parts, wholes) if gathers else (wholes, parts)
            of = self._fill(options, sources, targets, errors, counts=parts.counts)
            return self._start(name, owner, options, of, **more)

    def all_to_all(
        self,
        owner: object,
        tensor: Any,
        out: Any,
        counts: Counts | None,
        out_counts: Counts | None,
        world: LaidOutFor,
        more: dict[str, Any],
    ) -> OpInfo | Work:
        with _Call(self, "all_to_all", more):
            options = _options("all_to_all")
            _check_lists(tensor, out, "tensor", "out")
            sources, targets = tensors_of(tensor, "tensor", written=False), tensors_of(out, "out", written=True)
            if (counts is None) != (out_counts is None):
                raise InvalidArgument("give counts and out_counts, or neither")
            if sources.dtypes != targets.dtypes or (counts is None and sources.counts != targets.counts):
                said = [list(zip(side.dtypes, side.counts)) for side in (sources, targets)]
                i = _first(map(operator.ne, *said)) if counts is None else 0
                (dtype, count), (out_dtype, out_count) = said[0][i], said[1][i]
                raise InvalidArgument(
                    f"{sources.name_of(i)} is {dtype} x {count}, {targets.name_of(i)} is {out_dtype} x {out_count}; they need "
                    "the same dtype and number of elements"
                )
            if counts is not None and out_counts is not None:
                _check_one(sources)
                gives, gets = _lengths(counts, "counts"), _lengths(out_counts, "out_counts")
                _check_counts(gives, sources, "counts")
                _check_counts(gets, targets, "out_counts")
                if len(gives) != len(gets) or not gives:
                    raise InvalidArgument(
                        f"counts has {len(gives)} lengths, out_counts has {len(gets)}; give one for each member in both"
                    )
                options.world = self._layout("all_to_all", more, _given(world), len(gives))
                options.counts = _c_numbers(gives)
                options.target_counts = _c_numbers(gets)
                each = [0]
            else:
                options.world = parts = self._layout("all_to_all", more, _given(world), None)
                each = [count // parts for count in sources.counts]
                if sources.counts != [parts * count for count in each]:
                    i = _first(count % parts != 0 for count in sources.counts)
                    raise InvalidArgument(
                        f"{sources.name_of(i)} has {sources.counts[i]} elements for {parts} members; "
                        "it needs a part of the same length for each"
                    )
            of = self._fill(options, sources, targets, counts=each)
            return self._start("all_to_all", owner, options, of, **more)

    def send(
        self, owner: object, tensor: Any, to: int | None, to_member: int | None, more: dict[str, Any]
    ) -> OpInfo | Work:
        with _Call(self, "send", more, (to, to_member)):
            options = _options("send")
            _name_member(options, "to", to, to_member)
            sources = tensors_of(tensor, "tensor", written=False)
            return self._start("send", owner, options, self._fill(options, sources, None), **more)

    def recv(
        self, owner: object, tensor: Any, source: int | None, source_member: int | None, more: dict[str, Any]
    ) -> OpInfo | Work:
        with _Call(self, "recv", more, (source, source_member)):
            options = _options("recv")
            _name_member(options, "from", source, source_member, "source")
            targets = tensors_of(tensor, "tensor", written=True)
            return self._start("recv", owner, options, self._fill(options, None, targets), **more)

    def barrier(self, owner: object, more: dict[str, Any]) -> OpInfo | Work:
        with _Call(self, "barrier", more):
            return self._start("barrier", owner, _options("barrier"), _Of("", ()), **more)

    def reduce_numbers(
        self, owner: object, values: ctypes.Array[ctypes.c_uint64], op: str, tag: int, timeout: float | None
    ) -> OpInfo:
        """Reduces a small array of numbers in place."""
        elements = Elements(ctypes.addressof(values), len(values), "uint64", (len(values),), values)
        numbers = Tensors.one("numbers", elements)
        options = _options("all_reduce", op)
        of = self._fill(options, numbers, numbers)
        info = self._start("all_reduce", owner, options, of, tag=tag, timeout=timeout)
        assert isinstance(info, OpInfo)
        return info

    def give_up(self, owner: object, name: str, tag: int, begun: list[AnyOp]) -> None:
        """Starts an op that fits no other of this kind and tag: it ends with InvalidArgument at all its members.

        The offer is one bool, which _turn.given_up() looks for. name: "all_reduce" or "all_gather". begun: gets the op.
        """
        options = _options(name, "min" if name == "all_reduce" else None)
        values = (ctypes.c_bool * _native.MEMBERS_MAX)()
        source = Tensors.one("bool", Elements(ctypes.addressof(values), 1, "bool", (1,), values))
        target = source
        if name == "all_gather":
            options.world = self._world({})
            out = (ctypes.c_bool * _native.MEMBERS_MAX)()
            target = Tensors.one("out", Elements(ctypes.addressof(out), options.world, "bool", (options.world,), out))
        of = self._fill(options, source, target, counts=[1])
        self._start(name, owner, options, of, async_op=True, tag=tag, begun=begun)

    def _fill(
        self,
        options: Any,
        sources: Tensors | None,
        targets: Tensors | None,
        errors: Tensors | None = None,
        *,
        counts: list[int] | None = None,
    ) -> _Of:
        """Fills in the tensors. In place: sources and targets are one object. counts: the elements of each; in parts: of
        one part; None: those of the sources, or the targets."""
        known = sources or targets
        assert known is not None
        counts = known.counts if counts is None else counts
        staged = self._stage(sources, targets)
        if known.several:
            text = f" of {len(counts)} tensors"
            _set_slices(options, sources, targets, counts)
            if errors is not None:
                options.errors = (ctypes.c_void_p * len(counts))(*errors.addresses)
        else:
            text = f" of {known.dtypes[0]} x {known.counts[0]}"
            if sources is not None:
                options.source = sources.addresses[0]
            if targets is not None:
                options.target = targets.addresses[0]
            if errors is not None:
                options.error = errors.addresses[0]
            options.count = counts[0]
            options.dtype = _native.DTYPES[known.dtypes[0]]
        owners = known.owners
        reads = [] if sources is None or sources is targets else sources.places()
        writes = [] if targets is None else targets.places()
        if targets is not None and targets is not known:
            owners = (*owners, *targets.owners)
        if errors is not None:
            owners = (*owners, *errors.owners)
            writes = [*writes, *errors.places()]
        return _Of(text, owners, reads, writes, staged)

    def _stage(self, sources: Tensors | None, targets: Tensors | None) -> Staged | None:
        """Gives tensors of a GPU places in host memory. None: all are in host memory already."""
        rows = [None if side is None else side.elements for side in (sources, targets)]
        if rows == [None, None]:
            return None
        from .torch._staging import place  # not needed for CPU tensors

        staged = place(self._client, self._pools, *rows)
        for side in (sources, targets):
            if side is not None and side.elements is not None:
                side.addresses = [each.address for each in side.elements]
        return staged

    def _note_written(self, op: Op, of: _Of) -> None:
        op.written = of.writes
        self._client.written.update(dict.fromkeys(of.writes, op))

    def _check_not_written(self, name: str, of: _Of) -> None:
        """Raises FailedPrecondition if an op in flight writes one of the tensors.

        It finds tensors that begin at the same place. Whoever gives an op a part of another op's tensor is on their own.
        """
        written = self._client.written
        for address in (written.keys() & of.reads) | (written.keys() & of.writes):
            other = written.get(address)
            if other is not None and not other.poll():
                raise FailedPrecondition(
                    f"{name}{of.text}: an op in flight ({other.what}) writes the same tensor; wait for that op first, or "
                    "give this one another tensor"
                )

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

    def _layout(self, name: str, more: dict[str, Any], given: int | None, found: int | None) -> int:
        """The number of members that the tensors are laid out for.

        given: as the caller says. found: as the lengths of its tensors say; None: they say nothing. Without `given`, a
        caller has laid them out for its last step boundary. If it has heard of a death since, and took a number of now
        for some of them, its parts are not those of the other members.
        """
        if given is not None:
            if found not in (None, given):
                raise InvalidArgument(f"{name}: its tensors have parts for {found} members, and world is {given}")
            return given
        world = self._world(more)
        if found is not None and found < world:
            note = (
                f"its tensors have parts for {found} members, and {world} were there at this member's last step "
                "boundary: begin a step, or say with world= for how many members they are laid out"
            )
            if self._member.world().world_size == 1:
                raise Aborted(f"{name}: {note}; the source is unchanged")
            more["note"] = f" ({note})"
            return 1  # no world of several members is like this one
        return found or world

    def _world(self, more: dict[str, Any]) -> int:
        """The number of members that take part, as of this member's last step boundary."""
        participants = more.get("participants")
        if participants is None:
            return self._member.world().step.world_size
        more["participants"] = ids = tuple(participants)
        return len(set(ids).intersection(self._member.step_members())) or 1

    def refuse(self, name: str, more: dict[str, Any], partner: Partner | None, why: Exception) -> None:
        """The call was refused here: tells the other members, who wait for it. Raises an error if it names no op."""
        options = _native.RefuseOptions()
        options.call = f"lh_{name}".encode()
        options.why = str(why).replace("\0", " ").encode(errors="replace")
        options.tag = number_of(more.get("tag", 0), "tag", _NUMBER_MAX)
        _set_participants(options, more.get("participants"))
        if partner is not None:
            _name_member(options, "partner", *partner)
        _native.library().lh_refuse(self._handle, ctypes.byref(options))

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
        begun: list[AnyOp] | None = None,
        note: str = "",
        **more: Any,
    ) -> OpInfo | Work:
        """Fills in the options that all collectives have, and calls lh_<name>(), or lh_<name>_start() if async_op.

        Not for users:
        after: the op is on host memory that a GPU fills, and starts when that is done.
        begun: with async_op: gets the op before the call that starts it, so that no exception can hide it (_turn).
        note: what the texts of errors say of the tensors.
        """
        if async_op and timeout is not None:
            raise InvalidArgument("timeout has no meaning with async_op=True; pass the timeout to wait()")
        if not async_op:
            self._client.watcher.check_may_wait(name)
        deadline = _native.Deadline(timeout)
        if self.owed and begun is None:
            self.pay()
        options.tag = number_of(tag, "tag", _NUMBER_MAX)
        options.on_fault = _native.AS_JOINED if on_fault is None else code_of(_native.ON_FAULT, on_fault, "on_fault")
        for option, value in more.items():
            if option not in _SETTERS or not hasattr(options, option):
                raise TypeError(f"{name}() got an unexpected keyword argument {option!r}")
            _SETTERS[option](options, value)
        if note:
            of = of._replace(text=of.text + note)
        self._client.sweep()
        if self._client.written:
            self._check_not_written(name, of)
        if after is not None:
            of = of._replace(staged=after)
        if of.staged is not None:
            return self._start_staged(name, owner, options, of, async_op, timeout, begun)
        started = self._new_op(name, owner, of.owners)
        if begun is not None:
            begun.append(started)
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
        self,
        name: str,
        owner: object,
        options: Any,
        of: _Of,
        async_op: bool,
        timeout: float | None,
        begun: list[AnyOp] | None,
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

        work = Work(DeviceOp(self._client, what, staged, start, self._starter, begun))
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
        self.owed.clear()
        self._pools.clear()


def _late(work: Work, what: str, timeout: float | None) -> DeadlineExceeded:
    late = DeadlineExceeded(
        f"{what}: no outcome after {timeout} s; the op goes on and uses its tensors; call wait() of this error's .work"
    )
    late.work = work
    return late
