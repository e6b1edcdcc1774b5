"""The steps of tools/check. Runs the chosen steps in order and sums up their results.

  tools/check             all that CI runs
  tools/check quick       for the inner loop: no long tests, no clang-tidy
  tools/check full        the same as CI, with clang-tidy on all files, the sanitizers, fuzzing, tests on epoll, of images and alerts
  tools/check STEP...     only these steps (a step that needs the programs builds them first)
  tools/check fuzz --minutes=10    each fuzz target for ten minutes, under the address and undefined sanitizers

The last line is `N passed, N failed`. The exit code is 1 if anything failed. A failed step shows its
output; out/check/ holds the logs of all steps.
"""

from __future__ import annotations

import argparse
import concurrent.futures
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
PYTHON_SOURCES = ["bazel", "bench", "bench/report", "client", "coordinator", "deploy", "tests", "tools"]
CPP = re.compile(r"^(base|bench|bazel|client|coordinator|peerd|proto|tests|tools)/.*\.(c|cc|h|hpp)$")

# A failed step shows at most this many lines of its output. Its log holds all of them.
SHOWN_LINES = 150


@dataclasses.dataclass
class Result:
    passed: int
    failed: int


def run(name: str, command: list[str], log: pathlib.Path, append: bool = False) -> tuple[int, str]:
    """Runs a command in the root and writes its output to a log. Returns the exit code and the output."""
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
    """A step that runs Bazel's tests and counts test targets."""

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


def pytest(*arguments: str, settings: tuple[str, ...] = ()) -> Callable[[str, pathlib.Path], Result]:
    """A step that runs pytest and counts test functions. settings: environment variables, NAME=value."""

    def step(name: str, log: pathlib.Path) -> Result:
        command = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        code, output = run(name, ["env", *settings, *command], log)
        counts = {
            what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|error|skipped)", output.splitlines()[-1])
        }
        failed = counts.get("failed", 0) + counts.get("error", 0)
        return Result(counts.get("passed", 0), failed or int(code != 0))

    return step


def own_files(pattern: re.Pattern[str]) -> list[str]:
    """The files under version control, and new files that git does not ignore."""
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True).splitlines()
    return sorted(name for name in listed if pattern.match(name) and (ROOT / name).exists())


def changed_files(pattern: re.Pattern[str]) -> list[str]:
    """The own files that differ from the commit at which this branch left the main line.

    On the main line itself: the files that differ from the commit before the last one.
    """
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
    """Checks types strictly. In tests nothing needs annotations; mypy checks the annotations that are there."""
    command = [PYTHON, "-m", "mypy", "--config-file=mypy.ini"]
    loose = ["--allow-untyped-defs", "--allow-incomplete-defs", "--allow-untyped-calls", "--allow-any-generics"]
    tests = [
        path
        for path in (
            "client/python/tests",
            "tests/e2e",
            "tests/chaos",
            "tests/wan",
            "tests/solver",
            "tests/packaging",
            "tests/deploy",
            "tests/observe",
        )
        if any((ROOT / path).glob("*.py"))
    ]
    strict, _ = run(
        name,
        [
            *command,
            "client/python/longhaul",
            "client/examples",
            "deploy",
            "tools",
            "--exclude=_e2e_test",
        ],
        log,
    )
    relaxed, _ = run(name, [*command, *loose, *tests], log, append=True)
    # bench has a run of its own, because one of its modules may have the name of a test module.
    bench, _ = run(name, [*command, "--scripts-are-modules", "bench", "bench/report"], log, append=True)
    failed = sum(code != 0 for code in (strict, relaxed, bench))
    return Result(3 - failed, failed)


def faults(*command: str, logs: bool = False) -> Callable[[str, pathlib.Path], Result]:
    """A step that runs a command with a seed. Without network namespaces the command says so and counts as nothing."""

    def step(name: str, log: pathlib.Path) -> Result:
        seed = os.environ.get("LONGHAUL_SEED", "1")
        place = [f"--logs={LOGS}/{name}"] if logs else []
        code, output = run(name, [*command, f"--seed={seed}", *place], log)
        if code == 77:
            print(output.strip(), end=" ", flush=True)
            return Result(0, 0)
        return Result(int(code == 0), int(code != 0))

    return step


# How long the step `fuzz` runs each target, in minutes: --minutes.
fuzz_minutes = 0.25


def fuzz_one(target: str, programs: pathlib.Path, place: pathlib.Path) -> tuple[bool, str]:
    """Runs a fuzz target. Returns whether it found nothing, and a line that says so, or how to repeat what it found."""
    package, _, short = target.removeprefix("//").partition(":")
    binary = programs / package / short
    labels = subprocess.check_output(
        [*BAZEL, "query", "--noshow_progress", f"labels(data, {target})"],
        cwd=ROOT,
        text=True,
        stderr=subprocess.DEVNULL,
    ).split()
    corpus = {str((ROOT / label.removeprefix("//").replace(":", "/")).parent) for label in labels}
    name = f"{package}/{short}".replace("/", "_")
    grown = place / "corpora" / name
    grown.mkdir(parents=True, exist_ok=True)
    command = [
        str(binary),
        f"-max_total_time={max(1, round(60 * fuzz_minutes))}",
        "-timeout=60",
        "-print_final_stats=1",
        # The default schedule of libFuzzer takes more time than most of these targets do.
        "-entropic=0",
    ]
    command += [f"-artifact_prefix={place}/{name}-", str(grown), *sorted(corpus)]
    log = place / f"{name}.log"
    with open(log, "wb") as sink:
        code = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink).returncode
    output = log.read_text(errors="replace")
    runs = re.findall(r"number_of_executed_units: (\d+)", output)
    covered = re.findall(r"\bcov: (\d+)", output)
    line = f"{target}: {runs[-1] if runs else '?'} inputs, {covered[-1] if covered else '?'} edges"
    if code == 0:
        return True, line
    found = re.findall(r"Test unit written to (\S+)", output)
    if not found:
        return False, f"{line}: FAILED with exit code {code}; the log is {log.relative_to(ROOT)}"
    file = pathlib.Path(found[-1]).relative_to(ROOT)
    return False, (
        f"{line}: FAILED on {file}; the log is {log.relative_to(ROOT)}\n"
        f"    to repeat: bazel run --config=fuzz {target} -- $PWD/{file}"
    )


def fuzz(name: str, log: pathlib.Path) -> Result:
    """Builds all fuzz targets with libFuzzer, and runs as many at a time as there are processors."""
    runtime = subprocess.run(
        ["sh", "-c", "clang --print-file-name=libclang_rt.fuzzer-$(uname -m).a"], capture_output=True, text=True
    ).stdout.strip()
    if not pathlib.Path(runtime).is_absolute() or not pathlib.Path(runtime).exists():
        log.write_text("clang and its runtime are missing: tools/setup --system installs clang and libclang-rt-dev\n")
        return Result(0, 1)
    listed = subprocess.run(
        [*BAZEL, "query", "--noshow_progress", r'attr(tags, "[\[ ]fuzz[,\]]", tests(//...))'],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    targets = listed.stdout.split()
    if listed.returncode != 0 or not targets:
        log.write_text(listed.stderr)
        return Result(0, 1)
    code, _ = run(name, [*BAZEL, "build", "--noshow_progress", "--config=fuzz", *targets], log)
    if code != 0:
        return Result(0, 1)
    info = [*BAZEL, "info", "--config=fuzz", "bazel-bin"]
    programs = pathlib.Path(subprocess.check_output(info, cwd=ROOT, text=True, stderr=subprocess.DEVNULL).strip())
    place = LOGS / "fuzz"
    place.mkdir(parents=True, exist_ok=True)
    print(flush=True)
    passed = 0
    with open(log, "a") as sink, concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for one_run in concurrent.futures.as_completed([pool.submit(fuzz_one, t, programs, place) for t in targets]):
            good, line = one_run.result()
            passed += good
            print(f"  {line}", flush=True)
            print(line, file=sink)
    print(f"{name:12}", end="", flush=True)
    return Result(passed, len(targets) - passed)


def clang_format(name: str, log: pathlib.Path) -> Result:
    code, _ = run(name, ["clang-format", "--dry-run", "--Werror", *own_files(CPP)], log)
    return Result(int(code == 0), int(code != 0))


def clang_tidy(everything: bool) -> Callable[[str, pathlib.Path], Result]:
    """A step that runs clang-tidy and counts files. It leaves tests out, because clang-tidy rejects GoogleTest's macros."""
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


# The tests are built with the same flags as the programs, so that everything is compiled only once.
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
    "e2e": pytest("tests/e2e", "tests/chaos", "tests/wan", "tests/solver"),
    "epoll": pytest("client/python/tests", "tests/e2e", "tests/chaos", settings=("LONGHAUL_PEERD_IO=epoll",)),
    "bench": pytest("bench"),
    "packaging": pytest("-rs", "tests/packaging"),
    "deploy": pytest("-rs", "-m", "not images", "tests/deploy"),
    "images": pytest("-rs", "-m", "images", "tests/deploy"),
    "observe": pytest("-rs", "-m", "not churn", "tests/observe"),
    "churn": pytest("-rs", "-m", "churn", "tests/observe"),
    "chaos": faults("tests/chaos/run", "--minutes=2", logs=True),
    "network": faults("tests/chaos/network", "--faults=12"),
    "tidy": clang_tidy(everything=False),
    "tidy-all": clang_tidy(everything=True),
    "asan": bazel_test("--config=asan"),
    "ubsan": bazel_test("--config=ubsan"),
    "tsan": bazel_test("--config=tsan"),
    "fuzz": fuzz,
}
LINT = ["format", "ruff", "ruff-format", "mypy"]
SETS = {
    "default": [
        "build",
        *LINT,
        "bazel",
        "python",
        "e2e",
        "bench",
        "packaging",
        "deploy",
        "observe",
        "chaos",
        "network",
        "tidy",
    ],
    "quick": ["build", *LINT, "unit", "python"],
    "full": [
        "build",
        *LINT,
        "bazel",
        "python",
        "e2e",
        "epoll",
        "bench",
        "packaging",
        "deploy",
        "images",
        "observe",
        "churn",
        "chaos",
        "network",
        "tidy-all",
        "asan",
        "ubsan",
        "tsan",
        "fuzz",
    ],
    "lint": [*LINT, "tidy"],
}
NEED_PROGRAMS = {"python", "e2e", "epoll", "bench", "packaging", "observe", "churn", "chaos", "network"}


def prune_cache() -> None:
    """Deletes old files from Bazel's disk cache, which never shrinks by itself."""
    cache = pathlib.Path.home() / ".cache" / "longhaul-bazel"
    if cache.is_dir():
        subprocess.run(["find", str(cache), "-type", "f", "-atime", "+14", "-delete"], check=False)


def main() -> int:
    global fuzz_minutes
    parser = argparse.ArgumentParser(
        prog="tools/check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", nargs="*", default=["default"], help=", ".join([*SETS, *STEPS]))
    parser.add_argument("--minutes", type=float, default=fuzz_minutes, help="how long the step fuzz runs each target")
    chosen: list[str] = []
    arguments = parser.parse_args()
    fuzz_minutes = arguments.minutes
    for word in arguments.step:
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
                print("the build failed, so nothing else can be tested", flush=True)
                break
    prune_cache()
    print(f"took {time.monotonic() - begin:.0f} s")
    print(f"{total.passed} passed, {total.failed} failed")
    return int(total.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
