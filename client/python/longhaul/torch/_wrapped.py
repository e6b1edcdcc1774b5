"""Optimizers with other optimizers inside: accelerate's, which only delegates, and those that keep state of their own."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch

# How deep optimizers are looked for: an attribute, an item of it, an attribute of that.
_DEPTH = 3


def innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that makes the steps, if the given one only hands its groups and state on; else the given one.

    accelerate's AcceleratedOptimizer is of this kind: it has no groups, state or hooks of its own.
    """
    while True:
        inner = next((each for _, each in inside(optimizer) if _delegates(optimizer, each)), None)
        if inner is None:
            return optimizer
        optimizer = inner


def inside(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.optim.Optimizer]]:
    """The optimizers that an optimizer has in its attributes, each once, with the name of the attribute."""
    found: dict[int, tuple[str, torch.optim.Optimizer]] = {}
    for name, value in vars(optimizer).items():
        for each in _within(value, _DEPTH):
            if each is not optimizer:
                found.setdefault(id(each), (name, each))
    return list(found.values())


def _delegates(outer: torch.optim.Optimizer, inner: torch.optim.Optimizer) -> bool:
    return outer.param_groups is inner.param_groups and outer.state is inner.state


def _within(value: Any, depth: int) -> Iterator[torch.optim.Optimizer]:
    if isinstance(value, torch.optim.Optimizer):
        yield value
        return
    if depth == 0 or isinstance(value, (torch.Tensor, torch.nn.Module, str, bytes, int, float, type, types.ModuleType)):
        return
    if isinstance(value, types.MethodType):
        parts: list[Any] = [value.__self__]
    elif isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, (list, tuple, set)):
        parts = list(value)
    else:
        parts = list(getattr(value, "__dict__", {}).values())
    for part in parts:
        yield from _within(part, depth - 1)
