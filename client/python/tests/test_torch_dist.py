"""The backend "longhaul" of torch.distributed: what its ranks get, compared with gloo."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys
from typing import Any

import pytest
import torch_dist_cases

from longhaul.testing import LocalCluster

_HERE = pathlib.Path(__file__).parent
_RANKS = 3


def _run_program(cluster: LocalCluster, name: str, *arguments: str) -> Any:
    """The JSON that a program of this directory prints at its end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment.pop("LONGHAUL_RUN", None)
    ended = subprocess.run(
        [sys.executable, str(_HERE / name), *arguments], env=environment, capture_output=True, text=True, timeout=500
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def problems(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str | None]]:
    """What was wrong at each rank, by case."""
    store = tmp_path_factory.mktemp("store") / "file"
    # Two ranks share a peerd.
    sockets = ",".join(cluster.socket(min(rank, 1)) for rank in range(_RANKS))
    ranks: list[dict[str, str | None]] = _run_program(cluster, "torch_dist_cases.py", str(store), sockets)
    for rank in ranks:
        assert isinstance(rank, dict), rank
    return ranks


@pytest.mark.parametrize("case", torch_dist_cases.CASES)
def test_a_program_gets_what_gloo_gives(problems: list[dict[str, str | None]], case: str) -> None:
    for rank, of_rank in enumerate(problems):
        assert of_rank[case] is None, f"rank {rank}: {of_rank[case]}"


# ------------------------------------------------------------------ deaths

_TRIES = ["abort:0", "abort:2", "abort:5", "retry:0", "retry:1", "defer:2", "defer:3", "outside:0", "mesh:1"]


@pytest.fixture(scope="module")
def tries(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the survivors of each training say."""
    sockets = ",".join(cluster.socket(rank) for rank in range(_RANKS))
    return _run_program(cluster, "torch_dist_faults.py", str(tmp_path_factory.mktemp("faults")), sockets, *_TRIES)


def _survivors(tries: Any, which: str) -> list[Any]:
    """Their results. The victim has none."""
    victim, results = tries[which]["victim"], tries[which]["results"]
    assert results.pop(victim) is None
    for result in results:
        assert not str(result).startswith("Traceback"), result
    return results  # type: ignore[no-any-return]


def _of(scenario: str) -> list[str]:
    return [which for which in _TRIES if which.startswith(scenario)]


@pytest.mark.parametrize("which", _of("abort"))
def test_after_a_death_every_survivor_gets_an_error_that_names_the_dead_rank(tries: Any, which: str) -> None:
    for told in _survivors(tries, which):
        assert "Connection closed by peer" in told["text"], told
        assert f"rank {tries[which]['victim']} (member m" in told["text"], told
        assert f"host {socket.gethostname()}" in told["text"], told
        assert told["seconds"] < 5, told  # 10 to 50 ms on an idle machine
        assert "Connection closed by peer" in told["again"], told


@pytest.mark.parametrize("which", _of("retry"))
def test_survivors_go_on_with_a_mean_over_those_that_are_left(tries: Any, which: str) -> None:
    first, second = _survivors(tries, which)
    for told in (first, second):
        assert told["wrong"] == [], told
        assert set(told["sizes"]) == {2, 3}, told
        assert told["size"] == 3
    assert first["sizes"] == second["sizes"]


@pytest.mark.parametrize("which", _of("defer"))
def test_deferred_errors_leave_a_sharded_module_usable(tries: Any, which: str) -> None:
    for told in _survivors(tries, which):
        assert len(told) == 6  # all steps went on
        assert "Connection closed by peer" in told[-1], told
        assert any(not text for text in told[:-1]) or "Connection closed by peer" in told[0]


def test_a_death_outside_a_group_does_not_disturb_it(tries: Any) -> None:
    for which in _of("outside"):
        assert _survivors(tries, which) == ["well", "well"]


def test_a_mesh_of_gloo_may_have_replicas_over_longhaul(tries: Any) -> None:
    for which in _of("mesh"):
        for told in _survivors(tries, which):
            assert (told["name"], told["world"]) == ("longhaul", "gloo"), told
            assert told["done"] > 0
            assert "Connection closed by peer" in told["text"], told
