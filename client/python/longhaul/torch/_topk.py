"""TopK: sparse pseudo-gradients with error feedback, and the op that carries those of a fragment."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from .._arena import Client
from .._comm import Comm
from .._errors import InvalidArgument, number_of
from .._op_info import OpInfo
from .._work import AnyOp
from ._member_errors import MemberErrors
from ._memory import shared
from ._sparse import Form, add, decode, encode, form_of, take_out

_CHUNK_MAX = 1 << 16  # elements: an index has 16 bits at most
_BITS_MAX = 8
# What a member sends begins with this: the version of the form, k, chunk, bits.
_HEADER = struct.Struct("<4I")
_VERSION = 1
# So many elements are encoded at a time. Four times as many no longer fit in a cache, and take twice as long for each.
_BLOCK = 1 << 20


class TopK(MemberErrors):
    """Sparse pseudo-gradients with error feedback, for `DiLoCo` and `StreamingDiLoCo` (SparseLoCo, arXiv:2508.15706).

        topk = lh.torch.TopK()
        outer = torch.optim.SGD(model.parameters(), lr=0.7)  # no momentum: the errors take its place
        with lh.torch.DiLoCo(comm, model, inner, outer, sync_every=30, compress=topk) as diloco:
            ...

    A member sends 64 of 4096 elements of its pseudo-gradient, with 2 bits for each: 0.73 % of the bytes of float32. It
    keeps what it has not sent, its **error**, and adds it to the next pseudo-gradient. With error e, pseudo-gradient
    Delta and error_decay beta, a member does this at the end of a round:

        e = beta * e + Delta
        sent = Q(TopK(e))  # k elements of each chunk with the largest magnitudes, in `bits` bits
        e = e - sent

    The outer optimizer takes the mean of what all members sent as gradient: sums in float32, in the order of
    `OpInfo.members`. So all members get the same bits.

    k: elements that are sent of each chunk, from 1 to `chunk`. A shorter chunk at the end sends as large a share of
        its elements, rounded up.
    chunk: elements of a chunk, from 2 to 65536. The parameters of a bucket lie side by side, and chunks are cut from
        the bucket as a whole.
    bits: for each value that is sent, 2 to 8. One is the sign. The others choose a magnitude: with 2 bits one of two,
        the mean of the smaller and the mean of the larger magnitudes of the chunk; with more bits one of equal steps
        between the least and the largest magnitude.
    error_decay: beta, from 0 to 1.

    k, chunk and bits are equal at all members. If not, the op raises InvalidArgument at all of them.

    The defaults are those of the published run of 72 billion parameters (arXiv:2603.08163; tplr: topk_compression 64,
    target_chunk 64 for 64 x 64, momentum_decay 0.95, quantization_bins 4, outer_learning_rate 0.7). In that code
    (tplr/compress/topk.py) a chunk is a square of a matrix, and the values of a whole tensor share four means. Here a
    chunk is a run of a bucket, and has a sign and two means of its own.

    *Errors belong to the member*, like the state of the inner optimizer. They are not part of `diloco.state`; a
    newcomer begins with errors of zero. Put state_dict() into the member's own checkpoint. An error changes only when
    the op has ended well. After Aborted, Evicted, Unavailable or a timeout it is as before, so the round may be made
    again.

    NaN and infinity: the whole chunk of such an element is NaN at all members after the op. The error of that chunk is
    0 then.

    Memory: float32 errors, as many as there are parameters, in the process. While an op runs, what all members send.

    Raises InvalidArgument if an argument is out of its range. One object is for one DiLoCo; a second DiLoCo that is given
    it raises InvalidArgument. Not thread-safe: the thread that makes the inner steps uses it.
    """

    def __init__(self, k: int = 64, chunk: int = 4096, bits: int = 2, error_decay: float = 0.95) -> None:
        self.chunk = number_of(chunk, "chunk", _CHUNK_MAX, least=2)
        self.k = number_of(k, "k", self.chunk, least=1)
        self.bits = number_of(bits, "bits", _BITS_MAX, least=2)
        if not isinstance(error_decay, (int, float)) or not 0 <= error_decay <= 1:
            raise InvalidArgument(f"error_decay is {error_decay!r}; give a number from 0 to 1")
        self.error_decay = float(error_decay)

    def __repr__(self) -> str:
        return f"TopK(k={self.k}, chunk={self.chunk}, bits={self.bits}, error_decay={self.error_decay})"

    def _exchanges_of(self, lengths: Sequence[Sequence[int]]) -> list[SparseExchange]:
        """Makes the errors. lengths: the elements of each bucket of each fragment."""
        return [SparseExchange(self, errors) for errors in self._make_errors(lengths)]


class _Part(NamedTuple):
    """Chunks of one length in a bucket, and where their records are in what a member sends."""

    form: Form
    bucket: int
    chunks: slice  #: elements of the bucket
    records: slice  #: bytes

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.chunks].view(-1, self.form.length)

    def records_in(self, packed: torch.Tensor) -> torch.Tensor:
        return packed[self.records].view(-1, self.form.nbytes)


class SparseExchange:
    """The pseudo-gradients of one fragment on their way: one all-gather of what each member sends.

    Each member sends equally many bytes, because these depend only on the lengths of the buckets: a header, then the
    records (`_sparse`) of the buckets, one after the other. So the parts of the all-gather are equal. If a member dies,
    the op goes on without its part.

    open() before the first op. errors: by bucket; unpack() changes them.
    """

    def __init__(self, rule: TopK, errors: list[torch.Tensor]) -> None:
        self._rule = rule
        self.errors = errors
        self._parts = list(_parts_of([error.numel() for error in errors], rule))
        self._header = _HEADER.pack(_VERSION, rule.k, rule.chunk, rule.bits)
        self._nbytes = self._parts[-1].records.stop if self._parts else len(self._header)
        self._client: Client | None = None
        self._packed = self._gathered = torch.empty(0, dtype=torch.uint8)

    def open(self, client: Client) -> None:
        """Makes the tensors of the op. An op of an earlier block may still use the old ones."""
        self._client = client
        self._packed = shared(client, (self._nbytes,), torch.uint8)
        self._gathered = torch.empty(0, dtype=torch.uint8)

    def close(self) -> None:
        self._client = None
        self._packed = self._gathered = torch.empty(0, dtype=torch.uint8)

    def pack(self, progress: Sequence[torch.Tensor]) -> None:
        """Encodes what this member sends. progress: the pseudo-gradient by bucket, flat. The errors do not change."""
        self._packed[: len(self._header)] = torch.frombuffer(bytearray(self._header), dtype=torch.uint8)
        for part in self._parts:
            error, delta = part.of(self.errors[part.bucket]), part.of(progress[part.bucket])
            rows = max(1, _BLOCK // part.form.length)
            blocks = zip(error.split(rows), delta.split(rows), part.records_in(self._packed).split(rows))
            for old, new, records in blocks:
                records.copy_(encode(self._with(new, old.clone()), part.form))

    def _with(self, progress: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
        """Makes `error` what a member sends from: error_decay * error + progress."""
        return error.mul_(self._rule.error_decay).add_(progress.float())

    def start(self, comm: Comm, tag: int, again: bool, begun: list[AnyOp]) -> None:
        """Starts the op, and puts it into `begun` (Turn.belonging).

        again: the last one ended Aborted, perhaps because members did not agree on their number.
        """
        assert self._client is not None
        room = comm.world_size if again else comm.world().step.world_size
        if len(self._gathered) != room * self._nbytes:
            self._gathered = torch.empty(0, dtype=torch.uint8)  # frees the memory first
            self._gathered = shared(self._client, (room * self._nbytes,), torch.uint8)
        more: dict[str, Any] = {"begun": begun}
        comm.all_gather(self._packed, out=self._gathered, world=room, tag=tag, on_fault="retry", async_op=True, **more)

    def unpack(self, info: OpInfo, progress: Sequence[torch.Tensor]) -> None:
        """After the op ended well: takes what was sent out of the errors, and puts the mean in place of `progress`."""
        sent = list(self._gathered[: info.world_size * self._nbytes].view(info.world_size, self._nbytes))
        self._check_headers(info, sent)
        for error, delta in zip(self.errors, progress):
            self._with(delta, error)
        for part in self._parts:
            take_out(decode(part.records_in(self._packed), part.form), part.of(self.errors[part.bucket]))
        sums = [flat if flat.dtype == torch.float32 else flat.float() for flat in progress]
        for flat in sums:
            flat.zero_()
        for part in self._parts:
            for packed in sent:  # in the order of info.members
                add(decode(part.records_in(packed), part.form), part.of(sums[part.bucket]))
        for flat, total in zip(progress, sums):
            flat.copy_(total.div_(info.world_size))

    def _check_headers(self, info: OpInfo, sent: Sequence[torch.Tensor]) -> None:
        for member, packed in zip(info.members, sent):
            header = bytes(packed[: len(self._header)].tolist())
            if header != self._header:
                version, k, chunk, bits = _HEADER.unpack(header)
                raise InvalidArgument(
                    f"member {member} sent TopK(k={k}, chunk={chunk}, bits={bits}) in form {version}, this member "
                    f"TopK(k={self._rule.k}, chunk={self._rule.chunk}, bits={self._rule.bits}) in form {_VERSION}; give "
                    "all members the same TopK, and the same version of Longhaul"
                )


def _parts_of(lengths: Sequence[int], rule: TopK) -> Iterator[_Part]:
    """The chunks of buckets of these lengths: for each bucket those that are full, and one that is not."""
    place = _HEADER.size
    for bucket, length in enumerate(lengths):
        full = length - length % rule.chunk
        for begin, end, size in ((0, full, rule.chunk), (full, length, length - full)):
            if begin < end:
                form = form_of(size, rule.k, rule.chunk, rule.bits)
                stop = place + (end - begin) // size * form.nbytes
                yield _Part(form, bucket, slice(begin, end), slice(place, stop))
                place = stop
