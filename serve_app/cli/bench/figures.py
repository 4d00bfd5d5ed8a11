"""What the requests of a level add up to."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from serve_app.cli.bench.load import Run

PERCENTILES = (50, 90, 95, 99)
NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Figures:
    """One level. Latencies are by percentile, in seconds; errors are how many requests ended with each
    kind of message.
    """

    level: str
    number: float
    num_answered: int
    num_failed: int
    wall_s: float
    requests_per_s: float
    prompt_tokens_per_s: float
    tokens_per_s: float
    tokens_per_answer: float
    first_token_s: dict[int, float]
    token_s: dict[int, float]
    total_s: dict[int, float]
    errors: dict[str, int]

    def as_json(self) -> dict[str, Any]:
        """With percentiles as p50."""
        shown = asdict(self)
        for name in ("first_token_s", "token_s", "total_s"):
            shown[name] = {f"p{percent}": round(value, 6) for percent, value in shown[name].items()}
        return shown


def figures_of(run: Run) -> Figures:
    """Gives the figures; requests that failed are counted and in no latency."""
    answered = [request for request in run.requests if request.error is None]
    num_tokens = sum(request.num_tokens for request in answered)
    token_times = [request.token_s for request in answered if request.token_s is not None]
    return Figures(
        level=run.level.name,
        number=run.level.number,
        num_answered=len(answered),
        num_failed=len(run.requests) - len(answered),
        wall_s=run.wall_s,
        requests_per_s=len(answered) / run.wall_s,
        prompt_tokens_per_s=sum(request.num_prompt_tokens for request in answered) / run.wall_s,
        tokens_per_s=num_tokens / run.wall_s,
        tokens_per_answer=num_tokens / max(1, len(answered)),
        first_token_s=percentiles([request.first_token_s for request in answered]),
        token_s=percentiles(token_times),
        total_s=percentiles([request.total_s for request in answered]),
        errors=_kinds([request.error for request in run.requests if request.error is not None]),
    )


def _kinds(messages: Sequence[str]) -> dict[str, int]:
    """Counts messages that differ in numbers alone as one, by the first of them; the most frequent first."""
    first: dict[str, str] = {}
    counts = Counter(first.setdefault(NUMBER.sub("", message), message) for message in messages)
    return dict(counts.most_common())


def percentiles(values: Sequence[float]) -> dict[int, float]:
    """Gives each percentile, between two values in proportion; none where there is no value."""
    ordered = sorted(values)
    return {percent: _percentile(ordered, percent) for percent in PERCENTILES} if ordered else {}


def _percentile(ordered: Sequence[float], percent: int) -> float:
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
