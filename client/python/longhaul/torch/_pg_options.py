"""The options of a process group "longhaul"."""

from __future__ import annotations

import datetime
from typing import Literal

from .._errors import InvalidArgument


class Options:
    """`pg_options=` of `init_process_group("longhaul")` and `new_group`. Equal at all ranks of the group.

    on_fault: "abort": when a rank dies, every op of a group with that rank raises at all survivors. "retry": the
        survivors redo all-reduces and barriers without it: "sum" and "avg" are over those that are left, and
        `group.info()` says which. Other collectives fail as with "abort". `size()` stays.
    errors: "raise": an op that fails raises. "defer": it raises nothing and changes nothing, ops after it do nothing,
        and `group.check()` raises. For FSDP2, whose modules do not survive an exception within their backward.
    reconfigure: a group has no members until `group.reconfigure()`. What chooses them, such as torchft's lighthouse,
        collects `group.get_reconfigure_handle()` of each process.
    A group from `new_group` without options has those of the default group.
    """

    def __init__(
        self,
        *,
        on_fault: Literal["abort", "retry"] = "abort",
        errors: Literal["raise", "defer"] = "raise",
        reconfigure: bool = False,
    ) -> None:
        if on_fault not in ("abort", "retry"):
            raise InvalidArgument(f"on_fault is {on_fault!r}; give 'abort' or 'retry'")
        if errors not in ("raise", "defer"):
            raise InvalidArgument(f"errors is {errors!r}; give 'raise' or 'defer'")
        self.on_fault = on_fault
        self.errors = errors
        self.reconfigure = reconfigure
        # Device meshes read it.
        self._timeout = datetime.timedelta(minutes=30)

    def __repr__(self) -> str:
        return f"Options(on_fault={self.on_fault!r}, errors={self.errors!r}, reconfigure={self.reconfigure!r})"
