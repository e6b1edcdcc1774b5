"""Collectives of one member: checks the arguments, starts the op, and waits for it unless async_op is set."""

from __future__ import annotations

import ctypes
from typing import Any

from . import _native
from ._arena import Client
from ._errors import DeadlineExceeded, InvalidArgument, code_of, error, number_of
from ._tensor import Elements, elements_of
from ._work import Op, OpInfo, Work, abandon, op_info


def _elements(tensor: Any, out: Any) -> tuple[Elements, Elements]:
    source = elements_of(tensor, "tensor", written=out is None)
    target = source if out is None else elements_of(out, "out", written=True)
    if (target.shape, target.dtype) != (source.shape, source.dtype):
        raise InvalidArgument(
            f"out is {target.dtype} {list(target.shape)}, tensor is {source.dtype} {list(source.shape)}; "
            "pass an out of the same dtype and shape"
        )
    if source.count == 0:
        raise InvalidArgument(
            f"tensor has no elements (shape {list(source.shape)}); pass one with at least one element"
        )
    return source, target


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
        source, target = _elements(tensor, out)
        return self._run("all_reduce", owner, options, source, target, tag, on_fault, async_op, timeout)

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
    ) -> OpInfo | Work:
        """Fills in the options that all collectives have, and calls lh_<name>(), or lh_<name>_start() if async_op."""
        if async_op and timeout is not None:
            raise InvalidArgument("timeout has no meaning with async_op=True; pass the timeout to wait()")
        deadline = _native.Deadline(timeout)
        options.source = source.address
        options.target = target.address
        options.count = source.count
        options.dtype = _native.DTYPES[source.dtype]
        options.tag = number_of(tag, "tag", (1 << 64) - 1)
        options.on_fault = _native.AS_JOINED if on_fault is None else code_of(_native.ON_FAULT, on_fault, "on_fault")
        self._client.sweep()
        try:
            started = self._spare.pop()
        except IndexError:
            started = Op(self._client)
        started.owner = owner
        started.tensors = (source.owner, target.owner)
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
            started.what = f"{name} of {source.dtype} x {source.count}, tag {tag}"
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
