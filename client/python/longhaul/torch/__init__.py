"""Longhaul for PyTorch: tensors in memory shared with peerd, and what training programs build on top.

`import longhaul` does not import torch. The first use of `longhaul.torch` imports this package, and torch with it.
"""

from __future__ import annotations

from ._diloco import AsyncDiLoCo, DiLoCo, LocalSGD, StreamingDiLoCo
from ._memory import empty

__all__ = ["AsyncDiLoCo", "DiLoCo", "LocalSGD", "StreamingDiLoCo", "empty"]
