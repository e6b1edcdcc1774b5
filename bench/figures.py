"""Pure functions that compute figures from measured times: bandwidths, and what the machine would allow."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from longhaul.bench import algorithm_bandwidth, bus_bandwidth, quantile, text_of, wire_bytes

# For smaller tensors a system call costs more than the bytes that it moves, so a limit by bytes says nothing.
LIMIT_FROM_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Rates:
    """What this machine can do on tensors of `bytes`: bytes per second of all processors together."""

    bytes: int
    copy: float  #: memory to memory, in large blocks
    add: float  #: adds a block that is in cache to a block that need not be
    tcp: float  #: from a tensor to a tensor over loopback, sender and receiver together, in the cheapest way
    tcp_apart: float  #: the same, but one process sends to another process, as ranks do
    tcp_spliced: float  #: the same, but the sender splices from shared memory, which saves a copy

    def each(self) -> tuple[float, ...]:
        return dataclasses.astuple(self)[1:]


def better(a: Rates, b: Rates) -> Rates:
    """Each rate as the higher of two measurements."""
    return Rates(a.bytes, *(max(of_a, of_b) for of_a, of_b in zip(a.each(), b.each())))


def limit_seconds(world: int, nbytes: int, rates: Rates) -> float:
    """The least time of an all-reduce among `world` ranks that share this machine, with plain sends and receives.

    Each rank brings wire_bytes() through the kernel and adds (N - 1) / N of the tensor. Nothing waits for anything
    else.
    """
    return _seconds(world, nbytes, rates.tcp, rates.add)


def apart_seconds(world: int, nbytes: int, rates: Rates) -> float:
    """The same limit if each rank is a process of its own, as ranks are."""
    return _seconds(world, nbytes, rates.tcp_apart, rates.add)


def floor_seconds(world: int, nbytes: int, rates: Rates) -> float:
    """The same limit if each byte on the wire is only copied once, from memory to memory."""
    return _seconds(world, nbytes, rates.copy, rates.add)


def one_phase_seconds(world: int, nbytes: int, rates: Rates, reduces: bool) -> float:
    """The same limit for half an all-reduce: a reduce-scatter (`reduces`), an all-gather or a broadcast.

    The ranks together bring (N - 1) times the tensor through the kernel, and a reduce-scatter adds as many bytes.
    """
    moved = (world - 1) * nbytes
    return moved / rates.tcp + (moved / rates.add if reduces else 0.0)


def _seconds(world: int, nbytes: int, wire: float, add: float) -> float:
    """The time in which all ranks bring their bytes over the wire at this rate, and add them up."""
    return world * wire_bytes(world, nbytes) / wire + (world - 1) * nbytes / add


@dataclasses.dataclass
class Samples:
    """The times of one variant for one world size and one size of tensor. Figures are those of the slowest process."""

    rounds: list[list[list[float]]] = dataclasses.field(default_factory=list)  # seconds, by round, rank and op
    iterations: int = 1  # timed ops of a round
    warm: int = 1  # ops before the timed ops, which do not count
    cpu_s: float = 0  # CPU time of all processes of the system
    memory_bytes: float = 0  # memory of all processes together, less that of the idle ones

    def add_round(self, seconds: list[list[float]], cpu_s: float) -> None:
        self.rounds.append(seconds)
        self.cpu_s += cpu_s

    @property
    def ops(self) -> int:
        """How many ops cost `cpu_s`: the timed ones and those that do not count."""
        return len(self.rounds) * (self.iterations + self.warm)

    def by_rank(self) -> list[list[float]]:
        return [[second for part in parts for second in part] for parts in zip(*self.rounds)]

    def median(self) -> float:
        return max(statistics.median(of_rank) for of_rank in self.by_rank())

    def quantile(self, q: float) -> float:
        return max(quantile(of_rank, q) for of_rank in self.by_rank())

    def round_medians(self) -> list[float]:
        return [max(statistics.median(of_rank) for of_rank in one) for one in self.rounds]


def row_of(
    world: int, nbytes: int, system: str, variant: str, samples: Samples, rates: Rates | None = None
) -> dict[str, Any]:
    """A row as in the JSON file: seconds, bytes, and bytes per second."""
    median = samples.median()
    wire = world * wire_bytes(world, nbytes)
    row: dict[str, Any] = {
        "peers": world,
        "bytes": nbytes,
        "system": system,
        "variant": variant,
        "median_s": median,
        "p10_s": samples.quantile(0.1),
        "p90_s": samples.quantile(0.9),
        "algbw": algorithm_bandwidth(nbytes, median),
        "busbw": bus_bandwidth(world, nbytes, median),
        "cpu_s_per_op": samples.cpu_s / samples.ops,
        "cpu_s_per_wire_gb": samples.cpu_s / samples.ops / wire * 1e9,
        "memory_bytes": samples.memory_bytes,
        "timed_ops": sum(len(one[0]) for one in samples.rounds),
        "round_medians_s": samples.round_medians(),
    }
    if rates is not None:
        row["limit_s"] = limit_seconds(world, nbytes, rates)
        row["apart_s"] = apart_seconds(world, nbytes, rates)
        row["floor_s"] = floor_seconds(world, nbytes, rates)
    return row


def is_ours(row: dict[str, Any]) -> bool:
    """True if the row is of Longhaul, from any language."""
    return str(row["system"]).partition("/")[0] == "longhaul"


def best(rows: Sequence[dict[str, Any]], prefix: str, key: str = "median_s") -> float | None:
    """The least value among systems whose names begin with `prefix`; None if there is no such system."""
    found = [row[key] for row in rows if row["system"].startswith(prefix)]
    return min(found) if found else None


def compare(rows: list[dict[str, Any]]) -> None:
    """Adds how many times faster Longhaul is. This compares rows of one world size and one size of tensor."""
    for row in rows:
        if not is_ours(row):
            continue
        for rival in ("gloo", "openmpi"):
            time = best(rows, rival)
            if time is not None:
                row[f"times_{rival}"] = time / row["median_s"]
        cpu = best(rows, "gloo", "cpu_s_per_wire_gb")
        if cpu is not None:
            row["cpu_of_gloo"] = row["cpu_s_per_wire_gb"] / cpu


HEAD = (
    f"{'peers':>5} {'tensor':>8} {'system':<15} {'variant':<13} {'median ms':>10} {'p10':>9} {'p90':>9} {'algbw':>7} {'busbw':>7} "
    f"{'CPU s/GB':>8} {'MiB/peer':>8} {'x gloo':>6} {'x MPI':>6} {'limit':>6}"
)


def line_of(row: dict[str, Any]) -> str:
    def share(key: str) -> str:
        return f"{row[key]:.2f}" if key in row else ""

    limit = f"{row['limit_s'] / row['median_s']:.0%}" if "limit_s" in row else ""
    # For small tensors the number of ops costs, and not the number of bytes.
    cpu = f"{row['cpu_s_per_wire_gb']:.2f}" if row["bytes"] >= LIMIT_FROM_BYTES else ""
    return (
        f"{row['peers']:>5} {text_of(row['bytes']):>8} {row['system']:<15} {row['variant']:<13} {1e3 * row['median_s']:>10.3f} "
        f"{1e3 * row['p10_s']:>9.3f} {1e3 * row['p90_s']:>9.3f} {row['algbw'] / 1e9:>7.3f} {row['busbw'] / 1e9:>7.3f} "
        f"{cpu:>8} {row['memory_bytes'] / row['peers'] / (1 << 20):>8.0f} {share('times_gloo'):>6} {share('times_openmpi'):>6} {limit:>6}"
    )
