"""Lets a thread that works beside generation take its share of a core and no more."""

from collections.abc import Callable
from time import sleep, thread_time

STAGING_SHARE = 0.5
"""Of one core. Reading, checking, digesting and packing took 1.0 to 1.7 s of a core for a GB (EPYC, others running), so
that staging at this share has 0.3 GB/s and more."""


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
        if self._is_busy():
            sleep(worked * self._rest_per_work)
        self._since = thread_time()
