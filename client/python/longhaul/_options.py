"""The options that calls of collectives have in common, for type checkers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from ._quant import Quant

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


class GatherOptions(OpOptions, total=False):
    """What all-gather and broadcast take."""

    quantize: str | Quant | None


class QuantizedOptions(ReduceOptions, total=False):
    """What all-reduce and reduce-scatter take."""

    quantize: str | Quant | None
    error: Any


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


class GatherWait(GatherOptions, total=False):
    async_op: Literal[False]


class GatherStart(GatherOptions, total=False):
    async_op: Required[Literal[True]]


class QuantizedWait(QuantizedOptions, total=False):
    async_op: Literal[False]


class QuantizedStart(QuantizedOptions, total=False):
    async_op: Required[Literal[True]]
