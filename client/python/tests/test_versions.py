"""The package runs on every Python that its wheel says it does, down to the oldest."""

from __future__ import annotations

import ast
import os
import pathlib
import re
import shutil
import subprocess

import pytest

import longhaul as lh
from longhaul.testing import LocalCluster

PACKAGE = pathlib.Path(lh.__file__).parent
# (function, argument): arguments that a later Python added. An older one fails only when the call is made.
LATER = {("dataclass", "slots"), ("dataclass", "kw_only"), ("field", "kw_only"), ("zip", "strict")}


def oldest() -> tuple[int, int]:
    text = (PACKAGE.parents[1] / "pyproject.toml").read_text()
    found = re.search(r'requires-python = ">=(\d+)\.(\d+)"', text)
    assert found
    return int(found[1]), int(found[2])


def name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.name)
def test_the_sources_are_of_the_oldest_python(path: pathlib.Path) -> None:
    tree = ast.parse(path.read_text(), str(path), feature_version=oldest())
    used = {
        (name_of(node.func), keyword.arg)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
    }
    assert not used & LATER


def test_the_oldest_python_imports_and_joins(cluster: LocalCluster) -> None:
    name = "python{}.{}".format(*oldest())
    interpreter = shutil.which(name)
    if interpreter is None or subprocess.run([interpreter, "-c", ""], capture_output=True).returncode != 0:
        pytest.skip(f"no {name} here")
    code = """
import longhaul as lh
import longhaul.bench, longhaul._checkpoint, longhaul._digest, longhaul.testing
with lh.join('oldest') as comm:
    print(comm.begin_step().world_size)
"""
    process = subprocess.run(
        [interpreter, "-c", code],
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent), "LONGHAUL_SOCKET": cluster.socket(0)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.stdout == "1\n", process.stderr
