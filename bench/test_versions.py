"""Tests that bench/versions.py runs, with one build on both sides, on tensors so small that its figures mean nothing."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
# How long anything may take. A busy machine is not a failure.
PATIENCE_S = 600


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / "versions.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)


def test_both_builds_have_a_row_of_every_size_and_variant(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "result.json"
    quick = [
        "--peers=2",
        "--sizes=256,64K",
        "--rounds=2",
        "--round-seconds=0.01",
        "--variants=arena,sixteen",
        "--quiet-within-s=0",
    ]
    done = run(f"--against={HERE.parent}", *quick, "--no-rivals", f"--json={path}", f"--log-dir={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(path.read_text())["rows"]
    assert {(row["bytes"], row["system"], row["variant"]) for row in rows} == {
        (size, build, variant)
        for size in (256, 64 << 10)
        for build in ("there", "here")
        for variant in ("arena", "sixteen")
    }
    assert all(0 < row["p10_s"] <= row["median_s"] <= row["p90_s"] for row in rows)


def test_a_checkout_that_is_not_built_is_refused(tmp_path: pathlib.Path) -> None:
    done = run(f"--against={tmp_path}")
    assert done.returncode == 2
    assert f"no {tmp_path}/out/bin; build that checkout with tools/build" in done.stderr
