#!/usr/bin/env python3
"""Checks that every file exists that a source or a document names by its path in this tree."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import sources

_SUFFIXES = (*sources.SUFFIXES, ".py", ".md", ".proto", ".bazel", ".toml", ".ini")
_DIRECTORIES = (*sources.DIRECTORIES, "deploy", "docs")
_NAMED = re.compile(rf"(?<![\w/.-])((?:{'|'.join(_DIRECTORIES)})/[\w/.-]*\.(?:h|hpp|c|cc|inc|py|md|proto|json))\b")
# This file names files that its tests make.
_LEFT_OUT = ("tools/lint/lint_test.py",)
# Commands in documents write files here.
_MADE = ("bench/results/",)


def texts(root: Path) -> Iterator[str]:
    for where, subdirectories, names in os.walk(root):
        here = os.path.relpath(where, root)
        subdirectories[:] = sorted(
            name for name in subdirectories if here != "." or name in (*_DIRECTORIES, "third_party", "bazel")
        )
        for name in sorted(names):
            path = os.path.normpath(os.path.join(here, name))
            if name.endswith(_SUFFIXES) and path not in _LEFT_OUT:
                yield path


def check(root: Path) -> tuple[int, list[sources.Finding]]:
    files = 0
    findings = []
    for path in texts(root):
        files += 1
        text = (root / path).read_text(errors="replace")
        for match in _NAMED.finditer(text):
            # A generated header is not in the tree; its .proto has to be.
            name = re.sub(r"(\.grpc)?\.pb\.h$", ".proto", match[1])
            places = (root / name, (root / path).parent / name, root / "client/include" / name)
            if not name.startswith(_MADE) and not any(place.exists() for place in places):
                findings.append(
                    sources.Finding(path, sources.line_of(text, match.start()), f"there is no file {match[1]}")
                )
    return files, findings


if __name__ == "__main__":
    sys.exit(sources.main(check, "names", "Name the file that is meant, or name no file."))
