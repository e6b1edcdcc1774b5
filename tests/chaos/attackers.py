"""Hostile connections at a bounded rate: the attackers of flood.py, and a sink that only takes what they send.

An attacker process has a fixed number of places for connections. In each tick it opens some connections, sends some
bytes, and looks which connections the other side has ended. How many connections and bytes there are in a second does
not depend on the other side: if no place is free, the oldest connection makes room. So attackers cost about the same,
whatever they attack.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import functools
import os
import pathlib
import random
import re
import select
import socket
import ssl
import struct
import time
from typing import Any

WIRE = pathlib.Path(__file__).parents[2] / "proto" / "wire"


def _number(file: str, pattern: str) -> int:
    found = re.search(pattern, (WIRE / file).read_text())
    assert found is not None, f"{file} has no {pattern}"
    return int(found[1])


# With another version the other side would look at nothing else.
LANE_VERSION = _number("handshake.h", r"kLaneProtocolVersion = (\d+)")
IPC_VERSION = _number("ipc.h", r"#define LH_IPC_VERSION (\d+)")

TICK_S = 0.02
CHUNK_BYTES = 4096
# A slow connection sends one byte in this time.
SLOW_S = 1.0

# What a connection does. Those in SENDERS never stop sending.
KINDS = ("random", "truncated", "oversized", "slow", "endless", "silent", "close", "half", "reset", "unread")
SENDERS = {"random", "oversized", "endless", "unread"}

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = bytes(3) + b"\4" + bytes(5)
PING = b"\0\0\x08\6" + bytes(5) + b"flooding"
# The header block of a call, with two names of the static table and four literals.
HEADERS = b"\x83\x86" + b"".join(
    b"\0%c%s%c%s" % (len(name), name, len(value), value)
    for name, value in (
        (b":path", b"/longhaul.v1.Coordinator/Attach"),
        (b":authority", b"x"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
    )
)


@dataclasses.dataclass(frozen=True)
class Target:
    """An address that is attacked. protocol: what is spoken there: grpc, tls (gRPC in TLS), http, lane or ipc."""

    name: str
    protocol: str
    address: tuple[str, int] | str

    @property
    def family(self) -> int:
        return socket.AF_UNIX if isinstance(self.address, str) else socket.AF_INET


@functools.cache
def client_hello() -> bytes:
    """The first bytes of a TLS client that speaks HTTP/2."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["h2"])
    out = ssl.MemoryBIO()
    session = context.wrap_bio(ssl.MemoryBIO(), out, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        session.do_handshake()
    return out.read()


@functools.cache
def calls(count: int) -> bytes:
    """HTTP/2 calls, each of which is reset at once."""
    frames = []
    for number in range(1, 2 * count, 2):
        stream = struct.pack(">I", number)
        frames.append(struct.pack(">I", len(HEADERS))[1:] + b"\1\4" + stream + HEADERS)
        frames.append(b"\0\0\4\3\0" + stream + struct.pack(">I", 8))
    return b"".join(frames)


def lane_hello(rng: random.Random, lanes: int = 4) -> bytes:
    """The first message at a data port (proto/wire/handshake.h), of a run that the peer does not know."""
    head = struct.pack("<IHBB32sIHHQQ", 0x3148484C, LANE_VERSION, 0, 0, rng.randbytes(32), 0, 0, lanes, 0, 1)
    return head + rng.randbytes(48) + bytes(16)


def ipc_hello(name: bytes = b"flood", version: int = IPC_VERSION) -> bytes:
    """The first message at a Unix socket (proto/wire/ipc.h)."""
    return struct.pack("<IIQQII", 0x3149484C, 1, 1, 0, version, os.getpid()) + name.ljust(224, b"\0")


class Script:
    """What one connection sends: first `begin`, and then, if it is a sender, `more` again and again."""

    def __init__(self, kind: str, protocol: str, rng: random.Random) -> None:
        begin, more, oversized = {
            "grpc": (PREFACE + SETTINGS, PING * 100, PREFACE + b"\xff\xff\xff\4\0" + bytes(4)),
            "tls": (client_hello(), b"\x16\3\3\x40\0" + rng.randbytes(1000), b"\x16\3\1\xff\xff\1\xff\xff\xff"),
            "http": (b"GET /metrics HTTP/1.1\r\nHost: x\r\n", b"X-Flood: y\r\n" * 80, b"GET /" + b"a" * 8192),
            "lane": (lane_hello(rng), lane_hello(rng), lane_hello(rng, lanes=65535)[:40] + b"\xff" * 88),
            "ipc": (ipc_hello(), ipc_hello(), ipc_hello(b"\xff" * 224, 0xFFFFFFFF)),
        }[protocol]
        if kind == "random":
            begin = more = rng.randbytes(1000)
        elif kind == "truncated":
            begin = begin[: rng.randrange(1, len(begin))]
        elif kind == "oversized":
            begin, more = oversized, b"\xff" * 1000
        elif kind == "unread" and protocol == "http":
            begin = more = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
        elif kind == "unread" and protocol == "grpc":
            more = calls(20)
        elif kind in ("silent", "close"):
            begin = b""
        self.begin = begin
        self.more = more


class Connection:
    def __init__(self, kind: str, target: Target, rng: random.Random) -> None:
        self.kind = kind
        self.target = target
        script = Script(kind, target.protocol, rng)
        self.left = script.begin
        self.more = script.more
        self.next = 0.0  # when a slow connection sends again
        self.sock = socket.socket(target.family, socket.SOCK_STREAM)
        self.sock.setblocking(False)
        try:
            if kind == "unread":
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            error = self.sock.connect_ex(target.address)
            if error not in (0, errno.EINPROGRESS):
                raise OSError(error, os.strerror(error))
        except BaseException:
            self.sock.close()
            raise

    def send(self, bytes_max: int) -> int:
        """Sends up to so many bytes, and returns how many. OSError: the other side has ended the connection."""
        if not self.left and self.kind in SENDERS:
            self.left = self.more
        if not self.left:
            return 0
        try:
            sent = self.sock.send(self.left[:bytes_max], socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        self.left = self.left[sent:]
        if not self.left and self.kind == "half":
            self.sock.shutdown(socket.SHUT_WR)
        return sent

    def close(self, reset: bool = False) -> None:
        if reset and self.target.family == socket.AF_INET:
            with contextlib.suppress(OSError):
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


@dataclasses.dataclass
class Counts:
    opened: int = 0
    failed: int = 0  # connects that failed: the queue of the listener was full
    cut: int = 0  # connections that the other side ended
    sent: int = 0  # bytes
    held: float = 0  # connections at a time, on average
    held_max: int = 0


class Attackers:
    """Attackers of some targets. connections: places. connects, bytes_: connections and bytes in a second, in all."""

    def __init__(
        self,
        targets: list[Target],
        kinds: list[str],
        connections: int,
        connects: float,
        bytes_: float,
        seed: int,
    ) -> None:
        self.targets = targets
        self.kinds = kinds
        self.places = connections
        self.connects = connects
        self.bytes = bytes_
        self.rng = random.Random(seed)
        self.poll = select.epoll()
        self.open: collections.OrderedDict[int, Connection] = collections.OrderedDict()  # the oldest first
        self.senders: collections.deque[Connection] = collections.deque()
        self.slow: collections.deque[Connection] = collections.deque()
        self.pairs: list[tuple[str, Target]] = []
        self.counts = Counts()

    def run(self, seconds: float, more: bool) -> Counts:
        """Attacks for so long. more: leave the connections open, for the next run()."""
        self.counts = Counts()
        begun = last = time.monotonic()
        connects = bytes_ = ticks = 0.0
        while (now := time.monotonic()) < begun + seconds:
            # After a long absence the attackers do not make up for all of it.
            passed = min(now - last, 5 * TICK_S)
            last = now
            connects += self.connects * passed
            bytes_ = min(bytes_ + self.bytes * passed, self.bytes)
            self.look()
            while connects >= 1:
                connects -= 1
                self.connect()
            bytes_ -= self.send(int(bytes_))
            self.trickle(now)
            ticks += 1
            self.counts.held += len(self.open)
            self.counts.held_max = max(self.counts.held_max, len(self.open))
            time.sleep(max(0.0, now + TICK_S - time.monotonic()))
        self.counts.held /= max(ticks, 1)
        if not more:
            for connection in list(self.open.values()):
                self.end(connection)
        return self.counts

    def end(self, connection: Connection, reset: bool = False) -> None:
        self.open.pop(connection.sock.fileno(), None)
        connection.close(reset)

    def look(self) -> None:
        """Ends the connections that the other side has ended."""
        for number, _ in self.poll.poll(0, max(1, len(self.open))):
            connection = self.open.get(number)
            if connection is not None:
                self.counts.cut += 1
                self.end(connection)

    def connect(self) -> None:
        if not self.pairs:
            # All pairs come equally often, in an order of their own each time.
            self.pairs = [(kind, target) for kind in self.kinds for target in self.targets]
            self.rng.shuffle(self.pairs)
        kind, target = self.pairs.pop()
        while len(self.open) >= self.places:
            self.end(next(iter(self.open.values())), reset=self.rng.random() < 0.5)
        try:
            connection = Connection(kind, target, self.rng)
        except OSError:
            self.counts.failed += 1
            return
        self.counts.opened += 1
        try:
            while kind != "slow" and connection.left and connection.send(CHUNK_BYTES) > 0:
                pass
        except OSError:
            self.counts.cut += 1
            connection.close()
            return
        if kind in ("close", "reset"):
            connection.close(reset=kind == "reset")
            return
        self.open[connection.sock.fileno()] = connection
        # Not EPOLLIN: an attacker never reads.
        self.poll.register(connection.sock, select.EPOLLRDHUP)
        if kind in SENDERS:
            self.senders.append(connection)
        elif kind == "slow":
            self.slow.append(connection)

    def send(self, bytes_max: int) -> int:
        """Lets senders send in turn. Returns how many bytes they sent."""
        left = bytes_max
        for _ in range(len(self.senders)):
            if left < CHUNK_BYTES:
                break
            connection = self.senders.popleft()
            if connection.sock.fileno() < 0:
                continue
            try:
                left -= connection.send(CHUNK_BYTES)
                self.senders.append(connection)
            except OSError:
                self.counts.cut += 1
                self.end(connection)
        self.counts.sent += bytes_max - left
        return bytes_max - left

    def trickle(self, now: float) -> None:
        for _ in range(len(self.slow)):
            if self.slow[0].next > now:
                break
            connection = self.slow.popleft()
            if connection.sock.fileno() < 0:
                continue
            try:
                connection.send(1)
            except OSError:
                self.counts.cut += 1
                self.end(connection)
                continue
            connection.next = now + SLOW_S
            self.slow.append(connection)


def attack(pipe: Any, kinds: list[str], connections: int, connects: float, bytes_: float, seed: int) -> None:
    """A process of attackers. It takes (targets, seconds) from the pipe, and answers with Counts. None ends it."""
    gangs: dict[tuple[Target, ...], Attackers] = {}
    while (order := pipe.recv()) is not None:
        targets, seconds, more = order
        gang = gangs.setdefault(tuple(targets), Attackers(targets, kinds, connections, connects, bytes_, seed))
        pipe.send(gang.run(seconds, more))


def sink(pipe: Any, count: int, directory: str) -> None:
    """A process that accepts at `count` TCP ports and as many Unix sockets, and reads what comes, and no more.

    It sends its addresses once: a list of ports, and a list of paths.
    """
    tcp = [socket.create_server(("127.0.0.1", 0), backlog=4096) for _ in range(count)]
    unix = []
    for number in range(count):
        unix.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        unix[-1].bind(f"{directory}/sink{number}")
        unix[-1].listen(4096)
    listeners = {listener.fileno(): listener for listener in (*tcp, *unix)}
    pipe.send(([listener.getsockname()[1] for listener in tcp], [listener.getsockname() for listener in unix]))
    poll = select.epoll()
    for listener in listeners.values():
        listener.setblocking(False)
        poll.register(listener, select.EPOLLIN)
    poll.register(pipe, select.EPOLLIN)
    clients: dict[int, socket.socket] = {}
    buffer = bytearray(1 << 16)
    while True:
        for number, _ in poll.poll():
            if number == pipe.fileno():
                return
            if number in listeners:
                with contextlib.suppress(BlockingIOError):
                    while True:
                        client = listeners[number].accept()[0]
                        client.setblocking(False)
                        clients[client.fileno()] = client
                        poll.register(client, select.EPOLLIN)
                continue
            try:
                over = clients[number].recv_into(buffer) == 0
            except BlockingIOError:
                continue
            except OSError:
                over = True
            if over:
                clients.pop(number).close()
