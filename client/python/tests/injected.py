"""Exceptions at any line of the package: what out of memory, Ctrl-C and bugs do to a call, one line at a time."""

from __future__ import annotations

import linecache
import pathlib
import sys
import types
from collections.abc import Callable
from typing import Any

import longhaul

_PACKAGE = str(pathlib.Path(longhaul.__file__).parent)

KINDS: tuple[type[BaseException], ...] = (RuntimeError, MemoryError, KeyboardInterrupt)


class Injected(Exception):
    """Mixed into the exceptions raised here, so that no test takes another one for them."""


_RAISED = {
    kind: type(f"Injected{kind.__name__}", (Injected, kind), {}) for kind in KINDS if kind is not KeyboardInterrupt
}


class Injector:
    """Raises an exception when a call in this thread has executed `at` lines of the package. at None: counts them only.

    within: names of functions of the package. Only their lines count, and those of what they call. Lines of finalizers do
    not count, because Python drops their exceptions.
    """

    def __init__(self, at: int | None, kind: type[BaseException], within: tuple[str, ...]) -> None:
        self._at = at
        self._kind = _RAISED.get(kind, kind)
        self._within = within
        self._latest: dict[types.FrameType, int] = {}
        self.lines = 0
        self.place = ""  #: where the exception was raised; empty: nowhere

    def stop(self) -> None:
        """Raises nothing from now on."""
        self._at = None

    def run(self, call: Callable[[], Any]) -> BaseException | None:
        """Runs the call. Returns its exception."""
        sys.settrace(self._enter)
        try:
            call()
        except (longhaul.Error, Injected, KeyboardInterrupt) as problem:
            return problem
        finally:
            sys.settrace(None)
        return None

    def _enter(self, frame: types.FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(_PACKAGE) or self.place:
            return None
        names = set()
        each: types.FrameType | None = frame
        while each is not None:
            if each.f_code.co_filename.endswith("weakref.py") and each.f_code.co_name == "__call__":
                return None
            if each.f_code.co_filename.startswith(_PACKAGE):
                names.add(each.f_code.co_name)
            each = each.f_back
        if names.isdisjoint(self._within):
            return None
        self._latest[frame] = 0
        return self._line

    def _line(self, frame: types.FrameType, event: str, argument: object) -> Any:
        if event == "return":
            self._latest.pop(frame, None)
        if event != "line" or self.place:
            return self._line
        before, self._latest[frame] = self._latest.get(frame, 0), frame.f_lineno
        source = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        # Python itself raises nothing at these: a `try:`, which handlers around it do not cover, and the line of a `with`
        # again, at the end of its block.
        if source.startswith("try:") or (frame.f_lineno < before and source.startswith("with ")):
            return self._line
        self.lines += 1
        if self._at is not None and self.lines > self._at:
            self.place = f"{pathlib.Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            raise self._kind(f"at line {self._at} of the call, {self.place}")
        return self._line
