"""Wrong calls, time-outs and the end of a process group "longhaul". Its ranks are threads of this process."""

from __future__ import annotations

import datetime
import functools
import gc
import os
import pathlib
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import wait_until

import longhaul as lh
import longhaul.torch
from longhaul.testing import LocalCluster
from longhaul.torch import _pg_work
from longhaul.torch._pg_core import Core, Joined, assemble
from longhaul.torch._process_group import ProcessGroup

_PYTHON = pathlib.Path(__file__).parents[1]


class Ranks:
    """Process groups in the threads of one process, as torch itself does not have them."""

    def __init__(self, size: int, seconds: float = 30, **options: Any) -> None:
        self.store = torch._C._distributed_c10d.HashStore()
        self.pool = ThreadPoolExecutor(max(size, 1))
        self.size = size

        def make(rank: int) -> ProcessGroup:
            group = ProcessGroup(self.store, rank, size, seconds, "0", lh.torch.Options(**options))
            group._core.use(assemble(self.store, rank, size, seconds, "0"), None)
            return group

        self.groups = list(self.pool.map(make, range(size)))

    def all(self, call: Callable[[ProcessGroup], Any], seconds: float = 60) -> list[Any]:
        """call(group) of every rank at once. Their results, or what they raised."""
        results = []
        for future in [self.pool.submit(call, group) for group in self.groups]:
            problem = future.exception(seconds)
            results.append(future.result() if problem is None else problem)
        return results

    def close(self) -> None:
        for group in self.groups:
            group.shutdown()
        self.pool.shutdown()


@pytest.fixture
def ranks(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Ranks]]:
    monkeypatch.setenv("LONGHAUL_SOCKET", cluster.socket(0))
    monkeypatch.delenv("LONGHAUL_RUN", raising=False)
    made: list[Ranks] = []

    def make(size: int = 3, **options: Any) -> Ranks:
        made.append(Ranks(size, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def reduced(group: ProcessGroup, value: Any = None, op: Any = dist.ReduceOp.SUM, **how: Any) -> Any:
    value = torch.ones(4) if value is None else value
    options = dist.AllreduceOptions()
    options.reduceOp = op
    options.asyncOp = how.get("async_op", True)
    group.allreduce([value], options).wait(*how.get("timeout", ()))
    return value


def works_afterwards(ranks: Ranks) -> None:
    assert [value.tolist() for value in ranks.all(reduced)] == [[float(ranks.size)] * 4] * ranks.size


# ------------------------------------------------------------------ calls that differ, and wrong ones


@pytest.mark.parametrize("async_op", [True, False])
def test_calls_that_differ_end_at_all_ranks_with_both_offers_and_the_group_goes_on(ranks: Any, async_op: bool) -> None:
    three = ranks()
    dtypes = [torch.float32, torch.int64, torch.float64]
    ops = [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT]
    for call in (
        lambda group: reduced(group, torch.ones(3 + group.rank()), async_op=async_op),
        lambda group: reduced(group, torch.ones(3, dtype=dtypes[group.rank()]), async_op=async_op),
        lambda group: reduced(group, op=ops[group.rank()], async_op=async_op),
    ):
        began = time.monotonic()
        for problem in three.all(call):
            assert isinstance(problem, dist.DistBackendError)
            offers = re.search(r"member m\d offered (.*) min_world 3, this member (.*) min_world 3", str(problem))
            assert offers is not None and offers[1] != offers[2], problem
        assert time.monotonic() - began < 5  # far less on an idle machine
        works_afterwards(three)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_wrong_call_raises_there_and_at_the_other_ranks(ranks: Any) -> None:
    three = ranks()
    for wrong, kind, words in (
        (lambda: torch.ones(4).to(torch.float8_e5m2), TypeError, "float8"),
        (lambda: torch.ones(4, device="meta"), ValueError, "meta"),
        (
            lambda: torch.eye(3).to_sparse_csr(),
            TypeError,
            "csr",
        ),
    ):
        problems = three.all(lambda group, wrong=wrong: reduced(group, wrong() if group.rank() == 1 else None))
        assert isinstance(problems[1], kind) and words in str(problems[1])
        for problem in (problems[0], problems[2]):
            assert isinstance(problem, dist.DistBackendError) and words in str(problem), problem
        works_afterwards(three)


def test_shapes_that_do_not_fit_are_refused_at_the_call(ranks: Any) -> None:
    three = ranks()
    outputs = [torch.empty(3)] * 2
    for call in (
        lambda group: group.allgather([outputs], [torch.ones(3)]),
        lambda group: group.all_gather_single(torch.empty(7), torch.ones(3)),
        lambda group: group.reduce_scatter_single(torch.empty(2), torch.ones(5)),
        lambda group: group.all_to_all_single(torch.empty(4), torch.ones(4)),
        lambda group: group.all_to_all_single(torch.empty(6), torch.ones(6), [1, 2], [1, 2]),
        lambda group: group.broadcast([torch.ones(2)], 3),
        lambda group: group.send([torch.ones(2)], group.rank(), 0),
        lambda group: group.recv([torch.ones(2)], 3, 0),
        lambda group: group.recv_anysource([torch.ones(2)], 0),
        lambda group: group.allgather([[torch.empty(3), torch.empty(3), torch.empty(3)]], [torch.ones(3).int()]),
    ):
        for problem in three.all(call):
            assert isinstance(problem, (TypeError, ValueError, dist.DistBackendError)), problem
    works_afterwards(three)


def test_a_list_may_hold_a_tensor_twice_where_it_is_read(ranks: Any) -> None:
    def run(group: ProcessGroup) -> Any:
        part = torch.full((2,), float(group.rank()))
        outputs = [torch.empty(6), torch.empty(6), torch.empty(3)]
        group.all_gather_single_coalesced(outputs, [part, part, part[1:]]).wait()
        whole = torch.arange(3.0)
        sums = [torch.empty(1), torch.empty(1)]
        group.reduce_scatter_single_coalesced(sums, [whole, whole]).wait()
        return [value.tolist() for value in (*outputs, *sums)]

    expected = [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    for rank, got in enumerate(ranks().all(run)):
        assert got == [expected, expected, [0.0, 1.0, 2.0], [3.0 * rank], [3.0 * rank]]


def test_a_group_cannot_be_pickled(ranks: Any) -> None:
    one = ranks(1)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(one.groups[0])


def test_options_are_checked() -> None:
    with pytest.raises(lh.InvalidArgument, match="on_fault"):
        lh.torch.Options(on_fault="no")  # type: ignore[arg-type]
    with pytest.raises(lh.InvalidArgument, match="errors"):
        lh.torch.Options(errors="no")  # type: ignore[arg-type]


# ------------------------------------------------------------------ works


def test_the_result_of_a_dropped_work_arrives(ranks: Any) -> None:
    def run(group: ProcessGroup) -> Any:
        value = torch.ones(100_000)
        group.allreduce([value])
        wait_until(lambda: float(value[-1]) == 3)
        return float(value[0])

    assert ranks().all(run) == [3.0] * 3


def test_two_ops_on_one_tensor_come_one_after_the_other(ranks: Any) -> None:
    def run(group: ProcessGroup) -> Any:
        value = torch.full((200_000,), float(group.rank() + 1))
        works = [group.allreduce([value]), group.allreduce([value[100:200]]), group.allreduce([value])]
        for work in works:
            work.wait()
        return float(value[0]), float(value[150])

    assert ranks().all(run) == [(18.0, 54.0)] * 3


def test_a_callback_may_wait_for_the_future_of_another_op(ranks: Any) -> None:
    def run(group: ProcessGroup) -> Any:
        def again(ended: Any) -> Any:
            other = torch.ones(2)
            return (
                group.allreduce([other]).get_future().then(lambda inner: inner.value()[0] + ended.value()[0][:2]).wait()
            )

        return group.allreduce([torch.ones(4)]).get_future().then(again).wait().tolist()

    assert ranks().all(run) == [[6.0, 6.0]] * 3


def test_a_work_tells_what_it_did(ranks: Any) -> None:
    def run(group: ProcessGroup) -> Any:
        value = torch.ones(4)
        work = group.allreduce([value])
        assert work.wait()
        assert work.is_completed() and work.is_success() and work.exception() is None
        assert work.result()[0] is value
        info = group.info()
        assert info is not None and info.members == group.member_ids
        return work.get_future().value()[0].tolist()

    assert ranks().all(run) == [[3.0] * 4] * 3


def test_many_ops_in_flight_at_a_time(ranks: Any) -> None:
    def run(group: ProcessGroup) -> Any:
        values = [torch.full((3,), float(i)) for i in range(300)]
        works = [group.allreduce([value]) for value in values]
        for work in reversed(works):
            work.wait()
        return all(value.tolist() == [3.0 * i] * 3 for i, value in enumerate(values))

    assert ranks().all(run) == [True] * 3


def test_profiler_sees_ops(ranks: Any) -> None:
    one = ranks(1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        reduced(one.groups[0])
    assert any(event.key == "longhaul:all_reduce" for event in profile.key_averages())


# ------------------------------------------------------------------ time-outs and abort


@pytest.mark.parametrize("how", ["wait", "group", "sync", "future"])
def test_a_time_out_ends_the_group(ranks: Any, how: str) -> None:
    three = ranks(seconds=30 if how == "wait" else 0.3)
    come = threading.Event()

    def run(group: ProcessGroup) -> Any:
        if group.rank() == 2:
            assert come.wait(60)
        try:
            if how == "future":
                group.allreduce([torch.ones(2)]).get_future().wait()
            else:
                reduced(
                    group, async_op=how != "sync", timeout=(datetime.timedelta(seconds=0.3),) if how == "wait" else ()
                )
        except RuntimeError as problem:
            if group.rank() == 0:
                come.set()
            first = problem
        with pytest.raises(dist.DistBackendError, match="has ended"):
            reduced(group)
        assert group.errored() is not None
        return str(first)

    texts = three.all(run)
    assert any("Timed out waiting" in str(text) for text in texts[:2]), texts
    for text in texts:
        assert "Timed out waiting" in str(text) or "gave up" in str(text), texts


def test_a_rank_that_cancels_an_op_says_that_the_time_is_over() -> None:
    """Also if another thread is the first to see the end of the cancelled op."""

    class Cancelled:
        info = property(lambda self: (_ for _ in ()).throw(lh.Aborted("cancelled")))

        def cancel(self) -> None:
            flight._settle()  # the thread of the callbacks

        def wait(self, timeout: float | None = None) -> None:
            raise lh.Aborted("cancelled")

    core = Core("g", 1, lh.torch.Options())
    work: Any = Cancelled()
    joined: Any = Joined(Any, (1,), 0)  # type: ignore[arg-type]
    flight = _pg_work.Flight(core, joined, "all_reduce", work, [], [], 1)
    flight.time_out()
    assert "Timed out waiting" in str(flight.outcome)


def test_abort_wakes_a_waiter_and_ends_later_ops(ranks: Any) -> None:
    three = ranks()
    group = three.groups[0]
    futures = [
        three.pool.submit(reduced, group),
        three.pool.submit(lambda: group.allreduce([torch.ones(2)]).get_future().wait()),
    ]
    wait_until(lambda: len(group._core._flights) == 2)
    began = time.monotonic()
    group.abort()
    for future in futures:
        with pytest.raises(RuntimeError, match="was aborted"):
            future.result(60)
    assert time.monotonic() - began < 3  # 0.1 s on an idle machine
    with pytest.raises(dist.DistBackendError, match="was aborted"):
        reduced(group)
    # The others hear that it is gone.
    for other in three.groups[1:]:
        with pytest.raises(dist.DistBackendError, match=r"Connection closed by peer|gave up"):
            reduced(other)
    assert group.get_error() == torch._C._distributed_c10d.ErrorType.COMM_ERROR


def test_abort_does_not_need_the_coordinator(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalCluster(peers=1, log_dir=tmp_path) as own:
        monkeypatch.setenv("LONGHAUL_SOCKET", own.socket(0))
        three = Ranks(3)
        waiting = three.pool.submit(reduced, three.groups[0])
        wait_until(lambda: len(three.groups[0]._core._flights) == 1)
        os.kill(own.coordinator_pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            three.groups[0].abort()
            with pytest.raises(dist.DistBackendError, match="was aborted"):
                waiting.result(60)
            assert time.monotonic() - began < 3
        finally:
            os.kill(own.coordinator_pid, signal.SIGCONT)
        three.close()


def test_monitored_barrier_names_who_has_not_come(ranks: Any) -> None:
    three = ranks()
    come = threading.Event()

    def run(group: ProcessGroup) -> Any:
        group.monitored_barrier(datetime.timedelta(seconds=30))
        if group.rank() == 2:
            assert come.wait(60)
            return None
        try:
            group.monitored_barrier(datetime.timedelta(seconds=0.3), wait_all_ranks=True)
        finally:
            come.set()

    problems = three.all(run)
    assert "Rank 2 failed to pass monitoredBarrier" in str(problems[0]), problems
    assert isinstance(problems[1], dist.DistBackendError)


# ------------------------------------------------------------------ how groups begin and end


def test_a_dropped_group_leaves(ranks: Any, cluster: LocalCluster) -> None:
    three = ranks()
    comm = three.groups[0]._core.joined.comm
    assert len(comm.members) == 3
    dropped = three.groups.pop()
    three.size = 2
    del dropped
    gc.collect()
    wait_until(lambda: len(comm.members) == 2)


def test_groups_that_come_and_go_leave_no_thread_and_no_member(ranks: Any, cluster: LocalCluster) -> None:
    before = {thread for thread in threading.enumerate() if thread.name.startswith("longhaul")}
    for _ in range(5):
        two = ranks(2)
        two.all(lambda group: group.allreduce([torch.ones(2)]).get_future().wait())
        two.close()

    def left() -> set[str]:
        return {thread.name for thread in threading.enumerate() if thread.name.startswith("longhaul")} - {
            thread.name for thread in before
        }

    wait_until(lambda: not left() & {"longhaul-torch", "longhaul-torch-callback", "longhaul-torch-leave"})


def test_a_store_may_be_used_again(ranks: Any) -> None:
    """A rank that is early must not find the run of the group before."""
    three = ranks()
    first = three.groups[0]._core.joined.comm.run
    for group in three.groups:
        group.shutdown()
    joined = list(three.pool.map(lambda rank: assemble(three.store, rank, 3, 30, "0"), range(3)))
    assert {each.comm.run for each in joined} != {first}
    assert [each.rank for each in joined] == [0, 1, 2]
    for each in joined:
        each.leave(wait=True)


def test_a_peer_that_never_comes_is_a_time_out(ranks: Any) -> None:
    ranks(1)  # sets the socket
    store = torch._C._distributed_c10d.HashStore()
    with pytest.raises(dist.DistBackendError, match="Timed out waiting for 2 ranks"):
        assemble(store, 0, 2, 0.5, "alone")


def test_tags_of_messages_do_not_move_those_of_collectives() -> None:
    core = Core("g", 1, lh.torch.Options())
    core.ids = (1, 2, 3)
    other = Core("g", 1, lh.torch.Options())
    tags = {core.tag_between(0, 1, 0), core.tag_between(0, 1, 0), core.tag_between(1, 0, 0), core.tag_between(0, 1, 5)}
    assert len(tags) == 4
    assert other.tag_between(0, 1, 0) in tags
    assert not any(tag >> 64 for tag in tags)


def test_a_program_needs_no_import_of_longhaul(cluster: LocalCluster, tmp_path: pathlib.Path) -> None:
    """With the entry points of the package, torch knows the name. `import torch` does not import longhaul."""
    metadata = tmp_path / "longhaul-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: longhaul\nVersion: 0\n")
    lines = (_PYTHON.parent / "pyproject.toml").read_text().splitlines()
    points = []
    for group in ("torch.backends", "torch.distributed.backends"):
        at = lines.index(f'[project.entry-points."{group}"]')
        points += [f"[{group}]", lines[at + 1].replace('"', "")]
    (metadata / "entry_points.txt").write_text("\n".join(points))
    program = """
import sys, torch, torch.distributed as dist
assert not any(name == "longhaul" or name.startswith("longhaul.") for name in sys.modules)
assert dist.is_backend_available("longhaul")
dist.init_process_group("longhaul", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
dist.barrier()
print(dist.get_backend())
dist.destroy_process_group()
"""
    environment = {**os.environ, "PYTHONPATH": f"{_PYTHON}:{tmp_path}", "LONGHAUL_SOCKET": cluster.socket(0)}
    command = [sys.executable, "-c", program, str(tmp_path / "store")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "longhaul"


@pytest.mark.parametrize("hook", [False, True])
def test_ddp_with_retry_and_without_the_hook_warns_once(ranks: Any, tmp_path: pathlib.Path, hook: bool) -> None:
    ranks(0)  # sets the socket
    dist.init_process_group(
        "longhaul",
        init_method=f"file://{tmp_path}/store",
        rank=0,
        world_size=1,
        pg_options=lh.torch.Options(on_fault="retry"),
    )
    try:
        dist.all_reduce(torch.ones(1))  # says nothing about DDP
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
        if hook:
            model.register_comm_hook(None, lh.torch.ddp_average_hook)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(2):
                model(torch.ones(1, 3)).sum().backward()
        found = [each for each in told if "ddp_average_hook" in str(each.message)]
        assert len(found) == (0 if hook else 1), found
    finally:
        dist.destroy_process_group()


def test_the_pool_grows_while_its_threads_wait_and_shrinks_afterwards() -> None:
    pool = _pg_work.Pool()
    gates = [threading.Event() for _ in range(4)]

    def pass_on(i: int) -> None:
        assert gates[i + 1].wait(60)
        gates[i].set()

    for i in range(3):
        pool.submit(functools.partial(pass_on, i))
    pool.submit(gates[3].set)
    assert gates[0].wait(60)
    wait_until(lambda: not any(thread.name == "longhaul-torch-callback" for thread in threading.enumerate()))
