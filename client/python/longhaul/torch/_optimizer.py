"""The tensors and the options of an optimizer, also those that it makes in its first step."""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .._errors import InvalidArgument
from . import _objects
from ._memory import local_part
from ._objects import Json
from ._seen import OptimizerStates
from ._wrapped import innermost, inside

# A group's own entries, which are no options. "param_names" never changes.
_NO_OPTIONS = ("params", "param_names")


@dataclasses.dataclass(frozen=True)
class Blank:
    """A tensor without its elements."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def like(tensor: torch.Tensor, device: torch.device | None = None) -> Blank:
        return Blank(tuple(tensor.shape), tensor.dtype, device or tensor.device)

    def zeros(self, device: torch.device | None = None) -> torch.Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=device or self.device)


class OptimizerPart:
    """One optimizer of a state.

    name: of the optimizer in the state, such as "optimizer.0". names: the name of each parameter, by its id(). others: all
    optimizers of the state.
    optimizer: the one that makes the steps, if the given one only delegates (`innermost`).
    layout: by name, the tensors that the optimizer holds, and those that it makes in its first step; sorted, so that it
        does not matter whether it has made them.
    """

    def __init__(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        names: Mapping[int, str],
        others: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        self.name = name
        self.optimizer = innermost(optimizer)
        self._lengths = [len(group["params"]) for group in optimizer.param_groups]
        self._names = [
            [self._name_of(parameter, names) for parameter in group["params"]] for group in optimizer.param_groups
        ]
        self._seen: OptimizerStates | None = None
        self._learnt: dict[tuple[int, Blank], dict[str, Blank]] = {}
        self._inside = inside(self.optimizer)
        self._check_inside([innermost(each) for each in others])
        self.layout = self._learn()

    @property
    def structure(self) -> str:
        """What has to be alike at all members and is no tensor."""
        return f"{type(self.optimizer).__name__}, groups={len(self._lengths)}, parameters={sum(self._lengths)}"

    def read(self, tensors: dict[str, torch.Tensor]) -> Json:
        """The options of the groups and what the optimizer holds of each parameter. Puts its tensors into `tensors`.

        Raises InvalidArgument if the optimizer has other parameters than at first, or holds something that fits no
        state.
        """
        self._check_groups()
        return {"groups": self._groups(tensors), "state": self._runs(tensors)}

    def write(self, document: Json, tensor_of: Callable[[str], torch.Tensor]) -> None:
        """Gives the optimizer what read() told. tensor_of: gives the tensor of a name, which the optimizer then holds."""
        for number, (group, tree) in enumerate(zip(self.optimizer.param_groups, document["groups"])):
            options = _objects.decode(tree, f"{self.name}.group.{number}", tensor_of)
            for key in [key for key in group if key not in _NO_OPTIONS and key not in options]:
                del group[key]
            group.update(options)
        state = self.optimizer.state
        for (parameter, name), tree in zip(self._parameters(), _objects.each_of(document["state"])):
            if tree is None:
                state.pop(parameter, None)
                continue
            whole = _whole_of(parameter, tensor_of)
            state[parameter] = _objects.decode(tree, f"{self.name}.{name}", whole)

    def whole(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """The tensor of a name as the optimizer holds it: a DTensor, if `local` is the local part of one."""
        for parameter, of in self._parameters():
            if name.startswith(f"{self.name}.{of}.") and hasattr(parameter, "to_local"):
                return as_dtensor(local, parameter)
        return local

    def _check_inside(self, others: Sequence[torch.optim.Optimizer]) -> None:
        """Raises InvalidArgument if an optimizer inside this one has state that no optimizer of the state has."""
        for attribute, inner in self._inside:
            if inner.param_groups and not any(inner.state is each.state for each in others):
                kind, within = type(self.optimizer).__name__, type(inner).__name__
                raise InvalidArgument(
                    f"{self.name}: {kind} has a {within} inside ({attribute}) with state of its own, which this state "
                    f"would miss; pass that {within} in its place if {kind} keeps nothing between two steps (such as "
                    "SAM), or both, at all members after their first step"
                )

    def _name_of(self, parameter: torch.Tensor, names: Mapping[int, str]) -> str:
        name = names.get(id(parameter))
        if name is None:
            raise InvalidArgument(
                f"{self.name} ({type(self.optimizer).__name__}) has a parameter of shape {list(parameter.shape)} that "
                "is in no model of this state; pass all models, as model={'name': module, ...}"
            )
        return name

    def _parameters(self) -> list[tuple[torch.Tensor, str]]:
        return [
            pair
            for group, names in zip(self.optimizer.param_groups, self._names)
            for pair in zip(group["params"], names)
        ]

    def _check_groups(self) -> None:
        lengths = [len(group["params"]) for group in self.optimizer.param_groups]
        if lengths != self._lengths:
            raise InvalidArgument(
                f"{self.name} had {self._lengths} parameters in its groups when the state was made, and has {lengths} "
                "now; make a new lh.torch.State after add_param_group()"
            )

    def _groups(self, tensors: dict[str, torch.Tensor]) -> list[Json]:
        # In the order of the keys: it has no meaning, and differs once a scheduler has added a key.
        return [
            _objects.encode(
                {key: group[key] for key in sorted(group) if key not in _NO_OPTIONS},
                f"{self.name}.group.{number}",
                tensors,
            )
            for number, group in enumerate(self.optimizer.param_groups)
        ]

    def _runs(self, tensors: dict[str, torch.Tensor]) -> list[Json]:
        """What the optimizer holds of all parameters. From its second step on mostly the same objects as before."""
        state = self.optimizer.state
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        seen = self._seen
        if seen is None or not seen.are_of(parameters, state):
            found: dict[str, torch.Tensor] = {}
            made = (_objects.runs_of(self._states(found)), found)
            seen = OptimizerStates(parameters, state, made) if OptimizerStates.can_be_seen(state) else None
            self._seen = seen
        else:
            made = seen.made_of
        runs, held = made
        tensors.update(held)
        return runs

    def _states(self, tensors: dict[str, torch.Tensor]) -> list[Json]:
        state = self.optimizer.state
        pairs = self._parameters()
        known = {id(parameter) for parameter, _ in pairs}
        key: Any
        for key in state:
            if id(key) not in known:
                what = repr(key) if isinstance(key, str) else f"a {type(key).__name__} that is no parameter of it"
                raise InvalidArgument(
                    f"{self.name} holds state of {what}, and a state takes what belongs to parameters; pass the "
                    "optimizer in objects= if its state_dict() has tensors of fixed shapes"
                )
        return [self._state_of(parameter, name, tensors) for parameter, name in pairs]

    def _state_of(self, parameter: torch.Tensor, name: str, tensors: dict[str, torch.Tensor]) -> Json:
        held = self.optimizer.state.get(parameter)
        if not held:
            return None
        found: dict[str, torch.Tensor] = {}
        tree = _objects.encode(dict(held), f"{self.name}.{name}", found)
        tensors.update((key, local_part(tensor)) for key, tensor in found.items())
        return tree

    # ------------------------------------------------------------------ what an optimizer makes in its first step

    def _learn(self) -> dict[str, Blank]:
        present: dict[str, torch.Tensor] = {}
        self.read(present)
        layout: dict[str, Blank] = {}
        for number, (group, names) in enumerate(zip(self.optimizer.param_groups, self._names)):
            for parameter, name in zip(group["params"], names):
                if not parameter.requires_grad or self.optimizer.state.get(parameter):
                    continue
                blank = Blank.like(local_part(parameter.detach()))
                if (number, blank) not in self._learnt:
                    self._learnt[number, blank] = self._first_step(group, blank)
                layout.update(
                    (f"{self.name}.{name}.{part}", made) for part, made in self._learnt[number, blank].items()
                )
        layout.update((name, Blank.like(tensor)) for name, tensor in present.items())
        return dict(sorted(layout.items()))

    def _first_step(self, group: dict[str, Any], parameter: Blank) -> dict[str, Blank]:
        """The tensors that the first step makes for a parameter like this one, from a step of a copy of the optimizer.

        Tensors on the meta device have no elements, so there the copy costs nothing. Some optimizers look at elements,
        and fused ones refuse the meta device. Then the copy steps a real parameter of zeros.
        """
        if self._inside:
            raise InvalidArgument(
                f"{self.name}: what {type(self.optimizer).__name__} makes in its first step is not known, because a step "
                "of it steps the optimizer inside it, too; make the state at all members after the optimizer's first "
                "step"
            )
        cuda = [parameter.device.index or 0] if parameter.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(cuda):
                return self._step_a_copy(group, parameter, torch.device("meta"))
        except Exception:
            pass  # any optimizer may raise anything there
        try:
            with torch.random.fork_rng(cuda):
                return self._step_a_copy(group, parameter, parameter.device)
        except InvalidArgument:
            raise
        except Exception as problem:
            raise InvalidArgument(
                f"{self.name}: what {type(self.optimizer).__name__} makes in its first step is not known, because a "
                f"step of a copy of it with zero gradients failed ({type(problem).__name__}: {problem}); make the state "
                "at all members after the optimizer's first step"
            ) from problem

    def _step_a_copy(self, group: dict[str, Any], blank: Blank, device: torch.device) -> dict[str, Blank]:
        parameter = torch.nn.Parameter(blank.zeros(device), requires_grad=blank.dtype.is_floating_point)
        parameter.grad = torch.zeros_like(parameter)
        stand_in = _copy_of(self.optimizer)
        options = {key: _clone(value) for key, value in group.items() if key not in _NO_OPTIONS}
        stand_in.param_groups = [{**options, "params": [parameter]}]
        step: Any = type(stand_in).step
        # Past the wrapper of torch, which calls the hooks that are for all optimizers.
        step = step.__wrapped__ if getattr(step, "hooked", False) else step
        versions = [each._version for each, _ in self._parameters()]
        step(stand_in)
        if versions != [each._version for each, _ in self._parameters()]:
            raise InvalidArgument(
                f"{self.name}: a step of a copy of {type(self.optimizer).__name__} changed the parameters of the "
                "original, so this optimizer cannot be copied; load the model again, and make the state at all members "
                "after the optimizer's first step"
            )
        found: dict[str, torch.Tensor] = {}
        held = stand_in.state.get(parameter, {})
        for key, value in held.items():
            _objects.encode(value, str(key), found)
        return {
            part: Blank.like(tensor, blank.device if tensor.device.type == "meta" else tensor.device)
            for part, tensor in found.items()
        }


def _copy_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer of the same kind and attributes, without parameters, state and hooks. It shares nothing that changes."""
    # Without the constructor, whose arguments are not known.
    made = object.__new__(type(optimizer))
    # What attributes tell of the original and its parameters, they tell of the copy and of parameters without elements.
    known: dict[int, Any] = {id(optimizer): made, id(optimizer.state): collections.defaultdict(dict)}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            blank = Blank.like(local_part(parameter.detach()), torch.device("meta"))
            known[id(parameter)] = torch.nn.Parameter(blank.zeros(), requires_grad=False)
    for name, value in vars(optimizer).items():
        if name == "step":
            continue  # a scheduler has replaced it by one that steps the original
        if name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            made.__dict__[name] = collections.OrderedDict()
        elif name not in ("state", "param_groups"):
            made.__dict__[name] = _separate(value, known)
    made.state = collections.defaultdict(dict)
    return made


def _separate(value: Any, known: dict[int, Any]) -> Any:
    """A copy, so that a step of who has it does not change the original. The value itself if it cannot be copied."""
    if isinstance(value, torch.Generator):
        return value.clone_state()
    try:
        return copy.deepcopy(value, known)
    except Exception:  # such as a lock, a file or a process group
        return value


def _clone(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _whole_of(parameter: torch.Tensor, tensor_of: Callable[[str], torch.Tensor]) -> Callable[[str], torch.Tensor]:
    """tensor_of for the state of a parameter. For a DTensor, what has the shape of its local part is a DTensor, too."""
    if not hasattr(parameter, "to_local"):
        return tensor_of
    return lambda name: as_dtensor(tensor_of(name), parameter)


def as_dtensor(local: torch.Tensor, like: Any) -> torch.Tensor:
    """The DTensor with this local part that is divided as `like` is. `local` itself if it has another shape."""
    if tuple(local.shape) != tuple(local_part(like.detach()).shape) or local.dim() == 0:
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
