#!/usr/bin/env python3
"""Checks that no C, C++ or Python files depend on each other in a circle, and no directories.

A header and the source of the same name are one module. Imports for types only count, too, and those inside of
functions. A directory depends on the directories whose headers its sources include. What its tests include does not
count.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import sources

_SOURCE = re.compile(r"\.(c|cc|h|hpp)$")

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


class _Modules:
    """The Python files, by what an import calls them."""

    def __init__(self, files: list[str]) -> None:
        self._files = set(files)
        self._by_name: dict[str, list[str]] = {}
        for path in files:
            self._by_name.setdefault(self._name(path), []).append(path)

    def _name(self, path: str) -> str:
        """The full name of a module: with the packages that it is in."""
        parts = [] if os.path.basename(path) == "__init__.py" else [Path(path).stem]
        above = os.path.dirname(path)
        while f"{above}/__init__.py" in self._files:
            parts.append(os.path.basename(above))
            above = os.path.dirname(above)
        return ".".join(reversed(parts))

    def _below(self, directory: str, name: str) -> str | None:
        """The file of a dotted name, as seen from a directory."""
        base = os.path.normpath(os.path.join(directory, *name.split("."))) if name else directory
        return next((path for path in (f"{base}.py", f"{base}/__init__.py") if path in self._files), None)

    def _one(self, path: str, dots: int, name: str) -> str | None:
        """The file that `path` means by a name with so many dots before it."""
        directory = os.path.dirname(path)
        if dots:
            return self._below(os.path.join(directory, *[".."] * (dots - 1)), name)
        # A file of the same directory. If there is none, a file elsewhere, provided that only one has this name.
        near = None if self._below(directory, "__init__") else self._below(directory, name)
        everywhere = self._by_name.get(name, [])
        return near or (everywhere[0] if len(everywhere) == 1 else None)

    def used_by(self, path: str, text: str) -> Iterator[tuple[str, int]]:
        """The files that a file imports, with the lines, wherever in the file it does so.

        A package runs its __init__.py before each of its modules, and this does not count: no file chooses it.
        """
        for node in ast.walk(ast.parse(text)):
            wanted: list[str | None] = []
            if isinstance(node, ast.Import):
                wanted = [self._one(path, 0, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                module = node.module or ""
                for alias in node.names:
                    # What is imported is a module, or something of one.
                    inner = self._one(path, node.level, f"{module}.{alias.name}".lstrip("."))
                    wanted.append(inner or self._one(path, node.level, module))
            for used in wanted:
                if used is not None and used != path:
                    yield used, node.lineno  # type: ignore[attr-defined]


def _python(root: Path, graph: Graph) -> int:
    files = list(_python_files(root))
    modules = _Modules(files)
    for path in files:
        for used, line in modules.used_by(path, (root / path).read_text()):
            graph.setdefault(path, {}).setdefault(used, sources.Finding(path, line, ""))
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
