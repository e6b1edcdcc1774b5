#!/usr/bin/env python3
"""Shows that the checks of this directory find what they look for, and nothing else."""

from __future__ import annotations

import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import class_size
import cycles
import definitions
import file_lists
import layering
import names
import purity
import sources

Check = Callable[[Path], tuple[int, list[sources.Finding]]]


def findings(check: Check, files: dict[str, str]) -> list[str]:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        for path, text in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
        return [f"{finding.path}:{finding.line}" for finding in check(root)[1]]


def one(check: Check, path: str, text: str) -> int:
    return len(findings(check, {path: text}))


class Cycles(unittest.TestCase):
    def setUp(self) -> None:
        known: set[str] = set()
        patch = mock.patch.object(cycles, "KNOWN", known)
        patch.start()
        self.addCleanup(patch.stop)

    def test_a_header_and_its_source_are_one_module(self) -> None:
        a = {"base/a.h": '#include "base/b.h"\n', "base/b.h": "", "base/b.cc": '#include "base/b.h"\n'}
        self.assertEqual(findings(cycles.check, a), [])
        a["base/b.cc"] += '#include "base/a.h"\n'
        self.assertEqual(findings(cycles.check, a), ["base/a.h:1"])

    def test_a_circle_is_told_once(self) -> None:
        a = {f"base/{i}.h": f'\n#include "base/{(i + 1) % 3}.h"\n' for i in range(3)}
        a["base/9.h"] = '#include "base/0.h"\n'
        self.assertEqual(findings(cycles.check, a), ["base/0.h:2"])

    def test_imports_for_types_count(self) -> None:
        a = {
            "client/p/_a.py": "from . import _b, _c\n",
            "client/p/_b.py": "if TYPE_CHECKING:\n    from ._a import A\n",
            "client/p/_c.py": "import os\n",
        }
        self.assertEqual(findings(cycles.check, a), ["client/p/_a.py:1"])
        a["client/p/_b.py"] = "from ._c import C\n"
        self.assertEqual(findings(cycles.check, a), [])

    def test_circles_through_packages_are_found(self) -> None:
        packages = {"client/p/__init__.py": "from ._a import A\n", "client/p/q/__init__.py": "from ._x import X\n"}
        for down in ("from .q._x import X", "from .q import _x", "from p.q._x import X", "import p.q._x"):
            for up in ("from .._a import A", "from .. import _a", "from p._a import A"):
                a = {**packages, "client/p/_a.py": f"\n{down}\n", "client/p/q/_x.py": f"{up}\n"}
                self.assertEqual(findings(cycles.check, a), ["client/p/_a.py:2"], (down, up))
                a["client/p/q/_x.py"] = ""
                self.assertEqual(findings(cycles.check, a), [], down)

    def test_imports_count_wherever_they_are(self) -> None:
        for text in (
            "\ndef f():\n    from .q._x import X\n",
            "\nif TYPE_CHECKING:\n    from .q._x import X\n",
            "\ntry:\n    from .q._x import (\n        X,\n    )\nexcept ImportError:\n    pass\n",
        ):
            a = {"client/p/_a.py": text, "client/p/q/_x.py": "from .. import (\n    _a,\n)\n"}
            self.assertEqual(findings(cycles.check, a), ["client/p/_a.py:3"], text)

    def test_what_a_package_offers_is_of_its_init(self) -> None:
        a = {"client/p/__init__.py": "from ._a import A\n", "client/p/_a.py": "from . import A\n"}
        self.assertEqual(findings(cycles.check, a), ["client/p/__init__.py:1"])
        # A text of the same form is no import, and a module of the standard library is no neighbour in a package.
        a["client/p/_a.py"] = '"""\nfrom . import A\n"""\nimport json\n'
        a["client/p/json.py"] = "from ._a import B\n"
        self.assertEqual(findings(cycles.check, a), [])

    def test_a_module_of_the_same_directory_is_meant(self) -> None:
        a = {"bench/ring.py": "from wan import Wan\n", "bench/wan.py": "", "tests/wan/wan.py": "import ring\n"}
        self.assertEqual(findings(cycles.check, a), [])
        a["bench/wan.py"] = "import ring\n"
        self.assertEqual(findings(cycles.check, a), ["bench/ring.py:1"])

    def test_directories_that_lead_to_each_other_are_found(self) -> None:
        a = {
            "coordinator/loop/a.h": "",
            "coordinator/grpc/b.h": '#include "coordinator/loop/a.h"\n',
            "coordinator/loop/c.h": '#include "coordinator/grpc/b.h"\n',
        }
        self.assertEqual(findings(cycles.check, a), ["coordinator/grpc/b.h:1"])
        # A test may use a harness of a directory above its own.
        a["coordinator/loop/c_test.cc"] = a.pop("coordinator/loop/c.h")
        self.assertEqual(findings(cycles.check, a), [])

    def test_a_known_circle_passes_until_it_is_broken(self) -> None:
        a = {"base/a.h": '#include "base/b.h"\n', "base/b.h": '#include "base/a.h"\n'}
        with mock.patch.object(cycles, "KNOWN", {"base/a", "base/b"}):
            self.assertEqual(findings(cycles.check, a), [])
            a["base/b.h"] = ""
            self.assertEqual(findings(cycles.check, a), ["tools/lint/cycles.py:1"] * 2)


class Layering(unittest.TestCase):
    def caught(self, path: str, header: str) -> None:
        self.assertEqual(
            findings(layering.check, {path: f"// {path}\n#include {header}\n"}),
            [f"{path}:2"],
            header,
        )

    def allowed(self, path: str, header: str) -> None:
        self.assertEqual(findings(layering.check, {path: f"#include {header}\n"}), [], header)

    def test_cores_see_messages_and_base_values_only(self) -> None:
        for core in ("coordinator/core/a.cc", "peerd/core/a.cc"):
            self.allowed(core, "<map>")
            self.allowed(core, '"base/ids.h"')
            self.allowed(core, '"proto/control/messages.h"')
            self.allowed(core, '"absl/status/statusor.h"')
            self.caught(core, '"base/mutex.h"')
            self.caught(core, '"proto/control/convert.h"')
            self.caught(core, '"absl/synchronization/mutex.h"')
        self.caught("coordinator/core/a.cc", '"coordinator/store/store.h"')
        self.caught("peerd/core/a.h", '"peerd/transport/transport.h"')
        self.allowed("coordinator/core/a.cc", '"coordinator/solver/ring_solver.h"')
        self.allowed("coordinator/solver/a.cc", '"base/prng.h"')
        self.caught("coordinator/solver/a.h", '"proto/control/messages.h"')

    def test_daemons_do_not_see_each_other(self) -> None:
        self.caught("coordinator/loop/a.cc", '"peerd/core/peer_core.h"')
        self.caught("peerd/daemon/a.cc", '"coordinator/core/records.h"')
        self.caught("coordinator/core/a_test.cc", '"peerd/core/peer_core.h"')
        self.caught("peerd/core/a.cc", '"coordinator/core/records.h"')
        self.allowed("tests/sim/a.cc", '"peerd/core/peer_core.h"')
        self.allowed("tests/sim/a.cc", '"coordinator/core/records.h"')

    def test_only_tests_see_tests(self) -> None:
        self.allowed("client/tests/client_test.cc", '"tests/support/ipc_harness.h"')
        self.allowed("client/tests/client_test.cc", '"peerd/ipc/ipc_server.h"')
        self.caught("client/src/a.c", '"peerd/ipc/ipc_server.h"')
        self.caught("peerd/ipc/a.cc", '"tests/support/ipc_harness.h"')

    def test_client_sees_the_ipc_headers_only(self) -> None:
        self.allowed("client/src/a.c", '"proto/wire/ipc.h"')
        self.allowed("client/src/a.c", "<sys/socket.h>")
        self.allowed("client/src/a.c", '"longhaul/longhaul.h"')
        self.caught("client/src/a.c", '"proto/wire/frame.h"')
        self.caught("client/src/a.c", '"base/check.h"')
        self.caught("client/src/a.c", "<absl/status/status.h>")
        self.caught("proto/wire/ipc.h", '"base/bytes.h"')

    def test_grpc_and_protobuf_stay_at_the_border(self) -> None:
        for header in (
            "<grpcpp/grpcpp.h>",
            '"proto/longhaul/v1/coordinator.pb.h"',
            "<google/protobuf/message.h>",
        ):
            self.allowed("coordinator/grpc/a.cc", header)
            self.allowed("peerd/control/a.cc", header)
            self.allowed("tools/lhctl/a.cc", header)
            self.caught("coordinator/main.cc", header)
            self.caught("peerd/daemon/a.cc", header)
            self.caught("base/a.cc", header)

    def test_liburing_is_in_one_source_file(self) -> None:
        text = "#include <liburing.h>\n"
        self.assertEqual(findings(layering.check, {"peerd/io/a.cc": text}), [])
        self.assertEqual(findings(layering.check, {"peerd/io/a.cc": text, "peerd/io/a_test.cc": text}), [])
        self.assertEqual(findings(layering.check, {"peerd/io/a.h": text}), ["peerd/io/a.h:1"])
        self.assertEqual(len(findings(layering.check, {"peerd/io/a.cc": text, "peerd/io/b.cc": text})), 2)
        self.caught("peerd/daemon/a.cc", "<liburing.h>")

    def test_prometheus_is_in_metrics(self) -> None:
        self.allowed("peerd/metrics/a.cc", "<prometheus/registry.h>")
        self.caught("peerd/daemon/a.cc", "<prometheus/registry.h>")
        self.caught("coordinator/core/a.cc", "<prometheus/registry.h>")

    def test_collectives_see_wire_codecs_only(self) -> None:
        self.allowed("peerd/collective/a.cc", '"proto/wire/frame.h"')
        self.caught("peerd/collective/a.cc", '"peerd/io/ring.h"')
        self.allowed("peerd/transport/lane.cc", '"peerd/io/ring.h"')
        self.caught("peerd/io/ring.h", '"proto/wire/frame.h"')

    def test_peerd_has_one_way_up(self) -> None:
        self.allowed("peerd/state/a.cc", '"peerd/transport/transport.h"')
        self.caught("peerd/state/a.cc", '"peerd/core/peer_core.h"')
        self.caught("peerd/state/a.cc", '"peerd/ipc/ipc_server.h"')
        self.allowed("peerd/ipc/a.cc", '"peerd/core/events.h"')
        self.caught("peerd/ipc/a.cc", '"peerd/core/peer_core.h"')
        self.caught("peerd/ipc/a.cc", '"peerd/transport/transport.h"')
        self.allowed("peerd/engine/a.cc", '"peerd/core/actions.h"')
        self.caught("peerd/engine/a.cc", '"peerd/ipc/ipc_server.h"')
        self.caught("peerd/engine/a.cc", '"peerd/daemon/daemon.h"')
        self.caught("peerd/control/a.cc", '"peerd/core/peer_core.h"')
        self.allowed("peerd/transport/a.cc", '"peerd/paths/host_paths.h"')
        self.caught("peerd/paths/a.cc", '"peerd/transport/transport.h"')
        self.caught("peerd/paths/a.cc", '"peerd/io/sockets.h"')

    def test_coordinator_has_one_way_up(self) -> None:
        self.allowed("coordinator/loop/a.cc", '"coordinator/store/store.h"')
        self.caught("coordinator/loop/a.cc", '"coordinator/grpc/grpc_server.h"')
        self.caught("coordinator/loop/a.cc", '"proto/control/convert.h"')
        self.allowed("coordinator/grpc/a.cc", '"coordinator/loop/loop.h"')
        self.caught("coordinator/grpc/a.cc", '"coordinator/core/coordinator_core.h"')
        self.caught("coordinator/grpc/a.cc", '"coordinator/store/store.h"')
        self.allowed("coordinator/store/a.cc", '"coordinator/core/records.h"')
        self.caught("coordinator/store/a.cc", '"coordinator/core/coordinator_core.h"')

    def test_rules_that_name_what_is_not_there_are_found(self) -> None:
        rule = layering.Layer(r"peerd/(io|gone)/", r"base/|peerd/(io|lost)/a\.h", "why")
        with mock.patch.object(layering, "LAYERS", [rule]), mock.patch.object(layering, "CONFINED", []):
            found = [finding.text for finding in layering.stale(["base/a.h", "peerd/io/a.h"])]
        self.assertEqual(len(found), 2, found)
        self.assertIn("peerd/gone/", found[0])
        self.assertIn(r"peerd/lost/a\.h", found[1])

    def test_base_is_below_everything(self) -> None:
        self.allowed("base/a.cc", '"absl/status/status.h"')
        self.caught("base/a.cc", '"proto/wire/frame.h"')
        self.caught("base/a.cc", '"peerd/io/ring.h"')

    def test_googletest_is_in_tests(self) -> None:
        self.allowed("base/a_test.cc", '"gtest/gtest.h"')
        self.caught("base/a.cc", '"gtest/gtest.h"')


class Names(unittest.TestCase):
    def test_a_file_that_is_not_there_is_caught(self) -> None:
        files = {
            "base/a.h": "// See base/b.h and proto/x/y.pb.h.\n// Not base/c.h (any more).\n",
            "base/b.h": "",
            "proto/x/y.proto": "",
            "docs/page.md": "[code](../base/b.h)\n\nMade by bench/results/new.json, told in docs/other.md.\n",
        }
        self.assertEqual(findings(names.check, files), ["base/a.h:2", "docs/page.md:3"])


class FileLists(unittest.TestCase):
    LIST = "## What a feature costs\n\nWords.\n\n*An option* (3, and its use):\n- `base/a.{h,cc}`,\n- `docs/*.md`\n\nMore.\n"
    FILES = {"base/a.h": "", "base/a.cc": "", "docs/page.md": ""}

    def test_a_list_that_is_right_passes(self) -> None:
        self.assertEqual(findings(file_lists.check, {**self.FILES, file_lists.PAGE: self.LIST}), [])
        elsewhere = self.LIST.replace("What a feature costs", "Style").replace("a.{h", "b.{h")
        self.assertEqual(findings(file_lists.check, {**self.FILES, file_lists.PAGE: elsewhere}), [])

    def test_a_wrong_number_and_a_missing_file_are_found(self) -> None:
        for right, wrong in (
            ("(3,", "(4,"),
            ("`base/a.{h,cc}`", "`base/a.h` and its source"),
            ("base/a.{h,cc}", "base/{a,b}.h"),
            ("docs/*.md", "docs/*.proto"),
            ("`docs/*.md`", "`page.md`"),
        ):
            files = {**self.FILES, file_lists.PAGE: self.LIST.replace(right, wrong)}
            self.assertEqual(findings(file_lists.check, files), ["CONTRIBUTING.md:5"], wrong)

    def test_a_file_in_other_words_of_the_section_has_to_exist(self) -> None:
        files = {**self.FILES, file_lists.PAGE: self.LIST.replace("More.", "More in `base/b.h`.")}
        self.assertEqual(findings(file_lists.check, files), ["CONTRIBUTING.md:9"])


class Definitions(unittest.TestCase):
    A = "namespace n {\nclass A final : public B {\n};\n}  // namespace n\n"

    def test_a_type_that_two_files_define_is_caught(self) -> None:
        for other in (self.A, "namespace n {\nstruct A {};\n}\n", "namespace n {\n\nclass A\n    : B {\n};\n"):
            found = findings(definitions.check, {"base/a.h": self.A, "peerd/a.cc": other})
            self.assertEqual(found, [f"peerd/a.cc:{other[: other.index(' A')].count(chr(10)) + 1}"])

    def test_other_namespaces_declarations_and_members_are_not(self) -> None:
        others = (
            self.A.replace("n {", "m {"),
            "namespace n {\nnamespace {\n"
            + self.A[14:].replace("}  // namespace n", "}  // namespace\n}  // namespace n"),
            "namespace n {\nclass A;\nclass A::Inner {\n};\nvoid F() {\n}\nenum class C { A };\nstruct A2 {};\n}\n",
            "namespace n {\n}  // namespace n\nclass A {};\n",
        )
        for other in others:
            self.assertEqual(findings(definitions.check, {"base/a.h": self.A, "peerd/a.cc": other}), [])


class ClassSize(unittest.TestCase):
    HEADER = "namespace n {\nclass A {\n};\nstruct B {\n};\n}  // namespace n\n"

    def test_a_class_is_counted_over_all_its_files(self) -> None:
        long = "namespace n {\nabsl::Status A::F(int x) {\n" + "  ++x;\n" * 700 + "}\n}  // namespace n\n"
        files = {"base/a.h": self.HEADER, "base/a.cc": long, "base/a_more.cc": long.replace("A::F", "A::G")}
        self.assertEqual(findings(class_size.check, files), ["base/a.h:1"])
        files["base/a_more.cc"] = files["base/a_more.cc"].replace("A::G", "B::G")
        files["base/b.h"] = self.HEADER.replace("class A", "class C").replace("struct B", "struct D")
        self.assertEqual(findings(class_size.check, files), ["base/a.h:1"])
        files["base/a.h"] = self.HEADER.replace("struct B {\n};\n", "")
        files["base/b.h"] = "namespace n {\nstruct B {\n};\n}  // namespace n\n"
        self.assertEqual(findings(class_size.check, files), [])

    def test_a_file_without_classes_counts_and_tests_do_not(self) -> None:
        long = "// A line.\n" * 1300
        self.assertEqual(findings(class_size.check, {"base/a.cc": long}), ["base/a.cc:1"])
        self.assertEqual(findings(class_size.check, {"client/python/longhaul/a.py": long}), ["client/python/longhaul/a.py:1"])
        self.assertEqual(findings(class_size.check, {"base/a_test.cc": long, "tests/sim/a.cc": long}), [])


class Purity(unittest.TestCase):
    CORES = ("coordinator/core/a.h", "coordinator/solver/a.cc", "peerd/core/a.cc")

    def test_banned_includes_are_caught(self) -> None:
        for path in self.CORES:
            for header in (
                "<chrono>",
                "<thread>",
                "<mutex>",
                "<atomic>",
                "<random>",
                "<unordered_map>",
                "<unordered_set>",
                "<iostream>",
                "<sys/socket.h>",
                "<unistd.h>",
                '"absl/time/clock.h"',
                '"absl/random/random.h"',
                '"absl/container/flat_hash_map.h"',
                '"base/mutex.h"',
                '"base/log.h"',
            ):
                self.assertEqual(
                    findings(purity.check, {path: f"\n\n#include {header}\n"}),
                    [f"{path}:3"],
                    header,
                )

    def test_banned_words_are_caught(self) -> None:
        for words in (
            'getenv("X");',
            "std::thread t;",
            "std::unordered_map<int, int> m;",
            "auto t = time(nullptr);",
            "steady_clock::now();",
            "absl::Now();",
            "std::cout << 1;",
            "std::mt19937 r;",
            "rand();",
            "absl::flat_hash_map<int, int> m;",
            "::socket(1, 2, 3);",
        ):
            self.assertEqual(one(purity.check, "peerd/core/a.cc", words), 1, words)

    def test_comments_and_texts_are_not_code(self) -> None:
        text = '// std::thread, getenv("X")\n/* steady_clock\n rand() */\nconst char* k = "std::cout << rand()";\n'
        self.assertEqual(one(purity.check, "peerd/core/a.cc", text), 0)

    def test_ordered_values_pass(self) -> None:
        text = (
            "#include <map>\n#include <vector>\nint timeout(int runtime) { return runtime; }\nbool send_write_(int);\n"
        )
        for path in self.CORES:
            self.assertEqual(one(purity.check, path, text), 0)

    def test_other_code_and_tests_may(self) -> None:
        for path in (
            "peerd/daemon/a.cc",
            "base/mailbox.h",
            "peerd/core/a_test.cc",
            "tests/sim/a.cc",
        ):
            self.assertEqual(one(purity.check, path, "#include <thread>\n"), 0)


if __name__ == "__main__":
    unittest.main()
