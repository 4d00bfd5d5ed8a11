"""The edge of HTTP: bodies with a limit, clients that go away, streams that end their request, and their numbers."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine import PitstopError
from serve_app.metrics import Recorder
from serve_app.protocol.errors import INTERNAL_ERROR_MESSAGE, BodyTooLarge, rule_of

T = TypeVar("T")

MAX_LENGTH_DIGITS = 19
"""Of a content-length that is believed; a longer one is no length, and what is sent is counted all the same."""
UNEXPECTED = PitstopError(INTERNAL_ERROR_MESSAGE)
"""What a client is told of an error that is none of the project's."""
OTHER_ROUTE = "other"
"""The label of every path that is not ours, so that scanners do not grow the metrics."""


async def read_body(request: Request, *, limit_bytes: int) -> bytes:
    """Gives the body; raises BodyTooLarge as soon as it is known to be over the limit."""
    declared = request.headers.get("content-length", "")
    size = int(declared) if declared.isdecimal() and len(declared) < MAX_LENGTH_DIGITS else 0
    body = bytearray()
    if size <= limit_bytes:
        async for chunk in request.stream():
            body += chunk
            size = len(body)
            if size > limit_bytes:
                break
    if size > limit_bytes:
        raise BodyTooLarge(f"the body has {size} bytes or more; at most {limit_bytes} are taken")
    return bytes(body)


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Gives the result of `work`; raises ClientDisconnect, with `work` cancelled, once the client is gone.

    The body has to be read by then.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        watching.cancel()
        working.cancel()


class EventStream(StreamingResponse):
    """A stream of server-sent events that calls `on_close` however it ends, also before its first event."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], *, headers: dict[str, str], on_close: Callable[[], None]) -> None:
        # Proxies in between would otherwise collect events until a buffer is full.
        super().__init__(events, headers={"cache-control": "no-cache", "x-accel-buffering": "no"} | headers)
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()


class RequestMeter:
    """ASGI middleware that counts requests, and the errors that no handler inside it has answered.

    `x-request-id` needs none: Serve's own takes the client's or makes one, and sends it back.
    """

    def __init__(self, app: ASGIApp, *, recorder: Recorder, routes: Collection[str]) -> None:
        """routes: the paths of routes, `{name}` for what differs; the first that fits a request is its label."""
        self._app = app
        self._recorder = recorder
        self._routes = [compile_path(route)[:2] for route in routes]
        self._num_in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status: int | None = None

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        started_at = time.perf_counter()
        scope.setdefault("state", {})["arrived_at"] = started_at
        self._change_in_flight(1)
        # An answer that never starts is a client that left, which proxies log as 499.
        status_without_answer = 499
        try:
            await self._app(scope, receive, send_noting_status)
        except Exception as error:
            # Its answer is made outside of this.
            if not isinstance(error.__cause__, ClientDisconnect):
                status_without_answer = rule_of(UNEXPECTED).status
                count_refusal(self._recorder, UNEXPECTED)
            raise
        finally:
            self._change_in_flight(-1)
            route = self._route_of(path_of(scope))
            self._recorder.count("pitstop_http_requests_total", route, str(status or status_without_answer))
            self._recorder.observe("pitstop_http_request_seconds", route, value=time.perf_counter() - started_at)

    def _route_of(self, path: str) -> str:
        # Also of who was refused before the routes were asked.
        return next((label for pattern, label in self._routes if pattern.match(path)), OTHER_ROUTE)

    def _change_in_flight(self, change: int) -> None:
        self._num_in_flight += change
        self._recorder.set_gauge("pitstop_http_requests_in_flight", value=self._num_in_flight)


def arrived_at(request: Request) -> float:
    """Gives when a request came to the router, on `time.perf_counter`, before its body was read."""
    found: float = request.state.arrived_at
    return found


def count_refusal(recorder: Recorder, error: PitstopError) -> None:
    """Counts an error that a client is told, in an answer or in a stream."""
    recorder.count("pitstop_refusals_total", rule_of(error).code)


def path_of(scope: Scope) -> str:
    """Gives the path that routes know, without the prefix under which the application is found."""
    prefix = scope.get("root_path", "").rstrip("/")
    return str(scope["path"]).removeprefix(prefix) or "/"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
