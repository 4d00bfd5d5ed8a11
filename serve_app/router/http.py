"""The ASGI application of the router: all routes, and the one place where errors become answers."""

import logging
from collections.abc import Sequence

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from engine import PitstopError, QueueFull
from serve_app.metrics import Recorder
from serve_app.protocol.errors import (
    ErrorBody,
    ErrorDetail,
    LineFull,
    Unauthorized,
    error_body,
    rule_of,
)
from serve_app.router.admission import Admission
from serve_app.router.edge import UNEXPECTED, RequestMeter, count_refusal
from serve_app.router.keys import KeyGate, KeyRing

logger = logging.getLogger("ray.serve.pitstop")


def build_http(
    routers: Sequence[APIRouter],
    *,
    recorder: Recorder,
    admission: Admission,
    keys: KeyRing,
    cors_origins: Sequence[str] = (),
) -> FastAPI:
    """Gives the application that answers the routes of `routers`, every error in OpenAI's shape.

    keys: what users have to bring where they are set. cors_origins: web pages that browsers let in.
    """
    app = FastAPI(title="Pitstop", redoc_url=None)
    for router in routers:
        app.include_router(router)
    # Each once, in the order in which they are asked.
    paths = dict.fromkeys(str(getattr(route, "path", "")) for router in routers for route in router.routes)
    # What is added later stands before what was added earlier.
    app.add_middleware(KeyGate, keys=keys)
    if cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(cors_origins), allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(RequestMeter, recorder=recorder, routes=tuple(paths))

    @app.exception_handler(PitstopError)
    async def answer_error(_: Request, error: PitstopError) -> Response:
        count_refusal(recorder, error)
        headers: dict[str, str] = {}
        if isinstance(error, QueueFull):
            retry_s = error.retry_after_s if isinstance(error, LineFull) else admission.retry_after_s()
            headers["retry-after"] = str(retry_s)
        if isinstance(error, Unauthorized):
            headers["www-authenticate"] = "Bearer"
        return JSONResponse(error_body(error).model_dump(), status_code=rule_of(error).status, headers=headers)

    @app.exception_handler(HTTPException)
    async def answer_routing_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        detail = ErrorDetail(message=message, type="invalid_request_error", code="unknown_url")
        return JSONResponse(ErrorBody(error=detail).model_dump(), status_code=error.status_code, headers=error.headers)

    @app.exception_handler(ClientDisconnect)
    async def answer_nobody(_request: Request, _error: ClientDisconnect) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def answer_unexpected(request: Request, error: Exception) -> Response:
        logger.error("event=unexpected_error route=%s error=%s", request.url.path, type(error).__name__)
        return JSONResponse(error_body(UNEXPECTED).model_dump(), status_code=rule_of(UNEXPECTED).status)

    return app
