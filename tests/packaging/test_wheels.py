"""The packages of tools/wheels install into clean virtual environments, and work there without the source tree.

Every Python from 3.10 to 3.14 that is found is tried: python3.10 and so on of PATH, and those that LONGHAUL_PYTHONS
names (paths of interpreters, with colons between them). Programs see no compiler: PATH has the environment's own bin.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
PROGRAMS = ("longhaul-coordinator", "longhaul-peerd", "lhctl")
# These libraries are those of the host on every manylinux platform.
OF_THE_HOST = re.compile(r"(linux-vdso|ld-linux.*|libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+|libz)\.so\b")
# Debian 12 has glibc 2.36. Wheels that want a later one do not install there.
LAST_GLIBC = 36
PATIENCE_S = 600.0


@functools.cache
def interpreters() -> dict[str, str]:
    """The Pythons of this machine that run and have venv, by version."""
    found: dict[str, str] = {}
    named = [shutil.which(f"python{version}") for version in VERSIONS]
    for path in [sys.executable, *os.environ.get("LONGHAUL_PYTHONS", "").split(os.pathsep), *named]:
        if path:
            ask = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
            said = subprocess.run([path, "-c", ask], capture_output=True, text=True, timeout=PATIENCE_S)
            if said.returncode == 0:
                found.setdefault(said.stdout.strip(), path)
    return found


class Environment:
    """A virtual environment, and programs that run in it and see neither this tree nor another program."""

    def __init__(self, directory: pathlib.Path, version: str) -> None:
        self.directory = directory
        self.python = directory / "bin" / "python"
        subprocess.run(
            [interpreters()[version], "-m", "venv", "--without-pip", directory], check=True, timeout=PATIENCE_S
        )
        (self.site,) = directory.glob("lib/python*/site-packages")

    def install(self, *arguments: str | pathlib.Path, path: str = "") -> None:
        """Installs packages with the pip of the tests. path: a directory of programs that a build needs."""
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(self.python), "install"]
        programs = os.pathsep.join(filter(None, [path, os.environ["PATH"]]))
        done = subprocess.run(
            [*pip, *arguments],
            env={**os.environ, "PATH": programs},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def run(self, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Runs a command of the environment's bin."""
        kept = {name: os.environ[name] for name in ("LONGHAUL_PEERD_IO",) if name in os.environ}
        return subprocess.run(
            [self.directory / "bin" / command[0], *command[1:]],
            cwd=self.directory,
            env={"PATH": str(self.directory / "bin"), "HOME": str(self.directory), **kept, **more},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    def prints(self, code: str, **more: str) -> list[str]:
        """The words that a Python program prints."""
        done = self.run("python", "-c", code, **more)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.split()


@pytest.fixture(scope="session")
def wheels() -> pathlib.Path:
    built = subprocess.run([ROOT / "tools" / "wheels"], capture_output=True, text=True, timeout=1800)
    assert (built.returncode, built.stderr) == (0, "")
    return ROOT / "out" / "wheels"


@pytest.fixture(scope="session")
def installed(wheels: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """longhaul[daemons] and numpy, for the Python that runs the tests."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    environment = Environment(tmp_path_factory.mktemp("installed"), version)
    # Only numpy from an index: the name longhaul belongs to another project there.
    environment.install("--only-binary=:all:", "numpy")
    environment.install("--no-index", "--only-binary=:all:", "--find-links", wheels, "longhaul[daemons,numpy]")
    return environment


def wheel_of(wheels: pathlib.Path, name: str) -> zipfile.ZipFile:
    (path,) = wheels.glob(f"{name}-*.whl")
    return zipfile.ZipFile(path)


@pytest.mark.parametrize("name", ["longhaul", "longhaul_daemons"])
def test_a_wheel_is_for_every_python_3_and_for_debian_12(wheels: pathlib.Path, name: str) -> None:
    with wheel_of(wheels, name) as wheel:
        (info,) = [wheel.read(entry).decode() for entry in wheel.namelist() if entry.endswith(".dist-info/WHEEL")]
    tags = re.findall(r"^Tag: (\S+)$", info, re.MULTILINE)
    assert tags
    for tag in tags:
        found = re.fullmatch(r"py3-none-manylinux_2_(\d+)_\w+", tag)
        assert found, tag
        assert int(found[1]) <= LAST_GLIBC


def test_the_sdist_holds_what_a_build_needs_and_no_tests(wheels: pathlib.Path) -> None:
    # tools/wheels has built the wheel from the sdist, so nothing is missing.
    (path,) = wheels.glob("longhaul-*.tar.gz")
    with tarfile.open(path) as sdist:
        names = {name.split("/", 1)[1] for name in sdist.getnames()}
    assert {"proto/wire/ipc.h", "src/client.c", "include/longhaul/longhaul.h", "LICENSE", "README.md"} <= names
    assert [name for name in names if "test" in name] == ["python/longhaul/testing.py"]


def test_the_wheel_of_the_client_describes_itself(wheels: pathlib.Path) -> None:
    with wheel_of(wheels, "longhaul") as wheel:
        names = wheel.namelist()
        (metadata,) = [wheel.read(name).decode() for name in names if name.endswith(".dist-info/METADATA")]
    assert {
        "longhaul/liblonghaul.so",
        "longhaul/py.typed",
        "longhaul/torch/__init__.py",
        "longhaul_torch/__init__.py",
    } <= set(names)
    assert [name for name in names if "test" in name] == ["longhaul/testing.py"]
    (version,) = re.findall(r'^__version__ = "(.*)"$', (ROOT / "client/python/longhaul/_version.py").read_text(), re.M)
    # A wheel of daemons fits the package if the first two numbers of the version are equal.
    series = ".".join(version.split(".")[:2])
    assert f"Version: {version}\n" in metadata
    assert f'Requires-Dist: longhaul-daemons~={series}.0; extra == "daemons"' in metadata
    assert "License-Expression: Apache-2.0\n" in metadata
    extras = {"numpy", "torch", "checkpoints", "daemons", "all"}
    assert set(re.findall(r"^Provides-Extra: (.*)$", metadata, re.MULTILINE)) == extras
    # The README is the page of the package index.
    assert (ROOT / "client" / "README.md").read_text().strip() in metadata


def test_the_licences_of_the_bundled_libraries_are_in_the_wheel(wheels: pathlib.Path) -> None:
    with wheel_of(wheels, "longhaul_daemons") as wheel:
        names = wheel.namelist()
        found = [name.split("/bundled/")[1] for name in names if "/licenses/bundled/" in name and name[-1] != "/"]
        texts = [wheel.read(name).decode() for name in names if name.endswith("/copyright")]
    packages = [name.removesuffix("/copyright") for name in found if name.endswith("/copyright")]
    for library in (
        "libabsl",
        "libgrpc",
        "libprotobuf",
        "libsqlite3",
        "libssl",
        "libtcmalloc",
        "liburing",
        "libxxhash",
    ):
        assert any(package.startswith(library) for package in packages), library
    assert "common-licenses/Apache-2.0" in found
    assert all("Copyright" in text for text in texts)


@pytest.mark.parametrize(
    ("name", "programs"), [("longhaul", ("liblonghaul.so",)), ("longhaul_daemons", PROGRAMS)], ids=["client", "daemons"]
)
def test_a_wheel_has_the_bill_of_materials_of_its_programs(
    wheels: pathlib.Path, name: str, programs: tuple[str, ...]
) -> None:
    with wheel_of(wheels, name) as wheel:
        files = {entry: wheel.read(entry) for entry in wheel.namelist()}
    (place,) = [entry for entry in files if entry.endswith(".dist-info/sboms/longhaul.spdx.json")]
    record = files[place.split("/")[0] + "/RECORD"].decode()
    assert re.search(rf"^{re.escape(place)},sha256=[\w-]+,{len(files[place])}$", record, re.MULTILINE)
    bill = json.loads(files[place])
    packages = {package["SPDXID"]: package for package in bill["packages"]}
    described = [
        packages[r["relatedSpdxElement"]] for r in bill["relationships"] if r["relationshipType"] == "DESCRIBES"
    ]
    # The programs as they are in the wheel, not as they were before auditwheel changed them.
    sums = {package["name"]: package["checksums"][0]["checksumValue"] for package in described}
    there = {pathlib.PurePosixPath(entry).name: content for entry, content in files.items()}
    assert sums == {program: hashlib.sha256(there[program]).hexdigest() for program in programs}
    # All that is bundled is in the bill.
    bundled = {entry.split("/bundled/")[1].split("/")[0] for entry in files if entry.endswith("/copyright")}
    names = {package["name"] for package in packages.values()}
    assert {"libc6", *bundled} <= names
    assert bool(bundled) == (name == "longhaul_daemons")


def test_the_programs_need_no_library_but_those_of_the_wheel_and_of_every_host(installed: Environment) -> None:
    bundled = installed.site / "longhaul_daemons.libs"
    for program in PROGRAMS:
        path = installed.site / "longhaul_daemons" / "bin" / program
        listed = subprocess.check_output(["ldd", path], text=True)
        found = dict(re.findall(r"^\s*(\S+) => (\S+)", listed, re.MULTILINE))
        assert any(pathlib.Path(place).parent.resolve() == bundled for place in found.values())
        for name, place in found.items():
            assert OF_THE_HOST.match(name) or pathlib.Path(place).parent.resolve() == bundled, (program, name, place)


# Two members of one group on two peerds of a LocalCluster. There is no numpy.
BARRIER = """
import importlib.util, sys, threading
import longhaul as lh
from longhaul.testing import LocalCluster, find_binary

assert not {"numpy", "torch"} & {name for name in ("numpy", "torch") if importlib.util.find_spec(name)}
with LocalCluster(peers=2) as cluster:
    def member(i):
        with lh.join("wheel", peerd=cluster.socket(i), members=2) as comm:
            sizes.append(comm.barrier().world_size)
    sizes = []
    threads = [threading.Thread(target=member, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(*sizes, lh._native.library()._name, find_binary("longhaul-peerd"))
"""

# `python -m longhaul.coordinator` and a trainer that names it.
COORDINATOR = """
import json, os, subprocess, sys, time
import longhaul as lh

ports = [f"--{port}=127.0.0.1:0" for port in ("listen", "admin", "http")]
command = [sys.executable, "-m", "longhaul.coordinator", *ports, "--store=memory", "--ready-file=ready.json"]
coordinator = subprocess.Popen(command, stderr=subprocess.DEVNULL)
try:
    while not os.path.exists("ready.json"):
        assert coordinator.poll() is None, coordinator.returncode
        time.sleep(0.01)
    print(os.readlink(f"/proc/{coordinator.pid}/exe"))
    with open("ready.json") as ready:
        address = json.load(ready)["grpc"]
    with lh.join("private", coordinator=address) as comm:
        comm.barrier()
        print(comm.world_size)
finally:
    coordinator.terminate()
    print(coordinator.wait())
"""


@pytest.mark.parametrize("version", VERSIONS)
def test_longhaul_with_daemons_works_in_a_clean_environment(
    wheels: pathlib.Path, tmp_path: pathlib.Path, version: str
) -> None:
    if version not in interpreters():
        pytest.skip(f"no Python {version} here; LONGHAUL_PYTHONS may name one")
    environment = Environment(tmp_path, version)
    environment.install("--no-index", "--only-binary=:all:", "--find-links", wheels, "longhaul[daemons]")
    programs = environment.site / "longhaul_daemons" / "bin"
    library = environment.site / "longhaul" / "liblonghaul.so"
    assert environment.prints(BARRIER) == ["2", "2", str(library), str(programs / "longhaul-peerd")]
    assert environment.prints(COORDINATOR) == [str(programs / "longhaul-coordinator"), "1", "0"]
    for program in PROGRAMS:
        assert environment.run(program, "--version").stdout.startswith(program)
    assert environment.run("python", "-m", "longhaul.peerd", "--version").stdout.startswith("longhaul-peerd")


def test_the_program_of_the_readme_trains(installed: Environment) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "client" / "README.md").read_text(), re.DOTALL)
    assert program.count("COORDINATOR_HOST:29600") == 1
    code = (
        "from longhaul.testing import LocalCluster\nwith LocalCluster(peers=0) as cluster:\n"
        f" exec(compile({program!r}.replace('COORDINATOR_HOST:29600', cluster.coordinator), 'readme', 'exec'))"
    )
    assert installed.prints(code) == [word for revision in range(1, 21) for word in (str(revision), "1")]


def test_without_daemons_the_error_says_what_to_install(wheels: pathlib.Path, tmp_path: pathlib.Path) -> None:
    environment = Environment(tmp_path, f"{sys.version_info[0]}.{sys.version_info[1]}")
    environment.install("--no-index", "--find-links", wheels, "longhaul")
    for module, program in (("coordinator", "longhaul-coordinator"), ("peerd", "longhaul-peerd")):
        done = environment.run("python", "-m", f"longhaul.{module}")
        assert done.returncode == 1
        assert re.search(rf"^longhaul: no {program} in .*: pip install longhaul\[daemons\]", done.stderr), done.stderr
    joins = (
        "import longhaul as lh\ntry: lh.join(coordinator='127.0.0.1:1')\nexcept lh.FailedPrecondition as e: print(e)"
    )
    assert "longhaul[daemons]" in environment.prints(joins)


def test_an_editable_install_takes_the_sources_of_the_tree(wheels: pathlib.Path, tmp_path: pathlib.Path) -> None:
    environment = Environment(tmp_path, f"{sys.version_info[0]}.{sys.version_info[1]}")
    # Without --no-build-isolation pip would download the build backend. tools/wheels has it.
    tools = ROOT / "out" / "wheel-tools"
    (backend,) = tools.glob("lib/python*/site-packages")
    (environment.site / "backend.pth").write_text(f"{backend}\n")

    def files() -> list[str]:
        """What git lists, without what other tests compile meanwhile."""
        status = ["git", "status", "--porcelain", "--ignored", "client"]
        listed = subprocess.check_output(status, cwd=ROOT, text=True).splitlines()
        return [line for line in listed if "__pycache__" not in line]

    before = files()
    environment.install("--no-deps", "--no-build-isolation", "--editable", ROOT / "client", path=str(tools / "bin"))
    assert files() == before
    code = "import longhaul as lh\nprint(lh.__file__, lh._native.library()._name)"
    source, library = environment.prints(code, PYTHONDONTWRITEBYTECODE="1")
    assert pathlib.Path(source) == ROOT / "client" / "python" / "longhaul" / "__init__.py"
    assert pathlib.Path(library).is_relative_to(environment.directory)


def test_the_project_of_the_daemons_makes_no_wheel_without_programs(
    wheels: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    cmake = ROOT / "out" / "wheel-tools" / "bin" / "cmake"
    command = [str(cmake), "-S", f"{ROOT}/deploy/wheels/daemons", "-B", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode != 0
    assert "run tools/wheels, which builds this wheel" in " ".join(done.stderr.split())
