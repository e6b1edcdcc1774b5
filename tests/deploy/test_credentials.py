"""The program longhaul-credentials of the images: when it keeps a join token, and when it makes a new one."""

from __future__ import annotations

import os
import pathlib
import subprocess
from collections.abc import Iterator

import pytest

from longhaul.testing import LocalCluster, find_binary

PROGRAM = pathlib.Path(__file__).resolve().parents[2] / "deploy" / "docker" / "credentials"


class Coordinator:
    def __init__(self, admin: str) -> None:
        path = f"{pathlib.Path(find_binary('lhctl')).parent}:{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, "LONGHAUL_LHCTL_COORDINATOR": admin}

    def lhctl(self, *arguments: str) -> str:
        command = [str(find_binary("lhctl")), *arguments]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True, timeout=60)
        return done.stdout

    def tokens(self) -> dict[str, str]:
        """The states of all tokens, by ID."""
        rows = [row.split() for row in self.lhctl("token", "list").splitlines()[1:]]
        return {row[0]: row[3] for row in rows}

    def token(self, directory: pathlib.Path) -> str:
        """Runs the program. Returns the ID of the token that is in the directory then."""
        done = subprocess.run([PROGRAM, "token", directory], env=self.environment, capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert [path.name for path in directory.iterdir()] == ["token"]
        assert (directory / "token").stat().st_mode & 0o777 == 0o600
        name, number, secret = (directory / "token").read_text().strip().split("_", 2)
        assert name == "lht" and len(secret) > 20
        return number


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    with LocalCluster(peers=0) as cluster:
        assert cluster.admin is not None
        yield Coordinator(cluster.admin)


def test_a_token_that_is_valid_stays(coordinator: Coordinator, tmp_path: pathlib.Path) -> None:
    first = coordinator.token(tmp_path)
    coordinator.lhctl("token", "create", "--run=another")
    assert coordinator.token(tmp_path) == first
    assert list(coordinator.tokens().values()) == ["valid", "valid"]


@pytest.mark.parametrize("why", ["revoked", "unknown"])
def test_a_token_that_is_not_valid_is_replaced(coordinator: Coordinator, tmp_path: pathlib.Path, why: str) -> None:
    first = coordinator.token(tmp_path)
    if why == "revoked":
        coordinator.lhctl("token", "revoke", first)
    else:
        (tmp_path / "token").write_text("lht_0123456789ab_ofAnotherCoordinator\n")
    second = coordinator.token(tmp_path)
    assert second not in (first, "0123456789ab")
    assert coordinator.tokens()[second] == "valid"


def test_a_token_that_expires_soon_is_replaced_and_revoked(coordinator: Coordinator, tmp_path: pathlib.Path) -> None:
    (tmp_path / "token").write_text(coordinator.lhctl("token", "create", "--run=*", "--ttl=100d"))
    (old,) = coordinator.tokens()
    new = coordinator.token(tmp_path)
    assert coordinator.tokens() == {old: "revoked", new: "valid"}


def test_without_a_known_command_it_says_what_there_is() -> None:
    done = subprocess.run([PROGRAM, "token"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "usage: longhaul-credentials certificates CA SERVER JOIN HOST" in done.stderr
