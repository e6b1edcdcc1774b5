"""What a member knows of its group."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class StepWorld:
    """A group at a step boundary. Epoch and world_size are the same at all members that passed the boundary."""

    epoch: int
    rank: int  #: of this member, 0 to world_size - 1
    world_size: int  #: all members, those in the background included


@dataclasses.dataclass(frozen=True)
class World:
    """A group as one of its members saw it at one moment."""

    epoch: int  #: number of the agreed members and links; rises with every change
    rank: int  #: of this member, 0 to world_size - 1
    world_size: int  #: all members, those in the background included
    pending: int  #: newcomers that the next boundary may admit: members reach their hosts
    member_id: int  #: of this member; unique in the run, never changes
    background: bool = False  #: this member's input is not in the results yet
    #: The newest epoch that was made at a step boundary, as of this member's last boundary. It rises when that boundary
    #: admitted newcomers, or let members in the background take part. The same at all members until their next boundary.
    boundary: int = 0
    #: The group at this member's last boundary, whatever has happened since. A newcomer's first boundary is the one that
    #: admitted it. To divide the work of a step, use this.
    step: StepWorld = StepWorld(0, 0, 0)


@dataclasses.dataclass(frozen=True)
class MemberInfo:
    """What is known of a member of a group, present or former."""

    id: int
    name: str  #: as given to join(), else the process id
    host: str  #: name of its host
    cohort: str | None  #: name of its cohort
    rank: int | None  #: in the present epoch; None: it is no member any more
    peer: int  #: id of its peerd: equal for members at one peerd
