"""Finds the elements of objects that are neither numpy arrays nor torch tensors: by DLPack, or by the buffer protocol.

Nothing here needs numpy or torch. DLPack: https://dmlc.github.io/dlpack/latest/c_api.html.
"""

from __future__ import annotations

import ctypes
import math
import sys
from typing import Any, NamedTuple

from . import _native
from ._errors import InvalidArgument


class Found(NamedTuple):
    """Contiguous elements in host memory. The address is valid as long as `owner` is alive."""

    address: int
    dtype: str  # a key of _native.DTYPES
    shape: tuple[int, ...]
    owner: Any


# ------------------------------------------------------------------ the buffer protocol

# What a format of the module struct means. The size tells the rest: "l" has 4 or 8 bytes.
_KINDS = {"?": "bool", "c": "uint", "e": "float", "f": "float", "d": "float"}
_KINDS |= dict.fromkeys("bhilqn", "int") | dict.fromkeys("BHILQN", "uint")

_NATIVE_ORDERS = ("@", "=", "<" if sys.byteorder == "little" else ">")

_One = ctypes.c_char * 1
_None = ctypes.c_char * 0


def _dtype_of_format(view: memoryview, name: str) -> str:
    order = view.format[:1] if view.format[:1] in ("@", "=", "<", ">", "!") else ""
    if order and order not in _NATIVE_ORDERS:
        raise InvalidArgument(f"{name} has the byte order of another machine (format {view.format!r}); convert it")
    kind = _KINDS.get(view.format.removeprefix(order), "")
    dtype = kind if kind == "bool" else f"{kind}{8 * view.itemsize}"
    if dtype not in _native.DTYPES:
        raise InvalidArgument(
            f"{name} is a buffer of format {view.format!r}, which no op takes; "
            f"pass a buffer of one of {', '.join(_native.DTYPES)}"
        )
    return dtype


def _of_buffer(value: Any, name: str) -> Found | None:
    try:
        view = memoryview(value)
    except TypeError:
        return None
    except ValueError as problem:  # a memoryview that was released, a closed mmap
        raise InvalidArgument(f"{name} has no memory any more ({problem}); pass a live buffer") from None
    dtype = _dtype_of_format(view, name)
    if not view.c_contiguous:
        raise InvalidArgument(
            f"{name} (shape {view.shape}, strides {view.strides}) is not contiguous; copy it to a contiguous buffer"
        )
    if view.readonly:
        raise InvalidArgument(
            f"{name} is a read-only {type(value).__name__}; pass a writable buffer, as bytearray(...)"
        )
    # This object exports the buffer: a bytearray cannot be resized while the object is alive.
    owner: Any = (_One if view.nbytes else _None).from_buffer(view)
    return Found(ctypes.addressof(owner), dtype, tuple(view.shape or ()), owner)


# ------------------------------------------------------------------ DLPack

_CPU, _CUDA_HOST, _ROCM_HOST = 1, 3, 11
_DEVICES = {2: "CUDA", 4: "OpenCL", 7: "Vulkan", 8: "Metal", 10: "ROCm", 13: "managed CUDA memory", 14: "oneAPI"}
_READ_ONLY = 1  # of DLManagedTensorVersioned.flags

# By code and bits.
_DLPACK_DTYPES = (
    {(0, bits): f"int{bits}" for bits in (8, 16, 32, 64)}
    | {(1, bits): f"uint{bits}" for bits in (8, 16, 32, 64)}
    | {(2, bits): f"float{bits}" for bits in (16, 32, 64)}
    | {(4, 16): "bfloat16", (6, 8): "bool", (10, 8): "float8_e4m3fn", (12, 8): "float8_e5m2"}
)

# Frameworks whose tensors never change. Their DLPack does not say so everywhere, and a write would change constants
# that other tensors share.
_IMMUTABLE = ("jax", "jaxlib", "tensorflow")


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_is_capsule = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _capsule_of(value: Any, name: str) -> Any:
    try:
        try:
            return value.__dlpack__(max_version=(1, 0))
        except TypeError:  # older than DLPack 1.0
            return value.__dlpack__()
    except Exception as problem:  # what a foreign framework raises, for instance for a tensor that requires grad
        raise InvalidArgument(f"{name}: {type(value).__name__}.__dlpack__() failed: {problem}") from problem


def _tensor_in(capsule: Any, name: str) -> tuple[_Tensor, bool]:
    """The tensor in a capsule, and whether it is known to be read-only."""
    if _is_capsule(capsule, b"dltensor_versioned"):
        versioned = _Versioned.from_address(_pointer(capsule, b"dltensor_versioned"))
        if versioned.major != 1:
            raise InvalidArgument(f"{name}: its __dlpack__() gives DLPack {versioned.major}; Longhaul reads version 1")
        return versioned.tensor, bool(versioned.flags & _READ_ONLY)
    if _is_capsule(capsule, b"dltensor"):
        return _Tensor.from_address(_pointer(capsule, b"dltensor")), False
    raise InvalidArgument(f"{name}: its __dlpack__() gives no DLPack capsule, but {capsule!r}")


def _is_contiguous(tensor: _Tensor, shape: tuple[int, ...]) -> bool:
    if not tensor.strides or 0 in shape:
        return True
    due = 1
    for size, stride in zip(reversed(shape), reversed(tensor.strides[: tensor.ndim])):
        if size != 1 and stride != due:
            return False
        due *= size
    return True


def _of_dlpack(value: Any, name: str, written: bool) -> Found:
    device = int(value.__dlpack_device__()[0])
    if device not in (_CPU, _CUDA_HOST, _ROCM_HOST):
        where = _DEVICES.get(device, f"DLPack device type {device}")
        raise InvalidArgument(f"{name} is on a device ({where}); copy it to host memory first, or to a torch tensor")
    # While the capsule is alive and not consumed, so is the memory.
    capsule = _capsule_of(value, name)
    tensor, read_only = _tensor_in(capsule, name)
    dtype = _DLPACK_DTYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype is None:
        raise InvalidArgument(
            f"{name} has DLPack dtype (code {tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes), which no op takes; "
            f"convert it to one of {', '.join(_native.DTYPES)}"
        )
    shape = tuple(tensor.shape[: tensor.ndim])
    if not _is_contiguous(tensor, shape):
        raise InvalidArgument(
            f"{name} (shape {shape}, strides {tuple(tensor.strides[: tensor.ndim])}) is not contiguous; "
            "copy it to a contiguous tensor"
        )
    if written and (read_only or type(value).__module__.split(".")[0] in _IMMUTABLE):
        raise InvalidArgument(f"{name} is a {type(value).__name__}, which cannot be written; give out= for the result")
    address = (tensor.data or 0) + tensor.byte_offset
    if math.prod(shape) == 0:
        address = address or ctypes.addressof(_nowhere)
    elif not tensor.data:
        raise InvalidArgument(f"{name} has no memory: its DLPack data is NULL; pass a tensor that is alive")
    return Found(address, dtype, shape, (value, capsule))


_nowhere = _One()


def find(value: Any, name: str, written: bool) -> Found | None:
    """The elements of an object with DLPack or the buffer protocol; None: it has neither.

    name: what error messages call the value. written: the elements will be written to. Buffers have to be writable in
    any case. Raises InvalidArgument if the elements cannot be used, and says what to pass instead.
    """
    kind = type(value)
    if hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__"):
        return _of_dlpack(value, name, written)
    return _of_buffer(value, name)
