"""TLS between real programs: who is refused and what they are told, certificates that are replaced under load, and what
may go in clear."""

from __future__ import annotations

import contextlib
import pathlib
import re
import shutil
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from trainers import PATIENCE_S, free_port, until

import longhaul as lh
from longhaul.testing import LocalCluster, find_binary, start_tethered

# The connections of the tests end all the time.
AGE_S = 1
# How long trainers compute between two ops. Without a pause they would take the processors from all other tests.
COMPUTE_S = 0.003


def run(program: str, *arguments: object, code: int = 0) -> str:
    """Runs a program until it ends with `code`, and returns what it printed."""
    command = [str(find_binary(program)), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == code, f"{command}: {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


class Ca:
    """A CA of lhctl ca, with certificates for a coordinator, a host and an operator."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        run("lhctl", "ca", "init", directory)
        self.issue("coordinator", "--role=coordinator", "--host=127.0.0.1,localhost")
        self.issue("host")
        self.issue("operator", "--role=operator")

    @property
    def cert(self) -> pathlib.Path:
        return self.directory / "ca.crt"

    def issue(self, name: str, *flags: str) -> None:
        run("lhctl", "ca", "issue", self.directory, f"--name={name}", *flags)

    def pair(self, name: str) -> list[str]:
        return [f"--tls-cert={self.directory}/{name}.crt", f"--tls-key={self.directory}/{name}.key"]

    def flags(self, name: str) -> list[str]:
        return [*self.pair(name), f"--tls-ca={self.cert}"]


@pytest.fixture
def ca(tmp_path: pathlib.Path) -> Ca:
    return Ca(tmp_path / "ca")


class Cluster(LocalCluster):
    """A coordinator with TLS on both of its ports, and peers with certificates."""

    def __init__(
        self, ca: Ca, logs: pathlib.Path, peers: int = 0, age_s: int = AGE_S, more: Sequence[str] = ()
    ) -> None:
        self.ca = ca
        self.logs = logs
        super().__init__(
            peers=peers,
            log_dir=logs,
            coordinator_flags=[
                *ca.flags("coordinator"),
                f"--tls-crl={ca.directory}/crl.pem",
                f"--tls-connection-age-s={age_s}",
                "--admin=0.0.0.0:0",
                *more,
            ],
            peerd_flags=ca.flags("host"),
        )
        assert self.admin is not None
        self.admin = self.admin.replace("0.0.0.0", "127.0.0.1")

    def __enter__(self) -> Cluster:
        return self

    def lhctl(self, *arguments: str, code: int = 0) -> str:
        return run("lhctl", f"--coordinator={self.admin}", *arguments, code=code)

    def log(self, name: str = "coordinator") -> str:
        return (self.logs / f"{name}.log").read_text(errors="replace")

    def metric(self, name: str, label: str) -> float:
        return self._metric(rf'{name}{{\w+="{label}"}}')

    def refused(self) -> float:
        return self._metric("tls_files_refused")

    def _metric(self, series: str) -> float:
        with urllib.request.urlopen(f"http://{self.http}/metrics", timeout=PATIENCE_S) as page:
            text = page.read().decode()
        (value,) = re.findall(rf"^longhaul_coordinator_{series} (\S+)$", text, re.MULTILINE)
        return float(value)


@pytest.fixture
def cluster(ca: Ca, tmp_path: pathlib.Path) -> Iterator[Cluster]:
    with Cluster(ca, tmp_path) as running:
        yield running


def test_the_lines_of_the_page_make_a_cluster(tmp_path: pathlib.Path) -> None:
    page = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "security.md").read_text()
    lines = "".join(re.findall(r"```sh\n(.*?)```", page, re.DOTALL)).replace("\\\n", "").splitlines()
    assert len(lines) <= 10
    ports = {"29600": str(free_port()), "29602": str(free_port())}
    names = {"coordinator.example.org,10.0.0.5": "localhost,127.0.0.1", "10.0.0.5": "127.0.0.1", **ports}
    more = {
        "longhaul-coordinator": [f"--listen=127.0.0.1:{ports['29600']}", "--http=", "--store=memory"],
        "longhaul-peerd": ["--listen=127.0.0.1:0", "--http=", f"--socket={tmp_path}/s"],
    }
    flags_of_alice = ["--tls-ca=ca/ca.crt", "--tls-cert=ca/alice.crt", "--tls-key=ca/alice.key"]
    ask = [str(find_binary("lhctl")), f"--coordinator=127.0.0.1:{ports['29602']}", *flags_of_alice, "events"]

    def attached() -> bool:
        told = subprocess.run(ask, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
        return "peer attached" in told.stdout

    with contextlib.ExitStack() as stack:
        for line in lines:
            for name, value in names.items():
                line = line.replace(name, value)
            program, *flags = line.split()
            command = [str(find_binary(program)), *flags]
            if program == "lhctl":
                told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
                assert told.returncode == 0, (line, told.stderr)
                if flags[-1] == "status":
                    assert "peers 1" in told.stdout
                continue
            ready = tmp_path / f"{program}.json"
            daemon = start_tethered([*command, *more[program], f"--ready-file={ready}"], cwd=tmp_path)
            stack.callback(daemon.kill)
            until(ready.exists, f"{program} serves")
            if program == "longhaul-peerd":
                until(attached, "the peer is attached")


def test_operators_need_a_certificate_of_the_role(cluster: Cluster, ca: Ca) -> None:
    trust = f"--tls-ca={ca.cert}"
    assert "no runs" in cluster.lhctl(trust, *ca.pair("operator"), "status")
    assert "shows neither a join token nor a certificate" in cluster.lhctl(trust, "status", code=1)
    assert cluster.metric("callers_refused_total", "missing") == 1
    told = cluster.lhctl(trust, *ca.pair("host"), "evict", "a/0/m1", code=1)
    assert "is for the role trainer, and this call needs operator" in told
    assert cluster.metric("callers_refused_total", "role") == 1
    for reason in ("missing", "role"):
        assert f"call refused why={reason}" in cluster.log()


def test_certificates_of_other_cas_are_refused(cluster: Cluster, ca: Ca, tmp_path: pathlib.Path) -> None:
    other = Ca(tmp_path / "other")
    trust = f"--tls-ca={ca.cert}"
    assert "your certificate is not trusted" in cluster.lhctl(trust, *other.pair("operator"), "status", code=1)
    assert cluster.metric("certificates_refused_total", "untrusted") == 1
    # A peer is told the same, and has no effect on the coordinator.
    peer = cluster.add_peer([*other.pair("host"), trust])
    until(lambda: "your certificate is not trusted" in cluster.log(f"peerd-{peer}"), "peerd says why")
    assert cluster.metric("certificates_refused_total", "untrusted") > 1
    assert "peer attached" not in cluster.log()


def test_a_coordinator_of_another_ca_or_name_is_refused(cluster: Cluster, ca: Ca, tmp_path: pathlib.Path) -> None:
    other = Ca(tmp_path / "other")
    stranger = cluster.lhctl(*ca.pair("operator"), f"--tls-ca={other.cert}", "status", code=1)
    assert "no CA in --tls-ca has issued the coordinator's certificate" in stranger
    peer = cluster.add_peer([f"--tls-ca={other.cert}"])
    until(lambda: "no CA in --tls-ca has issued" in cluster.log(f"peerd-{peer}"), "peerd says why")
    port = cluster.admin.rpartition(":")[2] if cluster.admin else ""
    elsewhere = run("lhctl", f"--coordinator=127.0.0.2:{port}", *ca.flags("operator"), "status", code=1)
    assert "127.0.0.2 is not in peer certificate" in elsewhere
    assert "dial one of these, or issue it anew" in elsewhere
    # The certificate of a host cannot prove a coordinator.
    assert "--host is for the role coordinator" in run(
        "lhctl", "ca", "issue", ca.directory, "--name=x", "--host=127.0.0.1", code=2
    )


def test_a_client_in_clear_is_told_of_tls(cluster: Cluster) -> None:
    assert "if the coordinator speaks TLS there, give --tls-ca" in cluster.lhctl("status", code=1)


def test_expired_certificates_are_not_used(ca: Ca, tmp_path: pathlib.Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("the program openssl is missing")
    request = ["openssl", "req", "-new", "-key", f"{ca.directory}/host.key", "-subj", "/CN=late", "-out", "late.csr"]
    sign = ["openssl", "x509", "-req", "-in", "late.csr", "-days", "-1", "-out", f"{ca.directory}/host.crt"]
    sign += ["-CA", str(ca.cert), "-CAkey", f"{ca.directory}/ca.key"]
    for command in (request, sign):
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=PATIENCE_S)
    told = run("longhaul-peerd", "--coordinator=127.0.0.1:1", *ca.flags("host"), code=2)
    assert "the certificate expired at " in told


def test_a_revoked_certificate_is_shut_out(ca: Ca, tmp_path: pathlib.Path) -> None:
    with Cluster(ca, tmp_path, peers=1) as cluster:
        until(lambda: "peer attached" in cluster.log(), "the peer is attached")
        cluster.lhctl(*ca.flags("operator"), "status")
        for name in ("operator", "host"):  # whoever refuses the host has read of the operator, too
            run("lhctl", "ca", "revoke", ca.directory, name)
        until(lambda: "your certificate was revoked" in cluster.log("peerd-0"), "peerd is told")
        assert "your certificate was revoked" in cluster.lhctl(*ca.flags("operator"), "status", code=1)
        assert cluster.metric("certificates_refused_total", "revoked") >= 2
        # A new certificate of the same name is another certificate.
        ca.issue("host")
        attached = cluster.log().count("peer attached")
        until(lambda: cluster.log().count("peer attached") > attached, "the peer is attached again")


class Trainers:
    """Members of one group at all peers, which make ops until the block ends. An op that fails fails the test."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.size = len(cluster.peers)
        self.ops = 0
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(self.size)
        self._trainers = [self._pool.submit(self._train, number) for number in range(self.size)]

    def _train(self, number: int) -> None:
        comm = lh.join("rotation", peerd=self.cluster.socket(number), timeout=PATIENCE_S)
        while comm.begin_step().world_size < self.size:
            pass
        tensor = comm.empty(1 << 16)
        while True:
            tensor[:] = 1 if number == 0 and self._stop.is_set() else 0
            info = comm.all_reduce(tensor, timeout=PATIENCE_S)
            assert info.world_size == self.size
            comm.begin_step()
            self.ops += 1
            if tensor[0] > 0:
                break
            self._stop.wait(COMPUTE_S)
        comm.leave()

    def __enter__(self) -> Trainers:
        until(lambda: self.ops > 10 or any(trainer.done() for trainer in self._trainers), "ops run")
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for trainer in self._trainers:
            trainer.result(PATIENCE_S)
        self._pool.shutdown()


def test_without_tls_ca_the_coordinator_asks_nobody_for_a_certificate(ca: Ca, tmp_path: pathlib.Path) -> None:
    flags = [*ca.pair("coordinator"), f"--tls-connection-age-s={AGE_S}"]
    trust = [f"--tls-ca={ca.cert}"]
    with LocalCluster(peers=2, log_dir=tmp_path, coordinator_flags=flags, peerd_flags=trust) as cluster:
        log = tmp_path / "coordinator.log"
        with Trainers(cluster):
            ca.issue("coordinator", "--role=coordinator", "--host=127.0.0.1,localhost")
            until(lambda: "new TLS files are in use" in log.read_text(), "the new certificate is used")
            attached = log.read_text().count("peer attached")
            until(lambda: log.read_text().count("peer attached") >= attached + 4, "peers connect anew")
            # The end by age is the coordinator's own, not that of a connection that breaks.
            assert log.read_text().count('reason="the coordinator ended its stream"') >= 4
            assert 'reason="its stream closed"' not in log.read_text()
        # A certificate that a peer shows nevertheless is not looked at.
        cluster.add_peer([*Ca(tmp_path / "other").pair("host"), *trust])
        until(lambda: "control stream stands" in (tmp_path / "peerd-2.log").read_text(), "the peer is attached")


def test_everything_is_rotated_under_load(ca: Ca, tmp_path: pathlib.Path) -> None:
    with Cluster(ca, tmp_path, peers=3) as cluster, Trainers(cluster) as trainers:

        def reconnect() -> None:
            attached = cluster.log().count("peer attached")
            until(lambda: cluster.log().count("peer attached") >= attached + 6, "all peers connect anew")

        def used(good: int) -> None:
            until(lambda: cluster.metric("tls_files_total", "good") >= good, "the coordinator uses it")

        reconnect()
        # New certificates of the same CA.
        ca.issue("coordinator", "--role=coordinator", "--host=127.0.0.1,localhost")
        ca.issue("host")
        used(1)
        reconnect()
        # Another CA: first both are trusted, then the certificates change, then the first CA is removed.
        new = Ca(tmp_path / "new")
        old = ca.cert.read_text()
        (tmp_path / "both.crt").write_text(old + new.cert.read_text())
        (tmp_path / "both.crt").replace(ca.cert)
        used(2)  # the CRL stays, as long as its CA is trusted
        reconnect()
        for name in ("host", "operator", "coordinator"):
            for kind in ("key", "crt"):
                shutil.copy(new.directory / f"{name}.{kind}", ca.directory / f"{name}.{kind}.new")
                (ca.directory / f"{name}.{kind}.new").replace(ca.directory / f"{name}.{kind}")
        reconnect()
        shutil.copy(new.cert, ca.cert)
        shutil.copy(new.directory / "crl.pem", ca.directory / "crl.pem")
        reconnect()
        ops = trainers.ops
        until(lambda: trainers.ops > ops + 10, "ops go on")
        assert cluster.lhctl(*ca.flags("operator"), "status")
        # Nobody was removed, and no op was redone.
        assert "left=m" not in cluster.log()
        assert sum(peer.metric("longhaul_peerd_op_retries_total") for peer in cluster.peers) == 0


def test_broken_new_files_leave_the_old_ones_in_use(cluster: Cluster, ca: Ca) -> None:
    cert, key = ca.directory / "coordinator.crt", ca.directory / "coordinator.key"
    good, secret = cert.read_text(), key.read_text()

    def told(times: int) -> None:
        until(lambda: cluster.metric("tls_files_total", "broken") == times, "the coordinator has seen it")
        assert "no runs" in cluster.lhctl(*ca.flags("operator"), "status")

    broken = ("", good[: len(good) // 2], (ca.directory / "host.crt").read_text())
    for times, contents in enumerate(broken, 1):
        cert.write_text(contents)
        told(times)
    cert.unlink()
    told(len(broken) + 1)
    cert.write_text(good)
    until(lambda: cluster.refused() == 0, "the last good ones are there again")
    crl = ca.directory / "crl.pem"
    before = crl.read_text()
    crl.write_text("")  # as by a copy onto a full disk: it would revoke nothing
    told(len(broken) + 2)
    assert cluster.refused() == 1
    assert "crl.pem is empty" in cluster.log()
    crl.write_text(before)
    until(lambda: cluster.refused() == 0, "the CRL is there again")
    assert cluster.metric("tls_files_total", "good") == 0  # they are the ones in use
    assert cluster.log().count("new TLS files are refused") == len(broken) + 2
    assert not any(line in cluster.log() for line in secret.splitlines()[1:-1])


def address() -> str:
    """An address of this machine that other hosts may reach, or "" if there is none. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


@pytest.mark.parametrize(
    "command",
    [
        ["longhaul-coordinator", "--listen=0.0.0.0:0"],
        ["longhaul-coordinator", "--listen=127.0.0.1:0", "--admin=[::]:0"],
        ["longhaul-peerd", "--coordinator=127.0.0.1:1,192.0.2.1:29600"],
        ["lhctl", "--coordinator=192.0.2.1:29602", "status"],
    ],
    ids=lambda command: " ".join(command[:3]),
)
def test_clear_text_to_other_hosts_is_refused(command: list[str]) -> None:
    told = run(*command, code=2)
    assert "nothing would be encrypted" in told
    assert "--insecure" in told and "docs/security.md" in told


def test_insecure_beside_tls_is_refused(ca: Ca) -> None:
    trusted = f"--tls-ca={ca.cert}"
    for command in (
        ["longhaul-coordinator", "--listen=0.0.0.0:0", *ca.flags("coordinator")],
        ["longhaul-coordinator", "--listen=127.0.0.1:0", *ca.pair("coordinator"), "--auth=token"],
        ["longhaul-peerd", "--coordinator=192.0.2.1:29600", trusted],
        ["longhaul-peerd", "--coordinator=192.0.2.1:29600", *ca.flags("host")],
        ["lhctl", "--coordinator=192.0.2.1:29602", trusted, "status"],
    ):
        told = run(*command, "--insecure", code=2)
        assert "--insecure contradicts --tls-c" in told and "Remove --insecure" in told, command


def test_insecure_allows_clear_text_and_warns(tmp_path: pathlib.Path) -> None:
    flags = ["--listen=0.0.0.0:0", "--admin=0.0.0.0:0", "--insecure", "--admin-auth=none"]
    with LocalCluster(peers=0, log_dir=tmp_path, coordinator_flags=flags) as cluster:
        log = (tmp_path / "coordinator.log").read_text()
        assert "WARNING --insecure: gRPC of peers is not encrypted" in log
        assert "WARNING --insecure: the port of operators is not encrypted, and whoever reaches it may evict" in log
        own = address()
        if not own:
            return
        assert cluster.coordinator is not None and cluster.admin is not None
        cluster.coordinator = cluster.coordinator.replace("0.0.0.0", own)
        with pytest.raises(RuntimeError, match="nothing would be encrypted"):
            cluster.add_peer()
        peer = cluster.add_peer(["--insecure"])
        assert "--insecure: gRPC to the coordinator is not encrypted" in (tmp_path / f"peerd-{peer}.log").read_text()
        admin = f"--coordinator={cluster.admin.replace('0.0.0.0', own)}"
        run("lhctl", admin, "status", code=2)
        assert "no runs" in run("lhctl", admin, "--insecure", "status")


def test_the_port_of_operators_on_loopback_stays_in_clear(ca: Ca, tmp_path: pathlib.Path) -> None:
    flags = [*ca.flags("coordinator"), "--listen=0.0.0.0:0"]
    with LocalCluster(peers=0, log_dir=tmp_path, coordinator_flags=flags) as cluster:
        assert "no runs" in run("lhctl", f"--coordinator={cluster.admin}", "status")
        assert "tls=on" in (tmp_path / "coordinator.log").read_text()
