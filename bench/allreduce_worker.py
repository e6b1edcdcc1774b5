"""One process of a system that bench/allreduce.py measures from Python. native/worker.h explains its orders.

allreduce_worker.py longhaul CONTROL RANK SIZE PEERD_SOCKET RUN
allreduce_worker.py torch-gloo CONTROL RANK SIZE RENDEZVOUS_FILE
"""

from __future__ import annotations

import json
import socket
import sys
import time
from typing import Any

from workers import Failure, Member


class Longhaul(Member):
    """Longhaul. Its one variant is `arena`, in place."""

    def __init__(self, size: int, peerd: str, run: str) -> None:
        super().__init__()
        self.meet(peerd, run, size)
        self.tensors: dict[str, Any] = {}

    def prepare(self, variant: str, count: int) -> None:
        self.tensors[variant] = self.comm.empty(count, "float32")

    def fill(self, variant: str, value: float) -> None:
        self.tensors[variant].fill(value)

    def op(self, variant: str) -> None:
        self.comm.all_reduce(self.tensors[variant], timeout=self.PATIENCE_S)

    def result_is(self, variant: str, value: float) -> bool:
        tensor = self.tensors[variant]
        return bool(tensor.min() == value) and bool(tensor.max() == value)

    def close(self) -> None:
        self.comm.leave(timeout=self.PATIENCE_S)


class TorchGloo:
    """gloo in torch. Its one variant is in place."""

    def __init__(self, rank: int, size: int, rendezvous: str) -> None:
        import torch
        import torch.distributed

        self.torch = torch
        self.tensors: dict[str, Any] = {}
        torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)

    def prepare(self, variant: str, count: int) -> None:
        self.tensors[variant] = self.torch.empty(count, dtype=self.torch.float32)

    def fill(self, variant: str, value: float) -> None:
        self.tensors[variant].fill_(value)

    def op(self, variant: str) -> None:
        self.torch.distributed.all_reduce(self.tensors[variant])

    def result_is(self, variant: str, value: float) -> bool:
        return bool((self.tensors[variant] == value).all())

    def close(self) -> None:
        self.torch.distributed.destroy_process_group()


def carry_out(system: Longhaul | TorchGloo, rank: int, size: int, order: list[str]) -> Any:
    what, variant, *numbers = order
    if what == "prepare":
        system.prepare(variant, int(numbers[0]))
        system.fill(variant, rank + 1)
        system.op(variant)
        right = system.result_is(variant, size * (size + 1) / 2)
        system.fill(variant, 0)  # sums of zeros stay ordinary numbers, however often
        return right
    if what == "round":
        warm, iterations = map(int, numbers)
        for _ in range(warm):
            system.op(variant)
        seconds = []
        for _ in range(iterations):
            begin = time.perf_counter()
            system.op(variant)
            seconds.append(time.perf_counter() - begin)
        return seconds
    if what == "release":
        del system.tensors[variant]
        return True
    raise Failure(f"no such order: {what}")


def main() -> None:
    kind, control, rank, size, *where = sys.argv[1:]
    with socket.socket(socket.AF_UNIX) as bench:
        bench.connect(control)
        system: Longhaul | TorchGloo
        if kind == "longhaul":
            system = Longhaul(int(size), *where)
        else:
            system = TorchGloo(int(rank), int(size), *where)
        with bench.makefile("r") as orders, bench.makefile("w") as answers:
            print(rank, file=answers, flush=True)
            for line in orders:
                print(json.dumps(carry_out(system, int(rank), int(size), line.split())), file=answers, flush=True)
        system.close()


if __name__ == "__main__":
    main()
