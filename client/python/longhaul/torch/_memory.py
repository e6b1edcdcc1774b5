"""Torch tensors in memory shared with peerd."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .. import _native
from .._arena import Client, arena_of, shape_of
from .._errors import InvalidArgument
from .._programs import PathLike


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
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=kind)
    return shared(arena_of(peerd), shape, kind)


def shared(client: Client, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of at least one element, with undefined content, in memory shared with the peerd of `client`."""
    return torch.frombuffer(client.alloc(math.prod(shape) * dtype.itemsize), dtype=dtype).view(tuple(shape))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor that lies on this rank, which shares its memory; any other tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    local: torch.Tensor = to_local()
    # An all-gather or all-reduce in flight inside to_local() gives an AsyncCollectiveTensor.
    wait = getattr(local, "wait", None)
    return local if wait is None else wait()
