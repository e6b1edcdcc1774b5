"""What an op did."""

from __future__ import annotations

from typing import NamedTuple

from . import _native


class OpInfo(NamedTuple):
    """What one op did."""

    world_size: int  #: members whose tensors are in the result; none of them is in the background
    epoch: int  #: the epoch in which the result was made
    retries: int  #: how often a fault interrupted the op after all members had started it
    staged: bool  #: a tensor was not in memory shared with peerd, and was copied
    #: Tensor bytes that peerd sent for this op, for all its members on this host together.
    bytes_sent: int
    bytes_received: int  #: the same for bytes received
    seconds: float  #: from start to outcome, measured by peerd
    seconds_wait: float  #: the part of `seconds` until every member had started the op
    #: The ids of the members whose tensors are in the result, in rank order: the same at all of them (`Comm.member`).
    members: tuple[int, ...]
    #: A digest of the set of these members' hosts: equal for ops with the same hosts, in any group (`Comm.agree`).
    hosts: int
    algorithm: str = "auto"  #: what made the result: "oneshot", "mesh", "ring"; "local": nothing crossed the network
    #: Of a quantized op: blocks of this member's result with an element that is not finite.
    blocks_not_finite: int = 0
    quantize: str | None = None  #: how elements travelled: "bf16", "int8" or "int4"; None: as they are


def op_info(info: _native.OpInfoStruct) -> OpInfo:
    return OpInfo(
        info.world_size,
        info.epoch,
        info.retries,
        bool(info.staged),
        info.bytes_sent,
        info.bytes_received,
        info.seconds,
        info.seconds_wait,
        tuple(info.members[: info.world_size]),
        info.hosts,
        _native.ALGORITHM_NAMES[info.algorithm],
        info.blocks_not_finite,
        _native.CODEC_NAMES[info.quantize],
    )
