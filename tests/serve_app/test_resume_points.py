"""Streams of completions that a client goes on with after they were cut, at whatever place, and what is refused."""

import base64
import json
import random
import zlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from engine import InvalidRequest, PitstopError, WeightSpan
from serve_app.messages import GenerateRequest, TokenEvent
from serve_app.protocol.errors import NoReplica
from serve_app.protocol.requests import CompletionRequest
from serve_app.resume_point import MAX_NUMBERS, ResumePoint, ResumeTrail, extended, read_points, write_points
from serve_app.settings import AppSettings, parse_settings
from tests.serve_app.local_app import LocalApp, LocalStream, local_app
from tests.serve_app.tiny_model import make_model_folder
from tests.waiting import eventually

POINT = ResumePoint(7, ((1, 2), None, ()), ((WeightSpan(3, 0, 2),), (WeightSpan(3, 0, 4),), ()), first_version=3)


def written(points: list[ResumePoint], prompts: list[list[int]]) -> str:
    text = write_points(points, prompts)
    assert text is not None
    return text


def test_a_point_survives_its_text() -> None:
    prompts = [[1, 2], [3]]
    text = written([POINT, POINT], prompts)
    assert text.isascii()
    assert read_points(text, prompts) == [POINT, POINT]
    assert POINT.version == 3


@pytest.mark.parametrize("seed", [-(2**63), -5, -1, 0, 2**63 - 1])
def test_a_point_of_every_seed_that_a_request_may_have_survives(seed: int) -> None:
    point = replace(POINT, seed=CompletionRequest(model="m", prompt="x", seed=seed).sampling().seed)
    assert read_points(written([point], [[1]]), [[1]]) == [point]


@pytest.mark.parametrize("text", ["", "x", "!!!", "AAAA", "eJwDAAAAAAE=", "é", "a" * (2**20 + 1)])
def test_a_text_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"resume\.token cannot be read"):
        read_points(text, [[1]])


def test_every_damage_of_a_text_is_refused_or_harmless() -> None:
    text = written([POINT], [[1]])
    for place in range(len(text)):
        for letter in "Aa0_":
            try:
                found = read_points(text[:place] + letter + text[place + 1 :], [[1]])
            except InvalidRequest:
                continue
            assert found == [POINT]


def test_a_bomb_is_not_unpacked() -> None:
    bomb = base64.urlsafe_b64encode(zlib.compress(b"[" + b"0," * 2**25)).decode()
    with pytest.raises(InvalidRequest):
        read_points(bomb, [[1]])


MILLIONS = {"numbers": [2**23, "1"], "spans": [2**21, "[1,0,1]"], "points": [2**20, '{"seed":1,"tokens":[]}']}


@pytest.mark.parametrize("kind", MILLIONS)
def test_more_numbers_than_a_point_has_are_not_even_parsed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    number, written = MILLIONS[kind]
    bomb = base64.urlsafe_b64encode(zlib.compress(("[" + f"{written}," * int(number) + "1]").encode())).decode()
    assert len(bomb) < 2**18

    def parse(_: object) -> None:
        pytest.fail("it was parsed")

    monkeypatch.setattr(json, "loads", parse)
    with pytest.raises(InvalidRequest, match=r"more than \d+ numbers"):
        read_points(bomb, [[1]])


def test_a_point_of_a_hundred_thousand_tokens_is_read() -> None:
    rng = random.Random(0)
    point = ResumePoint(7, (tuple(rng.choices(range(128_000), k=100_000)),), ((WeightSpan(3, 0, 100_000),),), 3)
    assert read_points(written([point], [[1]]), [[1]]) == [point]


@pytest.mark.parametrize("num_choices", [1, 128, 1024])
@pytest.mark.parametrize("vocab_size", [300, 2**31])
def test_every_token_that_is_written_can_be_read_and_others_are_not_written(num_choices: int, vocab_size: int) -> None:
    rng, seen = random.Random(num_choices), set()
    ids = [rng.randrange(vocab_size) for _ in range(MAX_NUMBERS + 1)]
    for num_tokens in (1000, MAX_NUMBERS // 4, MAX_NUMBERS - 10 * num_choices, MAX_NUMBERS + 1 - num_choices):
        each = max(0, num_tokens) // num_choices
        tokens = tuple(tuple(ids[index * each : (index + 1) * each]) for index in range(num_choices))
        point = ResumePoint(7, tokens, ((WeightSpan(3, 0, each),),) * num_choices, 3)
        text = write_points([point], [[1]])
        assert text is None or read_points(text, [[1]]) == [point]
        seen.add(text is None)
    assert seen == {True, False}


def with_its_parts_replaced(value: Any) -> Iterator[Any]:
    """Gives copies of a JSON value, each with one part of it replaced by something else, doubled or left out."""
    yield from (None, True, -1, 1.5, 2**31, 2**63, 2**64, "x", [], {}, [[]], [None])
    if isinstance(value, dict):
        for name, part in value.items():
            yield {other: value[other] for other in value if other != name}
            yield from ({**value, name: changed} for changed in with_its_parts_replaced(part))
    if isinstance(value, list):
        yield value + value
        for index, part in enumerate(value):
            yield value[:index] + value[index + 1 :]
            yield from ([*value[:index], changed, *value[index + 1 :]] for changed in with_its_parts_replaced(part))


def test_the_point_of_another_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="of another prompt"):
        read_points(written([POINT], [[1]]), [[2]])


def test_later_tokens_are_added_to_their_choices() -> None:
    (found,) = extended([POINT], [[3], None, [9]])
    assert extended([POINT], [[3], [], [9]]) == [found]
    assert found.tokens == ((1, 2, 3), None, (9,))
    assert found.spans == ((WeightSpan(3, 0, 3),), (WeightSpan(3, 0, 4),), (WeightSpan(3, 0, 1),))
    (found,) = extended([POINT], [None, None, []])
    assert found.tokens == (None, None, ())
    with pytest.raises(InvalidRequest, match="there are 3 choices"):
        extended([POINT], [[3]])
    with pytest.raises(InvalidRequest, match="had ended"):
        extended([POINT], [[3], [1], []])


def test_a_trail_knows_where_each_output_is() -> None:
    trail = ResumeTrail()
    assert trail.point(2) is None
    trail.add(TokenEvent("r", [4], weight_versions=(WeightSpan(1, 0, 1),), seed=5))
    trail.add(TokenEvent("r1", [6, 7], weight_versions=(WeightSpan(1, 0, 2),), index=1, finish_reason="stop"))
    point = trail.point(2)
    assert point == ResumePoint(5, ((4,), None), ((WeightSpan(1, 0, 1),), (WeightSpan(1, 0, 2),)))
    assert ResumeTrail.starting_at(point).point(2) == point


def test_a_trail_is_about_as_long_as_its_tokens_however_they_came() -> None:
    trail = ResumeTrail(5)
    for start in range(200):
        trail.add(TokenEvent("r", [4], weight_versions=(WeightSpan(1 + start // 100, start, start + 1),)))
    point = trail.point(1)
    assert point == ResumePoint(5, ((4,) * 200,), ((WeightSpan(1, 0, 100), WeightSpan(2, 100, 200)),))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> AppSettings:
    folder = make_model_folder(tmp_path_factory.mktemp("model") / "base", max_position_embeddings=512)
    return parse_settings(
        {"model": folder, "served_model_name": "tiny", "engine": {"page_size": 16, "num_blocks": 128}}
    )


@pytest.fixture(scope="module")
def app(settings: AppSettings) -> Iterator[LocalApp]:
    with local_app(settings) as running:
        yield running


@pytest.fixture
async def http(app: LocalApp) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=app.url, timeout=60) as client:
        yield client
    assert await eventually(app.is_idle)


BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": "the prompt", "temperature": 0},
    "seeded": {"prompt": "the prompt", "temperature": 1.1, "seed": 4, "n": 2, "stop": ["q", "zz"]},
    "negative": {"prompt": "the prompt", "temperature": 1.1, "seed": -5},
    "unseeded": {"prompt": ["one", "two"], "temperature": 1.1},
    "regex": {"prompt": "x", "temperature": 1.0, "seed": 1, "structured_outputs": {"regex": "([a-d]{3} )*"}},
    "scored": {"prompt": "x", "temperature": 1.0, "seed": 1, "logprobs": 1, "echo": True},
}


class Cut:
    """Ends streams with an error that no other replica heals, after so many events."""

    def __init__(self, app: LocalApp) -> None:
        self._app = app
        self.after: int | None = None
        app.fleet.generate = self.generate  # type: ignore[method-assign]

    def generate(self, request: GenerateRequest, *, asked_at: float | None = None) -> LocalStream:  # noqa: ARG002
        stream = LocalStream(self._app.fleet.manager, request, self._app.fleet.grammars)
        if self.after is not None:
            _end_after(stream, self.after, NoReplica("the deployment has failed; its log says why"))
        return stream


def _end_after(stream: LocalStream, number: int, error: PitstopError) -> None:
    read, num_read = stream._generate, 0

    async def generate() -> Any:
        nonlocal num_read
        async for event in read():
            num_read += 1
            if num_read > number:
                stream.close()
                raise error
            yield event

    stream._generate = generate  # type: ignore[method-assign]


async def read(http: httpx.AsyncClient, body: dict[str, Any]) -> tuple[dict[int, dict[str, Any]], list[Any]]:
    """Gives each choice put together, and the chunks."""
    async with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    chunks = [json.loads(line) for line in lines if line != "[DONE]"]
    choices: dict[int, dict[str, Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk.get("choices", ())):
        whole = choices.setdefault(choice["index"], {"text": "", "token_ids": [], "finish_reason": None})
        whole["text"] += choice["text"]
        whole["token_ids"] += choice["token_ids"]
        whole["finish_reason"] = choice["finish_reason"]
    return choices, chunks


def joined(first: dict[int, dict[str, Any]], second: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    both: dict[int, dict[str, Any]] = {}
    for index in first.keys() | second.keys():
        parts = [part[index] for part in (first, second) if index in part]
        both[index] = {
            "text": "".join(part["text"] for part in parts),
            "token_ids": [token for part in parts for token in part["token_ids"]],
            "finish_reason": parts[-1]["finish_reason"],
        }
    return both


def whole_body(name: str) -> dict[str, Any]:
    options = {"include_resume": True}
    return {
        "model": "tiny",
        "max_tokens": 40,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "stream_options": options,
        **BODIES[name],
    }


@pytest.fixture(scope="module")
def cut(app: LocalApp) -> Cut:
    return Cut(app)


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("after", [1, 3])
async def test_a_stream_goes_on_from_the_token_of_its_error(
    http: httpx.AsyncClient, cut: Cut, name: str, after: int
) -> None:
    body = whole_body(name)
    cut.after = after
    try:
        first, chunks = await read(http, body)
    finally:
        cut.after = None
    error = chunks[-1]
    assert error["error"]["code"] == "no_replica"
    second, _ = await read(http, {**body, "resume": {"token": error["resume"]}})
    seed = read_points(error["resume"], await prompts_of(http, body))[0].seed
    if name != "unseeded":
        whole, _ = await read(http, {**body, "seed": body.get("seed", seed)})
        assert joined(first, second) == whole
    assert all(one["finish_reason"] for one in joined(first, second).values())


@pytest.mark.parametrize("name", [name for name in BODIES if name != "unseeded"])
async def test_a_stream_goes_on_from_its_first_token_and_what_came_since(http: httpx.AsyncClient, name: str) -> None:
    body = whole_body(name)
    whole, chunks = await read(http, body)
    token = chunks[0]["resume"]
    assert not any("resume" in chunk for chunk in chunks[1:])
    for cut in (0, 1, 7, 30):
        had = [whole[index]["token_ids"][:cut] for index in sorted(whole)]
        if any(len(ids) == len(whole[index]["token_ids"]) for index, ids in enumerate(had)):
            continue  # it has ended, of which the client would have heard
        rest, later = await read(http, {**body, "resume": {"token": token, "token_ids": had}})
        for index, choice in rest.items():
            assert had[index] + choice["token_ids"] == whole[index]["token_ids"]
            assert whole[index]["text"].endswith(choice["text"])
            assert choice["finish_reason"] == whole[index]["finish_reason"]
        ends = [choice["weight_versions"] for chunk in later for choice in chunk["choices"] if choice["finish_reason"]]
        assert all(spans[0]["start"] == 0 for spans in ends)


async def prompts_of(http: httpx.AsyncClient, body: dict[str, Any]) -> list[list[int]]:
    prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
    return [(await http.post("/tokenize", json={"model": "tiny", "prompt": one})).json()["tokens"] for one in prompts]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"resume": {"token": "xyz"}}, "cannot be read"),
        ({"prompt": "another"}, "of another prompt"),
        ({"n": 3}, "2 outputs of a prompt, and 3 are asked for"),
        ({"stream": False, "stream_options": None}, "stream=true"),
    ],
)
async def test_what_cannot_be_resumed_is_refused(http: httpx.AsyncClient, change: dict[str, Any], message: str) -> None:
    body = whole_body("seeded")
    _, chunks = await read(http, body)
    response = await http.post(
        "/v1/completions", json={**body, "resume": {"token": chunks[0]["resume"], "token_ids": [[1], [2]]}, **change}
    )
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "resume"


async def test_every_point_that_no_stream_gave_is_refused_or_harmless(http: httpx.AsyncClient) -> None:
    body = {**whole_body("seeded"), "stop": None, "max_tokens": 6}
    _, chunks = await read(http, body)
    packed = base64.urlsafe_b64decode(chunks[0]["resume"])
    point = json.loads(zlib.decompress(packed))
    point["points"][0] |= {"tokens": [[1, 2], [3]], "spans": [[[1, 0, 2]], [[1, 0, 1]]]}
    for number, changed in enumerate(with_its_parts_replaced(point)):
        text = base64.urlsafe_b64encode(zlib.compress(json.dumps(changed).encode())).decode()
        resume = {"token": text, "token_ids": [[4], [5]] if number % 2 else None}
        response = await http.post("/v1/completions", json={**body, "resume": resume})
        assert response.status_code in (200, 400), f"{changed}: {response.text}"
        if response.status_code == 200:
            assert '"error"' not in response.text, changed
            assert response.text.endswith("data: [DONE]\n\n"), changed
        else:
            assert response.json()["error"]["param"] in ("resume", "seed"), response.text


@pytest.mark.parametrize("ended", [[0], [2], [0, 1], [1, 2], [2, 3], [0, 1, 3], [0, 1, 2, 3]])
async def test_choices_that_have_ended_are_left_out(http: httpx.AsyncClient, ended: list[int]) -> None:
    body = {**whole_body("seeded"), "prompt": ["one", "two"], "stop": None}
    whole, chunks = await read(http, body)
    had = [None if index in ended else whole[index]["token_ids"][:9] for index in sorted(whole)]
    body["resume"] = {"token": chunks[0]["resume"], "token_ids": had}
    if len(ended) == 4:
        response = await http.post("/v1/completions", json=body)
        assert response.status_code == 400
        assert "every output has ended" in response.json()["error"]["message"]
        return
    rest, _ = await read(http, body)
    assert rest.keys() == whole.keys() - set(ended)
    for index, choice in rest.items():
        assert choice["token_ids"] == whole[index]["token_ids"][9:]
        assert choice["finish_reason"] == whole[index]["finish_reason"]


async def test_a_choice_that_has_all_its_tokens_is_told_to_have_ended(http: httpx.AsyncClient) -> None:
    body = {**whole_body("seeded"), "stop": None}
    whole, chunks = await read(http, body)
    had = [whole[0]["token_ids"], whole[1]["token_ids"][:9]]
    response = await http.post(
        "/v1/completions", json={**body, "resume": {"token": chunks[0]["resume"], "token_ids": had}}
    )
    assert response.status_code == 400
    assert "null among token_ids says so" in response.json()["error"]["message"]
