"""The faults of tests/chaos/network. They touch the network alone, and no process.

Each fault can undo itself, and says which members may be removed because of it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from faults import (
    DropHost,
    DropHostIn,
    DropHostOut,
    DropPair,
    DropPairOneWay,
    Fault,
    Fleet,
    Record,
    ResetControl,
    ResetLanes,
)
from world import AGE_S, DATA_PORT, Certificates, Host, endpoint, pair_drop, run

# A path with a small MTU and without ICMP lets packets up to this size pass.
BLACK_HOLE_BYTES = 600


class Rules(Fault):
    """Drops packets that match some rules at the bridge, as long as the fault lasts."""

    def begin(self, rules: Sequence[str], record: Record) -> Record:
        self.rules = list(rules)
        self.world.drop(*self.rules)
        return record

    def undo(self) -> None:
        self.world.undrop(*self.rules)


class Halves(Rules):
    """Cuts every link between two halves of the hosts. Each half still reaches the coordinator."""

    kind = "halves"
    hosts_needed = -1  # all of them

    def make(self) -> Record:
        half = len(self.hosts) // 2
        ours, theirs = self.hosts[half:], self.hosts[:half]
        self.lasts = self.rng.uniform(1.5, 4) * self.detect_s
        record = self.record(
            f"drop packets {names(ours)} <-> {names(theirs)} for {self.lasts:.2f} s", fatal=True, silent=True
        )
        record.watched = [host.name for host in ours]
        return self.begin([rule for a in ours for b in theirs for rule in pair_drop(a, b)], record)


class CoordinatorFromOne(Rules):
    """Cuts one host from the coordinator. The host and the other hosts still hear each other."""

    kind = "coordinator cut from one"

    def make(self) -> Record:
        assert self.host is not None
        self.lasts = self.rng.uniform(1, 6) * self.detect_s
        record = self.record(
            f"drop packets {self.host.name} <-> coordinator for {self.lasts:.2f} s",
            fatal=self.lasts > 3.5 * self.detect_s,
        )
        port = self.host.port
        return self.begin([f'iifname "{port}" oifname "pco"', f'iifname "pco" oifname "{port}"'], record)


class CoordinatorFromOneShortly(Rules):
    """Cuts one host from the coordinator for nearly as long as a member is kept. TCP repeats late what was lost."""

    kind = "coordinator cut shortly"

    def make(self) -> Record:
        assert self.host is not None
        # 4 to 5.5 s with the default --detect-ms; a member is removed after 4 * detect_ms without a word.
        self.lasts = self.rng.uniform(8 / 3, 11 / 3) * self.detect_s
        port = self.host.port
        record = self.record(f"drop packets {self.host.name} <-> coordinator for {self.lasts:.2f} s")
        return self.begin([f'iifname "{port}" oifname "pco"', f'iifname "pco" oifname "{port}"'], record)


class Rotation(Fault):
    """The coordinator gets other TLS files, and later the old ones again. Its connections end for their age meanwhile."""

    network = "tls"
    hosts_needed = 0

    def rotate(self, record: Record) -> Record:
        self.lasts = 3 * AGE_S + 6 * self.detect_s
        self.before = self.world.certificates.contents()
        self.world.certificates.replace(self.after())
        return record

    def after(self) -> dict[str, bytes]:
        raise NotImplementedError

    def undo(self) -> None:
        self.world.certificates.replace(self.before)


class WrongName(Rotation):
    """The new certificate is good, but for another name. The coordinator must not take it."""

    kind = "certificate, wrong name"

    def make(self) -> Record:
        return self.rotate(self.record("the coordinator gets a certificate for another name"))

    def after(self) -> dict[str, bytes]:
        ours = self.world.certificates
        ours.issue("other", "--role=coordinator", "--host=other.example")
        return {f"coordinator.{kind}": (ours.directory / f"other.{kind}").read_bytes() for kind in ("crt", "key")}


class AllRefused(Rotation):
    """The new certificate is of a CA that no peer trusts. Each peer whose connection ends cannot come back."""

    kind = "coordinator refuses all"

    def make(self) -> Record:
        return self.rotate(self.record("the coordinator gets files of a CA that no host trusts", silent=True))

    def after(self) -> dict[str, bytes]:
        directory = self.world.directory / f"ca-{self.rng.random()}"
        return Certificates(directory, self.world.address_of(1)).contents()


class CoordinatorFromAll(Rules):
    """Cuts all hosts from the coordinator."""

    kind = "coordinator cut from all"
    hosts_needed = 0

    def make(self) -> Record:
        self.lasts = self.rng.choice([10.0, 20.0, 40.0])
        record = self.record(f"drop all packets of the coordinator for {self.lasts:.0f} s", silent=True)
        return self.begin(['iifname "pco"', 'oifname "pco"'], record)


class TwoPairs(Rules):
    """Cuts two pairs of hosts within 200 ms. Peers report the second loss while the first one is being repaired."""

    kind = "two pairs"
    hosts_needed = 4

    def make(self) -> Record:
        self.lasts = self.rng.uniform(1.5, 3) * self.detect_s
        a, b, c, d = self.hosts
        record = self.record(
            f"drop packets {a.name} <-> {b.name}, soon {c.name} <-> {d.name}, for {self.lasts:.2f} s", silent=True
        )
        first, second = pair_drop(a, b), pair_drop(c, d)
        self.world.drop(*first)
        time.sleep(self.rng.uniform(0, 0.2))
        self.world.drop(*second)
        self.rules = first + second
        return record


class Flap(Rules):
    """Cuts a host off again and again, each time for less than detect_ms."""

    kind = "flap"

    def make(self) -> Record:
        assert self.host is not None
        self.lasts = self.detect_s * self.rng.uniform(2, 4)
        record = self.record(f"{self.host.name} is cut off every other 0.4 s for {self.lasts:.2f} s", silent=True)
        self.rules = []
        self.down = [f'iifname "{self.host.port}"', f'oifname "{self.host.port}"']
        end = time.monotonic() + self.lasts
        while time.monotonic() < end:
            self.world.drop(*self.down)
            time.sleep(0.4)
            self.world.undrop(*self.down)
            time.sleep(0.4)
        self.lasts = 0
        return record


class Loss(Rules):
    kind = "loss"

    def make(self) -> Record:
        assert self.host is not None
        percent = self.rng.choice([1, 3, 8])
        self.lasts = self.detect_s * self.rng.uniform(2, 4)
        record = self.record(f"{percent} % of the packets of {self.host.name} are lost for {self.lasts:.2f} s")
        lost = f"numgen random mod 100 < {percent}"
        return self.begin([f'iifname "{self.host.port}" {lost}', f'oifname "{self.host.port}" {lost}'], record)


class BlackHole(Rules):
    """Drops large packets to and from a host, and tells nobody. Small packets pass."""

    kind = "black hole"

    def make(self) -> Record:
        assert self.host is not None
        self.lasts = self.detect_s * self.rng.uniform(3, 6)
        record = self.record(
            f"packets above {BLACK_HOLE_BYTES} bytes of {self.host.name} vanish for {self.lasts:.2f} s", silent=True
        )
        # A host hands over large pieces that would be many packets on a wire. This makes it hand over single packets.
        for host in self.world.hosts:
            run(["ip", "-n", host.namespace, "link", "set", "eth0", "gso_max_segs", "1"])
        large = f"meta length > {BLACK_HOLE_BYTES}"
        return self.begin([f'iifname "{self.host.port}" {large}', f'oifname "{self.host.port}" {large}'], record)


class Newcomer(Rules):
    """A new host asks to join, again and again. Nobody reaches its data port."""

    kind = "newcomer"
    hosts_needed = 0
    port_rule = ""

    def make(self) -> Record:
        host = self.world.add_host()
        self.host, self.hosts = host, [host]
        self.lasts = 8 * self.detect_s
        record = self.record(f"{self.kind}: {host.name} asks for {self.lasts:.1f} s", fatal=True)
        self.begin([f'oifname "{host.port}" {self.port_rule}'] if self.port_rule else [], record)
        host.start_peerd(self.flags(host))
        self.fleet.start_trainers(host)
        return record

    def flags(self, host: Host) -> list[str]:
        return []

    def undo(self) -> None:
        assert self.host is not None
        self.fleet.end_host(self.host)
        super().undo()


class NewcomerDropped(Newcomer):
    kind = "newcomer, port drops"
    port_rule = f"tcp dport {DATA_PORT}"


class NewcomerRefused(Newcomer):
    kind = "newcomer, port refuses"

    def flags(self, host: Host) -> list[str]:
        return [f"--advertise={endpoint(host.address, DATA_PORT + 10)}"]


class NewcomerHalfOpen(Newcomer):
    """Connections to the new host open, but no data on them arrives."""

    kind = "newcomer, half-open"
    port_rule = f"tcp dport {DATA_PORT} tcp flags & psh == psh"


class NewAddress(Fault):
    """A host gets another address, as after a new DHCP lease. Its peerd listens on all addresses."""

    kind = "change of address"

    def make(self) -> Record:
        assert self.host is not None
        old, self.host.address = self.host.address, self.world.spare_address()
        # It takes peerd that long to find that its stream is dead, to attach again, and to hear that its members are
        # removed. Others may wait for it in a preparation meanwhile.
        self.lasts = 8 * self.detect_s
        record = self.record(f"{self.host.name} has the address {self.host.address} now", fatal=True, silent=True)
        # Delete the old address first: with the first address of a network the kernel deletes all its others.
        run(self.world.address_command("del", self.host.namespace, old))
        run(self.world.address_command("add", self.host.namespace, self.host.address))
        return record


class Several(Fault):
    """Two faults at once, at different hosts."""

    kind = "two at once"
    hosts_needed = 2

    def __init__(self, fleet: Fleet, hosts: list[Host], rng: random.Random) -> None:
        super().__init__(fleet, hosts, rng)
        kinds: list[type[Fault]] = [DropHost, DropHostIn, DropHostOut, CoordinatorFromOne, Loss, ResetLanes]
        self.parts = [rng.choice(kinds)(fleet, [host], rng) for host in hosts]

    def make(self) -> Record:
        records = [part.make() for part in self.parts]
        self.lasts = max(part.lasts for part in self.parts)
        record = self.record("; ".join(one.what for one in records), fatal=True, silent=True)
        return record

    def undo(self) -> None:
        for part in self.parts:
            part.undo()


def names(hosts: Sequence[Host]) -> str:
    return "+".join(host.name for host in hosts)


KINDS: dict[str, type[Fault]] = {
    kind.kind: kind
    for kind in (
        DropHost,
        DropHostOut,
        DropHostIn,
        DropPair,
        DropPairOneWay,
        TwoPairs,
        Halves,
        CoordinatorFromOne,
        CoordinatorFromOneShortly,
        CoordinatorFromAll,
        WrongName,
        AllRefused,
        ResetLanes,
        ResetControl,
        Flap,
        Loss,
        BlackHole,
        NewcomerDropped,
        NewcomerRefused,
        NewcomerHalfOpen,
        NewAddress,
        Several,
    )
}
