"""Collectives with any options: how to start one, and what each member must hold after it. Results are exact."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

import longhaul as lh

REDUCING = ("all_reduce", "reduce", "reduce_scatter")
# Laid out for a number of members. They end Aborted if one of them is gone.
FOR_A_WORLD = ("reduce_scatter", "scatter", "all_to_all")
IN_PARTS = (*FOR_A_WORLD, "all_gather", "gather")
ROOTED = ("reduce", "gather", "scatter", "broadcast")
# Their parts go straight to their receiver: no ring.
DIRECT = ("gather", "scatter", "all_to_all", "send")
QUANTIZED = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
# "send" stands for the send of one member and the receive of another one.
KINDS = (*REDUCING, "all_gather", "gather", "broadcast", "scatter", "all_to_all", "send", "barrier")

INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
MOVED = ("float8_e4m3fn", "float8_e5m2")
DTYPES = (*INTEGERS, *FLOATS, "bool", *MOVED)
OPS = ("sum", "avg", "prod", "min", "max")
ONE_SHOT_BYTES_MAX = 4096
# What numpy does not have as dtypes of its own is kept as bits.
BITS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


def size_of(dtype: str) -> int:
    return np.dtype(BITS.get(dtype, dtype)).itemsize


@dataclasses.dataclass(frozen=True)
class Spec:
    """One op, the same at all members. Members are named by id."""

    kind: str
    world: tuple[int, ...]  # all members, in rank order
    ids: tuple[int, ...]  # those that take part, in rank order
    root: int = 0  # of a send: the sender
    to: int = 0
    by_rank: bool = False
    dtypes: tuple[str, ...] = ("float32",)
    counts: tuple[int, ...] = (1,)  # the elements of each tensor; in parts: of each part
    several: bool = False
    # The lengths of the parts. All-to-all: a row for each giver; the others have one row.
    lengths: tuple[tuple[int, ...], ...] | None = None
    op: str = "sum"
    weights: tuple[float, ...] | None = None
    order: str = "any"
    algorithm: str = "auto"
    in_place: bool = False
    # In place, in parts: the part of the smaller tensor lies so many parts behind the own one in the larger tensor.
    shift: int = 0
    quantize: str = ""  # with errors, if the kind takes them
    arena: str = "all"  # or "none", or "mixed"
    on_fault: str = "retry"
    min_world: int = 0
    tag: int = 0

    def part(self, giver: int, getter: int, i: int) -> int:
        """The elements of a part of tensor i. giver, getter: ranks among the participants."""
        if self.lengths is None:
            return self.counts[i]
        if self.kind == "all_to_all":
            return self.lengths[giver][getter]
        return self.lengths[0][giver if self.kind in ("all_gather", "gather") else getter]

    def parts(self, i: int, giver: int | None = None, getter: int | None = None) -> list[int]:
        """The parts of one giver or one getter."""
        ranks = range(len(self.ids))
        if getter is None:
            return [self.part(giver or 0, each, i) for each in ranks]
        return [self.part(each, getter, i) for each in ranks]

    def given(self, member: int, i: int) -> int:
        """The elements of the input of a member in tensor i."""
        rank = self.ids.index(member)
        if self.kind in FOR_A_WORLD:
            return sum(self.parts(i, giver=rank))
        return self.part(rank, 0, i) if self.kind in IN_PARTS else self.counts[i]

    def gets(self, member: int) -> bool:
        """Whether the member gets a result."""
        if self.kind == "send":
            return member == self.to
        return self.kind != "barrier" and (member == self.root or self.kind not in ("reduce", "gather"))

    def whole_bytes(self) -> int:
        """What counts for the limit of a one-shot."""
        parts = len(self.ids) ** (self.kind == "all_to_all") * (len(self.ids) if self.kind in IN_PARTS else 1)
        return int(parts * sum(size_of(dtype) * count for dtype, count in zip(self.dtypes, self.counts)))


# ------------------------------------------------------------------ values

_PERIOD = 65_537  # a prime: what is at a wrong place is wrong
_TABLE = np.random.default_rng(20).integers(0, 1 << 16, _PERIOD)


def _range_of(spec: Spec, dtype: str) -> str:
    if dtype == "bool" or dtype in MOVED:
        return dtype
    if spec.op == "prod" and spec.kind in REDUCING:
        return "factors"
    return "unsigned" if dtype.startswith("u") else "signed"


@functools.cache
def _numbers(range_of: str) -> Any:
    """Numbers whose sums and products are exact in each dtype of the range."""
    if range_of == "bool":
        return (_TABLE % 3 == 0).astype(np.int64)
    if range_of in MOVED:
        return _TABLE % 256
    if range_of == "factors":
        return 1 + _TABLE % 2
    return _TABLE % 6 if range_of == "unsigned" else _TABLE % 8 - 3


def encode(dtype: str, values: np.ndarray) -> np.ndarray:
    """Rounds once. bfloat16 and float8 as bits."""
    if dtype == "bfloat16":
        bits = values.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return values.astype(BITS.get(dtype, dtype))


@functools.cache
def _encoded(range_of: str, dtype: str) -> np.ndarray:
    return encode(dtype, _numbers(range_of))


def _stretch(table: np.ndarray, spec: Spec, member: int, i: int, begin: int, count: int) -> np.ndarray:
    start = (begin + 7919 * member + 104_729 * spec.tag + 31 * i) % _PERIOD
    return np.resize(np.roll(table, -start), count) if count else table[:0]


def numbers_of(spec: Spec, member: int, i: int, begin: int, count: int) -> np.ndarray:
    """Elements of the input of a member, as int64."""
    return _stretch(_numbers(_range_of(spec, spec.dtypes[i])), spec, member, i, begin, count)


def bits_of(spec: Spec, member: int, i: int, begin: int, count: int) -> np.ndarray:
    """The same elements in the dtype of the tensor."""
    return _stretch(_encoded(_range_of(spec, spec.dtypes[i]), spec.dtypes[i]), spec, member, i, begin, count)


def reduced(spec: Spec, members: Sequence[int], i: int, begin: int, count: int) -> np.ndarray:
    """The reduction of the inputs of these members: exact, then rounded once."""
    dtype = spec.dtypes[i]
    rows = [numbers_of(spec, member, i, begin, count) for member in members]
    if spec.weights is not None:
        by_id = dict(zip(spec.ids, spec.weights))
        rows = [row * by_id[member] for row, member in zip(rows, members)]
    if dtype == "bool":
        return encode(dtype, np.min(rows, axis=0) if spec.op == "min" else np.max(rows, axis=0))
    if spec.op != "avg":
        call: Any = {"sum": np.sum, "prod": np.prod, "min": np.min, "max": np.max}[spec.op]
        return encode(dtype, call(rows, axis=0))
    total = np.sum(rows, axis=0)
    if dtype in INTEGERS:
        return encode(dtype, np.sign(total) * (np.abs(total) // len(rows)))
    accumulator = np.float64 if dtype == "float64" else np.float32
    divisor = len(rows) if spec.weights is None else weight_of(spec, members)
    return encode(dtype, total.astype(accumulator) / accumulator(divisor))


def weight_of(spec: Spec, members: Sequence[int]) -> float:
    assert spec.weights is not None
    return sum(dict(zip(spec.ids, spec.weights))[member] for member in members)


def expected(spec: Spec, members: Sequence[int], me: int, i: int) -> np.ndarray:
    """What the result at a member that gets one begins with, if exactly these members gave their inputs."""
    rank = spec.ids.index(me)
    kind, count = spec.kind, spec.counts[i]
    if kind in ("all_reduce", "reduce"):
        return reduced(spec, members, i, 0, count)
    if kind in ("broadcast", "send"):
        return bits_of(spec, spec.root, i, 0, count)
    if kind in ("all_gather", "gather"):
        return np.concatenate([bits_of(spec, each, i, 0, spec.given(each, i)) for each in members])
    if kind == "reduce_scatter":
        parts = spec.parts(i, giver=0)
        return reduced(spec, members, i, sum(parts[:rank]), parts[rank])
    if kind == "scatter":
        parts = spec.parts(i, giver=0)
        return bits_of(spec, spec.root, i, sum(parts[:rank]), parts[rank])
    pieces = []
    for giver, member in enumerate(spec.ids):
        parts = spec.parts(i, giver=giver)
        pieces.append(bits_of(spec, member, i, sum(parts[:rank]), parts[rank]))
    return np.concatenate(pieces)


def same(left: np.ndarray, right: np.ndarray) -> bool:
    """Bit by bit."""
    return left.dtype == right.dtype and bool(np.array_equal(left.view(np.uint8), right.view(np.uint8)))


# ------------------------------------------------------------------ what is promised

CONCEPTS = pathlib.Path(__file__).parents[2] / "docs" / "concepts.md"
PROMISES = "## What tensors hold if an op does not end well"


@dataclasses.dataclass(frozen=True)
class Promise:
    """A line of the table: what a tensor holds if an op of the kind does not end well."""

    source: str
    apart: str  # a target apart from the source
    inside: str  # a target that is, or overlaps, the source

    def keeps_inside(self, receives: bool) -> bool:
        """receives: this member gets what another one gives."""
        words = {
            "unchanged": True,
            "anything; the source in it is unchanged": False,
            "the root: unchanged; others: anything": not receives,
        }
        return words[self.inside]


@functools.cache
def promises() -> dict[str, Promise]:
    section = CONCEPTS.read_text().split(PROMISES)[1].split("\n## ")[0]
    made = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for kind in cells[0].replace("`", "").split(", ") if line.startswith("| `") else ():
            made[kind] = Promise(*cells[1:])
    assert set(made) >= set(KINDS) - {"barrier"}, made
    return made


# ------------------------------------------------------------------ ops

# What a member keeps of an earlier quantized op, and the most by which the result of one is off.
ERROR = 2**-8
ROUNDED = 0.5


def tensor_of(bits: np.ndarray, dtype: str) -> Any:
    """The array as the caller's tensor: a torch tensor where numpy lacks the dtype."""
    if dtype not in BITS:
        return bits
    import torch  # takes seconds, and few ops need it

    return torch.from_numpy(bits).view(getattr(torch, dtype))


class Started:
    """One op at one member. Makes the tensors and starts the op; then compares them with what they must hold."""

    def __init__(self, comm: lh.Comm, spec: Spec, me: int) -> None:
        self.spec, self.me = spec, me
        self._comm = comm
        self._rank = spec.ids.index(me)
        # One for each tensor. What this member does not give or get is not there.
        self.sources: list[np.ndarray] = []
        self.outs: list[np.ndarray] = []
        self.errors: list[np.ndarray] = []
        for i, dtype in enumerate(spec.dtypes if spec.kind != "barrier" else ()):
            self._make(i, dtype)
        self._before = [each.copy() for each in self.outs]
        self.work: lh.Work = self._start()

    def _is_shared(self, i: int) -> bool:
        """Whether tensor i is in memory shared with peerd."""
        return {"all": True, "none": False}.get(self.spec.arena, (i + self.me + self.spec.tag) % 2 == 0)

    def _new(self, i: int, count: int) -> np.ndarray:
        dtype = BITS.get(self.spec.dtypes[i], self.spec.dtypes[i])
        made = self._comm.empty(count, dtype) if self._is_shared(i) else np.empty(count, dtype)
        made.view(np.uint8)[:] = 1  # a valid bool
        return made

    def _make(self, i: int, dtype: str) -> None:
        spec, rank, root = self.spec, self._rank, self.me == self.spec.root
        kind = spec.kind
        gives = kind not in ("scatter", "send") or root
        gets = spec.gets(self.me)

        def inside(parts: list[int]) -> slice:
            before = sum(parts[: (rank + spec.shift) % len(parts)])
            begin = min(before, sum(parts) - parts[rank])
            return slice(begin, begin + parts[rank])

        source = self._new(i, spec.given(self.me, i)) if gives else None
        out = None
        if kind in ("reduce_scatter", "scatter"):
            parts = spec.parts(i, giver=0)
            if spec.in_place and source is not None:
                out = source[inside(parts)]
            else:
                out = self._new(i, parts[rank])
        elif kind in ("all_gather", "gather") and gets:
            parts = spec.parts(i, getter=0)
            out = self._new(i, sum(parts))
            if spec.in_place:
                source = out[inside(parts)]
        elif kind == "all_to_all":
            out = source if spec.in_place else self._new(i, sum(spec.parts(i, getter=rank)))
        elif kind == "send":
            out = None if root else self._new(i, spec.counts[i])
        elif gets:
            out = source if spec.in_place else self._new(i, spec.counts[i])
        if source is not None:
            source[:] = bits_of(spec, self.me, i, 0, len(source))
            self.sources.append(source)
            if spec.quantize and kind in REDUCING:
                self.errors.append(np.full(len(source), ERROR, np.float32))
        if out is not None:
            self.outs.append(out)

    def _argument(self, tensors: list[np.ndarray]) -> Any:
        if not tensors:
            return None
        made = [tensor_of(each, dtype) for each, dtype in zip(tensors, self.spec.dtypes)]
        return made if self.spec.several else made[0]

    def _start(self) -> Any:
        spec, comm, kind, rank = self.spec, self._comm, self.spec.kind, self._rank
        options: dict[str, Any] = {"tag": spec.tag, "async_op": True, "on_fault": spec.on_fault}
        # Some members name the root by rank, and others by id.
        by_rank = spec.by_rank and (self.me + spec.tag) % 2 == 0
        if kind != "barrier":
            options["algorithm"] = spec.algorithm
        if kind == "send":
            partner = spec.to if self.me == spec.root else spec.root
            name = "to" if self.me == spec.root else "source"
            options |= {name: spec.world.index(partner)} if by_rank else {f"{name}_member": partner}
            if self.me == spec.root:
                return comm.send(self._argument(self.sources), **options)
            return comm.recv(self._argument(self.outs), **options)
        options["min_world"] = spec.min_world
        if spec.ids != spec.world:
            options["participants"] = spec.ids
        if kind == "barrier":
            return comm.barrier(**options)
        if kind in REDUCING:
            options |= {"op": spec.op, "order": spec.order}
            if spec.weights is not None:
                options["weight"] = spec.weights[rank]
        if kind in ROOTED:
            options |= {"root": spec.world.index(spec.root)} if by_rank else {"root_member": spec.root}
        if spec.quantize:
            options["quantize"] = spec.quantize
        if self.errors:
            options["error"] = self.errors if spec.several else self.errors[0]
        if spec.lengths is not None:
            options["counts"] = spec.parts(0, giver=rank) if kind in FOR_A_WORLD else spec.parts(0, getter=rank)
            if kind == "all_to_all":
                options["out_counts"] = spec.parts(0, getter=rank)
        if kind in IN_PARTS or not spec.in_place:
            options["out"] = self._argument(self.outs)
        return getattr(comm, kind)(self._argument(self.sources), **options)

    def wrong(self, info: lh.OpInfo) -> str | None:
        """After an op that ended well: what is not as it must be."""
        spec = self.spec
        for i, out in enumerate(self.outs):
            wanted = expected(spec, info.members, self.me, i)
            got = out[: len(wanted)]
            good = np.allclose(got, wanted, rtol=0, atol=ROUNDED) if spec.quantize else same(got, wanted)
            if not good:
                return f"tensor {i} of {spec.dtypes[i]}: {_difference(got, wanted)}"
        return None if spec.in_place and self.outs else self._changed()

    def _changed(self) -> str | None:
        for i, source in enumerate(self.sources):
            wanted = bits_of(self.spec, self.me, i, 0, len(source))
            if not same(source, wanted):
                return f"input {i} of {self.spec.dtypes[i]}: {_difference(source, wanted)}"
        return None

    def harmed(self, peerd_died: bool = False) -> str | None:
        """After another outcome: what has changed, though the table in docs/concepts.md says that it does not."""
        spec = self.spec
        if spec.kind == "barrier":
            return None
        promised = promises()[spec.kind]
        assert promised.source == "unchanged", promised
        lost = peerd_died and spec.arena != "none"
        inside = spec.in_place and bool(self.sources)
        receives = spec.kind == "broadcast" and self.me != spec.root
        only_target = receives and spec.in_place
        both = spec.kind in ("all_reduce", "reduce") or (spec.kind == "broadcast" and bool(spec.quantize))
        if not (only_target or (lost and both and spec.in_place)) and (problem := self._changed()):
            return problem
        for i, (out, before) in enumerate(zip(self.outs, self._before)):
            keeps = promised.keeps_inside(receives) if inside else promised.apart == "unchanged"
            if lost and (both if inside else spec.kind == "reduce_scatter"):
                keeps = False
            if (keeps or not self._is_shared(i)) and not same(out, before):
                return f"out {i} of {spec.dtypes[i]}: {_difference(out, before)}"
        wanted = [np.full(len(error), ERROR, np.float32) for error in self.errors]
        for i, error in enumerate(self.errors if not lost else ()):
            if not same(error, wanted[i]):
                return f"error {i}: {_difference(error, wanted[i])}"
        return None


def _difference(got: np.ndarray, wanted: np.ndarray) -> str:
    places = np.flatnonzero(got != wanted)
    first = places[0] if len(places) else 0
    return f"{len(places)} of {len(wanted)} differ, the first at {first}: {got[first]}, not {wanted[first]}"


# ------------------------------------------------------------------ random ops


def lengths_of(rng: random.Random, kind: str, members: int, most: int) -> tuple[tuple[int, ...], ...]:
    rows = members if kind == "all_to_all" else 1
    return tuple(tuple(0 if rng.random() < 0.2 else rng.randint(0, most) for _ in range(members)) for _ in range(rows))


def dtypes_for(kind: str, op: str, weighted: bool) -> tuple[str, ...]:
    if kind not in REDUCING:
        return DTYPES
    if weighted:
        return FLOATS
    return (*INTEGERS, *FLOATS, *(() if op in ("avg", "prod") else ("bool",)))


def algorithms_for(spec: Spec) -> list[str]:
    if spec.kind == "barrier":
        return ["auto"]
    choices = ["auto", "mesh"]
    if spec.kind not in DIRECT and spec.order == "any":
        choices.append("ring")
    # peerd counts the gaps between the tensors of a list, too.
    if spec.lengths is None and spec.whole_bytes() * (4 if spec.several else 1) <= ONE_SHOT_BYTES_MAX:
        choices.append("oneshot")
    return choices


def random_spec(
    rng: random.Random, tag: int, kind: str, world: tuple[int, ...], late: bool = False, most: int = 1 << 20
) -> Spec:
    """An op of some members with any options.

    late: a member may start it when another one has died. So nothing may depend on the world at that time.
    most: about the bytes of the largest tensor.
    """
    ids = world
    if rng.random() < 0.4:
        some = set(rng.sample(world, rng.randint(1, len(world))))
        ids = tuple(each for each in world if each in some)
    root, to = rng.choice(ids), 0
    if kind == "send":
        root, to = rng.sample(world, 2)
        ids = tuple(each for each in world if each in (root, to))
    op = rng.choice(OPS)
    weights = None
    if kind in REDUCING and op in ("sum", "avg") and rng.random() < 0.3:
        weights = tuple(float(rng.choice((0, 1, 1, 2, 3))) for _ in ids)
    possible = dtypes_for(kind, op, weights is not None)
    # In these, a member that gives no lengths takes the number of parts from the world of its time.
    needs_lengths = late and kind in ("gather", "scatter", "all_to_all")
    several = not needs_lengths and rng.random() < 0.35
    parts = len(ids) if kind in IN_PARTS else 1
    tensors = rng.randint(1, 6) if several else 1
    dtypes = tuple(rng.choice(possible) for _ in range(tensors))
    size = rng.choice([rng.randint(0, 4), rng.randint(1, 500), int(2 ** rng.uniform(9, most.bit_length() - 1))])
    least = 1 if late and kind in IN_PARTS else 0
    counts = tuple(
        max(least, min(size if rng.random() < 0.7 else rng.randint(0, 9), most // (size_of(dtype) * parts)))
        for dtype in dtypes
    )
    lengths = None
    if kind in IN_PARTS and not several and (needs_lengths or rng.random() < 0.4):
        lengths = lengths_of(rng, kind, len(ids), counts[0])
    in_place = rng.random() < 0.5 and not (kind == "all_to_all" and lengths is not None)
    shift = rng.choice((0, 0, 1)) if in_place else 0
    spec = Spec(
        kind=kind,
        world=world,
        ids=ids,
        root=root if kind in ROOTED or kind == "send" else 0,
        to=to,
        by_rank=not late and rng.random() < 0.3,
        dtypes=dtypes,
        counts=counts,
        several=several,
        lengths=lengths,
        op=op if kind in REDUCING else "sum",
        weights=weights,
        order="rank" if kind in REDUCING and rng.random() < 0.3 else "any",
        in_place=in_place,
        shift=shift,
        arena=rng.choice(("all", "all", "none", "mixed")),
        on_fault="abort" if rng.random() < 0.1 else "retry",
        min_world=len(ids) if kind != "send" and rng.random() < 0.1 else 0,
        tag=tag,
    )
    return dataclasses.replace(spec, algorithm=rng.choice(algorithms_for(spec)))


def random_specs(seed: str, ops: int, world: Sequence[int], late: Sequence[int]) -> list[Spec]:
    """Ops of all kinds in turn. late: the tags of ops that a member may start when another one has died."""
    rng = random.Random(seed)
    kinds = list(KINDS)
    made = []
    for tag in range(ops):
        if tag % len(KINDS) == 0:
            rng.shuffle(kinds)
        made.append(random_spec(rng, tag, kinds[tag % len(KINDS)], tuple(world), late=tag in late))
    return made
