"""Two routers over two replicas on a real Ray: prefixes and sessions find their replica, a flood starves nobody."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine import InvalidRequest, SamplingParams, WorkloadHints
from serve_app.client import connect
from serve_app.settings import parse_settings
from tests.serve_app.running_app import APP_NAME, http_client, running_app
from tests.serve_app.tiny_model import make_model_folder
from tests.waiting import eventually

pytestmark = pytest.mark.slow

MODEL = "tiny"
PAGE = 16
NUM_ASKS = 6
FEW = SamplingParams(max_new_tokens=4, temperature=0)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    settings = parse_settings(
        {
            "model": make_model_folder(tmp_path_factory.mktemp("model")),
            "served_model_name": MODEL,
            "engine": {"page_size": PAGE, "num_blocks": 2048, "max_requests_per_batch": 4},
            "replicas": {"min": 2, "max": 2, "num_cpus": 0.25, "torch_threads": 1},
            "routing": {"num_routers": 2},
            "weights": {"heartbeat_interval_s": 0.5},
        }
    )
    with running_app(settings) as root:
        yield root


@pytest.fixture
async def http(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with http_client(url) as client:
        yield client


async def numbers(http: httpx.AsyncClient) -> Counter[str]:
    """The sum of each series over the fleet; of routing and admission by label as well."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families((await http.get("/metrics")).text):
        for sample in family.samples:
            found[sample.name] += sample.value
            for label in ("reason", "kind", "outcome"):
                found[f"{sample.name} {sample.labels.get(label)}"] += sample.value
    return found


async def place_of(prompt: list[int], *, session: str | None = None) -> str:
    """Gives the replica that answers."""
    pitstop = connect(APP_NAME)
    events = [event async for event in pitstop.generate(prompt, FEW, WorkloadHints(session_id=session))]
    assert sum(len(event.token_ids) for event in events) == 4
    return events[-1].replica_id


async def test_prompts_go_where_their_prefix_is_whichever_router_is_asked(http: httpx.AsyncClient) -> None:
    prompts = [[10 * family + i % 7 for i in range(20 * PAGE)] for family in range(8)]
    places: list[Counter[str]] = [Counter() for _ in prompts]
    before = await numbers(http)
    for ask in range(NUM_ASKS):
        for prompt, seen in zip(prompts, places, strict=True):
            seen[await place_of([*prompt, ask])] += 1
    after = await numbers(http)
    at_home = sum(max(seen.values()) for seen in places)
    assert at_home >= 0.9 * NUM_ASKS * len(prompts), places
    assert len({replica for seen in places for replica in seen}) == 2, "both replicas share the prefixes"
    # Every ask but the first of each prompt could find all of it.
    findable = (NUM_ASKS - 1) * len(prompts) * 20 * PAGE
    cached = after["pitstop_cached_prompt_tokens_total"] - before["pitstop_cached_prompt_tokens_total"]
    assert cached >= 0.85 * findable
    expected = after["pitstop_routing_hit_tokens_total expected"]
    assert 0.8 * cached <= expected <= 1.2 * cached
    assert after["pitstop_routing_decisions_total prefix"] >= 0.8 * (NUM_ASKS - 1) * len(prompts)
    assert after["pitstop_routing_decisions_total fallback"] == 0


async def test_a_session_stays_at_its_replica_whichever_router_is_asked(http: httpx.AsyncClient) -> None:
    places: dict[str, Counter[str]] = {f"session {number}": Counter() for number in range(12)}
    for ask in range(NUM_ASKS):
        for session, seen in places.items():
            seen[await place_of([90 + ask, 91, 92], session=session)] += 1
    at_home = sum(max(seen.values()) for seen in places.values())
    assert at_home >= 0.85 * NUM_ASKS * len(places), places
    assert (await numbers(http))["pitstop_routing_decisions_total session"] > 0


@pytest.mark.long
async def test_the_flood_of_one_tenant_leaves_another_its_turn_and_the_late_are_told_when(
    http: httpx.AsyncClient,
) -> None:
    ended: list[str] = []

    async def ask(tenant: str, number: int, **fields: float) -> httpx.Response:
        prompt = [number % 200, 41, 42, 43]
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 60, "ignore_eos": True, "user": tenant, **fields}
        response = await http.post("/v1/completions", json=body)
        ended.append(tenant)
        return response

    async def num_running() -> float:
        return (await numbers(http))["pitstop_requests_running"]

    flood = [asyncio.create_task(ask("flood", number)) for number in range(240)]
    await eventually(num_running, until=lambda running: running >= 8)
    ended.clear()
    late = [asyncio.create_task(ask("late", number)) for number in range(4)]
    too_late = await ask("hasty", 1, timeout=0.05)
    assert too_late.status_code in (400, 429), too_late.text
    assert too_late.json()["error"]["code"] in ("too_late", "deadline_too_short")
    assert (too_late.status_code == 400) or int(too_late.headers["retry-after"]) >= 1
    answers = await asyncio.gather(*late)
    num_before = ended.count("flood")
    left = sum(not task.done() for task in flood)
    assert [answer.status_code for answer in answers] == [200] * 4
    assert left > num_before, f"{num_before} of the flood came first, {left} are left"
    assert {answer.status_code for answer in await asyncio.gather(*flood)} == {200}
    found = await numbers(http)
    assert found["pitstop_admissions_total waited"] > 0
    assert found["pitstop_admissions_total too_late"] + found["pitstop_admissions_total never"] == 1
    await eventually(lambda: is_idle(http))


async def is_idle(http: httpx.AsyncClient) -> bool:
    found = await numbers(http)
    gauges = ("requests_running", "requests_waiting", "requests_waiting_at_router", "queued_tokens_at_router")
    return not any(found[f"pitstop_{gauge}"] for gauge in gauges)


async def test_a_handle_may_ask_for_an_answer_in_time(http: httpx.AsyncClient) -> None:
    pitstop = connect(APP_NAME)
    events = [event async for event in pitstop.generate([1, 2, 3], FEW, timeout_s=30.0)]
    assert events[-1].finish_reason == "length"
    for timeout_s in (0.0, 10**9):
        with pytest.raises(InvalidRequest, match="timeout_s"):
            await anext(pitstop.generate([1, 2, 3], FEW, timeout_s=timeout_s))
