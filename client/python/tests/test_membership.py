"""Joining, stepping, leaving."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import Members

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


@pytest.mark.parametrize("boundary", ["top", "end"])
def test_one_loop_fits_all_members_whenever_they_come(cluster: LocalCluster, boundary: str) -> None:
    """Members that start at different times and run the same loop, until all three have met."""
    with ThreadPoolExecutor() as pool:

        def trainer(i: int) -> int:
            rounds = 0
            with lh.join(f"loop-{boundary}", peerd=cluster.socket(i), timeout=60) as comm:
                while True:
                    if boundary == "top":
                        comm.begin_step(60)
                    total = np.full(100, 1 << i, np.float32)
                    info = comm.all_reduce(total, timeout=60)
                    rounds += 1
                    if info.world_size == 3:
                        assert (total == 7).all()
                        return rounds
                    if boundary == "end":
                        comm.begin_step(60)

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


def test_joining_again_reaches_a_peerd_that_was_started_anew(cluster: LocalCluster) -> None:
    flags = ["--coordinator_timeout_ms=20000"]
    with LocalCluster(peers=1, coordinator=cluster.coordinator, peerd_flags=flags) as other:
        path = other.socket(0)
        first = lh.join("anew", peerd=path)
        other.kill_peer(0)
        other.add_peer([f"--socket={path}"])
        # The old communicator keeps the old connection open. That does not hinder the new join.
        with lh.join("anew", peerd=path, timeout=30) as second:
            assert second.world_size >= 1
        with pytest.raises(lh.Unavailable):
            first.begin_step(10)
