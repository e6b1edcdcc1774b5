"""Longhaul: one training run out of machines that come and go.

    import longhaul as lh

    comm = lh.join(run="demo")                  # through the peerd on this host
    gradient = lh.empty((1 << 20,), "float32")  # memory shared with peerd: travels without a copy
    state = lh.State({"weights": weights})      # numpy arrays or torch tensors
    for ... in ...:
        with comm.step(state):                  # newcomers come in here; all hold the same weights
            gradient[:] = ...
            info = comm.all_reduce(gradient, op="avg")
            weights -= 0.1 * gradient
    comm.leave()

A member that dies does not stop the others: what was in flight is redone by the survivors, and
`info.world_size` says whose tensors are in the result.

numpy arrays and contiguous PyTorch CPU tensors are taken as they are; those from `longhaul.empty`
and `longhaul.torch.empty` go to the network without a copy. Neither numpy nor torch is needed to
import this package.

Threads: every function and method may be called from any thread; two ops in flight on one
communicator must differ in their tag. Every call that blocks releases the GIL and ends at Ctrl-C.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from ._arena import empty
from ._comm import Comm, Step
from ._errors import (
    Aborted,
    DeadlineExceeded,
    Error,
    Evicted,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    StateMismatch,
    TooFewMembers,
    Unavailable,
)
from ._join import join
from ._member import World
from ._state import Progress, State, SyncInfo
from ._version import __version__
from ._work import OpInfo, Work

if TYPE_CHECKING:
    from . import testing, torch

__all__ = [
    "Aborted",
    "Comm",
    "DeadlineExceeded",
    "Error",
    "Evicted",
    "FailedPrecondition",
    "Internal",
    "InvalidArgument",
    "OpInfo",
    "Progress",
    "State",
    "StateMismatch",
    "Step",
    "SyncInfo",
    "TooFewMembers",
    "Unavailable",
    "Work",
    "World",
    "__version__",
    "empty",
    "join",
    "testing",
    "torch",
]


def __getattr__(name: str) -> ModuleType:
    # These cost something or need another package: imported at first use.
    if name in ("testing", "torch"):
        return importlib.import_module("." + name, __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
