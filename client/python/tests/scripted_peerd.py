"""A model of peerd, in a thread of the test's process. The test decides what it answers, and when."""

from __future__ import annotations

import contextlib
import mmap
import pathlib
import socket
import struct
import tempfile
import threading
from collections.abc import Callable

# As in proto/wire/ipc.h.
MAGIC = 0x3149484C
REQUEST_BYTES = 256
REPLY_BYTES = 544
REQUESTS = (
    "HELLO",
    "REGION",
    "UNREGION",
    "JOIN",
    "LEAVE",
    "STEP",
    "OP",
    "MEMBERS",
    "STATE",
    "UNSTATE",
    "SYNC",
    "KEPT",
    "TAKE",
    "PREPARE",
    "MEMBER",
    "CANCEL",
    "WHY",
)
DONE, GONE, PROGRESS = 64, 66, 67
PASSED, BACKGROUND, CHANGED = 1, 4, 8  # of replies
ABORTED, DEADLINE_EXCEEDED, EVICTED = 4, 5, 7
MEMBER = 1  # every member's handle
OP_FORMAT = "<QQQQQQBBBBIBBHBBBBQdQQQIIIIHBB"
OP_FIELDS = (
    *("tag", "count", "source_region", "source_offset", "target_region", "target_offset", "dtype", "reduce"),
    *("on_fault", "quantization", "min_world", "algorithm", "kind", "world", "order", "weighted", "unequal", "flags"),
    *("root", "weight", "list", "table_region", "table_offset", "participants", "gives", "gets", "pieces"),
    *("block", "rounding", "refusal"),
)


class Request:
    def __init__(self, peerd: ScriptedPeerd, connection: socket.socket, frame: bytes) -> None:
        self.peerd = peerd
        self.connection = connection
        _, type_, self.call = struct.unpack_from("<IIQ", frame)
        self.name = REQUESTS[type_ - 1]
        self.body = frame[24:]

    def answer(self, body: bytes = b"", status: int = 0, flags: int = 0) -> None:
        self.say(DONE, self.call, body, status, flags)

    @property
    def op(self) -> dict[str, float]:
        """The fields of an OP (lh_ipc_op)."""
        return dict(zip(OP_FIELDS, struct.unpack_from(OP_FORMAT, self.body)))

    def table(self) -> bytes:
        """The table of an OP, to the end of its region."""
        region, offset = int(self.op["table_region"]), int(self.op["table_offset"])
        return self.peerd.regions[region][offset : offset + (1 << 20)] if region else b""

    @property
    def reads_all(self) -> bool:
        """True if a SYNC or STEP does not list touched tensors, so that peerd has to read all of them."""
        touched: int = struct.unpack_from("<QQQQII", self.body)[2]
        return touched == 0

    def fetch(self, content: bytes) -> None:
        """For SYNC or STEP: writes `content` to the inbox of the state's first tensor, and marks its first chunk."""
        (state,) = struct.unpack_from("<Q", self.body)
        table, marks = self.peerd.states[state]
        region, offset = table
        # 352: the offset of lh_ipc_tensor.inbox.
        inbox, at = struct.unpack_from("<QQ", self.peerd.regions[region], offset + 352)
        self.peerd.regions[inbox][at : at + len(content)] = content
        region, offset = marks
        self.peerd.regions[region][offset] = 1

    def progress(self, done: int, total: int) -> None:
        self.say(PROGRESS, 0, struct.pack("<QQQII", done, total, 1000, 1, 0))

    def say(self, type_: int, call: int, body: bytes, status: int = 0, flags: int = 0) -> None:
        head = struct.pack("<IIQQiI", MAGIC, type_, call, MEMBER, status, flags)
        epoch = self.peerd.epoch
        world = struct.pack("<QQIIIIQQII", epoch, 7, 0, 1, 0, 0, epoch, epoch, 0, 1)
        # The client may be gone.
        with contextlib.suppress(OSError):
            self.connection.sendall((head + world + body).ljust(REPLY_BYTES, b"\0"))


def op_info() -> bytes:
    """The body of an answer to OP."""
    return struct.pack("<QQQQQIIII", 1, 0, 0, 0, 0, 1, 0, 2, 0)


def sync_info(revision: int) -> bytes:
    """The body of an answer to SYNC, STEP or TAKE."""
    return struct.pack("<QQQQQII", revision, 1, 2, 0, 0, 0, 0)


class ScriptedPeerd:
    """Answers each request with success at once, unless `on` has a function for it. `heard`: names of `requests`."""

    def __init__(self, path: str | None = None, **on: Callable[[Request], None]) -> None:
        self.on = on
        self.heard: list[str] = []
        self.requests: list[Request] = []
        self.epoch = 1  # in every answer
        self.regions: dict[int, mmap.mmap] = {}
        # By state: region and offset of its table, and of the marks for the chunks that a sync changes.
        self.states: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}
        self.path = path or str(pathlib.Path(tempfile.mkdtemp(prefix="longhaul-", dir="/tmp")) / "peerd.sock")
        self._connections: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def evict(self) -> None:
        """Tells the client of the newest request that its member was removed."""
        self.requests[-1].say(GONE, 0, b"evicted", EVICTED)

    def die(self) -> None:
        pathlib.Path(self.path).unlink()
        # This wakes the thread in accept(). close() would not.
        self._listener.shutdown(socket.SHUT_RDWR)
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> ScriptedPeerd:
        return self

    def __exit__(self, *_: object) -> None:
        self.die()
        pathlib.Path(self.path).parent.rmdir()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        data = b""
        descriptors: list[int] = []
        with contextlib.suppress(OSError):
            while True:
                part, received, _, _ = socket.recv_fds(connection, REQUEST_BYTES - len(data), 1)
                descriptors += received
                if not part:
                    return
                data += part
                if len(data) < REQUEST_BYTES:
                    continue
                request = Request(self, connection, data)
                data = b""
                if request.name == "REGION":
                    descriptor = descriptors.pop()
                    self.regions[struct.unpack_from("<Q", request.body)[0]] = mmap.mmap(descriptor, 0)
                    socket.close(descriptor)
                if request.name == "STATE":
                    state, *ranges = struct.unpack_from("<QQQQQ", request.body)
                    self.states[state] = ((ranges[0], ranges[1]), (ranges[2], ranges[3]))
                self.requests.append(request)
                self.heard.append(request.name)
                self.on.get(request.name.lower(), self._answer)(request)

    def _answer(self, request: Request) -> None:
        body = sync_info(0) if request.name in ("SYNC", "STEP", "TAKE") else op_info()
        request.answer(body, flags=PASSED if request.name == "STEP" else 0)
