"""A generation loop that hangs, on a real Ray: the fleet says so, and the replica is replaced with its request.

What hangs is a step of the model: a `sitecustomize` that Ray's processes find has it wait while a file is there.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app.settings import parse_settings
from tests.serve_app.running_app import http_client, running_app
from tests.serve_app.tiny_model import make_model_folder
from tests.waiting import eventually

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
HOLD = """
import pathlib, sys, threading, time

def hold():
    while not hasattr(sys.modules.get("engine.loop"), "GenerationLoop") or not hasattr(
        sys.modules.get("engine.model_runner"), "ModelRunner"
    ):
        time.sleep(0.02)
    sys.modules["engine.loop"].HANG_S = 2.0
    runner = sys.modules["engine.model_runner"].ModelRunner
    launch = runner.launch

    def launch_later(self, plan):
        while pathlib.Path({flag!r}).exists():
            time.sleep(0.02)
        return launch(self, plan)

    runner.launch = launch_later

threading.Thread(target=hold, daemon=True).start()
"""


@pytest.fixture(scope="module")
def flag(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flag") / "hold"


@pytest.fixture(scope="module")
def url(flag: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(HOLD.format(flag=str(flag)))
    settings = parse_settings(
        {
            "model": make_model_folder(tmp_path_factory.mktemp("model")),
            "served_model_name": "tiny",
            "engine": {"page_size": 16, "num_blocks": 256},
            "replicas": {"torch_threads": 1, "health_check_period_s": 1, "graceful_shutdown_timeout_s": 1},
            "weights": {"heartbeat_interval_s": 0.5},
        }
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{folder}:{ROOT}")
        with running_app(settings) as root:
            yield root


async def test_a_hung_loop_is_said_to_be_and_its_request_is_answered_by_another_replica(url: str, flag: Path) -> None:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    async with http_client(url) as http:

        async def health() -> int:
            return (await http.get("/health")).status_code

        expected = (await http.post("/v1/completions", json=body)).json()["choices"][0]["text"]
        assert await health() == 200
        await asyncio.to_thread(flag.touch)
        asked = asyncio.create_task(http.post("/v1/completions", json=body, timeout=120))
        try:
            await eventually(health, until=lambda status: status == 503)
            assert "is hung or dead" in (await http.get("/health")).text
        finally:
            await asyncio.to_thread(flag.unlink)
        answer = await asked
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == expected
        await eventually(health, until=lambda status: status == 200)
