"""How long answers are, learned from those that ended: by tenant and route, in bounded memory."""

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

MAX_KEYS = 1024
"""Pairs of tenant and route remembered, half a kilobyte each; the one unheard of for longest is forgotten."""
BUCKETS_PER_OCTAVE = 4
"""So that a length is known to a fifth."""
NUM_BUCKETS = 20 * BUCKETS_PER_OCTAVE
"""Up to a million tokens."""
DECAY = 0.99
"""Of what was counted, at every answer: the last hundred or so count."""
LEAST_SEEN = 8.0
"""Answers of its own before a tenant's route is judged by itself, and any answers before anything is said."""

MIDDLES: npt.NDArray[np.float64] = 2.0 ** ((np.arange(NUM_BUCKETS) + 0.5) / BUCKETS_PER_OCTAVE)
"""Of the buckets, in tokens."""


@dataclass(slots=True)
class _Counts:
    """A decaying histogram; what decays is the weight of the next one, so that a count is one addition."""

    counts: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(NUM_BUCKETS))
    weight: float = 1.0

    def add(self, num_tokens: int) -> None:
        self.weight /= DECAY
        if self.weight > MAX_WEIGHT:
            self.counts /= self.weight
            self.weight = 1.0
        self.counts[_bucket(num_tokens)] += self.weight

    def num_seen(self) -> float:
        return float(self.counts.sum()) / self.weight


MAX_WEIGHT = 1e12
"""Before a weight is as large as that, all are scaled down."""


class OutputLengths:
    """Lengths of answers, with those of all tenants and routes together for who is new. One thread only."""

    def __init__(self) -> None:
        self._of: OrderedDict[tuple[str, str], _Counts] = OrderedDict()
        self._all = _Counts()

    def add(self, tenant: str, route: str, num_tokens: int) -> None:
        """Takes in the length of an answer that ended by itself."""
        counts = self._of.pop((tenant, route), None) or _Counts()
        self._of[tenant, route] = counts
        if len(self._of) > MAX_KEYS:
            self._of.popitem(last=False)
        counts.add(num_tokens)
        self._all.add(num_tokens)

    def expected(self, tenant: str, route: str, *, generated: int = 0) -> float | None:
        """Gives how many more tokens an answer is expected to have after `generated`; None before much was seen.

        Of heavy tails an answer that is long already is expected to go on for longer than a new one.
        """
        counts = self._of.get((tenant, route))
        if counts is None or counts.num_seen() < LEAST_SEEN:
            counts = self._all
        if counts.num_seen() < LEAST_SEEN:
            return None
        if generated == 0:
            return float(counts.counts @ MIDDLES / counts.counts.sum())
        is_longer = generated < MIDDLES
        longer = counts.counts[is_longer]
        total = float(longer.sum())
        if total <= 0.0:
            # Longer than all that were seen: then as much again as is usual at that length for tails of this kind.
            return float(generated)
        return max(1.0, float(longer @ MIDDLES[is_longer]) / total - generated)


def expected_tokens(*, hint: int | None, learned: float | None, limit: int | None, default: int) -> int:
    """Gives the length of an answer to count on: the hint, else what was learned, else the limit, which bounds it."""
    expected = hint or learned or limit or default
    return max(1, round(expected if limit is None else min(expected, limit)))


def _bucket(num_tokens: int) -> int:
    return min(NUM_BUCKETS - 1, int(np.log2(max(1, num_tokens)) * BUCKETS_PER_OCTAVE))
