"""The steps of tools/check: runs them in order and sums up.

  tools/check             everything that CI runs
  tools/check quick       a developer's inner loop: no long tests, no clang-tidy
  tools/check full        everything, all files through clang-tidy, and the sanitizers
  tools/check STEP...     these only (a step that needs programs builds them first)

Ends with a line `N passed, N failed`, and exit code 1 if anything failed. A failed step shows its
output; logs of all steps are in out/check/.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parents[1]
LOGS = ROOT / "out" / "check"
PYTHON = sys.executable
BAZEL = shlex.split(os.environ.get("LONGHAUL_BAZEL", "bazel"))
PYTHON_SOURCES = ["bazel", "bench", "bench/report", "client", "coordinator", "tests", "tools"]
CPP = re.compile(r"^(base|bench|bazel|client|coordinator|peerd|proto|tests|tools)/.*\.(c|cc|h|hpp)$")

# A failed step shows at most this much of its output; the log has all.
SHOWN_LINES = 150


@dataclasses.dataclass
class Result:
    passed: int
    failed: int


def run(name: str, command: list[str], log: pathlib.Path, append: bool = False) -> tuple[int, str]:
    """Runs a command from the root into a log; gives its exit code and output."""
    begin = log.stat().st_size if append and log.exists() else 0
    with open(log, "ab" if append else "wb") as sink:
        code = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink).returncode
    return code, log.read_bytes()[begin:].decode(errors="replace")


def one(command: list[str]) -> Callable[[str, pathlib.Path], Result]:
    """A step that passes or fails as a whole."""

    def step(name: str, log: pathlib.Path) -> Result:
        code, _ = run(name, command, log)
        return Result(int(code == 0), int(code != 0))

    return step


def bazel_test(*flags: str) -> Callable[[str, pathlib.Path], Result]:
    """Counts test targets."""

    def step(name: str, log: pathlib.Path) -> Result:
        command = [*BAZEL, "test", "--noshow_progress", "--keep_going", *flags, "//..."]
        code, output = run(name, command, log)
        verdicts = re.findall(
            r"^//\S+ +(?:\(cached\) )?(PASSED|FAILED TO BUILD|FAILED|FLAKY|TIMEOUT|NO STATUS)\b", output, re.M
        )
        passed = sum(verdict in ("PASSED", "FLAKY") for verdict in verdicts)
        failed = len(verdicts) - passed
        return Result(passed, failed or int(code != 0))

    return step


def pytest(*arguments: str) -> Callable[[str, pathlib.Path], Result]:
    """Counts test functions."""

    def step(name: str, log: pathlib.Path) -> Result:
        code, output = run(name, [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments], log)
        counts = {
            what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|error|skipped)", output.splitlines()[-1])
        }
        failed = counts.get("failed", 0) + counts.get("error", 0)
        return Result(counts.get("passed", 0), failed or int(code != 0))

    return step


def own_files(pattern: re.Pattern[str]) -> list[str]:
    """Files under version control, and new ones that are not ignored."""
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True).splitlines()
    return sorted(name for name in listed if pattern.match(name) and (ROOT / name).exists())


def changed_files(pattern: re.Pattern[str]) -> list[str]:
    """Of those, what differs from where this work left the main line; in the main line itself, from its last commit."""
    base = "HEAD~1"
    for upstream in ("@{upstream}", "origin/main"):
        found = subprocess.run(["git", "merge-base", "HEAD", upstream], cwd=ROOT, capture_output=True, text=True)
        head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True)
        if found.returncode == 0 and found.stdout != head:
            base = found.stdout.strip()
            break
    differs = subprocess.run(["git", "diff", "--name-only", base, "--"], cwd=ROOT, capture_output=True, text=True)
    fresh = subprocess.check_output(["git", "ls-files", "-o", "--exclude-standard"], cwd=ROOT, text=True)
    names = set((differs.stdout + fresh).splitlines())
    return [name for name in own_files(pattern) if name in names]


def mypy(name: str, log: pathlib.Path) -> Result:
    """Strict; in tests what is annotated is checked, and nothing has to be."""
    command = [PYTHON, "-m", "mypy", "--config-file=mypy.ini"]
    loose = ["--allow-untyped-defs", "--allow-incomplete-defs", "--allow-untyped-calls", "--allow-any-generics"]
    tests = [
        path
        for path in ("client/python/tests", "tests/e2e", "tests/chaos", "tests/wan")
        if any((ROOT / path).glob("*.py"))
    ]
    strict, _ = run(
        name,
        [*command, "client/python/longhaul", "client/examples", "client/pybuild.py", "tools", "--exclude=_e2e_test"],
        log,
    )
    relaxed, _ = run(name, [*command, *loose, *tests], log, append=True)
    # By itself: a module of bench may be named as one of the tests.
    bench, _ = run(name, [*command, "--scripts-are-modules", "bench", "bench/report"], log, append=True)
    failed = sum(code != 0 for code in (strict, relaxed, bench))
    return Result(3 - failed, failed)


def faults(*command: str, logs: bool = False) -> Callable[[str, pathlib.Path], Result]:
    """One run with a seed; where network namespaces cannot be used it says so and counts as nothing."""

    def step(name: str, log: pathlib.Path) -> Result:
        seed = os.environ.get("LONGHAUL_SEED", "1")
        place = [f"--logs={LOGS}/{name}"] if logs else []
        code, output = run(name, [*command, f"--seed={seed}", *place], log)
        if code == 77:
            print(output.strip(), end=" ", flush=True)
            return Result(0, 0)
        return Result(int(code == 0), int(code != 0))

    return step


def clang_format(name: str, log: pathlib.Path) -> Result:
    code, _ = run(name, ["clang-format", "--dry-run", "--Werror", *own_files(CPP)], log)
    return Result(int(code == 0), int(code != 0))


def clang_tidy(everything: bool) -> Callable[[str, pathlib.Path], Result]:
    """Counts files. Tests are left out: GoogleTest's macros trip it."""
    sources = re.compile(
        r"^(base|client|coordinator|peerd|proto|tools)/(?!.*(_test|_fuzz|_fuzz_test|/testing)\.cc?$).*\.cc?$"
    )

    def step(name: str, log: pathlib.Path) -> Result:
        files = own_files(sources) if everything else changed_files(sources)
        log.write_bytes(b"")
        if not files:
            return Result(1, 0)
        code, _ = run(name, [PYTHON, "bazel/compile_commands.py"], log, append=True)
        if code != 0:
            return Result(0, 1)
        code, output = run(name, [PYTHON, "tools/lint/tidy.py", *files], log, append=True)
        failed = len(re.findall(r"^FAILED ", output, re.M))
        return Result(len(files) - failed, failed or int(code != 0))

    return step


# Tests are built as the programs are, so that both are compiled once.
OPT = ("--compilation_mode=opt", "--config=strict")

STEPS: dict[str, Callable[[str, pathlib.Path], Result]] = {
    "build": one(["tools/build"]),
    "format": clang_format,
    "ruff": one([PYTHON, "-m", "ruff", "check", *PYTHON_SOURCES]),
    "ruff-format": one([PYTHON, "-m", "ruff", "format", "--check", *PYTHON_SOURCES]),
    "mypy": mypy,
    "unit": bazel_test(*OPT, "--test_size_filters=small,medium"),
    "bazel": bazel_test(*OPT),
    "python": pytest("client/python/tests"),
    "e2e": pytest("tests/e2e", "tests/chaos", "tests/wan"),
    "bench": pytest("bench"),
    "chaos": faults("tests/chaos/run", "--minutes=2", logs=True),
    "network": faults("tests/chaos/network", "--faults=12"),
    "tidy": clang_tidy(everything=False),
    "tidy-all": clang_tidy(everything=True),
    "asan": bazel_test("--config=asan"),
    "ubsan": bazel_test("--config=ubsan"),
    "tsan": bazel_test("--config=tsan"),
}
LINT = ["format", "ruff", "ruff-format", "mypy"]
SETS = {
    "default": ["build", *LINT, "bazel", "python", "e2e", "bench", "chaos", "network", "tidy"],
    "quick": ["build", *LINT, "unit", "python"],
    "full": [
        "build",
        *LINT,
        "bazel",
        "python",
        "e2e",
        "bench",
        "chaos",
        "network",
        "tidy-all",
        "asan",
        "ubsan",
        "tsan",
    ],
    "lint": [*LINT, "tidy"],
}
NEED_PROGRAMS = {"python", "e2e", "bench", "chaos", "network"}


def prune_cache() -> None:
    """Bazel's disk cache never shrinks by itself."""
    cache = pathlib.Path.home() / ".cache" / "longhaul-bazel"
    if cache.is_dir():
        subprocess.run(["find", str(cache), "-type", "f", "-atime", "+14", "-delete"], check=False)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tools/check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", nargs="*", default=["default"], help=", ".join([*SETS, *STEPS]))
    chosen: list[str] = []
    for word in parser.parse_args().step:
        if word not in SETS and word not in STEPS:
            parser.error(f"no step {word}; there are: {', '.join([*SETS, *STEPS])}")
        chosen += SETS.get(word, [word])
    if NEED_PROGRAMS & set(chosen) and "build" not in chosen:
        chosen.insert(0, "build")

    LOGS.mkdir(parents=True, exist_ok=True)
    total = Result(0, 0)
    begin = time.monotonic()
    for name in dict.fromkeys(chosen):
        print(f"{name:12}", end="", flush=True)
        started = time.monotonic()
        log = LOGS / f"{name}.log"
        result = STEPS[name](name, log)
        total.passed += result.passed
        total.failed += result.failed
        seconds = time.monotonic() - started
        print(f"{result.passed:5} passed {result.failed:3} failed {seconds:7.1f} s", flush=True)
        if result.failed:
            lines = log.read_text(errors="replace").splitlines()
            if len(lines) > SHOWN_LINES:
                print(f"... the beginning is in {log.relative_to(ROOT)}")
            print("\n".join(lines[-SHOWN_LINES:]), flush=True)
            if name == "build":
                print("without programs there is nothing to test", flush=True)
                break
    prune_cache()
    print(f"took {time.monotonic() - begin:.0f} s")
    print(f"{total.passed} passed, {total.failed} failed")
    return int(total.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
