"""`python -m longhaul.bench`, on tensors so small that its figures mean nothing."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from longhaul.testing import LocalCluster

BENCH = [sys.executable, "-m", "longhaul.bench"]
QUICK = ["--sizes=256,4K", "--seconds=0.01"]


def test_it_measures_on_this_machine(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "result.json"
    command = [*BENCH, "--peers=3", *QUICK, "--memory=arena,plain", "--algorithm=ring", f"--json={path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())["rows"]
    assert [(row["bytes"], row["memory"]) for row in rows] == [
        (256, "arena"),
        (256, "plain"),
        (4096, "arena"),
        (4096, "plain"),
    ]
    for row in rows:
        assert row["world_size"] == 3
        assert row["algorithm"] == "ring"
        assert row["busbw"] == pytest.approx(row["algbw"] * 4 / 3)
    # Only one member prints: a heading of two lines, then one line for each row.
    assert len(done.stdout.splitlines()) == 2 + len(rows)


def test_members_of_a_run_measure_together(cluster: LocalCluster, tmp_path: pathlib.Path) -> None:
    members = [
        subprocess.Popen(
            [
                *BENCH,
                "--run=bench-1",
                f"--peerd={cluster.socket(i)}",
                "--world-size=2",
                *QUICK,
                f"--json={tmp_path}/{i}",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    for member in members:
        _, errors = member.communicate(timeout=180)
        assert member.returncode == 0, errors
    # Every member reports the times of the slowest one.
    assert json.loads((tmp_path / "0").read_text())["rows"] == json.loads((tmp_path / "1").read_text())["rows"]


def test_a_member_alone_says_whom_it_waits_for(cluster: LocalCluster) -> None:
    command = [*BENCH, "--run=bench-2", f"--peerd={cluster.socket(0)}", "--world-size=2", "--timeout=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "only 1 of 2 members joined in 2 s" in done.stderr


def test_a_wrong_call_is_refused() -> None:
    for wrong, why in (
        (["--run=x"], "--world-size"),
        (["--peerd=/x"], "needs --run"),
        (["--sizes=6"], "float32, so give a multiple"),
    ):
        done = subprocess.run([*BENCH, *wrong], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert why in done.stderr
