"""Wishes for weight versions over HTTP, and the versions in what comes out, while a real engine changes its weights."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from serve_app.settings import parse_settings
from tests.serve_app.local_app import LocalApp, local_app
from tests.serve_app.tiny_model import make_model_folder

MODEL = "tiny"
ROUTES = {
    "/v1/completions": {"prompt": "the prompt of a test"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
}
LONG = 600
SHORTER = 250
"""Tokens: the engine is at them for longer than a swap takes."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("weights")
    return [make_model_folder(root / str(seed), seed=seed, max_position_embeddings=2048) for seed in (0, 1)]


@pytest.fixture(scope="module")
def app(folders: list[str]) -> Iterator[LocalApp]:
    engine = {"page_size": 16, "num_blocks": 1024}
    with local_app(parse_settings({"model": folders[0], "served_model_name": MODEL, "engine": engine})) as running:
        yield running


@pytest.fixture
async def http(app: LocalApp) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=app.url, timeout=60) as client:
        yield client


@pytest.fixture(params=list(ROUTES))
def route(request: pytest.FixtureRequest) -> str:
    path: str = request.param
    return path


class Swap:
    """New weights, read and checked beforehand."""

    def __init__(self, app: LocalApp, folder: str) -> None:
        self._manager = app.manager
        self._staged = app.manager.stage_weights(folder)

    async def commit(self, **options: Any) -> int:
        await asyncio.to_thread(self._manager.commit_weights, self._staged, **options)
        self._staged.discard()
        return self._manager.weight_version


def body(route: str, **fields: Any) -> dict[str, Any]:
    fixed = {"model": MODEL, "temperature": 0, "ignore_eos": True, "max_tokens": 8, "return_token_ids": True}
    return {**fixed, **ROUTES[route], **fields}


async def chunks(http: httpx.AsyncClient, route: str, **fields: Any) -> AsyncIterator[dict[str, Any]]:
    async with http.stream("POST", route, json=body(route, stream=True, **fields)) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


async def around_a_swap(
    http: httpx.AsyncClient, route: str, swap: Swap, options: dict[str, Any], **fields: Any
) -> list[dict[str, Any]]:
    """All chunks of a stream, whose weights are swapped once it has begun."""
    stream = chunks(http, route, **{"max_tokens": LONG, **fields})
    found = [await anext(stream)]
    await swap.commit(**options)
    return found + [chunk async for chunk in stream]


def versions_of(choice: dict[str, Any]) -> list[int]:
    """The version of each token, after a look that none is missing or twice."""
    spans = choice["weight_versions"]
    assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
    return [span["version"] for span in spans for _ in range(span["start"], span["end"])]


@pytest.mark.parametrize("wish", ["weight_version", "min_weight_version"])
async def test_the_version_served_is_given_to_who_asks_for_it(
    app: LocalApp, http: httpx.AsyncClient, route: str, wish: str
) -> None:
    version = app.manager.weight_version
    answer = await http.post(route, json=body(route, n=2, temperature=1, **{wish: version}))
    assert answer.status_code == 200, answer.text
    assert [versions_of(choice) for choice in answer.json()["choices"]] == [[version] * 8] * 2
    assert (answer.headers["x-weights-version"], answer.json()["system_fingerprint"]) == (
        str(version),
        f"{MODEL}@{version}",
    )


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_version_that_is_not_served_is_a_409(
    app: LocalApp, http: httpx.AsyncClient, route: str, is_stream: bool
) -> None:
    wish = app.manager.weight_version + 1
    answer = await http.post(route, json=body(route, weight_version=wish, stream=is_stream))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (409, "weight_version_gone", "weight_version")
    assert f"weight_version is {wish}, which no replica serves" in error["message"]


async def test_a_least_version_is_waited_for(
    app: LocalApp, http: httpx.AsyncClient, route: str, folders: list[str]
) -> None:
    swap = Swap(app, folders[1])
    wish = app.manager.weight_version + 1
    waiting = asyncio.ensure_future(http.post(route, json=body(route, min_weight_version=wish)))
    done, _ = await asyncio.wait([waiting], timeout=0.2)
    assert not done
    assert await swap.commit() == wish
    assert versions_of((await waiting).json()["choices"][0]) == [wish] * 8


@pytest.mark.parametrize("num_samples", [1, 2])
async def test_a_pinned_stream_ends_with_what_it_has_when_its_version_goes(
    app: LocalApp, http: httpx.AsyncClient, route: str, folders: list[str], num_samples: int
) -> None:
    swap, version = Swap(app, folders[1]), app.manager.weight_version
    fields = {"n": num_samples, "temperature": 1, "seed": 1, "weight_version": version}
    found = await around_a_swap(http, route, swap, {"pinned": "end"}, **fields)
    assert not [chunk for chunk in found if "error" in chunk]
    choices = [choice for chunk in found for choice in chunk["choices"]]
    for index in range(num_samples):
        own = [choice for choice in choices if choice["index"] == index]
        num_tokens = sum(len(choice["token_ids"]) for choice in own)
        assert own[-1]["finish_reason"] == "weight_version_gone"
        assert 0 < num_tokens < LONG
        assert versions_of(own[-1]) == [version] * num_tokens


async def test_a_stream_names_the_new_version_with_its_first_token(
    app: LocalApp, http: httpx.AsyncClient, route: str, folders: list[str]
) -> None:
    swap, old = Swap(app, folders[1]), app.manager.weight_version
    found = await around_a_swap(http, route, swap, {"in_flight": "keep"}, max_tokens=SHORTER)
    choices = [choice for chunk in found for choice in chunk["choices"]]
    named = [number for number, choice in enumerate(choices) if "weight_versions" in choice]
    assert [versions_of(choices[number])[-1] for number in named] == [old, old + 1, old + 1]
    assert (named[0], named[-1]) == (0, len(choices) - 1)
    seen = [token for choice in choices[: named[1]] for token in choice["token_ids"]]
    boundary = choices[named[1]]["weight_versions"][0]["end"]
    assert len(seen) <= boundary < len(seen) + len(choices[named[1]]["token_ids"])
    assert len(versions_of(choices[-1])) == SHORTER
    assert [chunk["system_fingerprint"] for chunk in found[:: len(found) - 1]] == [
        f"{MODEL}@{old}",
        f"{MODEL}@{old + 1}",
    ]
