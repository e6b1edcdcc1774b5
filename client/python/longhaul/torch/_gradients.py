"""Averages the gradients of a model over the members of a group, after backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from .. import _native
from .._comm import Comm
from .._errors import DeadlineExceeded
from .._quant import Quant
from .._turn import Turn
from ._exchange import GRADIENT_TAG, GradientExchange, GradientInfo, Settings, settings_of, trainable, unbegun

# What average_gradients() has made for the next call, by the first parameter. It keeps no parameter alive, and goes when
# that parameter goes. Tensors as keys are compared by identity here.
_exchanges: Any = WeakTensorKeyDictionary()
# The latest round, where there is no exchange that knows it.
_turns: Any = WeakTensorKeyDictionary()

Model = torch.nn.Module | Iterable[torch.nn.Parameter]


def average_gradients(
    model: torch.nn.Module | Iterable[torch.nn.Parameter],
    comm: Comm,
    *,
    weight: float | None = None,
    wire_dtype: torch.dtype | None = None,
    quantize: str | Quant | None = None,
    bucket_cap_mb: float = 25,
    gradient_as_bucket_view: bool = False,
    tag: int = GRADIENT_TAG,
    timeout: float | None = None,
) -> GradientInfo:
    """Replaces the gradients of a model by their averages over all members. All members get the same bits.

    Call it after backward, and before clipping and the step of the optimizer, at every member. The gradients are packed
    into flat buckets in memory shared with peerd. Each bucket is one all-reduce, and all are in flight at once. If a
    member dies meanwhile, the others average without it (`GradientInfo`).

    model: a module, or the parameters to average, in the same order, shapes and dtypes at all members. Only parameters
        with `requires_grad` count, of float16, bfloat16, float32 or float64, on any device. A parameter without a
        gradient counts as zeros, and gets the average like all others: so all members take the same step, also where a
        layer was used at one member only. The local part of a DTensor is averaged, so this works for FSDP2 with one
        group for each shard. To walk through a model of 1,000 modules takes some 3 ms; a list of parameters saves that.
    comm: the communicator. Members in the background call this function, too: they get the averages and give nothing.
    weight: 0 or more: how much this member's gradients count, for instance the number of its samples or tokens. All
        members give a weight, or none. The average is divided by the sum of the weights.
    wire_dtype: torch.bfloat16: gradients travel as bfloat16. They are rounded to bfloat16 before and after the sum,
        which is made in float32. None: in their own dtype.
    quantize: "bf16", "int8", "int4" or a longhaul.Quant: how gradients travel (see Comm.all_reduce). Best with stochastic
        rounding: its mean error is 0, so no errors have to be kept. The same at all members. Gradients of float64 cannot
        be quantized. None: as they are.
    bucket_cap_mb: size of a bucket in MiB. The same at all members. A larger gradient gets a bucket of its own.
    gradient_as_bucket_view: True: afterwards each `grad` is a view of a bucket, where that is possible (CPU, no DTensor,
        no wire_dtype). This saves a copy, and with `zero_grad(set_to_none=False)` another one. The next call overwrites
        what you have kept of an old gradient. If this member's peerd dies during the call, such a gradient may be
        partly overwritten. After an exception it is None if its op may have written to it.
    tag: first tag of the ops: one for the weights, and one for each bucket follow. Two models that are averaged at the
        same time need tags that are 2**20 apart, for instance.
    timeout: seconds; None: no limit.

    Memory: the buckets take as much of the memory shared with peerd as the gradients, as long as the first parameter
    lives, or until a call with another peerd. The ops in flight take as much scratch memory of peerd.

    Raises InvalidArgument if a gradient is sparse, the model has no parameters to average, an option is wrong, or the
    members' calls differ. Raises DeadlineExceeded if not all ops have an outcome in time: the ops go on, and the next
    call for these parameters waits for them; the gradients count that it packed first. Raises the errors of
    `Comm.all_reduce`; then the gradients are as they were (see gradient_as_bucket_view).

    **After any other exception** than DeadlineExceeded, also MemoryError or Ctrl-C, this round is over at this member,
    and the next call is the next round. If the member leaves, the others average without it. So a program may also catch
    the exception and go on with its next batch. Members that have all they need get their averages; the others get
    Aborted, which names this member, when it starts its next op or boundary. After an exception that is no
    `longhaul.Error`, gradients may be partly replaced: zero them.

    Threads: any, but one call at a time for one model.
    """
    options = (wire_dtype, bucket_cap_mb, bucket_cap_mb, tag, gradient_as_bucket_view, quantize)
    began: list[_Began] = []
    try:
        return _average(model, comm, weight, options, _native.Deadline(timeout), began)
    except DeadlineExceeded:
        raise
    except BaseException:
        _give_up(model, comm, weight, options, began)
        raise


class _Began(NamedTuple):
    """What a call found before it began a round, or went on with one."""

    exchange: GradientExchange
    turn: Turn | None  #: the latest one of the exchange
    is_open: bool


def _average(
    model: Model,
    comm: Comm,
    weight: float | None,
    options: tuple[Any, ...],
    deadline: _native.Deadline,
    began: list[_Began],
) -> GradientInfo:
    settings = settings_of(*options)
    parameters = trainable(model)
    exchange = _exchange_of(parameters, comm, settings)
    began.append(_Began(exchange, exchange.turn, exchange.comm is not None))
    if exchange.comm is None:
        exchange.begin(comm, weight, deadline)
    return exchange.finish(parameters, deadline)


def _give_up(model: Model, comm: Comm, weight: float | None, options: tuple[Any, ...], began: list[_Began]) -> None:
    """After an exception: for the other members the call is a round, also if it has not come to begin one."""
    with contextlib.suppress(Exception):  # what raises here has raised before: a wrong argument, for instance
        settings = settings_of(*options)
        parameters = trainable(model)
        first = parameters[0]
        exchange: GradientExchange | None = _exchanges.get(first)
        if exchange is not None and exchange.comm is not None:
            exchange.abandon(parameters)
        elif not began or (not began[0].is_open and began[0].exchange.turn is began[0].turn):
            before = _turns.get(first) if exchange is None else exchange.turn
            turn = unbegun(parameters, comm, settings, weight, before)
            if exchange is None:
                _turns[first] = turn
            else:
                exchange.turn = turn
            turn.abandon()


def _exchange_of(parameters: list[torch.nn.Parameter], comm: Comm, settings: Settings) -> GradientExchange:
    """The exchange of an earlier call, or a new one."""
    first = parameters[0]
    found: GradientExchange | None = _exchanges.get(first)
    if found is not None and _fits(found, parameters, comm, settings):
        return found
    if found is not None:
        found.abandon(parameters)
        _turns[first] = found.turn
        del found, _exchanges[first]  # frees its memory for the new one
    made = GradientExchange(parameters, comm._client, settings)
    made.turn = _turns.pop(first, None)
    _exchanges[first] = made
    return made


def _fits(exchange: GradientExchange, parameters: list[torch.nn.Parameter], comm: Comm, settings: Settings) -> bool:
    if exchange.settings != settings or exchange.client is not comm._client:
        return False
    turn = exchange.turn
    if turn is not None and not turn.is_of(comm) and not turn.is_settled:
        return False  # its ops belong to a member that has left
    return exchange.is_for(parameters)
