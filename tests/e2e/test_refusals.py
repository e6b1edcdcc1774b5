"""Who is refused, and that this disturbs nobody.

Each case below shows up in a counter and in a log line. Cases of whole programs are tests of this file: there, two
members reduce tensors all the time, and go on in the same epoch without doing an op anew. Cases that need a hostile
program on a connection are tests in C++, with the network in memory. They assert the same: the counter, and that links
of others stay up.

Names of counters are without `longhaul_`; those of the coordinator begin with `coordinator_`, those of a host with
`peerd_`. "-": there is none, because correct programs cause the same now and then.

| case | test | counter | log line |
| --- | --- | --- | --- |
| certificate of another CA | test_a_certificate_of_another_ca | coordinator_certificates_refused_total{untrusted} | certificate refused |
| expired certificate | test_a_certificate_that_expires | coordinator_certificates_refused_total{expired} | certificate refused |
| coordinator with another name | test_a_coordinator_of_another_name | peerd_coordinator_failures_total{name} | cannot reach coordinator |
| coordinator of another CA | test_a_coordinator_of_another_ca | peerd_coordinator_failures_total{untrusted} | cannot reach coordinator |
| no token | test_no_token | coordinator_callers_refused_total{missing} | call refused |
| revoked token | test_a_revoked_token | coordinator_callers_refused_total{revoked} | call refused |
| token of another run | test_a_token_of_another_run | coordinator_callers_refused_total{run} | join refused |
| observer that attaches as a peer | test_an_observer_that_attaches | coordinator_callers_refused_total{role} | call refused |
| order of somebody without the role | test_an_order_without_the_role | coordinator_callers_refused_total{role} | call refused |
| Hello with another peer's id | grpc_server_test AStrangerDoesNotEndTheStreamOfAPeer | coordinator_strangers_refused_total | control stream refused |
| message about a group of another run | tokens_test APeerJoinsGroupsOfItsRunOnly | coordinator_callers_refused_total{run} | control stream ended |
| vote in another member's name | coordinator_core_test StaleAndForeignMessagesChangeNothing | - | - |
| garbage at the data port | test_garbage_at_the_data_port | peerd_handshakes_refused_total{malformed} | caller at the data port refused |
| garbage in each message of a handshake | transport_test GarbageIsRefusedAtEveryStageOfTheHandshake | peerd_handshakes_refused_total | caller at the data port refused |
| what a refused lane is told | transport_test TheReplyToARefusedHelloHasTheReasonAndNothingElse | peerd_handshakes_refused_total{epoch} | caller at the data port refused |
| token of an old epoch, or of another group | transport_test AConfirmWithAnotherTokenOrOfAnotherConnectionIsRefused | peerd_handshakes_refused_total{token} | caller at the data port refused |
| replayed handshake | transport_test AConfirmWithAnotherTokenOrOfAnotherConnectionIsRefused | peerd_handshakes_refused_total{token} | caller at the data port refused |
| replayed connection | sealed_link_test RecordedConnectionsAreOfNoUse | peerd_handshakes_refused_total{busy} | - |
| member that poses as another one | sealed_link_test AMemberCannotPoseAsAnotherMember | peerd_handshakes_untrusted_total | caller at the data port refused |
| replayed and reordered segments | sealed_link_test RepeatedAndMovedSegmentsCostOneLaneAndNoData | peerd_unauthentic_total | lane lost |
| a bit flipped in any region of a frame | sealed_link_test AtAnyByteOfASealedLaneTheyCostOneLaneAndNoData | peerd_unauthentic_total | lane lost |
| relay that changes a byte | tunnel_test AByteOfASealedLaneThatTheRelayChangesCostsOneLaneAndNoData | peerd_unauthentic_total | lane lost |
| caller without the token that names a relay | tunnel_test ARelayAsksForTheTokenAndCountsWhoDoesNotHaveIt | peerd_handshakes_refused_total{token} | caller at the data port refused |
| relay that knows one end only | tunnel_test APeerThatDoesNotKnowBothIsNoRelay | peerd_handshakes_refused_total{epoch} | caller at the data port refused |
| member that lies about an op | liar_test AHostThatOffersAnotherOpToOneOfTheOthersIsNamedAndRemoved | coordinator_members_removed_total{dispute} | peer lies |
"""

from __future__ import annotations

import contextlib
import pathlib
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator

import pytest
from test_tls import Ca, Cluster, Trainers
from trainers import PATIENCE_S, until

import longhaul as lh
from longhaul.testing import LocalCluster

ROOT = pathlib.Path(__file__).resolve().parents[2]
# A refusal is there at once: the goal is a second. This is what a busy machine gets.
DEADLINE_S = 20
# The run of the members that reduce.
RUN = "rotation"
HONEST = 2


class Running(Cluster):
    """A cluster with TLS that asks peers for a certificate or a token, and two members that make ops."""

    def __init__(self, ca: Ca, logs: pathlib.Path) -> None:
        super().__init__(ca, logs, peers=HONEST, more=["--auth=any"])
        self.trust = f"--tls-ca={ca.cert}"
        self.operator = ca.flags("operator")

    def __enter__(self) -> Running:
        return self

    def token(self, name: str, *flags: str) -> tuple[str, str]:
        """Makes a token. Returns its id and the flag that shows it."""
        token = self.lhctl(*self.operator, "token", "create", *flags).splitlines()[0]
        path = self.logs / f"{name}.token"
        path.touch(mode=0o600)
        path.write_text(token + "\n")
        return token.split("_")[1], f"--token-file={path}"

    @contextlib.contextmanager
    def peer(self, *flags: str, coordinator: str | None = None) -> Iterator[Stranger]:
        """A peerd with these flags and no others, while the block runs."""
        logs = self.logs / f"stranger-{time.monotonic_ns()}"
        with LocalCluster(
            peers=1, coordinator=coordinator or self.coordinator, log_dir=logs, peerd_flags=flags
        ) as cluster:
            yield Stranger(cluster, logs)

    def epochs(self) -> int:
        return sum(f" group={RUN}/0" in line for line in self.log().splitlines() if "epoch committed" in line)

    def retries(self) -> float:
        return sum(peer.metric("longhaul_peerd_op_retries_total") for peer in self.peers)


class Stranger:
    """A peerd that is to be refused."""

    def __init__(self, cluster: LocalCluster, logs: pathlib.Path) -> None:
        self.socket = cluster.socket(0)
        self._peer = cluster.peers[0]
        self._log = logs / "peerd-0.log"

    def told(self, words: str) -> None:
        soon(lambda: words in self._log.read_text(errors="replace"), f"peerd logs '{words}'")

    def failures(self, reason: str) -> float:
        return labelled(self._peer.http, "longhaul_peerd_coordinator_failures_total", reason)


def labelled(http: str, name: str, reason: str) -> float:
    with urllib.request.urlopen(f"http://{http}/metrics", timeout=PATIENCE_S) as answer:
        page = answer.read().decode()
    (value,) = re.findall(rf'^{name}{{reason="{reason}"}} (\S+)$', page, re.MULTILINE)
    return float(value)


def soon(condition: Callable[[], bool], what: str) -> None:
    begun = time.monotonic()
    until(condition, what)
    assert time.monotonic() - begun < DEADLINE_S, what


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Trainers]]:
    directory = tmp_path_factory.mktemp("refusals")
    ca = Ca(directory / "ca")
    # For the one name: `localhost` is another one.
    ca.issue("coordinator", "--role=coordinator", "--host=127.0.0.1")
    with Running(ca, directory) as cluster, Trainers(cluster) as trainers:
        yield cluster, trainers


@pytest.fixture
def cluster(running: tuple[Running, Trainers]) -> Iterator[Running]:
    """Checks that the members went on as if nothing had been."""
    cluster, trainers = running
    before = (cluster.epochs(), cluster.retries())
    ops = trainers.ops
    yield cluster
    until(lambda: trainers.ops > ops + 10 * HONEST, "ops go on")
    assert (cluster.epochs(), cluster.retries()) == before
    assert cluster.epochs() > 0 and cluster.retries() == 0
    assert "left=m" not in cluster.log()


def refused(cluster: Running, reason: str, line: str = "call refused why=", metric: str = "callers") -> None:
    """Waits until the coordinator has refused somebody for this reason, and has said so."""
    soon(lambda: cluster.metric(f"{metric}_refused_total", reason) > 0, f"{metric}_refused_total has {reason}")
    assert line + reason in cluster.log()


# ---------------------------------------------------------------------- certificates


def test_a_certificate_of_another_ca(cluster: Running, tmp_path: pathlib.Path) -> None:
    with cluster.peer(*Ca(tmp_path / "other").pair("host"), cluster.trust) as peer:
        refused(cluster, "untrusted", "certificate refused port=--listen reason=", "certificates")
        peer.told("your certificate is not trusted")
        assert peer.failures("refused") > 0


def test_a_certificate_that_expires(cluster: Running) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("the program openssl is missing")
    ca = cluster.ca
    ca.issue("late")
    (ca.directory / "late.cnf").write_text(
        f"[ca]\ndefault_ca=it\n[it]\ndatabase={ca.directory}/late.txt\nnew_certs_dir={ca.directory}\nrand_serial=yes\n"
        f"default_md=sha256\npolicy=any\ncertificate={ca.cert}\nprivate_key={ca.directory}/ca.key\n"
        "[any]\ncommonName=supplied\n"
        "[more]\nsubjectAltName=URI:longhaul:role:trainer,URI:longhaul:run:*\nextendedKeyUsage=clientAuth\n"
    )

    def openssl(*command: str) -> None:
        subprocess.run(["openssl", *command], cwd=ca.directory, check=True, capture_output=True, timeout=PATIENCE_S)

    openssl("req", "-new", "-key", "late.key", "-subj", "/CN=late", "-out", "late.csr")
    sign = ["ca", "-batch", "-notext", "-config", "late.cnf", "-extensions", "more", "-in", "late.csr"]
    with contextlib.ExitStack() as stack:
        # A program with an expired certificate does not start, so this one expires while it runs. A machine that is
        # too slow for that gets more time.
        for seconds in (3, 6, 12, 24):
            expires = int(time.time()) + seconds
            (ca.directory / "late.txt").write_text("")
            end = time.strftime("%Y%m%d%H%M%SZ", time.gmtime(expires))
            openssl(*sign, "-enddate", end, "-out", "late.crt")
            with contextlib.suppress(RuntimeError):
                peer = stack.enter_context(cluster.peer(*ca.flags("late")))
                break
        until(lambda: time.time() > expires, "it has expired")
        refused(cluster, "expired", "certificate refused port=--listen reason=", "certificates")
        peer.told("your certificate expired at")


def test_a_coordinator_of_another_name(cluster: Running) -> None:
    port = cluster.coordinator.rpartition(":")[2]
    with cluster.peer(*cluster.ca.flags("host"), coordinator=f"localhost:{port}") as peer:
        peer.told("cannot reach coordinator localhost")
        peer.told("the coordinator's certificate is for other names")
        assert peer.failures("name") > 0
        assert peer.failures("lookup") == 0


def test_a_coordinator_of_another_ca(cluster: Running, tmp_path: pathlib.Path) -> None:
    with cluster.peer(f"--tls-ca={Ca(tmp_path / 'other').cert}") as peer:
        peer.told("no CA in --tls-ca has issued the coordinator's certificate")
        assert peer.failures("untrusted") > 0


# ---------------------------------------------------------------------- tokens and roles


def test_no_token(cluster: Running) -> None:
    with cluster.peer(cluster.trust) as peer:
        refused(cluster, "missing")
        peer.told("shows neither a join token nor a certificate")


def test_a_revoked_token(cluster: Running) -> None:
    token, flag = cluster.token("revoked", f"--run={RUN}")
    cluster.lhctl(*cluster.operator, "token", "revoke", token)
    with cluster.peer(cluster.trust, flag) as peer:
        refused(cluster, "revoked")
        peer.told("was revoked at")


def test_a_token_of_another_run(cluster: Running) -> None:
    _, flag = cluster.token("other", "--run=other")
    with cluster.peer(cluster.trust, flag) as peer:
        begun = time.monotonic()
        with pytest.raises(lh.FailedPrecondition, match=f"a group of run {RUN}, and the caller's join token"):
            lh.join(RUN, peerd=peer.socket, timeout=PATIENCE_S)
        assert time.monotonic() - begun < DEADLINE_S
        assert cluster.metric("callers_refused_total", "run") == 1
        assert re.search(rf'join refused peer=\w+ reason="join of {RUN}/0 refused', cluster.log())


def test_an_observer_that_attaches(cluster: Running) -> None:
    _, flag = cluster.token("observer", f"--run={RUN}", "--role=observer")
    with cluster.peer(cluster.trust, flag, "--coordinator-timeout-ms=500") as peer:
        refused(cluster, "role")
        peer.told("is for the role observer, and this call needs trainer")
        with pytest.raises(lh.Unavailable, match="this call needs trainer"):
            lh.join(RUN, peerd=peer.socket, timeout=PATIENCE_S)


def test_an_order_without_the_role(cluster: Running) -> None:
    before = cluster.metric("callers_refused_total", "role")
    lines = cluster.log().count("call refused why=role")
    begun = time.monotonic()
    told = cluster.lhctl(*cluster.ca.flags("host"), "evict", f"{RUN}/0/m1", code=1)
    assert time.monotonic() - begun < DEADLINE_S
    assert "is for the role trainer, and this call needs operator" in told
    assert cluster.metric("callers_refused_total", "role") == before + 1
    assert cluster.log().count("call refused why=role") == lines + 1


# ---------------------------------------------------------------------- the data port


def test_garbage_at_the_data_port(cluster: Running) -> None:
    peer = cluster.peers[0]
    host, _, port = peer.listen.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as caller:
        caller.sendall(b"\xff" * 128)
        with contextlib.suppress(ConnectionResetError):
            assert caller.recv(1) == b""
    name = "longhaul_peerd_handshakes_refused_total"
    soon(lambda: labelled(peer.http, name, "malformed") == 1, "the caller is counted")
    assert labelled(peer.http, name, "token") == 0
    assert "caller at the data port refused reason=malformed" in cluster.log("peerd-0")


# ---------------------------------------------------------------------- the table


def rows() -> list[list[str]]:
    assert __doc__ is not None
    lines = [line for line in __doc__.splitlines() if line.startswith("| ")][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_tests_of_the_table_exist() -> None:
    assert len(rows()) > 20
    for case, test, *_ in rows():
        if test.startswith("test_"):
            assert test in globals(), case
            continue
        file, name = test.split()
        paths = [path for top in ("coordinator", "peerd", "tests") for path in (ROOT / top).rglob(f"{file}.cc")]
        assert len(paths) == 1, (case, file)
        assert re.search(rf"^TEST(_F|_P)?\(\w+, {name}\)", paths[0].read_text(), re.MULTILINE), (case, test)


def test_the_counters_of_the_table_are_documented() -> None:
    text = re.sub(r"\s+", " ", (ROOT / "docs" / "metrics.md").read_text())
    for case, _, counter, _ in rows():
        if counter == "-":
            continue
        name, _, reason = counter.rstrip("}").partition("{")
        found = re.search(rf"`longhaul_{name}` \(counter(.*?)\):", text)
        assert found, (case, counter)
        values = found[1] + text[found.end() - 2 : found.end() + 300]
        assert not reason or re.search(rf"\b{reason}\b", values), (case, counter)
