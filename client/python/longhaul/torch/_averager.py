"""Averages gradients while backward still runs: a bucket leaves when its gradients are complete."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch

from .. import _native
from .._comm import Comm
from .._errors import DeadlineExceeded, Error, FailedPrecondition
from .._quant import Quant
from .._turn import Turn
from ._exchange import GRADIENT_TAG, GradientExchange, GradientInfo, settings_of, trainable, unbegun

_Self = TypeVar("_Self", bound="GradientAverager")


class GradientAverager:
    """Averages the gradients of a model over all members, and overlaps this with backward.

        averager = lh.torch.GradientAverager(model, comm)
        loss.backward()            # the op of each bucket starts as soon as its gradients are there
        info = averager.finish()   # before clipping and the step of the optimizer
        optimizer.step()

    The results are those of `average_gradients`, which documents the arguments that both have. Buckets hold the
    parameters in reverse order, because backward makes the gradients of the last layers first. The first bucket is
    small (first_bucket_mb), so that the network has work early. The scheme is that of PyTorch's DDP (Li et al., "PyTorch
    Distributed", VLDB 2020).

    One round is one backward, and one finish() or abandon(). Rules:
    - A parameter's gradient may be complete once in a round. For several backwards before one step use no_sync() for
      all but the last. A second backward without it raises FailedPrecondition inside backward.
    - finish() sends what has not been sent: the gradients of parameters that this backward did not use, from earlier
      backwards in no_sync(), or zeros. A member without data calls finish() without a backward, best with weight 0.
    - If backward raises in the middle, some ops are in flight already, and the other members wait for the rest. Let
      the exception end the member (`with lh.join(...)`), or catch it. Then call abandon(): the others get Aborted, and
      the next round is as usual at all. Or call finish(): it sends the rest as it is.
    - After an exception in finish() or in a hook of this object, DeadlineExceeded excepted, the round is over at this
      member, as average_gradients documents. Go on with the next backward.
    - While a round is open, do not touch the gradients, nor zero them.

    model: as for average_gradients. The parameters that require a gradient now; make a new averager when that changes.
    comm: may be replaced between two rounds, or after a rejoin: `averager.comm = comm`. An open round is given up then.
    weight: attribute, may be set between two rounds: this member's weight in the next round. The ops start in backward,
        so it has to be known before.

    Threads: backward may call the hooks on any thread. All methods: one thread at a time. The model keeps no reference
    to the averager: keep one. close(), or the end of a `with` block, removes the hooks.
    """

    def __init__(
        self,
        model: torch.nn.Module | Iterable[torch.nn.Parameter],
        comm: Comm,
        *,
        weight: float | None = None,
        wire_dtype: torch.dtype | None = None,
        quantize: str | Quant | None = None,
        bucket_cap_mb: float = 25,
        first_bucket_mb: float = 1,
        gradient_as_bucket_view: bool = False,
        tag: int = GRADIENT_TAG,
    ) -> None:
        self._settings = settings_of(wire_dtype, bucket_cap_mb, first_bucket_mb, tag, gradient_as_bucket_view, quantize)
        self._parameters = trainable(model)[::-1]
        self._comm = comm
        self._weight = weight
        self._sync = True
        self._lock = threading.Lock()  # several devices have a thread each in backward
        self._exchange: GradientExchange | None = None
        self._turn: Turn | None = None  # the latest round while there is no exchange
        # The backward in which a hook gave up the round, and why: other threads of that backward go on.
        self._failed: tuple[int, BaseException] | None = None
        self._buckets()
        me = weakref.ref(self)
        untyped: list[Any] = list(self._parameters)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(functools.partial(_hook, me, number))
            for number, parameter in enumerate(untyped)
        ]

    @property
    def comm(self) -> Comm:
        """The communicator. Setting it gives up an open round, and makes buckets at the peerd of the new one."""
        return self._comm

    @comm.setter
    def comm(self, comm: Comm) -> None:
        exchange = self._exchange
        # Ops in flight keep the memory of the old buckets alive, and may still write to it.
        if exchange is not None and (comm._client is not exchange.client or not self._is_settled(exchange)):
            exchange.abandon(self._parameters)
            self._drop(exchange)
        self._comm = comm
        self._failed = None
        self._reset(self._buckets())

    @staticmethod
    def _is_settled(exchange: GradientExchange) -> bool:
        return exchange.turn is None or exchange.turn.is_settled

    @property
    def weight(self) -> float | None:
        """This member's weight in the next round. Setting it raises FailedPrecondition while a round is open."""
        return self._weight

    @weight.setter
    def weight(self, weight: float | None) -> None:
        self._check_no_round("weight")
        self._weight = weight

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """In this block backward adds up gradients, and sends nothing: for all but the last backward before a step.

        Raises FailedPrecondition if a round is open.
        """
        self._check_no_round("no_sync")
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def finish(self, timeout: float | None = None) -> GradientInfo:
        """Ends the round: waits until all gradients are averages. See the class for what it sends.

        timeout: seconds; None: no limit. After DeadlineExceeded the ops go on; call finish() again. Raises the errors of
        average_gradients. After any other error the round has ended, and the gradients are as they were.
        """
        if self._failed is not None:
            _, problem = self._failed
            self._failed = None
            if isinstance(problem, Error):
                raise problem
            raise FailedPrecondition(
                f"finish: a hook of this averager raised {type(problem).__name__} in backward, and the round was given up; "
                "go on with the next backward"
            ) from problem
        began = self._began()
        try:
            return self._finish(_native.Deadline(timeout))
        except DeadlineExceeded:
            raise
        except BaseException:
            self._give_up(began)
            raise

    def _finish(self, deadline: _native.Deadline) -> GradientInfo:
        exchange = self._buckets()
        self._begin(exchange, deadline)
        info = exchange.finish(self._parameters, deadline)
        self._reset(exchange)
        return info

    def abandon(self) -> None:
        """Gives up a round: in place of finish(), for instance because forward or backward raised. Waits for nothing.

        The members that wait for gradients of this one get Aborted when it starts its next op or boundary. What gradients
        hold means nothing then: zero them.
        """
        if self._failed is not None:  # a hook has done so
            self._failed = None
            return
        self._give_up(self._began())

    def _began(self) -> tuple[Turn | None, bool]:
        """The latest round, and whether it is open."""
        exchange = self._exchange
        return (self._turn, False) if exchange is None else (exchange.turn, exchange.comm is not None)

    def _give_up(self, began: tuple[Turn | None, bool]) -> None:
        """Ends a round after an exception. began: _began() before it, to tell a round that has ended from one to begin."""
        turn, is_open = self._began()
        exchange = self._exchange
        if exchange is not None and is_open:
            exchange.abandon(self._parameters)
        elif not began[1] and turn is began[0]:
            turn = unbegun(self._parameters, self._comm, self._settings, self._weight, turn)
            if exchange is None:
                self._turn = turn
            else:
                exchange.turn = turn
            turn.abandon()
        if exchange is not None:
            self._reset(exchange)

    def close(self) -> None:
        """Removes the hooks, and gives up a round that backward has begun. A second call does nothing."""
        for handle in self._handles:
            handle.remove()
        began = self._began()
        if began[1] or any(self._arrived):
            self._give_up(began)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_no_round(self, what: str) -> None:
        if self._exchange is not None and (self._exchange.comm is not None or any(self._arrived)):
            raise FailedPrecondition(
                f"{what}: gradients of the last backward are not averaged yet; call finish() first"
            )

    def _buckets(self) -> GradientExchange:
        if self._exchange is None:
            made = GradientExchange(self._parameters, self._comm._client, self._settings)
            made.turn, self._turn = self._turn, None
            self._bucket_of = {number: i for i, bucket in enumerate(made.buckets) for number in bucket.numbers}
            self._reset(made)
            self._exchange = made
        return self._exchange

    def _drop(self, exchange: GradientExchange) -> None:
        self._turn = exchange.turn
        self._exchange = None

    def _reset(self, exchange: GradientExchange) -> None:
        self._arrived = bytearray(len(self._parameters))
        self._left = [len(bucket.numbers) for bucket in exchange.buckets]

    def _begin(self, exchange: GradientExchange, deadline: _native.Deadline) -> None:
        """Opens a round if none is open."""
        if exchange.comm is None:
            exchange.begin(self._comm, self._weight, deadline)

    def _on_gradient(self, number: int) -> None:
        """Backward has completed the gradient of a parameter."""
        if not self._sync:
            return
        with self._lock:
            backward = torch._C._current_graph_task_id()
            if self._failed is not None:
                if self._failed[0] == backward:
                    return
                self._failed = None
            began = self._began()
            try:
                first = self._arrive(number)
            except BaseException as problem:
                self._failed = (backward, problem)
                self._give_up(began)
                raise
            if not first:
                raise FailedPrecondition(
                    "backward has completed a gradient that is on its way already; call finish() of the averager after "
                    "each backward, and use no_sync() for all but the last backward before a step"
                )

    def _arrive(self, number: int) -> bool:
        """False: the gradient has arrived before."""
        exchange = self._buckets()
        if self._arrived[number]:
            return False
        self._arrived[number] = 1
        bucket = self._bucket_of[number]
        self._left[bucket] -= 1
        if self._left[bucket] == 0:
            self._begin(exchange, _native.Deadline(None))
            exchange.start(bucket, self._parameters)
        return True


def _hook(averager: weakref.ref[GradientAverager], number: int, parameter: torch.Tensor) -> None:
    # By a weak reference: the parameter keeps its hooks alive, and they would keep the averager.
    owner = averager()
    if owner is not None:
        owner._on_gradient(number)
