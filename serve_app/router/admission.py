"""How many requests may wait for their first token, and how long a refused one should stay away."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from engine import QueueFull

MAX_RETRY_AFTER_S = 60
"""A client that waits longer than this has given up."""
SMOOTHING = 0.2
"""Weight of the newest wait in the average: the last dozen or so count."""


class Admission:
    """Counts the requests of one router that wait. For one event loop; invariant: 0 <= num_waiting <= max_waiting."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._mean_wait_s = 0.0
        self.num_waiting = 0

    @contextmanager
    def place(self) -> Iterator[None]:
        """Holds a place until the first token; raises QueueFull when all are taken."""
        if self.num_waiting >= self._max_waiting:
            raise QueueFull(
                f"{self.num_waiting} requests wait already, which is the limit; retry in {self.retry_after_s()} s",
                self.num_waiting,
            )
        self.num_waiting += 1
        started_at = time.perf_counter()
        try:
            yield
        finally:
            self.num_waiting -= 1
            self._mean_wait_s += SMOOTHING * (time.perf_counter() - started_at - self._mean_wait_s)

    def retry_after_s(self) -> int:
        """Gives whole seconds after which a place is likely to be free: the usual wait for a first token."""
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil(self._mean_wait_s)))
