"""Trainers and peers that stop, die, or come late; worlds that shrink; groups that have nothing to do with each other."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import Members, wait_for_open_ops, wait_until
from test_process import read_until

import longhaul as lh
from longhaul.testing import LocalCluster

LARGE = 1 << 20


class Trainer:
    """A member in a process of its own: joins, says "in", then does `what` with `comm`."""

    def __init__(self, socket: str, run: str, what: str, options: str = "") -> None:
        code = f"""
import sys
import numpy as np, longhaul as lh
comm = lh.join({run!r}, {options})
print("in")
{what}
print("end")
sys.stdin.read()
"""
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", code],
            env={**os.environ, "LONGHAUL_SOCKET": socket},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def until(self, text: str) -> str:
        return read_until(self.process, text)

    def go_on(self) -> None:
        """Ends a `sys.stdin.readline()` of the trainer."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def send(self, what: signal.Signals) -> None:
        self.process.send_signal(what)
        if what == signal.SIGSTOP:
            stat = pathlib.Path(f"/proc/{self.process.pid}/stat")
            wait_until(lambda: stat.read_text().rsplit(")", 1)[1].split()[0] == "T")

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def admit(comm: lh.Comm, size: int) -> None:
    while comm.world_size < size:
        comm.begin_step(60)


def test_a_stopped_trainer_is_late_not_dead(cluster: LocalCluster) -> None:
    what = """
comm.begin_step()
print("standing")
sys.stdin.readline()
comm.begin_step()
comm.all_reduce(np.ones(9, np.float32))
"""
    with lh.join("stopped", peerd=cluster.socket(0)) as comm, Trainer(cluster.socket(1), "stopped", what) as other:
        admit(comm, 2)
        other.until("standing")
        other.send(signal.SIGSTOP)
        wait_until(lambda: comm.pending == 0)
        world = comm.world()
        with pytest.raises(lh.DeadlineExceeded):
            comm.begin_step(4)  # more than twice detect_ms
        assert comm.world() == world
        other.send(signal.SIGCONT)
        other.go_on()
        assert comm.begin_step(60).world_size == 2
        total = np.ones(9, np.float32)
        assert comm.all_reduce(total, timeout=60).world_size == 2
        assert (total == 2).all()
        other.until("end")


def test_ops_of_a_killed_trainer_finish_for_the_others_and_then_it_leaves(cluster: LocalCluster) -> None:
    what = f"""
comm.begin_step()
large = lh.empty({LARGE}, "float32")
large[:] = 3
works = [comm.all_reduce(large, tag=1, async_op=True), comm.all_reduce(np.full(9, 5, np.float32), tag=2, async_op=True)]
"""
    with lh.join("posted", peerd=cluster.socket(0)) as comm:
        with Trainer(cluster.socket(1), "posted", what) as other:
            admit(comm, 2)
            other.until("end")
            other.send(signal.SIGKILL)
            other.process.wait()
            large = comm.empty(LARGE)
            large[:] = 1
            small = np.ones(9, np.float32)
            works = [comm.all_reduce(large, tag=1, async_op=True), comm.all_reduce(small, tag=2, async_op=True)]
            infos = [work.wait(60) for work in works]
        assert [info.world_size for info in infos] == [2, 2]
        assert (large == 4).all()
        assert (small == 6).all()
        wait_until(lambda: comm.world_size == 1)
        assert comm.all_reduce(small, timeout=60).world_size == 1


def test_a_trainer_whose_peerd_is_killed_hears_of_it_at_once() -> None:
    # detect_ms is longer than all waits here, so the news cannot come from a silence.
    with LocalCluster(peers=2, coordinator_flags=["--detect_ms=60000"]) as cluster:
        members = Members([cluster.socket(0), cluster.socket(1)])
        second = members.comms[1]
        work = second.all_reduce(np.ones(LARGE, np.float32), async_op=True)
        wait_for_open_ops(cluster.peers[1:])
        with ThreadPoolExecutor(1) as pool:
            stepping = pool.submit(second.begin_step, 50)
            cluster.kill_peer(1)
            with pytest.raises(lh.Unavailable):
                stepping.result(50)
        with pytest.raises(lh.Unavailable):
            work.wait(50)
        with pytest.raises(lh.Unavailable):
            second.all_reduce(np.ones(3, np.float32))
        members.comms = []  # the first member could not leave as long as the second one counts as alive
        members.close()


def test_too_few_members_are_told_so_and_keep_their_tensors(pair: Members) -> None:
    def reduce(comm: lh.Comm) -> None:
        for count in (9, LARGE):
            tensor = np.full(count, comm.rank + 1, np.float32)
            with pytest.raises(lh.TooFewMembers, match="2 members take part, min_world asks for 3") as caught:
                comm.all_reduce(tensor, min_world=3, timeout=60)
            assert "intact" in str(caught.value)
            assert (tensor == comm.rank + 1).all()
            assert comm.all_reduce(tensor, min_world=2, timeout=60).world_size == 2

    pair.all(reduce)


def test_members_that_ask_for_different_worlds_are_told_both(pair: Members) -> None:
    def reduce(comm: lh.Comm) -> str:
        with pytest.raises(lh.InvalidArgument, match="min_world 5") as caught:
            comm.all_reduce(np.ones(9, np.float32), min_world=5 - 5 * comm.rank, timeout=60)
        return str(caught.value)

    pair.all(reduce)


def test_the_last_member_completes_alone_unless_min_world_forbids() -> None:
    with LocalCluster(peers=2) as cluster:
        members = Members([cluster.socket(0), cluster.socket(1)])
        first = members.comms[0]
        alone = first.all_reduce(np.ones(LARGE, np.float32), tag=1, async_op=True)
        never = first.all_reduce(np.ones(LARGE, np.float32), tag=2, min_world=2, async_op=True)
        wait_for_open_ops(cluster.peers[:1], 2)
        cluster.kill_peer(1)
        assert alone.wait(60).world_size == 1
        with pytest.raises(lh.TooFewMembers, match="1 members take part, min_world asks for 2"):
            never.wait(60)
        # The operator sees the fault in the histogram and in the log.
        wait_until(lambda: cluster.peers[0].metric("longhaul_peerd_fault_seconds_count") >= 2)
        assert re.search(
            r"fault over .* ops_frozen=2 .* redone=2 .* agree_ms=\d+ resume_ms=\d+", cluster.peers[0].log.read_text()
        )
        members.comms = [first]
        members.close()


def test_the_fault_policy_of_the_join_holds_for_its_ops() -> None:
    with LocalCluster(peers=2) as cluster, ThreadPoolExecutor(1) as pool:
        comm = lh.join("policy", peerd=cluster.socket(0), on_fault="abort")
        joining = pool.submit(lh.join, "policy", peerd=cluster.socket(1), on_fault="abort")
        admit(comm, 2)
        joining.result(60)
        tensor = np.ones(LARGE, np.float32)
        work = comm.all_reduce(tensor, async_op=True)
        again = comm.all_reduce(tensor.copy(), tag=1, on_fault="retry", async_op=True)
        wait_for_open_ops(cluster.peers[:1], 2)
        cluster.kill_peer(1)
        with pytest.raises(lh.Aborted, match="source is unchanged"):
            work.wait(60)
        assert (tensor == 1).all()
        assert again.wait(60).world_size == 1
        comm.leave(60)


def test_a_death_in_one_group_is_nothing_to_another() -> None:
    with LocalCluster(peers=3) as cluster, ThreadPoolExecutor(4) as pool:
        run = "apart"

        def enter(group: int, peers: list[int]) -> list[lh.Comm]:
            comms = [lh.join(run, group, cluster.socket(peers[0]))]
            for peer in peers[1:]:
                joining = pool.submit(lh.join, run, group, cluster.socket(peer))
                size = len(comms) + 1
                for done in [pool.submit(admit, comm, size) for comm in comms]:
                    done.result(60)
                comms.append(joining.result(60))
                comms[-1].begin_step(60)
            return comms

        calm, struck = enter(0, [0, 1]), enter(1, [0, 1, 2])
        epoch = calm[0].epoch
        # In flight in both groups when peer 2 dies.
        open_calm = calm[0].all_reduce(np.ones(LARGE, np.float32), async_op=True)
        open_struck = [comm.all_reduce(np.ones(LARGE, np.float32), async_op=True) for comm in struck[:2]]
        wait_for_open_ops(cluster.peers[:1], 2)
        wait_for_open_ops(cluster.peers[1:2])
        cluster.kill_peer(2)
        infos = [open_calm, calm[1].all_reduce(np.ones(LARGE, np.float32), async_op=True)]
        assert [work.wait(60).retries for work in infos] == [0, 0]
        assert [work.wait(60).world_size for work in open_struck] == [2, 2]
        for _ in range(5):
            works = [comm.all_reduce(np.ones(99, np.float32), async_op=True) for comm in calm]
            assert [(work.wait(60).retries, work.wait(60).epoch) for work in works] == [(0, epoch)] * 2
        assert calm[0].epoch == epoch


def test_a_stopped_trainer_with_a_step_deadline_is_removed_and_told_why(cluster: LocalCluster) -> None:
    what = """
try:
    while True:
        comm.begin_step()
except lh.Evicted as reason:
    print("evicted:", reason)
"""
    join = "step_deadline=1"
    with lh.join("judged", peerd=cluster.socket(0)) as comm, Trainer(cluster.socket(1), "judged", what, join) as other:
        admit(comm, 2)
        other.until("in")
        other.send(signal.SIGSTOP)
        # `comm` has no step_deadline, so it may come as late as it likes.
        while comm.world_size > 1:
            comm.begin_step(60)
        other.send(signal.SIGCONT)
        text = other.until("end")
        assert "late at the step boundary" in text, text
        assert "join again" in text


def test_a_cohort_comes_and_goes_together(cluster: LocalCluster) -> None:
    with ThreadPoolExecutor(4) as pool:

        def enter(peer: int, group: int) -> lh.Comm:
            return lh.join("hosts", group, cluster.socket(peer), cohort=(f"host-{peer}", 2))

        first = [pool.submit(enter, 0, group) for group in (0, 1)]
        comms = [each.result(60) for each in first]
        # An incomplete cohort is not admitted, however often the others pass a boundary.
        joining = [pool.submit(enter, 1, 0)]
        wait_until(lambda: comms[0].pending == 1)
        for _ in range(3):
            assert comms[0].begin_step(60).world_size == 1
        joining.append(pool.submit(enter, 1, 1))

        def both(comm: lh.Comm) -> None:
            while comm.world_size < 2:
                comm.begin_step(60)

        for done in [pool.submit(both, comm) for comm in comms]:
            done.result(60)
        others = [each.result(60) for each in joining]
        for comm in others:
            comm.begin_step(60)  # the boundary that admitted it: returns at once
        # If one member of the cohort leaves, the other one is removed.
        others[0].leave(60)
        wait_until(lambda: [comm.world_size for comm in comms] == [1, 1])
        with pytest.raises(lh.Evicted, match="host-1"):
            others[1].begin_step(60)
        for comm in comms:
            comm.leave(60)
