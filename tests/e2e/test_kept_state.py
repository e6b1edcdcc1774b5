"""Tests of peerd's --keep-state: after a crash a trainer continues from a state in the memory of its own host."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from trainers import Trainer, trainers_of, until

import longhaul as lh
from longhaul.testing import LocalCluster, Peer

PATIENCE = 60
# The size of the state that worker.py declares, in whole pages.
STATE_BYTES = (2 * 4 * 700_000 + 448 + 4095) // 4096 * 4096


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(peers=1, peerd_flags=["--keep-state=100000000"]) as started:
        yield started


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as started:
        yield started


def kept_bytes(peer: Peer) -> float:
    return peer.metric("longhaul_peerd_state_kept_bytes")


def kept_mappings(peer: Peer) -> int:
    with open(f"/proc/{peer.pid}/maps") as maps:
        return sum("longhaul-kept" in line for line in maps)


def joined(stack: ExitStack, cluster: LocalCluster, name: str, **state: Any) -> tuple[Trainer, int | None]:
    """Starts a trainer that is the only member of its group. Also returns the kept revision that it sees."""
    (trainer,) = trainers_of(stack, 1)
    trainer.do("join", socket=cluster.socket(0), run="kept", called=name)
    return trainer, trainer.do("declare", **state)["kept"]


def crashed(stack: ExitStack, cluster: LocalCluster, name: str = "t0", **state: Any) -> dict[str, Any]:
    """Trains the only member of a group to revision 3 and kills its trainer. Returns what the last sync said."""
    trainer, kept = joined(stack, cluster, name, fill=5, **state)
    assert kept is None
    last = trainer.do("train", steps=4)
    assert last["revision"] == 3 and last["right"] and not last["resumed"]
    trainer.kill()
    return last


@pytest.mark.parametrize("place", ["arena", "numpy", "both"])
def test_the_last_holder_goes_on_where_it_crashed(cluster: LocalCluster, stack: ExitStack, place: str) -> None:
    last = crashed(stack, cluster, place=place)
    trainer, kept = joined(stack, cluster, "t0", fill=0, place=place)
    assert kept == 3
    first = trainer.do("train", steps=1)
    assert first["resumed"]
    assert first["revision"] == 3
    assert first["hash"] == last["hash"]
    assert first["right"]
    assert first["values"] == {"w": [8], "m": [8], "rng": [8]}, "the tensor that may be unequal came back, too"
    assert first["bytes"] == 0, "nothing came from other members"
    # The trainer goes on, and the states of its further syncs are kept in the same place.
    assert trainer.do("train", steps=2)["revision"] == 5
    until(lambda: kept_bytes(cluster.peers[0]) == STATE_BYTES, "the state is kept")
    trainer.kill()
    trainer, kept = joined(stack, cluster, "t0", fill=0, place=place)
    assert kept == 5
    assert trainer.do("train", steps=1)["values"]["w"] == [10]


def test_a_member_of_another_name_begins_anew(cluster: LocalCluster, stack: ExitStack) -> None:
    crashed(stack, cluster)
    trainer, kept = joined(stack, cluster, "t1", fill=0)
    assert kept is None
    first = trainer.do("train", steps=1)
    assert (first["revision"], first["resumed"], first["values"]["w"]) == (0, False, [0])


def test_a_revision_of_its_own_that_is_not_lower_stays(cluster: LocalCluster, stack: ExitStack) -> None:
    crashed(stack, cluster)
    trainer, kept = joined(stack, cluster, "t0", fill=1, revision=9)
    assert kept == 3
    first = trainer.do("train", steps=1)
    assert (first["revision"], first["resumed"], first["values"]["w"]) == (9, False, [1])


def test_other_tensors_do_without_and_replace_what_was_kept(cluster: LocalCluster, stack: ExitStack) -> None:
    crashed(stack, cluster)
    trainer, kept = joined(stack, cluster, "t0", fill=1, count=200_000)
    assert kept is None
    first = trainer.do("train", steps=1)
    assert (first["revision"], first["resumed"], first["values"]["w"]) == (0, False, [1])
    log = cluster.peers[0].log.read_text()
    assert "kept state of no use" in log
    assert "has shape [200000] here and [700000] there" in log
    assert "kept state dropped" in log
    until(lambda: 0 < kept_bytes(cluster.peers[0]) < STATE_BYTES, "the smaller state is kept")


def test_a_member_that_comes_back_among_others_is_brought_to_the_present(stack: ExitStack) -> None:
    with LocalCluster(peers=2, peerd_flags=["--keep-state=100000000"]) as cluster:
        one, other, again = trainers_of(stack, 3)
        one.do("join", socket=cluster.socket(0), run="kept", called="t0")
        other.start("join", socket=cluster.socket(1), run="kept", called="t1")
        one.do("begin_step_until", size=2)
        assert "error" not in other.finish()
        for trainer in (one, other):
            trainer.do("declare", fill=5)
        for trainer in (one, other):
            trainer.start("train", steps=3)
        assert [trainer.finish()["revision"] for trainer in (one, other)] == [2, 2]
        one.kill()
        assert other.do("train", steps=1)["revision"] == 3
        again.start("join", socket=cluster.socket(0), run="kept", called="t0")
        other.do("begin_step_until", size=2)
        assert "error" not in again.finish()
        assert again.do("declare", fill=0)["kept"] == 2
        for trainer in (again, other):
            trainer.start("train", steps=1)
        seen = again.finish()
        assert (seen["revision"], seen["resumed"], seen["right"]) == (4, True, True)
        assert seen["values"] == {"w": [9], "m": [9], "rng": [7]}, "the tensor that may be unequal is its own"
        assert other.finish()["hash"] == seen["hash"]


def test_what_does_not_fit_is_not_kept_and_the_log_says_so(stack: ExitStack) -> None:
    with LocalCluster(peers=1, peerd_flags=[f"--keep-state={STATE_BYTES - 1}"]) as cluster:
        trainer, _ = joined(stack, cluster, "t0", fill=5)
        trainer.do("train", steps=3)
        trainer.kill()
        _, kept = joined(stack, cluster, "t0", fill=0)
        assert kept is None
        log = cluster.peers[0].log.read_text()
        assert log.count("state not kept") == 1
        assert f"bytes={STATE_BYTES}" in log and "raise --keep-state" in log
        assert kept_mappings(cluster.peers[0]) == 0


def test_without_the_flag_nothing_is_kept(stack: ExitStack) -> None:
    with LocalCluster(peers=1) as cluster:
        crashed(stack, cluster)
        _, kept = joined(stack, cluster, "t0", fill=0)
        assert kept is None
        assert kept_mappings(cluster.peers[0]) == 0


def test_what_nobody_takes_up_is_given_back_in_time(stack: ExitStack) -> None:
    flags = ["--keep-state=100000000", "--keep-state-for-ms=1000"]
    with LocalCluster(peers=1, peerd_flags=flags) as cluster:
        peer = cluster.peers[0]
        trainer, _ = joined(stack, cluster, "t0", fill=5)
        trainer.do("train", steps=3)
        until(lambda: kept_bytes(peer) == STATE_BYTES, "the state is kept")
        assert kept_mappings(peer) == 1
        trainer.kill()
        until(lambda: kept_bytes(peer) == 0, "the state is dropped")
        until(lambda: kept_mappings(peer) == 0, "its memory is given back")
        assert "nobody of its name came in time" in peer.log.read_text()
        trainer, kept = joined(stack, cluster, "t0", fill=0)
        assert kept is None
        assert trainer.do("train", steps=1)["revision"] == 0


def test_a_transfer_that_breaks_off_leaves_the_tensors_as_they_were() -> None:
    # The source sends at most 1 MiB per second. It is killed long before all 16 MiB are there.
    size = 16 << 20
    flags = [f"--keep-state={2 * size}", "--state-rate=1048576"]
    with LocalCluster(peers=2, peerd_flags=flags) as cluster, ThreadPoolExecutor() as pool:
        first = lh.join("kept", peerd=cluster.socket(0))
        joining = pool.submit(lh.join, "kept", 0, cluster.socket(1), PATIENCE)
        while first.world_size < 2:
            first.begin_step(PATIENCE)
        comms = [first, joining.result(PATIENCE)]
        comms[1].begin_step(PATIENCE)
        arrays = [lh.empty(size, "uint8", peerd=cluster.socket(i)) for i in range(2)]
        states = [lh.State({"w": array}) for array in arrays]
        for array in arrays:
            array[:] = 7
        infos = [pool.submit(comms[i].sync_state, states[i], timeout=PATIENCE) for i in range(2)]
        for info in infos:
            info.result(PATIENCE)
        until(lambda: kept_bytes(cluster.peers[1]) == size, "the state is kept")
        for state, array, fill in zip(states, arrays, (8, 9)):
            state.revision = 1
            array[:] = fill
        sending = pool.submit(comms[0].sync_state, states[0], "send", timeout=PATIENCE)

        def strike(progress: lh.Progress) -> None:
            assert progress.bytes_done < progress.bytes_total
            if progress.bytes_done > 0:
                cluster.kill_peer(0)

        # The receiver tries again and finds no sender any more.
        with pytest.raises(lh.FailedPrecondition):
            comms[1].sync_state(states[1], "receive", timeout=PATIENCE, progress=strike)
        with pytest.raises(lh.Error):
            sending.result(PATIENCE)
        assert states[1].revision == 1
        assert np.all(arrays[1] == 9)
        assert comms[1].sync_state(states[1], timeout=PATIENCE).revision == 1
