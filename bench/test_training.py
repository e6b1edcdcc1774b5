"""Tests of what bench/training.py counts, and of a short run of it on Longhaul."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
import training
from training import Event, Fault, Run

PROGRAM = pathlib.Path(training.__file__)


def outer(time: float, host: int, steps: int = 10, life: int = 0) -> Event:
    facts = {"steps": steps, "seconds": steps / 2, "size": 3, "round": int(time)}
    return Event(time, host, life, "outer", facts)


def run_of(events: list[Event], faults: list[Fault]) -> Run:
    return Run(hosts=3, begin=0, end=100, events=events, faults=faults)


def test_a_host_that_is_away_has_no_time_to_lose() -> None:
    run = run_of([], [Fault(20, 1, 0, "step", back=35), Fault(90, 2, 0, "step", back=None)])
    assert run.host_seconds() == 300 - 15 - 10


def test_lost_time_is_what_the_useful_steps_did_not_need() -> None:
    # A step takes half a second, and hosts spend 0.9 of their time in useful steps if there are no faults.
    run = run_of([outer(50, 0, 400), outer(60, 1, 50), outer(101, 2, 999)], [Fault(20, 1, 0, "step", back=30)])
    assert run.useful_steps() == 450
    assert run.useful_share() == pytest.approx(225 / 290)
    assert training.lost_host_seconds(run, share=0.9) == pytest.approx(290 - 250)


def test_survivors_are_those_that_took_part_before_the_kill() -> None:
    fault = Fault(25, 1, 0, "exchange", back=40)
    events = [outer(20, 0), outer(20, 1), outer(21, 2), outer(28, 0), outer(31, 2), outer(60, 1, life=1)]
    run = run_of(events, [fault])
    assert run.until_outer_step(fault) == 31 - 25  # that of the slower survivor, not that of the victim
    assert run.held_up(fault) == 31 - 21
    assert run.until_counted(fault) == 60 - 40
    assert run.died_with_victim(fault) == 25 - 20


def test_a_survivor_that_never_goes_on_counts_as_never() -> None:
    fault = Fault(25, 1, 0, "step", back=40)
    run = run_of([outer(20, 0), outer(20, 1), outer(20, 2), outer(30, 0)], [fault])
    assert run.until_outer_step(fault) == float("inf")
    assert run.until_counted(fault) == float("inf")
    assert training.number(float("inf")) == "never"


def test_the_schedule_is_the_same_for_each_system_and_leaves_time_to_come_back() -> None:
    kills = training.schedule(seed=3, kills=5, seconds=120, hosts=3)
    assert kills == training.schedule(seed=3, kills=5, seconds=120, hosts=3)
    assert kills != training.schedule(seed=4, kills=5, seconds=120, hosts=3)
    assert [kill.phase for kill in kills] == ["step", "exchange", "step", "exchange", "step"]
    moments = [kill.seconds for kill in kills]
    assert moments == sorted(moments) and moments[-1] <= 120 - 12
    assert training.schedule(seed=3, kills=0, seconds=120, hosts=3) == []


def test_the_aim_compares_lost_time() -> None:
    quiet = run_of([outer(50, 0, 300)], [])  # half of the time in useful steps
    ours = training.Result("1", quiet, run_of([outer(50, 0, 290)], []))
    theirs = training.Result("2", quiet, run_of([outer(50, 0, 285)], []))
    others = training.Result("3", quiet, run_of([outer(50, 0, 280)], []))
    lines = training.aim({"longhaul": ours, "torchft": theirs, "hivemind": others})
    assert "lost: 0. Aim: 0. Met." in lines[0]
    assert "Longhaul 10.0, torchft 15.0. Aim: at most half. Missed." in lines[1]
    assert "Longhaul 10.0, hivemind 20.0. Aim: at most half. Met." in lines[2]


def test_a_short_run_on_longhaul(tmp_path: pathlib.Path) -> None:
    """A host is killed and comes back, and the report says that the survivors lost no step."""
    arguments = ["--systems=longhaul", "--hosts=2", "--seconds=3", "--kills=1", "--away=0.1"]
    rounds = ["--sync-every=3", "--step-ms=5", "--batch=1", f"--log-dir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments, *rounds],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    assert "Steps that survivors on Longhaul lost: 0. Aim: 0. Met." in done.stdout
    assert "| with faults: kills in inner steps, in an exchange | 1, 0 |" in done.stdout
    assert "| with faults: trainers that ended by themselves | 0 |" in done.stdout
