#!/usr/bin/env python3
"""Joins hosts in network namespaces by wide-area links. See README.md.

    with Wan(logs, "three_continents") as wan:
        wan.start_coordinator()
        for host in wan.hosts:
            host.start_peerd()
        ...
        wan.set("h0", "h1", loss="1%")
        wan.down("h2")

From the shell:

    tests/wan/run --list
    tests/wan/run three_continents                     runs until Ctrl-C; prints how to use the hosts
    tests/wan/run --serve three_continents -- COMMAND  also starts coordinator and peerds; ends with COMMAND
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from world import PATIENCE_S, PREFIX, BareWorld, in_namespace, run

from longhaul.testing import find_binary, start_tethered

SCENARIOS = pathlib.Path(__file__).with_name("scenarios.json")
COORDINATOR = "co"
# How many frames the kernel keeps for the emulator. A host's burst has to fit: only the network may drop packets.
DEVICE_QUEUE_FRAMES = 20000
# Kernel settings of each namespace. A connection must not use what an earlier one learned of the path, so that every
# measurement begins alike. With the default tcp_min_tso_segs a connection of some ten Mbit/s hands over two segments at
# a time, which costs every host ten times as much.
SYSCTLS = {"tcp_no_metrics_save": 1, "tcp_min_tso_segs": 16}
SETTINGS = {"delay", "jitter", "rate", "queue", "loss", "flow_rate", "flow_queue"}
ACCESS_SETTINGS = {"up", "down", "queue"}

Scenario = Mapping[str, Any]
Names = str | Sequence[str]


def why_not() -> str:
    """Returns why the testbed cannot run here; an empty text means that it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the program ip is missing (package iproute2)"
    if not os.path.exists("/dev/net/tun"):
        return "there is no /dev/net/tun (modprobe tun; in a container, --device=/dev/net/tun)"
    name = f"{PREFIX}-{os.getpid()}-probe"
    try:
        for command in (["ip", "netns", "add", name], ["ip", "-n", name, "tuntap", "add", "probe", "mode", "tun"]):
            done = subprocess.run(command, capture_output=True, text=True, timeout=30)
            if done.returncode != 0:
                return f"`{' '.join(command)}` is refused here: {done.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30)
    try:
        find_binary("lh-wan")
    except FileNotFoundError as problem:
        return str(problem)
    return ""


# ---------------------------------------------------------------------------- scenarios


def scenarios() -> dict[str, Scenario]:
    """The scenarios of scenarios.json, by name."""
    loaded: dict[str, Scenario] = json.loads(SCENARIOS.read_text())
    return loaded


def uniform(hosts: int, **settings: str) -> Scenario:
    """A scenario in which all links have the same settings."""
    return {"hosts": hosts, "links": [{"between": "*", "and": "*", **settings}]}


def _matches(names: Names, name: str) -> bool:
    return names == "*" or name == names or (not isinstance(names, str) and name in names)


def settings_of(scenario: Scenario, src: str, dst: str) -> dict[str, str]:
    """The settings of one direction: all rules that name it, in order; later rules win. ValueError: a bad rule."""
    merged: dict[str, str] = {}
    for rule in scenario.get("links", []):
        ends = [key for key in ("between", "and", "from", "to") if key in rule]
        settings = {key: value for key, value in rule.items() if key not in ends}
        unknown = set(settings) - SETTINGS
        if ends not in (["between", "and"], ["from", "to"]) or unknown:
            raise ValueError(f"link {rule}: give between/and or from/to, and settings out of {sorted(SETTINGS)}")
        first, second = (rule[key] for key in ends)
        there = _matches(first, src) and _matches(second, dst)
        back = _matches(first, dst) and _matches(second, src)
        if there or (back and ends[0] == "between"):
            merged.update(settings)
    return merged


def access_of(scenario: Scenario, name: str) -> dict[str, str]:
    settings: dict[str, str] = dict(scenario.get("access", {}).get(name, {}))
    if set(settings) - ACCESS_SETTINGS:
        raise ValueError(f"access of {name}: {settings}: give settings out of {sorted(ACCESS_SETTINGS)}")
    return settings


# ---------------------------------------------------------------------------- the emulator


class EmulatorError(Exception):
    """The emulator refused a command. The text says why."""


class Emulator:
    """The program lh-wan and its control socket. lh-wan ends with this process at the latest. Any thread may use it."""

    def __init__(self, control: pathlib.Path, log: pathlib.Path, seed: int = 1, tick_us: int = 500) -> None:
        self.control = control
        self.log = log
        self._lock = threading.Lock()
        with open(log, "ab") as sink:
            self._process = start_tethered(
                [str(find_binary("lh-wan")), f"--control={control}", f"--seed={seed}", f"--tick-us={tick_us}"],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(PATIENCE_S)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                self._socket.connect(str(control))
                break
            except OSError as problem:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self._process.kill()
                    end = log.read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"lh-wan does not serve {control} ({problem}). Its log ends:\n{end}") from None
            time.sleep(0.005)
        self._lines = self._socket.makefile("r")

    def do(self, *words: object, **settings: str) -> dict[str, Any]:
        """Gives a command (tests/wan/commands.h) and returns its answer. EmulatorError: the command was refused."""
        line = " ".join([*map(str, words), *(f"{key}={value}" for key, value in settings.items())])
        with self._lock:
            self._socket.sendall(line.encode() + b"\n")
            answer = self._lines.readline()
        if not answer:
            raise RuntimeError(f"lh-wan ended or hung up at `{line}`; its log: {self.log}")
        parsed: dict[str, Any] = json.loads(answer)
        if "error" in parsed:
            raise EmulatorError(f"`{line}`: {parsed['error']}")
        return parsed

    def close(self) -> None:
        self._lines.close()
        self._socket.close()
        self._process.kill()
        self._process.wait()


class Wan(BareWorld):
    """A coordinator (co) and hosts (h0, h1, ...), joined by the links of a scenario. README.md explains scenarios.

    scenario: a name in scenarios.json, or a scenario itself. Its hosts exist at once, without daemons.
    tick_us: packets may be late by so much; a longer tick makes carrying them cheaper.
    The other arguments are those of BareWorld. Rates count whole IP packets, headers included.
    """

    def __init__(
        self,
        logs: pathlib.Path,
        scenario: str | Scenario,
        *,
        seed: int = 1,
        tick_us: int = 500,
        detect_ms: int = 1500,
        peerd_flags: Sequence[str] = (),
    ) -> None:
        if isinstance(scenario, str):
            known = scenarios()
            if scenario not in known:
                raise ValueError(f"no scenario {scenario}; there are: {', '.join(known)}")
            scenario = known[scenario]
        self.scenario = scenario
        self.seed = seed
        self.tick_us = tick_us
        self.emulator: Emulator | None = None
        self._names: dict[str, str] = {}  # name of a host to its namespace
        super().__init__(logs, detect_ms, peerd_flags)
        try:
            for _ in range(int(scenario.get("hosts", 0))):
                self.add_host()
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------ as a world

    def open_network(self) -> None:
        self.emulator = Emulator(self.directory / "wan.sock", self.logs / "wan.log", self.seed, self.tick_us)

    def add_namespace(self, name: str, port: str, address: str) -> None:
        self.make_namespace(name)
        host = name.rsplit("-", 1)[1]
        number = int(address.rsplit(".", 1)[1])
        self.do("host", host, number, f"/run/netns/{name}", "eth0")
        up = ["link", "set", "eth0", "up", "mtu", "1500", "txqueuelen", str(DEVICE_QUEUE_FRAMES)]
        run(["ip", "-n", name, *up])
        run(["ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0"])
        run(["ip", "-n", name, "addr", "add", f"fd77::{number:x}/64", "dev", "eth0", "nodad"])
        settings = "; ".join(f"echo {value} > /proc/sys/net/ipv4/{key}" for key, value in SYSCTLS.items())
        run(["ip", "netns", "exec", name, "sh", "-e", "-c", settings])
        access = access_of(self.scenario, host)
        if access:
            self.access(host, **access)
        for other in self._names:
            for src, dst in ((host, other), (other, host)):
                rules = settings_of(self.scenario, src, dst)
                if rules:
                    self.set(src, dst, **rules)
        self._names[host] = name

    def network_state(self) -> str:
        try:
            return f"links: {json.dumps(self.do('show'))}\n---- carried: {json.dumps(self.do('stats'))}"
        except (OSError, RuntimeError) as problem:
            return f"the emulator does not answer: {problem}"

    def close(self) -> None:
        super().close()
        if self.emulator is not None:
            self.emulator.close()
            self.emulator = None

    # ------------------------------------------------------------------ links, while it runs

    def do(self, *words: object, **settings: str) -> dict[str, Any]:
        """Gives the emulator a command (tests/wan/commands.h)."""
        assert self.emulator is not None
        return self.emulator.do(*words, **settings)

    def set(self, src: str, dst: str, **settings: str) -> None:
        """Changes one direction: delay, jitter, rate, queue, loss, flow_rate, flow_queue. Other settings stay."""
        self.do("set", src, dst, **settings)

    def link(self, a: str, b: str, **settings: str) -> None:
        """Changes both directions. Settings as in set()."""
        self.do("link", a, b, **settings)

    def access(self, host: str, **settings: str) -> None:
        """Changes what all pairs of a host share: up, down, queue."""
        self.do("access", host, **settings)

    def down(self, src: str, dst: str | None = None) -> None:
        """Drops all packets of a host, or of one direction between two hosts, and tells nobody."""
        self.do("down", src, *([dst] if dst else []))

    def up(self, src: str, dst: str | None = None) -> None:
        self.do("up", src, *([dst] if dst else []))

    def set_flow_rate(self, src: str, dst: str, src_port: int, dst_port: int, rate: str) -> None:
        """Gives one TCP connection a rate of its own in the direction from src to dst. The ports name it."""
        self.do("flow", src, dst, src_port, dst_port, rate)

    def flows(self, src: str, dst: str) -> list[dict[str, Any]]:
        """The counters of each flow of a direction."""
        found: list[dict[str, Any]] = self.do("flows", src, dst)["flows"]
        return found

    def reset_counters(self) -> None:
        self.do("reset")

    def counters(self, src: str, dst: str) -> dict[str, Any]:
        """The counters of one direction since the last reset; empty if nothing was sent."""
        for pair in self.do("stats")["pairs"]:
            if (pair["src"], pair["dst"]) == (src, dst):
                found: dict[str, Any] = pair
                return found
        return {}

    def validity(self) -> dict[str, float]:
        """Figures that tell whether a measurement since the last reset is valid. It is valid if all of this holds:

        - `late_p99_us` is well below the delays.
        - `refused` is 0: every host took its frames. `unread` is 0: the emulator took all frames (since the start).
        - `cpu_s` grew by clearly less than one second per second.
        """
        found: dict[str, float] = self.do("stats")["emulator"]
        unread = 0
        for name in self._names.values():
            (device,) = json.loads(run(["ip", "-n", name, "-s", "-j", "link", "show", "eth0"]))
            unread += device["stats64"]["tx"]["dropped"]
        return {**found, "unread": unread}

    @contextlib.contextmanager
    def inside(self, host: str) -> Iterator[None]:
        """In this block the calling thread makes sockets of that host. They keep belonging to the host."""
        with in_namespace(self._names[host]):
            yield

    def address(self, host: str) -> str:
        return next((known.address for known in self.hosts if known.name == host), "10.77.0.1")


# ---------------------------------------------------------------------------- by hand


def describe(wan: Wan) -> str:
    assert wan.emulator is not None
    lines = [f"control socket: {wan.emulator.control} (for instance with `socat - UNIX:...`)", f"logs: {wan.logs}"]
    for name, namespace in wan._names.items():
        lines.append(f"{name}: {wan.address(name)}, `ip netns exec {namespace} COMMAND`")
    return "\n".join(lines)


def environment_of(wan: Wan) -> dict[str, str]:
    assert wan.emulator is not None
    known = {"WAN_CONTROL": str(wan.emulator.control), "WAN_LOGS": str(wan.logs)}
    for name, namespace in wan._names.items():
        known[f"WAN_NETNS_{name}"] = namespace
        known[f"WAN_ADDRESS_{name}"] = wan.address(name)
    for host in wan.hosts:
        known[f"WAN_SOCKET_{host.name}"] = host.socket
    return {**os.environ, **known}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tests/wan/run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scenario", nargs="?", help="a name in scenarios.json, or a JSON file with one scenario")
    parser.add_argument(
        "command", nargs="*", metavar="COMMAND", help="run this command, given after --, and end with it"
    )
    parser.add_argument("--list", action="store_true", help="list the named scenarios")
    parser.add_argument("--serve", action="store_true", help="start the coordinator and a peerd on each host")
    parser.add_argument("--seed", type=int, default=1, help="seed of the losses (default 1)")
    parser.add_argument(
        "--logs", type=pathlib.Path, help="where logs go (default: a directory that is deleted at the end)"
    )
    parser.add_argument("--peerd-flag", action="append", default=[], help="a further flag for every peerd")
    args = parser.parse_args()
    if args.list:
        for name, scenario in scenarios().items():
            print(f"{name:22} {scenario['hosts']} hosts. {scenario.get('about', '')}")
        return 0
    if args.scenario is None:
        parser.error("give a scenario, or --list")
    reason = why_not()
    if reason:
        print(f"tests/wan: skipped: {reason}", file=sys.stderr)
        return 77
    scenario = json.loads(pathlib.Path(args.scenario).read_text()) if args.scenario.endswith(".json") else args.scenario
    with contextlib.ExitStack() as stack:
        logs = args.logs or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lh-wan-")))
        wan = stack.enter_context(Wan(logs, scenario, seed=args.seed, peerd_flags=args.peerd_flag))
        if args.serve:
            wan.start_coordinator()
            for host in wan.hosts:
                host.start_peerd()
        if args.command:
            return subprocess.run(args.command, env=environment_of(wan)).returncode
        stop = {signal.SIGINT, signal.SIGTERM}
        signal.pthread_sigmask(signal.SIG_BLOCK, stop)
        print(describe(wan), flush=True)
        signal.sigwait(stop)
    return 0


if __name__ == "__main__":
    sys.exit(main())
