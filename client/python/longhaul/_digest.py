"""Hashes a state without a peerd, with the same result as peerd (peerd/state/state_hash.h). For checkpoints.

All digests are 16 bytes, or their 32 hexadecimal digits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from . import _native

CHUNK_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Entry:
    """What a state declares of one tensor."""

    name: str
    dtype: str  # a key of _native.STATE_DTYPES
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
    """Hashes a sequence of values. Numbers have 8 bytes, little-endian; a string is preceded by its length."""

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
        # The digest is big-endian. peerd feeds it as two numbers, the high half first, each little-endian.
        self._state.update(value[7::-1] + value[:7:-1])
        return self

    def end(self) -> bytes:
        return bytes(self._state.digest())


def of_tensor(data: Any) -> bytes:
    """The digest of one tensor, over the digests of its chunks. data: its bytes, in any object with a buffer."""
    view = memoryview(data).cast("B")
    stream = _Stream().number(view.nbytes)
    chunk_digest = _xxhash().xxh3_128_digest
    for begin in range(0, view.nbytes, CHUNK_BYTES):
        stream.digest(chunk_digest(view[begin : begin + CHUNK_BYTES]))
    return stream.end()


def of_texts(texts: Sequence[str]) -> str:
    """The digest of a sequence of strings."""
    stream = _Stream().number(len(texts))
    for text in texts:
        stream.text(text)
    return stream.end().hex()


def of_manifest(entries: Sequence[Entry]) -> bytes:
    """The digest of what a state declares: names, dtypes, shapes and flags, in order."""
    stream = _Stream().number(len(entries))
    for entry in entries:
        stream.text(entry.name).number(_native.STATE_DTYPES[entry.dtype]).number(len(entry.shape))
        for size in entry.shape:
            stream.number(size)
        stream.number(entry.nbytes).number(int(entry.allow_unequal))
    return stream.end()


def of_state(entries: Sequence[Entry], tensors: Sequence[bytes]) -> str:
    """The hash of a state. tensors: the digest of each tensor. Tensors that may be unequal are left out."""
    stream = _Stream().digest(of_manifest(entries))
    for entry, digest in zip(entries, tensors):
        if not entry.allow_unequal:
            stream.digest(digest)
    return stream.end().hex()
