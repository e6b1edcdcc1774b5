"""A copier without a GPU: for tests of everything around the copies, on any machine."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from longhaul.torch import _copier
from longhaul.torch._copier import DOWN, UP, Copier, Mark, side_by_side, spread

#: A test that holds something back must let it go by then.
_PATIENCE_S = 120.0


class DeviceTensor(torch.Tensor):
    """A tensor that says that it is on a GPU. Its elements are in host memory, where only a FakeCopier looks for them."""

    on: torch.device  # the subclass of each FakeCopier sets it

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.on

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def data_ptr(self) -> int:
        """An address where nothing is: who takes it for host memory crashes."""
        return super().data_ptr() + (1 << 60)


class _Mark:
    def __init__(self) -> None:
        self.reached = threading.Event()
        self.problem: RuntimeError | None = None

    def wait(self) -> None:
        if not self.reached.wait(_PATIENCE_S):
            raise RuntimeError(f"a lane of the fake copier was held back for {_PATIENCE_S} s")
        if self.problem is not None:
            raise self.problem


class _Lane:
    """A stream: a thread that makes the calls of a queue, one after the other."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._problem: RuntimeError | None = None
        self._thread = threading.Thread(target=self._run, name=f"fake {name}", daemon=True)
        self._thread.start()

    def queue(self, call: Callable[[], None]) -> None:
        self._calls.put(call)

    def mark(self) -> _Mark:
        mark = _Mark()

        def reach() -> None:
            mark.problem = self._problem
            mark.reached.set()

        self.queue(reach)
        return mark

    def settle(self) -> None:
        """Waits until all calls are done that were queued before. At once if the lane has ended."""
        mark = self.mark()
        while threading.current_thread() is not self._thread and self._thread.is_alive():
            if mark.reached.wait(0.1):
                return

    def end(self) -> None:
        self._calls.put(None)
        self._thread.join(_PATIENCE_S)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except RuntimeError as problem:
                self._problem = problem  # as on a GPU, everything after it fails, too


class FakeCopier(Copier):
    """A device that is a part of this process. Within `with FakeCopier() as device:`, ops take its tensors.

    device.tensor(values)   # a tensor on the device
    device.run(call)        # a kernel: queued in the stream of the caller
    device.read(tensor)     # what the tensor holds when everything is done that the stream of the caller waits for
    with device.held(UP):   # what is queued in the lane from now on begins when the block ends
    device.log              # (lane, bytes) of all copies, in the order in which they were made
    device.pinned           # address and size of all host memory that is pinned now
    device.capture = True   # as if the stream of the caller recorded a graph
    device.fails = "..."    # the next copies fail with this text
    device.refuses = True   # host memory cannot be pinned
    """

    def __init__(self, index: int = 0) -> None:
        super().__init__(torch.device("cuda", index))
        self._kind: type[DeviceTensor] = type("DeviceTensor", (DeviceTensor,), {"on": self.device})
        self._lanes = {name: _Lane(name) for name in (DOWN, UP, "stream")}
        self._before: Copier | None = None
        self.log: list[tuple[str, int]] = []
        self.pinned: dict[int, int] = {}
        self.capture = False
        self.refuses = False
        self.fails: str | None = None

    def __enter__(self) -> FakeCopier:
        with _copier._lock:
            self._before = _copier._copiers.get(self.device)
            _copier._copiers[self.device] = self
        return self

    def __exit__(self, *_: object) -> None:
        with _copier._lock:
            del _copier._copiers[self.device]
            if self._before is not None:
                _copier._copiers[self.device] = self._before
        for lane in self._lanes.values():
            lane.end()
        self._lanes.clear()

    # ------------------------------------------------------------------ for tests

    def tensor(self, values: torch.Tensor) -> DeviceTensor:
        return values.clone().as_subclass(self._kind)

    def run(self, call: Callable[[], Any]) -> None:
        self._lanes["stream"].queue(lambda: (call(), None)[1])

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        copies: list[torch.Tensor] = []
        self.run(lambda: copies.append(_plain(tensor).clone()))
        self.now().wait()
        return copies[0]

    @contextlib.contextmanager
    def held(self, lane: str) -> Iterator[None]:
        """lane: DOWN, UP, or "stream": that of the caller."""
        gate = threading.Event()
        self._lanes[lane].queue(lambda: (gate.wait(_PATIENCE_S), None)[1])
        try:
            yield
        finally:
            gate.set()

    # ------------------------------------------------------------------ the copier

    def capturing(self) -> bool:
        return self.capture

    def now(self) -> Mark:
        return self._lanes["stream"].mark()

    def mark(self, lane: str) -> Mark:
        return self._lanes[lane].mark()

    def hold(self, lane: str, mark: Mark) -> None:
        self._lanes[lane].queue(mark.wait)

    def follow(self, mark: Mark) -> None:
        self.hold("stream", mark)

    def settle(self) -> None:
        for lane in self._lanes.values():
            lane.settle()

    def _down(self, host: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        sources = [_plain(tensor) for tensor in tensors]
        self._copy(DOWN, host, lambda: (host.copy_(side_by_side(sources, host.dtype)), None)[1])

    def _up(self, host: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        targets = [_plain(tensor) for tensor in tensors]
        self._copy(UP, host, lambda: spread(host, targets))

    def _copy(self, lane: str, host: torch.Tensor, call: Callable[[], None]) -> None:
        def copy() -> None:
            if self.fails is not None:
                raise RuntimeError(self.fails)
            call()
            self.log.append((lane, host.numel() * host.element_size()))

        self._lanes[lane].queue(copy)

    def _register(self, address: int, nbytes: int) -> bool:
        if self.refuses:
            return False
        others = list(self.pinned.items())  # a copy: members have a thread each
        assert not any(address < begin + size and begin < address + nbytes for begin, size in others), "pinned twice"
        self.pinned[address] = nbytes
        return True

    def _unregister(self, address: int) -> None:
        del self.pinned[address]

    def _finish(self) -> None:
        # The thread of a lane may free the memory itself, after the last copy of it.
        for lane in (self._lanes[name] for name in (DOWN, UP) if name in self._lanes):
            lane.settle()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_subclass(torch.Tensor)
