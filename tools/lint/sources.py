"""Shared by the checks of this directory: finds sources and reads their includes."""

import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

# The directories with our own C and C++. The checks do not look into others (out, .venv, bazel-*).
DIRECTORIES = ("base", "bench", "client", "coordinator", "peerd", "proto", "tests", "tools")
SUFFIXES = (".c", ".cc", ".h", ".hpp", ".inc")

# Tests, and code that only tests use. The build means the same by it.
_TEST = re.compile(r"(^tests/|^bench/|_test\.cc$|(^|/)testing\.(h|cc)$|_c99\.c$)")

_INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)', re.M)
_NOT_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)


class Include(NamedTuple):
    line: int
    name: str
    quoted: bool  # "..." rather than <...>


class Finding(NamedTuple):
    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def workspace() -> Path:
    """The root of the source tree. A Bazel test sees this file through a link, so follow links."""
    return Path(os.path.realpath(__file__)).parents[2]


def sources(root: Path) -> Iterator[str]:
    """The paths of all C and C++ files, relative to `root`, sorted by directory."""
    for directory in DIRECTORIES:
        for where, subdirectories, names in os.walk(root / directory):
            subdirectories.sort()
            for name in sorted(names):
                if name.endswith(SUFFIXES):
                    yield os.path.relpath(os.path.join(where, name), root)


def protos(root: Path) -> Iterator[str]:
    for where, _, names in os.walk(root / "proto"):
        for name in sorted(names):
            if name.endswith(".proto"):
                yield os.path.relpath(os.path.join(where, name), root)


def spelled_out(pattern: str) -> list[str]:
    """All alternatives of a pattern, also those inside of (groups)."""
    depth = 0
    parts = [""]
    for char in pattern:
        depth += (char == "(") - (char == ")")
        if char == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    if len(parts) > 1:
        return [text for part in parts for text in spelled_out(part)]
    group = re.search(r"\(([^()]*)\)", pattern)
    if not group:
        return [pattern]
    before, after = pattern[: group.start()], pattern[group.end() :]
    return [text for inner in group[1].split("|") for text in spelled_out(before + inner + after)]


def is_test(path: str) -> bool:
    return bool(_TEST.search(path))


def line_of(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def includes(text: str) -> list[Include]:
    return [
        Include(
            line_of(text, match.start(match.lastindex or 0)),
            match[1] or match[2],
            match[1] is not None,
        )
        for match in _INCLUDE.finditer(text)
    ]


def code_only(text: str) -> str:
    """The text with blanks in place of comments and literals. Line numbers stay the same."""
    return _NOT_CODE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def main(check: Callable[[Path], tuple[int, list[Finding]]], title: str, advice: str) -> int:
    files, findings = check(workspace())
    for finding in findings:
        print(finding)
    if findings:
        print(f"{title}: {len(findings)} findings. {advice}")
        return 1
    if not files:
        print(f"{title}: there are no sources below {workspace()}")
        return 1
    print(f"{title}: {files} files checked, no findings")
    return 0


if __name__ == "__main__":
    sys.exit("run cycles.py, definitions.py, file_lists.py, layering.py, names.py or purity.py")
