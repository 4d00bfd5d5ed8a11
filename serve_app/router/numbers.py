"""The numbers of one router, and those of the whole fleet on one page."""

from collections import Counter
from collections.abc import Callable, Mapping

from serve_app.metric_aliases import with_aliases
from serve_app.metrics import Recorder, merge_expositions
from serve_app.router.admission import Admission
from serve_app.router.fleet import Fleet
from serve_app.routing.request_routing import REASONS, RequestRouting


class RouterNumbers:
    """Carries what others of this process have counted over into the router's recorder. For one event loop."""

    def __init__(
        self, recorder: Recorder, admission: Admission, *, routing: Callable[[], RequestRouting | None] = lambda: None
    ) -> None:
        """routing: gives what chooses replicas in this process, once there is one."""
        self._recorder = recorder
        self._admission = admission
        self._routing = routing
        self._recorded: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self._count(self._recorded)

    def exposition(self) -> str:
        """Gives the numbers of this router as Prometheus text."""
        routing = self._routing()
        if routing is not None:
            counts = Counter(routing.reasons)
            self._count({reason: counts[reason] - self._recorded[reason] for reason in counts})
            self._recorded = counts
        self._recorder.set_gauge("pitstop_requests_waiting_at_router", value=self._admission.num_waiting)
        self._recorder.set_gauge("pitstop_requests_in_line", value=self._admission.num_in_line)
        self._recorder.set_gauge("pitstop_queued_tokens_at_router", value=self._admission.queued_tokens)
        return self._recorder.expose()

    def _count(self, new: Mapping[str, int]) -> None:
        for reason, number in new.items():
            self._recorder.count("pitstop_routing_decisions_total", reason, amount=number)


async def fleet_page(fleet: Fleet, own: RouterNumbers, *, model: str) -> str:
    """Gives the page of every router, replica and the controller: the same one whichever router is asked."""
    return with_aliases(merge_expositions([own.exposition(), *await fleet.metrics()]), model=model)
