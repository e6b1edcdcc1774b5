"""The programs of Longhaul. `bin` of this package holds them; the functions are the commands that pip installs."""

from __future__ import annotations

import os
import pathlib
import sys
from typing import NoReturn

from ._version import __version__ as __version__


def _run(name: str) -> NoReturn:
    # The program takes the place of this process: it gets the signals, and its exit code is the command's.
    program = pathlib.Path(__file__).resolve().parent / "bin" / name
    os.execv(program, [str(program), *sys.argv[1:]])


def coordinator() -> NoReturn:
    _run("longhaul-coordinator")


def peerd() -> NoReturn:
    _run("longhaul-peerd")


def lhctl() -> NoReturn:
    _run("lhctl")
