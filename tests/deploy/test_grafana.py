"""The dashboards of deploy/grafana follow from their source, are sound, and ask only for what Prometheus has."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import re
import types
from typing import Any

import pytest
import yaml
from test_prometheus import promtool, rules, unlisted

ROOT = pathlib.Path(__file__).resolve().parents[2]
GRAFANA = ROOT / "deploy" / "grafana"
FILES = sorted((GRAFANA / "dashboards").glob("*.json"))
# Series that Prometheus makes by itself.
OWN = {"up", "ALERTS"}
# Units of Grafana: https://github.com/grafana/grafana/blob/main/packages/grafana-data/src/valueFormats/categories.ts
UNITS = {"none", "s", "Bps", "bytes", "ops", "percentunit"}
Json = dict[str, Any]


def dashboard(path: pathlib.Path) -> Json:
    loaded: Json = json.loads(path.read_text())
    return loaded


def panels(path: pathlib.Path) -> list[Json]:
    return [panel for panel in dashboard(path)["panels"] if panel["type"] != "row"]


def expressions(path: pathlib.Path) -> list[str]:
    """All expressions of panels and annotations, as they stand in the dashboard."""
    found = [target["expr"] for panel in panels(path) for target in panel["targets"]]
    return found + [annotation["expr"] for annotation in dashboard(path)["annotations"]["list"]]


def filled(expr: str, interval: str = "1m") -> str:
    """An expression as Prometheus gets it from Grafana, with all values chosen."""
    expr = expr.replace("$__rate_interval", interval)
    return re.sub(r"\$(run|peer)\b", ".*", expr)


def generator() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("longhaul_dashboards", GRAFANA / "dashboards.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_generator_writes_what_is_in_the_tree(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = generator()
    monkeypatch.setattr(module, "DIRECTORY", tmp_path)
    module.main()
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert set(made) == {"run.json", "links.json", "faults.json", "coordinator.json"}
    kept = {path.name: path.read_text() for path in FILES}
    assert kept == made, "run deploy/grafana/dashboards.py"


def test_each_dashboard_has_an_id_of_its_own_and_leads_to_the_others() -> None:
    boards = [dashboard(path) for path in FILES]
    assert len({board["uid"] for board in boards}) == len(boards)
    for board in boards:
        assert board["title"].startswith("Longhaul: ") and board["description"]
        assert not board["editable"], "the file is the source"
        (link,) = board["links"]
        assert set(link["tags"]) <= set(board["tags"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_panels_are_sound(path: pathlib.Path) -> None:
    board = dashboard(path)
    variables = {variable["name"] for variable in board["templating"]["list"]}
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids), "two panels have one id"
    places: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & places, f"{panel['title']} lies on another panel"
        places |= cells
        if panel["type"] == "row":
            continue
        assert panel["title"] and panel["description"].endswith("."), panel
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        assert panel["targets"], f"{panel['title']} asks for nothing"
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for asks in (panel, *panel["targets"]):
            assert asks["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]
    assert "datasource" in variables
    for expr in expressions(path):
        assert set(re.findall(r"\$(\w+)", expr)) <= variables | {"__rate_interval"}, expr


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_expressions_name_metrics_and_recorded_series_that_exist(path: pathlib.Path) -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for expr in expressions(path):
        assert not unlisted(expr), f"{expr} names metrics that are not in docs/metrics.md"
        assert set(re.findall(r"longhaul:\w+:\w+", expr)) <= recorded, f"{expr} names series that no rule records"
        # What stands before a selector is a series.
        named = set(re.findall(r"([A-Za-z_][\w:]*)\{", expr))
        assert all(name.startswith("longhaul_") or name in OWN | recorded for name in named), expr
    for variable in dashboard(path)["templating"]["list"]:
        if variable["type"] == "query":
            assert not unlisted(variable["query"]["query"])


def test_prometheus_can_read_all_expressions(tmp_path: pathlib.Path) -> None:
    exprs = [filled(expr) for path in FILES for expr in expressions(path)]
    assert len(exprs) > 80
    assert not [expr for expr in exprs if "$" in expr]
    named = [{"record": f"panel:{number}", "expr": expr} for number, expr in enumerate(exprs)]
    checked = tmp_path / "panels.yml"
    checked.write_text(json.dumps({"groups": [{"name": "panels", "rules": named}]}))
    promtool("check", "rules", str(checked))


def test_annotations_tell_joins_deaths_and_epochs() -> None:
    names = {annotation["name"] for annotation in dashboard(GRAFANA / "dashboards" / "run.json")["annotations"]["list"]}
    assert {"Joins", "Deaths", "Leaves"} <= names and any("poch" in name for name in names)
    for path in FILES:
        for annotation in dashboard(path)["annotations"]["list"]:
            assert annotation["enable"] and annotation["titleFormat"] and annotation["iconColor"]


def test_grafana_finds_the_data_source_and_the_dashboards() -> None:
    compose = yaml.safe_load((ROOT / "deploy" / "docker" / "compose.yaml").read_text())
    service = compose["services"]["grafana"]
    assert service["profiles"] == ["grafana"]
    mounts = dict(volume.split(":")[:2] for volume in service["volumes"])
    assert mounts == {
        "../grafana/provisioning": "/etc/grafana/provisioning",
        "../grafana/dashboards": "/var/lib/grafana/dashboards",
    }
    (provider,) = yaml.safe_load((GRAFANA / "provisioning" / "dashboards" / "longhaul.yaml").read_text())["providers"]
    assert provider["options"]["path"] == mounts["../grafana/dashboards"]
    (source,) = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "prometheus.yaml").read_text())[
        "datasources"
    ]
    assert source["type"] == "prometheus" and source["isDefault"]
    assert source["url"] == "$PROMETHEUS_URL" and service["environment"]["PROMETHEUS_URL"] == "http://prometheus:9090"
    prometheus = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    assert source["jsonData"]["timeInterval"] == prometheus["global"]["scrape_interval"]
    assert {job["job_name"] for job in prometheus["scrape_configs"]} == {"longhaul-coordinator", "longhaul-peerd"}
    home = service["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (GRAFANA / "dashboards" / pathlib.PurePath(home).name).exists()
