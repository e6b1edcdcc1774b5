"""Collectives of one member: checks the arguments, starts the op, and waits for it unless async_op is set."""

from __future__ import annotations

import array
import ctypes
import itertools
from typing import Any

from . import _native
from ._arena import Client
from ._errors import DeadlineExceeded, InvalidArgument, code_of, error, number_of
from ._tensor import Elements, elements_of, plain_tensors
from ._work import Op, OpInfo, Work, abandon, op_info


def _pair(tensor: Any, out: Any, tensor_name: str, out_name: str) -> tuple[Elements, Elements]:
    """The elements of a tensor and of its result, which are alike; out None: in place."""
    source = elements_of(tensor, tensor_name, written=out is None)
    target = source if out is None else elements_of(out, out_name, written=True)
    if (target.shape, target.dtype) != (source.shape, source.dtype):
        raise InvalidArgument(
            f"{out_name} is {target.dtype} {list(target.shape)}, {tensor_name} is {source.dtype} {list(source.shape)}; "
            "pass an out of the same dtype and shape"
        )
    return source, target


def _elements(tensor: Any, out: Any) -> tuple[Elements, Elements]:
    source, target = _pair(tensor, out, "tensor", "out")
    if source.count == 0:
        raise InvalidArgument(
            f"tensor has no elements (shape {list(source.shape)}); pass one with at least one element"
        )
    return source, target


def _slices(tensor: Any, out: Any) -> tuple[str, int, ctypes.Array[_native.Slice]]:
    """The dtype, the number of elements and the slices of a list of tensors, with its list of results; None: in place."""
    if out is not None and (not isinstance(out, (list, tuple)) or len(out) != len(tensor)):
        raise InvalidArgument(f"tensor is a list of {len(tensor)}; out must be a list of as many")
    if not tensor:
        raise InvalidArgument("the list of tensors is empty; give at least one tensor")
    plain = plain_tensors(tensor) if out is None else None
    if plain is not None:
        dtype, sources, counts = plain
        targets = sources
    else:
        dtype, sources, targets, counts = _checked_slices(tensor, out)
    numbers = array.array("Q", itertools.chain.from_iterable(zip(sources, targets, counts)))
    return dtype, sum(counts), (_native.Slice * len(counts)).from_buffer(numbers)


def _checked_slices(tensor: Any, out: Any) -> tuple[str, list[int], list[int], list[int]]:
    pairs: list[tuple[Elements, Elements]] = []
    for i, each in enumerate(tensor):
        source, target = _pair(each, None if out is None else out[i], f"tensor[{i}]", f"out[{i}]")
        if pairs and source.dtype != pairs[0][0].dtype:
            raise InvalidArgument(
                f"tensor[{i}] is {source.dtype}, tensor[0] is {pairs[0][0].dtype}; the tensors of one op need the same "
                "dtype; start an op for each dtype"
            )
        pairs.append((source, target))
    addresses = [[elements.address for elements in side] for side in zip(*pairs)]
    return pairs[0][0].dtype, addresses[0], addresses[1], [source.count for source, _ in pairs]


def _parts(whole: Elements, part: Elements, whole_name: str, part_name: str) -> int:
    """The number of parts in `whole`."""
    if whole.dtype != part.dtype:
        raise InvalidArgument(f"{whole_name} is {whole.dtype}, {part_name} is {part.dtype}; they need the same dtype")
    if part.count == 0:
        raise InvalidArgument(f"{part_name} has no elements (shape {list(part.shape)}); it needs at least one")
    if whole.count == 0 or whole.count % part.count != 0:
        raise InvalidArgument(
            f"{whole_name} has {whole.count} elements, {part_name} has {part.count}; "
            f"{whole_name} needs as many as {part_name} for each member of the group"
        )
    return whole.count // part.count


class Collectives:
    """Starts collectives of one member. Any thread."""

    def __init__(self, client: Client, handle: ctypes.c_void_p) -> None:
        self._client = client
        self._handle = handle
        # Op objects for reuse: their operation ended within the call that started it.
        self._spare: list[Op] = []

    def all_reduce(
        self,
        owner: object,
        tensor: Any,
        op: str,
        out: Any,
        tag: int,
        on_fault: str | None,
        min_world: int,
        algorithm: str,
        async_op: bool,
        timeout: float | None,
    ) -> OpInfo | Work:
        """Does what Comm.all_reduce() documents. `owner` (the Comm) stays alive while the op is in flight."""
        options = _native.AllReduceOptions()
        options.op = code_of(_native.REDUCE_OPS, op, "op")
        options.min_world = number_of(min_world, "min_world", (1 << 32) - 1)
        options.algorithm = code_of(_native.ALGORITHMS, algorithm, "algorithm")
        if isinstance(tensor, (list, tuple)):
            return self._run_list("all_reduce", owner, options, tensor, out, tag, on_fault, async_op, timeout)
        source, target = _elements(tensor, out)
        return self._run("all_reduce", owner, options, source, target, tag, on_fault, async_op, timeout)

    def reduce_scatter(
        self,
        owner: object,
        tensor: Any,
        op: str,
        out: Any,
        tag: int,
        on_fault: str | None,
        min_world: int,
        algorithm: str,
        async_op: bool,
        timeout: float | None,
    ) -> OpInfo | Work:
        """Does what Comm.reduce_scatter() documents."""
        options = _native.ReduceScatterOptions()
        options.op = code_of(_native.REDUCE_OPS, op, "op")
        options.min_world = number_of(min_world, "min_world", (1 << 32) - 1)
        options.algorithm = code_of(_native.ALGORITHMS, algorithm, "algorithm")
        source = elements_of(tensor, "tensor", written=False)
        target = elements_of(out, "out", written=True)
        options.world = _parts(source, target, "tensor", "out")
        return self._run(
            "reduce_scatter", owner, options, source, target, tag, on_fault, async_op, timeout, target.count
        )

    def all_gather(
        self,
        owner: object,
        tensor: Any,
        out: Any,
        tag: int,
        on_fault: str | None,
        min_world: int,
        algorithm: str,
        async_op: bool,
        timeout: float | None,
    ) -> OpInfo | Work:
        """Does what Comm.all_gather() documents."""
        options = _native.AllGatherOptions()
        options.min_world = number_of(min_world, "min_world", (1 << 32) - 1)
        options.algorithm = code_of(_native.ALGORITHMS, algorithm, "algorithm")
        source = elements_of(tensor, "tensor", written=False)
        target = elements_of(out, "out", written=True)
        options.world = _parts(target, source, "out", "tensor")
        return self._run("all_gather", owner, options, source, target, tag, on_fault, async_op, timeout)

    def broadcast(
        self,
        owner: object,
        tensor: Any,
        root: int,
        root_member: int | None,
        out: Any,
        tag: int,
        on_fault: str | None,
        min_world: int,
        algorithm: str,
        async_op: bool,
        timeout: float | None,
    ) -> OpInfo | Work:
        """Does what Comm.broadcast() documents."""
        options = _native.BroadcastOptions()
        options.root = number_of(root, "root", (1 << 32) - 1)
        if root_member is not None:
            options.root_member = number_of(root_member, "root_member", (1 << 64) - 1)
            if options.root_member == 0:
                raise InvalidArgument("root_member is 0, which is no member; give an id from comm.members")
        options.min_world = number_of(min_world, "min_world", (1 << 32) - 1)
        options.algorithm = code_of(_native.ALGORITHMS, algorithm, "algorithm")
        if isinstance(tensor, (list, tuple)):
            return self._run_list("broadcast", owner, options, tensor, out, tag, on_fault, async_op, timeout)
        source, target = _elements(tensor, out)
        return self._run("broadcast", owner, options, source, target, tag, on_fault, async_op, timeout)

    def barrier(
        self,
        owner: object,
        tag: int,
        on_fault: str | None,
        min_world: int,
        async_op: bool,
        timeout: float | None,
    ) -> OpInfo | Work:
        """Does what Comm.barrier() documents."""
        options = _native.BarrierOptions()
        options.min_world = number_of(min_world, "min_world", (1 << 32) - 1)
        return self._start("barrier", None, owner, options, (), tag, on_fault, async_op, timeout)

    def reduce_numbers(
        self, owner: object, numbers: ctypes.Array[ctypes.c_uint64], op: str, tag: int, timeout: float | None
    ) -> OpInfo:
        """Reduces a small array of numbers in place."""
        elements = Elements(ctypes.addressof(numbers), len(numbers), "uint64", (len(numbers),), numbers)
        options = _native.AllReduceOptions()
        options.op = _native.REDUCE_OPS[op]
        info = self._run("all_reduce", owner, options, elements, elements, tag, None, False, timeout)
        assert isinstance(info, OpInfo)
        return info

    def _run(
        self,
        name: str,
        owner: object,
        options: Any,
        source: Elements,
        target: Elements,
        tag: int,
        on_fault: str | None,
        async_op: bool,
        timeout: float | None,
        count: int | None = None,
    ) -> OpInfo | Work:
        """Fills in the options of collectives with tensors, and starts one. count: None: that of the source."""
        options.source = source.address
        options.target = target.address
        options.count = source.count if count is None else count
        options.dtype = _native.DTYPES[source.dtype]
        of = (source.dtype, source.count)
        return self._start(name, of, owner, options, (source.owner, target.owner), tag, on_fault, async_op, timeout)

    def _run_list(
        self,
        name: str,
        owner: object,
        options: Any,
        tensor: Any,
        out: Any,
        tag: int,
        on_fault: str | None,
        async_op: bool,
        timeout: float | None,
    ) -> OpInfo | Work:
        """Starts one op on several tensors."""
        dtype, count, slices = _slices(tensor, out)
        if count == 0:
            raise InvalidArgument("the tensors of the list have no elements; pass at least one element")
        options.slices = slices
        options.slice_count = len(slices)
        options.dtype = _native.DTYPES[dtype]
        owners = (*tensor, *(out or ()))
        of = (f"{len(slices)} tensors, {dtype}", count)
        return self._start(name, of, owner, options, owners, tag, on_fault, async_op, timeout)

    def _start(
        self,
        name: str,
        of: tuple[str, int] | None,
        owner: object,
        options: Any,
        tensors: tuple[Any, ...],
        tag: int,
        on_fault: str | None,
        async_op: bool,
        timeout: float | None,
    ) -> OpInfo | Work:
        """Fills in the options that all collectives have, and calls lh_<name>(), or lh_<name>_start() if async_op.

        of: what the op is of, and its number of elements, for error texts; None: of nothing.
        """
        if async_op and timeout is not None:
            raise InvalidArgument("timeout has no meaning with async_op=True; pass the timeout to wait()")
        deadline = _native.Deadline(timeout)
        options.tag = number_of(tag, "tag", (1 << 64) - 1)
        options.on_fault = _native.AS_JOINED if on_fault is None else code_of(_native.ON_FAULT, on_fault, "on_fault")
        self._client.sweep()
        try:
            started = self._spare.pop()
        except IndexError:
            started = Op(self._client)
        started.owner = owner
        started.tensors = tensors
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
                    return op_info(info)
            elements = "" if of is None else f" of {of[0]} x {of[1]}"
            started.what = f"{name}{elements}, tag {tag}"
            if started.handle.value is None:
                raise error(status, started.what)
            if async_op:
                return Work(started)
            if started.wait(deadline):
                return started.info()
        except BaseException:
            abandon(started)
            raise
        late = DeadlineExceeded(
            f"{started.what}: no outcome after {timeout} s; the op goes on and uses its tensors; "
            "call wait() of this error's .work"
        )
        late.work = Work(started)
        raise late
