"""A fleet on a real Ray that wakes, grows with its load, shrinks again and falls asleep, without losing a stream.

One Serve for all; the tests follow each other through the life of a day.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from serve_app.settings import parse_settings
from tests.serve_app.running_app import http_client, running_app
from tests.serve_app.tiny_model import make_model_folder
from tests.waiting import eventually

pytestmark = pytest.mark.long

MODEL = "tiny"
MAX_REPLICAS = 3
SCALING_DEADLINE_S = 150.0
"""Two delays, and as long as three replicas take to start on two cores that others use as well."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """None to three replicas, with targets that eight streams of the tiny model exceed and one does not."""
    settings = parse_settings(
        {
            "model": make_model_folder(tmp_path_factory.mktemp("model"), max_position_embeddings=4096),
            "served_model_name": MODEL,
            "engine": {"page_size": 16, "num_blocks": 4096},
            "replicas": {"min": 0, "max": MAX_REPLICAS, "num_cpus": 0.25, "torch_threads": 1},
            "autoscaling": {
                "target_work_s": 0.5,
                "target_token_time_s": 1.0,
                "target_utilisation": 1.0,
                "startup_s": 0,
                "upscale_delay_s": 1.0,
                "downscale_delay_s": 4.0,
                "idle_s": 4.0,
            },
            "weights": {"heartbeat_interval_s": 0.5},
        }
    )
    with running_app(settings) as root:
        yield root


@pytest.fixture
async def http(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with http_client(url) as client:
        yield client


async def complete(http: httpx.AsyncClient, number: int, *, max_tokens: int = 2000) -> None:
    """Reads one whole stream, and asserts that nothing of it is missing."""
    body = {
        "model": MODEL,
        "prompt": [40 + number % 9, 41, 42, 43],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with http.stream("POST", "/v1/completions", json=body, timeout=SCALING_DEADLINE_S) as response:
        assert response.status_code == 200, await response.aread()
        lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
    assert not any("error" in line for line in lines), lines[-1]
    assert lines[-1] == "data: [DONE]"
    assert f'"completion_tokens":{max_tokens}' in lines[-2]


async def look(http: httpx.AsyncClient) -> dict[str, Any]:
    response = await http.get("/admin/weights")
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def num_ready(http: httpx.AsyncClient) -> int:
    return sum(replica["state"] == "ready" for replica in (await look(http))["replicas"])


async def changes(http: httpx.AsyncClient) -> list[tuple[int, int, str]]:
    """All changes of the number of replicas, oldest first."""
    scaling = (await look(http))["scaling"]
    found = scaling["changes"] if scaling else []
    return [(change["before"], change["after"], change["reason"]) for change in reversed(found)]


async def keep_busy(http: httpx.AsyncClient, number: int, stop: asyncio.Event) -> int:
    """Sends one request after the other until it is told to stop, and gives how many were answered whole."""
    num_whole = 0
    while not stop.is_set():
        await complete(http, number)
        num_whole += 1
    return num_whole


async def test_a_sleeping_fleet_is_ready_and_its_first_requests_wake_it(http: httpx.AsyncClient) -> None:
    await eventually(lambda: is_ready(http), deadline_s=SCALING_DEADLINE_S)
    assert (await look(http))["replicas"] == []
    await asyncio.gather(*(complete(http, number, max_tokens=20) for number in range(3)))
    assert await num_ready(http) >= 1
    await eventually(lambda: changes(http), until=lambda seen: (0, 1, "wake") in seen)


async def is_ready(http: httpx.AsyncClient) -> bool:
    return (await http.get("/ready")).status_code == 200


async def test_load_from_one_to_eight_and_back_scales_to_three_and_back_without_flapping(
    http: httpx.AsyncClient,
) -> None:
    before = len(await changes(http))
    stops = [asyncio.Event() for _ in range(8)]
    streams = [asyncio.create_task(keep_busy(http, number, stop)) for number, stop in enumerate(stops)]
    try:
        await eventually(lambda: num_ready(http), until=MAX_REPLICAS.__eq__, deadline_s=SCALING_DEADLINE_S)
        grown = (await changes(http))[before:]
        for stop in stops[1:]:
            stop.set()
        await eventually(lambda: num_ready(http), until=(1).__eq__, deadline_s=SCALING_DEADLINE_S)
    finally:
        for stop in stops:
            stop.set()
    numbers = await asyncio.gather(*streams)
    assert min(numbers) >= 1
    assert [after > before for before, after, _ in grown] == [True] * len(grown)
    assert grown[-1][1] == MAX_REPLICAS
    shrunk = (await changes(http))[before + len(grown) :]
    assert shrunk
    assert all(after < before for before, after, _ in shrunk), shrunk
    assert {reason for *_, reason in grown} <= {"work", "first_token", "token_time", "arrivals"}


async def test_a_fleet_without_requests_falls_asleep_and_can_be_woken_again(http: httpx.AsyncClient) -> None:
    await eventually(lambda: num_ready(http), until=(0).__eq__, deadline_s=SCALING_DEADLINE_S)
    assert await is_ready(http)
    seen = await eventually(lambda: changes(http), until=lambda seen: seen[-1][1] == 0)
    assert seen[-1][2] == "idle"
    await complete(http, 1, max_tokens=20)
    text = (await http.get("/metrics")).text
    assert 'pitstop_scaling_decisions_total{direction="up",reason="wake"}' in text
    assert 'pitstop_scaling_decisions_total{direction="down",reason="idle"}' in text
    assert "pitstop_scaling_failures_total 0.0" in text
