"""What differs between versions of torch for the process group "longhaul", and what torch's C++ asks of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .._errors import FailedPrecondition

#: The backend works from this version on.
OLDEST = (2, 13)


def version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def check_version() -> None:
    """Raises FailedPrecondition for a torch that is too old."""
    if version() < OLDEST:
        raise FailedPrecondition(
            f"the backend longhaul of torch.distributed needs torch {OLDEST[0]}.{OLDEST[1]} or newer, this is "
            f"{torch.__version__}; install a newer torch, or use longhaul.torch.HSDP or GradientAverager"
        )


# Any, because torch declares overloads that no single function with optional arguments matches.
_ProcessGroup: Any = dist.ProcessGroup


class Base(_ProcessGroup):  # type: ignore[misc]
    """A process group that answers for itself, without an inner torch Backend: names, device types, store, rank, size.

    The methods in camel case are called by torch's C++ code.
    """

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = False

    def __init__(self, store: Any, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)
        self._kept_store = store
        self._own_name = name
        self._own_description = "undefined"

    # ------------------------------------------------------------------ names

    def getBackendName(self) -> str:
        return "longhaul"

    name = getBackendName

    def getGroupName(self) -> str:
        return self._own_name

    def setGroupName(self, name: str) -> None:
        self._own_name = name

    _set_group_name = setGroupName

    @property
    def group_name(self) -> Any:
        return self._own_name

    def getGroupDesc(self) -> str:
        return self._own_description

    def setGroupDesc(self, desc: str) -> None:
        self._own_description = desc

    _set_group_desc = setGroupDesc

    @property
    def group_desc(self) -> str:
        return self._own_description

    # ------------------------------------------------------------------ what torch asks its backends

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def get_group_store(self) -> Any:
        return self._kept_store

    def _set_sequence_number_for_group(self) -> None:
        """The tags of ops count by themselves."""

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def _has_hooks(self) -> bool:
        return False
