"""The steps of tools/check. Runs the chosen steps and sums up their results.

  tools/check             all that CI runs
  tools/check quick       for the inner loop: no long tests, no clang-tidy
  tools/check full        everything: also the tests that overlap with others, planted bugs, benchmarks' tests, clang-tidy
                          on all files, the sanitizers, fuzzing, tests on epoll, of images and alerts
  tools/check STEP...     only these steps (a step that needs the programs builds them first)
  tools/check --again     also runs what has passed with the same inputs before
  tools/check fuzz --minutes=10    each fuzz target for ten minutes, under the address and undefined sanitizers

Steps that use the processors run in one lane, and steps that mostly wait in another lane beside it. Steps that measure
time come last, one at a time. The last line is `N passed, N failed`. The exit code is 1 if anything failed. A failed
step shows its output. out/check/ holds the logs of all steps, and times.txt there says what the steps and the slowest
tests took.
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
import threading
import time
import xml.etree.ElementTree
from collections.abc import Callable

import passed_tests

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
    # How many of those that passed were not run, because they have passed with the same inputs.
    remembered: int = 0
    # Maps tests to the seconds that they took.
    times: dict[str, float] = dataclasses.field(default_factory=dict)


Step = Callable[[str, pathlib.Path], Result]

# --again: nothing that has passed before is taken as passed.
again = False


def run(name: str, command: list[str], log: pathlib.Path, append: bool = False) -> tuple[int, str]:
    """Runs a command in the root and writes its output to a log. Returns the exit code and the output."""
    begin = log.stat().st_size if append and log.exists() else 0
    with open(log, "ab" if append else "wb") as sink:
        code = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink).returncode
    return code, log.read_bytes()[begin:].decode(errors="replace")


def one(command: list[str]) -> Step:
    """A step that passes or fails as a whole."""

    def step(name: str, log: pathlib.Path) -> Result:
        code, _ = run(name, command, log)
        return Result(int(code == 0), int(code != 0))

    return step


# A test that hangs is ended after this time, in seconds for each size of test. The machine may be slow, and busy.
TEST_TIMEOUTS = "300,900,1800,3600"


def bazel_test(*flags: str, without: tuple[str, ...] = (), planted: bool = False, programs: bool = False) -> Step:
    """A step that runs Bazel's tests and counts test targets.

    Only what tests need is built: `//...` would also compile each library a second time, for shared objects that nobody
    uses. programs: every program of the tree is built, too.

    without: tags of tests that are left out. planted: tests of planted bugs are left out, too, while nothing differs
    from the main line that such a bug could hide in.
    """

    def step(name: str, log: pathlib.Path) -> Result:
        tags = list(without)
        if planted and not again and not changed_files(PLANTED):
            tags.append("planted")
        log.write_bytes(b"")
        if programs:
            query = [*BAZEL, "query", "--noshow_progress", 'kind("cc_binary rule", //...)']
            code, output = run(name, query, log, append=True)
            targets = re.findall(r"^//\S+$", output, re.M)
            build_flags = [flag for flag in flags if not flag.startswith("--test_")]
            if code == 0:
                code, _ = run(name, [*BAZEL, "build", "--noshow_progress", *build_flags, *targets], log, append=True)
            if code != 0:
                return Result(0, 1)
        command = [*BAZEL, "test", "--noshow_progress", "--keep_going", "--build_tests_only"]
        command += [f"--test_timeout={TEST_TIMEOUTS}", *flags]
        if tags:
            command.append("--test_tag_filters=" + ",".join(f"-{tag}" for tag in tags))
        if again:
            command.append("--nocache_test_results")
        code, output = run(name, [*command, "//..."], log, append=True)
        result = Result(0, 0)
        for target, cached, verdict, seconds in re.findall(
            r"^(//\S+) +(\(cached\) )?(PASSED|FAILED TO BUILD|FAILED|FLAKY|TIMEOUT|NO STATUS)\b(?:.*? in ([\d.]+)s)?",
            output,
            re.M,
        ):
            good = verdict in ("PASSED", "FLAKY")
            result.passed += good
            result.failed += not good
            result.remembered += bool(cached)
            if seconds and not cached:
                result.times[target] = float(seconds)
        if code != 0:
            result.failed = max(1, result.failed)
        return result

    return step


def pytest(*places: str, markers: str = "", workers: int = 0, settings: tuple[str, ...] = ()) -> Step:
    """A step that runs the tests of some directories with pytest, and counts test functions.

    It leaves out files that have passed with the same inputs. markers: an expression of pytest's markers. workers: how
    many processes share the files. settings: environment variables, NAME=value.
    """

    def step(name: str, log: pathlib.Path) -> Result:
        options = (markers, *settings)
        files = sorted(file for place in places for file in (ROOT / place).glob("test_*.py"))
        keys = {str(file.relative_to(ROOT)): passed_tests.key(file, options) for file in files}
        known = {file: None if again else passed_tests.count_passed(key) for file, key in keys.items()}
        result = Result(0, 0)
        result.passed = result.remembered = sum(count or 0 for count in known.values())
        wanted = [file for file, count in known.items() if count is None]
        if not wanted:
            log.write_text("all tests have passed with the same inputs; tools/check --again runs them all the same\n")
            return result
        report = log.with_suffix(".xml")
        report.unlink(missing_ok=True)
        command = [PYTHON, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"]
        command += ["-o", "junit_family=xunit1", f"--junitxml={report}"]
        if workers:
            command += [f"--numprocesses={workers}", "--dist=loadfile"]
        if markers:
            command += ["-m", markers]
        code, _ = run(name, ["env", *settings, *command, *wanted], log)
        counts = dict.fromkeys(wanted, 0)
        bad = set()
        for case in xml.etree.ElementTree.parse(report).iter("testcase") if report.exists() else ():
            file = case.get("file", "")
            outcomes = {child.tag for child in case}
            if outcomes & {"failure", "error"}:
                result.failed += 1
                bad.add(file)
            elif "skipped" not in outcomes:
                counts[file] = counts.get(file, 0) + 1
            result.times[f"{file}::{case.get('name')}"] = float(case.get("time", 0))
        result.passed += sum(counts.values())
        # Exit code 5: no test of these files is chosen by the markers.
        if code not in (0, 5) and not result.failed:
            result.failed = 1
            return result
        for file in wanted:
            if file not in bad and code in (0, 1, 5):
                passed_tests.remember(keys[file], counts[file])
        return result

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
            "client/python/longhaul_torch",
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


def faults(*command: str, logs: bool = False) -> Step:
    """A step that runs a command with a seed. Without network namespaces the command says so and counts as nothing."""

    def step(name: str, log: pathlib.Path) -> Result:
        seed = os.environ.get("LONGHAUL_SEED", "1")
        place = [f"--logs={LOGS}/{name}"] if logs else []
        code, output = run(name, [*command, f"--seed={seed}", *place], log)
        if code == 77:
            print(output.strip(), flush=True)
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
        log.write_text("clang and its runtime are missing: tools/setup full --system installs them\n")
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
    passed = 0
    with open(log, "a") as sink, concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for one_run in concurrent.futures.as_completed([pool.submit(fuzz_one, t, programs, place) for t in targets]):
            good, line = one_run.result()
            passed += good
            print(f"  {line}", flush=True)
            print(line, file=sink)
    return Result(passed, len(targets) - passed)


def clang_format(name: str, log: pathlib.Path) -> Result:
    code, _ = run(name, ["clang-format", "--dry-run", "--Werror", *own_files(CPP)], log)
    return Result(int(code == 0), int(code != 0))


def clang_tidy(everything: bool) -> Step:
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

# Where a bug could hide that the tests of planted bugs are there for.
PLANTED = re.compile(
    r"^(tests/sim|coordinator/core|peerd/(collective|core|engine|state|transport)|proto)/.*\.(cc|h|inc)$"
)

# Tests of processes wait most of the time.
WORKERS = 2 * (os.cpu_count() or 1)
BESIDE_OTHERS = "not alone and not full and not images and not churn"
MEASURE = "alone and not full and not images and not churn"
PROCESSES = ("tests/e2e", "tests/chaos", "tests/wan", "tests/solver")


@dataclasses.dataclass(frozen=True)
class Entry:
    step: Step
    # "processor", "waiting": the lane. "alone": nothing else runs meanwhile.
    lane: str
    # What the step should take at most from a bare clone on two processors, in seconds. More is shown, and is no failure.
    budget: int


STEPS: dict[str, Entry] = {
    "build": Entry(one(["tools/build"]), "alone", 300),
    "format": Entry(clang_format, "processor", 20),
    "ruff": Entry(one([PYTHON, "-m", "ruff", "check", *PYTHON_SOURCES]), "processor", 5),
    "ruff-format": Entry(one([PYTHON, "-m", "ruff", "format", "--check", *PYTHON_SOURCES]), "processor", 5),
    "mypy": Entry(mypy, "processor", 90),
    "unit": Entry(bazel_test(*OPT, "--test_size_filters=small,medium", without=("full", "planted")), "processor", 600),
    "bazel": Entry(bazel_test(*OPT, without=("full",), planted=True, programs=True), "processor", 600),
    "bazel-full": Entry(bazel_test(*OPT, programs=True), "processor", 1500),
    "tidy": Entry(clang_tidy(everything=False), "processor", 120),
    "tidy-all": Entry(clang_tidy(everything=True), "processor", 3600),
    "python": Entry(pytest("client/python/tests", markers=BESIDE_OTHERS, workers=WORKERS), "waiting", 300),
    "e2e": Entry(pytest(*PROCESSES, markers=BESIDE_OTHERS, workers=WORKERS), "waiting", 300),
    "packaging": Entry(pytest("tests/packaging", markers=BESIDE_OTHERS, workers=WORKERS), "waiting", 120),
    "deploy": Entry(pytest("tests/deploy", markers=BESIDE_OTHERS, workers=WORKERS), "waiting", 60),
    "bench": Entry(pytest("bench"), "alone", 300),
    "alone": Entry(pytest("client/python/tests", *PROCESSES, "tests/observe", markers=MEASURE), "alone", 300),
    "overlap": Entry(pytest("client/python/tests", *PROCESSES, "tests/packaging", markers="full"), "alone", 1200),
    "epoll": Entry(
        pytest("client/python/tests", "tests/e2e", "tests/chaos", settings=("LONGHAUL_PEERD_IO=epoll",)), "alone", 1800
    ),
    "images": Entry(pytest("tests/deploy", markers="images"), "alone", 1800),
    "churn": Entry(pytest("tests/observe", markers="churn"), "alone", 400),
    "chaos": Entry(faults("tests/chaos/run", "--minutes=1", logs=True), "alone", 90),
    "network": Entry(faults("tests/chaos/network", "--faults=12"), "alone", 150),
    "asan": Entry(bazel_test("--config=asan"), "alone", 3600),
    "ubsan": Entry(bazel_test("--config=ubsan"), "alone", 3600),
    "tsan": Entry(bazel_test("--config=tsan"), "alone", 3600),
    "fuzz": Entry(fuzz, "alone", 3600),
}
LINT = ["format", "ruff", "ruff-format", "mypy"]
SETS = {
    "default": [
        *["build", *LINT, "bazel", "tidy"],
        *["python", "e2e", "packaging", "deploy"],
        *["alone", "chaos", "network"],
    ],
    "quick": ["build", *LINT, "unit", "python"],
    "full": [
        *["build", *LINT, "bazel-full", "tidy-all"],
        *["python", "e2e", "packaging", "deploy"],
        *["alone", "chaos", "network", "overlap", "epoll", "bench", "images", "churn", "asan", "ubsan", "tsan", "fuzz"],
    ],
    "lint": [*LINT, "tidy"],
}
NEED_PROGRAMS = {
    *["python", "e2e", "packaging", "bench", "alone", "overlap", "epoll", "churn", "chaos", "network"],
}
SLOWEST_SHOWN = 10
SLOWEST_KEPT = 30


class Summary:
    """Runs steps, prints a line for each, and keeps what they took. Thread-safe."""

    def __init__(self) -> None:
        self._printing = threading.Lock()
        self.total = Result(0, 0)
        self._steps: list[tuple[str, float]] = []

    def run(self, name: str) -> bool:
        """Runs a step and says how it ended. Returns whether it passed."""
        entry = STEPS[name]
        log = LOGS / f"{name}.log"
        started = time.monotonic()
        try:
            result = entry.step(name, log)
        except Exception as problem:  # a defect of the step; the others still run
            log.write_text(f"the step ended with {type(problem).__name__}: {problem}\n")
            result = Result(0, 1)
        seconds = time.monotonic() - started
        with self._printing:
            self._steps.append((name, seconds))
            self.total.passed += result.passed
            self.total.failed += result.failed
            self.total.remembered += result.remembered
            self.total.times.update(result.times)
            line = f"{name:12}{result.passed:5} passed {result.failed:3} failed {seconds:7.1f} s"
            if result.remembered:
                line += f", {result.remembered} passed earlier with the same inputs"
            if seconds > entry.budget:
                line += f", over its budget of {entry.budget} s"
            print(line, flush=True)
            if result.failed:
                lines = log.read_text(errors="replace").splitlines()
                if len(lines) > SHOWN_LINES:
                    print(f"... the beginning is in {log.relative_to(ROOT)}")
                print("\n".join(lines[-SHOWN_LINES:]), flush=True)
            self._write_times()
        return not result.failed

    def slowest(self, most: int) -> list[str]:
        """Lines that name the slowest tests, with their seconds."""
        ranked = sorted(self.total.times.items(), key=lambda one: -one[1])
        return [f"{seconds:8.1f} s  {test}" for test, seconds in ranked[:most]]

    def _write_times(self) -> None:
        lines = ["step                 seconds    budget"]
        for name, seconds in self._steps:
            budget = STEPS[name].budget
            lines.append(f"{name:18}{seconds:10.1f}{budget:10}{'  over' if seconds > budget else ''}")
        (LOGS / "times.txt").write_text("\n".join([*lines, "", "slowest tests", *self.slowest(SLOWEST_KEPT), ""]))


def prune_caches() -> None:
    """Deletes old files from Bazel's disk cache, which never shrinks by itself, and what passed long ago."""
    cache = pathlib.Path.home() / ".cache" / "longhaul-bazel"
    if cache.is_dir():
        subprocess.run(["find", str(cache), "-type", "f", "-atime", "+14", "-delete"], check=False)
    passed_tests.forget_old()


def main() -> int:
    global again, fuzz_minutes
    parser = argparse.ArgumentParser(
        prog="tools/check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", nargs="*", default=["default"], help=", ".join([*SETS, *STEPS]))
    parser.add_argument("--again", action="store_true", help="also run what has passed with the same inputs")
    parser.add_argument("--minutes", type=float, default=fuzz_minutes, help="how long the step fuzz runs each target")
    chosen: list[str] = []
    arguments = parser.parse_args()
    again = arguments.again
    fuzz_minutes = arguments.minutes
    for word in arguments.step:
        if word not in SETS and word not in STEPS:
            parser.error(f"no step {word}; there are: {', '.join([*SETS, *STEPS])}")
        chosen += SETS.get(word, [word])
    if NEED_PROGRAMS & set(chosen) and "build" not in chosen:
        chosen.insert(0, "build")
    chosen = list(dict.fromkeys(chosen))

    LOGS.mkdir(parents=True, exist_ok=True)
    summary = Summary()
    begin = time.monotonic()
    if "build" in chosen and not summary.run("build"):
        print("the build failed, so nothing else can be tested", flush=True)
    else:
        lanes = [[name for name in chosen if STEPS[name].lane == lane] for lane in ("processor", "waiting")]
        with concurrent.futures.ThreadPoolExecutor(len(lanes)) as pool:
            for lane in lanes:
                pool.submit(lambda names: [summary.run(name) for name in names], lane)
        for name in chosen:
            if STEPS[name].lane == "alone" and name != "build":
                summary.run(name)
    prune_caches()
    print(f"the slowest tests (more are in {(LOGS / 'times.txt').relative_to(ROOT)}):")
    print("\n".join(summary.slowest(SLOWEST_SHOWN)))
    print(f"took {time.monotonic() - begin:.0f} s")
    print(f"{summary.total.passed} passed, {summary.total.failed} failed")
    return int(summary.total.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
