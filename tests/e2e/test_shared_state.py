"""Tests of shared state with real daemons and the Python package: what PCCL's own tests check, and what only we have.

PCCL leaves some things open or to chance. Here they are fixed: the first revision is the highest that was offered; a
tie goes to the lowest hash; a member that does not fit gets an error and is not removed; element counts have to agree.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import pytest
from trainers import until

import longhaul as lh
from longhaul.testing import LocalCluster, find_binary

T = TypeVar("T")
PATIENCE = 60
_runs = itertools.count()


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(peers=4) as started:
        yield started


class Group:
    """Members of one group, each at a peer of its own. Threads of this process make their calls."""

    def __init__(self, cluster: LocalCluster, run: str, group: int) -> None:
        self.cluster = cluster
        self.run = run
        self.group = group
        self.comms: list[lh.Comm] = []
        self._pool = ThreadPoolExecutor(max_workers=16)

    def join(self, peer: int) -> Future[lh.Comm]:
        socket = self.cluster.socket(peer % len(self.cluster.peers))
        return self._pool.submit(lh.join, self.run, self.group, socket, PATIENCE)

    def add(self) -> lh.Comm:
        """Adds a member. The others admit it at a boundary without a state."""
        joining = self.join(len(self.comms))
        size = len(self.comms) + 1

        def admit(comm: lh.Comm) -> None:
            while comm.world_size < size:
                comm.begin_step(PATIENCE)

        self.all(admit)
        self.comms.append(joining.result(PATIENCE))
        self.comms[-1].begin_step(PATIENCE)
        return self.comms[-1]

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        return self._pool.submit(call, *arguments)

    def all(self, call: Callable[..., T], *each: list[Any]) -> list[T]:
        """Calls call(comm, one of each list) at all members at once. Returns the results, or raises the first error."""
        outcomes = self.outcomes(call, *each)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes  # type: ignore[return-value]

    def outcomes(self, call: Callable[..., T], *each: list[Any]) -> list[T | BaseException]:
        started = [self._pool.submit(call, *arguments) for arguments in zip(self.comms, *each)]
        results: list[T | BaseException] = []
        for future in started:
            try:
                results.append(future.result(PATIENCE))
            except Exception as problem:
                results.append(problem)
        return results

    def sync(self, states: list[lh.State], strategies: list[str] | str = "popular") -> list[lh.SyncInfo]:
        if isinstance(strategies, str):
            strategies = [strategies] * len(states)
        return self.all(sync, states, strategies)

    def try_sync(self, states: list[lh.State], strategies: list[str] | str = "popular") -> list[Any]:
        if isinstance(strategies, str):
            strategies = [strategies] * len(states)
        return self.outcomes(sync, states, strategies)

    def close(self) -> None:
        for comm in self.comms:
            try:
                comm.leave(timeout=10)
            except lh.Error:
                pass
        self._pool.shutdown()


def status_of(cluster: LocalCluster, run: str) -> list[dict[str, Any]]:
    """The groups of the run, as `lhctl status` shows them."""
    command = [str(find_binary("lhctl")), f"--coordinator={cluster.admin}", "status", "--json", run]
    shown = subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE).stdout
    groups: list[dict[str, Any]] = json.loads(shown)["groups"]
    return groups


def sync(comm: lh.Comm, state: lh.State, strategy: str) -> lh.SyncInfo:
    return comm.sync_state(state, strategy, timeout=PATIENCE)


@contextmanager
def group_of(cluster: LocalCluster, size: int, run: str | None = None, group: int = 0) -> Iterator[Group]:
    members = Group(cluster, run or f"state-{next(_runs)}", group)
    try:
        for _ in range(size):
            members.add()
        yield members
    finally:
        members.close()


def weights(value: float = 1, count: int = 300_000) -> Any:
    return np.full(count, value, np.float32)


def state_of(value: float = 1, revision: int = 0, **options: Any) -> lh.State:
    return lh.State({"w": weights(value), "b": weights(2 * value, 7)}, revision, **options)


def assert_equal(infos: list[lh.SyncInfo], states: list[lh.State], revision: int) -> None:
    """Asserts that all hold one state: with this revision, and with the hash that this process computes itself."""
    for info, state in zip(infos, states):
        assert info.revision == state.revision == revision
        assert info.hash == infos[0].hash == state.hash == state.compute_hash()


# ------------------------------------------------------------------------------ nothing to move


@pytest.mark.parametrize("size", [1, 2, 3])
def test_identical_states_move_nothing(cluster: LocalCluster, size: int) -> None:
    with group_of(cluster, size) as group:
        states = [state_of() for _ in range(size)]
        infos = group.sync(states)
        assert_equal(infos, states, 0)
        assert [(info.bytes, info.sources) for info in infos] == [(0, 0)] * size
        assert all(info.seconds > 0 for info in infos)


def test_members_that_compute_the_same_move_nothing_for_many_steps(cluster: LocalCluster) -> None:
    with group_of(cluster, 3) as group:
        states = [state_of() for _ in range(3)]

        def train(comm: lh.Comm, state: lh.State) -> list[int]:
            moved = []
            for _ in range(10):
                with comm.step(state, PATIENCE) as step:
                    assert step.world_size == 3
                    assert step.sync is not None
                    moved.append(step.sync.bytes)
                    state.tensors["w"][:] += 1
            return moved

        assert group.all(train, states) == [[0] * 10] * 3
        assert [state.revision for state in states] == [10] * 3


def test_the_first_sync_may_be_at_any_revision_and_the_next_is_one_more(cluster: LocalCluster) -> None:
    with group_of(cluster, 2) as group:
        states = [state_of(revision=13) for _ in range(2)]
        assert_equal(group.sync(states), states, 13)
        for state in states:
            state.tensors["b"][0] = 5
            state.revision = 14
        assert_equal(group.sync(states), states, 14)


def test_the_same_revision_may_be_synced_again(cluster: LocalCluster) -> None:
    with group_of(cluster, 2) as group:
        states = [state_of(revision=3) for _ in range(2)]
        group.sync(states)
        assert_equal(group.sync(states), states, 3)


def test_a_revision_too_high_is_an_error_of_that_member_alone(cluster: LocalCluster) -> None:
    with group_of(cluster, 3) as group:
        states = [state_of() for _ in range(3)]
        group.sync(states)
        for state in states:
            state.revision = 1
        states[1].revision = 2
        outcomes = group.try_sync(states)
        assert isinstance(outcomes[1], lh.StateMismatch)
        assert "revision is 2, due is 1" in str(outcomes[1])
        assert_equal([outcomes[0], outcomes[2]], [states[0], states[2]], 1)
        # The refused member is still a member, and takes part in the next sync.
        for state in states:
            state.revision = 2
        assert_equal(group.sync(states), states, 2)


def test_a_group_that_was_empty_starts_anew_at_any_revision(cluster: LocalCluster) -> None:
    run = f"state-{next(_runs)}"
    for revision in (7, 3):
        with group_of(cluster, 2, run=run) as group:
            states = [state_of(revision=revision) for _ in range(2)]
            assert_equal(group.sync(states), states, revision)


def other_manifests() -> dict[str, dict[str, Any]]:
    w, b = weights(), weights(2, 7)
    return {
        "name": {"w": w, "bias": b},
        "order": {"b": b, "w": w},
        "dtype": {"w": w.view(np.int32), "b": b},
        "shape": {"w": w.reshape(3, -1), "b": b},
        "count": {"w": weights(1, 299_999), "b": b},
        "fewer": {"w": w},
        "more": {"w": w, "b": b, "c": b.copy()},
    }


@pytest.mark.parametrize("difference", sorted(other_manifests()))
@pytest.mark.parametrize("odd", [0, 2])
def test_other_tensors_are_an_error_of_the_odd_member_alone(cluster: LocalCluster, difference: str, odd: int) -> None:
    with group_of(cluster, 3) as group:
        states = [state_of() for _ in range(3)]
        states[odd] = lh.State(other_manifests()[difference])
        outcomes = group.try_sync(states)
        assert isinstance(outcomes[odd], lh.StateMismatch)
        assert "differ from those of 2 of 3 members" in str(outcomes[odd])
        others = [i for i in range(3) if i != odd]
        assert_equal([outcomes[i] for i in others], [states[i] for i in others], 0)


def test_flags_are_part_of_what_has_to_be_equal(cluster: LocalCluster) -> None:
    with group_of(cluster, 3) as group:
        states = [state_of(), state_of(), state_of(allow_unequal={"b"})]
        outcomes = group.try_sync(states)
        assert isinstance(outcomes[2], lh.StateMismatch)
        assert_equal(outcomes[:2], states[:2], 0)


def test_groups_are_apart_and_sync_at_the_same_time(cluster: LocalCluster) -> None:
    run = f"state-{next(_runs)}"
    with group_of(cluster, 2, run, 0) as first, group_of(cluster, 2, run, 1) as second:
        one = [state_of(1, revision=5) for _ in range(2)]
        # The second group has the same names, other contents and another revision; its second sync is refused.
        two = [state_of(2, revision=8) for _ in range(2)]
        ahead = first.submit(first.sync, one)
        assert_equal(second.sync(two), two, 8)
        assert_equal(ahead.result(PATIENCE), one, 5)
        two[0].revision = 11
        two[1].revision = 9
        refused = second.submit(second.try_sync, two)
        for state in one:
            state.revision = 6
        assert_equal(first.sync(one), one, 6)
        assert isinstance(refused.result(PATIENCE)[0], lh.StateMismatch)
        assert two[1].revision == 9


def test_a_member_that_is_late_is_waited_for(cluster: LocalCluster) -> None:
    with group_of(cluster, 2) as group:
        states = [state_of() for _ in range(2)]
        with pytest.raises(lh.DeadlineExceeded):
            group.comms[0].sync_state(states[0], timeout=0.3)
        with pytest.raises(lh.FailedPrecondition):
            group.comms[0].sync_state(state_of(), timeout=0.3)
        with pytest.raises(lh.FailedPrecondition):
            states[0].save("/dev/null")
        # The sync goes on after the timeout. The next call waits for it.
        assert_equal(group.sync(states), states, 0)


def test_a_member_that_leaves_is_not_waited_for(cluster: LocalCluster) -> None:
    with group_of(cluster, 3) as group:
        states = [state_of() for _ in range(3)]
        started = [group.submit(sync, comm, state, "popular") for comm, state in zip(group.comms[:2], states)]
        until(
            lambda: "sync waiting for 1 of 3" in status_of(cluster, group.run)[0].get("waiting_for", ""),
            "two wait for the third",
        )
        group.comms[2].leave(PATIENCE)
        assert_equal([each.result(PATIENCE) for each in started], states[:2], 0)


def test_what_may_be_unequal_is_not_compared(cluster: LocalCluster) -> None:
    with group_of(cluster, 2) as group:
        states = [
            lh.State({"w": weights(), "rng": np.full(100, rank, np.uint64)}, allow_unequal={"rng"}) for rank in range(2)
        ]
        infos = group.sync(states)
        assert_equal(infos, states, 0)
        assert infos[1].bytes == 0 or states[1].tensors["rng"][0] == 0


def test_every_dtype_shape_and_place(cluster: LocalCluster) -> None:
    torch = pytest.importorskip("torch")

    def tensors() -> dict[str, Any]:
        made: dict[str, Any] = {}
        for dtype in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
            made[dtype] = np.arange(1000, dtype=dtype)
        for dtype in ("float16", "float32", "float64", "bool"):
            made[dtype] = np.arange(1000).astype(dtype)
        made["bfloat16"] = torch.arange(1000).to(torch.bfloat16)
        made["torch bool"] = torch.arange(1000) > 3
        made["parameter"] = torch.nn.Parameter(torch.ones(3, 5))
        made["scalar"] = np.array(3.0)
        made["torch scalar"] = torch.tensor(3)
        made["empty"] = np.zeros((0, 5), np.float32)
        made["arena"] = lh.empty(500_000, "float32", peerd=cluster.socket(0))
        made["arena"][:] = 4
        made["part of the arena"] = made["arena"][3:70].view(np.uint8)
        made["torch arena"] = lh.torch.empty(1000, dtype=torch.bfloat16, peerd=cluster.socket(0)).fill_(2)
        made["with gaps"] = np.arange(1000.0)[::3]
        made["transposed"] = torch.arange(12.0).reshape(3, 4).t()
        made["odd address"] = np.arange(1001, dtype=np.uint8)[1:]
        made["\u00e4\u20ac \U0001f69a"] = np.ones(3)
        tied = torch.ones(100)
        made["tied"] = tied
        made["tied too"] = tied
        return made

    with group_of(cluster, 2) as group:
        states = [lh.State(tensors()) for _ in range(2)]
        infos = group.sync(states)
        assert_equal(infos, states, 0)
        assert [info.bytes for info in infos] == [0, 0]


# ------------------------------------------------------------------------------ strategies


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_receive_has_nobody_to_elect(cluster: LocalCluster, size: int) -> None:
    with group_of(cluster, size) as group:
        states = [state_of() for _ in range(size)]
        for outcome in group.try_sync(states, "receive"):
            assert isinstance(outcome, lh.Error)
            assert "send" in str(outcome)


@pytest.mark.parametrize("strategies", [["send", "send"], ["send", "receive"], ["receive", "send", "send"]])
def test_equal_states_satisfy_senders_and_receivers(cluster: LocalCluster, strategies: list[str]) -> None:
    with group_of(cluster, len(strategies)) as group:
        states = [state_of() for _ in strategies]
        infos = group.sync(states, strategies)
        assert_equal(infos, states, 0)
        assert [info.bytes for info in infos] == [0] * len(strategies)


def test_of_senders_that_differ_the_less_popular_is_refused(cluster: LocalCluster) -> None:
    with group_of(cluster, 3) as group:
        states = [state_of(1), state_of(2), state_of(1)]
        outcomes = group.try_sync(states, "send")
        assert isinstance(outcomes[1], lh.StateMismatch)
        assert "only sends" in str(outcomes[1])
        assert_equal([outcomes[0], outcomes[2]], [states[0], states[2]], 0)
        assert (states[1].tensors["w"] == 2).all()


@pytest.mark.parametrize("other", ["receive", "send"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_popular_is_for_all_or_for_none(cluster: LocalCluster, size: int, other: str) -> None:
    with group_of(cluster, size) as group:
        states = [state_of() for _ in range(size)]
        outcomes = group.try_sync(states, ["popular"] * (size - 1) + [other])
        assert isinstance(outcomes[-1], lh.Error)
        assert "popular" in str(outcomes[-1])
        assert_equal(outcomes[:-1], states[:-1], 0)


# ------------------------------------------------------------------------------ steps and newcomers


def test_a_newcomer_with_the_same_bits_comes_in_at_a_step(cluster: LocalCluster) -> None:
    with group_of(cluster, 2) as group:
        states = [state_of() for _ in range(2)]
        joining = group.join(2)

        def train(comm: lh.Comm, state: lh.State) -> None:
            for _ in range(1000):
                with comm.step(state, PATIENCE) as step:
                    if step.world_size == 3:
                        return

        others = [group.submit(train, comm, state) for comm, state in zip(group.comms, states)]
        newcomer = joining.result(PATIENCE)
        group.comms.append(newcomer)
        states.append(state_of())
        # The newcomer does not know the revision. That of the others is higher.
        train(newcomer, states[2])
        for each in others:
            each.result(PATIENCE)
        assert states[2].revision == states[0].revision == states[1].revision
        assert states[2].hash == states[0].hash


def test_an_exception_in_a_step_leaves_the_revision(cluster: LocalCluster) -> None:
    with group_of(cluster, 1) as group:
        state = state_of()
        with pytest.raises(KeyError), group.comms[0].step(state, PATIENCE):
            raise KeyError
        assert state.revision == 0
        with group.comms[0].step(state, PATIENCE):
            pass
        assert state.revision == 1


def test_a_state_is_saved_after_the_block_of_a_step(cluster: LocalCluster, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("safetensors")
    with group_of(cluster, 1) as group:
        state = state_of()
        with group.comms[0].step(state, PATIENCE):
            state.tensors["w"][:] += 1
            with pytest.raises(lh.FailedPrecondition, match="the revision is still 0; save after the block"):
                state.save(tmp_path / "state")
        state.save(tmp_path / "state")
        loaded = state_of()
        loaded.load(tmp_path / "state")
        assert loaded.revision == 1
        assert loaded.compute_hash() == state.compute_hash()


def test_on_change_believes_what_was_touched(cluster: LocalCluster) -> None:
    with group_of(cluster, 2) as group:
        states = [state_of(hash="on_change") for _ in range(2)]
        before = group.sync(states)[0].hash
        for state in states:
            state.tensors["w"][5] = 9
        assert group.sync(states)[0].hash == before, "no call said that the tensor changed"
        for state in states:
            state.touch("w")
        infos = group.sync(states)
        assert infos[0].hash != before
        assert_equal(infos, states, 0)


@pytest.mark.parametrize("mode", ["always", "on_change"])
@pytest.mark.parametrize("arena", [True, False], ids=["arena", "copied"])
def test_a_state_named_at_join_is_read_before(cluster: LocalCluster, mode: str, arena: bool) -> None:
    values = lh.empty(300_000, dtype="float32", peerd=cluster.socket(0)) if arena else np.empty(300_000, np.float32)
    values[:] = 1
    state = lh.State({"w": values, "b": np.zeros(3)}, hash=mode)
    before = state.compute_hash()
    with lh.join(f"named-{mode}-{arena}", 0, cluster.socket(0), PATIENCE, state=state) as comm:
        values[7] = 2  # no call says so: the bits that were hashed count
        assert comm.sync_state(state, timeout=PATIENCE).hash == before
        values[7] = 3
        state.revision += 1
        state.touch("w")
        info = comm.sync_state(state, timeout=PATIENCE)
        assert info.hash == state.compute_hash() != before
    with pytest.raises(TypeError, match="State"):
        lh.join("named", 0, cluster.socket(0), PATIENCE, state={"w": values})  # type: ignore[arg-type]


def test_a_newcomer_that_names_its_state_gets_what_differs(cluster: LocalCluster) -> None:
    run = "named-newcomer"
    with ThreadPoolExecutor() as pool, lh.join(run, 0, cluster.socket(0), PATIENCE) as first:
        old = state_of(1)
        first.sync_state(old, timeout=PATIENCE)
        new = state_of(1)
        new.tensors["w"][5] = 2
        joining = pool.submit(lh.join, run, 0, cluster.socket(1), PATIENCE, state=new)
        old.revision += 1
        while first.world_size == 1:
            first.begin_step(timeout=PATIENCE)
        with joining.result(PATIENCE) as second:
            second.begin_step(PATIENCE)  # the boundary that admitted it
            syncs = [
                pool.submit(first.sync_state, old, timeout=PATIENCE),
                pool.submit(second.sync_state, new, timeout=PATIENCE),
            ]
            infos = [sync.result(PATIENCE) for sync in syncs]
            assert infos[0].hash == infos[1].hash
            assert 0 < infos[1].bytes <= 1 << 20
            assert new.tensors["w"][5] == 1


def test_a_tensor_that_moved_is_found_again(cluster: LocalCluster) -> None:
    torch = pytest.importorskip("torch")
    with group_of(cluster, 2) as group:
        parameters = [torch.nn.Parameter(torch.ones(1000)) for _ in range(2)]
        states = [lh.State({"p": parameter}, hash="on_change") for parameter in parameters]
        before = group.sync(states)[0].hash
        for parameter in parameters:
            parameter.data = torch.full((1000,), 2.0)
        infos = group.sync(states)
        assert infos[0].hash != before
        assert_equal(infos, states, 0)


def test_a_process_syncs_more_states_than_peerd_keeps_at_a_time(cluster: LocalCluster) -> None:
    with group_of(cluster, 1) as group:
        for _ in range(40):
            group.sync([state_of()])


# ------------------------------------------------------------------------------ what differs is moved

W_BYTES = 4 * 300_000
B_BYTES = 4 * 7


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("tensors", [("w",), ("b",), ("w", "b")])
def test_the_popular_state_wins_whoever_comes_first(cluster: LocalCluster, odd: int, tensors: tuple[str, ...]) -> None:
    with group_of(cluster, 3) as group:
        states = [state_of() for _ in range(3)]
        for name in tensors:
            states[odd].tensors[name][:] = 99
        infos: list[Any] = [None] * 3
        first = group.submit(sync, group.comms[odd], states[odd], "popular")
        others = [group.submit(sync, group.comms[i], states[i], "popular") for i in range(3) if i != odd]
        infos[odd] = first.result(PATIENCE)
        for i, future in zip([i for i in range(3) if i != odd], others):
            infos[i] = future.result(PATIENCE)
        assert_equal(infos, states, 0)
        assert all((state.tensors["w"] == 1).all() and (state.tensors["b"] == 2).all() for state in states)
        dirty = sum({"w": W_BYTES, "b": B_BYTES}[name] for name in tensors)
        assert [info.bytes for info in infos] == [dirty if i == odd else 0 for i in range(3)]
        assert infos[odd].sources >= 1


def test_a_tie_goes_to_one_of_both_always_the_same(cluster: LocalCluster) -> None:
    winners = set()
    for order in ((3, 4), (4, 3)):
        with group_of(cluster, 2) as group:
            states = [state_of(value) for value in order]
            infos = group.sync(states)
            assert_equal(infos, states, 0)
            assert sorted(info.bytes for info in infos) == [0, W_BYTES + B_BYTES]
            winners.add(float(states[0].tensors["w"][0]))
    assert len(winners) == 1


def test_only_chunks_that_differ_travel(cluster: LocalCluster) -> None:
    with group_of(cluster, 2) as group:
        states = [lh.State({"large": np.zeros(10 << 20, np.uint8), "small": np.zeros(10)}) for _ in range(2)]
        group.sync(states)
        for state in states:
            state.revision = 1
        states[0].tensors["large"][(3 << 20) + 5] = 1
        infos = group.sync(states, ["send", "receive"])
        assert_equal(infos, states, 1)
        assert [info.bytes for info in infos] == [0, 1 << 20]
        assert states[1].tensors["large"][(3 << 20) + 5] == 1


def test_a_lower_revision_is_pulled_forward(cluster: LocalCluster) -> None:
    with group_of(cluster, 3) as group:
        states = [state_of(1, 4), state_of(2, 7), state_of(1, 4)]
        assert_equal(group.sync(states), states, 7)
        assert all((state.tensors["w"] == 2).all() for state in states)


def test_a_member_that_does_not_compute_is_corrected_at_each_step(cluster: LocalCluster) -> None:
    with group_of(cluster, 3) as group:
        states = [state_of() for _ in range(3)]

        def train(comm: lh.Comm, state: lh.State, lazy: bool) -> list[int]:
            moved = []
            for _ in range(5):
                with comm.step(state, PATIENCE) as step:
                    assert step.sync is not None
                    moved.append(step.sync.bytes)
                    if not lazy:
                        state.tensors["w"][:] += 1
            return moved

        moved = group.all(train, states, [False, False, True])
        assert moved == [[0] * 5, [0] * 5, [0] + [W_BYTES] * 4]


def test_a_newcomer_receives_everything_also_what_may_be_unequal(cluster: LocalCluster) -> None:
    def made(value: float) -> lh.State:
        return lh.State({"w": weights(value), "rng": np.full(100, value)}, 7, allow_unequal={"rng"})

    with group_of(cluster, 2) as group:
        states = [made(1) for _ in range(2)]
        group.sync(states)
        group.add()
        for state in states:
            state.revision = 8
        states.append(made(0))
        states[2].revision = 0
        infos = group.sync(states)
        assert_equal(infos, states, 8)
        assert (states[2].tensors["rng"] == 1).all()
        assert infos[2].bytes == W_BYTES + 800
        # It is fetched only once.
        for state, value in zip(states, (5, 6, 7)):
            state.revision = 9
            state.tensors["rng"][:] = value
        infos = group.sync(states)
        assert [info.bytes for info in infos] == [0, 0, 0]
        assert [float(state.tensors["rng"][0]) for state in states] == [5, 6, 7]


def test_a_newcomer_that_has_all_that_is_compared_keeps_the_rest(cluster: LocalCluster) -> None:
    def made(rng: float) -> lh.State:
        return lh.State({"w": weights(1), "rng": np.full(100, rng)}, 7, allow_unequal={"rng"})

    with group_of(cluster, 2) as group:
        states = [made(1), made(2)]
        group.sync(states)
        group.add()
        for state in states:
            state.revision = 8
        states.append(made(3))  # from a checkpoint; the other tensors are its own
        infos = group.sync(states)
        assert_equal(infos, states, 8)
        assert [info.bytes for info in infos] == [0, 0, 0]
        assert [float(state.tensors["rng"][0]) for state in states] == [1, 2, 3]


def test_a_receiver_takes_what_a_sender_has(cluster: LocalCluster) -> None:
    with group_of(cluster, 3) as group:
        states = [state_of(1), state_of(2), state_of(1)]
        # Two members hold the same state, but they only receive.
        infos = group.sync(states, ["receive", "send", "receive"])
        assert_equal(infos, states, 0)
        assert all((state.tensors["w"] == 2).all() for state in states)
        assert [info.bytes for info in infos] == [W_BYTES + B_BYTES, 0, W_BYTES + B_BYTES]


def test_the_first_difference_of_manifests_is_named(cluster: LocalCluster) -> None:
    with group_of(cluster, 3) as group:
        for revision, (difference, said) in enumerate(
            {
                "name": 'tensor 1 is "bias" here and "b" there',
                "order": 'tensor 0 is "b" here and "w" there',
                "dtype": 'tensor 0 "w" is of int32 here and float32 there',
                "shape": 'tensor 0 "w" has shape [3, 100000] here and [300000] there',
                "fewer": 'tensor 1 "b" is declared there only',
            }.items()
        ):
            states = [state_of(revision=revision) for _ in range(3)]
            states[1] = lh.State(other_manifests()[difference], revision)
            outcomes = group.try_sync(states)
            assert isinstance(outcomes[1], lh.StateMismatch)
            assert said in str(outcomes[1])
            assert_equal([outcomes[0], outcomes[2]], [states[0], states[2]], revision)


def test_every_kind_of_tensor_is_filled(cluster: LocalCluster) -> None:
    torch = pytest.importorskip("torch")

    def tensors(fill: int, socket: str) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for dtype in ("uint8", "int64", "float16", "float64", "bool"):
            made[dtype] = np.full(1000, fill).astype(dtype)
        made["bfloat16"] = torch.full((700_000,), fill, dtype=torch.bfloat16)
        made["parameter"] = torch.nn.Parameter(torch.full((3, 5), float(fill)))
        made["scalar"] = np.array(float(fill))
        made["empty"] = np.zeros((0, 5), np.float32)
        made["arena"] = lh.empty(500_000, "float32", peerd=socket)
        made["arena"][:] = fill
        made["with gaps"] = np.full(3000, float(fill))[::3]
        made["transposed"] = torch.full((3, 700_000), float(fill)).t()
        made["odd address"] = np.full(1001, fill, np.uint8)[1:]
        made["tied"] = torch.full((100,), float(fill))
        made["tied too"] = made["tied"]
        return made

    with group_of(cluster, 2) as group:
        states = [lh.State(tensors(fill, cluster.socket(fill))) for fill in (0, 1)]
        infos = group.sync(states, ["receive", "send"])
        assert_equal(infos, states, 0)
        for name, tensor in states[0].tensors.items():
            assert bool((torch.as_tensor(tensor) == 1).all()), name
        assert (states[0].tensors["tied"] == 1).all()


def test_progress_of_a_long_transfer_is_told() -> None:
    # The source sends at most 16 MiB per second, so the transfer takes a second.
    size = 16 << 20
    with LocalCluster(peers=2, peerd_flags=["--state-rate=16777216"]) as cluster, group_of(cluster, 2) as group:
        states = [lh.State({"w": np.full(size, rank, np.uint8)}) for rank in range(2)]
        told: list[lh.Progress] = []
        sending = group.submit(sync, group.comms[0], states[0], "send")
        info = group.comms[1].sync_state(states[1], "receive", timeout=PATIENCE, progress=told.append)
        assert_equal([sending.result(PATIENCE), info], states, 0)
        assert info.bytes == size
        assert not states[1].tensors["w"].any()
        assert told and all(0 <= each.bytes_done <= each.bytes_total == size for each in told)
        assert [each.bytes_done for each in told] == sorted(each.bytes_done for each in told)


def test_several_sources_share_the_work(cluster: LocalCluster) -> None:
    size = 64 << 20
    with group_of(cluster, 4) as group:
        before = [peer.metric("longhaul_peerd_state_bytes_sent_total") for peer in cluster.peers]
        states = [lh.State({"w": np.full(size, rank == 3, np.uint8)}) for rank in range(4)]
        infos = group.sync(states)
        assert_equal(infos, states, 0)
        assert infos[3].bytes == size
        assert infos[3].sources >= 2

        def sent() -> list[float]:
            now = [peer.metric("longhaul_peerd_state_bytes_sent_total") for peer in cluster.peers]
            return [b - a for a, b in zip(before, now)]

        # Metrics are updated every half second.
        until(lambda: sum(sent()) >= size and sent().count(0) <= 4 - infos[3].sources, "the metrics tell what was sent")
        assert sum(amount > 0 for amount in sent()) == infos[3].sources


def test_a_rate_bounds_what_a_peer_sends() -> None:
    size, rate = 8 << 20, 4_000_000
    with LocalCluster(peers=2, peerd_flags=[f"--state-rate={rate}"]) as cluster, group_of(cluster, 2) as group:
        states = [lh.State({"w": np.full(size, rank, np.uint8)}) for rank in range(2)]
        started = group.submit(sync, group.comms[0], states[0], "send")
        info = sync(group.comms[1], states[1], "receive")
        assert_equal([started.result(PATIENCE), info], states, 0)
        assert info.bytes == size
        assert info.seconds > 0.9 * size / rate


def test_a_run_goes_on_from_the_newest_checkpoint(cluster: LocalCluster, tmp_path: Any) -> None:
    run = f"state-{next(_runs)}"
    paths = [tmp_path / f"{rank}.safetensors" for rank in range(3)]

    def train(comm: lh.Comm, state: lh.State, rank: int) -> None:
        for step in range(4):
            with comm.step(state, PATIENCE):
                state.tensors["w"][:] += 1
            # Each member saves at a time of its own. The last one never saves.
            if rank < 2 and step <= 2 + rank:
                state.save(paths[rank])

    with group_of(cluster, 3, run) as group:
        group.all(train, [state_of() for _ in range(3)], [0, 1, 2])
    # All members are gone. One has a checkpoint of revision 3, one has one of revision 4, and one has none.
    with group_of(cluster, 3, run) as group:
        states = [state_of(0) for _ in range(3)]
        for state, path in zip(states, paths[:2]):
            state.load(path)
        assert [state.revision for state in states] == [3, 4, 0]
        infos = group.sync(states)
        assert_equal(infos, states, 4)
        assert all((state.tensors["w"] == 5).all() for state in states)


def test_a_source_that_dies_half_way_is_replaced() -> None:
    size = 32 << 20
    # Each of two sources sends at most 5 MiB per second, so the transfer takes three seconds. One is killed before.
    with LocalCluster(peers=3, peerd_flags=["--state-rate=5242880"]) as cluster, group_of(cluster, 3) as group:
        states = [lh.State({"w": np.full(size, rank == 2, np.uint8)}) for rank in range(3)]
        started = [group.submit(sync, comm, state, "popular") for comm, state in zip(group.comms[:2], states)]

        def strike(progress: lh.Progress) -> None:
            if progress.sources == 2 and progress.bytes_done > 0:
                cluster.kill_peer(0)

        info = group.comms[2].sync_state(states[2], timeout=PATIENCE, progress=strike)
        assert cluster.peers[0].process.poll() is not None, "the transfer ended before two sources had sent something"
        assert_equal([started[1].result(PATIENCE), info], states[1:], 0)
        assert not states[2].tensors["w"].any()
        with pytest.raises(lh.Unavailable):
            started[0].result(PATIENCE)
        assert info.bytes == size
        # Metrics are updated every half second, all at once.
        until(
            lambda: cluster.peers[2].metric("longhaul_peerd_state_bytes_received_total") >= size,
            "the metric tells what came",
        )
        assert cluster.peers[2].metric("longhaul_peerd_state_bytes_refetched_total") < 0.05 * size


def test_lhctl_status_shows_who_fetches_and_how_far_it_is() -> None:
    # The source sends at most 1 MiB per second, so the fetch can be seen for 6 seconds.
    size = 6 << 20
    with LocalCluster(peers=2, peerd_flags=["--state-rate=1048576"]) as cluster, group_of(cluster, 2) as group:

        def fetches() -> list[dict[str, Any]]:
            members = [member for each in status_of(cluster, group.run) for member in each["members"]]
            return [member["fetch"] for member in members if "fetch" in member]

        # The second member fetches, because its revision is lower.
        states = [lh.State({"w": np.full(size, i, np.uint8)}, revision=1 - i) for i in range(2)]
        syncing = [group.submit(sync, comm, state, "popular") for comm, state in zip(group.comms, states)]
        seen: list[dict[str, Any]] = []

        def shown() -> bool:
            seen.extend(fetches())
            return bool(seen) and int(seen[-1].get("bytes_done", 0)) > 0

        until(shown, "lhctl status shows the fetch")
        assert int(seen[-1]["bytes_total"]) == size
        assert seen[-1]["sources"] == 1
        assert_equal([future.result(PATIENCE) for future in syncing], states, 1)
        until(lambda: not fetches(), "lhctl status does not show a fetch that is over")


def arena_state(cluster: LocalCluster, peer: int, revision: int) -> lh.State:
    """A state whose tensor is in the arena."""
    tensor = lh.empty(6 << 20, peerd=cluster.socket(peer))
    tensor[:] = revision
    return lh.State({"w": tensor}, revision)


def test_a_peerd_that_dies_in_the_middle_of_a_fetch_leaves_the_tensors_as_they_were() -> None:
    with LocalCluster(peers=2, peerd_flags=["--state-rate=5000000"]) as cluster, group_of(cluster, 2) as group:
        whole, fetched = arena_state(cluster, 0, 1), arena_state(cluster, 1, 0)
        killed: list[lh.Progress] = []

        def kill(progress: lh.Progress) -> None:
            if progress.bytes_done > 0 and not killed:
                killed.append(progress)
                cluster.kill_peer(1)

        source = group.submit(lambda: group.comms[0].sync_state(whole, timeout=PATIENCE))
        with pytest.raises(lh.Unavailable):
            group.comms[1].sync_state(fetched, timeout=PATIENCE, progress=kill)
        assert killed[0].bytes_done < killed[0].bytes_total
        assert not fetched.tensors["w"].any()
        assert source.result(PATIENCE).revision == 1


def test_a_state_whose_peerd_died_is_what_a_group_goes_on_from() -> None:
    with LocalCluster(peers=2) as cluster, group_of(cluster, 2) as group:
        state = arena_state(cluster, 0, 1)
        with pytest.raises(lh.DeadlineExceeded):
            group.comms[0].sync_state(state, timeout=0.3)
        cluster.kill_peer(0)
        with pytest.raises(lh.Unavailable):
            group.comms[0].sync_state(state, timeout=PATIENCE)
        with lh.join("anew", 0, cluster.socket(1), PATIENCE) as comm:
            assert comm.sync_state(state, timeout=PATIENCE).revision == 1
