"""Buckets: many tensors side by side in few flat tensors, in memory shared with peerd. An op on a bucket copies nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from .._arena import Client
from ._memory import shared


class Bucket:
    """Tensors of one dtype, side by side in one flat CPU tensor.

    numbers: which of the tensors given to `buckets_of` it holds, in its order.
    flat: all elements. views: the part of each tensor in it, in the shape of that tensor.
    """

    def __init__(
        self, client: Client | None, numbers: Sequence[int], shapes: Sequence[torch.Size], dtype: torch.dtype
    ) -> None:
        self.client = client
        self.numbers = tuple(numbers)
        total = sum(math.prod(shape) for shape in shapes)
        self._shapes = list(shapes)
        self.flat = shared(client, (total,), dtype) if total else torch.empty(0, dtype=dtype)
        self.views = self.views_of(self.flat)

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parts of another flat tensor, divided as `flat` is."""
        lengths = [math.prod(shape) for shape in self._shapes]
        parts: tuple[torch.Tensor, ...] = torch.split_with_sizes(flat, lengths)
        return [part.view(shape) for part, shape in zip(parts, self._shapes)]

    @property
    def nbytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()


def buckets_of(
    client: Client | None, tensors: Sequence[torch.Tensor], bytes_max: int, *, dtype: torch.dtype | None = None
) -> list[Bucket]:
    """Divides tensors among buckets, in the order given. A bucket ends at a change of dtype, or before `bytes_max`.

    A tensor that is longer than `bytes_max` gets a bucket of its own. dtype: that of all buckets; None: the tensors' own.
    The contents of the buckets are undefined.
    """
    return [
        Bucket(client, numbers, [tensors[number].shape for number in numbers], kind)
        for kind, numbers in division(tensors, bytes_max, dtype)
    ]


def division(
    tensors: Iterable[torch.Tensor], bytes_max: int, dtype: torch.dtype | None
) -> list[tuple[torch.dtype, list[int]]]:
    """The dtype of each bucket, and the numbers of the tensors in it. See buckets_of()."""
    parts: list[tuple[torch.dtype, list[int]]] = []
    room = 0
    for number, tensor in enumerate(tensors):
        kind = dtype or tensor.dtype
        size = tensor.numel() * kind.itemsize
        if not parts or parts[-1][0] != kind or size > room:
            parts.append((kind, []))
            room = bytes_max
        parts[-1][1].append(number)
        room -= size
    return parts
