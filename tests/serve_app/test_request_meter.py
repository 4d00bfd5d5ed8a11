"""How HTTP requests are counted: by the route that answers, by status, and by the code of their error."""

import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI, Response
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse

from serve_app.bearer_keys import KeySource
from serve_app.metrics import ROUTER_METRICS, Recorder
from serve_app.protocol.errors import NoReplica
from serve_app.router.admin_routes import AdminKey, admin_routes
from serve_app.router.admission import Admission
from serve_app.router.http import build_http
from serve_app.router.keys import KeyRing
from serve_app.router.openai_routes import openai_routes
from serve_app.router.ops_routes import ops_routes
from serve_app.router.text_routes import text_routes
from serve_app.router.wall_routes import wall_routes
from serve_app.settings import AppSettings, LimitSettings

NOBODY: Any = None
KEY = "user-0123456789abcdef"


def our_routers() -> list[APIRouter]:
    """All routes there are, with nobody behind them."""
    settings = AppSettings(model="/m")
    return [
        openai_routes(NOBODY, settings),
        text_routes(NOBODY, settings),
        ops_routes(NOBODY, NOBODY, model="m"),
        wall_routes(NOBODY),
        admin_routes(NOBODY, AdminKey(KeyRing(KeySource(KEY), what="admin key"))),
    ]


def app_of(*routers: APIRouter, keys: str = "") -> tuple[FastAPI, Recorder]:
    recorder = Recorder(ROUTER_METRICS)
    admission = Admission(LimitSettings(), max_waiting=10, recorder=recorder)
    ring = KeyRing(KeySource(keys), what="API key")
    return build_http(routers, recorder=recorder, admission=admission, keys=ring), recorder


def client_of(app: FastAPI, *, prefix: str = "") -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, root_path=prefix)
    return httpx.AsyncClient(transport=transport, base_url="http://router")


def counted(recorder: Recorder, name: str) -> dict[tuple[str, ...], float]:
    """The series of a counter that have counted anything, by the values of their labels."""
    samples = (one for family in text_string_to_metric_families(recorder.expose()) for one in family.samples)
    return {tuple(one.labels.values()): one.value for one in samples if one.name == name and one.value}


def paths_of(routers: list[APIRouter]) -> Iterator[str]:
    for router in routers:
        yield from (str(getattr(route, "path", "")) for route in router.routes)


@pytest.mark.parametrize("prefix", ["", "/fleet", "/a/b", "/v1"])
@pytest.mark.parametrize("keys", ["", KEY])
async def test_every_route_has_its_own_label_below_any_prefix(prefix: str, keys: str) -> None:
    app, recorder = app_of(*our_routers(), keys=keys)
    expected = set()
    async with client_of(app, prefix=prefix) as http:
        for path in paths_of(our_routers()):
            label = re.sub(r":\w+}", "}", path)
            await http.post(prefix + re.sub(r"{\w+}", "some-id", label))
            expected.add(label)
        for nothing in ("/nothing", "/v1", "/admin/pause/a/b/renew", "/metrics/more"):
            await http.post(prefix + nothing)
    assert len(expected) > 15
    labels = {route for route, _ in counted(recorder, "pitstop_http_requests_total")}
    assert labels == expected | {"other"}


@pytest.mark.parametrize("keys", ["", KEY])
@pytest.mark.parametrize("error", [RuntimeError("secret"), TimeoutError(), KeyError("x"), OSError(28, "full")])
async def test_an_error_nobody_expected_is_an_answer_of_500_and_a_refusal(keys: str, error: Exception) -> None:
    routes = APIRouter()

    @routes.get("/v1/broken")
    async def broken() -> None:
        raise error

    app, recorder = app_of(routes, keys=keys)
    async with client_of(app) as http:
        answer = await http.get("/v1/broken", headers={"authorization": f"Bearer {KEY}"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert counted(recorder, "pitstop_http_requests_total") == {("/v1/broken", "500"): 1}
    assert counted(recorder, "pitstop_refusals_total") == {("internal_error",): 1}


async def test_an_error_after_the_headers_keeps_their_status_and_is_a_refusal() -> None:
    routes = APIRouter()

    async def chunks() -> AsyncIterator[bytes]:
        yield b"a"
        raise RuntimeError("secret")

    @routes.get("/v1/broken")
    async def broken() -> Response:
        return StreamingResponse(chunks())

    app, recorder = app_of(routes)
    async with client_of(app) as http:
        await http.get("/v1/broken")
    assert counted(recorder, "pitstop_http_requests_total") == {("/v1/broken", "200"): 1}
    assert counted(recorder, "pitstop_refusals_total") == {("internal_error",): 1}


async def test_a_client_that_left_is_499_and_no_refusal() -> None:
    routes = APIRouter()

    async def chunks() -> AsyncIterator[bytes]:
        yield b"a"
        raise ClientDisconnect

    @routes.get("/v1/before")
    async def before() -> None:
        raise ClientDisconnect

    @routes.get("/v1/after")
    async def after() -> Response:
        return StreamingResponse(chunks())

    app, recorder = app_of(routes)
    async with client_of(app) as http:
        await http.get("/v1/before")
        await http.get("/v1/after")
    assert counted(recorder, "pitstop_http_requests_total") == {("/v1/before", "499"): 1, ("/v1/after", "200"): 1}
    assert counted(recorder, "pitstop_refusals_total") == {}


async def test_an_error_of_the_project_is_counted_once_by_its_code() -> None:
    routes = APIRouter()

    @routes.get("/v1/refused")
    async def refused() -> None:
        raise NoReplica("none answers")

    app, recorder = app_of(routes)
    async with client_of(app) as http:
        assert (await http.get("/v1/refused")).status_code == 503
    assert counted(recorder, "pitstop_http_requests_total") == {("/v1/refused", "503"): 1}
    assert counted(recorder, "pitstop_refusals_total") == {("no_replica",): 1}
