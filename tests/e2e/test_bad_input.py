"""Tests of bad input: each gives a clear error or a counted refusal, and nothing crashes, hangs or grows."""

from __future__ import annotations

import os
import pathlib
import random
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from trainers import Trainer, assemble, trainers_of, until

import longhaul as lh
from longhaul.testing import LocalCluster, find_binary

SEED = int(os.environ.get("LONGHAUL_SEED", "1"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(peers=3) as started:
        yield started


def resident_mib(pid: int) -> float:
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) / 1024


# ---------------------------------------------------------------------- members that disagree


@pytest.mark.parametrize(
    "odd, words",
    [
        ({"count": 4097}, ("4096", "4097")),
        ({"count": 300_000}, ("4096", "300000")),
        ({"dtype": "float64"}, ("float32", "float64")),
        ({"op": "max"}, ("sum", "max")),
    ],
    ids=["count", "count-one-shot-against-ring", "dtype", "op"],
)
def test_members_that_disagree_all_get_invalid_argument_naming_both(
    cluster: LocalCluster, odd: dict, words: tuple[str, str], request: pytest.FixtureRequest
) -> None:
    run = "odd-" + request.node.callspec.id
    with ExitStack() as stack:
        trainers = trainers_of(stack, 3)
        assemble(trainers, [cluster.socket(i) for i in range(3)], run)
        usual = {"count": 4096, "dtype": "float32", "op": "sum"}
        for i, trainer in enumerate(trainers):
            trainer.start("all_reduce", **{**usual, **(odd if i == 1 else {})})
        for trainer in trainers:
            answer = trainer.finish()
            assert answer.get("error") == "InvalidArgument", answer
            for word in words:
                assert word in answer["text"], answer
        # The group can go on.
        for trainer in trainers:
            trainer.start("all_reduce", count=10, value=1.0)
        for trainer in trainers:
            assert trainer.finish().get("first") == 3.0


# ---------------------------------------------------------------------- garbage on every socket


def garbage(rng: random.Random) -> list[bytes]:
    return [
        b"",
        b"\x00",
        b"GET / HTTP/1.1\r\n\r\n",
        rng.randbytes(9),
        rng.randbytes(127),
        rng.randbytes(128),
        rng.randbytes(65536),
        b"LHH1" + rng.randbytes(124),
        b"LHI1" + rng.randbytes(124),
        b"\xff" * (1 << 20),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rng.randbytes(4096),
    ]


def throw(family: int, address: object, data: bytes) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(60)
        try:
            sock.connect(address)  # type: ignore[arg-type]
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(65536):
                pass
        except OSError:
            pass  # any kind of refusal is right


def host_port(address: str) -> tuple[str, int]:
    host, port = address.rsplit(":", 1)
    return host, int(port)


def test_garbage_on_every_socket_is_refused_and_counted(cluster: LocalCluster) -> None:
    rng = random.Random(SEED)
    peer = cluster.peers[0]
    handshakes = peer.metric("longhaul_peerd_handshakes_refused_total")
    requests = peer.metric("longhaul_peerd_requests_refused_total")
    for _ in range(3):
        for data in garbage(rng):
            throw(socket.AF_INET, host_port(peer.listen), data)
            throw(socket.AF_UNIX, peer.socket, data)
            throw(socket.AF_INET, host_port(cluster.coordinator), data)
            throw(socket.AF_INET, host_port(peer.http), data)
    memory = resident_mib(peer.pid), resident_mib(cluster.coordinator_pid)
    for _ in range(20):
        for data in garbage(rng):
            throw(socket.AF_INET, host_port(peer.listen), data)
            throw(socket.AF_UNIX, peer.socket, data)
            throw(socket.AF_INET, host_port(cluster.coordinator), data)
    until(
        lambda: peer.metric("longhaul_peerd_handshakes_refused_total") > handshakes + 100,
        "refused handshakes are counted",
    )
    until(
        lambda: peer.metric("longhaul_peerd_requests_refused_total") > requests + 100,
        "refused requests are counted",
    )
    after = resident_mib(peer.pid), resident_mib(cluster.coordinator_pid)
    assert after[0] < memory[0] + 32 and after[1] < memory[1] + 32, (memory, after)
    # Peerd and coordinator still serve.
    trainer = Trainer()
    try:
        assert trainer.do("join", socket=peer.socket, run="after-garbage")["size"] == 1
        assert trainer.do("all_reduce", count=5, value=3.0)["first"] == 3.0
    finally:
        trainer.close()


def test_connections_that_say_nothing_do_not_keep_others_out(cluster: LocalCluster) -> None:
    peer = cluster.peers[1]
    with ExitStack() as stack:
        for _ in range(400):
            sock = stack.enter_context(socket.socket())
            sock.settimeout(60)
            sock.connect(host_port(peer.listen))
        assemble(trainers_of(stack, 2), [cluster.socket(i) for i in (0, 1)], "slow-strangers")


# ---------------------------------------------------------------------- a wrong set-up


def test_a_wrong_socket_path_is_named() -> None:
    with pytest.raises(lh.Unavailable, match="/nonexistent/peerd.sock"):
        lh.join(run="x", peerd="/nonexistent/peerd.sock", timeout=0.5)


def test_an_unreachable_coordinator_fails_the_join_and_is_named(tmp_path: pathlib.Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # taken, but nobody listens
        address = "127.0.0.1:%d" % closed.getsockname()[1]
        with LocalCluster(peers=1, coordinator=address, peerd_flags=["--coordinator_timeout_ms=500"]) as alone:
            with pytest.raises(lh.Unavailable, match=re.escape(address)):
                lh.join(run="x", peerd=alone.socket(0), timeout=60)


@pytest.mark.parametrize(
    "which", ["coordinator-grpc", "coordinator-admin", "coordinator-http", "peerd-data", "peerd-http", "peerd-socket"]
)
def test_an_address_in_use_is_named_and_ends_with_one(
    cluster: LocalCluster, which: str, tmp_path: pathlib.Path
) -> None:
    peer = cluster.peers[0]
    free = "127.0.0.1:0"
    coordinator = [str(find_binary("longhaul-coordinator")), f"--admin={free}", "--store=memory"]
    peerd = [str(find_binary("longhaul-peerd")), f"--coordinator={cluster.coordinator}"]
    command, named = {
        "coordinator-grpc": (
            [*coordinator, f"--listen={cluster.coordinator}", f"--http={free}"],
            cluster.coordinator,
        ),
        "coordinator-admin": (
            [*coordinator, f"--listen={free}", f"--admin={peer.http}", f"--http={free}"],
            peer.http,
        ),
        "coordinator-http": ([*coordinator, f"--listen={free}", f"--http={peer.http}"], peer.http),
        "peerd-data": (
            [*peerd, f"--listen={peer.listen}", f"--http={free}", f"--socket={tmp_path}/s"],
            peer.listen,
        ),
        "peerd-http": (
            [*peerd, f"--listen={free}", f"--http={peer.http}", f"--socket={tmp_path}/s"],
            peer.http,
        ),
        "peerd-socket": ([*peerd, f"--listen={free}", f"--http={free}", f"--socket={peer.socket}"], peer.socket),
    }[which]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done
    assert named in done.stderr, done.stderr


@pytest.mark.parametrize("binary", ["longhaul-coordinator", "longhaul-peerd", "lhctl"])
@pytest.mark.parametrize("flag", ["--no-such-flag", "--listen=nonsense", "stray"])
def test_bad_usage_ends_with_two_and_says_why(binary: str, flag: str) -> None:
    done = subprocess.run([str(find_binary(binary)), flag], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done
    assert flag.lstrip("-").split("=")[0] in done.stderr


@pytest.mark.parametrize(
    ("address", "why"), [("10.0.0.1:0", "port 0"), ("a" * 300 + ":29700", "306 bytes"), ("nonsense", "host:port")]
)
def test_an_address_that_nobody_can_reach_is_not_advertised(address: str, why: str) -> None:
    command = [str(find_binary("longhaul-peerd")), "--coordinator=127.0.0.1:1", f"--advertise={address}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done
    assert "--advertise" in done.stderr and why in done.stderr, done.stderr


def test_a_world_of_one_works(cluster: LocalCluster) -> None:
    trainer = Trainer()
    try:
        assert trainer.do("join", socket=cluster.socket(2), run="alone")["size"] == 1
        for count in (1, 4096, 1 << 20):
            assert trainer.do("all_reduce", count=count, value=7.0)["first"] == 7.0
            assert trainer.do("all_reduce", count=count, value=7.0, op="avg")["first"] == 7.0
        trainer.do("begin_step")
        trainer.do("leave")
    finally:
        trainer.close()
