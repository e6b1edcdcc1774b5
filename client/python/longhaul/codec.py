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
    if isinstance(values, class_of("torch", "Tensor")):
        return _torch_encode(values, form)
    array = np.asarray(values)
    if array.dtype.name not in ("float32", "float16", "bfloat16"):
        raise InvalidArgument(f"values is {array.dtype}; give float32, float16 or bfloat16")
    return _numpy_encode(np.ascontiguousarray(array, np.float32).ravel(), form)


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
    return _torch_decode(data.flatten(), count, form) if tensor else _numpy_decode(data, count, form)


def _ranges(count: int, form: _Form) -> Iterator[tuple[int, int, int, int]]:
    """The whole blocks, and the short last one: begin and end of elements, blocks, bytes of one block."""
    whole = count // form.block * form.block
    if whole:
        yield 0, whole, whole // form.block, form.bytes_of(form.block)
    if count > whole:
        yield whole, count, 1, form.bytes_of(count - whole)


# ------------------------------------------------------------------ numpy


def _numpy_encode(values: np.ndarray, form: _Form) -> np.ndarray:
    if not form.most:
        bits = values.view(np.uint32)
        magnitude = bits & np.uint32(_MAGNITUDE)
        rounded = (magnitude + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        rounded = np.minimum(rounded, np.uint32(0x7F7F))
        rounded = np.where(magnitude == _INFINITY, np.uint32(_INFINITY >> 16), rounded)
        rounded |= (bits >> np.uint32(16)) & np.uint32(0x8000)
        rounded = np.where(magnitude > _INFINITY, np.uint32(_NAN >> 16), rounded)
        return rounded.astype("<u2").view(np.uint8)
    out = np.empty(form.bytes_of(values.size), np.uint8)
    done = 0
    for begin, end, blocks, size in _ranges(values.size, form):
        rows = values[begin:end].reshape(blocks, -1)
        to = out[done : done + blocks * size].reshape(blocks, size)
        done += blocks * size
        greatest = (rows.view(np.uint32) & np.uint32(_MAGNITUDE)).max(1).view(np.float32)
        finite = greatest.view(np.uint32) < _INFINITY
        with np.errstate(all="ignore"):
            most = np.float32(form.most)
            scale = greatest / most
            scale = np.where(scale * most > np.float32(_FLOAT_MAX), np.nextafter(scale, np.float32(0)), scale)
            scale = np.where(finite & (scale < np.float32(_SCALE_MIN)), np.float32(0), scale)
            shifted = rows / scale[:, None] + np.float32(_MAGIC)
        numbers = (shifted.view(np.uint32) & np.uint32(0xFF)).astype(np.uint8)
        numbers[~(finite & (scale > 0))] = 0
        scale = np.where(finite, scale.view(np.uint32), np.uint32(_NAN))
        to[:, :4] = scale.astype("<u4").view(np.uint8).reshape(blocks, 4)
        if form.most == 7:
            numbers = np.pad(numbers & 0xF, ((0, 0), (0, numbers.shape[1] % 2)))
            numbers = (numbers[:, 0::2] | numbers[:, 1::2] << 4).astype(np.uint8, copy=False)
        to[:, 4:] = numbers
    return out


def _numpy_decode(data: np.ndarray, count: int, form: _Form) -> np.ndarray:
    if not form.most:
        return (data.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    out = np.empty(count, np.float32)
    done = 0
    for begin, end, blocks, size in _ranges(count, form):
        rows = data[done : done + blocks * size].reshape(blocks, size)
        done += blocks * size
        scale = np.ascontiguousarray(rows[:, :4]).view("<f4").astype(np.float32)
        numbers: Any = np.ascontiguousarray(rows[:, 4:])
        if form.most == 7:
            halves = np.stack([numbers & 0xF, numbers >> 4], 2).reshape(blocks, -1)
            numbers = np.subtract(halves ^ 8, 8, dtype=np.uint8)
        values = numbers.view(np.int8)[:, : (end - begin) // blocks].astype(np.float32)
        out[begin:end].reshape(blocks, -1)[:] = values * scale
    return out


# ------------------------------------------------------------------ torch


def _torch_encode(values: Any, form: _Form) -> Any:
    import torch

    if values.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise InvalidArgument(f"values is {values.dtype}; give float32, float16 or bfloat16")
    values = values.detach().to(torch.float32).contiguous().flatten()
    if not form.most:
        bits = values.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        magnitude = bits & _MAGNITUDE
        rounded = (magnitude + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = rounded.clamp(max=0x7F7F)
        rounded = rounded.where(magnitude != _INFINITY, _INFINITY >> 16) | ((bits >> 16) & 0x8000)
        rounded = rounded.where(magnitude <= _INFINITY, _NAN >> 16)
        return torch.stack([rounded & 0xFF, rounded >> 8], 1).to(torch.uint8).flatten()
    out = torch.empty(form.bytes_of(values.numel()), dtype=torch.uint8, device=values.device)
    # A tensor: to divide by a number, CUDA multiplies by its reciprocal, which is rounded in another way.
    most = torch.tensor(float(form.most), device=values.device)
    done = 0
    for begin, end, blocks, size in _ranges(values.numel(), form):
        rows = values[begin:end].view(blocks, -1)
        to = out[done : done + blocks * size].view(blocks, size)
        done += blocks * size
        greatest = (rows.view(torch.int32) & _MAGNITUDE).amax(1).view(torch.float32)
        finite = greatest.isfinite()
        scale = greatest / most
        scale = torch.where(scale * most > _FLOAT_MAX, torch.nextafter(scale, torch.zeros_like(scale)), scale)
        scale = torch.where(finite & (scale < _SCALE_MIN), torch.zeros_like(scale), scale)
        numbers = (rows / scale[:, None] + _MAGIC).view(torch.int32) & 0xFF
        numbers = numbers.where((finite & (scale > 0))[:, None], 0).to(torch.uint8)
        bits = scale.view(torch.int32).where(finite, _NAN)
        to[:, :4] = torch.stack([bits >> shift & 0xFF for shift in (0, 8, 16, 24)], 1).to(torch.uint8)
        if form.most == 7:
            numbers = torch.nn.functional.pad(numbers & 0xF, (0, numbers.shape[1] % 2))
            numbers = numbers[:, 0::2] | numbers[:, 1::2] << 4
        to[:, 4:] = numbers
    return out


def _torch_decode(data: Any, count: int, form: _Form) -> Any:
    import torch

    if not form.most:
        pairs = data.view(-1, 2).to(torch.int32)
        return (pairs[:, 0] << 16 | pairs[:, 1] << 24).view(torch.float32)
    out = torch.empty(count, dtype=torch.float32, device=data.device)
    done = 0
    for begin, end, blocks, size in _ranges(count, form):
        rows = data[done : done + blocks * size].view(blocks, size)
        done += blocks * size
        bits: Any = sum(rows[:, i].to(torch.int32) << 8 * i for i in range(4))
        numbers = rows[:, 4:].to(torch.int32)
        if form.most == 7:
            halves = torch.stack([numbers & 0xF, numbers >> 4], 2).view(blocks, -1)
            numbers = (halves ^ 8) - 8
        else:
            numbers = (numbers ^ 128) - 128
        values = numbers[:, : (end - begin) // blocks].to(torch.float32)
        out[begin:end].view(blocks, -1)[:] = values * bits.view(torch.float32)[:, None]
    return out
