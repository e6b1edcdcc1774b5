"""Torch tensors in memory shared with peerd, and the local part of DTensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .._arena import Client


def shared(client: Client | None, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of at least one element, with undefined content, in memory shared with the peerd of `client`.

    client None: in memory of this process, as long as nobody knows the peerd. Ops and syncs copy it.
    """
    if client is None:
        return torch.empty(tuple(shape), dtype=dtype)
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
