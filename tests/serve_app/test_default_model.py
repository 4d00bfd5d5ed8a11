"""The default model behind the whole application: it knows the capital of France."""

from collections.abc import Iterator

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
    with running_app(parse_settings({"replicas": {"graceful_shutdown_timeout_s": 1}})) as root:
        yield root


async def test_chat_answers_by_the_models_own_template(url: str) -> None:
    async with http_client(url) as http:
        body = {"model": "smollm2-135m-instruct", "messages": [QUESTION], "temperature": 0}
        answer = (await http.post("/v1/chat/completions", json=body)).json()
        assert answer["choices"][0]["message"]["content"] == ANSWER
        assert answer["choices"][0]["finish_reason"] == "stop"
        streamed = (await http.post("/v1/chat/completions", json=body | {"stream": True})).text
        assert streamed.rstrip().endswith("data: [DONE]")
