"""What comes out over HTTP, from a real engine: log-probabilities, echoes, counts, and streams that add up."""

import json
import math
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest

from serve_app.settings import AppSettings, parse_settings
from tests.serve_app.local_app import LocalApp, local_app
from tests.serve_app.tiny_model import make_model_folder

MODEL = "tiny"
PROMPT = "the prompt of a test"
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> AppSettings:
    folder = make_model_folder(tmp_path_factory.mktemp("model") / "base", max_position_embeddings=512)
    return parse_settings({"model": folder, "served_model_name": MODEL, "engine": {"page_size": 16, "num_blocks": 128}})


@pytest.fixture(scope="module")
def app(settings: AppSettings) -> Iterator[LocalApp]:
    with local_app(settings) as running:
        yield running


@pytest.fixture
async def http(app: LocalApp) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=app.url, timeout=60) as client:
        yield client


async def complete(http: httpx.AsyncClient, **fields: Any) -> Any:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, **GREEDY, **fields}
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def chat(http: httpx.AsyncClient, **fields: Any) -> Any:
    body = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8, **GREEDY, **fields}
    response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def chunks(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    asked = {"model": MODEL, "max_tokens": 8, "stream": True, **GREEDY, **body}
    async with http.stream("POST", path, json=asked) as response:
        assert response.status_code == 200, await response.aread()
        lines = [line async for line in response.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_each_token_of_a_chat_has_its_most_likely_ones(http: httpx.AsyncClient) -> None:
    choice = (await chat(http, logprobs=True, top_logprobs=3, return_token_ids=True))["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == len(choice["token_ids"]) == 8
    for entry in content:
        tops = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(tops) == 3
        assert tops == sorted(tops, reverse=True)
        assert entry["logprob"] == tops[0]  # greedy
        assert all(math.isfinite(value) and value <= 0 for value in tops)


async def test_ids_stand_for_tokens_where_asked_for(http: httpx.AsyncClient) -> None:
    fields = {"logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = (await chat(http, **fields))["choices"][0]
    names = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert names == [f"token_id:{token_id}" for token_id in choice["token_ids"]]


async def test_only_one_token_is_likely_where_no_other_may_come(http: httpx.AsyncClient) -> None:
    fields = {"logprobs": 20, "temperature": 1.0, "top_k": 1, "max_tokens": 3}
    choice = (await complete(http, **fields))["choices"][0]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [1, 1, 1]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx([0.0, 0.0, 0.0])


async def test_a_prompt_is_echoed_with_its_log_probabilities(http: httpx.AsyncClient) -> None:
    plain = (await complete(http, logprobs=2))["choices"][0]
    echoed = (await complete(http, logprobs=2, echo=True))["choices"][0]
    alone = await complete(http, logprobs=2, echo=True, max_tokens=0)
    assert echoed["text"] == PROMPT + plain["text"]
    num_prompt_tokens = alone["usage"]["prompt_tokens"]
    assert alone["usage"]["completion_tokens"] == 0
    only = alone["choices"][0]
    assert only["weight_versions"] == [{"version": 1, "start": 0, "end": 0}]
    assert alone["system_fingerprint"] == f"{MODEL}@1"
    assert (only["text"], only["finish_reason"]) == (PROMPT, "length")
    first = only["logprobs"]
    assert {len(first[name]) for name in first} == {num_prompt_tokens}
    assert (first["token_logprobs"][0], first["top_logprobs"][0]) == (None, None)
    assert all(math.isfinite(value) for value in first["token_logprobs"][1:])
    assert all(2 <= len(top) <= 3 for top in first["top_logprobs"][1:])
    together = echoed["logprobs"]
    assert together["tokens"] == first["tokens"] + plain["logprobs"]["tokens"]
    assert together["token_logprobs"] == pytest.approx(
        first["token_logprobs"] + plain["logprobs"]["token_logprobs"], abs=1e-4
    )
    assert "".join(together["tokens"]).startswith(PROMPT)
    for token, offset in zip(first["tokens"], first["text_offset"], strict=True):
        assert PROMPT[offset:].startswith(token)
    assert together["text_offset"] == sorted(together["text_offset"])
    assert together["text_offset"][num_prompt_tokens] == len(PROMPT)
    # The prefix is in the cache by now, and is scored all the same.
    again = (await complete(http, logprobs=2, echo=True, max_tokens=0))["choices"][0]["logprobs"]
    assert again["token_logprobs"] == pytest.approx(first["token_logprobs"], abs=1e-4)


async def test_an_echo_without_log_probabilities_is_text_alone(http: httpx.AsyncClient) -> None:
    answer = await complete(http, echo=True, max_tokens=0, n=2)
    assert [choice["text"] for choice in answer["choices"]] == [PROMPT, PROMPT]
    assert answer["choices"][0]["logprobs"] is None
    response = await http.post("/v1/completions", json={"model": MODEL, "prompt": PROMPT, "max_tokens": 0})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")


async def test_prompt_log_probabilities_have_the_form_of_vllm(http: httpx.AsyncClient) -> None:
    answer = await chat(http, prompt_logprobs=1, return_token_ids=True, n=2)
    ids, scores = answer["prompt_token_ids"], answer["prompt_logprobs"]
    assert len(scores) == len(ids)
    assert scores[0] is None
    for token_id, entry in zip(ids[1:], scores[1:], strict=True):
        assert str(token_id) in entry
        assert [one["rank"] for one in entry.values() if one["rank"]] == [1]
    streamed = await chunks(http, "/v1/completions", {"prompt": ids, "prompt_logprobs": 1})
    first = streamed[0]["choices"][0]["prompt_logprobs"]
    assert [entry and entry.keys() for entry in first] == [entry and entry.keys() for entry in scores]
    assert not any("prompt_logprobs" in chunk["choices"][0] for chunk in streamed[1:])


@pytest.mark.parametrize("fields", [
    {}, {"logprobs": 3}, {"logprobs": 1, "echo": True}, {"n": 3, "temperature": 1.0, "seed": 5},
    {"echo": True, "max_tokens": 0, "logprobs": 1}, {"prompt": [PROMPT, "another"], "n": 2, "echo": True},
    {"stop": "xyz", "n": 2, "temperature": 1.0, "seed": 3},
])  # fmt: skip
async def test_a_stream_adds_up_to_the_plain_answer(http: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    asked = {"prompt": PROMPT, "return_token_ids": True, **fields}
    plain = await complete(http, **asked)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *parts, usage = await chunks(http, "/v1/completions", {**asked, "stream_options": options})
    assert {**usage["usage"], "prompt_tokens_details": None} == {**plain["usage"], "prompt_tokens_details": None}
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == sorted(counts)
    assert counts[-1] == plain["usage"]["completion_tokens"]
    for expected in plain["choices"]:
        mine = [part["choices"][0] for part in parts if part["choices"][0]["index"] == expected["index"]]
        assert "".join(part["text"] for part in mine) == expected["text"]
        assert [token for part in mine for token in part["token_ids"]] == expected["token_ids"]
        assert mine[0]["prompt_token_ids"] == expected["prompt_token_ids"]
        assert [part["finish_reason"] for part in mine if part["finish_reason"]] == [expected["finish_reason"]]
        if expected["logprobs"]:
            for name in ("tokens", "text_offset"):
                assert [item for part in mine for item in part["logprobs"][name]] == expected["logprobs"][name]


async def test_forked_answers_differ_and_the_first_is_that_of_a_single_one(http: httpx.AsyncClient) -> None:
    how = {"temperature": 2.0, "seed": 11, "max_tokens": 16, "return_token_ids": True}
    single = (await complete(http, **how))["choices"][0]["token_ids"]
    several = [choice["token_ids"] for choice in (await complete(http, **how, n=4))["choices"]]
    assert several[0] == single
    assert len({tuple(ids) for ids in several}) == 4
    again = [choice["token_ids"] for choice in (await complete(http, **how, n=4))["choices"]]
    assert again == several


async def test_times_are_given_where_asked_for(http: httpx.AsyncClient) -> None:
    plain = await chat(http, return_timings=True)
    *parts, last = await chunks(http, "/v1/completions", {"prompt": PROMPT, "return_timings": True})
    for timings in (plain["timings"], last["timings"]):
        assert 0 <= timings["queued_s"] <= timings["first_token_s"] <= timings["total_s"] < 60
    assert not any("timings" in part for part in parts)
    assert "timings" not in await chat(http)


async def test_the_official_client_reads_all_of_it(app: LocalApp) -> None:
    async with openai.AsyncOpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "hi"}]
        answer = await client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=4, n=2, logprobs=True, top_logprobs=2,
            logit_bias={"70": 100}, extra_headers={"x-request-id": "mine"},
        )  # fmt: skip
        assert answer.id == "chatcmpl-mine"
        assert answer.system_fingerprint == f"{MODEL}@1"
        for choice in answer.choices:
            assert choice.logprobs is not None
            assert choice.logprobs.content is not None
            assert [entry.token for entry in choice.logprobs.content] == [choice.message.content[:1]] * 4  # type: ignore[index]
        completion = await client.completions.create(
            model=MODEL, prompt=["a", "b"], max_tokens=2, logprobs=2, echo=True
        )
        assert [choice.text[0] for choice in completion.choices] == ["a", "b"]


async def test_the_end_token_is_text_only_where_what_stops_is_asked_for(http: httpx.AsyncClient) -> None:
    ends = {"allowed_token_ids": [256], "ignore_eos": False, "return_token_ids": True, "skip_special_tokens": False}
    for asked in ({}, {"stop_token_ids": [256]}):
        for includes in (False, True):
            fields = {**ends, **asked, "include_stop_str_in_output": includes}
            choice = (await complete(http, **fields))["choices"][0]
            assert choice["text"] == (await chat(http, **fields))["choices"][0]["message"]["content"]
            assert (choice["text"], choice["finish_reason"]) == ("<|end|>" if includes else "", "stop")
            assert choice["token_ids"] == [256]
    # Where it ends nothing it is a token as any other.
    choice = (await complete(http, **{**ends, "ignore_eos": True}))["choices"][0]
    assert choice["text"] == 8 * "<|end|>"


async def test_a_completion_completes_the_character_that_its_prompt_began(
    app: LocalApp, http: httpx.AsyncClient
) -> None:
    *begun, last = app.service.tokenizer.encode("日")
    choice = (await complete(http, prompt=begun, allowed_token_ids=[last], max_tokens=1))["choices"][0]
    assert choice["text"] == "日"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for fields in ({}, {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}):
        choice = (await chat(http, **fields, allowed_token_ids=[last], max_tokens=1))["choices"][0]
        assert choice["message"]["content"] == "\ufffd", "no prompt began it"
