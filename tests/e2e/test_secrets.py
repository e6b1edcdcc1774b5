"""Tests that secrets stay where they belong: in files that only their owner can read, and nowhere else."""

from __future__ import annotations

import json
import os
import pathlib
import sqlite3
import stat
import subprocess
import time
import urllib.request

import pytest
from trainers import assemble, trainers_of, until

from longhaul.testing import LocalCluster, find_binary


def page(address: str, path: str) -> bytes:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=30) as answer:
        content: bytes = answer.read()
        return content


def test_no_secret_is_in_logs_events_metrics_or_recordings(tmp_path: pathlib.Path) -> None:
    from contextlib import ExitStack

    logs, dumps, db = (tmp_path / name for name in ("logs", "dumps", "run.db"))
    old = os.umask(0)  # files must not depend on it
    try:
        cluster = LocalCluster(
            peers=2,
            log_dir=logs,
            coordinator_flags=[
                f"--store=sqlite:{db}",
                f"--dump-dir={dumps}",
                "--log-level=debug",
            ],
            peerd_flags=[f"--dump-dir={dumps}", "--log-level=debug"],
        )
    finally:
        os.umask(old)
    shown: list[bytes] = []
    with cluster, ExitStack() as stack:
        trainers = trainers_of(stack, 2)
        assemble(trainers, [cluster.socket(0), cluster.socket(1)], "secret-run")
        for trainer in trainers:
            trainer.start("all_reduce", count=1000, value=1.0)
        for trainer in trainers:
            assert trainer.finish().get("first") == 2.0
        os.kill(cluster.peers[1].pid, 9)
        until(lambda: any(dumps.glob("*fault*")), "the fault is recorded in a file")
        for peer in cluster.peers[:1]:
            shown += [page(peer.http, path) for path in ("/metrics", "/readyz", "/healthz")]
        assert cluster.http is not None
        shown += [page(cluster.http, path) for path in ("/metrics", "/status.json", "/")]
        lhctl = [str(find_binary("lhctl")), f"--coordinator={cluster.admin}"]
        for command in (["events", "--json"], ["members"], ["why"], ["dump"], ["ring"], ["runs"]):
            shown.append(subprocess.run([*lhctl, *command], capture_output=True, timeout=60).stdout)
        with sqlite3.connect(f"file:{db}?mode=ro", uri=True) as connection:
            records = [row[0] for row in connection.execute("SELECT record FROM records")]
        secrets = [json.loads(record)["secret"] for record in records if '"secret"' in record]
        assert secrets, records
        for path in (db, *tmp_path.glob("run.db-*"), *dumps.iterdir()):
            mode = stat.S_IMODE(path.stat().st_mode)
            assert mode & 0o077 == 0, f"{path.name} has mode {mode:o}"
    shown += [path.read_bytes() for place in (logs, dumps) for path in place.rglob("*") if path.is_file()]
    assert sum(map(len, shown)) > 10_000
    for secret in secrets:
        for form in (secret.encode(), secret.upper().encode(), bytes.fromhex(secret)):
            assert not any(form in text for text in shown)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to start a daemon as another user")
@pytest.mark.parametrize("flags, owner", [([], 0), (["--core-dumps"], 4001)])
def test_daemons_leave_no_core_dump_unless_told_to(tmp_path: pathlib.Path, flags: list[str], owner: int) -> None:
    # The kernel shows by the owner of this file whether the process may leave a core dump.
    place = pathlib.Path("/tmp") / f"longhaul-core-{os.getpid()}"
    place.mkdir(mode=0o777)
    os.chown(place, 4001, 4001)
    program = [str(find_binary("longhaul-peerd")), "--coordinator=127.0.0.1:1", "--listen=127.0.0.1:0", "--http="]
    ready = place / "ready"
    command = [*program, f"--socket={place}/s", f"--ready-file={ready}", *flags]
    peerd = subprocess.Popen(command, user=4001, group=4001, extra_groups=[], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not ready.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert os.stat(f"/proc/{peerd.pid}/environ").st_uid == owner
    finally:
        peerd.kill()
        peerd.wait()
        subprocess.run(["rm", "-rf", str(place)])
