"""Digests of a state as peerd makes them (peerd/state/state_hash.h), without a peerd: for checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from . import _native

CHUNK_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor as it is declared."""

    name: str
    dtype: str  # a key of STATE_DTYPES
    shape: tuple[int, ...]
    nbytes: int
    allow_unequal: bool


def _xxhash() -> Any:
    try:
        import xxhash
    except ImportError:
        raise ImportError("checkpoints need the packages safetensors and xxhash: pip install both") from None
    return xxhash


class _Stream:
    """Feeds values in a fixed byte order, strings with their length."""

    def __init__(self) -> None:
        self._state = _xxhash().xxh3_128()

    def number(self, value: int) -> _Stream:
        self._state.update(value.to_bytes(8, "little"))
        return self

    def text(self, value: str) -> _Stream:
        encoded = value.encode()
        self.number(len(encoded))
        self._state.update(encoded)
        return self

    def digest(self, value: bytes) -> _Stream:
        # As it is written: the high half first, each half in the byte order of numbers.
        self._state.update(value[7::-1] + value[:7:-1])
        return self

    def end(self) -> bytes:
        return bytes(self._state.digest())


def of_tensor(data: Any) -> bytes:
    """data: its bytes, as anything that has a flat buffer of bytes."""
    view = memoryview(data).cast("B")
    stream = _Stream().number(view.nbytes)
    chunk_digest = _xxhash().xxh3_128_digest
    for begin in range(0, view.nbytes, CHUNK_BYTES):
        stream.digest(chunk_digest(view[begin : begin + CHUNK_BYTES]))
    return stream.end()


def of_texts(texts: Sequence[str]) -> str:
    stream = _Stream().number(len(texts))
    for text in texts:
        stream.text(text)
    return stream.end().hex()


def of_manifest(entries: Sequence[Entry]) -> bytes:
    stream = _Stream().number(len(entries))
    for entry in entries:
        stream.text(entry.name).number(_native.STATE_DTYPES[entry.dtype]).number(len(entry.shape))
        for size in entry.shape:
            stream.number(size)
        stream.number(entry.nbytes).number(int(entry.allow_unequal))
    return stream.end()


def of_state(entries: Sequence[Entry], tensors: Sequence[bytes]) -> str:
    """tensors: their digests."""
    stream = _Stream().digest(of_manifest(entries))
    for entry, digest in zip(entries, tensors):
        if not entry.allow_unequal:
            stream.digest(digest)
    return stream.end().hex()
