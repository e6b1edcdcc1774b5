"""The algorithms of an op: chosen by Longhaul, or by the caller."""

from __future__ import annotations

import re
import urllib.request

import numpy as np
import pytest
from conftest import Members, wait_until

import longhaul as lh
from longhaul.testing import LocalCluster, Peer


def reduce(comm: lh.Comm, count: int, algorithm: str) -> tuple[np.ndarray, lh.OpInfo]:
    tensor = comm.empty(count, "float32")
    # The sum of these numbers depends on the order of the additions.
    tensor[:] = np.random.default_rng(comm.rank).standard_normal(count)
    return tensor, comm.all_reduce(tensor, "sum", algorithm=algorithm, timeout=60)


def reduce_all(members: Members, count: int, algorithm: str) -> list[tuple[np.ndarray, lh.OpInfo]]:
    return members.all(lambda comm: reduce(comm, count, algorithm))


@pytest.mark.parametrize(
    "algorithm, count, taken",
    [
        ("auto", 1024, "oneshot"),
        ("oneshot", 1024, "oneshot"),
        ("mesh", 5, "mesh"),
        ("mesh", 300_007, "mesh"),
        ("ring", 5, "ring"),
        ("ring", 300_007, "ring"),
        # The measured links decide which of the two is faster.
        ("auto", 1025, "mesh or ring"),
    ],
)
def test_each_algorithm_adds_up_and_says_its_name(three: Members, algorithm: str, count: int, taken: str) -> None:
    results = reduce_all(three, count, algorithm)
    expected = sum(np.random.default_rng(rank).standard_normal(count).astype(np.float32) for rank in range(3))
    for tensor, info in results:
        assert info.algorithm in taken.split(" or ")
        assert info.algorithm == results[0][1].algorithm
        assert info.world_size == 3
        np.testing.assert_array_equal(tensor, results[0][0])
        np.testing.assert_allclose(tensor, expected, rtol=1e-5, atol=1e-5)


def test_mesh_and_one_shot_give_the_same_bits(three: Members) -> None:
    bits = {
        tensor.tobytes()
        for algorithm in ("oneshot", "mesh", "mesh")
        for tensor, _ in reduce_all(three, 1000, algorithm)
    }
    assert len(bits) == 1


def test_a_member_alone_is_local(cluster: LocalCluster) -> None:
    with lh.join("alone", peerd=cluster.socket(0), timeout=60) as comm:
        for algorithm, count in (("auto", 4), ("mesh", 4), ("ring", 100_000)):
            assert reduce(comm, count, algorithm)[1].algorithm == "local"


def test_what_is_impossible_is_refused_at_once(pair: Members) -> None:
    comm = pair.comms[0]
    with pytest.raises(lh.InvalidArgument, match="at most 4096 bytes, this one 4100; leave the algorithm to Longhaul"):
        comm.all_reduce(np.zeros(1025, np.float32), algorithm="oneshot")
    with pytest.raises(lh.InvalidArgument, match="algorithm is 'tree'; give one of auto, oneshot, mesh, ring"):
        comm.all_reduce(np.zeros(4, np.float32), algorithm="tree")


@pytest.mark.parametrize("count", [16, 50_000])
def test_members_that_want_different_ones_are_refused_with_both_names(three: Members, count: int) -> None:
    wanted = ("mesh", "ring", "mesh")

    def refused(comm: lh.Comm) -> str:
        with pytest.raises(lh.InvalidArgument) as caught:
            reduce(comm, count, wanted[comm.rank])
        return str(caught.value)

    for text in three.all(refused):
        assert "algorithm mesh" in text and "algorithm ring" in text, text
    # The members can go on.
    for _, info in reduce_all(three, count, "mesh"):
        assert info.algorithm == "mesh"


def done_by(peer: Peer, algorithm: str) -> float:
    with urllib.request.urlopen(f"http://{peer.http}/metrics", timeout=60) as page:
        text = page.read().decode()
    found = re.search(rf'^longhaul_peerd_ops_done_total{{algorithm="{algorithm}"}} (\S+)$', text, re.MULTILINE)
    assert found, text
    return float(found[1])


def test_metrics_tell_ops_by_algorithm(cluster: LocalCluster, pair: Members) -> None:
    names = ("oneshot", "mesh", "ring", "local")
    before = {name: done_by(cluster.peers[0], name) for name in names}
    for algorithm in ("oneshot", "mesh", "ring", "ring"):
        reduce_all(pair, 64, algorithm)
    after = {name: done_by(cluster.peers[0], name) for name in names}
    assert {name: after[name] - before[name] for name in names} == {"oneshot": 1, "mesh": 1, "ring": 2, "local": 0}


def test_eight_members_on_two_hosts_send_what_two_members_send() -> None:
    """The inputs of one host's members are added up before anything crosses the network."""
    count = 250_000
    expected = 0
    with LocalCluster(peers=2) as cluster:

        def total() -> float:
            return sum(peer.metric("longhaul_peerd_sent_bytes_total") for peer in cluster.peers)

        def sent_when_told(least: int) -> float:
            wait_until(lambda: total() >= least)
            return total()

        for hosts in ([0, 1], [0, 0, 0, 0, 1, 1, 1, 1]):
            members = Members([cluster.socket(host) for host in hosts])
            try:
                for algorithm in ("mesh", "ring"):
                    for _, info in reduce_all(members, count, algorithm):
                        assert info.world_size == len(hosts)
                        assert info.algorithm == algorithm
                        assert info.bytes_sent == 4 * count
                    # Each of two hosts sends 2 (N - 1) / N of the tensor, and not a byte more.
                    expected += 2 * 4 * count
                    assert sent_when_told(expected) == expected
            finally:
                members.close()
