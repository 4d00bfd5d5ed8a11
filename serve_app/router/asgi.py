"""The HTTP side of the router, whole: every route over one generation service."""

from importlib.metadata import version

from fastapi import FastAPI

from serve_app.metrics import Recorder
from serve_app.protocol.requests import ChatRequest, CompletionRequest
from serve_app.protocol.text_bodies import AbortBody, DetokenizeBody, TokenizeBody
from serve_app.router.admin_routes import AdminKey, admin_routes
from serve_app.router.http import build_http
from serve_app.router.keys import KeyRing
from serve_app.router.numbers import RouterNumbers
from serve_app.router.openai_routes import openai_routes
from serve_app.router.openapi import add_document
from serve_app.router.ops_routes import ops_routes
from serve_app.router.service import GenerationService
from serve_app.router.text_routes import text_routes
from serve_app.router.wall import Wall
from serve_app.router.wall_routes import wall_routes
from serve_app.settings import AppSettings

BODIES = (ChatRequest, CompletionRequest, TokenizeBody, DetokenizeBody, AbortBody)


def build_asgi(
    service: GenerationService, settings: AppSettings, *, recorder: Recorder, numbers: RouterNumbers
) -> FastAPI:
    """Gives the application that Ray Serve runs in the router's process. Raises ValueError for a key file at fault."""
    routers = [
        openai_routes(service, settings),
        text_routes(service, settings),
        ops_routes(service.fleet, numbers, model=settings.model_name),
        wall_routes(Wall(service.fleet, numbers, model=settings.model_name)),
        admin_routes(service.fleet, AdminKey(KeyRing(settings.admin_keys(), what="admin key"))),
    ]
    app = build_http(
        routers,
        recorder=recorder,
        admission=service.admission,
        keys=KeyRing(settings.api_keys(), what="API key"),
        cors_origins=settings.cors_origins,
    )
    add_document(app, BODIES, version=version("pitstop"))
    return app
