"""The numbers of one router, and those of the whole fleet on one page."""

from serve_app.metric_aliases import with_aliases
from serve_app.metrics import Recorder, merge_expositions
from serve_app.router.admission import Admission
from serve_app.router.fleet import Fleet
from serve_app.routing_state import COUNTS


class RouterNumbers:
    """Carries what others of this process have counted over into the router's recorder. For one event loop."""

    def __init__(self, recorder: Recorder, admission: Admission) -> None:
        self._recorder = recorder
        self._admission = admission
        self._recorded: dict[str, int] = {}

    def exposition(self) -> str:
        """Gives the numbers of this router as Prometheus text."""
        counts = {"policy": COUNTS.decided, "waited": COUNTS.waited, "fallback": COUNTS.failed}
        for outcome, count in counts.items():
            new = count - self._recorded.get(outcome, 0)
            self._recorder.count("pitstop_routing_decisions_total", outcome, amount=new)
        self._recorded = counts
        self._recorder.set_gauge("pitstop_requests_waiting_at_router", value=self._admission.num_waiting)
        return self._recorder.expose()


async def fleet_page(fleet: Fleet, own: RouterNumbers, *, model: str) -> str:
    """Gives the page of every router, replica and the controller: the same one whichever router is asked."""
    return with_aliases(merge_expositions([own.exposition(), *await fleet.metrics()]), model=model)
