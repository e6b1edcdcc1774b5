"""Tests of deploy/prometheus: rules are correct, fire when they should, and have a section in the runbook."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
RULE_TESTS = ROOT / "tests" / "deploy" / "rules_test.yml"
METRIC = re.compile(r"\blonghaul_(?:peerd|coordinator)_\w+")
Rule = dict[str, Any]


def rules() -> list[Rule]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def alerts() -> list[Rule]:
    return [rule for rule in rules() if "alert" in rule]


def listed_metrics() -> dict[str, str]:
    """The names on docs/metrics.md, with their types."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    return dict(re.findall(r"^- `(longhaul_\w+)` \((\w+)", page, flags=re.MULTILINE))


def unlisted(text: str) -> set[str]:
    """The names of metrics and of series of histograms in the text that docs/metrics.md does not have."""
    listed = listed_metrics()
    known = set(listed)
    for name, kind in listed.items():
        if kind == "histogram":
            known |= {f"{name}_bucket", f"{name}_sum", f"{name}_count"}
    return set(METRIC.findall(text)) - known


def promtool(*arguments: str) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed; it is in Debian's package prometheus")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"promtool {' '.join(arguments)}:\n{done.stdout}{done.stderr}"


def test_prometheus_takes_the_rules_and_the_configuration() -> None:
    promtool("check", "rules", str(RULES))
    promtool("check", "config", str(RULES.with_name("prometheus.yml")))
    configuration = yaml.safe_load(RULES.with_name("prometheus.yml").read_text())
    assert configuration["rule_files"] == [RULES.name], "prometheus.yml has to load the rules"


def test_alerts_fire_and_keep_quiet_as_the_cases_say() -> None:
    promtool("test", "rules", str(RULE_TESTS))


def test_each_alert_has_a_firing_and_a_quiet_case() -> None:
    firing: set[str] = set()
    quiet: set[str] = set()
    for test in yaml.safe_load(RULE_TESTS.read_text())["tests"]:
        for case in test.get("alert_rule_test", []):
            (firing if case["exp_alerts"] else quiet).add(case["alertname"])
    names = {alert["alert"] for alert in alerts()}
    assert names, "there are no alerts"
    assert (names - firing, names - quiet) == (set(), set()), "alerts without a firing case, without a quiet case"


def test_rules_and_runbook_name_metrics_that_exist() -> None:
    assert len(listed_metrics()) > 50, "docs/metrics.md has another form than this test expects"
    for path in (RULES, RULE_TESTS, ROOT / "docs" / "runbook.md"):
        assert METRIC.search(path.read_text()), f"{path.name} names no metric"
        assert not unlisted(path.read_text()), f"{path.name} names metrics that are not in docs/metrics.md"


def test_recorded_names_are_recorded() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    used = set(re.findall(r"longhaul:\w+:\w+", RULES.read_text()))
    assert used == recorded


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_an_alert_leads_to_its_section_of_the_runbook(alert: Rule) -> None:
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    assert alert["annotations"]["summary"] and alert["annotations"]["description"]
    page, _, anchor = alert["annotations"]["runbook"].partition("#")
    assert anchor == alert["alert"].lower()
    sections = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL))
    assert alert["alert"] in sections, f"{page} has no section for the alert"
    for part in ("**Meaning.**", "**Look.**", "**Do.**"):
        assert part in sections[alert["alert"]], f"the section of {alert['alert']} has no {part}"


def test_the_runbook_explains_no_alert_that_is_gone() -> None:
    sections = re.findall(r"^## (\S+)$", (ROOT / "docs" / "runbook.md").read_text(), re.MULTILINE)
    assert set(sections) == {alert["alert"] for alert in alerts()}
