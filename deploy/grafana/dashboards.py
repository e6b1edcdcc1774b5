#!/usr/bin/env python3
"""Writes the dashboards in deploy/grafana/dashboards, one JSON file each.

Run it after a change here. tests/deploy/test_grafana.py fails until you have. docs/metrics.md explains the metrics.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as dashboards
from grafana_foundation_sdk.builders import prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as models

DIRECTORY = pathlib.Path(__file__).resolve().parent / "dashboards"
# Each dashboard asks the data source that its reader chose.
SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
COORDINATOR = 'job="longhaul-coordinator"'
PEERS = 'job="longhaul-peerd", instance=~"$peer"'
# Widths of a panel; a row of the page has 24 columns.
QUARTER, THIRD, HALF = 6, 8, 12

# What a panel shows: (expression, legend).
Queries = Sequence[tuple[str, str]]


def rate(metric: str, by: str = "", where: str = "") -> str:
    """The growth of a counter in a second."""
    total = f"sum by ({by})" if by else "sum"
    return f"{total} (rate({metric}{{{where}}}[$__rate_interval]))"


def increase(metric: str, by: str = "", where: str = "") -> str:
    """The growth of a counter in one interval of the drawing."""
    total = f"sum by ({by})" if by else "sum"
    return f"{total} (increase({metric}{{{where}}}[$__rate_interval]))"


def quantile(q: float, histogram: str, by: str = "", where: str = "") -> str:
    labels = f"{by}, le" if by else "le"
    return f"histogram_quantile({q}, {rate(f'{histogram}_bucket', labels, where)})"


def mean(histogram: str, by: str = "", where: str = "") -> str:
    """The mean of what a histogram counted in one interval. No value where it counted nothing."""
    count = increase(f"{histogram}_count", by, where)
    return f"{increase(f'{histogram}_sum', by, where)} / ({count} > 0)"


def target(index: int, expr: str, legend: str) -> prometheus.Dataquery:
    query = prometheus.Dataquery().ref_id(chr(ord("A") + index)).datasource(SOURCE).expr(expr)
    return query.legend_format(legend).range()


class Page:
    """A dashboard in the making."""

    def __init__(self, name: str, title: str, description: str) -> None:
        self.name = name
        self.next_id = 1
        self.board = (
            dashboards.Dashboard(f"Longhaul: {title}")
            .uid(f"longhaul-{name}")
            .description(description)
            .tags(["longhaul"])
            .readonly()
            .refresh("10s")
            .time("now-30m", "now")
            .timezone("browser")
            .tooltip(models.DashboardCursorSync.CROSSHAIR)
            .link(
                dashboards.DashboardLink("Longhaul")
                .type(models.DashboardLinkType.DASHBOARDS)
                .tags(["longhaul"])
                .as_dropdown(True)
                .keep_time(True)
                .include_vars(True)
            )
            .with_variable(dashboards.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        )

    def variable(self, name: str, label: str, values: str) -> None:
        """A choice of label values, by default all."""
        self.board.with_variable(
            dashboards.QueryVariable(name)
            .label(label)
            .datasource(SOURCE)
            .query({"query": values, "refId": name, "qryType": 1})
            .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(models.VariableSort.NATURAL_ASC)
            .multi(True)
            .include_all(True)
            .all_value(".*")
            .current(models.VariableOption(selected=True, text=["All"], value=["$__all"]))
        )

    def row(self, title: str) -> None:
        self.board.with_row(dashboards.Row(title).id(self._id()))

    def number(self, title: str, unit: str, description: str, expr: str, width: int = QUARTER) -> None:
        """One number, with its course behind it."""
        self.board.with_panel(
            stat.Panel()
            .id(self._id())
            .title(title)
            .description(description)
            .datasource(SOURCE)
            .unit(unit)
            .span(width)
            .height(4)
            .reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]))
            .graph_mode(common.BigValueGraphMode.AREA)
            .color_mode(common.BigValueColorMode.NONE)
            .with_target(target(0, expr, ""))
        )

    def lines(
        self,
        title: str,
        unit: str,
        description: str,
        queries: Queries,
        width: int = THIRD,
        stacked: bool = False,
        most: float | None = None,
        steps: bool = False,
    ) -> None:
        """Lines over time, from 0 up. most: the upper end of the scale."""
        panel = (
            timeseries.Panel()
            .id(self._id())
            .title(title)
            .description(description)
            .datasource(SOURCE)
            .unit(unit)
            .min(0)
            .span(width)
            .height(8)
            .line_width(1)
            .fill_opacity(40 if stacked else 8)
            .show_points(common.VisibilityMode.AUTO)
            .legend(
                common_builders.VizLegendOptions()
                .show_legend(True)
                .display_mode(common.LegendDisplayMode.LIST)
                .placement(common.LegendPlacement.BOTTOM)
                .calcs([])
            )
            .tooltip(
                common_builders.VizTooltipOptions()
                .mode(common.TooltipDisplayMode.MULTI)
                .sort(common.SortOrder.DESCENDING)
            )
        )
        if stacked:
            panel.stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
        if most is not None:
            panel.max(most)
        if steps:
            panel.line_interpolation(common.LineInterpolation.STEP_AFTER)
        for index, (expr, legend) in enumerate(queries):
            panel.with_target(target(index, expr, legend))
        self.board.with_panel(panel)

    def annotation(self, name: str, colour: str, expr: str) -> None:
        """Marks each minute in which the expression has a value. [1m] is the step at which Grafana asks by default."""
        self.board.annotation(
            dashboards.AnnotationQuery().name(name).datasource(SOURCE).enable(True).icon_color(colour).expr(expr)
        )

    def faults(self) -> None:
        """Marks what happened to the group."""
        self.annotation("Joins", "green", 'sum (increase(longhaul_coordinator_epochs_total{cause="admit"}[1m])) > 0')
        removed = "sum by (cause) (increase(longhaul_coordinator_members_removed_total{%s}[1m])) > 0"
        self.annotation("Deaths", "red", removed % 'cause!~"leave|evict"')
        self.annotation("Leaves", "blue", removed % 'cause=~"leave|evict"')
        others = 'sum by (cause) (increase(longhaul_coordinator_epochs_total{cause=~"repair|ring"}[1m])) > 0'
        self.annotation("Epochs: repaired links, new rings", "orange", others)

    def json(self) -> str:
        made: dict[str, Any] = json.loads(JSONEncoder(sort_keys=True).encode(self.board.build()))
        titles = {"Joins": "Members joined", "Leaves": "Member left", "Deaths": "Member died: {{cause}}"}
        for annotation in made["annotations"]["list"]:
            # The SDK does not know these fields of Prometheus' annotations.
            annotation["titleFormat"] = titles.get(annotation["name"], "New epoch: {{cause}}")
            annotation["step"] = "60s"
        return json.dumps(made, indent=2, sort_keys=True) + "\n"

    def _id(self) -> int:
        self.next_id += 1
        return self.next_id - 1


def run() -> Page:
    page = Page("run", "run", "Does training progress, where does the time of a step go, and who came and went?")
    page.variable("run", "Run", "label_values(longhaul_coordinator_group_members, run)")
    page.variable("peer", "Peer", "label_values(longhaul_peerd_members, instance)")
    page.faults()
    # A member votes once at each boundary.
    step_s = (
        f"(avg_over_time(longhaul_coordinator_members{{{COORDINATOR}}}[$__rate_interval])"
        f" / (rate(longhaul_coordinator_votes_total{{{COORDINATOR}}}[$__rate_interval]) > 0))"
    )
    members = f"sum (avg_over_time(longhaul_peerd_members{{{PEERS}}}[$__rate_interval]))"

    # The part of a member's time that its ops spend in a phase.
    def share(phase: str = "") -> str:
        where = f'{PEERS}, phase="{phase}"' if phase else PEERS
        return f"({rate('longhaul_peerd_op_phase_seconds_sum', where=where)} / ({members} > 0))"

    lost = rate("longhaul_peerd_fault_seconds_sum", "instance", PEERS)
    goodput = f"avg (clamp_min(1 - {lost}, 0))"

    page.row("At a glance")
    page.number(
        "Members",
        "none",
        "Admitted members of the chosen runs.",
        'sum (longhaul_coordinator_group_members{run=~"$run"})',
        width=4,
    )
    page.number(
        "Revision",
        "none",
        "Revision of the shared state that the groups agreed on last, the highest of the chosen runs. It grows with each "
        "step; 0 if the program has no shared state.",
        'max (longhaul_coordinator_group_revision{run=~"$run"})',
        width=4,
    )
    page.number(
        "Step time", "s", "Mean time from one step boundary to the next, of all groups.", f"avg ({step_s})", width=4
    )
    page.number(
        "Since the last step",
        "s",
        "Time since the last step boundary, of the slowest group that has members.",
        'max (longhaul_coordinator_group_step_age_seconds{run=~"$run"}'
        ' and longhaul_coordinator_group_members{run=~"$run"} > 0)',
        width=4,
    )
    page.number(
        "Goodput",
        "percentunit",
        "Part of the time in which no fault held up ops: a fault counts from the freeze of the ops to the end of the "
        "first op that was redone. Mean of the chosen peers.",
        goodput,
        width=4,
    )
    page.number(
        "Alerts",
        "none",
        "Alerts that fire now.",
        '(sum (ALERTS{alertname=~"Longhaul.*", alertstate="firing"}) or vector(0))',
        width=4,
    )

    page.row("Progress")
    page.lines(
        "Steps",
        "none",
        "Revisions of the shared state that each group reached in a second.",
        [
            (
                'sum by (run, group) (rate(longhaul_coordinator_group_revision{run=~"$run"}[$__rate_interval]))',
                "{{run}}/{{group}}",
            )
        ],
    )
    page.lines(
        "Goodput",
        "percentunit",
        "Part of the time in which no fault held up ops, by peer. 1: no fault.",
        [(f"clamp_min(1 - {lost}, 0)", "{{instance}}")],
        most=1,
    )
    page.lines(
        "Waiting for a step",
        "s",
        "How long each group's open ballot has waited for the votes of all members, and the time since its last step, of groups with members. "
        "See the alert LonghaulTrainingStalled in the runbook.",
        [
            (
                'longhaul_coordinator_group_ballot_wait_seconds{run=~"$run"} and longhaul_coordinator_group_members > 0',
                "{{run}}/{{group}}: ballot",
            ),
            (
                'longhaul_coordinator_group_step_age_seconds{run=~"$run"} and longhaul_coordinator_group_members > 0',
                "{{run}}/{{group}}: last step",
            ),
        ],
    )

    page.row("Time of a step")
    page.lines(
        "Where the time of a step goes",
        "s",
        "The mean time of a step, split. Compute: no op was open. Wait: a member waited until all others had started the "
        "op, because one computes longer or stands still. Transfer: until the result was here. Commit: until the trainer "
        "had the answer. If ops overlap, the sum is larger than the time of a step.",
        [
            (f"avg ({step_s}) * clamp_min(1 - {share()}, 0)", "compute"),
            (f"avg ({step_s}) * {share('wait')}", "wait"),
            (f"avg ({step_s}) * {share('transfer')}", "transfer"),
            (f"avg ({step_s}) * {share('commit')}", "commit"),
        ],
        width=HALF,
        stacked=True,
    )
    page.lines(
        "Time in ops that wait for others, by peer",
        "percentunit",
        "Part of the time that ops of this peer wait for other peers. The peer with the lowest line is the one that the "
        "others wait for.",
        [(rate("longhaul_peerd_op_phase_seconds_sum", "instance", f'{PEERS}, phase="wait"'), "{{instance}}")],
        width=HALF,
    )
    page.lines(
        "Ops",
        "ops",
        "Ops that ended well in a second, by the way their bytes went.",
        [(rate("longhaul_peerd_ops_done_total", "algorithm", PEERS), "{{algorithm}}")],
        stacked=True,
    )
    page.lines(
        "Time of an op",
        "s",
        "From the call to the outcome, of ops that ended well.",
        [
            (quantile(0.5, "longhaul_peerd_op_seconds", where=PEERS), "median"),
            (quantile(0.99, "longhaul_peerd_op_seconds", where=PEERS), "99 of 100"),
        ],
    )
    page.lines(
        "Time since the last op",
        "s",
        "By peer. A peer whose line climbs alone has a trainer that computes longer than the others, or stands still.",
        [(f"longhaul_peerd_op_age_seconds{{{PEERS}}}", "{{instance}}")],
    )

    page.row("Members")
    page.lines(
        "Members",
        "none",
        "Admitted members of each group. Marks: joins (green), deaths (red), leaves (blue), other epochs (orange).",
        [('longhaul_coordinator_group_members{run=~"$run"}', "{{run}}/{{group}}")],
        width=HALF,
        steps=True,
    )
    page.lines(
        "Epochs",
        "none",
        "The committed epoch of each group. It grows with each join, removal, repaired link and new ring.",
        [('longhaul_coordinator_group_epoch{run=~"$run"}', "{{run}}/{{group}}")],
        width=QUARTER,
        steps=True,
    )
    page.lines(
        "Waiting for admission",
        "none",
        "Members that have joined and wait for the next step boundary of the others.",
        [(f"longhaul_coordinator_members_pending{{{COORDINATOR}}}", "pending")],
        width=QUARTER,
        steps=True,
    )
    return page


def links() -> Page:
    page = Page("links", "links and lanes", "Which link is slow, which one loses packets, and what a host has left.")
    page.variable("peer", "Peer", "label_values(longhaul_peerd_members, instance)")
    page.faults()

    def by_peer(metric: str) -> Queries:
        return [(f"{metric}{{{PEERS}}}", "{{instance}}")]

    def rates(metric: str) -> Queries:
        return [(rate(metric, "instance", PEERS), "{{instance}}")]

    page.row("Traffic")
    page.lines(
        "Sent",
        "Bps",
        "Bytes of tensors and shared state that each peer sends.",
        rates("longhaul_peerd_sent_bytes_total"),
    )
    page.lines(
        "Received",
        "Bps",
        "Bytes of tensors and shared state that each peer receives.",
        rates("longhaul_peerd_received_bytes_total"),
    )
    page.lines(
        "Sent again by TCP",
        "percentunit",
        "Part of the bytes that TCP had to send again. Above 2 % for some minutes: alert LonghaulLinkDegraded. No value "
        "where a peer sends less than 10 kB/s.",
        [('longhaul:repeated_bytes:ratio10m{instance=~"$peer"}', "{{instance}}")],
    )

    page.row("Links")
    page.lines(
        "Slowest links of the rings",
        "Bps",
        "What the slowest links of rings can carry to the next peer, measured by their own traffic or a probe.",
        [
            (
                f"longhaul_coordinator_ring_link_bytes_per_second{{{COORDINATOR}}}",
                "{{run}}/{{group}}: {{from_host}} {{from}} to {{to_host}} {{to}}",
            )
        ],
    )
    page.lines(
        "Their round trips",
        "s",
        "The round trips of these links.",
        [
            (
                f"longhaul_coordinator_ring_link_rtt_seconds{{{COORDINATOR}}}",
                "{{run}}/{{group}}: {{from_host}} {{from}} to {{to_host}} {{to}}",
            )
        ],
    )
    page.lines(
        "What each host carries",
        "Bps",
        "The most that each host was lately seen to send (up) and receive (down) in all, over all its links together, "
        "and the limit that it sets itself on long ways (0: none).",
        [
            (f"longhaul_peerd_host_up_bytes_per_second{{{PEERS}}}", "{{instance}} up"),
            (f"longhaul_peerd_host_down_bytes_per_second{{{PEERS}}}", "{{instance}} down"),
            (f"longhaul_peerd_pace_bytes_per_second{{{PEERS}}}", "{{instance}} limit"),
        ],
    )
    page.lines(
        "What each host owns in the mesh",
        "percentunit",
        "The part of a tensor that each host adds up and sends to all others. A slow host owns little, or nothing.",
        [(f"longhaul_peerd_mesh_share{{{PEERS}}}", "{{instance}}")],
    )
    page.lines(
        "Slowest links of each peer",
        "Bps",
        "What the slowest links of each peer can carry, at most four of each; a lower bound while ops send little.",
        [(f"longhaul_peerd_link_bytes_per_second{{{PEERS}}}", "{{instance}} to {{peer}}")],
    )
    page.lines(
        "Round trips of each peer",
        "s",
        "The shortest recent round trip on these links.",
        [(f"longhaul_peerd_link_rtt_seconds{{{PEERS}}}", "{{instance}} to {{peer}}")],
    )
    page.lines(
        "Links",
        "none",
        "Links to other peers that are up. In a group of N peers each has N - 1.",
        by_peer("longhaul_peerd_links"),
        steps=True,
    )
    page.lines(
        "Without a path, relayed",
        "none",
        "Pairs of hosts without a path to each other; lanes that other peers carry for such pairs; links on which large "
        "packets vanished, so that they use small ones.",
        [
            (f"longhaul_coordinator_pairs_blocked{{{COORDINATOR}}}", "pairs blocked"),
            (f"sum (longhaul_peerd_tunnels{{{PEERS}}})", "lanes carried for others"),
            (f"sum (longhaul_peerd_links_small_packets_total{{{PEERS}}})", "links with small packets"),
        ],
        steps=True,
    )

    page.row("Lanes")
    page.lines(
        "Lanes",
        "none",
        "Connections of each peer, and how many of them carry tensors.",
        [
            (f"longhaul_peerd_lanes{{{PEERS}}}", "{{instance}}: open"),
            (f"longhaul_peerd_lanes_used{{{PEERS}}}", "{{instance}}: used"),
        ],
        steps=True,
    )
    page.lines(
        "Lanes lost, replaced, left unused",
        "none",
        "Lanes that broke while their link stood, lost lanes that were replaced, and rests of lanes that were far slower "
        "than others; in one interval of the drawing.",
        [
            (increase("longhaul_peerd_lanes_lost_total", where=PEERS), "lost"),
            (increase("longhaul_peerd_lanes_redialled_total", where=PEERS), "replaced"),
            (increase("longhaul_peerd_lane_rests_total", where=PEERS), "left unused for a while"),
        ],
    )
    page.lines(
        "Probes",
        "Bps",
        "Bytes sent by probes of links that nothing else has measured.",
        rates("longhaul_peerd_probe_bytes_total"),
    )

    page.row("Hosts")
    page.lines(
        "Processor time of peerd",
        "percentunit",
        "By part of the program, all chosen peers; 1: one processor.",
        [(rate("longhaul_peerd_cpu_seconds_total", "component", PEERS), "{{component}}")],
        stacked=True,
    )
    page.lines(
        "Memory",
        "bytes",
        "Memory shared with trainers, scratch memory of ops in flight, and kept states, all chosen peers.",
        [
            (f"sum (longhaul_peerd_arena_bytes{{{PEERS}}})", "shared with trainers"),
            (f"sum (longhaul_peerd_scratch_bytes{{{PEERS}}})", "scratch"),
            (f"sum (longhaul_peerd_state_kept_bytes{{{PEERS}}})", "kept states"),
        ],
    )
    page.lines(
        "Near a limit",
        "percentunit",
        "Shared memory as a part of --arena-limit, and the highest scratch memory of five minutes as a part of "
        "--scratch-limit. Above 0.9: alerts LonghaulArenaNearLimit and LonghaulScratchNearLimit.",
        [
            (
                f"longhaul_peerd_arena_bytes{{{PEERS}}} / (longhaul_peerd_arena_limit_bytes{{{PEERS}}} > 0)",
                "{{instance}}: shared",
            ),
            (
                f"max_over_time(longhaul_peerd_scratch_bytes{{{PEERS}}}[5m])"
                f" / longhaul_peerd_scratch_limit_bytes{{{PEERS}}}",
                "{{instance}}: scratch",
            ),
        ],
        most=1,
    )
    page.lines(
        "Peers on epoll",
        "none",
        "Peers that move bytes with epoll, because io_uring was refused or not wanted. That costs processor time.",
        [(f"sum (longhaul_peerd_on_epoll{{{PEERS}}})", "peers")],
        width=HALF,
        steps=True,
    )
    page.lines(
        "Zero-copy sends that were copied",
        "ops",
        "Zero-copy sends that the kernel copied after all, as on loopback.",
        rates("longhaul_peerd_zero_copy_copied_total"),
        width=HALF,
    )
    return page


def faults() -> Page:
    page = Page("faults", "faults", "What broke, what it cost, and what was refused.")
    page.variable("peer", "Peer", "label_values(longhaul_peerd_members, instance)")
    page.faults()
    page.row("What happened")
    page.lines(
        "Alerts",
        "none",
        "Alerts that fire. docs/runbook.md has a section for each one. No value: none fires.",
        [('count by (alertname) (ALERTS{alertname=~"Longhaul.*", alertstate="firing"})', "{{alertname}}")],
        steps=True,
    )
    page.lines(
        "Members removed",
        "none",
        "Members removed in one interval of the drawing, by cause.",
        [(increase("longhaul_coordinator_members_removed_total", "cause"), "{{cause}}")],
    )
    page.lines(
        "Epochs",
        "none",
        "Epochs committed in one interval of the drawing, by what made them necessary. Many of cause removal or repair: "
        "alert LonghaulRepairLoop.",
        [(increase("longhaul_coordinator_epochs_total", "cause"), "{{cause}}")],
    )
    page.row("What it cost")
    page.lines(
        "Time of a fault, at the coordinator",
        "s",
        "Means. Detect: silence before the first report; 0 if the fault showed at once. Agree: from there to the commit "
        "of the epoch. No value where no fault was.",
        [(mean("longhaul_coordinator_fault_seconds", "phase"), "{{phase}}")],
    )
    page.lines(
        "Time of a fault, at the peers",
        "s",
        "Means. Agree: from the freeze of the ops to the agreement on them. Resume: from there to the end of the first op "
        "that was redone. No value where no fault was.",
        [(mean("longhaul_peerd_fault_seconds", "phase", PEERS), "{{phase}}")],
    )
    page.lines(
        "Ops redone, and ops without a result",
        "none",
        "Ops that were redone after a fault, or ended without a result, in one interval of the drawing.",
        [
            (increase("longhaul_peerd_op_retries_total", where=PEERS), "redone"),
            (increase("longhaul_peerd_ops_total", "outcome", f'{PEERS}, outcome!="ok"'), "{{outcome}}"),
        ],
    )
    page.lines(
        "Links and lanes lost",
        "none",
        "Links that broke or fell silent, and lanes that broke while their link stood, by peer, in one interval of the "
        "drawing.",
        [
            (increase("longhaul_peerd_links_lost_total", "instance", PEERS), "{{instance}}: links"),
            (increase("longhaul_peerd_lanes_lost_total", "instance", PEERS), "{{instance}}: lanes"),
        ],
    )
    page.lines(
        "Preparation of an epoch",
        "s",
        "Mean time from the first PrepareEpoch to the commit.",
        [(mean("longhaul_coordinator_preparation_seconds"), "time")],
    )
    page.lines(
        "Preparations aborted",
        "none",
        "Preparations that ended without the epoch, in one interval of the drawing. Each one means another fault meanwhile.",
        [(increase("longhaul_coordinator_preparations_aborted_total"), "aborted")],
    )
    page.row("Shared state")
    page.lines(
        "Syncs",
        "none",
        "Syncs of shared state in one interval of the drawing, by outcome; refused counts members.",
        [(increase("longhaul_coordinator_syncs_total", "outcome"), "{{outcome}}")],
    )
    page.lines(
        "Time of a sync",
        "s",
        "Mean time from the first vote for a sync to its commit. It is long where a newcomer fetches the state.",
        [(mean("longhaul_coordinator_sync_seconds"), "time")],
    )
    page.lines(
        "State fetched",
        "Bps",
        "Shared state that peers received in right chunks, received for nothing, and sent.",
        [
            (rate("longhaul_peerd_state_bytes_received_total", where=PEERS), "received"),
            (rate("longhaul_peerd_state_bytes_refetched_total", where=PEERS), "received for nothing"),
            (rate("longhaul_peerd_state_bytes_sent_total", where=PEERS), "sent"),
        ],
    )
    page.row("What was refused")
    page.lines(
        "At the coordinator",
        "none",
        "In one interval of the drawing. lhctl events says why.",
        [
            (increase("longhaul_coordinator_joins_refused_total"), "joins"),
            (increase("longhaul_coordinator_messages_refused_total"), "messages and streams"),
            (increase("longhaul_coordinator_strangers_refused_total"), "strangers"),
        ],
    )
    page.lines(
        "At the peers",
        "none",
        "Callers without the token of an epoch, frames against the protocol, and requests of trainers, in one interval of "
        "the drawing. The logs of longhaul-peerd say why.",
        [
            (increase("longhaul_peerd_handshakes_refused_total", where=PEERS), "handshakes"),
            (increase("longhaul_peerd_frames_refused_total", where=PEERS), "frames"),
            (increase("longhaul_peerd_requests_refused_total", where=PEERS), "requests of trainers"),
        ],
    )
    page.lines(
        "Wrong bytes",
        "none",
        "Chunks of shared state that arrived with wrong bytes, and reports of them, in one interval of the drawing. Never "
        "above 0 on sound hardware.",
        [
            (increase("longhaul_peerd_state_chunks_corrupt_total", where=PEERS), "chunks"),
            (increase("longhaul_coordinator_states_corrupt_total"), "reports"),
        ],
    )
    return page


def coordinator() -> Page:
    page = Page("coordinator", "coordinator", "Is the coordinator there, who is connected, and is it fast enough?")
    page.faults()
    page.row("Is it there")
    page.number("Reached by Prometheus", "none", "1: yes.", f"min (up{{{COORDINATOR}}})", width=4)
    page.number(
        "Streams of peers",
        "none",
        "Control streams that are open.",
        f"sum (longhaul_coordinator_streams{{{COORDINATOR}}})",
        width=4,
    )
    page.number(
        "Peers without it",
        "none",
        "Peers that Prometheus reaches, and that do not reach the coordinator.",
        "count (longhaul_peerd_coordinator_up) - sum (longhaul_peerd_coordinator_up)",
        width=4,
    )
    page.number("Runs", "none", "Runs that it knows.", f"sum (longhaul_coordinator_runs{{{COORDINATOR}}})", width=4)
    page.number(
        "Groups", "none", "Groups that it knows.", f"sum (longhaul_coordinator_groups{{{COORDINATOR}}})", width=4
    )
    page.number(
        "Members", "none", "Members of all groups.", f"sum (longhaul_coordinator_members{{{COORDINATOR}}})", width=4
    )
    page.row("Is it fast enough")
    page.lines(
        "How long messages wait",
        "s",
        "Time that a message, a stream or a request waited for the coordinator's loop. Each step boundary waits as long. "
        "99 of 100 above 0.2 s: alert LonghaulCoordinatorSlow.",
        [
            (quantile(0.5, "longhaul_coordinator_loop_lag_seconds", where=COORDINATOR), "median"),
            (quantile(0.99, "longhaul_coordinator_loop_lag_seconds", where=COORDINATOR), "99 of 100"),
        ],
    )
    page.lines(
        "Time of one decision",
        "s",
        "Time to handle one event with all that follows, the store included.",
        [
            (quantile(0.5, "longhaul_coordinator_step_seconds", where=COORDINATOR), "median"),
            (quantile(0.99, "longhaul_coordinator_step_seconds", where=COORDINATOR), "99 of 100"),
        ],
    )
    page.lines(
        "Time of a write to the store",
        "s",
        "One durable transaction. One step of a group costs one. No value with --store=memory.",
        [
            (quantile(0.5, "longhaul_coordinator_store_write_seconds", where=COORDINATOR), "median"),
            (quantile(0.99, "longhaul_coordinator_store_write_seconds", where=COORDINATOR), "99 of 100"),
        ],
    )
    page.lines(
        "Processor time",
        "percentunit",
        "By part of the program; 1: one processor. If loop is near 1, run fewer groups with one coordinator.",
        [(rate("longhaul_coordinator_cpu_seconds_total", "component", COORDINATOR), "{{component}}")],
        stacked=True,
    )
    page.lines(
        "Queue",
        "none",
        "Messages, streams and requests that wait for the loop.",
        [(f"longhaul_coordinator_loop_queue{{{COORDINATOR}}}", "waiting")],
    )
    page.lines(
        "Work",
        "ops",
        "What the coordinator does in a second.",
        [
            (rate("longhaul_coordinator_votes_total", where=COORDINATOR), "votes"),
            (rate("longhaul_coordinator_syncs_total", where=COORDINATOR), "syncs"),
            (rate("longhaul_coordinator_epochs_total", where=COORDINATOR), "epochs"),
            (rate("longhaul_coordinator_streams_opened_total", where=COORDINATOR), "streams opened"),
        ],
    )
    page.row("Groups and peers")
    page.lines(
        "Oldest ballot",
        "s",
        "Time since the first vote of the oldest ballot that is not decided.",
        [(f"longhaul_coordinator_ballot_wait_seconds{{{COORDINATOR}}}", "oldest ballot")],
    )
    page.lines(
        "Groups, streams",
        "none",
        "Groups that prepare an epoch, and streams on which the peer has not said who it is (at most 256).",
        [
            (f"longhaul_coordinator_groups_preparing{{{COORDINATOR}}}", "groups that prepare an epoch"),
            (f"longhaul_coordinator_streams_without_hello{{{COORDINATOR}}}", "streams without Hello"),
        ],
        steps=True,
    )
    page.lines(
        "Clocks",
        "s",
        "How much each clock differs from that of Prometheus. A page may be a second old when it is served. More than 5 s: "
        "alert LonghaulClockSkew.",
        [
            ("abs(longhaul_coordinator_time_seconds - timestamp(longhaul_coordinator_time_seconds))", "coordinator"),
            ("abs(longhaul_peerd_time_seconds - timestamp(longhaul_peerd_time_seconds))", "{{instance}}"),
        ],
    )
    page.lines(
        "Versions",
        "none",
        "Daemons by version. All have to be of one release.",
        [
            ("count by (version) (longhaul_coordinator_build_info)", "coordinator {{version}}"),
            ("count by (version) (longhaul_peerd_build_info)", "peerd {{version}}"),
        ],
        width=24,
        steps=True,
    )
    return page


def main() -> None:
    DIRECTORY.mkdir(exist_ok=True)
    for page in (run(), links(), faults(), coordinator()):
        (DIRECTORY / f"{page.name}.json").write_text(page.json())


if __name__ == "__main__":
    main()
