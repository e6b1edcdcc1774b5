"""longhaul.run: what a member does that lost its place, and what ends it."""

from __future__ import annotations

import logging
import pathlib
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from conftest import wait_until

import longhaul as lh
from longhaul import _arena, _waiting
from longhaul._run import Rejoins
from longhaul.testing import LocalCluster, find_binary


def evict(cluster: LocalCluster, comm: lh.Comm) -> None:
    member = f"{comm.run}/{comm.group}/m{comm.member_id}"
    command = [str(find_binary("lhctl")), f"--coordinator={cluster.admin}", "evict", member]
    subprocess.run(command, check=True, capture_output=True, timeout=60)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


class Other:
    """A member that makes steps with a state until stop()."""

    def __init__(self, pool: ThreadPoolExecutor, run: str, socket: str, revision: int) -> None:
        self.weights = np.full(1000, 7, np.float32)
        self.state = lh.State({"weights": self.weights}, revision)
        self.comm = lh.join(run, peerd=socket)
        self._stop = threading.Event()
        self._steps = pool.submit(self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            with self.comm.step(self.state, timeout=120):
                pass
        self.comm.leave(60)

    def stop(self) -> None:
        self._stop.set()
        self._steps.result(120)


# ------------------------------------------------------------------ the decision


def test_rejoins_are_bounded_in_a_window() -> None:
    now = [0.0]
    rejoins = Rejoins(2, 10, 1.0, lambda: now[0])
    problem = lh.Evicted("removed")
    assert rejoins.refusal(problem, False, 0) is None
    now[0] = 5
    assert rejoins.refusal(problem, False, 0) is None
    assert rejoins.refusal(problem, False, 0) == "this would be more than 2 rejoins in 10 s"
    now[0] = 10  # the first one is out of the window
    assert rejoins.refusal(problem, False, 0) is None
    assert rejoins.refusal(problem, False, 0) is not None


def test_delays_double_with_jitter_and_end_at_thirty_seconds() -> None:
    rejoins = Rejoins(100, 1000, 2.0, lambda: 0.0)
    for most in (2, 4, 8, 16, 30, 30):
        assert rejoins.refusal(lh.Unavailable("away"), False, 0) is None
        delays = {rejoins.delay() for _ in range(20)}
        assert len(delays) > 1
        assert all(most / 2 <= delay <= most for delay in delays)


def test_what_a_rejoin_cannot_help_is_refused() -> None:
    rejoins = Rejoins(100, 1000, 1.0)
    assert "still has its place" in str(rejoins.refusal(lh.Unavailable("memory"), True, 0))
    mismatch = lh.StateMismatch("other tensors")
    assert rejoins.refusal(mismatch, True, 3) is None
    assert "after joining again either" in str(rejoins.refusal(mismatch, True, 3))
    assert rejoins.refusal(mismatch, True, 4) is None, "a step lies in between"
    assert rejoins.count == 2


@pytest.mark.parametrize(
    "wrong", [{"max_rejoins": -1}, {"max_rejoins": True}, {"window": 0}, {"backoff": -1}, {"backoff": float("nan")}]
)
def test_bad_bounds_are_refused(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(lh.InvalidArgument, match=name):
        lh.run(lambda comm: None, "never", **wrong)


# ------------------------------------------------------------------ faults


def test_training_goes_on_after_its_peerd_was_restarted(
    pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "longhaul")
    # The dead member is removed after four times detect_ms, because no other member misses it.
    with LocalCluster(peers=1, coordinator_flags=["--detect-ms=500"]) as cluster:
        socket = cluster.socket(0)
        weights = np.zeros(1000, np.float32)
        state = lh.State({"weights": weights})
        comms: list[lh.Comm] = []
        dead = threading.Event()

        def train(comm: lh.Comm) -> dict[str, float]:
            comms.append(comm)
            while state.revision < 4:
                with comm.step(state):
                    if state.revision == 2 and len(comms) == 1:
                        cluster.kill_peer(0)
                        dead.set()
                    gain = np.ones_like(weights)
                    comm.all_reduce(gain, op="avg")
                    weights[:] += gain
            return comm.stats()

        # The second join would wait for a second member for ever if it gave members=.
        training = pool.submit(lh.run, train, "restarted", peerd=socket, state=state, members=1, backoff=0.01)
        assert dead.wait(60)
        cluster.add_peer([f"--socket={socket}"])
        stats = training.result(60)
    assert len(comms) == 2
    assert (weights == 4).all()
    assert stats["rejoins"] == 1
    assert stats["steps"] == 5, "the counters go on over the rejoin"
    assert stats["ops_all_reduce"] == 4
    (warning,) = [each.getMessage() for each in caplog.records if "joining again in" in each.getMessage()]
    assert warning.startswith("run restarted: Unavailable: ")
    assert "rejoin 1 of at most 10 in 600 s" in warning


def test_an_evicted_member_joins_again_and_gets_the_state(
    cluster: LocalCluster, pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    other = Other(pool, "evicted", cluster.socket(1), revision=5)
    weights = np.zeros(1000, np.float32)
    state = lh.State({"weights": weights})
    ids: list[int] = []
    told: list[lh.Error] = []

    def train(comm: lh.Comm) -> dict[str, float]:
        ids.append(comm.member_id)
        with comm.step(state, timeout=60):
            assert (weights == 7).all()
        if len(ids) == 1:
            evict(cluster, comm)
            while True:
                with comm.step(state, timeout=60):
                    pass
        return comm.stats()

    try:
        stats = lh.run(train, "evicted", peerd=cluster.socket(0), backoff=0.01, before_rejoin=told.append)
    finally:
        other.stop()
    assert len(set(ids)) == 2
    assert stats["rejoins"] == stats["evictions"] == 1
    (problem,) = told
    assert isinstance(problem, lh.Evicted)
    assert f"m{ids[0]} was removed" in caplog.text
    assert "Evicted" in caplog.text and "joining again" in caplog.text


def test_after_the_bound_the_error_is_raised(cluster: LocalCluster, caplog: pytest.LogCaptureFixture) -> None:
    comms: list[lh.Comm] = []

    def train(comm: lh.Comm) -> None:
        comms.append(comm)
        evict(cluster, comm)
        while True:
            comm.begin_step(60)

    with pytest.raises(lh.Evicted):
        lh.run(train, "bounded", peerd=cluster.socket(0), max_rejoins=2, backoff=0.01)
    assert len(comms) == 3
    assert "not joining again: this would be more than 2 rejoins" in caplog.text
    assert comms[-1].is_out()


def test_a_state_that_does_not_fit_twice_is_an_error_unless_the_program_corrects_it(
    cluster: LocalCluster, pool: ThreadPoolExecutor
) -> None:
    other = Other(pool, "unfit", cluster.socket(1), revision=1)
    weights = np.zeros(1000, np.float32)
    state = lh.State({"weights": weights}, revision=1 << 40)  # far above what the group is due to have
    joined: list[lh.Comm] = []

    def train(comm: lh.Comm) -> None:
        joined.append(comm)
        with comm.step(state, timeout=60):
            assert (weights == 7).all()

    def correct(problem: lh.Error) -> None:
        assert isinstance(problem, lh.StateMismatch)
        state.revision = 0

    try:
        with pytest.raises(lh.StateMismatch, match="due is"):
            lh.run(train, "unfit", peerd=cluster.socket(0), backoff=0.01)
        assert len(joined) == 2
        assert (weights == 0).all()
        lh.run(train, "unfit", peerd=cluster.socket(0), backoff=0.01, before_rejoin=correct)
    finally:
        other.stop()
    assert len(joined) == 4
    assert (weights == 7).all()


def test_a_group_whose_newest_state_is_lost_goes_on_with_what_is_left(
    cluster: LocalCluster, pool: ThreadPoolExecutor
) -> None:
    state = lh.State({"weights": np.full(1000, 3, np.float32)}, revision=3)
    newest = lh.State({"weights": np.full(1000, 9, np.float32)}, revision=9)
    gone = threading.Event()

    def train(comm: lh.Comm) -> dict[str, float]:
        assert gone.wait(60)
        with comm.step(state, timeout=60):
            pass
        return comm.stats()

    founder = lh.join("lost", peerd=cluster.socket(1))
    with founder.step(newest, timeout=60):
        pass
    training = pool.submit(lh.run, train, "lost", peerd=cluster.socket(0), state=state, backoff=0.01)
    while founder.world_size < 2:
        founder.begin_step(60)  # admits the newcomer, and syncs nothing
    founder.leave(60)
    gone.set()
    stats = training.result(60)
    assert stats["rejoins"] == stats["syncs_failed"] == 1
    assert state.revision == 4


def test_what_is_unavailable_to_a_member_in_its_place_is_raised() -> None:
    joined: list[lh.Comm] = []

    def train(comm: lh.Comm) -> None:
        joined.append(comm)
        comm.empty(1 << 28)

    with LocalCluster(peers=1, peerd_flags=[f"--arena_limit={256 << 20}"]) as cluster:
        with pytest.raises(lh.Unavailable, match="arena"):
            lh.run(train, "full", peerd=cluster.socket(0))
    assert len(joined) == 1


def test_memory_that_can_never_fit_the_state_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    joined: list[lh.Comm] = []
    state = lh.State({"weights": np.zeros(1 << 24, np.float32)})
    with LocalCluster(peers=1, peerd_flags=[f"--arena_limit={16 << 20}"]) as cluster:
        with pytest.raises(lh.FailedPrecondition, match="arena limit"):
            lh.run(joined.append, "never-fits", peerd=cluster.socket(0), state=state)
    assert joined == []
    assert "joining again" not in caplog.text


def test_a_socket_that_no_try_can_open_is_raised(tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "other.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(path)
        with pytest.raises(lh.FailedPrecondition, match="no peerd answers on .*other.sock"):
            lh.run(lambda comm: None, "other", peerd=path)


def test_a_run_without_a_peerd_says_so_again_and_again(
    cluster: LocalCluster,
    pool: ThreadPoolExecutor,
    tmp_path: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_arena, "PEERD_S", 0.0)
    monkeypatch.setattr(_waiting, "EVERY_S", 0.0)
    late = tmp_path / "late.sock"
    training = pool.submit(lh.run, lambda comm: comm.world_size, "late-peerd", peerd=str(late))
    try:
        wait_until(lambda: caplog.text.count("start longhaul-peerd") >= 2)
    finally:
        late.symlink_to(cluster.socket(1))
    assert training.result(60) == 1
    lines = [each for each in caplog.records if "start longhaul-peerd" in each.getMessage()]
    assert {(each.name, each.levelname) for each in lines} == {("longhaul", "WARNING")}
    assert "connecting to peerd has waited for" in lines[0].getMessage()
    assert str(late) in lines[0].getMessage()


# ------------------------------------------------------------------ the end


def test_what_train_returns_is_returned_and_the_member_leaves(cluster: LocalCluster) -> None:
    comm = lh.run(lambda comm: comm, run="returned", peerd=cluster.socket(0))
    with pytest.raises(lh.FailedPrecondition, match="has left"):
        comm.world()


@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt, lh.TooFewMembers])
def test_any_other_exception_leaves_the_group_and_is_raised(
    cluster: LocalCluster, pool: ThreadPoolExecutor, kind: type[BaseException]
) -> None:
    run = f"raised-{kind.__name__}"
    raised = kind("on purpose")

    def train(comm: lh.Comm) -> None:
        comm.begin_step(60)
        raise raised

    with lh.join(run, peerd=cluster.socket(1)) as other:
        failing: Future[None] = pool.submit(_outcome, lambda: lh.run(train, run, peerd=cluster.socket(0)))
        while other.world_size < 2 and not failing.done():
            other.begin_step(60)
        other.all_reduce(np.ones(9, np.float32), timeout=60)  # does not wait for the member that failed
        outcome: object = failing.result(60)
        assert outcome is raised
        wait_until(lambda: other.world_size == 1)


def _outcome(call: Callable[[], object]) -> Any:
    """The exception of the call. KeyboardInterrupt would end the thread of a pool."""
    try:
        return call()
    except BaseException as problem:
        return problem


def test_a_result_counts_if_the_place_is_lost_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    with LocalCluster(peers=1) as cluster:

        def train(comm: lh.Comm) -> int:
            cluster.kill_peer(0)
            return 7

        assert lh.run(train, "late", peerd=cluster.socket(0)) == 7
    assert "the training is over, but leaving failed" in caplog.text


def test_the_timeout_of_a_join_says_that_it_waits_for_the_steps_of_the_others(cluster: LocalCluster) -> None:
    with lh.join("long-step", peerd=cluster.socket(0)):
        with pytest.raises(lh.DeadlineExceeded, match="give a timeout longer than a step, or None"):
            lh.run(lambda comm: None, "long-step", peerd=cluster.socket(1), timeout=0.5)
