"""Hosts in network namespaces. Each host and the coordinator has a namespace of its own; one bridge joins all.

Faults of the network are made at the bridge or at a host's own sockets. So they look to the programs as they do in the
field: a dropped packet vanishes without an error, and a reset connection tells both ends.

BareWorld is everything except the bridge. tests/wan joins the same hosts by wide-area links.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from longhaul.testing import find_binary, start_tethered

if TYPE_CHECKING:
    from typing import Self

PREFIX = "lhc"
COORDINATOR_PORT = 29600
DATA_PORT = 29700
HTTP_PORT = 29701
# In a world with TLS a connection to the coordinator ends after this time.
AGE_S = 5
# How long a program may take to start or to end on a busy machine.
PATIENCE_S = 60.0


def why_not() -> str:
    """Returns why namespaces cannot be used here; an empty text means that they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "nft", "ss"):
        if shutil.which(program) is None:
            return f"the program {program} is missing (packages iproute2, nftables)"
    name = f"{PREFIX}-{os.getpid()}-probe"
    probe = [
        ["ip", "netns", "add", name],
        ["ip", "-n", name, "link", "add", "br0", "type", "bridge"],
        ["ip", "-n", name, "link", "add", "veth0", "type", "veth", "peer", "name", "veth1"],
        ["ip", "netns", "exec", name, "nft", "add", "table", "bridge", "probe"],
    ]
    try:
        for command in probe:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
            if done.returncode != 0:
                return f"`{' '.join(command)}` is refused here: {done.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=PATIENCE_S)
    return ""


def run(command: Sequence[str], timeout: float = PATIENCE_S, **options: object) -> str:
    """Runs a command and returns its output. RuntimeError: the command failed; the text has what it printed."""
    done = subprocess.run(  # type: ignore[call-overload]
        list(command), capture_output=True, text=True, timeout=timeout, **options
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")
    output: str = done.stdout
    return output


def remove_leftovers() -> None:
    """Removes the namespaces of runs that were killed."""
    for name in sorted(os.listdir("/run/netns")) if os.path.isdir("/run/netns") else []:
        parts = name.split("-")
        if parts[0] == PREFIX and len(parts) == 3 and parts[1].isdigit() and not os.path.exists(f"/proc/{parts[1]}"):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=PATIENCE_S)


def endpoint(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


class Process:
    """A daemon or trainer in a namespace."""

    command: list[str]
    pid: int

    @property
    def returncode(self) -> int | None:
        """The exit code; the negative number of a signal that ended the process; None while the process runs."""
        raise NotImplementedError

    def wait(self, timeout: float = PATIENCE_S) -> int:
        """Waits for the end and returns the returncode. subprocess.TimeoutExpired: the process still runs."""
        raise NotImplementedError

    @property
    def alive(self) -> bool:
        return self.returncode is None

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.alive:
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait()


class Executed(Process):
    """A process that runs a program."""

    def __init__(self, namespace: str, command: Sequence[str], log: pathlib.Path, environment: dict[str, str]) -> None:
        self.command = list(command)
        with open(log, "ab") as sink:
            self.popen = start_tethered(
                [shutil.which("ip") or "ip", "netns", "exec", namespace, *command],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env=environment,
                start_new_session=True,
            )
        self.pid = self.popen.pid

    @property
    def returncode(self) -> int | None:
        return self.popen.poll()

    def wait(self, timeout: float = PATIENCE_S) -> int:
        return self.popen.wait(timeout)


class Forked(Process):
    """A process that runs a Python function. It is forked from a process that has imported all modules already.

    All hosts share the machine's processors. An interpreter that starts and imports numpy would take a third of a
    second from all other hosts.
    """

    context = multiprocessing.get_context("forkserver")

    def __init__(
        self, namespace: str, main: Callable[[list[str]], None], arguments: list[str], log: pathlib.Path
    ) -> None:
        self.command = [main.__module__, *arguments]
        # Without this each process would import the module by itself.
        self.context.set_forkserver_preload([main.__module__])
        self.process = self.context.Process(target=_in_namespace, args=(namespace, main, arguments, str(log)))
        self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float = PATIENCE_S) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(self.command, timeout)
        return self.process.exitcode


def _in_namespace(namespace: str, main: Callable[[list[str]], None], arguments: list[str], log: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the fork server ends with the harness
    _enter(f"/run/netns/{namespace}")
    os.setsid()
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, place in ((nothing, 0), (sink, 1), (sink, 2)):
        os.dup2(source, place)
    for key in set(_without_longhaul(os.environ)) ^ set(os.environ):
        del os.environ[key]
    main(arguments)


def _enter(path: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path) as target:
        if libc.setns(target.fileno(), 0x40000000) != 0:  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {path}")


@contextlib.contextmanager
def in_namespace(namespace: str) -> Iterator[None]:
    """In this block the calling thread makes sockets of the namespace. They keep belonging to the namespace."""
    # Open the thread's own namespace first: afterwards the path would name the other one.
    with open("/proc/thread-self/ns/net") as home:
        _enter(f"/run/netns/{namespace}")
        try:
            yield
        finally:
            _enter(f"/proc/self/fd/{home.fileno()}")


def _without_longhaul(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without LONGHAUL_ variables: programs get settings by flags only.

    The exceptions name the library, and whether peerd uses io_uring or epoll.
    """
    kept = ("LONGHAUL_LIBRARY", "LONGHAUL_PEERD_IO")
    return {key: value for key, value in environment.items() if not key.startswith("LONGHAUL_") or key in kept}


class Host:
    """A namespace with an address, a peerd and trainers."""

    def __init__(self, world: BareWorld, number: int) -> None:
        self.world = world
        self.number = number
        self.name = f"h{number}"
        self.namespace = f"{PREFIX}-{os.getpid()}-{self.name}"
        self.address = world.address_of(10 + number)
        self.socket = str(world.directory / f"{self.name}.sock")
        self.peerd: Process | None = None
        self.trainers: dict[str, Process] = {}
        world.add_namespace(self.namespace, self.port, self.address)

    @property
    def port(self) -> str:
        """The name of the host's interface on the bridge."""
        return f"p{self.number}"

    @property
    def peerd_log(self) -> pathlib.Path:
        return self.world.logs / f"{self.name}.peerd.log"

    def start_peerd(self, flags: Sequence[str] = ()) -> None:
        ready = self.world.directory / f"{self.name}.json"
        ready.unlink(missing_ok=True)
        self.peerd = self.world.start(
            self.namespace,
            [
                str(find_binary("longhaul-peerd")),
                f"--coordinator={self.world.coordinator_address}",
                f"--socket={self.socket}",
                f"--listen={endpoint(self.address, DATA_PORT)}",
                f"--http={endpoint(self.address, HTTP_PORT)}",
                f"--ready-file={ready}",
                *self.world.peerd_flags,
                *flags,
            ],
            self.peerd_log,
        )
        self.world.wait_ready(self.peerd, ready, self.peerd_log)

    def run(self, *command: str, timeout: float = PATIENCE_S) -> str:
        """Runs a command at the host and returns its output. RuntimeError: the command failed."""
        return run(["ip", "netns", "exec", self.namespace, *command], timeout)

    def start(self, command: Sequence[str], log: pathlib.Path) -> Process:
        """Starts a command at the host. It ends with the world at the latest."""
        return self.world.start(self.namespace, command, log)

    def start_trainer(self, name: str, main: Callable[[list[str]], None], arguments: list[str]) -> None:
        """Starts `main`, a function of a module, in a process of its own. `main` gets the arguments as a list."""
        log = self.world.logs / f"{self.name}.{name}.stderr"
        self.trainers[name] = self.world.keep(Forked(self.namespace, main, arguments, log))

    def kill_trainers(self) -> None:
        for trainer in self.trainers.values():
            trainer.kill()
        self.trainers.clear()

    def peer_id(self) -> str:
        """The id of the peer at this host's address. LookupError: the coordinator knows no such peer."""
        status = self.world.status()
        for group in status.get("groups", []):
            for peer in group["ring"]:
                if peer["endpoint"] == endpoint(self.address, DATA_PORT):
                    return str(peer["peer"])
        raise LookupError(f"no peer at {self.address} in the coordinator's status")

    def metric(self, name: str) -> float:
        code = f"import urllib.request as u; print(u.urlopen('http://{endpoint(self.address, HTTP_PORT)}/metrics', timeout=60).read().decode())"
        text = self.run(sys.executable, "-S", "-c", code)
        return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.M))

    def connections(self) -> list[tuple[str, str]]:
        """(local, remote) of each established connection at the host with a data port at either end: the lanes."""
        listed = self.run("ss", "-Htn", "state", "established")
        found = []
        for line in listed.splitlines():
            fields = line.split()
            if len(fields) >= 4 and any(end.endswith(f":{DATA_PORT}") for end in fields[2:4]):
                found.append((fields[2], fields[3]))
        return found

    def reset(self, connections: Sequence[tuple[str, str]]) -> int:
        """Resets these connections, which both ends notice. Returns how many of them still existed."""
        if not connections:
            return 0
        which = " or ".join(f"( src {local} and dst {remote} )" for local, remote in connections)
        output = self.run("ss", "-KHtn", *which.split())
        return len(output.splitlines())


class BareWorld:
    """A coordinator and hosts. A context manager that removes everything at its end.

    A derived class joins the namespaces. It implements open_network() and add_namespace(), and if needed close() and
    network_state().

    logs: a directory for logs, which stays. detect_ms: a flag of the coordinator. peerd_flags: flags of every peerd.
    """

    def __init__(self, logs: pathlib.Path, detect_ms: int = 1500, peerd_flags: Sequence[str] = ()) -> None:
        self.logs = logs
        self.detect_ms = detect_ms
        self.peerd_flags = tuple(peerd_flags)
        self.coordinator_flags: tuple[str, ...] = ()
        self.logs.mkdir(parents=True, exist_ok=True)
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="lhc-", dir="/tmp"))
        self.hosts: list[Host] = []
        self.coordinator: Process | None = None
        self.coordinator_address = endpoint(self.address_of(1), COORDINATOR_PORT)
        self._namespaces: list[str] = []
        self._processes: list[Process] = []
        self._events: Process | None = None
        self.coordinator_namespace = f"{PREFIX}-{os.getpid()}-co"
        try:
            remove_leftovers()
            self.open_network()
            self.add_namespace(self.coordinator_namespace, "pco", self.address_of(1))
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------ the network

    def address_of(self, number: int) -> str:
        """The address of the coordinator (number 1), or of a host (number 10 + the host's number)."""
        return f"10.77.0.{number}"

    def open_network(self) -> None:
        """Makes what joins the namespaces. Called once, before add_namespace()."""
        raise NotImplementedError

    def add_namespace(self, name: str, port: str, address: str) -> None:
        """Makes a namespace that has an interface eth0 with this address, and joins it to the others.

        port: the name of the interface at its other end.
        """
        raise NotImplementedError

    def network_state(self) -> str:
        """A text about the network for dump()."""
        return ""

    def make_namespace(self, name: str) -> None:
        """Makes a namespace, which is removed with the world."""
        run(["ip", "netns", "add", name])
        self._namespaces.append(name)
        run(["ip", "-n", name, "link", "set", "lo", "up"])

    # ------------------------------------------------------------------ processes

    def start(self, namespace: str, command: Sequence[str], log: pathlib.Path) -> Process:
        # The namespaces are a private network. Programs of older releases, in comparisons, lack the flag --insecure.
        # Beside TLS the flag is refused.
        environment = _without_longhaul(os.environ)
        if not any(word.startswith("--tls-") for word in command):
            environment["LONGHAUL_INSECURE"] = "true"
        return self.keep(Executed(namespace, command, log, environment))

    def keep(self, process: Process) -> Process:
        """Makes the process end with this world, at the latest."""
        self._processes = [known for known in self._processes if known.alive]
        self._processes.append(process)
        return process

    def wait_ready(self, process: Process, ready: pathlib.Path, log: pathlib.Path) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not ready.exists():
            if not process.alive or time.monotonic() > deadline:
                what = "did not serve in time" if process.alive else f"ended with {process.returncode}"
                process.kill()
                end = log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{' '.join(process.command)} {what}. Its log ends:\n{end}")
            time.sleep(0.01)

    def start_coordinator(self, flags: Sequence[str] = ()) -> None:
        ready = self.directory / "coordinator.json"
        ready.unlink(missing_ok=True)
        log = self.logs / "coordinator.log"
        self.coordinator = self.start(
            self.coordinator_namespace,
            [
                str(find_binary("longhaul-coordinator")),
                f"--listen={self.coordinator_address}",
                # --admin keeps its default, because lhctl runs in this namespace, too.
                f"--http={endpoint(self.address_of(1), 29601)}",
                f"--store=sqlite:{self.directory}/coordinator.db",
                f"--detect-ms={self.detect_ms}",
                f"--ready-file={ready}",
                *self.coordinator_flags,
                *flags,
            ],
            log,
        )
        self.wait_ready(self.coordinator, ready, log)
        # A coordinator forgets its events when it ends. So lhctl writes them down as they happen.
        self._events = self.start(
            self.coordinator_namespace,
            [str(find_binary("lhctl")), "events", "--follow", "--json"],
            self.logs / "events.jsonl",
        )

    def kill_coordinator(self) -> None:
        if self.coordinator is not None:
            self.coordinator.kill()
        if self._events is not None:
            self._events.kill()

    def add_host(self) -> Host:
        host = Host(self, len(self.hosts))
        self.hosts.append(host)
        return host

    def lhctl(self, *arguments: str, timeout: float = PATIENCE_S) -> str:
        return run(
            [
                "ip",
                "netns",
                "exec",
                self.coordinator_namespace,
                str(find_binary("lhctl")),
                *arguments,
            ],
            timeout,
        )

    def status(self) -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads(self.lhctl("status", "--json"))
        return parsed

    def events(self) -> list[dict[str, str]]:
        """All events of all coordinators of this world so far, in order."""
        found = []
        path = self.logs / "events.jsonl"
        for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
            # The last line may not be complete. After a kill of the coordinator there is also an error line of lhctl.
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found

    def dump(self, what: str) -> pathlib.Path:
        """Writes status, why, events, stacks and sockets to a file, to explain a hang. Returns the file."""
        path = self.logs / "dump.txt"
        with open(path, "a") as sink:
            print(f"==== {what} at {time.monotonic():.3f} (monotonic)", file=sink)
            for arguments in (["status"], ["why"], ["events", "--backlog=200"]):
                print(f"---- lhctl {' '.join(arguments)}", file=sink)
                try:
                    print(self.lhctl(*arguments), file=sink)
                except (RuntimeError, subprocess.TimeoutExpired) as problem:
                    print(problem, file=sink)
            print(f"---- {self.network_state()}", file=sink)
            for process in self._processes:
                if not process.alive:
                    continue
                print(f"---- {process.pid}: {' '.join(process.command)[:200]}", file=sink)
                for task in sorted(pathlib.Path(f"/proc/{process.pid}/task").glob("*")):
                    with contextlib.suppress(OSError):
                        state = re.findall(r"State:\s+(\S.*)", (task / "status").read_text())
                        print(f"thread {task.name} {state}\n{(task / 'stack').read_text()}", file=sink)
            for host in self.hosts:
                print(f"---- sockets of {host.name}", file=sink)
                with contextlib.suppress(RuntimeError):
                    print(run(["ip", "netns", "exec", host.namespace, "ss", "-Htnpo"]), file=sink)
        return path

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        for process in self._processes:
            process.signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        self._processes.clear()
        for name in self._namespaces:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=PATIENCE_S)
        self._namespaces.clear()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Certificates:
    """A CA in a directory of its own, with certificates for a coordinator at an address and for hosts."""

    def __init__(self, directory: pathlib.Path, address: str) -> None:
        self.directory = directory
        self._lhctl("init", str(directory))
        self.issue("coordinator", "--role=coordinator", f"--host={address}")
        self.issue("host")

    def _lhctl(self, *arguments: str) -> None:
        run([str(find_binary("lhctl")), "ca", *arguments])

    def issue(self, name: str, *flags: str) -> None:
        self._lhctl("issue", str(self.directory), f"--name={name}", *flags)

    def flags(self, name: str) -> list[str]:
        files = {"cert": f"{name}.crt", "key": f"{name}.key", "ca": "ca.crt"}
        return [f"--tls-{flag}={self.directory / file}" for flag, file in files.items()]

    def contents(self) -> dict[str, bytes]:
        """What a rotation at the coordinator replaces."""
        return {name: (self.directory / name).read_bytes() for name in ("coordinator.crt", "coordinator.key", "ca.crt")}

    def replace(self, contents: Mapping[str, bytes]) -> None:
        for name, text in contents.items():
            fresh = self.directory / f"{name}.new"
            fresh.write_bytes(text)
            fresh.chmod(0o600)
            fresh.replace(self.directory / name)


class World(BareWorld):
    """A world whose hosts are on one bridge. The bridge can drop packets. ipv6: hosts have no IPv4 addresses. tls:
    gRPC has TLS, and its connections end for their age after AGE_S."""

    def __init__(
        self,
        logs: pathlib.Path,
        detect_ms: int = 1500,
        peerd_flags: Sequence[str] = (),
        ipv6: bool = False,
        tls: bool = False,
    ) -> None:
        self.ipv6 = ipv6
        super().__init__(logs, detect_ms, peerd_flags)
        if tls:
            self.certificates = Certificates(self.directory / "ca", self.address_of(1))
            self.coordinator_flags = (*self.certificates.flags("coordinator"), f"--tls-connection-age-s={AGE_S}")
            self.peerd_flags += tuple(self.certificates.flags("host"))

    def address_of(self, number: int) -> str:
        return f"fd77::{number:x}" if self.ipv6 else super().address_of(number)

    def address_command(self, what: str, namespace: str, address: str) -> list[str]:
        """The command that adds (`what` is "add") or deletes ("del") an address of a namespace."""
        bits = ["/64", "nodad"] if self.ipv6 and what == "add" else ["/64"] if self.ipv6 else ["/24"]
        return ["ip", "-n", namespace, "addr", what, address + bits[0], *bits[1:], "dev", "eth0"]

    def open_network(self) -> None:
        self._rules: list[str] = []
        self._spare = 0
        self.switch = f"{PREFIX}-{os.getpid()}-sw"
        self.make_namespace(self.switch)
        bridge = ["link", "add", "br0", "type", "bridge", "stp_state", "0", "forward_delay", "0"]
        run(["ip", "-n", self.switch, *bridge])
        run(["ip", "-n", self.switch, "link", "set", "br0", "up"])

    def add_namespace(self, name: str, port: str, address: str) -> None:
        self.make_namespace(name)
        run(["ip", "-n", self.switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name])
        run(["ip", "-n", self.switch, "link", "set", port, "master", "br0", "up"])
        run(self.address_command("add", name, address))
        run(["ip", "-n", name, "link", "set", "eth0", "up"])

    def spare_address(self) -> str:
        """An address that no host has had yet."""
        self._spare += 1
        return self.address_of(200 + self._spare)

    def network_state(self) -> str:
        return f"dropped at the bridge: {self._rules}"

    def drop(self, *rules: str) -> None:
        """Silently drops packets that match a rule, for instance 'iifname "p1" oifname "p2"'."""
        self._rules += rules
        self._apply()

    def undrop(self, *rules: str) -> None:
        for rule in rules:
            self._rules.remove(rule)
        self._apply()

    def _apply(self) -> None:
        lines = "\n".join(f"    {rule} drop" for rule in self._rules)
        script = (
            "table bridge chaos\ndelete table bridge chaos\ntable bridge chaos {\n  chain forward {\n"
            f"    type filter hook forward priority 0; policy accept;\n{lines}\n  }}\n}}\n"
        )
        run(["ip", "netns", "exec", self.switch, "nft", "-f", "-"], input=script)


def host_drop(host: Host, direction: str = "both") -> list[str]:
    """Rules that drop all packets of a host ("both"), or only what it sends ("out") or receives ("in")."""
    rules = {"out": f'iifname "{host.port}"', "in": f'oifname "{host.port}"'}
    return list(rules.values()) if direction == "both" else [rules[direction]]


def pair_drop(a: Host, b: Host, one_way: bool = False) -> list[str]:
    rules = [f'iifname "{a.port}" oifname "{b.port}"', f'iifname "{b.port}" oifname "{a.port}"']
    return rules[:1] if one_way else rules


def reset_some(host: Host, rng: random.Random, share: float) -> int:
    """Resets a random share of the lanes of a host, and at least one if it has lanes. Returns how many."""
    lanes = host.connections()
    return host.reset(rng.sample(lanes, min(len(lanes), max(1, round(share * len(lanes))))))
