"""Tests that the emulated network does what a scenario says, and that Longhaul works on it.

What the tests assert about time holds on any machine: no packet comes too early, and nothing gets more than its rate.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from testbed import SETTINGS, EmulatorError, Wan, access_of, scenarios, settings_of, uniform, why_not
from trainers import PATIENCE_S, all_do, trainers_of, until

pytestmark = pytest.mark.alone

needs_namespaces = pytest.mark.skipif(bool(why_not()), reason=why_not() or "never")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def udp_pair(stack: ExitStack, wan: Wan, src: str = "h0", dst: str = "h1") -> tuple[socket.socket, socket.socket]:
    """A sender at src and a receiver at dst; the sender is connected to the receiver."""
    with wan.inside(dst):
        receiver = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    # SO_RCVBUFFORCE goes beyond the system's limit, so that a slow receiver drops nothing.
    receiver.setsockopt(socket.SOL_SOCKET, 33, 32 << 20)
    receiver.bind((wan.address(dst), 0))
    receiver.settimeout(PATIENCE_S)
    with wan.inside(src):
        sender = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    sender.connect(receiver.getsockname())
    sender.settimeout(PATIENCE_S)
    return sender, receiver


def tcp_pair(stack: ExitStack, wan: Wan, src: str = "h0", dst: str = "h1") -> tuple[socket.socket, socket.socket]:
    """The two ends of a connection that src made to dst."""
    with wan.inside(dst):
        listener = stack.enter_context(socket.create_server((wan.address(dst), 0)))
    listener.settimeout(PATIENCE_S)
    with wan.inside(src):
        sender = stack.enter_context(socket.create_connection(listener.getsockname(), timeout=PATIENCE_S))
    receiver, _ = listener.accept()
    stack.enter_context(receiver)
    receiver.settimeout(PATIENCE_S)
    return sender, receiver


def transfer(pair: tuple[socket.socket, socket.socket], data: bytes) -> tuple[bytes, float]:
    """Sends `data` and ends the connection. Returns what arrived, and after how many seconds."""
    sender, receiver = pair

    def send() -> None:
        with contextlib.suppress(OSError):  # the receiver notices the error
            sender.sendall(data)
            sender.shutdown(socket.SHUT_WR)

    began = time.monotonic()
    thread = threading.Thread(target=send)
    thread.start()
    parts = []
    while part := receiver.recv(1 << 20):
        parts.append(part)
    seconds = time.monotonic() - began
    thread.join(PATIENCE_S)
    return b"".join(parts), seconds


@pytest.mark.parametrize("name", scenarios())
def test_a_named_scenario_says_something_sensible_of_every_pair(name: str) -> None:
    scenario = scenarios()[name]
    assert scenario["about"]
    hosts = ["co", *(f"h{i}" for i in range(scenario["hosts"]))]
    for src in hosts:
        access_of(scenario, src)
        for dst in hosts:
            if src != dst:
                assert "delay" in settings_of(scenario, src, dst), (src, dst)


def test_later_rules_win_and_directions_differ() -> None:
    scenario = {
        "links": [
            {"between": "*", "and": "*", "delay": "10ms", "rate": "1mbit"},
            {"from": ["h0", "h1"], "to": "h2", "delay": "20ms"},
        ]
    }
    assert settings_of(scenario, "h1", "h2") == {"delay": "20ms", "rate": "1mbit"}
    assert settings_of(scenario, "h2", "h1") == {"delay": "10ms", "rate": "1mbit"}
    for rule in ({"between": "h0", "to": "h1"}, {"from": "*"}, {"between": "*", "and": "*", "colour": "red"}):
        with pytest.raises(ValueError, match="link"):
            settings_of({"links": [rule]}, "h0", "h1")
    assert {"delay", "loss"} <= SETTINGS


@needs_namespaces
def test_a_packet_takes_its_delay_and_is_swallowed_while_down(stack: ExitStack, tmp_path: pathlib.Path) -> None:
    wan = stack.enter_context(Wan(tmp_path, uniform(2)))
    wan.set("h0", "h1", delay="30ms")
    wan.set("h1", "h0", delay="15ms")
    sender, receiver = udp_pair(stack, wan)

    def round_trip() -> float:
        began = time.monotonic()
        sender.send(b"there")
        data, whence = receiver.recvfrom(100)
        assert data == b"there"
        receiver.sendto(b"back", whence)
        assert sender.recv(100) == b"back"
        return time.monotonic() - began

    assert round_trip() >= 0.045
    wan.link("h0", "h1", delay="1ms")
    until(lambda: round_trip() < 0.045, "a packet takes less than it did")

    wan.down("h0", "h1")
    sender.send(b"never arrives")
    until(lambda: wan.counters("h0", "h1").get("blackholed") == 1, "it is swallowed")
    wan.up("h0", "h1")
    round_trip()
    wan.down("h1")
    receiver.sendto(b"never arrives", sender.getsockname())
    until(lambda: wan.counters("h1", "h0").get("blackholed") == 1, "it is swallowed")
    wan.up("h1")
    round_trip()
    assert wan.validity()["refused"] == 0


@needs_namespaces
def test_the_share_of_datagrams_that_is_lost_is_what_was_set(stack: ExitStack, tmp_path: pathlib.Path) -> None:
    wan = stack.enter_context(Wan(tmp_path, uniform(2, rate="200mbit", queue="10s")))
    wan.set("h0", "h1", loss="2%")
    sender, receiver = udp_pair(stack, wan)
    received: list[int] = []

    def receive() -> None:
        while (data := receiver.recv(2000)) != b"end":
            received.append(int.from_bytes(data[:4], "big"))

    thread = threading.Thread(target=receive)
    thread.start()
    count = 5000
    for i in range(count):
        sender.send(i.to_bytes(4, "big") + bytes(796))
    until(lambda: wan.counters("h0", "h1").get("entered") == count, "all are on their way")
    wan.set("h0", "h1", loss="0")
    sender.send(b"end")
    thread.join(PATIENCE_S)
    counters = wan.counters("h0", "h1")
    assert received == sorted(set(received))
    assert len(received) == count - counters["lost"]
    assert 50 <= counters["lost"] <= 150  # 100 are expected; the seed gives the same number in every run
    assert counters["dropped"] == 0


@needs_namespaces
@pytest.mark.parametrize("family", ["IPv4", "IPv6"])
def test_data_survives_what_is_cut_out_of_super_packets(stack: ExitStack, tmp_path: pathlib.Path, family: str) -> None:
    wan = stack.enter_context(Wan(tmp_path, uniform(2, delay="2ms", rate="200mbit", queue="5ms", loss="0.5%")))
    if family == "IPv6":
        with wan.inside("h1"):
            listener = stack.enter_context(socket.create_server(("fd77::b", 0), family=socket.AF_INET6))
        with wan.inside("h0"):
            sender = stack.enter_context(socket.create_connection(listener.getsockname()[:2], timeout=PATIENCE_S))
        receiver, _ = listener.accept()
        pair = sender, stack.enter_context(receiver)
        pair[1].settimeout(PATIENCE_S)
    else:
        pair = tcp_pair(stack, wan)
    data = os.urandom(6 << 20)
    came, _ = transfer(pair, data)
    assert hashlib.sha256(came).digest() == hashlib.sha256(data).digest()
    counters = wan.counters("h0", "h1")
    assert counters["lost"] > 5
    assert counters["entered"] == counters["delivered"] + counters["lost"] + counters["dropped"]
    assert wan.validity()["unread"] == 0


@needs_namespaces
def test_nothing_gets_more_than_the_rate_of_the_link_or_of_its_flow(stack: ExitStack, tmp_path: pathlib.Path) -> None:
    wan = stack.enter_context(Wan(tmp_path, uniform(2, delay="2ms", rate="40mbit", queue="20ms")))
    data = os.urandom(2 << 20)
    nbits = len(data) * 8
    came, seconds = transfer(tcp_pair(stack, wan), data)
    assert came == data
    assert seconds >= nbits / 40e6
    wan.link("h0", "h1", flow_rate="20mbit", flow_queue="20ms", rate="500mbit")
    came, seconds = transfer(tcp_pair(stack, wan), data)
    assert came == data
    assert seconds >= nbits / 20e6
    # One flow gets a rate of its own, by its ports. All others keep theirs.
    wan.reset_counters()
    slow = tcp_pair(stack, wan)
    ports = slow[0].getsockname()[1], slow[1].getsockname()[1]
    wan.set_flow_rate("h0", "h1", *ports, "5mbit")
    came, seconds = transfer(slow, data[: 1 << 19])
    assert seconds >= (8 << 19) / 5e6
    (flow,) = [flow for flow in wan.flows("h0", "h1") if flow["own_rate"]]
    assert (flow["src_port"], flow["dst_port"]) == ports
    assert flow["delivered_bytes"] > 1 << 19


@needs_namespaces
def test_a_command_that_makes_no_sense_is_refused_with_the_reason(stack: ExitStack, tmp_path: pathlib.Path) -> None:
    wan = stack.enter_context(Wan(tmp_path, uniform(1)))
    with pytest.raises(EmulatorError, match=r"no host h7; there are: co h0"):
        wan.set("h0", "h7", delay="1ms")
    with pytest.raises(EmulatorError, match="'fast' is no duration"):
        wan.set("h0", "co", delay="fast")
    with pytest.raises(EmulatorError, match="make it first, with `ip netns add`"):
        wan.do("host", "h9", 99, "/run/netns/lhc-no-such", "eth0")
    with pytest.raises(ValueError, match="no scenario mars; there are: .*three_continents"):
        Wan(tmp_path, "mars")


@needs_namespaces
def test_an_all_reduce_across_three_continents_is_right(stack: ExitStack, tmp_path: pathlib.Path) -> None:
    wan = stack.enter_context(Wan(tmp_path, "three_continents", peerd_flags=["--lanes=4", "--congestion=cubic"]))
    wan.start_coordinator()
    for host in wan.hosts:
        host.start_peerd()
    trainers = trainers_of(stack, 3)
    for host, trainer in zip(wan.hosts, trainers):
        trainer.start("assemble", socket=host.socket, run="wan", size=3)
    for trainer in trainers:
        assert "error" not in trainer.finish()
    for bit, trainer in enumerate(trainers):
        trainer.do("prepare", bit=bit, ops=2, count=300_000)
    for answer in all_do(trainers, "run_ops", members=3):
        for op in answer["ops"]:
            assert op.get("participants") == [0, 1, 2], op
            # At least two steps of the ring cross an ocean; the longest delay one way is 85 ms.
            assert op["seconds"] >= 0.085, op
    # The tensors really went through the emulator: each member sends 4/3 of each tensor.
    sent = [sum(wan.counters(f"h{i}", f"h{j}")["delivered_bytes"] for j in range(3) if j != i) for i in range(3)]
    assert all(count > 2 * 300_000 * 4 * 4 / 3 for count in sent), sent
    assert {event["kind"] for event in wan.events()} & {"death", "evict"} == set()
