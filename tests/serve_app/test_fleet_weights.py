"""The swap over a fleet: all or none, one at a time, versions that only grow. Real engines, no Ray."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import (
    ContinuousBatchingConfig,
    ContinuousBatchingManager,
    InvalidRequest,
    SwapConflict,
    WeightsError,
    WeightsInvalid,
    WeightsSourceError,
    init_continuous_batching,
    load_model,
)
from serve_app.fleet_weights import FleetWeights
from serve_app.messages import CommittedWeights, ReplicaReport, SwapOrder, SwapResult, WeightSource
from serve_app.settings import AppSettings, WeightSettings
from serve_app.weight_follower import WeightFollower
from tests.serve_app.tiny_model import changed_weights, make_model_folder

SETTINGS = AppSettings(
    weights=WeightSettings(stage_timeout_s=20, commit_timeout_s=5, heartbeat_interval_s=0.05, forget_after_s=0.5)
)
DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("weights")
    found = {name: make_model_folder(root / name, seed=seed) for seed, name in enumerate(("base", "second", "third"))}
    for change in ("missing", "extra", "misshapen", "non-finite"):
        found[change] = changed_weights(found["base"], root / change, change=change)
    return found


@pytest.fixture(scope="module")
def managers(folders: dict[str, str]) -> Iterator[list[ContinuousBatchingManager]]:
    torch.set_num_threads(1)
    config = ContinuousBatchingConfig(page_size=16, num_blocks=32)
    started = [init_continuous_batching(load_model(folders["base"]), None, config) for _ in range(2)]
    yield started
    for manager in started:
        manager.destroy()


class Fleet:
    """Two followers and their controller; `cut_off` names methods that replica "b" does not hear."""

    def __init__(self, managers: list[ContinuousBatchingManager], base: str) -> None:
        self.followers = {
            name: WeightFollower(manager, replica_id=name, base_path=base)
            for name, manager in zip("ab", managers, strict=True)
        }
        self.cut_off: set[str] = set()
        self.dead: set[str] = set()
        self.answered = asyncio.Event()
        self.weights = self.new_controller()

    def new_controller(self) -> FleetWeights:
        self.weights = FleetWeights(SETTINGS, call_all=self.call_all, count_running=self.count_running)
        return self.weights

    async def count_running(self) -> int:
        return len(self.followers) - len(self.dead)

    async def call_all(self, method: str, argument: object, *, timeout_s: float) -> list[Any]:
        heard = [
            follower
            for name, follower in self.followers.items()
            if name not in self.dead and not (name == "b" and method in self.cut_off)
        ]
        async with asyncio.timeout(timeout_s):
            answers = await asyncio.gather(*(getattr(follower, method)(argument) for follower in heard))
        self.answered.set()
        return list(answers)

    def report(self, name: str) -> ReplicaReport:
        follower = self.followers[name]
        return ReplicaReport(name, follower.version, follower.state, follower.source)

    async def beat(self) -> None:
        """One heartbeat of every replica, answered as `EngineReplica` answers it."""
        alive = [name for name in self.followers if name not in self.dead]
        answers = await asyncio.gather(*(self.weights.heartbeat(self.report(name)) for name in alive))
        for name, committed in zip(alive, answers, strict=True):
            await self.followers[name].catch_up(committed)

    async def swap(self, path: str, *, in_flight: str = "keep", cast: bool = False) -> SwapResult:
        return await self.weights.swap(WeightSource(path), in_flight=in_flight, cast=cast)

    def versions(self) -> list[int]:
        return [follower.version for follower in self.followers.values()]


@asynccontextmanager
async def beating(fleet: Fleet) -> AsyncIterator[None]:
    """Heartbeats going on beside a swap, as in a running fleet."""

    async def beat_forever() -> None:
        while True:
            await fleet.beat()
            await asyncio.sleep(SETTINGS.weights.heartbeat_interval_s)

    task = asyncio.get_running_loop().create_task(beat_forever())
    try:
        yield
    finally:
        task.cancel()


@pytest.fixture
async def fleet(managers: list[ContinuousBatchingManager], folders: dict[str, str]) -> AsyncIterator[Fleet]:
    for manager in managers:
        # Versions only grow, so every test starts engines anew, at the version they have reached.
        manager.start()
    fleet = Fleet(managers, folders["base"])
    highest = max(fleet.versions())
    await asyncio.gather(*(fleet.followers[name].catch_up(CommittedWeights(highest + 1)) for name in fleet.followers))
    async with asyncio.timeout(DEADLINE_S):
        await fleet.beat()
        yield fleet
    for manager in managers:
        manager.stop()


async def test_a_swap_reaches_every_replica_and_the_version_grows_by_one(fleet: Fleet, folders: dict[str, str]) -> None:
    before = fleet.versions()
    result = await fleet.swap(folders["second"])
    assert result.version == before[0] + 1
    assert result.previous_version == before[0]
    assert result.replicas == ["a", "b"]
    assert result.lagging == []
    assert fleet.versions() == [result.version] * 2
    assert 0 < result.paused_s < 1
    status = await fleet.weights.status()
    assert status.committed == CommittedWeights(result.version, WeightSource(folders["second"]), swap_id=result.swap_id)
    assert [(report.replica_id, report.version, report.state) for report in status.replicas] == [
        ("a", result.version, "ready"),
        ("b", result.version, "ready"),
    ]


@pytest.mark.parametrize("change", ["missing", "extra", "misshapen", "non-finite"])
async def test_a_faulty_tensor_is_refused_by_name_and_nothing_changes(
    fleet: Fleet, folders: dict[str, str], change: str
) -> None:
    before = fleet.versions()
    with pytest.raises(WeightsInvalid, match=r"replica [ab]: .*mlp\.down_proj\.weight") as caught:
        await fleet.swap(folders[change])
    assert caught.value.tensor is not None
    assert fleet.versions() == before
    assert all(follower.staged_swap_id is None for follower in fleet.followers.values())
    assert (await fleet.weights.status()).committed.version == before[0]


async def test_a_folder_that_is_not_there_is_refused(fleet: Fleet, tmp_path: Path) -> None:
    with pytest.raises(WeightsSourceError, match="nowhere"):
        await fleet.swap(str(tmp_path / "nowhere"))


async def test_an_unknown_choice_for_requests_in_flight_is_refused(fleet: Fleet, folders: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest, match="in_flight is 'kill'"):
        await fleet.swap(folders["second"], in_flight="kill")


async def test_a_relative_path_is_refused(fleet: Fleet) -> None:
    with pytest.raises(InvalidRequest, match="must be absolute"):
        await fleet.swap("weights/second")


async def test_the_second_of_two_swaps_is_told_the_first_ones_id(fleet: Fleet, folders: dict[str, str]) -> None:
    first = asyncio.get_running_loop().create_task(fleet.swap(folders["second"]))
    await asyncio.sleep(0)  # lets the first one start
    running = (await fleet.weights.status()).swap_in_progress
    assert running is not None
    with pytest.raises(SwapConflict, match=running):
        await fleet.swap(folders["third"])
    assert (await first).swap_id == running
    assert 'pitstop_swaps_total{outcome="conflict"} 1.0' in await fleet.weights.metrics()


async def test_a_refused_swap_takes_no_number(fleet: Fleet, folders: dict[str, str]) -> None:
    before = fleet.versions()[0]
    with pytest.raises(WeightsInvalid):
        await fleet.swap(folders["missing"])
    assert (await fleet.swap(folders["second"])).version == before + 1


async def test_a_replica_that_is_reached_late_is_asked_again(fleet: Fleet, folders: dict[str, str]) -> None:
    fleet.cut_off = {"stage"}
    async with beating(fleet):
        swap = asyncio.get_running_loop().create_task(fleet.swap(folders["second"]))
        await fleet.answered.wait()
        fleet.cut_off = set()
        assert (await swap).replicas == ["a", "b"]


async def test_weights_staged_by_a_lost_swap_are_never_committed_by_another(
    fleet: Fleet, folders: dict[str, str]
) -> None:
    follower = fleet.followers["b"]
    await follower.stage(SwapOrder("lost", follower.version + 1, WeightSource(folders["third"])))
    fleet.cut_off = {"commit"}
    await fleet.swap(folders["second"])
    await follower.stage(SwapOrder("lost", follower.version + 1, WeightSource(folders["third"])))
    assert await follower.catch_up(await fleet.weights.committed())
    assert follower.source == WeightSource(folders["second"])


async def test_a_replica_that_lives_but_does_not_stage_stops_the_swap(fleet: Fleet, folders: dict[str, str]) -> None:
    before = fleet.versions()
    fleet.cut_off = {"stage"}
    async with beating(fleet):
        with pytest.raises(WeightsError, match="replica b runs but did not stage"):
            await fleet.swap(folders["second"])
    assert fleet.versions() == before


async def test_a_replica_that_died_does_not_stop_the_swap(fleet: Fleet, folders: dict[str, str]) -> None:
    fleet.dead = {"b"}
    async with beating(fleet):
        result = await fleet.swap(folders["second"])
    assert (result.replicas, result.lagging) == (["a"], [])


async def test_a_replica_that_misses_the_commit_is_fenced_and_catches_up(fleet: Fleet, folders: dict[str, str]) -> None:
    fleet.cut_off = {"commit"}
    result = await fleet.swap(folders["second"])
    assert (result.replicas, result.lagging) == (["a"], ["b"])
    assert [report.state for report in (await fleet.weights.status()).replicas] == ["ready", "lagging"]
    committed = await fleet.weights.heartbeat(fleet.report("b"))
    assert fleet.followers["b"].is_behind(committed)
    assert fleet.followers["b"].state == "lagging"
    assert await fleet.followers["b"].catch_up(committed)
    assert fleet.followers["b"].state == "ready"
    assert fleet.versions() == [result.version] * 2


async def test_a_commit_that_fails_everywhere_leaves_the_old_version_committed(
    fleet: Fleet, folders: dict[str, str], managers: list[ContinuousBatchingManager]
) -> None:
    before = fleet.versions()
    call_all = fleet.call_all

    async def stop_engines_before_commit(method: str, argument: object, *, timeout_s: float) -> list[Any]:
        if method == "commit":
            for manager in managers:
                manager.stop()
        return await call_all(method, argument, timeout_s=timeout_s)

    fleet.weights._call_all = stop_engines_before_commit
    with pytest.raises(WeightsError, match=r"replica [ab]: "):
        await fleet.swap(folders["second"])
    assert fleet.versions() == before
    assert (await fleet.weights.status()).committed.version == before[0]


async def test_a_late_replica_takes_the_committed_weights(fleet: Fleet, folders: dict[str, str]) -> None:
    fleet.dead = {"b"}
    async with beating(fleet):
        result = await fleet.swap(folders["second"])
    fleet.dead = set()
    follower = fleet.followers["b"]
    assert await follower.catch_up(await fleet.weights.committed())
    assert (follower.version, follower.source) == (result.version, WeightSource(folders["second"]))
    weights = [f._manager.model.get_output_embeddings().weight for f in fleet.followers.values()]
    assert torch.equal(weights[0], weights[1])


async def test_a_restarted_controller_recovers_the_version_from_reports(fleet: Fleet, folders: dict[str, str]) -> None:
    result = await fleet.swap(folders["second"])
    fleet.new_controller()
    answers = asyncio.gather(*(fleet.weights.heartbeat(fleet.report(name)) for name in "ab"))
    assert await fleet.weights.committed() == CommittedWeights(result.version, WeightSource(folders["second"]))
    assert {answer.version for answer in await answers} == {result.version}
    assert (await fleet.swap(folders["third"])).version == result.version + 1


async def test_a_controller_that_hears_of_a_newer_version_late_follows_it(
    fleet: Fleet, folders: dict[str, str]
) -> None:
    result = await fleet.swap(folders["second"])
    fleet.dead = {"a", "b"}
    fleet.new_controller()
    assert (await fleet.weights.committed()).version == 1
    fleet.dead = set()
    assert (await fleet.weights.heartbeat(fleet.report("a"))).version == result.version


async def test_a_catch_up_that_fails_keeps_the_replica_fenced_and_its_weights(fleet: Fleet, tmp_path: Path) -> None:
    follower = fleet.followers["a"]
    committed = CommittedWeights(follower.version + 5, WeightSource(str(tmp_path / "gone")))
    before = follower.version
    assert not await follower.catch_up(committed)
    assert (follower.version, follower.state) == (before, "lagging")
    assert not await follower.catch_up(committed)


async def test_orders_given_twice_are_carried_out_once(fleet: Fleet, folders: dict[str, str]) -> None:
    follower = fleet.followers["a"]
    order = SwapOrder("s", follower.version + 1, WeightSource(folders["second"]))
    assert (await follower.stage(order)).ok
    first, second = await follower.commit(order), await follower.commit(order)
    assert first == second
    assert first.ok
    assert not (await follower.stage(order)).ok
    assert (await follower.abort("s")).ok
    await fleet.followers["b"].catch_up(CommittedWeights(order.version, order.source))


async def test_what_was_not_staged_cannot_be_committed(fleet: Fleet, folders: dict[str, str]) -> None:
    follower = fleet.followers["a"]
    reply = await follower.commit(SwapOrder("s", follower.version + 1, WeightSource(folders["second"])))
    assert not reply.ok
    assert "was not staged here" in str(reply.error)
