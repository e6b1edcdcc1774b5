#!/usr/bin/env python3
"""Measures what this machine can do with all processors busy: copies, additions, and TCP on loopback.

    .venv/bin/python bench/limits.py --sizes=1M,64M

`bench/allreduce.py` measures these in its own run and computes from them what an all-reduce could take at best
(figures.limit_seconds).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import json
import mmap
import multiprocessing
import multiprocessing.connection
import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Sequence

from figures import Rates
from machine import meminfo, processors
from workers import Failure

from longhaul.bench import sizes_of, text_of

# The settings that are tried for TCP: size of a block, socket buffers (0: the kernel chooses), congestion control
# ("": the system's default). The cheapest settings count.
TCP_SETTINGS = (
    (128 << 10, 0, ""),
    (128 << 10, 0, "cubic"),
    (512 << 10, 512 << 10, "cubic"),
    (1 << 20, 512 << 10, "cubic"),
)
# A block that fits into a processor's own cache.
ADD_BLOCK = 128 << 10
PATIENCE_S = 60

Start = Callable[[], None]
# The type of a function that sends a block of the tensor from an offset.
SendBlock = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class Done:
    """The work of one process: how many bytes, for how much processor time."""

    bytes: int
    cpu_s: float


def together(works: Sequence[Callable[[Start], Done]]) -> list[Done]:
    """Runs each function in a process of its own. They prepare, call start(), which waits for all, and then work."""
    context = multiprocessing.get_context("fork")  # the processes inherit sockets and tensors
    barrier = context.Barrier(len(works))

    def run(work: Callable[[Start], Done], result: multiprocessing.connection.Connection) -> None:
        def start() -> None:
            barrier.wait(PATIENCE_S)

        result.send(work(start))

    pipes = [context.Pipe(duplex=False) for _ in works]
    processes = [context.Process(target=run, args=(work, pipe[1]), daemon=True) for work, pipe in zip(works, pipes)]
    try:
        for process, pipe in zip(processes, pipes):
            process.start()
            pipe[1].close()
        done = []
        for pipe in pipes:
            if not pipe[0].poll(2 * PATIENCE_S):
                raise Failure("a measurement of the machine's limits does not end")
            try:
                done.append(pipe[0].recv())
            except EOFError:
                raise Failure("a process that measures the machine's limits died (its errors are above)") from None
        return done
    finally:
        for process in processes:
            process.kill()
            process.join()


def cost(done: Sequence[Done]) -> float:
    """Processor seconds per byte. Unlike bytes per second, this does not suffer if others use the processors, too."""
    return sum(one.cpu_s for one in done) / sum(one.bytes for one in done)


def _used() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _repeat(start: Start, seconds: float, once: Callable[[], int]) -> Done:
    """Calls `once` again and again. `once` returns how many bytes it moved."""
    once()
    start()
    used, begin = _used(), time.monotonic()
    moved = 0
    while True:
        moved += once()
        if time.monotonic() - begin >= seconds:
            return Done(moved, _used() - used)


def copy(nbytes: int, seconds: float) -> Callable[[Start], Done]:
    def work(start: Start) -> Done:
        import numpy as np

        source = np.ones(nbytes, "uint8")
        target = np.ones(nbytes, "uint8")

        def once() -> int:
            np.copyto(target, source)
            return nbytes

        return _repeat(start, seconds, once)

    return work


def add(nbytes: int, seconds: float) -> Callable[[Start], Done]:
    """Adds as a pipelined reduction does: a block that has just come and is in cache, onto the tensor."""

    def work(start: Start) -> Done:
        import numpy as np

        tensor = np.zeros(nbytes // 4, "float32")
        block = np.zeros(min(nbytes, ADD_BLOCK) // 4, "float32")
        parts = [tensor[at : at + block.size] for at in range(0, tensor.size, block.size)]

        def once() -> int:
            for part in parts:
                np.add(part, block[: part.size], out=part)
            return nbytes

        return _repeat(start, seconds, once)

    return work


def _connection(buffers: int, congestion: str) -> tuple[socket.socket, socket.socket]:
    """A connection on loopback: the sending end and the receiving end."""
    with socket.socket() as listener, socket.socket() as to_be:
        for end, option in ((listener, socket.SO_RCVBUF), (to_be, socket.SO_SNDBUF)):
            if buffers:
                end.setsockopt(socket.SOL_SOCKET, option, buffers)
            if congestion:
                with contextlib.suppress(OSError):  # the kernel may lack it
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        to_be.connect(listener.getsockname())
        to_be.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return to_be.dup(), listener.accept()[0]


class _Sink:
    """Receives. Every other block goes into one place that stays in cache, like a block that is added at once."""

    def __init__(self, nbytes: int, block: int) -> None:
        import numpy as np

        self._view = np.ones(nbytes, "uint8").data
        self._hot = np.ones(block, "uint8").data
        self._block = block
        self.moved = 0

    def place(self) -> memoryview:
        """Receives some of the next bytes, up to the end of their block."""
        at = self.moved % self._view.nbytes
        room = min(self._block - at % self._block, self._view.nbytes - at)
        if at // self._block % 2:
            return self._hot[self._block - room :]
        return self._view[at : at + room]


def plainly(to: socket.socket, nbytes: int, block: int) -> SendBlock:
    import numpy as np

    view = np.ones(nbytes, "uint8").data
    return lambda offset, end: to.sendall(view[offset:end])


def spliced(to: socket.socket, nbytes: int, block: int) -> SendBlock:
    """Sends with splice. The socket takes the pages of the tensor, which is in shared memory like an arena."""
    memory = os.memfd_create("tensor")
    os.ftruncate(memory, nbytes)
    with mmap.mmap(memory, nbytes) as pages:
        pages.write(b"\1" * nbytes)
    out, into = os.pipe()
    fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, block)

    def send(offset: int, end: int) -> None:
        while offset < end:
            piped = os.splice(memory, into, end - offset, offset_src=offset)
            offset += piped
            while piped > 0:
                piped -= os.splice(out, to.fileno(), piped)

    return send


def tcp(
    nbytes: int,
    seconds: float,
    block: int,
    buffers: int,
    congestion: str,
    sending: Callable[[socket.socket, int, int], SendBlock] = plainly,
) -> list[Callable[[Start], Done]]:
    """A sender and a receiver."""
    to, at = _connection(buffers, congestion)

    def send(start: Start) -> Done:
        send_block = sending(to, nbytes, block)
        start()
        used, until = _used(), time.monotonic() + seconds
        while time.monotonic() < until:
            for offset in range(0, nbytes, block):
                send_block(offset, min(nbytes, offset + block))
        to.shutdown(socket.SHUT_WR)  # other processes hold the socket, so closing it would not end the stream
        # The bytes count at the receiver.
        return Done(0, _used() - used)

    def receive(start: Start) -> Done:
        sink = _Sink(nbytes, block)
        start()
        used = _used()
        while True:
            count = at.recv_into(sink.place(), 0, socket.MSG_WAITALL)
            if count == 0:
                return Done(sink.moved, _used() - used)
            sink.moved += count

    return [send, receive]


def tcp_to_itself(nbytes: int, seconds: float, block: int) -> Callable[[Start], Done]:
    """Sends a block to itself, receives it, and so on. So nobody sleeps, and nobody has to be woken."""

    def work(start: Start) -> Done:
        import numpy as np

        to, at = _connection(0, "cubic")
        view = np.ones(nbytes, "uint8").data
        sink = _Sink(nbytes, block)

        def once() -> int:
            for offset in range(0, nbytes, block):
                part = view[offset : offset + block]
                to.sendall(part)
                end = sink.moved + part.nbytes
                while sink.moved < end:
                    sink.moved += at.recv_into(sink.place())
            return nbytes

        return _repeat(start, seconds, once)

    return work


def measure(nbytes: int, seconds: float = 0.3) -> Rates:
    """Measures all rates for one size. This takes about twelve times `seconds`."""
    count = processors()
    # The buffers take at most a quarter of the free memory, however many processors there are.
    nbytes = max(4 * 4096, min(nbytes, meminfo("MemAvailable") // (16 * count)) // 4096 * 4096)
    copied = cost(together([copy(nbytes, seconds)] * count))
    added = cost(together([add(nbytes, seconds)] * count))
    pairs = max(1, count // 2)
    apart, without_copy = (
        min(
            cost(together([work for _ in range(pairs) for work in tcp(nbytes, seconds, *setting, sending)]))
            for setting in TCP_SETTINGS
        )
        for sending in (plainly, spliced)
    )
    alone = min(cost(together([tcp_to_itself(nbytes, seconds, block)] * count)) for block in (64 << 10, 128 << 10))
    return Rates(nbytes, *(count / each for each in (copied, added, min(apart, alone), apart, without_copy)))


def line_of(rates: Rates) -> str:
    def through(rate: float) -> str:
        return f"{rate / 1e9:.2f} GB/s ({processors() / rate * 1e9:.2f} CPU s/GB)"

    return (
        f"{text_of(rates.bytes):>9}: copy {rates.copy / 1e9:.1f} GB/s, add {rates.add / 1e9:.1f} GB/s, TCP {through(rates.tcp)}, "
        f"between processes {through(rates.tcp_apart)}, spliced {through(rates.tcp_spliced)}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", type=sizes_of, default="1M,16M,64M,256M", help="sizes of the tensors (default 1M,16M,64M,256M)"
    )
    parser.add_argument("--seconds", type=float, default=0.3, help="seconds for each rate (default 0.3)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each size")
    args = parser.parse_args()
    print(f"{processors()} processors; bytes per second of all together", file=sys.stderr)
    for nbytes in args.sizes:
        rates = measure(nbytes, args.seconds)
        print(json.dumps(dataclasses.asdict(rates)) if args.json else line_of(rates), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
