"""The routes that change or show the weights; they need the admin key."""

from dataclasses import asdict
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse

from serve_app.messages import FleetStatus
from serve_app.protocol.drains import DrainBody, UndrainBody
from serve_app.protocol.errors import AdminDisabled
from serve_app.protocol.parsing import parse_body
from serve_app.protocol.strict import RequestModel
from serve_app.protocol.weights import PauseBody, RenewBody, ResumeBody, RollbackBody, SwapBody
from serve_app.router.edge import read_body
from serve_app.router.fleet import Fleet
from serve_app.router.keys import KeyRing

MAX_BODY_BYTES = 4 * 2**20
"""A swap is a path, a label and few flags; its probes may be 64 prompts of 4,096 ids with their references."""

Body = TypeVar("Body", bound=RequestModel)

SHOWN_FIRST = ("version", "source", "label", "committed_at", "requested_by")


class AdminKey:
    """Lets in who brings one of the admin keys. Where none is configured it lets nobody in."""

    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys

    def check(self, request: Request) -> None:
        """Raises AdminDisabled where no key is configured and Unauthorized unless the request brings one."""
        if not self._keys.is_set:
            raise AdminDisabled("no admin key is configured: set PITSTOP_ADMIN_KEY or PITSTOP_ADMIN_KEY_FILE")
        self._keys.find(request.headers.get("authorization", ""))


def admin_routes(fleet: Fleet, key: AdminKey) -> APIRouter:
    """Gives `/admin/weights`, its rollback, the leased pauses of the fleet, and the draining of replicas."""
    routes = APIRouter()

    async def body_of(request: Request, model: type[Body]) -> Body:
        key.check(request)
        return parse_body(model, await read_body(request, limit_bytes=MAX_BODY_BYTES))

    @routes.post("/admin/weights")
    async def swap(request: Request) -> JSONResponse:
        body = await body_of(request, SwapBody)
        return JSONResponse(asdict(await fleet.swap(body.request(requested_by=_requester(request)))))

    @routes.post("/admin/weights/rollback")
    async def rollback(request: Request) -> JSONResponse:
        body = await body_of(request, RollbackBody)
        return JSONResponse(asdict(await fleet.rollback(body.request(requested_by=_requester(request)))))

    @routes.post("/admin/pause")
    async def pause(request: Request) -> JSONResponse:
        body = await body_of(request, PauseBody)
        return JSONResponse(asdict(await fleet.pause(body.request(requested_by=_requester(request)))))

    @routes.post("/admin/pause/{lease_id}/renew")
    async def renew(request: Request, lease_id: str) -> JSONResponse:
        body = await body_of(request, RenewBody)
        return JSONResponse(asdict(await fleet.renew_pause(lease_id, body.lease_s)))

    @routes.post("/admin/resume")
    async def resume(request: Request) -> JSONResponse:
        body = await body_of(request, ResumeBody)
        return JSONResponse({"ended": await fleet.resume(body.lease_id)})

    @routes.post("/admin/drain")
    async def drain(request: Request) -> JSONResponse:
        body = await body_of(request, DrainBody)
        return JSONResponse(asdict(await fleet.drain(body.request())))

    @routes.post("/admin/undrain")
    async def undrain(request: Request) -> JSONResponse:
        body = await body_of(request, UndrainBody)
        return JSONResponse(asdict(await fleet.undrain(body.request())))

    @routes.get("/admin/weights")
    async def status(request: Request) -> JSONResponse:
        key.check(request)
        return JSONResponse(_shown(await fleet.status()))

    return routes


def _shown(status: FleetStatus) -> dict[str, Any]:
    """Puts what is asked for most before the rest: the committed version, from where, when and from whom it came."""
    shown = asdict(status)
    newest = shown["history"][0]
    return {name: newest[name] for name in SHOWN_FIRST} | shown


def _requester(request: Request) -> str:
    # Everybody has the same key, so the address is all there is to tell them apart.
    return f"HTTP from {request.client.host}" if request.client is not None else "HTTP"
