"""The screen of contributions: an event names the host that contributed wrong numbers, and no op changes."""

from __future__ import annotations

import json
import math
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from trainers import Trainer, assemble, trainers_of, until

from longhaul.testing import LocalCluster, find_binary

#: by algorithm: elements of a tensor
COUNTS = {"oneshot": 100, "mesh": 20_000, "ring": 20_000}


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


def sum_of(trainers: list[Trainer], algorithm: str, values: list[float]) -> list[float]:
    """The results of a sum to which each trainer contributes another value."""
    for trainer, value in zip(trainers, values):
        trainer.start("all_reduce", count=COUNTS[algorithm], value=value, algorithm=algorithm)
    results = [trainer.finish() for trainer in trainers]
    for result in results:
        assert "error" not in result and result["algorithm"] == algorithm, result
    return [result["first"] for result in results]


def wait_for_reports(cluster: LocalCluster, run: str, algorithm: str) -> list[dict[str, Any]]:
    """The events, when all hosts have reported that see the input of host 2."""
    # A host that owns nothing of the mesh sees its own input only.
    least = {"oneshot": 3, "mesh": 1, "ring": 1}[algorithm]
    until(lambda: len(suspects(cluster, run)) >= least, f"{least} hosts report")
    events = suspects(cluster, run)
    assert len({event["peer"] for event in events}) == len({event["member"] for event in events}) == 1
    assert len(reporters(events)) == len(events)
    return events


@pytest.mark.parametrize("algorithm", COUNTS)
def test_hosts_name_the_host_that_contributed_nan(cluster: LocalCluster, algorithm: str) -> None:
    run = "nan-" + algorithm
    with ExitStack() as stack:
        trainers = trainers_of(stack, 3)
        assemble(trainers, [cluster.socket(i) for i in range(3)], run)
        assert sum_of(trainers, algorithm, [1, 1, 1]) == [3, 3, 3]
        # The result is what the op says, also at the honest hosts.
        assert all(math.isnan(result) for result in sum_of(trainers, algorithm, [1, math.nan, 1]))
        events = wait_for_reports(cluster, run, algorithm)
        for event in events:
            assert " nan=0 " not in event["text"] and " inf=0 " in event["text"], event
            # In a ring nobody else sees the input.
            assert algorithm != "ring" or f"reporter={event['peer']} " in event["text"], event


def test_a_flood_of_nan_makes_few_events(cluster: LocalCluster) -> None:
    with ExitStack() as stack:
        trainers = trainers_of(stack, 3)
        assemble(trainers, [cluster.socket(i) for i in range(3)], "flood")
        begun = time.monotonic()
        for _ in range(50):
            sum_of(trainers, "oneshot", [1, math.nan, 1])
        # One for each reporter in ten seconds.
        intervals = 1 + (time.monotonic() - begun) // 10
        assert 3 <= len(suspects(cluster, "flood")) <= 3 * intervals


@pytest.mark.parametrize("algorithm", ["oneshot", "mesh"])
def test_hosts_name_the_host_whose_values_are_far_too_large(cluster: LocalCluster, algorithm: str) -> None:
    run = "large-" + algorithm
    with ExitStack() as stack:
        trainers = trainers_of(stack, 3)
        assemble(trainers, [cluster.socket(i) for i in range(3)], run)
        assert sum_of(trainers, algorithm, [1, 2, 1e6]) == [1_000_003] * 3
        for event in wait_for_reports(cluster, run, algorithm):
            assert 'norms="rms=1e+06 median=2 hosts=3"' in event["text"], event
            assert " nan=0 inf=0 " in event["text"], event


def test_ops_with_good_numbers_make_no_event(cluster: LocalCluster) -> None:
    before = sum(peer.metric("longhaul_peerd_contributions_suspect_total") for peer in cluster.peers)
    with ExitStack() as stack:
        trainers = trainers_of(stack, 3)
        assemble(trainers, [cluster.socket(i) for i in range(3)], "good")
        for algorithm in COUNTS:
            assert sum_of(trainers, algorithm, [1, 2, 90]) == [93] * 3
        assert suspects(cluster, "good") == []
    assert sum(peer.metric("longhaul_peerd_contributions_suspect_total") for peer in cluster.peers) == before


def test_the_screen_is_off_by_default() -> None:
    with LocalCluster(peers=3) as cluster, ExitStack() as stack:
        trainers = trainers_of(stack, 3)
        assemble(trainers, [cluster.socket(i) for i in range(3)], "off")
        sum_of(trainers, "oneshot", [1, math.nan, 1])
        assert sum_of(trainers, "oneshot", [1, 1, 1]) == [3, 3, 3]
        assert suspects(cluster, "off") == []
        assert [peer.metric("longhaul_peerd_contributions_suspect_total") for peer in cluster.peers] == [0, 0, 0]
