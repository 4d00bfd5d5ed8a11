"""Lets a thread that works beside generation take its share of a core and no more."""

from collections.abc import Callable
from time import sleep, thread_time

STAGING_SHARE = 0.2
"""Of one core: a step that shares one waits for it as long, and more since the memory is shared as well."""
LEAST_WORK_S = 0.001
"""Before a rest: a sleep is some 0.1 ms longer than asked for."""


class Pace:
    """Made and called in one thread: each call rests for as long as the work since the call before makes it owe."""

    def __init__(self, is_busy: Callable[[], bool], *, share: float = STAGING_SHARE) -> None:
        """is_busy: whether anybody is disturbed; where nobody is, there is no rest."""
        self._is_busy = is_busy
        self._rest_per_work = 1 / share - 1
        self._since = thread_time()

    def rest(self) -> None:
        """Sleeps, if need be. Counts the time of the processor: who had to wait for it has rested."""
        worked = thread_time() - self._since
        if worked < LEAST_WORK_S:
            return
        if self._is_busy():
            sleep(worked * self._rest_per_work)
        self._since = thread_time()
