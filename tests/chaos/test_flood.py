"""A short flood in each mode: see flood.py."""

from __future__ import annotations

import os
import pathlib

import pytest
from flood import flood, parser

pytestmark = pytest.mark.alone


@pytest.mark.parametrize("mode", ["clear", "sealed"])
def test_members_do_not_notice_a_flood(mode: str, tmp_path: pathlib.Path) -> None:
    # So short a time says little about speed.
    short = ["--seconds=3", "--rounds=1", "--connections=100", "--connects=150", "--bytes=1e6", "--ratio=0.3"]
    report = flood(mode, parser().parse_args([*short, f"--seed={os.environ.get('LONGHAUL_SEED', '1')}"]), tmp_path)
    assert not report["failures"], report


def test_a_lack_of_descriptors_shuts_no_port(tmp_path: pathlib.Path) -> None:
    few = ["--seconds=3", "--rounds=1", "--connections=300", "--connects=300", "--bytes=1e6", "--ratio=0", "--files=90"]
    report = flood("clear", parser().parse_args(few), tmp_path)
    assert not report["failures"], report
    assert "file descriptors run out" in (tmp_path / "coordinator.log").read_text()
