"""Remembers which pytest files have passed with which inputs, so that tools/check does not run them again.

A file of tests has a key: the SHA-256 of what its outcome can depend on. These are the programs and libraries of out/,
the file itself, the Python package with its examples, what the tests share, the settings of pytest, the pinned
packages, this machine's kernel and user, and the variables LONGHAUL_* of the environment. Other documents and files of
the tree count for a test that names them ("docs", "README" and so on).

A key that passed is a file in ~/.cache/longhaul-check, with the number of tests in it. Thread-safe.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import platform
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
STORE = pathlib.Path.home() / ".cache" / "longhaul-check"

# What no test of a process reads: it is in the programs already, or is about the past.
_LEFT_OUT = re.compile(
    r"^(base|bazel|coordinator|peerd|proto|third_party)/|\.(cc|h)$|^tests/(sim|support|solver/main)|^tools/(lint|lhctl)/"
    r"|^docs/(adr|images)/|^bench/results/|^CHANGELOG\.md$|^\.ci/|^tools/(check|passed_tests|check_steps)"
)
# Documents, and what only tests of deployments and packages look at.
_DOCUMENTS = re.compile(r"\.md$|^(docs|deploy|tools)/")
_READS_DOCUMENTS = re.compile(r"\b(docs|deploy|README|tools)\b")
_TEST = re.compile(r"(^|/)test_[^/]*\.py$")


@functools.cache
def _files() -> dict[str, str]:
    """Maps each file of the tree that may matter to a digest of its bytes."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    found = {}
    for name in sorted(set(listed)):
        path = ROOT / name
        # The headers and sources of client/ are built by some tests.
        if path.is_file() and (name.startswith("client/") or not _LEFT_OUT.search(name)):
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


@functools.cache
def _surroundings() -> str:
    """What counts for every test: the programs, the package, what tests share, and the machine."""
    digest = hashlib.sha256()
    settings = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith("LONGHAUL_"))
    about = [sys.version, platform.release(), platform.machine(), str(os.geteuid()), *settings]
    digest.update("\n".join(about).encode())
    for path in sorted((ROOT / "out" / "bin").glob("*")) + sorted((ROOT / "out" / "lib").glob("*")):
        digest.update(f"\n{path.name} ".encode() + hashlib.sha256(path.read_bytes()).digest())
    for name, content in _files().items():
        if not _TEST.search(name) and not _DOCUMENTS.search(name):
            digest.update(f"\n{name} {content}".encode())
    digest.update((ROOT / "tools" / "requirements.txt").read_bytes())
    return digest.hexdigest()


def key(test: pathlib.Path, options: tuple[str, ...]) -> str:
    """The key of a file of tests. options: what pytest is told beside the file, a choice of markers for instance."""
    source = test.read_text()
    digest = hashlib.sha256(f"{_surroundings()}\n{test.relative_to(ROOT)}\n{options}\n{source}".encode())
    if _READS_DOCUMENTS.search(source):
        for name, content in _files().items():
            if _DOCUMENTS.search(name):
                digest.update(f"\n{name} {content}".encode())
    return digest.hexdigest()


def count_passed(one: str) -> int | None:
    """How many tests passed with this key; None: it is not known to have passed."""
    try:
        return int((STORE / one).read_text())
    except (FileNotFoundError, ValueError):
        return None


def remember(one: str, count: int) -> None:
    STORE.mkdir(parents=True, exist_ok=True)
    (STORE / one).write_text(str(count))


def forget_old() -> None:
    """Deletes the keys that were stored more than two weeks ago."""
    if STORE.is_dir():
        subprocess.run(["find", str(STORE), "-type", "f", "-mtime", "+14", "-delete"], check=False)
