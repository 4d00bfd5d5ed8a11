"""Storms over HTTP on a real engine: everything the document allows, every parameter, and clients that leave.

Beside each of them a witness streams, and its text must not change; at the end nothing is left of anybody.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as hypothesis_settings

from serve_app.settings import parse_settings
from tests.serve_app.local_app import DEADLINE_S, LocalApp, local_app
from tests.serve_app.tiny_model import make_model_folder
from tests.waiting import eventually

pytestmark = pytest.mark.slow
MODEL = "tiny"
WITNESS: dict[str, Any] = {
    "model": MODEL,
    "prompt": "a witness",
    "max_tokens": 100,
    "temperature": 1.0,
    "seed": 7,
    "ignore_eos": True,
}
USER = {"role": "user", "content": "hi"}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalApp]:
    folder = make_model_folder(Path(tmp_path_factory.mktemp("model")) / "base", max_position_embeddings=128)
    engine = {"page_size": 16, "num_blocks": 48, "scheduler_type": "priority"}
    # The document allows to ask for a weight version that never comes.
    limits = {"max_choices": 4, "max_queued_requests": 2000, "version_wait_s": 0.2}
    with local_app(
        parse_settings({"model": folder, "served_model_name": MODEL, "engine": engine, "limits": limits})
    ) as running:
        yield running


async def witnessed(http: httpx.AsyncClient) -> str:
    """Gives the text of the witness's stream."""
    text = ""
    async with http.stream("POST", COMPLETIONS, json={**WITNESS, "stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    return text


@asynccontextmanager
async def witness(app: LocalApp) -> AsyncIterator[httpx.AsyncClient]:
    """A client, and beside it witnesses all the time, each of which says what the first one said."""
    async with httpx.AsyncClient(
        base_url=app.url, timeout=DEADLINE_S, limits=httpx.Limits(max_connections=None)
    ) as http:
        expected = await witnessed(http)
        is_over = False

        async def watch() -> int:
            num_seen = 0
            while not is_over:
                assert await witnessed(http) == expected
                num_seen += 1
            return num_seen

        watching = asyncio.ensure_future(watch())
        yield http
        is_over = True
        assert await watching > 0
    await eventually(app.is_idle)
    with app.manager.pause(weights_changed=False):
        app.manager._loop._scheduler.check_invariants()


@pytest.mark.parametrize(("method", "path"), [
    ("POST", CHAT), ("POST", COMPLETIONS), ("POST", "/tokenize"), ("POST", "/detokenize"), ("POST", "/v1/abort"),
    ("GET", "/v1/models"), ("GET", "/v1/models/{name}"), ("GET", "/health"), ("GET", "/ready"),
])  # fmt: skip
def test_nothing_that_the_document_allows_is_an_error_of_ours(app: LocalApp, method: str, path: str) -> None:
    document = httpx.get(f"{app.url}/openapi.json").json()
    for name in ("ChatRequest", "CompletionRequest"):
        # So that more than the refusal of an unknown model is tried.
        document["components"]["schemas"][name]["properties"]["model"] = {"const": MODEL}
    operation = schemathesis.openapi.from_dict(document)[path][method]

    @hypothesis_settings(
        max_examples=40, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck),
        # Without shrinking, which asks for minutes and would hide what failed behind the limit of a test.
        phases=[Phase.explicit, Phase.generate],
    )  # fmt: skip
    @given(case=operation.as_strategy())
    def ask(case: Any) -> None:
        response = case.call(base_url=app.url, timeout=DEADLINE_S)
        is_late = response.status_code == 504 and case.body.get("timeout") is not None
        assert response.status_code < 500 or is_late, response.text
        if response.status_code >= 400:
            assert response.json()["error"]["message"]

    ask()


FUZZ: dict[str, list[Any]] = {
    "n": [0, 1, 3, 5, 10**9, -1, "2", True],
    "temperature": [0, 0.5, 2, 2.1, -1, "hot", 1e999],
    "top_p": [0, 0.1, 1, 2],
    "top_k": [-1, 0, 1, 5, 10**6, -2],
    "min_p": [0, 0.5, 1, 2],
    "seed": [0, -1, 2**63, 2**63 - 1, 1.5],
    "frequency_penalty": [-2, 2, 3],
    "presence_penalty": [-2, 2, "x"],
    "repetition_penalty": [0, 0.1, 100, 101],
    "logit_bias": [{}, {"5": 100}, {"5": -100, "6": -100}, {"999": 1}, {"x": 1}, {str(i): 1 for i in range(2000)}],
    "bad_words": [[], ["a"], ["日本"], [""], ["x" * 300], ["a"] * 2000],
    "allowed_token_ids": [[5], [5, 6], [], [-1], [9999]],
    "min_tokens": [0, 5, 50, 500, -1],
    "max_tokens": [0, 1, 5, 20, 500, -1],
    "ignore_eos": [True, False, 1],
    "stop": ["a", ["a", "b"], [], "", ["x"] * 50, "日本"],
    "stop_token_ids": [[5], [], list(range(256)), [-1], [10**9]],
    "include_stop_str_in_output": [True, False],
    "skip_special_tokens": [True, False],
    "logprobs": [True, 0, 3, 20, 21],
    "top_logprobs": [0, 2, 20, 21],
    "prompt_logprobs": [0, 1, 20, 21, -1],
    "echo": [True, False, 1],
    "stream": [True, False],
    "stream_options": [{"include_usage": True}, {"continuous_usage_stats": True}, {}, 5],
    "return_token_ids": [True],
    "return_timings": [True],
    "return_tokens_as_token_ids": [True],
    "priority": [0, -5, 2**31],
    "user": ["me", "", "x" * 2000],
    "hints": [{}, {"expected_output_tokens": 3}, {"x": 1}],
    "truncate_prompt_tokens": [1, 5, -1, 0, 10**9],
    "cache_salt": ["s", ""],
    "best_of": [1, 2],
    "add_generation_prompt": [True, False],
    "continue_final_message": [True, False],
    "chat_template_kwargs": [{}, {"a": [1]}, {"messages": 1}],
    "suffix": ["", "x"],
    "response_format": [{"type": "text"}, {"type": "json_object"}, {"type": "x"}],
    "nonsense": [1],
}


async def test_no_parameter_changes_the_text_of_another_client(app: LocalApp) -> None:
    rng = random.Random(5)
    seen = set()
    async with witness(app) as http:

        async def ask() -> None:
            names = rng.sample(sorted(FUZZ), rng.choice([1, 1, 2, 4, 6]))
            fields = {name: rng.choice(FUZZ[name]) for name in names}
            if "stream_options" in fields:
                fields["stream"] = True
            path = rng.choice([CHAT, COMPLETIONS])
            prompt = rng.choice(["a", "日本語 👩‍👩‍👧‍👦", ["a", "b"], [5, 6, 7], "x" * 200, "", [300]])
            base: dict[str, Any] = {"messages": [USER]} if path == CHAT else {"prompt": prompt}
            content = json.dumps({"model": MODEL, "max_tokens": 8, **base, **fields})
            response = await http.post(path, content=content)
            assert response.status_code in (200, 400), (fields, response.text)
            if response.status_code == 200:
                assert "Infinity" not in response.text
                assert "NaN" not in response.text
            seen.update(names if response.status_code == 200 else ())

        for _ in range(40):
            await asyncio.gather(*(ask() for _ in range(8)))
    assert seen == FUZZ.keys() - {"nonsense"}


async def test_clients_that_leave_in_any_phase_leave_nothing(app: LocalApp) -> None:
    rng = random.Random(6)
    async with witness(app) as http:

        async def leave() -> None:
            body = {
                "model": MODEL, "prompt": "x" * rng.choice([1, 60, 100]), "max_tokens": 20, "ignore_eos": True,
                "n": rng.choice([1, 1, 3]), "stream": rng.random() < 0.5,
            }  # fmt: skip
            if rng.random() < 0.3:
                body["prompt_logprobs"] = 1
            # From before the first byte is read to after the last one.
            with suppress(TimeoutError):
                async with asyncio.timeout(rng.choice([0.0, 0.005, 0.02, 0.1, 0.3])):
                    await http.post(COMPLETIONS, json=body)

        for _ in range(15):
            await asyncio.gather(*(leave() for _ in range(20)))
