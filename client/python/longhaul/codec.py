"""Encodes and decodes what quantized ops send, without a peerd.

For tests, for the sizes of messages, and as a reference for kernels on other devices. Encoding to the nearest value
gives the same bytes as peerd (`peerd/collective/block_codec.h`), for numpy arrays and for torch tensors on any device.
What peerd encoded with stochastic rounding decodes in the same way. docs/wire_format.md describes the bytes.

    from longhaul import codec

    values = np.random.default_rng(0).standard_normal(1000, np.float32)
    sent = codec.encode(values, "int4")  # 532 bytes
    got = codec.decode(sent, 1000, "int4")
    lost = values - got
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from . import _native
from ._errors import InvalidArgument, number_of
from ._quant import Quant, quant_of
from ._tensor import class_of

__all__ = ["decode", "encode", "encoded_bytes"]

_MAGIC = 12582912.0  # 1.5 * 2^23: a float32 of about this size has whole numbers as its last places
_FLOAT_MAX = 3.4028234663852886e38
_SCALE_MIN = 1.1754943508222875e-38  # the least float32 that is not denormal
_INFINITY = 0x7F800000
_NAN = 0x7FC00000
_MAGNITUDE = 0x7FFFFFFF
# The greatest number, by codec: bf16, which has none, int8, int4.
_MOST = {1: 0, 2: 127, 3: 7}


class _Form(NamedTuple):
    most: int  # 0: bfloat16
    block: int

    def bytes_of(self, count: int) -> int:
        if not self.most:
            return 2 * count
        blocks = -(-count // self.block)
        return 4 * blocks + (count if self.most == 127 else (count + 1) // 2)


def _form_of(quantize: str | Quant) -> _Form:
    quant = quant_of(quantize)
    if quant is None or quant.codec == "auto":
        raise InvalidArgument(f"quantize is {quant and quant.codec}; give a codec")
    return _Form(_MOST[_native.QUANTIZATIONS[quant.codec]], quant.block or 128)


def encoded_bytes(count: int, quantize: str | Quant) -> int:
    """The bytes of `count` encoded elements.

    count: elements of one range, whose blocks count from its beginning.
    quantize: as in `Comm.all_reduce`, but not None.
    """
    return _form_of(quantize).bytes_of(number_of(count, "count", (1 << 63) - 1))


def encode(values: Any, quantize: str | Quant) -> Any:
    """Encodes elements, each to the nearest value.

    values: a numpy array or a torch tensor of float32, float16 or bfloat16. Its elements are one range, in the order of
        C.
    quantize: as in `Comm.all_reduce`, but not None, and with rounding "nearest".

    Returns a flat array or tensor of bytes (uint8), on the same device.
    """
    form = _form_of(quantize)
    if quant_of(quantize).rounding != "nearest":  # type: ignore[union-attr]
        raise InvalidArgument(
            'rounding of quantize is "stochastic", whose random numbers only peerd knows; encode with "nearest"'
        )
    tensor = isinstance(values, class_of("torch", "Tensor"))
    if not tensor:
        values = np.asarray(values)
    if str(values.dtype).removeprefix("torch.") not in ("float32", "float16", "bfloat16"):
        raise InvalidArgument(f"values is {values.dtype}; give float32, float16 or bfloat16")
    if tensor:
        torch = sys.modules["torch"]
        return _encode(torch, values.detach().to(torch.float32).contiguous().flatten(), form)
    return _encode(np, np.ascontiguousarray(values, np.float32).ravel(), form)


def decode(encoded: Any, count: int, quantize: str | Quant) -> Any:
    """Decodes `count` elements that were encoded to the nearest value, or with stochastic rounding.

    encoded: bytes, a numpy array or a torch tensor, of `encoded_bytes(count, quantize)` bytes.
    count: elements of the range.
    quantize: what they were encoded with.

    Returns a flat float32 array; for a torch tensor, a float32 tensor on the same device.
    """
    form = _form_of(quantize)
    wanted = form.bytes_of(number_of(count, "count", (1 << 63) - 1))
    tensor = isinstance(encoded, class_of("torch", "Tensor"))
    data: Any = encoded if tensor else np.frombuffer(encoded, np.uint8)
    size = data.numel() if tensor else data.size
    if str(data.dtype).replace("torch.", "") != "uint8" or size != wanted:
        raise InvalidArgument(f"encoded is {data.dtype} x {size}; {count} elements have {wanted} bytes (uint8)")
    return _decode(sys.modules["torch"] if tensor else np, data.flatten(), count, form)


def _ranges(count: int, form: _Form) -> Iterator[tuple[int, int, int, int]]:
    """The whole blocks, and the short last one: begin and end of elements, blocks, bytes of one block."""
    whole = count // form.block * form.block
    if whole:
        yield 0, whole, whole // form.block, form.bytes_of(form.block)
    if count > whole:
        yield whole, count, 1, form.bytes_of(count - whole)


# What follows works on numpy arrays and on torch tensors: xp is the module of the values. Numbers are int32, as torch has
# no operations on uint32. Whole arrays stand for numbers where the result could have another dtype or other bits
# otherwise: to divide by a number, CUDA multiplies by its reciprocal, which is rounded in another way.


def _cast(values: Any, dtype: Any) -> Any:
    return values.astype(dtype) if isinstance(values, np.ndarray) else values.to(dtype)


def _encode(xp: Any, values: Any, form: _Form) -> Any:
    if not form.most:
        return _encode_bfloat16(xp, values)
    parts = [_cast(values[:0], xp.uint8)]
    for begin, end, blocks, _ in _ranges(len(values), form):
        rows = values[begin:end].reshape(blocks, -1)
        greatest = xp.amax(rows.view(xp.int32) & _MAGNITUDE, 1).view(xp.float32)
        finite = xp.isfinite(greatest)
        most, zeros = xp.full_like(greatest, form.most), xp.zeros_like(greatest)
        with np.errstate(all="ignore"):
            scale = greatest / most
            scale = xp.where(scale * most > _FLOAT_MAX, xp.nextafter(scale, zeros), scale)
            scale = xp.where(finite & (scale < _SCALE_MIN), zeros, scale)
            numbers = (rows / scale[:, None] + _MAGIC).view(xp.int32) & 0xFF
        numbers = xp.where((finite & (scale > 0))[:, None], numbers, xp.zeros_like(numbers))
        bits = scale.view(xp.int32)
        bits = xp.where(finite, bits, xp.full_like(bits, _NAN))
        if form.most == 7:
            numbers = numbers & 0xF
            if numbers.shape[1] % 2:
                numbers = xp.concatenate([numbers, xp.zeros_like(numbers[:, :1])], 1)
            numbers = numbers[:, 0::2] | numbers[:, 1::2] << 4
        scales = xp.stack([bits >> shift & 0xFF for shift in (0, 8, 16, 24)], 1)
        parts.append(_cast(xp.concatenate([scales, numbers], 1), xp.uint8).reshape(-1))
    return xp.concatenate(parts)


def _encode_bfloat16(xp: Any, values: Any) -> Any:
    bits = values.view(xp.int32)
    magnitude = bits & _MAGNITUDE
    # The sum is too large for int32 for NaNs only, which are replaced.
    rounded = (magnitude + 0x7FFF + (bits >> 16 & 1)) >> 16
    rounded = xp.where(rounded < 0x7F80, rounded, xp.full_like(rounded, 0x7F7F))
    rounded = xp.where(magnitude != _INFINITY, rounded, xp.full_like(rounded, _INFINITY >> 16)) | (bits >> 16 & 0x8000)
    rounded = xp.where(magnitude <= _INFINITY, rounded, xp.full_like(rounded, _NAN >> 16))
    return _cast(xp.stack([rounded & 0xFF, rounded >> 8], 1), xp.uint8).reshape(-1)


def _decode(xp: Any, data: Any, count: int, form: _Form) -> Any:
    if not form.most:
        pairs = _cast(data.reshape(-1, 2), xp.int32)
        return (pairs[:, 0] << 16 | pairs[:, 1] << 24).view(xp.float32)
    parts = [_cast(data[:0], xp.float32)]
    done = 0
    for begin, end, blocks, size in _ranges(count, form):
        rows = _cast(data[done : done + blocks * size].reshape(blocks, size), xp.int32)
        done += blocks * size
        bits: Any = sum(rows[:, i] << 8 * i for i in range(4))
        numbers = rows[:, 4:]
        if form.most == 7:
            numbers = xp.stack([numbers & 0xF, numbers >> 4], 2).reshape(blocks, -1)
        sign = 8 if form.most == 7 else 128
        numbers = (numbers ^ sign) - sign
        values = _cast(numbers[:, : (end - begin) // blocks], xp.float32)
        parts.append((values * bits.view(xp.float32)[:, None]).reshape(-1))
    return xp.concatenate(parts)
