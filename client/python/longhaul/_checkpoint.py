"""Saves a state to a safetensors file, and loads it."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from . import _digest, _native
from ._errors import InvalidArgument
from ._state_tensor import StateTensor

# Keys in the metadata of the file.
REVISION = "longhaul.revision"
HASH = "longhaul.hash"  # the hash that a sync reports for the same contents
CHECKSUM = "longhaul.checksum"  # over the two values above, and over all tensors with their names

# In the directory of a file that is being written: it is locked as long as the writer lives.
_LOCK = "writer"

_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
}


def _package() -> Any:
    try:
        import safetensors
    except ImportError:
        raise ImportError("checkpoints need the packages safetensors and xxhash: pip install both") from None
    return safetensors


def save(
    path: str | os.PathLike[str],
    revision: int,
    tensors: Sequence[StateTensor],
    entries: Sequence[_digest.Entry],
    digests: Sequence[bytes],
) -> None:
    """Writes the file. The file appears complete or not at all. Raises OSError if it cannot be written."""
    safetensors = _package()
    target = os.path.abspath(os.fspath(path))
    specs = {}
    keep = []
    for tensor in tensors:
        if tensor.name == "__metadata__":
            raise InvalidArgument(
                "a tensor with the name __metadata__ cannot be saved, as safetensors reserves the name; rename the tensor"
            )
        memory = tensor.host()
        keep.append(memory)
        specs[tensor.name] = _spec(safetensors, tensor, memory)
    metadata = {REVISION: str(revision), HASH: _digest.of_state(entries, digests)}
    metadata[CHECKSUM] = _checksum(metadata, entries, digests)
    with _workplace(target) as (directory, mode):
        unfinished = os.path.join(directory, "state")
        try:
            safetensors.serialize_file(specs, unfinished, metadata)
        except safetensors.SafetensorError as problem:
            raise OSError(f"{unfinished}: {problem}") from None
        os.chmod(unfinished, mode)
        _flush(unfinished)
        os.replace(unfinished, target)
    _flush(os.path.dirname(target))


@contextlib.contextmanager
def _workplace(target: str) -> Iterator[tuple[str, int]]:
    """Gives a directory of this call alone, beside the target, and the mode that the umask gives a new file.

    safetensors first writes to a file with a name of its own choice, so nothing less than a directory is ours. It holds
    a file that is locked as long as the writer lives: so writers on other hosts and in other containers, whose process
    ids mean nothing here, see whether it does.
    """
    # The name of a file has at most 255 bytes, and a character at most four.
    prefix = f".{os.path.basename(target)[:50]}.unfinished-"
    parent = os.path.dirname(target)
    _remove_left(parent, prefix)
    directory, lock = "", -1
    try:
        while lock < 0:
            directory = tempfile.mkdtemp(prefix=prefix, dir=parent)
            lock = _locked(directory)
        yield directory, stat.S_IMODE(os.fstat(lock).st_mode)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if lock >= 0:
            os.close(lock)


def _locked(directory: str) -> int:
    """Makes and locks the file in a new directory. -1: another writer took the directory for one that was left."""
    path = os.path.join(directory, _LOCK)
    try:
        lock = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
    except FileNotFoundError:
        return -1
    with contextlib.suppress(OSError):  # a file system without locks: then nobody removes what is left
        fcntl.flock(lock, fcntl.LOCK_EX)
    if os.path.exists(path):
        return lock
    os.close(lock)
    return -1


def _remove_left(parent: str, prefix: str) -> None:
    """Removes the directories of writers that have died."""
    left: list[str] = []
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        left = [entry.path for entry in entries if entry.name.startswith(prefix)]
    for path in left:
        with contextlib.suppress(OSError):  # its writer lives, it belongs to another user, or it is gone meanwhile
            try:
                lock = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                os.rmdir(path)  # the writer died at once, or comes to its lock just now, and makes another directory
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _spec(safetensors: Any, tensor: StateTensor, memory: Any) -> Any:
    shape = list(tensor.shape)
    if not hasattr(safetensors, "TensorSpec"):  # safetensors before 0.8
        return {"dtype": tensor.dtype, "shape": shape, "data": bytes(memory)}
    data = ctypes.addressof(memory) if tensor.nbytes else 0
    return safetensors.TensorSpec(dtype=tensor.dtype, shape=shape, data_ptr=data, data_len=tensor.nbytes)


def _flush(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def load(path: str | os.PathLike[str], tensors: Sequence[StateTensor], entries: Sequence[_digest.Entry]) -> int:
    """Fills the tensors from the file and returns its revision.

    Reads the whole file and checks it before it changes a tensor. Raises InvalidArgument if the file is damaged or
    does not fit the state, OSError if it cannot be read.
    """
    safetensors = _package()
    name = os.fspath(path)
    # Only torch can read bfloat16. numpy can read every other dtype.
    framework = "pt" if "torch" in sys.modules else "np"
    with open(name, "rb"):
        pass  # raises an OSError that names the path
    try:
        with safetensors.safe_open(name, framework=framework) as file:
            metadata = file.metadata() or {}
            revision = _revision(name, metadata)
            _check_manifest(name, file, entries)
            found = _checksum(metadata, entries, [_digest.of_tensor(memory) for memory in _contents(file, entries)])
            if metadata.get(CHECKSUM) != found:
                raise InvalidArgument(
                    f"{name}: the checksum of its revision, hash and tensors is {found}, but the file says "
                    f"{metadata.get(CHECKSUM)}: the file is damaged; load another checkpoint"
                )
            _check_shared(name, file, tensors, entries)
            # The file is right. From here on tensors change.
            for tensor, memory in zip(tensors, _contents(file, entries)):
                if tensor.nbytes > 0:
                    tensor.write(memory, [(0, tensor.nbytes)])
    except safetensors.SafetensorError as problem:
        raise InvalidArgument(f"{name}: no safetensors file ({problem}); load another checkpoint") from None
    return revision


def _check_shared(name: str, file: Any, tensors: Sequence[StateTensor], entries: Sequence[_digest.Entry]) -> None:
    """Raises InvalidArgument if tensors that share memory have different contents there in the file."""
    places = sorted(
        (
            (address, entry)
            for tensor, entry in zip(tensors, entries)
            if entry.nbytes > 0 and (address := tensor.address()) is not None
        ),
        key=lambda place: place[0],
    )
    reaching = places[:1]  # the tensor that reaches farthest
    for address, entry in places[1:]:
        ((begin, before),) = reaching
        size = min(begin + before.nbytes - address, entry.nbytes)
        if size > 0:
            both = [bytes(next(_contents(file, [each]))) for each in (before, entry)]
            if both[0][address - begin :][:size] != both[1][:size]:
                raise InvalidArgument(
                    f"{name}: tensors {before.name!r} and {entry.name!r} of the state share memory, and differ in the "
                    "file; give them memory of their own, or load another checkpoint"
                )
        if address + entry.nbytes > begin + before.nbytes:
            reaching = [(address, entry)]


def _checksum(metadata: Mapping[str, str], entries: Sequence[_digest.Entry], digests: Sequence[bytes]) -> str:
    """The checksum over revision, hash and all tensors. It includes the tensors of `allow_unequal`, and does not depend
    on the order of the tensors."""
    ordered = sorted(zip(entries, digests), key=lambda pair: pair[0].name)
    tensors = _digest.of_state(
        [dataclasses.replace(entry, allow_unequal=False) for entry, _ in ordered], [digest for _, digest in ordered]
    )
    return _digest.of_texts([metadata.get(REVISION, ""), metadata.get(HASH, ""), tensors])


def _revision(name: str, metadata: Any) -> int:
    text = metadata.get(REVISION, "")
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= _native.REVISION_MAX):
        raise InvalidArgument(
            f"{name}: has no revision in its metadata, so it was not written by State.save(); load a file that was"
        )
    return int(text)


def _check_manifest(name: str, file: Any, entries: Sequence[_digest.Entry]) -> None:
    there = set(file.keys())
    for entry in entries:
        if entry.name not in there:
            raise InvalidArgument(f"{name}: holds no tensor {entry.name!r}, which the state has")
        part = file.get_slice(entry.name)
        dtype = _DTYPES.get(part.get_dtype(), part.get_dtype())
        if dtype != entry.dtype:
            raise InvalidArgument(
                f"{name}: tensor {entry.name!r} is {dtype} in the file and {entry.dtype} in the state"
            )
        shape = tuple(part.get_shape())
        if shape != entry.shape:
            raise InvalidArgument(
                f"{name}: tensor {entry.name!r} has shape {list(shape)} in the file and {list(entry.shape)} in the state"
            )
        there.remove(entry.name)
    if there:
        raise InvalidArgument(f"{name}: holds tensor {min(there)!r}, which the state has not")


def _contents(file: Any, entries: Sequence[_digest.Entry]) -> Iterator[Any]:
    """Gives the bytes of each tensor in turn. The bytes of one are valid until the next one is asked for."""
    for entry in entries:
        value = file.get_tensor(entry.name)
        if entry.nbytes == 0:
            yield (ctypes.c_char * 0)()
            continue
        if hasattr(value, "data_ptr"):
            value = value.contiguous()
            address = value.data_ptr()
        else:
            address = value.__array_interface__["data"][0]
        yield (ctypes.c_char * entry.nbytes).from_address(address)
