"""Quantized ops: what arrives, how many bytes travel, what `error=` gets, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Members, wait_for_open_ops, wait_until
from fake_copier import FakeCopier
from test_faults_of_members import admit

import longhaul as lh
from longhaul import codec
from longhaul.testing import LocalCluster

QUANTS = {
    "bf16": lh.Quant("bf16"),
    "int8": lh.Quant("int8"),
    "int4": lh.Quant("int4"),
    "int8, blocks of 32": lh.Quant("int8", 32),
    "int4, blocks of 4096": lh.Quant("int4", 4096),
    "bf16, stochastic": lh.Quant("bf16", rounding="stochastic"),
    "int4, stochastic": lh.Quant("int4", rounding="stochastic"),
}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# The last block is short, and for int4 its number of elements is odd.
COUNT = 100_003


@pytest.fixture
def four(cluster: LocalCluster) -> Iterator[Members]:
    """Four members at three peers; ranks 0 and 2 are at one peer."""
    members = Members([cluster.socket(i) for i in (0, 1, 0, 2)])
    yield members
    members.close()


def rows(members: int, count: int = COUNT) -> np.ndarray:
    """An input for each member: blocks of different sizes."""
    rng = np.random.default_rng(members * count)
    sizes = 10.0 ** rng.integers(-3, 3, -(-count // 128))
    return (rng.standard_normal((members, count)) * np.repeat(sizes, 128)[:count]).astype(np.float32)


def by_rank(results: list[Any]) -> list[Any]:
    """Of pairs of a rank and something, the things in the order of ranks."""
    return [each[1] for each in sorted(results, key=lambda each: each[0])]


def greatest(values: np.ndarray, block: int) -> np.ndarray:
    """For each element, the greatest magnitude in its block."""
    padded = np.pad(np.abs(values), (0, -len(values) % block))
    return np.repeat(padded.reshape(-1, block).max(1), block)[: len(values)]


def bound(data: np.ndarray, quant: lh.Quant, dtype: torch.dtype = torch.float32) -> np.ndarray:
    """How far an average may be from the true one. data: the inputs."""
    steps = {"bf16": 256, "int8": 254, "int4": 14}[quant.codec]
    block = 1 if quant.codec == "bf16" else quant.block or 128
    # No partial sum is larger than this. There are as many roundings of inputs and sums as members.
    largest = np.sum([greatest(each, block) for each in data], axis=0)
    # Those of inputs or partial sums, and that of the average.
    error = largest / steps * (1.01 if quant.rounding == "nearest" else 2.02) * (1 + 1 / len(data)) * 1.1
    half = {torch.float32: 0, torch.float16: 2**-11, torch.bfloat16: 2**-8}[dtype]
    near: np.ndarray = error + largest / len(data) * half + 1e-7
    return near


def check_same(results: list[torch.Tensor]) -> None:
    for each in results[1:]:
        assert each.dtype == results[0].dtype
        assert each.numel() == 0 or torch.equal(each.view(torch.uint8), results[0].view(torch.uint8))


# ------------------------------------------------------------------ results


@pytest.fixture(scope="module")
def bits_by_lanes() -> dict[str, bytes]:
    """The bits of the first test for each op. Those of the others must be equal."""
    return {}


@pytest.mark.parametrize("lanes", [1, 4, 16])
def test_the_bits_do_not_depend_on_the_lanes(lanes: int, bits_by_lanes: dict[str, bytes]) -> None:
    data = rows(2)
    with LocalCluster(peers=2, peerd_flags=[f"--lanes={lanes}"]) as cluster:
        members = Members([cluster.socket(0), cluster.socket(1)])
        for name, quant in QUANTS.items():
            if quant.rounding == "stochastic":
                continue  # random numbers depend on ids, which differ from run to run
            for algorithm in ("mesh", "ring"):

                def call(comm: lh.Comm, quant: lh.Quant = quant, algorithm: str = algorithm) -> bytes:
                    tensor = comm.empty(COUNT)
                    tensor[:] = data[comm.rank]
                    comm.all_reduce(tensor, "avg", quantize=quant, algorithm=algorithm, timeout=60)
                    return tensor.tobytes()

                mine, other = members.all(call)
                assert mine == other
                assert bits_by_lanes.setdefault(f"{name} {algorithm}", mine) == mine
        members.close()


@pytest.mark.parametrize("name", QUANTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_members_get_the_same_bits(cluster: LocalCluster, three: Members, dtype: torch.dtype, name: str) -> None:
    quant = QUANTS[name]
    data = torch.from_numpy(rows(3)).to(dtype)
    true = data.double()

    def place(comm: lh.Comm, values: torch.Tensor, arena: bool) -> torch.Tensor:
        socket = cluster.socket(three.comms.index(comm))
        tensor = lh.torch.empty(*values.shape, dtype=dtype, peerd=socket) if arena else torch.empty_like(values)
        return tensor.copy_(values)

    for algorithm in ("auto", "mesh", "ring"):
        for arena in (True, False):

            def call(comm: lh.Comm, algorithm: str = algorithm, arena: bool = arena) -> list[torch.Tensor]:
                options: dict[str, Any] = dict(quantize=quant, algorithm=algorithm, timeout=60)
                mine = data[comm.rank]
                apart, out = place(comm, mine, arena), place(comm, torch.zeros_like(mine), arena)
                within = place(comm, mine, arena)
                info = comm.all_reduce(apart, "avg", out=out, **options)
                assert info.algorithm == ("ring" if algorithm == "ring" else "mesh")
                assert torch.equal(apart, mine)
                comm.all_reduce(within, "avg", **options)
                got = [out, within]

                some = place(comm, mine, arena)
                whole = place(comm, torch.zeros(3 * COUNT, dtype=dtype), arena)
                comm.all_gather(some, out=whole, **options)
                assert torch.equal(some, mine)
                part = place(comm, torch.zeros(COUNT, dtype=dtype), arena)
                comm.reduce_scatter(whole, out=part, **options)
                # The part of rank r is the sum of equal inputs. Look at it in the sum of everybody.
                got += [whole, part]

                shown = place(comm, mine, arena)
                seen = place(comm, mine, arena)
                comm.broadcast(shown, 1, out=seen, **options)
                assert torch.equal(shown, mine)
                comm.broadcast(shown, 1, **options)
                return [*got, seen, shown]

            results = by_rank(three.all(lambda comm: (comm.rank, call(comm))))
            for i in (0, 1, 2, 4, 5):
                check_same([each[i] for each in results])
            out, within, whole, _, shown, again = results[0]
            wide = data.float().numpy()
            near = bound(wide, quant, dtype)
            for each in (out, within):
                assert (np.abs(each.double().numpy() - true.mean(0).numpy()) <= near).all()
            if quant.rounding == "nearest":
                assert torch.equal(shown, again)
                sent = [codec.decode(codec.encode(each, quant), COUNT, quant).to(dtype) for each in data]
                assert torch.equal(whole, torch.cat(sent))
                assert torch.equal(shown, sent[1])
            for r in range(3):
                part = whole[r * COUNT : (r + 1) * COUNT]
                near = 3 * bound(np.stack([part.float().numpy()] * 3), quant, dtype)
                assert (np.abs(results[r][3].double().numpy() - 3 * part.double().numpy()) <= near).all()


@pytest.mark.parametrize("name", ["bf16", "int8", "int4", "int8, blocks of 32", "int4, blocks of 4096"])
def test_two_members_get_what_the_page_says_bit_by_bit(pair: Members, name: str) -> None:
    quant = QUANTS[name]
    data = rows(2)

    def through(values: np.ndarray) -> np.ndarray:
        return np.asarray(codec.decode(codec.encode(values, quant), len(values), quant))

    def call(comm: lh.Comm, algorithm: str) -> np.ndarray:
        out = np.zeros(COUNT, np.float32)
        comm.all_reduce(data[comm.rank], "avg", out=out, quantize=quant, algorithm=algorithm, timeout=60)
        return out

    # The mesh rounds each input once, and the average once.
    sent = [through(each) for each in data]
    np.testing.assert_array_equal(pair.all(lambda comm: call(comm, "mesh"))[0], through((sent[0] + sent[1]) / 2))
    # In a ring of two, one of both is not rounded. Which one depends on the chunk.
    either = [through((sent[0] + data[1]) / 2), through((data[0] + sent[1]) / 2)]
    ring = pair.all(lambda comm: call(comm, "ring"))[0]
    halves = [ring == each for each in either]
    assert (halves[0] | halves[1]).all()
    assert all(half.mean() > 0.4 for half in halves)

    # A reduce-scatter does not round the sum.
    def scatter(comm: lh.Comm) -> np.ndarray:
        out = np.zeros(COUNT, np.float32)
        whole = np.concatenate([data[comm.rank], -data[comm.rank]])
        comm.reduce_scatter(whole, out=out, quantize=quant, algorithm="mesh", timeout=60)
        return out * (1 - 2 * comm.rank)

    for out in pair.all(scatter):
        np.testing.assert_array_equal(out, sent[0] + sent[1])


@pytest.mark.parametrize("name", QUANTS)
def test_lists(three: Members, name: str) -> None:
    quant = QUANTS[name]
    counts = [3, 0, 70_001, 1, 1000, 129]
    dtypes = [torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.bfloat16]
    rng = np.random.default_rng(2)
    data = [
        [torch.from_numpy(rng.uniform(-1, 1, count)).to(dtype) for _ in range(3)]
        for count, dtype in zip(counts, dtypes)
    ]
    wide = [np.stack([each.float().numpy() for each in same]) for same in data]

    def call(comm: lh.Comm) -> list[torch.Tensor]:
        mine = [same[comm.rank].clone() for same in data]
        out = [torch.zeros_like(each) for each in mine]
        wholes = [torch.zeros(3 * len(each), dtype=each.dtype) for each in mine]
        errors = [np.zeros(count, np.float32) for count in counts]
        info = comm.all_reduce(mine, "avg", out=out, quantize=quant, error=errors, timeout=60)
        assert info.algorithm == "mesh"
        assert any(each.any() for each in errors)
        comm.all_gather(mine, out=wholes, quantize=quant, timeout=60)
        shown = [each.clone() for each in mine]
        comm.broadcast(shown, 2, quantize=quant, timeout=60)
        parts = [torch.zeros_like(each) for each in mine]
        comm.reduce_scatter(wholes, out=parts, quantize=quant, timeout=60)
        for part, whole in zip(parts, wholes):
            expected = 3 * whole.view(3, -1)[comm.rank].double().numpy()
            near = 3 * bound(np.stack([expected / 3] * 3), quant, whole.dtype)
            assert (np.abs(part.double().numpy() - expected) <= near).all()
        return [*out, *wholes, *shown]

    results = three.all(call)
    for same in zip(*results):
        check_same(list(same))
    for out, inputs, dtype in zip(results[0], wide, dtypes):
        # Small tensors of one dtype lie side by side, and share blocks.
        near = bound(np.ones_like(inputs), quant, dtype)
        assert (np.abs(out.float().numpy() - inputs.mean(0)) <= near).all()


def test_parts_of_unequal_lengths(three: Members) -> None:
    counts = [1001, 0, 40_007]
    ends = np.cumsum([0, *counts])
    data = rows(3, sum(counts))

    def call(comm: lh.Comm) -> tuple[int, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        out = np.zeros(counts[comm.rank], np.float32)
        error = np.zeros(sum(counts), np.float32)
        options: dict[str, Any] = dict(counts=counts, quantize="int8", timeout=60)
        comm.reduce_scatter(data[comm.rank], "avg", out=out, error=error, **options)
        whole = np.zeros(sum(counts), np.float32)
        comm.all_gather(out, out=whole, **options)
        return comm.rank, (out, error, whole)

    results = by_rank(three.all(call))
    np.testing.assert_array_equal(results[0][2], results[1][2])
    np.testing.assert_array_equal(results[0][2], results[2][2])
    average = np.concatenate([each[0] for each in results])
    lost = sum(each[1].astype(float) for each in results)
    np.testing.assert_allclose(data.sum(0, dtype=float), 3 * average + lost, rtol=1e-5, atol=1e-4)
    for begin, end in itertools.pairwise(ends):
        part = average[begin:end]
        np.testing.assert_array_equal(
            results[0][2][begin:end], codec.decode(codec.encode(part, "int8"), end - begin, "int8")
        )


@pytest.mark.parametrize("name", ["int8", "int4", "bf16"])
def test_stochastic_rounding_has_a_mean_error_of_0(three: Members, name: str) -> None:
    data = np.random.default_rng(3).standard_normal((3, 10_007)).astype(np.float32)
    true = data.mean(0, dtype=float)

    def call(comm: lh.Comm, rounding: str) -> np.ndarray:
        total, out = np.zeros(len(true)), np.zeros(len(true), np.float32)
        for _ in range(64):
            comm.all_reduce(data[comm.rank], "avg", out=out, quantize=lh.Quant(name, rounding=rounding), timeout=60)
            total += out
        return total / 64

    def error(rounding: str) -> tuple[float, float]:
        """Its size, and how much of the input the mean keeps."""
        mean = three.all(lambda comm: call(comm, rounding))[0]
        return np.sqrt(np.mean((mean - true) ** 2)), mean @ true / (true @ true)

    nearest, stochastic = error("nearest"), error("stochastic")
    # An op draws new numbers each time, so the mean of 64 has an eighth of the error of one.
    assert stochastic[0] < nearest[0] / 3
    assert abs(stochastic[1] - 1) < 0.01


@pytest.mark.parametrize("algorithm", ["mesh", "ring"])
@pytest.mark.parametrize("name, most", [("int8", 0.27), ("int4", 0.14), ("bf16", 0.51)])
def test_fewer_bytes_travel(three: Members, name: str, most: float, algorithm: str) -> None:
    def call(comm: lh.Comm) -> None:
        tensor = np.ones(1 << 20, np.float32)
        plain = comm.all_reduce(tensor, algorithm=algorithm, timeout=60)
        quantized = comm.all_reduce(tensor, quantize=name, algorithm=algorithm, timeout=60)
        assert quantized.bytes_sent <= most * plain.bytes_sent
        assert quantized.bytes_received <= most * plain.bytes_received

    three.all(call)


def test_what_stays_on_a_host_is_exact(cluster: LocalCluster) -> None:
    members = Members([cluster.socket(0), cluster.socket(0)])
    data = rows(2)

    def call(comm: lh.Comm) -> None:
        tensor, error = data[comm.rank].copy(), np.ones(COUNT, np.float32)
        assert comm.all_reduce(tensor, quantize="int4", error=error, timeout=60).algorithm == "local"
        np.testing.assert_allclose(tensor, data.sum(0) + 2, rtol=1e-6, atol=1e-5)
        assert not error.any()

    members.all(call)
    members.close()


@pytest.mark.parametrize("count", [1, 1024])
def test_small_ops_are_exact(three: Members, count: int) -> None:
    def call(comm: lh.Comm) -> None:
        tensor, error = np.full(count, 0.1 * (comm.rank + 1), np.float32), np.full(count, 0.25, np.float32)
        info = comm.all_reduce(tensor, quantize="int4", error=error, timeout=60)
        assert info.algorithm == "oneshot"
        np.testing.assert_allclose(tensor, np.full(count, 0.6 + 0.75), rtol=1e-6)
        assert not error.any()

    three.all(call)


def test_small_ops_with_lengths_of_their_own_are_encoded(three: Members) -> None:
    def call(comm: lh.Comm) -> list[str | None]:
        used = []
        for counts in (None, [2, 2, 2]):
            options: dict[str, Any] = dict(quantize="int8", counts=counts, timeout=60)
            used += [
                comm.reduce_scatter(np.ones(6, np.float32), out=np.zeros(2, np.float32), **options).quantize,
                comm.all_gather(np.ones(2, np.float32), out=np.zeros(6, np.float32), **options).quantize,
            ]
        return used

    assert three.all(call) == [[None, None, "int8", "int8"]] * 3


def test_small_ops_are_encoded_if_the_caller_says_so(three: Members) -> None:
    data = rows(3, 1000)

    def call(comm: lh.Comm) -> np.ndarray:
        out, error = np.zeros(1000, np.float32), np.zeros(1000, np.float32)
        comm.all_reduce(data[comm.rank], out=out, quantize="int4", error=error, algorithm="mesh", timeout=60)
        assert error.any()
        return out

    results = three.all(call)
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])
    assert (results[0] != data.sum(0)).mean() > 0.5


# ------------------------------------------------------------------ NaN


@pytest.mark.parametrize("algorithm", ["mesh", "ring"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_block_with_a_nan_is_nan_everywhere(three: Members, value: float, algorithm: str) -> None:
    data = rows(3)
    data[1, 1000] = value  # in block 7

    def call(comm: lh.Comm, name: str, kind: str) -> tuple[np.ndarray, int]:
        options: dict[str, Any] = dict(quantize=name, algorithm=algorithm, timeout=60)
        tensor = data[comm.rank].copy()
        if kind == "all_reduce":
            error = np.zeros(COUNT, np.float32)
            info = comm.all_reduce(tensor, error=error, **options)
            assert np.isfinite(error).all()
            return tensor, info.blocks_not_finite
        if kind == "broadcast":
            return tensor, comm.broadcast(tensor, 1, **options).blocks_not_finite
        whole = np.zeros(3 * COUNT, np.float32)
        blocks = comm.all_gather(tensor, out=whole, **options).blocks_not_finite
        return whole[COUNT : 2 * COUNT], blocks

    for name in ("int8", "int4", "bf16"):
        damaged = [1000] if name == "bf16" else list(range(7 * 128, 8 * 128))
        for kind in ("all_reduce", "broadcast", "all_gather"):
            for values, blocks in three.all(lambda comm, name=name, kind=kind: call(comm, name, kind)):  # type: ignore[misc]
                assert np.flatnonzero(~np.isfinite(values)).tolist() == damaged
                assert np.isnan(values[damaged]).all() or name == "bf16"
                assert blocks == 1


@pytest.mark.parametrize("algorithm", ["mesh", "ring"])
def test_blocks_are_counted_once_for_members_in_place_and_out_of_place(four: Members, algorithm: str) -> None:
    def call(comm: lh.Comm) -> int:
        tensor, out = comm.empty(COUNT), comm.empty(COUNT)
        tensor[:] = 1
        tensor[5] = np.nan
        options: dict[str, Any] = dict(quantize="int8", algorithm=algorithm, timeout=60)
        info = comm.all_reduce(tensor, out=out if comm.rank == 2 else None, **options)
        return int(info.blocks_not_finite)

    assert four.all(call) == [1, 1, 1, 1]


@pytest.mark.parametrize("algorithm", ["mesh", "ring"])
@pytest.mark.parametrize("giver", [0, 1, 2, 3])
def test_blocks_of_a_reduce_scatter_are_those_of_the_part(four: Members, giver: int, algorithm: str) -> None:
    def call(comm: lh.Comm) -> tuple[int, tuple[int, list[int]]]:
        tensor, out = np.ones(4 * 4096, np.float32), np.zeros(4096, np.float32)
        if comm.rank == giver:
            tensor[5] = np.nan
        info = comm.reduce_scatter(tensor, out=out, quantize="int8", algorithm=algorithm, timeout=60)
        return comm.rank, (info.blocks_not_finite, np.flatnonzero(np.isnan(out)).tolist())

    assert by_rank(four.all(call)) == [(1, list(range(128))), (0, []), (0, []), (0, [])]


# ------------------------------------------------------------------ error=


def balance(
    inputs: np.ndarray, before: list[np.ndarray], average: np.ndarray, after: list[np.ndarray], divisor: float
) -> None:
    """Nothing is lost: the inputs and old errors are the results and new errors."""
    given = inputs.sum(0, dtype=float) + sum(each.astype(float) for each in before)
    got = divisor * average.astype(float) + sum(each.astype(float) for each in after)
    size = np.abs(inputs).max() + np.abs(before).max()
    np.testing.assert_allclose(got, given, rtol=0, atol=1e-5 * size)


@pytest.mark.parametrize("algorithm", ["auto", "mesh", "ring"])
@pytest.mark.parametrize("name", ["int4", "int8", "bf16", "int4, stochastic"])
def test_what_is_lost_comes_later(three: Members, name: str, algorithm: str) -> None:
    data, steps = rows(3), 20

    def call(comm: lh.Comm) -> tuple[int, tuple[list[np.ndarray], list[np.ndarray]]]:
        error = np.zeros(COUNT, np.float32)
        results, errors = [], [error.copy()]
        for _ in range(steps):
            out = np.zeros(COUNT, np.float32)
            options: dict[str, Any] = dict(quantize=QUANTS[name], algorithm=algorithm, timeout=60)
            comm.all_reduce(data[comm.rank], "avg", out=out, error=error, **options)
            results.append(out)
            errors.append(error.copy())
        return comm.rank, (results, errors)

    ended = by_rank(three.all(call))
    true = data.mean(0, dtype=float)
    for step in range(steps):
        outs = [results[step] for results, _ in ended]
        np.testing.assert_array_equal(outs[0], outs[1])
        np.testing.assert_array_equal(outs[0], outs[2])
        balance(data, [e[step] for _, e in ended], outs[0], [e[step + 1] for _, e in ended], 3)
    results = np.stack(ended[0][0]).astype(float)
    first = np.sqrt(np.mean((results[0] - true) ** 2))
    average = np.sqrt(np.mean((results.mean(0) - true) ** 2))
    assert average < first / 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_errors_of_halves_do_not_count_the_last_rounding(three: Members, dtype: torch.dtype) -> None:
    data = torch.from_numpy(np.random.default_rng(1).standard_normal((3, COUNT)).astype(np.float32)).to(dtype)

    def call(comm: lh.Comm) -> tuple[int, tuple[torch.Tensor, torch.Tensor]]:
        out, error = torch.zeros(COUNT, dtype=dtype), torch.zeros(COUNT)
        comm.all_reduce(data[comm.rank], out=out, quantize="int4", error=error, timeout=60)
        return comm.rank, (out, error)

    ended = by_rank(three.all(call))
    given = data.double().sum(0)
    got = ended[0][0].double() + sum(error.double() for _, error in ended)
    ulp = {torch.float16: 2**-11, torch.bfloat16: 2**-8}[dtype]
    assert ((got - given).abs() <= 1.01 * ulp * ended[0][0].double().abs() + 1e-5).all()
    assert ended[0][1].any()


@pytest.mark.parametrize("algorithm", ["mesh", "ring"])
@pytest.mark.parametrize("weights", [None, (1.0, 2.0, 3.0, 0.5), (0.0, 1.0, 2.0, 1.0)])
def test_members_on_one_host_share_an_error(four: Members, weights: tuple[float, ...] | None, algorithm: str) -> None:
    data = rows(4)
    before = np.abs(rows(4)[::-1]) / 16

    def call(comm: lh.Comm) -> tuple[int, tuple[np.ndarray, np.ndarray]]:
        out, error = np.zeros(COUNT, np.float32), before[comm.rank].copy()
        options: dict[str, Any] = dict(quantize="int4", algorithm=algorithm, timeout=60)
        weight = None if weights is None else weights[comm.rank]
        comm.all_reduce(data[comm.rank], "avg", out=out, error=error, weight=weight, **options)
        return comm.rank, (out, error)

    ended = by_rank(four.all(call))
    factors = np.array(weights or (1, 1, 1, 1), np.float32)
    balance(data * factors[:, None], list(before), ended[0][0], [error for _, error in ended], factors.sum())
    for out, _ in ended:
        np.testing.assert_array_equal(out, ended[0][0])
    if weights is not None and weights[0] == 0:
        # Its input is left out, and so is its error.
        np.testing.assert_array_equal(ended[0][1], before[0])
        assert ended[2][1].any()
    else:
        assert ended[0][1].any() and not ended[2][1].any()


def test_nothing_is_lost_at_a_host_that_adds_up_and_has_weight_0(three: Members) -> None:
    data = rows(3)

    def call(comm: lh.Comm) -> tuple[np.ndarray, np.ndarray]:
        out, error = np.zeros(COUNT, np.float32), np.zeros(COUNT, np.float32)
        options: dict[str, Any] = dict(quantize="int4", algorithm="mesh", timeout=60)
        comm.all_reduce(data[comm.rank], "avg", out=out, error=error, weight=float(comm.rank > 0), **options)
        return out, error

    ended = three.all(call)
    balance(data[1:], [np.zeros(1)], ended[0][0], [error for _, error in ended], 2)


def test_each_member_decides_whether_it_keeps_an_error(four: Members) -> None:
    data = rows(4)

    def call(comm: lh.Comm) -> tuple[int, tuple[np.ndarray, np.ndarray | None]]:
        error = None if comm.rank in (0, 1) else np.zeros(COUNT, np.float32)
        out = np.zeros(COUNT, np.float32)
        comm.all_reduce(data[comm.rank], out=out, quantize="int8", error=error, timeout=60)
        return comm.rank, (out, error)

    ended = by_rank(four.all(call))
    assert ended[2][1].any() and ended[3][1].any()
    assert (np.abs(ended[0][0] / 4 - data.mean(0)) <= bound(data, lh.Quant("int8"))).all()


@pytest.mark.parametrize("arena", [True, False])
def test_a_reduce_scatter_keeps_errors_of_all_parts(three: Members, arena: bool) -> None:
    data = rows(3, 3 * COUNT)
    before = rows(3, 3 * COUNT)[::-1] / 8

    def call(comm: lh.Comm) -> tuple[int, tuple[np.ndarray, np.ndarray]]:
        make = comm.empty if arena else np.zeros
        tensor, error, out = make(3 * COUNT, np.float32), make(3 * COUNT, np.float32), make(COUNT, np.float32)
        tensor[:], error[:] = data[comm.rank], before[comm.rank]
        info = comm.reduce_scatter(tensor, "avg", out=out, error=error, quantize="int4", timeout=60)
        assert info.staged is not arena
        return comm.rank, (out, error)

    ended = by_rank(three.all(call))
    balance(data, list(before), np.concatenate([out for out, _ in ended]), [error for _, error in ended], 3)


def mixed_errors(comm: lh.Comm, counts: list[int]) -> list[Any]:
    """Errors of a list: some in shared memory, some of torch."""
    made: list[Any] = [comm.empty(count) if count > 9999 else torch.zeros(count) for count in counts]
    for each in made:
        each[:] = 0.5
    return made


def test_errors_of_a_list(three: Members) -> None:
    counts = [3, 0, 70_001, 1, 100_000, 129]
    data = [rows(3, count) for count in counts]

    def call(comm: lh.Comm) -> tuple[int, tuple[list[np.ndarray], list[np.ndarray]]]:
        tensors, errors = [same[comm.rank].copy() for same in data], mixed_errors(comm, counts)
        comm.all_reduce(tensors, "avg", quantize="int4", error=errors, timeout=60)
        return comm.rank, (tensors, [np.asarray(each) for each in errors])

    ended = by_rank(three.all(call))
    for i, count in enumerate(counts):
        if count:
            before = [np.full(count, 0.5, np.float32)] * 3
            balance(data[i], before, ended[0][0][i], [errors[i] for _, errors in ended], 3)


# ------------------------------------------------------------------ errors of ops that do not end well


class Kept:
    """A tensor and an error of a member, and what both were."""

    def __init__(self, comm: lh.Comm, arena: bool) -> None:
        make = comm.empty if arena else np.zeros
        self.tensor, self.error = make(COUNT, np.float32), make(COUNT, np.float32)
        self.tensor[:] = rows(3)[comm.rank]
        self.error[:] = rows(3)[2 - comm.rank]
        self.before = self.tensor.copy(), self.error.copy()

    def start(self, comm: lh.Comm, quantize: str = "int4", **options: Any) -> lh.Work:
        work = comm.all_reduce(self.tensor, "avg", quantize=quantize, error=self.error, async_op=True, **options)
        assert isinstance(work, lh.Work)
        return work

    def check_intact(self) -> None:
        np.testing.assert_array_equal(self.tensor, self.before[0])
        np.testing.assert_array_equal(self.error, self.before[1])


@pytest.mark.parametrize("arena", [True, False])
def test_a_cancelled_op_leaves_errors_as_they_were(three: Members, arena: bool) -> None:
    kept = [Kept(comm, arena) for comm in three.comms]
    works = [each.start(comm) for each, comm in zip(kept[:2], three.comms)]
    works[0].cancel()
    for work in works:
        with pytest.raises(lh.Aborted, match="cancel"):
            work.wait(60)
    with pytest.raises(lh.Aborted, match="cancel"):
        kept[2].start(three.comms[2]).wait(60)
    for each in kept:
        each.check_intact()
    # The same again ends well.
    works = [each.start(comm) for each, comm in zip(kept, three.comms)]
    for work in works:
        work.wait(60)
    balance(
        np.stack([each.before[0] for each in kept]),
        [each.before[1] for each in kept],
        kept[0].tensor,
        [each.error for each in kept],
        3,
    )


@pytest.mark.parametrize("arena", [True, False])
def test_an_op_that_a_fault_aborts_leaves_errors_as_they_were(three: Members, arena: bool) -> None:
    kept = [Kept(comm, arena) for comm in three.comms[:2]]
    works = [each.start(comm, on_fault="abort") for each, comm in zip(kept, three.comms)]
    three.comms.pop().leave(60)  # without having started the op
    for work in works:
        with pytest.raises(lh.Aborted):
            work.wait(60)
    for each in kept:
        each.check_intact()


@pytest.mark.parametrize("options", [{"min_world": 3}, {"weight": 0.0}], ids=str)
@pytest.mark.parametrize("arena", [True, False])
def test_too_few_members_leave_errors_as_they_were(pair: Members, arena: bool, options: dict[str, Any]) -> None:
    kept = [Kept(comm, arena) for comm in pair.comms]
    for work in [each.start(comm, **options) for each, comm in zip(kept, pair.comms)]:
        with pytest.raises(lh.TooFewMembers):
            work.wait(60)
    for each in kept:
        each.check_intact()


@pytest.mark.parametrize("on_fault", ["abort", "retry"])
@pytest.mark.parametrize("arena", [True, False])
def test_the_death_of_a_peer(on_fault: str, arena: bool) -> None:
    with LocalCluster(peers=3) as cluster:
        members = Members([cluster.socket(i) for i in range(3)])
        kept = [Kept(comm, arena) for comm in members.comms[:2]]
        works = [each.start(comm, on_fault=on_fault) for each, comm in zip(kept, members.comms)]
        wait_for_open_ops(cluster.peers[:2])
        cluster.kill_peer(2)
        members.comms.pop()
        if on_fault == "abort":
            for work in works:
                with pytest.raises(lh.Aborted):
                    work.wait(60)
            for each in kept:
                each.check_intact()
        else:
            assert [work.wait(60).world_size for work in works] == [2, 2]
            np.testing.assert_array_equal(kept[0].tensor, kept[1].tensor)
            inputs = np.stack([each.before[0] for each in kept])
            balance(inputs, [each.before[1] for each in kept], kept[0].tensor, [each.error for each in kept], 2)
        members.close()


@pytest.mark.parametrize("arena", [True, False])
def test_the_death_of_the_own_peer_before_the_others_start(arena: bool) -> None:
    with LocalCluster(peers=2) as cluster:
        members = Members([cluster.socket(0), cluster.socket(1)])
        kept = Kept(members.comms[0], arena)
        work = kept.start(members.comms[0])
        wait_for_open_ops(cluster.peers[:1])
        cluster.kill_peer(0)
        with pytest.raises(lh.Unavailable):
            work.wait(60)
        kept.check_intact()
        members.comms.pop(0)
        members.close()


@pytest.mark.parametrize("place", ["own", "neighbour's"])
@pytest.mark.parametrize("quantize", [None, "int4"])
def test_a_part_in_the_whole_is_intact_after_a_cancelled_all_gather(
    cluster: LocalCluster, three: Members, quantize: str | None, place: str
) -> None:
    first, second, third = sorted(three.comms, key=lambda comm: comm.rank)
    received = "longhaul_peerd_received_bytes_total"
    before = sum(peer.metric(received) for peer in cluster.peers)
    wholes = [comm.empty(3 * COUNT) for comm in (first, second)]
    places = (0, 1) if place == "own" else (1, 0)
    parts = [whole[i * COUNT : (i + 1) * COUNT] for i, whole in zip(places, wholes)]
    data = rows(2)
    options: dict[str, Any] = dict(quantize=quantize, algorithm="mesh", async_op=True)
    works = []
    for comm, whole, part, values in zip((first, second), wholes, parts, data):
        whole[:] = np.nan
        part[:] = values
        works.append(comm.all_gather(part, out=whole, **options))
    # Each of the two has the other one's part.
    wait_until(lambda: sum(peer.metric(received) for peer in cluster.peers) >= before + COUNT)
    works[0].cancel()
    for work in works:
        with pytest.raises(lh.Aborted):
            work.wait(60)
    with pytest.raises(lh.Aborted):
        third.all_gather(np.ones(COUNT, np.float32), out=np.ones(3 * COUNT, np.float32), **options).wait(60)
    for part, values in zip(parts, data):
        np.testing.assert_array_equal(part, values)


@pytest.mark.parametrize("arena", [True, False])
def test_an_op_that_is_late_ends_well_in_the_end(pair: Members, arena: bool) -> None:
    comm, other = pair.comms
    kept = [Kept(each, arena) for each in pair.comms]
    with pytest.raises(lh.DeadlineExceeded) as late:
        comm.all_reduce(kept[0].tensor, "avg", quantize="int4", error=kept[0].error, timeout=0.05)
    kept[1].start(other).wait(60)
    assert late.value.work is not None
    late.value.work.wait(60)
    balance(
        np.stack([each.before[0] for each in kept]),
        [each.before[1] for each in kept],
        kept[0].tensor,
        [each.error for each in kept],
        2,
    )


def test_an_error_in_flight_is_not_given_to_another_op(pair: Members) -> None:
    comm, other = pair.comms
    kept = [Kept(each, True) for each in pair.comms]
    work = kept[0].start(comm)
    spare = np.zeros(COUNT, np.float32)
    with pytest.raises(lh.FailedPrecondition, match="writes the same tensor"):
        comm.all_reduce(spare, quantize="int4", error=kept[0].error, tag=1, async_op=True)
    with pytest.raises(lh.FailedPrecondition, match="writes the same tensor"):
        comm.all_reduce(kept[0].error, tag=1, async_op=True)
    kept[1].start(other).wait(60)
    work.wait(60)


def test_errors_of_members_on_one_host_may_not_overlap(cluster: LocalCluster) -> None:
    members = Members([cluster.socket(0), cluster.socket(0), cluster.socket(1)])
    first, second, third = members.comms
    memory = first.empty(2 * COUNT)
    memory[:] = 0.5
    tensors = [np.ones(COUNT, np.float32) for _ in range(3)]

    def others() -> list[lh.Work]:
        """Calls of the members that do nothing wrong. They are at peerd."""
        works = [
            first.all_reduce(tensors[0], quantize="int8", error=memory[:COUNT], async_op=True),
            third.all_reduce(tensors[2], quantize="int8", async_op=True),
        ]
        wait_for_open_ops(cluster.peers[:2])
        return works

    overlaps: tuple[tuple[str, dict[str, Any]], ...] = (
        ("error", {"tensor": tensors[1], "error": memory[COUNT - 9 : -9]}),
        ("source.*error|error.*source", {"tensor": memory[COUNT - 9 : -9], "out": tensors[1]}),
    )
    for text, overlapping in overlaps:
        works = others()
        with pytest.raises(lh.InvalidArgument, match=text):
            second.all_reduce(**overlapping, quantize="int8", timeout=60)
        for work in works:
            with pytest.raises(lh.InvalidArgument, match=f"of member m{second.member_id} was refused there.*({text})"):
                work.wait(60)
    works = others()
    works.append(second.all_reduce(tensors[1], quantize="int8", error=memory[COUNT:], async_op=True))
    for work in works:
        work.wait(60)
    for tensor in tensors:
        np.testing.assert_allclose(tensor, np.full(COUNT, 4), rtol=0.01)
    members.close()


# ------------------------------------------------------------------ misuse


@pytest.mark.parametrize(
    "one, another, texts",
    [
        ("int8", "int4", ("quantization int8 block 128", "quantization int4 block 128")),
        ("int8", None, ("quantization int8 block 128", "sum of float32 x 100003")),
        ("bf16", "int8", ("quantization bf16", "quantization int8 block 128")),
        ("int8", lh.Quant("int8", 64), ("block 128", "block 64")),
        ("int8", lh.Quant("int8", rounding="stochastic"), ("block 128", "rounding stochastic")),
    ],
)
def test_members_whose_codecs_differ_are_told_both(
    pair: Members, one: Any, another: Any, texts: tuple[str, str]
) -> None:
    def call(comm: lh.Comm) -> str:
        tensor, error = np.ones(COUNT, np.float32), np.full(COUNT, 0.5, np.float32)
        quant = another if comm.rank else one
        with pytest.raises(lh.InvalidArgument) as caught:
            comm.all_reduce(tensor, quantize=quant, error=None if quant is None else error, timeout=60)
        assert (tensor == 1).all() and (error == 0.5).all()
        return str(caught.value)

    for message in pair.all(call):
        assert all(text in message for text in texts), message


def test_pccls_names_mean_int8(pair: Members) -> None:
    data = rows(2)

    def call(comm: lh.Comm) -> np.ndarray:
        out = np.zeros(COUNT, np.float32)
        name = ("min-max", "zero-point-scale")[comm.rank]
        comm.all_reduce(data[comm.rank], out=out, quantize=name, algorithm="mesh", timeout=60)
        return out

    sent = sum(codec.decode(codec.encode(each, "int8"), COUNT, "int8") for each in data)
    np.testing.assert_array_equal(pair.all(call)[1], codec.decode(codec.encode(sent, "int8"), COUNT, "int8"))


def ones(count: int = 5000, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(count, dtype)


SHARED = ones()
REFUSED: dict[str, tuple[type[Exception], str, Callable[[lh.Comm], object]]] = {
    "a codec that does not exist": (
        lh.InvalidArgument,
        "quantize is 'int2'; give one of bf16, int8, int4",
        lambda comm: comm.all_reduce(ones(), quantize="int2"),
    ),
    "a number": (
        lh.InvalidArgument,
        'quantize is 8; give None, "bf16", "int8", "int4" or a longhaul.Quant',
        lambda comm: comm.all_reduce(ones(), quantize=8),  # type: ignore[call-overload]
    ),
    "a tuple": (
        lh.InvalidArgument,
        "quantize is .'int8', 64.; give None",
        lambda comm: comm.all_reduce(ones(), quantize=("int8", 64)),  # type: ignore[call-overload]
    ),
    "a block that is no power of two": (
        lh.InvalidArgument,
        "block of quantize is 100; give a power of two from 32 to 4096, or None",
        lambda comm: comm.all_reduce(ones(), quantize=lh.Quant("int8", 100)),
    ),
    "a block that is too small": (
        lh.InvalidArgument,
        "block of quantize is 16; give a power of two from 32 to 4096",
        lambda comm: comm.all_reduce(ones(), quantize=lh.Quant("int8", 16)),
    ),
    "a block that is too large": (
        lh.InvalidArgument,
        "block of quantize is 8192; give a power of two from 32 to 4096",
        lambda comm: comm.all_reduce(ones(), quantize=lh.Quant("int4", 8192)),
    ),
    "a block with bf16": (
        lh.InvalidArgument,
        'block of quantize is 64; "bf16" has no blocks',
        lambda comm: comm.all_reduce(ones(), quantize=lh.Quant("bf16", 64)),
    ),
    "a rounding that does not exist": (
        lh.InvalidArgument,
        "rounding of quantize is 'up'; give one of nearest, stochastic",
        lambda comm: comm.all_reduce(ones(), quantize=lh.Quant("int8", rounding="up")),
    ),
    "auto without codecs": (
        lh.InvalidArgument,
        'quantize is "auto" with among=.*; give the codecs that may be chosen, such as',
        lambda comm: comm.all_reduce(ones(), quantize="auto"),
    ),
    "auto with a name in place of a list": (
        lh.InvalidArgument,
        "with among='int8'; give the codecs that may be chosen",
        lambda comm: comm.all_reduce(ones(), quantize=lh.Quant("auto", among="int8")),
    ),
    "auto with a codec that does not exist": (
        lh.InvalidArgument,
        "among of quantize is 'int2'; give one of bf16, int8, int4",
        lambda comm: comm.all_reduce(ones(), quantize=lh.Quant("auto", among=("int8", "int2"))),
    ),
    "a set of codecs without auto": (
        lh.InvalidArgument,
        'among of quantize is .*int8.* with "int4"; it goes with "auto"',
        lambda comm: comm.all_reduce(ones(), quantize=lh.Quant("int4", among=("int8",))),
    ),
    "integers": (
        lh.InvalidArgument,
        "int32 x 5000.*dtype is int32, not float32, float16 or bfloat16 with quantization int8",
        lambda comm: comm.all_reduce(ones(dtype=np.int32), quantize="int8"),
    ),
    "doubles in a list": (
        lh.InvalidArgument,
        "not float32, float16 or bfloat16 with quantization int8",
        lambda comm: comm.all_reduce([ones(), ones(dtype=np.float64)], quantize="int8"),
    ),
    "integers in a broadcast": (
        lh.InvalidArgument,
        "not float32, float16 or bfloat16 with quantization int8",
        lambda comm: comm.broadcast(ones(dtype=np.int8), quantize="int8"),
    ),
    "a maximum": (
        lh.InvalidArgument,
        "reduce is max, not sum or avg with quantization int8",
        lambda comm: comm.all_reduce(ones(), "max", quantize="int8"),
    ),
    "an error of another dtype": (
        lh.InvalidArgument,
        "error is float64 with 5000 elements.*float32 and has as many elements as its tensor",
        lambda comm: comm.all_reduce(ones(), quantize="int8", error=ones(dtype=np.float64)),
    ),
    "an error of another length": (
        lh.InvalidArgument,
        "error is float32 with 4999 elements, tensor has 5000",
        lambda comm: comm.all_reduce(ones(), quantize="int8", error=ones(4999)),
    ),
    "an error of a part": (
        lh.InvalidArgument,
        "error is float32 with 2500 elements, tensor has 5000",
        lambda comm: comm.reduce_scatter(ones(), out=ones(), quantize="int8", error=ones(2500)),
    ),
    "a list of errors for one tensor": (
        lh.InvalidArgument,
        "tensor is one tensor; error must be one tensor",
        lambda comm: comm.all_reduce(ones(), quantize="int8", error=[ones()]),
    ),
    "an error too few": (
        lh.InvalidArgument,
        "tensor is a list of 2; error must be a list of as many",
        lambda comm: comm.all_reduce([ones(), ones()], quantize="int8", error=[ones()]),
    ),
    "None in a list of errors": (
        TypeError,
        r"error\[1\] is a NoneType; pass a numpy array",
        lambda comm: comm.all_reduce([ones(), ones()], quantize="int8", error=[ones(), None]),
    ),
    "an error that is read-only": (
        lh.InvalidArgument,
        "error is read-only",
        lambda comm: comm.all_reduce(ones(), quantize="int8", error=np.frombuffer(bytes(20_000), np.float32)),
    ),
    "an error with gaps": (
        lh.InvalidArgument,
        "error .* is not contiguous",
        lambda comm: comm.all_reduce(ones(), quantize="int8", error=ones(10_000)[::2]),
    ),
    "an error that is the tensor": (
        lh.InvalidArgument,
        "error overlaps source or target",
        lambda comm: comm.all_reduce(SHARED, quantize="int8", error=SHARED),
    ),
    "an error that overlaps the result": (
        lh.InvalidArgument,
        "error overlaps source or target",
        lambda comm: comm.all_reduce(ones(2500), out=SHARED[:2500], quantize="int8", error=SHARED[2000:4500]),
    ),
    "errors of a list that are the same": (
        lh.InvalidArgument,
        "slices 0 and 1 share memory.*errors included",
        lambda comm: comm.all_reduce([ones(), ones()], quantize="int8", error=[SHARED, SHARED]),
    ),
    "an error without quantize": (
        lh.InvalidArgument,
        "an error is given, and only a quantized all-reduce or reduce-scatter keeps one",
        lambda comm: comm.all_reduce(ones(), error=ones()),
    ),
    "errors of a list without quantize": (
        lh.InvalidArgument,
        "an error is given, and only a quantized all-reduce or reduce-scatter keeps one",
        lambda comm: comm.reduce_scatter([ones()], out=[ones()], error=[ones()]),
    ),
    "an error of a broadcast": (
        TypeError,
        r"broadcast\(\) got an unexpected keyword argument 'error'",
        lambda comm: comm.broadcast(ones(), quantize="int8", error=ones()),  # type: ignore[call-overload]
    ),
    "an error of an all-gather": (
        TypeError,
        r"all_gather\(\) got an unexpected keyword argument 'error'",
        lambda comm: comm.all_gather(ones(), out=ones(), quantize="int8", error=ones()),  # type: ignore[call-overload]
    ),
    "a reduce": (
        TypeError,
        r"reduce\(\) got an unexpected keyword argument 'quantize'",
        lambda comm: comm.reduce(ones(), 0, quantize="int8"),  # type: ignore[call-overload]
    ),
    "a gather": (
        TypeError,
        r"gather\(\) got an unexpected keyword argument 'quantize'",
        lambda comm: comm.gather(ones(), 0, out=ones(), quantize="int8"),  # type: ignore[call-overload]
    ),
}


@pytest.fixture(scope="module")
def alone(cluster: LocalCluster) -> Iterator[lh.Comm]:
    with lh.join("quantize-misuse", peerd=cluster.socket(0)) as comm:
        yield comm


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused_before_it_starts(alone: lh.Comm, what: str) -> None:
    kind, text, call = REFUSED[what]
    with pytest.raises(kind, match=text):
        call(alone)
    # Nothing is left: the tag is free.
    alone.all_reduce(ones(), quantize="int8", error=ones(), timeout=60)


def test_a_tensor_on_a_gpu_has_its_error_in_host_memory(pair: Members) -> None:
    data = [rows(2), rows(2, 300)]

    with FakeCopier() as device:

        def call(comm: lh.Comm) -> tuple[int, tuple[np.ndarray, np.ndarray]]:
            mine = [device.tensor(torch.from_numpy(each[comm.rank])) for each in data]
            errors = [np.zeros(each.shape[1], np.float32) for each in data]
            with pytest.raises(lh.InvalidArgument, match="error is on a GPU; keep errors in host memory"):
                comm.all_reduce(mine[0], quantize="int4", error=device.tensor(torch.zeros(COUNT)), timeout=60)
            with pytest.raises(lh.InvalidArgument, match=r"error\[1\] is on a GPU"):
                spare = [errors[0], device.tensor(torch.zeros(300))]
                comm.all_reduce(mine, quantize="int4", error=spare, timeout=60)
            comm.all_reduce(mine, "avg", quantize="int4", error=errors, timeout=60)
            assert all(each.any() for each in errors)
            comm.all_reduce(mine[1], "avg", quantize="int4", error=errors[1], algorithm="mesh", timeout=60)
            return comm.rank, (device.read(mine[0]).numpy(), errors[0])

        ended = by_rank(pair.all(call))
    np.testing.assert_array_equal(ended[0][0], ended[1][0])
    balance(data[0], [np.zeros(1)] * 2, ended[0][0], [error for _, error in ended], 2)


def test_newcomers_need_no_error(cluster: LocalCluster) -> None:
    """A member that comes later begins with an error of 0. It needs nothing from the others."""
    data = rows(2)
    with ThreadPoolExecutor(2) as pool, lh.join("quantize-new", peerd=cluster.socket(0)) as first:
        error = np.zeros(COUNT, np.float32)
        for _ in range(2):
            first.all_reduce(data[0].copy(), quantize="int4", error=error, timeout=60)
        joining = pool.submit(lh.join, "quantize-new", peerd=cluster.socket(1))
        admit(first, 2)
        with joining.result(60) as second:
            pool.submit(second.begin_step, 60).result(60)
            before, tensors = [error.copy(), np.zeros(COUNT, np.float32)], data.copy()
            after = [error, before[1].copy()]
            works = [
                comm.all_reduce(tensor, "avg", quantize="int4", error=each, async_op=True)
                for comm, tensor, each in zip((first, second), tensors, after)
            ]
            for work in works:
                work.wait(60)
            balance(data, before, tensors[0], after, 2)
