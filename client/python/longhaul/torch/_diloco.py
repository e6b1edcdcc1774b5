"""Training with few exchanges: LocalSGD, DiLoCo, AsyncDiLoCo and StreamingDiLoCo.

Each member makes `sync_every` inner steps of its own; that is a round. All members hold the same global parameters, bit
by bit, and change them together. A step boundary ends each round; newcomers come in there. No op is in flight at a
boundary, because a newcomer takes no part in an op that started before it was admitted.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypedDict, TypeVar

import torch

from .._comm import Comm, Step
from .._errors import FailedPrecondition, InvalidArgument, number_of
from .._op_info import OpInfo
from .._quant import Quant, quant_of
from .._state import State
from .._sync_info import SyncInfo
from .._turn import GivenUp
from ._error_feedback import ErrorFeedback
from ._fragment import Fragment
from ._outer import Outer
from ._topk import TopK
from ._wrapped import innermost, inside

if TYPE_CHECKING:
    from typing_extensions import Unpack

_Self = TypeVar("_Self", bound="Rounds")


class BucketOptions(TypedDict, total=False):
    """What all classes take. `LocalSGD` explains each."""

    use_bucketization: bool
    bucket_cap_mb: float
    pin_memory: bool
    backup_device: torch.device | str | None


class OuterOptions(BucketOptions, total=False):
    """What the classes with an outer optimizer take. `DiLoCo` explains each."""

    quantize: str | Quant | ErrorFeedback | None
    compress: TopK | None


class _Passed:
    """A boundary: what passed it."""

    step: Step | None = None


class Rounds(abc.ABC):
    """What the classes have in common: the block of `with`, the count of inner steps, boundaries.

    Not thread-safe: one thread enters the block, makes the inner steps and leaves the block.
    """

    #: The group. May be set outside the block, for instance after joining again.
    comm: Comm | None
    #: What all members hold equal. Its revision counts finished rounds.
    state: State
    #: What the latest op did that has changed the global parameters; None before the first one.
    info: OpInfo | None
    #: What the sync at the latest boundary did. `bytes` is more than 0 at a newcomer, and at a member whose processor
    #: has computed other bits than those of most members.
    sync: SyncInfo | None
    #: Whether an op in flight at the end of a block ends a round.
    _ends_with_block = True
    #: Seconds for which this member has waited for others, in all: for ops and at boundaries.
    seconds_blocked: float

    def __init__(
        self,
        comm: Comm | None,
        inner_optimizer: torch.optim.Optimizer | None,
        fragments: Sequence[Sequence[torch.nn.Parameter]],
        sync_every: int,
        *,
        use_bucketization: bool = True,
        bucket_cap_mb: float = 1024,
        pin_memory: bool = False,
        backup_device: torch.device | str | None = None,
    ) -> None:
        self._sync_every = number_of(sync_every, "sync_every", least=1)
        if not bucket_cap_mb > 0:
            raise InvalidArgument(f"bucket_cap_mb is {bucket_cap_mb!r}; give a number of MiB above 0")
        if backup_device is not None and torch.device(backup_device).type != "cpu":
            raise InvalidArgument(
                f"backup_device is {backup_device}; the global parameters lie in memory shared with peerd, so give "
                "'cpu' or None"
            )
        self.comm = comm
        self.info = None
        self.sync = None
        self.seconds_blocked = 0.0
        self._inner = None if inner_optimizer is None else innermost(inner_optimizer)
        # Which peerd it will be is not known without a communicator.
        self._client = None if comm is None else comm._client
        self._bytes_max = int(bucket_cap_mb * (1 << 20)) if use_bucketization else 0
        self._fragments = [
            Fragment(self._client, i, parameters, self._bytes_max, pin_memory) for i, parameters in enumerate(fragments)
        ]
        self._steps = 0  # inner steps since the round began
        self._planned = 0  # inner steps for which _due has what is due
        # What is left to do after inner steps. The first one removes itself when it is done: after an exception it is
        # repeated.
        self._due: list[Callable[[], None]] = []
        # The fragments whose op is to be started before the next boundary.
        self._unsent: list[Fragment] = []
        self._passing: _Passed | None = None  # the boundary of which _unsent does not know yet
        self._block: contextlib.ExitStack | None = None

    @property
    def round(self) -> int:
        """The number of finished rounds: the revision of the state."""
        return self.state.revision

    # ------------------------------------------------------------------ the block

    def __enter__(self: _Self) -> _Self:
        """Passes the first boundary, and sets the model to the global parameters.

        The first boundary of a newcomer is the one that admitted it. Raises FailedPrecondition if there is no
        communicator, if the block is open already, or if the member joined in the background; and what Comm.step()
        raises.
        """
        if self._block is not None:
            raise FailedPrecondition("the block is open already; one `with` at a time uses this object")
        comm = self._joined()
        if comm.background:
            raise FailedPrecondition(
                f"{type(self).__name__} needs a member that is not in the background; use join_mode='blocking'"
            )
        for fragment in self._fragments:
            fragment.open(comm._client)
        self._due, self._unsent = [], []
        try:
            self._boundary(_Passed())
            self._begin()
            with contextlib.ExitStack() as block:
                if self._inner is not None:
                    block.callback(self._inner.register_step_post_hook(lambda *_: self.step()).remove)
                self._block = block.pop_all()
        except BaseException:
            self._give_up()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Without an exception: applies the ops in flight, and sets the model to the global parameters.

        With one, it waits for nothing; the model keeps the values of the inner steps. If the member leaves, the others
        go on without it. If it enters a block again, it has given up the round: where the others wait for it, they get
        Aborted, and meet it at the boundary.
        """
        assert self._block is not None
        self._block.close()
        self._block = None
        try:
            if kind is None:
                with torch.no_grad():
                    self._drain()
                self._write_models()
                self._unsent = []
        finally:
            self._give_up()

    def _give_up(self) -> None:
        """Ends the block: this member starts no more ops before its next boundary."""
        self._due = []
        passing, self._passing = self._passing, None
        if passing is not None and passing.step is not None:  # an exception came right after the boundary
            self._unsent = list(self._fragments)
        for fragment in self._fragments:
            if self.comm is not None:
                fragment.give_up(self.comm, fragment in self._unsent)
            fragment.close()

    def step(self) -> None:
        """Counts one inner step, and does what is due after it. The hook of the inner optimizer calls this.

        Call it yourself after each inner step if inner_optimizer is None. Raises what ops and boundaries raise.

        After Evicted and Unavailable, leave the block, join again, set `comm`, and enter the block. **After any other
        exception**, Ctrl-C and MemoryError, too, the object can go on: the state is as before or after what was due,
        never in between, and the next call goes on where this one was interrupted. Meanwhile the others wait. After
        Aborted because another member gave up the round, the next call passes the boundary, where all meet.
        """
        if self._block is None:
            raise FailedPrecondition(f"step: outside the block; write `with {type(self).__name__}(...)`")
        self._steps += 1
        with torch.no_grad():
            self._go_on()

    def _go_on(self) -> None:
        while True:
            while self._due:
                self._due[0]()
            if self._planned >= self._steps:
                return
            self._due, self._planned = self._after_step(self._planned + 1), self._planned + 1

    @contextlib.contextmanager
    def global_parameters(self) -> Iterator[None]:
        """The model has the global parameters in this block, for instance to evaluate it. Then it has its own again.

        Make no inner steps in this block. Takes no part of other members.
        """
        with torch.no_grad():
            kept = [[part.clone() for part in fragment.locals()] for fragment in self._fragments]
        self._write_models()
        try:
            yield
        finally:
            with torch.no_grad():
                for fragment, values in zip(self._fragments, kept):
                    for part, value in zip(fragment.locals(), values):
                        part.copy_(value)

    # ------------------------------------------------------------------ for the classes

    @abc.abstractmethod
    def _after_step(self, count: int) -> list[Callable[[], None]]:
        """What is due after the inner step with this number, 1 to sync_every. Changes nothing."""

    @abc.abstractmethod
    def _apply(self, fragment: Fragment) -> None:
        """Changes the global parameters by the average that has come."""

    def _begin(self) -> None:
        """Begins the first round of a block."""
        self._steps = self._planned = 0
        self._write_models()

    def _drain(self) -> None:
        """Waits for the ops in flight, and applies them."""
        ends = self._ends_with_block
        self._due = [functools.partial(self._take, each, ends) for each in self._fragments if each.in_flight]
        while self._due:
            self._due[0]()

    def _joined(self) -> Comm:
        if self.comm is None:
            raise FailedPrecondition("there is no communicator: set `comm` to what longhaul.join() returned")
        return self.comm

    def _boundary(self, passed: _Passed) -> None:
        """Passes a step boundary: newcomers get the state. passed: of this boundary; if it has a step, it is passed."""
        self._passing = passed
        if passed.step is None:
            with self._waiting(), self._joined().step(self.state) as passed.step:
                pass
        self._unsent, self._passing = list(self._fragments), None
        assert passed.step is not None and passed.step.sync is not None
        # The end of a round raises the revision, together with the change of the tensors. The boundary does not.
        self.state.revision = passed.step.sync.revision
        self.sync = passed.step.sync

    # ------------------------------------------------------------------ what may be due

    def _send(self, fragment: Fragment, put: Callable[[], None], weight: float | None = None) -> None:
        """Starts the average of what `put` puts out."""
        if not fragment.in_flight:
            put()
        fragment.start(self._joined(), weight)
        if fragment in self._unsent:
            self._unsent.remove(fragment)
        self._due.pop(0)

    def _take(self, fragment: Fragment, ends_round: bool) -> None:
        """Waits for the average of a fragment, and applies it: at once, or not at all."""
        mine = self._due[0]
        try:
            with self._waiting():
                info = fragment.finish()
        except GivenUp:
            fragment.take()
            self._due.pop(0)
            raise
        info_before, revision = self.info, self.state.revision
        kept, undo = self._kept(fragment)
        try:
            if info is not None:
                fragment.unpack(info)
                self.info = info
                self._apply(fragment)
            if ends_round:
                self.state.revision += 1
            fragment.take()
            self._due.pop(0)
        except BaseException:
            if self._due and self._due[0] is mine:
                for tensor, value in kept:
                    tensor.copy_(value)
                undo()
                self.info, self.state.revision = info_before, revision
                fragment.untake()
            raise

    def _kept(self, fragment: Fragment) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], Callable[[], None]]:
        """What _take() changes, with copies, and a function that undoes the rest."""
        return [(each, each.clone()) for each in fragment.changed()], lambda: None

    def _pass(self, passed: _Passed) -> None:
        """Passes the boundary at the end of a round."""
        self._boundary(passed)
        self._steps = self._planned = 0
        self._due.pop(0)

    def _write(self) -> None:
        """Sets the model to the global parameters."""
        self._write_models()
        self._due.pop(0)

    def _end_of_round(self, *more: Callable[[], None]) -> list[Callable[[], None]]:
        return [functools.partial(self._pass, _Passed()), *more]

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self.seconds_blocked += time.monotonic() - begin

    @torch.no_grad()
    def _write_models(self) -> None:
        for fragment in self._fragments:
            fragment.write_model()

    def _globals(self) -> dict[str, torch.Tensor]:
        """The tensors of the state that hold the global parameters."""
        flats = [flat for fragment in self._fragments for flat in fragment.flats if flat.numel()]
        return {f"global.{i}": flat for i, flat in enumerate(flats)}


class LocalSGD(Rounds):
    """Averages the parameters of all members every `sync_every` inner steps (arXiv:1805.09767).

        with LocalSGD(comm, model, optimizer, sync_every=8) as local:
            for batch in data:
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()  # every eighth call averages the parameters of all members

    comm: the group; None: set `comm` before the block, for instance because `join(state=local.state)` needs the state.
        The global parameters are in memory shared with its peerd; with None, in this process, as the peerd is not known.
    model: its parameters with requires_grad, on any device; of a DTensor the part on this rank. Buffers, parameters
        without requires_grad and the optimizer's state stay with each member.
    optimizer: makes the inner steps; a hook counts them. One that only hands on to the optimizer inside it, such as that
        of accelerate, counts as that one. None: call step() after each inner step.
    sync_every: inner steps in a round; the same at all members.
    use_bucketization: True, the default: parameters lie side by side in buckets, which is faster; False: each by itself.
    bucket_cap_mb: a bucket has at most so many MiB, by default 1024, unless one parameter is larger.
    pin_memory: True: locks the buckets in memory, so that copies from and to a GPU are faster. Nothing without CUDA.
    backup_device: where the global parameters lie. None or "cpu": in memory shared with peerd.

    Memory shared with peerd: two times the parameters. One op for each round carries all buckets. At the end of a round a
    copy of the global parameters, in this process.

    After an exception the object can go on: see step(). After one that ended the block, enter a block again.

    Raises InvalidArgument for an argument that cannot be used, Unavailable if peerd has no memory.
    """

    def __init__(
        self,
        comm: Comm | None,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        sync_every: int,
        **buckets: Unpack[BucketOptions],
    ) -> None:
        super().__init__(comm, optimizer, [trained(model)], sync_every, **buckets)
        self.state = State(self._globals())

    def _after_step(self, count: int) -> list[Callable[[], None]]:
        if count != self._sync_every:
            return []
        [fragment] = self._fragments
        return [
            functools.partial(self._send, fragment, fragment.put_parameters),
            functools.partial(self._take, fragment, True),
            *self._end_of_round(self._write),
        ]

    def _apply(self, fragment: Fragment) -> None:
        fragment.take_average()


class OuterRounds(Rounds):
    """What the classes with an outer optimizer have in common."""

    _may_compress = True

    def __init__(
        self,
        comm: Comm | None,
        fragments: Sequence[Sequence[torch.nn.Parameter]],
        inner_optimizer: torch.optim.Optimizer | None,
        outer_optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
        sync_every: int,
        *,
        quantize: str | Quant | ErrorFeedback | None = None,
        compress: TopK | None = None,
        **buckets: Unpack[BucketOptions],
    ) -> None:
        if quantize is not None and not isinstance(quantize, ErrorFeedback):
            quant_of(quantize)  # raises InvalidArgument
        if quantize is not None and compress is not None:
            raise InvalidArgument(
                "quantize and compress are given; TopK quantizes what it sends, so give one of the two"
            )
        if compress is not None and not isinstance(compress, TopK):
            raise InvalidArgument(f"compress is {compress!r}; give a longhaul.torch.TopK, or None")
        if compress is not None and not self._may_compress:
            raise InvalidArgument(
                f"compress is {compress!r}, and {type(self).__name__} sends whole pseudo-gradients only; use DiLoCo, or "
                "StreamingDiLoCo, which hides the exchange, too"
            )
        super().__init__(comm, inner_optimizer, fragments, sync_every, **buckets)
        # The errors of sparse pseudo-gradients take the place of momentum.
        momentum = 0.0 if compress is not None else 0.9
        optimizers = _outer_optimizers(outer_optimizer, fragments, momentum)
        self._outer = Outer(self._client, optimizers, self._pairs(), self._bytes_max)
        self.state = State({**self._globals(), **self._outer.tensors})
        if compress is not None:  # last: a TopK that a failed call was given may be used again
            for fragment, exchange in zip(self._fragments, compress._exchanges_of(self._lengths())):
                fragment.sparse = exchange
        self._set_quantize(quantize)

    def _set_quantize(self, quantize: str | Quant | ErrorFeedback | None) -> None:
        for fragment in self._fragments:
            fragment.quantize = quantize.quantize if isinstance(quantize, ErrorFeedback) else quantize
        if isinstance(quantize, ErrorFeedback):
            for fragment, errors in zip(self._fragments, quantize._make_errors(self._lengths())):
                fragment.errors = errors

    def _lengths(self) -> list[list[int]]:
        """The elements of each bucket of each fragment."""
        return [[flat.numel() for flat in fragment.flats] for fragment in self._fragments]

    def _pairs(self) -> dict[torch.nn.Parameter, torch.nn.Parameter]:
        return {
            parameter: value
            for fragment in self._fragments
            for parameter, value in zip(fragment.parameters, fragment.globals)
        }

    def _boundary(self, passed: _Passed) -> None:
        super()._boundary(passed)
        self._outer.bind()

    def _kept(self, fragment: Fragment) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], Callable[[], None]]:
        kept, _ = super()._kept(fragment)
        tensors, undo = self._outer.kept(fragment.globals)
        return [*kept, *((each, each.clone()) for each in tensors)], undo

    def _apply(self, fragment: Fragment) -> None:
        self._outer.step(fragment.globals, fragment.results())


class DiLoCo(OuterRounds):
    """DiLoCo (arXiv:2311.08105): every `sync_every` inner steps, one outer step with what the members have done.

        with DiLoCo(comm, model, inner, outer, sync_every=100) as diloco:
            for batch in data:
                inner.zero_grad()
                loss_of(model, batch).backward()
                inner.step()  # every hundredth call ends a round

    At the end of a round, a member's pseudo-gradient is: global parameters minus its own. The outer optimizer takes the
    average of all members' pseudo-gradients as the gradient of the global parameters. Then the model is set to the
    global parameters. Meanwhile the member waits.

    A newcomer comes in between two rounds and gets the global parameters and the state of the outer optimizer. It makes
    all inner steps of its first round, so its first pseudo-gradient is like that of the others.

    comm, model, sync_every, use_bucketization, bucket_cap_mb, pin_memory, backup_device: as for LocalSGD.
    inner_optimizer: as optimizer of LocalSGD. Its state stays with each member.
    outer_optimizer: over the parameters of the model; or several, each over some of them. Its groups hold the global
        parameters afterwards. Its state must be tensors, the same ones after each step. Its hyperparameters are not
        shared: change them as all others do, for instance as a function of `round`. None: SGD(lr=0.7, momentum=0.9,
        nesterov=True); with `compress` SGD(lr=0.7).
    quantize: how pseudo-gradients travel: "bf16", "int8", "int4" or a longhaul.Quant (see Comm.all_reduce), or an
        ErrorFeedback of one of them. The same at all members. None: as they are. The global parameters and the average
        of the members stay equal bit by bit.
    compress: a TopK: the members send the largest elements of their pseudo-gradients only, and keep the rest for the
        next round. The same at all members. None: they send everything.

    Memory shared with peerd: two times the parameters, and the state of the outer optimizer. At the end of a round a copy
    of what the outer step changes, in this process. Errors, and after an exception: as for LocalSGD.
    """

    def __init__(
        self,
        comm: Comm | None,
        model: torch.nn.Module,
        inner_optimizer: torch.optim.Optimizer | None,
        outer_optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        sync_every: int,
        **options: Unpack[OuterOptions],
    ) -> None:
        super().__init__(comm, [trained(model)], inner_optimizer, outer_optimizer, sync_every, **options)

    def _after_step(self, count: int) -> list[Callable[[], None]]:
        if count != self._sync_every:
            return []
        [fragment] = self._fragments
        return [
            functools.partial(self._send, fragment, lambda: fragment.put_progress(fragment.flats)),
            functools.partial(self._take, fragment, True),
            *self._end_of_round(self._write),
        ]


class AsyncDiLoCo(DiLoCo):
    """DiLoCo whose outer step comes one round late, so that nobody waits for the exchange (compare arXiv:2502.12996).

    Used as DiLoCo; the arguments and errors are the same, but for `compress`, which must be None. At the end of round
    k, in this order:
    1. Wait for the op of round k-1, usually done long ago. The outer optimizer takes its average.
    2. Pass the step boundary. Newcomers come in, and no op is in flight.
    3. A member's pseudo-gradient of round k is where its inner steps of this round began minus where they ended.
    4. Start the op that averages the pseudo-gradients of round k.
    5. The member guesses that this average will be its own pseudo-gradient: its parameters are set to what the outer
       optimizer would make of that. Here its inner steps of round k+1 begin. The guess changes nothing that is shared.

    A member alone guesses right, so its parameters are those of DiLoCo. With SGD, also with momentum, the guesses of
    all members together have the right mean, so the late outer step does not upset the outer optimizer.

    Only the parameters of the model differ between members; the state is equal at all. A newcomer has no
    pseudo-gradient yet: it takes part in the op of step 4 with weight 0, and so changes no average. Its inner steps
    begin at the global parameters.

    The block ends with a wait for the last op, which counts as a round. Then the model has the global parameters.

    Memory: as DiLoCo, and once more the parameters. While step 5 lasts, three times the parameters and once the state of
    the outer optimizer. All of it on the CPU, and not shared with peerd. After an exception: as for LocalSGD.
    """

    _may_compress = False
    _starts: list[torch.Tensor]
    _own: list[torch.Tensor]  # the pseudo-gradient of the op in flight, until the guess is made

    def _begin(self) -> None:
        super()._begin()
        [fragment] = self._fragments
        self._starts = [flat.clone() for flat in fragment.flats]
        # The others start the op of the round that has ended. A group that has just begun starts an op for which
        # nobody has anything.
        with torch.no_grad():
            fragment.put_progress(self._starts)
        fragment.start(self._joined(), weight=0.0)
        self._unsent = []

    def _after_step(self, count: int) -> list[Callable[[], None]]:
        if count != self._sync_every:
            return []
        [fragment] = self._fragments

        def put() -> None:
            fragment.put_progress(self._starts)
            self._own = [each.clone() for each in fragment.results()]

        return [
            functools.partial(self._take, fragment, True),
            *self._end_of_round(functools.partial(self._send, fragment, put, 1.0), self._guess),
        ]

    def _guess(self) -> None:
        [fragment] = self._fragments
        own = [each.clone() for each in self._own]  # the outer optimizer may change it
        fragment.go_from(self._outer.preview(fragment.globals, own), self._starts)
        self._own = []
        self._due.pop(0)


class StreamingDiLoCo(OuterRounds):
    """Streaming DiLoCo (arXiv:2501.18512): the model in fragments, which are exchanged one after the other.

        fragments = [*model.blocks, model.head]  # together they hold all parameters
        with StreamingDiLoCo(
            comm, model, inner, outer, sync_every=100, model_fragments=fragments, fragment_sync_delay=5
        ) as diloco:
            ...

    A round of `sync_every` inner steps has one turn for each fragment, of `sync_every / len(model_fragments)` inner
    steps. `fragment_sync_delay` inner steps before the end of its turn, the op of the fragment starts: it averages the
    members' pseudo-gradients, global parameters minus own ones. At the end of the turn the member waits for the op, and
    the outer optimizer makes its step for this fragment. Then each parameter of the fragment is set to
    global + fragment_update_alpha * (own - global).

    The boundary is at the end of the round. No op is in flight there, so one state holds all fragments. A newcomer
    makes all inner steps of its first round.

    model_fragments: modules that hold all trained parameters together. A parameter that is in several of them belongs
        to the first one. The same at all members.
    fragment_sync_delay: 0: the member waits for the whole exchange. Otherwise the exchange has the time of so many
        inner steps. Less than the inner steps of a turn.
    fragment_update_alpha: from 0, the member takes the global parameters, to 1, it keeps its own.
    sync_every: a multiple of the number of fragments.
    The other arguments, the errors, and what holds after an exception: as for DiLoCo. An exception while a fragment is
    brought to the global parameters leaves the fragment as it was.
    """

    _ends_with_block = False

    def __init__(
        self,
        comm: Comm | None,
        model: torch.nn.Module,
        inner_optimizer: torch.optim.Optimizer | None,
        outer_optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        sync_every: int,
        model_fragments: Sequence[torch.nn.Module],
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
        **options: Unpack[OuterOptions],
    ) -> None:
        fragments = divided(model, model_fragments)
        sync_every = number_of(sync_every, "sync_every", least=1)
        self._turn, rest = divmod(sync_every, len(fragments))
        if rest:
            raise InvalidArgument(
                f"sync_every is {sync_every}, and there are {len(fragments)} fragments; give a multiple of that number"
            )
        self._delay = number_of(fragment_sync_delay, "fragment_sync_delay")
        if self._delay >= self._turn:
            raise InvalidArgument(
                f"fragment_sync_delay is {self._delay}, and each of the {len(fragments)} fragments has a turn of "
                f"{self._turn} inner steps; give less than that"
            )
        if not 0 <= fragment_update_alpha <= 1:
            raise InvalidArgument(f"fragment_update_alpha is {fragment_update_alpha!r}; give a number from 0 to 1")
        self._alpha = float(fragment_update_alpha)
        super().__init__(comm, fragments, inner_optimizer, outer_optimizer, sync_every, **options)

    def _after_step(self, count: int) -> list[Callable[[], None]]:
        if count > self._sync_every:
            return []
        fragment = self._fragments[(count - 1) // self._turn]
        left = -count % self._turn  # inner steps to the end of the turn
        ends = count == self._sync_every
        due: list[Callable[[], None]] = []
        if left == self._delay:
            due.append(functools.partial(self._send, fragment, lambda: fragment.put_progress(fragment.flats)))
        if left == 0:
            due.append(functools.partial(self._take, fragment, ends))
            due.append(functools.partial(self._mix, fragment))
        return [*due, *(self._end_of_round() if ends else [])]

    def _mix(self, fragment: Fragment) -> None:
        """Brings the fragment of the model to the global parameters, as far as fragment_update_alpha says."""
        mine = self._due[0]
        kept = [(each, each.clone()) for each in fragment.locals()]
        try:
            fragment.write_model(self._alpha)
            self._due.pop(0)
        except BaseException:
            if self._due and self._due[0] is mine:
                for part, value in kept:
                    part.copy_(value)
            raise


# ---------------------------------------------------------------------------- arguments


def trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters that the members have in common: each once, also if modules share it."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise InvalidArgument("no parameter of the model has requires_grad; there is nothing to train")
    return parameters


def divided(model: torch.nn.Module, modules: Sequence[torch.nn.Module]) -> list[list[torch.nn.Parameter]]:
    """The parameters of each fragment. Raises InvalidArgument if the fragments are not the whole model."""
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    left = dict.fromkeys(trained(model))
    fragments = []
    for number, module in enumerate(modules):
        inside = [parameter for parameter in module.parameters() if parameter in left]
        if not inside:
            raise InvalidArgument(
                f"model_fragments[{number}] has no trained parameter of the model that is in no fragment before it"
            )
        for parameter in inside:
            del left[parameter]
        fragments.append(inside)
    if left:
        raise InvalidArgument(
            f"model_fragments leaves out {len(left)} parameters of the model, the first is {names[next(iter(left))]}; "
            "give each of them to a fragment"
        )
    return fragments


def _outer_optimizers(
    given: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    fragments: Sequence[Sequence[torch.nn.Parameter]],
    momentum: float,
) -> list[torch.optim.Optimizer]:
    if given is None:
        parameters = [parameter for fragment in fragments for parameter in fragment]
        return [torch.optim.SGD(parameters, lr=0.7, momentum=momentum, nesterov=momentum > 0)]
    optimizers = [innermost(each) for each in ([given] if isinstance(given, torch.optim.Optimizer) else given)]
    for each in optimizers:
        if within := inside(each):
            name, inner = within[0]
            raise InvalidArgument(
                f"{type(each).__name__} cannot be the outer optimizer: it has a {type(inner).__name__} inside ({name}) with "
                "state of its own, which members could not share"
            )
    return optimizers
