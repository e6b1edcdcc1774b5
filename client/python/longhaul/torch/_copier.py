"""Copies between tensors on a GPU and host memory, beside the streams of the caller.

A copier has two lanes, one for each direction. A lane is a queue of copies on the device: a CUDA stream. Copies of one
lane run one after the other, and beside the other lane, the network, and what the caller computes:

    caller's stream   gradient 1   gradient 2   gradient 3
    to host                        1            2            3
    network                                     1            2            3
    to device                                                1            2            3

Marks order the lanes: a copy to the host begins when the caller's stream has computed the tensor, and the caller's
stream goes on with a result when the copy to the device is done. The host waits only where it says so.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from .._arena import Client
from .._errors import FailedPrecondition, InvalidArgument
from .._log import logger
from ._buckets import Bucket

#: The names of the lanes.
DOWN, UP = "to host", "to device"

#: A large tensor is copied in pieces of this size, so that a small copy of another op comes in between.
PIECE_BYTES = 64 << 20
#: Smaller tensors are copied together: to start a copy takes as long as to copy that much.
LARGE_BYTES = 256 << 10
#: Host memory is pinned from this size on. Such blocks of the arena begin at a page, so no two of them share a page,
#: and CUDA pins no page twice.
PIN_BYTES_MIN = 1 << 20

#: A flat tensor in host memory, and the tensors of the device that lie side by side in it.
Part = tuple[torch.Tensor, Sequence[torch.Tensor]]


class Mark(Protocol):
    """A moment in a lane or stream: when everything that was queued before has been done."""

    def wait(self) -> None:
        """The host waits for the moment. Raises RuntimeError if the device has failed."""


class Copier(abc.ABC):
    """Copies for the tensors of one device. Any thread.

    "The caller's stream" is the current stream of the calling thread on this device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # The last copy from a bucket to the device. The next copy to that bucket has to wait for it.
        self._unpacked: weakref.WeakKeyDictionary[Bucket, Mark] = weakref.WeakKeyDictionary()

    # ------------------------------------------------------------------ what a device has to provide

    @abc.abstractmethod
    def capturing(self) -> bool:
        """Whether the caller's stream records a graph."""

    @abc.abstractmethod
    def now(self) -> Mark:
        """Marks what the caller's stream has queued until now."""

    @abc.abstractmethod
    def mark(self, lane: str) -> Mark:
        """Marks what the lane has queued until now."""

    @abc.abstractmethod
    def hold(self, lane: str, mark: Mark) -> None:
        """What is queued in the lane from now on begins after the mark."""

    @abc.abstractmethod
    def follow(self, mark: Mark) -> None:
        """What is queued in the caller's stream from now on begins after the mark."""

    @abc.abstractmethod
    def settle(self) -> None:
        """The host waits for all streams of the device."""

    @abc.abstractmethod
    def _down(self, host: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Queues a copy to the host. The memory of the tensors is not used for anything else before it is done."""

    @abc.abstractmethod
    def _up(self, host: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Queues a copy to the device. The memory of the tensors is not used for anything else before it is done."""

    @abc.abstractmethod
    def _register(self, address: int, nbytes: int) -> bool:
        """Pins host memory. False: the device refuses it; copies of it work, but the host waits for them."""

    @abc.abstractmethod
    def _unregister(self, address: int) -> None:
        """Takes _register() back."""

    @abc.abstractmethod
    def _finish(self) -> None:
        """The host waits for both lanes. Never raises: memory has to be freed after a failure of the device, too."""

    # ------------------------------------------------------------------ copies

    def check_usable(self, what: str) -> None:
        """Raises FailedPrecondition while the caller's stream records a CUDA graph."""
        if self.capturing():
            raise FailedPrecondition(
                f"{what}: a CUDA graph is being captured on the current stream of {self.device}, and a graph cannot hold "
                "an op of the network; capture the work before and after it in graphs of their own"
            )

    def start_down(self, parts: Sequence[Part], after: Sequence[Mark]) -> Mark:
        """Starts copies to the host, after the marks. Returns the mark of their end."""
        for mark in after:
            self.hold(DOWN, mark)
        for host, tensors in parts:
            for piece, sources in _pieces(host, tensors):
                self._down(piece, sources)
        return self.mark(DOWN)

    def start_up(self, parts: Sequence[Part], after: Sequence[Mark]) -> Mark:
        """Starts copies to the device, after the marks. Returns the mark of their end."""
        for mark in after:
            self.hold(UP, mark)
        for host, tensors in parts:
            for piece, targets in _pieces(host, tensors):
                self._up(piece, targets)
        return self.mark(UP)

    # ------------------------------------------------------------------ parts of buckets, for BucketCopier

    def start_pack_part(self, bucket: Bucket, host: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Mark:
        """Starts to copy tensors of this device to a part of a bucket. The mark tells when the part holds them.

        They are copied as the caller's stream leaves them now. If an unpack still reads the bucket, the copy begins
        after that. The first call pins the memory of the bucket, if it has 1 MiB or more.
        """
        self.check_usable("pack")
        assert bucket.client is not None
        self.pin(bucket.client, bucket.flat.data_ptr(), bucket.nbytes)
        before = self._unpacked.get(bucket)
        return self.start_down([(host, tensors)], [self.now(), *([] if before is None else [before])])

    def unpack_part(self, bucket: Bucket, host: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Copies a part of a bucket to tensors of this device. The caller's stream waits for the copy, not the host."""
        self.check_usable("unpack")
        assert bucket.client is not None
        self.pin(bucket.client, bucket.flat.data_ptr(), bucket.nbytes)
        mark = self.start_up([(host, tensors)], [self.now()])
        self._unpacked[bucket] = mark  # after the marks of all parts before it: a lane keeps its order
        self.follow(mark)

    # ------------------------------------------------------------------ pinned memory

    def pin(self, client: Client, address: int, nbytes: int) -> bool:
        """Pins memory from client.alloc(), until it is freed. Returns whether it is pinned.

        The memory is that of a whole block, given by its begin. Less than 1 MiB is never pinned. A second call for a
        block does nothing. Raises FailedPrecondition while a CUDA graph is captured: it would break the capture.
        """
        if nbytes < PIN_BYTES_MIN:
            return False
        if client.is_held(address, self):
            return True
        if client.is_held(
            address
        ):  # another device has pinned it, which counts for all; but it knows only its own copies
            client.before_free(address, self, self._finish)
            return True
        self.check_usable("pinning memory")
        if not self._register(address, nbytes):
            return False

        def release() -> None:
            self._finish()
            self._unregister(address)

        client.before_free(address, self, release)
        return True


def _pieces(host: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Iterator[Part]:
    """Cuts a copy in pieces: of large tensors, and of small ones that are copied together."""
    size = host.element_size()
    begin = end = 0  # of the small tensors in `small`
    small: list[torch.Tensor] = []
    for tensor in tensors:
        count = tensor.numel()
        if small and (count * size >= LARGE_BYTES or (end - begin + count) * size > PIECE_BYTES):
            yield host[begin:end], small
            begin, small = end, []
        if count * size >= LARGE_BYTES:
            yield from _pieces_of(host[end : end + count], tensor)
            begin = end + count
        elif count:
            small.append(tensor)
        end += count
    if small:
        yield host[begin:end], small


def _pieces_of(host: torch.Tensor, tensor: torch.Tensor) -> Iterator[Part]:
    if not tensor.is_contiguous():
        yield host, [tensor]
        return
    flat, step = tensor.detach().view(-1), PIECE_BYTES // host.element_size()
    for begin in range(0, host.numel(), step):
        yield host[begin : begin + step], [flat[begin : begin + step]]


def side_by_side(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The elements of all tensors in one flat tensor, on their device."""
    parts = [tensor.detach().reshape(-1).to(dtype) for tensor in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def spread(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Writes a flat tensor to the tensors whose elements lie side by side in it, on their device."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    # One kernel for many tensors; torch's own optimizers and FSDP use the same function.
    torch._foreach_copy_(  # type: ignore[attr-defined,unused-ignore]
        [tensor.detach() for tensor in tensors], [part.view(tensor.shape) for part, tensor in zip(parts, tensors)]
    )


class _CudaMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        # Blocking: the host sleeps until the event, and leaves the processor to peerd.
        self.event = torch.cuda.Event(blocking=True)
        self.event.record(stream)

    def wait(self) -> None:
        self.event.synchronize()


class CudaCopier(Copier):
    """The copier of one CUDA device. Its lanes are two streams, because a GPU has a copy engine for each direction."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._streams = {lane: torch.cuda.Stream(device) for lane in (DOWN, UP)}

    def capturing(self) -> bool:
        with torch.cuda.device(self.device):
            return torch.cuda.is_current_stream_capturing()

    def now(self) -> Mark:
        return _CudaMark(torch.cuda.current_stream(self.device))

    def mark(self, lane: str) -> Mark:
        return _CudaMark(self._streams[lane])

    def hold(self, lane: str, mark: Mark) -> None:
        assert isinstance(mark, _CudaMark)
        self._streams[lane].wait_event(mark.event)

    def follow(self, mark: Mark) -> None:
        assert isinstance(mark, _CudaMark)
        torch.cuda.current_stream(self.device).wait_event(mark.event)

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)

    def _down(self, host: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        with self._on(DOWN, tensors):
            host.copy_(side_by_side(tensors, host.dtype), non_blocking=True)

    def _up(self, host: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        with self._on(UP, tensors):
            first = tensors[0].detach()
            if len(tensors) == 1 and first.dtype == host.dtype and first.is_contiguous():
                first.view(-1).copy_(host, non_blocking=True)
            else:
                spread(host.to(self.device, non_blocking=True), tensors)

    @contextlib.contextmanager
    def _on(self, lane: str, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Makes the stream of the lane the current one."""
        stream = self._streams[lane]
        with torch.cuda.stream(stream):
            yield
        for tensor in tensors:
            # The allocator would give the memory of a freed tensor away in the order of the caller's stream.
            tensor.record_stream(stream)

    def _register(self, address: int, nbytes: int) -> bool:
        with torch.cuda.device(self.device):
            code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
            if code == 0:
                return True
            # CUDA keeps the error, and torch would report it at the next kernel that anybody starts. Let that be here.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=self.device)
        logger.warning(
            "CUDA refuses to pin %d bytes of shared memory (cudaError %d): copies are slower; look at the memory that is "
            "free, and at the limits of the container",
            nbytes,
            code,
        )
        return False

    def _unregister(self, address: int) -> None:
        with contextlib.suppress(RuntimeError), torch.cuda.device(self.device):
            torch.cuda.cudart().cudaHostUnregister(address)

    def _finish(self) -> None:
        for stream in self._streams.values():
            with contextlib.suppress(RuntimeError):
                stream.synchronize()


class BucketCopier:
    """Copies between buckets and tensors on the CPU and on CUDA devices, also several devices in one bucket. Any thread.

    tensors: those that the bucket was made for, in its order; their dtypes may differ from that of the bucket.
    Errors: InvalidArgument if the tensors are of other lengths or other devices, FailedPrecondition while a CUDA graph is
    captured.
    """

    def pack(self, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> None:
        """Fills the bucket. An op may read it as soon as this returns."""
        for mark in self.start_pack(bucket, tensors):
            mark.wait()

    def unpack(self, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> None:
        """Fills the tensors from the bucket: those on a GPU in the order of its current stream. The bucket may be
        packed again as soon as this returns; until then nothing else may write to it."""
        for device, host, group in _runs(bucket, tensors, "unpack"):
            if device.type == "cpu":
                spread(host, group)
            else:
                copier_for(device).unpack_part(bucket, host, group)

    def start_pack(self, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> list[Mark]:
        """Starts to fill the bucket, and waits for no GPU. It is full after the marks."""
        marks: list[Mark] = []
        for device, host, group in _runs(bucket, tensors, "pack"):
            if device.type == "cpu":
                parts = host.split([tensor.numel() for tensor in group])
                views = [part.view(tensor.shape) for part, tensor in zip(parts, group)]
                torch._foreach_copy_(views, [tensor.detach() for tensor in group])
            else:
                marks.append(copier_for(device).start_pack_part(bucket, host, group))
        return marks


def _runs(
    bucket: Bucket, tensors: Sequence[torch.Tensor], what: str
) -> Iterator[tuple[torch.device, torch.Tensor, list[torch.Tensor]]]:
    """Divides a bucket where the device changes: the device, the part of bucket.flat, and the tensors in it."""
    if [tensor.numel() for tensor in tensors] != [view.numel() for view in bucket.views]:
        raise InvalidArgument(f"{what}: the tensors are not those that the bucket was made for; their lengths differ")
    begin = 0
    for device, group in itertools.groupby(tensors, lambda tensor: tensor.device):
        members = list(group)
        end = begin + sum(tensor.numel() for tensor in members)
        yield device, bucket.flat[begin:end], members
        begin = end


_lock = threading.Lock()
_copiers: dict[torch.device, Copier] = {}


def copier_for(device: torch.device, name: str = "the tensor") -> Copier:
    """The copier of a device; the first call makes it. name: what error messages call the tensor.

    Raises InvalidArgument if ops take no tensors of such devices, FailedPrecondition if CUDA cannot be used.
    """
    with _lock:
        copier = _copiers.get(device)
        if copier is None:
            if device.type != "cuda":
                raise InvalidArgument(
                    f"{name} is on {device}; ops take tensors on the CPU and on CUDA devices: "
                    "copy it to a CPU tensor first, best from longhaul.torch.empty"
                )
            if not torch.cuda.is_available():
                raise FailedPrecondition(
                    f"{name} is on {device}, and torch.cuda.is_available() is False: start the program where CUDA works, or "
                    "use memory of the CPU"
                )
            _copiers[device] = copier = CudaCopier(device)
        return copier
