"""What requests teach as their events pass: how long answers are, and whether prefixes were where they should be."""

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

    def __init__(self, recorder: Recorder, *, routing: Callable[[], RequestRouting | None]) -> None:
        """routing: gives what chooses replicas in this process, once there is one."""
        self.recorder = recorder
        self._routing = routing
        self._lengths = OutputLengths()
        for kind in ("expected", "found"):
            # From zero, so that the first one is a rise.
            recorder.count(HITS, kind, amount=0)

    def expected_length(self, tenant: str | None, route: str) -> int:
        """Gives how many tokens an answer is expected to have; 0 before enough of them have ended."""
        return round(self._lengths.expected(tenant or "", route) or 0)

    def observe(self, events: TokenEvents, request: GenerateRequest, *, route: str) -> "ObservedEvents":
        """Gives the same events, learned from."""
        return ObservedEvents(self, events, request, route)

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
    """The token events of one request, learned from as they pass."""

    observer: RequestObserver
    events: TokenEvents
    request: GenerateRequest
    route: str
    _has_begun: bool = field(default=False, init=False)
    _num_tokens: dict[int, int] = field(default_factory=dict, init=False)

    async def __anext__(self) -> TokenEvent:
        event = await anext(self.events)
        if not self._has_begun:
            self._has_begun = True
            self.observer.note_begun(self.request.request_id, event.num_cached_tokens)
        for each in (event, *event.more):
            self._num_tokens[each.index] = self._num_tokens.get(each.index, 0) + len(each.token_ids)
            # One that was cut short would have been longer, nobody knows by how much.
            if each.finish_reason == FinishReason.STOP:
                self.observer.note_ended(self.request.hints.tenant, self.route, self._num_tokens[each.index])
        return event

    def close(self) -> None:
        self.events.close()
