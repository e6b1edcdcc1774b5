"""Tests that the benchmarks run, on tensors so small that their figures mean nothing."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import limits
import pytest
import systems
import world as network

HERE = pathlib.Path(__file__).resolve().parent
# How long anything may take. A busy machine is not a failure.
PATIENCE_S = 600


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The result file of one run with all systems that are installed."""
    path = tmp_path_factory.mktemp("bench") / "result.json"
    quick = [
        "--peers=2",
        "--sizes=256,1M",
        "--rounds=2",
        "--round-seconds=0.01",
        "--quiet-within-s=0",
        f"--json={path}",
    ]
    done = run(str(HERE / "allreduce.py"), *quick)
    assert done.returncode == 0, done.stdout + done.stderr
    return path


def test_every_installed_system_has_a_row_of_every_size(result: pathlib.Path) -> None:
    rows = json.loads(result.read_text())["rows"]
    installed = [system for system in systems.SYSTEMS if not system.why_not()]
    expected = {
        (size, system.name, variant) for size in (256, 1 << 20) for system in installed for variant in system.variants
    }
    assert {(row["bytes"], row["system"], row["variant"]) for row in rows} == expected
    for row in rows:
        assert 0 < row["p10_s"] <= row["median_s"] <= row["p90_s"]
        assert row["cpu_s_per_op"] > 0
        assert len(row["round_medians_s"]) == 2


def test_variants_that_are_named_are_measured(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "result.json"
    names = ("arena", "out-of-place", "plain", "mesh", "ring", "sixteen")
    sizes = (4, 256, 1 << 20)  # a tensor of one element has no sixteen parts
    what = [
        "--systems=longhaul",
        f"--variants={','.join(names)}",
        "--peers=3",
        "--sizes=4,256,1M",
        "--no-limits",
        "--quiet-within-s=0",
    ]
    done = run(str(HERE / "allreduce.py"), *what, "--rounds=2", "--round-seconds=0.01", f"--json={path}")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(path.read_text())["rows"]
    assert {(row["bytes"], row["variant"]) for row in rows} == {(size, name) for size in sizes for name in names}


def test_longhaul_is_compared_with_rivals_from_c_and_from_python(result: pathlib.Path) -> None:
    rows = json.loads(result.read_text())["rows"]
    rivals = {row["system"].partition("/")[0] for row in rows} - {"longhaul"}
    for row in rows:
        ratios = {name for name in ("gloo", "openmpi") if f"times_{name}" in row}
        assert ratios == (rivals if row["system"] in ("longhaul", "longhaul/python") else set())


def test_what_is_not_installed_is_named(result: pathlib.Path) -> None:
    named = json.loads(result.read_text())["missing"]
    why_not = [system.why_not() for system in systems.SYSTEMS] + [systems.why_no_line()]
    assert named == [why for why in why_not if why]


def test_large_tensors_have_a_limit_and_small_ones_have_none(result: pathlib.Path) -> None:
    for row in json.loads(result.read_text())["rows"]:
        assert ("limit_s" in row) == (row["bytes"] == 1 << 20)


def test_the_machine_is_described(result: pathlib.Path) -> None:
    about = json.loads(result.read_text())["machine"]
    assert about["cpu"] and about["kernel"]
    assert about["processors"] > 0 and about["memory_bytes"] > 0
    assert "longhaul" in about["versions"]


def test_memory_grows_with_the_tensor(result: pathlib.Path) -> None:
    rows = json.loads(result.read_text())["rows"]
    memory = [row["memory_bytes"] for row in rows if row["variant"] == "arena" and row["bytes"] == 1 << 20]
    assert len(memory) == 2  # from C, from Python
    assert min(memory) >= 2 << 20  # two members, each with a tensor


def test_the_report_tells_all_rows_without_matplotlib(result: pathlib.Path) -> None:
    done = run(str(HERE / "report"), str(result), "--no-plots")
    assert done.returncode == 0, done.stderr
    assert "| 2 | 256 B |" in done.stdout
    assert "| 2 | 1 MiB |" in done.stdout
    assert (
        "| peers | tensor | longhaul, arena | longhaul, out-of-place | longhaul, plain | longhaul/python, arena |"
        in done.stdout
    )


@pytest.mark.parametrize("kept", sorted((HERE / "results").glob("loopback*.md")), ids=lambda path: path.name)
def test_a_result_that_is_kept_is_a_summary_of_the_report(result: pathlib.Path, kept: pathlib.Path) -> None:
    def shape(text: str) -> list[str]:
        """The lines of a summary without figures: names of facts, headings, and the beginning of each table."""
        lines = [line for line in text.splitlines() if line and not line.startswith(("| 2", "| 3", "| 4", "| 8"))]
        return [line.split(":")[0] if line.startswith("- ") else line[:18] for line in lines]

    made = shape(run(str(HERE / "report"), str(result), "--no-plots").stdout)
    optional = {"- line", "- not installed", "- left out"}
    assert [line for line in shape(kept.read_text()) if line not in optional] == [
        line for line in made if line not in optional
    ]


def test_the_report_draws(result: pathlib.Path, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    done = run(str(HERE / "report"), str(result), f"--out={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("result-*.png"))) == 3


def test_hosts_may_be_network_namespaces(tmp_path: pathlib.Path) -> None:
    why_not = network.why_not()
    if why_not:
        pytest.skip(why_not)
    path = tmp_path / "result.json"
    quick = [
        "--peers=3",
        "--sizes=4K",
        "--rounds=1",
        "--round-seconds=0.01",
        "--no-limits",
        "--quiet-within-s=0",
        f"--json={path}",
    ]
    done = run(str(HERE / "allreduce.py"), "--where=namespaces", "--variants=arena,in-place", *quick)
    assert done.returncode == 0, done.stdout + done.stderr
    installed = [system.name for system in systems.SYSTEMS if not system.why_not()]
    assert [row["system"] for row in json.loads(path.read_text())["rows"]] == installed


def test_a_system_that_there_is_not_is_refused() -> None:
    done = run(str(HERE / "allreduce.py"), "--systems=longhaul,nccl")
    assert done.returncode == 2
    assert "no system nccl" in done.stderr


def test_a_variant_that_there_is_not_is_refused() -> None:
    done = run(str(HERE / "allreduce.py"), "--systems=longhaul", "--variants=arena,in-place")
    assert done.returncode == 2
    assert "arena mesh out-of-place plain ring sixteen" in done.stderr


def test_rates_of_the_machine_are_measured() -> None:
    rates = limits.measure(1 << 16, seconds=0.01)
    assert min(rates.each()) > 0
    assert rates.tcp >= rates.tcp_apart
