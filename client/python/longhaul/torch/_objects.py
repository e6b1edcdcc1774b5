"""Python values as JSON without pickle, with their tensors apart. What is decoded equals what was encoded, bit by bit."""

from __future__ import annotations

import collections
import ctypes
import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .._errors import InvalidArgument

Json = Any  # what json.loads() returns

# Marks a JSON object that stands for something other than a dict with string keys. A dict with this key is encoded as a
# list of pairs.
_KIND = "!"
_TENSOR = {_KIND: "tensor"}
_ARRAY = {_KIND: "array"}


def encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Json:
    """The value as JSON. Its tensors and numpy arrays are put into `tensors`, each under its path.

    value: None, bool, int, float, str, bytes, list, tuple, dict, OrderedDict, Counter, torch.dtype, torch.Size,
        torch.device, numpy scalars and arrays, tensors, and what is made of these.
    path: the name of the value, such as "objects.loader"; errors name it.
    Raises InvalidArgument for anything else, and for two tensors of one name.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [encode(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]
    if kind is tuple:
        return {_KIND: "tuple", "of": [encode(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]}
    if kind in _DICTS.values():
        return _encode_dict(value, path, tensors)
    if isinstance(value, torch.Tensor):
        _keep(path, value, tensors)
        return _TENSOR
    return _encode_other(value, path, tensors)


_DICTS = {"dict": dict, "OrderedDict": collections.OrderedDict, "Counter": collections.Counter}


def _encode_dict(value: dict[Any, Any], path: str, tensors: dict[str, torch.Tensor]) -> Json:
    items = [(key, encode(item, f"{path}.{key}", tensors)) for key, item in value.items()]
    if type(value) is dict and all(type(key) is str and key != _KIND for key, _ in items):
        return dict(items)
    for key, _ in items:
        if key is not None and type(key) not in (bool, int, float, str):
            raise InvalidArgument(
                f"{path} has the key {key!r} of type {type(key).__name__}; use keys of type str or int, or leave the "
                "value out of the state"
            )
    return {_KIND: type(value).__name__, "of": [list(item) for item in items]}


def _encode_other(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Json:
    if isinstance(value, bytes):
        return {_KIND: "bytes", "of": value.hex()}
    if isinstance(value, torch.Size):
        return {_KIND: "size", "of": list(value)}
    if isinstance(value, torch.dtype):
        return {_KIND: "dtype", "of": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {_KIND: "device", "of": str(value)}
    if type(value).__module__ == "numpy":
        return _encode_numpy(value, path, tensors)
    raise InvalidArgument(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which a state cannot hold without pickle; "
        "give it state_dict() and load_state_dict() and pass it in objects=, or turn it into numbers, texts, lists, "
        "dicts or tensors"
    )


def _encode_numpy(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Json:
    import numpy

    if isinstance(value, numpy.ndarray):
        try:
            _keep(path, torch.from_numpy(numpy.array(value)), tensors)
        except TypeError:
            raise InvalidArgument(
                f"{path} is an array of {value.dtype}, which no tensor can hold; convert it to numbers"
            ) from None
        return _ARRAY
    if isinstance(value, (numpy.bool_, numpy.integer, numpy.floating)) and value.dtype.itemsize <= 8:
        return {_KIND: "number", "dtype": value.dtype.name, "of": value.item()}
    raise InvalidArgument(f"{path} is a numpy {type(value).__name__}; convert it to a number or a text")


def _keep(path: str, tensor: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
    if path in tensors:
        raise InvalidArgument(f"two tensors have the name {path}; rename one of the keys that its parts come from")
    tensors[path] = tensor


def decode(tree: Json, path: str, tensor_of: Callable[[str], torch.Tensor]) -> Any:
    """What encode() encoded. tensor_of: gives the tensor of a path; a numpy array is a copy of that tensor."""
    if isinstance(tree, list):
        return [decode(item, f"{path}.{i}", tensor_of) for i, item in enumerate(tree)]
    if not isinstance(tree, dict):
        return tree
    if _KIND not in tree:
        return {key: decode(item, f"{path}.{key}", tensor_of) for key, item in tree.items()}
    kind: str = tree[_KIND]
    content: Any = tree.get("of")
    if kind in _DICTS:
        return _DICTS[kind]({key: decode(item, f"{path}.{key}", tensor_of) for key, item in content})
    if kind == "tuple":
        return tuple(decode(item, f"{path}.{i}", tensor_of) for i, item in enumerate(content))
    return _decode_other(tree, path, tensor_of)


def _decode_other(tree: Json, path: str, tensor_of: Callable[[str], torch.Tensor]) -> Any:
    kind: str = tree[_KIND]
    content: Any = tree.get("of")
    if kind == "tensor":
        return tensor_of(path)
    if kind == "array":
        return tensor_of(path).detach().cpu().clone().numpy()
    if kind == "number":
        import numpy

        return numpy.dtype(tree["dtype"]).type(content)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "size":
        return torch.Size(content)
    if kind == "dtype":
        return getattr(torch, content)
    if kind == "device":
        return torch.device(content)
    raise InvalidArgument(f"{path} was encoded as {kind!r} by another version of longhaul; use one version everywhere")


def text_of(tree: Json) -> str:
    """The text of a tree. Trees that equal each other in Python may have different texts: 1, 1.0 and True."""
    return json.dumps(tree, separators=(",", ":"))


def runs_of(trees: list[Json]) -> list[list[Json]]:
    """Run-length encoding: [tree, how often in a row]. Parameters mostly have the same values, one after the other."""
    return [[json.loads(text), len(list(same))] for text, same in itertools.groupby(map(text_of, trees))]


def each_of(runs: list[list[Json]]) -> list[Json]:
    """What runs_of() encoded."""
    return [tree for tree, count in runs for _ in range(count)]


class Text:
    """JSON in a tensor of fixed size: 8 bytes with the length, little-endian; the text; zeros."""

    def __init__(self, bytes_max: int) -> None:
        self.tensor = torch.zeros(bytes_max + 8, dtype=torch.uint8)
        self._content = b""

    def write(self, texts: Mapping[str, str]) -> bool:
        """Writes the document of these values, each given as its text_of(). Returns whether the bytes changed.

        Raises InvalidArgument if it is too long.
        """
        content = f"{{{','.join(f'{json.dumps(name)}:{text}' for name, text in texts.items())}}}".encode()
        room = len(self.tensor) - 8
        if len(content) > room:
            raise InvalidArgument(
                f"the Python values of this state take {len(content)} bytes as JSON, and there is room for {room}; the "
                f"largest is {_largest(texts)}; give objects_bytes_max={2 * len(content)} at all members, or keep "
                "long values in tensors"
            )
        if content == self._content and self.bytes() == content:
            return False
        whole = len(content).to_bytes(8, "little") + content
        self.tensor.zero_()
        self.tensor[: len(whole)] = torch.frombuffer(bytearray(whole), dtype=torch.uint8)
        self._content = content
        return True

    def bytes(self) -> bytes:
        """The text that the tensor holds now."""
        length = int.from_bytes(bytes(self.tensor[:8].tolist()), "little")
        if length > len(self.tensor) - 8:
            raise InvalidArgument("the tensor of the Python values holds no text; another program has written to it")
        return ctypes.string_at(self.tensor.data_ptr() + 8, length)

    def read(self) -> Json:
        """The document that the tensor holds now."""
        self._content = self.bytes()
        return json.loads(self._content)


def _largest(texts: Mapping[str, str]) -> str:
    sizes = {name: len(text) for name, text in texts.items()}
    if not sizes:
        return "unknown"
    name = max(sizes, key=lambda name: sizes[name])
    return f"{name} with {sizes[name]} bytes"
