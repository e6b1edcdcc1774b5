"""Tests that bench/peerd_flags.py runs, on tensors so small that its figures mean nothing."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
# How long anything may take. A busy machine is not a failure.
PATIENCE_S = 600


@pytest.mark.parametrize("flag, names", [("io", ("uring", "epoll")), ("encryption", ("clear", "sealed"))])
def test_both_values_have_a_row_of_every_size(flag: str, names: tuple[str, str], tmp_path: pathlib.Path) -> None:
    path = tmp_path / "result.json"
    quick = [flag, "--peers=2", "--sizes=256,1M", "--rounds=2", "--round-seconds=0.01", "--quiet-within-s=0"]
    command = [sys.executable, str(HERE / "peerd_flags.py"), *quick, f"--json={path}", f"--log-dir={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(path.read_text())["rows"]
    assert {(row["bytes"], row["system"]) for row in rows} == {
        (size, name) for size in (256, 1 << 20) for name in names
    }
    for row in rows:
        assert 0 < row["p10_s"] <= row["median_s"] <= row["p90_s"]
        assert row["cpu_s_per_op"] > 0
    if flag != "io":
        return
    logs = [log.read_text() for log in tmp_path.glob("2-*/peerd-*.log")]
    assert sum("epoll of Linux" in log for log in logs) == 2
    assert sum("io_uring of Linux" in log for log in logs) == 2
