"""The seccomp profile for peerd is the default profile of containers/common, with io_uring allowed and nothing else."""

from __future__ import annotations

import hashlib
import json
import pathlib
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROFILE = ROOT / "deploy" / "docker" / "seccomp-peerd.json"
IO_URING = ["io_uring_enter", "io_uring_register", "io_uring_setup"]
# The default of containers/common 0.50 (podman 4.3), as sorted JSON.
DEFAULT_SHA256 = "86fbb3dbde22fd226feb9cfd62252ed8aee3fc736873a2d57d25e69a8d45de55"
# Where podman's packages install the default.
INSTALLED = pathlib.Path("/usr/share/containers/seccomp.json")


def added(profile: dict[str, Any]) -> list[dict[str, Any]]:
    return [rule for rule in profile["syscalls"] if set(rule["names"]) & set(IO_URING)]


def sha256(profile: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(profile, sort_keys=True).encode()).hexdigest()


def without_io_uring() -> dict[str, Any]:
    profile: dict[str, Any] = json.loads(PROFILE.read_text())
    profile["syscalls"] = [rule for rule in profile["syscalls"] if rule not in added(profile)]
    return profile


def test_one_rule_allows_the_three_calls_of_io_uring() -> None:
    rules = added(json.loads(PROFILE.read_text()))
    assert len(rules) == 1
    assert rules[0]["names"] == IO_URING
    assert rules[0]["action"] == "SCMP_ACT_ALLOW"
    assert not rules[0]["args"] and not rules[0]["includes"] and not rules[0]["excludes"]


def test_all_other_rules_are_those_of_the_default() -> None:
    assert sha256(without_io_uring()) == DEFAULT_SHA256


def test_the_installed_default_differs_in_these_calls_only() -> None:
    if not INSTALLED.exists():
        pytest.skip(f"no {INSTALLED} here (it comes with podman)")
    default = json.loads(INSTALLED.read_text())
    if sha256(default) != DEFAULT_SHA256:
        pytest.skip(f"{INSTALLED} is not the version that the profile was made from")
    assert without_io_uring() == default
