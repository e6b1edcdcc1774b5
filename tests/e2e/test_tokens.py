"""Join tokens between real programs: who is refused and what they are told, quotas, and tokens that are replaced and
revoked under load."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import pytest
from test_tls import Ca, Trainers, run
from trainers import PATIENCE_S, until

import longhaul as lh
from longhaul.testing import LocalCluster, find_binary


class Cluster(LocalCluster):
    """A coordinator that asks peers for a join token. Its port for operators is on loopback and asks for nothing."""

    def __init__(self, directory: pathlib.Path, *flags: str) -> None:
        self.directory = directory
        store = f"--store=sqlite:{directory}/store.db"
        super().__init__(peers=0, log_dir=directory, coordinator_flags=["--auth=token", store, *flags])

    def __enter__(self) -> Cluster:
        return self

    def lhctl(self, *arguments: str, code: int = 0) -> str:
        return run("lhctl", f"--coordinator={self.admin}", *arguments, code=code)

    def token(self, *flags: str) -> str:
        """Makes a token."""
        made = json.loads(self.lhctl("token", "create", "--json", *flags))
        token: str = made["token"]
        return token

    def file(self, name: str, token: str) -> pathlib.Path:
        """Puts a token into a file, in one step."""
        path = self.directory / f"{name}.token"
        new = path.with_suffix(".new")
        new.write_text(token + "\n")
        new.chmod(0o600)
        new.replace(path)
        return path

    def peer(self, token: str) -> int:
        """Starts a peerd that shows the token."""
        return self.add_peer([f"--token-file={self.file(f'peer-{len(self.peers)}', token)}"])

    def log(self, name: str = "coordinator") -> str:
        return (self.directory / f"{name}.log").read_text(errors="replace")

    def told(self, peer: int, words: str) -> None:
        until(lambda: words in self.log(f"peerd-{peer}"), f"peerd logs '{words}'")

    def refused(self, reason: str) -> int:
        with urllib.request.urlopen(f"http://{self.http}/metrics", timeout=PATIENCE_S) as page:
            text: str = page.read().decode()
        name = f'longhaul_coordinator_callers_refused_total{{reason="{reason}"}} '
        (value,) = [line[len(name) :] for line in text.splitlines() if line.startswith(name)]
        return int(float(value))


def id_of(token: str) -> str:
    return token.split("_")[1]


@pytest.fixture
def cluster(tmp_path: pathlib.Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as running:
        yield running


def test_a_peer_with_a_token_takes_part(cluster: Cluster) -> None:
    peer = cluster.peer(cluster.token("--run=a"))
    comm = lh.join("a", peerd=cluster.socket(peer), timeout=PATIENCE_S)
    assert comm.world_size == 1
    comm.leave()


def test_a_private_peerd_takes_its_token_from_the_environment(cluster: Cluster) -> None:
    path = cluster.file("mine", cluster.token("--run=a"))
    program = f"import longhaul as lh; print(lh.join('a', coordinator={cluster.coordinator!r}, timeout=60).world_size)"
    environment = {**os.environ, "LONGHAUL_PEERD_TOKEN_FILE": str(path), "LONGHAUL_PEERD_LISTEN": "127.0.0.1:0"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout == "1\n", done.stderr


# ---------------------------------------------------------------------- who is refused


def test_without_a_token_nobody_attaches(cluster: Cluster) -> None:
    begun = time.monotonic()
    peer = cluster.add_peer(["--coordinator-timeout-ms=500"])
    cluster.told(peer, "the caller shows no join token")
    cluster.told(peer, "--token-file")
    assert time.monotonic() - begun < 20
    assert cluster.refused("missing") > 0
    assert "call refused why=missing" in cluster.log()
    with pytest.raises(lh.Unavailable, match="shows no join token"):
        lh.join("a", peerd=cluster.socket(peer), timeout=PATIENCE_S)
    assert "peer attached" not in cluster.log()
    assert "no runs" in cluster.lhctl("runs")


@pytest.mark.parametrize(
    "what, reason, words",
    [
        ("revoked", "revoked", "was revoked at"),
        ("expired", "expired", "expired at"),
        ("another coordinator's", "unknown", "is not known here"),
        ("no token", "malformed", "is no join token"),
        ("observer", "role", "is for the role observer, and this call needs trainer"),
        ("operator", "role", "is for the role operator, and this call needs trainer"),
    ],
)
def test_a_token_that_does_not_fit_is_refused(cluster: Cluster, what: str, reason: str, words: str) -> None:
    if what == "revoked":
        token = cluster.token("--run=a")
        assert cluster.lhctl("token", "revoke", id_of(token)) == f"token {id_of(token)} is revoked\n"
    elif what == "expired":
        token = cluster.token("--run=a", "--ttl=1s")
        until(lambda: "expired" in cluster.lhctl("token", "list"), "it has expired")
    elif what == "another coordinator's":
        token = f"lht_0123456789ab_{'A' * 43}"
    elif what == "no token":
        token = "secret"
    else:
        token = cluster.token("--run=*", f"--role={what}")
    peer = cluster.peer(token)
    cluster.told(peer, words)
    assert cluster.refused(reason) > 0
    assert f"call refused why={reason}" in cluster.log()
    with pytest.raises(lh.DeadlineExceeded, match=words):
        lh.join("a", peerd=cluster.socket(peer), timeout=1)
    assert "peer attached" not in cluster.log()
    for name in ("coordinator", f"peerd-{peer}"):
        assert token.split("_", 2)[-1] not in cluster.log(name)


def test_a_token_of_another_run_joins_nothing(cluster: Cluster) -> None:
    peer = cluster.peer(cluster.token("--run=a"))
    with pytest.raises(lh.FailedPrecondition, match="a group of run b, and the caller's join token .* is for run a"):
        lh.join("b", peerd=cluster.socket(peer), timeout=PATIENCE_S)
    assert cluster.refused("run") == 1
    assert "join of b/0 refused" in cluster.lhctl("events")
    # The peer's own run goes on.
    lh.join("a", peerd=cluster.socket(peer), timeout=PATIENCE_S).leave()


def test_a_quota_bounds_what_a_token_holds(cluster: Cluster) -> None:
    token = cluster.token("--run=*", "--members=2", "--runs=1")
    first, second = cluster.peer(token), cluster.peer(token)
    comm = lh.join("a", peerd=cluster.socket(first), timeout=PATIENCE_S)
    with pytest.raises(lh.FailedPrecondition, match="have 1 runs, the most that its quota allows"):
        lh.join("b", peerd=cluster.socket(second), timeout=PATIENCE_S)
    other = lh.join("a", group=1, peerd=cluster.socket(second), timeout=PATIENCE_S)
    with pytest.raises(lh.FailedPrecondition, match="have 2 members, the most that its quota allows"):
        lh.join("a", group=2, peerd=cluster.socket(second), timeout=PATIENCE_S)
    assert cluster.refused("quota") == 2
    other.leave()
    lh.join("a", group=2, peerd=cluster.socket(second), timeout=PATIENCE_S).leave()
    comm.leave()


def test_a_file_that_others_may_read_is_refused(cluster: Cluster) -> None:
    path = cluster.file("open", cluster.token("--run=a"))
    path.chmod(0o644)
    with pytest.raises(RuntimeError, match="others than its owner may read or change it"):
        cluster.add_peer([f"--token-file={path}"])
    told = cluster.lhctl(f"--token-file={path}", "status", code=1)
    assert "chmod 600" in told


# ---------------------------------------------------------------------- beside certificates


def test_any_takes_a_token_or_a_certificate(tmp_path: pathlib.Path) -> None:
    ca = Ca(tmp_path / "ca")
    ca.issue("of-a", "--run=a")
    crl = tmp_path / "ca" / "crl.pem"
    flags = [*ca.flags("coordinator"), f"--tls-crl={crl}", "--auth=any", "--tls-connection-age-s=3600"]
    with Cluster(tmp_path, *flags) as cluster:
        trust = f"--tls-ca={ca.cert}"
        nobody = cluster.add_peer([trust])
        cluster.told(nobody, "shows neither a join token nor a certificate")
        with pytest.raises(lh.DeadlineExceeded, match="shows neither a join token nor a certificate"):
            lh.join("b", peerd=cluster.socket(nobody), timeout=2)
        lh.join("b", peerd=cluster.socket(cluster.add_peer(ca.flags("host"))), timeout=PATIENCE_S).leave()
        token = f"--token-file={cluster.file('b', cluster.token('--run=b'))}"
        lh.join("b", peerd=cluster.socket(cluster.add_peer([trust, token])), timeout=PATIENCE_S).leave()
        operator = cluster.add_peer(ca.flags("operator"))
        cluster.told(operator, "is for the role operator, and this call needs trainer")
        # A certificate is for its run only.
        bound = cluster.add_peer(ca.flags("of-a"))
        with pytest.raises(lh.FailedPrecondition, match="a group of run b, and the caller's certificate .* for run a"):
            lh.join("b", peerd=cluster.socket(bound), timeout=PATIENCE_S)
        # Both have to be right, if both are shown.
        twice = cluster.add_peer([*ca.flags("of-a"), token])
        cluster.told(twice, "show two of one run")
        assert cluster.refused("certificate") > 0
        # A revoked certificate ends its stream, although the connection is young.
        run("lhctl", "ca", "revoke", ca.directory, "of-a")
        cluster.told(bound, "your certificate was revoked")
        with pytest.raises(lh.DeadlineExceeded, match="your certificate was revoked"):
            lh.join("a", peerd=cluster.socket(bound), timeout=2)
        assert cluster.refused("revoked") > 0


def test_both_needs_both(tmp_path: pathlib.Path) -> None:
    ca = Ca(tmp_path / "ca")
    with Cluster(tmp_path, *ca.flags("coordinator"), "--auth=both") as cluster:
        token = f"--token-file={cluster.file('a', cluster.token('--run=a'))}"
        cluster.told(cluster.add_peer([f"--tls-ca={ca.cert}", token]), "shows no certificate")
        cluster.told(cluster.add_peer(ca.flags("host")), "shows no join token")
        lh.join("a", peerd=cluster.socket(cluster.add_peer([*ca.flags("host"), token])), timeout=PATIENCE_S).leave()


# ---------------------------------------------------------------------- operators


def test_admin_needs_the_role(tmp_path: pathlib.Path) -> None:
    with Cluster(tmp_path) as first:
        operator = first.token("--run=*", "--role=operator")
    with Cluster(tmp_path, "--admin-auth=token") as cluster:
        path = cluster.file("operator", operator)
        assert "shows no join token" in cluster.lhctl("status", code=1)
        assert cluster.refused("missing") == 1

        def token(role: str, run: str = "*") -> str:
            made = cluster.lhctl(f"--token-file={path}", "token", "create", f"--run={run}", f"--role={role}")
            return f"--token-file={cluster.file(f'{role}-{len(run)}', made.splitlines()[0])}"

        trainer, observer, of_a = token("trainer"), token("observer"), token("observer", "a1")
        assert "is for the role trainer, and this call needs observer" in cluster.lhctl(trainer, "status", code=1)
        assert "no runs" in cluster.lhctl(observer, "runs")
        for order in (["evict", "a/0/m1"], ["drain", "p1f"], ["token", "list"]):
            assert "this call needs operator" in cluster.lhctl(observer, *order, code=1)
        assert cluster.refused("role") == 4
        assert "this call concerns run b" in cluster.lhctl(of_a, "status", "b", code=1)
        assert "no member m1" in cluster.lhctl(f"--token-file={path}", "evict", "a/0/m1", code=1)
        assert "call refused why=role" in cluster.log()


def test_tokens_are_made_listed_and_revoked(cluster: Cluster) -> None:
    command = [str(find_binary("lhctl")), f"--coordinator={cluster.admin}", "token", "create", "--run=a", "--ttl=72h"]
    made = subprocess.run([*command, "--label=site b"], capture_output=True, text=True, timeout=PATIENCE_S)
    token = made.stdout.strip()
    assert made.stdout == token + "\n" and token.startswith("lht_")
    assert f"token {id_of(token)} for run a, role trainer, until" in made.stderr
    listed = cluster.lhctl("token", "list")
    assert id_of(token) in listed and "site b" in listed and "valid" in listed
    (about,) = json.loads(cluster.lhctl("token", "list", "--json"))["tokens"]
    assert int(about["expires_s"]) - int(about["created_s"]) == 72 * 3600
    cluster.lhctl("token", "revoke", id_of(token))
    assert "revoked" in cluster.lhctl("token", "list")
    assert "no token 012345" in cluster.lhctl("token", "revoke", "012345", code=1)
    assert "give --run=RUN" in cluster.lhctl("token", "create", code=2)
    assert "for instance 72h" in cluster.lhctl("token", "create", "--run=a", "--ttl=soon", code=2)
    assert "role: give trainer" in cluster.lhctl("token", "create", "--run=a", "--role=king", code=1)
    # The secret is nowhere.
    secret = token.split("_", 2)[2]
    for path in cluster.directory.iterdir():
        assert secret.encode() not in path.read_bytes(), path
    assert f"join token created id={id_of(token)} run=a" in cluster.log()


# ---------------------------------------------------------------------- while peers train


def test_a_token_is_replaced_under_load_and_the_old_one_revoked(cluster: Cluster) -> None:
    tokens = [cluster.token("--run=rotation") for _ in range(3)]
    for token in tokens:
        cluster.peer(token)
    with Trainers(cluster) as trainers:

        def replace(number: int, old: str) -> None:
            # The file first, then the revocation: peerd reads the file when its stream ends.
            cluster.file(f"peer-{number}", cluster.token("--run=rotation"))
            attached = cluster.log().count("peer attached")
            cluster.lhctl("token", "revoke", id_of(old))
            until(lambda: cluster.log().count("peer attached") > attached, "peerd comes back")
            assert "was revoked at" in cluster.log(f"peerd-{number}")
            ops = trainers.ops
            until(lambda: trainers.ops > ops + 10, "ops go on")

        for number, old in enumerate(tokens):
            replace(number, old)
        # Nobody was removed.
        assert "left=m" not in cluster.log()
    # No op was redone.
    assert sum(peer.metric("longhaul_peerd_op_retries_total") for peer in cluster.peers) == 0


def test_a_thief_is_shut_out_and_the_others_go_on(tmp_path: pathlib.Path) -> None:
    with Cluster(tmp_path, "--detect-ms=500") as cluster:
        stolen, good = cluster.token("--run=a"), cluster.token("--run=a")
        thief, host = cluster.peer(stolen), cluster.peer(good)
        comm = lh.join("a", peerd=cluster.socket(host), timeout=PATIENCE_S)
        mate = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import longhaul as lh, sys\n"
                f"comm = lh.join('a', peerd={cluster.socket(thief)!r}, timeout=60)\n"
                "comm.begin_step()\n"
                "x = comm.empty(1024)\n"
                "while True: comm.all_reduce(x, timeout=60)\n",
            ],
            stderr=subprocess.DEVNULL,
        )
        try:
            while comm.world_size < 2:
                comm.begin_step(timeout=PATIENCE_S)
            x = comm.empty(1024)
            assert comm.all_reduce(x, timeout=PATIENCE_S).world_size == 2
            begun = time.monotonic()
            cluster.lhctl("token", "revoke", id_of(stolen))
            while comm.all_reduce(x, timeout=PATIENCE_S).world_size == 2:
                pass
            assert time.monotonic() - begun < 60
            cluster.told(thief, "was revoked at")
            assert cluster.refused("revoked") > 0
            assert "control stream ended why=revoked" in cluster.log()
            comm.leave()
        finally:
            mate.kill()
            mate.wait()
