"""How old the weights were that drew the tokens which the router handed out, in numbers."""

from collections import Counter
from collections.abc import Iterable

from engine import WeightSpan, WeightVersionGone
from serve_app.messages import TokenEvent
from serve_app.metrics import Recorder
from serve_app.protocol.errors import WeightVersionUnavailable
from serve_app.router.fleet import Fleet
from serve_app.router.generation import TokenEvents

MAX_BEHIND = 3
"""Up to so many versions behind have a series each. Versions have none: Prometheus keeps every series it has seen."""
REFUSAL_OUTCOMES = ("unavailable", "gone")
"""A least version that did not come in time, and a pinned one that nobody serves."""
OLDER = "older"
"""The label of what is further behind."""


class VersionMeter:
    """Counts tokens by how many versions they are behind the committed one, when they come and when their request ends.

    For one event loop.
    """

    def __init__(self, recorder: Recorder, fleet: Fleet) -> None:
        self._recorder = recorder
        self._fleet = fleet
        self._newest = 0
        for outcome in REFUSAL_OUTCOMES:
            # From zero, so that the first one is a rise.
            self.count_refusal(outcome, amount=0)

    def count_tokens(self, spans: Iterable[WeightSpan]) -> None:
        """Takes the spans of tokens just handed out."""
        for span in spans:
            self._newest = max(self._newest, span.version)
            behind = self._committed - span.version
            label = str(behind) if behind <= MAX_BEHIND else OLDER
            self._recorder.count("pitstop_version_tokens_total", label, amount=span.end - span.start)

    def observe_staleness(self, tokens: Counter[int]) -> None:
        """Takes how many tokens of an ended request each version has drawn."""
        for version, count in tokens.items():
            self._recorder.observe("pitstop_token_staleness_versions", value=self._committed - version, times=count)

    def count_refusal(self, outcome: str, *, amount: int = 1) -> None:
        self._recorder.count("pitstop_version_refusals_total", outcome, amount=amount)

    @property
    def _committed(self) -> int:
        """The router's latest word of it; tokens may have brought news sooner."""
        return max(self._newest, self._fleet.newest_version)


class MeteredEvents:
    """The token events of one request, counted as they pass."""

    def __init__(self, events: TokenEvents, meter: VersionMeter) -> None:
        self._events = events
        self._meter = meter
        self._tokens: Counter[int] = Counter()

    async def __anext__(self) -> TokenEvent:
        try:
            event = await anext(self._events)
        except (WeightVersionUnavailable, WeightVersionGone) as error:
            self._meter.count_refusal("gone" if isinstance(error, WeightVersionGone) else "unavailable")
            raise
        for span in (span for each in (event, *event.more) for span in each.weight_versions):
            self._meter.count_tokens([span])
            self._tokens[span.version] += span.end - span.start
        return event

    def close(self) -> None:
        self._events.close()
        self._meter.observe_staleness(self._tokens)
        # Closed again, it counts nothing again.
        self._tokens.clear()
