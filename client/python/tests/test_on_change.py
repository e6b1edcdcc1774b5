"""Steps with sync="on_change", and what an exception in the block of a step does to the revision."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import wait_until
from scripted_peerd import ABORTED, PASSED, Request, ScriptedPeerd, op_info, sync_info

import longhaul as lh
from longhaul.testing import LocalCluster

STATE_MISMATCH = 8


@pytest.fixture
def peerd() -> Iterator[ScriptedPeerd]:
    with ScriptedPeerd() as scripted:
        scripted.on["sync"] = agrees
        yield scripted


def agrees(request: Request) -> None:
    """The sync ends well, with the revision that the member brought."""
    request.answer(sync_info(int.from_bytes(request.body[8:16], "little")))


def boundaries(peerd: ScriptedPeerd) -> list[str]:
    return [name for name in peerd.heard if name in ("STEP", "SYNC")]


def joined(peerd: ScriptedPeerd) -> tuple[lh.Comm, lh.State]:
    comm = lh.join("run", peerd=peerd.path)
    comm.begin_step()  # the one of its join
    return comm, lh.State({"w": np.ones(10, np.float32)})


def step(comm: lh.Comm, state: lh.State, timeout: float = 60) -> lh.Step:
    with comm.step(state, timeout, sync="on_change") as passed:
        return passed


def test_a_step_syncs_only_if_the_epoch_is_another_than_at_the_last_sync(peerd: ScriptedPeerd) -> None:
    comm, state = joined(peerd)
    assert step(comm, state).sync is not None
    for _ in range(3):
        assert step(comm, state).sync is None
    peerd.epoch = 2
    assert step(comm, state).sync is not None
    assert step(comm, state).sync is None
    assert boundaries(peerd) == ["STEP", "SYNC", *3 * ["STEP"], "STEP", "SYNC", "STEP"]
    assert state.revision == 6


def test_each_state_has_its_own_last_sync(peerd: ScriptedPeerd) -> None:
    comm, state = joined(peerd)
    other = lh.State({"v": np.ones(10, np.float32)})
    synced = [step(comm, each).sync is not None for each in (state, other, state, other)]
    assert synced == [True, True, False, False]
    with comm.step(other, sync="always"):
        pass
    peerd.epoch = 2
    comm.begin_step()
    comm.sync_state(state)
    assert [step(comm, each).sync is not None for each in (state, other)] == [False, True]


def test_a_sync_that_had_no_time_goes_on_with_the_next_call(peerd: ScriptedPeerd) -> None:
    comm, state = joined(peerd)
    peerd.on["sync"] = lambda request: None
    with pytest.raises(lh.DeadlineExceeded):
        step(comm, state, 0.05)
    wait_until(lambda: "SYNC" in peerd.heard)
    peerd.requests[-1].answer(sync_info(0))
    assert step(comm, state).sync is not None
    assert boundaries(peerd) == ["STEP", "SYNC"]
    assert state.revision == 1


def test_an_aborted_sync_is_made_again_at_the_same_boundary(peerd: ScriptedPeerd) -> None:
    comm, state = joined(peerd)
    peerd.on["sync"] = lambda request: request.answer(b"by a test", ABORTED)
    with pytest.raises(lh.Aborted):
        step(comm, state)
    peerd.on["sync"] = agrees
    assert step(comm, state).sync is not None
    assert boundaries(peerd) == ["STEP", *6 * ["SYNC"]]
    assert state.revision == 1


def test_what_the_library_refuses_is_owed_at_the_same_boundary(peerd: ScriptedPeerd) -> None:
    comm, state = joined(peerd)
    peerd.on["op"] = lambda request: None
    work = comm.all_reduce(state.tensors["w"], async_op=True)
    with pytest.raises(lh.FailedPrecondition, match="in flight"):
        step(comm, state)
    wait_until(lambda: "OP" in peerd.heard)
    next(request for request in peerd.requests if request.name == "OP").answer(op_info())
    work.wait(60)
    assert step(comm, state).sync is not None
    assert boundaries(peerd) == ["STEP", "SYNC"]


def test_a_member_whose_sync_was_refused_must_not_go_on_unseen(peerd: ScriptedPeerd) -> None:
    comm, state = joined(peerd)
    peerd.on["sync"] = lambda request: request.answer(b"by a test", STATE_MISMATCH)
    with pytest.raises(lh.StateMismatch):
        step(comm, state)
    for _ in range(2):
        with pytest.raises(lh.FailedPrecondition, match="StateMismatch at this member.*leave"):
            step(comm, state)
    peerd.on["sync"] = agrees
    comm.sync_state(state)
    assert step(comm, state).sync is None


def test_a_member_whose_block_failed_must_not_go_on_unseen(peerd: ScriptedPeerd) -> None:
    comm, state = joined(peerd)
    with pytest.raises(ZeroDivisionError), comm.step(state, sync="on_change"):
        raise ZeroDivisionError
    assert state.revision == 0
    with pytest.raises(lh.FailedPrecondition, match="revision 0 ended with ZeroDivisionError"):
        step(comm, state)
    with comm.step(state, sync="always"):
        pass
    step(comm, state)
    assert state.revision == 2


def test_an_unknown_mode_is_refused(peerd: ScriptedPeerd) -> None:
    comm, state = joined(peerd)
    with pytest.raises(lh.InvalidArgument, match="sync is 'never'"), comm.step(state, sync="never"):  # type: ignore[arg-type]
        pass


# ---- exceptions in the block


def test_an_exception_that_the_block_caught_raises_the_revision_only_with_a_warning(
    peerd: ScriptedPeerd, caplog: pytest.LogCaptureFixture
) -> None:
    comm, state = joined(peerd)
    peerd.on["step"] = lambda request: request.answer(sync_info(state.revision), flags=PASSED)
    peerd.on["op"] = lambda request: request.answer(b"by a test", ABORTED)
    caplog.set_level(logging.WARNING, "longhaul")
    with comm.step(state) as passed:
        with pytest.raises(lh.Aborted):
            comm.all_reduce(np.ones(10, np.float32))
        passed.repeat()
    assert (state.revision, caplog.text) == (0, "")
    with comm.step(state):
        with pytest.raises(lh.Aborted):
            comm.all_reduce(np.ones(10, np.float32))
    assert state.revision == 1
    assert "1 ops failed in the block of a step, and state.revision rises to 1" in caplog.text


# ---- with others


def test_a_newcomer_gets_the_state_of_members_that_had_not_synced_for_some_steps(cluster: LocalCluster) -> None:
    states = [lh.State({"w": np.full(1000, float(i))}) for i in range(2)]
    steps = 12

    def train(comm: lh.Comm, state: lh.State) -> list[bool]:
        synced = []
        while state.revision < steps:
            with comm.step(state, 60, sync="on_change") as passed:
                synced.append(passed.sync is not None)
                state.tensors["w"][:] += state.revision
            if state.revision == 5:
                waiting.set()
                wait_until(lambda: comm.pending == 1)
        return synced

    waiting = threading.Event()
    with ThreadPoolExecutor() as pool:
        comm = lh.join("on-change", peerd=cluster.socket(0))
        first = pool.submit(train, comm, states[0])
        assert waiting.wait(60)
        newcomer = lh.join("on-change", peerd=cluster.socket(1), state=states[1])
        assert train(newcomer, states[1]) == [True, *6 * [False]]
        assert first.result(60) == [True, *4 * [False], True, *6 * [False]]
    assert (states[0].tensors["w"] == states[1].tensors["w"]).all()
    assert states[1].tensors["w"][0] == sum(range(steps))
    for each in (comm, newcomer):
        each.leave(60)
