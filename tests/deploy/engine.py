"""Podman with storage, mounts and a network of its own: nothing of it meets what else runs on this machine.

All of podman's commands run in one mount namespace, because rootful podman keeps the addresses and the name server of
its networks in /run/containers, whatever its storage is. Mounts of containers end with this namespace. Images are built
in the machine's network, because the build installs packages. Containers run in a network namespace without a way out,
so that published ports are free. The base image is made from Debian's packages (mmdebstrap), because
a machine that tests may reach no registry of images. Settings in the environment:

- LONGHAUL_PODMAN_ROOT names a directory that keeps images between runs. Without it each run builds everything anew.
- LONGHAUL_BASE_IMAGE names a base image to pull.
- LONGHAUL_BUILD_FLAGS: more arguments of `podman build`, for instance --build-arg=BAZEL_FLAGS=--jobs=1.
- LONGHAUL_COMPILE_ALL=1: Bazel in the image takes no compiled file from this machine's cache.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import Self

ROOT = pathlib.Path(__file__).resolve().parents[2]
PREFIX = "longhaul-podman-"
DEBIAN = "bookworm"
BASE = "localhost/longhaul-test/base"
# How long a command may take on a busy machine. A build compiles everything and downloads PyTorch.
PATIENCE_S = 120.0
BUILD_S = 3600.0
CAP_SYS_RESOURCE = 24


def _has_capability(number: int) -> bool:
    found = re.search(r"^CapEff:\s*(\w+)$", pathlib.Path("/proc/self/status").read_text(), re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> number & 1)


def _hard_limits() -> dict[str, int]:
    """The limits that containers may have at most, by their names in containers.conf; empty: any."""
    if _has_capability(CAP_SYS_RESOURCE):
        return {}
    numbers = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC, "memlock": resource.RLIMIT_MEMLOCK}
    limits = {name: resource.getrlimit(number)[1] for name, number in numbers.items()}
    # Podman 4.3 cannot give a container more processes than this, unless it may raise limits.
    limits["nproc"] = min(limits["nproc"], 32768) if limits["nproc"] > 0 else 32768
    return limits


def _run(command: Sequence[str], timeout: float = PATIENCE_S, **options: object) -> str:
    """Runs a command and returns its output. RuntimeError: the command failed; the text has what it printed."""
    done = subprocess.run(  # type: ignore[call-overload]
        list(command), capture_output=True, text=True, timeout=timeout, **options
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"{shlex.join(command)}: exit {done.returncode}:\n{done.stdout[-6000:]}{done.stderr[-6000:]}"
        )
    output: str = done.stdout
    return output


class Engine:
    """Podman for one test run. Its containers, storage and namespace go with the block.

    Use `with Engine() as engine`. RuntimeError: a command failed; the text has the command and its output.
    """

    def __init__(self) -> None:
        kept = os.environ.get("LONGHAUL_PODMAN_ROOT")
        self._kept = bool(kept)
        remove_leftovers()
        self.root = pathlib.Path(kept or tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir="/var/tmp"))
        self.root.mkdir(parents=True, exist_ok=True)
        self.namespace = self.root.name if not kept else f"{PREFIX}{os.getpid()}-kept"
        self._mounts: subprocess.Popen[str] | None = None
        self.limits = _hard_limits()
        self.environment = {
            **os.environ,
            "CONTAINERS_CONF": str(self.root / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(self.root / "storage.conf"),
            "TMPDIR": str(self.root / "tmp"),
        }
        self._configure()
        self._lend_compiled_files()

    def _configure(self) -> None:
        # Two limits that podman raises for each container, which is refused where this machine's are lower.
        ulimits = [f"{name}={limit}:{limit}" for name, limit in self.limits.items() if name != "memlock"]
        # runc rather than crun where both are there: crun refuses hybrid control groups.
        runtime = 'runtime = "runc"' if shutil.which("runc") else ""
        (self.root / "containers.conf").write_text(
            f"[containers]\ndefault_ulimits = {json.dumps(ulimits)}\n"
            # Podman keeps all engines' networks in one directory of the machine, unless told otherwise.
            f'[network]\nnetwork_backend = "netavark"\nnetwork_config_dir = "{self.root}/networks"\n'
            f'[engine]\n{runtime}\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
        )
        (self.root / "storage.conf").write_text(
            f'[storage]\ndriver = "overlay"\nrunroot = "{self.root}/run"\ngraphroot = "{self.root}/graph"\n'
        )

    def _lend_compiled_files(self) -> None:
        """Gives builds the compiled files of this machine's Bazel, in the place where buildah keeps cache mounts.

        Bazel takes a file from there only if the command and all inputs are the same.
        """
        cache = self.root / "tmp" / "buildah-cache"
        cache.mkdir(parents=True, exist_ok=True)
        ours = pathlib.Path.home() / ".cache" / "longhaul-bazel"
        if ours.is_dir() and not os.environ.get("LONGHAUL_COMPILE_ALL") and not (cache / "longhaul-bazel").exists():
            (cache / "longhaul-bazel").symlink_to(ours)

    def __enter__(self) -> Self:
        try:
            _run(["ip", "netns", "add", self.namespace])
            _run(["ip", "-n", self.namespace, "link", "set", "lo", "up"])
            self._enter_mounts()
        except BaseException:
            self.close()
            raise
        return self

    def _enter_mounts(self) -> None:
        """Starts a process that keeps the mount namespace. It ends with this process."""
        ours = self.root / "run-containers"
        ours.mkdir(exist_ok=True)
        script = 'mkdir -p /run/containers && mount --bind "$1" /run/containers && echo ready && exec sleep infinity'
        keep = ["unshare", "--mount", "--propagation=private", "sh", "-c", script, "sh", str(ours)]
        self._mounts = subprocess.Popen(
            ["setpriv", "--pdeathsig=KILL", *keep], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self._mounts.stdout is not None
        if (said := self._mounts.stdout.readline()) != "ready\n":
            raise RuntimeError(f"no mount namespace for podman: {said}{self._mounts.stdout.read()}")

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
            self.podman("rm", "--all", "--force", "--time=0")
            self.podman("volume", "rm", "--all", "--force")
            self.podman("network", "prune", "--force")
        if self._mounts is not None:
            self._mounts.kill()
            self._mounts.communicate()
        subprocess.run(["ip", "netns", "del", self.namespace], capture_output=True, timeout=PATIENCE_S)
        if not self._kept:
            _remove_storage(self.root)

    # ------------------------------------------------------------------ commands

    def inside(self, *command: str, timeout: float = PATIENCE_S, cwd: pathlib.Path = ROOT, **environment: str) -> str:
        """Runs a command in the network of the containers and returns its output."""
        command = (*self._namespaces(network=True), f"--wdns={cwd}", *command)
        return _run(command, timeout, env={**self.environment, **environment})

    def _namespaces(self, network: bool) -> list[str]:
        """The command before a command that runs in the mount namespace, and in the network of the containers."""
        if self._mounts is None:
            raise RuntimeError("the engine is not open: use it in a `with` block")
        # Not `ip netns exec`, which hides the control groups.
        net = [f"--net=/run/netns/{self.namespace}"] if network else []
        return ["nsenter", f"--mount=/proc/{self._mounts.pid}/ns/mnt", *net]

    def path(self, place: str) -> pathlib.Path:
        """Where a file that podman has mounted is for this process."""
        assert self._mounts is not None
        return pathlib.Path(f"/proc/{self._mounts.pid}/root{place}")

    def podman(self, *arguments: str, timeout: float = PATIENCE_S) -> str:
        return self.inside("podman", *arguments, timeout=timeout)

    def logs(self, container: str) -> str:
        """All that a container has printed since it was made."""
        done = subprocess.run(
            [*self._namespaces(network=False), "podman", "logs", container],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
            env=self.environment,
        )
        return done.stdout

    def inspect(self, container: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = json.loads(self.podman("inspect", container))
        return found[0]

    # ------------------------------------------------------------------ images

    def make_base(self) -> None:
        """Makes the image BASE: a minimal Debian."""
        if self._kept and self.podman("images", "--quiet", BASE):
            return
        if image := os.environ.get("LONGHAUL_BASE_IMAGE"):
            _run([*self._namespaces(network=False), "podman", "pull", image], BUILD_S, env=self.environment)
            self.podman("tag", image, BASE)
            return
        archive = self.root / "base.tar"
        left_out = ("/usr/share/man/*", "/usr/share/doc/*", "/usr/share/locale/*")
        _run(
            [
                "mmdebstrap",
                "--variant=minbase",
                "--mode=root",
                "--format=tar",
                *(f"--dpkgopt=path-exclude={pattern}" for pattern in left_out),
                "--dpkgopt=path-include=/usr/share/doc/*/copyright",
                '--customize-hook=rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/*.bin "$1"/var/log/*',
                '--customize-hook=rm -f "$1"/etc/resolv.conf "$1"/etc/hostname',
                DEBIAN,
                str(archive),
            ],
            BUILD_S,
        )
        self.podman("import", '--change=CMD ["bash"]', str(archive), BASE)
        archive.unlink()

    def build(self, name: str, *arguments: str, file: pathlib.Path, context: pathlib.Path = ROOT) -> str:
        """Builds an image on BASE. Returns what the build printed."""
        return _run(
            [
                *self._namespaces(network=False),
                "podman",
                "build",
                "--format=docker",
                "--network=host",
                f"--build-arg=BASE={BASE}",
                *self._pip_settings(),
                *shlex.split(os.environ.get("LONGHAUL_BUILD_FLAGS", "")),
                *arguments,
                f"--tag={name}",
                f"--file={file}",
                str(context),
            ],
            BUILD_S,
            env=self.environment,
        )

    def _pip_settings(self) -> list[str]:
        """Lets a build use pip as this machine does: its indexes, directories of wheels and certificates."""
        listed = _run([sys.executable, "-m", "pip", "config", "list"])
        settings = dict(re.findall(r"^(?:global|:env:|install)\.([\w-]+)='(.*)'$", listed, re.MULTILINE))
        if not settings.keys() & {"index-url", "extra-index-url", "find-links"}:
            return []
        flags = []
        places = []
        for place in settings.get("find-links", "").split():
            if os.path.isdir(place):
                flags.append(f"--volume={place}:{place}:ro")
            if os.path.isdir(place) or "://" in place:
                places.append(place)
        config = {"find-links": " ".join(places), "index-url": settings.get("index-url", "")}
        if certificates := settings.get("cert"):
            # Not where it is on this machine, because a package of the image writes that file.
            flags.append(f"--volume={certificates}:/mnt/certificates.pem:ro")
            config["cert"] = "/mnt/certificates.pem"
        path = self.root / "pip.conf"
        path.write_text("[global]\n" + "".join(f"{key} = {value}\n" for key, value in config.items() if value))
        more = [url for url in settings.get("extra-index-url", "").split() if not url.startswith("file:")]
        return [*flags, f"--volume={path}:/etc/pip.conf:ro", f"--build-arg=PIP_EXTRA_INDEX_URL={' '.join(more)}"]


def _remove_storage(root: pathlib.Path) -> None:
    # Storage that is still mounted, of a run that was killed.
    for mount in reversed(pathlib.Path("/proc/self/mounts").read_text().splitlines()):
        place = mount.split()[1]
        if place.startswith(f"{root}/"):
            subprocess.run(["umount", "--lazy", place], capture_output=True, timeout=PATIENCE_S)
    shutil.rmtree(root, ignore_errors=True)


def remove_leftovers() -> None:
    """Removes storage and namespaces of runs that were killed."""
    for place in (pathlib.Path("/var/tmp"), pathlib.Path("/run/netns")):
        for path in place.glob(f"{PREFIX}*"):
            pid = path.name[len(PREFIX) :].split("-")[0]
            if not pid.isdigit() or os.path.exists(f"/proc/{pid}"):
                continue
            if place.name == "netns":
                subprocess.run(["ip", "netns", "del", path.name], capture_output=True, timeout=PATIENCE_S)
            else:
                _remove_storage(path)


def why_not() -> str:
    """Why podman cannot run here. Empty: it can."""
    if os.geteuid() != 0:
        return "podman with a network of its own needs root"
    for program in ("podman", "buildah", "mmdebstrap", "nsenter", "unshare", "setpriv", "ip"):
        if shutil.which(program) is None:
            return f"the program {program} is missing (tools/setup installs it)"
    # The smallest container that shows whether podman, its runtime and its network work: this machine's programs.
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        os.chmod(directory, 0o755)
        try:
            with Engine() as engine:
                rootfs = pathlib.Path(directory)
                for name in ("usr", "proc", "sys", "dev", "tmp", "etc", "run"):
                    (rootfs / name).mkdir()
                for name in ("bin", "lib", "lib64", "sbin"):
                    if os.path.islink(f"/{name}"):
                        (rootfs / name).symlink_to(os.readlink(f"/{name}"))
                network = "longhaul-probe"
                engine.podman("network", "create", network)
                volume = "--volume=/usr:/usr:ro"
                said = engine.podman(
                    "run", "--rm", f"--network={network}", volume, "--rootfs", directory, "echo", "works"
                )
                return "" if said == "works\n" else f"a container that should print `works` printed {said!r}"
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as problem:
            return f"podman does not work here: {problem}"
