"""Runs a sample of tests/chaos/matrix: every phase and every kind of death, in a world of three.

The variable LONGHAUL_FAULT_MATRIX gives the matrix other arguments, for instance "--full".
"""

from __future__ import annotations

import os
import pathlib
import subprocess

import pytest

pytestmark = pytest.mark.alone

MATRIX = pathlib.Path(__file__).parents[1] / "chaos" / "matrix"
SKIPPED = 77


def test_no_fault_in_any_phase_harms_a_healthy_member(tmp_path: pathlib.Path) -> None:
    arguments = os.environ.get("LONGHAUL_FAULT_MATRIX", "").split()
    done = subprocess.run([str(MATRIX), f"--logs={tmp_path}", *arguments], capture_output=True, text=True)
    if done.returncode == SKIPPED:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failed" in done.stdout
