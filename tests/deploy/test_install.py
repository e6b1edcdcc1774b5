"""Tests that tools/install installs everything into a prefix, and removes everything again."""

from __future__ import annotations

import hashlib
import pathlib
import re
import subprocess
import sys
import venv

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
UNITS = ("longhaul-coordinator.service", "longhaul-peerd.service")


def install(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([ROOT / "tools" / "install", *arguments], capture_output=True, text=True, timeout=600)


def must_install(*arguments: str) -> str:
    done = install(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stderr


def tree(directory: pathlib.Path) -> dict[str, str]:
    """All files below a directory with their digests, and all directories."""
    found = {}
    for path in directory.rglob("*"):
        data = path.readlink().name if path.is_symlink() else "" if path.is_dir() else digest(path)
        found["/" + str(path.relative_to(directory))] = data
    return found


def digest(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("prefix", "units"),
    [
        ("/usr", "/usr/lib/systemd/system"),
        ("/usr/local", "/usr/local/lib/systemd/system"),
        ("/opt/longhaul", "/etc/systemd/system"),
    ],
)
def test_what_is_installed_is_removed_again(tmp_path: pathlib.Path, prefix: str, units: str) -> None:
    # Directories that were there stay, also empty ones.
    (tmp_path / "etc").mkdir()
    before = tree(tmp_path)
    where = (f"--destdir={tmp_path}", f"--prefix={prefix}")
    must_install(*where)
    after = tree(tmp_path)
    for program in ("longhaul-coordinator", "longhaul-peerd", "lhctl"):
        version = subprocess.run([f"{tmp_path}{prefix}/bin/{program}", "--version"], capture_output=True, text=True)
        assert version.stdout.startswith(program), version
    # The libraries that another host needs, and no packages to build with.
    packages = (tmp_path / prefix[1:] / "share/longhaul/packages").read_text().split()
    assert {name for name in packages if name.startswith("libgrpc++")} and "libsqlite3-0" in packages
    assert [name for name in packages if name.endswith("-dev")] == []
    for unit in UNITS:
        text = (tmp_path / units[1:] / unit).read_text()
        assert re.findall(r"^ExecStart=(.*)/longhaul-\w+ --config=/etc/longhaul/\w+\.conf$", text, re.M) == [
            f"{prefix}/bin"
        ]
        assert str(tmp_path) not in text
    manifest = (tmp_path / prefix[1:] / "share/longhaul/installed").read_text().splitlines()
    assert {line.rstrip("/") for line in manifest} == set(after) - set(before)
    must_install(*where, "--remove")
    assert tree(tmp_path) == before


def test_an_upgrade_removes_what_is_gone_and_keeps_the_configuration(tmp_path: pathlib.Path) -> None:
    destdir = f"--destdir={tmp_path}"
    must_install(destdir)
    fresh = tree(tmp_path)
    # The release before had another program, and its default configuration was another one.
    manifest = tmp_path / "usr/local/share/longhaul/installed"
    old = tmp_path / "usr/local/bin/longhaul-old"
    old.write_text("old")
    manifest.write_text(manifest.read_text() + "/usr/local/bin/longhaul-old\n")
    peerd = tmp_path / "etc/longhaul/peerd.conf"
    peerd.write_text("coordinator=10.0.0.5:29600\n")
    must_install(destdir)
    assert not old.exists()
    assert peerd.read_text() == "coordinator=10.0.0.5:29600\n"
    assert set(tree(tmp_path)) == set(fresh)

    removed = must_install(destdir, "--remove")
    assert f"kept, because you have changed them: {peerd}" in removed
    assert [name for name, data in tree(tmp_path).items() if data] == ["/etc/longhaul/peerd.conf"]
    # Installed again, it is still the operator's.
    must_install(destdir)
    assert peerd.read_text() == "coordinator=10.0.0.5:29600\n"


def test_the_wheel_is_installed_for_a_python_and_removed_again(tmp_path: pathlib.Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    destdir = tmp_path / "root"
    must_install(f"--destdir={destdir}")
    (wheel,) = destdir.glob("usr/local/share/longhaul/longhaul-*.whl")
    subprocess.run([python, "-m", "pip", "install", "--no-index", "--no-deps", "--quiet", wheel], check=True)
    # In isolated mode Python does not see the package of the source tree.
    load = "import longhaul.testing; print(longhaul.__version__, longhaul.__file__)"
    found = subprocess.run([python, "-I", "-c", load], capture_output=True, text=True)
    assert str(tmp_path / "venv") in found.stdout, found.stderr


def test_problems_are_named(tmp_path: pathlib.Path) -> None:
    wrong = install("--destdir=relative")
    assert (wrong.returncode, "cannot use '--destdir=relative'; usage:" in wrong.stderr) == (2, True)
    wrong = install("--prefix=/opt/long haul")
    assert (wrong.returncode, "use letters, digits" in wrong.stderr) == (2, True)
    wrong = install(f"--destdir={tmp_path}", f"--python={sys.executable}")
    assert (wrong.returncode, "--destdir for another one" in wrong.stderr) == (2, True)
    wrong = install(f"--destdir={tmp_path}", "--remove")
    assert (wrong.returncode, "nothing to remove: there is no" in wrong.stderr) == (1, True)
    (tmp_path / "usr").write_text("in the way")
    wrong = install(f"--destdir={tmp_path}")
    assert (wrong.returncode, f"cannot make {tmp_path}/usr; run this as root" in wrong.stderr) == (1, True)
