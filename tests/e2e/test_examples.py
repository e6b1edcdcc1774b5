"""Runs the programs in client/examples at small size, as their first lines say."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Sequence

import pytest
from forks import forks

from longhaul.testing import LocalCluster

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = ROOT / "client" / "examples"
PATIENCE_S = 120


def run_all(cluster: LocalCluster, commands: Sequence[Sequence[str | os.PathLike[str]]]) -> list[str]:
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


TORCH_EXAMPLES = {
    "bare_loop": ["bare_loop.py", "--steps=20"],
    "ddp": ["ddp.py", "--epochs=1"],
    "gpt-diloco": ["gpt_diloco.py", "--method=diloco", "--rounds=2", "--sync-every=4"],
    "gpt-sparse": ["gpt_diloco.py", "--method=sparse", "--rounds=2", "--sync-every=4"],
    "gpt-async": ["gpt_diloco.py", "--method=async", "--rounds=2", "--sync-every=4"],
    "gpt-streaming": ["gpt_diloco.py", "--method=streaming", "--rounds=2", "--sync-every=8"],
    "lora": ["lora.py", "--rounds=2", "--sync-every=2"],
}


@pytest.mark.parametrize("name", TORCH_EXAMPLES)
def test_the_pytorch_examples_agree_on_the_state(tmp_path: pathlib.Path, name: str) -> None:
    file, *options = TORCH_EXAMPLES[name]
    words = [str(EXAMPLES / file), *options, "--members=2"]
    with LocalCluster(peers=2) as cluster:
        settings = [{"LONGHAUL_SOCKET": cluster.socket(i)} for i in range(2)]
        with forks([words, words], settings, tmp_path) as programs:
            outputs = [program.succeeds(PATIENCE_S) for program in programs]
    states = [re.findall(r"state (\w{32})$", output, re.MULTILINE) for output in outputs]
    assert len(states[0]) == 1
    assert states[0] == states[1]


def test_the_notebook_runs() -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(EXAMPLES / "first_steps.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=PATIENCE_S, kernel_name="python3").execute()
    outputs = [
        output["data"]["text/plain"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "data" in output
    ]
    assert len(outputs) == 4
    assert "array([0.5, 0.5, 0.5, 0.5], dtype=float32), 2)" in outputs[2]
