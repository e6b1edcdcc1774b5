"""Starts Longhaul and its rivals, each in its usual way, on loopback or on hosts in network namespaces.

All of them take the same orders (native/worker.h) and sleep between orders. Their processes use TCP and no shared
memory, as if each process were on a host of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import machine
from workers import PATIENCE_S, Failure, Line

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
# The compiled programs of native/. They are compiled when they are first needed.
PROGRAMS = ROOT / "out" / "bench"
HEADERS = (HERE / "native" / "worker.h", ROOT / "client" / "include" / "longhaul" / "longhaul.h")
# Programs that are linked against Longhaul's library look for this name.
LIBRARY_NAME = "liblonghaul.so.0"


# ---------------------------------------------------------------------------- places


@dataclasses.dataclass
class Place:
    """The hosts for one world size: a coordinator, and one peerd per host."""

    size: int
    interface: str  # the network interface that leads to the other hosts
    addresses: list[str]
    inside: list[list[str]]  # the words with which a command at host i has to begin
    sockets: list[str]  # the peerds' sockets
    daemons: list[int]  # the peerds' pids
    coordinator: int  # the coordinator's pid
    directory: pathlib.Path  # for files of this world size; a short path


@contextlib.contextmanager
def loopback(size: int, log_dir: str | None, peerd_flags: Sequence[str]) -> Iterator[Place]:
    from longhaul.testing import LocalCluster

    with (
        tempfile.TemporaryDirectory(prefix="lhb-", dir="/tmp") as directory,
        LocalCluster(peers=size, log_dir=log_dir, peerd_flags=peerd_flags) as cluster,
    ):
        yield Place(
            size,
            "lo",
            ["127.0.0.1"] * size,
            [[] for _ in range(size)],
            [peer.socket for peer in cluster.peers],
            [peer.pid for peer in cluster.peers],
            cluster.coordinator_pid,
            pathlib.Path(directory),
        )


@contextlib.contextmanager
def namespaces(size: int, log_dir: str | None, peerd_flags: Sequence[str]) -> Iterator[Place]:
    """A network namespace for each host, veth pairs and a bridge between them. Needs root."""
    sys.path.append(str(ROOT / "tests" / "chaos"))
    import world as network

    why = network.why_not()
    if why:
        raise Failure(why)
    with tempfile.TemporaryDirectory(prefix="lhb-", dir="/tmp") as directory:
        logs = pathlib.Path(log_dir or directory)
        with network.World(logs, peerd_flags=peerd_flags) as world:
            world.start_coordinator()
            hosts = [world.add_host() for _ in range(size)]
            for host in hosts:
                host.start_peerd()
            ip = shutil.which("ip") or "ip"
            yield Place(
                size,
                "eth0",
                [host.address for host in hosts],
                [[ip, "netns", "exec", host.namespace] for host in hosts],
                [host.socket for host in hosts],
                [host.peerd.pid for host in hosts if host.peerd is not None],
                world.coordinator.pid if world.coordinator is not None else 0,
                pathlib.Path(directory),
            )


PLACES = {"loopback": loopback, "namespaces": namespaces}


# ---------------------------------------------------------------------------- systems


@dataclasses.dataclass(frozen=True)
class System:
    name: str
    variants: tuple[str, ...]
    # Returns what to install if the system cannot run; an empty text means that it can run.
    why_not: Callable[[], str]
    # The commands that start all ranks at a place. The ranks connect to a socket, the second argument.
    commands: Callable[[Place, str], list[list[str]]]
    # Variants that are measured only if they are named.
    more_variants: tuple[str, ...] = ()
    # True if the ranks are members at the place's peerds. Then the cost of the daemons in a turn belongs to this
    # system.
    uses_peerds: bool = False

    def chosen(self, names: Sequence[str] | None) -> list[str]:
        """The variants with these names; for None, the usual variants."""
        if not names:
            return list(self.variants)
        return [variant for variant in self.variants + self.more_variants if variant in names]


def library() -> pathlib.Path:
    """Longhaul's C library, the same for C and for Python. Raises Failure if there is none.

    It is $LONGHAUL_LIBRARY, else the library in ../lib of $LONGHAUL_BIN, else the library of this tree.
    """
    named, programs = os.environ.get("LONGHAUL_LIBRARY"), os.environ.get("LONGHAUL_BIN")
    if named:
        path = pathlib.Path(named)
    else:
        path = (pathlib.Path(programs).parent if programs else ROOT / "out") / "lib" / "liblonghaul.so"
    if not path.exists():
        raise Failure(f"no {path}: run tools/build, or set LONGHAUL_LIBRARY to the path of liblonghaul.so")
    return path.resolve()


def _python(place: Place, kind: str, control: str, wheres: Sequence[Sequence[str]]) -> list[list[str]]:
    program = [sys.executable, str(HERE / "allreduce_worker.py"), kind, control]
    return [[*inside, *program, str(i), str(place.size), *wheres[i]] for i, inside in enumerate(place.inside)]


def _longhaul(place: Place, control: str) -> list[list[str]]:
    # The program is the same for every library: at each place it finds the one that is linked there.
    link = place.directory / LIBRARY_NAME
    link.symlink_to(library())
    headers = ROOT / "client" / "include"
    program = _compiled("longhaul", ["cc", f"-I{headers}"], [str(link)])
    env, path = shutil.which("env") or "env", f"LD_LIBRARY_PATH={place.directory}"
    return [
        [*inside, env, path, program, control, str(i), str(place.size), place.sockets[i], "bench"]
        for i, inside in enumerate(place.inside)
    ]


def _longhaul_python(place: Place, control: str) -> list[list[str]]:
    # These ranks join a run of their own, because the ranks in C are members at the same peerds.
    return _python(place, "longhaul", control, [(peerd, "bench-python") for peerd in place.sockets])


def _torch_gloo(place: Place, control: str) -> list[list[str]]:
    return _python(place, "torch-gloo", control, [(f"{place.directory}/torch-gloo",)] * place.size)


def _compiled(name: str, compiler: Sequence[str], libraries: Sequence[str] = ()) -> str:
    """Compiles a program of native/ if needed, and returns its path. Raises Failure if it does not compile."""
    source = next((HERE / "native").glob(f"{name}.c*"))
    program = PROGRAMS / name
    if not program.exists() or program.stat().st_mtime < max(path.stat().st_mtime for path in (source, *HEADERS)):
        PROGRAMS.mkdir(parents=True, exist_ok=True)
        command = [*compiler, "-O2", "-o", str(program), str(source), *libraries]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            raise Failure(f"{' '.join(command)}: {done.stderr.strip()}")
    return str(program)


def _gloo(place: Place, control: str) -> list[list[str]]:
    program = _compiled("gloo", ["c++", "-std=c++17"], ["-lgloo", "-lpthread"])
    rendezvous = place.directory / "gloo"
    rendezvous.mkdir()
    return [
        [*inside, program, control, str(i), str(place.size), place.interface, str(rendezvous)]
        for i, inside in enumerate(place.inside)
    ]


def _openmpi(place: Place, control: str) -> list[list[str]]:
    program = _compiled("mpi", ["mpicc"])
    command = [
        shutil.which("mpirun") or "mpirun",
        "--allow-run-as-root",
        "--oversubscribe",
        "--bind-to",
        "none",
        "-np",
        str(place.size),
    ]
    # Use TCP only, although ranks could share memory. Open MPI uses loopback only if it is named.
    command += ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", place.interface]
    if not place.inside[0]:
        return [[*command, "--mca", "plm", "isolated", program, control]]
    # Open MPI takes the namespaces for hosts that it reaches with a remote shell, which is a script of ours. Each has a
    # host name of its own; otherwise Open MPI would take all of them for one host.
    names = [f"lhb{i}" for i in range(place.size)]
    shell = place.directory / "shell"
    cases = "\n".join(
        f'  {name}) exec {" ".join(inside)} unshare --uts sh -c "hostname {name}; $*" ;;'
        for name, inside in zip(names, place.inside)
    )
    shell.write_text(f'#!/bin/sh\nhost=$1\nshift\ncase $host in\n{cases}\nesac\necho "no host $host" >&2\nexit 1\n')
    shell.chmod(0o755)
    command += ["--mca", "plm_rsh_agent", str(shell), "--mca", "plm", "rsh", "--host", ",".join(names)]
    command += ["--mca", "oob_tcp_if_include", place.interface]
    head = [*place.inside[0], "unshare", "--uts", "sh", "-c", 'hostname lhb-head; exec "$@"', "sh"]
    return [[*head, *command, program, control]]


def _always() -> str:
    return ""


def _no_compiler() -> str:
    return "" if shutil.which("cc") else "Longhaul from C: apt-get install gcc libc6-dev"


def _no_torch() -> str:
    return "" if importlib.util.find_spec("torch") else "PyTorch: run tools/setup"


def _no_gloo() -> str:
    if pathlib.Path("/usr/include/gloo/allreduce.h").exists():
        return ""
    return "gloo without torch: apt-get install libgloo-dev"


def _no_openmpi() -> str:
    if shutil.which("mpirun") and shutil.which("mpicc"):
        return ""
    return "Open MPI: apt-get install openmpi-bin libopenmpi-dev"


SYSTEMS = (
    System(
        "longhaul",
        ("arena", "out-of-place", "plain"),
        _no_compiler,
        _longhaul,
        more_variants=("mesh", "ring", "sixteen"),
        uses_peerds=True,
    ),
    System("longhaul/python", ("arena",), _always, _longhaul_python, uses_peerds=True),
    System("gloo", ("in-place",), _no_gloo, _gloo),
    System("gloo/torch", ("in-place",), _no_torch, _torch_gloo),
    System("openmpi", ("in-place",), _no_openmpi, _openmpi),
)


# ---------------------------------------------------------------------------- teams


class Team:
    """The processes of one system at one place. All get the same orders."""

    def __init__(self, system: System, place: Place) -> None:
        from longhaul.testing import start_tethered

        self.system = system
        self.size = place.size
        self.name = f"{system.name}, world of {place.size}"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.daemons = [*place.daemons, place.coordinator] if system.uses_peerds else []
        self._connections: list[socket.socket] = []
        control = f"{place.directory}/{system.name.replace('/', '-')}.sock"
        # Without this, gloo would look up the host's name and might find an address that is not its own.
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": place.interface}
        if system.uses_peerds:
            environment["LONGHAUL_LIBRARY"] = str(library())
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(control)
            listener.listen(place.size)
            try:
                for command in system.commands(place, control):
                    self.processes.append(start_tethered(command, env=environment, stdin=subprocess.DEVNULL))
                self._accept(listener)
            except BaseException:
                self.kill()
                raise
        # mpirun counts as a daemon of its ranks. With other systems the processes that were started are the ranks.
        self.daemons += [process.pid for process in self.processes if process.pid not in self.pids]
        self.idle_bytes = 0

    def _accept(self, listener: socket.socket) -> None:
        """Waits until all ranks have connected. Each sends its number when it is ready."""
        deadline = time.monotonic() + PATIENCE_S
        listener.settimeout(0.2)
        while len(self._connections) < self.size:
            for process in self.processes:
                if process.poll() is not None:
                    raise Failure(f"{self.name}: a process ended with {process.returncode} (its errors are above)")
            if time.monotonic() > deadline:
                raise Failure(f"{self.name}: {len(self._connections)} of {self.size} ranks connected in {PATIENCE_S} s")
            with contextlib.suppress(TimeoutError):
                connection = listener.accept()[0]
                connection.setblocking(True)
                self._connections.append(connection)
        ranks: dict[int, tuple[Line, int]] = {}
        children = {process.pid: process for process in self.processes}
        for connection in self._connections:
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            pid = struct.unpack("3i", peer)[0]
            name = f"process {pid} of {self.name}"
            line = Line(name, connection.fileno(), connection.fileno(), children.get(pid))
            rank = int(line.receive())
            line.name = f"rank {rank} of {self.name}"
            ranks[rank] = (line, pid)
        if sorted(ranks) != list(range(self.size)):
            raise Failure(f"{self.name}: the ranks that connected are {sorted(ranks)}")
        self._lines = [ranks[rank][0] for rank in range(self.size)]
        self.pids = [ranks[rank][1] for rank in range(self.size)]

    def order(self, text: str) -> list[Any]:
        """Gives all ranks an order and returns their answers."""
        for line in self._lines:
            line.send(text)
        return [json.loads(line.receive()) for line in self._lines]

    def cpu_seconds(self) -> float:
        return machine.cpu_seconds([*self.pids, *self.daemons])

    def forget_peak(self) -> None:
        """Waits until the processes have freed memory in the background. Then makes peak_bytes() count from now on."""
        before = machine.resident_bytes([*self.pids, *self.daemons])
        for _ in range(50):
            time.sleep(0.05)
            now = machine.resident_bytes([*self.pids, *self.daemons])
            if now >= before:
                break
            before = now
        machine.forget_peak([*self.pids, *self.daemons])

    def note_idle(self) -> None:
        """Notes the memory of the idle processes. Call this when all teams are up, because some share their daemons."""
        self.idle_bytes = machine.peak_bytes(self.pids, self.daemons)

    def peak_bytes(self) -> int:
        """The highest resident memory, less that of the idle processes."""
        return max(0, machine.peak_bytes(self.pids, self.daemons) - self.idle_bytes)

    def close(self) -> None:
        """Lets the processes end by themselves."""
        self._hang_up()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)

    def kill(self) -> None:
        self._hang_up()
        for process in self.processes:
            process.kill()
            process.wait()

    def _hang_up(self) -> None:
        for connection in self._connections:
            connection.close()
        self._connections.clear()


# ---------------------------------------------------------------------------- the line


def why_no_line() -> str:
    return "" if shutil.which("iperf3") else "the line: apt-get install iperf3"


def line_rate(place: Place, streams: int, seconds: int = 1) -> dict[str, Any]:
    """iperf3 from the second host to the first, one way."""
    address = place.addresses[0]
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = str(probe.getsockname()[1])
    server = subprocess.Popen(
        [*place.inside[0], "iperf3", "--server", "--one-off", "--bind", address, "--port", port],
        stdout=subprocess.DEVNULL,
    )
    try:
        command = [*place.inside[1], "iperf3", "--client", address, "--port", port, "--parallel", str(streams)]
        command += ["--time", str(seconds), "--json"]
        deadline = time.monotonic() + 20
        while True:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            result = json.loads(done.stdout or "{}")
            if "end" in result and "sum_received" in result["end"]:
                break
            # The server may not listen yet, so try again for a while.
            if time.monotonic() > deadline or server.poll() is not None:
                raise Failure(f"{' '.join(command)}: {result.get('error', done.stderr.strip())}")
            time.sleep(0.05)
    finally:
        server.kill()
        server.wait()
    received = result["end"]["sum_received"]
    used = result["end"]["cpu_utilization_percent"]
    cpu = (used["host_total"] + used["remote_total"]) / 100 * received["seconds"]
    return {
        "peers": place.size,
        "streams": streams,
        "rate": received["bits_per_second"] / 8,
        "cpu_s_per_gb": cpu / received["bytes"] * 1e9,
    }
