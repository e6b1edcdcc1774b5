"""Machines in network namespaces find each other, whoever starts first: the tutorial's programs, and small ones.

The coordinator's machine names the coordinator by an address on loopback, as the tutorial says, or as Debian's
/etc/hosts does for the host's own name.
"""

from __future__ import annotations

import os
import pathlib
import re
import signal
import sys
import time
from collections.abc import Callable

import pytest
from world import COORDINATOR_PORT, DATA_PORT, PATIENCE_S, Process, World, endpoint, run, why_not

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorial.md").read_text()
SHELL = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
FOREVER = "1000000000"

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "never")

# A trainer that meets one other member, and sums with it.
MEETS = """
import sys
import numpy as np
import longhaul as lh

comm = lh.join("meet", peerd=sys.argv[1] if len(sys.argv) > 1 else None, timeout=180)
while comm.begin_step(180).world_size < 2:
    pass
tensor = np.ones(1)
comm.all_reduce(tensor, timeout=180)
print("sum", int(tensor[0]), flush=True)
comm.leave()
"""


class Machine:
    """A network namespace in which programs run as in a terminal."""

    def __init__(self, world: World, namespace: str, coordinator: str) -> None:
        self.world = world
        self.namespace = namespace
        self.directory = world.directory / namespace
        self.directory.mkdir()
        self.coordinator = coordinator
        self.started = 0

    def start(self, command: str) -> Program:
        """The shell's command, of which environment and interpreter are those of the test."""
        self.started += 1
        log = self.world.logs / f"{self.namespace}.{self.started}.log"
        settings = {
            "PATH": f"{pathlib.Path(sys.executable).parent}:{ROOT}/out/bin:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}/client/python",
            "HOME": str(self.directory),
        }
        set_all = [f"{key}={value}" for key, value in settings.items()]
        shell = ["bash", "-c", f"unset LONGHAUL_INSECURE; cd {self.directory}; exec env {command}"]
        return Program(self.world.start(self.namespace, ["env", *set_all, *shell], log), log)

    def train(self, block: str) -> Program:
        block = block.replace("127.0.0.1:29600", self.coordinator)
        return self.start(block.replace("train.py 300", f"train.py {FOREVER}").strip())

    def end_all(self) -> None:
        """Ends all programs of the machine at once, as the loss of its power does."""
        for pid in run(["ip", "netns", "pids", self.namespace]).split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue

    def link(self, state: str) -> None:
        run(["ip", "-n", self.namespace, "link", "set", "eth0", state])


class Program:
    def __init__(self, process: Process, log: pathlib.Path) -> None:
        self.process = process
        self.log = log

    def steps(self) -> dict[int, tuple[int, str]]:
        """By number of the step: members, and the hash at its begin."""
        lines = re.findall(r"^step (\d+) .* members (\d+)  (\w+)$", self.log.read_text(), re.MULTILINE)
        return {int(step): (int(members), digest) for step, members, digest in lines}

    def until_members(self, members: int, after: int = 0) -> int:
        """Waits until the three newest steps, all later than `after`, had so many members. Returns the newest one."""

        def true(steps: dict[int, tuple[int, str]]) -> bool:
            newest = sorted(number for number in steps if number > after)[-3:]
            return len(newest) == 3 and all(steps[number][0] == members for number in newest)

        self.until(lambda: true(self.steps()))
        return max(self.steps())

    def until_says(self, text: str) -> None:
        self.until(lambda: text in self.log.read_text())

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 3 * PATIENCE_S
        while not condition():
            assert self.process.alive, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)


def agree(*programs: Program) -> None:
    """Steps that several programs made have equal members and state in all."""
    one, *others = [program.steps() for program in programs]
    for other in others:
        both = one.keys() & other.keys()
        assert both
        assert all(one[number] == other[number] for number in both)


@pytest.mark.parametrize(
    ("first", "beside"),
    [
        ("the coordinator's machine", "127.0.0.1"),
        ("the other machine", "127.0.1.1"),
        pytest.param("the coordinator's machine", "127.0.1.1", marks=pytest.mark.full),
        pytest.param("the other machine", "127.0.0.1", marks=pytest.mark.full),
    ],
)
def test_the_tutorial_on_two_machines(tmp_path: pathlib.Path, first: str, beside: str) -> None:
    _, coordinator, train, _, _ = SHELL
    with World(tmp_path / "logs") as world:
        here = Machine(world, world.coordinator_namespace, f"{beside}:{COORDINATOR_PORT}")
        there = Machine(world, world.add_host().namespace, f"{world.address_of(1)}:{COORDINATOR_PORT}")
        for machine in (here, there):
            (machine.directory / "train.py").write_text(PYTHON[0])
        here.start(coordinator.strip())
        order = [here, there] if first.startswith("the coord") else [there, here]
        one = order[0].train(train)
        one.until_members(1)
        two = order[1].train(train)
        seen = max(program.until_members(2) for program in (one, two))
        agree(one, two)
        programs = {order[0]: one, order[1]: two}

        # Step 5 and 6: each of the two programs dies and comes back.
        for dies, stays in ((there, here), (here, there)):
            programs[dies].process.kill()
            seen = programs[stays].until_members(1, after=seen)
            programs[dies] = dies.train(train)
            seen = max(programs[machine].until_members(2, after=seen) for machine in (stays, dies))
            agree(programs[here], programs[there])
            assert min(programs[dies].steps()) > 3, "it goes on, and does not begin anew"

        # A whole machine dies: without the coordinator, then with it.
        there.link("down")
        there.end_all()
        seen = programs[here].until_members(1, after=seen)
        there.link("up")
        programs[there] = there.train(train)
        seen = max(programs[machine].until_members(2, after=seen) for machine in (here, there))
        here.link("down")
        here.end_all()
        here.link("up")
        here.start(coordinator.strip())
        programs[here] = here.train(train)
        seen = max(programs[machine].until_members(2, after=seen) for machine in (there, here))
        agree(programs[here], programs[there])


class Net:
    """How the two machines are joined; each returns the coordinator's address as the other machine names it."""

    @staticmethod
    def ipv4(world: World) -> str:
        return world.address_of(1)

    ipv6 = ipv4

    @staticmethod
    def two_networks(world: World) -> str:
        """The coordinator's machine has its default route in another network."""
        for command in (
            "link add veth1 type veth peer name veth2",
            "addr add 192.168.9.1/24 dev veth1",
            "link set veth1 up",
            "link set veth2 up",
            "route add default via 192.168.9.9",
        ):
            run(["ip", "-n", world.coordinator_namespace, *command.split()])
        return world.address_of(1)

    @staticmethod
    def late(world: World) -> str:
        """The coordinator's machine has no network when its programs start."""
        run(["ip", "-n", world.coordinator_namespace, "addr", "flush", "dev", "eth0"])
        return world.address_of(1)


@pytest.mark.parametrize("first", ["here", "there"])
@pytest.mark.parametrize("own_peerd", [True, False], ids=["private peerd", "peerd"])
@pytest.mark.parametrize("net", ["ipv4", "ipv6", "two_networks", "late"])
def test_machines_meet_whoever_starts_first(tmp_path: pathlib.Path, net: str, own_peerd: bool, first: str) -> None:
    with World(tmp_path / "logs", ipv6=net == "ipv6") as world:
        other = world.add_host()
        address = getattr(Net, net)(world)
        beside = "[::1]" if net == "ipv6" else "127.0.0.1"
        here = Machine(world, world.coordinator_namespace, f"{beside}:{COORDINATOR_PORT}")
        there = Machine(world, other.namespace, endpoint(address, COORDINATOR_PORT))
        serving = here.start("longhaul-coordinator --listen=0.0.0.0:29600 --insecure --store=memory")
        serving.until_says("coordinator serving")
        programs = []
        for machine in (here, there) if first == "here" else (there, here):
            (machine.directory / "meets.py").write_text(MEETS)
            settings = {
                "COORDINATOR": machine.coordinator,
                "COORDINATOR_TIMEOUT_MS": str(round(3000 * PATIENCE_S)),
                "INSECURE": "true",
                "LOG_LEVEL": "info",
            }
            peerd = f"{machine.directory}/peerd.sock"
            if own_peerd:
                variables = " ".join(f"LONGHAUL_PEERD_{name}={value}" for name, value in settings.items())
                command = f"{variables} LONGHAUL_COORDINATOR={machine.coordinator} python meets.py"
                programs.append(machine.start(command))
                connects = programs[-1]
            else:
                flags = " ".join(f"--{name.lower().replace('_', '-')}={value}" for name, value in settings.items())
                connects = machine.start(f"longhaul-peerd {flags} --socket={peerd}")
                connects.until_says("peerd serving")
                programs.append(machine.start(f"python meets.py {peerd}"))
            if net == "late" and machine is here:
                connects.until_says("control stream stands")
                run(world.address_command("add", world.coordinator_namespace, address))
        for program in programs:
            assert program.process.wait(3 * PATIENCE_S) == 0, program.log.read_text()
            assert "sum 2" in program.log.read_text()


def test_nobody_is_told_to_open_a_port_on_loopback(tmp_path: pathlib.Path) -> None:
    """The newcomer's peerd listens on loopback only. Its log and the refusal say what helps."""
    with World(tmp_path / "logs") as world:
        here = Machine(world, world.coordinator_namespace, f"127.0.0.1:{COORDINATOR_PORT}")
        there = Machine(world, world.add_host().namespace, f"{world.address_of(1)}:{COORDINATOR_PORT}")
        here.start("longhaul-coordinator --listen=0.0.0.0:29600 --insecure --store=memory").until_says("serving")
        programs = []
        for machine, listen in ((here, "[::]:0"), (there, "127.0.0.1:0")):
            (machine.directory / "meets.py").write_text(MEETS)
            settings = f"LONGHAUL_COORDINATOR={machine.coordinator} LONGHAUL_PEERD_INSECURE=true"
            programs.append(machine.start(f"{settings} LONGHAUL_PEERD_LISTEN={listen} python meets.py"))
            if machine is here:
                programs[0].until(lambda: world.status().get("groups", []) != [])
        assert programs[1].process.wait(3 * PATIENCE_S) == 1
        said = programs[1].log.read_text()
        assert "WARNING other hosts cannot reach this peer" in said
        assert "(unreachable)" in said
        assert "give it --listen=[::]:PORT" in said
        assert "open 127." not in said


def test_a_second_daemon_on_one_host_goes_on_without_default_ports(tmp_path: pathlib.Path) -> None:
    with World(tmp_path / "logs") as world:
        host = Machine(world, world.coordinator_namespace, "127.0.0.1:29600")
        daemons = []
        for number, port in enumerate((COORDINATOR_PORT, COORDINATOR_PORT + 50)):
            command = f"longhaul-coordinator --listen=127.0.0.1:{port} --store=memory"
            daemons.append(host.start(command))
            daemons[-1].until_says("coordinator serving")
            flags = f"--listen=127.0.0.1:{DATA_PORT + 50 * number} --socket={host.directory}/{number}.sock"
            daemons.append(host.start(f"longhaul-peerd --coordinator=127.0.0.1:{port} {flags}"))
            daemons[-1].until_says("control stream stands")
        for daemon in daemons[:2]:
            assert "goes on without" not in daemon.log.read_text()
        for daemon, ports in zip(daemons[2:], (("29602", "29601"), ("29701",))):
            warnings = [line for line in daemon.log.read_text().splitlines() if " WARNING " in line]
            for taken in ports:
                assert any("goes on without" in line and taken in line for line in warnings), warnings
        # A port that was named is needed.
        third = host.start(
            f"longhaul-peerd --listen=127.0.0.1:0 --http=127.0.0.1:29701 --socket={host.directory}/3.sock"
        )
        assert third.process.wait() == 1
        assert "29701" in third.log.read_text()
