"""Tests of the programs in C and C++ that time ops: how they carry out orders, and how they end."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import systems
from workers import Failure

NATIVE = pathlib.Path(__file__).resolve().parent / "native"
PATIENCE_S = 60

# A system that knows the sums of ranks 0 to 2. At its end it prints which calls it got.
FAKE = """
#include "worker.h"

typedef struct Fake { int calls; int tensors; int settled; } Fake;

static void right(void* system, const float* source, float* target, size_t count) {
  ++((Fake*)system)->calls;
  for (size_t i = 0; i < count; ++i) target[i] = 6 * source[i];
}
static void last_is_wrong(void* system, const float* source, float* target, size_t count) {
  right(system, source, target, count);
  target[count - 1] += 1;
}
static void leaves_the_target(void* system, const float* source, float* target, size_t count) {
  (void)target;
  right(system, source, (float*)source, count);
}
static float* allocate(void* system, size_t count) {
  ++((Fake*)system)->tensors;
  return (float*)malloc(count * sizeof(float));
}
static void give_back(void* system, float* tensor) {
  --((Fake*)system)->tensors;
  free(tensor);
}

static void settle(void* system) { ((Fake*)system)->settled = ((Fake*)system)->calls; }

static const Variant kVariants[] = {
    {"right", right, 0, NULL, NULL, NULL},
    {"last-is-wrong", last_is_wrong, 0, NULL, NULL, NULL},
    {"apart", right, 1, allocate, give_back, settle},
    {"leaves-the-target", leaves_the_target, 1, NULL, NULL, NULL},
};

int main(int argc, char** argv) {
  Fake fake = {0, 0, 0};
  (void)argc;
  worker_run(argv[1], 0, 3, kVariants, 4, &fake);
  printf("%d calls, %d tensors, settled after %d\\n", fake.calls, fake.tensors, fake.settled);
  return 0;
}
"""


@pytest.fixture(scope="module", params=[("c", "cc", "-std=gnu99"), ("cc", "c++", "-std=c++17")], ids=["c", "c++"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    suffix, *compiler = request.param
    directory = tmp_path_factory.mktemp("fake")
    source = directory / f"fake.{suffix}"
    source.write_text(FAKE)
    strict = ["-Wall", "-Wextra", "-Werror", "-O2"]
    subprocess.run([*compiler, *strict, f"-I{NATIVE}", "-o", str(directory / "fake"), str(source)], check=True)
    return directory / "fake"


class Ended(Exception):
    """The program hung up and gave no answer."""


class Fake:
    """A process of the program above, which has sent its rank."""

    def __init__(self, process: subprocess.Popen[str], connection: socket.socket) -> None:
        self.process = process
        self._connection = connection
        self._answers = connection.makefile("r")
        assert self._answers.readline() == "0\n"

    def order(self, text: str) -> Any:
        self._connection.sendall(f"{text}\n".encode())
        answer = self._answers.readline()
        if not answer:
            raise Ended
        return json.loads(answer)

    def end(self) -> tuple[int, str, str]:
        """Hangs up. Returns the program's exit code, standard output and errors."""
        self._answers.close()
        self._connection.close()
        output, errors = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, output, errors


@pytest.fixture
def fake(program: pathlib.Path, tmp_path: pathlib.Path) -> Iterator[Fake]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(PATIENCE_S)
        listener.bind(str(tmp_path / "control"))
        listener.listen()
        with subprocess.Popen(
            [program, tmp_path / "control"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            connection = listener.accept()[0]
            connection.settimeout(PATIENCE_S)
            try:
                yield Fake(process, connection)
            finally:
                process.kill()
                connection.close()


def test_a_system_settles_behind_the_last_op_of_an_order(fake: Fake) -> None:
    fake.order("prepare apart 5")
    fake.order("round apart 2 3")
    assert fake.end()[:2] == (0, "6 calls, 0 tensors, settled after 6\n")


def test_a_sum_is_right_or_wrong_in_every_element(fake: Fake) -> None:
    assert fake.order("prepare right 5") is True
    assert fake.order("prepare last-is-wrong 5") is False


def test_out_of_place_the_target_is_what_is_looked_at(fake: Fake) -> None:
    assert fake.order("prepare apart 5") is True
    assert fake.order("prepare leaves-the-target 5") is False


def test_a_round_times_the_ops_behind_those_that_warm_up(fake: Fake) -> None:
    fake.order("prepare right 5")
    seconds = fake.order("round right 2 3")
    assert len(seconds) == 3
    assert all(0 <= one < PATIENCE_S for one in seconds)
    assert fake.end()[:2] == (0, "6 calls, 0 tensors, settled after 0\n")  # one call was made by "prepare"


def test_variants_have_tensors_at_the_same_time(fake: Fake) -> None:
    fake.order("prepare right 5")
    fake.order("prepare apart 7")
    assert fake.order("release right") is True
    assert len(fake.order("round apart 0 2")) == 2


def test_all_memory_goes_back_the_way_it_came(fake: Fake) -> None:
    fake.order("prepare apart 5")
    fake.order("prepare apart 7")
    code, output, errors = fake.end()
    assert (code, output, errors) == (0, "2 calls, 0 tensors, settled after 2\n", "")


@pytest.mark.parametrize(
    ("order", "text"),
    [
        ("prepare nothing-such 5", "no such variant: nothing-such"),
        ("prepare right 0", "no such order: prepare right 0"),
        ("round right 1 3", "no such order: round right 1 3"),  # nothing is prepared
        ("rest right", "no such order: rest right"),
    ],
)
def test_an_order_that_cannot_be_carried_out_ends_it(fake: Fake, order: str, text: str) -> None:
    with pytest.raises(Ended):
        fake.order(order)
    code, _, errors = fake.end()
    assert code == 1
    assert text in errors


# ---------------------------------------------------------------------------- Longhaul


@contextlib.contextmanager
def team(place: systems.Place, name: str) -> Iterator[systems.Team]:
    made = systems.Team(next(system for system in systems.SYSTEMS if system.name == name), place)
    try:
        yield made
    finally:
        made.kill()


@pytest.fixture
def place() -> Iterator[systems.Place]:
    with systems.loopback(1, None, []) as made:
        yield made


def test_both_worlds_of_longhaul_are_up_at_the_same_peerds(place: systems.Place) -> None:
    with team(place, "longhaul") as compiled, team(place, "longhaul/python") as python:
        for one in (compiled, python):
            # The daemons' time in a turn counts for the system.
            assert set(one.daemons) == {*place.daemons, place.coordinator}
            assert one.order("prepare arena 64") == [True]
        for one in (compiled, python):
            assert [len(seconds) for seconds in one.order("round arena 1 2")] == [2]
            assert one.order("release arena") == [True]
        compiled.close()
        python.close()
        assert [process.returncode for process in compiled.processes + python.processes] == [0, 0]


def test_an_op_that_fails_ends_the_process_and_says_why(
    place: systems.Place, capfd: pytest.CaptureFixture[str]
) -> None:
    with team(place, "longhaul") as compiled:
        compiled.order("prepare arena 64")
        os.kill(place.daemons[0], signal.SIGKILL)
        with pytest.raises(Failure, match="rank 0 of longhaul, world of 1 ended with 1"):
            compiled.order("round arena 0 1")
    assert "longhaul: lh_all_reduce: LH_UNAVAILABLE: " in capfd.readouterr().err


def test_without_a_peerd_it_says_so(place: systems.Place, capfd: pytest.CaptureFixture[str]) -> None:
    place.sockets[0] = "/nonexistent/peerd.sock"
    with pytest.raises(Failure, match="longhaul, world of 1: a process ended with 1"), team(place, "longhaul"):
        pass
    errors = capfd.readouterr().err
    assert "longhaul: lh_open: LH_UNAVAILABLE: " in errors
    assert "/nonexistent/peerd.sock" in errors


# ---------------------------------------------------------------------------- which library


def library_of(directory: pathlib.Path) -> pathlib.Path:
    (directory / "lib").mkdir(parents=True)
    path = directory / "lib" / "liblonghaul.so"
    path.touch()
    return path


def environment(monkeypatch: pytest.MonkeyPatch, **named: pathlib.Path) -> None:
    for name in ("LONGHAUL_LIBRARY", "LONGHAUL_BIN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in named.items():
        monkeypatch.setenv(name, str(value))


def test_the_library_that_is_named_is_taken(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named, beside = library_of(tmp_path / "named"), library_of(tmp_path / "beside")
    environment(monkeypatch, LONGHAUL_LIBRARY=named, LONGHAUL_BIN=beside.parents[1] / "bin")
    assert systems.library() == named


def test_otherwise_the_one_beside_the_programs_is(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = library_of(tmp_path)
    environment(monkeypatch, LONGHAUL_BIN=tmp_path / "bin")
    assert systems.library() == beside


def test_otherwise_that_of_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    environment(monkeypatch)
    monkeypatch.setattr(systems, "ROOT", pathlib.Path("/nonexistent"))
    with pytest.raises(Failure, match="no /nonexistent/out/lib/liblonghaul.so: run tools/build"):
        systems.library()


def test_the_program_runs_with_the_library_that_is_named(
    place: systems.Place, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy.so"
    copy.write_bytes(systems.library().read_bytes())
    environment(monkeypatch, LONGHAUL_LIBRARY=copy)
    with team(place, "longhaul") as compiled:
        maps = pathlib.Path(f"/proc/{compiled.pids[0]}/maps").read_text()
    assert str(copy) in maps
