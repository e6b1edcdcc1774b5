"""Facts about the machine, and the cost of processes on it."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
import re
import subprocess
import time
from collections.abc import Iterable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROC = pathlib.Path("/proc")


def processors() -> int:
    return len(os.sched_getaffinity(0))


def meminfo(name: str) -> int:
    """A value of /proc/meminfo, in bytes."""
    return 1024 * int(re.findall(rf"^{name}:\s+(\d+) kB", (PROC / "meminfo").read_text(), re.M)[0])


def _output(*command: str) -> str:
    """The output of a command; empty if the command is missing or failed."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=ROOT).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _sysctl(name: str) -> str:
    path = PROC / "sys" / name.replace(".", "/")
    return " ".join(path.read_text().split()) if path.exists() else ""


def describe() -> dict[str, Any]:
    """Facts about the machine for readers of the figures."""
    model = re.findall(r"^model name\s*:\s*(.*)$", (PROC / "cpuinfo").read_text(), re.M)
    versions = {
        "longhaul": _output("git", "describe", "--always", "--dirty", "--abbrev=12"),
        "python": platform.python_version(),
    }
    for package in ("numpy", "torch"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    versions["openmpi"] = _output("dpkg-query", "-W", "-f=${Version}", "openmpi-bin")
    versions["gloo"] = _output("dpkg-query", "-W", "-f=${Version}", "libgloo-dev")
    versions["iperf3"] = _output("dpkg-query", "-W", "-f=${Version}", "iperf3")
    return {
        "cpu": model[0] if model else platform.machine(),
        "processors": processors(),
        "memory_bytes": meminfo("MemTotal"),
        "kernel": platform.release(),
        "versions": {name: version for name, version in versions.items() if version},
        "tcp": {name: _sysctl(f"net.ipv4.{name}") for name in ("tcp_congestion_control", "tcp_rmem", "tcp_wmem")},
    }


def busy_elsewhere(seconds: float) -> float:
    """The share of the processors that others use while the caller sleeps: other programs, or other guests (steal)."""

    def used() -> float:
        fields = [int(field) for field in (PROC / "stat").read_text().splitlines()[0].split()[1:9]]
        return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")

    before, begin = used(), time.monotonic()
    time.sleep(seconds)
    return (used() - before) / (time.monotonic() - begin) / (os.cpu_count() or 1)


def cpu_seconds(pids: Iterable[int]) -> float:
    """The CPU seconds of these processes so far, of threads that live. A daemon's threads live while it is measured."""
    nanoseconds = 0
    for pid in pids:
        for task in (PROC / str(pid) / "task").iterdir():
            # utime and stime count in ticks, which are too coarse for rounds of a fraction of a second.
            nanoseconds += int((task / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9


def _status(pid: int, name: str) -> int:
    found = re.findall(rf"^{name}:\s+(\d+) kB", (PROC / str(pid) / "status").read_text(), re.M)
    return 1024 * int(found[0]) if found else 0


def resident_bytes(pids: Iterable[int]) -> int:
    """The resident memory of all these processes. Shared memory counts at each of them."""
    return sum(_status(pid, "VmRSS") for pid in pids)


def forget_peak(pids: Iterable[int]) -> None:
    """Makes peak_bytes() count from now on."""
    for pid in pids:
        (PROC / str(pid) / "clear_refs").write_text("5")


def peak_bytes(members: Iterable[int], daemons: Iterable[int]) -> int:
    """The highest resident memory of all processes. What a daemon shares with its member counts only at the member."""
    peak = sum(_status(pid, "VmHWM") for pid in members)
    return peak + sum(max(0, _status(pid, "VmHWM") - _status(pid, "RssShmem")) for pid in daemons)
