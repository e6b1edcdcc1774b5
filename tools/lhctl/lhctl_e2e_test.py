"""Tests lhctl against a running coordinator that has no runs: commands, JSON, errors and exit codes."""

import fcntl
import json
import os
import sqlite3
import struct
import subprocess
import sys
import tempfile
import termios
import time
import unittest

LHCTL = os.path.abspath(sys.argv.pop(1))
COORDINATOR = os.path.abspath(sys.argv.pop(1))
DEADLINE_S = 60


class Lhctl(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR"))
        ready_file = os.path.join(cls.directory.name, "ready.json")
        cls.coordinator = subprocess.Popen(
            [
                COORDINATOR,
                "--listen=127.0.0.1:0",
                "--admin=127.0.0.1:0",
                "--http=",
                "--store=memory",
                "--ready-file",
                ready_file,
                "--log-level=error",
            ]
        )
        until = time.monotonic() + DEADLINE_S
        while not os.path.exists(ready_file):
            assert cls.coordinator.poll() is None and time.monotonic() < until, "the coordinator did not start"
            time.sleep(0.01)
        with open(ready_file) as file:
            ready = json.load(file)
        cls.address = ready["admin"]
        cls.peers_address = ready["grpc"]

    @classmethod
    def tearDownClass(cls):
        cls.coordinator.terminate()
        assert cls.coordinator.wait(timeout=DEADLINE_S) == 0
        cls.directory.cleanup()

    def lhctl(self, *args, address=None, env=None):
        address = address or self.address
        return subprocess.run(
            [LHCTL, f"--coordinator={address}", *args],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            env={**os.environ, **(env or {})},
        )

    def test_commands_of_an_idle_coordinator(self):
        for command, text in [
            ("status", "no runs\n"),
            ("runs", "no runs\n"),
            ("members", "no members\n"),
            ("ring", "no peers\n"),
            ("links", "no links: no group has two peers\n"),
            ("why", "no runs\n"),
            ("events", ""),
        ]:
            with self.subTest(command=command):
                result = self.lhctl(command)
                self.assertEqual(result.returncode, 0, result.stderr)
                self.assertTrue(result.stdout.endswith(text), result.stdout)
        top = self.lhctl("top", "--once")
        self.assertEqual(top.returncode, 0, top.stderr)
        self.assertRegex(top.stdout, r"^coordinator \S+  version \S+  peers 0  groups 0\n\nno runs\n$")
        status = json.loads(self.lhctl("status", "--json").stdout)
        self.assertEqual(status["detect_ms"], 1500)
        self.assertEqual(status["store"], "memory")
        self.assertEqual(status["groups"], [])

    def test_address_comes_from_the_environment(self):
        result = subprocess.run(
            [LHCTL, "runs"], capture_output=True, text=True, env={**os.environ, "LONGHAUL_COORDINATOR": self.address}
        )
        self.assertEqual((result.returncode, result.stdout), (0, "no runs\n"))

    def test_what_is_not_there_is_exit_code_1(self):
        for args, text in [
            (["status", "nowhere"], "no run 'nowhere'"),
            (["ring", "nowhere/3"], "no group 3 of run 'nowhere'"),
            (["links", "nowhere"], "no run 'nowhere'"),
            (["drain", "p1f"], "no peer p1f"),
            (["drain", "host1"], "write it as in `lhctl ring`"),
            (["evict", "demo/0/m3"], "no member m3 in demo/0"),
            (["evict", "demo/0/3"], "write it as in `lhctl members`"),
        ]:
            with self.subTest(args=args):
                result = self.lhctl(*args)
                self.assertEqual(result.returncode, 1, result.stdout)
                self.assertIn(text, result.stderr)
                self.assertEqual(result.stdout, "")

    def test_bad_usage_is_exit_code_2(self):
        for args, text in [
            ([], "no command given"),
            (["frobnicate"], "unknown command 'frobnicate'"),
            (["drain"], "drain needs an argument"),
            (["runs", "x"], "unexpected argument 'x'"),
            (["top", "--json"], "top prints no JSON"),
            (["evict", "m3"], "'m3' is not RUN/GROUP/MEMBER"),
            (["status", "demo/x"], "'x' is not a group's number"),
            (["status", "--jsno"], "unknown flag --jsno"),
        ]:
            with self.subTest(args=args):
                result = self.lhctl(*args)
                self.assertEqual(result.returncode, 2, result.stdout)
                self.assertIn(text, result.stderr)

    def test_absent_coordinator_is_named_and_the_next_one_is_tried(self):
        absent = self.lhctl("status", address="127.0.0.1:1")
        self.assertEqual(absent.returncode, 1)
        self.assertIn("no coordinator answers (127.0.0.1:1:", absent.stderr)
        second = self.lhctl("runs", address=f"127.0.0.1:1,{self.address}")
        self.assertEqual((second.returncode, second.stdout), (0, "no runs\n"))

    def test_the_port_for_peers_takes_no_orders_and_lhctl_names_the_right_one(self):
        for args in (["status"], ["evict", "demo/0/m3"], ["drain", "p1f"], ["events", "--follow"]):
            with self.subTest(args=args):
                result = self.lhctl(*args, address=self.peers_address)
                self.assertEqual((result.returncode, result.stdout), (1, ""))
                for text in (self.peers_address, "port for peers (--listen)", "--admin", "127.0.0.1:29602"):
                    self.assertIn(text, result.stderr)

    def doctor(self, *args, address=None, expect=0):
        """The verdicts of lhctl doctor, by check, and what was seen."""
        result = self.lhctl("doctor", "--json", "--pid=0", *args, address=address)
        self.assertEqual(result.returncode, expect, result.stdout + result.stderr)
        report = json.loads(result.stdout)
        for check in report["checks"]:
            self.assertTrue(check["seen"] and check["why"], check)
            if check["verdict"] in ("advice", "wrong"):
                self.assertTrue(check["do"], check)
        self.assertEqual(report["wrong"], sum(check["verdict"] == "wrong" for check in report["checks"]))
        return {check["check"]: (check["verdict"], check["seen"]) for check in report["checks"]}

    # The data port that a peerd of this host would have may be taken by one that runs beside this test.
    OTHERS = ("data port", "nofile", "kernel")

    def test_doctor_asks_the_coordinator(self):
        found = self.doctor_of_this_machine()
        self.assertEqual(found["admin"][0], "ok")
        self.assertIn(self.address, found["admin"][1])
        self.assertEqual(found["timeouts"][0], "ok")
        self.assertIn("detect_ms is 1500", found["timeouts"][1])
        self.assertRegex(found["clock"][1], r"(ahead of|behind) the coordinator's, give or take")
        self.assertEqual(found["members"], ("ok", "no other host is a member now, so no data port was tried"))

    def test_doctor_takes_the_port_for_peers(self):
        found = self.doctor_of_this_machine(address=self.peers_address)
        self.assertEqual(found["coordinator"][0], "ok")
        self.assertIn(f"a coordinator answers at {self.peers_address}", found["coordinator"][1])
        self.assertEqual(found["admin"][0], "unknown")

    def test_doctor_without_a_coordinator_names_the_address(self):
        found = self.doctor_of_this_machine(address="127.0.0.1:1", wrong=["admin"])
        self.assertIn("127.0.0.1:1: Connection refused", found["admin"][1])
        self.assertEqual(found["timeouts"][0], "unknown")
        self.assertEqual(found["members"][0], "unknown")

    def doctor_of_this_machine(self, address=None, wrong=()):
        """Doctor's findings. Exactly `wrong` is wrong, besides what this machine itself may have."""
        result = self.lhctl("doctor", "--json", "--pid=0", address=address)
        report = json.loads(result.stdout)
        found = [check["check"] for check in report["checks"] if check["verdict"] == "wrong"]
        self.assertEqual([check for check in found if check not in self.OTHERS], list(wrong), result.stdout)
        return self.doctor(address=address, expect=1 if found else 0)

    def test_doctor_prints_a_line_for_each_check(self):
        lines = self.lhctl("doctor", "--pid=0").stdout.splitlines()
        self.assertRegex(lines[-1], r"^\d+ wrong, \d+ advice, \d+ unknown, \d+ ok$")
        for line in lines[:-2]:
            self.assertRegex(line, r"^(ok|unknown|advice|wrong) +\S.*\. Why: .*\.$")

    def test_follow_goes_on_when_the_coordinator_is_killed_and_started_again(self):
        with tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR")) as directory:
            store = os.path.join(directory, "store.db")
            first, address = self.start(directory, store, "127.0.0.1:0")
            first.kill()
            first.wait()
            # A coordinator that finds a run in its store makes an event "restart".
            with sqlite3.connect(store) as database:
                run = json.dumps({"run": "demo", "next_member": 1, "secret": "00" * 32})
                database.execute("INSERT INTO records VALUES('runs', 'demo', 0, 0, ?)", (run,))
            database.close()
            second, _ = self.start(directory, store, address)
            follow = subprocess.Popen(
                [LHCTL, f"--coordinator={address}", "events", "--follow", "--json"],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            try:
                before = json.loads(follow.stdout.readline())
                self.assertEqual((before["kind"], before["sequence"]), ("restart", "1"))
                second.kill()
                second.wait()
                third, _ = self.start(directory, store, address)
                after = json.loads(follow.stdout.readline())
                self.assertEqual((after["kind"], after["sequence"]), ("restart", "1"))
                self.assertNotEqual(after["incarnation"], before["incarnation"])
                third.kill()
                third.wait()
            finally:
                follow.kill()
                follow.wait()
                follow.stdout.close()

    def test_top_goes_on_when_the_coordinator_is_killed_and_started_again(self):
        with tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR")) as directory:
            store = os.path.join(directory, "store.db")
            first, address = self.start(directory, store, "127.0.0.1:0")
            top = subprocess.Popen([LHCTL, f"--coordinator={address}", "top"], stdout=subprocess.PIPE, text=True)
            try:
                before = self.line_of(top, "coordinator ")
                first.kill()
                first.wait()
                self.assertIn("127.0.0.1", self.line_of(top, "NO ANSWER for "))
                self.start(directory, store, address)
                while (after := self.line_of(top, "coordinator ")) == before:
                    pass
                self.assertNotIn("NO ANSWER", top.stdout.readline())
            finally:
                top.kill()
                top.wait()
                top.stdout.close()
        self.assertNotEqual(before.split()[1], after.split()[1])

    def line_of(self, process, beginning):
        """The next line of the process that begins so."""
        until = time.monotonic() + DEADLINE_S
        for line in process.stdout:
            self.assertNotIn("\x1b", line)
            if line.startswith(beginning):
                return line
            self.assertLess(time.monotonic(), until)
        self.fail(f"the output ended without {beginning!r}")

    def test_top_on_a_terminal_stays_within_its_size(self):
        ours, theirs = os.openpty()
        self.addCleanup(os.close, ours)
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 3, 20, 0, 0))
        top = subprocess.Popen([LHCTL, f"--coordinator={self.address}", "top"], stdout=theirs)
        os.close(theirs)
        try:
            screen = b""
            while screen.count(b"\x1b[J") < 2:
                screen += os.read(ours, 4096)
        finally:
            top.kill()
            top.wait()
        # A terminal gets a carriage return for each newline.
        one = screen.split(b"\x1b[J")[0].removeprefix(b"\x1b[2J").removeprefix(b"\x1b[H")
        lines = one.replace(b"\x1b[K", b"").split(b"\r\n")
        self.assertEqual(lines[1:], [b"2 more lines", b""])
        self.assertRegex(lines[0], rb"^coordinator .{8}$")

    def test_top_needs_a_coordinator_at_first_and_ends_with_its_reader(self):
        absent = self.lhctl("top", address="127.0.0.1:1")
        self.assertEqual((absent.returncode, absent.stdout), (1, ""))
        self.assertIn("no coordinator answers (127.0.0.1:1:", absent.stderr)
        with subprocess.Popen([LHCTL, f"--coordinator={self.address}", "top"], stdout=subprocess.PIPE) as top:
            top.stdout.readline()
            top.stdout.close()
            self.assertNotEqual(top.wait(timeout=DEADLINE_S), 0)

    def start(self, directory, store, admin):
        ready_file = os.path.join(directory, "ready.json")
        if os.path.exists(ready_file):
            os.unlink(ready_file)
        process = subprocess.Popen(
            [
                COORDINATOR,
                "--listen=127.0.0.1:0",
                f"--admin={admin}",
                "--http=",
                "--store",
                f"sqlite:{store}",
                "--ready-file",
                ready_file,
                "--log-level=error",
            ]
        )
        self.addCleanup(lambda: process.poll() is None and (process.kill(), process.wait()))
        until = time.monotonic() + DEADLINE_S
        while not os.path.exists(ready_file):
            self.assertIsNone(process.poll(), "the coordinator did not start")
            self.assertLess(time.monotonic(), until)
            time.sleep(0.01)
        with open(ready_file) as file:
            return process, json.load(file)["admin"]

    def test_help(self):
        result = self.lhctl("--help")
        self.assertEqual(result.returncode, 0)
        for command in (
            "status",
            "runs",
            "members",
            "ring",
            "links",
            "why",
            "top",
            "events",
            "doctor",
            "drain",
            "evict",
        ):
            self.assertIn(f"\n  {command} ", result.stdout)


if __name__ == "__main__":
    unittest.main(verbosity=2)
