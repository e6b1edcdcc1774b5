"""The health check of the images: it asks the right address, and only the answer 200 is healthy."""

from __future__ import annotations

import http.server
import pathlib
import subprocess
import threading
from collections.abc import Iterator

import pytest

PROBE = pathlib.Path(__file__).resolve().parents[2] / "deploy" / "docker" / "probe"


class Daemon(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/readyz" else 503)
        self.end_headers()
        self.wfile.write(b"some text\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Daemon) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def probe(port: int, path: str, **environment: str) -> tuple[int, str]:
    done = subprocess.run([PROBE, str(port), path], env=environment, capture_output=True, text=True, timeout=60)
    assert not done.stderr
    return done.returncode, done.stdout


def test_the_answer_200_is_healthy(port: int) -> None:
    assert probe(port, "/readyz") == (0, f"http://127.0.0.1:{port}/readyz: 200\n")


def test_another_answer_is_unhealthy(port: int) -> None:
    assert probe(port, "/healthz") == (1, f"http://127.0.0.1:{port}/healthz: 503\n")


@pytest.mark.parametrize("name", ["LONGHAUL_COORDINATOR_HTTP", "LONGHAUL_PEERD_HTTP", "LONGHAUL_HTTP"])
def test_the_environment_names_the_address(port: int, name: str) -> None:
    assert probe(1, "/readyz", **{name: f"0.0.0.0:{port}"}) == (0, f"http://0.0.0.0:{port}/readyz: 200\n")


def test_an_empty_variable_counts_as_unset(port: int) -> None:
    assert probe(port, "/readyz", LONGHAUL_HTTP="")[0] == 0


def test_an_ipv6_address_is_taken_apart(port: int) -> None:
    code, said = probe(1, "/readyz", LONGHAUL_HTTP="[::ffff:127.0.0.1]:" + str(port))
    assert (code, said) == (0, f"http://[::ffff:127.0.0.1]:{port}/readyz: 200\n")


def test_no_connection_is_unhealthy_and_says_what_to_do() -> None:
    code, said = probe(1, "/readyz", LONGHAUL_HTTP="127.0.0.1:1")
    assert code == 1
    assert "no connection to http://127.0.0.1:1" in said
    assert "LONGHAUL_HTTP" in said
