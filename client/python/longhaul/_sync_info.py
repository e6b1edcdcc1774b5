"""What a sync tells: of its result, and of its progress."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class SyncInfo:
    """The result of a sync, as this member saw it."""

    revision: int  #: of the state that all members hold now
    hash: str  #: of its contents, 32 hexadecimal digits; the same at all members
    bytes: int  #: bytes that this member received; 0: it had the state already
    sources: int  #: how many members sent some of these bytes
    seconds: float  #: from the call to its end, measured by peerd
    resumed: bool  #: before the sync, the tensors were filled from what peerd had kept (`Comm.kept_revision`)
    #: True: this member is in the background, and peerd fetches the state meanwhile. Do not write to its tensors until
    #: take() returns True. The other fields mean nothing then.
    background: bool = False


@dataclasses.dataclass(frozen=True)
class Progress:
    """How much of the state a fetching member has received."""

    bytes_done: int
    bytes_total: int
    bytes_per_second: int  #: recent speed
    sources: int  #: how many members are asked for parts of the state


OnProgress = bool | Callable[[Progress], None]
