"""Shows that links which lose packets and delay them by up to a third of a second remove no member.

LONGHAUL_BAD_PATHS_MINUTES=10 pytest tests/wan/test_bad_paths.py    runs for ten minutes; the default run is short
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import time
from typing import Any

import pytest
from testbed import Wan, uniform, why_not
from trainer import main as trainer_main

pytestmark = pytest.mark.alone

MINUTES = float(os.environ.get("LONGHAUL_BAD_PATHS_MINUTES", "0.3"))
HOSTS = 4
# How long a call may take. A round trip takes up to 0.7 s, and a lost packet comes several round trips later.
PATIENCE_S = 120


def lines_of(path: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "never")
def test_five_percent_loss_and_300_ms_of_jitter_cost_nobody_a_place(tmp_path: pathlib.Path) -> None:
    bad = uniform(HOSTS, delay="20ms", jitter="300ms", loss="5%", rate="100mbit")
    with Wan(tmp_path, bad, peerd_flags=["--congestion=cubic"]) as wan:
        wan.start_coordinator()
        logs = [tmp_path / f"{host.name}.g0.jsonl" for host in wan.hosts]
        for host, log in zip(wan.hosts, logs):
            host.start_peerd()
            arguments = [f"--socket={host.socket}", f"--log={log}", f"--patience={PATIENCE_S}", "--max-log2=12"]
            host.start_trainer("g0", trainer_main, arguments)

        def steps() -> int:
            """Returns how many steps the slowest host made in a world of all hosts."""
            fewest: int = min(
                sum(line["k"] == "step" and line["ws"] == HOSTS for line in lines_of(log)) for log in logs
            )
            return fewest

        deadline = time.monotonic() + 2 * PATIENCE_S
        while steps() == 0:
            assert time.monotonic() < deadline, "the hosts never made a step together"
            time.sleep(0.2)
        end = time.monotonic() + 60 * MINUTES
        while time.monotonic() < end or steps() < 2:
            assert time.monotonic() < end + 2 * PATIENCE_S, "no step was made"
            assert all(trainer.alive for host in wan.hosts for trainer in host.trainers.values())
            time.sleep(0.5)
        done = steps()
        removed = [event for event in wan.events() if event["kind"] in ("death", "evict")]
        for host in wan.hosts:
            for trainer in host.trainers.values():
                trainer.signal(signal.SIGTERM)
        for host in wan.hosts:
            for trainer in host.trainers.values():
                assert trainer.wait(PATIENCE_S) == 0
    lost = [event for event in wan.events() if event["kind"] in ("link_lost", "block")]
    print(f"{done} steps of {HOSTS} members in {MINUTES} minutes, {len(lost)} links lost, {len(removed)} removed")
    assert removed == []
    kinds = {line["k"] for log in logs for line in lines_of(log)}
    assert kinds <= {"joined", "step", "part", "left"}, kinds
