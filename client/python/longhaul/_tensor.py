"""Where the elements of a caller's tensor are."""

from __future__ import annotations

import functools
import sys
from typing import Any

from . import _native
from ._errors import InvalidArgument


class Elements:
    """Contiguous elements in host memory. Valid while `owner` lives."""

    __slots__ = ("address", "count", "dtype", "owner", "shape")

    def __init__(self, address: int, count: int, dtype: str, shape: tuple[int, ...], owner: Any) -> None:
        self.address = address
        self.count = count
        self.dtype = dtype  # a key of DTYPES
        self.shape = shape
        self.owner = owner


@functools.lru_cache(maxsize=64)
def _name_of_dtype(dtype: Any) -> str | None:
    """numpy makes up the name of a dtype anew each time. None: not one that can be reduced."""
    name: str = dtype.name
    return name if name in _native.DTYPES and dtype.isnative else None


def check_unmasked(array: Any, name: str) -> None:
    """Raises InvalidArgument for a masked numpy array."""
    # As below: an array can be masked only if that module is imported.
    masked = sys.modules.get("numpy.ma")
    if masked is not None and isinstance(array, masked.MaskedArray):
        raise InvalidArgument(f"{name} is a masked array, and masks are not sent; pass .filled(value) of it, or .data")


def _elements_of_array(array: Any, name: str, written: bool) -> Elements:
    check_unmasked(array, name)
    dtype = _name_of_dtype(array.dtype)
    if dtype is None:
        raise InvalidArgument(
            f"{name} has dtype {array.dtype}, which cannot be reduced; convert it to one of {', '.join(_native.DTYPES)}"
        )
    flags = array.flags
    # Of any alignment: what is not in the arena is copied there.
    if not flags.c_contiguous:
        raise InvalidArgument(
            f"{name} (shape {array.shape}, strides {array.strides}) is not contiguous; pass numpy.ascontiguousarray() of it"
        )
    if written and not flags.writeable:
        raise InvalidArgument(f"{name} is read-only; pass a copy, or give out= for the result")
    # array.ctypes.data, at a fifth of its price.
    address: int = array.__array_interface__["data"][0]
    return Elements(address, array.size, dtype, array.shape, array)


def _elements_of_tensor(torch: Any, tensor: Any, name: str) -> Elements:
    dtype = str(tensor.dtype).replace("torch.", "")
    if dtype not in _native.DTYPES:
        raise InvalidArgument(
            f"{name} has dtype {tensor.dtype}, which cannot be reduced; convert it to one of {', '.join(_native.DTYPES)}"
        )
    if tensor.device.type != "cpu":
        raise InvalidArgument(
            f"{name} is on {tensor.device}; copy it to a CPU tensor first, best from longhaul.torch.empty"
        )
    if tensor.layout != torch.strided:
        raise InvalidArgument(f"{name} has layout {tensor.layout}; pass {name}.to_dense()")
    if not tensor.is_contiguous():
        raise InvalidArgument(
            f"{name} (shape {tuple(tensor.shape)}, strides {tensor.stride()}) is not contiguous; pass {name}.contiguous()"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise InvalidArgument(f"{name} is a lazy view; pass {name}.resolve_conj().resolve_neg()")
    return Elements(tensor.data_ptr(), tensor.numel(), dtype, tuple(tensor.shape), tensor)


def elements_of(value: Any, name: str, written: bool) -> Elements:
    """Of a numpy array or torch CPU tensor. InvalidArgument or TypeError: what to do instead."""
    # A value can be of a package only if that is imported: neither is imported here.
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return _elements_of_array(value, name, written)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _elements_of_tensor(torch, value, name)
    raise TypeError(f"{name} is a {type(value).__name__}; pass a numpy array or a torch CPU tensor")
