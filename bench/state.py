#!/usr/bin/env python3
"""Measures how long a member takes to get a state: with trainers, peerds and a coordinator, and all checks.

    tools/build && .venv/bin/python bench/state.py
    .venv/bin/python bench/state.py links death --mib=512 --link-mbit=400 --json=result.json

loopback: one source and one joiner on 127.0.0.1. A plain TCP copy of as many bytes between the same two processes takes
turns with it. Target: 0.60 of the copy's speed. links: three sources, each behind a third of the joiner's link (network
namespaces, tbf). Target: 0.90 of the joiner's link. The result also has plain TCP from the three sources at the same
time. death: the same, and one source's peerd and trainer get SIGKILL when half of the state has come. Target: the right
bits, and less than 5 % of the state received for nothing.

Times are of whole calls of `comm.sync_state(state)` at the joiner. In a call both sides hash, the coordinator elects,
and chunks are moved and checked. `links` and `death` need root. The exit code is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import platform
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from workers import MIB, Failure, Member, Trainer, finish_all, team, work

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests" / "chaos"))

# How long a sync or a copy may take.
PATIENCE_S = 180
RUN = "bench-state"
SOURCES = 3


# ---------------------------------------------------------------------------- workers


class Worker(Member):
    """A trainer with a state."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = None
        self.tensor: Any = None

    def make(self, peerd: str, mib: int, source: bool) -> None:
        self.tensor = self.lh.empty(mib * MIB // 8, "uint64", peerd=peerd)
        self.reset(source)
        self.state = self.lh.State({"weights": self.tensor})

    def reset(self, source: bool = False) -> None:
        """Fills the tensor with the bits of all sources, or with bits that no source has."""
        if source:
            self.tensor[:] = self.np.arange(1, self.tensor.size + 1, dtype="uint64")
            self.tensor *= self.np.uint64(0x9E3779B97F4A7C15)
        else:
            self.tensor.fill(0)

    def sync(self, revision: int) -> dict[str, Any]:
        self.state.revision = revision
        begin = time.monotonic()
        info = self.comm.sync_state(self.state, timeout=PATIENCE_S)
        seconds = time.monotonic() - begin
        return {"seconds": seconds, "bytes": info.bytes, "sources": info.sources, "hash": info.hash}

    def check(self) -> dict[str, Any]:
        """Says whether all bits are those of the sources. Does not use Longhaul's hash."""
        right = True
        for at in range(0, self.tensor.size, MIB):
            part = self.tensor[at : at + MIB]
            want = self.np.arange(at + 1, at + 1 + part.size, dtype="uint64") * self.np.uint64(0x9E3779B97F4A7C15)
            right = right and bool((part == want).all())
        return {"right": right}

    def plain_offer(self, address: str, begin: int, end: int) -> dict[str, Any]:
        """Sends this part of the tensor to the next process that connects."""
        listener = socket.create_server((address, 0))
        view = memoryview(self.tensor).cast("B")[begin:end]

        def send() -> None:
            with listener, listener.accept()[0] as connection:
                connection.sendall(view)

        threading.Thread(target=send, daemon=True).start()
        return {"port": listener.getsockname()[1]}

    def plain_fetch(self, parts: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """Fetches all parts at once. Each part is (address, port, begin, end)."""
        view = memoryview(self.tensor).cast("B")
        short: list[str] = []

        def fetch(address: str, port: int, begin: int, end: int) -> None:
            at = begin
            with socket.create_connection((address, port), timeout=PATIENCE_S) as connection:
                while at < end:
                    count = connection.recv_into(view[at : min(end, at + MIB)])
                    if count == 0:
                        short.append(f"{address} sent {at - begin} of {end - begin} bytes")
                        return
                    at += count

        threads = [threading.Thread(target=fetch, args=part) for part in parts]
        begin = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if short:
            raise Failure("; ".join(short))
        return {"seconds": time.monotonic() - begin}


def all_do(trainers: Sequence[Trainer], what: str, each: Sequence[dict[str, Any]]) -> list[Any]:
    for trainer, order in zip(trainers, each):
        trainer.start(what, **order)
    return finish_all(trainers)


def assemble(sources: Sequence[Trainer], joiner: Trainer, sockets: Sequence[str], mib: int) -> None:
    """Makes the states and joins all trainers to one group. `sockets`: the sources' in order, then the joiner's."""
    everybody = [*sources, joiner]
    makes = [{"peerd": path, "mib": mib, "source": i < len(sources)} for i, path in enumerate(sockets)]
    all_do(everybody, "make", makes)
    all_do(everybody, "meet", [{"peerd": path, "run": RUN, "size": len(everybody)} for path in sockets])


def fetch(sources: Sequence[Trainer], joiner: Trainer, revision: int, mib: int) -> dict[str, Any]:
    """Lets the joiner fetch the whole state. Returns its figures."""
    joiner.do("reset")
    for source in sources:
        source.start("sync", revision=revision)
    # The joiner's time includes the work that the sources do first, above all hashing.
    got: dict[str, Any] = joiner.do("sync", revision=revision - 1)
    others = [source.finish() for source in sources]
    expect(got, others, mib)
    if not joiner.do("check")["right"]:
        raise Failure("the joiner's bits are not those of its sources")
    return got


def expect(got: dict[str, Any], others: list[dict[str, Any]], mib: int) -> None:
    if got["bytes"] != mib * MIB:
        raise Failure(f"the joiner fetched {got['bytes']} bytes, not {mib * MIB}")
    if {other["hash"] for other in others} != {got["hash"]}:
        raise Failure("the hashes differ")


def plain(sources: Sequence[Trainer], addresses: Sequence[str], joiner: Trainer, mib: int) -> float:
    """The seconds that a plain copy of as many bytes takes, over one connection from each source at the same time."""
    joiner.do("reset")
    size = mib * MIB
    ends = [(size * (i + 1) // len(sources)) for i in range(len(sources))]
    parts = []
    for source, address, begin, end in zip(sources, addresses, [0, *ends], ends):
        port = source.do("plain_offer", address=address, begin=begin, end=end)["port"]
        parts.append([address, port, begin, end])
    seconds: float = joiner.do("plain_fetch", parts=parts)["seconds"]
    return seconds


# ---------------------------------------------------------------------------- scenes


def loopback(args: argparse.Namespace) -> dict[str, Any]:
    from longhaul.testing import LocalCluster

    flags = args.peerd_flag
    with LocalCluster(peers=2, peerd_flags=flags, log_dir=args.log_dir) as cluster, contextlib.ExitStack() as stack:
        source, joiner = stack.enter_context(team(__file__, 2))
        assemble([source], joiner, [cluster.socket(0), cluster.socket(1)], args.mib)
        plains = []
        ours = []
        # The first round does not count, because it touches memory for the first time.
        for turn in range(args.rounds + 1):
            plains.append(plain([source], ["127.0.0.1"], joiner, args.mib))
            ours.append(fetch([source], joiner, turn + 1, args.mib)["seconds"])
        ratio = min(plains[1:]) / min(ours[1:])
        return {
            "plain_mb_s": args.mib * MIB / min(plains[1:]) / 1e6,
            "mb_s": args.mib * MIB / min(ours[1:]) / 1e6,
            "of_plain": ratio,
            "plain_s": plains[1:],
            "seconds": ours[1:],
            "target": 0.6,
            "met": ratio >= 0.6,
        }


@contextlib.contextmanager
def hosts_behind_links(args: argparse.Namespace) -> Iterator[tuple[Any, list[Any], list[Trainer]]]:
    """A world, its hosts (the joiner's is the last) and their trainers, which are members of one group."""
    import world as network

    why = network.why_not()
    if why:
        raise Failure(why)
    logs = pathlib.Path(args.log_dir or "/tmp/longhaul-bench-state")
    with network.World(logs, peerd_flags=args.peerd_flag) as world, contextlib.ExitStack() as stack:
        world.start_coordinator()
        hosts = [world.add_host() for _ in range(SOURCES + 1)]
        for host in hosts[:-1]:
            limit(network, host.namespace, "eth0", args.link_mbit / SOURCES)
        limit(network, world.switch, hosts[-1].port, args.link_mbit)
        trainers = []
        for host in hosts:
            host.start_peerd()
            trainers.append(Trainer(__file__, host.namespace))
            stack.callback(trainers[-1].kill)
        assemble(trainers[:-1], trainers[-1], [host.socket for host in hosts], args.mib)
        yield world, hosts, trainers


def limit(network: Any, namespace: str, device: str, mbit: float) -> None:
    """Limits what leaves by a device to a rate, with bursts of 10 ms and a queue of 50 ms."""
    rate = f"{mbit * 1e6:.0f}bit"
    burst = f"{max(mbit * 1e6 / 8 * 0.01, 65536):.0f}"
    discipline = ["tbf", "rate", rate, "burst", burst, "latency", "50ms"]
    network.run(["ip", "netns", "exec", namespace, "tc", "qdisc", "replace", "dev", device, "root", *discipline])


def links(args: argparse.Namespace) -> dict[str, Any]:
    with hosts_behind_links(args) as (_, hosts, trainers):
        addresses = [host.address for host in hosts[:-1]]
        plain_s = plain(trainers[:-1], addresses, trainers[-1], args.mib)
        got = fetch(trainers[:-1], trainers[-1], 1, args.mib)
        link = args.link_mbit * 1e6 / 8
        size = args.mib * MIB
        share = size / got["seconds"] / link
        return {
            "link_mb_s": link / 1e6,
            "mb_s": size / got["seconds"] / 1e6,
            "of_link": share,
            "plain_of_link": size / plain_s / link,
            "refetched": hosts[-1].metric("longhaul_peerd_state_bytes_refetched_total") / size,
            "sources": got["sources"],
            "seconds": got["seconds"],
            "target": 0.9,
            "met": share >= 0.9,
        }


def death(args: argparse.Namespace) -> dict[str, Any]:
    with hosts_behind_links(args) as (_, hosts, trainers):
        *sources, joiner = trainers
        size = args.mib * MIB
        for source in sources:
            source.start("sync", revision=1)
        begin = time.monotonic()
        joiner.start("sync", revision=0)
        while hosts[-1].metric("longhaul_peerd_state_bytes_received_total") < size / 2:
            if time.monotonic() - begin > PATIENCE_S:
                raise Failure("half of the state does not come in time")
            time.sleep(0.05)
        died = time.monotonic() - begin
        before = hosts[-1].metric("longhaul_peerd_state_bytes_received_total")
        hosts[0].peerd.kill()
        sources[0].kill()
        got = joiner.finish()
        expect(got, [source.finish() for source in sources[1:]], args.mib)
        if not joiner.do("check")["right"]:
            raise Failure("the joiner's bits are not those of its sources")
        # Metrics are updated twice per second, all at once.
        while hosts[-1].metric("longhaul_peerd_state_bytes_received_total") < size:
            if time.monotonic() - begin > PATIENCE_S:
                raise Failure("the metrics do not tell what came")
            time.sleep(0.1)
        refetched = hosts[-1].metric("longhaul_peerd_state_bytes_refetched_total") / size
        left = args.link_mbit * 1e6 / 8 * (SOURCES - 1) / SOURCES
        rest = (size - before) / (got["seconds"] - died) / left
        return {
            "died_at": before / size,
            "refetched": refetched,
            "rest_of_two_links": rest,
            "sources": got["sources"],
            "seconds": got["seconds"],
            "target_refetched": 0.05,
            "met": refetched < 0.05,
        }


SCENES = {"loopback": loopback, "links": links, "death": death}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenes", nargs="*", metavar="scene", help="loopback, links, death (default all)")
    parser.add_argument("--mib", type=int, default=1024, help="size of the state in MiB")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of loopback; the best of each side counts")
    parser.add_argument("--link-mbit", type=float, default=600, help="rate of the joiner's link in Mbit/s")
    parser.add_argument("--peerd-flag", action="append", default=[], help="a flag for every peerd, such as --lanes=1")
    parser.add_argument("--log-dir", help="keep the daemons' logs here")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(Worker())
        return 0
    unknown = set(args.scenes) - set(SCENES)
    if unknown:
        parser.error(f"no scene {' '.join(sorted(unknown))}: there are {' '.join(SCENES)}")
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} processors, {args.mib} MiB")
    results = {}
    for scene in args.scenes or list(SCENES):
        results[scene] = SCENES[scene](args)
        figures = " ".join(f"{key}={show(value)}" for key, value in results[scene].items())
        print(f"{scene}: {figures}", flush=True)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(result["met"] for result in results.values()) else 1


def show(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(show(one) for one in value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failure as problem:
        sys.exit(f"failed: {problem}")
