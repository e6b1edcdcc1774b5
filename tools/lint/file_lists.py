#!/usr/bin/env python3
"""Checks the lists of files in CONTRIBUTING.md: that each file exists, and that the stated number of files is right.

A list begins with `*What it is for* (7` and ends with its paragraph. Files are named by their path, in backquotes;
braces name several, as in `base/fields.{h,cc}`, and a star stands for any one file.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import sources

PAGE = "CONTRIBUTING.md"
_SECTIONS = ("What a feature costs", "How to add a codec", "How to add a fault to the simulation")
_TITLE = re.compile(r"\*[^*]+\* \((\d+)")
_FILE = re.compile(r"`([\w./{},*-]+\.(?:h|hpp|c|cc|inc|py|md|proto|yml|yaml|json|sql|\{[\w,]+\}))`")


def _spelled_out(name: str) -> list[str]:
    match = re.search(r"\{([^{}]*)\}", name)
    if not match:
        return [name]
    return [
        path
        for part in match[1].split(",")
        for path in _spelled_out(name[: match.start()] + part + name[match.end() :])
    ]


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """The paragraphs of the sections with lists, each with the number of its first line."""
    section = ""
    line = 1
    for paragraph in re.split(r"(\n\n+)", text):
        heading = re.search(r"^## (.*)$", paragraph, re.M)
        if heading:
            section = heading[1]
        if section in _SECTIONS:
            yield line, paragraph
        line += paragraph.count("\n")


def check(root: Path) -> tuple[int, list[sources.Finding]]:
    page = root / PAGE
    if not page.exists():
        return 0, []
    files = 0
    findings = []
    for line, paragraph in _paragraphs(page.read_text()):
        named = sorted({path for match in _FILE.finditer(paragraph) for path in _spelled_out(match[1])})
        files += len(named)
        for path in named:
            if not any(root.glob(path)):
                findings.append(sources.Finding(PAGE, line, f"there is no file {path}; name files by their path"))
        title = _TITLE.match(paragraph)
        if title and int(title[1]) != len(named):
            findings.append(sources.Finding(PAGE, line, f"{title[0]}: names {len(named)} files, and says {title[1]}"))
    return files, findings


if __name__ == "__main__":
    sys.exit(sources.main(check, "file_lists", "Name every file of the list, and correct the number."))
