"""The backend "longhaul" of torch.distributed: what its ranks get, compared with gloo."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from longhaul.testing import LocalCluster

pytest.importorskip("torch", minversion="2.13")

import torch_dist_cases

_HERE = pathlib.Path(__file__).parent
_RANKS = 3


def _run_program(cluster: LocalCluster, name: str, *arguments: str) -> Any:
    """The JSON that a program of this directory prints at its end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment.pop("LONGHAUL_RUN", None)
    ended = subprocess.run(
        [sys.executable, str(_HERE / name), *arguments], env=environment, capture_output=True, text=True, timeout=170
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
