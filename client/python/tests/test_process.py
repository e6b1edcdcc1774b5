"""Longhaul in a process of its own: Ctrl-C, imports, the README, tethered clusters."""

from __future__ import annotations

import os
import pathlib
import re
import select
import signal
import subprocess
import sys
import time

import pytest

import longhaul as lh
from longhaul.testing import LocalCluster, find_binary


def python(code: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", "-c", code],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def read_until(process: subprocess.Popen[str], text: str, seconds: float = 60) -> str:
    assert process.stdout is not None
    seen = ""
    deadline = time.monotonic() + seconds
    while text not in seen:
        ready, _, _ = select.select([process.stdout], [], [], deadline - time.monotonic())
        assert ready, f"no {text!r} in {seconds} s, only: {seen}"
        part = os.read(process.stdout.fileno(), 4096).decode()
        assert part, f"ended without {text!r}: {seen}"
        seen += part
    return seen


WAITS = {
    "join": "lh.join('busy', timeout=None)",
    "begin_step": "comm.begin_step()",
    "all_reduce": "comm.all_reduce(np.ones(10, np.float32))",
    "work": "comm.all_reduce(np.ones(10, np.float32), async_op=True).wait()",
    "peerd": "lh.join(peerd='/nonexistent/peerd.sock', timeout=None)",
}


@pytest.mark.parametrize("wait", WAITS)
def test_ctrl_c_ends_every_wait(cluster: LocalCluster, wait: str, request: pytest.FixtureRequest) -> None:
    run = f"interrupt-{wait}"
    code = f"""
import os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # not where it was ignored by who started the tests
import numpy as np, longhaul as lh
comm = lh.join({run!r}, timeout=None)
# A second member that never does anything; another thread runs on while this one waits.
def other():
    second = lh.join({run!r}, peerd={cluster.socket(1)!r}, timeout=None)
    with open(0) as never:
        never.read()
threading.Thread(target=other, daemon=True).start()
while comm.world_size < 2:
    comm.begin_step()
held = lh.join('busy', group=1)
print('member')
package = os.path.dirname(lh.__file__)
begun = threading.Event()
def watch():
    # Until the main thread is in a call of the package.
    begun.wait()
    while not sys._current_frames()[threading.main_thread().ident].f_code.co_filename.startswith(package):
        pass
    print('waiting')
threading.Thread(target=watch, daemon=True).start()
try:
    begun.set()
    {WAITS[wait]}
except KeyboardInterrupt:
    print('interrupted')
"""
    with lh.join("busy", peerd=cluster.socket(2)):  # makes a second join of "busy" wait
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", code],
            env={**os.environ, "LONGHAUL_SOCKET": cluster.socket(0)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            read_until(process, "waiting")
            process.send_signal(signal.SIGINT)
            read_until(process, "interrupted")
        finally:
            process.kill()
            process.wait()


def test_numpy_and_torch_are_not_needed_to_import(cluster: LocalCluster) -> None:
    code = """
import sys
sys.modules['numpy'] = sys.modules['torch'] = None
import longhaul as lh
with lh.join('bare') as comm:
    assert comm.world_size == 1
    comm.begin_step()
    for wrong in (lambda: lh.empty(3), lambda: lh.torch):
        try:
            wrong()
        except ImportError as problem:
            print(problem)
    try:
        comm.all_reduce([1.0])
    except TypeError as problem:
        print(problem)
print('end')
"""
    process = python(code, LONGHAUL_SOCKET=cluster.socket(0))
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "install numpy" in output
    assert "pass a numpy array, a torch tensor, or another object" in output
    assert output.endswith("end\n")


def test_a_peerd_has_one_connection_whichever_way_its_socket_is_named(cluster: LocalCluster) -> None:
    code = """
import os
import longhaul as lh
from longhaul import _arena
array = lh.empty(3)
named = os.environ['LONGHAUL_SOCKET']
with lh.join('named', peerd=named) as comm:
    client, made = _arena.client_of(os.path.relpath(named), None)
    assert not made
    assert client is comm._client is _arena.client_of(None, None)[0]
print('end')
"""
    process = python(code, LONGHAUL_SOCKET=cluster.socket(0))
    output, _ = process.communicate(timeout=60)
    assert output.endswith("end\n"), output


def test_a_missing_library_is_named() -> None:
    process = python("import longhaul as lh; lh.join()", LONGHAUL_LIBRARY="/nonexistent/liblonghaul.so")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert re.search(r"ImportError: .*LONGHAUL_LIBRARY.*/nonexistent/liblonghaul.so: no such file", output)


def test_a_cluster_dies_with_its_process() -> None:
    code = """
import time
from longhaul.testing import LocalCluster
cluster = LocalCluster(peers=2)
print(cluster.coordinator_pid, *(peer.pid for peer in cluster.peers), 'started')
time.sleep(600)
"""
    process = python(code)
    pids = [int(word) for word in read_until(process, "started").split()[:3]]
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while any(pathlib.Path(f"/proc/{pid}/cmdline").exists() and is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still there: {pids}"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_program_that_does_not_come_up_shows_its_log() -> None:
    with pytest.raises(RuntimeError, match="no-such-flag"):
        LocalCluster(peers=1, peerd_flags=["--no-such-flag"])


def test_missing_programs_are_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"no longhaul-peerd in {tmp_path}: the argument must name"):
        find_binary("longhaul-peerd", tmp_path)
