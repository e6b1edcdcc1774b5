"""Fragments: parameters of a model, their global values, and the op that carries what this member did with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .._arena import Client
from .._comm import Comm
from .._errors import Aborted, FailedPrecondition, InvalidArgument, TooFewMembers
from .._native import Deadline
from .._op_info import OpInfo
from .._quant import Quant
from .._turn import Turn, given_up
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

    parameters: those of the model. globals: for each of them, the value that all members agree on. client: whose peerd
    shares the memory of the globals; None: no peerd does.
    """

    def __init__(
        self, client: Client | None, number: int, parameters: Sequence[torch.nn.Parameter], bytes_max: int, pinned: bool
    ) -> None:
        self._number = number
        self._bytes_max = bytes_max
        self._pinned = pinned
        self._outgoing: list[Bucket] | None = None
        #: The latest op, which may not have started yet, and the latest one whose result was used or given up.
        self._turn: Turn | None = None
        self._taken: Turn | None = None
        self._weight: float | None = None
        self._tries = 0
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

    def _buckets(self, client: Client | None) -> list[Bucket]:
        buckets = buckets_of(client, self.locals(), self._bytes_max)
        if self._pinned and client is not None and torch.cuda.is_available():
            copier = copier_for(torch.device("cuda", torch.cuda.current_device()))
            for bucket in buckets:
                copier.pin(client, bucket.flat.data_ptr(), bucket.nbytes)
        return buckets

    def locals(self) -> list[torch.Tensor]:
        """The tensors of the model, or of a DTensor the part on this rank. Writing to them changes the model."""
        return [local_part(parameter.detach()) for parameter in self.parameters]

    @property
    def flats(self) -> list[torch.Tensor]:
        """The global values as flat tensors."""
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
        self._outgoing = None
        if self._turn is not None and self._turn is self._taken:
            self._turn.close()
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
        """An op has started, and take() was not called for it."""
        return self._work is not None

    @property
    def _work(self) -> Work | None:
        turn = self._turn
        op = None if turn is None or turn is self._taken else turn.op_of(self._tag)
        return None if op is None else Work(op)

    @property
    def _tag(self) -> int:
        return FIRST_TAG + self._number

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

    # An exception may interrupt each of these, and the call is made again then. Nothing is started twice.

    def start(self, comm: Comm, weight: float | None = None) -> None:
        """Starts the average over all members: one op with one outcome, for all buckets together.

        weight: None if what goes out is compressed.
        """
        last = self._turn
        if last is None or last is self._taken:
            if last is not None and last.is_of(comm):
                last.end(Deadline(None))
            self._weight, self._tries = weight, 0
            self._turn = self._turn_of(comm)
        if not self.in_flight:
            if self.sparse is not None:
                self.sparse.pack([bucket.flat for bucket in self.outgoing])
            self._start()

    def _turn_of(self, comm: Comm, before: Turn | None = None) -> Turn:
        return Turn(comm, {self._tag: "all_reduce" if self.sparse is None else "all_gather"}, before)

    def _start(self) -> None:
        turn = self._turn
        assert turn is not None and turn.comm is not None
        begun = turn.belonging(self._tag)
        if self.sparse is not None:
            self.sparse.start(turn.comm, self._tag, self._tries > 0, begun)
            return
        codec: dict[str, Any] = {"quantize": self.quantize, "begun": begun}
        if self.errors is not None:
            codec["error"] = self.errors
        flats = [bucket.flat for bucket in self.outgoing]
        turn.comm.all_reduce(flats, "avg", weight=self._weight, tag=self._tag, on_fault="retry", async_op=True, **codec)

    def finish(self) -> OpInfo | None:
        """Waits for the average. None: no member gave anything. take() says that it was used.

        After an Error of the op the next call starts the op again: it has ended so at all members.
        """
        while True:
            if not self.in_flight:
                self._start()
            work = self._work
            assert work is not None
            try:
                return work.wait()
            except TooFewMembers:
                return None
            except (Aborted, InvalidArgument) as problem:
                if (gone := given_up(problem, "averaging parameters")) is not None:
                    raise gone from None
                self._prepare_retry()
                if self._tries % _TRIES == 0 or isinstance(problem, InvalidArgument):
                    raise

    def _prepare_retry(self) -> None:
        turn = self._turn
        assert turn is not None and turn.comm is not None
        self._turn, self._tries = self._turn_of(turn.comm), self._tries + 1
        turn.close()

    def unpack(self, info: OpInfo) -> None:
        """Once finish() has returned: puts the average in the place of what goes out."""
        if self.sparse is not None:
            self.sparse.unpack(info, [bucket.flat for bucket in self.outgoing])

    def take(self) -> None:
        """The average was used, or is not wanted: start() starts another op."""
        self._taken = self._turn

    def untake(self) -> None:
        """take() was too early."""
        self._taken = None

    def give_up(self, comm: Comm, owes: bool) -> None:
        """Ends what goes on after an exception. owes: the others will start an op that this member has not started."""
        if owes and not self.in_flight:
            if self._turn is None or self._turn is self._taken:
                self._turn = self._turn_of(comm, self._turn)
        if self._turn is not None and self._turn is not self._taken:
            self._turn.abandon()
        self.take()

    def changed(self) -> list[torch.Tensor]:
        """What unpack(), and a change of the global values, write to."""
        if self.sparse is None:
            return self.flats
        return [*self.flats, *self.sparse.errors, *(bucket.flat for bucket in self.outgoing)]

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
