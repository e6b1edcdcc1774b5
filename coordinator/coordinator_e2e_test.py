"""The coordinator's binary from outside: flags, ports, HTTP, signals, exit codes."""

import contextlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.error
import urllib.request

BINARY = os.path.abspath(sys.argv.pop(1))
DEADLINE_S = 60
# No test may meet the default ports: another coordinator may run on this machine.
ANYWHERE = ("--listen=127.0.0.1:0", "--admin=127.0.0.1:0", "--store=memory")


def scratch():
    return tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR"))


class Coordinator:
    """A running coordinator on free ports."""

    def __init__(self, directory, *flags, env=None):
        self.ready_file = os.path.join(directory, "ready.json")
        self.log_path = os.path.join(directory, "log")
        if os.path.exists(self.ready_file):
            os.unlink(self.ready_file)  # of a killed one
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(
                [BINARY, *ANYWHERE, "--http=127.0.0.1:0", "--ready-file", self.ready_file, *flags],
                stderr=log,
                env={**os.environ, **(env or {})},
            )
        until = time.monotonic() + DEADLINE_S
        while not os.path.exists(self.ready_file):
            if self.process.poll() is not None or time.monotonic() > until:
                raise AssertionError("not ready: " + self.log())
            time.sleep(0.01)
        with open(self.ready_file) as file:
            self.ready = json.load(file)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def log(self):
        with open(self.log_path) as file:
            return file.read()

    def get(self, path):
        with urllib.request.urlopen(f"http://{self.ready['http']}{path}", timeout=DEADLINE_S) as reply:
            return reply.status, reply.read().decode()

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        return self.process.wait(timeout=DEADLINE_S)


def run(*flags, env=None):
    """Runs one that is to end by itself."""
    return subprocess.run(
        [BINARY, *flags], capture_output=True, text=True, timeout=DEADLINE_S, env={**os.environ, **(env or {})}
    )


class Usage(unittest.TestCase):
    def test_help_and_version(self):
        help_text = run("--help")
        self.assertEqual(help_text.returncode, 0)
        for flag in (
            "--listen=",
            "--admin=",
            "--http=",
            "--store=",
            "--detect-ms=",
            "--ready-file",
            "--log-format",
            "--config",
        ):
            self.assertIn(flag, help_text.stdout)
        version = run("--version")
        self.assertEqual(version.returncode, 0)
        self.assertRegex(version.stdout, r"^longhaul-coordinator \d+\.\d+\.\d+\n$")

    def test_bad_usage_is_exit_code_2_and_names_the_flag(self):
        for flags, text in [
            (["--nosuchflag"], "unknown flag --nosuchflag"),
            (["stray"], "unexpected argument 'stray'"),
            (["--detect-ms=soon"], "--detect-ms=soon"),
            (["--detect-ms=5"], "--detect-ms=5: give 50 to 60000"),
            (["--listen=nowhere"], "--listen: address 'nowhere': no port"),
            (["--admin=nowhere"], "--admin: address 'nowhere': no port"),
            (["--http=x:y"], "--http: address 'x:y'"),
            (["--store=etcd:http://h:2379"], "etcd is not in this version"),
            (["--store=paper"], "no such store"),
            (["--log-format=xml"], "write text or json"),
            (["--config=/nonexistent"], "cannot read config file /nonexistent"),
        ]:
            with self.subTest(flags=flags):
                result = run(*flags)
                self.assertEqual(result.returncode, 2, result.stderr)
                self.assertIn(text, result.stderr)

    def test_flags_come_from_environment_and_config_file(self):
        with scratch() as directory:
            config = os.path.join(directory, "config")
            with open(config, "w") as file:
                file.write("# comment\nlog-format=json\ndetect-ms=77\n")
            env = {"LONGHAUL_COORDINATOR_DETECT_MS": "88", "LONGHAUL_COORDINATOR_PORT": "tcp://10.0.0.1:29600"}
            with Coordinator(directory, "--config", config, env=env) as coordinator:
                first = json.loads(coordinator.log().splitlines()[-1])
                self.assertEqual(first["message"], "coordinator serving")
                self.assertEqual(first["detect_ms"], "88")


class Serving(unittest.TestCase):
    def test_http_pages(self):
        with scratch() as directory, Coordinator(directory) as coordinator:
            self.assertEqual(coordinator.get("/healthz"), (200, "ok\n"))
            self.assertEqual(coordinator.get("/readyz"), (200, "ready\n"))
            metrics = coordinator.get("/metrics")[1]
            self.assertIn("\nlonghaul_coordinator_members 0\n", metrics)
            self.assertIn("\nlonghaul_coordinator_streams 0\n", metrics)
            with self.assertRaises(urllib.error.HTTPError) as refused:
                coordinator.get("/secret")
            self.assertEqual(refused.exception.code, 404)
            refused.exception.close()

    def test_sigterm_and_sigint_end_it_with_0(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            with scratch() as directory, Coordinator(directory) as coordinator:
                self.assertEqual(coordinator.stop(number), 0, coordinator.log())
                self.assertIn("stopped", coordinator.log())

    def test_used_grpc_port_is_exit_code_1(self):
        with scratch() as directory, Coordinator(directory) as coordinator:
            second = run("--listen", coordinator.ready["grpc"], "--admin=", "--http=", "--store=memory")
            self.assertEqual(second.returncode, 1)
            self.assertIn("another process has the port", second.stderr)
            self.assertEqual(coordinator.get("/readyz")[0], 200)

    def test_used_http_port_is_exit_code_1(self):
        with scratch() as directory, Coordinator(directory) as coordinator:
            second = run(*ANYWHERE, "--http", coordinator.ready["http"])
            self.assertEqual(second.returncode, 1)
            self.assertIn("choose another --http", second.stderr)

    def test_used_admin_port_is_exit_code_1(self):
        with scratch() as directory, Coordinator(directory) as coordinator:
            second = run("--listen=127.0.0.1:0", "--admin", coordinator.ready["admin"], "--http=", "--store=memory")
            self.assertEqual(second.returncode, 1)
            self.assertIn("choose another --admin", second.stderr)

    def test_who_may_reach_what_by_default(self):
        defaults = run("--help").stdout
        for flag, default in (
            ("listen", "\n[^\n]*else 127.0.0.1:29600"),
            ("admin", "=auto\n[^\n]*auto: 127.0.0.1:29602"),
            ("http", "=auto\n[^\n]*auto: 127.0.0.1:29601"),
        ):
            with self.subTest(flag=flag):
                self.assertRegex(defaults, f"--{flag}{default}")

    def test_a_used_port_is_a_warning_unless_it_was_named(self):
        with contextlib.ExitStack() as stack:
            for port in (29601, 29602):
                taken = stack.enter_context(socket.socket())
                # If this fails, another process has the port, which is as good here.
                with contextlib.suppress(OSError):
                    taken.bind(("127.0.0.1", port))
                    taken.listen()
            directory = stack.enter_context(scratch())
            # Of two flags of one name the last counts.
            coordinator = stack.enter_context(Coordinator(directory, "--admin=auto", "--http=auto"))
            self.assertEqual((coordinator.ready["admin"], coordinator.ready["http"]), ("", ""))
            for flag, service, port in (("--admin", "gRPC", 29602), ("--http", "HTTP", 29601)):
                self.assertIn(
                    f"goes on without a port: cannot listen for {service} on 127.0.0.1:{port}", coordinator.log()
                )
                named = run(*ANYWHERE, "--http=", f"{flag}=127.0.0.1:{port}")
                self.assertEqual(named.returncode, 1)
                self.assertIn(f"choose another {flag}", named.stderr)
            self.assertEqual(coordinator.stop(), 0)

    def test_operators_and_pages_may_be_switched_off(self):
        with scratch() as directory, Coordinator(directory, "--admin=", "--http=") as coordinator:
            self.assertEqual((coordinator.ready["admin"], coordinator.ready["http"]), ("", ""))
            self.assertNotEqual(coordinator.ready["grpc"], "")
            self.assertEqual(coordinator.stop(), 0)

    def test_address_of_another_host_is_exit_code_1(self):
        result = run("--listen=192.0.2.1:1", "--insecure", "--admin=", "--http=", "--store=memory")
        self.assertEqual(result.returncode, 1)
        self.assertIn("cannot listen for gRPC on 192.0.2.1:1", result.stderr)

    def test_garbage_on_all_ports_leaves_it_alive(self):
        with scratch() as directory, Coordinator(directory) as coordinator:
            for name in ("grpc", "admin", "http"):
                host, port = coordinator.ready[name].rsplit(":", 1)
                for garbage in (b"\x00" * 5000, b"GET / HTTP/9\r\n\r\n", b"\xff" * 20000, b""):
                    with socket.create_connection((host, int(port))) as connection:
                        try:
                            connection.sendall(garbage)
                            connection.shutdown(socket.SHUT_WR)
                            connection.settimeout(DEADLINE_S)
                            while connection.recv(65536):
                                pass
                        except OSError:
                            pass  # reset: as good an answer
            self.assertEqual(coordinator.get("/readyz")[0], 200)
            self.assertEqual(coordinator.stop(), 0)


class Storing(unittest.TestCase):
    def test_one_coordinator_per_file_even_after_kill(self):
        with scratch() as directory:
            path = os.path.join(directory, "store.db")
            store = f"--store=sqlite:{path}"
            with Coordinator(directory, store) as first:
                second = run(*ANYWHERE, "--http=", store)
                self.assertEqual(second.returncode, 1)
                self.assertIn(f"in use by another coordinator (process {first.process.pid})", second.stderr)
                first.process.kill()
                first.process.wait()
            with Coordinator(directory, store) as third:
                connection = sqlite3.connect(path)
                self.assertEqual(connection.execute("SELECT count(*) FROM runs").fetchone(), (0,))
                connection.close()
                self.assertEqual(third.stop(), 0)

    def test_a_missing_directory_is_made_for_the_owner_only(self):
        with scratch() as directory:
            made = os.path.join(directory, "longhaul")
            with Coordinator(directory, f"--store=sqlite:{made}/coordinator.db") as coordinator:
                self.assertEqual(os.stat(made).st_mode & 0o777, 0o700)
                self.assertTrue(os.path.exists(f"{made}/coordinator.db"))
                self.assertEqual(coordinator.stop(), 0)
            result = run(*ANYWHERE, "--http=", f"--store=sqlite:{directory}/no/such/store.db")
            self.assertEqual(result.returncode, 1)
            self.assertIn(f"cannot make directory {directory}/no/such for store", result.stderr)

    def test_unusable_file_is_exit_code_1(self):
        with scratch() as directory:
            path = os.path.join(directory, "store.db")
            with open(path, "w") as file:
                file.write("not a database " * 1000)
            result = run(*ANYWHERE, "--http=", f"--store=sqlite:{path}")
            self.assertEqual(result.returncode, 1)
            self.assertIn("not a database", result.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)
