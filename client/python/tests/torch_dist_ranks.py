"""Ranks for tests of torch.distributed: children of one process, which has imported torch for all of them."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch


def import_slow_parts() -> None:
    """Imports once for all ranks what takes seconds on a slow machine."""
    for name in (
        "torch._dynamo",
        "torch._functorch.aot_autograd",
        "torch.distributed._functional_collectives",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.distributed.optim",
        "torch.distributed.pipelining",
        "torch.distributed.tensor.parallel",
    ):
        importlib.import_module(name)


def forked(run: Callable[[int], Any], sockets: Sequence[str], seconds: float = 240) -> list[Any]:
    """Runs run(rank) in a child for each socket of a peerd. Returns what they return, as JSON has it.

    None: the child was killed. A text that begins with "Traceback": it raised. No threads may run in this process.
    """
    children = []
    for rank, socket in enumerate(sockets):
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read_end)
            _be_rank(run, rank, socket, write_end, seconds)
        os.close(write_end)
        children.append((child, read_end))
    results = []
    for child, read_end in children:
        with os.fdopen(read_end, "rb") as pipe:
            text = pipe.read()
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status)
        results.append(json.loads(text) if text else None if killed else f"Traceback: ended with {status}")
    return results


def _be_rank(run: Callable[[int], Any], rank: int, socket: str, pipe: int, seconds: float) -> None:
    code = 1
    with contextlib.suppress(BaseException):
        faulthandler.dump_traceback_later(seconds - 5)
        signal.alarm(round(seconds))  # a rank that hangs is killed
        os.environ["LONGHAUL_SOCKET"] = socket
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        try:
            result = run(rank)
        except BaseException:
            result = traceback.format_exc()
        with os.fdopen(pipe, "w") as sink:
            json.dump(result, sink)
        code = 0
    os._exit(code)
