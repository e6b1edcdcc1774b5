"""Three hosts train a small GPT together. One is killed in the middle of an all-reduce, and another one joins.

Each "host" is two processes: a peerd and a trainer. All run on this machine and talk by TCP over loopback. At the end
the demo prints a table. The exit code is 1 if the members' parameters differ or the loss did not fall.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import queue
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

from longhaul.testing import LocalCluster, start_tethered

TRAINER = pathlib.Path(__file__).with_name("trainer.py")
HOSTS = 3
VICTIM = 1
# The demo fails if no trainer reports anything for this long.
SILENCE_S = 180


class Failed(Exception):
    """The demo did not show what it should. The text says what was seen."""


@dataclasses.dataclass
class Host:
    number: int
    process: subprocess.Popen[bytes]
    log: pathlib.Path
    killed: bool = False
    ended: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        return "ABCDEFGH"[self.number]


class Demo:
    def __init__(self, cluster: LocalCluster, logs: pathlib.Path, rounds: int, local_steps: int) -> None:
        self.cluster = cluster
        self.logs = logs
        self.rounds = rounds
        self.local_steps = local_steps
        self.begin = time.monotonic()
        self.said: queue.Queue[tuple[Host, dict[str, Any] | None]] = queue.Queue()
        self.hosts: list[Host] = []
        self.first_loss: float | None = None
        self.last_loss: float | None = None
        self.shown = 0
        self.kill_time: float | None = None
        # By round and host: when the trainer started, and finished, the all-reduce of the round.
        self.started: dict[int, dict[str, float]] = {}
        self.finished: dict[int, dict[str, float]] = {}
        self.fault_round = 0
        self.usual: list[float] = []
        self.received = 0.0

    def note(self, text: str) -> None:
        print(f"{time.monotonic() - self.begin:6.1f} s  {text}", flush=True)

    def start_host(self, *flags: str) -> Host:
        """Starts a trainer on the peerd that was started last."""
        number = len(self.hosts)
        log = self.logs / f"trainer-{number}.log"
        host = Host(number, self.start_trainer(self.cluster.socket(number), log, f"--seed={number}", *flags), log)
        self.hosts.append(host)
        threading.Thread(target=self.listen, args=(host,), daemon=True).start()
        return host

    def start_trainer(self, socket: str, log: pathlib.Path, *flags: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(TRAINER), f"--rounds={self.rounds}", f"--local-steps={self.local_steps}", *flags]
        # One thread for each trainer, because a small machine has fewer cores than trainers.
        environment = {**os.environ, "LONGHAUL_SOCKET": socket, "OMP_NUM_THREADS": "1"}
        with open(log, "wb") as sink:
            return start_tethered(command, stdout=subprocess.PIPE, stderr=sink, env=environment)

    def listen(self, host: Host) -> None:
        assert host.process.stdout is not None
        for line in host.process.stdout:
            self.said.put((host, json.loads(line)))
        self.said.put((host, None))

    # ------------------------------------------------------------------ the story

    def run(self) -> None:
        kill_from = max(2, self.rounds // 4)
        join_from = self.rounds // 2
        for _ in range(HOSTS):
            self.start_host(f"--start-with={HOSTS}")
        self.note(f"coordinator, {HOSTS} peerds, {HOSTS} trainers; logs in {self.logs}")
        newcomer: Host | None = None
        while any(not host.killed and host.ended is None for host in self.hosts):
            host, said = self.hear()
            if said is None:
                if not host.killed and host.ended is None:
                    raise Failed(f"the trainer of host {host.name} ended by itself:\n{host.log.read_text()[-2000:]}")
                continue
            event, round_ = said["event"], said.get("round", 0)
            if event == "joined":
                self.first_loss = self.first_loss or said["loss"]
                self.note(f"host {host.name} is member m{said['member']} in epoch {said['epoch']}")
            elif event == "received":
                self.received = said["seconds"]
                self.note(
                    f"host {host.name} received the state, {said['bytes'] / 1e6:.1f} MB in {1e3 * said['seconds']:.0f} ms"
                )
            elif event == "started":
                self.started.setdefault(round_, {})[host.name] = said["time"]
                if self.kill_time is None and round_ >= kill_from and self.in_flight(round_):
                    self.kill(round_)
            elif event == "finished":
                self.finished.setdefault(round_, {})[host.name] = said["time"]
                if round_ == self.fault_round and len(self.finished[round_]) == HOSTS - 1:
                    self.note(f"the survivors went on by themselves: {self.seconds_lost():.2f} s lost")
            elif event == "round":
                self.show_round(said)
                # The new host takes a while to start. The others go on training meanwhile.
                if newcomer is None and self.kill_time is not None and round_ >= join_from - 3:
                    self.cluster.add_peer()
                    newcomer = self.start_host()
                    self.note(f"host {newcomer.name} starts: a fresh peerd and trainer; the others go on training")
            elif event == "end":
                host.ended = said
                self.last_loss = said["loss"]

    def hear(self) -> tuple[Host, dict[str, Any] | None]:
        try:
            return self.said.get(timeout=SILENCE_S)
        except queue.Empty:
            raise Failed(f"nothing heard from the trainers for {SILENCE_S} s; see the logs in {self.logs}") from None

    def in_flight(self, round_: int) -> bool:
        """Whether the victim has started the all-reduce and another host has not: then it cannot be over."""
        started = self.started[round_]
        return "ABCDEFGH"[VICTIM] in started and len(started) < HOSTS

    def kill(self, round_: int) -> None:
        victim = self.hosts[VICTIM]
        victim.killed = True
        self.fault_round = round_
        self.kill_time = time.monotonic()
        self.cluster.peers[VICTIM].process.kill()
        victim.process.kill()
        self.note(
            f"host {victim.name} is killed (SIGKILL to its peerd and its trainer) in the collective of round {round_}"
        )

    def show_round(self, said: dict[str, Any]) -> None:
        self.usual.append(said["seconds"])
        if said["loss"] is None or said["round"] <= self.shown:
            return
        self.shown = said["round"]
        speed = said["bytes"] / max(said["seconds"], 1e-6) / 1e6
        redone = f", redone {said['retries']}x" if said["retries"] else ""
        self.note(
            f"round {said['round']:2}/{self.rounds}  step {said['round'] * self.local_steps:4}  loss {said['loss']:.3f}  "
            f"{said['size']} members, epoch {said['epoch']}  {1e3 * said['seconds']:.0f} ms, {speed:.0f} MB/s{redone}"
        )

    def seconds_lost(self) -> float:
        """How much longer than usual the all-reduce took: from the last survivor's start, or the kill, to its end."""
        assert self.kill_time is not None
        victim = self.hosts[VICTIM].name
        survivors = [h.name for h in self.hosts[:HOSTS] if h.name != victim]
        ready = max(self.started[self.fault_round][name] for name in survivors)
        over = max(self.finished[self.fault_round][name] for name in survivors)
        usual = sorted(self.usual)[len(self.usual) // 2]
        return max(0.0, over - max(ready, self.kill_time) - usual)

    def alone(self) -> float:
        """Trains with one trainer alone, for the same number of local steps, and returns its loss."""
        self.note(f"one trainer alone with the same budget, {self.rounds * self.local_steps} steps")
        log = self.logs / "alone.log"
        process = self.start_trainer("", log, "--alone", "--seed=0")
        output, _ = process.communicate(timeout=SILENCE_S)
        if process.returncode != 0:
            raise Failed(f"the trainer alone failed:\n{log.read_text()[-2000:]}")
        loss: float = json.loads(output.splitlines()[-1])["loss"]
        return loss

    def table(self, alone: float) -> None:
        members = [host for host in self.hosts if host.ended is not None]
        digests = {host.name: host.ended["digest"] for host in members if host.ended}
        assert self.first_loss is not None
        assert self.last_loss is not None
        equal = len(set(digests.values())) == 1
        rows = [
            ("loss, together", f"{self.first_loss:.3f} -> {self.last_loss:.3f}"),
            ("loss, alone, same steps", f"{self.first_loss:.3f} -> {alone:.3f}"),
            ("faults", f"1 (host {self.hosts[VICTIM].name}, SIGKILL in a collective)"),
            ("seconds lost per fault", f"{self.seconds_lost():.2f}"),
            ("hosts joined later", f"{len(self.hosts) - HOSTS} (state received in {self.received:.2f} s)"),
            *((f"parameters of host {name}", f"sha256 {digest[:16]}") for name, digest in digests.items()),
            ("parameters equal", "yes" if equal else "NO"),
        ]
        width = max(len(name) for name, _ in rows)
        print()
        for name, value in rows:
            print(f"  {name:{width}}  {value}")
        print(f"  {'seconds':{width}}  {time.monotonic() - self.begin:.0f}", flush=True)
        expected = {host.name for host in self.hosts if not host.killed}
        if set(digests) != expected or len(expected) != HOSTS:
            raise Failed(f"{sorted(expected)} should have ended together, {sorted(digests)} did")
        if not equal:
            raise Failed("the members' parameters differ")
        if not self.last_loss < self.first_loss - 0.3:
            raise Failed(f"the loss did not fall: {self.first_loss:.3f} -> {self.last_loss:.3f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="outer steps (at least 8; default %(default)s)")
    parser.add_argument("--local-steps", type=int, default=20, help="AdamW steps of a round (default %(default)s)")
    args = parser.parse_args()
    if args.rounds < 8:
        parser.error("--rounds: at least 8, or there is no room for the events")
    logs = pathlib.Path(tempfile.mkdtemp(prefix="longhaul-demo-"))
    try:
        with LocalCluster(peers=HOSTS, log_dir=logs) as cluster:
            demo = Demo(cluster, logs, args.rounds, args.local_steps)
            demo.run()
            demo.table(demo.alone())
    except Failed as problem:
        print(f"\ndemo failed: {problem}\nlogs are in {logs}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
