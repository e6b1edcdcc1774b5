"""A plugin of pytest with what the tests of images share: podman, and the images, which are built once for all tests.

A test module says `pytest_plugins = ["images"]`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from engine import BASE, ROOT, Engine, why_not

TARGETS = ("coordinator", "peerd", "trainer-example")

# Stands in for the image of Prometheus, whose registry this machine may not reach.
PROMETHEUS = f"""
FROM {BASE}
RUN apt-get update && apt-get install -y --no-install-recommends prometheus && install -d -o nobody /prometheus
USER nobody
ENTRYPOINT ["prometheus", "--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]
"""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests that use images, because building the images takes minutes."""
    for item in items:
        if "engine" in getattr(item, "fixturenames", ()):
            item.add_marker("images")


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    if reason := why_not():
        pytest.skip(reason)
    with Engine() as engine:
        engine.make_base()
        for target in TARGETS:
            begin = time.monotonic()
            engine.build(
                f"longhaul/{target}",
                f"--target={target}",
                "--build-arg=REVISION=abc",
                file=ROOT / "deploy" / "docker" / "Dockerfile",
            )
            print(f"built {target} in {time.monotonic() - begin:.0f} s")
        context = tmp_path_factory.mktemp("prometheus")
        (context / "Dockerfile").write_text(PROMETHEUS)
        engine.build("longhaul-test/prometheus", file=context / "Dockerfile", context=context)
        yield engine
