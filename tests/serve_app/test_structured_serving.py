"""Structured answers from a real server, as the official client asks for them and as the Python handle does."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import openai
import pytest
from running_app import APP_NAME, running_app
from tiny_model import make_model_folder

from engine import InvalidRequest, SamplingParams
from serve_app.client import connect
from serve_app.settings import AppSettings

pytestmark = pytest.mark.slow

MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 999}, "kind": {"enum": ["a", "bb"]}},
    "required": ["id", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path: Path = tmp_path_factory.mktemp("model")
    settings = AppSettings(
        model=make_model_folder(path), served_model_name="tiny", dtype="float32", tool_parser="hermes"
    )
    with running_app(settings) as root:
        yield root


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)


@pytest.mark.parametrize("seed", range(3))
def test_a_schema_holds_in_plain_answers_and_in_streams(client: openai.OpenAI, seed: int) -> None:
    response_format = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    arguments = {"model": "tiny", "messages": MESSAGES, "seed": seed, "response_format": response_format}
    choice = client.chat.completions.create(**arguments).choices[0]
    text = choice.message.content
    jsonschema.validate(json.loads(text), SCHEMA)
    assert choice.finish_reason == "stop"
    stream = client.chat.completions.create(**arguments, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text


def test_a_cut_answer_says_length(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt="x", max_tokens=5, extra_body={"structured_outputs": {"regex": "[ab]{9}"}}
    )
    assert re.fullmatch("[ab]{5}", answer.choices[0].text)
    assert answer.choices[0].finish_reason == "length"


def test_a_bad_schema_is_a_refusal_that_names_its_parameter(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="Invalid type: strin") as refusal:
        client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}},
        )
    assert refusal.value.param == "response_format"


async def test_the_handle_takes_the_same(url: str) -> None:
    pitstop = connect(APP_NAME)
    words = ["ja", "nein"]
    outputs = await pitstop.generate_batch(
        ["a", "b", "c"], SamplingParams(temperature=1.0), structured={"choice": words}
    )
    assert {output.text for output in outputs} <= set(words)
    with pytest.raises(InvalidRequest, match="structured_outputs is refused"):
        await anext(pitstop.generate("a", structured={"regex": "(["}))


def called(delta_calls: list[dict[str, str]], chunk: openai.types.chat.ChatCompletionChunk) -> None:
    for call in chunk.choices[0].delta.tool_calls or []:
        if call.id is not None:
            assert (call.type, call.index) == ("function", len(delta_calls))
            delta_calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
        delta_calls[call.index]["arguments"] += call.function.arguments


@pytest.mark.parametrize("seed", range(2))
def test_a_required_call_comes_plain_and_streamed(client: openai.OpenAI, seed: int) -> None:
    tools = [{"type": "function", "function": {"name": "look", "description": "looks", "parameters": SCHEMA}}]
    arguments = {"model": "tiny", "messages": MESSAGES, "seed": seed, "tools": tools, "tool_choice": "required"}
    choice = client.chat.completions.create(**arguments, parallel_tool_calls=False).choices[0]
    assert (choice.finish_reason, choice.message.content, len(choice.message.tool_calls)) == ("tool_calls", None, 1)
    call = choice.message.tool_calls[0]
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    streamed: list[dict[str, str]] = []
    for chunk in client.chat.completions.create(**arguments, parallel_tool_calls=False, stream=True):
        called(streamed, chunk)
        reason = chunk.choices[0].finish_reason
    assert reason == "tool_calls"
    assert [(call["name"], call["arguments"]) for call in streamed] == [(call.function.name, call.function.arguments)]
    answer = [
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "nothing there"},
    ]
    assert client.chat.completions.create(model="tiny", messages=[*MESSAGES, *answer], tools=tools, max_tokens=4)
