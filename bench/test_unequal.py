"""Tests of what bench/unequal.py computes. They start nothing."""

from __future__ import annotations

import pytest
from unequal import adapted, bound
from workers import MIB


def rates(*mbit: float) -> list[tuple[float, float]]:
    return [(each, each) for each in mbit]


def seconds_of(tensors: float, mbit: float) -> float:
    return tensors * MIB * 8 / 1e6 / mbit


def test_equal_hosts_send_as_much_as_in_a_ring() -> None:
    assert bound(rates(100, 100, 100, 100), 1) == pytest.approx(seconds_of(1.5, 100))


def test_a_slow_host_owns_less() -> None:
    # The last host sends its input and what it owns, w, twice. The rest owns (1 - w) / 3 each.
    # (1 + 2 w) / 70 = (1 + 2 (1 - w) / 3) / 100
    share = (70 * (1 + 2 / 3) - 100) / (200 + 140 / 3)
    assert bound(rates(100, 100, 100, 70), 1) == pytest.approx(seconds_of(1 + 2 * share, 70))


def test_a_host_that_owns_nothing_sends_its_input() -> None:
    assert bound([(100.0, 100.0)] * 7 + [(20.0, 100.0)], 1) == pytest.approx(seconds_of(1, 20))


def test_ops_have_adapted_when_two_in_a_row_are_fast() -> None:
    assert adapted([1, 5, 2, 5, 2, 2], within=3) == 4
    assert adapted([1, 1, 1], within=3) == 1  # the first one is the op during the change
    assert adapted([1, 5, 2], within=3) is None
    assert adapted([1], within=3) is None
