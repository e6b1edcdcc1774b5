"""Tests of the figures that are computed from times and rates."""

from __future__ import annotations

import argparse

import figures
import pytest
from figures import Rates, Samples

from longhaul.bench import algorithm_bandwidth, bus_bandwidth, bytes_of, quantile, text_of, wire_bytes


def test_bandwidths_are_those_of_nccl_tests() -> None:
    # Each of two members sends the tensor once, and each of four members one and a half times.
    assert wire_bytes(2, 1000) == 1000
    assert wire_bytes(4, 1000) == 1500
    assert algorithm_bandwidth(1000, 0.5) == 2000
    assert bus_bandwidth(4, 1000, 0.5) == 3000


def test_a_quantile_is_a_measured_value() -> None:
    assert quantile([5, 1, 4, 2, 3], 0.5) == 3
    assert quantile([5, 1, 4, 2, 3], 0.1) == 1
    assert quantile([5, 1, 4, 2, 3], 0.9) == 5
    assert quantile([float(i) for i in range(1, 101)], 0.9) == 90
    assert quantile([7], 0.9) == 7


@pytest.mark.parametrize(("text", "nbytes"), [("256", 256), ("4K", 4096), ("64m", 64 << 20), ("1G", 1 << 30)])
def test_sizes_are_read(text: str, nbytes: int) -> None:
    assert bytes_of(text) == nbytes


@pytest.mark.parametrize("text", ["", "K", "many", "0", "-4", "6"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        bytes_of(text)


def test_sizes_are_written() -> None:
    assert [text_of(n) for n in (256, 4096, 4100, 64 << 20)] == ["256 B", "4 KiB", "4100 B", "64 MiB"]


RATES = Rates(bytes=1 << 20, copy=10e9, add=5e9, tcp=2e9, tcp_apart=1e9, tcp_spliced=1e9)


def test_the_limit_is_what_all_ranks_send_and_add_on_one_machine() -> None:
    # Each of two ranks sends 1 GB and adds half a GB.
    assert figures.limit_seconds(2, 10**9, RATES) == pytest.approx(2 / 2 + 1 / 5)
    # Each of four ranks sends 1.5 GB and adds three quarters of a GB.
    assert figures.limit_seconds(4, 10**9, RATES) == pytest.approx(6 / 2 + 3 / 5)


def test_the_floor_copies_each_byte_once() -> None:
    assert figures.floor_seconds(2, 10**9, RATES) == pytest.approx(2 / 10 + 1 / 5)


def test_ranks_are_processes_of_their_own() -> None:
    assert figures.apart_seconds(2, 10**9, RATES) == pytest.approx(2 / 1 + 1 / 5)


def test_the_better_of_two_measurements_counts() -> None:
    a = Rates(bytes=1, copy=3, add=1, tcp=2, tcp_apart=1, tcp_spliced=4)
    b = Rates(bytes=1, copy=1, add=3, tcp=1, tcp_apart=2, tcp_spliced=3)
    best = Rates(bytes=1, copy=3, add=3, tcp=2, tcp_apart=2, tcp_spliced=4)
    assert figures.better(a, b) == figures.better(b, a) == best


def samples() -> Samples:
    """Two rounds of two ranks; the second rank is the slower one."""
    made = Samples(iterations=3, warm=1)
    made.add_round([[1, 1, 1], [2, 3, 4]], cpu_s=8)
    made.add_round([[1, 1, 1], [5, 6, 7]], cpu_s=8)
    return made


def test_a_time_is_that_of_the_slowest_process() -> None:
    assert samples().median() == 4.5
    assert samples().quantile(0.9) == 7
    assert samples().round_medians() == [3, 6]


def test_cpu_time_is_of_all_ops_also_those_that_are_not_timed() -> None:
    row = figures.row_of(2, 10**9, "longhaul", "arena", samples())
    assert row["cpu_s_per_op"] == 2  # 16 seconds, 8 ops
    assert row["cpu_s_per_wire_gb"] == 1  # each op brings 2 GB over the wire
    assert row["timed_ops"] == 6
    assert "limit_s" not in row


def test_ours_are_compared_with_the_better_gloo_and_with_open_mpi() -> None:
    rows = [
        {"system": "longhaul", "median_s": 1.0, "cpu_s_per_wire_gb": 0.5},
        {"system": "gloo", "median_s": 3.0, "cpu_s_per_wire_gb": 1.0},
        {"system": "gloo/torch", "median_s": 2.0, "cpu_s_per_wire_gb": 2.0},
        {"system": "openmpi", "median_s": 4.0, "cpu_s_per_wire_gb": 1.0},
    ]
    figures.compare(rows)
    assert (rows[0]["times_gloo"], rows[0]["times_openmpi"], rows[0]["cpu_of_gloo"]) == (2, 4, 0.5)
    assert "times_gloo" not in rows[1]


def test_ours_called_from_python_are_compared_alike() -> None:
    rows = [
        {"system": "longhaul", "median_s": 1.0, "cpu_s_per_wire_gb": 0.5},
        {"system": "longhaul/python", "median_s": 2.0, "cpu_s_per_wire_gb": 1.0},
        {"system": "gloo", "median_s": 3.0, "cpu_s_per_wire_gb": 1.0},
        {"system": "openmpi", "median_s": 4.0, "cpu_s_per_wire_gb": 1.0},
    ]
    figures.compare(rows)
    assert (rows[1]["times_gloo"], rows[1]["times_openmpi"], rows[1]["cpu_of_gloo"]) == (1.5, 2, 1)


def test_without_a_rival_there_is_no_ratio() -> None:
    rows = [{"system": "longhaul", "median_s": 1.0, "cpu_s_per_wire_gb": 0.5}]
    figures.compare(rows)
    assert "times_gloo" not in rows[0]


def test_half_an_all_reduce_takes_half_its_wire_and_a_reduce_scatter_all_its_additions() -> None:
    rates = figures.Rates(1 << 20, copy=10e9, add=5e9, tcp=2e9, tcp_apart=2e9, tcp_spliced=2e9)
    for world in (2, 3, 8):
        whole = figures.limit_seconds(world, 1 << 20, rates)
        scatter = figures.one_phase_seconds(world, 1 << 20, rates, reduces=True)
        gather = figures.one_phase_seconds(world, 1 << 20, rates, reduces=False)
        assert scatter + gather == pytest.approx(whole)
        assert gather == pytest.approx((world - 1) * (1 << 20) / 2e9)
