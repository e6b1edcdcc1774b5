"""What a call says while it waits."""

from __future__ import annotations

import ast
import contextlib
import os
import pathlib
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from conftest import wait_until
from scripted_peerd import Request, ScriptedPeerd

import longhaul as lh
from longhaul import _waiting
from longhaul._waiting import EVERY_S, FIRST_S, PEERD_S, Waiting
from longhaul.testing import LocalCluster


def test_a_line_comes_after_a_while_and_then_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    asked: list[float] = []

    def why() -> str:
        asked.append(now[0])
        return "2 of 3 have come"

    waiting = Waiting("begin_step", now=lambda: now[0])
    while now[0] < 100 + 3 * EVERY_S:
        waiting.look(why)
        now[0] += 0.5
    assert asked == [100 + FIRST_S, 100 + FIRST_S + EVERY_S, 100 + FIRST_S + 2 * EVERY_S]
    assert [(each.name, each.levelname, each.getMessage()) for each in caplog.records] == [
        ("longhaul", "WARNING", f"begin_step has waited for {after:.0f} s: 2 of 3 have come")
        for after in (FIRST_S, FIRST_S + EVERY_S, FIRST_S + 2 * EVERY_S)
    ]


def test_a_short_wait_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    waiting = Waiting("begin_step", first=PEERD_S, now=lambda: now[0])
    now[0] = PEERD_S - 0.1
    waiting.look(lambda: "never asked")
    assert caplog.text == ""


# ------------------------------------------------------------------ every call that blocks


def _state() -> lh.State:
    return lh.State({"w": np.zeros(3, np.float32)})


def _step(comm: lh.Comm) -> None:
    with comm.step(_state()):
        pass


# By name: what a trainer calls, the request that peerd does not answer for a while, and how the call is named.
CALLS: dict[str, tuple[Callable[[lh.Comm], Any], str, str]] = {
    "begin_step": (lambda comm: comm.begin_step(), "step", "begin_step"),
    "step": (_step, "step", "step"),
    "sync_state": (lambda comm: comm.sync_state(_state()), "sync", "sync_state"),
    "barrier": (lambda comm: comm.barrier(), "op", "barrier, tag 0"),
    "all_reduce": (lambda comm: comm.all_reduce(np.ones(3)), "op", "all_reduce of float64 x 3, tag 0"),
    "wait": (lambda comm: comm.barrier(async_op=True).wait(), "op", "barrier, tag 0"),
    "wait_any": (lambda comm: lh.wait_any([comm.barrier(async_op=True)]), "op", "barrier, tag 0"),
    "leave": (lambda comm: comm.leave(), "leave", "leave"),
}


def _again(call: Callable[[], Any]) -> None:
    """Makes the call with short timeouts until it ends, as programs do that look after something else meanwhile."""
    while True:
        with contextlib.suppress(lh.DeadlineExceeded):
            call()
            return


def _steps(comm: lh.Comm, end: threading.Event) -> None:
    """Passes boundaries until `end`: a signal takes a moment to stop the coordinator."""
    while not end.is_set():
        _again(lambda: comm.begin_step(1))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_waiting, "FIRST_S", 0.0)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_waits_says_what_for(name: str, caplog: pytest.LogCaptureFixture) -> None:
    call, request, said = CALLS[name]
    held: list[Request] = []
    asked = threading.Event()

    def why(request: Request) -> None:
        asked.set()
        request.answer(b"m2 is missing")

    with ScriptedPeerd(why=why) as peerd, ThreadPoolExecutor(1) as pool:
        comm = lh.join("waits", 3, peerd=peerd.path)
        comm.begin_step()  # the boundary of the join
        peerd.on[request] = held.append
        waiting = pool.submit(call, comm)
        assert asked.wait(60)
        del peerd.on[request]
        for each in held:
            peerd._answer(each)
        waiting.result(60)
    (line,) = [each.getMessage() for each in caplog.records if "has waited" in each.getMessage()]
    assert line == f"run waits group 3: {said} has waited for 0 s: m2 is missing"


@pytest.mark.usefixtures("at_once")
def test_a_join_that_waits_says_what_for(caplog: pytest.LogCaptureFixture) -> None:
    held: list[Request] = []
    with ScriptedPeerd(join=held.append, why=lambda request: request.answer(b"m2 computes")) as peerd:
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(lh.join, "waits", peerd=peerd.path)
            wait_until(lambda: "has waited" in caplog.text)
            held[0].answer()
            joining.result(60)
    assert "run waits group 0: join has waited for 0 s: m2 computes" in caplog.text


def test_calls_that_go_on_with_a_wait_count_as_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that gives short timeouts is told, too."""
    monkeypatch.setattr(_waiting, "FIRST_S", 0.5)
    held: list[Request] = []
    with ScriptedPeerd(why=lambda request: request.answer(b"m2 is missing")) as peerd:
        with ThreadPoolExecutor(1) as pool:
            comm = lh.join("short", peerd=peerd.path)
            comm.begin_step()
            peerd.on["step"] = held.append
            waiting = pool.submit(_again, lambda: comm.begin_step(0.001))
            wait_until(lambda: "begin_step has waited" in caplog.text)
            peerd._answer(held[0])
            waiting.result(60)
            peerd.on["op"] = held.append
            work = comm.barrier(async_op=True)
            waiting = pool.submit(_again, lambda: work.wait(0.001))
            wait_until(lambda: "barrier, tag 0 has waited" in caplog.text)
            peerd._answer(held[1])
            waiting.result(60)


@pytest.mark.usefixtures("at_once")
def test_a_peerd_that_does_not_answer_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longhaul._arena._WHY_MS", 10)
    with ScriptedPeerd(why=lambda request: None, step=lambda request: None) as peerd:
        comm = lh.join("mute", peerd=peerd.path)
        comm.begin_step()
        with pytest.raises(lh.DeadlineExceeded):
            comm.begin_step(0.3)
    assert "peerd does not answer: it is stopped, or hangs" in caplog.text


def _waits_in_slices(function: ast.FunctionDef) -> bool:
    loops = [node for node in ast.walk(function) if isinstance(node, ast.While)]
    calls = [node for loop in loops for node in ast.walk(loop) if isinstance(node, ast.Attribute)]
    return any(each.attr == "slice_ms" for each in calls)


def test_every_loop_of_the_package_that_waits_looks() -> None:
    package = pathlib.Path(lh.__file__).parent
    waits = []
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and _waits_in_slices(node):
                names = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
                names |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
                waits.append((f"{path.name}: {node.name}", "look" in names))
    assert len(waits) >= 5
    assert [name for name, looks in waits if not looks] == []


# ------------------------------------------------------------------ what peerd and the coordinator say


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Late enough that the coordinator knows, and again and again until it does."""
    monkeypatch.setattr(_waiting, "FIRST_S", 0.5)
    monkeypatch.setattr(_waiting, "EVERY_S", 0.5)
    yield


@pytest.mark.usefixtures("soon")
def test_the_coordinator_says_who_is_missing(caplog: pytest.LogCaptureFixture, cluster: LocalCluster) -> None:
    with ThreadPoolExecutor(2) as pool:
        joining = [pool.submit(lh.join, "missing", peerd=cluster.socket(i), members=2, name=f"t{i}") for i in (0, 1)]
        here, there = (each.result(60) for each in joining)
        here.begin_step(60), there.begin_step(60)
        missing = f"m{there.member_id}(t1) at peer p"

        waiting = pool.submit(here.begin_step)
        wait_until(lambda: "begin_step has waited" in caplog.text and missing in caplog.text)
        assert "waiting for 1 of 2 votes" in caplog.text
        there.begin_step(60)
        waiting.result(60)

        op = pool.submit(here.barrier)
        wait_until(lambda: "has not called the op with tag 0" in caplog.text)
        there.barrier(timeout=60)
        op.result(60)

        coming = pool.submit(lh.join, "missing", peerd=cluster.socket(2))
        wait_until(lambda: "run missing group 0: join has waited" in caplog.text)
        late = pool.submit(here.begin_step, 60)
        there.begin_step(60)
        late.result(60)
        newcomer = coming.result(60)
        assert newcomer._client.why("other", 0) == "this host has no member in the group"
        assert newcomer._client.why("missing", 7) == "this host has no member in the group"
        for comm in (here, there, newcomer):
            comm.leave(60)


@pytest.mark.usefixtures("soon")
def test_an_outage_of_the_coordinator_is_said_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with LocalCluster(peers=1) as cluster, ThreadPoolExecutor(1) as pool:
        comm = lh.join("outage", peerd=cluster.socket(0))
        comm.begin_step(60)
        os.kill(cluster.coordinator_pid, signal.SIGKILL)
        waiting = pool.submit(_steps, comm, threading.Event())
        wait_until(lambda: "no coordinator for 2 s: cannot reach coordinator" in caplog.text)
        assert cluster.coordinator in caplog.text
        # Also if the member is to be removed meanwhile: peerd is asked about the group, not about the member.
        cluster.kill_peer(0)
        with pytest.raises(lh.Unavailable):
            waiting.result(60)


@pytest.mark.usefixtures("soon")
def test_a_coordinator_that_hangs_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with LocalCluster(peers=1) as cluster, ThreadPoolExecutor(1) as pool:
        comm = lh.join("hangs", peerd=cluster.socket(0))
        comm.begin_step(60)
        os.kill(cluster.coordinator_pid, signal.SIGSTOP)
        end = threading.Event()
        waiting = pool.submit(_steps, comm, end)
        wait_until(lambda: "the coordinator does not answer" in caplog.text or "no coordinator for" in caplog.text)
        end.set()
        os.kill(cluster.coordinator_pid, signal.SIGCONT)
        waiting.result(60)
