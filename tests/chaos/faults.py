"""The faults of tests/chaos/run. Each fault can undo itself, and says which members may be removed because of it."""

from __future__ import annotations

import abc
import dataclasses
import random
import signal
import time
from typing import Protocol

from world import DATA_PORT, PATIENCE_S, Host, World, host_drop, pair_drop, reset_some, run

# A silence of less than this share of detect_ms must not count as a death.
SHORT = 0.6


class Fleet(Protocol):
    """The hosts at which faults are made."""

    world: World

    def start_trainers(self, host: Host) -> None: ...

    def ended(self, host: Host) -> bool:
        """Sends peerd SIGTERM, once, so that it drains. Returns whether peerd has ended."""

    def end_host(self, host: Host) -> None: ...


@dataclasses.dataclass
class Record:
    """A fault that was made. Its times are those of the monotonic clock."""

    kind: str
    what: str
    begin: float
    hosts: list[str]  #: the hosts that the fault was done to
    fatal: bool  #: members of these hosts may be removed for the fault
    blocks_pair: bool = False  #: one of the pair may be removed if no third host reaches both
    silent: bool = False  #: the group waits for these hosts until they are removed or the fault ends
    watched: list[str] | None = None  #: hosts whose ops show what the fault costs; None: all hosts but `hosts`
    end: float | None = None


class Fault(abc.ABC):
    """A fault. It is made at hosts at which no other fault lasts."""

    kind = ""
    hosts_needed = 1
    network = ""  #: the only kind of world in which it can be made; "": every kind

    def __init__(self, fleet: Fleet, hosts: list[Host], rng: random.Random) -> None:
        self.fleet = fleet
        self.world: World = fleet.world
        self.hosts = hosts
        self.host = hosts[0] if hosts else None
        self.rng = rng
        self.detect_s = self.world.detect_ms / 1000
        #: how long the fault lasts, in seconds; make() sets it
        self.lasts = 0.0

    @abc.abstractmethod
    def make(self) -> Record: ...

    def over(self) -> bool:
        """Returns whether undo() may be called and has nothing to wait for. Called again and again after `lasts`."""
        return True

    def undo(self) -> None:  # noqa: B027 - a fault that is over at once has nothing to undo
        """Undoes the fault. Called after `lasts`."""

    def record(self, what: str, **fields: bool) -> Record:
        return Record(
            kind=self.kind,
            what=what,
            begin=time.monotonic(),
            hosts=[host.name for host in self.hosts],
            fatal=fields.get("fatal", False),
            blocks_pair=fields.get("blocks_pair", False),
            silent=fields.get("silent", False),
        )

    def some_silence(self) -> tuple[float, bool]:
        """A duration clearly shorter or clearly longer than detect_ms, and whether it may count as a death."""
        if self.rng.random() < 0.5:
            return self.detect_s * self.rng.uniform(0.1, SHORT), False
        return self.detect_s * self.rng.uniform(1.2, 3), True


class KillPeerd(Fault):
    kind = "kill peerd"

    def make(self) -> Record:
        assert self.host is not None and self.host.peerd is not None
        self.lasts = self.rng.uniform(0.2, 3)
        record = self.record(f"SIGKILL peerd of {self.host.name}, again after {self.lasts:.1f} s", fatal=True)
        self.host.peerd.kill()
        return record

    def undo(self) -> None:
        assert self.host is not None
        self.host.start_peerd()


class KillTrainer(Fault):
    kind = "kill trainer"

    def make(self) -> Record:
        assert self.host is not None
        self.lasts = self.rng.uniform(0.2, 2)
        record = self.record(f"SIGKILL the trainers of {self.host.name}, again after {self.lasts:.1f} s", fatal=True)
        self.host.kill_trainers()
        return record

    def undo(self) -> None:
        assert self.host is not None
        self.fleet.start_trainers(self.host)


class KillHost(Fault):
    kind = "kill host"

    def make(self) -> Record:
        assert self.host is not None and self.host.peerd is not None
        self.lasts = self.rng.uniform(0.2, 3)
        record = self.record(
            f"SIGKILL peerd and trainers of {self.host.name}, again after {self.lasts:.1f} s", fatal=True
        )
        self.host.peerd.signal(signal.SIGKILL)
        self.host.kill_trainers()
        self.host.peerd.wait()
        return record

    def undo(self) -> None:
        assert self.host is not None
        self.host.start_peerd()
        self.fleet.start_trainers(self.host)


class StopPeerd(Fault):
    kind = "stop peerd"

    def make(self) -> Record:
        assert self.host is not None and self.host.peerd is not None
        self.lasts, fatal = self.some_silence()
        record = self.record(f"SIGSTOP peerd of {self.host.name} for {self.lasts:.2f} s", fatal=fatal, silent=True)
        self.host.peerd.signal(signal.SIGSTOP)
        return record

    def undo(self) -> None:
        assert self.host is not None and self.host.peerd is not None
        self.host.peerd.signal(signal.SIGCONT)


class StopTrainer(Fault):
    kind = "stop trainer"

    def make(self) -> Record:
        assert self.host is not None
        self.lasts, _ = self.some_silence()
        record = self.record(f"SIGSTOP the trainers of {self.host.name} for {self.lasts:.2f} s", silent=True)
        for trainer in self.host.trainers.values():
            trainer.signal(signal.SIGSTOP)
        return record

    def undo(self) -> None:
        assert self.host is not None
        for trainer in self.host.trainers.values():
            trainer.signal(signal.SIGCONT)


class DropHost(Fault):
    kind = "drop host"
    direction = "both"

    def make(self) -> Record:
        assert self.host is not None
        self.lasts, fatal = self.some_silence()
        self.rules = host_drop(self.host, self.direction)
        record = self.record(
            f"drop packets of {self.host.name} ({self.direction}) for {self.lasts:.2f} s", fatal=fatal, silent=True
        )
        self.world.drop(*self.rules)
        return record

    def undo(self) -> None:
        self.world.undrop(*self.rules)


class DropHostOut(DropHost):
    kind = "drop host out"
    direction = "out"


class DropHostIn(DropHost):
    kind = "drop host in"
    direction = "in"


class DropPair(Fault):
    kind = "drop pair"
    hosts_needed = 2
    one_way = False

    def make(self) -> Record:
        self.lasts = self.rng.uniform(0.2, 3) * self.detect_s
        self.rules = pair_drop(self.hosts[0], self.hosts[1], self.one_way)
        arrow = "->" if self.one_way else "<->"
        record = self.record(
            f"drop packets {self.hosts[0].name} {arrow} {self.hosts[1].name} for {self.lasts:.2f} s",
            blocks_pair=self.lasts > SHORT * self.detect_s,
            silent=True,
        )
        self.world.drop(*self.rules)
        return record

    def undo(self) -> None:
        self.world.undrop(*self.rules)


class DropPairOneWay(DropPair):
    kind = "drop pair one way"
    one_way = True


class ResetLanes(Fault):
    kind = "reset lanes"

    def make(self) -> Record:
        assert self.host is not None
        share = self.rng.choice([0.05, 0.3, 1.0])
        record = self.record("")
        count = reset_some(self.host, self.rng, share)
        record.what = f"reset {count} lanes of {self.host.name} ({share:.0%})"
        return record


class ResetControl(Fault):
    kind = "reset stream"

    def make(self) -> Record:
        assert self.host is not None
        record = self.record(f"reset the coordinator stream of {self.host.name}")
        where = ["dst", self.world.coordinator_address]
        run(["ip", "netns", "exec", self.host.namespace, "ss", "-KHtn", *where])
        return record


class KillCoordinator(Fault):
    kind = "kill coordinator"
    hosts_needed = 0

    def make(self) -> Record:
        self.lasts = self.rng.uniform(0.1, 3)
        # The coordinator counts the votes of a boundary, so boundaries wait for it.
        record = self.record(f"SIGKILL the coordinator, again after {self.lasts:.1f} s", silent=True)
        self.world.kill_coordinator()
        return record

    def undo(self) -> None:
        self.world.start_coordinator()


class Spawn(Fault):
    """A new host comes, trains, and ends by SIGTERM."""

    kind = "spawn"
    hosts_needed = 0

    def make(self) -> Record:
        self.lasts = self.rng.uniform(3, 8)
        host = self.world.add_host()
        self.host = host
        self.hosts = [host]
        record = self.record(f"a fresh host {host.name} for {self.lasts:.1f} s", fatal=True)
        host.start_peerd()
        self.fleet.start_trainers(host)
        return record

    def over(self) -> bool:
        assert self.host is not None
        return self.fleet.ended(self.host)

    def undo(self) -> None:
        assert self.host is not None
        self.fleet.end_host(self.host)


class Drain(Fault):
    kind = "drain"

    def make(self) -> Record:
        assert self.host is not None and self.host.peerd is not None
        self.made = time.monotonic()
        self.lasts = self.rng.uniform(2, 4)
        self.by_signal = self.rng.random() < 0.5
        record = self.record(
            f"drain {self.host.name} by {'SIGTERM' if self.by_signal else 'lhctl'}, again after {self.lasts:.1f} s",
            fatal=True,
        )
        if self.by_signal:
            self.host.peerd.signal(signal.SIGTERM)
        else:
            try:
                self.world.lhctl("drain", self.host.peer_id(), "--reason=chaos")
            except (LookupError, RuntimeError) as problem:
                # The coordinator is away, or the host has no member yet.
                record.what += f" (refused: {str(problem)[-200:]})"
                self.by_signal = True
                self.host.peerd.signal(signal.SIGTERM)
        return record

    def over(self) -> bool:
        assert self.host is not None and self.host.peerd is not None
        if not self.by_signal:
            self.by_signal = True
            self.host.peerd.signal(signal.SIGTERM)
        return not self.host.peerd.alive or time.monotonic() > self.made + self.lasts + PATIENCE_S

    def undo(self) -> None:
        assert self.host is not None and self.host.peerd is not None
        code = self.host.peerd.wait(PATIENCE_S)
        if code != 0:
            raise RuntimeError(f"peerd of {self.host.name} was drained and ended with {code} instead of 0")
        self.host.start_peerd()


KINDS: dict[str, type[Fault]] = {
    kind.kind: kind
    for kind in (
        KillPeerd,
        KillTrainer,
        KillHost,
        StopPeerd,
        StopTrainer,
        DropHost,
        DropHostOut,
        DropHostIn,
        DropPair,
        DropPairOneWay,
        ResetLanes,
        ResetControl,
        KillCoordinator,
        Spawn,
        Drain,
    )
}

__all__ = ["DATA_PORT", "KINDS", "SHORT", "Fault", "Record"]
