"""The options that calls of collectives have in common, for type checkers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    from typing_extensions import Required


class SendOptions(TypedDict, total=False):
    """What all ops take. `Comm` explains each."""

    tag: int
    on_fault: str | None
    algorithm: str
    timeout: float | None


class OpOptions(SendOptions, total=False):
    """What ops of any number of members take."""

    min_world: int
    participants: Iterable[int] | None


class ReduceOptions(OpOptions, total=False):
    """What ops that reduce take."""

    weight: float | None
    order: str


# For each of these, a call that waits, and one that does not.
class SendWait(SendOptions, total=False):
    async_op: Literal[False]


class SendStart(SendOptions, total=False):
    async_op: Required[Literal[True]]


class OpWait(OpOptions, total=False):
    async_op: Literal[False]


class OpStart(OpOptions, total=False):
    async_op: Required[Literal[True]]


class ReduceWait(ReduceOptions, total=False):
    async_op: Literal[False]


class ReduceStart(ReduceOptions, total=False):
    async_op: Required[Literal[True]]
