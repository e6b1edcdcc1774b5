"""Tests that docs/python_api.md is what the docstrings say."""

from __future__ import annotations

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[3]


def test_the_page_is_up_to_date() -> None:
    done = subprocess.run([sys.executable, ROOT / "tools" / "python_api.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
