"""Longhaul for PyTorch: tensors in memory shared with peerd, and what training programs build on top.

`import longhaul` does not import torch. The first use of `longhaul.torch` imports this package, and torch with it.
"""

from __future__ import annotations

from ._hsdp import HSDP
from ._memory import empty
from ._state import State

__all__ = ["HSDP", "State", "empty"]
