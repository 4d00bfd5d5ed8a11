"""The default model behind the whole application: it knows the capital of France."""

import json
from collections.abc import Iterator

import jsonschema
import openai
import pytest

from serve_app.model_store import fetch_default_model
from serve_app.settings import parse_settings
from tests.serve_app.running_app import http_client, running_app

QUESTION = {"role": "user", "content": "What is the capital of France?"}
ANSWER = "The capital of France is Paris."

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    fetch_default_model()
    with running_app(parse_settings({"replicas": {"graceful_shutdown_timeout_s": 1}, "tool_parser": "hermes"})) as root:
        yield root


async def test_chat_answers_by_the_models_own_template(url: str) -> None:
    async with http_client(url) as http:
        body = {"model": "smollm2-135m-instruct", "messages": [QUESTION], "temperature": 0}
        answer = (await http.post("/v1/chat/completions", json=body)).json()
        assert answer["choices"][0]["message"]["content"] == ANSWER
        assert answer["choices"][0]["finish_reason"] == "stop"
        streamed = (await http.post("/v1/chat/completions", json=body | {"stream": True})).text
        assert streamed.rstrip().endswith("data: [DONE]")


CITY = {
    "type": "object",
    "properties": {"country": {"type": "string", "maxLength": 40}, "capital": {"type": "string", "maxLength": 40}},
    "required": ["country", "capital"],
    "additionalProperties": False,
}


def test_an_answer_by_a_schema_and_a_required_call_parse(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
    response_format = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    asked = {"model": "smollm2-135m-instruct", "messages": [QUESTION], "temperature": 0}
    choice = client.chat.completions.create(**asked, response_format=response_format).choices[0]
    assert choice.finish_reason == "stop"
    city = json.loads(choice.message.content)
    jsonschema.validate(city, CITY)
    assert city["capital"] == "Paris"
    tools = [{"type": "function", "function": {"name": "look_up", "description": "Finds a city", "parameters": CITY}}]
    called = client.chat.completions.create(**asked, tools=tools, tool_choice="required", parallel_tool_calls=False)
    assert called.choices[0].finish_reason == "tool_calls"
    (call,) = called.choices[0].message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), CITY)
