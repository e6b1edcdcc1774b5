"""The gradients of one list of parameters on their way to the other members and back: one op for each bucket."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from .. import _native
from .._arena import Client
from .._comm import Comm
from .._errors import DeadlineExceeded, Error, InvalidArgument
from .._op_info import OpInfo
from .._quant import Quant, quant_of
from .._turn import Turn, given_up
from .._work import Work
from ._buckets import Bucket, division
from ._copier import BucketCopier, Copier, Mark, copier_for
from ._memory import local_part

#: First tag of the ops on gradients. The op on the weights has it; bucket i has this one plus 1 + i.
GRADIENT_TAG = 1 << 62

_GRAD = operator.attrgetter("grad")
_IS_CPU = operator.attrgetter("is_cpu")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_JOIN_MIN = 4  # tensors

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclasses.dataclass(frozen=True)
class GradientInfo:
    """What was averaged, and over whom."""

    infos: tuple[OpInfo, ...]  #: of the op of each bucket
    #: The ids of the members whose gradients are in the averages, in rank order. If `complete` is False: those whose
    #: gradients are in the averages of all buckets.
    members: tuple[int, ...]
    #: All buckets are averages over the same members. False: a member died between the ops of two buckets. Then its
    #: gradients are in some buckets and not in others; `infos` says in which. Each bucket is still an exact average over
    #: its own `OpInfo.members`, and all members have the same bits.
    complete: bool
    world_size: int  #: all members at the start of the step, those in the background included, as this member saw it
    #: The share of the global batch that is not in the averages: 0.25 if one of four members died before its gradients
    #: were in. The weight of a lost member is not known, so it counts as much as the mean of the others. If `complete` is
    #: False: the mean over all elements of the gradients.
    lost: float
    #: With `weight=`: the sum of the weights of all members that took part in this sum, such as all tokens of the step.
    #: It is one more op, so in a step with a death its members may differ from `members`. None: there are no weights.
    weight: float | None = None


class GradientCopier(Protocol):
    """Copies gradients into a bucket and back.

    tensors: one for each of `bucket.views`, of the same shape; dtype, device and strides may differ.
    """

    def all_reduce(self, comm: Comm, bucket: Bucket, tensors: Sequence[torch.Tensor], op: str, **options: Any) -> Work:
        """Fills the bucket, and starts an all-reduce of it in place. options: those of Comm.all_reduce()."""

    def unpack(self, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> None:
        """Fills the tensors from the bucket. The bucket may be filled again as soon as this returns."""


@dataclasses.dataclass(frozen=True)
class _Run:
    """Tensors of a bucket, one after the other, that differ in their first dimension only."""

    first: int
    last: int  #: of the next one
    views: list[torch.Tensor]
    joined: torch.Tensor | None  #: all of them as one tensor; None: not worth it, or they have no dimension


def _runs_of(bucket: Bucket) -> list[_Run]:
    runs = []
    first = begin = 0
    for _, group in itertools.groupby(bucket.views, key=_alike):
        views = list(group)
        length = sum(view.numel() for view in views)
        joined = None
        if len(views) >= _JOIN_MIN and length > 0 and views[0].dim() > 0:
            joined = bucket.flat[begin : begin + length].view(-1, *views[0].shape[1:])
        runs.append(_Run(first, first + len(views), views, joined))
        first += len(views)
        begin += length
    return runs


def _alike(tensor: torch.Tensor) -> tuple[int, ...]:
    """Equal for tensors that torch.cat() joins along the first dimension."""
    return (tensor.dim(), *tensor.shape[1:])


class HostCopier:
    """Copies gradients that are on the CPU, in the calling thread.

    torch.cat() of tensors on the CPU takes little more than half of the time of torch._foreach_copy_(), if they are small.
    """

    def __init__(self) -> None:
        self._runs: weakref.WeakKeyDictionary[Bucket, list[_Run]] = weakref.WeakKeyDictionary()

    def all_reduce(self, comm: Comm, bucket: Bucket, tensors: Sequence[torch.Tensor], op: str, **options: Any) -> Work:
        self._pack(bucket, tensors)
        work: Work = comm.all_reduce(bucket.flat, op, async_op=True, **options)
        return work

    def _pack(self, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> None:
        if all(map(operator.is_, tensors, bucket.views)):
            return  # backward has added to the views that the last round left
        runs = self._runs.get(bucket)
        if runs is None:
            runs = self._runs[bucket] = _runs_of(bucket)
        for run in runs:
            mine = list(tensors[run.first : run.last])
            if run.joined is not None:
                torch.cat(mine, out=run.joined)
            else:
                torch._foreach_copy_(run.views, mine)

    def unpack(self, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> None:
        torch._foreach_copy_(list(tensors), bucket.views)


class DeviceCopier(BucketCopier):
    """Copies gradients that are on CUDA devices, or on the CPU and on CUDA devices."""

    def all_reduce(self, comm: Comm, bucket: Bucket, tensors: Sequence[torch.Tensor], op: str, **options: Any) -> Work:
        """Fills the bucket, and then starts an all-reduce of it in place. Returns at once, as with async_op=True.

        The host waits for no GPU: the op starts when the bucket is full.
        """
        marks = self.start_pack(bucket, tensors)
        if marks:
            copier = copier_for(next(tensor.device for tensor in tensors if not tensor.is_cpu))
            # Only Collectives knows this option, because it is not for users.
            options["after"] = _Filled(copier, marks)
        work: Work = comm.all_reduce(bucket.flat, op, async_op=True, **options)
        return work


class _Filled:
    """Does for an op on a bucket what Staged does for an op on tensors of a GPU: says when the memory is filled."""

    def __init__(self, copier: Copier, marks: Sequence[Mark]) -> None:
        self.copier = copier
        self._marks = marks

    def begin(self, what: str) -> Mark:
        return self

    def wait(self) -> None:
        for mark in self._marks:
            mark.wait()

    def land(self) -> None:
        """The result stays in the bucket."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How gradients travel. Equal at all members, but for `as_view`."""

    wire_dtype: torch.dtype | None = None
    bucket_bytes: int = 25 << 20
    first_bytes: int = 25 << 20
    tag: int = GRADIENT_TAG
    as_view: bool = False
    quantize: str | Quant | None = None


def settings_of(
    wire_dtype: torch.dtype | None,
    bucket_cap_mb: float,
    first_bucket_mb: float,
    tag: int,
    as_view: bool,
    quantize: str | Quant | None,
) -> Settings:
    """Checks the options of the public calls. Raises InvalidArgument."""
    quant_of(quantize)
    if wire_dtype not in (None, torch.bfloat16):
        raise InvalidArgument(
            f"wire_dtype is {wire_dtype}; give torch.bfloat16, or None for the dtype of each gradient"
        )
    for name, size in (("bucket_cap_mb", bucket_cap_mb), ("first_bucket_mb", first_bucket_mb)):
        if not size > 0:
            raise InvalidArgument(f"{name} is {size}; give the size of a bucket in MiB, more than 0")
    mib = 1 << 20
    return Settings(wire_dtype, int(bucket_cap_mb * mib), int(first_bucket_mb * mib), tag, as_view, quantize)


def trainable(model: object) -> list[torch.nn.Parameter]:
    """The parameters that require a gradient, of a module or an iterable, without duplicates (tied weights).

    Raises InvalidArgument if there is none, TypeError for anything else.
    """
    if isinstance(model, torch.Tensor) or not isinstance(model, (torch.nn.Module, Iterable)):
        raise TypeError(f"model is a {type(model).__name__}; pass a torch.nn.Module, or a list of its parameters")
    parameters = list(model.parameters() if isinstance(model, torch.nn.Module) else model)
    if len(set(map(id, parameters))) < len(parameters):
        parameters = list({id(each): each for each in parameters}.values())
    if not all(map(_REQUIRES_GRAD, parameters)):
        parameters = [parameter for parameter in parameters if parameter.requires_grad]
    if not parameters:
        raise InvalidArgument("the model has no parameter that requires a gradient; there is nothing to average")
    return parameters


def gradients_of(parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    """The local part of each gradient. A parameter without a gradient gets zeros."""
    gradients: list[torch.Tensor] = list(map(_GRAD, parameters))
    if set(map(type, gradients)) == {torch.Tensor}:
        return gradients  # all are there, and none is a DTensor: the usual case, which has to be fast
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return [local_part(gradient) for gradient in map(_GRAD, parameters)]


def check_dense(gradients: Sequence[torch.Tensor]) -> None:
    """Raises InvalidArgument if a gradient is sparse."""
    for gradient in gradients:
        if gradient.layout != torch.strided:
            raise InvalidArgument(
                f"the gradient of a parameter of shape {list(gradient.shape)} is sparse ({gradient.layout}), and only "
                "dense ones are averaged; make the layer with sparse=False, or set "
                "parameter.grad = parameter.grad.to_dense() at all members"
            )


def _check_dtypes(parameters: Sequence[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        if parameter.dtype not in DTYPES:
            raise InvalidArgument(
                f"a parameter of shape {list(parameter.shape)} is {parameter.dtype}; "
                f"gradients are averaged in {', '.join(str(dtype) for dtype in DTYPES)}"
            )


class GradientExchange:
    """Buckets for the gradients of one list of parameters, in memory shared with one peerd, and the ops on them.

    A round is one op for each bucket. begin() opens it, start() starts an op, finish() ends the round. An exception in
    start() or finish() ends it, too, and so does abandon() (Turn): the next round is a new one at all members. The callers
    pass the same parameters each time. So the object keeps no parameter alive, and a Comm only while a round is open. Not
    thread-safe.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], client: Client, settings: Settings) -> None:
        self.client = client
        self.settings = settings
        _check_dtypes(parameters)
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self.buckets = _divided(client, parameters, settings)
        self._as_view = [
            settings.as_view and all(_may_be_view(parameters[number], bucket) for number in bucket.numbers)
            for bucket in self.buckets
        ]
        self._copier = _copier_of(parameters)
        self._works: dict[int, Work] = {}  # by number of the bucket
        self._weights: Work | None = None  # the op that sums the weights
        self._sum = torch.zeros(1, dtype=torch.float64)
        self._weight: float | None = None
        self._expected = 0
        #: The latest round, which may be over. The next one waits until its ops have ended.
        self.turn: Turn | None = None

    @property
    def comm(self) -> Comm | None:
        """Whose round is open."""
        return None if self.turn is None else self.turn.comm

    def is_for(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Whether the object was made for these parameters."""
        mine = self._parameters
        return len(mine) == len(parameters) and all(reference() is each for reference, each in zip(mine, parameters))

    def begin(self, comm: Comm, weight: float | None, deadline: _native.Deadline) -> None:
        """Opens a round, with this member's weight. Raises DeadlineExceeded while ops of an abandoned one go on."""
        if self.turn is not None and self.turn.is_of(comm):
            self.turn.end(deadline)
        self._works.clear()
        self._weights = None
        self._expected = comm.world().step.world_size
        self._weight = weight
        self.turn = turn_of(comm, len(self.buckets), self.settings.tag, weight)

    def start(self, number: int, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Packs the gradients of a bucket and starts its op. An exception ends the round."""
        try:
            self._start(number, parameters)
        except BaseException:
            self.abandon(parameters)
            raise

    @torch.no_grad()
    def _start(self, number: int, parameters: Sequence[torch.nn.Parameter]) -> None:
        turn = self.turn
        assert turn is not None and turn.comm is not None
        bucket, tag, weight = self.buckets[number], self.settings.tag, self._weight
        gradients = gradients_of([parameters[i] for i in bucket.numbers])
        if weight is not None and self._weights is None:
            self._sum[0] = weight
            self._weights = turn.comm.all_reduce(self._sum, "sum", tag=tag, async_op=True, **belonging(turn, tag))
        try:
            self._works[number] = self._copier.all_reduce(
                turn.comm,
                bucket,
                gradients,
                "avg",
                weight=weight,
                tag=tag + 1 + number,
                quantize=self.settings.quantize,
                **belonging(turn, tag + 1 + number),
            )
        except RuntimeError:
            check_dense(gradients)
            raise

    def finish(self, parameters: Sequence[torch.nn.Parameter], deadline: _native.Deadline) -> GradientInfo:
        """Starts the ops that are not started, waits for all, and writes the averages to the gradients.

        Raises DeadlineExceeded: the ops go on, and a further call waits for them. Any other exception ends the round.
        Raises the first error of an op when all have ended; no gradient is changed then.
        """
        try:
            for number in range(len(self.buckets)):
                if number not in self._works:
                    self._start(number, parameters)
            infos, total = self._wait(deadline)
            info = self._info(infos, total)
            self._unpack(parameters)
            self._end()
            return info
        except DeadlineExceeded:
            raise
        except BaseException:
            self.abandon(parameters)
            raise

    def _end(self) -> None:
        if self.turn is not None:
            self.turn.close()
        self._works.clear()
        self._weights = None

    def abandon(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Gives up the round if one is open: the others hear of it where they wait for this member. Waits for nothing.

        A gradient that is a view of a bucket is None then, if the op may have written to it.
        """
        turn = self.turn
        if turn is None or turn.comm is None:
            return
        for number, bucket in enumerate(self.buckets):
            if self._as_view[number] and turn.may_have_written(self.settings.tag + 1 + number):
                for i, view in zip(bucket.numbers, bucket.views):
                    if parameters[i].grad is view:
                        parameters[i].grad = None
        turn.abandon()
        self._works.clear()
        self._weights = None

    def _all(self) -> list[Work]:
        return [*self._works.values(), *([] if self._weights is None else [self._weights])]

    def _wait(self, deadline: _native.Deadline) -> tuple[tuple[OpInfo, ...], float | None]:
        """What each op did, and the sum of the weights."""
        problem: Error | None = None
        for work in self._all():
            try:
                work.wait(deadline.left())
            except DeadlineExceeded:
                late = sum(not each.done() for each in self._all())
                raise DeadlineExceeded(
                    f"averaging gradients: {late} of {len(self._all())} ops have no outcome yet; they go on; "
                    "make the same call again to wait for them"
                ) from None
            except Error as error:
                problem = problem or given_up(error, "averaging gradients, of which none was changed") or error
        if problem is not None:
            raise problem
        infos = tuple(self._works[number].info for number in range(len(self.buckets)))
        return infos, None if self._weights is None else float(self._sum[0])

    @torch.no_grad()
    def _unpack(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        for bucket, as_view in zip(self.buckets, self._as_view):
            mine = [parameters[number] for number in bucket.numbers]
            if as_view:
                for parameter, view in zip(mine, bucket.views):
                    parameter.grad = view
            else:
                self._copier.unpack(bucket, gradients_of(mine))

    def _info(self, infos: tuple[OpInfo, ...], total: float | None) -> GradientInfo:
        first = infos[0].members
        complete = all(info.members == first for info in infos)
        common = set(first).intersection(*(info.members for info in infos))
        members = tuple(member for member in first if member in common)
        return GradientInfo(infos, members, complete, self._expected, self._lost(infos), total)

    def _lost(self, infos: tuple[OpInfo, ...]) -> float:
        if all(info.world_size == self._expected for info in infos):
            return 0.0
        # A member that is not in the result and is a member still stands in the background: it gave nothing to lose.
        alive: tuple[int, ...] = ()
        with contextlib.suppress(Error):
            alive = () if self.comm is None else self.comm.members
        lost = elements = 0.0
        for bucket, info in zip(self.buckets, infos):
            gone = max(0, self._expected - len({*alive, *info.members}))
            size = max(1, bucket.flat.numel())
            lost += size * gone / (gone + info.world_size)
            elements += size
        return lost / elements


def turn_of(comm: Comm, buckets: int, tag: int, weight: float | None, before: Turn | None = None) -> Turn:
    """The ops of a round."""
    first = tag if weight is not None else tag + 1
    return Turn(comm, dict.fromkeys(range(first, tag + 1 + buckets), "all_reduce"), before)


def unbegun(
    parameters: Sequence[torch.nn.Parameter], comm: Comm, settings: Settings, weight: float | None, before: Turn | None
) -> Turn:
    """A round that an exception has ended before begin(): to be abandoned, and kept as `turn` of the next exchange."""
    buckets = len(parts_of([local_part(each) for each in parameters], settings))
    return turn_of(comm, buckets, settings.tag, weight, before)


def belonging(turn: Turn, tag: int) -> dict[str, Any]:
    """The option of an op that belongs to a turn. Only Collectives knows it, because it is not for users."""
    return {"begun": turn.belonging(tag)}


def _copier_of(parameters: Sequence[torch.nn.Parameter]) -> GradientCopier:
    """A gradient is where its parameter is."""
    return HostCopier() if all(map(_IS_CPU, parameters)) else DeviceCopier()


def _may_be_view(parameter: torch.nn.Parameter, bucket: Bucket) -> bool:
    plain = type(parameter) is torch.nn.Parameter or type(parameter) is torch.Tensor
    return plain and parameter.dtype == bucket.flat.dtype and parameter.device.type == "cpu"


def parts_of(tensors: Sequence[torch.Tensor], settings: Settings) -> list[tuple[torch.dtype, list[int]]]:
    """The dtype of each bucket, and the numbers of its tensors. The first one may be smaller than the others."""
    dtype = settings.wire_dtype
    first = len(division(tensors, settings.first_bytes, dtype)[0][1])
    rest = division(tensors[first:], settings.bucket_bytes, dtype)
    parts = division(tensors[:first], settings.first_bytes, dtype)
    return parts + [(kind, [first + number for number in numbers]) for kind, numbers in rest]


@torch.no_grad()
def _divided(client: Client, parameters: Sequence[torch.nn.Parameter], settings: Settings) -> list[Bucket]:
    """The buckets. In each, gradients that pack() can join lie together."""
    tensors = [local_part(parameter) for parameter in parameters]
    buckets = []
    for kind, numbers in parts_of(tensors, settings):
        ordered = sorted(numbers, key=lambda number: _alike(tensors[number]))
        buckets.append(Bucket(client, ordered, [tensors[number].shape for number in ordered], kind))
    return buckets
