"""The routes that probes and Prometheus ask."""

from fastapi import APIRouter, Response
from starlette.responses import JSONResponse

from serve_app.metrics import CONTENT_TYPE, Recorder, merge_expositions
from serve_app.protocol.errors import NoReplica, error_body
from serve_app.router.fleet import Fleet
from serve_app.routing_state import COUNTS


def ops_routes(fleet: Fleet, recorder: Recorder) -> APIRouter:
    """Gives `/health`, `/ready` and `/metrics`; none of them needs a key."""
    routes = APIRouter()
    decisions = _Decisions(recorder)

    @routes.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "alive"}

    @routes.get("/ready")
    async def ready() -> JSONResponse:
        reason = await fleet.reason_not_ready()
        if reason is None:
            return JSONResponse({"status": "ready"})
        return JSONResponse(error_body(NoReplica(reason)).model_dump(), status_code=503, headers={"retry-after": "1"})

    @routes.get("/metrics")
    async def metrics() -> Response:
        decisions.record()
        return Response(merge_expositions([recorder.expose(), *await fleet.metrics()]), media_type=CONTENT_TYPE)

    return routes


class _Decisions:
    """Carries what the routing policy of this process has counted over into the router's metrics."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._recorded: dict[str, int] = {}

    def record(self) -> None:
        counts = {"policy": COUNTS.decided, "waited": COUNTS.waited, "fallback": COUNTS.failed}
        for outcome, count in counts.items():
            new = count - self._recorded.get(outcome, 0)
            self._recorder.count("pitstop_routing_decisions_total", outcome, amount=new)
        self._recorded = counts
