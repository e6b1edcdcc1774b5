"""The coordinator's status page in headless Chromium, while members come, leave and die.

LONGHAUL_SCREENSHOTS=DIR keeps pictures of the page.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright
from trainers import until

from longhaul.testing import LocalCluster, find_binary, start_tethered

pytestmark = pytest.mark.alone

CHROMIUM = os.environ.get("LONGHAUL_CHROMIUM") or shutil.which("chromium")
CHURN = pathlib.Path(__file__).with_name("churn.py")
PICTURES = os.environ.get("LONGHAUL_SCREENSHOTS")
# How long anything may take on a busy machine.
PATIENCE_S = 60
# The coordinator makes at most four frames a second, so an event needs about 0.3 s to the page. This machine may be busy.
EVENT_S_MAX = 10


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no chromium in PATH: install Debian's package chromium, or name one in LONGHAUL_CHROMIUM")
    with sync_playwright() as playwright:
        # The sandbox of Chromium needs namespaces, which containers of CI often lack. The page is our own.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Cluster:
    """A LocalCluster whose peers each have a trainer."""

    def __init__(self, stack: contextlib.ExitStack, peers: int) -> None:
        self.cluster = stack.enter_context(LocalCluster(peers=0, coordinator_flags=["--detect-ms=1000"]))
        self.trainers: list[subprocess.Popen[bytes]] = []
        self.stack = stack
        for _ in range(peers):
            self.add()

    @property
    def url(self) -> str:
        return f"http://{self.cluster.http}/"

    def add(self) -> None:
        peer = self.cluster.add_peer()
        command = [sys.executable, str(CHURN), self.cluster.socket(peer), "demo", "8"]
        trainer = start_tethered(command, stdin=subprocess.DEVNULL)
        self.trainers.append(trainer)
        self.stack.callback(trainer.wait)
        self.stack.callback(trainer.kill)


class Watched:
    """A page, and everything that went wrong on it. told: what the page gets in place of the coordinator's stream."""

    def __init__(self, browser: Browser, url: str, told: str | None = None, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page: Page = self.context.new_page()
        self.problems: list[str] = []
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.problems.append(f"exception: {error}"))
        self.page.on("requestfailed", lambda request: self.problems.append(f"request failed: {request.url}"))
        self.page.on("request", lambda request: self._on_request(request, url))
        if told is not None:
            self.page.route("**/status.events", lambda r: r.fulfill(content_type="text/event-stream", body=told))
        self.page.goto(url)
        # A stream that is told ends at once, and the page says so.
        expect(self.page.locator("#live")).to_have_text(
            re.compile("live" if told is None else "live|lost"), timeout=PATIENCE_S * 1000
        )
        # From now on, note when the row of each new event appears: [kind, milliseconds after the event].
        self.page.evaluate(
            """() => {
              window.appeared = {};
              const known = new Set(events.map((event) => event.sequence));
              new MutationObserver(() => {
                const shown = byId("events").tBodies[0].nodesByKey;
                for (const event of events) {
                  if (known.has(event.sequence) || !shown.has(event.sequence)) continue;
                  known.add(event.sequence);
                  window.appeared[event.sequence] = [event.kind, Date.now() - event.time_ms];
                }
              }).observe(byId("events"), {childList: true, subtree: true});
            }"""
        )

    def _on_console(self, message: ConsoleMessage) -> None:
        self.problems.append(f"console: {message.type}: {message.text}")

    def _on_request(self, request: Request, url: str) -> None:
        if not request.url.startswith((url, "data:")):
            self.problems.append(f"the page asks another host: {request.url}")

    def shows(self, selector: str, text: str) -> None:
        expect(self.page.locator(selector)).to_contain_text(text, timeout=PATIENCE_S * 1000)

    def members(self, count: int) -> None:
        expect(self.page.locator("#members tbody tr")).to_have_count(count, timeout=PATIENCE_S * 1000)
        expect(self.page.locator("#ring circle")).to_have_count(count, timeout=PATIENCE_S * 1000)

    def delay(self, kind: str) -> float:
        """Seconds from the first event of this kind to the moment when it stood on the page."""
        seen: list[float] = []

        def look() -> bool:
            appeared = self.page.evaluate("() => Object.values(window.appeared)")
            seen.extend(ms / 1000 for what, ms in appeared if what == kind)
            return bool(seen)

        until(look, f"an event {kind} on the page")
        return seen[0]

    def picture(self, name: str) -> None:
        if PICTURES:
            self.page.screenshot(path=f"{PICTURES}/{name}.png", full_page=False)


def test_page_shows_churn_live_and_without_errors(browser: Browser) -> None:
    with contextlib.ExitStack() as stack:
        three = Cluster(stack, 3)
        wide = Watched(browser, three.url, viewport={"width": 1280, "height": 1000}, color_scheme="light")
        dark = Watched(browser, three.url, viewport={"width": 1280, "height": 1000}, color_scheme="dark")
        phone = Watched(
            browser, three.url, viewport={"width": 390, "height": 844}, device_scale_factor=1, is_mobile=True
        )
        for watched in (wide, dark, phone):
            watched.members(3)
            watched.shows("#runs", "demo/0")

        delays = {}
        three.add()
        wide.members(4)
        delays["admit"] = wide.delay("admit")

        three.cluster.kill_peer(0)
        wide.shows("#events", "died")
        delays["death"] = wide.delay("death")
        three.trainers[1].send_signal(signal.SIGTERM)
        assert three.trainers[1].wait(PATIENCE_S) == 0
        delays["leave"] = wide.delay("leave")
        for watched in (wide, dark, phone):
            watched.members(2)
        three.add()
        for watched in (wide, dark, phone):
            watched.members(3)
            watched.shows("#tiles", "MB/s")

        # What training does shows without an event.
        before = wide.page.evaluate("() => values.get('g:demo/0').state.revision")
        until(lambda: wide.page.evaluate("() => values.get('g:demo/0').state.revision") > before, "a later revision")
        # A phone scrolls in one direction only.
        assert phone.page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
        backs = [w.page.evaluate("() => getComputedStyle(document.body).backgroundColor") for w in (wide, dark)]
        assert backs[0] != backs[1], "the dark page looks like the light one"

        for watched, name in ((wide, "light"), (dark, "dark"), (phone, "phone")):
            watched.picture(f"status-page-{name}")
            assert watched.problems == []
        print("seconds from an event to the page:", {kind: round(delay, 2) for kind, delay in delays.items()})
        assert max(delays.values()) < EVENT_S_MAX


def test_page_goes_on_after_the_coordinator_restarted(browser: Browser, tmp_path: pathlib.Path) -> None:
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(peers=0))
        watched = Watched(browser, f"http://{cluster.http}/")
        watched.shows("#none", "No trainer has joined yet")
        first = watched.page.evaluate("() => head.incarnation")
        port = str(cluster.http)
        os.kill(cluster.coordinator_pid, signal.SIGKILL)
        expect(watched.page.locator("#live")).to_contain_text("connection lost", timeout=PATIENCE_S * 1000)
        flags = [
            "--listen=127.0.0.1:0",
            "--admin=",
            f"--http={port}",
            "--store=memory",
            f"--ready-file={tmp_path}/ready",
        ]
        again = start_tethered([str(find_binary("longhaul-coordinator")), *flags])
        stack.callback(again.wait)
        stack.callback(again.kill)
        expect(watched.page.locator("#live")).to_have_text("live", timeout=PATIENCE_S * 1000)
        until(lambda: watched.page.evaluate("() => head.incarnation") != first, "the new coordinator on the page")

        # A connection that is dead without a sign, as after a sleep of this computer.
        watched.page.evaluate("() => { window.dead = source; heard = -SILENCE_MS; }")
        until(lambda: bool(watched.page.evaluate("() => source !== window.dead && version > 0")), "a new connection")
        expect(watched.page.locator("#live")).to_have_text("live", timeout=PATIENCE_S * 1000)


def frame_of(members: int, hostile: str) -> dict[str, Any]:
    """A snapshot of one group with everything that the page can show. Its form is that of status_feed.h."""
    group = "big/0"
    ids = [f"m{i}" for i in range(1, members + 1)]
    peers = [f"p{i:x}" for i in range(1, members + 1)]
    values: dict[str, Any] = {
        "head": {"incarnation": "a", "version": "9", "store": "s", "detect_ms": 1500, "streams": members, "error": ""},
        f"g:{group}": {
            **{"run": "big", "group": 0, "epoch": 7, "preparing": 8, "members": ids, "ring": peers},
            "blocked": [{"a": peers[0], "b": peers[2], "relay": peers[1], "reason": hostile}],
            **{"ring_epoch": 0, "ring_gain": ""},
        },
        f"w:{group}": {"waiting": True, "verdict": "epoch 8 is being prepared", "facts": ["one fact", hostile]},
    }
    for i, (member, peer) in enumerate(zip(ids, peers)):
        values[f"m:{group}/{member}"] = {
            **{"peer": peer, "name": hostile, "cohort": "", "background": False, "voting": i % 2 == 0},
            "joined": 0 if i == members - 1 else 1,
        }
        values[f"p:{group}/{peer}"] = {
            "host": hostile,
            "endpoint": "10.0.0.1:1",
            "attached": i != 1,
            "draining": i == 2,
        }
        values[f"l:{group}/{peer}"] = [1, 2, 3, 4]
        values[f"k:{group}/{peer}"] = [125_000_000, 12_000, 1]
    values[f"m:{group}/m1"]["fetch"] = {
        **{"bytes_done": 250_000_000, "bytes_total": 1_000_000_000},
        **{"bytes_per_second": 50_000_000, "sources": 3},
    }
    now = int(time.time() * 1000)
    events = [
        {"sequence": i, "time_ms": now - 1000 * i, "kind": kind, "group": group, "epoch": 7, "text": hostile}
        for i, kind in enumerate(("commit", "death", "sync"), start=1)
    ]
    return {"version": 5, "base": 0, "tick_ms": 1, "time_ms": now, "set": values, "gone": [], "events": events}


def test_page_draws_200_members_and_takes_foreign_names_for_text(browser: Browser) -> None:
    hostile = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
    with LocalCluster(peers=0) as cluster:
        url = f"http://{cluster.http}/"
        body = f"data: {json.dumps(frame_of(200, hostile))}\n\n"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as page:
            first_load = len(page.read()) + len(body)
        print("first load with 200 members:", first_load, "bytes")
        assert first_load < 1_000_000
        watched = Watched(browser, url, body)
        watched.members(200)
        for selector, text in {
            "#tiles": "7 \u2192 8",
            "#verdict": "epoch 8 is being prepared",
            "#facts": hostile,
            "#members": hostile,
            "#events": hostile,
            "#transfers": "250\u00a0MB",
        }.items():
            watched.shows(selector, text)
        page_of = watched.page.evaluate
        assert page_of("() => byId('transfers').querySelector('.bar div').style.width") == "25%"
        assert page_of("() => document.querySelectorAll('#ring .blocked').length") == 1
        assert page_of("() => document.querySelectorAll('#ring .node.bad').length") == 1
        assert page_of("() => document.querySelectorAll('#timeline .dot').length") == 3
        assert page_of("() => document.querySelectorAll('img').length") == 0
        assert watched.problems == []


def test_answers_have_strict_headers() -> None:
    with LocalCluster(peers=1) as cluster:
        with urllib.request.urlopen(f"http://{cluster.http}/", timeout=PATIENCE_S) as reply:
            policy = reply.headers["Content-Security-Policy"]
            assert reply.headers["X-Content-Type-Options"] == "nosniff"
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
        with urllib.request.urlopen(f"http://{cluster.http}/status.json", timeout=PATIENCE_S) as reply:
            assert reply.headers["X-Content-Type-Options"] == "nosniff"
            assert json.load(reply)["base"] == 0
