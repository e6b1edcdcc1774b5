"""How a program learns of the end of an op without waiting for it: callbacks, futures, asyncio, descriptors."""

from __future__ import annotations

import asyncio
import logging
import select
import threading
from typing import Any

import numpy as np
import pytest
from conftest import Members, wait_until

import longhaul as lh

PATIENCE_S = 60


def begin(comm: lh.Comm, tag: int, count: int = 1000) -> tuple[lh.Work, np.ndarray]:
    tensor = np.full(count, 1 + comm.rank, np.float32)
    work = comm.all_reduce(tensor, op="sum", tag=tag, async_op=True)
    assert isinstance(work, lh.Work)
    return work, tensor


def test_a_callback_comes_when_the_result_is_in_the_tensor(pair: Members) -> None:
    first, tensor = begin(pair.comms[0], 1)
    called = threading.Event()
    seen: list[Any] = []

    def call(work: lh.Work) -> None:
        seen.extend((work, float(tensor[0]), work.info.world_size, threading.current_thread().name))
        called.set()

    first.add_done_callback(call)
    assert not called.wait(0.05), "the other member has not started the op"
    second, _ = begin(pair.comms[1], 1)
    assert called.wait(PATIENCE_S)
    assert seen == [first, 3.0, 2, "longhaul-callbacks"]
    second.wait(PATIENCE_S)
    second.add_done_callback(seen.append)  # has ended: is called here
    assert seen[-1] is second


def test_a_bad_end_calls_back_and_a_bad_callback_is_logged(pair: Members, caplog: pytest.LogCaptureFixture) -> None:
    ended = threading.Event()

    def bad(work: lh.Work) -> None:
        work.add_done_callback(lambda work: ended.set())  # runs at once: the op has ended
        work.info  # noqa: B018  # raises

    with caplog.at_level(logging.ERROR, "longhaul"):
        work = pair.comms[0].all_reduce(np.ones(4, np.float32), tag=2, min_world=3, async_op=True)
        other = pair.comms[1].all_reduce(np.ones(4, np.float32), tag=2, min_world=3, async_op=True)
        assert isinstance(work, lh.Work) and isinstance(other, lh.Work)
        work.add_done_callback(bad)
        assert ended.wait(PATIENCE_S)
        wait_until(lambda: bool(caplog.text))
    assert "a callback of an op failed" in caplog.text and "TooFewMembers" in caplog.text
    with pytest.raises(lh.TooFewMembers):
        other.future().result(PATIENCE_S)


def test_a_future_holds_the_outcome(pair: Members) -> None:
    works = [begin(comm, 3)[0] for comm in pair.comms]
    futures = [work.future() for work in works]
    assert [future.result(PATIENCE_S) for future in futures] == [work.info for work in works]


def test_ops_are_awaited_in_a_coroutine(pair: Members) -> None:
    async def both() -> list[lh.OpInfo]:
        ticks = 0
        first, tensor = begin(pair.comms[0], 4)

        async def later() -> lh.OpInfo:
            nonlocal ticks
            for _ in range(5):
                await asyncio.sleep(0.001)
                ticks += 1
            second, _ = begin(pair.comms[1], 4)
            return await second

        infos = await asyncio.gather(_await(first), later())
        assert ticks == 5 and tensor[0] == 3
        assert await first == infos[0], "an await of an op that has ended gives the same"
        return [*infos]

    async def _await(work: lh.Work) -> lh.OpInfo:
        return await work

    infos = asyncio.run(asyncio.wait_for(both(), PATIENCE_S))
    assert infos[0].members == infos[1].members

    async def cancelled() -> None:
        first, _ = begin(pair.comms[0], 5)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_await(first), 0.01)
        second, _ = begin(pair.comms[1], 5)  # the op has gone on
        assert (await first).members == (await second).members

    asyncio.run(cancelled())


def test_wait_any_gives_the_op_that_ends(pair: Members) -> None:
    comm, other = pair.comms
    works = [begin(comm, tag)[0] for tag in (10, 11, 12)]
    with pytest.raises(lh.DeadlineExceeded, match="none of 3 ops has an outcome"):
        lh.wait_any(works, timeout=0.01)
    for tag in (11, 12, 10):
        finishing, _ = begin(other, tag)
        ended = lh.wait_any(works, timeout=PATIENCE_S)
        assert ended is next(work for work in works if work.done())
        works.remove(ended)
        finishing.wait(PATIENCE_S)
    with pytest.raises(lh.InvalidArgument, match="no ops"):
        lh.wait_any([])
    first, _ = begin(comm, 13)
    second, _ = begin(other, 13)
    first.wait(PATIENCE_S)
    assert lh.wait_any([first, second], timeout=0) is first


def test_the_descriptor_serves_an_event_loop(pair: Members) -> None:
    comm, other = pair.comms
    assert comm.fileno() == comm.fileno()
    comm.take_events()
    work, _ = begin(comm, 20)
    finishing, _ = begin(other, 20)
    while not work.done():
        assert select.select([comm], [], [], PATIENCE_S)[0] == [comm]
        comm.take_events()
    finishing.wait(PATIENCE_S)


def test_the_thread_of_callbacks_takes_no_event_from_an_event_loop(pair: Members) -> None:
    comm, other = pair.comms
    descriptor = comm.fileno()
    work, _ = begin(comm, 21)
    finishing, _ = begin(other, 21)
    for each in (work, finishing):
        each.wait(PATIENCE_S)
    comm.take_events()
    comm._client.take_for_callbacks()  # the thread was faster than the event loop
    assert select.select([descriptor], [], [], PATIENCE_S)[0] == [descriptor]


def test_the_helper_copies_what_nobody_waits_for(pair: Members) -> None:
    for comm in pair.comms:
        comm.start_helper()
    begun = [begin(comm, 30, count=100_000) for comm in pair.comms]
    deadline = threading.Event()
    for _ in range(6000):
        if all(tensor[-1] == 3 for _, tensor in begun):
            break
        deadline.wait(0.01)
    assert all((tensor == 3).all() for _, tensor in begun)
    for work, _ in begun:
        assert work.wait(PATIENCE_S).staged
