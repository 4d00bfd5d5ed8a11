"""Streams that ask for versions while the weights change every second: right answers or a clean 409, nothing else.

The weights of a version always draw one token, so that a wrong span shows in the answer.
"""

import asyncio
import json
import logging
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from engine import SamplingParams, WeightVersionGone
from serve_app.client import Completion, Pitstop, connect
from serve_app.protocol.errors import WeightVersionUnavailable
from serve_app.settings import AppSettings, parse_settings
from tests.serve_app.running_app import APP_NAME, http_client, running_app
from tests.serve_app.tiny_model import make_folder_that_draws
from tests.waiting import eventually

pytestmark = pytest.mark.slow

logger = logging.getLogger(__name__)

NUM_STREAMS, NUM_SWAPS, SWAP_EVERY_S = 64, 20, 1.0
TOKENS = (40, 50, 60)
"""Drawn by versions 1, 2 and 3, then again by 4, 5 and 6, and so on."""
REFUSED = "refused"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("weights")
    return [make_folder_that_draws(token, root / str(token)) for token in TOKENS]


@pytest.fixture(scope="module")
def url(folders: list[str]) -> Iterator[str]:
    settings: AppSettings = parse_settings(
        {
            "model": folders[0],
            "served_model_name": "tiny",
            "engine": {"page_size": 16, "num_blocks": 1024},
            "replicas": {"min": 2, "max": 2, "torch_threads": 1, "graceful_shutdown_timeout_s": 1},
            "weights": {"heartbeat_interval_s": 0.5},
            "limits": {"version_wait_s": 5},
        }
    )
    with running_app(settings) as root:
        yield root


class Storm:
    """Asks in random ways until told to stop, and looks at every answer."""

    def __init__(self, http: httpx.AsyncClient, llm: Pitstop) -> None:
        self._http = http
        self._llm = llm
        self.newest = 1
        self.is_over = False
        self.outcomes: Counter[str] = Counter()

    async def run(self, seed: int) -> None:
        """One client, with one request at a time."""
        rng = random.Random(seed)
        while not self.is_over:
            wish = self._wish(rng)
            ask = rng.choice([self._plain, self._stream, self._handle])
            answer = await ask([seed % 256, rng.randrange(256)] * 10, rng.randint(1, 60), wish)
            if answer == REFUSED:
                assert wish, "a request that asked for no version was refused"
                self.outcomes["/".join([*wish, REFUSED])] += 1
                continue
            tokens, spans, reason = answer
            self.outcomes["/".join([*wish, reason])] += 1
            _check(tokens, spans, reason, wish)

    def _wish(self, rng: random.Random) -> dict[str, int]:
        version = max(1, self.newest + rng.randint(-1, 1))
        return rng.choice([{}, {"min_weight_version": version}, {"weight_version": version}])

    async def _plain(self, prompt: list[int], length: int, wish: dict[str, int]) -> Any:
        response = await self._http.post("/v1/completions", json=_body(prompt, length, wish))
        if response.status_code == 409:
            return _refusal(response.json())
        assert response.status_code == 200, response.text
        return _read([response.json()])

    async def _stream(self, prompt: list[int], length: int, wish: dict[str, int]) -> Any:
        body = _body(prompt, length, wish) | {"stream": True}
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
        if response.status_code == 409:
            return _refusal(json.loads(lines[0]))
        assert (response.status_code, lines[-1]) == (200, "[DONE]"), lines
        return _read([json.loads(line) for line in lines[:-1]])

    async def _handle(self, prompt: list[int], length: int, wish: dict[str, int]) -> Any:
        sampling = SamplingParams(temperature=0.0, max_new_tokens=length, eos_token_ids=())
        (output,) = await self._llm.generate_batch([prompt], sampling, **wish)
        if isinstance(output, WeightVersionGone | WeightVersionUnavailable):
            return REFUSED
        assert isinstance(output, Completion), output
        spans = [(span.version, span.start, span.end) for span in output.weight_versions]
        return output.token_ids, spans, output.finish_reason


async def test_every_answer_is_right_or_a_clean_refusal(url: str, folders: list[str]) -> None:
    async with http_client(url) as http:
        storm = Storm(http, connect(APP_NAME))
        clients = [asyncio.create_task(storm.run(seed)) for seed in range(NUM_STREAMS)]
        rng = random.Random(0)
        for number in range(1, NUM_SWAPS + 1):
            await asyncio.wait(clients, timeout=SWAP_EVERY_S, return_when=asyncio.FIRST_EXCEPTION)
            body = {
                "source": {"path": folders[number % len(folders)]},
                "in_flight": rng.choice(["keep", "recompute"]),
                "strategy": rng.choice(["synchronous", "rolling"]),
                "pinned": rng.choice(["finish", "end"]),
            }
            response = await http.post("/admin/weights", json=body)
            assert response.status_code == 200, response.text
            storm.newest = response.json()["version"]
        storm.is_over = True
        await asyncio.gather(*clients)
        logger.info("event=storm_over outcomes=%s", dict(storm.outcomes))
        assert storm.newest == NUM_SWAPS + 1
        for outcome in ("length", "min_weight_version/length", "weight_version/length", "weight_version/refused"):
            assert storm.outcomes[outcome] > 0, storm.outcomes

        async def num_busy() -> float:
            text = (await http.get("/metrics")).text
            lines = [
                line for line in text.splitlines() if line.startswith(("pitstop_requests_r", "pitstop_kv_blocks_u"))
            ]
            return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

        await eventually(num_busy, until=lambda busy: busy == 0)


def _check(tokens: list[int], spans: list[tuple[int, int, int]], reason: str, wish: dict[str, int]) -> None:
    assert reason == "length" or ("weight_version" in wish and reason == "weight_version_gone"), reason
    assert [start for _, start, _ in spans] == [0, *(end for *_, end in spans[:-1])], spans
    versions = [version for version, start, end in spans for _ in range(start, end)]
    assert versions == sorted(versions)
    assert tokens == [TOKENS[(version - 1) % len(TOKENS)] for version in versions], (tokens, spans)
    assert min(versions) >= wish.get("min_weight_version", 1)
    assert set(versions) == {wish.get("weight_version", versions[0])} or "weight_version" not in wish


def _body(prompt: list[int], length: int, wish: dict[str, int]) -> dict[str, Any]:
    fields = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "max_tokens": length}
    return {"model": "tiny", "prompt": prompt, **fields, **wish}


def _refusal(body: dict[str, Any]) -> str:
    assert body["error"]["code"] in {"weight_version_gone", "weight_version_unavailable"}, body
    return REFUSED


def _read(chunks: list[dict[str, Any]]) -> tuple[list[int], list[tuple[int, int, int]], str]:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    spans = [(span["version"], span["start"], span["end"]) for span in choices[-1]["weight_versions"]]
    return [token for choice in choices for token in choice["token_ids"]], spans, choices[-1]["finish_reason"]
