"""Programs of bench/ that parse their options themselves say what these are."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

PROGRAMS = sorted(
    path
    for path in pathlib.Path(__file__).parent.glob("*.py")
    if "ArgumentParser(description=__doc__" in path.read_text() and path != pathlib.Path(__file__)
)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_help(program: pathlib.Path) -> None:
    done = subprocess.run([sys.executable, str(program), "--help"], capture_output=True, text=True, timeout=300)
    assert len(PROGRAMS) >= 15
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout
