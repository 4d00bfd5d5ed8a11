"""Two routers before one fleet: what a client asks of one of them is found wherever it is."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from serve_app.settings import parse_settings
from tests.serve_app.running_app import http_client, running_app
from tests.serve_app.tiny_model import make_model_folder
from tests.waiting import eventually

pytestmark = pytest.mark.slow

NUM_STREAMS = 12
"""Serve takes the less busy of its routers, so that both get some."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = make_model_folder(Path(tmp_path_factory.mktemp("model")) / "base", max_position_embeddings=4096)
    settings = parse_settings(
        {
            "model": folder,
            "served_model_name": "tiny",
            "engine": {"page_size": 16, "num_blocks": 4096},
            "replicas": {"torch_threads": 1, "graceful_shutdown_timeout_s": 1},
            "routing": {"num_routers": 2},
        }
    )
    with running_app(settings) as root:
        yield root


async def reason_of(http: httpx.AsyncClient, request_id: str, started: asyncio.Semaphore) -> str:
    """Gives why a long stream ended; says when it has begun."""
    body = {"model": "tiny", "prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    headers = {"x-request-id": request_id}
    last = ""
    async with http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                if not last:
                    started.release()
                last = line
    return last


async def test_an_abort_finds_its_request_at_either_router(url: str) -> None:
    started = asyncio.Semaphore(0)
    async with http_client(url) as http:
        streams = [asyncio.ensure_future(reason_of(http, f"r{index}", started)) for index in range(NUM_STREAMS)]
        for _ in streams:
            await started.acquire()
        for index in range(NUM_STREAMS):
            answer = await http.post("/v1/abort", json={"request_id": f"r{index}"})
            assert answer.json() == {"num_aborted": 1}
        for last in await asyncio.gather(*streams):
            assert '"finish_reason":"cancelled"' in last

        async def is_idle() -> bool:
            replicas = (await http.get("/admin/weights")).json()["replicas"]
            return not any(replica["num_running"] + replica["num_waiting"] for replica in replicas)

        await eventually(is_idle)
