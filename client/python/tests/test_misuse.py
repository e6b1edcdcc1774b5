"""Misuse: each row of the table in docs/errors.md is a test here. Each gets a named error at once; nothing crashes or hangs."""

from __future__ import annotations

import functools
import mmap
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from conftest import Members, wait_until
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import longhaul as lh
from longhaul.testing import LocalCluster

PAGE = pathlib.Path(__file__).resolve().parents[3] / "docs" / "errors.md"

# How long an error may take. Most come before anything is sent; on a loaded machine even that takes a while.
SOON = 10.0


@pytest.fixture(scope="module")
def comm(cluster: LocalCluster) -> Iterator[lh.Comm]:
    with lh.join("misuse", peerd=cluster.socket(0)) as made:
        yield made


def refused(kind: type[lh.Error], text: str, call: Callable[[], object]) -> None:
    begun = time.monotonic()
    with pytest.raises(kind, match=text):
        call()
    assert time.monotonic() - begun < SOON


def test_the_table_names_each_test_of_this_file() -> None:
    named = re.findall(r"`(test_\w+)`", PAGE.read_text())
    own = {name for name in globals() if name.startswith("test_")} - {"test_the_table_names_each_test_of_this_file"}
    assert sorted(set(named)) == sorted(own)


# ------------------------------------------------------------------ tensors


def test_a_dtensor(comm: lh.Comm) -> None:
    distributed.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    try:
        whole = distribute_tensor(torch.ones(8), init_device_mesh("cpu", (1,)), [Shard(0)])
        for tensor in (whole, [torch.ones(8), whole]):
            refused(lh.InvalidArgument, r"is a DTensor.*to_local\(\)", functools.partial(comm.all_reduce, tensor))
        refused(lh.InvalidArgument, r"is a DTensor.*to_local\(\)", lambda: lh.State({"whole": whole}))
        comm.all_reduce(whole.to_local(), timeout=60)
    finally:
        distributed.destroy_process_group()


def test_a_tensor_that_requires_grad_is_written(comm: lh.Comm) -> None:
    leaf = torch.nn.Parameter(torch.ones(8))
    for tensor in (leaf, leaf * 2, [torch.ones(8), leaf]):
        refused(lh.InvalidArgument, r"requires grad.*no_grad\(\)", functools.partial(comm.all_reduce, tensor))
    # These are what the message offers, and what reads only.
    with torch.no_grad():
        comm.broadcast([leaf], timeout=60)
        comm.all_reduce(leaf, timeout=60)
    comm.all_reduce(leaf.detach(), timeout=60)
    out = torch.zeros(8)
    comm.all_reduce(leaf, out=out, timeout=60)
    assert (out == 1).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_tensor_without_a_device(comm: lh.Comm) -> None:
    with pytest.raises((AssertionError, RuntimeError), match="CUDA|NVIDIA"):
        torch.ones(3, device="cuda")  # torch itself refuses: no such tensor comes into being
    nowhere = torch.ones(3, device="meta")
    refused(lh.InvalidArgument, "is on meta; ops take tensors on the CPU", lambda: comm.all_reduce(nowhere))
    refused(lh.InvalidArgument, "is on meta; ops take tensors on the CPU", lambda: comm.all_reduce([nowhere]))
    refused(lh.InvalidArgument, "device meta, so it has no data", lambda: lh.State({"nowhere": nowhere}))


def test_a_tensor_with_gaps(comm: lh.Comm) -> None:
    for tensor in (torch.ones(3, 4).t(), [torch.ones(3, 4).t()], np.ones((3, 4)).T):
        refused(lh.InvalidArgument, "is not contiguous; pass", functools.partial(comm.all_reduce, tensor))


def test_a_freed_tensor(comm: lh.Comm) -> None:
    whole = torch.ones(1 << 20)
    view = whole[1000:2000]  # its address is not 0 once the storage is gone
    state = lh.State({"whole": whole})
    whole.untyped_storage().resize_(0)
    for tensor in (whole, view, [torch.ones(3), view]):
        refused(lh.InvalidArgument, "has no memory", functools.partial(comm.all_reduce, tensor, timeout=60))
    refused(lh.InvalidArgument, "has no memory", lambda: comm.sync_state(state, timeout=60))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns when the address of a fake tensor is asked for
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            fake = torch.ones(4)
        refused(lh.InvalidArgument, "has no memory", lambda: comm.all_reduce(fake, timeout=60))


def test_a_closed_buffer(comm: lh.Comm) -> None:
    view = memoryview(bytearray(8))
    view.release()
    refused(lh.InvalidArgument, "no memory any more", lambda: comm.all_reduce(view))
    closed = mmap.mmap(-1, 4096)
    closed.close()
    refused(lh.InvalidArgument, "no memory any more", lambda: comm.all_reduce(closed))
    # While an array, a state or an op uses it, Python does not let go of a buffer.
    growing = bytearray(8)
    state = lh.State({"growing": growing})
    with pytest.raises(BufferError):
        growing.append(1)
    assert comm.sync_state(state, timeout=60).revision == 0


# ------------------------------------------------------------------ ops


def test_two_threads_use_one_tag(pair: Members) -> None:
    first, second = pair.comms
    outcomes: list[object] = []

    def reduce() -> None:
        try:
            outcomes.append(first.all_reduce(np.ones(4, np.float32), tag=5, timeout=60).world_size)
        except lh.InvalidArgument as problem:
            outcomes.append(str(problem))

    threads = [threading.Thread(target=reduce) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(outcomes) == 1)
    assert "this member has an op with this tag in flight" in str(outcomes[0])
    assert second.all_reduce(np.ones(4, np.float32), tag=5, timeout=60).world_size == 2
    for thread in threads:
        thread.join(60)
    assert outcomes[1] == 2, "the op that was there goes on"


def test_one_tensor_in_two_ops(pair: Members) -> None:
    first, second = pair.comms
    for tensor in (np.ones(4, np.float32), first.empty(1000), [torch.ones(4), torch.ones(3)]):
        work = first.all_reduce(tensor, tag=1, async_op=True)
        calls: list[Callable[[], object]] = [
            functools.partial(first.all_reduce, tensor, tag=2, timeout=60),
            functools.partial(first.broadcast, tensor, tag=2, async_op=True),
        ]
        for call in calls:
            refused(lh.FailedPrecondition, r"an op in flight \(all_reduce.*tag 1\) writes the same tensor", call)
        other = [each.clone() for each in tensor] if isinstance(tensor, list) else np.array(tensor)
        second.all_reduce(other, tag=1, timeout=60)
        work.wait(60)
        # The op has ended, so the tensor is free.
        work = first.all_reduce(tensor, tag=2, async_op=True)
        second.all_reduce(other, tag=2, timeout=60)
        work.wait(60)


def test_one_tensor_in_an_op_and_a_sync(pair: Members) -> None:
    first, second = pair.comms
    tensor = np.ones(4, np.float32)
    state = lh.State({"tensor": tensor})
    work = first.all_reduce(tensor, tag=1, async_op=True)
    refused(lh.FailedPrecondition, "op of tag 1 in flight uses tensor", lambda: first.sync_state(state))
    second.all_reduce(np.ones(4, np.float32), tag=1, timeout=60)
    work.wait(60)


@pytest.mark.parametrize("wait", ["wait", "wait_any", "all_reduce", "begin_step"])
def test_a_callback_waits(pair: Members, wait: str) -> None:
    first, second = pair.comms
    never = first.all_reduce(np.ones(4, np.float32), tag=1, async_op=True)
    calls: dict[str, Callable[[], object]] = {
        "wait": never.wait,
        "wait_any": lambda: lh.wait_any([never]),
        "all_reduce": lambda: first.all_reduce(np.ones(4, np.float32), tag=9),
        "begin_step": first.begin_step,
    }
    caught: list[BaseException | None] = []

    def call(work: lh.Work) -> None:
        assert work.wait().world_size == 2  # this one has ended
        try:
            calls[wait]()
            caught.append(None)
        except lh.Error as problem:
            caught.append(problem)

    work = first.all_reduce(np.ones(4, np.float32), tag=2, async_op=True)
    work.add_done_callback(call)
    second.all_reduce(np.ones(4, np.float32), tag=2, timeout=60)
    wait_until(lambda: bool(caught))
    assert isinstance(caught[0], lh.FailedPrecondition)
    assert "this is a callback of an op" in str(caught[0])
    second.all_reduce(np.ones(4, np.float32), tag=1, timeout=60)
    assert never.wait(60).world_size == 2


def test_a_comm_is_used_after_leave(cluster: LocalCluster) -> None:
    comm = lh.join("left", peerd=cluster.socket(0))
    state = lh.State({"tensor": np.ones(4)})
    comm.leave(60)
    uses: list[Callable[[], object]] = [
        lambda: comm.all_reduce(np.ones(4)),
        lambda: comm.sync_state(state),
        comm.begin_step,
        comm.barrier,
        comm.world,
        lambda: comm.members,
    ]
    for use in uses:
        refused(lh.FailedPrecondition, "has left its group; join again", use)
    comm.leave()  # does nothing
    assert comm.stats()["world_size"] == 1, "the numbers stay readable"


# ------------------------------------------------------------------ processes


def program(cluster: LocalCluster, code: str) -> tuple[int, str]:
    """Runs a program that joins "processes" as `comm`, alone. Returns its exit code and what it printed."""
    begin = "import os, sys, time\nimport numpy as np, longhaul as lh\ncomm = lh.join('processes')\n"
    ended = subprocess.run(
        [sys.executable, "-u", "-c", begin + code],
        env={**os.environ, "LONGHAUL_SOCKET": cluster.socket(0)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    return ended.returncode, ended.stdout


def test_a_forked_child_uses_the_comm(cluster: LocalCluster) -> None:
    code, output = program(
        cluster,
        """

work = comm.all_reduce(np.ones(4, np.float32), async_op=True)
child = os.fork()
if child == 0:
    calls = [comm.world, comm.begin_step, work.wait, comm.leave, lambda: comm.all_reduce(np.ones(4, np.float32))]
    for call in calls:
        try:
            call()
        except lh.FailedPrecondition as problem:
            print(problem)
    with lh.join("of-the-child") as own:  # it may have a connection of its own
        print("child is", own.world_size)
    sys.exit(0)  # the usual end: finalizers run, and leave the connection of the parent alone
_, status = os.waitpid(child, 0)
print("status", status, "parent is", comm.world_size, work.wait(60).world_size)
comm.leave(60)
""",
    )
    assert code == 0, output
    assert output.count("which forked this one; open another client here with longhaul.join()") == 5, output
    assert "child is 1" in output
    assert "status 0 parent is 1 1" in output


NEVER = """
def other():  # a member that never does anything, so that the ops of this process do not end
    second = lh.join('processes', timeout=None)
    time.sleep(600)
import threading
threading.Thread(target=other, daemon=True).start()
while comm.world_size < 2:
    comm.begin_step()
works = [comm.all_reduce(np.ones(1 << 20, np.float32), tag=i, async_op=True) for i in range(20)]
works[0].add_done_callback(print)
comm.start_helper()
"""


@pytest.mark.parametrize(
    "end, code", [("sys.exit(0)", 0), ("sys.exit(3)", 3), ("raise ValueError('mine')", 1), ("", 0)]
)
def test_a_process_ends_with_ops_in_flight(cluster: LocalCluster, end: str, code: int) -> None:
    ended, output = program(cluster, f"{NEVER}\nprint('ending')\n{end}\n")
    assert ended == code, output
    text = output.split("ending")[1]
    assert text.strip() == "" if code != 1 else text.rstrip().endswith("ValueError: mine"), output


def test_a_signal_ends_a_process_with_ops_in_flight(cluster: LocalCluster) -> None:
    ended, output = program(cluster, f"{NEVER}\nos.kill(os.getpid(), {int(signal.SIGTERM)})\ntime.sleep(600)\n")
    assert ended == -signal.SIGTERM, output
    with lh.join("processes", peerd=cluster.socket(0), timeout=60) as comm:  # nobody waits for the one that has gone
        assert comm.world_size == 1
