"""What a call says while it waits."""

from __future__ import annotations

import pytest

from longhaul._waiting import EVERY_S, FIRST_S, PEERD_S, Waiting


def test_a_line_comes_after_a_while_and_then_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    asked: list[float] = []

    def why() -> str:
        asked.append(now[0])
        return "2 of 3 have come"

    waiting = Waiting("begin_step", now=lambda: now[0])
    while now[0] < 100 + 3 * EVERY_S:
        waiting.look(why)
        now[0] += 0.5
    assert asked == [100 + FIRST_S, 100 + FIRST_S + EVERY_S, 100 + FIRST_S + 2 * EVERY_S]
    assert [(each.name, each.levelname, each.getMessage()) for each in caplog.records] == [
        ("longhaul", "WARNING", f"begin_step has waited for {after:.0f} s: 2 of 3 have come")
        for after in (FIRST_S, FIRST_S + EVERY_S, FIRST_S + 2 * EVERY_S)
    ]


def test_a_short_wait_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    waiting = Waiting("begin_step", first=PEERD_S, now=lambda: now[0])
    now[0] = PEERD_S - 0.1
    waiting.look(lambda: "never asked")
    assert caplog.text == ""
