"""A Prometheus with the rules and dashboards of deploy/, which scrapes each second.

So that alerts fire within seconds, all times of the rules are divided by SCALE: the ranges, `for`, and the
numbers of LonghaulTrainingStalled and LonghaulOpStalled that are times. Everything else is as in deploy/prometheus/rules.yml.
"""

from __future__ import annotations

import contextlib
import json
import math
import pathlib
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable
from typing import Any

import yaml
from test_grafana import FILES, dashboard, filled, panels
from test_prometheus import RULES

from longhaul.testing import start_tethered

SCALE = 30
# How long anything may take on a busy machine.
PATIENCE_S = 150
# How often a condition is looked at.
LOOK_S = 0.2
# What stands for $__rate_interval.
INTERVAL = "10s"
JOBS = ("longhaul-coordinator", "longhaul-peerd")
_UNIT_MS = {"s": 1000, "m": 60_000, "h": 3_600_000}
_TIME_LIMITS = re.compile(r"((?:ballot_wait|step_age|op_age)_seconds > )(\d+)")
Json = dict[str, Any]


def until(condition: Callable[[], bool], what: Callable[[], str] | str) -> None:
    """Waits until the condition holds. Fails if that takes too long."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not in {PATIENCE_S} s: {what if isinstance(what, str) else what()}"
        time.sleep(LOOK_S)


def shorter(duration: str) -> str:
    number, unit = int(duration[:-1]), duration[-1]
    return f"{number * _UNIT_MS[unit] // SCALE}ms"


def scaled_rules() -> Json:
    rules: Json = yaml.safe_load(RULES.read_text())
    for group in rules["groups"]:
        group["interval"] = "1s"
        for rule in group["rules"]:
            expr = re.sub(r"\[(\d+[smh])\]", lambda found: f"[{shorter(found[1])}]", rule["expr"])
            rule["expr"] = _TIME_LIMITS.sub(lambda found: f"{found[1]}{int(found[2]) / SCALE:g}", expr)
            if "for" in rule:
                rule["for"] = shorter(rule["for"])
    return rules


class Prometheus:
    """Ends with this process at the latest. inside: the context in which a thread reaches it (another namespace).

    command: what stands before the program's name, to start it in that namespace.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        inside: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        command: Iterable[str] = (),
    ) -> None:
        program = shutil.which("prometheus")
        assert program is not None, "prometheus is not installed; it is in Debian's package prometheus"
        self.directory = directory
        self.inside = inside
        self.begin = time.time()
        (directory / "rules.yml").write_text(json.dumps(scaled_rules()))
        scrapes = [{"job_name": job, "file_sd_configs": [{"files": [f"{directory}/{job}.json"]}]} for job in JOBS]
        for job in JOBS:
            self.scrape(job, [])
        times = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
        config = {"global": times, "rule_files": ["rules.yml"], "scrape_configs": scrapes}
        (directory / "prometheus.yml").write_text(json.dumps(config))
        # Prometheus cannot choose a port. Somebody else may take the one that was free a moment ago.
        for _ in range(5):
            with inside(), socket.create_server(("127.0.0.1", 0)) as free:
                self.address = f"127.0.0.1:{free.getsockname()[1]}"
            with open(directory / "prometheus.log", "ab") as log:
                self.process = start_tethered(
                    [
                        *command,
                        program,
                        f"--config.file={directory}/prometheus.yml",
                        f"--storage.tsdb.path={directory}/data",
                        f"--web.listen-address={self.address}",
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            until(lambda: self.ready() or self.process.poll() is not None, "Prometheus is ready")
            if self.process.poll() is None:
                return
        raise RuntimeError(f"Prometheus does not run:\n{(directory / 'prometheus.log').read_text()[-2000:]}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def scrape(self, job: str, addresses: list[str]) -> None:
        """Sets the targets of a job. Prometheus notices by itself."""
        path = self.directory / f"{job}.json"
        path.with_suffix(".new").write_text(json.dumps([{"targets": addresses}] if addresses else []))
        path.with_suffix(".new").replace(path)

    def ready(self) -> bool:
        try:
            with self.inside(), urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=PATIENCE_S) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def get(self, path: str, **parameters: str) -> Any:
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with self.inside(), urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"Prometheus refuses {parameters}: {error.read().decode()}") from None

    def value(self, query: str) -> float | None:
        """The sum of what a query yields now; None: nothing."""
        result = self.get("query", query=query)["result"]
        return sum(float(series["value"][1]) for series in result) if result else None

    def course(self, query: str, begin: float | None = None) -> list[Json]:
        """The series of a query from the start of Prometheus (or from `begin`) until now, a point each second."""
        window = {"start": f"{begin or self.begin:.3f}", "end": f"{time.time():.3f}", "step": "1"}
        result: list[Json] = self.get("query_range", query=query, **window)["result"]
        for series in result:
            series["values"] = [(float(t), float(v)) for t, v in series["values"] if math.isfinite(float(v))]
        return [series for series in result if series["values"]]

    # ------------------------------------------------------------------ alerts

    def firing(self) -> set[str]:
        return {alert["labels"]["alertname"] for alert in self.get("alerts")["alerts"] if alert["state"] == "firing"}

    def fires(self, *alerts: str) -> None:
        until(lambda: set(alerts) <= self.firing(), lambda: f"{set(alerts) - self.firing()} fire. {self.story()}")

    def clears(self, *alerts: str) -> None:
        until(lambda: not set(alerts) & self.firing(), lambda: f"{set(alerts) & self.firing()} clear. {self.story()}")

    def story(self) -> str:
        alerts = [f"{a['state']} {a['labels']} {a['value']}" for a in self.get("alerts")["alerts"]]
        return "Alerts now:\n" + "\n".join(alerts)

    def check_rules(self) -> None:
        """Fails if Prometheus could not evaluate a rule."""
        for group in self.get("rules")["groups"]:
            for rule in group["rules"]:
                assert rule["health"] == "ok", f"{rule['name']}: {rule.get('lastError')}"

    # ------------------------------------------------------------------ dashboards

    def empty(self) -> dict[str, str]:
        """Maps what a panel or an annotation asks for without an answer to its expression."""
        found = {}
        for path in FILES:
            asked = [(panel["title"], target["expr"]) for panel in panels(path) for target in panel["targets"]]
            asked += [(mark["name"], mark["expr"]) for mark in dashboard(path)["annotations"]["list"]]
            for title, expr in asked:
                if not self.course(filled(expr, INTERVAL)):
                    found[f"{path.stem}: {title}: {expr}"] = expr
        return found


def named(legend: str, labels: dict[str, str]) -> str:
    """The legend of a series, as Grafana makes it."""
    for name in re.findall(r"\{\{(\w+)\}\}", legend):
        legend = legend.replace("{{%s}}" % name, labels.get(name, ""))
    return legend


def draw(prometheus: Prometheus, board: str, titles: Iterable[str], picture: pathlib.Path) -> None:
    """Draws panels of a dashboard, two in a row, from what Prometheus has."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    (path,) = (path for path in FILES if path.stem == board)
    lines = {panel["title"]: panel for panel in panels(path) if panel["type"] == "timeseries"}
    chosen = [lines[title] for title in titles]
    rows = math.ceil(len(chosen) / 2)
    figure, axes = pyplot.subplots(rows, 2, figsize=(11, 2.7 * rows), squeeze=False)
    units = {"s": "s", "Bps": "MB/s", "percentunit": "%", "bytes": "MB", "ops": "/s", "none": ""}
    factors = {"Bps": 1e-6, "bytes": 1e-6, "percentunit": 100}
    peers: dict[str, str] = {}
    for panel, axis in zip(chosen, axes.flat):
        defaults = panel["fieldConfig"]["defaults"]
        factor = factors.get(defaults["unit"], 1)
        drawn: list[tuple[str, dict[float, float]]] = []
        for target in panel["targets"]:
            for series in prometheus.course(filled(target["expr"], INTERVAL)):
                labels = dict(series["metric"])
                if "instance" in labels:
                    labels["instance"] = peers.setdefault(labels["instance"], f"host {len(peers) + 1}")
                legend = named(target["legendFormat"], labels)
                points = {t - prometheus.begin: v * factor for t, v in series["values"]}
                drawn.append((legend, points))
        if defaults["custom"].get("stacking", {}).get("mode") == "normal":
            # A gap stays a gap.
            seconds = {round(t) for _, points in drawn for t in points}
            times = list(range(min(seconds), max(seconds) + 1))
            drawn = [(legend, {round(t): v for t, v in points.items()}) for legend, points in drawn]
            axis.stackplot(
                times, [[p.get(t, 0) for t in times] for _, p in drawn], labels=[n for n, _ in drawn], alpha=0.75
            )
        else:
            for legend, points in drawn:
                # A gap stays a gap.
                times = list(range(math.floor(min(points)), math.ceil(max(points)) + 1))
                known = {round(t): v for t, v in points.items()}
                axis.plot(times, [known.get(round(t), math.nan) for t in times], label=legend, linewidth=1.2)
        for mark in dashboard(path)["annotations"]["list"]:
            for series in prometheus.course(mark["expr"].replace("[1m]", "[2s]")):
                last = -math.inf
                for t, _ in series["values"]:
                    if t > last + 2:
                        axis.axvline(t - prometheus.begin, color=mark["iconColor"], linewidth=0.7, alpha=0.6)
                    last = t
        axis.set_title(panel["title"], loc="left", fontsize=10)
        axis.set_ylabel(units[defaults["unit"]], fontsize=8)
        axis.tick_params(labelsize=8)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        if len(drawn) <= 8:
            axis.legend(fontsize=7, loc="upper left", framealpha=0.6)
    for axis in axes[-1]:
        axis.set_xlabel("seconds", fontsize=8)
    figure.tight_layout()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=80)
    pyplot.close(figure)
    assert picture.stat().st_size < 100_000, f"{picture.name} is too large for the docs: draw less"
