"""What was found in a program's objects at one time, to see cheaply that it is all still there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from operator import is_
from typing import Any

import torch

from .._errors import InvalidArgument
from ._memory import local_part

# Equal and unchanged whenever they are the same object.
_SCALARS = (type(None), bool, int, float, str)


def is_fixed(value: Any) -> bool:
    """Whether the value, if it is still the same object, is encoded as before: a number, text or plain tensor."""
    return type(value) in _SCALARS or (isinstance(value, torch.Tensor) and not hasattr(value, "to_local"))


class Entries:
    """The keys and values of a mapping at one time."""

    def __init__(self, mapping: Mapping[Any, Any]) -> None:
        self._keys = tuple(mapping.keys())
        self._values = tuple(mapping.values())

    def are_of(self, mapping: Mapping[Any, Any]) -> bool:
        """Whether the mapping holds the same objects under the same keys in the same order.

        Compares by identity: tensors cannot be compared otherwise, and it is fast.
        """
        return (
            len(mapping) == len(self._keys)
            and all(map(is_, mapping.keys(), self._keys))
            and all(map(is_, mapping.values(), self._values))
        )


class ModelTensors:
    """The parameters of modules, and the buffers that are saved with them.

    Walking through the modules takes longer than a small step. So the walk is only repeated when a module has another
    parameter, buffer or child than at the last walk.
    """

    def __init__(self, models: Mapping[str, torch.nn.Module]) -> None:
        self._models = models
        self._seen: list[tuple[torch.nn.Module, Entries, Entries, Entries, set[str]]] | None = None
        self._whole: dict[str, torch.Tensor] = {}
        self._local: dict[str, torch.Tensor] | None = None  # None: some of them are DTensors

    def whole(self) -> dict[str, torch.Tensor]:
        """By name. A tensor with several names is there once. Raises InvalidArgument for lazy modules."""
        if not self._as_before():
            self._look()
        return dict(self._whole)

    def with_extra_state(self) -> dict[str, torch.nn.Module]:
        """By name, the modules with a get_extra_state() of their own, which is neither parameter nor buffer."""
        return {
            ".".join(filter(None, (prefix, name))): module
            for prefix, model in self._models.items()
            for name, module in model.named_modules()
            if type(module).get_extra_state is not torch.nn.Module.get_extra_state
        }

    def local(self) -> dict[str, torch.Tensor]:
        """As whole(), with the local parts of DTensors."""
        if not self._as_before():
            self._look()
        if self._local is not None:
            return dict(self._local)
        with torch.no_grad():
            return {name: local_part(tensor) for name, tensor in self._whole.items()}

    def _as_before(self) -> bool:
        return self._seen is not None and all(
            parameters.are_of(module._parameters)
            and buffers.are_of(module._buffers)
            and children.are_of(module._modules)
            and module._non_persistent_buffers_set == skipped
            for module, parameters, buffers, children, skipped in self._seen
        )

    def _look(self) -> None:
        self._seen = None
        self._whole = dict(self._walk())
        modules = {id(each): each for model in self._models.values() for each in model.modules()}.values()
        if all(map(_is_plain, modules)):
            self._seen = [
                (each, Entries(each._parameters), Entries(each._buffers), Entries(each._modules), _skipped_by(each))
                for each in modules
            ]
        divided = any(hasattr(tensor, "to_local") for tensor in self._whole.values())
        self._local = None if divided else self._whole

    def _walk(self) -> Iterator[tuple[str, torch.Tensor]]:
        seen: set[int] = set()
        for prefix, module in self._models.items():
            skipped = _not_saved(module)
            buffers = ((name, each) for name, each in module.named_buffers() if name not in skipped)
            for name, tensor in [*module.named_parameters(), *buffers]:
                if torch.nn.parameter.is_lazy(tensor):
                    raise InvalidArgument(
                        f"{prefix}.{name} has no shape yet, because its module is lazy; run one forward pass first"
                    )
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield f"{prefix}.{name}", tensor


def _not_saved(module: torch.nn.Module) -> set[str]:
    """The names of the buffers that state_dict() of the module leaves out."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, each in module.named_modules()
        for name in each._non_persistent_buffers_set
    }


def _skipped_by(module: torch.nn.Module) -> set[str]:
    return set(module._non_persistent_buffers_set)


_WALKS = ("named_modules", "named_parameters", "named_buffers", "_named_members")


def _is_plain(module: torch.nn.Module) -> bool:
    """Whether the module's tensors are those in its dicts. Modules with a walk of their own may say otherwise."""
    return all(getattr(getattr(module, walk), "__func__", None) is getattr(torch.nn.Module, walk) for walk in _WALKS)


class OptimizerStates:
    """What an optimizer held of its parameters at one time, if all of it was plain."""

    def __init__(self, parameters: Iterable[torch.Tensor], state: Mapping[Any, Any], made_of: Any) -> None:
        """made_of: what the caller made of this, to be found again."""
        self._parameters = tuple(parameters)
        self._held = Entries(state)
        self._entries = [Entries(held) for held in state.values()]
        self.made_of = made_of

    @staticmethod
    def can_be_seen(state: Mapping[Any, Any]) -> bool:
        """Whether a change inside `state` always shows as another object."""
        return all(type(held) is dict and all(map(is_fixed, held.values())) for held in state.values())

    def are_of(self, parameters: list[torch.Tensor], state: Mapping[Any, Any]) -> bool:
        """Whether these are the parameters and the contents as at first."""
        return (
            len(parameters) == len(self._parameters)
            and all(map(is_, parameters, self._parameters))
            and self._held.are_of(state)
            and all(entries.are_of(held) for entries, held in zip(self._entries, state.values()))
        )
