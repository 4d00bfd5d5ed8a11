"""Grammars over HTTP and through the engine, beside a stream that must not notice."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import jsonschema
import openai
import pytest
from local_app import LocalApp, local_app
from tiny_model import make_model_folder

from serve_app.settings import AppSettings

MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 999}, "kind": {"enum": ["a", "bb"]}},
    "required": ["id", "kind"],
    "additionalProperties": False,
}
STRUCTURES = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}},
    {"extra_body": {"structured_outputs": {"regex": "[ab]{9}"}}},
    {"extra_body": {"structured_outputs": {"choice": ["ja", "nein"]}}},
    {"extra_body": {"structured_outputs": {"grammar": 'root ::= [0-9]{3} "x"'}}},
    {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
]
HOSTILE: list[dict[str, Any]] = [
    {"json": {"type": "strin"}},
    {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    {"json": {"enum": [f"value {number}" for number in range(3000)]}},
    {"json": {"type": "string", "pattern": "^((x{1,100}y?){1,100}z){1,100}$"}},
    {"regex": "(((("},
    {"grammar": "root ::= " + "(" * 500},
]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalApp]:
    path = make_model_folder(tmp_path_factory.mktemp("model"))
    with local_app(AppSettings(model=path, served_model_name="m", dtype="float32", tool_parser="hermes")) as running:
        yield running


@pytest.fixture
async def client(app: LocalApp) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{app.url}/v1", api_key="x", max_retries=0) as opened:
        yield opened


async def answer(client: openai.AsyncOpenAI, fields: dict[str, Any], **more: Any) -> Any:
    created = await client.chat.completions.create(model="m", messages=MESSAGES, **fields, **more)
    return created.choices[0]


async def test_answers_follow_what_was_asked_for_all_at_once(client: openai.AsyncOpenAI) -> None:
    shared = {"seed": 0, "max_tokens": 200}
    choices = await asyncio.gather(*(answer(client, fields, **shared) for fields in STRUCTURES))
    assert [choice.finish_reason for choice in choices] == ["stop", "stop", "stop", "stop", "tool_calls"]
    texts = [choice.message.content for choice in choices]
    jsonschema.validate(json.loads(texts[0]), SCHEMA)
    assert re.fullmatch("[ab]{9}", texts[1])
    assert texts[2] in ("ja", "nein")
    assert re.fullmatch("[0-9]{3}x", texts[3])
    jsonschema.validate(json.loads(choices[4].message.tool_calls[0].function.arguments), SCHEMA)


@pytest.mark.parametrize("fields", [{"allowed_token_ids": [5]}, {"bad_words": ["y", "n"]}])
async def test_settings_that_contradict_a_structure_are_the_requests_own_fault(
    client: openai.AsyncOpenAI, fields: dict[str, Any]
) -> None:
    asked = {"extra_body": {"structured_outputs": {"choice": ["yes", "no"]}, **fields}}
    with pytest.raises(openai.BadRequestError, match="allowed_token_ids, bad_words and logit_bias") as refusal:
        await answer(client, asked)
    assert (refusal.value.type, refusal.value.code) == ("invalid_request_error", "contradictory_settings")
    with pytest.raises(openai.APIError, match="no token is left to choose") as told:
        async for _ in await client.chat.completions.create(model="m", messages=MESSAGES, stream=True, **asked):
            pass
    assert (told.value.type, told.value.code) == ("invalid_request_error", "contradictory_settings")


@pytest.mark.parametrize("fields", STRUCTURES)
async def test_min_tokens_is_refused_where_a_structure_ends_the_answer(
    client: openai.AsyncOpenAI, fields: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError, match="min_tokens is 8") as refusal:
        await answer(client, {**fields, "extra_body": {**fields.get("extra_body", {}), "min_tokens": 8}})
    assert refusal.value.param == "min_tokens"


async def test_a_cut_answer_says_length(client: openai.AsyncOpenAI) -> None:
    choice = await answer(client, STRUCTURES[1], max_tokens=5)
    assert (len(choice.message.content), choice.finish_reason) == (5, "length")


async def test_several_answers_to_a_prompt_each_follow_it(client: openai.AsyncOpenAI) -> None:
    created = await client.chat.completions.create(model="m", messages=MESSAGES, n=4, seed=1, **STRUCTURES[1])
    texts = [choice.message.content for choice in created.choices]
    assert all(re.fullmatch("[ab]{9}", text) for text in texts)
    assert len(set(texts)) > 1


async def test_hostile_grammars_are_refused_or_served_and_a_stream_beside_them_stays_the_same(
    app: LocalApp, client: openai.AsyncOpenAI
) -> None:
    asked: dict[str, Any] = {"model": "m", "prompt": "the race", "temperature": 0, "max_tokens": 64}
    alone = (await client.completions.create(**asked)).choices[0].text

    witness = asyncio.create_task(client.completions.create(**asked))
    asks = [
        answer(client, {"extra_body": {"structured_outputs": structure}}, max_tokens=8) for structure in HOSTILE * 3
    ]
    outcomes = await asyncio.gather(*asks, return_exceptions=True)
    refused = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    assert len(refused) >= 12
    assert {(type(refusal), getattr(refusal, "param", "")) for refusal in refused} == {
        (openai.BadRequestError, "structured_outputs")
    }
    assert (await witness).choices[0].text == alone
    assert app.is_idle()
