"""The Python example at the top of the README runs as it stands."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

from longhaul.testing import LocalCluster

README = pathlib.Path(__file__).parents[2] / "README.md"


def test_every_word_has_one_meaning() -> None:
    table = (README.parent / "docs" / "concepts.md").read_text().split("\n## ")[0]
    words = [
        word for row in re.findall(r"^\| (.*?) \|", table, re.MULTILINE) for word in re.findall(r"\*\*(.*?)\*\*", row)
    ]
    assert len(words) > 20
    assert sorted(words) == sorted(set(words))


def test_the_example_of_the_readme_runs(tmp_path: pathlib.Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 1
    script = tmp_path / "trainer.py"
    script.write_text(blocks[0])
    with LocalCluster(peers=2) as cluster:
        trainers = [
            subprocess.Popen(
                [sys.executable, str(script)],
                env={**os.environ, "LONGHAUL_SOCKET": cluster.socket(i)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for i in range(2)
        ]
        for trainer in trainers:
            out, err = trainer.communicate(timeout=90)
            assert trainer.returncode == 0, err
            assert out.count("step ") == 10, out
