"""Every collective, dtype and reduction at several worlds and sizes, exact. What is not supported is refused at once.

The table is a sample: each pair of values of two columns is in one row at least.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import collectives
import numpy as np
import pytest
from collectives import DIRECT, FLOATS, IN_PARTS, INTEGERS, KINDS, MOVED, OPS, REDUCING, Spec, Started

import longhaul as lh
from longhaul.testing import LocalCluster

SEED = int(os.environ.get("LONGHAUL_SEED", "1"))
WORLDS = (1, 2, 3, 5, 8)
# Of each tensor; in parts, of each part, except that 1M are the elements of the whole.
COUNTS = ("0", "1", "world-1", "1025", "1M")
PEERS = 5

COLUMNS: dict[str, tuple[Any, ...]] = {
    "kind": KINDS,
    "dtype": collectives.DTYPES,
    "op": ("", *OPS),
    "world": WORLDS,
    "count": COUNTS,
    "in_place": (False, True),
    "several": (False, True),
}
Row = tuple[Any, ...]
Pair = tuple[int, Any, int, Any]


def is_possible(row: Row) -> bool:
    kind, dtype, op, world, count, in_place, several = row
    if kind == "barrier":  # it has no tensors
        return (dtype, op, count, in_place, several) == ("float32", "", "0", False, False)
    if kind == "send" and (world == 1 or in_place):
        return False
    if kind in REDUCING:
        return bool(op) and dtype in collectives.dtypes_for(kind, op, False)
    return bool(op == "")


def pairs_of(row: Row) -> list[Pair]:
    return [(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)]


def pairwise(rng: random.Random) -> list[Row]:
    """Possible rows in which each possible pair of values occurs."""
    rows = [row for row in itertools.product(*COLUMNS.values()) if is_possible(row)]
    by_pair: dict[Pair, list[Row]] = {}
    for row in rows:
        for pair in pairs_of(row):
            by_pair.setdefault(pair, []).append(row)
    left = dict.fromkeys(sorted(by_pair, key=lambda pair: len(by_pair[pair])))
    chosen = []
    while left:
        some = by_pair[next(iter(left))]
        row = max(rng.sample(some, min(50, len(some))), key=lambda row: sum(pair in left for pair in pairs_of(row)))
        chosen.append(row)
        for pair in pairs_of(row):
            left.pop(pair, None)
    return chosen


# The samples differ in rows, and in all that is no column.
SAMPLES = int(os.environ.get("LONGHAUL_TABLE_SAMPLES", "3"))
ROWS = [row for sample in range(SAMPLES) for row in pairwise(random.Random(f"{SEED}/{sample}"))]


def spec_of(rng: random.Random, row: Row, ids: tuple[int, ...], tag: int) -> Spec:
    """An op of that row. What is no column is random."""
    kind, dtype, op, world, count, in_place, several = row
    parts = world if kind in IN_PARTS else 1
    elements = {"world-1": world - 1, "1M": (1 << 20) // parts}.get(count) if not count.isdigit() else int(count)
    assert elements is not None
    weights = None
    if op in ("sum", "avg") and dtype in FLOATS and rng.random() < 0.3:
        weights = (*(float(rng.randint(0, 3)) for _ in ids[1:]), 1.0)
    dtypes, counts = [dtype], [elements]
    if several:
        possible = collectives.dtypes_for(kind, op, weights is not None)
        dtypes += [rng.choice(possible) for _ in range(4)]
        counts += [5, 0, elements // 3, 1]
        if elements == 0:
            counts = [0, 0, 0, 0, 0]
    root, to = rng.sample(ids, 2) if kind == "send" else (rng.choice(ids), 0)
    lengths = None
    if kind in IN_PARTS and not several and elements > 1 and rng.random() < 0.4:
        lengths = collectives.lengths_of(rng, kind, world, elements)
        in_place = in_place and kind != "all_to_all"
    spec = Spec(
        kind=kind,
        world=ids,
        ids=tuple(each for each in ids if each in (root, to)) if kind == "send" else ids,
        root=root if kind in collectives.ROOTED or kind == "send" else 0,
        to=to,
        by_rank=rng.random() < 0.5,
        dtypes=tuple(dtypes),
        counts=tuple(counts),
        several=several,
        lengths=lengths,
        op=op or "sum",
        weights=weights,
        order="rank" if kind in REDUCING and rng.random() < 0.3 else "any",
        in_place=in_place,
        arena=rng.choice(("all", "none", "mixed")),
        tag=tag,
    )
    return dataclasses.replace(spec, algorithm=rng.choice(collectives.algorithms_for(spec)))


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(peers=PEERS) as started:
        yield started


def together(cluster: LocalCluster, world: int, call: Callable[[lh.Comm], None]) -> None:
    """Runs call(comm) for all members of a group at once. Each is a thread here; some share a host."""

    def member(number: int) -> None:
        run = f"table-{world}-{call.__name__}"
        with lh.join(run, peerd=cluster.socket(number % PEERS), members=world, name=f"{number}", timeout=60) as comm:
            call(comm)

    with ThreadPoolExecutor(world) as pool:
        for done in [pool.submit(member, number) for number in range(world)]:
            done.result()


@pytest.mark.parametrize("world", WORLDS)
def test_results_are_exact(cluster: LocalCluster, world: int) -> None:
    rows = [row for row in ROWS if row[3] == world]
    problems: list[str] = []
    # What a caller's choice may come to.
    used = {"auto": ("oneshot", "mesh", "ring")}

    def ops(comm: lh.Comm) -> None:
        rng = random.Random(SEED)
        ids, me = comm.members, comm.member_id
        for tag, row in enumerate(rows):
            spec = spec_of(rng, row, ids, tag)
            if me not in spec.ids:
                continue
            # A member that ends here would spoil the ops of the others.
            try:
                started = Started(comm, spec, me)
                info = started.work.wait(60)
            except Exception as error:
                problems.append(f"{error!r} in {spec}")
                continue
            problem = started.wrong(info)
            if info.members != spec.ids or info.algorithm not in (
                "local",
                *used.get(spec.algorithm, (spec.algorithm,)),
            ):
                problem = f"{info}"
            if problem is not None:
                problems.append(f"{problem} in {spec}")

    together(cluster, world, ops)
    assert not problems, "\n".join(problems)


# ------------------------------------------------------------------ what is refused


def refused_specs(ids: tuple[int, ...]) -> Iterator[tuple[str, Spec]]:
    """Ops that no group can do, and what the error has to say."""

    def spec(kind: str, **changes: Any) -> Spec:
        root = ids[0] if kind in (*collectives.ROOTED, "send") else 0
        plain = Spec(kind, ids, ids, root=root, to=ids[1] if kind == "send" else 0, counts=(6,))
        return dataclasses.replace(plain, **changes)

    equal = ((3,) * len(ids),)
    for kind in REDUCING:
        for several in (False, True):
            dtypes = ("float32",) if several else ()
            counts = (6,) * (1 + len(dtypes))
            for dtype, op in itertools.product(MOVED, OPS):
                more = {"dtypes": (*dtypes, dtype), "counts": counts, "several": several, "op": op}
                yield "not one that can be reduced; float8 can only be moved", spec(kind, **more)
            for op in ("avg", "prod"):
                more = {"dtypes": (*dtypes, "bool"), "counts": counts, "several": several, "op": op}
                yield f"reduce is {op}, not sum, min or max for bool", spec(kind, **more)
            for dtype in (*INTEGERS, "bool"):
                more = {"dtypes": (*dtypes, dtype), "counts": counts, "several": several}
                yield "dtype is .*, not a float with weights", spec(kind, weights=(1.0, 2.0), **more)
        for op in ("prod", "min", "max"):
            yield f"reduce is {op}, not sum or avg with weights", spec(kind, weights=(1.0, 2.0), op=op)
        for weight in (-1.0, float("inf"), float("nan")):
            yield "weight is .*, not a finite number, 0 or more", spec(kind, weights=(weight, weight))
        yield "algorithm is ring, not auto, oneshot or mesh with order rank", spec(kind, order="rank", algorithm="ring")
        yield "op is 'mean'; give one of sum, avg, prod, min, max", spec(kind, op="mean")
        yield "order is 'time'; give one of any, rank", spec(kind, order="time")
    for kind in DIRECT:
        yield "algorithm is ring, not auto, oneshot or mesh for this kind", spec(kind, algorithm="ring")
    for kind in KINDS:
        yield "on_fault is 'ignore'; give one of retry, abort", spec(kind, on_fault="ignore")
        if kind != "send":
            yield "min_world is 1025, not at most 1024", spec(kind, min_world=1025)
        if kind == "barrier":
            continue
        yield "algorithm is 'tree'; give one of", spec(kind, algorithm="tree")
        yield "a one-shot op has at most 4096 bytes", spec(kind, algorithm="oneshot", counts=(1025,))
        if kind in IN_PARTS:
            rows = equal * len(ids) if kind == "all_to_all" else equal
            yield (
                "parts of unequal lengths cannot travel as a one-shot op",
                spec(kind, algorithm="oneshot", lengths=rows),
            )
            yield "counts is given for a list", spec(kind, several=True, lengths=rows, counts=(3,))


def other_refusals(comm: lh.Comm) -> Iterator[tuple[str, type[Exception], Callable[..., object]]]:
    me, rank = comm.member_id, comm.rank
    other = next(each for each in comm.members if each != me)
    six, three = np.zeros(6, np.float32), np.zeros(3, np.float32)
    wrong = lh.InvalidArgument
    calls: dict[str, Callable[..., object]] = {
        "all_reduce": lambda **more: comm.all_reduce(six, **more),
        "reduce": lambda **more: comm.reduce(six, **more),
        "reduce_scatter": lambda **more: comm.reduce_scatter(six, out=three, **more),
        "all_gather": lambda **more: comm.all_gather(three, out=six, **more),
        "gather": lambda **more: comm.gather(three, out=six, **more),
        "broadcast": lambda **more: comm.broadcast(six, **more),
        "scatter": lambda **more: comm.scatter(six, out=three, **more),
        "all_to_all": lambda **more: comm.all_to_all(six, out=six.copy(), **more),
        "send": lambda **more: comm.send(six, 1 - rank, **more),
        "recv": lambda **more: comm.recv(six, 1 - rank, **more),
        "barrier": lambda **more: comm.barrier(**more),
    }
    for kind, call in calls.items():
        if kind not in REDUCING:
            for option, value in (("weight", 1.0), ("order", "rank")):
                yield "unexpected keyword argument", TypeError, functools.partial(call, **{option: value})
        for option in ("participants", "min_world") if kind in ("send", "recv") else ():
            yield "unexpected keyword argument", TypeError, functools.partial(call, **{option: [me]})
        yield "tag is -1; give a whole number from 0", wrong, functools.partial(call, tag=-1)
        yield "timeout has no meaning", wrong, functools.partial(call, async_op=True, timeout=1)
        if kind in ("send", "recv"):
            continue
        for ids, text in (
            ([], "is empty"),
            ([other], "member,? m.*, is not among its participants"),
            ([me, me], "twice"),
            ([0, me], "member id 0"),
        ):
            yield text, wrong, functools.partial(call, participants=ids)
        if kind in collectives.ROOTED:
            alone = {"participants": [me], "root_member": other}
            yield "the root, member m.*, is not among its participants", wrong, functools.partial(call, **alone)
            yield "root is rank 7, and the group has 2", wrong, functools.partial(call, root=7)
    yield "a member cannot send to itself", wrong, lambda: comm.recv(six, source_member=me)
    yield "a member cannot send to itself", wrong, lambda: comm.send(six, to=rank)
    yield "same dtype", wrong, lambda: comm.reduce_scatter(six, out=three.astype(np.float64))
    yield "out is float64", wrong, lambda: comm.all_reduce(six, out=six.astype(np.float64))
    yield "dtype complex64, which no op takes", wrong, lambda: comm.broadcast(six.astype(np.complex64))
    yield "overlap", wrong, lambda: comm.all_reduce(six[:4], out=six[2:])


def test_what_is_not_supported_is_refused_before_it_starts(cluster: LocalCluster) -> None:
    meeting = threading.Barrier(2)

    def refusals(comm: lh.Comm) -> None:
        me = comm.member_id
        for text, spec in refused_specs(comm.members):
            meeting.wait(60)  # the same call at both
            with pytest.raises(lh.InvalidArgument, match=text):
                Started(comm, spec, me).work.wait(10)
                pytest.fail(f"not refused: {spec}")
        for text, kind, call in other_refusals(comm):
            meeting.wait(60)
            with pytest.raises(kind, match=text):
                call()
        # No peer has an op of all these, so the tag that all of them had is free.
        meeting.wait(60)
        assert cluster.peers[0].metric("longhaul_peerd_ops_open") == 0
        meeting.wait(60)
        comm.barrier(tag=0, timeout=60)

    together(cluster, 2, refusals)
