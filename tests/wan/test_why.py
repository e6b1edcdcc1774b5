"""Stages faults in a run with several ops in flight, and checks that the first line of `lhctl why` names the culprit.

LONGHAUL_WHY_ROUNDS=2 pytest -s tests/wan/test_why.py    asks once, two seconds after each fault, and counts

The default run stages each fault once and asks until the answer is right.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import signal
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from testbed import Wan, uniform, why_not
from why_trainer import main as trainer_main

ROUNDS = int(os.environ.get("LONGHAUL_WHY_ROUNDS", "0"))
HOSTS = 3
PATIENCE_S = 120
ASK_AFTER_S = 2.0
WANTED = 0.95


class Stage:
    """A run on three hosts, whose trainers have four ops in flight at once."""

    def __init__(self, directory: pathlib.Path, mib: int, state_mib: int) -> None:
        self.directory = directory
        self.sizes = [f"--mib={mib}", f"--state-mib={state_mib}"]
        self.wan = Wan(directory, uniform(HOSTS + 1, delay="1ms", rate="200mbit"))
        self.wan.start_coordinator()
        for host in self.wan.hosts:
            host.start_peerd()
        for number in range(HOSTS):
            self.start_trainer(number)
        self.until("all members train together", lambda: self.world() == HOSTS and min(self.steps()) > 1)

    def start_trainer(self, number: int, *flags: str) -> None:
        host = self.wan.hosts[number]
        self.control(number).mkdir(exist_ok=True)
        arguments = [f"--socket={host.socket}", f"--control={self.control(number)}", *self.sizes]
        host.start_trainer("t", trainer_main, [*arguments, f"--steps={self.directory}/steps{number}", *flags])

    def control(self, number: int) -> pathlib.Path:
        return self.directory / f"control{number}"

    def steps(self) -> list[int]:
        files = [self.directory / f"steps{number}" for number in range(HOSTS)]
        return [int(file.read_text() or 0) if file.exists() else 0 for file in files]

    def world(self) -> int:
        groups = self.wan.status().get("groups", [])
        return sum(int(member.get("joined", 0)) > 0 for group in groups for member in group["members"])

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"never: {what}\n{self.why()}"
            time.sleep(0.02)

    def peer(self, number: int) -> str:
        return self.wan.hosts[number].peer_id()

    def member(self, number: int) -> str:
        (group,) = self.wan.status()["groups"]
        return next(str(member["member"]) for member in group["members"] if member["peer"] == self.peer(number))

    def why(self) -> str:
        try:
            return self.wan.lhctl("why")
        except (RuntimeError, subprocess.TimeoutExpired) as problem:
            return str(problem)

    def close(self) -> None:
        self.wan.close()


@dataclasses.dataclass
class Fault:
    """`culprit` is a regular expression that the first line has to match. `undo` is called at the end."""

    culprit: str
    undo: Callable[[], object] = lambda: None


def late_member(stage: Stage, number: int) -> str:
    member = stage.member(number)
    return rf"({member}\b[^;]* at peer {stage.peer(number)} .*has not called the op|votes: {member}(\(|$))"


def frozen_trainer(stage: Stage, number: int) -> Fault:
    culprit = late_member(stage, number)
    trainer = stage.wan.hosts[number].trainers["t"]
    trainer.signal(signal.SIGSTOP)
    return Fault(culprit, lambda: trainer.signal(signal.SIGCONT))


def slow_trainer(stage: Stage, number: int) -> Fault:
    culprit = late_member(stage, number)
    (stage.control(number) / "slow").touch()
    return Fault(culprit, (stage.control(number) / "slow").unlink)


def missing_vote(stage: Stage, number: int) -> Fault:
    culprit = rf"votes: {stage.member(number)}(\(|$)"
    (stage.control(number) / "hold_vote").touch()
    return Fault(culprit, (stage.control(number) / "hold_vote").unlink)


def frozen_peer(stage: Stage, number: int) -> Fault:
    culprit = rf"(peer {stage.peer(number)} .*(last heard|stands still|cut off)|{stage.peer(number)})"
    peerd = stage.wan.hosts[number].peerd
    assert peerd is not None
    peerd.signal(signal.SIGSTOP)
    return Fault(culprit, lambda: peerd.signal(signal.SIGCONT))


def both(stage: Stage, a: int, b: int) -> str:
    return rf"(?=.*\b{stage.peer(a)}\b)(?=.*\b{stage.peer(b)}\b)"


def throttled_link(stage: Stage, number: int) -> Fault:
    other = (number + 1) % HOSTS
    culprit = rf"link from peer {stage.peer(number)} .* to peer {stage.peer(other)} "
    stage.wan.set(f"h{number}", f"h{other}", rate="1mbit")
    return Fault(culprit)


def throttled_lane(stage: Stage, number: int) -> Fault:
    """Leaves the link a tenth of its rate, and one of its lanes a hundredth of that."""
    other = (number + 1) % HOSTS
    culprit = rf"link from peer {stage.peer(number)} .* to peer {stage.peer(other)} .*data lane \d"
    src, dst = f"h{number}", f"h{other}"
    flow = max(stage.wan.flows(src, dst), key=lambda flow: flow["delivered_bytes"])
    stage.wan.set(src, dst, rate="2mbit")
    stage.wan.set_flow_rate(src, dst, flow["src_port"], flow["dst_port"], "20kbit")
    return Fault(culprit)


def one_way_cut(stage: Stage, number: int) -> Fault:
    other = (number + 1) % HOSTS
    culprit = both(stage, number, other)
    stage.wan.down(f"h{number}", f"h{other}")
    return Fault(culprit)


def blocked_pair(stage: Stage, number: int) -> Fault:
    other = (number + 1) % HOSTS
    culprit = both(stage, number, other)
    stage.wan.down(f"h{number}", f"h{other}")
    stage.wan.down(f"h{other}", f"h{number}")
    return Fault(culprit)


def slow_disk(stage: Stage, number: int) -> Fault:
    """Another program holds the write lock of the store for seconds at a time."""
    stop = threading.Event()

    def hold() -> None:
        with contextlib.closing(sqlite3.connect(stage.wan.directory / "coordinator.db", isolation_level=None)) as store:
            while not stop.is_set():
                store.execute("PRAGMA busy_timeout=5000")
                store.execute("BEGIN IMMEDIATE")
                time.sleep(2 + number)
                store.execute("ROLLBACK")
                time.sleep(0.5)  # the coordinator's SQLite asks ten times a second; it gives up after 5 s

    thread = threading.Thread(target=hold)
    thread.start()

    def undo() -> None:
        stop.set()
        thread.join()

    return Fault(r"the coordinator's store is slow|its store may be slow", undo)


def coordinator_gone(stage: Stage, number: int) -> Fault:
    assert stage.wan.coordinator is not None
    if number % 2 == 0:
        stage.wan.kill_coordinator()
    else:
        stage.wan.coordinator.signal(signal.SIGSTOP)
    return Fault(r"no coordinator answers")


def joiner_that_fetches(stage: Stage, number: int) -> Fault:
    newcomer = HOSTS
    for other in range(HOSTS):
        stage.wan.set(f"h{other}", f"h{newcomer}", rate="8mbit")
    stage.start_trainer(newcomer, "--newcomer")
    stage.until("the newcomer is a member", lambda: stage.world() == HOSTS + 1)
    member = stage.member(newcomer)
    return Fault(rf"{member}\b.* fetches the shared state")


STATE_MIB = 48
FAULTS: list[tuple[str, list[Callable[[Stage, int], Fault]]]] = [
    ("frozen trainer", [frozen_trainer]),
    ("frozen peer", [frozen_peer]),
    ("throttled lane", [throttled_link, throttled_lane]),
    ("one-way cut", [one_way_cut]),
    ("blocked pair", [blocked_pair]),
    ("missing vote", [missing_vote]),
    ("slow disk", [slow_disk]),
    ("coordinator gone", [coordinator_gone]),
    ("slow trainer", [slow_trainer]),
    ("joiner that fetches", [joiner_that_fetches]),
]


@contextlib.contextmanager
def staged(directory: pathlib.Path, kind: str, variant: int) -> Iterator[tuple[Stage, Fault]]:
    directory.mkdir(parents=True)
    # Steps are short where the store is slow: only step boundaries write to it.
    stage = Stage(directory, 1 if kind == "slow disk" else 4, STATE_MIB if kind == "joiner that fetches" else 0)
    try:
        makers = dict(FAULTS)[kind]
        fault = makers[variant % len(makers)](stage, variant % HOSTS)
        try:
            yield stage, fault
        finally:
            with contextlib.suppress(FileNotFoundError):
                fault.undo()
    finally:
        stage.close()


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "never")
@pytest.mark.skipif(ROUNDS > 0, reason="LONGHAUL_WHY_ROUNDS counts instead")
@pytest.mark.parametrize("kind", [kind for kind, _ in FAULTS])
def test_why_names_the_culprit(tmp_path: pathlib.Path, kind: str) -> None:
    with staged(tmp_path / "stage", kind, 0) as (stage, fault):
        stage.until(fault.culprit, lambda: re.search(fault.culprit, stage.why().splitlines()[0]) is not None)


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "never")
@pytest.mark.skipif(ROUNDS == 0, reason="LONGHAUL_WHY_ROUNDS=2 counts right answers after two seconds")
def test_two_seconds_after_a_fault_the_culprit_is_known(tmp_path: pathlib.Path) -> None:
    right = 0
    for kind, _ in FAULTS:
        for variant in range(ROUNDS):
            with staged(tmp_path / f"{kind.replace(' ', '-')}-{variant}", kind, variant) as (stage, fault):
                time.sleep(ASK_AFTER_S)
                asked = time.monotonic()
                answer = stage.why()
                took = time.monotonic() - asked
            named = re.search(fault.culprit, answer.splitlines()[0]) is not None
            right += named
            print(f"{'ok ' if named else 'NO '} {kind}, variant {variant}, {took:.1f} s: {answer.splitlines()[0]}")
            if not named:
                print(f"    wanted {fault.culprit}\n    " + "\n    ".join(answer.splitlines()[1:]))
    print(f"{right} of {ROUNDS * len(FAULTS)}")
    assert right >= WANTED * ROUNDS * len(FAULTS)
