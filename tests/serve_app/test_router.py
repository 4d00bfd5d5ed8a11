import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import ray
from ray import serve

from engine import InvalidRequest, QueueFull, SamplingParams, SwapConflict, WeightsInvalid, WeightSpan
from serve_app.client import Completion, Pitstop, SyncPitstop, connect, connect_sync
from serve_app.protocol.errors import GenerationFailed, NoReplica, VersionUnavailable
from serve_app.router import Router
from serve_app.settings import AppSettings
from tests.ports import free_port
from tests.serve_app.router_fakes import FakeController, FakeEngine
from tests.serve_app.tiny_tokenizers import byte_level_tokenizer
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
ADMIN_KEY = "correct-horse-battery-staple"
DEADLINE_S = 30.0
PROMPT = "the string 日本語 ends here"


@dataclass(frozen=True)
class Server:
    url: str
    key_file: Path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two applications: `/` as users have it, `/small` with tight limits and without an admin key."""
    folder = tmp_path_factory.mktemp("model")
    byte_level_tokenizer().save_pretrained(folder)
    key_file = folder / "key"
    key_file.write_text(ADMIN_KEY)
    port = free_port()
    # The workers import the deployments of this test by name.
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    usual = AppSettings(model=str(folder), served_model_name="tiny", admin_key_file=str(key_file))
    limits: Any = {"max_queued_requests": 1, "request_timeout_s": 2, "version_wait_s": 0, "max_body_bytes": 1024}
    small = AppSettings(model=str(folder), served_model_name="tiny", limits=limits)
    serve.run(Router.bind(usual, FakeEngine.bind(), FakeController.bind()), name="pitstop", route_prefix="/")
    serve.run(Router.bind(small, FakeEngine.bind(), FakeController.bind()), name="small", route_prefix="/small")
    yield Server(f"http://127.0.0.1:{port}", key_file)
    serve.shutdown()
    ray.shutdown()


@pytest.fixture
async def http(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=DEADLINE_S) as client:
        yield client


@pytest.fixture
def pitstop(server: Server) -> Pitstop:
    return connect("pitstop")


def chat(text: str = PROMPT, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}]} | fields


def completion(prompt: Any = PROMPT, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 100} | fields


async def sse(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    async with client.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in response.aiter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    return [line if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


async def num_open(application: str = "pitstop") -> int:
    return int(await serve.get_deployment_handle("FakeEngine", application).num_open.remote())


async def all_closed() -> bool:
    return await num_open() == 0


async def test_a_chat_is_answered(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/chat/completions", json=chat())
    body = response.json()
    choice = body["choices"][0]
    assert (body["object"], body["model"]) == ("chat.completion", "tiny")
    assert choice["message"] == {"role": "assistant", "content": f"<|user|>{PROMPT}\n<|assistant|>", "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    prompt_tokens, completion_tokens = body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]
    assert completion_tokens == prompt_tokens + 1
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    spans = [{"version": 1, "start": 0, "end": 4}, {"version": 2, "start": 4, "end": completion_tokens}]
    assert choice["weight_versions"] == spans
    assert response.headers["x-weights-version"] == "2"
    assert body["system_fingerprint"] == "tiny@2"
    assert "token_ids" not in choice


@pytest.mark.parametrize("fields", [{}, {"stop": ["ends"]}, {"max_tokens": 9}, {"logprobs": True}])
async def test_a_streamed_chat_adds_up_to_the_plain_one(http: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    asked = chat(return_token_ids=True) | fields
    plain = (await http.post("/v1/chat/completions", json=asked)).json()
    *chunks, usage, done = await sse(http, "/v1/chat/completions", asked | {"stream_options": {"include_usage": True}})
    assert done == "data: [DONE]"
    assert (usage["choices"], usage["usage"]) == ([], plain["usage"])
    choices = [chunk["choices"][0] for chunk in chunks]
    expected = plain["choices"][0]
    assert "".join(c["delta"].get("content", "") for c in choices) == expected["message"]["content"]
    assert [t for c in choices for t in c["token_ids"]] == expected["token_ids"]
    assert chunks[0]["prompt_token_ids"] == plain["prompt_token_ids"]
    assert choices[0]["delta"]["role"] == "assistant"
    assert [c["finish_reason"] for c in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == expected["finish_reason"]
    assert choices[-1]["weight_versions"] == expected["weight_versions"]
    shown = [choice["weight_versions"] for choice in choices if "weight_versions" in choice]
    assert [spans[-1]["version"] for spans in shown] == [1, 2, 2]
    assert [chunks[0]["system_fingerprint"], usage["system_fingerprint"]] == ["tiny@1", "tiny@2"]
    if "logprobs" in fields:
        entries = [entry for c in choices for entry in c["logprobs"]["content"]]
        assert entries == expected["logprobs"]["content"]
        assert len(entries) == plain["usage"]["completion_tokens"]


async def test_a_stop_string_over_tokens_is_trimmed_and_counted(http: httpx.AsyncClient) -> None:
    body = (await http.post("/v1/completions", json=completion(stop=["ring 日"], return_token_ids=True))).json()
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("the st", "stop")
    assert len(choice["token_ids"]) == body["usage"]["completion_tokens"]
    assert choice["weight_versions"][-1]["end"] == len(choice["token_ids"])
    await eventually(all_closed)


async def test_a_completion_takes_text_or_ids(http: httpx.AsyncClient) -> None:
    by_text = (await http.post("/v1/completions", json=completion(return_token_ids=True, logprobs=0))).json()
    choice = by_text["choices"][0]
    assert choice["text"] == PROMPT
    assert choice["logprobs"]["text_offset"][0] == 0
    assert {len(choice["logprobs"][n]) for n in ("tokens", "token_logprobs", "text_offset")} == {
        len(choice["token_ids"])
    }
    by_ids = (await http.post("/v1/completions", json=completion(choice["prompt_token_ids"]))).json()
    assert by_ids["choices"][0]["text"] == PROMPT


async def test_the_official_client_works_unchanged(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "hi"}]
        answer = await client.chat.completions.create(model="tiny", messages=messages, n=1, presence_penalty=0)
        assert answer.choices[0].message.content == "<|user|>hi\n<|assistant|>"
        stream = await client.chat.completions.create(model="tiny", messages=messages, stream=True)
        assert "".join([c.choices[0].delta.content or "" async for c in stream]) == "<|user|>hi\n<|assistant|>"
        assert (await client.completions.create(model="tiny", prompt="hi")).choices[0].text == "hi"
        assert [model.id async for model in client.models.list()] == ["tiny"]
        assert (await client.models.retrieve("tiny")).id == "tiny"
        with pytest.raises(openai.BadRequestError, match=r"n is 200 for 1 prompt.* 128 choices at most"):
            await client.chat.completions.create(model="tiny", messages=messages, n=200)


async def test_several_answers_and_prompts_are_numbered_as_openai_does(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        asked: Any = {"model": "tiny", "prompt": ["the end", "here"], "n": 2}
        plain = await client.completions.create(**asked)
        assert [(c.index, c.text) for c in plain.choices] == [(0, "the end"), (1, "the end"), (2, "here"), (3, "here")]
        usage: Any = None
        texts, reasons = [""] * 4, []
        stream = await client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                reasons += [choice.index] if choice.finish_reason else []
        assert texts == [choice.text for choice in plain.choices]
        assert sorted(reasons) == [0, 1, 2, 3]
        assert plain.usage is not None
        assert usage.model_dump() == plain.usage.model_dump()
        by_ids = await client.completions.create(model="tiny", prompt=["the end", "here"], max_tokens=1)
        assert by_ids.usage is not None
        assert (by_ids.usage.prompt_tokens, by_ids.usage.completion_tokens) == (plain.usage.prompt_tokens, 2)


async def test_one_refused_prompt_of_several_refuses_all_and_leaves_nothing_open(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", json=completion(["fine", "x" * 300]))
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    response = await http.post("/v1/completions", json=completion(["fine", "well"], cache_salt="full"))
    assert response.status_code == 429
    await eventually(all_closed)


@pytest.mark.parametrize(("path", "body", "status", "code", "param"), [
    ("/v1/chat/completions", chat(n=0), 400, "invalid_request", "n"),
    ("/v1/completions", completion(best_of=2), 400, "invalid_request", "best_of"),
    ("/v1/chat/completions", chat(model="other"), 404, "model_not_found", None),
    ("/v1/chat/completions", chat("forbidden"), 400, "invalid_request", "messages"),
    ("/v1/chat/completions", chat("x" * 300), 400, "context_length_exceeded", "messages"),
    ("/v1/chat/completions", chat(max_tokens=1000), 400, "context_length_exceeded", "max_tokens"),
    ("/v1/chat/completions", chat(cache_salt="refuse"), 400, "invalid_request", "messages"),
    ("/v1/completions", completion(cache_salt="refuse"), 400, "invalid_request", "prompt"),
    ("/v1/chat/completions", chat("\ud800"), 400, "invalid_request", "messages"),
    ("/v1/completions", completion("\ud800"), 400, "invalid_request", "prompt"),
    ("/v1/completions", completion(**{"\ud800": 1}), 400, "invalid_request", None),
    ("/v1/completions", completion(**{"top-k": 1}), 400, "invalid_request", "top-k"),
    ("/v1/completions", completion(cache_salt="full"), 429, "queue_full", None),
    ("/v1/completions", completion(cache_salt="bug"), 500, "internal_error", None),
    ("/v1/completions", completion(min_weight_version=0), 400, "invalid_request", "min_weight_version"),
    ("/v1/chat/completions", chat(min_weight_version=2, weight_version=1), 400, "invalid_request", "weight_version"),
    ("/v1/chat/completions", chat(weight_version=7), 409, "weight_version_gone", "weight_version"),
    ("/v1/completions", completion(weight_version=7), 409, "weight_version_gone", "weight_version"),
    ("/small/v1/chat/completions", chat(min_weight_version=7), 409, "weight_version_unavailable", None),
    ("/small/v1/completions", completion(min_weight_version=7), 409, "weight_version_unavailable", None),
    ("/v1/unknown", {}, 404, "unknown_url", None),
    ("/v1/models", {}, 405, "unknown_url", None),
    ("/small/v1/completions", completion("x" * 2000), 413, "body_too_large", None),
    ("/small/v1/completions", completion(cache_salt="silent"), 504, "deadline_exceeded", None),
])  # fmt: skip
@pytest.mark.parametrize("is_stream", [False, True])
async def test_refusals_have_a_status_and_the_shape_of_openai(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], status: int, code: str, param: str | None, is_stream: bool
) -> None:
    # Half a surrogate pair can only be sent escaped, as json.dumps does it.
    response = await http.post(path, content=json.dumps(body | {"stream": is_stream}))
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, param)
    assert "secret" not in error["message"]
    assert ("retry-after" in response.headers) == (status == 429)


async def test_a_body_that_is_no_json_is_a_400(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", content=b"[" * 100_000)
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_a_failure_after_the_first_token_is_an_event_and_the_end(http: httpx.AsyncClient) -> None:
    plain = await http.post("/v1/completions", json=completion(cache_salt="fail"))
    assert (plain.status_code, plain.json()["error"]["code"]) == (500, "generation_failed")
    *chunks, last = await sse(http, "/v1/completions", completion(cache_salt="fail"))
    assert chunks[0]["choices"][0]["text"]
    assert last["error"]["message"] == "the logits are not finite"


async def test_the_deadline_ends_a_stream_with_an_event(http: httpx.AsyncClient) -> None:
    *chunks, last = await sse(http, "/small/v1/completions", completion(cache_salt="endless"))
    assert chunks
    assert last["error"]["code"] == "deadline_exceeded"


async def test_who_comes_while_all_places_are_taken_is_told_when_to_retry(http: httpx.AsyncClient) -> None:
    async def send() -> httpx.Response:
        return await http.post("/small/v1/completions", json=completion(cache_salt="silent"))

    responses = await asyncio.gather(send(), send())
    refused = next(response for response in responses if response.status_code == 429)
    assert refused.json()["error"]["code"] == "queue_full"
    assert int(refused.headers["retry-after"]) >= 1


@pytest.mark.parametrize("script", ["endless", "silent"])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_leaves_ends_its_request(server: Server, script: str, is_stream: bool) -> None:
    async def ask() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=None) as client:
            await client.post("/v1/completions", json=completion(cache_salt=script, stream=is_stream))

    clients = [asyncio.ensure_future(ask()) for _ in range(5)]

    async def all_open() -> bool:
        return await num_open() == 5

    await eventually(all_open)
    for client in clients:
        client.cancel()
    await eventually(all_closed)


@pytest.mark.parametrize("script", ["endless", "silent"])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_abort_ends_a_request_for_its_client_and_in_the_engine(
    http: httpx.AsyncClient, script: str, is_stream: bool
) -> None:
    request_id = f"{script}-{is_stream}"
    asked = completion(cache_salt=script, stream=is_stream)
    sending = http.post("/v1/completions", json=asked, headers={"x-request-id": request_id})
    answering = asyncio.ensure_future(sending)

    async def one_open() -> bool:
        return await num_open() == 1

    await eventually(one_open)
    aborted = await http.post("/v1/abort", json={"request_id": request_id})
    assert aborted.json() == {"num_aborted": 1}
    answer = await answering
    assert answer.status_code == 200
    assert '"finish_reason":"cancelled"' in answer.text
    await eventually(all_closed)
    assert (await http.post("/v1/abort", json={"request_id": request_id})).json() == {"num_aborted": 0}


async def test_request_ids_come_back_and_equal_ones_are_both_served(http: httpx.AsyncClient) -> None:
    headers = {"x-request-id": "mine"}
    send = [http.post("/v1/completions", json=completion(), headers=headers) for _ in range(2)]
    for response in await asyncio.gather(*send):
        assert response.status_code == 200
        assert response.headers.get_list("x-request-id") == ["mine"]
    assert (await http.get("/health")).headers["x-request-id"]


async def test_readiness_follows_the_committed_version(http: httpx.AsyncClient) -> None:
    assert (await http.get("/health")).status_code == 200
    assert (await http.get("/ready")).status_code == 200
    controller = serve.get_deployment_handle("FakeController", "pitstop")
    await controller.set_committed.remote(2)
    response = await http.get("/ready")
    await controller.set_committed.remote(1)
    assert response.status_code == 503
    assert "weight version 1, committed is 2" in response.json()["error"]["message"]


async def test_metrics_of_router_and_replicas_come_together(http: httpx.AsyncClient) -> None:
    await http.post("/v1/completions", json=completion())
    text = (await http.get("/metrics")).text
    assert 'pitstop_engine_alive{replica="0"} 1.0' in text
    assert 'pitstop_http_requests_total{route="/v1/completions",router="0",status="200"}' in text
    assert "vllm:num_requests_running" not in text  # the fake engine has no such number
    shown = next(line for line in text.splitlines() if line.startswith("pitstop_requests_waiting_at_router{"))
    assert shown.endswith(" 0.0")


async def test_the_weights_are_swapped_with_the_admin_key(http: httpx.AsyncClient) -> None:
    body = {"source": {"path": "/weights"}, "in_flight": "keep"}
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    swapped = (await http.post("/admin/weights", json=body, headers=headers)).json()
    assert (swapped["version"], swapped["paused_s"]) == (2, 0.04)
    shown = (await http.get("/admin/weights", headers=headers)).json()
    assert (shown["version"], shown["source"], shown["swap_in_progress"]) == (1, None, None)
    assert (shown["label"], shown["committed_at"], shown["requested_by"]) == ("base", "now", "me")
    assert [version["version"] for version in shown["history"]] == [1]
    assert [(r["replica_id"], r["version"], r["state"]) for r in shown["replicas"]] == [("fake", 1, "ready")]


async def test_label_key_and_origin_of_a_swap_reach_the_controller(http: httpx.AsyncClient) -> None:
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    body = {"source": {"path": "/weights"}, "label": "step 5", "idempotency_key": "k"}
    assert (await http.post("/admin/weights", json=body, headers=headers)).status_code == 200
    asked = await serve.get_deployment_handle("FakeController", "pitstop").asked.remote()
    assert (asked.label, asked.idempotency_key) == ("step 5", "k")
    assert asked.requested_by.startswith("HTTP from ")


async def test_the_weights_are_rolled_back_with_the_admin_key(http: httpx.AsyncClient) -> None:
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    controller = serve.get_deployment_handle("FakeController", "pitstop")
    for body, version in [({}, None), ({"version": 4, "idempotency_key": "k"}, 4)]:
        response = await http.post("/admin/weights/rollback", json=body, headers=headers)
        assert (response.status_code, response.json()["version"]) == (200, 3)
        assert (await controller.asked.remote()).version == version
    refused = await http.post("/admin/weights/rollback", json={"version": 9}, headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "version_unavailable")
    misspelt = await http.post("/admin/weights/rollback", json={"versoin": 1}, headers=headers)
    assert (misspelt.status_code, misspelt.json()["error"]["param"]) == (400, "versoin")
    assert (await http.post("/admin/weights/rollback", json={})).status_code == 401


@pytest.mark.parametrize(("path", "status", "param"), [("/bad", 400, "lm_head.weight"), ("/busy", 409, None)])
async def test_a_refused_swap_says_why(http: httpx.AsyncClient, path: str, status: int, param: str | None) -> None:
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    response = await http.post("/admin/weights", json={"source": {"path": path}}, headers=headers)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


@pytest.mark.parametrize(("path", "key", "status"), [
    ("/admin/weights", None, 401), ("/admin/weights", "Bearer wrong", 401), ("/admin/weights", ADMIN_KEY, 401),
    ("/admin/weights", "Bearer ü", 401), ("/small/admin/weights", f"Bearer {ADMIN_KEY}", 403),
])  # fmt: skip
async def test_admin_routes_need_the_key(http: httpx.AsyncClient, path: str, key: str | None, status: int) -> None:
    headers = {} if key is None else {"authorization": key.encode()}
    for method in ("GET", "POST"):
        response = await http.request(method, path, headers=headers)
        assert response.status_code == status
        assert response.json()["error"]["message"]


async def test_the_handle_streams_token_events(pitstop: Pitstop) -> None:
    events = [e async for e in pitstop.generate(PROMPT, SamplingParams(logprobs=True), stop="ends")]
    ids = await pitstop.tokenize(PROMPT)
    assert events[0].prompt_ids == ids
    assert "".join(e.text for e in events) == "the string 日本語 "
    assert [e.finish_reason for e in events] == [None] * (len(events) - 1) + ["stop"]
    assert all(len(e.logprobs) == len(e.token_ids) for e in events)
    assert events[-1].weight_versions[-1].end == sum(len(e.token_ids) for e in events)


async def test_a_handle_takes_ids_and_chats(pitstop: Pitstop) -> None:
    ids = await pitstop.tokenize([{"role": "user", "content": "hi"}])
    outputs = await pitstop.generate_batch([ids, [{"role": "user", "content": "hi"}]])
    assert [o.text for o in outputs if isinstance(o, Completion)] == ["<|user|>hi\n<|assistant|>"] * 2


async def test_a_batch_keeps_its_order_and_a_bad_prompt_fails_alone(pitstop: Pitstop) -> None:
    outputs = await pitstop.generate_batch(["one", "x" * 300, "", "three"], SamplingParams(max_new_tokens=50))
    assert [type(output).__name__ for output in outputs] == [
        "Completion", "ContextLengthExceeded", "InvalidRequest", "Completion",
    ]  # fmt: skip
    last = outputs[3]
    assert isinstance(last, Completion)
    assert (last.text, last.finish_reason) == ("three", "stop")
    assert last.weight_versions[0] == WeightSpan(1, 0, min(4, len(last.token_ids)))


@pytest.mark.parametrize(("prompt", "fields", "param"), [
    (None, {}, "prompt"), ([], {}, "prompt"), ([{"role": "robot", "content": ""}], {}, "messages[0].role"),
    ("a", {"stop": [""]}, "stop"), ("a", {"sampling": {"top_k": 1}}, "sampling"), ("a", {"hints": 3}, "hints"),
    ("a", {"weight_version": True}, "weight_version"), ("a", {"weight_version": 7}, "weight_version"),
    ("a", {"min_weight_version": "2"}, "min_weight_version"), ("a", {"min_weight_version": 0}, "min_weight_version"),
])  # fmt: skip
async def test_a_handle_refuses_what_it_cannot_use(
    pitstop: Pitstop, prompt: Any, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        _ = [event async for event in pitstop.generate(prompt, **fields)]
    assert caught.value.param == param


async def test_a_request_waits_for_the_least_version_it_asks_for(http: httpx.AsyncClient, pitstop: Pitstop) -> None:
    engine = serve.get_deployment_handle("FakeEngine", "pitstop")
    controller = serve.get_deployment_handle("FakeController", "pitstop")
    body = completion(min_weight_version=2)
    waiting = asyncio.gather(
        http.post("/v1/completions", json=body),
        sse(http, "/v1/completions", body),
        pitstop.generate_batch([PROMPT], min_weight_version=2),
    )
    done, _ = await asyncio.wait([waiting], timeout=0.3)
    assert not done
    await engine.set_version.remote(2)
    await controller.set_committed.remote(2)
    plain, events, (output,) = await waiting
    await engine.set_version.remote(1)
    await controller.set_committed.remote(1)
    assert plain.json()["choices"][0]["text"] == PROMPT
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == PROMPT
    assert isinstance(output, Completion)
    assert output.text == PROMPT


async def test_leaving_a_handle_stream_ends_the_request(pitstop: Pitstop) -> None:
    events = pitstop.generate(PROMPT, cache_salt="endless")
    await anext(events)
    assert await num_open() == 1
    await events.aclose()
    await eventually(all_closed)


async def test_errors_cross_the_handle_as_themselves(pitstop: Pitstop) -> None:
    for salt, kind in [("refuse", InvalidRequest), ("full", QueueFull), ("fail", GenerationFailed)]:
        with pytest.raises(kind):
            _ = [e async for e in pitstop.generate(PROMPT, cache_salt=salt)]
    with pytest.raises(WeightsInvalid) as caught:
        await pitstop.swap_weights("/bad")
    assert caught.value.tensor == "lm_head.weight"
    with pytest.raises(SwapConflict):
        await pitstop.swap_weights("/busy")


async def test_the_handle_swaps_and_shows_the_weights(pitstop: Pitstop) -> None:
    assert (await pitstop.swap_weights("/weights", label="step 5", idempotency_key="k")).version == 2
    asked = await serve.get_deployment_handle("FakeController", "pitstop").asked.remote()
    assert (asked.label, asked.idempotency_key, asked.requested_by) == ("step 5", "k", "Python handle")
    assert (await pitstop.rollback()).version == 3
    with pytest.raises(VersionUnavailable, match="version 9 is not in the history"):
        await pitstop.rollback(9)
    assert (await pitstop.status()).replicas[0].state == "ready"


def test_the_synchronous_twin_does_the_same(server: Server) -> None:
    with connect_sync("pitstop") as twin:
        assert isinstance(twin, SyncPitstop)
        assert "".join(event.text for event in twin.generate("hello")) == "hello"
        assert next(twin.generate("hello", cache_salt="endless")).token_ids
        outputs = twin.generate_batch(["one", ""])
        assert [type(output) for output in outputs] == [Completion, InvalidRequest]
        assert twin.swap_weights("/weights").version == 2
        assert twin.rollback(1).version == 3
        assert twin.status().committed.version == 1
    with pytest.raises(NoReplica):
        connect("absent")


async def test_streams_of_a_replica_that_dies_go_on_at_the_next_one(http: httpx.AsyncClient, pitstop: Pitstop) -> None:
    async def by_handle() -> str:
        return "".join([event.text async for event in pitstop.generate(PROMPT, cache_salt="endless")])

    streams = asyncio.gather(sse(http, "/v1/completions", completion(cache_salt="endless")), by_handle())
    await eventually(two_open)
    with pytest.raises(ray.exceptions.RayActorError):
        await serve.get_deployment_handle("FakeEngine", "pitstop").crash.remote()
    over_http, over_handle = await streams
    assert over_http[-1] == "data: [DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in over_http[:-1]) == PROMPT
    assert over_handle == PROMPT

    async def is_ready() -> bool:
        return (await http.get("/ready")).status_code == 200

    await eventually(is_ready)


@pytest.mark.slow
async def test_a_request_that_kills_replicas_is_refused_after_the_third(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json=completion(cache_salt="poison"), timeout=240)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "poison_request")
    numbers = (await http.get("/metrics")).text
    assert 'pitstop_poison_requests_total{router="0"} 1.0' in numbers

    async def is_ready() -> bool:
        return (await http.get("/ready")).status_code == 200

    await eventually(is_ready)


async def two_open() -> bool:
    return await num_open() == 2
