"""The swap over a fleet: all or none, one at a time, versions that only grow. Real engines, no Ray."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import (
    ContinuousBatchingConfig,
    ContinuousBatchingManager,
    InvalidRequest,
    NotFinished,
    SwapConflict,
    WeightsError,
    WeightsInvalid,
    WeightsSourceError,
    init_continuous_batching,
    load_model,
)
from serve_app.messages import (
    CommittedVersion,
    CommittedWeights,
    PauseOrder,
    ReplicaReport,
    RollbackRequest,
    SwapOrder,
    SwapRequest,
    SwapResult,
    WeightSource,
)
from serve_app.protocol.errors import ManifestError, ManifestTaken, VersionUnavailable
from serve_app.settings import WeightSettings
from serve_app.weights import replica_census
from serve_app.weights.failures import MAX_KEPT
from serve_app.weights.fleet_member import ControllerCalls, FleetMember
from serve_app.weights.fleet_weights import FleetWeights
from serve_app.weights.follower import WeightFollower
from serve_app.weights.history import WeightHistory
from serve_app.weights.leased_pauses import LeasedPauses
from serve_app.weights.manifest import FILE_NAME
from serve_app.weights.two_phase_swap import Checked
from tests.serve_app.tiny_model import WEIGHTS_FILE, changed_weights, make_model_folder
from tests.waiting import eventually

SETTINGS = WeightSettings(stage_timeout_s=20, commit_timeout_s=5, heartbeat_interval_s=0.05, forget_after_s=2)
DEADLINE_S = 30.0
STARTS, LOSSES = "pitstop_replica_starts_total", "pitstop_replica_losses_total"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("weights")
    found = {name: make_model_folder(root / name, seed=seed) for seed, name in enumerate(("base", "second", "third"))}
    for change in ("missing", "extra", "misshapen", "non-finite"):
        found[change] = changed_weights(found["base"], root / change, change=change)
    tensors = load_file(Path(found["base"]) / WEIGHTS_FILE)
    for name, written in (
        ("half", {key: tensor.bfloat16() for key, tensor in tensors.items()}),
        ("part", {"model.norm.weight": tensors["model.norm.weight"]}),
    ):
        found[name] = shutil.copytree(found["base"], str(root / name))
        save_file(written, Path(found[name]) / WEIGHTS_FILE, metadata={"format": "pt"})
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
        self.pauses = {
            name: LeasedPauses(manager, replica_id=name) for name, manager in zip("ab", managers, strict=True)
        }
        self.followers = {
            name: WeightFollower(manager, self.pauses[name], replica_id=name, base_path=base)
            for name, manager in zip("ab", managers, strict=True)
        }
        self.members = {
            name: FleetMember(
                follower,
                self.pauses[name],
                controller=ControllerCalls(
                    heartbeat=lambda report: self.weights.heartbeat(report),
                    committed=lambda: self.weights.committed(),
                    digests=lambda version: self.weights.digests(version),
                    start_failed=lambda reason, name=name: self.weights.start_failed(name, reason),  # type: ignore[misc]
                    number=lambda name=name: self.weights.number(name),  # type: ignore[misc]
                ),
                report=lambda name=name: self.report(name),  # type: ignore[misc]
            )
            for name, follower in self.followers.items()
        }
        self.cut_off: set[str] = set()
        self.dead: set[str] = set()
        self.answered = asyncio.Event()
        self.weights = self.new_controller()

    def new_controller(self, folder: Path | None = None, *, num_earlier: int = 16) -> FleetWeights:
        """A controller that knows nothing but what the folder and the replicas tell it."""
        history = WeightHistory(
            application="pitstop", model="base", folder=folder and str(folder), num_earlier=num_earlier
        )
        self.weights = FleetWeights(
            SETTINGS,
            history,
            call_all=self._call,
            count_running=self.count_running,
            check_alone=self.check_alone,
            kill=self.kill,
        )
        return self.weights

    async def _call(self, method: str, argument: object, *, timeout_s: float) -> list[Any]:
        return await self.call_all(method, argument, timeout_s=timeout_s)

    async def check_alone(self, _: SwapOrder) -> Checked | None:
        return None

    async def kill(self, name: str) -> None:
        self.dead.add(name)

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

    async def report(self, name: str) -> ReplicaReport:
        follower = self.followers[name]
        return ReplicaReport(
            name,
            follower.version,
            follower.state,
            follower.source,
            error=follower.error,
            reply=follower.reply,
            cast=follower.cast,
        )

    async def beat(self) -> None:
        """One heartbeat of every replica, answered as `EngineReplica` answers it."""
        alive = [name for name in self.followers if name not in self.dead]
        answers = await asyncio.gather(*(self.members[name].beat() for name in alive))
        for name, committed in zip(alive, answers, strict=True):
            if committed.swap_in_progress is None:
                await self.members[name].caught_up()

    async def swap(self, path: str, **options: Any) -> SwapResult:
        return await self.weights.swap(SwapRequest(WeightSource(path), **options))

    async def rollback(self, version: int | None = None, **options: Any) -> SwapResult:
        return await self.weights.rollback(RollbackRequest(version, **options))

    async def history(self) -> list[CommittedVersion]:
        return (await self.weights.status()).history

    async def recover(self) -> None:
        """Lets a new controller hear of every replica."""
        await asyncio.gather(self.weights.committed(), self.beat())

    def versions(self) -> list[int]:
        return [follower.version for follower in self.followers.values()]


@asynccontextmanager
async def beating(fleet: Fleet) -> AsyncIterator[None]:
    """Heartbeats going on beside a swap, as in a running fleet."""

    async def beat_forever() -> None:
        while True:
            await fleet.beat()
            await asyncio.sleep(SETTINGS.heartbeat_interval_s)

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
    assert status.committed == CommittedWeights(
        result.version, WeightSource(folders["second"]), swap_id=result.swap_id, digest=result.digest
    )
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


async def test_the_status_has_the_last_swaps_that_failed(fleet: Fleet, folders: dict[str, str], tmp_path: Path) -> None:
    for index in range(MAX_KEPT + 1):
        with pytest.raises(WeightsSourceError):
            await fleet.swap(str(tmp_path / f"nowhere-{index}"))
    with pytest.raises(WeightsInvalid):
        await fleet.swap(folders["non-finite"])
    newest, *others = (await fleet.weights.status()).failures
    assert (newest.reason, newest.was_rolled_back) == ("invalid", False)
    assert "down_proj" in newest.error
    assert len(others) == MAX_KEPT - 1
    assert all(failure.reason == "source" for failure in others)
    assert f"nowhere-{MAX_KEPT}" in others[0].error


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


async def test_a_swap_that_may_wait_comes_after_the_one_under_way(fleet: Fleet, folders: dict[str, str]) -> None:
    phases: list[str | None] = []
    call_all = fleet.call_all

    async def look(method: str, argument: object, *, timeout_s: float) -> list[Any]:
        phases.append((await fleet.weights.status()).phase)
        return await call_all(method, argument, timeout_s=timeout_s)

    fleet.call_all = look
    first, second = await asyncio.gather(
        fleet.swap(folders["second"]), fleet.swap(folders["third"], wait_s=20.0, idempotency_key="k")
    )
    assert second.version == first.version + 1
    assert phases == ["stage", "stage", "finish", "park", "vote", "commit", "resume"] * 2
    assert (await fleet.weights.status()).phase is None


async def test_a_repeated_request_that_waits_gets_the_result_of_the_first(
    fleet: Fleet, folders: dict[str, str]
) -> None:
    swaps = [fleet.swap(folders["second"], wait_s=20.0, idempotency_key="k") for _ in range(2)]
    first, second = await asyncio.gather(*swaps)
    assert first == second
    assert fleet.versions() == [first.version] * 2


async def test_a_swap_waits_no_longer_than_asked(fleet: Fleet, folders: dict[str, str]) -> None:
    call_all, is_refused = fleet.call_all, asyncio.Event()

    async def hold(method: str, argument: object, *, timeout_s: float) -> list[Any]:
        await is_refused.wait()
        return await call_all(method, argument, timeout_s=timeout_s)

    fleet.call_all = hold
    first = asyncio.get_running_loop().create_task(fleet.swap(folders["second"]))
    await asyncio.sleep(0)
    running = (await fleet.weights.status()).swap_in_progress
    with pytest.raises(SwapConflict, match=f"swap {running} is still under way after 0.05 s"):
        await fleet.swap(folders["third"], wait_s=0.05)
    is_refused.set()
    assert (await first).swap_id == running


# The hub


def cached_in_hub(cache: Path, folder: str, *, commit: str = "c0ffee") -> None:
    """Lays a folder into a hub cache, as a download leaves it."""
    root = cache / "models--org--name"
    shutil.copytree(folder, root / "snapshots" / commit)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(commit)


async def test_a_model_of_the_hub_is_fetched_to_a_folder_once(
    fleet: Fleet, folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached_in_hub(tmp_path, folders["second"])
    offline_hub(monkeypatch, tmp_path)
    wanted = SwapRequest(WeightSource(hub="org/name"), idempotency_key="k")
    result = await fleet.weights.swap(wanted)
    folder = str(tmp_path / "models--org--name" / "snapshots" / "c0ffee")
    assert {follower.source for follower in fleet.followers.values()} == {WeightSource(folder, hub="org/name")}
    assert await fleet.weights.swap(wanted) == result


async def test_a_model_that_the_hub_does_not_give_is_refused_in_a_sentence(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offline_hub(monkeypatch, tmp_path)
    before = fleet.versions()
    with pytest.raises(WeightsSourceError, match=r"org/name at v2 cannot be fetched from the hub: .+"):
        await fleet.weights.swap(SwapRequest(WeightSource(hub="org/name", revision="v2")))
    assert fleet.versions() == before


def offline_hub(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Has the hub's client look into this cache only."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


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
    await fleet.beat()
    await fleet.beat()
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


async def test_a_replica_that_misses_the_commit_stays_parked_and_catches_up(
    fleet: Fleet, folders: dict[str, str]
) -> None:
    fleet.cut_off = {"commit"}
    result = await fleet.swap(folders["second"])
    assert (result.replicas, result.lagging) == (["a"], ["b"])
    follower = fleet.followers["b"]
    assert (follower.state, follower.has_voted) == ("paused", True)
    committed = await fleet.weights.heartbeat(await fleet.report("b"))
    assert [report.state for report in (await fleet.weights.status()).replicas] == ["paused"]
    await follower.settle(committed, seen=follower.num_changes)
    assert follower.is_fenced
    assert await follower.catch_up(committed)
    assert (follower.state, follower.is_fenced) == ("ready", False)
    assert fleet.versions() == [result.version] * 2


async def test_a_commit_that_fails_everywhere_leaves_the_old_version_committed(
    fleet: Fleet, folders: dict[str, str], managers: list[ContinuousBatchingManager], tmp_path: Path
) -> None:
    before = fleet.versions()
    call_all = fleet.call_all

    async def stop_engines_before_commit(method: str, argument: object, *, timeout_s: float) -> list[Any]:
        if method == "commit":
            for manager in managers:
                manager.stop()
        return await call_all(method, argument, timeout_s=timeout_s)

    fleet.new_controller(tmp_path)
    await fleet.recover()
    fleet.call_all = stop_engines_before_commit
    with pytest.raises(WeightsError, match=r"replica [ab]: "):
        await fleet.swap(folders["second"], idempotency_key="k")
    assert fleet.versions() == before
    assert (await fleet.weights.status()).committed.version == before[0]
    assert 'pitstop_swaps_total{outcome="rolled_back"} 1.0' in await fleet.weights.metrics()
    fleet.call_all = call_all
    for manager in managers:
        manager.start()
    # Neither the version nor its number comes back, not even after a restart with all replicas dead.
    fleet.dead = {"a", "b"}
    fleet.new_controller(tmp_path)
    assert (await fleet.weights.committed()).version == before[0]
    fleet.dead = set()
    await fleet.beat()
    assert (await fleet.swap(folders["second"], idempotency_key="k")).version == before[0] + 2


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
    answers = asyncio.gather(*[fleet.weights.heartbeat(await fleet.report(name)) for name in "ab"])
    assert await fleet.weights.committed() == CommittedWeights(result.version, WeightSource(folders["second"]))
    assert {answer.version for answer in await answers} == {result.version}
    assert (await fleet.swap(folders["third"])).version == result.version + 1


@pytest.mark.parametrize(
    ("base", "source", "options"), [("base", "half", {"cast": True}), ("half", "part", {"partial": True})]
)
async def test_a_restarted_controller_has_weights_of_another_dtype_converted_again(
    fleet: Fleet,
    managers: list[ContinuousBatchingManager],
    folders: dict[str, str],
    base: str,
    source: str,
    options: dict[str, bool],
) -> None:
    fleet = Fleet(managers, folders[base])
    await fleet.recover()
    result = await fleet.swap(folders[source], **options)
    fleet.new_controller()
    await fleet.recover()
    committed = await fleet.weights.committed()
    assert (committed.version, committed.cast) == (result.version, True)
    assert await fleet.followers["a"].catch_up(replace(committed, version=result.version + 1))


async def test_a_controller_that_hears_of_a_newer_version_late_follows_it(
    fleet: Fleet, folders: dict[str, str]
) -> None:
    result = await fleet.swap(folders["second"])
    fleet.dead = {"a", "b"}
    fleet.new_controller()
    assert (await fleet.weights.committed()).version == 1
    fleet.dead = set()
    assert (await fleet.weights.heartbeat(await fleet.report("a"))).version == result.version


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
    assert (await follower.park(order)).ok
    first, second = await follower.commit(order), await follower.commit(order)
    assert (await follower.resume(order)).ok
    assert first == second
    assert first.ok
    assert not (await follower.stage(order)).ok
    assert (await follower.abort(order)).ok
    await fleet.followers["b"].catch_up(CommittedWeights(order.version, order.source))


@pytest.mark.parametrize("options", [{}, {"in_flight": "finish"}, {"in_flight": "finish", "pinned": "end"}])
async def test_a_swap_in_a_pause_is_refused_at_once_where_requests_would_have_to_finish(
    fleet: Fleet, managers: list[ContinuousBatchingManager], folders: dict[str, str], options: dict[str, str]
) -> None:
    version, name = fleet.versions()[0], managers[0].new_request_id()
    managers[0].add_request(
        [5, 6, 7], name, max_new_tokens=400, streaming=True, weight_version=version, eos_token_id=-1
    )
    assert managers[0].get_result(name, timeout=DEADLINE_S) is not None
    assert (await fleet.pauses["a"].pause(PauseOrder("lease", remaining_s=600.0))).ok
    # Its time for requests to finish is longer than that of the test.
    with pytest.raises(
        NotFinished, match="replica a: requests that are to finish first stand still in the pause lease"
    ):
        await fleet.swap(folders["second"], finish_timeout_s=600.0, **options)
    assert (await fleet.swap(folders["second"], pinned="end")).version == version + 1
    await fleet.pauses["a"].end(["lease"])


@pytest.mark.parametrize("in_flight", ["keep", "finish"])
async def test_nobody_stands_still_while_requests_of_one_replica_finish(
    fleet: Fleet, managers: list[ContinuousBatchingManager], folders: dict[str, str], in_flight: str
) -> None:
    version, name = fleet.versions()[0], managers[0].new_request_id()
    managers[0].add_request([5, 6, 7], name, max_new_tokens=300, weight_version=version, eos_token_id=-1)
    running: dict[str, tuple[int, bool]] = {}
    call_all = fleet.call_all

    async def look(method: str, argument: object, *, timeout_s: float) -> list[Any]:
        running.setdefault(method, (managers[0].stats().num_running, managers[1].stats().is_paused))
        return await call_all(method, argument, timeout_s=timeout_s)

    fleet.call_all = look  # type: ignore[method-assign]
    async with beating(fleet):
        result = await fleet.swap(folders["second"], in_flight=in_flight)
    assert result.version == version + 1
    assert running["park"] == (0, False)
    output = managers[0].get_result(name, timeout=DEADLINE_S)
    assert output is not None
    assert [span.version for span in output.weight_versions] == [version]


async def test_requests_that_wait_for_others_to_finish_begin_when_the_swap_ends_early(
    fleet: Fleet, managers: list[ContinuousBatchingManager], folders: dict[str, str]
) -> None:
    follower, version = fleet.followers["a"], fleet.versions()[0]
    managers[0].add_request([5, 6, 7], max_new_tokens=400, weight_version=version, eos_token_id=-1)
    order = SwapOrder("s", version + 1, WeightSource(folders["second"]), finish_timeout_s=600.0)
    assert (await follower.stage(order)).ok
    finishing = asyncio.create_task(follower.finish(order))
    await eventually(lambda: bool(managers[0]._loop._holds))
    assert (await follower.abort(order)).ok
    assert not (await finishing).ok
    assert not managers[0]._loop._holds
    # Also where the controller is not heard of any more.
    order = replace(order, swap_id="t", lease_s=0.01, in_flight="finish")
    assert (await follower.stage(order)).ok
    await follower.finish(order)
    await eventually(lambda: not managers[0]._loop._holds)
    assert not (await follower.vote(order)).ok
    assert (await follower.abort(order)).ok


async def test_what_was_not_staged_cannot_be_committed(fleet: Fleet, folders: dict[str, str]) -> None:
    follower = fleet.followers["a"]
    reply = await follower.commit(SwapOrder("s", follower.version + 1, WeightSource(folders["second"])))
    assert not reply.ok
    assert "was not staged here" in str(reply.error)


# A manifest in a folder


def manifest_text(folder: Path) -> str:
    return (folder / FILE_NAME).read_text()


async def test_with_all_replicas_dead_a_restart_finds_the_committed_version(
    fleet: Fleet, folders: dict[str, str], tmp_path: Path
) -> None:
    fleet.new_controller(tmp_path)
    await fleet.recover()
    result = await fleet.swap(folders["second"], label="step 100", requested_by="me")
    fleet.dead = {"a", "b"}
    fleet.new_controller(tmp_path)
    committed = await fleet.weights.committed()
    assert committed == CommittedWeights(
        result.version, WeightSource(folders["second"]), swap_id=result.swap_id, digest=result.digest
    )
    newest = (await fleet.history())[0]
    assert (newest.label, newest.requested_by, newest.result) == ("step 100", "me", result)
    assert newest.committed_at.endswith("+00:00")
    fleet.dead = set()
    await fleet.beat()
    assert (await fleet.swap(folders["third"])).version == result.version + 1


async def test_replicas_behind_the_manifest_catch_up_to_it(
    fleet: Fleet, folders: dict[str, str], tmp_path: Path
) -> None:
    fleet.new_controller(tmp_path)
    await fleet.recover()
    version = fleet.versions()[0]
    # As a controller leaves it that dies between its decision and the first commit.
    history = WeightHistory(application="pitstop", model="base", folder=str(tmp_path), num_earlier=16)
    await history.commit(CommittedVersion(version + 1, WeightSource(folders["second"]), swap_id="s"))
    fleet.new_controller(tmp_path)
    await fleet.recover()
    # Catching up goes on beside a heartbeat.
    await eventually(fleet.versions, until=lambda versions: versions == [version + 1] * 2)
    source = WeightSource(folders["second"])
    # Told a moment after the weights themselves.
    await eventually(lambda: all(follower.source == source for follower in fleet.followers.values()))


async def test_replicas_ahead_of_the_manifest_are_followed_and_written_down(
    fleet: Fleet, folders: dict[str, str], tmp_path: Path
) -> None:
    result = await fleet.swap(folders["second"])
    fleet.new_controller(tmp_path)
    await fleet.recover()
    assert (await fleet.weights.committed()).version == result.version
    fleet.dead = {"a", "b"}
    fleet.new_controller(tmp_path)
    assert (await fleet.weights.committed()).version == result.version


async def test_a_swap_whose_decision_cannot_be_written_changes_nothing(
    fleet: Fleet, folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.new_controller(tmp_path)
    await fleet.recover()
    before, written = fleet.versions(), manifest_text(tmp_path)

    def fail(_path: Path, _content: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("serve_app.weights.manifest.write_durably", fail)
        with pytest.raises(ManifestError, match=r"manifest\.json cannot be written: No space left on device"):
            await fleet.swap(folders["second"])
    assert fleet.versions() == before
    assert all(follower.staged_swap_id is None for follower in fleet.followers.values())
    assert (await fleet.weights.committed()).version == before[0]
    assert manifest_text(tmp_path) == written
    assert (await fleet.swap(folders["second"])).version > before[0]


async def test_a_decision_that_cannot_be_taken_back_stands(
    fleet: Fleet, folders: dict[str, str], managers: list[ContinuousBatchingManager], tmp_path: Path
) -> None:
    fleet.new_controller(tmp_path)
    await fleet.recover()
    before = fleet.versions()[0]
    call_all = fleet.call_all

    async def fail_commit_and_disk(method: str, argument: object, *, timeout_s: float) -> list[Any]:
        if method == "commit":
            (tmp_path / FILE_NAME).rename(tmp_path / "moved")
            for manager in managers:
                manager.stop()
        return await call_all(method, argument, timeout_s=timeout_s)

    fleet.call_all = fail_commit_and_disk
    result = await fleet.swap(folders["second"])
    assert (result.version, result.replicas, result.lagging) == (before + 1, [], ["a", "b"])
    for manager in managers:
        manager.start()
    await fleet.beat()
    assert fleet.versions() == [before + 1] * 2


async def test_the_controller_of_an_old_deployment_commits_nothing_any_more(
    fleet: Fleet, folders: dict[str, str], tmp_path: Path
) -> None:
    blue = fleet.new_controller(tmp_path)
    await fleet.recover()
    before, call_all = fleet.versions(), fleet.call_all

    async def upgrade_before_the_decision(method: str, argument: object, *, timeout_s: float) -> list[Any]:
        answers = await call_all(method, argument, timeout_s=timeout_s)
        if method == "stage":
            fleet.new_controller(tmp_path)
        return answers

    fleet.call_all = upgrade_before_the_decision
    for _ in range(2):
        with pytest.raises(ManifestTaken, match="taken over by another controller"):
            await blue.swap(SwapRequest(WeightSource(folders["second"])))
    assert fleet.versions() == before
    assert all(follower.staged_swap_id is None for follower in fleet.followers.values())
    fleet.call_all = call_all
    await fleet.recover()
    assert (await fleet.swap(folders["second"])).replicas == ["a", "b"]


async def test_a_damaged_manifest_starts_no_controller(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("{")
    with pytest.raises(ManifestError, match="is damaged"):
        fleet.new_controller(tmp_path)


async def test_the_status_says_why_a_replica_cannot_take_the_committed_weights(fleet: Fleet, tmp_path: Path) -> None:
    history = WeightHistory(application="pitstop", model="base", folder=str(tmp_path), num_earlier=16)
    gone, version = str(tmp_path / "gone"), fleet.versions()[0] + 1
    await history.commit(CommittedVersion(version, WeightSource(gone)))
    fleet.new_controller(tmp_path)
    await fleet.recover()
    await fleet.beat()
    status = await fleet.weights.status()
    assert [report.state for report in status.replicas] == ["lagging", "lagging"]
    assert all(gone in str(report.error) for report in status.replicas)
    await fleet.weights.start_failed("c", f"there is no folder {gone}")
    assert (await fleet.weights.status()).problem == f"replica c cannot start: there is no folder {gone}"
    await fleet.weights.heartbeat(ReplicaReport("d", version, "ready"))
    assert (await fleet.weights.status()).problem is None
    page = (await fleet.weights.metrics()).splitlines()
    assert "pitstop_replica_start_failures_total 1.0" in page
    assert "pitstop_replica_starts_total 1.0" in page


async def counted(fleet: Fleet, name: str) -> float:
    (line,) = (line for line in (await fleet.weights.metrics()).splitlines() if line.startswith(f"{name} "))
    return float(line.rpartition(" ")[2])


async def test_replicas_that_serve_have_not_started_when_the_controller_has(fleet: Fleet) -> None:
    fleet.new_controller()
    await fleet.recover()
    await fleet.beat()
    assert await counted(fleet, STARTS) == 0
    # Recovery did not hear of it in time.
    await fleet.weights.heartbeat(ReplicaReport("late", fleet.versions()[0], "ready", generated_tokens=7))
    assert await counted(fleet, STARTS) == 0
    await fleet.weights.heartbeat(ReplicaReport("new", fleet.versions()[0], "ready"))
    assert await counted(fleet, STARTS) == 1


async def test_a_replica_that_was_forgotten_and_comes_back_has_not_started_again(fleet: Fleet) -> None:
    await fleet.recover()
    report = ReplicaReport("c", fleet.versions()[0], "ready")
    before = await counted(fleet, STARTS)
    await fleet.weights.heartbeat(report)

    async def is_forgotten() -> bool:
        return "c" not in {one.replica_id for one in (await fleet.weights.status()).replicas}

    await eventually(is_forgotten)
    await fleet.weights.heartbeat(report)
    assert await counted(fleet, STARTS) == before + 1


async def test_silent_replicas_are_lost_but_for_those_that_are_scaled_away(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_census, "LOST_AFTER_S", SETTINGS.forget_after_s)
    fleet.new_controller()
    await fleet.recover()
    await fleet.weights.heartbeat(ReplicaReport("c", fleet.versions()[0], "ready"))
    fleet.weights.expect_leaving(2, within_s=DEADLINE_S)
    await eventually(lambda: counted(fleet, LOSSES), until=lambda losses: losses == 1)


# History, rollback and idempotency


async def test_a_rollback_brings_earlier_weights_under_a_new_number(fleet: Fleet, folders: dict[str, str]) -> None:
    second = await fleet.swap(folders["second"], label="good")
    third = await fleet.swap(folders["third"])
    back = await fleet.rollback(requested_by="me")
    assert (back.version, back.previous_version) == (third.version + 1, third.version)
    assert fleet.versions() == [back.version] * 2
    assert {follower.source for follower in fleet.followers.values()} == {WeightSource(folders["second"])}
    newest = (await fleet.history())[0]
    assert newest.label == f"rollback of {third.version} to {second.version}"
    assert (newest.rollback_to, newest.requested_by) == (second.version, "me")
    again = await fleet.rollback(third.version)
    assert (await fleet.weights.committed()).source == WeightSource(folders["third"])
    assert [one.version for one in await fleet.history()][:4] == [
        again.version,
        back.version,
        third.version,
        second.version,
    ]


async def test_the_configured_model_can_be_gone_back_to_however_long_ago_it_was(
    fleet: Fleet, folders: dict[str, str], managers: list[ContinuousBatchingManager], tmp_path: Path
) -> None:
    fleet.new_controller(tmp_path, num_earlier=1)
    await fleet.recover()
    for name in ("second", "third", "second"):
        result = await fleet.swap(folders[name])
    assert [one.version for one in await fleet.history()] == [result.version, result.version - 1, 1]
    back = await fleet.rollback(1)
    assert fleet.versions() == [back.version] * 2
    assert {follower.source for follower in fleet.followers.values()} == {None}
    base = load_model(folders["base"]).get_output_embeddings().weight
    assert all(torch.equal(one.model.get_output_embeddings().weight, base) for one in managers)


async def test_there_is_no_going_back_to_what_the_history_does_not_hold(fleet: Fleet, folders: dict[str, str]) -> None:
    result = await fleet.swap(folders["second"])
    before = fleet.versions()
    with pytest.raises(VersionUnavailable, match=f"version {result.version} is the committed one already"):
        await fleet.rollback(result.version)
    with pytest.raises(VersionUnavailable, match="version 999 is not in the history; it holds 1, "):
        await fleet.rollback(999)
    assert fleet.versions() == before


async def test_with_nothing_before_it_a_version_cannot_be_rolled_back() -> None:
    history = WeightHistory(application="pitstop", model="base", folder=None, num_earlier=16)
    with pytest.raises(VersionUnavailable, match="version 1 is the only one there is"):
        history.rollback_target(None)


async def test_there_is_no_going_back_to_a_folder_that_is_gone(
    fleet: Fleet, folders: dict[str, str], tmp_path: Path
) -> None:
    gone = make_model_folder(tmp_path / "soon gone", seed=1)
    first = await fleet.swap(gone)
    second = await fleet.swap(folders["second"])
    shutil.rmtree(gone)
    with pytest.raises(
        VersionUnavailable, match=f"no going back to version {first.version}: replica [ab]: .*soon gone"
    ):
        await fleet.rollback()
    assert fleet.versions() == [second.version] * 2


async def test_the_same_key_again_gives_the_first_result_and_swaps_nothing(
    fleet: Fleet, folders: dict[str, str], tmp_path: Path
) -> None:
    fleet.new_controller(tmp_path)
    await fleet.recover()
    first = await fleet.swap(folders["second"], idempotency_key="k")
    assert await fleet.swap(folders["second"], idempotency_key="k") == first
    fleet.new_controller(tmp_path)
    await fleet.recover()
    assert await fleet.swap(folders["second"], idempotency_key="k") == first
    back = await fleet.rollback(1, idempotency_key="b")
    assert await fleet.rollback(1, idempotency_key="b") == back
    assert await fleet.rollback(idempotency_key="b") == back
    assert fleet.versions() == [back.version] * 2


async def test_a_key_of_another_request_is_refused(fleet: Fleet, folders: dict[str, str]) -> None:
    first = await fleet.swap(folders["second"], idempotency_key="k")
    with pytest.raises(
        SwapConflict, match=f"'k' brought version {first.version} from {folders['second']}; use another"
    ):
        await fleet.swap(folders["third"], idempotency_key="k")
    with pytest.raises(SwapConflict, match="use another"):
        await fleet.rollback(idempotency_key="k")
    assert fleet.versions() == [first.version] * 2


async def test_while_a_swap_runs_its_key_is_told_its_id(fleet: Fleet, folders: dict[str, str]) -> None:
    conflicts: list[str] = []
    call_all = fleet.call_all

    async def ask_again_meanwhile(method: str, argument: object, *, timeout_s: float) -> list[Any]:
        with pytest.raises(SwapConflict) as caught:
            await fleet.swap(folders["second"], idempotency_key="k")
        conflicts.append(str(caught.value))
        return await call_all(method, argument, timeout_s=timeout_s)

    fleet.call_all = ask_again_meanwhile
    result = await fleet.swap(folders["second"], idempotency_key="k")
    assert set(conflicts) == {f"swap {result.swap_id} is under way; try again when it has ended, or set wait_s"}


async def test_a_refused_swap_does_not_use_its_key_up(fleet: Fleet, folders: dict[str, str]) -> None:
    with pytest.raises(WeightsInvalid):
        await fleet.swap(folders["missing"], idempotency_key="k")
    assert (await fleet.swap(folders["second"], idempotency_key="k")).replicas == ["a", "b"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label": "x" * 1025}, "label has 1025 characters; at most 1024"),
        ({"label": "\ud800"}, "label is .* half a surrogate pair"),
        ({"idempotency_key": 5}, "idempotency_key is 5; it must be text"),
    ],
)
async def test_what_the_manifest_cannot_hold_is_refused(
    fleet: Fleet, folders: dict[str, str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        await fleet.swap(folders["second"], **options)
