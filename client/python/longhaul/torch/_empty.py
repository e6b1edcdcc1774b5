"""longhaul.torch.empty(): torch tensors in memory shared with peerd."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch

from .. import _native
from .._arena import Client, arena_of, shape_of
from .._errors import InvalidArgument
from .._programs import PathLike
from ._copier import PIN_BYTES_MIN, copier_for
from ._memory import shared


def empty(
    *size: Any, dtype: torch.dtype | None = None, peerd: PathLike | None = None, pin_memory: bool = False
) -> torch.Tensor:
    """Creates a CPU tensor in memory shared with peerd. An op on it copies nothing.

    size: ints, or one sequence of ints, as for torch.empty.
    dtype: torch.bool, int8 to int64, uint8 to uint64, float16, bfloat16, float32, float64, float8_e4m3fn or float8_e5m2;
        None: torch's default dtype.
    peerd: as for `longhaul.empty`.
    pin_memory: True: pins the memory for the current CUDA device, as in torch.empty: copies between it and a GPU then
        run at full speed, and with non_blocking=True beside the program. It takes 1 MiB at least.

    The content is undefined. The memory is freed when the tensor and all its views are gone. Errors: as for
    `longhaul.empty`; with pin_memory also FailedPrecondition if CUDA cannot be used. If CUDA refuses to pin the memory,
    a warning is logged, and the tensor is not pinned.
    """
    kind = dtype or torch.get_default_dtype()
    if str(kind).replace("torch.", "") not in _native.DTYPES:
        raise InvalidArgument(f"dtype {kind} is not possible; give one of {', '.join(_native.DTYPES)}")
    shape = shape_of(size[0] if len(size) == 1 else size)
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=kind)
    client = arena_of(peerd)
    return _pinned(client, shape, kind) if pin_memory else shared(client, shape, kind)


def _pinned(client: Client, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    index = torch.cuda.current_device() if torch.cuda.is_available() else 0
    copier = copier_for(torch.device("cuda", index), "pin_memory=True: the memory")
    count = math.prod(shape)
    memory = client.alloc(max(count * dtype.itemsize, PIN_BYTES_MIN))
    copier.pin(client, ctypes.addressof(memory), len(memory))
    return torch.frombuffer(memory, dtype=dtype, count=count).view(tuple(shape))
