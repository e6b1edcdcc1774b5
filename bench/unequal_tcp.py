"""Plain TCP between the hosts of bench/unequal.py: the bytes of an all-reduce, and nothing else.

In an all-reduce by shares w of a tensor of S bytes, hosts i and j send each other (w_i + w_j) S. Here each host has a
process in its network namespace, which sends every other host as many bytes at once, over a few connections that stay
open. Nothing waits for anything: no byte has to arrive before another is sent. So no all-reduce over as many
connections with the same congestion control can be expected to take less time.

The connections to a host share the bytes for it: each takes the next 64 KiB when TCP has sent most of what it had.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from workers import MIB, PATIENCE_S, Failure, Trainer, finish_all, work

PIECE = 64 << 10
UNSENT_MAX = 128 << 10


class Worker:
    """The process of a host. Its methods are the orders."""

    def listen(self, address: str) -> int:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.listener = socket.create_server((address, 0), family=family, backlog=1024)
        self.incoming: list[socket.socket] = []
        self.outgoing: list[list[socket.socket]] = []
        return int(self.listener.getsockname()[1])

    def connect(self, peers: list[tuple[str, int]], flows: int, congestion: str) -> None:
        """Opens connections to all peers, and accepts as many of theirs."""
        accepting = threading.Thread(target=self._accept, args=(len(peers) * flows,))
        accepting.start()
        for address, port in peers:
            group = [socket.create_connection((address, port), PATIENCE_S) for _ in range(flows)]
            for each in group:
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_MAX)
                each.setblocking(False)
            self.outgoing.append(group)
        accepting.join()

    def _accept(self, count: int) -> None:
        for _ in range(count):
            accepted, _ = self.listener.accept()
            accepted.setblocking(False)
            self.incoming.append(accepted)

    def exchange(self, to_send: list[int], to_receive: int) -> float:
        """Sends each peer its bytes, and receives. Returns the seconds until the last byte has come."""
        began = time.monotonic()
        left = list(to_send)
        piece, scrap = bytes(PIECE), bytearray(4 * PIECE)
        with selectors.DefaultSelector() as selector:
            for each in self.incoming:
                selector.register(each, selectors.EVENT_READ, None)
            for peer, group in enumerate(self.outgoing):
                for each in group:
                    selector.register(each, selectors.EVENT_WRITE, peer)
            while to_receive or any(left):
                ready = selector.select(PATIENCE_S)
                if not ready:
                    raise Failure(f"nothing moved for {PATIENCE_S} s")
                for key, _ in ready:
                    assert isinstance(key.fileobj, socket.socket)
                    if key.data is None:
                        got = key.fileobj.recv_into(scrap)
                        if not got:
                            raise Failure("a connection was closed")
                        to_receive -= got
                    elif left[key.data]:
                        with contextlib.suppress(BlockingIOError):
                            left[key.data] -= key.fileobj.send(piece[: left[key.data]])
                    else:
                        selector.unregister(key.fileobj)
        return time.monotonic() - began


@contextlib.contextmanager
def processes(wan: Any, flows: int, congestion: str) -> Iterator[list[Trainer]]:
    with contextlib.ExitStack() as stack:
        team = [Trainer(__file__, host.namespace) for host in wan.hosts]
        for each in team:
            stack.callback(each.kill)
        places = [(host.address, each.do("listen", address=host.address)) for host, each in zip(wan.hosts, team)]
        for rank, each in enumerate(team):
            each.start("connect", peers=places[:rank] + places[rank + 1 :], flows=flows, congestion=congestion)
        finish_all(team)
        yield team


def measure(
    wan: Any, shares: Sequence[float], mib: int, ops: int, warm_ops: int, flows: int, congestion: str, judge: Any
) -> dict[str, Any]:
    """The figures of plain TCP for a line of bench/unequal.py. judge: makes a wan.Judge, which begins when it is made."""
    size = mib * MIB
    pair = [[round((own + other) * size) for other in shares] for own in shares]
    hosts = range(len(shares))
    with processes(wan, flows, congestion) as team:

        def exchange() -> float:
            """Returns the seconds of the slowest host."""
            for i, each in enumerate(team):
                others = [j for j in hosts if j != i]
                each.start(
                    "exchange",
                    to_send=[pair[i][j] for j in others],
                    to_receive=sum(pair[j][i] for j in others),
                )
            return float(max(finish_all(team)))

        for _ in range(warm_ops):
            exchange()
        verdict = judge(wan)
        counted = [exchange() for _ in range(ops)]
        judged = verdict.verdict()
    return {
        "flows": flows,
        "congestion": congestion,
        "op_s": round(statistics.median(counted), 3),
        "op_all_s": [round(each, 3) for each in counted],
        **judged,
    }


if __name__ == "__main__" and "--worker" in sys.argv:
    work(Worker())
