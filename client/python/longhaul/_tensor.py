"""Finds the elements of a numpy array or torch tensor, and checks that an op can use them."""

from __future__ import annotations

import array
import functools
import operator
import sys
from typing import Any

from . import _native
from ._errors import InvalidArgument

_DTYPE = operator.attrgetter("dtype")
_IS_CPU = operator.attrgetter("is_cpu")


class Elements:
    """Contiguous elements in host memory. The address is valid as long as `owner` is alive.

    copier: None; or the longhaul.torch._copier.Copier of a tensor on a GPU. The address is 0 then, until the op gives
    the elements a place in host memory.
    """

    __slots__ = ("address", "copier", "count", "dtype", "owner", "shape")

    def __init__(
        self, address: int, count: int, dtype: str, shape: tuple[int, ...], owner: Any, copier: Any = None
    ) -> None:
        self.address = address
        self.count = count
        self.dtype = dtype  # a key of _native.DTYPES
        self.shape = shape
        self.owner = owner
        self.copier = copier


@functools.lru_cache(maxsize=64)
def _name_of_dtype(dtype: Any) -> str | None:
    """The name of a numpy dtype; None: no op takes it. Cached, because numpy computes the name each time."""
    name: str = dtype.name
    return name if name in _native.DTYPES and dtype.isnative else None


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


def _elements_of_tensor(torch: Any, tensor: Any, name: str) -> Elements:
    dtype = str(tensor.dtype).replace("torch.", "")
    if dtype not in _native.DTYPES:
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
    address = tensor.data_ptr() if copier is None else 0
    return Elements(address, tensor.numel(), dtype, tuple(tensor.shape), tensor, copier)


def _copier_of(tensor: Any, name: str) -> Any:
    from .torch._copier import copier_for  # not needed for CPU tensors

    return copier_for(tensor.device, name)


def elements_of(value: Any, name: str, written: bool) -> Elements:
    """The elements of a numpy array or torch tensor, on the CPU or a GPU.

    name: what error messages call the value. written: the op writes to it. Raises InvalidArgument or TypeError, which
    say what to pass instead.
    """
    if isinstance(value, class_of("numpy", "ndarray")):
        return _elements_of_array(value, name, written)
    if isinstance(value, class_of("torch", "Tensor")):
        return _elements_of_tensor(sys.modules["torch"], value, name)
    raise TypeError(f"{name} is a {type(value).__name__}; pass a numpy array or a torch tensor")


def numbers(values: Any) -> array.array[int]:
    return array.array("Q", values)


def plain_tensors(values: Any) -> tuple[array.array[int], array.array[int], array.array[int]] | None:
    """Does for a list of torch tensors what elements_of() does for each: their addresses, lengths and dtypes (lh_dtype).

    None: not all are torch CPU tensors that can be used as they are. elements_of() then says what is wrong. This takes a
    tenth of the time of elements_of(), which counts where a model has thousands of small tensors.
    """
    kind = class_of("torch", "Tensor")
    if not values or not isinstance(values[0], kind):
        return None
    if not all(issubclass(each, kind) for each in set(map(type, values))):
        return None
    # Calls without Python code in between take half the time of a loop. Each line reads one thing of all tensors, and
    # takes about a tenth of a microsecond for each of them, so nothing is read that another line tells as well: tensors
    # whose layout is not strided have no is_contiguous() and no data_ptr().
    dtypes = list(map(_DTYPE, values))
    codes = {dtype: _native.DTYPES.get(str(dtype).replace("torch.", "")) for dtype in set(dtypes)}
    if None in codes.values() or not all(map(_IS_CPU, values)):
        return None
    try:
        if not all(map(kind.is_contiguous, values)) or any(map(kind.is_neg, values)):
            return None
        addresses = numbers(list(map(kind.data_ptr, values)))
    except RuntimeError:
        return None
    if len(codes) == 1:
        types = numbers(codes.values()) * len(values)
    else:
        types = numbers([codes[dtype] for dtype in dtypes])
    return addresses, numbers(list(map(kind.numel, values))), types
