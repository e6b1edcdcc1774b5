"""Pinned host memory for ops on tensors of a GPU: where their elements lie while the op is at peerd."""

from __future__ import annotations

import collections
import ctypes
import weakref
from collections.abc import Sequence

import torch

from .._arena import Client
from .._errors import InvalidArgument, Unavailable
from .._tensor import Elements
from ._copier import LARGE_BYTES, Copier, Mark, Part

#: Blocks of up to 1 MiB are slots of these sizes, 2 MiB of slots at a time. Larger ones are multiples of 2 MiB.
_SLOTS = (4 << 10, 64 << 10, 1 << 20)
_UNIT = 2 << 20
_ALIGN = 64


class _Block:
    """A part of pinned memory. mark: the last copy from it to the device."""

    def __init__(self, memory: ctypes.Array[ctypes.c_char], offset: int, size: int) -> None:
        self.memory = memory
        self.offset = offset
        self.size = size
        self.mark: Mark | None = None


class Pool:
    """Pinned blocks of memory shared with peerd, for the ops of one member on tensors of one device. Any thread.

    Pinning a block takes longer than an op, so a block that was given back is kept. The pool frees those that have not
    been used for the longest time if it would hold more than twice what ops have had at one time.

    Finalizers call give(), also in the middle of another call on the same thread. So there is no lock: each step is one
    call of a deque or dict.
    """

    def __init__(self, client: Client, copier: Copier) -> None:
        self.copier = copier
        self._client = client
        self._slots: dict[int, collections.deque[_Block]] = {size: collections.deque() for size in _SLOTS}
        self._large: collections.deque[_Block] = collections.deque()  # free ones; the last used comes last
        self._held: dict[int, int] = {}  # the sizes of all large blocks, by their addresses
        self._most = 0  # bytes of large blocks that ops have had at one time

    def take(self, nbytes: int) -> _Block:
        """A block of at least `nbytes`. Raises Unavailable if the arena has no room for it."""
        for size, free in self._slots.items():
            if nbytes <= size:
                return self._take_slot(size, free)
        return self._take_large(-(-nbytes // _UNIT) * _UNIT)

    def give(self, block: _Block) -> None:
        self._slots.get(block.size, self._large).append(block)

    def _take_slot(self, size: int, free: collections.deque[_Block]) -> _Block:
        while True:
            try:
                return free.popleft()  # the one that was given back first: its last copy is the most likely to be done
            except IndexError:
                memory = self._new(_UNIT)
                free.extend(_Block(memory, offset, size) for offset in range(0, _UNIT, size))

    def _take_large(self, size: int) -> _Block:
        # A block that is much too large would be missed by a large op.
        fitting = [block for block in list(self._large) if size <= block.size <= 2 * size]
        for block in sorted(fitting, key=lambda block: block.size):
            try:
                self._large.remove(block)
            except ValueError:  # another thread took it
                continue
            self._make_room(0)
            return block
        self._make_room(size)
        memory = self._new(size)
        self._held[ctypes.addressof(memory)] = size
        return _Block(memory, 0, size)

    def _make_room(self, size: int) -> None:
        """Frees blocks, such that one of `size` may be added."""
        held = sum(list(self._held.values())) + size
        self._most = max(self._most, held - sum(block.size for block in list(self._large)))
        while held > 2 * self._most and (dropped := self._drop()):
            held -= dropped

    def _drop(self) -> int:
        """Frees the large block that was not used for the longest time. Returns its size; 0: there is none."""
        try:
            block = self._large.popleft()
        except IndexError:
            return 0
        del self._held[ctypes.addressof(block.memory)]
        return block.size

    def _new(self, size: int) -> ctypes.Array[ctypes.c_char]:
        try:
            memory = self._client.alloc(size)
        except Unavailable:
            while self._drop():
                pass
            memory = self._client.alloc(size)
        self.copier.pin(self._client, ctypes.addressof(memory), size)
        return memory


class Staged:
    """The device tensors of one op, and their places in a pinned block. The places are the addresses of the elements."""

    def __init__(self, pool: Pool, sources: list[list[Elements]], targets: list[list[Elements]], nbytes: int) -> None:
        self.copier = pool.copier
        self._block = block = pool.take(nbytes)
        # Gives the block back when this object is gone, whatever becomes of the op.
        weakref.finalize(self, pool.give, block).atexit = False
        offset = 0
        self._down, offset = self._lay_out(sources, offset)
        self._up, offset = (self._down, offset) if targets is sources else self._lay_out(targets, offset)

    def _lay_out(self, groups: list[list[Elements]], offset: int) -> tuple[list[Part], int]:
        parts: list[Part] = []
        base = ctypes.addressof(self._block.memory) + self._block.offset
        for group in groups:
            begin = offset
            for each in group:
                each.address = base + offset
                offset += _bytes_of(each)
            tensors = [each.owner for each in group if each.count]
            if tensors:
                count = sum(each.count for each in group)
                host = torch.frombuffer(
                    self._block.memory, dtype=tensors[0].dtype, count=count, offset=self._block.offset + begin
                )
                parts.append((host, tensors))
            offset = _aligned(offset)
        return parts, offset

    def begin(self, what: str) -> Mark:
        """Starts to copy the inputs to the host. Returns the mark after which the op may start.

        The copies begin when the caller's stream has computed the tensors. Raises FailedPrecondition while a CUDA graph
        is captured.
        """
        self.copier.check_usable(what)
        # peerd, too, may only write to the block when the copy of the last result has left it.
        last = self._block.mark
        return self.copier.start_down(self._down, [self.copier.now(), *([] if last is None else [last])])

    def land(self) -> Mark:
        """Starts to copy the results to the device, once the op has ended. Returns the mark of their end."""
        mark = self.copier.start_up(self._up, [])
        self._block.mark = mark
        return mark


Pools = dict[Copier, Pool]


def place(client: Client, pools: Pools, sources: list[Elements] | None, targets: list[Elements] | None) -> Staged:
    """Gives the device tensors of an op places in host memory. targets may be the same list as sources: in place.

    Raises InvalidArgument if the tensors are on two devices, or if results overlap; Unavailable if memory is used up.
    """
    outputs = _on_device(targets)
    inputs = outputs if sources is targets else _on_device(sources)
    copiers = {each.copier: each for each in [*inputs, *outputs]}
    if len(copiers) > 1:
        first, second, *_ = copiers
        raise InvalidArgument(
            f"tensors of one op are on {first.device} and on {second.device}; an op takes tensors of one GPU, and of the "
            "CPU: call an op for each GPU"
        )
    _check_apart(outputs)
    (copier,) = copiers
    copier.check_usable("an op")
    pool = pools.get(copier) or pools.setdefault(copier, Pool(client, copier))
    out_groups = _groups(outputs)
    in_groups = out_groups if inputs is outputs else _groups(inputs)
    both = out_groups if inputs is outputs else [*in_groups, *out_groups]
    nbytes = sum(_aligned(sum(map(_bytes_of, group))) for group in both)
    return Staged(pool, in_groups, out_groups, nbytes)


def _on_device(elements: list[Elements] | None) -> list[Elements]:
    return [each for each in elements or () if each.copier is not None]


def _bytes_of(elements: Elements) -> int:
    size: int = elements.count * elements.owner.element_size()
    return size


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _groups(elements: list[Elements]) -> list[list[Elements]]:
    """Divides tensors into those that lie side by side: each large one alone, small ones by dtype."""
    groups: list[list[Elements]] = []
    small: dict[str, list[Elements]] = {}
    for each in elements:
        if _bytes_of(each) >= LARGE_BYTES:
            groups.append([each])
        else:
            small.setdefault(each.dtype, []).append(each)
    return [*groups, *small.values()]


def _check_apart(outputs: Sequence[Elements]) -> None:
    end = 0
    for each in sorted((each for each in outputs if each.count), key=lambda each: each.owner.data_ptr()):
        begin = each.owner.data_ptr()
        if begin < end:
            raise InvalidArgument(
                f"two tensors that the op writes share memory on {each.owner.device}; give each element once"
            )
        end = begin + _bytes_of(each)
