"""Tests of who may use peerd's Unix socket, with trainers of several users. They need root."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
from collections.abc import Iterator

import pytest

import longhaul as lh
from longhaul.testing import LocalCluster, find_binary

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as other users")

ALICE, BOB, CAROL, GROUP = 4001, 4002, 4003, 4500


def as_user(uid: int, socket: str, groups: tuple[int, ...] = (), timeout: float = 60) -> str:
    """Joins and leaves in a child that runs as this user. Returns "joined", or the error with its class."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        answer = "joined"
        try:
            os.setgroups(groups)
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            lh.join(f"users-{uid}", peerd=socket, timeout=timeout).leave()
        except Exception as error:  # the parent judges
            answer = f"{type(error).__name__}: {error}"
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        answer = pipe.read().decode()
    os.waitpid(child, 0)
    return answer


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(peers=1) as started:
        # Loads every module that a join needs: the other users may not be able to read this Python's files.
        lh.join("warm", peerd=started.socket(0), timeout=60).leave()
        yield started


def peer_of(cluster: LocalCluster, *flags: str) -> int:
    index = cluster.add_peer(list(flags))
    os.chmod(pathlib.Path(cluster.socket(index)).parent, 0o755)
    return index


def test_a_list_admits_whom_it_names_and_tells_the_others(cluster: LocalCluster) -> None:
    peer = peer_of(cluster, "--socket-mode=0666", f"--allow-users={ALICE}", f"--allow-groups={GROUP}")
    socket = cluster.socket(peer)
    assert as_user(ALICE, socket) == "joined"
    assert as_user(BOB, socket, (GROUP,)) == "joined"
    assert as_user(0, socket) == "joined"
    refused = as_user(CAROL, socket)
    assert refused.startswith("FailedPrecondition") and "user 4003" in refused, refused
    assert "root, users 0,4001, members of group 4500" in refused and "--allow-users" in refused, refused
    assert cluster.peers[peer].metric("longhaul_peerd_users_refused_total") == 1
    assert cluster.peers[peer].metric("longhaul_peerd_trainers_refused_total") == 1


def test_without_a_list_the_mode_decides(cluster: LocalCluster) -> None:
    everybody = cluster.socket(peer_of(cluster, "--socket-mode=0666"))
    assert as_user(CAROL, everybody) == "joined"
    group = cluster.socket(peer_of(cluster, f"--socket-group={GROUP}"))
    assert as_user(ALICE, group, (GROUP,)) == "joined"
    assert as_user(CAROL, group, timeout=0.5).startswith("FailedPrecondition")
    nobody = cluster.socket(peer_of(cluster, "--socket-mode=0600", f"--socket-group={GROUP}"))
    assert os.stat(nobody).st_mode & 0o777 == 0o600
    refused = as_user(ALICE, nobody, (GROUP,), timeout=0.5)
    assert "Permission denied" in refused and "--socket-mode" in refused, refused


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--socket-mode=0777"], "--socket-mode=0777: give 0600, 0660 or 0666"),
        (["--socket-mode=0600", "--allow-users=4001"], "can admit nobody"),
        (["--allow-users=no-such-user"], 'no user "no-such-user"'),
        (["--allow-groups=nogroup"], "--allow-groups"),
        (["--user-share=0"], "--user-share=0: give 1 to 100"),
    ],
)
def test_flags_that_cannot_be_meant_end_peerd(flags: list[str], words: str, tmp_path: pathlib.Path) -> None:
    command = [str(find_binary("longhaul-peerd")), "--coordinator=127.0.0.1:1", "--listen=127.0.0.1:0", "--http="]
    done = subprocess.run([*command, f"--socket={tmp_path}/s", *flags], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done
    assert words in done.stderr.replace("_", "-") or words in done.stderr, done.stderr


def test_a_user_has_its_share_of_the_arena(cluster: LocalCluster) -> None:
    socket = cluster.socket(peer_of(cluster, "--socket-mode=0666", "--user-share=50", f"--arena-limit={64 << 20}"))
    comm = lh.join("share", peerd=socket, timeout=60)
    with pytest.raises(lh.Unavailable, match=re.escape("user 0 may have at most 33554432 bytes of arena")):
        comm.empty(40 << 20, dtype="uint8")
    comm.leave()
    assert as_user(ALICE, socket) == "joined"
