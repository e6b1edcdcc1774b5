"""Processes that carry out orders. Several benchmarks use this.

For each member a benchmark starts its own program again as a worker. So each member has an interpreter of its own, like
a real trainer. Orders and answers are lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import selectors
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

# A worker that says nothing for this long has failed. This is longer than a worker's own timeout for an op.
PATIENCE_S = 190
MIB = 1 << 20


class Failure(Exception):
    """The measurement cannot go on. The text says why."""


class Line:
    """Sends and receives lines to and from another process. The caller keeps the descriptors and closes them.

    Errors use the name of the process, and its exit code if it is a child of this process.
    """

    def __init__(self, name: str, reads: int, writes: int, process: subprocess.Popen[bytes] | None = None) -> None:
        self.name = name
        self.process = process
        self._reads = reads
        self._writes = writes
        self._rest = b""

    def send(self, text: str) -> None:
        data = text.encode() + b"\n"
        while data:
            try:
                data = data[os.write(self._writes, data) :]
            except (BrokenPipeError, ConnectionResetError):
                raise self._ended() from None

    def receive(self, patience: float = PATIENCE_S) -> str:
        """Waits for the next line. Failure: the other end has closed, or sent nothing for too long."""
        deadline = time.monotonic() + patience
        with selectors.DefaultSelector() as selector:
            selector.register(self._reads, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0, deadline - time.monotonic())):
                    raise Failure(f"{self.name} gave no answer in {patience:g} s: a hang")
                try:
                    piece = os.read(self._reads, 1 << 16)
                except ConnectionResetError:
                    piece = b""
                if not piece:
                    raise self._ended()
                self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def _ended(self) -> Failure:
        code = ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = "" if self.process is None else f" with {self.process.wait(10)}"
        return Failure(f"{self.name} ended{code} (its errors are above)")


# ---------------------------------------------------------------------------- trainers


def work(worker: Any) -> None:
    """Carries out orders from standard input. Each names a method of `worker` and the arguments."""
    import longhaul as lh

    for line in sys.stdin:
        order = json.loads(line)
        try:
            value = getattr(worker, order.pop("do"))(**order)
        except (lh.Error, Failure, OSError) as problem:
            value = {"error": f"{type(problem).__name__}: {problem}"}
        print(json.dumps(value), flush=True)


class Trainer:
    """A process that runs `program --worker`, which calls work().

    namespace: the network namespace in which it runs. options: further arguments of subprocess.Popen.
    """

    def __init__(self, program: str, namespace: str = "", python: str = sys.executable, **options: Any) -> None:
        from longhaul.testing import start_tethered

        inside = [shutil.which("ip") or "ip", "netns", "exec", namespace] if namespace else []
        command = [*inside, python, str(pathlib.Path(program).resolve()), "--worker"]
        self.process = start_tethered(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options)
        assert self.process.stdin is not None and self.process.stdout is not None
        pipes = (self.process.stdout.fileno(), self.process.stdin.fileno())
        self.line = Line(f"trainer {self.process.pid}", *pipes, self.process)

    def start(self, do: str, **order: Any) -> None:
        self.line.send(json.dumps({"do": do, **order}))

    def finish(self) -> Any:
        """Waits for the answer. Failure: the answer is an error, or there is none in time."""
        value = json.loads(self.line.receive())
        if isinstance(value, dict) and "error" in value:
            raise Failure(value["error"])
        return value

    def do(self, what: str, **order: Any) -> Any:
        self.start(what, **order)
        return self.finish()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def finish_all(trainers: Sequence[Trainer]) -> list[Any]:
    return [trainer.finish() for trainer in trainers]


def meet(trainers: Sequence[Trainer], sockets: Sequence[str], run: str) -> None:
    """All trainers join one group of the run, each at the peerd of its socket."""
    for trainer, socket in zip(trainers, sockets):
        trainer.start("meet", peerd=socket, run=run, size=len(trainers))
    finish_all(trainers)


@contextlib.contextmanager
def team(program: str, count: int) -> Iterator[list[Trainer]]:
    trainers = [Trainer(program) for _ in range(count)]
    try:
        yield trainers
    finally:
        for trainer in trainers:
            trainer.kill()


class Member:
    """The base of workers that are members of a run."""

    # An op or a boundary has failed if it takes longer.
    PATIENCE_S = 120

    def __init__(self) -> None:
        import numpy

        import longhaul

        self.lh = longhaul
        self.np = numpy
        self.comm: Any = None

    def meet(self, peerd: str, run: str, size: int) -> None:
        """Joins together with the others."""
        self.comm = self.lh.join(run=run, peerd=peerd, timeout=self.PATIENCE_S, members=size)
        self.comm.all_reduce(self.np.zeros(1, "float32"), tag=1 << 40, timeout=self.PATIENCE_S)
