"""Who is let in and how much at once, text routes, probes and aborts: over HTTP, on a real engine."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.settings import AppSettings, parse_settings
from tests.serve_app.local_app import DEADLINE_S, LocalApp, local_app
from tests.serve_app.tiny_model import make_model_folder
from tests.waiting import eventually

MODEL = "tiny"
KEYS = {"alice": "alice-0123456789abcdef", "bob": "bob-0123456789abcdef", "": "nobody-0123456789abcdef"}
ADMIN_KEY = "admin-0123456789abcdef"
LONG: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("app")
    make_model_folder(path / "model", max_position_embeddings=512)
    (path / "keys").write_text("# who may ask\n" + "".join(f"{key} {name}\n" for name, key in KEYS.items()))
    (path / "admin").write_text(ADMIN_KEY)
    return path


def settings_of(folder: Path, **fields: Any) -> AppSettings:
    engine = {"page_size": 16, "num_blocks": 128}
    return parse_settings({"model": str(folder / "model"), "served_model_name": MODEL, "engine": engine, **fields})


@pytest.fixture(scope="module")
def app(folder: Path) -> Iterator[LocalApp]:
    """With keys, tenants' limits, and one page that may call."""
    limits = {
        "max_tenant_requests": 2,
        "max_tenant_queued_tokens": 300,
        "max_body_bytes": 4096,
        "max_text_characters": 1500,
    }
    settings = settings_of(
        folder,
        limits=limits,
        api_keys_file=str(folder / "keys"),
        admin_key_file=str(folder / "admin"),
        cors_origins=["https://example.org"],
    )
    with local_app(settings) as running:
        yield running


def client(app: LocalApp, name: str | None = "alice") -> httpx.AsyncClient:
    headers = {} if name is None else {"authorization": f"Bearer {KEYS[name]}"}
    return httpx.AsyncClient(base_url=app.url, timeout=DEADLINE_S, headers=headers)


@pytest.fixture
async def http(app: LocalApp) -> AsyncIterator[httpx.AsyncClient]:
    async with client(app) as opened:
        yield opened


async def test_everything_but_probes_and_metrics_needs_a_key(app: LocalApp) -> None:
    async with client(app, None) as http:
        for path in ("/health", "/ready", "/metrics"):
            assert (await http.get(path)).status_code == 200
        for path in ("/v1/models", "/v1/models/tiny", "/openapi.json", "/docs", "/tokenize", "/v1/abort", "/nothing"):
            refused = await http.get(path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
            assert refused.headers["www-authenticate"] == "Bearer"
        for header in ("", "Bearer", "Bearer wrong-0123456789abcdef", f"Basic {KEYS['bob']}", f"Bearer {ADMIN_KEY}"):
            assert (await http.get("/v1/models", headers={"authorization": header})).status_code == 401
        for key in KEYS.values():
            assert (await http.get("/v1/models", headers={"authorization": f"bearer {key}"})).status_code == 200
        # The admin routes have keys of their own, and those of users do not open them.
        assert (await http.get("/admin/weights", headers={"authorization": f"Bearer {KEYS['bob']}"})).status_code == 401


async def test_keys_change_while_the_server_runs(folder: Path) -> None:
    keys = folder / "changing"
    keys.write_text("first-0123456789abcdef")
    with local_app(settings_of(folder, api_keys_file=str(keys))) as app:
        async with client(app, None) as http:

            async def status(key: str) -> int:
                return (await http.get("/v1/models", headers={"authorization": f"Bearer {key}"})).status_code

            assert await status("first-0123456789abcdef") == 200
            (folder / "next").write_text("second-0123456789abcdef tenant\n")
            (folder / "next").replace(keys)  # as a mounted secret changes
            assert await status("first-0123456789abcdef") == 401
            assert await status("second-0123456789abcdef") == 200
            # What cannot be used leaves the keys as they were.
            keys.write_text("short")
            assert await status("second-0123456789abcdef") == 200
            keys.unlink()
            assert await status("second-0123456789abcdef") == 200


async def test_a_page_that_is_named_may_call_and_no_other(app: LocalApp) -> None:
    asked = {"origin": "https://example.org", "access-control-request-method": "POST"}
    async with client(app, None) as http:
        allowed = await http.options("/v1/completions", headers=asked)
        assert allowed.headers["access-control-allow-origin"] == "https://example.org"
        other = await http.options("/v1/completions", headers={**asked, "origin": "https://example.com"})
        assert "access-control-allow-origin" not in other.headers


async def test_a_tenant_has_so_much_under_way_and_no_more(app: LocalApp, http: httpx.AsyncClient) -> None:
    async with (
        http.stream("POST", "/v1/completions", json=LONG) as first,
        http.stream("POST", "/v1/completions", json=LONG) as second,
    ):
        assert (first.status_code, second.status_code) == (200, 200)
        refused = await http.post("/v1/completions", json={**LONG, "user": "bob", "stream": False})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "tenant_limit")
        assert int(refused.headers["retry-after"]) >= 1
        async with client(app, "bob") as other:
            answer = await other.post("/v1/completions", json={**LONG, "stream": False, "max_tokens": 2})
            assert answer.status_code == 200
        # A key without a tenant asks for the `user` of the request.
        async with client(app, "") as gateway:
            asked = {**LONG, "stream": False, "max_tokens": 2, "user": "somebody"}
            assert (await gateway.post("/v1/completions", json=asked)).status_code == 200
            assert (await gateway.post("/v1/completions", json={**asked, "user": "alice"})).status_code == 429
    await eventually(app.is_idle)
    assert (await http.post("/v1/completions", json={**LONG, "stream": False, "max_tokens": 2})).status_code == 200


async def test_prompts_that_wait_are_counted_by_tenant(app: LocalApp, http: httpx.AsyncClient) -> None:
    asked = {"model": MODEL, "prompt": "x" * 200, "max_tokens": 1}
    with app.manager.pause(weights_changed=False):
        waiting = asyncio.ensure_future(http.post("/v1/completions", json=asked))
        await eventually(lambda: app.manager.stats().num_waiting == 1)
        refused = await http.post("/v1/completions", json=asked)
        assert refused.status_code == 429
        assert "200 prompt tokens waiting and sends 200" in refused.json()["error"]["message"]
    assert (await waiting).status_code == 200
    assert (await http.post("/v1/completions", json=asked)).status_code == 200


async def test_text_becomes_tokens_and_back(http: httpx.AsyncClient) -> None:
    text = "naïve 日本語 👩‍👩‍👧‍👦"
    answer = (await http.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 512)
    assert len(answer["token_strs"]) == answer["count"]
    assert (await http.post("/detokenize", json={"tokens": answer["tokens"]})).json() == {"prompt": text}
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    ids = (await http.post("/tokenize", json=chat)).json()["tokens"]
    assert (await http.post("/detokenize", json={"tokens": ids})).json() == {"prompt": "user: hi\nassistant: "}


@pytest.mark.parametrize(("path", "body", "status", "param"), [
    ("/tokenize", {}, 400, "prompt"), ("/tokenize", {"prompt": "a", "messages": []}, 400, "messages"),
    ("/tokenize", {"prompt": "a", "model": "other"}, 404, None), ("/tokenize", {"prompt": "\ud800"}, 400, "prompt"),
    ("/detokenize", {"tokens": [257]}, 400, "tokens"), ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"), ("/v1/abort", {}, 400, "request_id"),
    ("/tokenize", {"prompt": "x" * 5000}, 413, None),
    ("/tokenize", {"prompt": "a", "chat_template_kwargs": {"a": 1}}, 400, "chat_template_kwargs"),
    ("/tokenize", {"prompt": "a", "add_generation_prompt": False}, 400, "add_generation_prompt"),
    ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True}, 400,
     "add_special_tokens"),
])  # fmt: skip
async def test_text_routes_refuse_by_name(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    response = await http.post(path, content=json.dumps(body))
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


@pytest.mark.parametrize("token_id", [-1, -(2**40), 257, 2**31, 2**64])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_of_ids_that_the_model_lacks_is_refused(
    http: httpx.AsyncClient, token_id: int, stream: bool
) -> None:
    body = {"model": MODEL, "prompt": [5, token_id, 6], "stream": stream, "echo": True}
    response = await http.post("/v1/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "prompt")
    assert str(token_id) in error["message"]


async def test_a_request_is_aborted_by_its_caller_alone(app: LocalApp, http: httpx.AsyncClient) -> None:
    headers = {"x-request-id": "mine"}
    plain = asyncio.ensure_future(http.post("/v1/completions", json={**LONG, "stream": False}, headers=headers))
    async with http.stream("POST", "/v1/completions", json={**LONG, "n": 2}, headers=headers) as stream:
        async with client(app, "bob") as other:
            assert (await other.post("/v1/abort", json={"request_id": "mine"})).json() == {"num_aborted": 0}
        await eventually(lambda: app.manager.stats().num_running == 3)
        assert (await http.post("/v1/abort", json={"request_id": "mine"})).json() == {"num_aborted": 2}
        lines = [line async for line in stream.aiter_lines() if line.startswith("data: {")]
    reasons = [json.loads(line[6:])["choices"][0]["finish_reason"] for line in lines]
    assert [reason for reason in reasons if reason] == ["cancelled", "cancelled"]
    answer = (await plain).json()
    assert answer["choices"][0]["finish_reason"] == "cancelled"
    assert answer["usage"]["completion_tokens"] < 400
    await eventually(app.is_idle)
    assert (await http.post("/v1/abort", json={"request_id": "mine"})).json() == {"num_aborted": 0}


async def test_a_waiting_request_can_be_aborted_too(app: LocalApp, http: httpx.AsyncClient) -> None:
    headers = {"x-request-id": "waits"}
    with app.manager.pause(weights_changed=False):
        waiting = asyncio.ensure_future(http.post("/v1/completions", json={**LONG, "stream": False}, headers=headers))
        await eventually(lambda: app.manager.stats().num_waiting == 1)
        assert (await http.post("/v1/abort", json={"request_id": "waits"})).json() == {"num_aborted": 1}
    assert (await waiting).json()["choices"][0]["finish_reason"] == "cancelled"


async def test_health_is_lost_with_the_loop(app: LocalApp, http: httpx.AsyncClient) -> None:
    app.fleet.state = "unhealthy"
    lost = await http.get("/health")
    app.fleet.state = "ready"
    assert (lost.status_code, lost.json()["error"]["message"]) == (503, "the loop is dead")
    assert (await http.get("/health")).json() == {"status": "alive"}


async def test_the_document_describes_the_bodies_of_all_routes(http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1/abort"):
        operation = document["paths"][path]["post"]
        name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
        assert schemas[name]["properties"]
        assert schemas[operation["responses"]["200"]["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]]
        assert "4XX" in operation["responses"]
    assert {"temperature", "n", "logit_bias", "messages"} <= schemas["ChatRequest"]["properties"].keys()

    def references(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield from [value["$ref"]] if "$ref" in value else []
            value = list(value.values())
        for item in value if isinstance(value, list) else []:
            yield from references(item)

    assert {name.rsplit("/", 1)[1] for name in references(document)} <= schemas.keys()


@pytest.mark.parametrize(("options", "text"), [
    ({}, "user: hi\nassistant: "), ({"add_generation_prompt": False}, "user: hi\n"),
    ({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I"}],
      "continue_final_message": True}, "user: hi\nassistant: I"),
])  # fmt: skip
async def test_a_chat_ends_where_it_is_asked_to(http: httpx.AsyncClient, options: dict[str, Any], text: str) -> None:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, **options}
    answer = await http.post("/v1/chat/completions", json={**asked, "return_token_ids": True})
    ids = answer.json()["prompt_token_ids"]
    assert (await http.post("/detokenize", json={"tokens": ids})).json() == {"prompt": text}


@pytest.mark.parametrize(("options", "param"), [
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    ({"priority": 3}, "priority"), ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"hints": {"expected_output_tokens": 0}}, "hints.expected_output_tokens"),
    ({"logit_bias": {"257": 1}}, "logit_bias"), ({"allowed_token_ids": [300]}, "allowed_token_ids"),
    ({"min_tokens": 2}, "min_tokens"), ({"max_tokens": None, "min_tokens": 10**30}, "min_tokens"),
])  # fmt: skip
async def test_hints_and_templates_are_refused_by_name(
    http: httpx.AsyncClient, options: dict[str, Any], param: str
) -> None:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, **options}
    response = await http.post("/v1/chat/completions", json=asked)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(("kept", "expected"), [(3, "def"), (-1, None), (100, "abcdef")])
async def test_a_prompt_keeps_its_last_tokens(http: httpx.AsyncClient, kept: int, expected: str | None) -> None:
    text = "abcdef" if expected else "x" * 600
    asked = {"model": MODEL, "prompt": text, "max_tokens": 10, "truncate_prompt_tokens": kept, "echo": True}
    answer = (await http.post("/v1/completions", json={**asked, "return_token_ids": True})).json()
    ids = answer["choices"][0]["prompt_token_ids"]
    assert len(ids) == (len(expected) if expected else 502)
    assert answer["choices"][0]["text"].startswith(expected or "x" * 502)


LONG_TEXT = "a" * 3000
LONG_CHAT = [{"role": "user", "content": LONG_TEXT}]


@pytest.mark.parametrize(("path", "fields", "param"), [
    ("/tokenize", {"prompt": LONG_TEXT}, "prompt"),
    ("/tokenize", {"messages": LONG_CHAT}, "messages"),
    ("/v1/completions", {"prompt": LONG_TEXT, "truncate_prompt_tokens": -1}, "prompt"),
    ("/v1/chat/completions", {"messages": LONG_CHAT, "truncate_prompt_tokens": 5}, "messages"),
])  # fmt: skip
async def test_a_text_of_any_number_of_tokens_is_so_long_at_most(
    http: httpx.AsyncClient, path: str, fields: dict[str, Any], param: str
) -> None:
    response = await http.post(path, json={"model": MODEL, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert "at most 2048 are read" in error["message"]
