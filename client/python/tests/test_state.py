"""Who may use the tensors of a State after a failure, and which of them count as changed."""

from __future__ import annotations

import pathlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from conftest import wait_until
from scripted_peerd import (
    ABORTED,
    BACKGROUND,
    CHANGED,
    EVICTED,
    PASSED,
    Request,
    ScriptedPeerd,
    op_info,
    sync_info,
)

import longhaul as lh


@pytest.fixture
def peerd() -> Iterator[ScriptedPeerd]:
    with ScriptedPeerd() as scripted:
        yield scripted


def syncs(peerd: ScriptedPeerd) -> list[Request]:
    return [request for request in peerd.requests if request.name == "SYNC"]


def the(name: str, peerd: ScriptedPeerd) -> Request:
    wait_until(lambda: name in peerd.heard)
    return next(request for request in peerd.requests if request.name == name)


def never(_: Request) -> None:
    """Never answers."""


def joined(peerd: ScriptedPeerd) -> lh.Comm:
    comm = lh.join("run", peerd=peerd.path)
    comm.begin_step()  # the one of its join
    return comm


def in_place(peerd: ScriptedPeerd) -> lh.State:
    """A state whose tensor is in the arena."""
    tensor = lh.empty(1000, peerd=peerd.path)
    tensor[:] = 1
    return lh.State({"w": tensor})


def succeeds(request: Request) -> None:
    request.answer(sync_info(0))


def hang_up(request: Request) -> None:
    """Closes the connection, as if peerd died."""
    request.connection.shutdown(socket.SHUT_RDWR)


def evict(peerd: ScriptedPeerd, comm: lh.Comm) -> None:
    """Removes the member. Returns when the client knows."""
    peerd.evict()
    wait_until(lambda: "evicted" in repr(comm))


def fetches(content: float, status: int = 0, flags: int = CHANGED) -> Callable[[Request], None]:
    """Answers as if the sync had filled the tensor with `content`."""

    def fetch(request: Request) -> None:
        request.fetch(np.full(1000, content, np.float32).tobytes())
        request.answer(b"by a test" if status else sync_info(5), status, flags if status == 0 else 0)

    return fetch


# ---- what the tensors hold


def test_what_was_fetched_is_written_when_the_sync_has_ended_well(peerd: ScriptedPeerd) -> None:
    comm = joined(peerd)
    state = in_place(peerd)
    peerd.on["sync"] = fetches(7)
    comm.sync_state(state)
    assert (state.tensors["w"] == 7).all()
    assert state.revision == 5


@pytest.mark.parametrize("dies", [False, True])
def test_whatever_breaks_off_the_tensors_are_as_they_were(
    peerd: ScriptedPeerd, dies: bool, tmp_path: pathlib.Path
) -> None:
    comm = joined(peerd)
    state = in_place(peerd)
    before = state.compute_hash()

    def die(request: Request) -> None:
        request.fetch(b"half of something")
        hang_up(request)

    peerd.on["sync"] = die if dies else fetches(7, ABORTED)
    with pytest.raises(lh.Unavailable if dies else lh.Aborted):
        comm.sync_state(state)
    assert state.compute_hash() == before
    assert state.revision == 0
    state.save(tmp_path / "state.safetensors")


def test_a_member_that_leaves_in_a_sync_has_its_state_again(peerd: ScriptedPeerd) -> None:
    comm = joined(peerd)
    state = in_place(peerd)
    peerd.on["sync"] = never
    with pytest.raises(lh.DeadlineExceeded):
        comm.sync_state(state, timeout=0.05)
    the("SYNC", peerd).answer(b"left", EVICTED)
    comm.leave()
    peerd.on["sync"] = succeeds
    joined(peerd).sync_state(state)


def test_a_sync_whose_member_is_out_does_not_keep_the_state(peerd: ScriptedPeerd) -> None:
    comm = joined(peerd)
    state = in_place(peerd)
    peerd.on["sync"] = never
    with pytest.raises(lh.DeadlineExceeded):
        comm.sync_state(state, timeout=0.05)
    with pytest.raises(lh.FailedPrecondition, match="goes on"):
        state.save("nowhere")
    the("SYNC", peerd).answer(b"out", EVICTED)
    evict(peerd, comm)
    # No call waits for that sync any more.
    peerd.on["sync"] = succeeds
    joined(peerd).sync_state(state)


# ---- held


def hold(peerd: ScriptedPeerd, comm: lh.Comm, state: lh.State) -> None:
    peerd.on["sync"] = lambda request: request.answer(flags=BACKGROUND)
    assert comm.sync_state(state).background
    assert state.held


def test_a_peerd_that_dies_holds_nothing(peerd: ScriptedPeerd) -> None:
    comm = joined(peerd)
    state = in_place(peerd)
    hold(peerd, comm, state)
    peerd.on["take"] = hang_up
    with pytest.raises(lh.Unavailable):
        comm.take_state(state, 1)
    assert not state.held
    assert (state.tensors["w"] == 1).all()


def test_a_take_that_is_refused_on_the_way_leaves_the_state_held(peerd: ScriptedPeerd) -> None:
    comm = joined(peerd)
    state = in_place(peerd)
    hold(peerd, comm, state)
    peerd.on["step"] = never
    with pytest.raises(lh.DeadlineExceeded):
        comm.begin_step(timeout=0.05)
    with pytest.raises(lh.FailedPrecondition):
        comm.take_state(state)
    assert state.held
    the("STEP", peerd).answer(flags=PASSED)
    comm.begin_step()
    assert comm.take_state(state)


@pytest.mark.parametrize("dropped", [False, True])
def test_what_was_held_for_a_member_that_is_out_goes_to_the_next_one(peerd: ScriptedPeerd, dropped: bool) -> None:
    comm = joined(peerd)
    staged = np.ones((4, 8), np.float32)[:, ::2]
    state = lh.State({"w": staged, "v": lh.empty(10, peerd=peerd.path)})
    hold(peerd, comm, state)
    if dropped:
        del comm
    else:
        evict(peerd, comm)
    other = joined(peerd)
    peerd.on["sync"] = succeeds
    read: list[Any] = []
    tensor = state._tensors[0]
    original = tensor.read

    def noted(memory: Any) -> None:
        read.append(memory)
        original(memory)

    tensor.read = noted  # type: ignore[method-assign]
    other.sync_state(state)
    assert read, "what peerd has in its place is not the trainer's"
    assert not state.held


def test_what_is_held_for_another_member_is_refused(peerd: ScriptedPeerd) -> None:
    comm = joined(peerd)
    state = in_place(peerd)
    hold(peerd, comm, state)
    with pytest.raises(lh.FailedPrecondition, match="another member"):
        joined(peerd).sync_state(state)
    assert state.held


@pytest.mark.parametrize("held", [False, True])
def test_touch_and_the_revision_are_the_trainers_while_the_tensors_are(peerd: ScriptedPeerd, held: bool) -> None:
    comm = joined(peerd)
    state = in_place(peerd)
    if held:
        hold(peerd, comm, state)
    else:
        peerd.on["sync"] = never
        with pytest.raises(lh.DeadlineExceeded):
            comm.sync_state(state, timeout=0.05)
    with pytest.raises(lh.FailedPrecondition, match="touch"):
        state.touch("w")
    with pytest.raises(lh.FailedPrecondition, match="revision"):
        state.revision = 7
    assert state.revision == 0


# ---- ops and syncs


@pytest.mark.parametrize("arena", [False, True])
def test_a_tensor_is_in_an_op_or_in_a_sync(peerd: ScriptedPeerd, arena: bool) -> None:
    comm = joined(peerd)
    state = in_place(peerd) if arena else lh.State({"w": np.ones(1000, np.float32)})
    peerd.on["op"] = never
    work = comm.all_reduce(state.tensors["w"], tag=3, async_op=True)
    with pytest.raises(lh.FailedPrecondition, match=r'tag 3 in flight uses tensor "w".*; call wait\(\)'):
        comm.sync_state(state)
    with pytest.raises(lh.FailedPrecondition, match='tag 3 in flight uses tensor "w"'):
        with comm.step(state):
            pass
    the("OP", peerd).answer(op_info())
    work.wait(10)
    peerd.on["sync"] = never
    with pytest.raises(lh.DeadlineExceeded):
        comm.sync_state(state, timeout=0.05)
    with pytest.raises(lh.FailedPrecondition, match='tag 4 has memory of tensor "w" of a state that is in a sync'):
        comm.all_reduce(state.tensors["w"][:10], tag=4)
    the("SYNC", peerd).answer(sync_info(0))
    comm.sync_state(state)


def test_an_op_that_nobody_waits_for_does_not_stand_in_the_way_of_a_sync(peerd: ScriptedPeerd) -> None:
    comm = joined(peerd)
    state = lh.State({"w": np.ones(1000, np.float32)})
    answered = threading.Event()

    def answer(request: Request) -> None:
        request.answer(op_info())
        answered.set()

    peerd.on["op"] = answer
    comm.all_reduce(state.tensors["w"], async_op=True)
    assert answered.wait(60)
    comm.sync_state(state)


# ---- steps


def test_a_step_without_its_state_does_not_end_one_that_has_it(peerd: ScriptedPeerd) -> None:
    comm = joined(peerd)
    state = in_place(peerd)
    peerd.on["step"] = never
    with pytest.raises(lh.DeadlineExceeded):
        with comm.step(state, timeout=0.05):
            pass
    the("STEP", peerd).answer(sync_info(5), flags=PASSED)
    with pytest.raises(lh.FailedPrecondition, match=r"call step\(\) with it again"):
        comm.begin_step(1)
    with comm.step(state, timeout=10) as step:
        assert step.sync is not None and step.sync.revision == 5
    assert state.revision == 6
    assert peerd.heard.count("STEP") == 1


def test_a_step_with_a_state_does_not_take_the_end_of_one_without(peerd: ScriptedPeerd) -> None:
    comm = joined(peerd)
    state = in_place(peerd)
    peerd.on["step"] = never
    with pytest.raises(lh.DeadlineExceeded):
        comm.begin_step(0.05)
    the("STEP", peerd).answer(flags=PASSED)
    with pytest.raises(lh.FailedPrecondition, match=r"begin_step\(\) waits"):
        with comm.step(state, timeout=10):
            pass
    assert (state.revision, state.hash) == (0, None)
    comm.begin_step(10)


# ---- joins


def test_a_join_that_failed_leaves_nothing_prepared(peerd: ScriptedPeerd) -> None:
    peerd.on["join"] = never
    state = lh.State({"w": np.ones(10, np.float32)})
    with pytest.raises(lh.DeadlineExceeded):
        lh.join("run", peerd=peerd.path, timeout=0.2, state=state)
    del peerd.on["join"]
    lh.join("run", peerd=peerd.path).sync_state(state)
    assert syncs(peerd)[0].reads_all
    with lh.join("run", peerd=peerd.path, state=state) as comm:
        comm.sync_state(state)
        assert not syncs(peerd)[1].reads_all
        comm.sync_state(state)
        assert syncs(peerd)[2].reads_all


# ---- tensors that changed


def test_a_tensor_that_was_converted_is_refused(peerd: ScriptedPeerd, tmp_path: pathlib.Path) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(64, 64, bias=False)
    state = lh.State(dict(model.named_parameters()))
    state.save(tmp_path / "state.safetensors")
    model.bfloat16()
    comm = joined(peerd)
    calls: list[Callable[[], Any]] = [
        lambda: comm.sync_state(state),
        state.compute_hash,
        lambda: state.save(tmp_path / "converted.safetensors"),
        lambda: state.load(tmp_path / "state.safetensors"),
        lambda: lh.join("run", peerd=peerd.path, state=state),
    ]
    for call in calls:
        with pytest.raises(
            lh.InvalidArgument, match=r"'weight' was declared as float32 \[64, 64\] and is bfloat16 .*lh.State"
        ):
            call()
    model.float()
    comm.sync_state(state)


def test_a_tensor_that_was_resized_is_refused(peerd: ScriptedPeerd) -> None:
    array = np.ones(1000, np.float32)
    state = lh.State({"w": array})
    array.resize(10, refcheck=False)
    with pytest.raises(lh.InvalidArgument, match=r"'w' was declared as float32 \[1000\] and is float32 \[10\]"):
        joined(peerd).sync_state(state)
