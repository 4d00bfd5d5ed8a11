"""Swaps while processes are killed and stopped: one version everywhere in the end, nothing paused, nothing lost.

The weights of a version always draw one token, so that a wrong span shows in the answer.
"""

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from engine import PitstopError, SamplingParams
from serve_app.client import Pitstop, connect
from serve_app.messages import FleetStatus, SwapResult
from serve_app.protocol.errors import NoReplica
from serve_app.settings import parse_settings
from tests.serve_app.running_app import APP_NAME, running_app
from tests.serve_app.tiny_model import make_folder_that_draws
from tests.waiting import eventually

pytestmark = pytest.mark.slow

NUM_REPLICAS = 2
TOKENS = (40, 50, 60)
"""Drawn by the weights of the three folders."""
STOPPED_S = 6.0
"""Longer than a replica may be silent, and than any deadline of a swap here."""
NUM_KILLS = 3
DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("weights")
    return [make_folder_that_draws(token, root / str(token)) for token in TOKENS]


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


@dataclass
class Clients:
    """Streams, one after another in each of `number` places, until told to end; looks at every token."""

    llm: Pitstop
    folders: list[str]
    number: int = 8
    length: int = 200
    outcomes: Counter[str] = field(default_factory=Counter)
    drawn: dict[int, set[int]] = field(default_factory=dict)
    """Tokens that each version drew; one only, or a span was wrong."""
    is_over: bool = False

    async def run(self, place: int) -> None:
        """Fails on a gap in the spans, and where anything ends a stream that has begun."""
        sampling = SamplingParams(temperature=0.0, max_new_tokens=self.length, eos_token_ids=())
        while not self.is_over:
            try:
                await asyncio.wait_for(self._stream([place % 256] * 20, sampling), DEADLINE_S)
            except NoReplica as error:
                self.outcomes[type(error).__name__] += 1
                # Nobody may be there for a while.
                await asyncio.sleep(0.1)

    async def _stream(self, prompt: list[int], sampling: SamplingParams) -> None:
        versions: list[int] = []
        async for event in self.llm.generate(prompt, sampling):
            for span in event.weight_versions:
                assert span.start == len(versions), "a gap or an overlap in the spans"
                tokens = set(event.token_ids[span.start - event.weight_versions[0].start :][: span.end - span.start])
                self.drawn.setdefault(span.version, set()).update(tokens)
                versions += [span.version] * (span.end - span.start)
            if event.finish_reason is not None:
                assert event.finish_reason == "length", event
        assert versions == sorted(versions)
        assert len(versions) == self.length
        self.outcomes["length"] += 1


@asynccontextmanager
async def clients_of(llm: Pitstop, folders: list[str], *, number: int = 8) -> AsyncIterator[Clients]:
    """Runs clients beside what is done inside; afterwards every version has drawn one token."""
    clients = Clients(llm, folders, number=number)
    tasks = [asyncio.create_task(clients.run(place)) for place in range(number)]
    try:
        yield clients
        clients.is_over = True
        await asyncio.wait_for(asyncio.gather(*tasks), DEADLINE_S)
    finally:
        for task in tasks:
            task.cancel()
    assert clients.outcomes["length"] > 0
    assert all(len(tokens) == 1 for tokens in clients.drawn.values()), clients.drawn


async def settled(llm: Pitstop) -> FleetStatus:
    """Waits until all replicas serve the committed version, and nothing stands still."""

    async def look() -> FleetStatus | str:
        try:
            return await llm.status()
        except PitstopError as error:
            return str(error)

    def is_settled(status: FleetStatus | str) -> bool:
        if isinstance(status, str) or status.swap_in_progress is not None or status.pauses:
            return False
        states = [(report.version, report.state) for report in status.replicas]
        return states == [(status.committed.version, "ready")] * NUM_REPLICAS

    status = await eventually(look, until=is_settled, deadline_s=DEADLINE_S)
    assert isinstance(status, FleetStatus)
    return status


async def check_serving(llm: Pitstop, folders: list[str]) -> None:
    """The fleet serves the committed weights, on every replica, and lets a new swap through."""
    status = await settled(llm)
    before = status.committed
    path = before.source.path if before.source is not None else folders[0]
    answers = await llm.generate_batch(
        [[number] * 5 for number in range(8)], SamplingParams(temperature=0.0, max_new_tokens=3, eos_token_ids=())
    )
    for answer in answers:
        assert not isinstance(answer, PitstopError), answer
        assert answer.token_ids == [TOKENS[folders.index(path)]] * 3
        assert [span.version for span in answer.weight_versions] == [before.version]


def processes_of(deployment: str) -> list[psutil.Process]:
    """The processes of a deployment's replicas, among those that this test has started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if any(f"ServeReplica:{APP_NAME}:{deployment}" in part for part in process.cmdline()):
                found.append(process)
    return found


async def swap_or_error(llm: Pitstop, path: str, **options: object) -> SwapResult | PitstopError:
    try:
        return await asyncio.wait_for(llm.swap_weights(path, **options), DEADLINE_S)  # type: ignore[arg-type]
    except PitstopError as error:
        return error


@pytest.mark.parametrize("strategy", ["synchronous", "rolling"])
async def test_twenty_swaps_in_a_row_fail_no_stream(llm: Pitstop, folders: list[str], strategy: str) -> None:
    await settled(llm)
    async with clients_of(llm, folders, number=32) as clients:
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
    async with clients_of(llm, folders) as clients:
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
    async with clients_of(llm, folders):
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
    async with clients_of(llm, folders):
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
