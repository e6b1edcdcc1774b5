"""Shows the progress of a fetch on stderr: with tqdm if it is installed, else with a bar of our own."""

from __future__ import annotations

import sys
from typing import Any

from ._sync_info import Progress


class Bar:
    """Shows the progress of a fetch as one line on stderr."""

    def __init__(self) -> None:
        self._shown = False

    def __call__(self, progress: Progress) -> None:
        total = max(1, progress.bytes_total)
        done = min(progress.bytes_done, total)
        filled = 24 * done // total
        left = (total - done) / progress.bytes_per_second if progress.bytes_per_second else 0.0
        line = (
            f"state [{'#' * filled}{'.' * (24 - filled)}] {100 * done // total:3d} % of {_size(total)}, "
            f"{_size(progress.bytes_per_second)}/s from {progress.sources}, {left:.0f} s left"
        )
        # A terminal shows the latest line only. In a log, close() writes one line at the end.
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{line:<78}")
            sys.stderr.flush()
        self._line = line
        self._shown = True

    def close(self) -> None:
        if not self._shown:
            return
        sys.stderr.write("\n" if sys.stderr.isatty() else self._line + "\n")
        self._shown = False


def _size(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


class TqdmBar:
    """Shows the progress of a fetch with tqdm, in a notebook as a widget. tqdm: the class."""

    def __init__(self, tqdm: Any) -> None:
        self._tqdm = tqdm
        self._bar: Any = None

    def __call__(self, progress: Progress) -> None:
        if self._bar is None:
            self._bar = self._tqdm(desc="state", total=progress.bytes_total, unit="B", unit_scale=True)
        self._bar.total = progress.bytes_total
        self._bar.set_postfix(sources=progress.sources, refresh=False)
        self._bar.update(min(progress.bytes_done, progress.bytes_total) - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class Shown:
    """What progress=True means. Imports tqdm when the first progress is told: most syncs fetch nothing."""

    def __init__(self) -> None:
        self._bar: Bar | TqdmBar | None = None

    def __call__(self, progress: Progress) -> None:
        if self._bar is None:
            self._bar = _made()
        self._bar(progress)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _made() -> Bar | TqdmBar:
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return Bar()
    return TqdmBar(tqdm)
