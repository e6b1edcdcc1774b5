"""What strangers cost the coordinator in memory: see stranger_memory.py."""

from __future__ import annotations

import pathlib

import pytest
from stranger_memory import WAYS, measure

pytestmark = pytest.mark.alone


@pytest.mark.parametrize("tls", [False, True], ids=["clear", "sealed"])
@pytest.mark.parametrize("way", WAYS)
def test_strangers_cost_little_memory_whatever_they_send(way: str, tls: bool, tmp_path: pathlib.Path) -> None:
    report = measure(way, tls, seconds=5, logs=tmp_path)
    assert not report["failures"], report
