"""Optimizers and a module of the kinds that programs bring along, for tests of states and of DiLoCo."""

from __future__ import annotations

from typing import Any

import torch


class Delegating(torch.optim.Optimizer):
    """As accelerate.optimizer.AcceleratedOptimizer: made without the constructor of its base class."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self._is_overflow = False

    state = property(lambda self: self.optimizer.state, lambda self, value: setattr(self.optimizer, "state", value))
    param_groups = property(
        lambda self: self.optimizer.param_groups, lambda self, value: setattr(self.optimizer, "param_groups", value)
    )
    defaults = property(lambda self: self.optimizer.defaults)

    def step(self, closure: Any = None) -> Any:
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class Sam(torch.optim.Optimizer):
    """As those of github.com/davda54/sam, with a step() that needs no closure."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, {"rho": 0.05, **options})
        self.base_optimizer = torch.optim.Adam(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["old_p"] = parameter.data.clone()
        self.base_optimizer.step()


class Lookahead(torch.optim.Optimizer):
    """Slow weights beside those of the optimizer inside, which is in a list of it."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner.param_groups, {})
        self.steps = {"made": 0}
        self.parts = [inner]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.parts[0].step()
        self.steps["made"] += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                slow = self.state[parameter].setdefault("slow", torch.zeros_like(parameter))
                parameter.copy_(slow.lerp_(parameter, 0.5))


class Counting(torch.optim.SGD):
    """What its steps change is in attributes, not in state; it knows its parameters by a list of its own."""

    def __init__(self, parameters: Any) -> None:
        self.mine = list(parameters)
        self.generator = torch.Generator().manual_seed(7)
        self.counts = {"steps": [0]}
        self.norm = torch.zeros(())
        super().__init__(self.mine, lr=0.1, momentum=0.9)

    def step(self, closure: Any = None) -> Any:
        self.counts["steps"][0] += 1
        self.norm += torch.rand((), generator=self.generator)
        torch.rand(1)
        super().step(closure)


class Extra(torch.nn.Linear):
    """A module with something beside its tensors, of any kind and length."""

    def __init__(self, extra: Any) -> None:
        super().__init__(2, 2)
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, extra: Any) -> None:
        self.extra = extra
