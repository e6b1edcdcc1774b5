"""Where the programs of Longhaul are, and the peerd that belongs to this process alone."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
from typing import NoReturn, Protocol, Union

from ._errors import FailedPrecondition, InvalidArgument, Unavailable

PathLike = Union[str, "os.PathLike[str]"]

# With this code the programs end if a setting is wrong.
_USAGE = 2
# How long a private peerd may take to end after this process has let it go.
_END_S = 10
# Settings that a private peerd needs other than the defaults of a host's peerd. As everywhere, the environment goes
# before the defaults: LONGHAUL_PEERD_LISTEN or LONGHAUL_LISTEN, for instance.
_DEFAULTS = {"listen": "[::]:0", "http": "127.0.0.1:0", "log-level": "warning"}


class Connection(Protocol):
    """What is needed here of a connection to a peerd. In practice a Client."""

    def alive(self) -> bool: ...


def find_binary(name: str, directory: PathLike | None = None) -> pathlib.Path:
    """Finds a program of Longhaul by name, such as "longhaul-peerd".

    Looks only in `directory` if it is given, else only in $LONGHAUL_BIN if that is set. Otherwise looks in out/bin of
    the source tree that holds this package, then in the installed package longhaul-daemons, then in PATH. Raises
    FileNotFoundError, which names the places. Safe in any thread.
    """
    named = directory or os.environ.get("LONGHAUL_BIN")
    if named:
        places = [pathlib.Path(named)]
    else:
        places = [
            *_own_places(),
            *(pathlib.Path(place) for place in os.environ.get("PATH", "").split(os.pathsep) if place),
        ]
    for place in places:
        if os.access(place / name, os.X_OK):
            return place / name
    if named:
        source = "the argument" if directory else "LONGHAUL_BIN"
        raise FileNotFoundError(f"no {name} in {places[0]}: {source} must name the directory of Longhaul's programs")
    tried = ", ".join(map(str, [*_own_places(), "PATH"]))
    raise FileNotFoundError(
        f"no {name} in {tried}: pip install longhaul[daemons] (with --no-index --find-links=, as in docs/packages.md), "
        "or run tools/build in the source tree, or set LONGHAUL_BIN to the directory of the programs"
    )


def _own_places() -> list[pathlib.Path]:
    """The directories of programs that belong to this package: a build of its source tree, and longhaul-daemons."""
    places = []
    package = pathlib.Path(__file__).resolve().parent
    if len(package.parents) > 2:  # a source tree: client/python/longhaul
        places.append(package.parents[2] / "out" / "bin")
    daemons = importlib.util.find_spec("longhaul_daemons")
    if daemons is not None:
        places += [pathlib.Path(place, "bin") for place in daemons.submodule_search_locations or ()]
    return places


def run_program(name: str) -> NoReturn:
    """Replaces this process by a program of Longhaul, with the arguments of this process.

    Ends the process with exit code 1, and says why on standard error, if the program is missing or cannot start.
    """
    try:
        binary = str(find_binary(name))
    except FileNotFoundError as problem:
        sys.exit(f"longhaul: {problem}")
    try:
        os.execv(binary, [binary, *sys.argv[1:]])
    except OSError as problem:
        sys.exit(f"longhaul: {binary} cannot start: {problem.strerror}")


class _PrivatePeerd:
    """A peerd that ends when this process ends, for any reason: its standard input is a pipe of this process."""

    def __init__(self, coordinator: str) -> None:
        try:
            binary = find_binary("longhaul-peerd")
        except FileNotFoundError as problem:
            raise FailedPrecondition(f"starting a private peerd for coordinator {coordinator}: {problem}") from None
        # The path of a Unix socket has at most 107 bytes, which a TMPDIR of the user may exceed.
        runtime = os.environ.get("XDG_RUNTIME_DIR")
        self._directory = tempfile.mkdtemp(prefix="longhaul-", dir=runtime if runtime and len(runtime) < 64 else "/tmp")
        self.socket = f"{self._directory}/peerd.sock"
        # A connection of this process, which is kept: whoever cleans up the directory takes the way to further ones.
        self._connection: Connection | None = None
        self._served = False
        flags = [
            f"--{flag}={value}"
            for flag, value in _DEFAULTS.items()
            if not any(os.environ.get(f"LONGHAUL_{part}{flag.replace('-', '_').upper()}") for part in ("PEERD_", ""))
        ]
        self._command = [
            str(binary),
            f"--coordinator={coordinator}",
            f"--socket={self.socket}",
            "--until-stdin-ends",
            *flags,
        ]
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the trainer
        )

    def alive(self) -> bool:
        return self._process.poll() is None

    def serves(self, connection: Connection) -> None:
        """A connection has been made, which is kept."""
        self._served = True
        self._connection = connection

    def lost(self) -> bool:
        """Whether it has served, and this process cannot reach it any more. It may live on, or not."""
        if not self._served:
            return False
        connected = self._connection is not None and self._connection.alive()
        return not self.alive() or not (connected or os.path.exists(self.socket))

    def check(self) -> None:
        """Raises if the process has ended and has never served: FailedPrecondition if a setting is wrong, so that the
        next one would end, too, else Unavailable."""
        if self._served or self.alive():
            return
        self.end()
        code = self._process.returncode
        what = f"a private peerd ended with {code} before it served"
        if code == _USAGE:
            raise FailedPrecondition(f"{what}: {self._complaint()}")
        raise Unavailable(f"{what}; it has written why to the standard error output of this process")

    def _complaint(self) -> str:
        """What the program says about a wrong setting. It is asked again, as its words went to the standard error output
        of this process."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            again = subprocess.run(
                self._command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_END_S,
            )
            if again.returncode == _USAGE and again.stderr.strip():
                return again.stderr.strip().splitlines()[-1]
        return "it has written why to the standard error output of this process"

    def let_go(self) -> None:
        """Lets peerd end, but does not wait. In a child of fork(): only closes the child's copy of the pipe."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def end(self) -> None:
        self.let_go()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)


_lock = threading.Lock()
_peerds: dict[str, _PrivatePeerd] = {}


def private_socket(coordinator: str) -> str:
    """Starts a peerd for this process, unless one runs for the same coordinator. Returns the path of its socket, where it
    listens now or soon. Whoever has connected calls serves().

    Raises InvalidArgument if the address is none. If the last peerd for it never served, raises FailedPrecondition
    (there is no program, or a setting is wrong) or Unavailable.
    """
    for address in coordinator.split(",") if isinstance(coordinator, str) else [""]:
        host, colon, port = address.rpartition(":")
        if not (host and colon and port.isdigit() and 0 < int(port) < 65536):
            raise InvalidArgument(
                f"coordinator is {coordinator!r}; give host:port, or several with commas between them"
            )
    with _lock:
        peerd = _peerds.get(coordinator)
        if peerd is not None and peerd.lost():
            peerd.end()
            peerd = None
        if peerd is None:
            peerd = _peerds[coordinator] = _PrivatePeerd(coordinator)
        try:
            peerd.check()
        except BaseException:
            del _peerds[coordinator]
            raise
        return peerd.socket


def serves(socket: str, connection: Connection) -> None:
    """Tells of a connection that was made to a socket. If it is that of a private peerd, the connection is kept."""
    with _lock:
        for peerd in _peerds.values():
            if peerd.socket == socket:
                peerd.serves(connection)


def _end_all() -> None:
    for peerd in _peerds.values():
        peerd.let_go()  # all at once
    for peerd in _peerds.values():
        peerd.end()


def _forget() -> None:
    """Runs in a child of fork(). The peerds belong to the parent."""
    global _lock
    _lock = threading.Lock()
    for peerd in _peerds.values():
        peerd.let_go()
    _peerds.clear()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_forget)
