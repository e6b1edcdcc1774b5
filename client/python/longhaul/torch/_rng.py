"""The random generators that training programs use without naming them: of torch, of Python, of numpy."""

from __future__ import annotations

import hashlib
import random
import struct
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .._errors import InvalidArgument
from .._tensor import class_of

# Python's generator: 624 words and a position, and a normal deviate that is left over. numpy's: the same.
_WORDS = struct.Struct("<625Ibd")
_REST = struct.Struct("<Ibd")  # without the words


class Generator:
    """One generator. get: its state as a uint8 CPU tensor of fixed length. set: takes such a tensor. seed: a number."""

    def __init__(
        self,
        name: str,
        get: Callable[[], torch.Tensor],
        set: Callable[[torch.Tensor], None],
        seed: Callable[[int], object],
    ) -> None:
        self.name = name
        self.get = get
        self.set = set
        self.seed = seed


def generators(devices: Iterable[torch.device]) -> list[Generator]:
    """The generators of this process: torch's for the CPU and for each of the CUDA devices, Python's, and numpy's if
    numpy is imported."""
    found = [
        Generator("torch", torch.get_rng_state, torch.set_rng_state, torch.default_generator.manual_seed),
        Generator("python", _get_python, _set_python, random.seed),
    ]
    if "numpy" in sys.modules:
        found.append(Generator("numpy", _get_numpy, _set_numpy, lambda seed: _numpy_random().seed(seed % (1 << 32))))
    found += [_cuda(index) for index in sorted({device.index or 0 for device in devices if device.type == "cuda"})]
    return found


def seed_of(shared: int, number: int, name: str) -> int:
    """The seed of one generator of one member: 63 bits that depend on all three, as if drawn at random."""
    digest = hashlib.blake2b(f"{shared} {number} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _unpack(tensor: torch.Tensor) -> tuple[Any, ...]:
    return _WORDS.unpack(bytes(tensor.tolist()))


def _get_python() -> torch.Tensor:
    _, words, left_over = random.getstate()
    return _tensor(_WORDS.pack(*words, left_over is not None, left_over or 0.0))


def _set_python(tensor: torch.Tensor) -> None:
    *words, has_left_over, left_over = _unpack(tensor)
    random.setstate((3, tuple(words), left_over if has_left_over else None))


def _numpy_random() -> Any:
    import numpy

    return numpy.random


def _get_numpy() -> torch.Tensor:
    kind, words, position, has_left_over, left_over = _numpy_random().get_state(legacy=True)
    if kind != "MT19937":
        raise InvalidArgument(
            f"numpy's global generator is {kind}, and a state can hold MT19937 only; pass rng=None, and your generator "
            "in objects="
        )
    return _tensor(words.astype("<u4", copy=False).tobytes() + _REST.pack(position, has_left_over, left_over))


def _set_numpy(tensor: torch.Tensor) -> None:
    *words, position, has_left_over, left_over = _unpack(tensor)
    _numpy_random().set_state(("MT19937", words, position, has_left_over, left_over))


def _cuda(index: int) -> Generator:
    device = torch.device("cuda", index)

    def seed(number: int) -> None:
        with torch.cuda.device(device):
            torch.cuda.manual_seed(number)

    return Generator(
        f"cuda.{index}",
        lambda: torch.cuda.get_rng_state(device),
        lambda state: torch.cuda.set_rng_state(state, device),
        seed,
    )


def held_of(value: Any) -> tuple[str, Callable[[], Any], Callable[[Any], object]] | None:
    """The kind of a generator that a program holds, and how to get and set its state. None: the value is no generator."""
    if isinstance(value, torch.Generator):
        return "TorchGenerator", value.get_state, value.set_state
    if isinstance(value, random.Random):
        return "PythonGenerator", value.getstate, value.setstate
    if isinstance(value, class_of("numpy.random", "Generator")):
        bits = value.bit_generator
        return "NumpyGenerator", lambda: bits.state, lambda state: setattr(bits, "state", state)
    return None
