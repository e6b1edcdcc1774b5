"""The workload: a trainer that checks every result against an oracle. When it is removed, it joins again.

Each step is a boundary, one small op that brings newcomers to the step and state of the others, and then several
all-reduces at once. Sizes, tags, in place or not, retry or abort follow from the seed and the step, so all members
choose the same.

The oracle: element i of a member's input is bit * odd(i, step, tag) modulo 2**64, where bit is 4**(member id mod 31).
The number odd() is odd, so it has an inverse. Therefore each element of a sum tells whose inputs are in it, and how
often. All elements have to tell the same, and OpInfo has to agree. A mixture, a stale value, a value of another op, and
an input that was added twice all fail.

Writes one JSON line per step to --log; verdict.py reads it. Exit codes: 0 stopped by SIGTERM, 3 something waited longer
than --patience, 4 a wrong value.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import time
from typing import Any

import numpy as np

import longhaul as lh

WORD = (1 << 64) - 1
SYNC_TAG = 1 << 40
# An op of at most this many bytes that is retried after a fault answers before it knows that the others are done
# (docs/adr/0019-small-ops-answer-at-once.md).
ONE_SHOT_BYTES = 4096
# A sum has room for the bits of this many members. Member ids rise, so members of one time have ids close together.
SLOTS = 31


class Stop(Exception):
    pass


class Wrong(Exception):
    pass


class Trainer:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.stop = False
        self.interruptible = False
        self.local = random.Random(f"{args.seed}/{os.getpid()}")
        self.log_file = os.open(args.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.ramp = np.arange(1 << args.max_log2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        self.works: list[lh.Work] = []
        signal.signal(signal.SIGTERM, self._on_term)

    def _on_term(self, number: int, frame: object) -> None:
        self.stop = True
        if self.interruptible:
            raise Stop

    def log(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"k": kind, "t": round(time.monotonic(), 4), **fields}, separators=(",", ":"))
        os.write(self.log_file, line.encode() + b"\n")

    # ------------------------------------------------------------------ the oracle

    def odd(self, count: int, step: int, tag: int) -> np.ndarray:
        salt = int.from_bytes(hashlib.blake2b(f"{step}/{tag}".encode(), digest_size=8).digest(), "little")
        return (self.ramp[:count] + np.uint64(salt)) | np.uint64(1)

    def whose(self, result: np.ndarray, odd: np.ndarray, what: str) -> int:
        """The sum of the bits of the members whose inputs are in the result. Raises Wrong if its elements disagree."""
        total = int(result[0]) * pow(int(odd[0]), -1, 1 << 64) & WORD
        expected = odd * np.uint64(total)
        if not np.array_equal(result, expected):
            bad = np.flatnonzero(result != expected)
            sums = [int(result[i]) * pow(int(odd[i]), -1, 1 << 64) & WORD for i in (0, int(bad[0]), int(bad[-1]))]
            raise Wrong(
                f"{what}: {bad.size} of {result.size} elements differ from element 0's participants, first {bad[0]}, "
                f"last {bad[-1]}; participants by these elements: {[f'{s:x}' for s in sums]}"
            )
        return total

    def check_set(self, total: int, mine: int, members: tuple[int, ...], info: lh.OpInfo, what: str) -> None:
        counts = [total >> 2 * slot & 3 for slot in range(SLOTS)]
        there = [0] * SLOTS
        for member in members:
            there[member % SLOTS] += 1
        if sum(counts) != info.world_size or total >> 2 * SLOTS:
            raise Wrong(f"{what}: inputs of {sum(counts)} members are in it ({total:x}), OpInfo says {info.world_size}")
        if counts[mine % SLOTS] == 0:
            raise Wrong(f"{what}: the own input is not in it ({total:x})")
        if any(count > limit for count, limit in zip(counts, there)):
            raise Wrong(f"{what}: inputs in it ({total:x}) of others than the members at the boundary {members}")

    # ------------------------------------------------------------------ the loop

    def run(self) -> None:
        while not self.stop:
            self.works = []
            try:
                self.interruptible = True
                try:
                    comm = lh.join(
                        run=self.args.run, group=self.args.group, peerd=self.args.socket, timeout=self.args.patience
                    )
                finally:
                    self.interruptible = False
                self.member(comm)
            except lh.DeadlineExceeded as problem:
                self.log("hang", text=str(problem), wait="join")
                sys.exit(3)
            except lh.Evicted as problem:
                self.log("removed", text=str(problem))
            except lh.Error as problem:
                self.log("error", error=type(problem).__name__, text=str(problem))
                if isinstance(problem, (lh.InvalidArgument, lh.Internal)):
                    sys.exit(4)
                time.sleep(0.1)

    def member(self, comm: lh.Comm) -> None:
        me = comm.member_id
        self.log("joined", m=me, e=comm.epoch, ws=comm.world_size)
        gen = step = state = 0
        while True:
            if self.stop:
                comm.leave(timeout=self.args.patience)
                self.log("left", m=me)
                return
            begun = time.monotonic()
            comm.begin_step(timeout=self.args.patience)
            at = time.monotonic()
            members = comm.members
            gen, step, state, founded = self.sync(comm, me, gen, step, state, members)
            line: dict[str, Any] = {"m": me, "g": gen, "s": step, "f": founded, "b": round(at - begun, 4)}
            ops: list[list[Any]] = []
            try:
                state = self.step(comm, me, gen, step, state, members, ops)
                step += 1
            except BaseException:
                self.log("part", **line, ops=ops)
                raise
            self.log("step", **line, ops=ops, state=f"{state:x}", ws=len(members))
            time.sleep(self.args.think)

    def sync(
        self, comm: lh.Comm, me: int, gen: int, step: int, state: int, members: tuple[int, ...]
    ) -> tuple[int, int, int, bool]:
        """Brings newcomers to the generation, step and state of the other members, which have to agree on them."""
        vector = comm.empty(7, "uint64")
        vector[:] = 0
        vector[6] = me
        if gen:
            vector[:6] = [gen, step, state, WORD - gen, WORD - step, WORD - state]
        info = comm.all_reduce(vector, op="max", tag=SYNC_TAG, timeout=self.args.patience)
        got = [int(value) for value in vector]
        if got[0] == 0:
            # All members are new. The newest one names the generation that begins.
            return got[6], 0, 0, True
        if any(got[i] != WORD - got[i + 3] for i in range(3)):
            raise Wrong(f"members come to a boundary with different generation, step or state: {got}, {info}")
        return got[0], got[1], got[2], False

    def step(
        self, comm: lh.Comm, me: int, gen: int, step: int, state: int, members: tuple[int, ...], ops: list[list[Any]]
    ) -> int:
        plan = random.Random(f"{self.args.seed}/{self.args.group}/{gen}/{step}")
        bit = np.uint64(1 << 2 * (me % SLOTS))
        wanted = []
        for tag in range(plan.randint(2, self.args.ops)):
            count = round(2 ** plan.uniform(7, self.args.max_log2))
            wanted.append((tag, count, plan.random() < 0.5, plan.random() < 0.25, plan.random() < 0.15))
        self.local.shuffle(wanted)
        open_ops: list[list[Any]] = []
        for tag, count, in_place, abort, staged in wanted:
            odd = self.odd(count, step, tag)
            source = np.empty(count, np.uint64) if staged else comm.empty(count, "uint64")
            np.multiply(odd, bit, out=source)
            target = source
            if not in_place:
                target = np.empty(count, np.uint64) if staged else comm.empty(count, "uint64")
                target[:] = 0
            open_ops.append([tag, source, target, odd, abort, None])
        results = {}
        # If an eviction ends an op, the outcomes of the other ops are still checked and written down.
        problem: lh.Error | None = None
        aborted = dict.fromkeys((op[0] for op in open_ops), 0)
        # Each member waits for its ops in an order of its own. So all aborted ops start again before the next wait.
        while open_ops and problem is None:
            for op in open_ops:
                op[5] = self.post(comm, op)
            again = []
            for op in open_ops:
                tag, source, target, odd, abort, work = op
                what = f"member {me} generation {gen} step {step} tag {tag} ({source.size} elements)"
                try:
                    info = work.wait(timeout=self.args.patience)
                except lh.Aborted as refused:
                    if not abort:
                        raise Wrong(f"{what}: aborted, and was to be retried: {refused}") from refused
                    if not np.array_equal(source, odd * bit):
                        raise Wrong(f"{what}: aborted, and the input is not intact") from refused
                    aborted[tag] += 1
                    again.append(op)
                    continue
                except lh.DeadlineExceeded as late:
                    self.log("hang", text=f"{what}: {late}", wait="op")
                    sys.exit(3)
                except lh.Error as ended:
                    if isinstance(ended, (lh.InvalidArgument, lh.Internal)):
                        raise
                    # A peerd that was killed cannot restore an input that it had overwritten in place.
                    if isinstance(ended, lh.Evicted) and not np.array_equal(source, odd * bit):
                        raise Wrong(f"{what}: ended as {ended}, and the input is not intact") from ended
                    problem = problem or ended
                    continue
                total = self.whose(target, odd, what)
                self.check_set(total, me, members, info, what)
                if target is not source and not np.array_equal(source, odd * bit):
                    raise Wrong(f"{what}: the source of an op out of place was changed")
                if abort and info.retries:
                    raise Wrong(f"{what}: retried {info.retries} times, and was to be aborted")
                early = target.nbytes <= ONE_SHOT_BYTES and not abort
                now = round(time.monotonic(), 4)
                ops.append([tag, f"{total:x}", info.retries, aborted[tag], info.epoch, now, early])
                results[tag] = (source.size, total)
            open_ops = again
        if problem is not None:
            raise problem
        digest = hashlib.blake2b(f"{state}/{gen}/{step}/{sorted(results.items())}".encode(), digest_size=8)
        return int.from_bytes(digest.digest(), "little")

    def post(self, comm: lh.Comm, op: list[Any]) -> lh.Work:
        tag, source, target, _, abort, _ = op
        return comm.all_reduce(
            source,
            out=None if target is source else target,
            tag=tag,
            on_fault="abort" if abort else "retry",
            async_op=True,
        )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--run", default="chaos")
    parser.add_argument("--group", type=int, default=0)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--log", required=True)
    parser.add_argument("--patience", type=float, default=60)
    parser.add_argument("--think", type=float, default=0.05, help="seconds that a step pretends to compute")
    parser.add_argument("--ops", type=int, default=5, help="at most so many ops per step")
    parser.add_argument("--max-log2", type=int, default=20, help="the largest op has 2**N elements of 8 bytes")
    trainer = Trainer(parser.parse_args(arguments))
    try:
        trainer.run()
    except Stop:
        pass
    except Wrong as problem:
        trainer.log("wrong", text=str(problem))
        sys.exit(4)


if __name__ == "__main__":
    main()
