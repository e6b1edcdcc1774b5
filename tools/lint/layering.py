#!/usr/bin/env python3
"""Checks that dependencies point one way, by what each source includes.

The rules are the two tables below. For a file without a layer of its own, only the second table counts. A rule that
names files that do not exist (any more) is a finding, too.
"""

import re
import sys
from pathlib import Path
from typing import NamedTuple

import sources

# Headers of base that know of threads or the operating system.
_BASE_VALUES = (
    r"base/(bytes|check|counters|digest|fields|fields_json|hash128|ids|outcome|prng|rarely|status_macros|text|tick)\.h"
)
_ABSL_VALUES = (
    r"absl/(status|strings|types|base/attributes|base/optimization|base/macros|numeric|container/inlined_vector)"
)
_IPC = r"proto/wire/(ipc|ipc_why|kinds|limits|types)\.h"


class Layer(NamedTuple):
    """Sources that match `path` may use `project` headers (and <system> ones) only if they match."""

    path: str
    project: str
    why: str


# The first that matches a file counts. A file may always include the headers of its own directory.
LAYERS = [
    Layer(_IPC, _IPC, "the client library, in C, sees nothing else"),
    Layer(
        r"proto/wire/",
        rf"proto/wire/|{_BASE_VALUES}|{_ABSL_VALUES}",
        "wire codecs see base values only",
    ),
    Layer(
        r"proto/control/(messages\.h|blocked\.(h|cc))",
        rf"proto/control/messages\.h|proto/wire/(limits|shares)\.h|{_BASE_VALUES}",
        "messages are plain values",
    ),
    Layer(
        r"proto/",
        r"proto/|base/|absl/|google/protobuf/|grpc",
        "what crosses a border knows neither side",
    ),
    Layer(r"base/http/", r"base/|absl/|httplib\.h", "base is below everything"),
    Layer(r"base/(crypto|tls)/", r"base/|absl/|openssl/", "base is below everything"),
    Layer(r"base/", r"base/|absl/", "base is below everything"),
    Layer(
        r"coordinator/solver/",
        rf"proto/wire/shares\.h|{_BASE_VALUES}",
        "the solver sees base values only",
    ),
    Layer(
        r"coordinator/store/",
        r"coordinator/(core/records|tokens/token_record)\.h|coordinator/store/|base/|absl/",
        "stores keep records and know no decisions",
    ),
    Layer(
        r"coordinator/tokens/",
        r"coordinator/tokens/|base/|absl/",
        "tokens know neither the store nor callers",
    ),
    Layer(
        r"coordinator/metrics/",
        r"coordinator/core/records\.h|coordinator/metrics/|base/|prometheus/",
        "metrics are told what to count",
    ),
    Layer(
        r"coordinator/loop/",
        r"coordinator/(core|loop|metrics|store)/|coordinator/tokens/token_record\.h|base/|absl/",
        "the loop knows streams and operators through its ports only",
    ),
    Layer(
        r"coordinator/grpc/",
        r"coordinator/(grpc|loop|metrics|tokens)/|proto/|base/|absl/|grpcpp/|google/protobuf/",
        "gRPC reaches the core and the store through the loop only",
    ),
    Layer(
        r"coordinator/web/",
        r"coordinator/core/records\.h|coordinator/(loop|metrics|web)/|base/|absl/",
        "pages reach the core and the store through the loop only",
    ),
    Layer(
        r"(coordinator|peerd)/core/",
        rf"proto/control/(messages|blocked|signed_ready)\.h|proto/wire/|base/crypto/secrets\.h|{_BASE_VALUES}|"
        rf"{_ABSL_VALUES}|coordinator/(core|solver)/|peerd/core/",
        "cores see messages and base values only",
    ),
    Layer(
        r"peerd/collective/",
        rf"peerd/collective/|proto/wire/|{_BASE_VALUES}|{_ABSL_VALUES}",
        "plans, executors and kernels see wire codecs and base values only",
    ),
    Layer(
        r"peerd/io/",
        r"peerd/io/|base/|absl/|liburing\.h",
        "the ring knows nothing of what it carries",
    ),
    Layer(
        r"peerd/transport/",
        r"peerd/(io|paths|transport)/|proto/wire/|base/|absl/|openssl/",
        "lanes know no ops",
    ),
    Layer(
        r"peerd/state/",
        r"peerd/io/unmapper\.h|peerd/(state|transport)/|proto/control/messages\.h|proto/wire/|base/|absl/",
        "states move over links, and know neither ops nor trainers",
    ),
    Layer(
        r"peerd/ipc/",
        r"peerd/engine/trainers\.h|peerd/core/(events|values)\.h|peerd/state/local_state\.h|peerd/(io|ipc)/|proto/wire/|base/|absl/",
        "the socket turns bytes into events, and knows neither links nor decisions",
    ),
    Layer(
        r"peerd/paths/",
        r"peerd/paths/|proto/control/messages\.h|proto/wire/limits\.h|base/(log|tcp)\.h|"
        rf"{_BASE_VALUES}|absl/functional/|{_ABSL_VALUES}",
        "samples come in and settings go out: what paths carry is judged without sockets, links or ops",
    ),
    Layer(
        r"peerd/control/",
        r"peerd/control/|proto/|base/|absl/|grpcpp/|google/protobuf/",
        "the control stream carries messages, and knows nobody who says them",
    ),
    Layer(
        r"peerd/metrics/",
        r"peerd/(core|metrics|transport)/|base/|prometheus/",
        "metrics are told what to count",
    ),
    Layer(
        r"peerd/engine/",
        r"peerd/(collective|core|engine|state|transport)/|proto/(control/(messages|signed_ready|why)\.h|wire/)|base/|absl/",
        "the engine reaches trainers, coordinator and ring through its ports only",
    ),
    Layer(r"client/", rf"client/|longhaul/|{_IPC}", "the client library depends on nothing"),
]


class Confined(NamedTuple):
    """Headers that match `header` may be included by sources that match `path` only."""

    header: str
    path: str
    why: str


CONFINED = [
    Confined(
        r"coordinator/",
        r"(coordinator|tests|tools)/",
        "only tests and tools see the coordinator's code",
    ),
    Confined(r"peerd/", r"(peerd|tests|bench|tools|client/tests)/", "only tests and tools see peerd's code"),
    Confined(r"tests/", r".*_test\.(cc|h)$|tests/", "tests are above everything"),
    Confined(
        r"grpc(pp|\+\+)?/|google/protobuf/|.*\.pb\.h$",
        r"coordinator/grpc/|peerd/control/|proto/|tools/lhctl/|tests/|bench/",
        "gRPC and protobuf stay at the border",
    ),
    Confined(r"httplib\.h$", r"base/http/", "one file knows cpp-httplib"),
    Confined(r"liburing(/.*)?\.h$", r"peerd/io/", "one file knows io_uring"),
    Confined(
        r"prometheus/",
        r"(coordinator|peerd)/metrics/|tests/",
        "other code counts in plain structs",
    ),
    Confined(
        r"openssl/",
        r"base/(crypto|tls)/|peerd/transport/|tools/lhctl/|tests/",
        "few files know OpenSSL",
    ),
    Confined(r"sqlite3\.h$", r"coordinator/store/", "only stores know SQLite"),
    Confined(
        r"(gtest|gmock)/",
        r".*(_test\.cc$|[/_]testing\.(h|cc)$)|tests/",
        "only tests know GoogleTest",
    ),
]

# Of everything but tests, exactly this many files include it.
LIBURING_FILES = 1

# <...> headers of other projects that count like quoted ones.
_FOREIGN = re.compile(r"absl/|grpc|google/|prometheus/|liburing|sqlite3|httplib|openssl/|gtest/|gmock/|longhaul/")


def _layer_findings(path: str, include: sources.Include) -> list[sources.Finding]:
    for layer in LAYERS:
        match = re.match(layer.path, path)
        if not match:
            continue
        own = include.name.startswith(path.rsplit("/", 1)[0] + "/") or "/" not in include.name
        if (own and include.quoted) or re.match(layer.project, include.name):
            return []
        return [sources.Finding(path, include.line, f"must not include {include.name}: {layer.why}")]
    return []


# Where the tables name files of this tree.
_OWN = re.compile(rf"({'|'.join(sources.DIRECTORIES)})/")


def stale(paths: list[str]) -> list[sources.Finding]:
    """Returns a finding for each name in the tables that fits none of the `paths`."""
    findings = []
    rules: list[Layer | Confined] = [*LAYERS, *CONFINED]
    for rule in rules:
        named = [rule.path, *([rule.project] if isinstance(rule, Layer) else [])]
        for pattern in dict.fromkeys(part for text in named for part in sources.spelled_out(text)):
            if _OWN.match(pattern) and not any(re.match(pattern, path) for path in paths):
                findings.append(
                    sources.Finding("tools/lint/layering.py", 1, f"no file is {pattern}, of the rule '{rule.why}'")
                )
    return findings


def check(root: Path) -> tuple[int, list[sources.Finding]]:
    files = 0
    findings: list[sources.Finding] = []
    with_liburing: list[sources.Finding] = []
    for path in sources.sources(root):
        files += 1
        for include in sources.includes((root / path).read_text()):
            if not include.quoted and not _FOREIGN.match(include.name):
                continue  # the language's or the system's
            for rule in CONFINED:
                if re.match(rule.header, include.name) and not re.match(rule.path, path):
                    findings.append(sources.Finding(path, include.line, f"must not include {include.name}: {rule.why}"))
                    break
            else:
                if not sources.is_test(path):
                    findings += _layer_findings(path, include)
            if re.match(r"liburing(/.*)?\.h$", include.name) and not sources.is_test(path):
                with_liburing.append(sources.Finding(path, include.line, "includes liburing as another file does"))
    if len(with_liburing) > LIBURING_FILES:
        findings += with_liburing
    findings += [
        sources.Finding(f.path, f.line, "liburing belongs into one .cc file")
        for f in with_liburing
        if not f.path.endswith(".cc")
    ]
    return files, findings


def check_with_rules(root: Path) -> tuple[int, list[sources.Finding]]:
    files, findings = check(root)
    return files, [*findings, *stale([*sources.sources(root), *sources.protos(root)])]


if __name__ == "__main__":
    sys.exit(
        sources.main(
            check_with_rules,
            "layering",
            "Move the code to where it may see this, or pass a value or an interface down.",
        )
    )
