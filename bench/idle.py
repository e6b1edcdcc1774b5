#!/usr/bin/env python3
"""Measures what a peerd costs while its trainers do nothing. No thread of the data plane may spin.

    tools/build && .venv/bin/python bench/idle.py
    .venv/bin/python bench/idle.py --peers=9 --lanes=16 --seconds=30 --json=result.json

Members of one group, each with a peerd of its own, reduce a tensor twice and wait. A row is the processor time that a
peerd then uses, in percent of one processor: the median over the peerds, and the highest. Target: at most 0.5 with 8
links of 16 lanes (the default). All peerds share this machine, so each also wakes the others.

Exit code 1 if the target is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import machine

PERCENT_MAX = 0.5
PATIENCE_S = 120
# Wait so long after the ops, until all peerds and links are quiet.
SETTLE_S = 5


def measure(peers: int, lanes: int, seconds: float) -> dict[str, float]:
    import longhaul as lh
    from longhaul.testing import LocalCluster

    with LocalCluster(peers=peers, peerd_flags=[f"--lanes={lanes}"]) as cluster, ThreadPoolExecutor(peers) as pool:
        idle = threading.Event()

        def member(i: int) -> None:
            with lh.join(run="idle", peerd=cluster.socket(i), timeout=PATIENCE_S) as comm:
                while comm.begin_step(PATIENCE_S).world_size < peers:
                    pass
                tensor = comm.empty(1 << 20, "float32")
                tensor[...] = 1
                for _ in range(2):
                    comm.all_reduce(tensor, timeout=PATIENCE_S)
                everybody.wait(PATIENCE_S)
                idle.wait()

        everybody = threading.Barrier(peers + 1)
        members = [pool.submit(member, i) for i in range(peers)]
        try:
            everybody.wait(PATIENCE_S)
            time.sleep(SETTLE_S)
            pids = [peer.pid for peer in cluster.peers]
            before, begin = [machine.cpu_seconds([pid]) for pid in pids], time.monotonic()
            time.sleep(seconds)
            took = time.monotonic() - begin
            percents = [100 * (machine.cpu_seconds([pid]) - used) / took for pid, used in zip(pids, before)]
            up = [int(peer.metric("longhaul_peerd_lanes")) for peer in cluster.peers]
        finally:
            everybody.abort()
            idle.set()
        for future in members:
            future.result(PATIENCE_S)
    return {"percent_median": statistics.median(percents), "percent_max": max(percents), "lanes_up": min(up)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=9, help="peerds, each linked to all others (default 9)")
    parser.add_argument("--lanes", type=int, default=16, help="data lanes of a link (default 16)")
    parser.add_argument("--seconds", type=float, default=20, help="seconds that are measured (default 20)")
    parser.add_argument("--json", help="write the result to this file")
    args = parser.parse_args()
    row = measure(args.peers, args.lanes, args.seconds)
    met = row["percent_median"] <= PERCENT_MAX
    print(
        f"{args.peers} peerds, {args.lanes} lanes a link, at least {row['lanes_up']} lanes at each: "
        f"{row['percent_median']:.2f} % of a processor (highest {row['percent_max']:.2f}), at most {PERCENT_MAX}: {'met' if met else 'MISSED'}"
    )
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            result = {"machine": machine.describe(), "peers": args.peers, "lanes": args.lanes, **row, "met": met}
            json.dump(result, file, indent=1)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
