"""Chats over HTTP, of an engine that answers as it is told: what calls and reasoning look like to a client."""

import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from test_chat_style import CALL, PING, TEMPLATES, WEATHER, style_of
from tiny_model import CHAT_TEMPLATE

from engine import FinishReason, WeightSpan
from serve_app.messages import CommittedWeights, FleetStatus, GenerateRequest, GrammarKind, TokenEvent
from serve_app.metrics import ROUTER_METRICS, Recorder
from serve_app.router.asgi import build_asgi
from serve_app.router.fleet import ModelLimits
from serve_app.router.numbers import RouterNumbers
from serve_app.router.request_observer import RequestObserver
from serve_app.router.resuming_stream import ResumeMeter
from serve_app.router.service import INLINE_CHARACTERS, GenerationService
from serve_app.router.version_meter import VersionMeter
from serve_app.settings import AppSettings
from serve_app.text.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]


class ScriptedFleet:
    """Answers every request with the same tokens, three an event; keeps the requests."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids
        self.requests: list[GenerateRequest] = []

    newest_version = 1

    async def end_sequence(self, sequence_id: str) -> None:
        pass

    async def limits(self) -> ModelLimits:
        return ModelLimits(max_model_len=4096, vocab_size=300)

    async def probe_patiently(self) -> None:
        pass

    def routing(self) -> None:
        pass

    async def status(self) -> FleetStatus:
        return FleetStatus(CommittedWeights(1), [])

    def generate(
        self,
        request: GenerateRequest,
        *,
        asked_at: float | None = None,  # noqa: ARG002  # the interface of a fleet
    ) -> "ScriptedEvents":
        self.requests.append(request)
        return ScriptedEvents(request, self._ids)


class ScriptedEvents:
    def __init__(self, request: GenerateRequest, ids: list[int]) -> None:
        self._events = self._all(request, ids)

    async def __anext__(self) -> TokenEvent:
        return await anext(self._events)

    def close(self) -> None:
        pass

    async def _all(self, request: GenerateRequest, ids: list[int]) -> AsyncIterator[TokenEvent]:
        for start in range(0, len(ids), 3):
            for index in range(request.sampling.num_return_sequences or 1):
                tokens = ids[start : start + 3]
                yield TokenEvent(
                    request.request_id,
                    tokens,
                    weight_versions=(WeightSpan(1, start, start + len(tokens)),),
                    finish_reason=FinishReason.STOP.value if start + 3 >= len(ids) else None,
                    index=index,
                )


def client_of(template: str, text: str, **settings: Any) -> tuple[openai.AsyncOpenAI, ScriptedFleet]:
    style, tokenizer = style_of(template, served_model_name="m", **settings)
    fleet = ScriptedFleet(tokenizer.encode(text))
    app_settings = AppSettings(served_model_name="m", **settings)
    recorder = Recorder(ROUTER_METRICS)
    seam: Any = fleet
    service = GenerationService(
        app_settings,
        tokenizer=style.tokenizer,
        fleet=seam,
        meter=VersionMeter(recorder, seam),
        observer=RequestObserver(recorder, routing=lambda: None),
        resumes=ResumeMeter(recorder),
    )
    app = build_asgi(service, app_settings, recorder=recorder, numbers=RouterNumbers(recorder, service.admission))
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app=app))
    return openai.AsyncOpenAI(base_url="http://test/v1", api_key="x", max_retries=0, http_client=http), fleet


async def streamed(client: openai.AsyncOpenAI, **fields: Any) -> dict[str, Any]:
    """Gives the message that the deltas make, and the finish reason."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": []}
    reasons = []
    async for chunk in await client.chat.completions.create(model="m", messages=MESSAGES, stream=True, **fields):
        choice = chunk.choices[0]
        message["content"] += choice.delta.content or ""
        message["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or []:
            if call.id is not None:
                assert (call.index, call.type) == (len(message["calls"]), "function")
                message["calls"].append([call.function.name, ""])
            message["calls"][call.index][1] += call.function.arguments
        reasons += [choice.finish_reason] if choice.finish_reason else []
    (message["reason"],) = reasons
    return message


async def plain(client: openai.AsyncOpenAI, **fields: Any) -> dict[str, Any]:
    answer = await client.chat.completions.create(model="m", messages=MESSAGES, **fields)
    choice = answer.choices[0]
    calls = choice.message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls)
    assert all("index" not in call.model_dump(exclude_unset=True) for call in calls)
    return {
        "content": choice.message.content or "",
        "reasoning_content": getattr(choice.message, "reasoning_content", None) or "",
        "calls": [[call.function.name, call.function.arguments] for call in calls],
        "reason": choice.finish_reason,
    }


@pytest.mark.parametrize(
    ("template", "text", "tools", "expected"),
    [
        (
            TEMPLATES["hermes"],
            'Let me see. <tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n<tool_call>\n'
            '{"name": "ping", "arguments": {}}\n</tool_call>',
            [WEATHER, PING],
            ("Let me see.", "", [["weather", '{"city": "Köln"}'], ["ping", "{}"]], "tool_calls"),
        ),
        (
            TEMPLATES["mistral"],
            '[TOOL_CALLS][{"name": "ping", "arguments": {}}]',
            [PING],
            ("", "", [["ping", "{}"]], "tool_calls"),
        ),
        (
            TEMPLATES["llama3_json"],
            '{"name": "ping", "parameters": {}}',
            [PING],
            ("", "", [["ping", "{}"]], "tool_calls"),
        ),
        (TEMPLATES["hermes"], "<tool_call> is a tag", [PING], ("<tool_call> is a tag", "", [], "stop")),
        (CHAT_TEMPLATE + "<think>\n", "hm\n</think>\n\nYes.", [], ("Yes.", "hm", [], "stop")),
        (CHAT_TEMPLATE, "<tool_call>{}", [], ("<tool_call>{}", "", [], "stop")),
    ],
)
async def test_the_official_client_gets_the_same_plain_and_streamed(
    template: str, text: str, tools: list[Any], expected: tuple[Any, ...]
) -> None:
    client, _ = client_of(template, text)
    fields = {"tools": tools} if tools else {}
    message = await plain(client, **fields)
    assert (message["content"], message["reasoning_content"], message["calls"], message["reason"]) == expected
    assert await streamed(client, **fields) == message


async def test_an_answer_of_calls_alone_has_no_content_and_another_no_calls() -> None:
    client, _ = client_of(TEMPLATES["hermes"], '<tool_call>{"name": "ping"}</tool_call>')
    answer = await client.chat.completions.create(model="m", messages=MESSAGES, tools=[PING])
    assert answer.choices[0].message.content is None
    client, _ = client_of(TEMPLATES["hermes"], "hi")
    answer = await client.chat.completions.create(model="m", messages=MESSAGES, tools=[PING])
    message = json.loads(answer.choices[0].message.model_dump_json(exclude_unset=True))
    assert message == {"content": "hi", "role": "assistant", "refusal": None}


async def test_each_of_several_answers_has_its_own_calls() -> None:
    client, _ = client_of(TEMPLATES["hermes"], 'Look: <tool_call>{"name": "ping", "arguments": {"a": 1}}</tool_call>')
    asked = {"model": "m", "messages": MESSAGES, "tools": [PING], "n": 2}
    answer = await client.chat.completions.create(**asked)
    for choice in answer.choices:
        (call,) = choice.message.tool_calls or []
        assert (choice.message.content, call.function.name, call.function.arguments) == ("Look:", "ping", '{"a": 1}')
    arguments = ["", ""]
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        for call in chunk.choices[0].delta.tool_calls or []:
            arguments[chunk.choices[0].index] += call.function.arguments
    assert arguments == ['{"a": 1}'] * 2


async def test_the_replica_is_told_what_the_answer_has_to_follow() -> None:
    client, fleet = client_of(TEMPLATES["hermes"], "hi")
    await client.chat.completions.create(model="m", messages=MESSAGES, tools=[PING])
    await client.chat.completions.create(model="m", messages=MESSAGES, tools=[PING], tool_choice="required")
    await client.chat.completions.create(model="m", messages=MESSAGES, response_format={"type": "json_object"})
    await client.completions.create(model="m", prompt="x", extra_body={"structured_outputs": {"regex": "a"}})
    kinds = [request.grammar and request.grammar.kind for request in fleet.requests]
    assert kinds == [None, GrammarKind.LARK, GrammarKind.JSON_SCHEMA, GrammarKind.REGEX]


async def test_a_model_that_knows_no_tools_refuses_them_by_name() -> None:
    client, _ = client_of(CHAT_TEMPLATE, "hi")
    with pytest.raises(openai.BadRequestError, match="knows none") as refusal:
        await client.chat.completions.create(model="m", messages=MESSAGES, tools=[PING])
    assert refusal.value.param == "tools"
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    with pytest.raises(openai.BadRequestError, match="knows none") as refusal:
        await client.chat.completions.create(model="m", messages=messages)
    assert refusal.value.param == "messages"


async def test_what_is_long_together_is_read_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    readers: list[tuple[str, bool]] = []
    encode = Tokenizer.encode

    def noted(self: Tokenizer, text: str, **options: Any) -> list[int]:
        readers.append((text.strip()[:1], threading.current_thread() is threading.main_thread()))
        return encode(self, text, **options)

    client, fleet = client_of(CHAT_TEMPLATE, "hi")
    monkeypatch.setattr(Tokenizer, "encode", noted)
    part = "a" * (INLINE_CHARACTERS // 10)
    for num_prompts, is_inline in ((10, True), (11, False)):
        readers.clear()
        await client.completions.create(model="m", prompt=[part] * num_prompts)
        assert readers == [("a", is_inline)] * num_prompts
    readers.clear()
    await client.completions.create(model="m", prompt=["a"] * 5, extra_body={"bad_words": ["b", "b2"]})
    assert readers == [("a", True)] * 5 + [("b", False)] * 4, "the words are read once for all prompts"
    assert all(request.sampling.bad_words_ids for request in fleet.requests[-5:])
