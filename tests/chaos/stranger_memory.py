"""What strangers cost the coordinator in memory, whatever they send: attacks of which the first three once took gigabytes.

headers: headers without end, by clients that never acknowledge the server's settings; watches: streams that wait for
news of its health; resets: calls that are reset at once; most: the most that the
coordinator lets through. Each comes from some loopback addresses, over TLS and in clear.
Meanwhile a peer of another address is attached, and its stream must not end, and a new peer joins from there.

The run fails if the coordinator uses more than MEMORY_MIB above what it had, or if a peer cannot come in.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import multiprocessing
import pathlib
import re
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import longhaul as lh
from longhaul.testing import LocalCluster, find_binary

MEMORY_MIB = 64
PATIENCE_S = 60
ADDRESSES = tuple(f"127.0.1.{i}" for i in range(1, 9))
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5)
SPAWN = multiprocessing.get_context("spawn")


def literal(name: bytes, value: bytes) -> bytes:
    """A header field without compression (RFC 7541, 6.2.2)."""
    return b"\0" + length(name) + name + length(value) + value


def length(text: bytes) -> bytes:
    if len(text) < 127:
        return bytes([len(text)])
    left, out = len(text) - 127, b"\x7f"
    while left >= 128:
        out, left = out + bytes([left % 128 + 128]), left // 128
    return out + bytes([left])


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def call(path: bytes) -> bytes:
    fields = ((b":path", path), (b":authority", b"x"), (b"content-type", b"application/grpc"), (b"te", b"trailers"))
    return b"\x83\x86" + b"".join(literal(name, value) for name, value in fields)


def headers() -> bytes:
    """One stream whose headers go on for ever: the server may drop the fields, and not the frames."""
    begin = frame(1, 0, 1, call(b"/longhaul.v1.Coordinator/Attach"))
    return PREFACE + begin + b"".join(frame(9, 0, 1, literal(b"x%d" % i, b"v" * 16000)) for i in range(120))


def watches() -> bytes:
    asked = b"\0" + struct.pack(">I", 0)
    path = call(b"/grpc.health.v1.Health/Watch")
    return PREFACE + b"".join(frame(1, 4, 2 * i + 1, path) + frame(0, 1, 2 * i + 1, asked) for i in range(256))


def resets() -> bytes:
    path = call(b"/longhaul.v1.Coordinator/Attach")
    code = struct.pack(">I", 8)
    return PREFACE + b"".join(frame(1, 4, 2 * i + 1, path) + frame(3, 0, 2 * i + 1, code) for i in range(1000))


def most() -> bytes:
    """What a stranger may send at most (coordinator/grpc/stranger_budget.h): the fields repeat one of a table."""
    path = call(b"/longhaul.v1.Coordinator/Attach") + b"\x40" + length(b"x") + b"x" + length(b"v" * 450) + b"v" * 450
    first = path + b"\xbe" * (680 - len(path))
    later = call(b"/longhaul.v1.Coordinator/Attach")
    later += b"\xbe" * (680 - len(later))
    begin = frame(1, 4, 1, first) + frame(1, 4, 3, later) + frame(1, 4, 5, later)
    message = b"\0" + struct.pack(">I", 70000) + bytes(16379)
    return PREFACE + begin + frame(0, 0, 1, message) + b"".join(frame(0, 0, 1, bytes(16384)) for _ in range(1))


WAYS: dict[str, tuple[Callable[[], bytes], int]] = {
    "headers": (headers, 300),
    "watches": (watches, 300),
    "resets": (resets, 60),
    "most": (most, 300),
}


def flood(way: str, address: tuple[str, int], tls: bool, held: int, seconds: float, counts: Any) -> None:
    """Holds connections that send what they can, and opens others in place of those that end."""
    sends = WAYS[way][0]()
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    held_now: list[tuple[socket.socket, int]] = []
    deadline = time.monotonic() + seconds
    opened = 0
    while time.monotonic() < deadline:
        if len(held_now) < held:
            plain = socket.socket()
            with contextlib.suppress(OSError):
                plain.bind((ADDRESSES[opened % len(ADDRESSES)], 0))
                plain.settimeout(2)
                plain.connect(address)
                sock = context.wrap_socket(plain) if tls else plain
                sock.settimeout(0)
                held_now.append((sock, 0))
            opened += 1
        for i in reversed(range(len(held_now))):
            sock, sent = held_now[i]
            try:
                if sent < len(sends):
                    more = sock.send(sends[sent : sent + 65536])
                    held_now[i] = (sock, sent + more)
                    counts[1] += more
                elif not sock.recv(4096):
                    raise ConnectionResetError
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                continue
            except OSError:
                sock.close()
                del held_now[i]
        counts[0] = opened


def memory_mib(pid: int) -> float:
    (kib,) = re.findall(r"VmRSS:\s+(\d+) kB", pathlib.Path(f"/proc/{pid}/status").read_text())
    return int(kib) / 1024


def run_lhctl(*arguments: object) -> str:
    return subprocess.run(
        [str(find_binary("lhctl")), *map(str, arguments)], check=True, capture_output=True, text=True
    ).stdout


def join_by(socket_path: str, seconds: float) -> float | None:
    """How long a new member takes to come in; None: it cannot."""
    begun = time.monotonic()
    try:
        comm = lh.join("r", group=1, peerd=socket_path, timeout=seconds)
    except lh.Error:
        return None
    joined = round(time.monotonic() - begun, 2)
    comm.leave(timeout=PATIENCE_S)
    return joined


def measure(way: str, tls: bool, seconds: float, logs: pathlib.Path) -> dict[str, Any]:
    flags: list[str] = []
    peer_flags: list[str] = []
    if tls:
        ca = logs / "ca"
        run_lhctl("ca", "init", ca)
        run_lhctl("ca", "issue", ca, "--name=coordinator", "--role=coordinator", "--host=127.0.0.1")
        flags = [f"--tls-cert={ca}/coordinator.crt", f"--tls-key={ca}/coordinator.key", "--auth=token"]
        peer_flags = [f"--tls-ca={ca}/ca.crt"]
        token = logs / "token"
    with LocalCluster(peers=0, log_dir=logs, coordinator_flags=flags) as cluster:
        if tls:
            made = json.loads(run_lhctl(f"--coordinator={cluster.admin}", "token", "create", "--json", "--run=r"))
            token.touch(0o600)
            token.write_text(made["token"] + "\n")
            peer_flags.append(f"--token-file={token}")
        cluster.add_peer(peer_flags)
        comm = lh.join("r", peerd=cluster.socket(0), timeout=PATIENCE_S)
        host, _, port = cluster.coordinator.rpartition(":")
        counts = SPAWN.RawArray("Q", 2)
        held = WAYS[way][1]
        before = memory_mib(cluster.coordinator_pid)
        attacker = SPAWN.Process(target=flood, args=(way, (host, int(port)), tls, held, seconds, counts), daemon=True)
        attacker.start()
        most = before
        begun = time.monotonic()
        try:
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                while counts[0] < held / 4:
                    assert attacker.is_alive(), f"the attacker ended after {counts[0]} of {held}"
                    time.sleep(0.02)
                number = cluster.add_peer(peer_flags)
                newcomer = pool.submit(join_by, cluster.socket(number), seconds)
                while attacker.is_alive():
                    most = max(most, memory_mib(cluster.coordinator_pid))
                    time.sleep(0.02)
                joined_s = newcomer.result()
        finally:
            attacker.kill()
        comm.leave(timeout=PATIENCE_S)
        cut = re.findall(r"peer detached peer=\w+ reason=(.*)", (logs / "coordinator.log").read_text())
    report = {
        "way": way,
        "tls": tls,
        "before_mib": round(before),
        "more_mib": round(most - before, 1),
        "connections": int(counts[0]),
        "sent_mib": round(counts[1] / 2**20, 1),
        "joined_s": joined_s,
        "seconds": round(time.monotonic() - begun, 1),
        "failures": [],
    }
    if joined_s is None:
        report["failures"].append("a peer could not come in")
    if most - before > MEMORY_MIB:
        report["failures"].append(
            f"the coordinator used {most - before:.0f} MiB for strangers; allowed are {MEMORY_MIB}"
        )
    if cut:
        report["failures"].append(f"streams of peers ended: {cut}")
    return report


def main() -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--seconds", type=float, default=10, help="of each attack")
    made.add_argument("--way", choices=tuple(WAYS), action="append", help="default: all")
    made.add_argument("--mode", choices=("clear", "sealed"), action="append", help="default: both")
    options = made.parse_args()
    failed = False
    for mode in options.mode or ("clear", "sealed"):
        for way in options.way or tuple(WAYS):
            with tempfile.TemporaryDirectory(prefix="lhm-") as logs:
                report = measure(way, mode == "sealed", options.seconds, pathlib.Path(logs))
            print(json.dumps(report), flush=True)
            failed |= bool(report["failures"])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
