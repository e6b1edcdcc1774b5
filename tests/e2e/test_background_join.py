"""Tests of join_mode="background": a newcomer gets the shared state while the other members train and do not wait."""

from __future__ import annotations

import itertools
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from trainers import trainers_of

import longhaul as lh
from longhaul.testing import LocalCluster, find_binary

PATIENCE = 60
COUNT = 3 << 20  # 12 MiB of float32
_runs = itertools.count()


@pytest.fixture(scope="module", params=[(), ("--keep-state=200000000",)], ids=["tensors", "keep"])
def cluster(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    with LocalCluster(peers=3, peerd_flags=request.param) as started:
        yield started


class Model:
    """The model of one trainer: a state. Every step adds the result of all_reduce() to all its elements."""

    def __init__(self, cluster: LocalCluster, peer: int, fill: float, arena: bool = True) -> None:
        self.elements = 4 if arena else 1 << 18  # small ops and large ops use different algorithms
        self.weights = (
            lh.empty(COUNT, dtype="float32", peerd=cluster.socket(peer)) if arena else np.empty(COUNT, np.float32)
        )
        self.weights[:] = fill
        self.state = lh.State({"weights": self.weights, "rng": np.full(1, fill, np.float64)}, allow_unequal={"rng"})
        self.background_seen: list[bool] = []
        self.counted: list[int] = []
        self.averages: list[float] = []

    def step(self, comm: lh.Comm, take: float | None, newcomer: bool) -> bool:
        """Makes one step. Returns whether the newcomer's input was in its result."""
        with comm.step(self.state, PATIENCE) as step:
            self.background_seen.append(step.background)
            assert step.sync is not None and step.sync.background == step.background
            assert self.state.held == step.background
            # No result may show the input of a member in the background.
            gradient = np.full(self.elements, 1000.0 if step.background else 1.0, np.float32)
            if not step.background:
                gradient[3] = newcomer
            info = comm.all_reduce(gradient, op="avg", timeout=PATIENCE)
            self.counted.append(info.world_size)
            self.averages += set(map(float, gradient[:3])) | set(map(float, gradient[4:]))
            if (take is not None or not step.background) and step.take(take or 0.0):
                assert not self.state.held
                self.weights += gradient[0]
        return bool(gradient[3])


class Run:
    """Members of one group, each in a thread. They stop three steps after the newcomer begins to contribute."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.name = f"background-{next(_runs)}"
        self.pool = ThreadPoolExecutor(max_workers=8)
        self.steps = threading.Semaphore(0)

    def veteran(self, peer: int, model: Model) -> Future[str]:
        return self.pool.submit(self._train, peer, model, None, False)

    def newcomer(self, peer: int, model: Model, take: float | None) -> Future[str]:
        return self.pool.submit(self._train, peer, model, take, True)

    def _train(self, peer: int, model: Model, take: float | None, newcomer: bool) -> str:
        mode: Any = "background" if newcomer else "blocking"
        with lh.join(self.name, 0, self.cluster.socket(peer), PATIENCE, join_mode=mode) as comm:
            together = 0
            while together < 3:
                together += model.step(comm, take, newcomer)
                self.steps.release()
            # One more boundary, whose sync compares the states.
            info = comm.sync_state(model.state, timeout=PATIENCE)
            assert not comm.background and not info.background
            assert info.hash == model.state.compute_hash()
            return info.hash

    def wait_for_steps(self, count: int) -> None:
        for _ in range(count):
            assert self.steps.acquire(timeout=PATIENCE)


@pytest.mark.parametrize("arena", [True, False], ids=["arena", "numpy"])
@pytest.mark.parametrize("take", [PATIENCE / 2, None], ids=["takes", "waits"])
def test_a_joiner_in_the_background_ends_equal_and_contributes(
    cluster: LocalCluster, take: float | None, arena: bool, request: pytest.FixtureRequest
) -> None:
    run = Run(cluster)
    models = [Model(cluster, peer, fill, arena) for peer, fill in enumerate((1, 1, -7))]
    veterans = [run.veteran(peer, models[peer]) for peer in range(2)]
    run.wait_for_steps(6)
    joiner = run.newcomer(2, models[2], take)
    hashes = [future.result(PATIENCE) for future in [*veterans, joiner]]
    assert len(set(hashes)) == 1
    assert len({float(model.weights[0]) for model in models}) == 1
    # The newcomer's first steps were in the background; then it contributed in all further steps.
    seen = models[2].background_seen
    assert seen[0] and not seen[-1] and seen == sorted(seen, reverse=True)
    # Every average is over the members that contributed. No input of the newcomer's background steps is in it.
    for model in models:
        assert set(model.averages) == {1.0}
    assert models[2].counted[: seen.index(False)] == [2] * seen.index(False)
    assert models[2].counted[seen.index(False) :] == [3] * (len(seen) - seen.index(False))
    # The tensor that may be unequal was fetched once.
    assert float(models[2].state.tensors["rng"][0]) == 1.0
    if take is not None and "keep" in request.node.name:
        # The newcomer trained on from the state that it took, as the others did. So a few background steps were enough.
        assert seen.index(False) <= 3


def test_the_others_step_on_while_the_joiner_stands_still(
    cluster: LocalCluster, request: pytest.FixtureRequest
) -> None:
    """The joiner's trainer does not use the state that it gets. The others wait for its calls, and for nothing else."""
    run = Run(cluster)
    models = [Model(cluster, peer, fill) for peer, fill in enumerate((1, 1, 0))]
    veterans = [run.veteran(peer, models[peer]) for peer in range(2)]
    run.wait_for_steps(4)
    with lh.join(run.name, 0, cluster.socket(2), PATIENCE, join_mode="background") as comm:
        assert comm.background and comm.world_size == 3
        comm.begin_step(PATIENCE)  # the boundary that admitted it
        info = comm.sync_state(models[2].state, timeout=PATIENCE)
        assert info.background and models[2].state.held
        with pytest.raises(lh.FailedPrecondition, match="take"):
            models[2].state.save("nowhere")
        # The others are within their step. They wait only for the joiner to start their op.
        gradient = np.full(4, 1000.0, np.float32)
        assert comm.all_reduce(gradient, op="avg", timeout=PATIENCE).world_size == 2
        # Without --keep-state the others may have changed the state before all of it was here.
        taken = comm.take_state(models[2].state, PATIENCE)
        assert bool(models[2].state.held) != taken
        if taken:
            models[2].weights += gradient[0]
            models[2].state.revision += 1
        else:
            assert "keep" not in request.node.name
        together = 0
        while together < 3:
            together += models[2].step(comm, PATIENCE / 2, True)
        mine = comm.sync_state(models[2].state, timeout=PATIENCE).hash
        assert {future.result(PATIENCE) for future in veterans} == {mine}


def test_a_joiner_that_is_killed_is_removed_and_nobody_else_notices(cluster: LocalCluster) -> None:
    run = Run(cluster)
    models = [Model(cluster, peer, 1) for peer in range(2)]
    veterans = [run.veteran(peer, models[peer]) for peer in range(2)]
    run.wait_for_steps(4)
    with ExitStack() as stack:
        (victim,) = trainers_of(stack, 1)
        victim.do("join", socket=cluster.socket(2), run=run.name, mode="background")
        assert victim.do("hand_over", count=COUNT)["background"]
        victim.kill()
    run.wait_for_steps(4)
    # The next newcomer is served all the same.
    models.append(Model(cluster, 2, 3))
    joiner = run.newcomer(2, models[2], PATIENCE / 2)
    assert len({future.result(PATIENCE) for future in [*veterans, joiner]}) == 1


def test_what_was_being_fetched_is_nobodys_when_its_member_was_evicted(cluster: LocalCluster) -> None:
    run = Run(cluster)
    models = [Model(cluster, peer, 1) for peer in range(2)]
    veterans = [run.veteran(peer, models[peer]) for peer in range(2)]
    run.wait_for_steps(4)
    models.append(Model(cluster, 2, 3))
    state = models[2].state
    comm = lh.join(run.name, 0, cluster.socket(2), PATIENCE, join_mode="background")
    comm.begin_step(PATIENCE)  # the boundary that admitted it
    assert comm.sync_state(state, timeout=PATIENCE).background
    assert state.held
    brought = state.compute_hash()
    member = f"{run.name}/0/m{comm.member_id}"
    command = [str(find_binary("lhctl")), f"--coordinator={cluster.admin}", "evict", member]
    subprocess.run(command, timeout=PATIENCE, check=True)
    with pytest.raises(lh.Evicted):
        comm.all_reduce(np.ones(4, np.float32), tag=7, timeout=PATIENCE)
    # While the transfer is stopped the state is still held.
    deadline = time.monotonic() + PATIENCE

    def held() -> bool:
        return state.held

    while held():
        assert time.monotonic() < deadline
        with pytest.raises(lh.Evicted):
            comm.sync_state(state, timeout=PATIENCE)
    # The tensors are unchanged, so a group of their own can use them.
    assert state.compute_hash() == brought
    with lh.join(f"background-{next(_runs)}", 0, cluster.socket(2), PATIENCE) as alone:
        assert alone.sync_state(state, timeout=PATIENCE).hash == brought
    # Joined again, the trainer gets the state of the others.
    joiner = run.newcomer(2, models[2], None)
    assert len({future.result(PATIENCE) for future in [*veterans, joiner]}) == 1


def test_a_source_that_dies_is_replaced() -> None:
    with LocalCluster(peers=4) as cluster:
        run = Run(cluster)
        models = [Model(cluster, peer, 1) for peer in range(4)]
        # The first member dies with its host. The other two and the joiner are left.
        doomed = run.veteran(0, models[0])
        others = [run.veteran(peer, models[peer]) for peer in (1, 2)]
        run.wait_for_steps(9)
        joiner = run.newcomer(3, models[3], PATIENCE / 2)
        run.wait_for_steps(1)
        cluster.kill_peer(0)
        with pytest.raises(lh.Error):
            doomed.result(PATIENCE)
        assert len({future.result(PATIENCE) for future in [*others, joiner]}) == 1


def test_who_joins_an_empty_group_in_the_background_contributes_at_once(cluster: LocalCluster) -> None:
    with lh.join(f"background-{next(_runs)}", 0, cluster.socket(0), PATIENCE, join_mode="background") as comm:
        assert not comm.background
        model = Model(cluster, 0, 1)
        with comm.step(model.state, PATIENCE) as step:
            assert not step.background and step.take()


def test_a_state_of_other_tensors_is_refused_with_the_first_difference(cluster: LocalCluster) -> None:
    run = Run(cluster)
    models = [Model(cluster, peer, 1) for peer in range(2)]
    veterans = [run.veteran(peer, models[peer]) for peer in range(2)]
    run.wait_for_steps(4)
    comm = lh.join(run.name, 0, cluster.socket(2), PATIENCE, join_mode="background")
    comm.begin_step(PATIENCE)  # the boundary that admitted it
    odd = lh.State({"weights": np.zeros(3, np.float32)})
    deadline = time.monotonic() + PATIENCE
    with pytest.raises(lh.StateMismatch, match="agreed on"):
        # A call hands the state over. The first call may come before the peer knows which state the others have.
        while time.monotonic() < deadline:
            comm.sync_state(odd, timeout=PATIENCE)
    comm.leave(PATIENCE)
    models.append(Model(cluster, 2, 3))
    joiner = run.newcomer(2, models[2], PATIENCE / 2)
    assert len({future.result(PATIENCE) for future in [*veterans, joiner]}) == 1


def test_a_wrong_mode_is_named(cluster: LocalCluster) -> None:
    with pytest.raises(lh.InvalidArgument, match="join_mode is 'fast'; give one of blocking, background"):
        lh.join(f"background-{next(_runs)}", 0, cluster.socket(0), PATIENCE, join_mode="fast")  # type: ignore[arg-type]
