#!/usr/bin/env python3
"""Writes the two manifests below this directory that follow from other files of the tree.

  base/seccomp-peerd.json                     from deploy/docker/seccomp-peerd.json
  components/monitoring/prometheusrule.yaml   from the rules of deploy/prometheus

Run it after a change there. tests/deploy/test_kubernetes.py fails until you have.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import yaml

HERE = pathlib.Path(__file__).resolve().parent
DEPLOY = HERE.parent
# What the container may have of what the profile asks for: see the DaemonSet.
CAPABILITIES = {"CAP_IPC_LOCK"}
ARCHITECTURES = {
    "amd64": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"],
    "arm64": ["SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"],
}


def seccomp() -> str:
    """The profile as containerd reads it: without rules that depend on capabilities and architectures.

    Docker and podman decide these rules when a container starts. containerd takes the file as it is, and would apply
    all of them at once. A system call that an architecture does not have is skipped there.
    """
    profile = json.loads((DEPLOY / "docker" / "seccomp-peerd.json").read_text())
    rules: list[dict[str, Any]] = []
    for rule in profile["syscalls"]:
        wanted, unwanted = rule.get("includes") or {}, rule.get("excludes") or {}
        if set(wanted) - {"caps", "arches"} or set(unwanted) - {"caps"}:
            raise ValueError(f"a rule with a condition that is not known here: {rule}")
        if not set(wanted.get("caps", ())) <= CAPABILITIES or set(unwanted.get("caps", ())) & CAPABILITIES:
            continue
        if "arches" in wanted and not set(wanted["arches"]) & set(ARCHITECTURES):
            continue
        kept = {key: rule[key] for key in ("names", "action", "errnoRet", "args") if rule.get(key) not in (None, [])}
        rules.append(kept)
    # Where one rule allows a system call and another one forbids it, the answer depends on the runtime.
    forbidden = {
        name for rule in rules if rule["action"] != "SCMP_ACT_ALLOW" and "args" not in rule for name in rule["names"]
    }
    for rule in rules:
        if rule["action"] == "SCMP_ACT_ALLOW":
            rule["names"] = [name for name in rule["names"] if name not in forbidden]
    flat = {
        "defaultAction": profile["defaultAction"],
        "defaultErrnoRet": profile["defaultErrnoRet"],
        "architectures": [name for names in ARCHITECTURES.values() for name in names],
        "syscalls": [rule for rule in rules if rule["names"]],
    }
    return json.dumps(flat, indent="\t") + "\n"


def rules() -> str:
    """All groups of rules, as an object of the Prometheus operator."""
    groups = []
    for path in sorted((DEPLOY / "prometheus").glob("*rules*.yml")):
        if "test" not in path.name:
            groups += yaml.safe_load(path.read_text())["groups"]
    manifest = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "longhaul", "namespace": "longhaul", "labels": {"app.kubernetes.io/name": "longhaul"}},
        "spec": {"groups": groups},
    }
    text: str = yaml.safe_dump(manifest, sort_keys=False, width=118)
    return "# Made by derive.py: do not edit.\n" + text


DERIVED = {
    HERE / "base" / "seccomp-peerd.json": seccomp,
    HERE / "components" / "monitoring" / "prometheusrule.yaml": rules,
}

if __name__ == "__main__":
    for path, content in DERIVED.items():
        path.write_text(content())
