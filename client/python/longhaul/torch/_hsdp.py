"""HSDP: several trainers per host share a model by FSDP2, and each of its shards is averaged across hosts by a group."""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist

from .._comm import Comm, Step
from .._errors import (
    Aborted,
    DeadlineExceeded,
    Error,
    Evicted,
    FailedPrecondition,
    InvalidArgument,
    StateMismatch,
    TooFewMembers,
    number_of,
)
from .._join import join_groups
from .._log import logger
from .._op_info import OpInfo
from .._programs import PathLike
from .._state import State
from .._work import Work
from ._buckets import Bucket, buckets_of
from ._copier import BucketCopier
from ._exchange import gradients_of

#: The most trainers of one host. Each is two members, and peerd has 64 at most.
SHARDS_MAX = 32
# Groups below this number are those of the shards. Those above have the trainers of one host each.
_HOST_GROUPS = 1 << 31
# How often a round is redone. A redo follows the removal of a host, so a run that needs more has another problem.
_REDOS_MAX = 16
_BUCKET_BYTES = 64 << 20
# What a shard whose ops failed offers to agree() in place of a digest of hosts.
_FAILED = 1

_Self = TypeVar("_Self", bound="HSDP")


class HSDP:
    """One trainer of a host whose trainers share a model by FSDP2. It joins when it is made.

        dist.init_process_group("gloo")                # the trainers of this host, and only they
        fully_shard(model)
        with lh.torch.HSDP("demo", hosts=2) as hsdp:
            while state.revision < 1000:
                with hsdp.step(state):                 # hosts come in here, with all their trainers
                    loss(model).backward()             # FSDP reduces inside the host
                    hsdp.average_gradients(model)      # averages this shard across hosts; redone if shards differ
                    optimizer.step()

    The trainer is a member of two groups of the run: `comm`, with the same shard of every host, and `local`, with the
    other shards of this host. All members of a host are one cohort: they are admitted together. If a trainer leaves,
    dies or is removed, the others of its host are removed, too: their next call raises Evicted. FSDP inside the host is
    broken then, so end all trainers of the host, and start them again as new processes (torchrun does both).

    run, peerd, timeout, step_deadline: as for `longhaul.join`. All trainers of a host use the same peerd; a private one
        (`coordinator=`) is not possible.
    hosts: as `members` of `longhaul.join`: to begin, wait until so many hosts have come. None: do not wait.
    process_group: the trainers of this host. Its rank is the number of the shard. None: the default group of
        torch.distributed.
    shard, shards, token: in place of a process group: the number of this trainer on its host, the number of trainers of
        each host (1 to 32), and a number from 0 to 2**31 - 1 that is the same at all trainers of the host, and other
        than that of each other host and each earlier start.
    host: the name of this host in logs and `lhctl`. None: the host name. Members are named HOST.SHARD, so with
        `--keep-state` peerd keeps the state of each shard.

    Raises InvalidArgument for a wrong argument, and all that `longhaul.join` raises. Any thread may call any method;
    one call at a time, because all shards call the same things in the same order.

    After an error that all shards have agreed on (until_agreed()) the object goes on. After any other exception in
    until_agreed(), agree() or average_gradients(), also Ctrl-C or MemoryError, it cannot, because its ops would meet other
    ones of the other shards and hosts: all methods but leave() raise FailedPrecondition.
    """

    comm: Comm  #: the group of this shard: one member per host
    local: Comm  #: the group of this host: one member per shard
    redone: int  #: how many rounds were redone, because shards had other hosts; the same at all trainers of a host

    def __init__(
        self,
        run: str = "default",
        *,
        hosts: int | None = None,
        peerd: PathLike | None = None,
        timeout: float | None = 60,
        step_deadline: float | None = None,
        process_group: dist.ProcessGroup | None = None,
        shard: int | None = None,
        shards: int | None = None,
        token: int | None = None,
        host: str | None = None,
    ) -> None:
        self.shard, self.shards, token = _place(process_group, shard, shards, token)
        name = re.sub(r"[^A-Za-z0-9._-]", "-", host or socket.gethostname())[:48]
        try:
            self.comm, self.local = join_groups(
                run,
                {self.shard: hosts, _HOST_GROUPS + token: self.shards},
                peerd,
                timeout,
                cohort=(f"{name}-{token:x}", 2 * self.shards),
                name=f"{name}.{self.shard}",
                step_deadline=step_deadline,
            )
        except DeadlineExceeded as late:
            raise DeadlineExceeded(
                f"{late}; nobody of host {name} is admitted before all its {self.shards} trainers have asked the same "
                "peerd: look whether one is missing"
            ) from None
        self.redone = 0
        self._open: str | None = None  # the call whose ops the others wait for; left set by an exception
        self._stepped = False
        self._goodbye: Work | None = None
        self._peers: dict[int, int] = {}  # by member id
        self._buckets: list[Bucket] = []
        self._layout: list[tuple[torch.Size, torch.dtype]] = []  # of the gradients that the buckets are for

    # ------------------------------------------------------------------ rounds

    @contextlib.contextmanager
    def step(self, state: State | None = None, timeout: float | None = None) -> Iterator[Step]:
        """One training step: as `Comm.step` of the group of this shard.

        state: that of this shard: its part of the parameters and of the optimizer (`DTensor.to_local()`). Each group
        makes its shard equal at all hosts, and chooses it by itself. So two hosts must not come with other contents under
        one revision: a host that comes back begins at revision 0, and takes what the others have.

        Raises StateMismatch in the first step if the shards of this host are at different revisions then, for instance
        because their files are not of one step.
        """
        self._check_whole("step")
        with self.comm.step(state, timeout) as step:
            if state is not None and not self._stepped:
                self._check_revisions(state.revision)
            self._stepped = True
            yield step

    def _check_whole(self, what: str) -> None:
        """Raises FailedPrecondition if an exception has ended an earlier call in its middle."""
        if self._open is not None:
            raise FailedPrecondition(
                f"{what}: {self._open} ended with an exception at this trainer, and the other shards and hosts still wait for "
                "its ops; leave, and start all trainers of this host again"
            )

    def _check_revisions(self, revision: int) -> None:
        if not self.local.agree([_info_with(revision)]):
            raise StateMismatch(
                f"shard {self.shard} is at revision {revision}, and other shards of this host are at others: leave at "
                "all trainers, give all shards of a host states of one revision, and join again"
            )

    def until_agreed(self, ops: Callable[[], Iterable[OpInfo]]) -> list[OpInfo]:
        """Runs `ops()` until all shards of this host have had the same hosts in it. Returns its infos.

        ops: makes ops of `comm`, waits for them, and returns their infos: at least one. It may be called again, so the
            inputs must be intact afterwards: use `out=`, or copy the inputs first. Results of a call before the last one
            do not belong together: drop them.

        Every trainer of the run calls it at the same point. All of them redo a round, or none does: an op tells all its
        participants the same hosts, and all shards of a host hear the same answer of agree().

        If an op raises Aborted or TooFewMembers, all redo the round. If it does so at all shards, or 16 times, the error
        is raised. Raises Aborted if shards had other hosts 16 times. Errors of ops() and agree() are raised as they
        come: leave then (`with HSDP(...)` does so), and end this process.
        """
        self._check_whole("until_agreed")
        self._open = "until_agreed"
        return self._until_agreed(ops)

    def _until_agreed(self, ops: Callable[[], Iterable[OpInfo]]) -> list[OpInfo]:
        problem: Error | None = None
        for _ in range(_REDOS_MAX + 1):
            infos, problem = _outcome(ops)
            if self._all_shards_have(self._hosts_of(infos) if problem is None else _FAILED):
                self._open = None
                if problem is not None:
                    raise problem
                return infos
            self.redone += 1
            logger.warning("shard %d: a round is redone, because the shards had other hosts in it", self.shard)
        self._open = None
        raise problem or Aborted(f"the shards of this host had other hosts in {_REDOS_MAX} rounds, one after the other")

    def agree(self, infos: Iterable[OpInfo]) -> bool:
        """Whether ops of all shards of this host had the same hosts. True or False at all of them; see until_agreed().

        infos: of ops of `comm`, at least one. Shards may have another number of ops.

        `Comm.agree` compares host names. This compares peerds, so hosts may have equal names. Raises as
        `Comm.all_reduce`.
        """
        self._check_whole("agree")
        hosts = self._hosts_of(infos)
        self._open = "agree"
        agreed = self._all_shards_have(hosts)
        self._open = None
        return agreed

    def average_gradients(self, model: torch.nn.Module, *, weight: float | None = None) -> OpInfo:
        """Averages the gradients of this shard over all hosts, in place. Call it after backward. One op.

        model: whose gradients are averaged: FSDPModule or not; of a DTensor, the local part. A parameter that requires a
            gradient and has none counts as zero.
        weight: as for `Comm.all_reduce`; the same at all shards of a host, for instance its number of tokens.

        Returns what the op did. All gradients are written after all shards have agreed: if this raises, they are
        unchanged. Errors: as until_agreed().
        """
        self._check_whole("average_gradients")
        self._open = "average_gradients"
        gradients = gradients_of([each for each in model.parameters() if each.requires_grad])
        buckets = self._buckets_for(gradients)
        flat = [bucket.flat for bucket in buckets if bucket.nbytes]
        copier = BucketCopier()

        def average() -> list[OpInfo]:
            for bucket in buckets:  # the gradients themselves stay as they are until all agree
                copier.pack(bucket, [gradients[number] for number in bucket.numbers])
            if not flat:  # this shard has no element: it still has to say which hosts are there
                return [self.comm.barrier()]
            return [self.comm.all_reduce(flat, "avg", weight=weight)]

        (info,) = self._until_agreed(average)
        for bucket in buckets:
            copier.unpack(bucket, [gradients[number] for number in bucket.numbers])
        return info

    def _buckets_for(self, gradients: list[torch.Tensor]) -> list[Bucket]:
        layout = [(gradient.shape, gradient.dtype) for gradient in gradients]
        if layout != self._layout:
            self._buckets = buckets_of(self.comm._client, gradients, _BUCKET_BYTES)
            self._layout = layout
        return self._buckets

    def _all_shards_have(self, hosts: int | None) -> bool:
        # An info with a digest that no other shard can have, so that all hear False.
        value = secrets.randbits(64) if hosts is None else hosts
        return self.local.agree([_info_with(value)]) and hosts is not None

    def _hosts_of(self, infos: Iterable[OpInfo]) -> int | None:
        """A digest of the peerds whose members are in the results. None: the ops differ."""
        sets = {frozenset(self._peer_of(member) for member in info.members) for info in infos}
        if not sets:
            raise InvalidArgument("there are no infos of ops; give at least one, for instance that of comm.barrier()")
        if len(sets) > 1:
            return None
        text = ",".join(map(str, sorted(sets.pop())))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def _peer_of(self, member: int) -> int:
        if member not in self._peers:
            self._peers[member] = self.comm.member(member).peer
        return self._peers[member]

    # ------------------------------------------------------------------ the end

    def leave(self, timeout: float | None = None) -> None:
        """Leaves when all trainers of this host have called it. The other hosts go on.

        timeout: seconds for each of three waits; None: no limit. Raises DeadlineExceeded; call it again then.
        """
        # The first one that leaves takes the others of its cohort along: so wait until all are done.
        with contextlib.suppress(Evicted):
            if self._goodbye is None:
                self._goodbye = self.local.barrier(async_op=True)
            self._goodbye.wait(timeout)
        self._leave(timeout)

    def _leave(self, timeout: float | None) -> None:
        try:
            self.comm.leave(timeout)
        finally:
            self.local.leave(timeout)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.leave()
            return
        with contextlib.suppress(Error):
            self._leave(timeout=5)

    def __repr__(self) -> str:
        return f"<HSDP shard {self.shard} of {self.shards}: {self.comm!r}>"


def _place(
    process_group: dist.ProcessGroup | None, shard: int | None, shards: int | None, token: int | None
) -> tuple[int, int, int]:
    """The number of this trainer, how many there are on its host, and a number that only they have."""
    given = [each is not None for each in (shard, shards, token)]
    if any(given):
        if not all(given) or process_group is not None:
            raise InvalidArgument("HSDP: give a process group, or shard, shards and token, all three")
    elif not dist.is_available() or not dist.is_initialized():
        raise InvalidArgument(
            "HSDP: torch.distributed has no process group; call init_process_group() for the trainers of this host "
            "first, or give shard, shards and token"
        )
    else:
        box = [secrets.randbelow(_HOST_GROUPS)]
        dist.broadcast_object_list(box, group=process_group, group_src=0)
        shard, shards, (token,) = dist.get_rank(process_group), dist.get_world_size(process_group), box
    size = number_of(shards, "HSDP: shards", SHARDS_MAX)
    if size == 0:
        raise InvalidArgument("HSDP: shards is 0; give the number of trainers of this host")
    return number_of(shard, "HSDP: shard", size - 1), size, number_of(token, "HSDP: token", _HOST_GROUPS - 1)


def _outcome(ops: Callable[[], Iterable[OpInfo]]) -> tuple[list[OpInfo], Error | None]:
    try:
        return list(ops()), None
    except (Aborted, TooFewMembers) as problem:
        return [], problem


def _info_with(hosts: int) -> OpInfo:
    return OpInfo(0, 0, 0, False, 0, 0, 0.0, 0.0, (), hosts)
