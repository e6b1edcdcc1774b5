"""Writes docs/python_api.md, the reference of the Python package, from the docstrings.

tools/python_api.py          writes the page
tools/python_api.py --check  exits with 1 if the page is not what the docstrings say
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import pathlib
import re
import sys
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from longhaul import _errors

PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "python_api.md"
MODULES = ("longhaul", "longhaul.torch", "longhaul.codec", "longhaul.testing")
HEAD = """# Python reference
Read this page if you call the package `longhaul` and want to know exactly what a call does. Afterwards you know its
arguments, results and errors. `tools/python_api.py` makes the page from the docstrings: change those.
"""
WIDTH = 120
# "name: text" or "name, other: text" begins the description of an argument, a result or an error.
ENTRY = re.compile(r"^([A-Za-z_]\w*(?:, [A-Za-z_]\w*)*): (?=\S)")


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes docs/python_api.md from the docstrings.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is not up to date")
    check = parser.parse_args().check
    text = page()
    if not check:
        PAGE.write_text(text)
        return 0
    if PAGE.exists() and PAGE.read_text() == text:
        return 0
    print("docs/python_api.md is not what the docstrings say: run tools/python_api.py", file=sys.stderr)
    return 1


def page() -> str:
    parts = [HEAD]
    for name in MODULES:
        parts += [f"## {name}\n", *of_module(importlib.import_module(name))]
    return "\n".join(parts)


def of_module(module: ModuleType) -> Iterator[str]:
    if module.__doc__:
        yield markdown(module.__doc__)
    own = [name for name, thing in vars(module).items() if getattr(thing, "__module__", "") == module.__name__]
    public = getattr(module, "__all__", own)
    names = [name for name in public if not inspect.ismodule(getattr(module, name)) and name[0] != "_"]
    for name in sorted(names, key=str.lower):
        thing = getattr(module, name)
        if inspect.isclass(thing):
            yield from of_class(name, thing)
        elif callable(thing):
            yield from of_callable("###", name, thing)


def of_class(name: str, kind: type) -> Iterator[str]:
    bases = [base.__name__ for base in kind.__bases__ if base not in (object, tuple)]
    yield f"### {name}\n"
    made_by_us = issubclass(kind, Exception) or "Made by" in (kind.__doc__ or "")
    signature = "" if made_by_us else signature_of(kind, name)
    if signature:
        yield f"```python\n{signature}\n```\n"
    if bases:
        yield f"A subclass of {', '.join(f'`{base}`' for base in bases)}.\n"
    # A dataclass or named tuple without a docstring gets a text made of its fields, which the signature has already.
    if kind.__doc__ and not kind.__doc__.startswith(f"{name}("):
        yield markdown(kind.__doc__)
    fields = list(fields_of(kind))
    if fields:
        yield "\n".join(fields) + "\n"
    for member, value in vars(kind).items():
        if member[0] == "_":
            continue
        value = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if isinstance(value, property) and value.__doc__:
            yield f"#### {name}.{member}\n"
            yield markdown(value.__doc__)
        elif inspect.isfunction(value) and value.__doc__:
            yield from of_callable("####", f"{name}.{member}", value)


def fields_of(kind: type) -> Iterator[str]:
    """The fields that have a comment `#: text` before or behind them, as bullets."""
    try:
        lines = inspect.getsource(kind).splitlines()
    except OSError:
        return
    comment: list[str] = []
    for line in lines[1:]:
        text = line.strip()
        if text.startswith("#: "):
            comment.append(text[3:])
        elif text.startswith("# ") and comment:
            comment.append(text[2:])
        else:
            field = re.match(r"^(?:self\.)?([a-z]\w*): .*?(?:#: (.*))?$", text)
            said = " ".join([*comment, *([field[2]] if field and field[2] else [])])
            if field and said:
                yield fill(f"- `{field[1]}`: {said}", "  ")
            comment = []


def of_callable(mark: str, name: str, thing: Any) -> Iterator[str]:
    yield f"{mark} {name}\n"
    yield f"```python\n{signature_of(thing, name.rpartition('.')[2])}\n```\n"
    if thing.__doc__:
        yield markdown(thing.__doc__)


class Verbatim:
    """An annotation that prints as it stands in the source."""

    def __init__(self, annotation: object) -> None:
        annotation = getattr(annotation, "__forward_arg__", annotation)  # as NamedTuple wraps them
        self.text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)

    def __repr__(self) -> str:
        return self.text


def signature_of(thing: Any, name: str) -> str:
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return ""
    shown = [each for key, each in signature.parameters.items() if key not in ("self", "cls") and key[0] != "_"]
    kinds = [each.kind for each in shown]
    arguments = [str(each.replace(annotation=Verbatim(each.annotation))) for each in shown]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        arguments.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    result = signature.return_annotation
    arrow = "" if result is inspect.Signature.empty or inspect.isclass(thing) else f" -> {result}"
    line = f"{name}({', '.join(arguments)}){arrow}".replace(str(2**64 - 1), "2**64 - 1")
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {argument}," for argument in arguments), f"){arrow}"])


def markdown(doc: str) -> str:
    """A docstring as Markdown: examples become code, and descriptions of arguments become lists."""
    out: list[str] = []
    entries: list[str] = []  # of the list that is being made

    def end_list() -> None:
        if entries:
            out.append("\n".join(fill(entry, "  ") for entry in entries))
            entries.clear()

    for block in re.split(r"\n\s*\n", inspect.cleandoc(doc)):
        lines = block.splitlines()
        if all(line.startswith("    ") for line in lines):
            end_list()
            code = textwrap.dedent(block) + "\n```"
            if out and out[-1].endswith("\n```"):
                out[-1] = out[-1].removesuffix("```") + "\n" + code  # an empty line within one example
            else:
                out.append("```python\n" + code)
            continue
        words: list[str] = []
        for line in lines:
            found = ENTRY.match(line)
            begins = not words or words[-1].endswith((".", ":", "Raises"))
            if found and begins and (found[1][0].islower() or hasattr(_errors, found[1])):
                if words:
                    end_list()
                    out.append(fill(" ".join(words)))
                    words = []
                entries.append(f"- `{found[1].replace(', ', '`, `')}`: {line[found.end() :]}")
            elif entries and not words and (line.startswith("    ") or not entries[-1].endswith((".", ":"))):
                entries[-1] += " " + line.strip()
            else:
                end_list()
                words.append(line.strip())
        end_list()
        if words:
            out.append(fill(" ".join(words)))
    end_list()
    return "\n\n".join(out) + "\n"


def fill(text: str, indent: str = "") -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    sys.exit(main())
