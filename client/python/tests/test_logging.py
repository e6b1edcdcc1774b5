"""What logging.getLogger("longhaul") reports, the numbers of Comm.stats(), and the progress of a fetch."""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any

import numpy as np
import pytest
from conftest import Members, wait_until
from test_run import evict

import longhaul as lh
from longhaul._log import Counters, Record
from longhaul._progress import Shown, TqdmBar
from longhaul.testing import LocalCluster

LARGE = 1 << 20


def messages(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == "longhaul" and each.levelno == level]


def info(members: tuple[int, ...] = (1,), retries: int = 0, **fields: Any) -> lh.OpInfo:
    rest = {"bytes_sent": 10, "bytes_received": 20, "seconds": 0.5, "seconds_wait": 0.25, **fields}
    return lh.OpInfo(world_size=len(members), epoch=3, retries=retries, staged=False, members=members, hosts=1, **rest)


# ------------------------------------------------------------------ logging


def test_joins_and_leaves_are_reported_with_names(cluster: LocalCluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "longhaul")
    members = Members([cluster.socket(0)])
    first = members.comms[0]
    members.add(cluster.socket(1))
    second = members.comms[1]
    assert f"run {first.run} group 0: joined as m{first.member_id}, rank 0 of 1, epoch 1" in messages(caplog)
    came = f"has 2 members; came: m{second.member_id} ("
    assert any(came in text for text in messages(caplog)), messages(caplog)
    id_of_second = second.member_id
    second.leave(60)
    assert f"run {first.run} group 0: m{id_of_second} has left" in messages(caplog)
    wait_until(lambda: first.world_size == 1)
    first.begin_step(60)
    assert any(f"has 1 members; gone: m{id_of_second} (" in text for text in messages(caplog)), messages(caplog)
    assert messages(caplog, logging.WARNING) == []
    before = len(messages(caplog))
    first.begin_step(60)
    assert len(messages(caplog)) == before, "nothing has changed"
    members.close()


def test_without_a_listener_nobody_asks_for_the_members(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[str] = []

    def members() -> tuple[int, ...]:
        asked.append("members")
        return (1, 2)

    def member(id: int) -> Any:
        asked.append("member")
        raise lh.Unavailable("peerd has gone")

    world = lh.World(1, 0, 2, 0, 1)
    record = Record("demo", 0)
    caplog.set_level(logging.WARNING, "longhaul")
    record.joined(world, members)
    record.changed(world, members, member)
    assert asked == []
    caplog.set_level(logging.INFO, "longhaul")
    record.changed(world, members, member)  # the first that is known
    record.changed(world, lambda: (1, 7), member)
    assert asked == ["members", "member", "member"]
    assert messages(caplog) == [
        "run demo group 0: epoch 1 has 2 members",
        "run demo group 0: epoch 1 has 2 members; came: m7; gone: m2",
    ]


def test_an_op_that_was_redone_is_reported_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    record = Record("demo", 1)
    record.op_ended("all_reduce", "all_reduce of float32 x 10, tag 3", info((1, 2), retries=2))
    (text,) = messages(caplog, logging.WARNING)
    assert "run demo group 1: a fault interrupted all_reduce of float32 x 10, tag 3" in text
    assert "2 retries" in text and "2 members are in the result (m1, m2), epoch 3" in text
    assert record.stats(None)["retries"] == 2


def test_an_eviction_is_reported_once(cluster: LocalCluster, caplog: pytest.LogCaptureFixture) -> None:
    comm = lh.join("reported", peerd=cluster.socket(0))
    id = comm.member_id
    evict(cluster, comm)
    for _ in range(3):
        with pytest.raises(lh.Evicted):
            while True:
                comm.begin_step(60)
    with pytest.raises(lh.Evicted):
        comm.all_reduce(np.ones(3))
    (text,) = messages(caplog, logging.WARNING)
    assert f"run reported group 0: m{id} was removed" in text
    stats = comm.stats()
    assert stats["evictions"] == 1
    assert (stats["epoch"], stats["world_size"]) == (1, 1), "as when it was last in"


# ------------------------------------------------------------------ numbers


def test_the_stats_are_a_flat_dict_of_floats(pair: Members) -> None:
    state_bytes = 4 * LARGE
    tensors = [np.full(LARGE, comm.rank, np.float32) for comm in pair.comms]

    def train(comm: lh.Comm) -> dict[str, float]:
        before = comm.stats()
        state = lh.State({"weights": tensors[comm.rank]}, revision=comm.rank)
        with comm.step(state, timeout=60):
            comm.all_reduce(np.ones(1000, np.float32), timeout=60)
        comm.begin_step(60)
        work = comm.all_reduce([np.ones(10), np.ones(20)], tag=3, async_op=True)
        work.wait(60)
        comm.barrier(timeout=60)
        with pytest.raises(lh.TooFewMembers):
            comm.all_reduce(np.ones(3), min_world=9, timeout=60)
        dropped = comm.all_reduce(np.ones(3), tag=4 + comm.rank, async_op=True)  # the other one never starts it
        dropped.cancel()
        with pytest.raises(lh.Aborted):
            dropped.wait(60)
        after = comm.stats()
        assert all(type(value) is float for value in after.values())
        return {name: after[name] - before.get(name, 0.0) for name in after}

    gains = pair.all(train)
    for rank, gained in enumerate(gains):
        assert gained["ops"] == 3
        assert gained["ops_all_reduce"] == 2
        assert gained["ops_barrier"] == 1
        assert gained["ops_failed"] == 2
        assert gained["ops_aborted"] == 1
        assert gained["steps"] == 2
        assert gained["seconds_steps"] > 0
        assert gained["syncs"] == 1
        assert gained["bytes_synced"] == (state_bytes if rank == 0 else 0)
        assert gained["bytes_sent"] > 4000 / 2 and gained["bytes_received"] > 4000 / 2
        assert gained["seconds_ops"] >= gained["seconds_ops_wait"] >= 0
    # Of the two members, the one that starts an op first waits for the other. It need not be the same one each time.
    assert sum([gained["seconds_ops_wait"] for gained in gains]) > 0
    assert pair.comms[0].stats()["world_size"] == 2


def test_counters_lose_nothing_between_threads() -> None:
    counters = Counters()

    def count() -> None:
        for _ in range(2000):
            counters.op("barrier", info())

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    numbers = counters.read()
    assert numbers["ops"] == numbers["ops_barrier"] == 8000
    assert (numbers["bytes_sent"], numbers["bytes_received"]) == (80000, 160000)
    assert (numbers["seconds_ops"], numbers["seconds_ops_wait"]) == (4000, 2000)
    assert len(counters._fresh) == 0


# ------------------------------------------------------------------ progress


def test_progress_uses_tqdm_where_it_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    shown = Shown()
    shown.close()
    assert capsys.readouterr().err == "", "nothing was fetched"
    shown(lh.Progress(1_000_000, 2_000_000, 1000, 3))
    assert isinstance(shown._bar, TqdmBar)
    shown(lh.Progress(2_000_000, 2_000_000, 1000, 2))
    shown.close()
    text = capsys.readouterr().err
    assert "state: 100%" in text and "2.00M/2.00M" in text and "sources=2" in text


def test_progress_needs_no_tqdm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    missing: Any = None
    monkeypatch.setitem(sys.modules, "tqdm", missing)
    monkeypatch.setitem(sys.modules, "tqdm.auto", missing)
    shown = Shown()
    shown(lh.Progress(1, 2, 0, 1))
    shown.close()
    assert "50 %" in capsys.readouterr().err
