#!/usr/bin/env python3
"""Checks that no class is larger than MOST lines, over all files that have its code.

A class that is cut into several files is as hard to read as before, so all of them count. The size of a class is that
of the header that defines it and of each source in which it has more members than any other class. For code without
classes, and in Python, a file counts.
"""

from __future__ import annotations

import collections
import re
import sys
from pathlib import Path

import definitions
import sources

MOST = 1200

# The start of a definition of a member, such as `absl::Status OpTable::Post(` or `OpTable::OpTable(`.
_MEMBER = re.compile(r"^[\w:<>&*,\s\[\]~]*?\b(\w+)::~?\w+\(", re.M)


def check(root: Path) -> tuple[int, list[sources.Finding]]:
    texts = {path: (root / path).read_text(errors="replace") for path in _files(root)}
    lines = {path: text.count("\n") for path, text in texts.items()}
    # Maps the directory and the name of a class to its header.
    headers = {
        (str(Path(path).parent), name.split("::")[-1]): path
        for path, text in texts.items()
        if path.endswith(".h")
        for _, name in definitions.types(text)
    }
    sizes: dict[str, list[str]] = {path: [path] for path in texts if not path.endswith(".cc")}
    for path, text in texts.items():
        if not path.endswith(".cc"):
            continue
        members = collections.Counter(
            header for name in _MEMBER.findall(text) if (header := headers.get((str(Path(path).parent), name)))
        )
        owner = members.most_common(1)[0][0] if members else path
        sizes.setdefault(owner, []).append(path)
    findings = []
    for owner, files in sizes.items():
        total = sum(lines[path] for path in files)
        if total > MOST:
            findings.append(sources.Finding(owner, 1, f"{total} lines in {', '.join(files)}; at most {MOST}"))
    return len(texts), findings


def _files(root: Path) -> list[str]:
    cpp = [path for path in sources.sources(root) if not sources.is_test(path)]
    python = sorted(str(path.relative_to(root)) for path in (root / "client" / "python" / "longhaul").rglob("*.py"))
    return cpp + python


if __name__ == "__main__":
    sys.exit(sources.main(check, "class_size", "Find the part with a purpose of its own, and make it a class."))
