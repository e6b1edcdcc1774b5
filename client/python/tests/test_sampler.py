"""The elastic sampler gives each sample of an epoch to one member, whoever comes and goes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from conftest import Members
from torch.utils.data import DataLoader, Dataset

import longhaul as lh
from longhaul.testing import LocalCluster


class Alone:
    """Stands for a communicator: a sampler asks it for the world until the first step."""

    def world(self) -> lh.World:
        return place(0, 1)


def place(rank: int, world_size: int) -> lh.World:
    return lh.World(1, rank, world_size, 0, rank + 1, step=lh.StepWorld(1, rank, world_size))


def sampler(length: int, **options: Any) -> lh.torch.ElasticSampler:
    return lh.torch.ElasticSampler(length, Alone(), **options)  # type: ignore[arg-type]


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index < 0:
            raise IndexError
        return index


@pytest.mark.parametrize("seed", range(5))
def test_each_sample_of_an_epoch_is_given_out_once_while_members_come_and_go(seed: int) -> None:
    random_ = random.Random(seed)
    length, batch_size = random_.randint(1, 60), random_.randint(1, 4)
    members = [sampler(length, batch_size=batch_size, seed=seed)]
    seen: list[int] = []
    while len(seen) < 4 * length:
        size = random_.randint(1, 5)
        while len(members) < size:  # a newcomer takes the position from the state
            members.append(sampler(length, batch_size=batch_size, seed=seed))
            members[-1].load_state_dict(members[0].state_dict())
        random_.shuffle(members)  # any of them may go, and ranks may change
        members = members[:size]
        for rank, member in enumerate(members):
            seen += member.take(place(rank, size))
    assert len({member.position for member in members}) == 1 and members[0].position == len(seen)
    orders = [seen[epoch * length : (epoch + 1) * length] for epoch in range(4)]
    assert all(sorted(order) == list(range(length)) for order in orders)
    if length > 20:
        assert len({tuple(order) for order in orders}) == 4  # each epoch in another order


def test_without_shuffle_the_order_is_that_of_the_data_set() -> None:
    plain = sampler(5, shuffle=False, batch_size=2)
    assert [plain.take(place(0, 1)) for _ in range(3)] == [[0, 1], [2, 3], [4, 0]]
    assert plain.epoch == 1 and plain.position == 6
    assert plain.take(place(1, 2)) == [3, 4]


def test_seeds_give_other_orders() -> None:
    orders = set()
    for seed in range(3):
        mine = sampler(50, seed=seed, batch_size=50)
        orders |= {tuple(mine.take(place(0, 1))) for _ in range(3)}
    assert len(orders) == 9


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_follows_the_members(workers: int) -> None:
    """Also with a worker, which prepares batches ahead for a world that changes."""
    data = Numbers(1000)
    mine = sampler(1000, batch_size=4)
    reference = sampler(1000, batch_size=4)
    loader = DataLoader(data, batch_sampler=mine, num_workers=workers, persistent_workers=workers > 0)
    batches = mine.batches(loader)
    for where in [place(0, 2)] * 3 + [place(1, 3)] * 2 + [place(0, 1)] * 2:
        assert batches.next(where).tolist() == reference.take(where)
    before = mine.state_dict()
    batches.next(place(0, 1))
    mine.load_state_dict(before)  # a step is done again
    assert batches.next(place(0, 1)).tolist() == reference.take(place(0, 1))


def test_an_old_iterator_is_refused_after_a_change() -> None:
    mine = sampler(100, batch_size=2)
    old = iter(mine)
    next(old)
    assert not mine.set_world(place(0, 1))
    next(old)
    assert mine.set_world(place(0, 2))
    with pytest.raises(lh.FailedPrecondition, match="rank 0 of 1"):
        next(old)
    next(iter(mine))


def test_bad_input_is_refused() -> None:
    with pytest.raises(lh.InvalidArgument, match="0 samples"):
        sampler(0)
    with pytest.raises(lh.InvalidArgument, match="batch_size is 0"):
        sampler(3, batch_size=0)
    mine = sampler(10, batch_size=2)
    with pytest.raises(lh.InvalidArgument, match="position is -1"):
        mine.position = -1
    for name in ("length", "batch_size", "seed"):
        with pytest.raises(lh.InvalidArgument, match=f"sampler with {name} 7"):
            mine.load_state_dict({**mine.state_dict(), name: 7})
    with pytest.raises(lh.InvalidArgument, match="keys"):
        mine.load_state_dict({"position": 1})
    with pytest.raises(lh.InvalidArgument, match="batch_sampler"):
        mine.batches(DataLoader(Numbers(10), batch_size=2))


def test_members_share_the_samples_while_one_joins(cluster: LocalCluster) -> None:
    """The position goes in the state, so a newcomer begins where the others are."""
    members = Members([cluster.socket(0), cluster.socket(1)])
    kept: dict[int, tuple[lh.State, torch.Tensor, lh.torch.ElasticSampler]] = {}
    taken: list[int] = []

    def step(comm: lh.Comm) -> list[int]:
        if comm.member_id not in kept:
            position = torch.zeros(1, dtype=torch.int64)
            kept[comm.member_id] = (
                lh.State({"position": position}),
                position,
                lh.torch.ElasticSampler(24, comm, batch_size=2),
            )
        state, position, mine = kept[comm.member_id]
        with comm.step(state, 60) as now:
            mine.position = int(position)
            batch = mine.take(now)
            position[0] = mine.position
        return batch

    for count in (2, 2, 3):
        if count > len(members.comms):
            members.add(cluster.socket(2))
        batches = members.all(step)
        assert [len(batch) for batch in batches] == [2] * count
        taken += [sample for batch in batches for sample in batch]
    assert len(taken) == 14 and len(set(taken)) == 14
    members.close()
