"""What the numbers of a router say of answers, plain and streamed, of an engine that answers as it is told."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from test_chat_style import style_of
from tiny_model import CHAT_TEMPLATE

from engine import PitstopError
from serve_app.messages import CommittedWeights, FleetStatus, GenerateRequest, TokenEvent
from serve_app.metrics import ROUTER_METRICS, Recorder
from serve_app.protocol.errors import (
    ERROR_RULES,
    DeadlineExceeded,
    GenerationFailed,
    NoReplica,
    PoisonRequest,
    rule_of,
)
from serve_app.router.asgi import build_asgi
from serve_app.router.fleet import ModelLimits
from serve_app.router.numbers import RouterNumbers
from serve_app.router.request_observer import RequestObserver
from serve_app.router.resuming_stream import ResumeMeter
from serve_app.router.service import GenerationService
from serve_app.router.version_meter import VersionMeter
from serve_app.settings import AppSettings

ROUTES = {
    "/v1/completions": {"model": "m", "prompt": "hi"},
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
}


class ScriptedFleet:
    """Answers every request by the same events; one that is an error is raised, a number is seconds to wait."""

    newest_version = 1

    def __init__(self, *script: TokenEvent | Exception | float) -> None:
        self.script = script

    async def limits(self) -> ModelLimits:
        return ModelLimits(max_model_len=4096, vocab_size=300)

    async def probe_patiently(self) -> None:
        pass

    def routing(self) -> None:
        pass

    async def status(self) -> FleetStatus:
        return FleetStatus(CommittedWeights(1), [])

    def generate(self, _: GenerateRequest, **__: float | None) -> "ScriptedEvents":
        return ScriptedEvents(self.script)


class ScriptedEvents:
    def __init__(self, script: tuple[TokenEvent | Exception | float, ...]) -> None:
        self._events = self._all(script)

    async def __anext__(self) -> TokenEvent:
        return await anext(self._events)

    def close(self) -> None:
        pass

    async def _all(self, script: tuple[TokenEvent | Exception | float, ...]) -> AsyncIterator[TokenEvent]:
        for step in script:
            if isinstance(step, Exception):
                raise step
            if isinstance(step, TokenEvent):
                yield step
            else:
                await asyncio.sleep(step)


class Running:
    """A router over a scripted fleet, and what it has counted."""

    def __init__(self, *script: TokenEvent | Exception | float, **settings: Any) -> None:
        fields = {"served_model_name": "m", **settings}
        app_settings = AppSettings.model_validate(fields)
        seam: Any = ScriptedFleet(*script)
        self.recorder = recorder = Recorder(ROUTER_METRICS)
        self.service = GenerationService(
            app_settings,
            tokenizer=style_of(CHAT_TEMPLATE, served_model_name="m")[0].tokenizer,
            fleet=seam,
            meter=VersionMeter(recorder, seam),
            observer=RequestObserver(recorder, routing=lambda: None),
            resumes=ResumeMeter(recorder),
        )
        self.numbers = RouterNumbers(recorder, self.service.admission)
        app = build_asgi(self.service, app_settings, recorder=recorder, numbers=self.numbers)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test")

    async def post(self, route: str, **fields: Any) -> httpx.Response:
        return await self.http.post(route, json=ROUTES[route] | fields)

    def found(self, name: str) -> dict[tuple[str, ...], float]:
        """The series of this name that are not 0, by the values of their labels."""
        families = text_string_to_metric_families(self.numbers.exposition())
        samples = (one for family in families for one in family.samples)
        return {tuple(one.labels.values()): one.value for one in samples if one.name == name and one.value}


FAILURES = [
    NoReplica("none answers"),
    DeadlineExceeded("2 s are over"),
    GenerationFailed("not finite"),
    PoisonRequest("three died"),
    RuntimeError("secret"),
]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_failure_counts_by_its_code_whether_or_not_the_headers_are_gone(
    failure: Exception, route: str, is_streamed: bool
) -> None:
    running = Running(TokenEvent("r", [65, 66]), failure)
    answer = await running.post(route, stream=is_streamed)
    rule = rule_of(failure) if isinstance(failure, PitstopError) else ERROR_RULES[PitstopError]
    assert f'"code":"{rule.code}"' in answer.text
    assert "secret" not in answer.text
    assert running.found("pitstop_refusals_total") == {(rule.code,): 1}
    status = "200" if is_streamed else str(rule.status)
    assert running.found("pitstop_http_requests_total") == {(route, status): 1}


@pytest.mark.parametrize("route", ROUTES)
async def test_an_answer_that_ends_well_is_no_refusal(route: str) -> None:
    running = Running(TokenEvent("r", [65, 66], finish_reason="stop"))
    for is_streamed in (False, True):
        assert (await running.post(route, stream=is_streamed)).status_code == 200
    assert running.found("pitstop_refusals_total") == {}


SLOW_S = 0.3
"""What a client takes to send its body."""


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_times_count_from_the_arrival_of_a_request_and_not_from_when_its_body_was_read(
    route: str, is_streamed: bool
) -> None:
    running = Running(TokenEvent("r", [65], computed_s=0.0), TokenEvent("r", [66], finish_reason="stop"))
    body = json.dumps(ROUTES[route] | {"stream": is_streamed}).encode()

    async def slowly() -> AsyncIterator[bytes]:
        yield body[:9]
        await asyncio.sleep(SLOW_S)
        yield body[9:]

    answer = await running.http.post(route, content=slowly(), headers={"content-type": "application/json"})
    assert answer.status_code == 200
    (http_s,) = running.found("pitstop_http_request_seconds_sum").values()
    for name in ("time_to_first_token", "queue", "generation"):
        assert list(running.found(f"pitstop_{name}_seconds_count").values()) == [1]
        (seconds,) = running.found(f"pitstop_{name}_seconds_sum").values()
        assert SLOW_S <= seconds <= http_s, name
