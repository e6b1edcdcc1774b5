"""A trainer process for end-to-end tests. It does what the test tells it.

    worker.py FD    forks a trainer for each message that the Unix socket FD brings, until its other end is closed

Each input line is a command in JSON. Each output line is the result of a command, in the same order. The test decides
about time and faults; the worker owns the tensors. The methods of Worker are the commands.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import signal
import socket
import sys
import time
import traceback
from typing import Any

import collectives
import numpy as np

import longhaul as lh


@functools.lru_cache(maxsize=4)
def ramp(count: int) -> np.ndarray:
    return (1 + np.arange(count) % 7).astype(np.float32)


def pattern(bit: int, tag: int, count: int) -> np.ndarray:
    """The input of member `bit` for op `tag`: whole numbers as float32. Each set of members has another sum."""
    return ramp(count) * np.float32(1 << bit) + np.float32(tag)


def participants_of(result: np.ndarray, tag: int, members: int) -> list[int] | None:
    """The set of members whose exact sum is `result`; None if there is no such set."""
    count = result.shape[0]
    for mask in range(1, 1 << members):
        bits = [b for b in range(members) if mask >> b & 1]
        # Element 0 decides which set is possible. Then all elements have to agree.
        if float(result[0]) != float(sum(1 << b for b in bits) + tag * len(bits)):
            continue
        # Sums of small whole numbers are exact in any order.
        if np.array_equal(ramp(count) * np.float32(mask) + np.float32(tag * len(bits)), result):
            return bits
    return None


def pattern_of(member: int, tag: int, count: int) -> np.ndarray:
    """The input of a member for op `tag`: whole numbers, so that sums are exact."""
    return ramp(count) * np.float32(member) + np.float32(tag)


# What a target of Beside holds before its op.
UNTOUCHED = np.float32(-0.5)


@dataclasses.dataclass
class Sent:
    """An op of Beside that is in flight."""

    kind: str
    work: lh.Work
    tensor: np.ndarray | None
    out: np.ndarray | None
    count: int
    tag: int


class Beside:
    """Ops of the given kinds, all at once, among members that have the given ids.

    `ids` are the same at all members, and may name members that are gone. An op in parts is laid out for the members
    that this member knows of, which may be fewer than at its last step boundary.
    """

    def __init__(self, comm: lh.Comm, kinds: list[str], ids: list[int], count: int, turn: int) -> None:
        self.comm = comm
        self.me = comm.member_id
        self.ids = ids
        self.root = ids[turn % len(ids)]
        #: by a name that is the same at all members of the op
        self.sent: dict[str, Sent] = {}
        for i, kind in enumerate(kinds):
            # Large ones and one-shots.
            n = count if (turn + i) % 2 else 11
            tag = 1000 + i
            if kind == "send":
                # Each member sends to the next one.
                at = ids.index(self.me)
                after, before = ids[(at + 1) % len(ids)], ids[at - 1]
                self.sent[f"send {self.me} to {after}"] = self._start("send", n, tag, after)
                self.sent[f"send {before} to {self.me}"] = self._start("recv", n, tag, before)
            elif kind != "pair" or self.me in ids[:2]:
                self.sent[kind] = self._start(kind, n, tag, self.root)

    @staticmethod
    def weight_of(member: int) -> int:
        return member % 4 + 1

    def _start(self, kind: str, n: int, tag: int, other: int) -> Sent:
        world = self.comm.world_size
        is_root = self.me == self.root
        whole = world * n
        gives = {"reduce_scatter": whole, "all_to_all": whole, "scatter": whole if is_root else 0, "recv": 0}.get(
            kind, n
        )
        gets = {"all_gather": whole, "all_to_all": whole, "gather": whole if is_root else 0, "send": 0}.get(kind, n)
        if kind == "reduce" and not is_root:
            gets = 0
        tensor = out = None
        if gives:
            tensor = lh.empty(gives, dtype="float32")
            tensor[:] = pattern_of(self.me, tag, gives)
        if gets:
            out = lh.empty(gets, dtype="float32")
            out[:] = UNTOUCHED
        options: dict[str, Any] = {"tag": tag, "async_op": True}
        comm = self.comm
        if kind == "barrier":
            work = comm.barrier(**options)
        elif kind == "send":
            work = comm.send(tensor, to_member=other, **options)
        elif kind == "recv":
            work = comm.recv(out, source_member=other, **options)
        elif kind == "pair":
            work = comm.all_reduce(tensor, out=out, participants=sorted(self.ids[:2]), **options)
        elif kind == "weighted":
            work = comm.all_reduce(tensor, out=out, weight=float(self.weight_of(self.me)), **options)
        elif kind in ("broadcast", "reduce"):
            work = getattr(comm, kind)(tensor, root_member=other, out=out, **options)
        elif kind in ("gather", "scatter"):
            work = getattr(comm, kind)(tensor, root_member=other, out=out, world=world, **options)
        else:
            work = getattr(comm, kind)(tensor, out=out, world=world, **options)
        return Sent(kind, work, tensor, out, n, tag)

    def wait(self, timeout: float) -> dict[str, dict[str, Any]]:
        """Waits for all ops. Compares each result with the one over exactly OpInfo.members."""
        answers: dict[str, dict[str, Any]] = {}
        for name, sent in self.sent.items():
            answer: dict[str, Any] = {"kind": sent.kind}
            try:
                info = sent.work.wait(timeout)
            except lh.Error as error:
                answer |= {"error": type(error).__name__, "text": str(error)}
            else:
                answer |= {"members": list(info.members), "right": self._right(sent, name, list(info.members))}
                answer["retries"] = info.retries
            tensor = sent.tensor
            answer["intact"] = tensor is None or bool(
                np.array_equal(tensor, pattern_of(self.me, sent.tag, tensor.size))
            )
            if "error" in answer and sent.kind == "reduce_scatter":
                assert sent.out is not None
                answer["intact"] &= bool(np.all(sent.out == UNTOUCHED))
            answers[name] = answer
        return answers

    def _right(self, sent: Sent, name: str, members: list[int]) -> bool:
        kind, out, n, tag = sent.kind, sent.out, sent.count, sent.tag
        if kind == "barrier" or out is None:
            return True
        rank = members.index(self.me)

        def part(member: int) -> np.ndarray:
            """The part for this member."""
            return pattern_of(member, tag, len(members) * n)[rank * n : (rank + 1) * n]

        if kind in ("all_gather", "gather"):
            expected = np.concatenate([pattern_of(member, tag, n) for member in members])
            out = out[: expected.size]
        elif kind == "reduce_scatter":
            expected = np.sum([part(member) for member in members], axis=0)
        elif kind == "all_to_all":
            expected = np.concatenate([part(member) for member in members])
        elif kind == "scatter":
            expected = part(self.root)
        elif kind == "broadcast":
            expected = pattern_of(self.root, tag, n)
        elif kind == "recv":
            expected = pattern_of(int(name.split()[1]), tag, n)
        else:
            weights = [self.weight_of(member) if kind == "weighted" else 1 for member in members]
            inputs = [pattern_of(member, tag, n) * np.float32(weight) for member, weight in zip(members, weights)]
            expected = np.sum(inputs, axis=0)
        return bool(np.array_equal(out, expected))


class Worker:
    def __init__(self) -> None:
        self.comm: lh.Comm | None = None
        self.tensors: list[np.ndarray] = []
        self.inputs: list[np.ndarray] = []
        self.bit = 0
        self.prepared = (0, False)
        self.works: list[lh.Work] = []
        self.beside: Beside | None = None
        self.cancel_asked = False
        self.state: lh.State | None = None

    def join(
        self,
        socket: str,
        run: str,
        group: int = 0,
        timeout: float = 60,
        called: str | None = None,
        mode: Any = "blocking",
        members: int | None = None,
    ) -> dict[str, Any]:
        self.prepared = (0, False)
        self.comm = lh.join(
            run=run, group=group, peerd=socket, timeout=timeout, members=members, name=called, join_mode=mode
        )
        if members is None and self.comm.world_size > 1:
            self.comm.begin_step(timeout)  # the boundary that admitted it
        return {"rank": self.comm.rank, "size": self.comm.world_size, "epoch": self.comm.epoch}

    def assemble(self, socket: str, run: str, size: int, group: int = 0, timeout: float = 60) -> dict[str, Any]:
        """Forms a group of `size` members. All of them have to run this command."""
        # The peerd and its arena may be others than before.
        self.prepared = (0, False)
        self.comm = lh.join(run=run, group=group, peerd=socket, timeout=timeout, members=size)
        # A member's first boundary call may return at once, because that boundary admitted it. After this op that is
        # over for all members.
        self.comm.all_reduce(np.zeros(1, np.float32), tag=1 << 32, timeout=timeout)
        return {"member": self.comm.member_id, "epoch": self.comm.epoch}

    def begin_step(self) -> dict[str, Any]:
        assert self.comm is not None
        self.comm.begin_step()
        return {"rank": self.comm.rank, "size": self.comm.world_size, "epoch": self.comm.epoch}

    def begin_step_until(self, size: int) -> dict[str, Any]:
        """Passes step boundaries until the world has `size` members."""
        assert self.comm is not None
        while self.comm.world_size < size:
            self.comm.begin_step()
        return {"size": self.comm.world_size}

    def prepare(self, bit: int, ops: int, count: int, arena: bool = True) -> dict[str, Any]:
        self.bit = bit
        self.works = []
        if [data.size for data in self.inputs] == [count] * ops and self.prepared == (bit, arena):
            for tensor, data in zip(self.tensors, self.inputs):
                tensor[:] = data
            return {}
        self.prepared = (bit, arena)
        self.inputs = [pattern(bit, tag, count) for tag in range(ops)]
        self.tensors = []
        for data in self.inputs:
            tensor = lh.empty(count, dtype="float32") if arena else np.empty(count, dtype=np.float32)
            tensor[:] = data
            self.tensors.append(tensor)
        return {}

    def post_ops(self, ops: int, algorithm: str = "auto") -> dict[str, Any]:
        """Starts the ops of the first tensors, in place, one tag each. run_ops() starts the others."""
        assert self.comm is not None
        for tag in range(len(self.works), ops):
            self.works.append(
                self.comm.all_reduce(self.tensors[tag], op="sum", tag=tag, algorithm=algorithm, async_op=True)
            )
        return {}

    def run_ops(
        self,
        members: int,
        timeout: float = 60,
        algorithm: str = "auto",
        beside: dict[str, Any] | None = None,
        cancels: bool = False,
    ) -> dict[str, Any]:
        """Reduces all tensors at once. Returns for each the set of participants, or the error.

        beside: the arguments of Beside, for ops of other kinds at the same time.
        cancels: cancel_beside() may be called meanwhile, or was called for these ops.
        """
        self.cancel_asked = self.cancel_asked and cancels
        self.post_ops(len(self.tensors), algorithm)
        others = None
        if beside is not None:
            assert self.comm is not None
            self.beside = others = Beside(self.comm, **beside)
            if self.cancel_asked:
                self.cancel_beside()
        # Wait for all ops first: the checks below take longer than the ops.
        outcomes: list[tuple[lh.OpInfo | lh.Error, float]] = []
        for work in self.works:
            try:
                outcomes.append((work.wait(timeout=timeout), time.monotonic()))
            except lh.Error as error:
                outcomes.append((error, time.monotonic()))
        self.works = []
        answer = {
            "ops": [self._outcome(tag, *outcome, members) for tag, outcome in enumerate(outcomes)],
            "beside": {} if others is None else others.wait(timeout),
        }
        self.beside = None
        return answer

    def cancel_beside(self) -> None:
        """Cancels the ops of Beside that are in flight, or as soon as run_ops() has started them."""
        self.cancel_asked = True
        for sent in self.beside.sent.values() if self.beside is not None else ():
            sent.work.cancel()

    def _outcome(self, tag: int, outcome: lh.OpInfo | lh.Error, at: float, members: int) -> dict[str, Any]:
        if isinstance(outcome, lh.Error):
            intact = bool(np.array_equal(self.tensors[tag], self.inputs[tag]))
            return {"error": type(outcome).__name__, "text": str(outcome), "intact": intact}
        return {
            "participants": participants_of(self.tensors[tag], tag, members),
            "seconds": outcome.seconds,
            "wait": outcome.seconds_wait,
            "at": at,
            "world_size": outcome.world_size,
            "retries": outcome.retries,
            "epoch": outcome.epoch,
            "algorithm": outcome.algorithm,
        }

    def random_specs(self, seed: str, ops: int, late: list[int]) -> dict[str, Any]:
        """Makes the ops of start_random(). The test makes the same ones."""
        assert self.comm is not None
        self.specs = collectives.random_specs(seed, ops, self.comm.members, late)
        self.started: dict[int, collectives.Started] = {}
        return {"world": self.comm.members}

    def start_random(self, tags: list[int], cancel: list[int] | tuple[()] = ()) -> dict[str, Any]:
        """Starts ops, those in which this member takes part, and cancels some."""
        assert self.comm is not None
        me = self.comm.member_id
        for tag in tags:
            if me in self.specs[tag].ids:
                self.started[tag] = collectives.Started(self.comm, self.specs[tag], me)
        for tag in cancel:
            self.started[tag].work.cancel()
        return {}

    def wait_random(self, tags: list[int] | None = None, timeout: float = 60) -> dict[str, Any]:
        """Waits for ops of start_random(), and compares each result with the one over exactly OpInfo.members."""
        return {
            "ops": {tag: self._outcome_of(tag, timeout) for tag in (sorted(self.started) if tags is None else tags)}
        }

    def _outcome_of(self, tag: int, timeout: float) -> dict[str, Any]:
        assert self.comm is not None
        started = self.started[tag]
        try:
            info = started.work.wait(timeout)
        except lh.Error as error:
            return {"error": type(error).__name__, "text": str(error), "wrong": started.harmed()}
        return {"members": info.members, "wrong": started.wrong(info), "retries": info.retries}

    def all_reduce(
        self,
        count: int,
        dtype: str = "float32",
        op: str = "sum",
        value: float = 1,
        tag: int = 0,
        timeout: float = 60,
        algorithm: Any = "auto",
    ) -> dict[str, Any]:
        assert self.comm is not None
        tensor = lh.empty(count, dtype=dtype)
        tensor[:] = value
        info = self.comm.all_reduce(tensor, op=op, tag=tag, timeout=timeout, algorithm=algorithm)
        return {
            "first": float(tensor[0]) if count else None,
            "same": bool((tensor == tensor[0]).all()) if count else True,
            "world_size": info.world_size,
            "algorithm": info.algorithm,
        }

    def allocate(self, socket: str, mib: int, fill: bool = False) -> dict[str, Any]:
        """Takes memory that is shared with peerd, and keeps it. Its pages are in use only after `fill`."""
        self.kept = lh.empty(mib << 20, dtype="uint8", peerd=socket)
        if fill:
            self.kept[:] = 1
        return {"bytes": self.kept.size}

    def prepare_state(self, mib: int, odd: bool) -> dict[str, Any]:
        """Makes a state with one tensor in shared memory. All states are equal, but all chunks of an odd one differ."""
        tensor = lh.empty(mib << 18, dtype="float32")
        tensor[:] = ramp(mib << 18) + np.float32(odd)
        self.held = tensor
        self.state = lh.State({"tensor": tensor}, revision=0)
        return {}

    def sync(self, timeout: float = 60) -> dict[str, Any]:
        """Syncs the state. `odd` in the answer says whether the tensor now has the odd bits; None: it has neither."""
        assert self.comm is not None and self.state is not None
        try:
            info = self.comm.sync_state(self.state, timeout=timeout)
        except lh.Error as error:
            return {"error": type(error).__name__, "text": str(error)}
        tensor = self.held
        odd = bool(tensor[0] != ramp(tensor.size)[0])
        same = bool(np.array_equal(tensor, ramp(tensor.size) + np.float32(odd)))
        return {"hash": info.hash, "bytes": info.bytes, "sources": info.sources, "odd": odd if same else None}

    def declare(self, fill: float, place: str = "arena", count: int = 700_000, revision: int = 0) -> dict[str, Any]:
        """Makes a state of three tensors full of `fill`. Members may differ in "rng". place: arena, numpy or both."""
        where = {"arena": ["arena"] * 2, "numpy": ["numpy"] * 2, "both": ["arena", "numpy"]}[place]
        first, second = (
            lh.empty(count, dtype="float32") if one == "arena" else np.empty(count, dtype=np.float32) for one in where
        )
        self.parts = {"w": first, "m": second, "rng": np.empty(100, np.float32)}
        for part in self.parts.values():
            part[:] = fill
        self.state = lh.State(self.parts, revision, allow_unequal={"rng"})
        return {"kept": None if self.comm is None else self.comm.kept_revision(self.state)}

    def hand_over(self, count: int, timeout: float = 60) -> dict[str, Any]:
        """Hands over a state like that of test_background_join, into which peerd fetches in the background."""
        assert self.comm is not None
        self.parts = {"weights": lh.empty(count, dtype="float32"), "rng": np.zeros(1)}
        self.state = lh.State(self.parts, allow_unequal={"rng"})
        info = self.comm.sync_state(self.state, timeout=timeout)
        return {"background": info.background}

    def train(self, steps: int, timeout: float = 60) -> dict[str, Any]:
        """Makes steps that add one to all tensors. Returns what the last sync said, and what the tensors then held."""
        assert self.comm is not None and self.state is not None
        seen: dict[str, Any] = {}
        for _ in range(steps):
            with self.comm.step(self.state, timeout) as step:
                assert step.sync is not None
                seen = {
                    "revision": step.sync.revision,
                    "resumed": step.sync.resumed,
                    "bytes": step.sync.bytes,
                    "hash": step.sync.hash,
                    "right": step.sync.hash == self.state.compute_hash(),
                    "values": {name: sorted(map(float, set(part))) for name, part in self.parts.items()},
                }
                for part in self.parts.values():
                    part += 1
        return seen

    def member(self) -> dict[str, Any]:
        assert self.comm is not None
        return {"member": self.comm.member_id}

    def world(self) -> dict[str, Any]:
        assert self.comm is not None
        return {"size": self.comm.world_size, "members": list(self.comm.members), "epoch": self.comm.epoch}

    def leave(self, timeout: float | None = None) -> dict[str, Any]:
        assert self.comm is not None
        self.comm.leave(timeout=timeout)
        self.comm = None
        return {}

    def forget(self) -> dict[str, Any]:
        """Leaves the group if it can, and forgets it in any case."""
        if self.comm is not None:
            with contextlib.suppress(lh.Error):
                self.comm.leave(timeout=10)
            self.comm = None
        return {}


def main() -> None:
    worker = Worker()
    signal.signal(signal.SIGUSR1, lambda *_: worker.cancel_beside())
    for line in sys.stdin:
        command = json.loads(line)
        name = command.pop("do")
        try:
            result = getattr(worker, name)(**command)
        except lh.Error as error:
            result = {"error": type(error).__name__, "text": str(error)}
        except Exception:  # the test prints the text
            result = {"error": "Python", "text": traceback.format_exc()}
        print(json.dumps(result), flush=True)


def fork_trainers(control: socket.socket) -> None:
    """Answers each message, which brings a standard input and output, with the process id of a new trainer.

    The message says whether the trainer has PyTorch at once. Returns in the trainers. Importing all modules takes far
    longer than a fork.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets trainers that have ended
    while True:
        message, files, _, _ = socket.recv_fds(control, 1, 2)
        if not message:
            sys.exit()
        if message == b"T":
            import torch  # noqa: F401
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
        for place, file in enumerate(files):
            if pid == 0:
                os.dup2(file, place)
            os.close(file)
        if pid == 0:
            return
        control.sendall(pid.to_bytes(8, "little"))


if __name__ == "__main__":
    fork_trainers(socket.socket(fileno=int(sys.argv[1])))
    main()
