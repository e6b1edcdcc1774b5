"""The tensors of a State: their declaration, and where their elements are."""

from __future__ import annotations

import ctypes
import math
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

from . import _buffer, _native
from ._arena import Client
from ._errors import InvalidArgument
from ._tensor import SUSPICIOUS, TENSORS, address_of, check_local, check_unmasked, class_of

Memory = ctypes.Array[ctypes.c_char]


def _is_plain(name: str) -> bool:
    try:
        size = len(name.encode())
    except UnicodeEncodeError:  # a lone surrogate has no UTF-8
        return False
    # peerd has the same rule (proto/wire/ipc_check.h).
    return 0 < size <= _native.STATE_NAME_BYTES_MAX and not any(unicodedata.category(c) == "Cc" for c in name)


def _shares_elements(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements of a tensor have one place in memory, as after expand(). strides: in any unit."""
    if 0 in shape:
        return False
    reach = 0  # the farthest place that the dimensions seen so far get to
    dims = sorted((abs(stride), size) for stride, size in zip(strides, shape) if size > 1)
    for stride, size in dims:
        if stride <= reach or stride == 0:
            break
        reach += stride * (size - 1)
    else:
        return False
    places = {0}
    for stride, size in dims:
        count = len(places) * size
        places = {place + stride * i for place in places for i in range(size)}
        if len(places) < count:
            return True
    return False


class StateTensor:
    """One tensor of the caller: name, dtype, shape, and access to its elements."""

    def __init__(self, name: str, value: Any, dtype: str, shape: tuple[int, ...]) -> None:
        if not (isinstance(name, str) and _is_plain(name)):
            raise InvalidArgument(
                f"state tensor {name!r}: a name needs 1 to {_native.STATE_NAME_BYTES_MAX} bytes of UTF-8 without "
                "control characters"
            )
        if len(shape) > _native.STATE_DIMS_MAX:
            raise InvalidArgument(
                f"state tensor {name!r} has {len(shape)} dimensions; at most {_native.STATE_DIMS_MAX} are possible"
            )
        if dtype not in _native.STATE_DTYPES:
            raise InvalidArgument(
                f"state tensor {name!r} has dtype {dtype}, which cannot be shared; "
                f"convert it to one of {', '.join(_native.STATE_DTYPES)}"
            )
        self.name = name
        self.value = value
        self.dtype = dtype
        self.shape = shape
        self.nbytes = math.prod(self.shape) * _native.ITEM_BYTES[dtype]

    def dtype_now(self) -> str:
        """The dtype that the tensor has now. It may differ from the declared one."""
        raise NotImplementedError

    def check_declared(self) -> None:
        """Raises InvalidArgument if dtype or shape changed since the declaration.

        Otherwise peerd could read or write beyond the memory of the tensor.
        """
        self.check_is_like(self.dtype_now(), tuple(self.value.shape))

    def check_is_like(self, dtype: str, shape: tuple[int, ...]) -> None:
        """Raises InvalidArgument unless dtype and shape are the declared ones."""
        if (dtype, shape) != (self.dtype, self.shape):
            raise InvalidArgument(
                f"state tensor {self.name!r} was declared as {self.dtype} {list(self.shape)} and is {dtype} {list(shape)} "
                "now; make a new lh.State after converting or resizing tensors"
            )

    def check_writable(self) -> None:
        """Raises InvalidArgument if write() could fail, or could not give each element its value."""

    def _check_apart(self, strides: Sequence[int]) -> None:
        if _shares_elements(self.shape, strides):
            raise InvalidArgument(
                f"state tensor {self.name!r} has elements that share memory, as after expand(), so it cannot be written; "
                "pass a copy, such as contiguous() of it"
            )

    def address(self) -> int | None:
        """The address of the elements. None: they are not contiguous or not in host memory, and must be copied."""
        raise NotImplementedError

    def place(self) -> int | None:
        """check_declared() and address() in one. Each sync calls this for each tensor, so subclasses make it fast."""
        self.check_declared()
        return self.address()

    def read(self, memory: Memory) -> None:
        """Copies the elements to `memory`."""
        raise NotImplementedError

    def write(self, memory: Memory, ranges: Iterable[tuple[int, int]]) -> None:
        """Copies from `memory` to the tensor: at least the byte ranges (begin, end)."""
        raise NotImplementedError

    def pin(self, client: Client, memory: Memory) -> None:
        """Makes copies to and from `memory`, which is from client.alloc(), as fast as can be."""

    def host(self) -> Memory:
        """The bytes of the tensor as they are now. Without a copy if they are contiguous in host memory."""
        self.check_declared()
        address = self.address()
        if address is not None:
            return (ctypes.c_char * self.nbytes).from_address(address)
        memory = (ctypes.c_char * self.nbytes)()
        self.read(memory)
        return memory


class _Array(StateTensor):
    def __init__(self, name: str, array: Any) -> None:
        check_unmasked(array, f"state tensor {name!r}")
        if not array.dtype.isnative:
            raise InvalidArgument(
                f"state tensor {name!r} has the byte order of another machine; convert it with astype()"
            )
        super().__init__(name, array, array.dtype.name, tuple(array.shape))
        self._own_dtype = array.dtype
        self.check_writable()

    def check_writable(self) -> None:
        if not self.value.flags.writeable:
            raise InvalidArgument(f"state tensor {self.name!r} is read-only, but a sync may write to it; pass a copy")
        self._check_apart(self.value.strides)

    def dtype_now(self) -> str:
        # numpy makes the name anew each time.
        name: str = self.dtype if self.value.dtype is self._own_dtype else self.value.dtype.name
        return name

    def address(self) -> int | None:
        if not self.value.flags.c_contiguous:
            return None
        address: int = self.value.__array_interface__["data"][0]
        return address

    def _view(self, memory: Any) -> Any:
        import numpy

        return numpy.frombuffer(memory, dtype=self.value.dtype).reshape(self.shape)

    def read(self, memory: Memory) -> None:
        self._view(memory)[...] = self.value

    def write(self, memory: Memory, ranges: Iterable[tuple[int, int]]) -> None:
        self.value[...] = self._view(memory)


class _TorchTensor(StateTensor):
    def __init__(self, name: str, torch: Any, tensor: Any) -> None:
        check_local(tensor, f"state tensor {name!r}")
        if tensor.layout != torch.strided:
            raise InvalidArgument(f"state tensor {name!r} has layout {tensor.layout}; pass to_dense() of it")
        if tensor.is_conj() or tensor.is_neg():
            raise InvalidArgument(f"state tensor {name!r} is a lazy view; pass resolve_conj().resolve_neg() of it")
        if tensor.device.type == "meta":
            raise InvalidArgument(
                f"state tensor {name!r} is on the device meta, so it has no data; pass a tensor with data"
            )
        super().__init__(name, tensor, str(tensor.dtype).replace("torch.", ""), tuple(tensor.shape))
        self.torch = torch
        self._own_dtype = tensor.dtype
        self._check_apart(tensor.stride())

    def check_writable(self) -> None:
        self._check_apart(self.value.stride())
        if self.value.is_inference() and not self.torch.is_inference_mode_enabled():
            raise InvalidArgument(
                f"state tensor {self.name!r} was made in inference mode, so it cannot be written outside of it; pass "
                "clone() of it"
            )
        copier = self._copier()
        if copier is not None:
            copier.check_usable(f"writing the state tensor {self.name!r}")

    def dtype_now(self) -> str:
        return str(self.value.dtype).replace("torch.", "")

    def address(self) -> int | None:
        if self.value.device.type != "cpu" or not self.value.is_contiguous():
            return None
        return address_of(self.value, f"state tensor {self.name!r}")

    def place(self) -> int | None:
        value = self.value
        if value.dtype is not self._own_dtype or value.shape != self.shape:
            self.check_declared()
        if not (value.is_cpu and value.is_contiguous()):
            return None
        address: int = value.data_ptr()
        return address if address >= SUSPICIOUS else self.address()

    def _flat(self, memory: Memory) -> Any:
        return self.torch.frombuffer(memory, dtype=self.value.dtype)

    def _copier(self) -> Any:
        """The copier of the tensor's GPU; None: it is on the CPU, or on a device that torch's own copies have to serve."""
        if self.value.device.type != "cuda":
            return None
        from .torch._copier import copier_for  # not needed for CPU tensors

        return copier_for(self.value.device, f"state tensor {self.name!r}")

    def pin(self, client: Client, memory: Memory) -> None:
        copier = self._copier()
        if copier is not None:
            copier.pin(client, ctypes.addressof(memory), self.nbytes)

    def read(self, memory: Memory) -> None:
        if self.nbytes == 0:
            return
        copier = self._copier()
        if copier is None:
            self._flat(memory).view(self.shape).copy_(self.value.detach())
            return
        copier.check_usable(f"reading the state tensor {self.name!r}")
        copier.settle()  # streams other than the current one may still write to the tensor
        copier.start_down([(self._flat(memory), [self.value])], []).wait()

    def write(self, memory: Memory, ranges: Iterable[tuple[int, int]]) -> None:
        flat = self._flat(memory)
        own = self.value.detach()
        parts = [(flat, own)]
        if own.is_contiguous():
            # A range covers whole chunks, and a chunk holds whole elements.
            item = _native.ITEM_BYTES[self.dtype]
            slices = [slice(begin // item, end // item) for begin, end in ranges]
            parts = [(flat[each], own.view(-1)[each]) for each in slices]
        copier = self._copier()
        if copier is None:
            for source, target in parts:
                target.copy_(source.view(target.shape))
            return
        copier.check_usable(f"writing the state tensor {self.name!r}")
        copier.settle()  # streams other than the current one may still read the tensor
        copier.start_up([(source, [target]) for source, target in parts], []).wait()


class _Buffer(StateTensor):
    """An object with DLPack or the buffer protocol. Its memory stays where it is as long as this object lives."""

    def __init__(self, name: str, value: Any, found: _buffer.Found) -> None:
        super().__init__(name, value, found.dtype, found.shape)
        self._found = found

    def check_declared(self) -> None:
        pass  # what was found holds as long as the memory does

    def address(self) -> int | None:
        return self._found.address

    def write(self, memory: Memory, ranges: Iterable[tuple[int, int]]) -> None:
        source = ctypes.addressof(memory)
        for begin, end in ranges:
            ctypes.memmove(self._found.address + begin, source + begin, end - begin)


def tensor_of(name: str, value: Any) -> StateTensor:
    """Wraps a tensor, array or buffer. Raises TypeError for anything else, InvalidArgument if it cannot be used."""
    if isinstance(value, class_of("numpy", "ndarray")):
        return _Array(name, value)
    if isinstance(value, class_of("torch", "Tensor")):
        return _TorchTensor(name, sys.modules["torch"], value)
    found = _buffer.find(value, f"state tensor {name!r}", written=True)
    if found is None:
        raise TypeError(f"state tensor {name!r} is a {type(value).__name__}; pass {TENSORS}")
    return _Buffer(name, value, found)
