"""What requests teach as their events pass: how long they take from their arrival, how long answers are, and whether
prefixes were where they should be.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from engine import FinishReason
from serve_app.messages import GenerateRequest, TokenEvent
from serve_app.metrics import Recorder
from serve_app.router.generation import TokenEvents
from serve_app.routing.output_lengths import OutputLengths
from serve_app.routing.request_routing import RequestRouting

HITS = "pitstop_routing_hit_tokens_total"


class RequestObserver:
    """Learns from all requests of one router. For one event loop."""

    def __init__(
        self,
        recorder: Recorder,
        *,
        routing: Callable[[], RequestRouting | None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """routing: gives what chooses replicas in this process, once there is one. clock: seconds, as `arrived_at`."""
        self.recorder = recorder
        self._routing = routing
        self.clock = clock
        self._lengths = OutputLengths()
        for kind in ("expected", "found"):
            # From zero, so that the first one is a rise.
            recorder.count(HITS, kind, amount=0)

    def expected_length(self, tenant: str | None, route: str) -> int:
        """Gives how many tokens an answer is expected to have; 0 before enough of them have ended."""
        return round(self._lengths.expected(tenant or "", route) or 0)

    def observe(
        self, events: TokenEvents, request: GenerateRequest, *, route: str, arrived_at: float | None = None
    ) -> "ObservedEvents":
        """Gives the same events, learned from; arrived_at: on `time.perf_counter`, where it was not just now."""
        return ObservedEvents(self, events, request, route, self.clock() if arrived_at is None else arrived_at)

    def note_begun(self, request_id: str, num_cached_tokens: int) -> None:
        """Takes in how much of a prompt its replica had cached."""
        routing = self._routing()
        expected = None if routing is None else routing.take_expected_hit(request_id)
        if expected is not None:
            self.recorder.count(HITS, "expected", amount=expected)
            self.recorder.count(HITS, "found", amount=num_cached_tokens)

    def note_ended(self, tenant: str | None, route: str, num_tokens: int) -> None:
        """Takes in the length of an answer that ended by itself."""
        self._lengths.add(tenant or "", route, num_tokens)


@dataclass(slots=True)
class ObservedEvents:
    """The token events of one request, learned from as they pass; all its sequences are one."""

    observer: RequestObserver
    events: TokenEvents
    request: GenerateRequest
    route: str
    arrived_at: float
    _is_computed: bool = field(default=False, init=False)
    _has_tokens: bool = field(default=False, init=False)
    _has_begun: bool = field(default=False, init=False)
    _num_tokens: dict[int, int] = field(default_factory=dict, init=False)

    async def __anext__(self) -> TokenEvent:
        event = await anext(self.events)
        if not self._has_begun:
            self._has_begun = True
            self.observer.note_begun(self.request.request_id, event.num_cached_tokens)
        self._time(event)
        for each in (event, *event.more):
            self._num_tokens[each.index] = self._num_tokens.get(each.index, 0) + len(each.token_ids)
            # One that was cut short would have been longer, nobody knows by how much.
            if each.finish_reason == FinishReason.STOP:
                self.observer.note_ended(self.request.hints.tenant, self.route, self._num_tokens[each.index])
        return event

    def close(self) -> None:
        self.events.close()

    def end(self) -> None:
        """Takes that the last token has been read."""
        self._observe("pitstop_generation_seconds", self.observer.clock())

    def _time(self, event: TokenEvent) -> None:
        now, events = self.observer.clock(), (event, *event.more)
        computed_s = [each.computed_s for each in events if each.computed_s is not None]
        if computed_s and not self._is_computed:
            self._is_computed = True
            # Whatever it waited for until then: its turn, a place at a replica, another replica after one was lost.
            self._observe("pitstop_queue_seconds", now - max(computed_s))
        if not self._has_tokens and any(each.token_ids for each in events):
            self._has_tokens = True
            self._observe("pitstop_time_to_first_token_seconds", now)

    def _observe(self, name: str, moment: float) -> None:
        self.observer.recorder.observe(name, value=max(0.0, moment - self.arrived_at))
