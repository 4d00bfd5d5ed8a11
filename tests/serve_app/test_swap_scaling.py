"""Swaps over a fleet that grows meanwhile, and one whose manifest finds no room on the disk."""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import PitstopError
from serve_app.client import Pitstop, connect
from serve_app.protocol.errors import ManifestError
from serve_app.settings import parse_settings
from tests.serve_app.running_app import APP_NAME, running_app
from tests.serve_app.swap_clients import (
    DEADLINE_S,
    check_serving,
    clients_of,
    make_folders,
    settled,
    swap_or_error,
)

pytestmark = pytest.mark.slow

MAX_REPLICAS = 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return make_folders(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def manifest_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("manifest")


@pytest.fixture(scope="module")
def llm(folders: list[str], manifest_folder: Path) -> Iterator[Pitstop]:
    """One replica, and three as soon as there is work; they stay."""
    settings = parse_settings(
        {
            "model": folders[0],
            "served_model_name": "tiny",
            "engine": {"page_size": 16, "num_blocks": 1024},
            "replicas": {"min": 1, "max": MAX_REPLICAS, "num_cpus": 0.25, "torch_threads": 1},
            "autoscaling": {
                "target_work_s": 0.05,
                "target_token_time_s": 1.0,
                "target_utilisation": 1.0,
                "startup_s": 0,
                "upscale_delay_s": 1.0,
                "downscale_delay_s": 600.0,
            },
            "weights": {"folder": str(manifest_folder), "heartbeat_interval_s": 0.5},
        }
    )
    with running_app(settings):
        yield connect(APP_NAME)


async def test_a_manifest_without_room_leaves_the_old_weights(
    llm: Pitstop, folders: list[str], manifest_folder: Path
) -> None:
    before = await settled(llm, 1)
    async with clients_of(llm, number=2) as clients:
        # What is written first, and then renamed: here it goes to a device that is always full.
        (manifest_folder / "manifest.new").symlink_to("/dev/full")
        result = await swap_or_error(llm, folders[1])
        assert isinstance(result, ManifestError), result
        assert "No space left on device; see to the disk of weights.folder" in str(result)
    assert set(clients.outcomes) == {"length"}
    assert clients.drawn.keys() == {before.committed.version}
    assert (await settled(llm, 1)).committed == before.committed
    assert not isinstance(await swap_or_error(llm, folders[1]), PitstopError)
    await check_serving(llm, folders, 1)


async def test_a_fleet_that_grows_while_swap_follows_swap(llm: Pitstop, folders: list[str]) -> None:
    rng = random.Random(0)
    num_swaps = 0
    deadline = time.monotonic() + DEADLINE_S
    async with clients_of(llm, number=24) as clients:
        while sum(report.state == "ready" for report in (await llm.status()).replicas) < MAX_REPLICAS:
            assert time.monotonic() < deadline, await llm.status()
            result = await swap_or_error(llm, rng.choice(folders))
            assert not isinstance(result, PitstopError), result
            num_swaps += 1
    assert num_swaps > 3
    assert set(clients.outcomes) == {"length"}
    assert len(clients.drawn) > 3
    await check_serving(llm, folders, MAX_REPLICAS)
