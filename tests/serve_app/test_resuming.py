"""Answers that go on at another replica are those that nobody disturbed, in every shape a client may ask for.

One engine stands in for all replicas; streams of it are cut at random, as those of a replica that dies.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from engine import EngineDead, PitstopError
from serve_app.messages import GenerateRequest, TokenEvent
from serve_app.protocol.errors import ReplicaDraining, ReplicaLost, ReplicaSilent
from serve_app.settings import AppSettings, parse_settings
from tests.serve_app.local_app import LocalApp, LocalStream, local_app
from tests.serve_app.tiny_model import make_model_folder
from tests.waiting import eventually

MODEL = "tiny"
FAILURES: list[type[PitstopError]] = [ReplicaLost, EngineDead, ReplicaSilent, ReplicaDraining]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.1, "seed": 5},
    "several": {"temperature": 1.3, "seed": 9, "n": 3},
    "scored": {"temperature": 1.0, "seed": 2, "logprobs": 2, "prompt_logprobs": 1, "n": 2},
    "penalties": {"temperature": 0.8, "seed": 3, "presence_penalty": 0.8, "repetition_penalty": 1.2, "min_tokens": 20},
    "stopped": {"temperature": 1.0, "seed": 4, "stop": ["e", "ab"], "n": 4},
    "schema": {"temperature": 1.0, "seed": 6, "response_format": {"type": "json_object"}, "max_tokens": 60},
    "regex": {"temperature": 1.0, "seed": 7, "structured_outputs": {"regex": "([a-f]{3} )*"}, "max_tokens": 30},
    "echo": {"temperature": 1.0, "seed": 8, "echo": True, "logprobs": 1},
    "prompts": {"temperature": 1.0, "seed": 8, "prompt": ["one", "and two"], "n": 2},
}
CHATS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0, "seed": 1, "logprobs": True, "top_logprobs": 2},
    "schema": {
        "temperature": 1.0,
        "seed": 2,
        "max_tokens": 80,
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}},
    },
    "tool": {"temperature": 1.0, "seed": 3, "max_tokens": 90, "tools": [TOOL], "tool_choice": "required"},
}


class CutStream(LocalStream):
    """Fails after so many events."""

    num_left: int
    failure: PitstopError

    async def __anext__(self) -> TokenEvent:
        if self.num_left == 0:
            self.close()
            raise self.failure
        self.num_left -= 1
        return await super().__anext__()


class Cuts:
    """Cuts the streams of an app while it is on: each attempt after few events, a number of times for each request."""

    def __init__(self, app: LocalApp) -> None:
        self._app = app
        self._rng = random.Random(0)
        self._lives: dict[str, int] = {}
        self.requests: list[GenerateRequest] = []
        self.is_on = False
        app.fleet.generate = self.generate  # type: ignore[method-assign]

    def generate(self, request: GenerateRequest, *, asked_at: float | None = None) -> LocalStream:  # noqa: ARG002
        self.requests.append(request)
        name = request.request_id.partition("~")[0]
        left = self._lives.setdefault(name, 4)
        if not self.is_on or left == 0:
            return LocalStream(self._app.fleet.manager, request, self._app.fleet.grammars)
        self._lives[name] = left - 1
        stream = CutStream(self._app.fleet.manager, request, self._app.fleet.grammars)
        stream.num_left = self._rng.choice([0, 1] if left == 4 else [0, 1, 1, 2, 3, 5, 8])
        # At most two deaths: after a third the request is poison.
        stream.failure = FAILURES[left % 4]("cut by the test")
        return stream


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> AppSettings:
    folder = make_model_folder(tmp_path_factory.mktemp("model") / "base", max_position_embeddings=1024)
    return parse_settings(
        {
            "model": folder,
            "served_model_name": MODEL,
            "tool_parser": "hermes",
            "engine": {"page_size": 16, "num_blocks": 256},
        }
    )


@pytest.fixture(scope="module")
def app(settings: AppSettings) -> Iterator[LocalApp]:
    with local_app(settings) as running:
        yield running


@pytest.fixture(scope="module")
def cuts(app: LocalApp) -> Cuts:
    return Cuts(app)


@pytest.fixture
async def http(app: LocalApp) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=app.url, timeout=60) as client:
        yield client
    assert await eventually(app.is_idle)


async def ask(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    """Gives a whole answer, or of a stream the parts of each choice put together, without what differs by nature."""
    if not body.get("stream"):
        response = await http.post(path, json=body)
        assert response.status_code == 200, response.text
        return stripped(response.json())
    async with http.stream("POST", path, json=body) as response:
        assert response.status_code == 200, await response.aread()
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert lines[-1] == "[DONE]"
    joined: dict[int, dict[str, Any]] = {}
    for chunk in map(json.loads, lines[:-1]):
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            join(joined.setdefault(choice["index"], {}), choice)
    return {index: joined[index] for index in sorted(joined)} | {"usage": stripped(json.loads(lines[-2]))["usage"]}


def join(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Adds a chunk to what came before it: texts and lists grow, the rest is replaced."""
    for name, value in part.items():
        before = whole.get(name)
        if name in ("weight_versions", "finish_reason", "stop_reason", "index"):
            whole[name] = value if value is not None else before
        elif isinstance(value, dict) and isinstance(before, dict):
            join(before, value)
        elif name == "tool_calls" and value and before:
            for call in value:
                join(before[call["index"]], call)
        elif isinstance(value, str | list) and before is not None and name not in ("id", "role", "type"):
            whole[name] = before + value
        elif value is not None or name not in whole:
            whole[name] = value


def stripped(answer: Any) -> Any:
    if isinstance(answer, dict):
        return {name: stripped(value) for name, value in answer.items() if name not in ("id", "created")}
    return [stripped(value) for value in answer] if isinstance(answer, list) else answer


def assert_same(found: Any, expected: Any, place: str = "answer") -> None:
    """Numbers may differ by rounding: a prompt is computed at once what was generated one by one."""
    if isinstance(expected, dict):
        assert isinstance(found, dict)
        assert found.keys() == expected.keys(), place
        for name in expected:
            if name not in ("id", "created"):
                assert_same(found[name], expected[name], f"{place}.{name}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), place
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{place}[{index}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-3), place
    else:
        assert found == expected, place


async def compare(http: httpx.AsyncClient, cuts: Cuts, path: str, body: dict[str, Any]) -> None:
    body = {"model": MODEL, "max_tokens": 40, **body}
    if body.get("stream"):
        body["stream_options"] = {"include_usage": True}
    # Twice, so that the cache has the prompt for both that are compared.
    await ask(http, path, body)
    undisturbed = await ask(http, path, body)
    cuts.requests.clear()
    cuts.is_on = True
    try:
        disturbed = await ask(http, path, body)
    finally:
        cuts.is_on = False
    assert any("~" in request.request_id for request in cuts.requests), "nothing was cut"
    assert_same(disturbed, undisturbed)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
async def test_completions(http: httpx.AsyncClient, cuts: Cuts, variant: str, stream: bool) -> None:
    body = {"prompt": "the prompt", "return_token_ids": True, **VARIANTS[variant], "stream": stream}
    await compare(http, cuts, "/v1/completions", body)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("variant", CHATS)
async def test_chats(http: httpx.AsyncClient, cuts: Cuts, variant: str, stream: bool) -> None:
    messages = [{"role": "user", "content": "the prompt"}]
    await compare(http, cuts, "/v1/chat/completions", {"messages": messages, **CHATS[variant], "stream": stream})


async def test_many_at_once(http: httpx.AsyncClient, cuts: Cuts) -> None:
    bodies = [
        {"model": MODEL, "prompt": f"prompt {number}", "max_tokens": 60, "temperature": 1.0, "seed": number}
        for number in range(24)
    ]
    undisturbed = [await ask(http, "/v1/completions", body) for body in bodies]
    cuts.is_on = True
    try:
        disturbed = await asyncio.gather(*(ask(http, "/v1/completions", body) for body in bodies))
    finally:
        cuts.is_on = False
    for one, other in zip(disturbed, undisturbed, strict=True):
        assert one["choices"] == other["choices"]


async def test_without_a_seed_one_is_drawn_before_anything_is_lost(http: httpx.AsyncClient, cuts: Cuts) -> None:
    cuts.requests.clear()
    cuts.is_on = True
    try:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 50, "temperature": 1.0, "return_token_ids": True}
        answer = await ask(http, "/v1/completions", body)
    finally:
        cuts.is_on = False
    seeds = {request.sampling.seed for request in cuts.requests}
    assert len(seeds) == 1
    assert len(cuts.requests) > 1
    undisturbed = await ask(http, "/v1/completions", {**body, "seed": seeds.pop()})
    assert answer["choices"] == undisturbed["choices"]
