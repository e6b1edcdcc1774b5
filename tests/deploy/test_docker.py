"""The images build from nothing, and deploy/docker/compose.yaml runs the demo with them, here under podman."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine import PATIENCE_S, ROOT, Engine
from images import TARGETS

from longhaul.testing import find_binary

pytest_plugins = ["images"]

DOCKER = ROOT / "deploy" / "docker"
PROFILE = DOCKER / "seccomp-peerd.json"
DAEMONS = {"coordinator": "longhaul-coordinator", "peerd": "longhaul-peerd"}
# How long a step of the story may take: four trainers share the processors of this machine.
STORY_S = 600.0


def until(what: str, condition: Callable[[], Any], seconds: float = STORY_S) -> Any:
    """Waits until the condition returns something true, and returns that."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.2)
    return found


# ---------------------------------------------------------------------- images


def version() -> str:
    found = re.search(r'kVersion\[\] = "(.*)"', (ROOT / "base" / "daemon" / "version.h").read_text())
    assert found
    return found[1]


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_is_labelled_and_its_user_is_not_root(engine: Engine, target: str) -> None:
    image = engine.inspect(f"longhaul/{target}")
    labels = {key.rsplit(".", 1)[1]: value for key, value in image["Labels"].items() if "opencontainers" in key}
    assert labels["title"] == f"longhaul-{target}"
    assert labels["version"] == version()
    assert labels["revision"] == "abc"
    assert labels["licenses"] == "Apache-2.0"
    assert labels["description"]
    assert image["User"] == "10001:10001"
    print(f"{target}: {image['Size'] / 1e6:.0f} MB")


@pytest.mark.parametrize("target", DAEMONS)
def test_an_image_holds_the_stripped_program_and_no_compiler(engine: Engine, target: str) -> None:
    place = engine.path(engine.podman("image", "mount", f"longhaul/{target}").strip())
    try:
        programs = [place / "usr/local/bin" / name for name in (DAEMONS[target], "lhctl")]
        for program in programs:
            sections = subprocess.check_output(["readelf", "--sections", "--wide", str(program)], text=True)
            assert ".dynsym" in sections
            assert ".symtab" not in sections
        for name in ("g++", "gcc", "bazel", "git", "python3"):
            assert shutil.which(name, path=f"{place}/usr/bin") is None
        assert not list((place / "var/lib/apt/lists").glob("*_Packages*"))
    finally:
        engine.podman("image", "unmount", f"longhaul/{target}")


def test_the_image_of_peerd_holds_the_seccomp_profile(engine: Engine) -> None:
    shown = engine.podman("run", "--rm", "--entrypoint=cat", "longhaul/peerd", "/usr/share/longhaul/seccomp-peerd.json")
    assert shown == PROFILE.read_text()


def test_under_the_engines_own_profile_peerd_runs_on_epoll_and_says_so(engine: Engine) -> None:
    name = engine.podman("run", "--detach", "longhaul/peerd").strip()
    ask = r"exec 3<>/dev/tcp/127.0.0.1/29701 && printf 'GET /metrics HTTP/1.0\r\n\r\n' >&3 && cat <&3"
    try:
        until("peerd warns", lambda: "epoll instead of io_uring" in engine.logs(name), PATIENCE_S)
        until("peerd is healthy", lambda: healthy(engine, name), PATIENCE_S)
        assert "\nlonghaul_peerd_on_epoll 1\n" in engine.podman("exec", name, "bash", "-c", ask)
        warnings = [line for line in engine.logs(name).splitlines() if "epoll instead of io_uring" in line]
        assert len(warnings) == 1
        assert "deploy/docker/seccomp-peerd.json" in warnings[0]
    finally:
        engine.podman("rm", "--force", "--time=0", name)


def test_with_io_uring_alone_peerd_exits_and_names_the_profile(engine: Engine) -> None:
    with pytest.raises(RuntimeError, match=r"io_uring setup refused .*deploy/docker/seccomp-peerd\.json"):
        engine.podman("run", "--rm", "longhaul/peerd", "--io=uring")


def certificates(engine: Engine, directory: pathlib.Path) -> dict[str, bytes]:
    """Runs the service `certificates` on directories of this machine. Returns what the daemons get."""
    for name in ("ca", "tls", "join"):
        (directory / name).mkdir(mode=0o700, exist_ok=True)
    rights = ["--cap-drop=all", *(f"--cap-add={name}" for name in ("CHOWN", "DAC_OVERRIDE", "FOWNER"))]
    volumes = [f"--volume={directory}/{name}:/{name}" for name in ("ca", "tls", "join")]
    how = ["--rm", "--user=0", "--network=none", "--read-only", *rights, *volumes, "--entrypoint=longhaul-credentials"]
    engine.podman("run", *how, "longhaul/coordinator", "certificates", "/ca", "/tls", "/join", "coordinator")
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.glob("[tj]*/*")}


def test_certificates_are_renewed_and_their_ca_stays(engine: Engine, tmp_path: pathlib.Path) -> None:
    first, second = certificates(engine, tmp_path), certificates(engine, tmp_path)
    assert first.keys() == second.keys() == {"tls/coordinator.crt", "tls/coordinator.key", "join/ca.crt"}
    assert [name for name in first if first[name] == second[name]] == ["join/ca.crt"]


def test_a_ca_of_the_users_own_is_used(engine: Engine, tmp_path: pathlib.Path) -> None:
    def lhctl(*arguments: str) -> None:
        subprocess.run([find_binary("lhctl"), "ca", *arguments], check=True, stdout=subprocess.DEVNULL)

    ca = tmp_path / "ca"
    lhctl("init", str(ca))
    root = (ca / "ca.crt").read_bytes()
    made = certificates(engine, tmp_path)
    assert made["join/ca.crt"] == root
    # Another CA gives certificates, and keeps its key for itself.
    (ca / "ca.key").unlink()
    for _ in range(2):
        assert certificates(engine, tmp_path) == made
    assert made["tls/coordinator.key"] == (ca / "coordinator.key").read_bytes()
    (ca / "coordinator.key").unlink()
    with pytest.raises(RuntimeError, match=r"/ca has ca\.crt and no ca\.key, so it must have coordinator\.key, too"):
        certificates(engine, tmp_path)


def test_the_commands_of_the_page_start_a_coordinator_and_a_peer(engine: Engine, tmp_path: pathlib.Path) -> None:
    page = (ROOT / "docs" / "deploy.md").read_text().split("### Several hosts")[1].split("\n### ")[0]
    coordinator, host = re.findall(r"```\n(.*?)```", page, re.DOTALL)[:2]
    peerd, trainer = host.split("docker run --rm")
    assert "trainer-example" in trainer

    def run(commands: str) -> None:
        # Both hosts are this network, and directories of the host are below tmp_path.
        commands = re.sub(r"(mkdir .*)", lambda line: line[1].replace("/etc/longhaul", str(tmp_path)), commands)
        for text, here in {
            "docker ": "podman ",
            "--volume /etc/longhaul": f"--volume {tmp_path}",
            "10.0.0.5": "127.0.0.1",
            "seccomp=seccomp-peerd.json": f"seccomp={PROFILE}",
            "--ulimit memlock=-1": "" if engine.limits else "--ulimit memlock=-1",
        }.items():
            commands = commands.replace(text, here)
        engine.inside("bash", "-euc", commands, timeout=PATIENCE_S)

    try:
        run(coordinator)
        assert (tmp_path / "ca").stat().st_mode & 0o777 == 0o700
        run(peerd)
        until("peerd is admitted", lambda: "control stream stands" in engine.logs("longhaul-peerd"), PATIENCE_S)
        assert "auth=token" in engine.logs("longhaul-coordinator")
    finally:
        print(engine.logs("longhaul-coordinator"), engine.logs("longhaul-peerd"))
        for name in ("longhaul-peerd", "longhaul-coordinator"):
            engine.podman("rm", "--force", "--ignore", "--time=0", name)


@pytest.mark.parametrize("target", DAEMONS)
def test_an_image_has_the_bill_of_materials_of_its_programs(engine: Engine, target: str) -> None:
    def image(*command: str) -> str:
        return engine.podman("run", "--rm", f"--entrypoint={command[0]}", f"longhaul/{target}", *command[1:])

    bill = json.loads(image("cat", "/usr/share/doc/longhaul/sbom.spdx.json"))
    packages = {package["SPDXID"]: package for package in bill["packages"]}
    described = [r["relatedSpdxElement"] for r in bill["relationships"] if r["relationshipType"] == "DESCRIBES"]
    sums = {packages[one]["name"]: packages[one]["checksums"][0]["checksumValue"] for one in described}
    names = sorted((DAEMONS[target], "lhctl"))
    there = image("sha256sum", *(f"/usr/local/bin/{name}" for name in names)).split()
    assert sums == {pathlib.PurePosixPath(path).name: digest for digest, path in zip(there[::2], there[1::2])}
    # The image has just these versions of the libraries.
    linked = {r["relatedSpdxElement"] for r in bill["relationships"] if r["relationshipType"] == "DYNAMIC_LINK"}
    installed = set(image("dpkg-query", "--show", "--showformat=${Package} ${Version}\n").splitlines())
    assert {f"{packages[one]['name']} {packages[one]['versionInfo']}" for one in linked} <= installed


def healthy(engine: Engine, container: str) -> bool:
    try:
        engine.podman("healthcheck", "run", container)
    except RuntimeError:
        return False
    return True


# ---------------------------------------------------------------------- the composed demo


class Stack:
    """The services of compose.yaml."""

    def __init__(self, engine: Engine, directory: pathlib.Path) -> None:
        self.engine = engine
        # What differs here: an image from this machine, and limits that podman cannot raise on this machine.
        services: dict[str, Any] = {"prometheus": {"image": "longhaul-test/prometheus"}}
        if engine.limits:
            services |= {f"peerd-{i}": {"ulimits": engine.limits} for i in range(1, 5)}
        self.override = directory / "override.yaml"
        self.override.write_text(json.dumps({"services": services}))

    def compose(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "podman_compose", "--file=compose.yaml", f"--file={self.override}"]
        return self.engine.inside(*command, *arguments, cwd=DOCKER, timeout=STORY_S, ROUNDS="100000")

    def up(self, *services: str) -> None:
        self.compose("--profile=fourth", "up", "--detach", "--no-build", *services)

    def container(self, service: str) -> str:
        found = self.engine.podman(
            "ps", "--all", f"--filter=label=com.docker.compose.service={service}", "--format={{.ID}}"
        )
        assert found, f"there is no container of {service}"
        return found.split()[0]

    def state(self, service: str) -> dict[str, Any]:
        state: dict[str, Any] = self.engine.inspect(self.container(service))["State"]
        return state

    def said(self, trainer: str, event: str) -> list[dict[str, Any]]:
        """What a trainer has reported, over all its starts."""
        lines = self.engine.logs(self.container(trainer)).splitlines()
        return [told for line in lines if line.startswith("{") and (told := json.loads(line))["event"] == event]

    def rounds(self, trainer: str, after: int, size: int) -> list[dict[str, Any]]:
        """The rounds later than one round that counted so many members."""
        return [told for told in self.said(trainer, "round") if told["round"] > after and told["size"] == size]

    def value(self, query: str) -> float | None:
        """What Prometheus answers to a query for one number; None: nothing yet."""
        command = ["promtool", "query", "instant", "http://127.0.0.1:9090", query]
        try:
            answer = self.engine.podman("exec", self.container("prometheus"), *command)
        except RuntimeError:
            return None  # does not serve yet
        found = re.search(r" => (\S+) @", answer)
        return float(found[1]) if found else None

    def files(self, service: str, directory: str) -> dict[str, str]:
        """The files of a container, with mode, owner and digest."""
        script = 'cd "$1" && find . -type f -printf "%P %m %U:%G " -exec sh -c "sha256sum <\\"\\$1\\"" sh {} \\;'
        listed = self.engine.podman("exec", self.container(service), "sh", "-c", script, "sh", directory)
        return dict(line.split(" ", 1) for line in listed.splitlines())

    def story(self) -> str:
        """What all containers printed last, for a test that fails."""
        names = self.engine.podman("ps", "--all", "--format={{.Names}}").split()
        return "\n".join(f"--- {name}\n{self.engine.logs(name)[-2000:]}" for name in names)


@pytest.fixture(scope="module")
def stack(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(engine, tmp_path_factory.mktemp("compose"))
    try:
        stack.up("token", "prometheus", *(f"{what}-{i}" for what in ("peerd", "trainer") for i in (1, 2, 3)))
        yield stack
    finally:
        print(stack.story())
        stack.compose("--profile=fourth", "down", "--volumes", "--timeout=0")


def test_three_hosts_train_and_the_loss_falls_while_one_is_killed_and_one_joins(stack: Stack) -> None:
    first = until("three hosts train together", lambda: stack.rounds("trainer-1", 0, size=3))[0]
    start = stack.said("trainer-1", "joined")[0]["loss"]

    stack.engine.podman("kill", stack.container("peerd-2"))
    assert stack.state("peerd-2")["ExitCode"] == 137
    two = until("two hosts go on", lambda: stack.rounds("trainer-1", first["round"], size=2))[0]
    assert not stack.rounds("trainer-1", two["round"], size=3)

    stack.up("peerd-4", "trainer-4")
    until("the fourth host has joined", lambda: stack.rounds("trainer-4", two["round"], size=3))
    assert stack.said("trainer-4", "received")[0]["bytes"] > 0

    # The trainer of the killed host tried again and again. It finds its peerd, and joins anew.
    last = max(told["round"] for told in stack.said("trainer-1", "round"))
    stack.engine.podman("start", stack.container("peerd-2"))
    until("the second host is back", lambda: stack.rounds("trainer-2", last, size=4))
    members = stack.compose("exec", "-T", "coordinator", "lhctl", "members")
    assert {f"host-{i}" for i in (1, 2, 3, 4)} <= set(re.findall(r"host-\d", members)), members

    def losses() -> list[float]:
        told = [told for i in (1, 2, 3, 4) for told in stack.said(f"trainer-{i}", "round")]
        return [told["loss"] for told in sorted(told, key=lambda told: told["round"]) if told["loss"] is not None]

    until("the loss falls", lambda: losses()[-1] < start - 0.3)


def test_prometheus_sees_the_coordinator_and_all_peers(stack: Stack) -> None:
    stack.up("peerd-2", "peerd-4")
    until("one coordinator is scraped", lambda: stack.value('sum(up{job="longhaul-coordinator"})') == 1)
    until("four peers are scraped", lambda: stack.value('sum(up{job="longhaul-peerd"})') == 4)
    assert stack.value("sum(longhaul_peerd_coordinator_up)") == 4


@pytest.mark.parametrize("service", ["coordinator", "peerd-1"])
def test_a_daemon_is_healthy(stack: Stack, service: str) -> None:
    until("it is healthy", lambda: healthy(stack.engine, stack.container(service)), PATIENCE_S)


CA, TOKEN, KEY = "join/ca.crt", "join/token", "tls/coordinator.key"


def test_each_daemon_has_the_secrets_that_it_needs_and_no_others(stack: Stack) -> None:
    def rights(service: str) -> dict[str, str]:
        return {name: " ".join(what.split()[:2]) for name, what in stack.files(service, "/etc/longhaul").items()}

    assert rights("peerd-1") == {CA: "644 10001:10001", TOKEN: "600 10001:10001"}
    assert rights("coordinator") == {"tls/coordinator.crt": "644 10001:10001", KEY: "600 10001:10001"}
    log = stack.engine.logs(stack.container("coordinator"))
    assert "auth=token admin_auth=none" in log
    assert "--insecure" not in log


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--tls-ca=/etc/longhaul/join/ca.crt"], "the caller shows no join token"),
        (["--insecure"], "if the coordinator speaks TLS there, give --tls-ca"),
        (["--token-file=/etc/longhaul/join/token"], "nothing would be encrypted"),
    ],
    ids=["no token", "in clear", "no CA"],
)
def test_a_peer_that_lacks_something_is_refused(stack: Stack, flags: list[str], why: str) -> None:
    network = "--network=longhaul_default"
    volume = "--volume=longhaul_join:/etc/longhaul/join:ro"
    command = ["run", "--detach", network, volume, "longhaul/peerd", "--coordinator=coordinator:29600", "--io=epoll"]
    name = stack.engine.podman(*command, *flags).strip()
    try:
        until("peerd says why", lambda: re.search(why, stack.engine.logs(name)), PATIENCE_S)
        assert "control stream stands" not in stack.engine.logs(name)
    finally:
        stack.engine.podman("rm", "--force", "--time=0", name)


def test_a_revoked_token_is_replaced_by_the_next_up_and_nobody_starts_again(stack: Stack) -> None:
    stack.up("peerd-2", "trainer-2", "peerd-4", "trainer-4")
    before, started = stack.files("peerd-1", "/etc/longhaul")[TOKEN], stack.state("peerd-1")["StartedAt"]
    stack.up()
    until("the service has ended", lambda: not stack.state("token")["Running"], PATIENCE_S)
    assert stack.files("peerd-1", "/etc/longhaul")[TOKEN] == before, "a token that is valid stays"

    listed = stack.compose("exec", "-T", "coordinator", "lhctl", "token", "list")
    (number,) = re.findall(r"^(\w+) .* valid ", listed, re.MULTILINE)
    stack.compose("exec", "-T", "coordinator", "lhctl", "token", "revoke", number)
    stack.up()
    until("there is a new token", lambda: stack.files("peerd-1", "/etc/longhaul")[TOKEN] != before, PATIENCE_S)
    last = max((told["round"] for told in stack.said("trainer-1", "round")), default=0)
    until("all train with the new token", lambda: stack.rounds("trainer-1", last, size=4))
    assert stack.state("peerd-1")["StartedAt"] == started


def test_all_containers_made_anew_use_the_same_ca_and_token(stack: Stack) -> None:
    before = stack.files("peerd-1", "/etc/longhaul") | stack.files("coordinator", "/etc/longhaul")
    stack.compose("--profile=fourth", "down", "--timeout=10")
    stack.up("token", *(f"{what}-{i}" for what in ("peerd", "trainer") for i in (1, 2)))
    until("two hosts train together", lambda: stack.rounds("trainer-1", 0, size=2))
    after = stack.files("peerd-1", "/etc/longhaul") | stack.files("coordinator", "/etc/longhaul")
    assert [name for name in before if before[name] == after[name]] == [CA, TOKEN]
    assert after.keys() == before.keys(), "the certificate of the coordinator is a new one"


def test_process_1_of_each_container_ends_by_sigterm(stack: Stack) -> None:
    for service in ("trainer-1", "peerd-1", "coordinator"):
        assert stack.state(service)["Running"]
        stack.engine.podman("stop", "--time=60", stack.container(service))
        assert stack.state(service)["ExitCode"] == 0, stack.engine.logs(stack.container(service))[-2000:]
    assert "drained; closing" in stack.engine.logs(stack.container("peerd-1"))
