"""Runs the programs in client/examples at small size, as their first lines say."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import subprocess
from collections.abc import Sequence

import pytest

from longhaul.testing import LocalCluster

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = ROOT / "client" / "examples"
PATIENCE_S = 120


def run_all(cluster: LocalCluster, commands: Sequence[Sequence[str]]) -> list[str]:
    """Runs one program at each peer of the cluster, and returns what they print."""
    with contextlib.ExitStack() as stack:
        programs = []
        for i, command in enumerate(commands):
            environment = {**os.environ, "LONGHAUL_SOCKET": cluster.socket(i)}
            program = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            stack.callback(program.kill)
            programs.append(program)
        outputs = []
        for program in programs:
            out, problems = program.communicate(timeout=PATIENCE_S)
            assert program.returncode == 0, out + problems
            outputs.append(out)
        return outputs


@pytest.mark.parametrize("source", ["c/regression.c", "cpp/regression.cc"])
def test_the_native_examples_agree_on_the_weights(tmp_path: pathlib.Path, source: str) -> None:
    compiler = shutil.which("c++" if source.endswith(".cc") else "cc")
    if compiler is None:
        pytest.skip("no C or C++ compiler here")
    standard = "-std=c++17" if source.endswith(".cc") else "-std=c99"
    library = ROOT / "out" / "lib"
    program = tmp_path / "regression"
    flags = [standard, "-Wall", "-Wextra", "-Werror", f"-I{ROOT}/out/include"]
    link = [f"-L{library}", f"-Wl,-rpath,{library}", "-llonghaul", "-o", str(program)]
    subprocess.check_call([compiler, *flags, str(EXAMPLES / source), *link])
    with LocalCluster(peers=2) as cluster:
        lines = run_all(cluster, [[str(program), "200", seed, "2"] for seed in ("1", "2")])
    weights = [line.rpartition(" weights ")[2] for line in lines]
    assert weights[0] == weights[1]
    first, second = (float.fromhex(number) for number in weights[0].split())
    assert abs(first - 3) < 0.1
    assert abs(second + 1) < 0.1
    assert all(line.startswith("200 steps, ") for line in lines)
