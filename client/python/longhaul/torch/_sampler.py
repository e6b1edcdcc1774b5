"""Divides a data set among members that come and go."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sized
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Sampler

from .._comm import Comm
from .._errors import FailedPrecondition, InvalidArgument


class Place(Protocol):
    """A member's place in its group: a Step or a World."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...


class ElasticSampler(Sampler[list[int]]):
    """A batch sampler that divides each batch of the group anew when members come or go.

        sampler = lh.torch.ElasticSampler(dataset, comm, batch_size=32)
        batches = sampler.batches(DataLoader(dataset, batch_sampler=sampler))
        with comm.step(state) as step:
            images, labels = batches.next(step)

    All members read one endless order of samples: a permutation of the data set for each epoch, one after the other. In
    a step, the group takes the next `world_size * batch_size` samples of that order, and the member of rank r takes part
    r of them. `position` counts the samples that the group has taken. It is the same at all members, so it belongs into
    the state: `lh.torch.State(..., objects={"sampler": sampler})`.

    Guarantee: whatever the members do, each sample of an epoch is given to exactly one member, once, if the members
    - pass the same step (rank and world_size of one boundary) in the same step,
    - hold the same position at that boundary, as members do whose state holds it, and
    - take the same number of batches in each step.
    Two kinds of samples are given out and count in no gradient: the batch of a member that died in the step
    (`GradientInfo.lost`), and the batches of members in the background.

    All batches have the same length. The last step of an epoch takes its missing samples from the next epoch.

    dataset: anything with a length, or the number of samples. The same at all members, as are the options.
    comm: gives rank and world_size until the first step is passed in. None: rank 0 of 1 until then; for a sampler that
        has to be there before the group is joined.
    shuffle: False: every epoch is in the order of the data set.
    seed: chooses the permutations, which also depend on the PyTorch version. A permutation takes 8 bytes for each sample.

    Raises InvalidArgument if the data set is empty or batch_size is not positive. Not thread-safe.
    """

    def __init__(
        self,
        dataset: Sized | int,
        comm: Comm | None = None,
        shuffle: bool = True,
        seed: int = 0,
        *,
        batch_size: int = 1,
    ) -> None:
        self.length = dataset if isinstance(dataset, int) else len(dataset)
        if self.length <= 0:
            raise InvalidArgument(f"the data set has {self.length} samples; it needs at least one")
        if batch_size <= 0:
            raise InvalidArgument(f"batch_size is {batch_size}; give the samples of one member's batch, 1 or more")
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self._position = 0
        self._orders: dict[int, torch.Tensor] = {}  # by epoch
        self.rank, self.world_size = 0, 1
        if comm is not None:
            self.set_world(comm.world().step)

    @property
    def position(self) -> int:
        """How many samples the group has taken since the first epoch began. May be set, alike at all members."""
        return self._position

    @position.setter
    def position(self, position: int) -> None:
        if position < 0:
            raise InvalidArgument(f"position is {position}; give a number of samples, 0 or more")
        self._position = position

    @property
    def epoch(self) -> int:
        """The epoch of the next sample, from 0."""
        return self._position // self.length

    def set_world(self, step: Place) -> bool:
        """From here on, divides by rank and world_size of this step. Returns whether they have changed.

        Call it at the begin of each step, with what `comm.step()` or `comm.begin_step()` gave. Do not use `comm.rank` at
        another moment: after a death in the step, some members see the new world earlier than others. take() and
        Batches.next() call it.
        """
        before = self.rank, self.world_size
        self.rank, self.world_size = step.rank, step.world_size
        return before != (self.rank, self.world_size)

    def take(self, step: Place) -> list[int]:
        """This member's batch in this step: indices into the data set. Moves `position` on by that of all members."""
        self.set_world(step)
        batch = self._batch(self._position)
        self._position += self.world_size * self.batch_size
        return batch

    def batches(self, loader: DataLoader[Any]) -> Batches:
        """Draws batches through a DataLoader that was made with `batch_sampler=` this sampler."""
        if loader.batch_sampler is not self:
            raise InvalidArgument("the DataLoader has another batch sampler; make it with batch_sampler=this sampler")
        return Batches(self, loader)

    def __iter__(self) -> Iterator[list[int]]:
        """This member's batches from `position` on, without end, as long as the world does not change. For Batches.

        Does not move `position`, because a DataLoader draws ahead of the loop. Raises FailedPrecondition once the world
        has changed: draw through `batches()` instead, which begins anew then.
        """
        return self._stream(self._position, self.rank, self.world_size)

    def _stream(self, position: int, rank: int, world_size: int) -> Iterator[list[int]]:
        while True:
            if (rank, world_size) != (self.rank, self.world_size):
                raise FailedPrecondition(
                    f"this iterator divides by rank {rank} of {world_size}, and this member is now rank {self.rank} of "
                    f"{self.world_size}; draw batches through sampler.batches(loader), or make a new iterator"
                )
            yield self._batch(position)
            position += world_size * self.batch_size

    def state_dict(self) -> dict[str, int]:
        """The position, and what it means: all integers."""
        return {
            "position": self._position,
            "length": self.length,
            "batch_size": self.batch_size,
            "shuffle": int(self.shuffle),
            "seed": self.seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to the position of a state_dict(). Raises InvalidArgument if it is from a sampler with other options."""
        mine = self.state_dict()
        if mine.keys() != state.keys():
            raise InvalidArgument(f"a state of an ElasticSampler has the keys {list(mine)}, this one has {list(state)}")
        for name, value in mine.items():
            if name != "position" and int(state[name]) != value:
                raise InvalidArgument(
                    f"the state is of a sampler with {name} {state[name]}, this one has {value}; make the sampler alike "
                    "at all members. To go on with other options, set sampler.position at all of them"
                )
        self.position = int(state["position"])

    def _batch(self, position: int) -> list[int]:
        begin = position + self.rank * self.batch_size
        return [self._sample(place) for place in range(begin, begin + self.batch_size)]

    def _sample(self, place: int) -> int:
        epoch, number = divmod(place, self.length)
        return int(self._order(epoch)[number]) if self.shuffle else number

    def _order(self, epoch: int) -> torch.Tensor:
        order = self._orders.get(epoch)
        if order is None:
            generator = torch.Generator()
            # A seed of its own for each epoch: seed + epoch would give seed 1 the epochs of seed 0, one later.
            digest = hashlib.blake2b(f"{self.seed} {epoch}".encode(), digest_size=8).digest()
            generator.manual_seed(int.from_bytes(digest, "little") >> 1)
            order = torch.randperm(self.length, generator=generator)
            self._orders = {old: kept for old, kept in self._orders.items() if abs(old - epoch) <= 1}
            self._orders[epoch] = order
        return order


class Batches:
    """Draws one batch in each step through a DataLoader. Made by ElasticSampler.batches(). Not thread-safe.

    Workers of the loader prepare batches ahead, for the world and position of the last step. If the step has others, the
    prepared batches are dropped, and the loader begins anew at the right place. With workers this takes as long as their
    start, but with `persistent_workers=True` only as long as the batches that they prepare.
    """

    def __init__(self, sampler: ElasticSampler, loader: DataLoader[Any]) -> None:
        self._sampler = sampler
        self._loader = loader
        self._iterator: Iterator[Any] | None = None
        self._ready_for: tuple[int, int, int] | None = None

    def next(self, step: Place) -> Any:
        """This member's batch in this step, as the loader collates it. Moves the position as ElasticSampler.take() does.

        All members call it in the same steps, equally often, with the step of the boundary (`with comm.step(...) as step`).
        """
        self._sampler.set_world(step)
        if self._iterator is None or self._ready_for != self._place():
            self._iterator = iter(self._loader)
        batch = next(self._iterator)
        self._sampler.take(step)
        self._ready_for = self._place()
        return batch

    def _place(self) -> tuple[int, int, int]:
        return self._sampler.position, self._sampler.rank, self._sampler.world_size
