"""Judges what the trainers wrote down.

Each op has to have one outcome at all members, each step one state, and no member may be removed without cause.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import dataclasses
import json
import pathlib
import statistics
from typing import Any

from faults import Record

# After the end of its cause a removal may take detect_ms, and this much more for repairs and on a busy machine.
AFTERMATH_S = 3.0


@dataclasses.dataclass
class Line:
    host: str
    group: int
    fields: dict[str, Any]


@dataclasses.dataclass
class Verdict:
    problems: list[str]
    lines: list[Line]

    def of(self, kind: str) -> list[Line]:
        return [line for line in self.lines if line.fields["k"] == kind]


def read(logs: pathlib.Path) -> list[Line]:
    """The lines of all files named HOST.gGROUP.jsonl."""
    lines = []
    for path in sorted(logs.glob("h*.g*.jsonl")):
        host, group, _ = path.name.split(".")
        for text in path.read_text(errors="replace").splitlines():
            # A trainer that was killed may have left half a line.
            with contextlib.suppress(ValueError):
                lines.append(Line(host, int(group[1:]), json.loads(text)))
    return lines


def judge(logs: pathlib.Path, faults: list[Record], detect_s: float) -> Verdict:
    problems: list[str] = []
    lines = read(logs)
    # For one op all members must have one result, and for one step one state.
    results: dict[tuple[int, int, int, int], dict[str, str]] = collections.defaultdict(dict)
    states: dict[tuple[int, int, int], dict[str, str]] = collections.defaultdict(dict)
    for line in lines:
        fields = line.fields
        if fields["k"] in ("step", "part"):
            name = f"m{fields['m']} on {line.host}"
            for tag, total, *_, early in fields["ops"]:
                # A small op may have told this member, which did not survive, a result that no survivor sees.
                if early and fields["k"] == "part":
                    continue
                results[(line.group, fields["g"], fields["s"], tag)].setdefault(total, name)
            if fields["k"] == "step":
                states[(line.group, fields["g"], fields["s"])].setdefault(fields["state"], name)
        elif fields["k"] in ("hang", "wrong"):
            problems.append(f"{fields['k']} at {line.host} group {line.group}: {fields['text']}")
        elif fields["k"] == "error" and fields["error"] in ("InvalidArgument", "Internal"):
            problems.append(f"error at {line.host} group {line.group}: {fields['error']}: {fields['text']}")
    for (group, gen, step, tag), seen in results.items():
        if len(seen) > 1:
            problems.append(
                f"group {group} generation {gen} step {step} tag {tag}: members have different sums: {seen}"
            )
    for (group, gen, step), seen in states.items():
        if len(seen) > 1:
            problems.append(f"group {group} generation {gen} step {step}: members have different states: {seen}")
    problems += false_removals(lines, faults, detect_s)
    return Verdict(problems, lines)


def false_removals(lines: list[Line], faults: list[Record], detect_s: float) -> list[str]:
    """A problem for each member that was removed although no fault at its host allows the removal."""
    problems = []
    sizes: dict[tuple[str, int], int] = {}
    for line in sorted(lines, key=lambda line: float(line.fields["t"])):
        fields = line.fields
        if "ws" in fields:
            sizes[(line.host, line.group)] = fields["ws"]
        if fields["k"] != "removed":
            continue
        excused = False
        for fault in faults:
            if line.host not in fault.hosts:
                continue
            end = (fault.end if fault.end is not None else fields["t"]) + detect_s + AFTERMATH_S
            # A stopped trainer hears of its removal only after the stop.
            for stop in faults:
                if stop.kind == "stop trainer" and line.host in stop.hosts and stop.begin <= end:
                    end = max(end, (stop.end if stop.end is not None else fields["t"]) + AFTERMATH_S)
            if fault.begin <= fields["t"] <= end:
                # If no third host reaches both hosts of a blocked pair, one of the two has to go.
                others = [one for one in faults if one is not fault and one.begin <= fields["t"]]
                alone = all(one.end is not None and one.end + detect_s + AFTERMATH_S < fault.begin for one in others)
                small = sizes.get((line.host, line.group), 0) <= (2 if alone else 3)
                excused = excused or fault.fatal or (fault.blocks_pair and small)
        if not excused:
            done = [
                fault.what for fault in faults if fault.begin <= fields["t"] + 1 and fields["t"] - 15 <= fault.begin
            ]
            problems.append(
                f"false eviction at {line.host} group {line.group} t={fields['t']:.2f} "
                f"world {sizes.get((line.host, line.group))}: {fields['text']}; faults of the last 15 s: {done}"
            )
    return problems


# ---------------------------------------------------------------------- figures


def presence(lines: list[Line], until: float) -> list[tuple[str, int, float, float]]:
    """(host, group, from, to) of every membership, as the trainers saw it."""
    spans = []
    open_since: dict[tuple[str, int], float] = {}
    last: dict[tuple[str, int], float] = {}
    for line in lines:
        key = (line.host, line.group)
        kind, t = line.fields["k"], float(line.fields["t"])
        if kind == "joined":
            if key in open_since:  # it was killed meanwhile, so it was present until its last line
                spans.append((*key, open_since[key], last[key]))
            open_since[key] = t
        elif kind in ("removed", "left", "error") and key in open_since:
            spans.append((*key, open_since.pop(key), t if kind != "error" else last[key]))
        last[key] = t
    spans += [(*key, since, min(until, max(last[key], since))) for key, since in open_since.items()]
    return spans


def overlap(begin: float, end: float, intervals: list[tuple[float, float]]) -> float:
    """How much of [begin, end] the intervals cover. They must be disjoint."""
    return sum(max(0.0, min(end, b) - max(begin, a)) for a, b in intervals)


def union(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def member_steps(lines: list[Line], begin: float, end: float) -> int:
    return sum(line.fields["k"] == "step" and begin <= line.fields["t"] <= end for line in lines)


@dataclasses.dataclass
class Goodput:
    """The steps that members made in some time, compared with what as many members make without faults."""

    steps: int
    present_s: float  #: member-seconds of membership
    waiting_s: float  #: the part of present_s in which members had to wait for a silent host
    references: list[float]  #: steps per member-second in each time without faults
    reference: float  #: the same over all times without faults

    @property
    def raw(self) -> float:
        return self.steps / max(1e-9, self.present_s * self.reference)

    @property
    def net(self) -> float:
        return self.steps / max(1e-9, (self.present_s - self.waiting_s) * self.reference)


def goodput(
    lines: list[Line],
    faults: list[Record],
    calm: list[tuple[float, float]],
    chaos: tuple[float, float],
    detect_s: float,
) -> Goodput:
    def seconds(span: tuple[float, float]) -> float:
        return sum(max(0.0, min(to, span[1]) - max(since, span[0])) for _, _, since, to in presence(lines, span[1]))

    references = [member_steps(lines, *span) / max(1e-9, seconds(span)) for span in calm]
    reference = sum(member_steps(lines, *span) for span in calm) / max(1e-9, sum(map(seconds, calm)))
    # Members have to wait for a silent host until it is removed or speaks again: at most detect_ms. They wait for a
    # stopped trainer, and at boundaries for the coordinator, as long as it takes.
    silences = union(
        [
            (
                fault.begin,
                min(
                    fault.end if fault.end is not None else chaos[1],
                    float("inf") if fault.kind in ("stop trainer", "kill coordinator") else fault.begin + detect_s,
                ),
            )
            for fault in faults
            if fault.silent
        ]
    )
    waiting = sum(
        overlap(max(since, chaos[0]), min(to, chaos[1]), silences) for _, _, since, to in presence(lines, chaos[1])
    )
    return Goodput(member_steps(lines, *chaos), seconds(chaos), waiting, references, reference)


def stalls(lines: list[Line], faults: list[Record]) -> dict[str, list[float]]:
    """For each kind of fault, a time for each fault of this kind.

    It is the longest time without a finished op that begins within the fault, at the worst of the members that the
    fault was not done to. Without faults it is about the time of a step.
    """
    finished: dict[tuple[str, int], list[float]] = collections.defaultdict(list)
    for line in lines:
        if line.fields["k"] in ("step", "part"):
            finished[(line.host, line.group)] += [op[5] for op in line.fields["ops"]]
    found: dict[str, list[float]] = collections.defaultdict(list)
    for times in finished.values():
        times.sort()
    for fault in faults:
        end = fault.end if fault.end is not None else fault.begin
        worst = 0.0
        for (host, _), times in finished.items():
            if host in fault.hosts if fault.watched is None else host not in fault.watched:
                continue
            first = bisect.bisect_right(times, fault.begin)
            # Count gaps that begin before the fault ends, and at most two seconds after it was made.
            while 0 < first < len(times) and times[first - 1] <= min(end, fault.begin + 2):
                worst = max(worst, times[first] - max(times[first - 1], fault.begin))
                first += 1
        if worst:
            found[fault.kind].append(worst)
    return found


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))] if values else float("nan")


def table(verdict: Verdict, faults: list[Record], events: list[dict[str, str]], figures: Goodput) -> str:
    lines = verdict.lines
    by_kind = collections.Counter(fault.kind for fault in faults)
    waited = stalls(lines, faults)
    rows = [f"{'fault':<20} {'times':>6}   {'others without a finished op: median':>36} {'worst':>8}"]
    for kind, count in sorted(by_kind.items()):
        of_kind = waited.get(kind, [])
        median = f"{statistics.median(of_kind):.2f} s" if of_kind else "-"
        worst = f"{max(of_kind):.2f} s" if of_kind else "-"
        rows.append(f"{kind:<20} {count:>6}   {median:>36} {worst:>8}")
    ops = [op for line in lines if line.fields["k"] in ("step", "part") for op in line.fields["ops"]]
    removed = collections.Counter(
        line.fields["k"] for line in lines if line.fields["k"] in ("removed", "error", "left")
    )
    rows += [
        "",
        f"ops checked            {len(ops)}",
        f"  of these retried     {sum(op[2] > 0 for op in ops)} (attempts {sum(op[2] for op in ops)})",
        f"  aborted and repeated {sum(op[3] > 0 for op in ops)}",
        f"steps by members       {sum(line.fields['k'] == 'step' for line in lines)}",
        f"memberships            {sum(line.fields['k'] == 'joined' for line in lines)}"
        f" (removed {removed['removed']}, lost their peerd or were refused {removed['error']}, left {removed['left']})",
        f"epochs committed       {sum(event.get('kind') == 'commit' for event in events)}",
        f"goodput                {figures.raw:.1%} of fault-free, {figures.net:.1%} less the wait for silent hosts"
        f" ({figures.reference:.2f} steps per member and second without faults:"
        f" {', '.join(f'{one:.2f}' for one in figures.references)})",
        f"false evictions        {sum('false eviction' in problem for problem in verdict.problems)}",
    ]
    return "\n".join(rows)
