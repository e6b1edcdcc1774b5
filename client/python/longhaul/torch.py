"""Longhaul for PyTorch: torch tensors in memory shared with peerd.

`import longhaul` does not import torch. The first use of `longhaul.torch` imports this module, and torch with it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from . import _native
from ._arena import arena_of, shape_of
from ._errors import InvalidArgument
from ._programs import PathLike

__all__ = ["empty"]


def empty(*size: Any, dtype: torch.dtype | None = None, peerd: PathLike | None = None) -> torch.Tensor:
    """Creates a CPU tensor in memory shared with peerd. An op on it copies nothing.

    size: ints, or one sequence of ints, as for torch.empty.
    dtype: torch.bool, int8 to int64, uint8 to uint64, float16, bfloat16, float32, float64, float8_e4m3fn or float8_e5m2;
        None: torch's default dtype.
    peerd: as for `longhaul.empty`.

    The content is undefined. The memory is freed when the tensor and all its views are gone. Errors: as for
    `longhaul.empty`.
    """
    kind = dtype or torch.get_default_dtype()
    if str(kind).replace("torch.", "") not in _native.DTYPES:
        raise InvalidArgument(f"dtype {kind} is not possible; give one of {', '.join(_native.DTYPES)}")
    shape = shape_of(size[0] if len(size) == 1 else size)
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=kind)
    memory = arena_of(peerd).alloc(count * torch.empty((), dtype=kind).element_size())
    return torch.frombuffer(memory, dtype=kind).view(shape)
