#!/usr/bin/env python3
"""Runs clang-tidy on the given files of compile_commands.json, one per CPU at a time.

A file that passed is not checked again until its text, its own headers, the settings or its compile command change.
$XDG_CACHE_HOME/longhaul-tidy (else ~/.cache/longhaul-tidy) keeps notes of what passed.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import sources

ROOT = sources.workspace()
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "longhaul-tidy"


def closure(path: str, seen: set[str]) -> None:
    """Adds to `seen` the file and all own headers that it includes, directly or indirectly."""
    if path in seen or not (ROOT / path).is_file():
        return
    seen.add(path)
    for include in sources.includes((ROOT / path).read_text()):
        closure(include.name, seen)
        closure(os.path.normpath(os.path.join(os.path.dirname(path), include.name)), seen)


def fingerprint(path: str, command: object) -> str:
    seen: set[str] = set()
    closure(path, seen)
    digest = hashlib.sha256(json.dumps(command).encode() + (ROOT / ".clang-tidy").read_bytes())
    for name in sorted(seen):
        digest.update(name.encode() + b"\0" + (ROOT / name).read_bytes())
    return digest.hexdigest()


def main() -> int:
    commands = {entry["file"]: entry for entry in json.loads((ROOT / "compile_commands.json").read_text())}
    CACHE.mkdir(parents=True, exist_ok=True)

    def check(path: str) -> bool:
        entry = commands.get(str(ROOT / path))
        if entry is None:
            print(f"skipped {path}: no target compiles it")
            return True
        note = CACHE / fingerprint(path, entry["arguments"])
        if note.exists():
            return True
        done = subprocess.run(
            ["clang-tidy", "--quiet", "-p", str(ROOT), str(ROOT / path)], capture_output=True, text=True, cwd=ROOT
        )
        if done.returncode == 0:
            note.touch()
            return True
        print(f"FAILED {path}\n{done.stdout}{done.stderr}", flush=True)
        return False

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return int(not all(list(pool.map(check, sys.argv[1:]))))


if __name__ == "__main__":
    sys.exit(main())
