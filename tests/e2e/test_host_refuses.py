"""What the host refuses to the daemons is said in a line, and ends them only where they cannot do without it."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable

import pytest

from longhaul.testing import find_binary, start_tethered

PATIENCE_S = 120
# Python ignores the signal, and so would its children.
DEFAULT = "env --default-signal=XFSZ"


def until(condition: Callable[[], bool], log: pathlib.Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.01)


def accepts(path: pathlib.Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
        return True


def test_a_store_beyond_the_limit_of_file_sizes_ends_the_coordinator_with_a_line(tmp_path: pathlib.Path) -> None:
    log, ready = tmp_path / "log", tmp_path / "ready"
    coordinator = find_binary("longhaul-coordinator")
    ports = "--listen=127.0.0.1:0 --admin=127.0.0.1:0 --http="
    command = f"{coordinator} {ports} --store=sqlite:{tmp_path}/run.db --ready-file={ready}"
    # The log goes through a pipe, which has no such limit.
    shell = f"(ulimit -f 60; exec {DEFAULT} {command}) 2>&1 | cat > {log}; exit ${{PIPESTATUS[0]}}"
    with start_tethered(["/bin/bash", "-c", shell]) as process:
        until(lambda: ready.exists() or process.poll() is not None, log)
        admin = ready.read_text().split('"admin": "')[1].split('"')[0]
        write = [str(find_binary("lhctl")), f"--coordinator={admin}", "token", "create", "--role=trainer", "--run=r"]
        deadline = time.monotonic() + PATIENCE_S
        while process.poll() is None and time.monotonic() < deadline:
            subprocess.run(write, capture_output=True, timeout=PATIENCE_S)
        assert process.poll() == 1, log.read_text()
    assert "ERROR the store failed" in log.read_text()
    assert "File too large" in log.read_text()


def test_peerd_goes_on_where_its_log_cannot_grow(tmp_path: pathlib.Path) -> None:
    log, path = tmp_path / "log", tmp_path / "peerd.sock"
    flags = f"--listen=127.0.0.1:0 --http= --coordinator=127.0.0.1:1 --insecure --socket={path}"
    shell = f"ulimit -f 0; exec {DEFAULT} {find_binary('longhaul-peerd')} {flags} 2> {log}"
    with start_tethered(["/bin/bash", "-c", shell]) as process:
        until(lambda: accepts(path) or process.poll() is not None, log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    assert log.read_text() == ""


def test_peerd_serves_while_no_coordinator_has_its_name(tmp_path: pathlib.Path) -> None:
    log, ready = tmp_path / "log", tmp_path / "ready"
    flags = ["--listen=0.0.0.0:0", "--http=127.0.0.1:0", "--coordinator=no-such-host.invalid:29600", "--insecure"]
    files = [f"--socket={tmp_path}/peerd.sock", f"--ready-file={ready}"]
    with open(log, "wb") as sink:
        command = [str(find_binary("longhaul-peerd")), *flags, *files]
        process = start_tethered(command, stderr=sink)
    try:
        until(lambda: ready.exists() or process.poll() is not None, log)
        assert process.poll() is None, log.read_text()
        http = ready.read_text().split('"http": "')[1].split('"')[0]
        until(lambda: "cannot reach coordinator no-such-host.invalid:29600" in log.read_text(), log)
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"http://{http}/readyz", timeout=PATIENCE_S)
        assert accepts(tmp_path / "peerd.sock")
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


# A mount namespace in which /var/lib is new, and HOME too.
FRESH = "mount --make-rprivate / && mount -t tmpfs none /var/lib && mkdir /var/lib/longhaul"


def mounts_are_refused() -> bool:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return True
    return subprocess.run(["unshare", "--mount", "sh", "-c", FRESH], capture_output=True).returncode != 0


@pytest.mark.skipif(mounts_are_refused(), reason="mounts need root, and may be refused in a container")
@pytest.mark.parametrize("used", [True, False])
def test_a_read_only_store_is_not_replaced_by_an_empty_one(tmp_path: pathlib.Path, used: bool) -> None:
    command = f"{find_binary('longhaul-coordinator')} --listen=127.0.0.1:0 --admin= --http="
    start = f"{command} --ready-file={tmp_path}/ready & while [ ! -e {tmp_path}/ready ]; do kill -0 $! || break; done"
    script = f"{FRESH}; export HOME={tmp_path}/home; mkdir $HOME; unset XDG_STATE_HOME; "
    if used:
        script += f"{start}; kill $!; wait $!; rm -f {tmp_path}/ready; "
    script += f"mount -o remount,ro /var/lib; echo again >&2; {start}; kill $!; wait $!; echo code $? >&2"
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", script], capture_output=True, text=True, timeout=PATIENCE_S
    )
    again = done.stderr.split("again\n")[1]
    own = tmp_path / "home/.local/state/longhaul/coordinator.db"
    if used:
        assert "ERROR cannot write the store /var/lib/longhaul/coordinator.db: Read-only file system" in again
        assert "--store" in again
        assert "code 1" in again
        assert not own.exists()
    else:
        assert "WARNING the default store cannot be made; a new one is elsewhere" in again
        assert f"store={own}" in again
        assert own.exists()
