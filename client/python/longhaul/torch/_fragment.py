"""Fragments: parameters of a model, their global values, and the op that carries what this member did with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .._arena import Client
from .._comm import Comm
from .._errors import Aborted, FailedPrecondition, TooFewMembers
from .._op_info import OpInfo
from .._quant import Quant
from .._work import Work
from ._buckets import Bucket, buckets_of
from ._copier import copier_for
from ._memory import local_part
from ._topk import SparseExchange

# The ops of fragment i have the tag FIRST_TAG + i: far from those that programs choose, and from those of gradients.
FIRST_TAG = (1 << 62) + (1 << 61)
# How often an op is started. It ends `Aborted` at all members or at none, so all of them start it again.
_TRIES = 5


class Fragment:
    """Some parameters of a model. All its tensors are on the CPU; the model may be on another device.

    parameters: those of the model. globals: for each of them, the value that all members agree on.
    """

    def __init__(
        self, client: Client, number: int, parameters: Sequence[torch.nn.Parameter], bytes_max: int, pinned: bool
    ) -> None:
        self._number = number
        self._bytes_max = bytes_max
        self._pinned = pinned
        self._outgoing: list[Bucket] | None = None
        self._work: Work | None = None
        self._started: Callable[[bool], Work] | None = None
        #: Set before open(): what goes out is compressed. None: it is not.
        self.sparse: SparseExchange | None = None
        #: How what goes out is quantized, and its errors by bucket; None: it is not, and has none.
        self.quantize: str | Quant | None = None
        self.errors: list[torch.Tensor] | None = None
        self.parameters = list(parameters)
        self._globals = self._buckets(client)
        self.read_model(self._globals)
        views = dict(_numbered_views(self._globals))
        self.globals = [torch.nn.Parameter(views[i]) for i in range(len(self.parameters))]

    def _buckets(self, client: Client) -> list[Bucket]:
        buckets = buckets_of(client, self.locals(), self._bytes_max)
        if self._pinned and torch.cuda.is_available():
            copier = copier_for(torch.device("cuda", torch.cuda.current_device()))
            for bucket in buckets:
                copier.pin(client, bucket.flat.data_ptr(), bucket.nbytes)
        return buckets

    def locals(self) -> list[torch.Tensor]:
        """The tensors of the model, or of a DTensor the part on this rank. Writing to them changes the model."""
        return [local_part(parameter.detach()) for parameter in self.parameters]

    @property
    def flats(self) -> list[torch.Tensor]:
        """The global values as flat tensors, in memory shared with peerd."""
        return [bucket.flat for bucket in self._globals]

    # ------------------------------------------------------------------ between the model and buckets

    def read_model(self, buckets: list[Bucket]) -> None:
        """Copies the parameters of the model to buckets."""
        parts = self.locals()
        for i, view in _numbered_views(buckets):
            view.copy_(parts[i])

    def write_model(self, alpha: float = 0.0) -> None:
        """Sets each parameter to global + alpha * (parameter - global)."""
        parts = self.locals()
        for i, view in _numbered_views(self._globals):
            value = view.to(parts[i].device)
            parts[i].copy_(torch.lerp(value, parts[i], alpha) if alpha else value)

    # ------------------------------------------------------------------ what goes out

    def open(self, client: Client) -> None:
        """Makes the buckets that go out. A block that ended by an exception may have left old ones in use."""
        self.close()
        self._outgoing = self._buckets(client)
        if self.sparse is not None:
            self.sparse.open(client)

    def close(self) -> None:
        self._outgoing = self._work = self._started = None
        if self.sparse is not None:
            self.sparse.close()

    @property
    def outgoing(self) -> list[Bucket]:
        """What goes out, and what the op leaves there. Belongs to the op from start() to finish()."""
        if self._outgoing is None:
            raise FailedPrecondition("this works only inside the block of `with`, where all members take part")
        return self._outgoing

    @property
    def in_flight(self) -> bool:
        return self._work is not None

    def put_parameters(self) -> None:
        self.read_model(self.outgoing)

    def put_progress(self, starts: Sequence[torch.Tensor]) -> None:
        """Puts out start - parameter. starts: for each bucket a flat tensor: where the inner steps began."""
        self.read_model(self.outgoing)
        for bucket, start in zip(self.outgoing, starts):
            torch.sub(start, bucket.flat, out=bucket.flat)

    def go_from(self, values: Sequence[torch.Tensor], starts: Sequence[torch.Tensor]) -> None:
        """Sets each parameter, and its place in `starts`, to a value."""
        for part, value in zip(self.locals(), values):
            part.copy_(value)
        for bucket, start in zip(self._globals, starts):
            for i, view in zip(bucket.numbers, bucket.views_of(start)):
                view.copy_(values[i])

    # ------------------------------------------------------------------ the op

    def start(self, comm: Comm, weight: float | None = None) -> None:
        """Starts the average over all members: one op with one outcome, for all buckets together.

        weight: None if what goes out is compressed.
        """
        flats = [bucket.flat for bucket in self.outgoing]
        tag = FIRST_TAG + self._number
        sparse = self.sparse
        if sparse is not None:
            sparse.pack(flats)

        def started(again: bool) -> Work:
            if sparse is not None:
                return sparse.start(comm, tag, again)
            codec: dict[str, Any] = {"quantize": self.quantize}
            if self.errors is not None:
                codec["error"] = self.errors
            return comm.all_reduce(flats, "avg", weight=weight, tag=tag, on_fault="retry", async_op=True, **codec)

        self._started = started
        self._work = started(False)

    def finish(self) -> OpInfo | None:
        """Waits for the average. None: no member gave anything."""
        for _ in range(_TRIES - 1):
            try:
                return self._result()
            except Aborted:
                assert self._started is not None
                self._work = self._started(True)
        return self._result()

    def _result(self) -> OpInfo | None:
        assert self._work is not None
        work, self._work = self._work, None
        try:
            info = work.wait()
        except TooFewMembers:
            return None
        if self.sparse is not None:
            self.sparse.unpack(info, [bucket.flat for bucket in self.outgoing])
        return info

    def take_average(self) -> None:
        """Makes the average the global values."""
        for flat, bucket in zip(self.flats, self.outgoing):
            flat.copy_(bucket.flat)

    def results(self) -> list[torch.Tensor]:
        """What lies in the buckets that go out, for each parameter in its shape."""
        views = dict(_numbered_views(self.outgoing))
        return [views[i] for i in range(len(self.parameters))]


def _numbered_views(buckets: list[Bucket]) -> Iterator[tuple[int, torch.Tensor]]:
    for bucket in buckets:
        yield from zip(bucket.numbers, bucket.views)
