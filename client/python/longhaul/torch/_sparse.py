"""The largest elements of each chunk of a tensor, as few bytes: what `TopK` puts on the wire. Pure functions.

A tensor is taken as one flat row of float32 and cut into chunks of equal length; the last chunk may be shorter. The
bytes of one chunk are its record. All records of chunks of one length are equally long. A record has three parts,
without gaps, numbers in little-endian order:

| part | bytes | content |
| --- | --- | --- |
| scales | 8 | two float32: the lowest and the highest magnitude that a code can stand for |
| indices | ceil(k / 8) * index bits | for each element that is sent, its place in the chunk |
| codes | ceil(k / 8) * bits | for each of these elements, the lowest bit: negative; the bits above: its level |

Indices and codes are streams of bits: eight numbers of w bits take w bytes, and the number i begins at bit i * w. If k
is not a multiple of 8, the numbers that fill up the last eight are 0. The elements come with the largest magnitude
first. Level l stands for the magnitude low + l * (high - low) / (levels - 1), where levels = 2 ** (bits - 1).

A chunk with a NaN or an infinity has NaN as both scales. Then every element of the chunk decodes to NaN.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

_SCALES_BYTES = 8
_MAGNITUDE = 0x7FFFFFFF  # of the bits of a float32: all but the sign
_INFINITY = 0x7F800000


class Form(NamedTuple):
    """How chunks of one length are written."""

    length: int  #: elements of a chunk
    k: int  #: elements that are sent
    index_bits: int
    bits: int  #: of a code: 2 to 8

    @property
    def nbytes(self) -> int:
        """Bytes of a record."""
        return _SCALES_BYTES + _packed_bytes(self.k, self.index_bits) + _packed_bytes(self.k, self.bits)

    @property
    def levels(self) -> int:
        return 1 << (self.bits - 1)


def form_of(length: int, k: int, chunk: int, bits: int) -> Form:
    """The form of chunks of `length` elements, where a chunk of `chunk` elements sends k. Shorter ones send as large a
    share of theirs, rounded up."""
    return Form(length, math.ceil(k * length / chunk), max(1, (chunk - 1).bit_length()), bits)


class Decoded(NamedTuple):
    """What records say. One row for each chunk."""

    indices: torch.Tensor  #: int64 [chunks, k]
    values: torch.Tensor  #: float32 [chunks, k]
    broken: torch.Tensor  #: bool [chunks]: all elements of the chunk are NaN


# ---------------------------------------------------------------------------- chunks to records, and back


def encode(chunks: torch.Tensor, form: Form) -> torch.Tensor:
    """float32 [chunks, length] to records, uint8 [chunks, nbytes]. Of equal magnitudes, the first ones are taken."""
    indices = largest(chunks, form.k, form.index_bits)
    values = chunks.gather(1, indices)
    magnitudes = values.abs()
    broken = ~magnitudes[:, :1].isfinite()  # the first one is the largest; NaN counts as larger than infinity
    magnitudes = torch.where(broken, 0.0, magnitudes)
    low, high, level = _halves(magnitudes) if form.bits == 2 else _grid(magnitudes, form.levels)
    scales = torch.cat([low, high], 1)
    # The sum of finite numbers may be infinite.
    scales = torch.where(broken | ~scales.isfinite().all(1, keepdim=True), torch.nan, scales)
    code = (level << 1) | (values < 0)
    return torch.cat(
        [
            scales.contiguous().view(torch.uint8),
            pack(indices.to(torch.int32), form.index_bits),
            pack(code, form.bits),
        ],
        1,
    )


def decode(records: torch.Tensor, form: Form) -> Decoded:
    """Records, uint8 [chunks, nbytes], to what they say. The same bits on every processor."""
    lengths = [_SCALES_BYTES, _packed_bytes(form.k, form.index_bits), _packed_bytes(form.k, form.bits)]
    scales, indices, codes = records.split(lengths, 1)
    # A copy, since the floats of a record may lie at any address.
    low, high = scales.clone(memory_format=torch.contiguous_format).view(torch.float32).split(1, 1)
    code = unpack(codes, form.bits, form.k)
    # One operation at a time: fused ones round otherwise. The highest level is `high` exactly.
    step = (high - low) / torch.full_like(low, max(1, form.levels - 1))
    level = code >> 1
    magnitudes = torch.where(level == form.levels - 1, high, low + level * step)
    values = torch.where((code & 1).bool(), -magnitudes, magnitudes)
    return Decoded(unpack(indices, form.index_bits, form.k).to(torch.int64), values, low.isnan().squeeze(1))


def add(decoded: Decoded, to: torch.Tensor) -> None:
    """Adds what records say to chunks, float32 [chunks, length]. No two elements of a chunk have the same index."""
    to.scatter_add_(1, decoded.indices, decoded.values)
    to[decoded.broken] = torch.nan


def take_out(decoded: Decoded, of: torch.Tensor) -> None:
    """Takes what records say out of the chunks that they were made from: what is left was not sent.

    Broken chunks become 0. All members see the NaN in what was sent; left here, it would come again in each round.
    """
    of.scatter_add_(1, decoded.indices, -decoded.values)
    of[decoded.broken] = 0


# ---------------------------------------------------------------------------- parts of a record


def largest(chunks: torch.Tensor, k: int, index_bits: int) -> torch.Tensor:
    """The indices, int64 [chunks, k], of the k largest magnitudes of each chunk, the largest first.

    Of equal magnitudes the lower index comes first. torch.topk() does not promise that. So it gets numbers that are all
    different: the bits of the magnitude, which are in the order of the magnitudes, and below them the index, reversed.
    """
    last = chunks.shape[1] - 1
    reversed_index = torch.arange(last, -1, -1, device=chunks.device)
    keys = chunks.contiguous().view(torch.int32).bitwise_and(_MAGNITUDE).to(torch.int64)
    keys = keys.bitwise_left_shift_(index_bits).bitwise_or_(reversed_index)
    found = torch.topk(keys, k, dim=1, sorted=True).values
    return last - found.bitwise_and_((1 << index_bits) - 1)


def _halves(magnitudes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Low, high, and the level of each element: the means of those below the mean of all, and of the others.

    Each element becomes the mean of its half, so what is lost is at right angles to what is sent: sending never makes
    the rest larger.
    """
    upper = magnitudes >= magnitudes.mean(1, keepdim=True)
    upper[:, 0] = True  # if all are equal, the mean may be rounded up
    count = upper.sum(1, keepdim=True)
    high = torch.where(upper, magnitudes, 0.0).sum(1, keepdim=True) / count
    low = torch.where(upper, 0.0, magnitudes).sum(1, keepdim=True) / (magnitudes.shape[1] - count).clamp(min=1)
    return low, high, upper.to(torch.int32)


def _grid(magnitudes: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Low, high, and the level of each element: the nearest of equal steps from the least to the largest."""
    low, high = magnitudes[:, -1:], magnitudes[:, :1]
    step = (high - low) / (levels - 1)
    level = ((magnitudes - low) / step).nan_to_num(0.0).round().clamp(0, levels - 1)
    return low, high, level.to(torch.int32)


def _packed_bytes(count: int, width: int) -> int:
    return math.ceil(count / 8) * width


def pack(numbers: torch.Tensor, width: int) -> torch.Tensor:
    """int32 [rows, count], each below 2 ** width, width at most 16, to uint8 [rows, ceil(count / 8) * width]."""
    rows, count = numbers.shape
    eights = torch.nn.functional.pad(numbers, (0, -count % 8)).view(rows, -1, 8)
    packed = eights.new_zeros(rows, eights.shape[1], width)
    for i in range(8):
        first, shift = divmod(i * width, 8)
        number = eights[..., i] << shift
        for byte in range(first, min(first + 3, width)):
            packed[..., byte] |= (number >> 8 * (byte - first)) & 0xFF
    return packed.to(torch.uint8).view(rows, -1)


def unpack(packed: torch.Tensor, width: int, count: int) -> torch.Tensor:
    """What pack() was given, int32 [rows, count]."""
    rows = packed.shape[0]
    eights = packed.reshape(rows, -1, width).to(torch.int32)
    numbers = eights.new_zeros(rows, eights.shape[1], 8)
    for i in range(8):
        first, shift = divmod(i * width, 8)
        for byte in range(first, min(first + 3, width)):
            numbers[..., i] |= eights[..., byte] << 8 * (byte - first)
        numbers[..., i] >>= shift
    return numbers.bitwise_and_((1 << width) - 1).view(rows, -1)[:, :count]
