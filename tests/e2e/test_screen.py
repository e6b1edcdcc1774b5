"""The screen of contributions: an event names the host that contributed wrong numbers, and no op changes."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from trainers import Trainer, assemble, trainers_of, until

from longhaul.testing import LocalCluster, find_binary

#: by algorithm: elements of a tensor that goes that way
COUNTS = {"oneshot": 100, "mesh": 20_000}


def screening() -> LocalCluster:
    return LocalCluster(peers=3, peerd_flags=("--screen-contributions",))


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with screening() as started:
        yield started


def suspects(cluster: LocalCluster, run: str) -> list[dict[str, Any]]:
    command = [str(find_binary("lhctl")), f"--coordinator={cluster.admin}", "events", run, "--json"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == "contribution_suspect"]


def reporters(events: list[dict[str, Any]]) -> set[str]:
    return {word for event in events for word in event["text"].split() if word.startswith("reporter=")}


def sum_of(trainers: list[Trainer], count: int, values: list[float]) -> list[float]:
    """The results of a sum to which each trainer contributes another value."""
    for trainer, value in zip(trainers, values):
        trainer.start("all_reduce", count=count, value=value)
    results = [trainer.finish() for trainer in trainers]
    for result in results:
        assert "error" not in result, result
    return [result["first"] for result in results]


@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS.keys())
def test_all_hosts_name_the_host_that_contributed_nan(
    cluster: LocalCluster, count: int, request: pytest.FixtureRequest
) -> None:
    run = "nan-" + request.node.callspec.id
    with ExitStack() as stack:
        trainers = trainers_of(stack, 3)
        assemble(trainers, [cluster.socket(i) for i in range(3)], run)
        assert sum_of(trainers, count, [1, 1, 1]) == [3, 3, 3]
        # The result is what the op says, also at the honest hosts.
        assert all(math.isnan(result) for result in sum_of(trainers, count, [1, math.nan, 1]))
        until(lambda: len(suspects(cluster, run)) == 3, "each host reports the one with NaN")
        events = suspects(cluster, run)
        assert len(reporters(events)) == 3
        assert len({event["peer"] for event in events}) == 1
        assert len({event["member"] for event in events}) == 1
        for event in events:
            assert " nan=0 " not in event["text"] and " inf=0 " in event["text"], event
        # A flood of them is one event for each pair in ten seconds.
        for _ in range(20):
            sum_of(trainers, count, [1, math.nan, 1])
        assert len(suspects(cluster, run)) <= 6


@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS.keys())
def test_all_hosts_name_the_host_whose_values_are_far_too_large(
    cluster: LocalCluster, count: int, request: pytest.FixtureRequest
) -> None:
    run = "large-" + request.node.callspec.id
    with ExitStack() as stack:
        trainers = trainers_of(stack, 3)
        assemble(trainers, [cluster.socket(i) for i in range(3)], run)
        assert sum_of(trainers, count, [1, 2, 1e6]) == [1_000_003] * 3
        until(lambda: len(suspects(cluster, run)) == 3, "each host reports the one with large values")
        events = suspects(cluster, run)
        assert len({event["peer"] for event in events}) == 1
        for event in events:
            assert 'norms="rms=1e+06 median=2 hosts=3"' in event["text"], event
            assert " nan=0 inf=0 " in event["text"], event


def test_ops_with_good_numbers_make_no_event(cluster: LocalCluster) -> None:
    before = sum(peer.metric("longhaul_peerd_contributions_suspect_total") for peer in cluster.peers)
    with ExitStack() as stack:
        trainers = trainers_of(stack, 3)
        assemble(trainers, [cluster.socket(i) for i in range(3)], "good")
        for count in COUNTS.values():
            assert sum_of(trainers, count, [1, 2, 90]) == [93] * 3
        assert suspects(cluster, "good") == []
    assert sum(peer.metric("longhaul_peerd_contributions_suspect_total") for peer in cluster.peers) == before


def test_the_screen_is_off_by_default() -> None:
    with LocalCluster(peers=3) as cluster, ExitStack() as stack:
        trainers = trainers_of(stack, 3)
        assemble(trainers, [cluster.socket(i) for i in range(3)], "off")
        sum_of(trainers, 100, [1, math.nan, 1])
        assert sum_of(trainers, 100, [1, 1, 1]) == [3, 3, 3]
        assert suspects(cluster, "off") == []
        assert [peer.metric("longhaul_peerd_contributions_suspect_total") for peer in cluster.peers] == [0, 0, 0]
