"""Tests that programs and library are built so that a mistake in them is harder to exploit (docs/hardening.md)."""

from __future__ import annotations

import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAMS = ["out/bin/longhaul-coordinator", "out/bin/longhaul-peerd", "out/bin/lhctl"]
LIBRARY = "out/lib/liblonghaul.so.0"


def readelf(option: str, path: str) -> str:
    return subprocess.run(
        ["readelf", "--wide", option, str(ROOT / path)], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize("path", [*PROGRAMS, LIBRARY])
def test_addresses_are_random_and_tables_are_read_only(path: str) -> None:
    header, dynamic, segments = readelf("--file-header", path), readelf("--dynamic", path), readelf("--segments", path)
    assert re.search(r"Type:\s+DYN", header)
    if path != LIBRARY:
        assert re.search(r"FLAGS_1.*\bPIE\b", dynamic)
    # All symbols are bound at the start, and then the table of their addresses is made read-only.
    assert "GNU_RELRO" in segments
    assert re.search(r"\(FLAGS_1\).*\bNOW\b", dynamic)
    assert "TEXTREL" not in dynamic


@pytest.mark.parametrize("path", [*PROGRAMS, LIBRARY])
def test_no_memory_is_both_written_and_executed(path: str) -> None:
    segments = readelf("--segments", path)
    flags = re.findall(r"^\s+(LOAD|GNU_STACK)\s+(?:0x\w+\s+){5}([RWE ]{3})", segments, re.M)
    assert {kind for kind, _ in flags} == {"LOAD", "GNU_STACK"}
    for kind, allowed in flags:
        assert not ("W" in allowed and "E" in allowed), (kind, allowed)


@pytest.mark.parametrize("path", [*PROGRAMS, LIBRARY])
def test_stacks_and_buffers_are_checked(path: str) -> None:
    symbols = readelf("--dyn-syms", path)
    assert "__stack_chk_fail" in symbols
    # _FORTIFY_SOURCE: calls of libc that know how large their buffer is.
    assert re.search(r"__(recv|read|poll|memcpy|snprintf|sprintf|fdelt|strncpy|longjmp)_chk", symbols)


@pytest.mark.parametrize("path", PROGRAMS)
def test_no_library_is_looked_for_beside_the_program(path: str) -> None:
    assert not re.search(r"\((RPATH|RUNPATH)\)", readelf("--dynamic", path))


def test_all_code_is_compiled_with_the_flags() -> None:
    flags = (ROOT / ".bazelrc").read_text()
    assert "build:strict --config=hardened" in flags
    cmake = (ROOT / "client/CMakeLists.txt").read_text()
    for flag in re.findall(r"--copt=(\S+)", "\n".join(re.findall(r"^build:hardened.*", flags, re.M))):
        assert flag in cmake, flag
