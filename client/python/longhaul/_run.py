"""run(): trains as a member of a group, and joins again after a fault that cost the member its place."""

from __future__ import annotations

import collections
import contextlib
import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

from ._comm import Comm
from ._errors import Error, Evicted, InvalidArgument, StateMismatch, Unavailable, number_of
from ._join import join
from ._log import Counters, logger
from ._programs import PathLike
from ._state import State

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")

# Seconds between two joins, at most, before jitter.
_BACKOFF_MAX = 30.0
# Seconds that leaving may take after an error. The end of the connection ends the member in any case.
_LEAVE = 5.0


class JoinOptions(TypedDict, total=False):
    """The options of join() that run() hands on."""

    group: int
    peerd: PathLike | None
    timeout: float | None
    members: int | None
    coordinator: str | None
    cohort: tuple[str, int] | None
    step_deadline: float | None
    on_fault: str
    name: str | None
    join_mode: Literal["blocking", "background"]


class Rejoins:
    """Decides whether to join again, and when. Not thread-safe.

    now: gives seconds; for tests.
    """

    def __init__(self, most: int, window: float, backoff: float, now: Callable[[], float] = time.monotonic) -> None:
        if not window > 0:
            raise InvalidArgument(f"window is {window!r}; give seconds, more than 0")
        if not backoff >= 0:
            raise InvalidArgument(f"backoff is {backoff!r}; give seconds, 0 or more")
        self.most = number_of(most, "max_rejoins")
        self.window = window
        self._backoff = backoff
        self._now = now
        self._times: collections.deque[float] = collections.deque()
        self._mismatch_at: float | None = None  # steps that were passed before the last StateMismatch

    def refusal(self, problem: Error, member_is_in: bool, steps: float) -> str | None:
        """Why not to join again after `problem`. None: join again, and it is counted.

        member_is_in: the member still has its place. steps: how many boundaries were passed in all.
        """
        if isinstance(problem, Unavailable) and member_is_in:
            return "the member still has its place, so joining again would not help"
        if isinstance(problem, StateMismatch):
            before, self._mismatch_at = self._mismatch_at, steps
            if before == steps:
                return "the state does not fit after joining again either"
        now = self._now()
        while self._times and self._times[0] <= now - self.window:
            self._times.popleft()
        if len(self._times) >= self.most:
            return f"this would be more than {self.most} rejoins in {self.window:g} s"
        self._times.append(now)
        return None

    @property
    def count(self) -> int:
        """The rejoins in the window, the last one included."""
        return len(self._times)

    def delay(self) -> float:
        """Seconds to wait before the join. They double with each rejoin in the window. Random, so that members whose
        peerd or coordinator has been away do not come back all at once."""
        return random.uniform(0.5, 1.0) * min(_BACKOFF_MAX, self._backoff * 2.0 ** min(self.count - 1, 30))


def run(
    train: Callable[[Comm], T],
    run: str = "default",
    *,
    state: State | None = None,
    max_rejoins: int = 10,
    window: float = 600.0,
    backoff: float = 1.0,
    before_rejoin: Callable[[Error], object] | None = None,
    **join_options: Unpack[JoinOptions],
) -> T:
    """Joins a group, calls `train(comm)`, leaves, and returns what `train` returned. Joins again after a fault.

        def train(comm):
            while state.revision < 1000:  # goes on where the state is, so it may be called again
                with comm.step(state):
                    ...

        lh.run(train, "demo", state=state)

    If `train` or the join raises one of these errors, run() leaves, waits, joins again and calls `train` again:
    Evicted: this member was removed from its group.
    Unavailable: peerd stopped or died, the coordinator does not serve, or the others do not reach this host. Not if the
        member still has its place: joining again would not help then, for instance if memory is used up.
    StateMismatch: the state does not fit those of the others. If it does not fit after joining again either, with no
        step in between, the error is raised: then only you can decide, perhaps in `before_rejoin`.
    Any other exception leaves the group and is raised, also KeyboardInterrupt. So the others never wait for a program
    that has failed.

    train: gets the Comm of the present membership. Keep what must survive a rejoin outside: the model, the State. Do
        not keep the Comm.
    run: name of the run, as for join().
    state: the state of the first step in `train`. It is copied and hashed before each join, so that the others wait
        less. None: the first step does that.
    max_rejoins, window: after so many rejoins within `window` seconds the next such error is raised. 0: none.
    backoff: seconds until the first rejoin. They double with each rejoin in the window, up to 30, and are shortened at
        random by up to half.
    before_rejoin: is called with the error before each rejoin, for instance to load a checkpoint or to set
        `state.revision`. What it raises is raised.
    join_options: as for join(), with two differences. `timeout` is None if it is not given: a join waits as long as the
        step of the others takes. `members` counts for the first join only: a program that comes back does not wait
        until as many are there again.

    Each rejoin is logged as a warning with its reason (`logging.getLogger("longhaul")`) and counted in
    `comm.stats()["rejoins"]`. Raises also what join() raises.
    """
    options: dict[str, Any] = {"timeout": None, **join_options}
    rejoins = Rejoins(max_rejoins, window, backoff)
    counters = Counters()
    while True:
        comm: Comm | None = None
        try:
            comm = join(run, state=state, **options)
            options["members"] = None
            comm._share_counters(counters)
            result = train(comm)
        except (Evicted, Unavailable, StateMismatch) as problem:
            member_is_in = comm is not None and not comm.is_out()
            _leave(comm)
            refusal = rejoins.refusal(problem, member_is_in, counters.read()["steps"])
            if refusal is not None:
                logger.error("run %s: not joining again: %s: %s", run, refusal, problem)
                raise
            _wait(run, rejoins, problem)
            if before_rejoin is not None:
                before_rejoin(problem)
            counters.add(rejoins=1)
        except BaseException:
            _leave(comm)
            raise
        else:
            _end(comm, run)
            return result


def _wait(run: str, rejoins: Rejoins, problem: Error) -> None:
    delay = rejoins.delay()
    logger.warning(
        "run %s: %s: %s; joining again in %.1f s (rejoin %d of at most %d in %g s)",
        *(run, type(problem).__name__, problem, delay, rejoins.count, rejoins.most, rejoins.window),
    )
    time.sleep(delay)


def _leave(comm: Comm | None) -> None:
    """Leaves after an error, which counts more than what goes wrong here."""
    if comm is not None:
        with contextlib.suppress(Error):
            comm.leave(timeout=_LEAVE)


def _end(comm: Comm, run: str) -> None:
    """Leaves after `train` has returned: its result counts, also if the member lost its place just now."""
    try:
        comm.leave()
    except (Evicted, Unavailable) as problem:
        logger.warning("run %s: the training is over, but leaving failed: %s", run, problem)
