"""Tests that a page of metrics shows the values of the moment at which it is served."""

from __future__ import annotations

import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import longhaul as lh
from longhaul.testing import LocalCluster

COUNT = 1 << 20
OPS = 20


def test_bytes_of_an_op_are_on_the_page_when_the_op_has_ended() -> None:
    with LocalCluster(peers=2) as cluster, ThreadPoolExecutor(1) as pool:
        comms = [lh.join("metrics", peerd=cluster.socket(0))]
        joiner = pool.submit(lh.join, "metrics", peerd=cluster.socket(1))
        while comms[0].world_size < 2:
            comms[0].begin_step()
        comms.append(joiner.result())
        comms[1].begin_step()  # the boundary that admitted it
        tensors = [comm.empty(COUNT) for comm in comms]
        sent, received = [0, 0], [0, 0]
        for op in range(OPS):
            works = [comm.all_reduce(x, async_op=True) for comm, x in zip(comms, tensors)]
            for i, (peer, work) in enumerate(zip(cluster.peers, works)):
                info = work.wait(timeout=60)
                sent[i] += info.bytes_sent
                received[i] += info.bytes_received
                assert info.bytes_sent > 0
                assert peer.metric("longhaul_peerd_sent_bytes_total") == sent[i], f"op {op} at peer {i}"
                assert peer.metric("longhaul_peerd_received_bytes_total") == received[i], f"op {op} at peer {i}"
        assert cluster.peers[0].metric("longhaul_peerd_members") == 1
        for comm in comms:
            comm.leave()
        assert cluster.peers[0].metric("longhaul_peerd_members") == 0


def page_of_coordinator(cluster: LocalCluster) -> list[str]:
    with urllib.request.urlopen(f"http://{cluster.http}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
        return text.splitlines()


def test_an_epoch_without_a_member_counts_as_a_removal() -> None:
    with LocalCluster(peers=2) as cluster:
        first = lh.join("metrics", peerd=cluster.socket(0))
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(lh.join, "metrics", peerd=cluster.socket(1), timeout=60)
            while first.world_size < 2:
                first.begin_step(timeout=60)
            second = joining.result()
        assert second.world_size == 2
        second.leave()
        while first.world_size == 2:
            time.sleep(0.01)
        lines = page_of_coordinator(cluster)
        assert 'longhaul_coordinator_epochs_total{cause="admit"} 2' in lines
        assert 'longhaul_coordinator_epochs_total{cause="removal"} 1' in lines
        assert 'longhaul_coordinator_epochs_total{cause="repair"} 0' in lines


def test_a_member_is_on_the_coordinators_page_when_its_join_has_returned() -> None:
    with LocalCluster(peers=1) as cluster:
        comms = []
        for members in range(1, 11):
            comms.append(lh.join("metrics", group=members, peerd=cluster.socket(0)))
            lines = page_of_coordinator(cluster)
            assert f"longhaul_coordinator_members {members}" in lines
            assert f"longhaul_coordinator_groups {members}" in lines
            assert f'longhaul_coordinator_epochs_total{{cause="admit"}} {members}' in lines
            assert "longhaul_coordinator_streams 1" in lines
            assert "longhaul_coordinator_streams_without_hello 0" in lines
