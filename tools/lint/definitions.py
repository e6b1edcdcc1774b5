#!/usr/bin/env python3
"""Checks that no two files define a type of the same name: one name has one meaning in the whole project.

In one namespace, the C++ standard forbids such a pair ([basic.def.odr]), but compiler and linker do not notice. The
linker keeps one of the two destructors for both types. In two namespaces, a pair misleads the reader. Tests may use a
name of another namespace again. Types in unnamed namespaces belong to their file alone.
"""

import re
import sys
from pathlib import Path

import sources

_LINE = re.compile(
    r"^(?:inline )?namespace ?(?P<begin>[\w:]*) ?\{$"
    r"|^(?P<end>\}) *(?:// namespace.*)?$"
    r"|^(?:class|struct|union|enum|enum class)\s+(?P<type>\w+)(?: final)?\s*(?::(?!:)[^;\n]*)?(?:\{.*)?$",
    re.M,
)


# Names that mean the same in both cores, or on both sides of a border.
SAME_MEANING = {"CoreConfig", "TimePassed"}


def types(text: str) -> list[tuple[int, str]]:
    """The line and the full name of each type that other files could define, too."""
    result = []
    around: list[str] = []
    for match in _LINE.finditer(text):
        if match["begin"] is not None:
            around.append(match["begin"])
        elif match["end"]:
            # A function also ends so. The end of a namespace says what it ends.
            if around and "// namespace" in match[0]:
                around.pop()
        elif "" not in around:
            result.append((sources.line_of(text, match.start()), "::".join([*around, match["type"]])))
    return result


def check(root: Path) -> tuple[int, list[sources.Finding]]:
    files = 0
    findings = []
    first: dict[str, str] = {}
    # Maps the last part of a name to the first production file that defines it, and to its full name.
    meaning: dict[str, tuple[str, str]] = {}
    for path in sources.sources(root):
        if path.endswith(".c"):
            continue
        files += 1
        for line, name in types((root / path).read_text(errors="replace")):
            if first.setdefault(name, path) != path:
                findings.append(sources.Finding(path, line, f"{first[name]} also defines {name}"))
                continue
            short = name.split("::")[-1]
            if sources.is_test(path) or short in SAME_MEANING:
                continue
            other, full = meaning.setdefault(short, (path, name))
            if full != name:
                findings.append(sources.Finding(path, line, f"{name}: {other} defines {full}"))
    return files, findings


if __name__ == "__main__":
    sys.exit(sources.main(check, "definitions", "Rename one of the two."))
