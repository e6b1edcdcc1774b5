"""Runs a coordinator and peerds on this machine, for tests and notebooks."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence

from ._programs import PathLike
from ._programs import find_binary as find_binary  # part of this module, too

# A small program that starts another one, such that the kernel kills it when this process dies for any reason. It is a
# separate program, because Python code between fork and exec is not safe in a process with threads.
_TETHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent process is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


def start_tethered(command: Sequence[str], **options: object) -> subprocess.Popen[bytes]:
    """Starts a child process that gets SIGKILL when the calling thread or this process ends.

    options: keyword arguments of subprocess.Popen.
    """
    return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
        [sys.executable, "-S", "-E", "-c", _TETHER, str(os.getpid()), *command], **options
    )


@dataclasses.dataclass
class Peer:
    """One peerd of a LocalCluster."""

    socket: str  #: path of its Unix socket, for join(peerd=...)
    listen: str  #: host:port of its data port
    http: str  #: host:port of /metrics, /healthz, /readyz
    process: subprocess.Popen[bytes]
    log: pathlib.Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def metric(self, name: str) -> float:
        """The present value of a Prometheus metric of this peerd, summed over its labels. KeyError: no such metric."""
        with urllib.request.urlopen(f"http://{self.http}/metrics", timeout=60) as page:
            text = page.read().decode()
        values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        if not values:
            raise KeyError(name)
        return sum(float(value) for value in values)


class LocalCluster:
    """A coordinator and several peerds on loopback, on free ports, each with its own Unix socket.

        with LocalCluster(peers=3) as cluster:
            comm = lh.join(run="test", peerd=cluster.socket(0))

    All programs serve when the constructor returns. They are killed when the block ends, or when the thread that made
    the cluster ends for any reason.

    peers: how many peerds to start.
    binaries: directory of the programs; None: see find_binary().
    log_dir: directory for the logs, which stay there. None: a temporary directory that is removed with the cluster.
    coordinator: host:port of a coordinator that runs already. None: starts one.
    coordinator_flags, peerd_flags: more flags for the programs. The only LONGHAUL_ variable that the programs see is
        LONGHAUL_PEERD_IO (--io of longhaul-peerd).
    timeout: seconds that each program may take until it serves.

    Not thread-safe. Raises RuntimeError, with the end of its log, if a program does not serve in time.
    """

    def __init__(
        self,
        peers: int = 3,
        *,
        binaries: PathLike | None = None,
        log_dir: PathLike | None = None,
        coordinator: str | None = None,
        coordinator_flags: Sequence[str] = (),
        peerd_flags: Sequence[str] = (),
        timeout: float = 120,
    ) -> None:
        self._binaries = binaries
        self._timeout = timeout
        self._peerd_flags = tuple(peerd_flags)
        # The path of a Unix socket has at most 107 bytes. The temporary directory of a test may be too long.
        self._directory = pathlib.Path(tempfile.mkdtemp(prefix="longhaul-", dir="/tmp"))
        self._logs = pathlib.Path(log_dir) if log_dir is not None else self._directory
        self._logs.mkdir(parents=True, exist_ok=True)
        self._coordinator: subprocess.Popen[bytes] | None = None
        self.peers: list[Peer] = []  #: in the order of their start; killed ones stay in the list
        self.http: str | None = (
            None  #: host:port of the coordinator's status page and /metrics; None if it was not started here
        )
        self.admin: str | None = None  #: host:port for lhctl --coordinator=...; None if it was not started here
        try:
            if coordinator is None:
                ports = [f"--{port}=127.0.0.1:0" for port in ("listen", "admin", "http")]
                flags = [*ports, "--store=memory", *coordinator_flags]
                self._coordinator, _, ready = self._start("longhaul-coordinator", "coordinator", flags)
                coordinator = ready["grpc"]
                self.admin = ready["admin"]
                self.http = ready["http"]
            self.coordinator = coordinator  #: host:port of the coordinator, for peers
            for _ in range(peers):
                self.add_peer()
        except BaseException:
            self.stop()
            raise

    def socket(self, i: int) -> str:
        """The path of the Unix socket of peer i, for join(peerd=...)."""
        return self.peers[i].socket

    @property
    def coordinator_pid(self) -> int:
        if self._coordinator is None:
            raise ValueError("the coordinator was not started by this cluster, so its process id is not known")
        return self._coordinator.pid

    def add_peer(self, flags: Sequence[str] = ()) -> int:
        """Starts another peerd and returns its number. flags: more flags for this one."""
        number = len(self.peers)
        process, log, ready = self._start(
            "longhaul-peerd",
            f"peerd-{number}",
            [
                f"--coordinator={self.coordinator}",
                f"--socket={self._directory}/{number}.sock",
                "--listen=127.0.0.1:0",
                "--http=127.0.0.1:0",
                *self._peerd_flags,
                *flags,
            ],
        )
        self.peers.append(Peer(ready["socket"], ready["listen"], ready["http"], process, log))
        return number

    def kill_peer(self, i: int) -> None:
        """Kills peer i with SIGKILL and waits until it has ended. A second call does nothing."""
        self.peers[i].process.kill()
        self.peers[i].process.wait()

    def terminate_peer(self, i: int, timeout: float = 60) -> int:
        """Sends SIGTERM to peer i, which drains and ends. Waits for that and returns the exit code."""
        self.peers[i].process.send_signal(signal.SIGTERM)
        return self.peers[i].process.wait(timeout)

    def stop(self) -> None:
        """Kills all programs and removes the temporary directory. A second call does nothing."""
        processes = [peer.process for peer in self.peers]
        if self._coordinator is not None:
            processes.append(self._coordinator)
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(
        self, binary: str, name: str, flags: Sequence[str]
    ) -> tuple[subprocess.Popen[bytes], pathlib.Path, dict[str, str]]:
        ready_file = self._directory / f"{name}.json"
        log = self._logs / f"{name}.log"
        command = [str(find_binary(binary, self._binaries)), *flags, f"--ready-file={ready_file}"]
        # Settings in the environment of the caller are not meant for this cluster. The exception says what this
        # machine allows, or lets a whole test suite run on epoll.
        environment = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("LONGHAUL_") or key == "LONGHAUL_PEERD_IO"
        }
        with open(log, "wb") as sink:
            process = start_tethered(
                command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=environment, start_new_session=True
            )
        deadline = time.monotonic() + self._timeout
        while True:
            # The program writes the file atomically: it is complete when it exists.
            with contextlib.suppress(FileNotFoundError):
                ready: dict[str, str] = json.loads(ready_file.read_text())
                return process, log, ready
            code = process.poll()
            if code is not None or time.monotonic() > deadline:
                process.kill()
                process.wait()
                end = log.read_text(errors="replace")[-2000:]
                what = f"did not serve in {self._timeout} s" if code is None else f"ended with {code}"
                raise RuntimeError(f"{' '.join(command)} {what}. Its log ends:\n{end}")
            time.sleep(0.005)
