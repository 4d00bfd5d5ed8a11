"""The routes that probes and Prometheus ask."""

from fastapi import APIRouter, Response
from starlette.responses import JSONResponse

from serve_app.metrics import CONTENT_TYPE
from serve_app.protocol.errors import NoReplica, error_body
from serve_app.protocol.text_bodies import Health
from serve_app.router.fleet import Fleet
from serve_app.router.numbers import RouterNumbers, fleet_page


def ops_routes(fleet: Fleet, numbers: RouterNumbers, *, model: str) -> APIRouter:
    """Gives `/health`, `/ready` and `/metrics`; none of them needs a key."""
    routes = APIRouter()

    @routes.get("/health", response_model=Health)
    async def health() -> JSONResponse:
        reason = await fleet.reason_unhealthy()
        return JSONResponse({"status": "alive"}) if reason is None else _unavailable(reason)

    @routes.get("/ready", response_model=Health)
    async def ready() -> JSONResponse:
        reason = await fleet.reason_not_ready()
        return JSONResponse({"status": "ready"}) if reason is None else _unavailable(reason)

    @routes.get("/metrics")
    async def metrics() -> Response:
        return Response(await fleet_page(fleet, numbers, model=model), media_type=CONTENT_TYPE)

    return routes


def _unavailable(reason: str) -> JSONResponse:
    return JSONResponse(error_body(NoReplica(reason)).model_dump(), status_code=503, headers={"retry-after": "1"})
