"""Process groups "longhaul" whose members are chosen from outside, again and again. The processes are threads here."""

from __future__ import annotations

import datetime
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import wait_until

import longhaul as lh
import longhaul.torch
from longhaul.testing import LocalCluster
from longhaul.torch._process_group import ProcessGroup

_SECOND = datetime.timedelta(seconds=1)


class Loose:
    """Groups without members, each with a thread."""

    def __init__(self, count: int, seconds: float = 30) -> None:
        self.pool = ThreadPoolExecutor(8)
        self.groups = [
            ProcessGroup(None, i, count, seconds, "0", lh.torch.Options(reconfigure=True)) for i in range(count)
        ]
        self._uuid = 0

    def handles(self, which: Sequence[int]) -> list[str]:
        return [self.groups[i].get_reconfigure_handle() for i in which]

    def all(self, which: Sequence[int], call: Callable[[ProcessGroup], Any]) -> list[Any]:
        """What call(group) returns for these groups, at once, or the exceptions."""
        futures = [self.pool.submit(call, self.groups[i]) for i in which]
        return [future.exception(60) or future.result() for future in futures]

    def become(self, *which: int, uuid: Any = None, **options: Any) -> list[Any]:
        """These become one group, in this order. Returns their sums of 2 ** (their number)."""
        self._uuid += 1
        uuid = self._uuid if uuid is None else uuid
        handles = self.handles(which)

        def run(group: ProcessGroup) -> Any:
            group.reconfigure(uuid, options.get("handles", handles), options.get("timeout")).wait()
            values = torch.full((3,), 2.0 ** self.groups.index(group))
            group.allreduce([values]).wait()
            return group.rank(), group.size(), float(values[0])

        return self.all(which, run)

    def kill(self, which: int) -> None:
        """As if the process had died: peerd sees that its member is gone."""
        self.groups[which].abort()

    def close(self) -> None:
        for group in self.groups:
            group.shutdown()
        self.pool.shutdown()


@pytest.fixture
def loose(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Loose]]:
    monkeypatch.setenv("LONGHAUL_SOCKET", cluster.socket(0))
    made: list[Loose] = []

    def make(count: int = 3, **options: Any) -> Loose:
        made.append(Loose(count, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def told(*numbers: int) -> list[tuple[int, int, float]]:
    total = float(sum(2**number for number in numbers))
    return [(rank, len(numbers), total) for rank in range(len(numbers))]


def test_members_come_and_go_without_a_restart(loose: Any) -> None:
    three = loose()
    assert three.become(0, 1, 2) == told(0, 1, 2)
    assert three.become(0, 1, 2) == told(0, 1, 2)  # the same again
    assert three.become(0, 1) == told(0, 1)  # without the last
    assert three.become(0, 1, 2) == told(0, 1, 2)
    assert three.become(0, 2) == told(0, 2)  # without the one in the middle
    assert three.become(1) == told(1)
    assert three.become(2, 1, 0) == told(2, 1, 0)  # the order of the handles is that of the ranks


def test_a_group_splits_and_merges(loose: Any) -> None:
    four = loose(4)
    assert four.become(0, 1, 2, 3) == told(0, 1, 2, 3)
    results: list[Any] = [None, None]

    def half(i: int, *which: int) -> None:
        results[i] = four.become(*which, uuid=f"half {i}")

    halves = [threading.Thread(target=half, args=(0, 0, 1)), threading.Thread(target=half, args=(1, 2, 3))]
    for each in halves:
        each.start()
    for each in halves:
        each.join()
    assert results == [told(0, 1), told(2, 3)]
    assert four.become(0, 1, 2, 3) == told(0, 1, 2, 3)


def test_a_set_of_handles_is_sorted(loose: Any) -> None:
    three = loose()
    results = three.become(0, 1, 2, handles=set(three.handles([0, 1, 2])))
    order = sorted(three.handles([0, 1, 2]))
    assert results == [(order.index(handle), 3, 7.0) for handle in three.handles([0, 1, 2])]


def test_options_of_torch_hold_all_arguments(loose: Any) -> None:
    one = loose(1)

    class Options:
        uuid = 5
        handles = one.handles([0])
        timeout = _SECOND
        hints = None

    assert one.groups[0].supports_reconfigure
    assert one.groups[0].reconfigure(Options()).wait()
    assert one.groups[0].size() == 1


def test_a_late_process_is_waited_for(loose: Any) -> None:
    two = loose(2)
    handles = two.handles([0, 1])
    early = two.pool.submit(two.groups[0].reconfigure, 1, handles)
    comm = two.groups[0]
    wait_until(lambda: comm._core._ended is not None and "failed" in comm._core._ended)  # it has begun
    assert not early.done()
    two.groups[1].reconfigure(1, handles)
    early.result(60)
    assert two.groups[0].size() == 2


def test_wrong_calls_are_named(loose: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    two = loose(2)
    group = two.groups[0]
    assert (group.rank(), group.size()) == (0, 2)
    with pytest.raises(dist.DistBackendError, match=r"call reconfigure\(\) first"):
        group.allreduce([torch.ones(1)])
    assert two.become(0, 1, uuid=1) == told(0, 1)
    with pytest.raises(ValueError, match="already used"):
        group.reconfigure(1, two.handles([0]))
    with pytest.raises(ValueError, match="this one"):
        group.reconfigure(2, two.handles([1]))
    with pytest.raises(ValueError, match="once"):
        group.reconfigure(3, two.handles([0, 0]))
    # None of these has done anything.
    assert two.all([0, 1], lambda group: float(_sum(group))) == [2.0, 2.0]
    fixed = ProcessGroup(None, 0, 1, 30, "0", lh.torch.Options())
    with pytest.raises(lh.InvalidArgument, match="reconfigure=True"):
        fixed.reconfigure(1, [fixed.get_reconfigure_handle()])


def _sum(group: ProcessGroup) -> torch.Tensor:
    values = torch.ones(1)
    group.allreduce([values]).wait()
    return values


def test_a_time_out_names_who_is_missing_and_another_try_passes(loose: Any) -> None:
    three = loose()
    assert three.become(0, 1, 2) == told(0, 1, 2)
    handles = three.handles([0, 1, 2])
    # The first gives up before the second.
    problems = three.all([0, 1], lambda group: group.reconfigure("a", handles, (1 + 2 * group.rank()) * _SECOND / 2))
    for problem in problems:
        assert isinstance(problem, dist.DistBackendError)
        assert "Timed out waiting" in str(problem) and str(problem).endswith(f"missing: {handles[2]}"), problem
    with pytest.raises(dist.DistBackendError, match="has no members"):
        _sum(three.groups[0])
    assert three.become(0, 1) == told(0, 1)


def test_after_abort_and_with_ops_in_flight(loose: Any) -> None:
    three = loose()
    assert three.become(0, 1, 2) == told(0, 1, 2)
    works = [three.groups[i].allreduce([torch.ones(5)]) for i in (0, 1)]  # the third never comes
    part = three.groups[0].subgroup([0, 1], None, "part", 30, None)
    three.groups[1].abort()
    assert three.become(0, 1) == told(0, 1)
    for work in works:
        with pytest.raises(dist.DistBackendError, match="was reconfigured|was aborted"):
            work.wait()
    with pytest.raises(dist.DistBackendError, match="was reconfigured"):
        _sum(part)
    assert three.all([0, 1], lambda group: float(_sum(group))) == [2.0, 2.0]


def test_after_a_death_in_an_op(loose: Any) -> None:
    three = loose()
    assert three.become(0, 1, 2) == told(0, 1, 2)
    waiting = [three.pool.submit(_sum, three.groups[i]) for i in (0, 1)]
    wait_until(lambda: all(three.groups[i]._core._flights for i in (0, 1)))
    three.kill(2)
    for each in waiting:
        with pytest.raises(dist.DistBackendError, match="Connection closed by peer|gave up"):
            each.result(60)
    assert three.become(0, 1) == told(0, 1)
    assert three.become(0, 1, 2) == told(0, 1, 2)


def test_forty_rounds_leave_no_thread_and_no_member(loose: Any) -> None:
    three = loose()
    times = []
    for _ in range(40):
        began = time.monotonic()
        assert three.become(0, 1, 2) == told(0, 1, 2)
        times.append(time.monotonic() - began)
    assert statistics.median(times) < 2, times  # 15 ms on an idle machine
    wait_until(lambda: not any(thread.name == "longhaul-torch-leave" for thread in threading.enumerate()))
    joined = three.groups[0]._core.joined
    assert len(joined.comm.members) == 3


def test_init_process_group_with_reconfigure(loose: Any, tmp_path: Any) -> None:
    loose(0)  # sets the socket
    import torch.distributed.distributed_c10d as c10d

    assert not dist.is_initialized()
    dist.init_process_group(
        "longhaul",
        init_method=f"file://{tmp_path}/store",
        rank=0,
        world_size=1,
        pg_options=lh.torch.Options(reconfigure=True),
    )
    try:
        group: Any = c10d._get_default_group()
        group.reconfigure(1, [group.get_reconfigure_handle()])
        values = torch.ones(2)
        dist.all_reduce(values)
        assert (dist.get_rank(), dist.get_world_size(), values.tolist()) == (0, 1, [1.0, 1.0])
        group.reconfigure(2, [group.get_reconfigure_handle()])
        dist.all_reduce(values)
    finally:
        dist.destroy_process_group()
