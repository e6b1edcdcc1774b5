"""Trainer processes under a test's control."""

from __future__ import annotations

import json
import pathlib
import queue
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from typing import Any

WORKER = pathlib.Path(__file__).with_name("worker.py")


class Trainer:
    """One worker.py process. `do()` asks and waits; `start()` and `finish()` do so in two steps."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-u", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def start(self, name: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": name, **arguments}) + "\n")
        self.process.stdin.flush()

    def finish(self, timeout: float = 90) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise AssertionError(f"trainer {self.process.pid} gave no answer in {timeout} s: a hang") from None
        assert line is not None, f"trainer {self.process.pid} died"
        result: dict[str, Any] = json.loads(line)
        return result

    def idle(self) -> bool:
        """Whether no answer has come yet."""
        return self._lines.empty()

    def do(self, name: str, timeout: float = 90, **arguments: Any) -> dict[str, Any]:
        self.start(name, **arguments)
        result = self.finish(timeout)
        assert "error" not in result, result
        return result

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self.kill()


def all_do(trainers: list[Trainer], name: str, timeout: float = 90, **arguments: Any) -> list[dict[str, Any]]:
    """The same command at all of them at once."""
    for trainer in trainers:
        trainer.start(name, **arguments)
    results = [trainer.finish(timeout) for trainer in trainers]
    for result in results:
        assert "error" not in result, result
    return results


def trainers_of(stack: ExitStack, count: int) -> list[Trainer]:
    """Fresh ones, which end with the stack."""
    trainers = []
    for _ in range(count):
        trainers.append(Trainer())
        stack.callback(trainers[-1].kill)
    return trainers
