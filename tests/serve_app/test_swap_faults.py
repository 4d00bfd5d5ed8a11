"""Swaps while processes are killed and stopped: one version everywhere in the end, nothing paused, nothing lost."""

import asyncio
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from engine import PitstopError
from serve_app.client import Pitstop, connect
from serve_app.messages import SwapResult
from serve_app.settings import parse_settings
from tests.serve_app.running_app import APP_NAME, running_app
from tests.serve_app.swap_clients import (
    check_serving,
    clients_of,
    make_folders,
    processes_of,
    settled,
    swap_or_error,
)

pytestmark = pytest.mark.slow

NUM_REPLICAS = 2
STOPPED_S = 6.0
"""Longer than a replica may be silent, and than any deadline of a swap here."""
NUM_KILLS = 2


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return make_folders(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def llm(folders: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pitstop]:
    settings = parse_settings(
        {
            "model": folders[0],
            "served_model_name": "tiny",
            "engine": {"page_size": 16, "num_blocks": 1024},
            "replicas": {
                "min": NUM_REPLICAS,
                "max": NUM_REPLICAS,
                "torch_threads": 1,
                "graceful_shutdown_timeout_s": 1,
                "health_check_period_s": 1,
            },
            "weights": {
                "folder": str(tmp_path_factory.mktemp("manifest")),
                "heartbeat_interval_s": 0.5,
                "forget_after_s": 3,
                "lease_s": 2,
                "stage_timeout_s": 20,
                "commit_timeout_s": 4,
                "converge_timeout_s": 10,
            },
        }
    )
    with running_app(settings):
        yield connect(APP_NAME)


@pytest.mark.parametrize("strategy", ["synchronous", "rolling"])
async def test_twenty_swaps_in_a_row_fail_no_stream(llm: Pitstop, folders: list[str], strategy: str) -> None:
    await settled(llm)
    async with clients_of(llm, number=32) as clients:
        for number in range(20):
            result = await llm.swap_weights(folders[number % 3], strategy=strategy, verify=number % 5 == 0)
            assert len(result.replicas) == NUM_REPLICAS
            assert not result.lagging
    assert set(clients.outcomes) == {"length"}
    assert len(clients.drawn) > 5
    await check_serving(llm, folders)


@pytest.mark.parametrize("strategy", ["synchronous", "rolling"])
@pytest.mark.parametrize("victim", ["EngineReplica", "WeightController"])
async def test_killed_in_mid_swap(llm: Pitstop, folders: list[str], strategy: str, victim: str) -> None:
    """Kills at random moments of a swap, which the clock of an undisturbed one spans."""
    rng = random.Random(f"{strategy} {victim}")
    await settled(llm)
    started = time.monotonic()
    await llm.swap_weights(folders[1], strategy=strategy)
    usual_s = time.monotonic() - started
    async with clients_of(llm) as clients:
        for number in range(NUM_KILLS):
            before = await settled(llm)
            path = folders[(number + 2) % 3]
            swap = asyncio.create_task(swap_or_error(llm, path, strategy=strategy))
            await asyncio.sleep(rng.uniform(0, usual_s))
            rng.choice(processes_of(victim)).kill()
            result = await swap
            after = await settled(llm)
            if isinstance(result, SwapResult):
                assert after.committed.version == result.version
            assert after.committed.version in (before.committed.version, before.committed.version + 1)
            await check_serving(llm, folders)
    if victim == "WeightController":
        assert set(clients.outcomes) == {"length"}


@pytest.mark.parametrize("strategy", ["synchronous", "rolling"])
async def test_a_replica_that_is_stopped_in_mid_swap(llm: Pitstop, folders: list[str], strategy: str) -> None:
    rng = random.Random(strategy)
    async with clients_of(llm):
        for number in range(NUM_KILLS):
            before = await settled(llm)
            swap = asyncio.create_task(swap_or_error(llm, folders[number % 3], strategy=strategy))
            await asyncio.sleep(rng.uniform(0, 0.3))
            stopped = rng.choice(processes_of("EngineReplica"))
            stopped.suspend()
            try:
                await asyncio.sleep(STOPPED_S)
            finally:
                with suppress(psutil.NoSuchProcess):
                    stopped.send_signal(signal.SIGCONT)
            await swap
            after = await settled(llm)
            assert after.committed.version - before.committed.version in (0, 1)
            await check_serving(llm, folders)


async def test_replicas_that_start_while_swap_follows_swap(llm: Pitstop, folders: list[str]) -> None:
    await settled(llm)
    async with clients_of(llm):
        rng = random.Random(0)
        for _ in range(2):
            victim = rng.choice(processes_of("EngineReplica"))
            victim.kill()
            end = time.monotonic() + 20
            while time.monotonic() < end:
                await swap_or_error(llm, rng.choice(folders))
            await check_serving(llm, folders)


async def test_weights_cut_short_while_they_are_read_are_refused_or_whole(
    llm: Pitstop, folders: list[str], tmp_path: Path
) -> None:
    before = await settled(llm)
    whole = (Path(folders[1]) / "model.safetensors").read_bytes()
    rng = random.Random(1)
    for number in range(10):
        folder = tmp_path / str(number)
        folder.mkdir()
        damaged = bytearray(whole[: rng.randrange(len(whole))] if number % 2 else whole)
        if number % 2 == 0:
            # In the header: what the tensors hold may be anything.
            damaged[rng.randrange(200)] ^= 1 << rng.randrange(8)
        (folder / "model.safetensors").write_bytes(damaged)
        result = await swap_or_error(llm, str(folder))
        assert isinstance(result, PitstopError), f"damage {number} was not noticed"
    assert (await settled(llm)).committed.version == before.committed.version
    await check_serving(llm, folders)
