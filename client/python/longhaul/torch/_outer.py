"""The outer optimizer of the DiLoCo family: it updates the global parameters, and all members share its state."""

from __future__ import annotations

import collections
import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .._arena import Client
from .._errors import InvalidArgument
from ._buckets import Bucket, buckets_of
from ._memory import local_part, shared

# Names the parameter of the model that a global parameter belongs to.
_ORIGIN = "_longhaul_origin"


class _Slot(NamedTuple):
    """One tensor of the optimizer's state, in memory shared with peerd."""

    key: str
    tensor: torch.Tensor


class Outer:
    """Optimizers that update global parameters.

    optimizers: over the model's parameters, each in one of them. They are changed: from now on their groups hold the
        global parameters. Hyperparameters, also those that a scheduler changes, stay where they are.
    globals: for each parameter of the model, its global parameter: a CPU tensor.

    An optimizer makes the state of a parameter in that parameter's first step. The shared tensors exist from the start;
    a flag for each parameter says whether they count. So a member that joins before the first step has, as the others,
    an optimizer without state.

    Raises InvalidArgument if a parameter is in no optimizer, in two, or strange, or if the state of an optimizer is
    not made of tensors.
    """

    def __init__(
        self,
        client: Client | None,
        optimizers: Sequence[torch.optim.Optimizer],
        globals: Mapping[torch.nn.Parameter, torch.nn.Parameter],
        bytes_max: int,
    ) -> None:
        self._optimizers = list(optimizers)
        self._of: dict[torch.nn.Parameter, torch.optim.Optimizer] = {}
        earlier: dict[torch.nn.Parameter, dict[str, torch.Tensor]] = {}
        for number, optimizer in enumerate(self._optimizers):
            earlier.update(_retarget(optimizer, f"outer optimizer {number}", globals))
            for group in optimizer.param_groups:
                self._own(optimizer, group["params"])
        left = len(globals) - len(self._of)
        if left:
            raise InvalidArgument(
                f"{left} of {len(globals)} parameters of the model are in no outer optimizer; make it over all "
                "parameters that are trained"
            )
        self._parameters = list(globals.values())
        self._made = shared(client, (len(self._parameters),), torch.uint8).zero_()
        self._buckets: dict[str, list[Bucket]] = {}
        self._slots: dict[torch.nn.Parameter, list[_Slot]] = {parameter: [] for parameter in self._parameters}
        self._make_slots(client, bytes_max, earlier)
        for i, parameter in enumerate(self._parameters):
            if earlier.get(parameter):
                self._of[parameter].state[parameter] = earlier[parameter]
                self._adopt(i, parameter)

    def _own(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter in self._of:
                raise InvalidArgument("a parameter is in two outer optimizers; give each parameter to one of them")
            self._of[parameter] = optimizer

    def _make_slots(
        self, client: Client | None, bytes_max: int, earlier: Mapping[torch.nn.Parameter, dict[str, torch.Tensor]]
    ) -> None:
        entries = [
            (key, parameter, example)
            for parameter in self._parameters
            for key, example in _example(self._of[parameter], parameter, earlier.get(parameter)).items()
        ]
        entries.sort(key=lambda entry: entry[0])  # a bucket holds tensors of one kind, in the order of the parameters
        for key, of_key in itertools.groupby(entries, lambda entry: entry[0]):
            owners, examples = zip(*[(parameter, example) for _, parameter, example in of_key])
            self._buckets[key] = buckets_of(client, examples, bytes_max)
            for bucket in self._buckets[key]:
                bucket.flat.zero_()
                for number, view in zip(bucket.numbers, bucket.views):
                    self._slots[owners[number]].append(_Slot(key, view))

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The shared tensors by name."""
        named = {
            f"outer.{key}.{i}": bucket.flat
            for key, buckets in self._buckets.items()
            for i, bucket in enumerate(buckets)
        }
        return {"outer.made": self._made, **named}

    def bind(self) -> None:
        """Gives the optimizers what the shared tensors hold, for instance after another member's were fetched."""
        self._restore()
        for made, parameter in zip(self._made.tolist(), self._parameters):
            state = self._of[parameter].state
            state.pop(parameter, None)
            if made and self._slots[parameter]:
                state[parameter] = dict(self._slots[parameter])

    def step(self, parameters: Sequence[torch.nn.Parameter], gradients: Sequence[torch.Tensor]) -> None:
        """One step for these global parameters. The others stay as they are."""
        self._restore()
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient
        try:
            for optimizer in self._optimizers:
                if any(self._of[parameter] is optimizer for parameter in parameters):
                    optimizer.step()
        finally:
            for parameter in parameters:
                parameter.grad = None
        stepped = set(parameters)
        for i, parameter in enumerate(self._parameters):
            if parameter in stepped:
                self._adopt(i, parameter)

    def kept(self, parameters: Sequence[torch.nn.Parameter]) -> tuple[list[torch.Tensor], Callable[[], None]]:
        """What step() changes beside these global parameters, and a function that undoes the rest.

        To undo a step: write the contents of before to these tensors, then call the function.
        """
        self._restore()
        tensors = [slot.tensor for parameter in parameters for slot in self._slots[parameter]]
        groups = [
            (group, {key: _kept(value) for key, value in group.items() if key != "params"})
            for optimizer in self._optimizers
            for group in optimizer.param_groups
        ]

        def undo() -> None:
            for group, options in groups:
                group.update(options)
            self.bind()

        return [self._made, *tensors], undo

    def preview(
        self, parameters: Sequence[torch.nn.Parameter], gradients: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """What these global parameters would be after step() with these gradients. Changes only the gradients."""
        copies = {parameter: _copy(parameter, gradient) for parameter, gradient in zip(parameters, gradients)}
        for optimizer in self._optimizers:
            own = {each: copy for each, copy in copies.items() if self._of[each] is optimizer}
            states = {copy: _tensors_of(optimizer, optimizer.state.get(each, {})) for each, copy in own.items()}
            with _stand_ins(optimizer, own, states):
                optimizer.step()
        return [copies[parameter].detach() for parameter in parameters]

    def _restore(self) -> None:
        for optimizer in self._optimizers:
            _restore(optimizer)

    def _adopt(self, number: int, parameter: torch.nn.Parameter) -> None:
        """Moves the state of a parameter to the shared tensors, if the optimizer has made or replaced it."""
        state = self._of[parameter].state[parameter]
        slots = dict(self._slots[parameter])
        kept = _tensors_of(self._of[parameter], state)
        if kept.keys() != slots.keys():
            raise InvalidArgument(
                f"the outer optimizer keeps {sorted(kept)} for a parameter, and kept {sorted(slots)} after its first "
                "step; members can share an optimizer only if it keeps the same tensors from its first step on"
            )
        for key, tensor in slots.items():
            if state[key] is not tensor:
                tensor.copy_(state[key])
                state[key] = tensor
        self._made[number] = 1


def _retarget(
    optimizer: torch.optim.Optimizer, name: str, globals: Mapping[torch.nn.Parameter, torch.nn.Parameter]
) -> dict[torch.nn.Parameter, dict[str, torch.Tensor]]:
    """Puts the global parameters in the groups of an optimizer. Returns the state that it had for them."""
    new: list[list[torch.nn.Parameter]] = []
    earlier: dict[torch.nn.Parameter, dict[str, torch.Tensor]] = {}
    for group in optimizer.param_groups:
        new.append([])
        for parameter in group["params"]:
            origin = getattr(parameter, _ORIGIN, parameter)
            if origin not in globals:
                if not origin.requires_grad:
                    continue
                raise InvalidArgument(
                    f"{name} has a parameter of shape {list(parameter.shape)} that is not one of the model's; "
                    "make it over the parameters of the model"
                )
            new[-1].append(globals[origin])
            if state := optimizer.state.get(parameter):
                earlier[globals[origin]] = {
                    key: local_part(tensor).cpu() for key, tensor in _tensors_of(optimizer, state).items()
                }
    for group, parameters in zip(optimizer.param_groups, new):
        group["params"] = parameters
    optimizer.state.clear()
    for origin, parameter in globals.items():
        setattr(parameter, _ORIGIN, origin)
    return earlier


def _example(
    optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, earlier: dict[str, torch.Tensor] | None
) -> dict[str, torch.Tensor]:
    """The state that the optimizer makes for a parameter: finds out by a step on a copy of it."""
    copy = _copy(parameter, torch.zeros_like(parameter))
    with _stand_ins(optimizer, {parameter: copy}, {copy: earlier or {}}):
        try:
            optimizer.step()
        except TypeError as problem:
            raise InvalidArgument(
                f"{type(optimizer).__name__} cannot be the outer optimizer: step() without arguments fails: {problem}"
            ) from problem
        return _tensors_of(optimizer, optimizer.state[copy])


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _copy(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> torch.nn.Parameter:
    copy = torch.nn.Parameter(parameter.detach().clone())
    copy.grad = gradient
    return copy


@contextlib.contextmanager
def _stand_ins(
    optimizer: torch.optim.Optimizer,
    copies: Mapping[torch.nn.Parameter, torch.nn.Parameter],
    states: Mapping[torch.nn.Parameter, dict[str, torch.Tensor]],
) -> Iterator[None]:
    """In this block the optimizer has copies in place of its parameters, with copies of these states."""
    _restore(optimizer)
    groups, state = optimizer.param_groups, optimizer.state
    _STOOD_IN[optimizer] = groups, state
    optimizer.param_groups = [
        {**group, "params": [copies[each] for each in group["params"] if each in copies]} for group in groups
    ]
    optimizer.state = collections.defaultdict(dict)
    for copy, tensors in states.items():
        if tensors:
            optimizer.state[copy] = {key: tensor.clone() for key, tensor in tensors.items()}
    try:
        yield
    finally:
        _restore(optimizer)


#: The groups and states of optimizers that have stand-ins. An exception that no block can catch, such as Ctrl-C in the
#: last line of `_stand_ins`, leaves the stand-ins in their place: whoever uses an optimizer calls _restore() before.
_STOOD_IN: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[Any, Any]] = weakref.WeakKeyDictionary()


def _restore(optimizer: torch.optim.Optimizer) -> None:
    """Gives the optimizer its own parameters and states again."""
    if optimizer in _STOOD_IN:
        optimizer.param_groups, optimizer.state = _STOOD_IN[optimizer]
        del _STOOD_IN[optimizer]


def _tensors_of(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of an optimizer's state for one parameter."""
    for key, value in state.items():
        if value is not None and not isinstance(value, torch.Tensor):
            raise InvalidArgument(
                f"{type(optimizer).__name__} keeps {key} as a {type(value).__name__}; members can share tensors only, "
                "so use an optimizer whose state is made of tensors"
            )
    return {key: value for key, value in state.items() if value is not None}
