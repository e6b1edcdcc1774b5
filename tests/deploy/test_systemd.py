"""Tests of deploy/systemd: the units are correct and strict, and the daemons do what the units promise."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from trainers import free_port

import longhaul as lh
from longhaul.testing import LocalCluster, find_binary

ROOT = pathlib.Path(__file__).resolve().parents[2]
UNITS = ROOT / "deploy" / "systemd"
DAEMONS = ("longhaul-coordinator", "longhaul-peerd")
# systemd-analyze gives a service without any protection 96, and one without any rights about 0.
EXPOSURE_MAX = 20

need_analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="no systemd-analyze on this machine; apt-get install systemd"
)


def settings(daemon: str) -> dict[str, list[str]]:
    """The lines name=value of a unit, by name, in their order."""
    found: dict[str, list[str]] = {}
    for name, value in re.findall(r"^(\w+)=(.*)$", (UNITS / f"{daemon}.service").read_text(), re.M):
        found.setdefault(name, []).append(value)
    return found


@pytest.fixture(params=DAEMONS)
def daemon(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def unit(daemon: str, tmp_path: pathlib.Path) -> pathlib.Path:
    """The unit, with the program at the place where this tree has it."""
    path = tmp_path / f"{daemon}.service"
    text = (UNITS / path.name).read_text()
    path.write_text(text.replace(f"/usr/local/bin/{daemon}", str(find_binary(daemon))))
    return path


def test_the_lines_of_the_page_make_a_coordinator_and_a_peer_with_tls_and_a_token(tmp_path: pathlib.Path) -> None:
    page = (ROOT / "docs" / "deploy.md").read_text().split("## systemd")[1].split("\n## ")[0]
    (coordinator,) = [block for block in re.findall(r"```\n(.*?)```", page, re.S) if "ca init" in block]
    (peerd,) = [block for block in re.findall(r"```\n(.*?)```", page, re.S) if "token-file=" in block]
    port, admin = free_port(), free_port()
    etc = tmp_path / "etc"
    etc.mkdir()
    for name in ("coordinator", "peerd"):
        shutil.copy(UNITS / f"{name}.conf", etc)

    def shell(script: str) -> None:
        # Nobody is named longhaul here, and systemd does not run.
        for text, value in {
            "/etc/longhaul": str(etc),
            "COORDINATOR_HOST:29600": f"localhost:{port}",
            "COORDINATOR_HOST": "localhost",
            "install -o longhaul": "install",
            "chgrp longhaul": "chgrp $(id -g)",
            "lhctl token": f"lhctl --coordinator=127.0.0.1:{admin} token",
        }.items():
            script = script.replace(text, value)
        path = f"{pathlib.Path(find_binary('lhctl')).parent}:{os.environ['PATH']}"
        subprocess.run(["bash", "-euc", script], env={**os.environ, "PATH": path}, check=True, timeout=60)

    def start(daemon: str, *flags: str) -> pathlib.Path:
        log, ready = tmp_path / f"{daemon}.log", tmp_path / f"{daemon}.json"
        config = f"--config={etc}/{daemon.removeprefix('longhaul-')}.conf"
        with log.open("wb") as sink:
            command = [str(find_binary(daemon)), config, f"--ready-file={ready}", "--http=", *flags]
            process = subprocess.Popen(command, stderr=sink)
        stack.callback(process.wait)
        stack.callback(process.kill)
        deadline = time.monotonic() + 60
        while not ready.exists():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.01)
        return log

    # Lines between `systemctl` ones: before the daemon starts, and after that.
    with contextlib.ExitStack() as stack:
        before, after = re.split(r"^systemctl .*\n", coordinator, flags=re.M)
        shell(before)
        start("longhaul-coordinator", f"--listen=0.0.0.0:{port}", f"--admin=127.0.0.1:{admin}", "--store=memory")
        shell(after)
        shell(re.split(r"^systemctl .*\n", peerd, flags=re.M)[0])
        if os.geteuid() != 0:
            (etc / "token").chmod(0o600)
        log = start("longhaul-peerd", "--listen=127.0.0.1:0", f"--socket={tmp_path}/socket")
        deadline = time.monotonic() + 60
        while "control stream stands" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.01)
    assert "auth=token" in (tmp_path / "longhaul-coordinator.log").read_text()


@need_analyze
def test_the_unit_is_understood(unit: pathlib.Path) -> None:
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True)
    # It ends with 0 also if it ignores a setting that it does not know, and says so.
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@need_analyze
def test_the_unit_leaves_a_broken_daemon_few_rights(unit: pathlib.Path) -> None:
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", f"--threshold={EXPOSURE_MAX}", unit],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_configuration_shows_the_defaults(daemon: str) -> None:
    text = (UNITS / f"{daemon.removeprefix('longhaul-')}.conf").read_text()
    shown = subprocess.run([find_binary(daemon), "--help"], capture_output=True, text=True, check=True).stdout
    defaults = dict(re.findall(r"^  --([\w-]+)(?:=(.*))?$", shown, re.M))
    # What the program decides only when it starts under the unit.
    defaults |= {"store": "sqlite:/var/lib/longhaul/coordinator.db", "socket": "/run/longhaul/peerd.sock"}
    lines = re.findall(r"^#?([\w-]+)=(.*)$", text, re.M)
    assert len(lines) >= 5
    assert [(name, value) for name, value in lines if defaults.get(name) != value] == []


class Manager:
    """What systemd is for a daemon: the socket that the daemon tells its state."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.settimeout(120)

    def next(self) -> dict[str, str]:
        return dict(line.split("=", 1) for line in self._socket.recv(4096).decode().splitlines())

    def close(self) -> None:
        self._socket.close()


@contextlib.contextmanager
def managed(daemon: str, directory: pathlib.Path) -> Iterator[tuple[subprocess.Popen[bytes], Manager]]:
    manager = Manager(directory / "notify")
    unit = settings(daemon)
    config = UNITS / unit["ExecStart"][0].split("--config=/etc/longhaul/")[1]
    flags = ["--listen=127.0.0.1:0", "--http=127.0.0.1:0", f"--ready-file={directory}/ready"]
    flags += (
        ["--admin=127.0.0.1:0", f"--store=sqlite:{directory}/store"]
        if daemon == "longhaul-coordinator"
        # Nobody listens at this port: peerd serves all the same.
        else [f"--socket={directory}/peerd.sock", "--coordinator=127.0.0.1:1"]
    )
    environment = {"NOTIFY_SOCKET": str(manager.path), "WATCHDOG_USEC": "2000000"}
    with open(directory / "log", "wb") as log:
        process = subprocess.Popen(
            [find_binary(daemon), f"--config={config}", *flags], env=environment, stderr=log, start_new_session=True
        )
    try:
        yield process, manager
    finally:
        process.kill()
        process.wait()
        manager.close()


def test_the_daemon_says_that_it_serves_lives_and_ends(daemon: str, tmp_path: pathlib.Path) -> None:
    unit = settings(daemon)
    assert unit["Type"] == ["notify"]
    assert int(unit["WatchdogSec"][0]) >= 30
    with managed(daemon, tmp_path) as (process, manager):
        assert manager.next() == {"READY": "1"}, (tmp_path / "log").read_text()
        assert "http" in json.loads((tmp_path / "ready").read_text())
        begun = time.monotonic()
        for _ in range(3):
            assert manager.next() == {"WATCHDOG": "1"}
        # The second and the third sign of life did not come at once.
        assert time.monotonic() - begun > 0.5
        process.send_signal(signal.SIGTERM)
        said = manager.next()
        while said == {"WATCHDOG": "1"}:
            said = manager.next()
        assert said["STOPPING"] == "1"
        # It may take longer than a drain, and systemd waits for that.
        assert int(said["EXTEND_TIMEOUT_USEC"]) / 1e6 > (30 if daemon == "longhaul-peerd" else 2)
        assert process.wait(120) == 0


def test_a_stopped_daemon_gives_no_sign_of_life(daemon: str, tmp_path: pathlib.Path) -> None:
    with managed(daemon, tmp_path) as (process, manager):
        assert manager.next() == {"READY": "1"}
        assert manager.next() == {"WATCHDOG": "1"}
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        manager._socket.settimeout(3)
        with pytest.raises(TimeoutError):
            for _ in range(3):  # what it had said before
                manager.next()


# -------------------------------------------------------------------- system calls

NUMBERS = pathlib.Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")

# A program that allows itself only some system calls, and then starts another one. argv: file of the filter, program,
# arguments.
CONFINED = """
import ctypes, os, sys
code = open(sys.argv[1], "rb").read()
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]
libc = ctypes.CDLL(None, use_errno=True)
program = Program(len(code) // 8, code)
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program)):
    sys.exit("cannot set the filter: " + os.strerror(ctypes.get_errno()))
os.execv(sys.argv[2], sys.argv[2:])
"""


def expand(word: str) -> set[str]:
    """The system calls of a group such as @system-service."""
    if not word.startswith("@"):
        return {word}
    listed = subprocess.run(["systemd-analyze", "syscall-filter", word], capture_output=True, text=True, check=True)
    names = set()
    for line in listed.stdout.splitlines():
        if re.match(r"\s+[@\w]", line):
            names |= expand(line.strip())
    return names


def allowed(daemon: str) -> set[str]:
    """The system calls that the unit allows, by the rules of systemd.exec(5)."""
    names = expand("@default")  # always allowed
    for line in settings(daemon)["SystemCallFilter"]:
        words = line.lstrip("~").split()
        calls = set().union(*(expand(word) for word in words))
        names = names - calls if line.startswith("~") else names | calls
    return names


def filter_code(names: set[str]) -> bytes:
    """A BPF program that lets these system calls pass, and kills the process at any other one."""

    def instruction(code: int, k: int, yes: int = 0, no: int = 0) -> bytes:
        return code.to_bytes(2, "little") + bytes([yes, no]) + k.to_bytes(4, "little")

    numbers = dict(re.findall(r"^#define __NR_(\w+) (\d+)$", NUMBERS.read_text(), re.M))
    load, jump_if_equal, answer = 0x20, 0x15, 0x06
    kill, allow = 0x80000000, 0x7FFF0000
    code = instruction(load, 0)  # the number of the system call
    for name in sorted(names & set(numbers)):
        code += instruction(jump_if_equal, int(numbers[name]), 0, 1) + instruction(answer, allow)
    return code + instruction(answer, kill)


@need_analyze
@pytest.mark.skipif(
    platform.machine() != "x86_64" or not NUMBERS.exists(), reason=f"no numbers of system calls here ({NUMBERS})"
)
def test_the_daemons_need_only_system_calls_that_their_units_allow(tmp_path: pathlib.Path) -> None:
    confined = tmp_path / "confined.py"
    confined.write_text(CONFINED)
    for daemon in DAEMONS:
        assert "ptrace" not in allowed(daemon)
        (tmp_path / f"{daemon}.bpf").write_bytes(filter_code(allowed(daemon)))
        wrapper = tmp_path / daemon
        wrapper.write_text(
            f'#!/bin/sh\nexec {sys.executable} -IS {confined} {tmp_path}/{daemon}.bpf {find_binary(daemon)} "$@"\n'
        )
        wrapper.chmod(0o755)
    flags = [f"--store=sqlite:{tmp_path}/coordinator.db"]
    with (
        LocalCluster(peers=2, binaries=tmp_path, log_dir=tmp_path / "logs", coordinator_flags=flags) as cluster,
        ThreadPoolExecutor(2) as pool,
    ):
        socket_group = cluster.add_peer([f"--socket-group={os.getgid()}", "--zero-copy=on", "--poll-us=20"])
        sockets = [cluster.socket(0), cluster.socket(socket_group)]
        assert list(pool.map(train, sockets)) == [3, 3]
        assert cluster.peers[0].metric("longhaul_peerd_coordinator_up") == 1
        assert [cluster.terminate_peer(i) for i in range(3)] == [0, 0, 0], (tmp_path / "logs/peerd-0.log").read_text()
        os.kill(cluster.coordinator_pid, signal.SIGTERM)
        # The child of this process is not reaped here: LocalCluster does that.
        ended = os.waitid(os.P_PID, cluster.coordinator_pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None and (ended.si_code, ended.si_status) == (os.CLD_EXITED, 0)


def train(peerd: str) -> int:
    """Two members do what trainers do: ops of both kinds of memory, and a shared state."""
    weights = lh.empty(1 << 18, peerd=peerd)
    weights[:] = 0
    state = lh.State({"weights": weights})
    comm = lh.join("filter", peerd=peerd, state=state, timeout=120)
    while comm.begin_step(120).world_size < 2:
        time.sleep(0.01)
    while state.revision < 3:
        with comm.step(state):
            comm.all_reduce(weights, op="sum")
            comm.all_reduce(np.ones(1000, dtype="float32"), op="avg")
    comm.leave()
    return state.revision


def test_the_filter_of_the_test_stops_other_system_calls(tmp_path: pathlib.Path) -> None:
    """The test above would find a system call that is missing in the unit."""
    if platform.machine() != "x86_64" or not NUMBERS.exists() or shutil.which("systemd-analyze") is None:
        pytest.skip("what the test above needs is not here")
    confined, code = tmp_path / "confined.py", tmp_path / "code"
    confined.write_text(CONFINED)
    for calls, wanted in ((allowed("longhaul-peerd"), 0), (allowed("longhaul-peerd") - {"uname"}, -signal.SIGSYS)):
        code.write_bytes(filter_code(calls))
        assert subprocess.run([sys.executable, "-IS", confined, code, shutil.which("uname") or ""]).returncode == wanted
