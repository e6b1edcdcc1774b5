"""How the elements of an op are quantized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from . import _native
from ._errors import InvalidArgument, code_of, number_of

_BLOCK_MIN = 32
_BLOCK_MAX = 4096


class Quant(NamedTuple):
    """How elements travel between hosts: the `quantize` of an op.

    codec: "bf16", "int8", "int4" or "auto". "int8" and "int4" are whole numbers with one float32 scale for each block of
        elements: the greatest magnitude in the block, divided by 127 or 7.
    block: elements of a block: a power of two from 32 to 4096. Small blocks have smaller errors, and more scales: 4 bytes
        each. None: 128, which is 25.8 % of the bytes of float32 for "int8" and 13.3 % for "int4". "bf16" has no blocks.
    rounding: "nearest": each element to the nearest value. "stochastic": up or down by chance, so that the mean error is
        0. The random numbers depend on the run, the op and the member, so an op that is redone sends the same bytes.

    among: with "auto": the codecs that Longhaul may choose from, such as ("bf16", "int8"). It takes none, or one of them,
        whichever is the fastest with the measured links: the same at all members. `OpInfo.quantize` says which. An op
        with "auto" keeps no error.

    For those who come from PCCL, the codecs "min-max" and "zero-point-scale" are "int8" with its own rule for scales: here
    no codec has a zero point. Both round to nearest.
    """

    codec: str
    block: int | None = None
    rounding: str = "nearest"
    among: Sequence[str] = ()


def set_quantize(options: Any, value: str | Quant | None) -> None:
    """Fills in the codec of an op."""
    if value is None:
        return
    if isinstance(value, str):
        value = Quant(value)
    if not isinstance(value, Quant):
        raise InvalidArgument(f'quantize is {value!r}; give None, "bf16", "int8", "int4" or a longhaul.Quant')
    if value.codec == "auto":
        _set_auto(options, value)
    elif value.among:
        raise InvalidArgument(f'among of quantize is {value.among!r} with "{value.codec}"; it goes with "auto"')
    else:
        options.quantize = code_of(_native.QUANTIZATIONS, value.codec, "quantize")
    options.rounding = code_of(_native.ROUNDINGS, value.rounding, "rounding of quantize")
    if value.block is None:
        return
    block = number_of(value.block, "block of quantize", (1 << 32) - 1)
    if value.codec == "bf16":
        raise InvalidArgument(f'block of quantize is {block}; "bf16" has no blocks, so leave it None')
    if not _BLOCK_MIN <= block <= _BLOCK_MAX or block & (block - 1):
        raise InvalidArgument(
            f"block of quantize is {block}; give a power of two from {_BLOCK_MIN} to {_BLOCK_MAX}, or None for 128"
        )
    options.block = block


def _set_auto(options: Any, value: Quant) -> None:
    if isinstance(value.among, str) or not value.among:
        raise InvalidArgument(
            f'quantize is "auto" with among={value.among!r}; give the codecs that may be chosen, such as '
            'longhaul.Quant("auto", among=("bf16", "int8"))'
        )
    options.quantize = _native.QUANTIZE_AUTO
    for name in value.among:
        options.codecs |= 1 << (code_of(_native.QUANTIZATIONS, name, "among of quantize") - 1)
