"""Tests of peerd's --io: which ring it takes where io_uring is refused, what it says then, and that ops work."""

from __future__ import annotations

import pathlib
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import longhaul as lh
from longhaul.testing import LocalCluster, Peer, find_binary

GAUGE = "longhaul_peerd_on_epoll"
WARNING = "epoll instead of io_uring"

# Runs the real program with a seccomp filter under which one system call fails, as in a container.
REFUSING = """#!{python} -SE
import ctypes, os, struct, sys

ERRNO = {errno}
filters = [(0x20, 0, 0, 0), (0x15, 0, 1, {number}), (0x06, 0, 0, 0x00050000 | ERRNO), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in filters))

class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]

libc = ctypes.CDLL(None, use_errno=True)
program = Program(len(filters), ctypes.addressof(code))
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(program), 0, 0):
    sys.exit(f"prctl: {{os.strerror(ctypes.get_errno())}}")
os.execv({real!r}, sys.argv)
"""
EPERM, ENOSYS = 1, 38
CALLS = {"setup": 425, "enter": 426, "register": 427}  # the system calls of io_uring


def refusing(directory: pathlib.Path, errno: int = EPERM, call: str = "setup") -> pathlib.Path:
    """Makes a directory in which longhaul-peerd is the real program without one system call of io_uring."""
    directory.mkdir()
    program = directory / "longhaul-peerd"
    real = str(find_binary("longhaul-peerd"))
    program.write_text(REFUSING.format(python=sys.executable, errno=errno, number=CALLS[call], real=real))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return directory


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(peers=1, peerd_flags=["--io=epoll"]) as started:
        yield started


def warnings_of(peer: Peer) -> list[str]:
    return [line for line in peer.log.read_text().splitlines() if WARNING in line]


def reduce_together(sockets: list[str], run: str) -> None:
    """Members at these peers make ops of all algorithms. Each sum has to be right."""
    with ThreadPoolExecutor(len(sockets)) as pool:
        comms = [lh.join(run, peerd=sockets[0])]
        for socket in sockets[1:]:
            joiner = pool.submit(lh.join, run, peerd=socket)
            while comms[0].world_size < len(comms) + 1:
                list(pool.map(lambda comm: comm.begin_step(), comms))
            comms.append(joiner.result())
            comms[-1].begin_step()  # the boundary that admitted it
        for count in (16, 100_003, 3_000_017):
            tensors = [comm.empty(count) for comm in comms]
            for i, tensor in enumerate(tensors):
                tensor[:] = np.arange(count) % 1000 + i
            works = [comm.all_reduce(x, async_op=True) for comm, x in zip(comms, tensors)]
            for work in works:
                assert work.wait(timeout=60).world_size == len(comms)
            expected = np.arange(count) % 1000 * len(comms) + sum(range(len(comms)))
            for tensor in tensors:
                assert np.array_equal(tensor, expected.astype(np.float32))
        for comm in comms:
            comm.leave()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("errno, name", [(EPERM, "EPERM"), (ENOSYS, "ENOSYS")])
def test_auto_takes_epoll_where_io_uring_is_refused_and_warns_once(
    cluster: LocalCluster, tmp_path: pathlib.Path, errno: int, name: str, call: str
) -> None:
    flags = ["--io=auto"]
    programs = refusing(tmp_path / "bin", errno, call)
    with LocalCluster(peers=1, coordinator=cluster.coordinator, binaries=programs, peerd_flags=flags) as refused:
        peer = refused.peers[0]
        assert peer.metric(GAUGE) == 1
        (warning,) = warnings_of(peer)
        assert f"io_uring {call} refused ({name}): " in warning
        assert "seccomp" in warning
        reduce_together([cluster.socket(0), refused.socket(0)], f"io-{name}-{call}")
        assert len(warnings_of(peer)) == 1


def test_uring_that_is_refused_ends_peerd_with_the_reason(tmp_path: pathlib.Path) -> None:
    program = refusing(tmp_path / "bin") / "longhaul-peerd"
    ports = ["--listen=127.0.0.1:0", "--http=", f"--socket={tmp_path}/peerd.sock"]
    done = subprocess.run([str(program), "--io=uring", *ports], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    assert "io_uring setup refused (EPERM): " in done.stderr
    assert "seccomp" in done.stderr
    assert WARNING not in done.stderr


def test_a_ring_that_does_not_exist_is_bad_usage() -> None:
    command = [str(find_binary("longhaul-peerd")), "--io=poll"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--io=poll: give auto, uring or epoll" in done.stderr


def test_hosts_on_epoll_and_on_io_uring_work_together(cluster: LocalCluster) -> None:
    peer = cluster.peers[0]
    assert peer.metric(GAUGE) == 1
    (warning,) = warnings_of(peer)
    assert "reason=--io=epoll" in warning
    with LocalCluster(peers=1, coordinator=cluster.coordinator, peerd_flags=["--io=auto"]) as other:
        if other.peers[0].metric(GAUGE) == 1:
            pytest.skip(f"io_uring is refused here: {warnings_of(other.peers[0])}")
        assert warnings_of(other.peers[0]) == []
        assert 'ring="io_uring of Linux ' in other.peers[0].log.read_text()
        reduce_together([cluster.socket(0), other.socket(0)], "io-mixed")
