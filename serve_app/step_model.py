"""What a step of this engine takes, learned from its counters: so much each, and for each request and prompt token."""

from dataclasses import dataclass
from itertools import combinations

import numpy as np

DECAY = 0.995
"""At every interval: of intervals of a fifth of a second, the last forty seconds count."""
RIDGE = 1e-6
"""So that a column that never varied has a solution at all."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds: of a step, more for each request that generates in it, and for each prompt token; 0 while unknown."""

    step_s: float = 0.0
    request_s: float = 0.0
    token_s: float = 0.0


class StepModel:
    """Least squares with decay over intervals. Nothing is negative: a time that would be is taken to be nothing."""

    def __init__(self) -> None:
        self._products = np.zeros((3, 3))
        self._targets = np.zeros(3)
        self._times: StepTimes | None = StepTimes()

    def observe(self, *, num_steps: float, generated: float, prefilled: float, seconds: float) -> None:
        """Takes in an interval: its steps, the tokens generated and prompt tokens computed in them, and their time."""
        if num_steps <= 0 or seconds <= 0:
            return
        # Relative errors count, so that a long interval weighs as much as a short one.
        row = np.array([num_steps, max(0.0, generated), max(0.0, prefilled)]) / seconds
        self._products = DECAY * self._products + np.outer(row, row)
        self._targets = DECAY * self._targets + row
        self._times = None

    def times(self) -> StepTimes:
        """Gives what fits best."""
        if self._times is None:
            self._times = StepTimes(*self._solved().tolist())
        return self._times

    def _solved(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Gives the best of the solutions in which some times are nothing and no other is negative."""
        scale = np.sqrt(np.diag(self._products))
        scale[scale == 0] = 1.0
        products, targets = self._products / np.outer(scale, scale), self._targets / scale
        best, best_gain = np.zeros(3), 0.0
        for size in (3, 2, 1):
            for kept in map(list, combinations(range(3), size)):
                part = products[np.ix_(kept, kept)] + RIDGE * np.eye(size)
                found = np.linalg.solve(part, targets[kept])
                gain = float(found @ targets[kept])
                if (found >= 0).all() and gain > best_gain:
                    best, best_gain = np.zeros(3), gain
                    best[kept] = found
        return best / scale
