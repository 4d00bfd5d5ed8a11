"""Tokens by the age of their weights: the same few series however many versions come."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine import WeightSpan
from serve_app.messages import TokenEvent
from serve_app.metrics import ROUTER_METRICS, Recorder
from serve_app.protocol.errors import WeightVersionUnavailable
from serve_app.router.version_meter import MeteredEvents, VersionMeter

TOKENS = "pitstop_version_tokens_total"
STALENESS = "pitstop_token_staleness_versions"


class Events:
    """Gives what it was made of, one after the other."""

    def __init__(self, *events: TokenEvent | Exception) -> None:
        self._events = list(events)
        self.num_closed = 0

    async def __anext__(self) -> TokenEvent:
        event = self._events.pop(0)
        if isinstance(event, Exception):
            raise event
        return event

    def close(self) -> None:
        self.num_closed += 1


class Metered:
    """A meter, and what Prometheus sees of it."""

    def __init__(self) -> None:
        self.fleet = SimpleNamespace(newest_version=0)
        self._recorder = Recorder(ROUTER_METRICS)
        fleet: Any = self.fleet
        self.meter = VersionMeter(self._recorder, fleet)

    def samples(self, name: str) -> dict[str, float]:
        """Values by the only label, or "" where there is none."""
        return {
            "".join(sample.labels.values()): sample.value
            for family in text_string_to_metric_families(self._recorder.expose())
            for sample in family.samples
            if sample.name == name
        }


def test_thousands_of_versions_make_no_more_series_than_five() -> None:
    metered = Metered()
    for version in range(1, 1001):
        metered.meter.count_tokens([WeightSpan(each, 0, 1) for each in range(max(1, version - 9), version + 1)])
        metered.fleet.newest_version = version
    assert {label: count > 900 for label, count in metered.samples(TOKENS).items()} == dict.fromkeys(
        ("0", "1", "2", "3", "older"), True
    )


def test_tokens_are_counted_by_how_far_behind_the_committed_version_they_come() -> None:
    metered = Metered()
    metered.fleet.newest_version = 7
    metered.meter.count_tokens([WeightSpan(3, 0, 5), WeightSpan(4, 5, 7), WeightSpan(7, 7, 8)])
    assert metered.samples(TOKENS) == {"older": 5, "3": 2, "0": 1}
    # A token of weights that the router has not heard of is of the committed ones.
    metered.meter.count_tokens([WeightSpan(8, 0, 10), WeightSpan(7, 10, 13)])
    assert metered.samples(TOKENS) == {"older": 5, "3": 2, "1": 3, "0": 11}


def test_staleness_counts_tokens_behind_the_committed_version() -> None:
    metered = Metered()
    metered.meter.count_tokens([WeightSpan(4, 0, 2), WeightSpan(6, 2, 5)])
    metered.meter.observe_staleness(Counter({4: 2, 6: 3}))
    metered.fleet.newest_version = 9
    metered.meter.observe_staleness(Counter({6: 1}))
    buckets = metered.samples(f"{STALENESS}_bucket")
    assert [buckets[limit] for limit in ("0.0", "1.0", "2.0", "3.0", "+Inf")] == [3, 3, 5, 6, 6]


async def test_events_pass_and_are_counted_once() -> None:
    metered = Metered()
    event = TokenEvent("r", [1, 2], weight_versions=(WeightSpan(1, 0, 1), WeightSpan(2, 1, 2)))
    source = Events(event, WeightVersionUnavailable("no"))
    events = MeteredEvents(source, metered.meter)
    assert await anext(events) == event
    assert metered.samples("pitstop_version_refusals_total") == {"unavailable": 0, "gone": 0}
    with pytest.raises(WeightVersionUnavailable):
        await anext(events)
    assert metered.samples("pitstop_version_refusals_total") == {"unavailable": 1, "gone": 0}
    events.close()
    events.close()
    assert source.num_closed == 2
    assert metered.samples(TOKENS) == {"0": 2}
    assert metered.samples(f"{STALENESS}_count") == {"": 2}
