#!/usr/bin/env python3
"""Writes what the programs consist of, as a software bill of materials (SPDX 2.3, JSON).

  tools/sbom.py                                  # out/bin and out/lib, to out/longhaul.spdx.json
  tools/sbom.py --output=FILE PROGRAM...         # these programs
  tools/sbom.py --wheel=WHEEL PROGRAM...         # puts the document into a wheel that holds these programs (PEP 770):
                                                 # .dist-info/sboms/longhaul.spdx.json. The programs of the wheel may be
                                                 # stripped or patched: their SHA-256 counts

The document names:

- each program, with its SHA-256
- the Debian packages of the libraries that it loads, and of those that these load, with their versions
  (DYNAMIC_LINK)
- the Debian packages that deploy/apt-packages.txt installs to compile (BUILD_DEPENDENCY_OF). Some of them are headers
  whose code is part of the programs
- the Python packages of tools/requirements.txt (TEST_DEPENDENCY_OF) and tools/requirements-wheels.txt
  (BUILD_TOOL_OF). The programs do not contain them

Run it on the machine that has built the programs: versions come from its dpkg. The same programs and packages give the
same document, if SOURCE_DATE_EPOCH is set.
"""

from __future__ import annotations

import argparse
import base64
import datetime
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import zipfile
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
SUPPLIER = "Organization: Longhaul"
PROGRAMS = ["out/bin/longhaul-coordinator", "out/bin/longhaul-peerd", "out/bin/lhctl"]
LIBRARIES = ["out/lib/liblonghaul.so.0"]

Json = dict[str, Any]


def version() -> str:
    found = re.search(r'kVersion\[?\]? = "([^"]+)"', (ROOT / "base/daemon/version.h").read_text())
    if found is None:
        raise SystemExit("sbom: no kVersion in base/daemon/version.h")
    return found[1]


def spdx_id(kind: str, name: str) -> str:
    return f"SPDXRef-{kind}-" + re.sub(r"[^A-Za-z0-9.-]", "-", name.replace("+", "plus"))


def loaded_libraries(program: pathlib.Path) -> list[pathlib.Path]:
    """The libraries that the dynamic linker loads for a program, its own ones and theirs."""
    listed = subprocess.run(["ldd", str(program)], capture_output=True, text=True)
    if listed.returncode != 0 and "not a dynamic executable" not in listed.stdout + listed.stderr:
        raise SystemExit(f"sbom: ldd {program}: {listed.stderr.strip()}")
    missing = re.findall(r"^\s*(\S+) => not found", listed.stdout, re.M)
    if missing:
        raise SystemExit(f"sbom: {program} needs libraries that this machine lacks: {', '.join(missing)}")
    return sorted({pathlib.Path(path) for path in re.findall(r"(/\S+) \(0x", listed.stdout)})


def packages_of(libraries: set[pathlib.Path]) -> set[str]:
    """The Debian packages that have these libraries: `name`, or `name:arch` where dpkg says so.

    One call of dpkg-query for all of them, because each call reads the lists of files of all packages.
    """

    def places(library: pathlib.Path) -> list[str]:
        # Debian 12 has /lib as a link to /usr/lib, and dpkg knows either path.
        real = library.resolve()
        return [str(library), str(real), f"/usr{real}", re.sub("^/usr", "", str(real))]

    wanted = sorted({place for library in libraries for place in places(library)})
    # It ends with 1, because it does not know all of these paths.
    found = subprocess.run(["dpkg-query", "--search", *wanted], capture_output=True, text=True)
    owners: dict[str, str] = {}
    for line in found.stdout.splitlines():
        names, _, path = line.rpartition(": ")
        owners[path] = names.split(",")[0]
    packages = set()
    for library in libraries:
        known = [owners[place] for place in places(library) if place in owners]
        if not known:
            raise SystemExit(f"sbom: no Debian package has {library}")
        packages.add(known[0])
    return packages


def debian_package(name: str) -> Json | None:
    """None: the package is not installed."""
    form = "${Package}\t${Version}\t${Architecture}\t${source:Package}\t${db:Status-Status}\n"
    found = subprocess.run(["dpkg-query", "--show", f"--showformat={form}", name], capture_output=True, text=True)
    rows = [row.split("\t") for row in found.stdout.splitlines()]
    installed = [row for row in rows if row[4] == "installed"]
    if not installed:
        return None
    package, number, architecture, source, _ = installed[0]
    return {
        "SPDXID": spdx_id("deb", package),
        "name": package,
        "versionInfo": number,
        "supplier": "Organization: Debian",
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": False,
        "licenseConcluded": "NOASSERTION",
        "licenseDeclared": "NOASSERTION",
        "copyrightText": "NOASSERTION",
        "sourceInfo": f"built from the Debian source package {source}",
        "externalRefs": [
            {
                "referenceCategory": "PACKAGE-MANAGER",
                "referenceType": "purl",
                "referenceLocator": f"pkg:deb/debian/{package}@{number}?arch={architecture}",
            }
        ],
    }


def python_package(line: str) -> Json:
    name, number = line.split("==")
    return {
        "SPDXID": spdx_id("pypi", name),
        "name": name,
        "versionInfo": number,
        "supplier": "NOASSERTION",
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": False,
        "licenseConcluded": "NOASSERTION",
        "licenseDeclared": "NOASSERTION",
        "copyrightText": "NOASSERTION",
        "externalRefs": [
            {
                "referenceCategory": "PACKAGE-MANAGER",
                "referenceType": "purl",
                "referenceLocator": f"pkg:pypi/{name.lower()}@{number}",
            }
        ],
    }


def lines_of(path: str) -> list[str]:
    lines = (line.split("#")[0].strip() for line in (ROOT / path).read_text().splitlines())
    return [line for line in lines if line]


def compile_packages() -> list[str]:
    """The packages of deploy/apt-packages.txt that compiling needs: those before the line `# To run`."""
    text = (ROOT / "deploy/apt-packages.txt").read_text().split("# To run")[0]
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def program_package(program: pathlib.Path, content: bytes) -> Json:
    return {
        "SPDXID": spdx_id("program", program.name),
        "name": program.name,
        "versionInfo": version(),
        "packageFileName": program.name,
        "checksums": [{"algorithm": "SHA256", "checksumValue": hashlib.sha256(content).hexdigest()}],
        "supplier": SUPPLIER,
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": False,
        "licenseConcluded": "Apache-2.0",
        "licenseDeclared": "Apache-2.0",
        "copyrightText": "NOASSERTION",
    }


def document(programs: list[pathlib.Path], contents: list[bytes]) -> Json:
    """The bill of programs of this machine. contents: what the users of the bill get of each program."""
    packages: dict[str, Json] = {}
    relationships: list[tuple[str, str, str]] = []

    def add(package: Json) -> str:
        packages[package["SPDXID"]] = package
        return str(package["SPDXID"])

    own = [add(program_package(*one)) for one in zip(programs, contents, strict=True)]
    for program, name in zip(programs, own, strict=True):
        relationships.append(("SPDXRef-DOCUMENT", "DESCRIBES", name))
        for owner in sorted(packages_of(set(loaded_libraries(program)))):
            found = debian_package(owner)
            if found is None:
                raise SystemExit(f"sbom: dpkg does not know the package {owner}")
            relationships.append((name, "DYNAMIC_LINK", add(found)))
    for wanted in compile_packages():
        found = debian_package(wanted)
        if found is not None:
            relationships += [(add(found), "BUILD_DEPENDENCY_OF", name) for name in own]
    for path, relation in [
        ("tools/requirements.txt", "TEST_DEPENDENCY_OF"),
        ("tools/requirements-wheels.txt", "BUILD_TOOL_OF"),
    ]:
        for line in lines_of(path):
            relationships += [(add(python_package(line)), relation, name) for name in own]

    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    moment = datetime.datetime.fromtimestamp(
        int(epoch) if epoch else int(datetime.datetime.now().timestamp()), datetime.timezone.utc
    )
    content = json.dumps([packages, relationships], sort_keys=True)
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": f"longhaul-{version()}",
        "documentNamespace": f"https://longhaul.invalid/spdx/{hashlib.sha256(content.encode()).hexdigest()}",
        "creationInfo": {
            "created": moment.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "creators": [SUPPLIER, "Tool: longhaul tools/sbom.py"],
        },
        "packages": [packages[name] for name in sorted(packages)],
        "relationships": [
            {"spdxElementId": a, "relationshipType": kind, "relatedSpdxElement": b} for a, kind, b in relationships
        ],
    }


def as_text(bill: Json) -> str:
    return json.dumps(bill, indent=1) + "\n"


def in_wheel(wheel: zipfile.ZipFile, program: pathlib.Path) -> bytes:
    found = [name for name in wheel.namelist() if pathlib.PurePosixPath(name).name == program.name]
    if len(found) != 1:
        raise SystemExit(f"sbom: {wheel.filename} has {len(found)} files named {program.name}, not one")
    return wheel.read(found[0])


def add_to_wheel(path: pathlib.Path, programs: list[pathlib.Path]) -> None:
    """Writes the wheel anew, with the bill and a line for it in RECORD. Everything else stays as it is."""
    new = path.with_suffix(".new")
    with zipfile.ZipFile(path) as wheel, zipfile.ZipFile(new, "w") as target:
        (record,) = [entry for entry in wheel.infolist() if entry.filename.endswith(".dist-info/RECORD")]
        name = str(pathlib.PurePosixPath(record.filename).parent / "sboms" / "longhaul.spdx.json")
        text = as_text(document(programs, [in_wheel(wheel, program) for program in programs])).encode()
        digest = base64.urlsafe_b64encode(hashlib.sha256(text).digest()).decode().rstrip("=")
        for entry in wheel.infolist():
            if entry.filename not in (record.filename, name):
                target.writestr(entry, wheel.read(entry))
        lines = [line for line in wheel.read(record).decode().splitlines() if not line.startswith(f"{name},")]
        added = zipfile.ZipInfo(name, record.date_time)
        added.compress_type, added.external_attr = record.compress_type, record.external_attr
        target.writestr(added, text)
        target.writestr(record, "\n".join([*lines, f"{name},sha256={digest},{len(text)}", ""]))
    new.replace(path)


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "out/longhaul.spdx.json", metavar="FILE")
    parser.add_argument("--wheel", type=pathlib.Path, metavar="WHEEL")
    parser.add_argument("programs", nargs="*", type=pathlib.Path, metavar="PROGRAM")
    options = parser.parse_args()
    programs = options.programs or [ROOT / path for path in PROGRAMS + LIBRARIES]
    absent = [str(program) for program in programs if not program.is_file()]
    if absent:
        print(f"sbom: no such file: {', '.join(absent)}; run tools/build first", file=sys.stderr)
        return 2
    if options.wheel is not None:
        add_to_wheel(options.wheel, programs)
        return 0
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(as_text(document(programs, [program.read_bytes() for program in programs])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
