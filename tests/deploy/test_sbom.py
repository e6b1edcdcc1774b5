"""Tests of the bill of materials that tools/sbom.py writes."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PEERD = ROOT / "out/bin/longhaul-peerd"
LIBRARY = ROOT / "out/lib/liblonghaul.so.0"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    output = tmp_path_factory.mktemp("sbom") / "deeper" / "sbom.json"
    command: list[str | pathlib.Path] = [sys.executable, ROOT / "tools/sbom.py", f"--output={output}", PEERD, LIBRARY]
    subprocess.run(command, check=True, env={"PATH": "/usr/bin:/bin", "SOURCE_DATE_EPOCH": "1700000000"})
    return output.read_text()


@pytest.fixture(scope="module")
def document(text: str) -> dict:
    parsed: dict = json.loads(text)
    return parsed


def test_it_is_a_whole_spdx_document(document: dict) -> None:
    assert document["spdxVersion"] == "SPDX-2.3" and document["dataLicense"] == "CC0-1.0"
    assert document["creationInfo"]["created"] == "2023-11-14T22:13:20Z"
    ids = [package["SPDXID"] for package in document["packages"]]
    assert len(ids) == len(set(ids))
    for package in document["packages"]:
        assert re.fullmatch(r"SPDXRef-[A-Za-z0-9.-]+", package["SPDXID"])
        assert package["name"] and package["versionInfo"] and package["downloadLocation"]
    known = {*ids, "SPDXRef-DOCUMENT"}
    for relation in document["relationships"]:
        assert relation["spdxElementId"] in known and relation["relatedSpdxElement"] in known
    described = {r["relatedSpdxElement"] for r in document["relationships"] if r["relationshipType"] == "DESCRIBES"}
    assert described == {"SPDXRef-program-longhaul-peerd", "SPDXRef-program-liblonghaul.so.0"}


def test_every_library_that_is_loaded_has_its_package_with_the_version(document: dict) -> None:
    names = {package["SPDXID"]: package for package in document["packages"]}
    linked = {
        names[r["relatedSpdxElement"]]["name"]: names[r["relatedSpdxElement"]]["versionInfo"]
        for r in document["relationships"]
        if r["relationshipType"] == "DYNAMIC_LINK" and r["spdxElementId"] == "SPDXRef-program-longhaul-peerd"
    }
    dynamic = subprocess.run(["readelf", "--dynamic", PEERD], capture_output=True, text=True, check=True).stdout
    for library in re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic):
        owners = subprocess.run(["dpkg-query", "--search", f"*/{library}"], capture_output=True, text=True, check=True)
        packages = {line.split(":")[0] for line in owners.stdout.splitlines()}
        assert packages & set(linked), library
    for name, version in linked.items():
        installed = subprocess.run(
            ["dpkg-query", "--show", "--showformat=${Version}\n", name], capture_output=True, text=True, check=True
        )
        assert version in installed.stdout.split()
    # The client library needs libc and nothing else.
    assert [
        names[r["relatedSpdxElement"]]["name"]
        for r in document["relationships"]
        if r["relationshipType"] == "DYNAMIC_LINK" and r["spdxElementId"] == "SPDXRef-program-liblonghaul.so.0"
    ] == ["libc6"]


def test_it_names_what_builds_and_tests(document: dict) -> None:
    urls = {ref["referenceLocator"] for package in document["packages"] for ref in package.get("externalRefs", [])}
    assert any(url.startswith("pkg:deb/debian/libxxhash-dev@") for url in urls)
    assert any(url.startswith("pkg:pypi/torch@") for url in urls)
    assert any(url.startswith("pkg:pypi/auditwheel@") for url in urls)


def test_the_same_programs_give_the_same_document(text: str, tmp_path: pathlib.Path) -> None:
    again = tmp_path / "sbom.json"
    command: list[str | pathlib.Path] = [sys.executable, ROOT / "tools/sbom.py", f"--output={again}", PEERD, LIBRARY]
    subprocess.run(command, check=True, env={"PATH": "/usr/bin:/bin", "SOURCE_DATE_EPOCH": "1700000000"})
    assert again.read_text() == text


def test_a_program_that_is_not_there_is_named(tmp_path: pathlib.Path) -> None:
    command: list[str | pathlib.Path] = [
        sys.executable,
        ROOT / "tools/sbom.py",
        f"--output={tmp_path}/x",
        tmp_path / "nothing",
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2 and "nothing" in result.stderr
