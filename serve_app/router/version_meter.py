"""Which weights drew the tokens that the router handed out, in numbers: by version, and by age."""

from collections import Counter
from collections.abc import Iterable

from engine import WeightSpan, WeightVersionGone
from serve_app.messages import TokenEvent
from serve_app.metrics import Recorder
from serve_app.protocol.errors import WeightVersionUnavailable
from serve_app.router.fleet import Fleet
from serve_app.router.generation import TokenEvents

NUM_SHOWN_VERSIONS = 4
"""The newest ones have a series each: a trainer makes thousands of versions, and few of them generate at one time."""
REFUSAL_OUTCOMES = ("unavailable", "gone")
"""A least version that did not come in time, and a pinned one that nobody serves."""
OLDER = "older"
"""The label of all other versions."""


class VersionMeter:
    """Counts tokens by weight version, and how far they are behind the committed one when their request ends.

    For one event loop.
    """

    def __init__(self, recorder: Recorder, fleet: Fleet) -> None:
        self._recorder = recorder
        self._fleet = fleet
        self._shown: list[int] = []
        self._newest = 0
        for outcome in REFUSAL_OUTCOMES:
            # From zero, so that the first one is a rise.
            self.count_refusal(outcome, amount=0)

    def count_tokens(self, spans: Iterable[WeightSpan]) -> None:
        """Takes the spans of tokens just handed out."""
        for span in spans:
            self._recorder.count(
                "pitstop_version_tokens_total", self._label(span.version), amount=span.end - span.start
            )

    def observe_staleness(self, tokens: Counter[int]) -> None:
        """Takes how many tokens of an ended request each version has drawn."""
        committed = max(self._newest, self._fleet.newest_version)
        for version, count in tokens.items():
            self._recorder.observe("pitstop_token_staleness_versions", value=committed - version, times=count)

    def count_refusal(self, outcome: str, *, amount: int = 1) -> None:
        self._recorder.count("pitstop_version_refusals_total", outcome, amount=amount)

    def _label(self, version: int) -> str:
        if version not in self._shown:
            self._newest = max(self._newest, version)
            self._shown = sorted([*self._shown, version])
            for forgotten in self._shown[:-NUM_SHOWN_VERSIONS]:
                if forgotten != version:
                    self._recorder.forget("pitstop_version_tokens_total", str(forgotten))
            self._shown = self._shown[-NUM_SHOWN_VERSIONS:]
        return str(version) if version in self._shown else OLDER


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
