#!/usr/bin/env python3
"""Checks that no C, C++ or Python files depend on each other in a circle, and no directories.

A header and the source of the same name are one module. Imports for types only count, too. A directory depends on the
directories whose headers its sources include. What its tests include does not count.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import sources

_SOURCE = re.compile(r"\.(c|cc|h|hpp)$")
_IMPORT = re.compile(r"^\s*(?:from (\.*)([\w.]*) import ([^\n]*)|import (\w[\w.]*))", re.M)

# Modules of old circles that nobody has broken up yet. Never add one.
KNOWN: set[str] = set()

# Maps each module to the modules that it uses, with the place of the include or import.
Graph = dict[str, dict[str, sources.Finding]]


def _python_files(root: Path) -> Iterator[str]:
    for directory in sources.DIRECTORIES:
        for where, subdirectories, names in os.walk(root / directory):
            subdirectories.sort()
            for name in sorted(names):
                if name.endswith(".py"):
                    yield os.path.relpath(os.path.join(where, name), root)


def _cpp(root: Path, graph: Graph) -> int:
    files = list(sources.sources(root))
    modules = {_SOURCE.sub("", path) for path in files}
    for path in files:
        module = _SOURCE.sub("", path)
        for include in sources.includes((root / path).read_text()):
            used = _SOURCE.sub("", include.name)
            if include.quoted and used in modules and used != module:
                graph.setdefault(module, {})[used] = sources.Finding(path, include.line, "")
    return len(files)


def _python(root: Path, graph: Graph) -> int:
    files = list(_python_files(root))
    by_name: dict[str, list[str]] = {}
    for path in files:
        by_name.setdefault(Path(path).stem, []).append(path)
    for path in files:
        text = (root / path).read_text()
        for found in _IMPORT.finditer(text):
            dots, module, names, plain = found.groups()
            if dots and not module:
                wanted = re.findall(r"\w+", names)  # from . import a, b
            else:
                wanted = [(plain or module).split(".")[0]]
            for name in wanted:
                # The name means a file of the same directory. If there is none, it means a file elsewhere, provided
                # that only one has this name.
                near = os.path.join(os.path.dirname(path), f"{name}.py")
                everywhere = by_name.get(name, [])
                used = near if near in everywhere else everywhere[0] if len(everywhere) == 1 and not dots else path
                if used != path:
                    line = sources.line_of(text, found.start(found.lastindex or 0))
                    graph.setdefault(path, {})[used] = sources.Finding(path, line, "")
    return len(files)


def _directories(graph: Graph) -> Graph:
    """Maps each directory to the directories that its modules use. Leaves tests out."""
    above: Graph = {}
    for module, uses in graph.items():
        for used, where in uses.items():
            start, end = os.path.dirname(module), os.path.dirname(used)
            if start != end and not sources.is_test(where.path):
                above.setdefault(start, {}).setdefault(end, where)
    return above


def _circle_from(graph: Graph, start: str) -> list[str]:
    """The modules of a shortest circle through `start`; empty if there is no circle."""
    came: dict[str, str] = {}
    ahead = [start]
    while ahead:
        now = ahead.pop(0)
        for used in graph.get(now, {}):
            if used == start:
                way = [now]
                while way[-1] != start:
                    way.append(came[way[-1]])
                return way[::-1]
            if used not in came:
                came[used] = now
                ahead.append(used)
    return []


def check(root: Path) -> tuple[int, list[sources.Finding]]:
    graph: Graph = {}
    files = _cpp(root, graph)
    directories = _directories(graph)
    files += _python(root, graph)
    findings = []
    told: set[str] = set()
    known: set[str] = set()
    for uses in (graph, directories):
        for module in sorted(uses):
            circle = _circle_from(uses, module)
            if not circle or told & set(circle):
                continue
            if set(circle) <= KNOWN:
                known |= set(circle)
                continue
            told |= set(circle)
            where = uses[module][circle[1]]
            findings.append(where._replace(text=f"depends on itself: {' -> '.join([*circle, module])}"))
    for module in sorted(KNOWN - known):
        findings.append(
            sources.Finding("tools/lint/cycles.py", 1, f"{module} is in KNOWN and in no circle: remove it from KNOWN")
        )
    return files, findings


if __name__ == "__main__":
    sys.exit(
        sources.main(
            check,
            "cycles",
            "Move what both modules need into a module below them, or pass a value, a function or an interface down.",
        )
    )
