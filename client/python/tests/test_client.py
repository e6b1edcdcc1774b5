"""Connections of a process to its peerds, and that nothing is left behind, however a call ends."""

from __future__ import annotations

import collections
import gc
import os
import pathlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from conftest import Members, wait_until
from scripted_peerd import BACKGROUND, DEADLINE_EXCEEDED, Request, ScriptedPeerd, op_info, sync_info
from test_process import python

import longhaul as lh
from longhaul import _arena, _native
from longhaul.testing import LocalCluster

MIB = 1 << 20


# ------------------------------------------------------------------ connections


def test_a_join_that_waits_for_its_peerd_is_nothing_to_others(cluster: LocalCluster, tmp_path: pathlib.Path) -> None:
    late = tmp_path / "late.sock"
    with ThreadPoolExecutor(1) as pool, LocalCluster(peers=1, coordinator=cluster.coordinator) as fresh:
        joining = pool.submit(lh.join, "late", peerd=str(late), timeout=60)
        try:
            lh.empty(3, peerd=cluster.socket(0))
            with lh.join("in-time", peerd=fresh.socket(0), timeout=50):
                assert not joining.done()
        finally:
            late.symlink_to(cluster.socket(1))
        joining.result(60).leave(60)


def test_two_threads_that_connect_at_once_share_a_connection() -> None:
    held: list[Request] = []
    with ScriptedPeerd(hello=held.append) as peerd, ThreadPoolExecutor(2) as pool:
        clients = [pool.submit(_arena.client_of, peerd.path, _native.Deadline(60)) for _ in range(2)]
        wait_until(lambda: len(held) == 2)
        for hello in held:
            hello.answer()
        (first, _), (second, _) = (client.result(60) for client in clients)
        assert first is second


def test_memory_is_to_be_had_of_a_peerd_that_was_started_anew() -> None:
    with ScriptedPeerd() as peerd:
        old = lh.empty(3, peerd=peerd.path)
        old[:] = 1
        comm = lh.join("old", peerd=peerd.path)
        peerd.die()
        anew = ScriptedPeerd(peerd.path)
        # Through the peerd used last, then through the peerd at this path.
        assert lh.empty(3).shape == lh.empty(3, peerd=peerd.path).shape == (3,)
        assert anew.heard == ["HELLO", "REGION"]
        assert (old == 1).all()
        with pytest.raises(lh.Unavailable, match=r"then longhaul\.join\(\) again"):
            comm.begin_step(30)
        with lh.join("new", peerd=peerd.path):
            pass


def test_a_child_of_fork_joins_by_itself(cluster: LocalCluster) -> None:
    code = """
import os
import numpy as np, longhaul as lh
comm = lh.join('forked')
tensor = lh.empty(3)
comm.begin_step()
tensor[:] = 1
child = os.fork()
if child == 0:
    try:
        comm.begin_step()
    except lh.FailedPrecondition as refused:
        assert 'longhaul.join()' in str(refused), refused
    own = lh.join('child', timeout=30)
    inherited = np.array(tensor)
    assert own.all_reduce(inherited, timeout=30).world_size == 1
    lh.empty(3)[:] = 1
    own.leave(30)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert comm.all_reduce(tensor, timeout=30).world_size == 1
comm.leave(30)
print('end')
"""
    process = python(code, LONGHAUL_SOCKET=cluster.socket(0))
    output, _ = process.communicate(timeout=60)
    assert output.endswith("end\n"), output


# ------------------------------------------------------------------ what a call leaves behind


def interrupt(monkeypatch: pytest.MonkeyPatch, function: str, call: Callable[[], Any]) -> None:
    """Runs `call`. KeyboardInterrupt is raised when `function` of the C library returns."""
    lib = _native.library()
    real = getattr(lib, function)

    def interrupted(*arguments: Any) -> None:
        real(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(lib, function, interrupted)
        with pytest.raises(KeyboardInterrupt):
            call()
    gc.collect()


def sweep_all(client: _arena.Client) -> None:
    def swept() -> bool:
        client.sweep()
        return not client.leftovers

    wait_until(swept)


@pytest.fixture(scope="module")
def small(cluster: LocalCluster) -> str:
    """The socket of a peer whose trainers may share 256 MiB."""
    return cluster.socket(cluster.add_peer(["--arena_limit=%d" % (256 * MIB)]))


@pytest.mark.parametrize("call", ["lh_alloc", "lh_all_reduce_start", "lh_all_reduce", "lh_state_new"])
def test_a_call_that_is_interrupted_leaves_no_memory_behind(
    cluster: LocalCluster, small: str, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Each round takes 100 MiB of the arena. So the third would fail if the rounds before had left theirs."""
    members = Members([small, cluster.socket(0)])
    comm, other = members.comms
    lib = _native.library()
    at_once = lib.lh_all_reduce

    def all_reduce(comm: Any, options: Any, wait_ms: int, info: Any, op: Any) -> int:
        status: int = at_once(comm, options, 0, info, op)
        assert status == _native.DEADLINE_EXCEEDED
        return status

    array = np.ones(50 * MIB, np.uint8)
    calls: dict[str, Callable[[], Any]] = {
        "lh_alloc": lambda: lh.empty(100 * MIB, "uint8", peerd=small),
        "lh_all_reduce_start": lambda: comm.all_reduce(array, async_op=True),
        "lh_all_reduce": lambda: comm.all_reduce(array),
        "lh_state_new": lambda: lh.State({"a": array, "b": array[:]}).register(comm._client),
    }
    monkeypatch.setattr(lib, "lh_all_reduce", all_reduce)
    for _ in range(4):
        interrupt(monkeypatch, call, calls[call])
        if "all_reduce" in call:
            # The op waits for `other`, so it was still in flight when the call was interrupted.
            other.all_reduce(np.ones(50 * MIB, np.uint8), async_op=True).wait(60)
        sweep_all(comm._client)
    members.close()


def test_a_join_that_is_interrupted_is_withdrawn(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    first = lh.join("withdrawn", peerd=cluster.socket(0))
    path = cluster.socket(1)
    keep = lh.empty(3, peerd=path)  # and with it the connection, whose end would withdraw it
    interrupt(monkeypatch, "lh_join_start", lambda: lh.join("withdrawn", peerd=path))
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(lh.join, "withdrawn", peerd=path)  # behind the other one all the way
        while first.world_size < 2:
            first.begin_step(60)
        second = joining.result(30)
        assert second.world_size == 2, "the first wish was granted, too"
        second.leave(60)
    first.leave(60)
    del keep


def test_a_connection_that_is_interrupted_is_closed(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalCluster(peers=1, coordinator=cluster.coordinator) as fresh:
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        interrupt(monkeypatch, "lh_open", lambda: lh.empty(3, peerd=fresh.socket(0)))
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_state_that_goes_in_a_sync_is_given_back_after_it() -> None:
    syncs: list[Request] = []
    with ScriptedPeerd(sync=syncs.append) as peerd:
        keep = lh.empty(3, peerd=peerd.path)  # and with it the connection
        comm = lh.join("dropped", peerd=peerd.path)
        state = lh.State({"staged": np.ones((8, 8), np.float32).T, "in place": comm.empty(1000)})
        with pytest.raises(lh.DeadlineExceeded):
            comm.sync_state(state, timeout=0)
        client = comm._client
        del comm, state
        gc.collect()
        assert "UNSTATE" not in peerd.heard
        wait_until(lambda: len(syncs) == 1)
        syncs[0].answer(sync_info(0))
        sweep_all(client)  # what was in it goes with it
        wait_until(lambda: "UNSTATE" in peerd.heard)
        del keep


def test_a_sweep_within_a_sweep_loses_nothing_and_does_nothing_twice() -> None:
    """A finalizer may sweep in the middle of a sweep. So may another thread, while a C call has released the GIL."""
    client = _arena.Client.__new__(_arena.Client)
    client.leftovers = collections.deque()
    tried: list[int] = []

    def attempt(i: int) -> Callable[[], bool]:
        def attempt() -> bool:
            tried.append(i)
            if tried.count(i) == 1:
                client.sweep()
            return i % 2 == 0

        return attempt

    for i in range(6):
        client.let_go(attempt(i))
    client.sweep()
    assert len(client.leftovers) == 3
    assert [tried.count(i) for i in (0, 2, 4)] == [1, 1, 1]
    del client.leftovers


def test_threads_sweep_at_once() -> None:
    client = _arena.Client.__new__(_arena.Client)
    client.leftovers = collections.deque()
    done: list[int] = []
    stop = threading.Event()

    def attempt(i: int) -> Callable[[], bool]:
        def attempt() -> bool:
            if not stop.is_set():
                return False
            done.append(i)
            return True

        return attempt

    for i in range(500):
        client.let_go(attempt(i))
    with ThreadPoolExecutor(4) as pool:
        sweeps = [pool.submit(client.sweep) for _ in range(100)]
        stop.set()
        for sweep in sweeps:
            sweep.result(60)
    client.sweep()
    assert sorted(done) == list(range(500))


# ------------------------------------------------------------------ a peerd that does not answer


def in_the_background(peerd: ScriptedPeerd) -> tuple[lh.Comm, lh.State]:
    peerd.on["sync"] = lambda request: request.answer(sync_info(0), flags=BACKGROUND)
    comm = lh.join("background", peerd=peerd.path)
    state = lh.State({"w": np.ones(10, np.float32)})
    assert comm.sync_state(state, timeout=30).background
    del peerd.on["sync"]
    return comm, state


def test_a_take_ends_in_time_though_peerd_does_not_answer() -> None:
    takes: list[Request] = []
    with ScriptedPeerd(take=takes.append) as peerd:
        comm, state = in_the_background(peerd)
        assert not comm.take_state(state, timeout=0.1)
        assert state.held
        # Before the next step the client must know whether the tensors belong to peerd or to the trainer.
        with pytest.raises(lh.DeadlineExceeded, match="peerd does not answer"):
            comm.begin_step(0)
        takes[0].answer(sync_info(7))
        assert comm.take_state(state, timeout=30)
        assert (state.revision, state.held, len(takes)) == (7, False, 1)
        assert comm.sync_state(state, timeout=30).revision == 0


@pytest.mark.parametrize("taken", [True, False])
def test_a_member_goes_on_when_a_take_is_answered_late(taken: bool) -> None:
    takes: list[Request] = []
    with ScriptedPeerd(take=takes.append) as peerd:
        comm, state = in_the_background(peerd)
        assert not comm.take_state(state, timeout=0)

        # The answer comes before the step, or while the step waits for it.
        def answer() -> None:
            wait_until(lambda: len(takes) == 1)
            if taken:
                takes[0].answer(sync_info(7), 0)
            else:
                late(takes[0])

        threading.Timer(0.2, answer).start()
        peerd.on["step"] = lambda request: request.answer(sync_info(9), flags=1)
        with comm.step(state, timeout=30) as step:
            assert step.sync is not None
            assert step.sync.revision == 9
        assert (state.revision, len(takes)) == (10, 1)


def late(take: Request) -> None:
    take.answer(b"not yet", status=DEADLINE_EXCEEDED, flags=BACKGROUND)


def test_ctrl_c_ends_a_sync_that_fetches() -> None:
    code = """
import os, signal, threading, time
import numpy as np, longhaul as lh
from scripted_peerd import ScriptedPeerd
signal.signal(signal.SIGINT, signal.default_int_handler)
def fetch(request):
    def go_on():
        done = 0
        while not told:
            done += 1
            request.progress(done, 1000)
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=go_on, daemon=True).start()
told = []
with ScriptedPeerd(sync=fetch) as peerd:
    comm = lh.join('fetches', peerd=peerd.path)
    state = lh.State({'w': np.ones(10, np.float32)})
    try:
        comm.sync_state(state, timeout=50, progress=told.append)
    except KeyboardInterrupt:
        print('interrupted')
assert told and told[0].bytes_total == 1000, told
print('end')
"""
    path = os.pathsep.join([str(pathlib.Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    process = python(code, PYTHONPATH=path)
    output, _ = process.communicate(timeout=60)
    assert output == "interrupted\nend\n", output


def test_an_op_whose_wait_was_interrupted_gives_its_memory_back_when_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ops: list[Request] = []
    with ScriptedPeerd(op=ops.append) as peerd:
        comm = lh.join("ops", peerd=peerd.path)
        for make in (comm.empty, np.ones):
            tensor = [make(1000, "float32")]
            interrupt(monkeypatch, "lh_all_reduce", lambda tensor=tensor: comm.all_reduce(tensor.pop()))  # type: ignore[misc]
            client = comm._client
            client.sweep()
            assert client.leftovers, "the op owns its tensor"
            wait_until(lambda: len(ops) == 1)
            ops.pop().answer(op_info())
            sweep_all(client)
