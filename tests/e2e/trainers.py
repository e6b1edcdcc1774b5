"""Trainer processes that a test controls, and checks of what they do."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import queue
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, TextIO

from longhaul.testing import LocalCluster

WORKER = pathlib.Path(__file__).with_name("worker.py")
# How long any call may take on a busy machine.
PATIENCE_S = 60
# The most members that a group has in these tests.
MEMBERS_MAX = 8
# How many ops post() holds back.
HELD = 2


def until(condition: Callable[[], bool], what: str) -> None:
    """Waits until the condition holds. Fails if that takes too long."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"did not happen in {PATIENCE_S} s: {what}"
        time.sleep(0.01)


def free_port() -> int:
    """A port of 127.0.0.1 for a program that cannot choose one by itself.

    It is below the ports that the kernel gives to whoever asks for any. So no other test gets it before the program.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 20_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class _Server:
    """A process that forks trainers. It ends with this process, or with the last reference to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-u", str(WORKER), str(fd)], stdin=subprocess.DEVNULL, pass_fds=[fd]
            )

    def fork(self, torch: bool) -> tuple[int, TextIO, TextIO]:
        """Starts a trainer. Returns its process id, and the other ends of its standard input and output."""
        its_input, our_output = os.pipe()
        our_input, its_output = os.pipe()
        with self._lock:
            socket.send_fds(self._control, [b"T" if torch else b"t"], [its_input, its_output])
            answer = self._control.recv(8)
        os.close(its_input)
        os.close(its_output)
        assert len(answer) == 8, "the process that forks trainers has ended"
        return int.from_bytes(answer, "little"), open(our_output, "w", buffering=1), open(our_input)


_server = functools.cache(_Server)


class Trainer:
    """A process that runs worker.py. do() gives a command and waits for the answer; start() and finish() split this.

    torch: it has imported PyTorch, which takes seconds for the first trainer.
    """

    def __init__(self, torch: bool = False) -> None:
        self.pid, self._input, self._output = _server().fork(torch)
        # Unlike the process id, this never names another process.
        self._process = os.pidfd_open(self.pid)
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def __del__(self) -> None:
        os.close(self._process)

    def _read(self) -> None:
        for line in self._output:
            self._lines.put(line)
        self._lines.put(None)

    def start(self, name: str, **arguments: Any) -> None:
        self._input.write(json.dumps({"do": name, **arguments}) + "\n")

    def finish(self, timeout: float = 90) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise AssertionError(f"trainer {self.pid} gave no answer in {timeout} s: a hang") from None
        assert line is not None, f"trainer {self.pid} died"
        result: dict[str, Any] = json.loads(line)
        return result

    def idle(self) -> bool:
        """True if no answer has come yet."""
        return self._lines.empty()

    def do(self, name: str, timeout: float = 90, **arguments: Any) -> dict[str, Any]:
        self.start(name, **arguments)
        result = self.finish(timeout)
        assert "error" not in result, result
        return result

    def do_wrong(self, name: str, timeout: float = 90, **arguments: Any) -> dict[str, Any]:
        """As do(), for a command that ends with an error of Longhaul. Returns {"error": its class, "text": ...}."""
        self.start(name, **arguments)
        result = self.finish(timeout)
        assert "error" in result, result
        return result

    def _ended(self, timeout: float | None) -> bool:
        return bool(select.select([self._process], [], [], timeout)[0])

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)
        self._ended(None)

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        if not self._ended(60):
            self.kill()


def all_do(trainers: list[Trainer], name: str, timeout: float = 90, **arguments: Any) -> list[dict[str, Any]]:
    """Gives all trainers the same command at once, and returns their answers. Fails if one is an error."""
    for trainer in trainers:
        trainer.start(name, **arguments)
    results = [trainer.finish(timeout) for trainer in trainers]
    for result in results:
        assert "error" not in result, result
    return results


def trainers_of(stack: ExitStack, count: int, torch: bool = False) -> list[Trainer]:
    """Starts `count` trainers. They end with the stack."""
    trainers = []
    for _ in range(count):
        trainers.append(Trainer(torch))
        stack.callback(trainers[-1].kill)
    return trainers


def assemble(trainers: list[Trainer], sockets: list[str], run: str, group: int = 0) -> None:
    """Makes all trainers members of one group. Each uses the peerd at its own socket."""
    for trainer, path in zip(trainers, sockets):
        trainer.start("assemble", socket=path, run=run, group=group, size=len(trainers))
    for trainer in trainers:
        answer = trainer.finish()
        assert "error" not in answer, answer


def post(trainers: list[Trainer], ops: int, count: int, holder: Trainer | None = None, **options: Any) -> None:
    """Lets all trainers post `ops` ops at once. check() then takes the outcomes.

    With a holder there are HELD more ops. All trainers except the holder post these, too. So these ops stay in flight
    until release(), however fast the machine is.
    """
    held = HELD if holder is not None else 0
    for bit, trainer in enumerate(trainers):
        trainer.start("prepare", bit=bit, ops=ops + held, count=count)
    for trainer in trainers:
        assert "error" not in trainer.finish()
    for trainer in trainers:
        if trainer is holder:
            trainer.start("post_ops", ops=ops, **options)
        else:
            trainer.start("run_ops", members=MEMBERS_MAX, **options)


def release(holder: Trainer, **options: Any) -> None:
    """Lets the holder of post() post the ops that it held back."""
    answer = holder.finish()
    assert "error" not in answer, answer
    holder.start("run_ops", members=MEMBERS_MAX, **options)


def check(trainers: list[Trainer], ops: int, healthy: list[int]) -> list[list[dict[str, Any]]]:
    """Returns the outcomes of post(). Checks that every op ended well, with the exact sum over one set of members.

    The set is the same at all trainers, has the size that OpInfo names, and holds all healthy members.
    """
    answers: list[list[dict[str, Any]]] = [trainer.finish()["ops"] for trainer in trainers]
    for tag in range(ops):
        for answer in answers:
            op = answer[tag]
            assert "error" not in op, f"tag {tag}: {op}"
            assert op["participants"] is not None, f"tag {tag}: no set of members has this sum: {op}"
            assert len(op["participants"]) == op["world_size"], f"tag {tag}: {op}"
            assert set(op["participants"]) >= set(healthy), f"tag {tag}: {op}"
            assert op["participants"] == answers[0][tag]["participants"], f"tag {tag}: members differ"
    return answers


def kill_at_many_points(
    cluster: LocalCluster,
    survivors: list[Trainer],
    run: str,
    ops: int,
    count: int,
    points: int,
    seed: int,
    kill_trainer: bool = True,
    **options: Any,
) -> Iterator[list[list[dict[str, Any]]]]:
    """Kills a host at many points of concurrent ops. Checks the survivors' outcomes and yields them for each point.

    A first round without a kill measures how long the ops take here. The points are spread over that time. In each
    round a survivor holds HELD ops back until the host is dead. So each death hits ops in flight.
    """
    rng = random.Random(seed)
    healthy = list(range(len(survivors)))
    holder = survivors[-1]
    span = 0.0
    for point in range(-1, points):
        peer = cluster.add_peer()
        with ExitStack() as stack:
            trainers = [*survivors, *trainers_of(stack, 1)]
            sockets = [cluster.socket(i) for i in (*healthy, peer)]
            assemble(trainers, sockets, f"{run}-{point + 1}")
            if point < 0:
                post(trainers, ops, count, **options)
                begin = time.monotonic()
                answers = check(trainers, ops, [*healthy, len(healthy)])
                span = max(op["at"] for answer in answers for op in answer) - begin
            else:
                post(trainers, ops, count, holder, **options)
                time.sleep(span * (point + rng.random()) / points)
                cluster.kill_peer(peer)
                if kill_trainer:
                    trainers[-1].kill()
                release(holder, **options)
                answers = check(survivors, ops + HELD, healthy)
                for op in answers[0][ops:]:
                    assert op["participants"] == healthy, f"a member that died before all had posted took part: {op}"
                yield answers
            all_do(survivors, "leave")
        cluster.kill_peer(peer)
