"""The whole application on a real Ray with a tiny random model: streams, swaps, scaling, crashes and metrics.

Serve is started once. Each test leaves the application healthy, but not at the same weights or number of replicas.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from engine import InvalidRequest, SamplingParams, WeightsInvalid
from serve_app.client import Completion, connect
from serve_app.metrics import METRICS
from serve_app.settings import AppSettings, parse_settings
from tests.serve_app.running_app import (
    ADMIN_KEY,
    APP_NAME,
    http_client,
    kill_actor_of,
    running_app,
)
from tests.serve_app.tiny_model import changed_weights, make_model_folder
from tests.waiting import eventually

MODEL = "tiny"
MAX_MODEL_LEN = 1024
PROMPT = [40, 41, 42, 43, 44, 45, 46, 47] * 6
"""Three full blocks, so that a second time finds a prefix."""
GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
REFUSED = ("missing", "extra", "misshapen", "non-finite")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Three sets of good weights, and one set for each fault."""
    root = tmp_path_factory.mktemp("weights")
    found = {
        name: make_model_folder(root / name, seed=seed, max_position_embeddings=MAX_MODEL_LEN)
        for seed, name in enumerate(("base", "second", "third"))
    }
    for change in REFUSED:
        found[change] = changed_weights(found["base"], root / change, change=change)
    return found


@pytest.fixture(scope="module")
def settings(folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> AppSettings:
    """One to two replicas, and a target that a burst of the tiny model exceeds."""
    return parse_settings(
        {
            "model": folders["base"],
            "served_model_name": MODEL,
            "seed": 1,
            "engine": {"page_size": 16, "num_blocks": 1024},
            "replicas": {"min": 1, "max": 2, "torch_threads": 1, "graceful_shutdown_timeout_s": 1},
            "autoscaling": {"target_work_s": 2.0, "upscale_delay_s": 0.5, "downscale_delay_s": 3600},
            "weights": {"heartbeat_interval_s": 0.5, "folder": str(tmp_path_factory.mktemp("manifest"))},
        }
    )


@pytest.fixture(scope="module")
def url(settings: AppSettings) -> Iterator[str]:
    with running_app(settings) as root:
        yield root


@pytest.fixture
async def http(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with http_client(url) as client:
        yield client


# How the tests speak to the application


async def complete(http: httpx.AsyncClient, prompt: list[int] | str = PROMPT, **parameters: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 16, **GREEDY, **parameters}
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def stream(http: httpx.AsyncClient, prompt: list[int], **parameters: Any) -> AsyncIterator[dict[str, Any]]:
    """The chunks of one streamed completion; an error event of the server ends it like any chunk."""
    body = {"model": MODEL, "prompt": prompt, "stream": True, **GREEDY, **parameters}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))


async def begin(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    """The same chunks, once the first of them has come."""
    first = await anext(chunks)

    async def all_of_them() -> AsyncIterator[dict[str, Any]]:
        yield first
        async for chunk in chunks:
            yield chunk

    return all_of_them()


async def read(chunks: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
    """All of a stream: token ids, version spans, finish reason, error."""
    found: dict[str, Any] = {"token_ids": [], "spans": [], "finish_reason": None, "error": None}
    async for chunk in chunks:
        found["error"] = chunk.get("error") or found["error"]
        for choice in chunk.get("choices", []):
            found["token_ids"] += choice.get("token_ids") or []
            found["spans"] = choice.get("weight_versions") or found["spans"]
            found["finish_reason"] = choice["finish_reason"] or found["finish_reason"]
    return found


async def fleet(http: httpx.AsyncClient) -> dict[str, Any]:
    response = await http.get("/admin/weights")
    assert response.status_code == 200, response.text
    status: dict[str, Any] = response.json()
    return status


async def swap(http: httpx.AsyncClient, path: str, **parameters: Any) -> httpx.Response:
    return await http.post("/admin/weights", json={"source": {"path": path}, **parameters})


async def numbers(http: httpx.AsyncClient) -> dict[str, float]:
    """Every metric of ours, summed over its labels."""
    response = await http.get("/metrics")
    assert response.status_code == 200, response.text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


async def is_idle(http: httpx.AsyncClient) -> bool:
    found = await numbers(http)
    busy = ("pitstop_requests_running", "pitstop_requests_waiting", "pitstop_kv_blocks_used")
    return all(found[name] == 0 for name in busy)


async def committed(http: httpx.AsyncClient) -> int:
    version: int = (await fleet(http))["version"]
    return version


def expected_tokens(folder: str, *, num_tokens: int = 16) -> list[int]:
    """What plain `generate` gives for PROMPT under the weights of a folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    output = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False, eos_token_id=None
    )
    tokens: list[int] = output[0, len(PROMPT) :].tolist()
    return tokens


# Answers


async def test_chat_answers_and_its_stream_gives_the_same_text(http: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 24, "temperature": 0}
    response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["usage"]["completion_tokens"] == 24
    assert answer["choices"][0]["finish_reason"] == "length"
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    lines = (await http.post("/v1/chat/completions", json=body)).text.split("\n\n")
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    text = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
    assert text == answer["choices"][0]["message"]["content"]
    assert chunks[-1]["usage"] == answer["usage"] | {
        "prompt_tokens_details": chunks[-1]["usage"]["prompt_tokens_details"]
    }


async def test_token_ids_in_give_the_tokens_of_plain_generate(http: httpx.AsyncClient, folders: dict[str, str]) -> None:
    answer = await complete(http)
    assert answer["choices"][0]["token_ids"] == expected_tokens(folders["base"])
    assert answer["choices"][0]["weight_versions"] == [{"version": 1, "start": 0, "end": 16}]


async def test_the_official_client_works_unchanged(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
        assert [model.id for model in (await client.models.list()).data] == [MODEL]
        answer = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=8, temperature=0
        )
        chunks = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=8, temperature=0, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
        assert text == answer.choices[0].message.content
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.completions.create(model=MODEL, prompt="Hi", temperature=7)
        with pytest.raises(openai.NotFoundError, match="gpt-4"):
            await client.completions.create(model="gpt-4", prompt="Hi")


async def test_health_and_readiness_answer(http: httpx.AsyncClient) -> None:
    assert (await http.get("/health")).status_code == 200
    assert (await http.get("/ready")).status_code == 200


async def test_the_handle_gives_tokens_with_their_version(http: httpx.AsyncClient) -> None:
    handle: Any = serve.get_app_handle(APP_NAME)
    events = handle.options(stream=True).generate.remote(PROMPT, SamplingParams(temperature=0.0, max_new_tokens=12))
    tokens: list[int] = []
    spans = []
    async for event in events:
        tokens += event.token_ids
        spans += event.weight_versions
    assert tokens == (await complete(http, max_tokens=12))["choices"][0]["token_ids"]
    assert {span.version for span in spans} == {await committed(http)}
    assert sum(span.end - span.start for span in spans) == 12


# Isolation


async def test_leaving_a_stream_ends_it_in_the_engine(http: httpx.AsyncClient) -> None:
    before = (await numbers(http)).get("pitstop_generated_tokens_total", 0)
    async with aclosing(stream(http, PROMPT, max_tokens=900)) as chunks:
        async for _ in chunks:
            break
    await eventually(lambda: is_idle(http), until=bool, deadline_s=10)
    assert (await numbers(http))["pitstop_generated_tokens_total"] - before < 900


async def test_bad_requests_beside_a_stream_change_none_of_its_tokens(http: httpx.AsyncClient) -> None:
    alone = (await read(stream(http, PROMPT, max_tokens=300)))["token_ids"]
    bad: list[dict[str, Any]] = [
        {"prompt": []},
        {"prompt": ""},
        {"prompt": [10**6]},
        {"prompt": [-1]},
        {"prompt": [1] * (MAX_MODEL_LEN + 1)},
        {"prompt": [1] * 500, "max_tokens": 600},
        {"prompt": {"text": "no"}},
        {"prompt": "x", "temperature": "hot"},
        {"prompt": "x", "top_p": 0},
        {"prompt": "x", "unheard_of": 1},
        {"prompt": "x", "seed": 2**70},
        {"prompt": "x", "n": 0},
        {"prompt": "x", "n": 10**6},
        {"prompt": "x", "best_of": 3},
    ]
    witness = asyncio.get_running_loop().create_task(read(stream(http, PROMPT, max_tokens=300)))
    answers = await asyncio.gather(
        *(http.post("/v1/completions", json={"model": MODEL, "max_tokens": 4, **body}) for body in bad),
        http.post("/v1/completions", content=b"{not json", headers={"Content-Type": "application/json"}),
    )
    for body, answer in zip([*bad, {}], answers, strict=True):
        assert answer.status_code in (400, 422), f"{body}: {answer.status_code} {answer.text}"
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert (await witness)["token_ids"] == alone
    await eventually(lambda: is_idle(http), until=bool)


# Weights


@pytest.mark.parametrize("change", REFUSED)
async def test_faulty_weights_are_refused_by_name_and_nothing_changes(
    http: httpx.AsyncClient, folders: dict[str, str], change: str
) -> None:
    before, tokens = await fleet(http), (await complete(http))["choices"][0]["token_ids"]
    response = await swap(http, folders[change])
    assert response.status_code == 400, response.text
    assert "mlp.down_proj.weight" in response.json()["error"]["message"]
    assert await committed(http) == before["version"]
    after = await complete(http)
    assert after["choices"][0]["token_ids"] == tokens
    assert after["choices"][0]["weight_versions"] == [{"version": before["version"], "start": 0, "end": 16}]


async def test_admin_routes_want_the_key(url: str, folders: dict[str, str]) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=30) as stranger:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": ADMIN_KEY}):
            assert (await stranger.get("/admin/weights", headers=headers)).status_code == 401
            body = {"source": {"path": folders["second"]}}
            assert (await stranger.post("/admin/weights", headers=headers, json=body)).status_code == 401


async def test_a_swap_under_load_fails_no_stream_and_forgets_the_old_prefixes(
    http: httpx.AsyncClient, folders: dict[str, str]
) -> None:
    before = await committed(http)
    await complete(http)
    assert (await complete(http))["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    prompts = [[seat, *PROMPT] for seat in range(8)]
    streams = [await begin(stream(http, prompt, max_tokens=700)) for prompt in prompts]
    response = await swap(http, folders["second"])
    assert response.status_code == 200, response.text
    result = response.json()
    assert (result["version"], result["lagging"]) == (before + 1, [])
    assert 0 < result["paused_s"] < 1
    fresh = await complete(http)
    assert fresh["choices"][0]["token_ids"] == expected_tokens(folders["second"])
    assert fresh["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    for found in await asyncio.gather(*(read(chunks) for chunks in streams)):
        assert (found["finish_reason"], found["error"]) == ("length", None)
        assert [span["version"] for span in found["spans"]] == [before, before + 1]
        assert found["spans"][-1]["end"] == 700
        assert found["spans"][0]["end"] == found["spans"][1]["start"]
    status = await fleet(http)
    assert {replica["version"] for replica in status["replicas"]} == {before + 1}


async def test_requests_meet_the_weights_they_ask_for(http: httpx.AsyncClient, folders: dict[str, str]) -> None:
    old = await committed(http)
    next_one = asyncio.create_task(complete(http, min_weight_version=old + 1))
    pinned = [await begin(stream(http, [seat, *PROMPT], max_tokens=200, weight_version=old)) for seat in range(2)]
    response = await swap(http, folders["base"])
    assert response.status_code == 200, response.text
    answer = (await next_one)["choices"][0]
    assert answer["weight_versions"] == [{"version": old + 1, "start": 0, "end": 16}]
    assert answer["token_ids"] == expected_tokens(folders["base"])
    for found in await asyncio.gather(*(read(chunks) for chunks in pinned)):
        # Finished first, or ended, as the swap asks.
        assert (found["finish_reason"] in {"length", "weight_version_gone"}, found["error"]) == (True, None)
        assert found["spans"] == [{"version": old, "start": 0, "end": len(found["token_ids"])}]
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4}
    gone = await http.post("/v1/completions", json=body | {"weight_version": old})
    assert (gone.status_code, gone.json()["error"]["code"]) == (409, "weight_version_gone")
    assert (await complete(http, weight_version=old + 1))["choices"][0]["weight_versions"][0]["version"] == old + 1
    assert (await numbers(http))["pitstop_version_refusals_total"] == 1


async def test_the_python_client_generates_swaps_and_raises_the_engines_errors(
    http: httpx.AsyncClient, folders: dict[str, str]
) -> None:
    llm = connect(APP_NAME)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=12, eos_token_ids=(), logprobs=True)
    good, empty, foreign = await llm.generate_batch([PROMPT, [], [10**6]], sampling)
    assert isinstance(empty, InvalidRequest)
    assert isinstance(foreign, InvalidRequest)
    assert isinstance(good, Completion)
    assert good.token_ids == (await complete(http, max_tokens=12))["choices"][0]["token_ids"]
    assert len(good.logprobs) == 12
    with pytest.raises(WeightsInvalid, match=r"mlp\.down_proj\.weight"):
        await llm.swap_weights(folders["missing"])
    async with llm.swap(label="from a trainer") as session:
        await session.put(AutoModelForCausalLM.from_pretrained(folders["third"]).named_parameters())
    assert (await llm.status()).committed.version == session.result.version == await committed(http)
    tokens = [token async for event in llm.generate(PROMPT, sampling) for token in event.token_ids]
    assert tokens == expected_tokens(folders["third"], num_tokens=12)


async def test_aborting_requests_in_flight_is_the_callers_choice(
    http: httpx.AsyncClient, folders: dict[str, str]
) -> None:
    chunks = await begin(stream(http, PROMPT, max_tokens=900))
    assert (await swap(http, folders["second"], in_flight="abort")).status_code == 200
    found = await read(chunks)
    assert found["finish_reason"] != "length"
    assert len(found["token_ids"]) < 900


# Scaling and crashes


async def has_replicas(http: httpx.AsyncClient, number: int) -> bool:
    status = await fleet(http)
    version = status["version"]
    ready = [r for r in status["replicas"] if (r["state"], r["version"]) == ("ready", version)]
    return len(ready) == len(status["replicas"]) == number


async def test_load_brings_a_second_replica_that_serves_the_committed_weights(
    http: httpx.AsyncClient, folders: dict[str, str]
) -> None:
    assert (await swap(http, folders["third"])).status_code == 200
    version = await committed(http)

    async def keep_busy() -> None:
        while True:
            await read(stream(http, PROMPT, max_tokens=900))

    # Three times what the cache holds at once, so that it is more than the target on the fastest of machines.
    load = [asyncio.get_running_loop().create_task(keep_busy()) for _ in range(48)]
    try:
        await eventually(lambda: has_replicas(http, 2), until=bool)
        spans = [(await complete(http, max_tokens=4))["choices"][0]["weight_versions"] for _ in range(8)]
        assert {span["version"] for found in spans for span in found} == {version}
        await eventually(lambda: served_by_both(http), until=bool)
    finally:
        for task in load:
            task.cancel()
        await asyncio.gather(*load, return_exceptions=True)
    await eventually(lambda: is_idle(http), until=bool)


async def served_by_both(http: httpx.AsyncClient) -> bool:
    generated = await by_replica(http, "pitstop_generated_tokens")
    return len(generated) == 2 and all(generated.values())


async def by_replica(http: httpx.AsyncClient, name: str) -> dict[int, float]:
    """One metric, by the numbers of replicas."""
    text = (await http.get("/metrics")).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    return {int(sample.labels["replica"]): sample.value for sample in families[name].samples}


async def test_a_swap_reaches_both_replicas(http: httpx.AsyncClient, folders: dict[str, str]) -> None:
    await eventually(lambda: has_replicas(http, 2), until=bool)
    result = (await swap(http, folders["second"])).json()
    assert len(result["replicas"]) == 2
    # A report of during the pause may still come after the answer.
    await eventually(lambda: has_replicas(http, 2), until=bool)
    tokens = [(await complete(http))["choices"][0]["token_ids"] for _ in range(6)]
    assert all(found == expected_tokens(folders["second"]) for found in tokens)


async def test_a_rolling_swap_is_read_back_and_a_part_names_what_it_left(
    http: httpx.AsyncClient, folders: dict[str, str], tmp_path: Path
) -> None:
    await eventually(lambda: has_replicas(http, 2), until=bool)
    whole = await swap(http, folders["second"], strategy="rolling", verify=True, in_flight="finish")
    assert whole.status_code == 200, whole.text
    assert whole.json()["verified"] == whole.json()["replicas"]
    assert len(whole.json()["verified"]) == 2
    name = "lm_head.weight"
    with safe_open(Path(folders["third"]) / "model.safetensors", framework="pt") as stored:
        save_file({name: stored.get_tensor(name)}, tmp_path / "model.safetensors")
    part = (await swap(http, str(tmp_path), partial=True)).json()
    assert name not in part["unchanged"]
    assert "model.embed_tokens.weight" in part["unchanged"]
    assert part["digest"] != whole.json()["digest"]


async def test_a_leased_pause_holds_requests_back_until_it_ends(http: httpx.AsyncClient) -> None:
    lease = (await http.post("/admin/pause", json={"lease_s": 60.0})).json()
    assert len(lease["replicas"]) == 2
    answer = asyncio.get_running_loop().create_task(complete(http))
    shown = await fleet(http)
    assert [pause["lease_id"] for pause in shown["pauses"]] == [lease["lease_id"]]
    paused = await eventually(lambda: fleet(http), until=lambda one: states(one) == {"paused"})
    assert paused["pauses"]
    renewed = await http.post(f"/admin/pause/{lease['lease_id']}/renew", json={"lease_s": 50.0})
    assert renewed.json()["lease_s"] == 50.0
    assert not answer.done()
    assert (await http.post("/admin/resume", json={})).json() == {"ended": [lease["lease_id"]]}
    assert (await answer)["choices"][0]["token_ids"]
    again = await http.post(f"/admin/pause/{lease['lease_id']}/renew", json={})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "lease_gone")


def states(status: dict[str, Any]) -> set[str]:
    return {replica["state"] for replica in status["replicas"]}


async def test_of_swaps_at_once_all_but_one_are_refused_with_its_id(
    http: httpx.AsyncClient, folders: dict[str, str]
) -> None:
    async def in_conflict() -> tuple[list[httpx.Response], list[httpx.Response]]:
        # A swap of so small a model may be over before the next one arrives: then both are right to succeed.
        answers = await asyncio.gather(*(swap(http, folders["third"]) for _ in range(4)))
        assert {answer.status_code for answer in answers} <= {200, 409}
        refused = [answer for answer in answers if answer.status_code == 409]
        return [answer for answer in answers if answer.status_code == 200], refused

    taken, refused = await eventually(in_conflict, until=lambda found: bool(found[1]))
    ids = [answer.json()["swap_id"] for answer in taken]
    assert all(any(one in answer.json()["error"]["message"] for one in ids) for answer in refused)


async def test_streams_of_a_killed_replica_go_on_elsewhere_and_it_is_replaced(
    http: httpx.AsyncClient, folders: dict[str, str]
) -> None:
    await eventually(lambda: has_replicas(http, 2), until=bool)
    version = await committed(http)
    names = {replica["number"]: replica["replica_id"] for replica in (await fleet(http))["replicas"]}
    streams = [await begin(stream(http, [seat, *PROMPT], max_tokens=900)) for seat in range(8)]
    running = await by_replica(http, "pitstop_requests_running")
    # Where most of them are: the router may have found one replica too slow for any.
    victim = names[max(running, key=lambda number: running[number])]
    kill_actor_of("EngineReplica", replica_id=victim)
    async with asyncio.timeout(60):
        found = await asyncio.gather(*(read(chunks) for chunks in streams))
    assert [one["error"] for one in found] == [None] * 8
    assert {(one["finish_reason"], len(one["token_ids"])) for one in found} == {("length", 900)}
    resumed = [line for line in (await http.get("/metrics")).text.splitlines() if 'reason="lost"' in line]
    assert sum(float(line.split()[-1]) for line in resumed) > 0, "nothing ran on the replica that was killed"

    async def is_replaced() -> bool:
        names = {replica["replica_id"] for replica in (await fleet(http))["replicas"]}
        return victim not in names and await has_replicas(http, 2)

    await eventually(is_replaced, until=bool)
    assert await committed(http) == version
    tokens = [(await complete(http))["choices"][0]["token_ids"] for _ in range(6)]
    assert all(one == expected_tokens(folders["third"]) for one in tokens)


async def test_a_killed_controller_recovers_the_version_from_the_replicas(
    http: httpx.AsyncClient, folders: dict[str, str]
) -> None:
    before = (await fleet(http))["committed"]
    assert before["version"] > 1
    assert (await http.get("/ready")).status_code == 200
    kill_actor_of("WeightController")
    assert (await http.get("/ready")).status_code == 200, "replicas serve on without it"

    async def status_code() -> int:
        return (await http.get("/admin/weights")).status_code

    await eventually(status_code, until=lambda code: code == 200)
    after = (await fleet(http))["committed"]
    assert (after["version"], after["source"]) == (before["version"], before["source"])
    await eventually(lambda: has_replicas(http, 2), until=bool)
    response = await swap(http, folders["base"])
    assert response.status_code == 200, response.text
    assert response.json()["version"] == before["version"] + 1
    assert (await complete(http))["choices"][0]["token_ids"] == expected_tokens(folders["base"])


async def test_a_rollback_brings_the_weights_of_before_back(http: httpx.AsyncClient, folders: dict[str, str]) -> None:
    swapped = (await swap(http, folders["third"], label="step 100", idempotency_key="once")).json()
    assert (await swap(http, folders["second"])).status_code == 200
    assert (await swap(http, folders["third"], idempotency_key="once")).json() == swapped
    response = await http.post("/admin/weights/rollback", json={"version": swapped["version"]})
    assert response.status_code == 200, response.text
    assert (await complete(http))["choices"][0]["token_ids"] == expected_tokens(folders["third"])
    shown = await fleet(http)
    assert (shown["version"], shown["source"]["path"]) == (swapped["version"] + 2, folders["third"])
    assert shown["label"] == f"rollback of {swapped['version'] + 1} to {swapped['version']}"
    assert shown["history"][2]["label"] == "step 100"


# Numbers


async def test_the_metrics_have_moved_and_every_one_is_there(http: httpx.AsyncClient) -> None:
    text = (await http.get("/metrics")).text
    found = await numbers(http)
    for spec in METRICS:
        assert f"# TYPE {spec.name} {spec.kind}" in text
    for name in (
        "pitstop_generated_tokens_total",
        "pitstop_steps_total",
        "pitstop_requests_total",
        "pitstop_weight_commits_total",
        "pitstop_time_to_first_token_seconds_count",
        "pitstop_http_requests_total",
        "pitstop_routing_decisions_total",
        "pitstop_swaps_total",
        "pitstop_committed_weight_version",
    ):
        assert found[name] > 0, name
    await eventually(lambda: is_idle(http), until=bool)
