"""join(coordinator=...): a peerd that belongs to one process."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import longhaul as lh
from longhaul import _arena, _programs
from longhaul.testing import LocalCluster

PATIENCE_S = 60


@pytest.fixture(scope="module")
def coordinator() -> Iterator[str]:
    # A member whose peerd has died is removed after four times detect_ms, if no other member misses it.
    with LocalCluster(peers=0, coordinator_flags=["--detect-ms=500"]) as cluster:
        yield cluster.coordinator


def until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"did not happen in {PATIENCE_S} s: {what}"
        time.sleep(0.01)


def peerds_of(pid: int) -> list[int]:
    """The private peerds that the process has started."""

    def private(child: str) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return b"--until-stdin-ends" in pathlib.Path(f"/proc/{child}/cmdline").read_bytes()
        return False

    children = (child for task in pathlib.Path(f"/proc/{pid}/task").iterdir() for child in children_of(task))
    return [int(child) for child in children if private(child)]


def children_of(task: pathlib.Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return (task / "children").read_text().split()
    return []


def running(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0] != "Z"
    return False


# Joins, and says so; then goes on until its standard input ends.
TRAINER = """
import sys
import numpy as np
import longhaul as lh
{before}
with lh.join("private", members=2, {how}) as comm:
    x = comm.empty(1000)
    x[:] = 1 + comm.rank
    info = comm.all_reduce(x, op="sum", timeout=60)
    assert (x == 3).all() and not info.staged, (x, info)
    {after}
    print("ready", flush=True)
    sys.stdin.read()
"""


def start(how: str, before: str = "", after: str = "", **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", TRAINER.format(how=how, before=before, after=after)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def ready(trainer: subprocess.Popen[str]) -> None:
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "ready\n"


def finish(trainer: subprocess.Popen[str]) -> None:
    trainer.communicate(timeout=PATIENCE_S)
    assert trainer.returncode == 0


def test_trainers_without_a_daemon_train_together(coordinator: str) -> None:
    by_argument = start(f"coordinator={coordinator!r}")
    by_environment = start("timeout=60", LONGHAUL_COORDINATOR=coordinator)
    for trainer in (by_argument, by_environment):
        ready(trainer)
        assert len(peerds_of(trainer.pid)) == 1
    peerds = peerds_of(by_argument.pid) + peerds_of(by_environment.pid)
    finish(by_argument)
    finish(by_environment)
    assert not any(running(pid) for pid in peerds), "the end of the program waits for its peerd"


@pytest.mark.parametrize("forked", [False, True])
def test_it_ends_when_its_process_is_killed(coordinator: str, forked: bool) -> None:
    """A child of fork() that outlives the trainer, such as a worker of a data loader, does not keep its peerd."""
    fork = "import os, time\n    if os.fork() == 0:\n        time.sleep(600)\n    " if forked else ""
    trainers = [start(f"coordinator={coordinator!r}", after=fork) for _ in range(2)]
    for trainer in trainers:
        ready(trainer)
    (peerd,) = peerds_of(trainers[0].pid)
    children = pathlib.Path(f"/proc/{trainers[0].pid}/task/{trainers[0].pid}/children").read_text().split()
    trainers[0].kill()
    until(lambda: not running(peerd), "the peerd of the dead trainer has ended")
    for child in map(int, children):
        if child != peerd:
            assert running(child)
            os.kill(child, signal.SIGKILL)
    trainers[1].kill()  # its child of fork(), if any, holds the pipe of the test open
    for pid in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"coordinator={coordinator!r}".encode() in (pid / "cmdline").read_bytes():
                os.kill(int(pid.name), signal.SIGKILL)
    for trainer in trainers:
        trainer.wait(PATIENCE_S)


def test_joins_of_one_process_share_it(coordinator: str) -> None:
    with lh.join("shared", coordinator=coordinator) as first:
        (peerd,) = peerds_of(os.getpid())
        with lh.join("shared", 1, coordinator=coordinator) as second:
            assert peerds_of(os.getpid()) == [peerd]
            x = lh.empty(10)  # from the peerd that this process used last
            x[:] = 2
            assert not second.all_reduce(x).staged
        assert first.world_size == 1


@pytest.mark.parametrize("reported", [True, False], ids=["", "before the system reports its end"])
def test_one_that_died_is_started_again(coordinator: str, reported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = lh.join("again", coordinator=coordinator)
    (peerd,) = peerds_of(os.getpid())
    os.kill(peerd, signal.SIGKILL)
    with pytest.raises(lh.Unavailable):
        lost.all_reduce(np.ones(10, np.float32), timeout=PATIENCE_S)
    if not reported:
        process = _programs._peerds[coordinator]._process
        process.wait()
        answers = itertools.chain([None], itertools.repeat(process.returncode))
        monkeypatch.setattr(process, "poll", lambda: next(answers))
    with lh.join("again", coordinator=coordinator, timeout=PATIENCE_S) as comm:
        assert peerds_of(os.getpid()) != [peerd]
        x = np.ones(10, np.float32)
        comm.all_reduce(x)


@pytest.mark.parametrize("gone", ["what was written", "the whole directory"])
def test_a_cleaner_of_its_directory_does_not_keep_the_program_out(coordinator: str, gone: str) -> None:
    peerds: list[list[int]] = []

    def train(comm: lh.Comm) -> None:
        peerds.append(peerds_of(os.getpid()))
        if len(peerds) == 1:
            directory = pathlib.Path(_programs._peerds[coordinator].socket).parent
            for file in directory.iterdir():
                if gone == "the whole directory" or not file.is_socket():
                    file.unlink()
            if gone == "the whole directory":
                directory.rmdir()
            raise lh.Evicted("on purpose")

    lh.run(train, "cleaned", coordinator=coordinator, backoff=0.01)
    assert len(peerds) == 2
    assert peerds[0] == peerds[1], "the peerd lives, and is asked again"


def test_one_that_nobody_can_reach_any_more_is_started_again(coordinator: str) -> None:
    with lh.join("unreachable", coordinator=coordinator):
        peerd = _programs._peerds[coordinator]
    assert peerd._connection is not None
    peerd._connection = None  # as if peerd had cut it
    pathlib.Path(peerd.socket).unlink(missing_ok=True)  # an earlier test has cleaned up
    _arena._clients.clear()
    with lh.join("unreachable", coordinator=coordinator, timeout=PATIENCE_S):
        assert _programs._peerds[coordinator] is not peerd
    until(lambda: not running(peerd._process.pid), "the old peerd has ended")


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "nothing would be encrypted. Give --tls-ca=FILE"),
        ({"LONGHAUL_PEERD_TLS_CA": "/nowhere/ca.pem"}, "/nowhere/ca.pem"),
        ({"LONGHAUL_PEERD_INSECURE": "true", "LONGHAUL_PEERD_ARENA_LIMIT": "much"}, "arena-limit"),
        ({"LONGHAUL_BIN": "/nowhere"}, "no longhaul-peerd in /nowhere"),
    ],
)
def test_a_wrong_setting_ends_a_run_at_once_with_its_text(
    environment: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(lh.FailedPrecondition, match=said):
        lh.run(lambda comm: None, "wrong", coordinator="192.0.2.1:29600")
    assert "joining again" not in caplog.text


def test_what_cannot_be_is_said(coordinator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(lh.InvalidArgument, match="peerd and coordinator are both given"):
        lh.join("wrong", peerd="/tmp/x.sock", coordinator=coordinator)
    for wrong in ("", "host", "host:", ":1", "host:0", "host:65536", "a:1,b"):
        with pytest.raises(lh.InvalidArgument, match="give host:port"):
            lh.join("wrong", coordinator=wrong)
    _programs._end_all()
    monkeypatch.setenv("LONGHAUL_PEERD_IO", "none")
    with pytest.raises(lh.FailedPrecondition, match="ended with 2 before it served.*give auto, uring or epoll"):
        lh.join("wrong", coordinator=coordinator, timeout=30)
    monkeypatch.setenv("LONGHAUL_BIN", "/nowhere")
    with pytest.raises(lh.FailedPrecondition, match="no longhaul-peerd in /nowhere"):
        lh.join("wrong", coordinator=coordinator, timeout=30)
