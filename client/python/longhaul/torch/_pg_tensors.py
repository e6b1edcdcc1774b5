"""Prepares the tensors of torch's collectives for ours: contiguous, of a known dtype, parts side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import _native

_DTYPES = frozenset(dtype for name in _native.DTYPES if (dtype := getattr(torch, name, None)) is not None)
_REDUCED = frozenset(dtype for dtype in _DTYPES if not str(dtype).startswith("torch.float8"))


@dataclasses.dataclass
class Plan:
    """What is passed to a collective of Comm.

    after: what to do when it has ended well. reads, writes: the caller's tensors. result: those with the results.
    method: of Comm, if it is another one than the name of the op.
    """

    arguments: tuple[Any, ...] = ()
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    result: list[torch.Tensor] = dataclasses.field(default_factory=list)
    reads: Sequence[torch.Tensor] = ()
    writes: Sequence[torch.Tensor] = ()
    after: list[Callable[[], object]] = dataclasses.field(default_factory=list)
    method: str | None = None


def place_of(tensor: torch.Tensor) -> tuple[int, int, int]:
    """The storage of a tensor, and the first and the last address in it that it may touch."""
    if tensor.layout != torch.strided:
        return 0, 0, 0
    begin = tensor.data_ptr()
    if tensor.is_contiguous():
        span = tensor.numel()
    else:
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.untyped_storage().data_ptr(), begin, begin + span * tensor.element_size()


def check_reduced(tensor: torch.Tensor, name: str) -> None:
    """Raises TypeError if no op can add up such elements."""
    if tensor.dtype not in _REDUCED and not tensor.is_complex():
        raise TypeError(
            f"{name} is {tensor.dtype}, which is moved but not reduced; convert it to another dtype for this op"
        )


def _as_known(tensor: torch.Tensor) -> torch.Tensor:
    """Elements of other dtypes as bytes."""
    return tensor if tensor.dtype in _DTYPES else tensor.view(-1).view(torch.uint8)


def source(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as an op can read it: itself, or a copy."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg()
    if tensor.layout == torch.strided and not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return _as_known(tensor)


def apart(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """source() of each, as an op can read them: a list must not hold the same memory twice, so that is copied."""
    wires = [source(tensor) for tensor in tensors]
    end = 0
    for at, i in sorted((wire.data_ptr(), i) for i, wire in enumerate(wires)):
        if at < end and wires[i].numel():
            wires[i] = wires[i].clone()
        else:
            end = at + wires[i].numel() * wires[i].element_size()
    return wires


def target(tensor: torch.Tensor, after: list[Callable[[], object]], *, read: bool) -> torch.Tensor:
    """The tensor as an op can write it: itself, or another one that is copied to it when the op has ended.

    read: the op reads it, too.
    """
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_complex() and not tensor.is_conj():
        tensor = torch.view_as_real(tensor)
    if tensor.layout == torch.strided and (not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg()):
        own = tensor
        plain = (
            own.resolve_conj().resolve_neg().contiguous()
            if read
            else torch.empty_like(own, memory_format=torch.contiguous_format)
        )
        after.append(lambda: own.copy_(plain))
        tensor = torch.view_as_real(plain) if plain.is_complex() else plain
    return _as_known(tensor)


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensors as one, if they are so in memory already, one after the other."""
    first = tensors[0]
    at = first.data_ptr()
    storage = first.untyped_storage().data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != at or not tensor.is_contiguous() or tensor.untyped_storage().data_ptr() != storage:
            return None
        at += tensor.numel() * tensor.element_size()
    total = sum(tensor.numel() for tensor in tensors)
    return first.as_strided((total,), (1,))


def _check_alike(tensors: Sequence[torch.Tensor], name: str) -> None:
    if not tensors:
        raise ValueError(f"{name} is empty; give one tensor for each rank")
    first = tensors[0]
    for i, tensor in enumerate(tensors):
        if tensor.dtype != first.dtype or tensor.device != first.device:
            raise TypeError(
                f"{name}[{i}] is {tensor.dtype} on {tensor.device}, {name}[0] is {first.dtype} on {first.device}; they need "
                "the same dtype and device"
            )


def _plain_parts(tensors: Sequence[torch.Tensor], name: str) -> list[torch.Tensor]:
    """Views of the tensors, without gradients; complex numbers as pairs of reals, but for conjugates."""
    _check_alike(tensors, name)
    return [torch.view_as_real(t.detach()) if t.is_complex() and not t.is_conj() else t.detach() for t in tensors]


def sources(tensors: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    """Parts that an op reads, side by side."""
    _check_alike(tensors, name)
    parts = [source(tensor) for tensor in tensors]
    found = _joined(parts)
    return torch.cat([part.reshape(-1) for part in parts]) if found is None else found


def targets(tensors: Sequence[torch.Tensor], name: str, after: list[Callable[[], object]]) -> torch.Tensor:
    """Parts that an op writes, side by side; copied to the tensors when the op has ended, if they are elsewhere."""
    parts = _plain_parts(tensors, name)
    found = _joined(parts)
    if found is not None:
        return _as_known(found)
    lengths = [part.numel() for part in parts]
    whole = torch.empty(sum(lengths), dtype=parts[0].dtype, device=parts[0].device)

    def unpack() -> None:
        for part, piece in zip(parts, whole.split(lengths)):
            part.copy_(piece.view(part.shape))

    after.append(unpack)
    return torch.view_as_real(whole) if whole.is_complex() else _as_known(whole)


def lengths_of(tensors: Sequence[torch.Tensor]) -> list[int] | None:
    """The elements of each part as the op sees them; None: all parts are equal."""
    lengths = [tensor.numel() * _factor(tensor) for tensor in tensors]
    return None if len(set(lengths)) <= 1 else lengths


def _factor(tensor: torch.Tensor) -> int:
    """How many elements of the op one element of the tensor is."""
    if tensor.is_complex():
        return 2
    return 1 if tensor.dtype in _DTYPES else tensor.element_size()


def row_lengths(splits: Sequence[int], tensor: torch.Tensor, size: int, name: str) -> list[int]:
    """The elements of each part of a tensor that is divided in rows. splits: rows of each part; empty: equal parts."""
    rows = tensor.shape[0] if tensor.dim() > 0 else 0
    if not splits:
        if rows % size != 0:
            raise ValueError(
                f"{name} has {rows} rows for {size} ranks; give split sizes, or as many rows for each rank"
            )
        splits = [rows // size] * size
    if len(splits) != size:
        raise ValueError(f"{name} has {len(splits)} split sizes for {size} ranks; give one for each")
    if sum(splits) != rows:
        raise ValueError(f"the split sizes of {name} are {sum(splits)} rows in all, and it has {rows}")
    width = tensor.numel() // rows if rows else 0
    return [split * width * _factor(tensor) for split in splits]
