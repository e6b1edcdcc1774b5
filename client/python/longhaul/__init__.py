"""Longhaul: one training run across machines that come and go.

    import longhaul as lh

    comm = lh.join(run="demo")                  # through the peerd daemon on this host
    gradient = lh.empty((1 << 20,), "float32")  # in memory shared with peerd: sent without a copy
    state = lh.State({"weights": weights})      # numpy arrays or torch tensors
    while state.revision < 1000:
        with comm.step(state):                  # newcomers join here; now all have equal weights
            gradient[:] = ...
            info = comm.all_reduce(gradient, op="avg")
            weights -= 0.1 * gradient
    comm.leave()

`lh.run(train, "demo", state=state)` does the same and joins again after a fault.

A member is one trainer in one group of a run. If a member dies, the others go on: they redo the
all-reduces that were in flight. `info.world_size` is the number of members in the result.

All collectives take contiguous numpy arrays, contiguous PyTorch tensors on the CPU or one CUDA
device, other contiguous tensors on the CPU with DLPack or the buffer protocol, and lists of them.
Tensors from `longhaul.empty` and `longhaul.torch.empty` are sent and received without a copy.
Importing this package needs neither numpy nor torch.

Threads: any thread may call any function and method. Two ops in flight on one communicator must
have different tags. Calls that wait release the GIL, and Ctrl-C interrupts them.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from ._arena import empty, empty_buffer
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
from ._op_info import OpInfo
from ._quant import Quant
from ._run import run
from ._state import State
from ._sync_info import Progress, SyncInfo
from ._version import __version__
from ._work import Work, wait_any
from ._world import MemberInfo, StepWorld, World

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
    "MemberInfo",
    "OpInfo",
    "Progress",
    "Quant",
    "State",
    "StateMismatch",
    "Step",
    "StepWorld",
    "SyncInfo",
    "TooFewMembers",
    "Unavailable",
    "Work",
    "World",
    "__version__",
    "empty",
    "empty_buffer",
    "join",
    "run",
    "testing",
    "torch",
    "wait_any",
]


def __getattr__(name: str) -> ModuleType:
    # Imported at first use: `torch` needs PyTorch, and `testing` is for tests only.
    if name in ("testing", "torch"):
        return importlib.import_module("." + name, __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
