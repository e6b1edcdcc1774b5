"""Runs the tutorial in a clean virtual environment, both machines on this one.

Its ports become free ones, and it trains until it is killed. By default PyTorch and scikit-learn come from the
environment of the tests. LONGHAUL_TUTORIAL=full installs them as the page says (some minutes).
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable

import pytest
from test_wheels import PATIENCE_S, ROOT, Environment, wheels  # noqa: F401
from trainers import free_port

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
SHELL = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
FULL = os.environ.get("LONGHAUL_TUTORIAL") == "full"
FOREVER = "1000000000"


class Terminal:
    """Commands of the tutorial in one environment."""

    def __init__(self, directory: pathlib.Path, packages: pathlib.Path) -> None:
        self.directory = directory
        self.port, self.admin = free_port(), free_port()
        (directory / "wheels").symlink_to(packages)

    def start(self, stack: contextlib.ExitStack, block: str, name: str) -> Program:
        block = block.replace("0.0.0.0", "127.0.0.1").replace("29600", str(self.port))
        block = block.replace("train.py 300", f"train.py {FOREVER}")
        log = self.directory / f"{name}.log"
        with open(log, "wb") as sink:
            process = subprocess.Popen(
                ["bash", "-e", "-c", f". longhaul/bin/activate\nexec env {block}"],
                cwd=self.directory,
                stdout=sink,
                stderr=sink,
                env={key: value for key, value in os.environ.items() if not key.startswith("LONGHAUL_")},
                start_new_session=True,
            )
        program = Program(process, log)
        stack.callback(program.kill)
        return program


class Program:
    def __init__(self, process: subprocess.Popen[bytes], log: pathlib.Path) -> None:
        self.process = process
        self.log = log

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def steps(self) -> dict[int, tuple[int, str]]:
        """By number of the step: members, and the hash at its begin."""
        lines = re.findall(r"^step (\d+) .* members (\d+)  (\w+)$", self.log.read_text(), re.MULTILINE)
        return {int(step): (int(members), digest) for step, members, digest in lines}

    def until(self, condition: Callable[[dict[int, tuple[int, str]]], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition(self.steps()):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)


@pytest.fixture
def terminal(wheels: pathlib.Path, tmp_path: pathlib.Path) -> Terminal:  # noqa: F811
    return Terminal(tmp_path, wheels)


def lasts(members: int) -> Callable[[dict[int, tuple[int, str]]], bool]:
    """The three newest steps had this many members."""
    return lambda steps: len(steps) > 3 and all(steps[number][0] == members for number in sorted(steps)[-3:])


def install(terminal: Terminal) -> None:
    lines = SHELL[0].splitlines()
    if not FULL:
        # PyTorch and the rest from the environment of the tests; the wheels are clean.
        Environment(terminal.directory / "longhaul", f"{sys.version_info[0]}.{sys.version_info[1]}")
        (site,) = (terminal.directory / "longhaul").glob("lib/python*/site-packages")
        (site / "tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
        pip = f"{sys.executable} -m pip --python longhaul/bin/python"
        lines = [re.sub(r"^pip", pip, line) + " --force-reinstall --no-deps" for line in lines if "wheels" in line]
        lines = [line.replace('"longhaul[', 'longhaul-daemons "longhaul[') for line in lines]
    constraints = {"PIP_CONSTRAINT": str(ROOT / "tools" / "requirements.txt")}
    done = subprocess.run(
        ["bash", "-e", "-c", "\n".join(lines)],
        cwd=terminal.directory,
        env={**os.environ, **constraints},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_tutorial(terminal: Terminal) -> None:
    began = time.monotonic()
    install(terminal)
    _, coordinator, train, _, status = SHELL
    with contextlib.ExitStack() as stack:
        admin = f"127.0.0.1:{terminal.admin}"
        terminal.start(stack, f"{coordinator.strip()} --admin={admin}", "coordinator")
        (terminal.directory / "train.py").write_text(PYTHON[0])
        one = terminal.start(stack, train, "one")
        one.until(lasts(1))
        two = terminal.start(stack, train, "two")
        two.until(lasts(2))
        both = one.steps().keys() & two.steps().keys()
        assert both
        assert all(one.steps()[number] == two.steps()[number] for number in both)
        two.kill()
        one.until(lasts(1))
        again = terminal.start(stack, train, "again")
        again.until(lasts(2))
        assert min(again.steps()) > max(two.steps())  # it goes on, and does not begin anew
        asked = terminal.start(stack, f"{status.strip()} --coordinator={admin}", "status")
        assert asked.process.wait(PATIENCE_S) == 0
        assert "tutorial" in asked.log.read_text()
        # Step 7: another loop, in another run.
        loop = PYTHON[0][: PYTHON[0].index("def train")] + PYTHON[1]
        (terminal.directory / "train.py").write_text(loop)
        diloco = terminal.start(stack, train.replace("300", "100"), "diloco")
        assert diloco.process.wait(PATIENCE_S) == 0, diloco.log.read_text()
    print(f"the tutorial took {time.monotonic() - began:.0f} s")
