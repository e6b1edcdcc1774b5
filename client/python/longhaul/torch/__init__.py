"""Longhaul for PyTorch: tensors in memory shared with peerd, and what training programs build on top.

`import longhaul` does not import torch. The first use of `longhaul.torch` imports this package, and torch with it.
"""

from __future__ import annotations

import longhaul_torch

from ._averager import GradientAverager
from ._diloco import AsyncDiLoCo, DiLoCo, LocalSGD, StreamingDiLoCo
from ._empty import empty
from ._error_feedback import ErrorFeedback
from ._exchange import GRADIENT_TAG, GradientInfo
from ._gradients import average_gradients
from ._hsdp import HSDP
from ._pg_options import Options
from ._process_group import ddp_average_hook
from ._sampler import ElasticSampler
from ._state import State
from ._topk import TopK

__all__ = [
    "GRADIENT_TAG",
    "HSDP",
    "AsyncDiLoCo",
    "DiLoCo",
    "ElasticSampler",
    "ErrorFeedback",
    "GradientAverager",
    "GradientInfo",
    "LocalSGD",
    "Options",
    "State",
    "StreamingDiLoCo",
    "TopK",
    "average_gradients",
    "ddp_average_hook",
    "empty",
]

longhaul_torch.register()
