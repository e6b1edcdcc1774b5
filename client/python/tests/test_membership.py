"""Joining, stepping, leaving."""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from conftest import Members, wait_until

import longhaul as lh
from longhaul.testing import LocalCluster


def test_the_first_member_is_alone_at_once(cluster: LocalCluster) -> None:
    with lh.join("alone", peerd=cluster.socket(0)) as comm:
        assert (comm.world_size, comm.rank, comm.pending) == (1, 0, 0)
        assert comm.members == (comm.member_id,)
        assert comm.epoch > 0


def test_members_agree_on_the_world(three: Members) -> None:
    worlds = three.all(lambda comm: comm.world())
    assert {world.epoch for world in worlds} == {worlds[0].epoch}
    assert sorted(world.rank for world in worlds) == [0, 1, 2]
    assert {world.world_size for world in worlds} == {3}
    members = three.all(lambda comm: comm.members)
    assert members[0] == members[1] == members[2]
    for world in worlds:
        assert members[0][world.rank] == world.member_id


def test_a_step_without_newcomers_keeps_the_epoch(pair: Members) -> None:
    first = pair.all(lambda comm: comm.begin_step(30))
    second = pair.all(lambda comm: comm.begin_step(30))
    assert {step.epoch for step in first + second} == {first[0].epoch}
    assert not any(step.changed for step in second)


def test_a_newcomer_waits_for_the_step_boundary(cluster: LocalCluster, pair: Members) -> None:
    epoch = pair.comms[0].epoch
    with pytest.raises(lh.DeadlineExceeded, match="begin_step"):
        lh.join(pair.run, peerd=cluster.socket(2), timeout=0.3)
    assert pair.comms[0].epoch == epoch
    pair.add(cluster.socket(2))
    assert pair.comms[0].epoch > epoch
    assert {comm.world_size for comm in pair.comms} == {3}


def test_step_is_a_boundary_and_names_its_world(pair: Members) -> None:
    def one(comm: lh.Comm) -> lh.Step:
        with comm.step(timeout=30) as step:
            assert step.epoch == comm.epoch
            return step

    assert sorted(step.rank for step in pair.all(one)) == [0, 1]


def test_all_members_are_told_one_world_of_a_boundary(three: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    """One member goes before another one has looked. The first one is held between its boundary and its look."""
    first, second, leaver = three.comms
    gone = threading.Event()
    before = first._member.begin_step

    def held(*arguments: Any) -> None:
        before(*arguments)
        assert gone.wait(60)
        wait_until(lambda: first.world_size == 2)

    monkeypatch.setattr(first._member, "begin_step", held)

    def pass_boundary(comm: lh.Comm) -> lh.Step:
        step = comm.begin_step(60)
        if comm is leaver:
            comm.leave(60)
            gone.set()
        return step

    steps = three.all(pass_boundary)
    assert len({(step.epoch, step.world_size, step.changed) for step in steps}) == 1
    assert sorted(step.rank for step in steps) == [0, 1, 2]
    wait_until(lambda: (first.world_size, second.world_size) == (2, 2))  # the world of now is another one
    monkeypatch.undo()
    three.comms.remove(leaver)
    after = three.all(pass_boundary)
    assert {step.world_size for step in after} == {2}
    assert {step.epoch for step in after} != {steps[0].epoch}


def test_the_first_boundary_of_a_newcomer_is_the_one_that_admitted_it(cluster: LocalCluster, pair: Members) -> None:
    """A member goes before the newcomer's first step, which takes its world from the others' last boundary."""
    steps: list[lh.Step] = []

    def admit(comm: lh.Comm) -> lh.Step:
        while True:
            step = comm.begin_step(60)
            if step.world_size == 3:
                return step

    joining = pair._pool.submit(lh.join, pair.run, peerd=cluster.socket(2), timeout=60)
    steps = pair.all(admit)
    newcomer = joining.result(60)
    pair.comms.pop().leave(60)
    wait_until(lambda: newcomer.world_size == 2)
    sampler = lh.torch.ElasticSampler(1000, newcomer, batch_size=4)
    steps.append(newcomer.begin_step(60))
    pair.comms.append(newcomer)
    assert len({(step.epoch, step.world_size) for step in steps}) == 1
    assert sorted(step.rank for step in steps) == [0, 1, 2]
    assert (sampler.rank, sampler.world_size) == (steps[2].rank, 3)


def test_one_loop_fits_all_members_whenever_they_come(cluster: LocalCluster) -> None:
    """Members that start at different times and run the same loop, until all three have met."""
    with ThreadPoolExecutor() as pool:

        def trainer(i: int) -> int:
            rounds = 0
            with lh.join("loop", peerd=cluster.socket(i), timeout=60) as comm:
                while True:
                    comm.begin_step(60)
                    total = np.full(100, 1 << i, np.float32)
                    info = comm.all_reduce(total, timeout=60)
                    rounds += 1
                    if info.world_size == 3:
                        assert (total == 7).all()
                        return rounds

        first = pool.submit(trainer, 0)
        others = [pool.submit(trainer, i) for i in (1, 2)]
        assert first.result(90) >= 1
        assert all(other.result(90) >= 1 for other in others)


def test_a_late_member_makes_the_boundary_late(pair: Members) -> None:
    first, _ = pair.comms
    with pytest.raises(lh.DeadlineExceeded, match="begin_step"):
        first.begin_step(timeout=0.2)
    # The first member still stands at this boundary. Its next call waits at the same one.
    assert pair.all(lambda comm: comm.begin_step(30).world_size) == [2, 2]


def test_the_others_go_on_without_one_that_leaves(three: Members) -> None:
    gone = three.comms.pop(1)
    gone.leave(timeout=30)
    gone.leave()  # twice is once
    with pytest.raises(lh.FailedPrecondition, match="join again"):
        gone.begin_step()

    def reduce(comm: lh.Comm) -> int:
        comm.begin_step(30)
        return comm.all_reduce(np.ones(10, np.float32), timeout=30).world_size

    assert three.all(reduce) == [2, 2]


def test_groups_of_one_run_are_apart(cluster: LocalCluster) -> None:
    with lh.join("grouped", 0, cluster.socket(0)) as zero, lh.join("grouped", 1, cluster.socket(0)) as one:
        assert (zero.world_size, one.world_size) == (1, 1)


@pytest.mark.parametrize("run", ["", "with space", "x" * 65, "slash/"])
def test_a_run_name_that_is_none_is_refused(cluster: LocalCluster, run: str) -> None:
    with pytest.raises(lh.InvalidArgument):
        lh.join(run, peerd=cluster.socket(0))


def test_a_missing_peerd_is_named() -> None:
    with pytest.raises(lh.Unavailable, match="/nonexistent/peerd.sock"):
        lh.join(peerd="/nonexistent/peerd.sock", timeout=0.2)


def test_joining_again_reaches_a_peerd_that_was_started_anew() -> None:
    # The dead member is removed after four times detect_ms, because no other member misses it.
    timeouts = ["--detect-ms=500"], ["--coordinator_timeout_ms=20000"]
    with LocalCluster(peers=1, coordinator_flags=timeouts[0], peerd_flags=timeouts[1]) as other:
        path = other.socket(0)
        first = lh.join("anew", peerd=path)
        other.kill_peer(0)
        other.add_peer([f"--socket={path}"])
        # The old communicator keeps the old connection open. That does not hinder the new join.
        with lh.join("anew", peerd=path, timeout=30) as second:
            assert second.world_size >= 1
        with pytest.raises(lh.Unavailable):
            first.begin_step(10)


def test_members_are_known_by_id_also_when_they_have_left(cluster: LocalCluster, pair: Members) -> None:
    comm, other = pair.comms
    ids = comm.members
    for rank, id in enumerate(ids):
        info = comm.member(id)
        assert (info.id, info.rank, info.cohort) == (id, rank, None)
        assert info.name == str(os.getpid())
        assert info.host == socket.gethostname()
    assert comm.member(ids[0]).peer != comm.member(ids[1]).peer
    with pytest.raises(lh.InvalidArgument, match="no member of the group"):
        comm.member(10**9)
    for wrong in (0, -1, "1", 2**64):
        with pytest.raises(lh.InvalidArgument):
            comm.member(wrong)  # type: ignore[arg-type]
    gone = other.member_id
    other.leave()
    assert comm.begin_step(30).world_size == 1
    assert comm.member(gone).rank is None
    assert comm.member(gone).name == str(os.getpid())


def test_a_member_of_a_cohort_has_a_name_of_its_own(cluster: LocalCluster) -> None:
    for name, shown in (("shard-0", "shard-0"), (None, str(os.getpid()))):
        with lh.join("named", peerd=cluster.socket(0), cohort=("host-a", 1), name=name) as comm:
            info = comm.member(comm.member_id)
            assert (info.name, info.cohort) == (shown, "host-a")


def test_the_shards_of_a_host_agree_on_the_hosts_of_their_ops(cluster: LocalCluster) -> None:
    """Two hosts with two shards each. The groups of the shards lose a host one after the other."""

    def join(host: int, group: int) -> lh.Comm:
        return lh.join("shards", group, cluster.socket(host), 60, members=2)

    with ThreadPoolExecutor() as pool:
        # Groups 0 and 1 have one shard of each host; groups 10 and 11 have the shards of host 0 and host 1.
        keys = [(host, shard) for host in (0, 1) for shard in (0, 1)]
        shards = dict(zip(keys, pool.map(lambda key: join(key[0], key[1]), keys)))
        locals_ = dict(zip(keys, pool.map(lambda key: join(key[0], 10 + key[0]), keys)))

        def reduce(key: tuple[int, int]) -> lh.OpInfo:
            info = shards[key].all_reduce(np.ones(10, np.float32), timeout=60)
            assert isinstance(info, lh.OpInfo)
            return info

        def agreed(infos: dict[tuple[int, int], lh.OpInfo]) -> set[bool]:
            keys = list(infos)
            return set(pool.map(lambda key: locals_[key].agree([infos[key]], timeout=60), keys))

        infos = dict(zip(shards, pool.map(reduce, list(shards))))
        assert {info.world_size for info in infos.values()} == {2}
        assert len({info.hosts for info in infos.values()}) == 1
        assert agreed(infos) == {True}
        # The op of group 1 has only host 0 now, that of group 0 both.
        shards.pop((1, 1)).leave()
        later = dict(zip(shards, pool.map(reduce, list(shards))))
        assert later[0, 1].world_size == 1
        one_host = {key: info for key, info in later.items() if key[0] == 0}
        # All peerds of this test are on one machine, so their hosts are the same.
        assert agreed(one_host) == {True}
        altered = {(0, 0): one_host[0, 0], (0, 1): one_host[0, 1]._replace(hosts=one_host[0, 1].hosts ^ 1)}
        assert agreed(altered) == {False}
