#!/usr/bin/env python3
"""Trains one small GPT on Longhaul, torchft and hivemind while hosts are killed and come back, and counts the cost.

    tools/build && .venv/bin/python bench/training.py --markdown=result.md
    .venv/bin/python bench/training.py --systems=longhaul,torchft --seconds=60 --kills=2

Each system trains twice: without faults, and with kills. The kills are the same for all systems, drawn from --seed: the
same hosts, due at the same seconds after the begin. Every second kill that is due waits for its victim's next exchange,
and hits it. The others wait for the victim's next outer step, and hit the inner steps after it, at the same part of the
round for all systems. A killed host comes back after --away seconds.

A host is a trainer and what belongs to it (the peerd of Longhaul, the processes of hivemind's DHT). All of its
processes get SIGKILL. The program that coordinates (coordinator, lighthouse, a peer of the DHT) is never killed.

Each inner step takes --step-ms, computing and sleeping. So the hosts do not compete for the processors of this
machine. bench/README.md says how to read the figures.

torchft and hivemind are installed into a virtual environment of their own (--venv) when they are first needed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import itertools
import json
import os
import pathlib
import queue
import random
import re
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import machine
from workers import Failure

HERE = pathlib.Path(__file__).resolve().parent
# 1.1.11 of hivemind is no choice: its wheel holds p2pd for macOS.
RIVALS = {"torchft": "torchft==0.2.0", "hivemind": "hivemind==1.1.12"}
# A system that has made no outer step for this long has failed.
PATIENCE_S = 180.0


# ---------------------------------------------------------------------------- what is counted


@dataclasses.dataclass(frozen=True)
class Event:
    """What a trainer said; see training_worker.py. life: how often its host had been started before."""

    time: float
    host: int
    life: int
    name: str
    facts: dict[str, Any]

    @property
    def steps(self) -> int:
        steps: int = self.facts.get("steps", 0)
        return steps


@dataclasses.dataclass
class Fault:
    """A host that was away. From `time` to `back` it computed nothing."""

    time: float
    host: int
    life: int
    phase: str  # "step", "exchange"; or "crash" if the trainer ended by itself
    back: float | None = None  # when the next life of the host was ready to join


@dataclasses.dataclass
class Run:
    """One training run: what happened from `begin` to `end`, and what it amounts to."""

    hosts: int
    begin: float
    end: float
    events: list[Event]
    faults: list[Fault]
    load: float = 0.0  # load average of the machine at the end

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def kills(self) -> list[Fault]:
        return [fault for fault in self.faults if fault.phase != "crash"]

    def within(self, *names: str) -> list[Event]:
        return [event for event in self.events if event.name in names and self.begin < event.time <= self.end]

    def host_seconds(self) -> float:
        """The time that hosts could compute: all of it, less the times from a death to being ready again."""
        away = sum(
            max(0.0, min(self.end, fault.back or self.end) - max(self.begin, fault.time)) for fault in self.faults
        )
        return self.hosts * self.seconds - away

    def useful_steps(self) -> int:
        return sum(event.steps for event in self.within("outer"))

    def speed(self) -> float:
        """Useful inner steps per second that a host could compute."""
        return self.useful_steps() / self.host_seconds()

    def useful_seconds(self) -> float:
        """The time of all hosts in useful inner steps."""
        return float(sum(event.facts["seconds"] for event in self.within("outer")))

    def useful_share(self) -> float:
        """The part of the time that hosts could compute which they spent in useful inner steps.

        Other programs that slow down inner steps change this much less than speed().
        """
        return self.useful_seconds() / self.host_seconds()

    def lost_steps(self, why: str) -> int:
        return sum(event.steps for event in self.within("lost") if event.facts["why"] == why)

    def outer_steps(self) -> int:
        return len({event.facts["round"] for event in self.within("outer")})

    def round_seconds(self) -> float:
        """The usual time between two outer steps of a host."""
        gaps = [b - a for times in self._outer_times().values() for a, b in itertools.pairwise(times)]
        return statistics.median(gaps) if gaps else float("inf")

    def died_with_victim(self, fault: Fault) -> float:
        """Seconds of work that the victim had not shared with anybody yet. No system can save it."""
        mine = [
            event.time
            for event in self.events
            if (event.host, event.life) == (fault.host, fault.life) and event.name in ("ready", "outer")
        ]
        return fault.time - max((moment for moment in mine if moment <= fault.time), default=fault.time)

    def until_outer_step(self, fault: Fault) -> float:
        """Seconds from a fault until the last of the survivors has made an outer step."""
        return max((after - fault.time for _, after in self._around(fault)), default=float("inf"))

    def held_up(self, fault: Fault) -> float:
        """How long the survivors went without an outer step around a fault: the longest of them."""
        return max((after - before for before, after in self._around(fault)), default=float("inf"))

    def until_counted(self, fault: Fault) -> float:
        """Seconds from when the killed host is ready again until steps of it count. inf: not before the end."""
        for event in self.events:
            if event.host == fault.host and event.life > fault.life and event.name == "outer" and event.steps:
                return event.time - (fault.back or event.time)
        return float("inf")

    def losses(self) -> list[float]:
        return [event.facts["loss"] for event in self.events if event.name == "end"]

    def _outer_times(self) -> dict[tuple[int, int], list[float]]:
        times: dict[tuple[int, int], list[float]] = {}
        for event in self.events:
            if event.name == "outer":
                times.setdefault((event.host, event.life), []).append(event.time)
        return times

    def _around(self, fault: Fault) -> Iterator[tuple[float, float]]:
        """For each survivor that took part before the fault: its last outer step before it, and the first one after."""
        for (host, life), times in self._outer_times().items():
            before = [moment for moment in times if moment <= fault.time]
            after = [moment for moment in times if moment > fault.time]
            died = any(f.host == host and f.life == life and f.time <= fault.time for f in self.faults)
            if before and not died:
                yield before[-1], after[0] if after else float("inf")


def lost_host_seconds(run: Run, share: float) -> float:
    """The time lost to faults: what hosts could compute, less what the useful steps would have taken without faults.

    share: the useful share without faults.
    """
    return run.host_seconds() - run.useful_seconds() / share


@dataclasses.dataclass(frozen=True)
class Kill:
    """A kill that is planned, the same for all systems.

    It is due `seconds` after the begin. Then it waits for the victim's next outer step, and hits after the part `after`
    of the inner steps of a round. Or it waits for the victim's next exchange, and hits within the time of a quick one.
    """

    seconds: float
    host: int
    phase: str  # "step" or "exchange"
    after: float  # 0 to 1


def schedule(seed: int, kills: int, seconds: float, hosts: int) -> list[Kill]:
    """Kills that are spread evenly over the run, each with a random delay."""
    draw = random.Random(seed)
    room = seconds / (kills + 1)  # the last one leaves time to come back
    return [
        Kill(
            (0.4 * draw.random() + number) * room,
            draw.randrange(hosts),
            "exchange" if number % 2 else "step",
            draw.random(),
        )
        for number in range(kills)
    ]


# ---------------------------------------------------------------------------- systems


def make_venv(path: pathlib.Path, packages: Sequence[str]) -> pathlib.Path:
    """Installs packages with the same torch as here into a virtual environment. Returns its Python."""
    python = path / "bin" / "python"
    stamp = path / "training.stamp"
    torch = importlib.metadata.version("torch")
    wanted = [f"torch=={torch}", *packages]
    there = set(stamp.read_text().split()) if stamp.exists() else set()
    if set(wanted) <= there:
        return python
    print(f"installing {', '.join(wanted)} into {path}", file=sys.stderr, flush=True)
    commands = [[sys.executable, "-m", "venv", str(path)], [str(python), "-m", "pip", "install", "--quiet", *wanted]]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise Failure(f"{shlex.join(command)} failed:\n{(done.stdout + done.stderr).strip()[-2000:]}")
    stamp.write_text("\n".join(sorted(there | set(wanted))))
    return python


class System:
    """Starts what coordinates, and knows how to start and how to kill a host."""

    name = ""

    def __init__(self, args: argparse.Namespace, logs: pathlib.Path) -> None:
        self.args = args
        self.logs = logs
        self.python = sys.executable
        self._stack = contextlib.ExitStack()

    def version(self) -> str:
        return self.output_of("import importlib.metadata as m; print(m.version(%r))" % self.name)

    def output_of(self, program: str) -> str:
        done = subprocess.run([self.python, "-c", program], capture_output=True, text=True, timeout=120)
        return done.stdout.strip()

    def __enter__(self) -> System:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def address_for(self, host: int) -> str:
        """Called at each start of a host. The address that its trainer gets."""
        raise NotImplementedError

    def host_is_dead(self, host: int) -> None:
        """Called right after the trainer of the host got SIGKILL."""

    def start_daemon(self, command: Sequence[str], log: pathlib.Path) -> None:
        from longhaul.testing import start_tethered

        with open(log, "wb") as sink:
            daemon = start_tethered(
                command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=environment(), start_new_session=True
            )
        self._stack.callback(kill_group, daemon)


class Longhaul(System):
    name = "longhaul"

    def __enter__(self) -> System:
        from longhaul.testing import LocalCluster

        self._cluster = self._stack.enter_context(LocalCluster(peers=0, log_dir=self.logs))
        self._peers: dict[int, int] = {}
        return self

    def version(self) -> str:
        import longhaul

        # Outside a git tree there is no commit to name.
        return str(machine.describe()["versions"].get("longhaul", longhaul.__version__))

    def address_for(self, host: int) -> str:
        self._peers[host] = self._cluster.add_peer()
        return self._cluster.socket(self._peers[host])

    def host_is_dead(self, host: int) -> None:
        self._cluster.kill_peer(self._peers[host])


class Torchft(System):
    name = "torchft"

    def __init__(self, args: argparse.Namespace, logs: pathlib.Path) -> None:
        super().__init__(args, logs)
        self.python = str(make_venv(args.venv, [RIVALS[self.name]]))

    def __enter__(self) -> System:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._address = f"127.0.0.1:{probe.getsockname()[1]}"
        program = str(pathlib.Path(self.python).with_name("torchft_lighthouse"))
        # The command of torchft's readme.
        flags = ["--min_replicas=1", "--quorum_tick_ms=100", "--join_timeout_ms=10000", f"--bind={self._address}"]
        self.start_daemon([program, *flags], self.logs / "lighthouse.log")
        return self

    def address_for(self, host: int) -> str:
        return self._address


class Hivemind(System):
    name = "hivemind"

    def __init__(self, args: argparse.Namespace, logs: pathlib.Path) -> None:
        super().__init__(args, logs)
        self.python = str(make_venv(args.venv, [RIVALS[self.name]]))

    def __enter__(self) -> System:
        log = self.logs / "dht.log"
        program = str(pathlib.Path(self.python).with_name("hivemind-dht"))
        self.start_daemon([program, "--host_maddrs=/ip4/127.0.0.1/tcp/0"], log)
        deadline = time.monotonic() + 120
        while not (found := re.search(r"/ip4/127\.0\.0\.1/tcp/\d+/p2p/\w+", log.read_text())):
            if time.monotonic() > deadline:
                raise Failure(f"hivemind-dht gave no address. Its log ends:\n{log.read_text()[-2000:]}")
            time.sleep(0.1)
        self._address = found[0]
        return self

    def address_for(self, host: int) -> str:
        return self._address


SYSTEMS: dict[str, type[System]] = {system.name: system for system in (Longhaul, Torchft, Hivemind)}


def environment() -> dict[str, str]:
    # gloo would look up the host's name and might find an address that is not its own. One thread for each trainer.
    return {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kills a process that was started in a session of its own, and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# ---------------------------------------------------------------------------- a run


class Host:
    def __init__(self, number: int) -> None:
        self.number = number
        self.life = -1
        self.process: subprocess.Popen[bytes] | None = None
        self.counted = False  # the present life has made an outer step
        self.comes_back = 0.0


class Training:
    """One run of one system. Starts and kills the hosts, and collects what they say."""

    def __init__(self, system: System, args: argparse.Namespace, kills: list[Kill]) -> None:
        self.system = system
        self.args = args
        self.kills = list(kills)
        self.hosts = [Host(number) for number in range(args.hosts)]
        self.said: queue.Queue[tuple[Host, int, dict[str, Any] | None]] = queue.Queue()
        self.events: list[Event] = []
        self.faults: list[Fault] = []
        # The kill that waits, and its victim.
        self.aimed: tuple[Kill, Host, int] | None = None
        self.due = float("inf")  # when a kill in inner steps hits; known after the victim's outer step

    def run(self) -> Run:
        try:
            for host in self.hosts:
                self.start(host)
            self.until(lambda: all(host.counted for host in self.hosts), PATIENCE_S, "all hosts train together")
            begin = time.monotonic()
            self.train(begin)
            # The run ends with an outer step of every host that is there, so that no round counts by half.
            marks = {host.number: time.monotonic() for host in self.hosts if host.counted}
            self.until(lambda: all(self.stepped_since(n, t) for n, t in marks.items()), PATIENCE_S, "a last outer step")
            end = time.monotonic()
            load = os.getloadavg()[0]
            self.stop()
            self.name_phases()
            return Run(self.args.hosts, begin, end, self.events, self.faults, load)
        finally:
            for host in self.hosts:
                self.kill(host)

    def train(self, begin: float) -> None:
        """Until the time is over: kills hosts when it is due, and starts them again."""
        while (now := time.monotonic()) < begin + self.args.seconds:
            for host in self.hosts:
                if host.process is None and now >= host.comes_back:
                    self.start(host)
            if self.aimed is None and self.kills and now >= begin + self.kills[0].seconds:
                self.aim(self.kills.pop(0))
            if self.aimed is not None and now >= self.due:
                _, host, life = self.aimed
                self.kill(host)
                self.struck(host, life, now, "step")
            self.hear(0.02)
        self.aimed = None

    def aim(self, kill: Kill) -> None:
        host = self.hosts[kill.host]
        if not host.counted:
            # It has not come back to the training yet. Take one that has.
            host = next((other for other in self.hosts if other.counted), host)
        self.aimed, self.due = (kill, host, host.life), float("inf")

    def struck(self, host: Host, life: int, moment: float, phase: str) -> None:
        self.aimed = None
        self.faults.append(Fault(moment, host.number, life, phase))
        host.comes_back = moment + self.args.away

    def name_phases(self) -> None:
        """A kill that was aimed at an exchange and came after its end has hit the inner steps."""
        for fault in self.kills_at_exchanges():
            mine = [event.name for event in self.events if (event.host, event.life) == (fault.host, fault.life)]
            if mine[-1] != "sync":
                fault.phase = "step"

    def kills_at_exchanges(self) -> list[Fault]:
        return [fault for fault in self.faults if fault.phase == "exchange"]

    def start(self, host: Host) -> None:
        from longhaul.testing import start_tethered

        args = self.args
        host.life += 1
        host.counted = False
        command = [self.system.python, str(HERE / f"training_{self.system.name}.py")]
        command += [f"--address={self.system.address_for(host.number)}", f"--host={host.number}", f"--life={host.life}"]
        command += [f"--hosts={args.hosts}", f"--sync-every={args.sync_every}"]
        command += [f"--step-ms={args.step_ms:g}", f"--batch={args.batch}"]
        with open(self.system.logs / f"trainer-{host.number}-{host.life}.log", "wb") as sink:
            host.process = start_tethered(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                env=environment(),
                start_new_session=True,
            )
        threading.Thread(target=self.listen, args=(host, host.life, host.process), daemon=True).start()

    def listen(self, host: Host, life: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            # What a library prints is not meant for us.
            if not line.startswith(b'{"event": '):
                continue
            said = json.loads(line)
            self.said.put((host, life, said))
            if said["event"] == "sync" and self.strikes(host, life, "exchange"):
                # In this thread, because an exchange may be over in milliseconds.
                moment = time.monotonic()
                self.destroy(host, process)
                self.said.put((host, life, {"event": "struck", "time": moment}))
        self.said.put((host, life, None))

    def strikes(self, host: Host, life: int, phase: str) -> bool:
        """Whether the kill that waits is for this life of the host, and for this phase. If so, waits within it."""
        aimed = self.aimed
        if aimed is None or aimed[0].phase != phase or aimed[1:] != (host, life):
            return False
        if phase == "exchange":
            time.sleep(aimed[0].after * self.quick_exchange())
        return True

    def destroy(self, host: Host, process: subprocess.Popen[bytes]) -> None:
        kill_group(process)
        self.system.host_is_dead(host.number)

    def kill(self, host: Host) -> None:
        if host.process is not None:
            self.destroy(host, host.process)
            host.process = None
            host.counted = False

    def hear(self, timeout: float) -> None:
        try:
            host, life, said = self.said.get(timeout=timeout)
        except queue.Empty:
            return
        if life != host.life or host.process is None:
            # The last words of a host that was killed meanwhile. What it had finished counts.
            if said is not None:
                self.note(host, life, said)
            return
        if said is None:
            self.crashed(host)
            return
        if said["event"] == "struck":
            self.kill(host)
            self.struck(host, life, said["time"], "exchange")
            return
        event = self.note(host, life, said)
        if event.name == "ready":
            for fault in self.faults:
                if fault.host == host.number and fault.back is None:
                    fault.back = event.time
        elif event.name == "outer":
            host.counted = True
            if self.strikes(host, life, "step") and self.aimed is not None:
                self.due = event.time + self.aimed[0].after * self.args.sync_every * self.args.step_ms / 1000

    def note(self, host: Host, life: int, said: dict[str, Any]) -> Event:
        facts = {name: fact for name, fact in said.items() if name not in ("time", "event")}
        self.events.append(Event(said["time"], host.number, life, said["event"], facts))
        return self.events[-1]

    def crashed(self, host: Host) -> None:
        """A trainer that ends by itself is started again, as a supervisor would do it."""
        assert host.process is not None
        code = host.process.wait()
        log = self.system.logs / f"trainer-{host.number}-{host.life}.log"
        print(f"{self.system.name}: the trainer of host {host.number} ended with {code}:", file=sys.stderr)
        print(log.read_text(errors="replace")[-1500:], file=sys.stderr, flush=True)
        if host.life == 0 and not host.counted:
            raise Failure(
                f"the trainer of {self.system.name} ended with {code} before its first outer step. Its log ends:\n"
                + log.read_text(errors="replace")[-1500:]
            )
        now = time.monotonic()
        self.faults.append(Fault(now, host.number, host.life, "crash"))
        if self.aimed is not None and self.aimed[1] is host:
            self.aimed = None
        self.kill(host)
        host.comes_back = now + 1

    def quick_exchange(self) -> float:
        """The shortest time from `sync` to `outer` of a host so far."""
        times: list[float] = []
        begun: dict[tuple[int, int], float] = {}
        for event in list(self.events):
            key = (event.host, event.life)
            if event.name == "sync":
                begun[key] = event.time
            elif event.name == "outer" and key in begun:
                times.append(event.time - begun.pop(key))
        return min(times, default=0.0)

    def stepped_since(self, number: int, moment: float) -> bool:
        host = self.hosts[number]
        return host.process is None or any(
            event.name == "outer" and event.host == number and event.time > moment for event in self.events
        )

    def until(self, done: Any, patience: float, what: str) -> None:
        deadline = time.monotonic() + patience
        while not done():
            if time.monotonic() > deadline:
                raise Failure(f"{self.system.name}: waited {patience:g} s in vain: {what}; logs in {self.system.logs}")
            self.hear(0.05)

    def stop(self) -> None:
        """Has all trainers evaluate their weights. Each ends then."""
        alive = [host for host in self.hosts if host.process is not None and host.counted]
        for host in alive:
            assert host.process is not None and host.process.stdin is not None
            host.process.stdin.write(b"stop\n")
            host.process.stdin.flush()
        deadline = time.monotonic() + PATIENCE_S
        ended: set[int] = set()
        while len(ended) < len(alive) and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                host, life, said = self.said.get(timeout=0.1)
                if said is not None and self.note(host, life, said).name == "end":
                    ended.add(host.number)


def measure(name: str, args: argparse.Namespace, kills: list[Kill]) -> Run:
    what = f"{name}, {len(kills)} kills" if kills else f"{name}, no faults"
    print(f"{datetime.datetime.now():%H:%M:%S} {what}", file=sys.stderr, flush=True)
    logs = pathlib.Path(args.log_dir or tempfile.mkdtemp(prefix="lhb-training-")) / what.replace(", ", "-").replace(
        " ", "-"
    )
    logs.mkdir(parents=True, exist_ok=True)
    with SYSTEMS[name](args, logs) as system:
        return Training(system, args, kills).run()


# ---------------------------------------------------------------------------- report


@dataclasses.dataclass
class Result:
    version: str
    quiet: Run
    faulty: Run


def number(value: float, digits: int = 1) -> str:
    return "never" if value == float("inf") else f"{value:.{digits}f}"


def spread(values: Sequence[float], digits: int = 1) -> str:
    if not values:
        return "-"
    return f"{number(statistics.median(values), digits)} ({number(max(values), digits)})"


def rows_of(result: Result) -> list[tuple[str, str]]:
    quiet, faulty = result.quiet, result.faulty
    share = quiet.useful_share()
    lost = lost_host_seconds(faulty, share)
    faults = len(faulty.kills)
    phases = {
        phase: [faulty.until_outer_step(f) for f in faulty.kills if f.phase == phase] for phase in ("step", "exchange")
    }
    delays = [faulty.held_up(fault) - quiet.round_seconds() for fault in faulty.kills]
    return [
        ("version", result.version),
        ("without faults: useful steps per second and host", f"{quiet.speed():.2f}"),
        ("without faults: seconds between outer steps", f"{quiet.round_seconds():.2f}"),
        ("without faults: final loss, outer steps", _loss(quiet)),
        ("with faults: kills in inner steps, in an exchange", f"{len(phases['step'])}, {len(phases['exchange'])}"),
        ("with faults: trainers that ended by themselves", str(len(faulty.faults) - faults)),
        ("with faults: useful steps per second and host", f"{faulty.speed():.2f}"),
        (
            "time of hosts in useful steps: without faults, with faults",
            f"{share:.1%}, {faulty.useful_share():.1%}",
        ),
        ("**goodput**", f"**{faulty.useful_share() / share:.1%}**"),
        ("**host seconds lost per kill**", f"**{lost / max(1, faults):.1f}**"),
        (
            "of these, work of the victim that nobody else had",
            f"{sum(faulty.died_with_victim(f) for f in faulty.kills) / max(1, faults):.1f}",
        ),
        ("inner steps that survivors lost", str(faulty.lost_steps("discarded"))),
        ("inner steps that newcomers lost", str(faulty.lost_steps("newcomer"))),
        ("seconds from a kill in inner steps to the next outer step: median (worst)", spread(phases["step"], 2)),
        ("seconds from a kill in an exchange to the next outer step: median (worst)", spread(phases["exchange"], 2)),
        ("seconds that a kill delayed the survivors' next outer step: median (worst)", spread(delays)),
        (
            "seconds from ready to counted, for a host that came back: median (worst)",
            spread([faulty.until_counted(f) for f in faulty.kills if f.back is not None]),
        ),
        ("with faults: final loss, outer steps", _loss(faulty)),
        ("load average at the end of both runs", f"{quiet.load:.1f}, {faulty.load:.1f}"),
    ]


def _loss(run: Run) -> str:
    losses = run.losses()
    if not losses:
        return "-"
    apart = f" (hosts differ by up to {max(losses) - min(losses):.3f})" if max(losses) - min(losses) > 5e-4 else ""
    return f"{statistics.mean(losses):.3f}{apart}, {run.outer_steps()}"


def aim(results: dict[str, Result]) -> list[str]:
    """Whether Longhaul saves at least half of the time that each rival loses, and loses no step."""
    if "longhaul" not in results:
        return []
    ours = results["longhaul"].faulty
    mine = lost_host_seconds(ours, results["longhaul"].quiet.useful_share())
    steps = ours.lost_steps("discarded")
    lines = [f"- Steps that survivors on Longhaul lost: {steps}. Aim: 0. {'Met' if steps == 0 else 'Missed'}."]
    for name, result in results.items():
        if name == "longhaul":
            continue
        theirs = lost_host_seconds(result.faulty, result.quiet.useful_share())
        verdict = "Met" if mine <= theirs / 2 else "Missed"
        lines.append(
            f"- Host seconds lost to faults, all kills: Longhaul {mine:.1f}, {name} {theirs:.1f}. "
            f"Aim: at most half. {verdict}."
        )
    return lines


def report(results: dict[str, Result], failures: dict[str, str], args: argparse.Namespace, begun: str) -> str:
    facts = machine.describe()
    lines = [
        f"- command: `bench/training.py {shlex.join(sys.argv[1:])}`",
        f"- begun: {begun}",
        f"- machine: {facts['cpu']}, {facts['processors']} processors, {facts['memory_bytes'] / 1e9:.0f} GB",
        f"- Linux: {facts['kernel']}",
        f"- Python {facts['versions']['python']}, torch {facts['versions'].get('torch', '?')}",
        f"- hosts: {args.hosts}; a round: {args.sync_every} inner steps of {args.step_ms:g} ms, batch {args.batch}",
        f"- kills: {args.kills} in {args.seconds:g} s, seed {args.seed}",
        f"- a killed host comes back after {args.away:g} s",
        "",
    ]
    if results:
        table = {name: rows_of(result) for name, result in results.items()}
        names = list(table)
        lines += [f"| | {' | '.join(names)} |", f"| --- |{' --- |' * len(names)}"]
        for index, (label, _) in enumerate(table[names[0]]):
            lines.append(f"| {label} | {' | '.join(table[name][index][1] for name in names)} |")
        lines += ["", *aim(results)]
    for name, text in failures.items():
        lines += ["", f"{name} could not be measured:", "```", text, "```"]
    return "\n".join(lines) + "\n"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="names with commas (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=180, help="length of a run (default %(default)s)")
    parser.add_argument("--kills", type=int, default=5, help="kills in a run with faults (default %(default)s)")
    parser.add_argument("--away", type=float, default=10, help="seconds until a host comes back (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="chooses the kills (default %(default)s)")
    parser.add_argument("--hosts", type=int, default=3, help="2 to 8 (default %(default)s)")
    parser.add_argument("--sync-every", type=int, default=50, help="inner steps of a round (default %(default)s)")
    parser.add_argument("--step-ms", type=float, default=100, help="time of an inner step (default %(default)s)")
    parser.add_argument("--batch", type=int, default=2, help="passages of an inner step (default %(default)s)")
    parser.add_argument("--venv", type=pathlib.Path, default=HERE.parent / "out" / "bench" / "venv")
    parser.add_argument("--log-dir", help="where the logs go; they stay there")
    parser.add_argument("--markdown", type=pathlib.Path, help="writes the report to this file, too")
    args = parser.parse_args()
    for name in args.systems.split(","):
        if name not in SYSTEMS:
            parser.error(f"--systems: {name} is none of {', '.join(SYSTEMS)}")
    if not 2 <= args.hosts <= 8:
        parser.error("--hosts: 2 to 8, or there are no survivors, or too many processes for one machine")
    return args


def main() -> int:
    args = arguments()
    begun = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    names = args.systems.split(",")
    kills = schedule(args.seed, args.kills, args.seconds, args.hosts)
    runs: dict[str, list[Run]] = {}
    failures: dict[str, str] = {}
    for name in names:
        try:
            # One right after the other: the ratio of the two counts, so the machine should be the same.
            runs[name] = [measure(name, args, []), measure(name, args, kills)]
        except Failure as problem:
            print(f"{name}: {problem}", file=sys.stderr, flush=True)
            failures[name] = str(problem)
    results = {
        name: Result(SYSTEMS[name](args, pathlib.Path()).version(), *runs[name])
        for name in names
        if name not in failures
    }
    text = report(results, failures, args, begun)
    print(text)
    if args.markdown is not None:
        args.markdown.write_text(text)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
