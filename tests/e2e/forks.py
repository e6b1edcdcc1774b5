"""Runs Python programs as forks of one process that has imported PyTorch already: importing it takes seconds."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pathlib
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "longhaul", "longhaul.torch", "sklearn.datasets", "transformers", "peft"])


class Fork:
    """A program that runs. What it prints goes to `log`."""

    def __init__(self, words: Sequence[str], settings: Mapping[str, str], log: pathlib.Path) -> None:
        self.log = log
        self._process = _CONTEXT.Process(target=_run, args=(list(words), dict(settings), str(log)))
        self._process.start()

    def succeeds(self, patience_s: float) -> str:
        """Waits for its end, and returns what it has printed. Fails unless its exit code is 0."""
        self._process.join(patience_s)
        assert self._process.exitcode == 0, self.log.read_text()
        return self.log.read_text()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


@contextlib.contextmanager
def forks(
    programs: Sequence[Sequence[str]], settings: Sequence[Mapping[str, str]], directory: pathlib.Path
) -> Iterator[list[Fork]]:
    """Runs programs in `directory`: each is a path and arguments, and has its settings (environment variables)."""
    started: list[Fork] = []
    try:
        for i, words in enumerate(programs):
            own = {**settings[i], "PWD": str(directory)}
            started.append(Fork(words, own, directory / f"program{i}.log"))
        yield started
    finally:
        for fork in started:
            fork.kill()


def _run(words: list[str], settings: dict[str, str], log: str) -> None:
    os.environ.update(settings)
    os.chdir(settings["PWD"])
    with open(log, "w", buffering=1) as sink, contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
        import torch

        torch.set_num_threads(1)  # more would only wait for each other's turn
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
