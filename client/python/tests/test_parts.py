"""Ops in parts belong to the world that their tensors are laid out for, and a refused call ends the op at all members.

One death hits many ops at once: of every kind, with one tensor and with lists, and with every set of members that have
made their call before the death, while the others make it afterwards.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from conftest import Members, wait_until

import longhaul as lh
from longhaul.testing import LocalCluster

PART = 6
#: What all members get after a death: docs/concepts.md, "Collectives, and what a death does to them".
REDONE = {"all_gather": True, "gather": True, "reduce_scatter": False, "scatter": False, "all_to_all": False}


@pytest.fixture
def four(cluster: LocalCluster) -> Iterator[Members]:
    """Two of the members share a peer. The one that leaves in the tests has a peer of its own."""
    members = Members([cluster.socket(0), cluster.socket(1), cluster.socket(0), cluster.socket(2)])
    yield members
    members.close()


def start(comm: lh.Comm, kind: str, listed: bool, tag: int, parts: int, root: int, **more: Any) -> lh.Work:
    """Starts an op whose tensors are laid out for `parts` members; `root` is a member id. See result_of()."""
    rank = float(comm.members.index(comm.member_id))
    whole = np.repeat(10 * rank + np.arange(parts, dtype=np.float32), PART).astype(np.float32)
    part = np.full(PART, rank, np.float32)
    is_root = comm.member_id == root
    sides: tuple[Any, Any] = {
        "all_gather": (part, np.zeros(parts * PART, np.float32)),
        "gather": (part, np.zeros(parts * PART, np.float32) if is_root else None),
        "reduce_scatter": (whole, np.zeros(PART, np.float32)),
        "scatter": (whole if is_root else None, np.zeros(PART, np.float32)),
        "all_to_all": (whole, np.zeros(parts * PART, np.float32)),
    }[kind]
    tensor, out = ([side, side.copy()] if listed and side is not None else side for side in sides)
    if kind in ("gather", "scatter"):
        more["root_member"] = root
    work: lh.Work = getattr(comm, kind)(tensor, out=out, tag=tag, async_op=True, **more)
    return work


def verdict(work: lh.Work) -> str:
    try:
        info = work.wait(60)
    except lh.Error as problem:
        return type(problem).__name__
    return f"OK with {info.world_size}"


def leave_one(four: Members) -> list[lh.Comm]:
    """The last member goes. Returns the others, which have heard of it."""
    four.comms.pop().leave(60)
    for comm in four.comms:
        wait_until(lambda comm=comm: comm.world_size == 3)  # type: ignore[misc]
    return four.comms


def test_calls_before_and_after_a_death_come_to_one_verdict(four: Members) -> None:
    root = four.comms[1].member_id
    members = range(3)
    befores = itertools.chain.from_iterable(itertools.combinations(members, n) for n in range(4))
    cases = list(itertools.product(REDONE, (False, True), (None, four.comms[0].members), befores))
    works: dict[tuple[int, int], lh.Work] = {}

    def call(tag: int, member: int) -> None:
        kind, listed, participants, _ = cases[tag]
        works[tag, member] = start(four.comms[member], kind, listed, tag, 4, root, participants=participants)

    for tag, (_, _, _, before) in enumerate(cases):
        for member in before:
            call(tag, member)
    leave_one(four)
    for tag, (_, _, _, before) in enumerate(cases):
        for member in members:
            if member not in before:
                call(tag, member)
    for tag, (kind, listed, participants, before) in enumerate(cases):
        wanted = "OK with 3" if REDONE[kind] else "Aborted"
        seen = [verdict(works[tag, member]) for member in members]
        assert seen == [wanted] * 3, f"{kind}, list {listed}, {participants}, called before by {before}"


@pytest.mark.parametrize("kind", REDONE)
def test_parts_for_fewer_members_need_a_word_or_a_boundary(four: Members, kind: str) -> None:
    root = four.comms[1].member_id
    comms = leave_one(four)
    if kind not in ("all_gather", "gather"):
        # Laid out for the four of the last boundary: the parts of the three are others.
        works = [start(comm, kind, False, 1, 4, root) for comm in comms]
        assert [verdict(work) for work in works] == ["Aborted"] * 3
    if kind != "all_to_all":
        # One member has taken the number of now. Its parts are not those of the others.
        works = [start(comm, kind, False, 2, 3 if comm is comms[1] else 4, root) for comm in comms]
        with pytest.raises(lh.Aborted, match="parts for 3 members, and 4 were there"):
            works[1].wait(60)
        assert [verdict(work) for work in works] == ["Aborted"] * 3
        if kind in ("all_gather", "reduce_scatter"):
            works = [start(comm, kind, False, 2, 3, root) for comm in comms]  # all have
            assert [verdict(work) for work in works] == ["Aborted"] * 3
    # All have looked.
    info = four.all(lambda comm: comm.all_reduce(np.ones(1, np.float32), tag=9))[0]
    for world in (3, info, comms[0].world()):
        works = [start(comm, kind, False, 3, 3, root, world=world) for comm in comms]
        assert [verdict(work) for work in works] == ["OK with 3"] * 3
    four.all(lambda comm: comm.begin_step(60))
    works = [start(comm, kind, True, 4, 3, root) for comm in comms]
    assert [verdict(work) for work in works] == ["OK with 3"] * 3
    with pytest.raises(lh.InvalidArgument, match="world is 'three'"):
        start(comms[0], kind, False, 5, 3, root, world="three")
    works = [start(comm, kind, False, 5, 3, root) for comm in comms[1:]]
    assert [verdict(work) for work in works] == ["InvalidArgument"] * 2


Call = Callable[..., Any]
GOOD: dict[str, Call] = {
    "all_reduce": lambda comm, tag: comm.all_reduce(np.ones(9, np.float32), tag=tag, async_op=True),
    "barrier": lambda comm, tag: comm.barrier(tag=tag, async_op=True),
    "broadcast": lambda comm, tag: comm.broadcast(np.ones(9, np.float32), root=0, tag=tag, async_op=True),
    "reduce": lambda comm, tag: comm.reduce(np.ones(9, np.float32), root=0, tag=tag, async_op=True),
    "large": lambda comm, tag: comm.all_reduce(np.ones(1 << 20, np.float32), tag=tag, async_op=True),
    **{kind: lambda comm, tag, kind=kind: start(comm, kind, tag % 2 == 1, tag, 3, comm.members[0]) for kind in REDONE},
}


def _refused_by_python(comm: lh.Comm, kind: str, tag: int) -> None:
    getattr(comm, "all_reduce" if kind == "large" else kind)(
        **({} if kind == "barrier" else {"tensor": "no tensor"}),
        **({"out": "no tensor"} if kind in REDONE else {}),
        **({"timeout": 1.0} if kind == "barrier" else {}),
        tag=tag,
        async_op=True,
    )


def _refused_by_peerd(comm: lh.Comm, kind: str, tag: int) -> None:
    comm.all_reduce(np.ones(9, np.float32), algorithm="oneshot", quantize="int8", op="max", tag=tag)


@pytest.mark.parametrize("refused", [_refused_by_python, _refused_by_peerd])
@pytest.mark.parametrize("first", ["refused", "called"])
def test_a_refusal_at_one_member_ends_the_op_at_all(three: Members, first: str, refused: Call) -> None:
    bad, others = three.comms[1], [three.comms[0], three.comms[2]]
    works: dict[int, list[lh.Work]] = {}

    def call() -> None:
        for tag, kind in enumerate(GOOD):
            works[tag] = [GOOD[kind](comm, tag) for comm in others]

    if first == "called":
        call()
    reasons = []
    for tag, kind in enumerate(GOOD):
        with pytest.raises((lh.InvalidArgument, TypeError)) as problem:
            refused(bad, kind, tag)
        reasons.append(str(problem.value))
    if first == "refused":
        call()
    for tag, at_others in works.items():
        for work in at_others:
            with pytest.raises(lh.InvalidArgument) as problem:
                work.wait(60)
            found = re.search(
                rf"of member m{bad.member_id} was refused there, so it ends at all: (.+)", str(problem.value)
            )
            assert found, str(problem.value)
            assert found[1] in reasons[tag], "the others hear why"
    # The next op of the name is whole.
    for tag, kind in enumerate(GOOD):
        again = [GOOD[kind](comm, tag) for comm in three.comms]
        assert [verdict(work) for work in again] == ["OK with 3"] * 3, kind


def test_calls_after_a_refused_one_are_the_next_ops(three: Members) -> None:
    for _ in range(3):
        with pytest.raises(TypeError):
            _refused_by_python(three.comms[0], "all_reduce", 0)
    good = GOOD["all_reduce"](three.comms[0], 0)

    def call(comm: lh.Comm) -> list[str]:
        return [verdict(GOOD["all_reduce"](comm, 0)) for _ in range(4)]

    others = [three._pool.submit(call, comm) for comm in three.comms[1:]]
    assert [each.result(60) for each in others] == [["InvalidArgument"] * 3 + ["OK with 3"]] * 2
    assert verdict(good) == "OK with 3"
    # Members that are refused together have nothing to wait for.
    for comm in three.comms[:2]:
        with pytest.raises(TypeError):
            _refused_by_python(comm, "all_reduce", 0)
    assert verdict(GOOD["all_reduce"](three.comms[2], 0)) == "InvalidArgument"
    for comm in three.comms:
        with pytest.raises(TypeError):
            _refused_by_python(comm, "all_reduce", 0)
    assert set(three.all(lambda comm: verdict(GOOD["all_reduce"](comm, 0)))) == {"OK with 3"}


def test_a_boundary_ends_what_was_refused_before(three: Members) -> None:
    for _ in range(3):
        with pytest.raises(TypeError):
            _refused_by_python(three.comms[0], "all_reduce", 0)
        three.all(lambda comm: comm.begin_step(60))
        assert set(three.all(lambda comm: verdict(GOOD["all_gather"](comm, 0)))) == {"OK with 3"}


def test_a_member_that_was_refused_may_leave_or_die(three: Members, cluster: LocalCluster) -> None:
    with pytest.raises(TypeError):
        _refused_by_python(three.comms[1], "all_reduce", 0)
    early = GOOD["all_reduce"](three.comms[0], 0)
    three.comms.pop(1).leave(60)  # does not wait for calls of the others
    late = GOOD["all_reduce"](three.comms[1], 0)
    seen = [verdict(early), verdict(late)]
    assert seen[0] == seen[1] and seen[0] in ("OK with 2", "InvalidArgument"), seen


def test_a_text_of_another_member_is_only_text(pair: Members) -> None:
    text = "\x1b[2J\n" + "Länge " * 100
    with pytest.raises(TypeError, match="Länge"):
        pair.comms[0].all_reduce(np.ones(1, np.float32), **{text: 1})  # type: ignore[call-overload]
    with pytest.raises(lh.InvalidArgument, match="of member .* was refused there.* Länge") as problem:
        pair.comms[1].all_reduce(np.ones(1, np.float32), timeout=60)
    assert "\x1b" not in str(problem.value) and "\n" not in str(problem.value)
    assert len(str(problem.value)) < 400


def test_a_refused_send_or_receive_ends_its_partner(three: Members) -> None:
    a, b, c = three.comms
    for wrong, right in (("send", "recv"), ("recv", "send")):
        named = {"send": "to_member", "recv": "source_member"}
        work = getattr(b, right)(np.ones(9, np.float32), **{named[right]: a.member_id}, async_op=True)
        with pytest.raises((lh.InvalidArgument, TypeError)):
            getattr(a, wrong)("no tensor", **{named[wrong]: b.member_id})
        with pytest.raises(lh.InvalidArgument, match=f"of member m{a.member_id} was refused there"):
            work.wait(60)
    # An op of others is none of theirs.
    with pytest.raises((lh.InvalidArgument, TypeError)):
        c.all_reduce("no tensor", participants=[a.member_id, c.member_id])
    works = [
        comm.all_reduce(np.ones(9, np.float32), participants=[a.member_id, b.member_id], async_op=True)
        for comm in (a, b)
    ]
    assert [verdict(work) for work in works] == ["OK with 2"] * 2


def test_a_refusal_reaches_a_member_at_the_same_peer(cluster: LocalCluster) -> None:
    members = Members([cluster.socket(0), cluster.socket(0), cluster.socket(1)])
    a, b, c = members.comms
    early = GOOD["all_reduce"](b, 1)
    for tag in (1, 2):
        with pytest.raises((lh.InvalidArgument, TypeError)):
            _refused_by_python(a, "all_reduce", tag)
    works = [early, GOOD["all_reduce"](b, 2), GOOD["all_reduce"](c, 1), GOOD["all_reduce"](c, 2)]
    assert [verdict(work) for work in works] == ["InvalidArgument"] * 4
    for tag in (1, 2):
        works = [GOOD["all_reduce"](comm, tag) for comm in members.comms]
        assert [verdict(work) for work in works] == ["OK with 3"] * 3
    members.close()


def test_ids_of_members_that_left_before_a_newcomer_came_may_stay(four: Members, cluster: LocalCluster) -> None:
    gone = four.comms[3].member_id
    leave_one(four)
    four.add(cluster.socket(2))
    ids = [*(comm.member_id for comm in four.comms), gone]
    infos = four.all(lambda comm: comm.all_reduce(np.ones(9, np.float32), participants=ids))
    assert [info.world_size for info in infos] == [4] * 4
    for comm in four.comms:
        with pytest.raises(lh.Aborted, match=f"m{gone}"):
            comm.send(np.ones(9, np.float32), to_member=gone)
        with pytest.raises(lh.Aborted, match=f"m{gone}"):
            comm.recv(np.ones(9, np.float32), source_member=gone)


# ------------------------------------------------------------------ wrong lengths

KINDS = ("all_reduce", "reduce", "broadcast", *REDONE)
COUNTS = [2, 3, 4]  # of parts of unequal lengths


def sides_of(comm: lh.Comm, kind: str, unequal: bool, root: int) -> tuple[int | None, int | None, dict[str, Any]]:
    """How many elements tensor and out of a call have, and its options. root: a rank."""
    whole, part = (sum(COUNTS), COUNTS[comm.rank]) if unequal else (3 * PART, PART)
    is_root = comm.rank == root
    more: dict[str, Any] = {"counts": COUNTS} if unequal else {}
    if kind in ("reduce", "broadcast", "gather", "scatter"):
        more["root"] = root
    if kind == "all_to_all" and unequal:
        more["out_counts"] = [part] * 3
    sides: dict[str, tuple[int | None, int | None]] = {
        "all_reduce": (PART, PART),
        "reduce": (PART, PART if is_root else None),
        "broadcast": (PART, PART),
        "all_gather": (part, whole),
        "gather": (part, whole if is_root else None),
        "reduce_scatter": (whole, part),
        "scatter": (whole if is_root else None, part),
        "all_to_all": (whole, 3 * part if unequal else whole),
    }
    return *sides[kind], more


def made(count: int | None, dtype: Any, listed: bool) -> Any:
    if count is None:
        return None
    return [np.ones(count, dtype), np.ones(count, dtype)] if listed else np.ones(count, dtype)


@pytest.mark.parametrize("hosts", [(0, 1, 2), (0, 0, 1)], ids=["apart", "shared_host"])
def test_a_wrong_out_is_told_at_once_and_to_all(cluster: LocalCluster, hosts: tuple[int, ...]) -> None:
    """Also with async_op: the call raises where the mistake is, and the others hear of it when they wait."""
    members = Members([cluster.socket(host) for host in hosts])
    bad = members.comms[1]
    tag = 0
    for kind, unequal, listed in itertools.product(KINDS, (False, True), (False, True)):
        if unequal and (listed or kind not in REDONE):
            continue
        for wrong in ("short", "long", "twice", "dtype", "list", "part"):
            if wrong == "part" and not (unequal and kind.endswith("gather")):
                continue
            if wrong == "twice" and not unequal and kind.endswith("gather"):
                continue  # so many parts, for twice the members: see below
            tag += 1
            works = {}
            for comm in members.comms:
                count, out_count, more = sides_of(comm, kind, unequal, bad.rank)
                dtype: Any = np.float32
                out_listed = listed
                if comm is bad:
                    assert out_count is not None
                    out_count += {"short": -1, "long": 1, "twice": out_count}.get(wrong, 0)
                    dtype = np.int32 if wrong == "dtype" else np.float32
                    out_listed = listed != (wrong == "list")
                    count = count and count - (wrong == "part")
                tensor, out = made(count, np.float32, listed), made(out_count, dtype, out_listed)
                call = functools.partial(getattr(comm, kind), tensor, out=out, tag=tag, async_op=True, **more)
                if comm is bad:
                    with pytest.raises(lh.InvalidArgument) as problem:
                        call()
                else:
                    works[comm] = call()
            for work in works.values():
                with pytest.raises(lh.InvalidArgument, match=f"of member m{bad.member_id} was refused there") as told:
                    work.wait(60)
                reason = str(told.value).split("it ends at all: ")[1]
                assert reason.split("(): ")[-1] in str(problem.value), f"{kind} {wrong}"
    members.close()


@pytest.mark.parametrize("hosts", [(0, 1), (0, 0)], ids=["apart", "shared_host"])
def test_a_receive_that_does_not_fit_its_send_is_told_at_both(cluster: LocalCluster, hosts: tuple[int, ...]) -> None:
    members = Members([cluster.socket(host) for host in hosts])
    a, b = members.comms
    good = np.ones(PART, np.float32)
    wrong = (good[1:].copy(), np.ones(PART + 1, np.float32), good.astype(np.int32), [good.copy()], [good[1:].copy()])
    for tag, tensor in enumerate(wrong):
        for listed in (False, True):
            for sends, to in ((True, 2 * tag), (False, 2 * tag + 1)):
                mine = [good.copy(), good.copy()] if listed else good.copy()
                theirs = [good.copy(), tensor] if listed and not isinstance(tensor, list) else tensor
                works = [
                    getattr(comm, "send" if (comm is a) == sends else "recv")(
                        mine if comm is a else theirs,
                        **{"to_member" if (comm is a) == sends else "source_member": other.member_id},
                        tag=100 * listed + to,
                        async_op=True,
                    )
                    for comm, other in ((a, b), (b, a))
                ]
                for work, other in zip(works, (b, a), strict=True):
                    with pytest.raises(lh.InvalidArgument, match=f"member m{other.member_id} offered send-recv, "):
                        work.wait(60)
    members.close()


def test_a_call_with_parts_for_more_members_than_there_are_ends_at_all(three: Members) -> None:
    """Nobody can tell whether its tensors are wrong, or of an earlier world: so it is no wrong argument."""
    for tag, kind in enumerate(("all_gather", "reduce_scatter")):
        works = [start(comm, kind, False, tag, 4 if comm is three.comms[1] else 3, 0) for comm in three.comms]
        for work in works:
            with pytest.raises(lh.Aborted, match="world 4|for 4 members|for 3 members"):
                work.wait(60)
