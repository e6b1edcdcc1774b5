"""Finds the elements of what is given to an op, and checks that the op can use them.

Numpy arrays and torch tensors come first, and fast. _buffer.py does the rest.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

from . import _buffer, _native
from ._errors import InvalidArgument

_DTYPE = operator.attrgetter("dtype")
_IS_CPU = operator.attrgetter("is_cpu")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_SHAPE = operator.attrgetter("shape")
_SIZE = operator.attrgetter("size")

_NOTHING = ctypes.c_char * 0

# A tensor whose storage was resized to 0, as FSDP does, has address 0, and its views have their offsets as addresses. So
# only tensors below this address are looked at more closely. Few live tensors are.
SUSPICIOUS = 1 << 32


#: For messages: what may be passed where a tensor is asked for.
TENSORS = "a numpy array, a torch tensor, or another object with DLPack or a writable buffer, such as array.array"


@dataclasses.dataclass(eq=False)
class Elements:
    """Contiguous elements in host memory. The address is valid as long as `owner` is alive.

    copier: None; or the longhaul.torch._copier.Copier of a tensor on a GPU. The address is 0 then, until the op gives
    the elements a place in host memory.
    """

    address: int
    count: int
    dtype: str  # a key of _native.DTYPES
    shape: tuple[int, ...]
    owner: Any
    copier: Any = None


@functools.lru_cache(maxsize=64)
def _name_of_dtype(dtype: Any) -> str | None:
    """The name of a numpy dtype; None: no op takes it. Cached, because numpy computes the name each time."""
    name: str = dtype.name
    return name if name in _native.DTYPES and dtype.isnative else None


def _name_of_torch_dtype(dtype: Any) -> str | None:
    name = str(dtype).removeprefix("torch.")
    return name if name in _native.DTYPES else None


def class_of(module: str, name: str) -> Any:
    """A class of a module; an empty tuple, as isinstance() takes it, if the module does not have it yet.

    Nothing is imported: a value can only be of a module that is imported already. Another thread may be importing it at
    this moment, and then it lacks some of its classes.
    """
    return getattr(sys.modules.get(module), name, ())


def check_unmasked(array: Any, name: str) -> None:
    """Raises InvalidArgument for a masked numpy array."""
    if isinstance(array, class_of("numpy.ma", "MaskedArray")):
        raise InvalidArgument(f"{name} is a masked array, and masks are not sent; pass .filled(value) of it, or .data")


def _elements_of_array(values: Any, name: str, written: bool) -> Elements:
    check_unmasked(values, name)
    dtype = _name_of_dtype(values.dtype)
    if dtype is None:
        raise InvalidArgument(
            f"{name} has dtype {values.dtype}, which no op takes; convert it to one of {', '.join(_native.DTYPES)}"
        )
    flags = values.flags
    # Any alignment will do here: the C library copies tensors that are not in shared memory.
    if not flags.c_contiguous:
        raise InvalidArgument(
            f"{name} (shape {values.shape}, strides {values.strides}) is not contiguous; pass numpy.ascontiguousarray() of it"
        )
    if written and not flags.writeable:
        raise InvalidArgument(f"{name} is read-only; pass a copy, or give out= for the result")
    # The same as array.ctypes.data, in a fifth of the time.
    address: int = values.__array_interface__["data"][0]
    return Elements(address, values.size, dtype, values.shape, values)


def check_local(tensor: Any, name: str) -> None:
    """Raises InvalidArgument for a DTensor."""
    if isinstance(tensor, class_of("torch.distributed.tensor", "DTensor")):
        raise InvalidArgument(
            f"{name} is a DTensor, whose parts lie on several ranks; pass its local part, that is .to_local() of it, "
            "in a group of its own for each shard"
        )


def _check_grad(torch: Any, tensor: Any, name: str) -> None:
    """Torch's own rule for writing in place: autograd would not notice the write."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise InvalidArgument(
            f"{name} requires grad, and autograd does not see what an op writes; call the op in torch.no_grad(), "
            f"or pass {name}.detach(), which shares its memory"
        )


def _is_freed(tensor: Any, address: int) -> bool:
    """Whether a tensor with elements has no memory, or less than its shape needs."""
    end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    return address == 0 or tensor.untyped_storage().nbytes() < end


def address_of(tensor: Any, name: str) -> int:
    """The address of a strided torch CPU tensor. Raises InvalidArgument if it has elements and no memory."""
    address: int = tensor.data_ptr()
    if address < SUSPICIOUS and tensor.numel() and _is_freed(tensor, address):
        raise InvalidArgument(
            f"{name} (shape {tuple(tensor.shape)}) has no memory: its storage was freed or resized, as FSDP does with "
            "parameters outside of forward and backward, or it is a fake tensor; pass a tensor that is alive"
        )
    return address


def _elements_of_tensor(torch: Any, tensor: Any, name: str, written: bool) -> Elements:
    if type(tensor) is not torch.Tensor:
        check_local(tensor, name)
    dtype = _name_of_torch_dtype(tensor.dtype)
    if dtype is None:
        raise InvalidArgument(
            f"{name} has dtype {tensor.dtype}, which no op takes; convert it to one of {', '.join(_native.DTYPES)}"
        )
    copier = None if tensor.device.type == "cpu" else _copier_of(tensor, name)
    if tensor.layout != torch.strided:
        raise InvalidArgument(f"{name} has layout {tensor.layout}; pass {name}.to_dense()")
    if not tensor.is_contiguous():
        raise InvalidArgument(
            f"{name} (shape {tuple(tensor.shape)}, strides {tensor.stride()}) is not contiguous; pass {name}.contiguous()"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise InvalidArgument(f"{name} is a lazy view; pass {name}.resolve_conj().resolve_neg()")
    if written:
        _check_grad(torch, tensor, name)
    address = address_of(tensor, name) if copier is None else 0
    return Elements(address, tensor.numel(), dtype, tuple(tensor.shape), tensor, copier)


def _copier_of(tensor: Any, name: str) -> Any:
    from .torch._copier import copier_for  # not needed for CPU tensors

    return copier_for(tensor.device, name)


def elements_of(value: Any, name: str, written: bool) -> Elements:
    """The elements of a numpy array, a torch tensor on the CPU or a GPU, or an object with DLPack or a buffer.

    name: what error messages call the value. written: the op writes to it. Raises InvalidArgument or TypeError, which
    say what to pass instead.
    """
    if isinstance(value, class_of("numpy", "ndarray")):
        return _elements_of_array(value, name, written)
    if isinstance(value, class_of("torch", "Tensor")):
        return _elements_of_tensor(sys.modules["torch"], value, name, written)
    found = _buffer.find(value, name, written)
    if found is None:
        raise TypeError(f"{name} is a {type(value).__name__}; pass {TENSORS}")
    return Elements(found.address, math.prod(found.shape), found.dtype, found.shape, found.owner)


@dataclasses.dataclass(eq=False)
class Tensors:
    """The tensors on one side of an op, column by column: those of a list, or one.

    Each call looks at them anew, and nothing is kept for the next one: any of them may have another dtype, length or
    place then.

    name: what error messages call the tensor or the list. owners: keep the elements alive. elements: row by row; None:
    all are in host memory.
    """

    name: str
    several: bool
    addresses: list[int]
    counts: list[int]
    dtypes: list[str]
    owners: tuple[Any, ...]
    own_shapes: list[tuple[int, ...]] | None = None  # None: those of the owners
    elements: list[Elements] | None = None

    @staticmethod
    def one(name: str, of: Elements) -> Tensors:
        rows = None if of.copier is None else [of]
        return Tensors(name, False, [of.address], [of.count], [of.dtype], (of.owner,), [of.shape], rows)

    @staticmethod
    def many(name: str, of: list[Elements]) -> Tensors:
        addresses, counts = [each.address for each in of], [each.count for each in of]
        dtypes, shapes = [each.dtype for each in of], [each.shape for each in of]
        rows = of if any(each.copier is not None for each in of) else None
        return Tensors(name, True, addresses, counts, dtypes, tuple(each.owner for each in of), shapes, rows)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return list(map(_SHAPE, self.owners)) if self.own_shapes is None else self.own_shapes

    def name_of(self, i: int) -> str:
        return f"{self.name}[{i}]" if self.several else self.name

    def places(self) -> list[int]:
        """The addresses of those that have elements."""
        return [at for at, count in zip(self.addresses, self.counts) if count] if 0 in self.counts else self.addresses


def tensors_of(value: Any, name: str, written: bool) -> Tensors:
    """elements_of() for a tensor, or for each of a list or tuple of them."""
    if not isinstance(value, (list, tuple)):
        return Tensors.one(name, elements_of(value, name, written))
    if not value:
        raise InvalidArgument("the list of tensors is empty; give at least one tensor")
    kinds = set(map(type, value))
    columns = None
    if kinds == {class_of("numpy", "ndarray")}:
        columns = _columns_of_arrays(value)
    elif all(issubclass(kind, class_of("torch", "Tensor")) for kind in kinds):
        columns = _columns_of_tensors(sys.modules["torch"], value, written)
    if columns is not None:
        return Tensors(name, True, *columns, tuple(value))
    return Tensors.many(name, [elements_of(each, f"{name}[{i}]", written) for i, each in enumerate(value)])


# The next two find addresses, counts and dtypes of a list of tensors that are all of one kind. None: one of them cannot be
# used as it is; elements_of() takes it, or says what is wrong with it. They take a tenth of the time of elements_of(),
# which counts where a model has thousands of small tensors: calls without Python code in between take half the time of a
# loop. Each line reads one thing of all tensors, and takes 0.02 to 0.2 microseconds for each of them, so nothing is read
# that another line tells as well.
_Columns = tuple[list[int], list[int], list[str]]


def _dtype_column(values: Sequence[Any], name_of: Callable[[Any], str | None]) -> list[str] | None:
    dtypes = list(map(_DTYPE, values))
    names = {dtype: name_of(dtype) for dtype in set(dtypes)}
    if None in names.values():
        return None
    column = list(names.values()) * len(values) if len(names) == 1 else [names[dtype] for dtype in dtypes]
    return column  # type: ignore[return-value]


def _columns_of_arrays(values: Sequence[Any]) -> _Columns | None:
    dtypes = _dtype_column(values, _name_of_dtype)
    if dtypes is None:
        return None
    try:
        # Refuses arrays with gaps, and those that are read-only.
        buffers = map(_NOTHING.from_buffer, values)
        addresses = list(map(ctypes.addressof, buffers))
    except (TypeError, ValueError, BufferError):
        return None
    return addresses, list(map(_SIZE, values)), dtypes


def _columns_of_tensors(torch: Any, values: Sequence[Any], written: bool) -> _Columns | None:
    dtypes = _dtype_column(values, _name_of_torch_dtype)
    if dtypes is None or not all(map(_IS_CPU, values)):
        return None
    kind = torch.Tensor
    try:
        # Tensors whose layout is not strided have no is_contiguous() and no data_ptr().
        if not all(map(kind.is_contiguous, values)) or any(map(kind.is_neg, values)):
            return None
        addresses = list(map(kind.data_ptr, values))
    except RuntimeError:
        return None
    if min(addresses) < SUSPICIOUS:
        low = [(each, at) for each, at in zip(values, addresses) if at < SUSPICIOUS]
        if any(_is_freed(each, at) for each, at in low if each.numel()):
            return None
    if written and torch.is_grad_enabled() and any(map(_REQUIRES_GRAD, values)):
        return None
    return addresses, list(map(kind.numel, values)), dtypes
