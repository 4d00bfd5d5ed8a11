"""The phases of a swap between controller and replicas, with what may go wrong in each. Simulated, in virtual time."""

import asyncio
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import InvalidRequest, NotFinished, SwapConflict, WeightsError, WeightsInvalid, WeightsSourceError
from serve_app.controller import WeightController
from serve_app.messages import PauseRequest, Probes, RollbackRequest, SwapOrder, SwapReply, SwapRequest, WeightSource
from serve_app.protocol.errors import LeaseGone, ReplicaGone, RollingFailed, VersionUnavailable
from serve_app.weights.swap_turn import SwapTurn
from tests.serve_app.simulated_fleet import SETTINGS, FakeStaged, Replica, SimulatedFleet, committed_of
from tests.serve_app.virtual_loop import VirtualLoop


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[SimulatedFleet]:
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    fleet = SimulatedFleet(loop, tmp_path)
    fleet.folders |= {f"/{number}": {"a": float(number), "b": float(number)} for number in range(1, 6)}
    fleet.start_controller()
    for _ in range(3):
        fleet.add()
    fleet.pass_time(3)
    assert len(fleet.generating()) == 3
    yield fleet
    loop.end()
    assert fleet.violations == []
    asyncio.set_event_loop(None)


def swapped(fleet: SimulatedFleet, path: str, **options: Any) -> Any:
    return fleet.loop.run(_done(fleet.swap(path, **options)))


async def _done(task: "asyncio.Task[Any]") -> Any:
    return await task


def refused(fleet: SimulatedFleet, path: str, **options: Any) -> str:
    with pytest.raises(WeightsError) as caught:
        swapped(fleet, path, **options)
    return str(caught.value)


def assert_all_serve(fleet: SimulatedFleet, version: int, *, num_replicas: int = 3) -> None:
    """One version everywhere, and everybody generates."""
    assert sorted(fleet.generating().values()) == [version] * num_replicas
    assert not any(replica.engine.holds for replica in fleet.replicas.values()), "some requests are held back"


# Synchronous


def test_a_synchronous_swap_parks_all_before_any_commits_and_resumes_none_before_all_have(
    fleet: SimulatedFleet,
) -> None:
    parked: dict[str, list[int]] = {}

    async def look(phase: str, _: Replica) -> None:
        parked.setdefault(phase, []).append(len(fleet.generating()))

    fleet.before_call = look
    result = swapped(fleet, "/1")
    assert_all_serve(fleet, 2)
    assert (result.replicas, result.lagging, result.strategy) == (["r0", "r1", "r2"], [], "synchronous")
    assert parked["stage"] == parked["finish"] == [3, 3, 3]
    assert parked["vote"] == parked["commit"] == [0, 0, 0]
    assert list(result.phases_s) == ["stage", "finish", "park", "vote", "commit", "resume"]


@pytest.mark.parametrize("phase", ["stage", "finish", "park"])
def test_a_replica_that_fails_before_the_commit_point_leaves_the_old_weights_running(
    fleet: SimulatedFleet, phase: str
) -> None:
    fleet.replicas["r1"].engine.fails_to = {phase}
    assert refused(fleet, "/1") == f"replica r1: cannot {phase}"
    assert_all_serve(fleet, 1)
    fleet.replicas["r1"].engine.fails_to = set()
    assert swapped(fleet, "/1").version == 2


def falls_silent_in(fleet: SimulatedFleet, phase: str, name: str) -> Callable[[str, Replica], Any]:
    async def silence(method: str, replica: Replica) -> None:
        if (method, replica.name) == (phase, name):
            replica.awake.clear()

    return silence


@pytest.mark.parametrize("phase", ["stage", "finish", "park", "vote"])
def test_a_replica_that_falls_silent_before_the_commit_point_aborts_the_swap(fleet: SimulatedFleet, phase: str) -> None:
    fleet.before_call = falls_silent_in(fleet, phase, "r1")
    with pytest.raises(ReplicaGone, match=rf"did not {phase}.*; try again"):
        swapped(fleet, "/1")
    fleet.before_call = None
    assert sorted(fleet.generating()) == ["r0", "r2"]
    fleet.replicas["r1"].awake.set()
    fleet.pass_time(30)
    assert_all_serve(fleet, 1)


def test_requests_that_do_not_finish_in_time_refuse_a_swap_and_a_pause_by_name(fleet: SimulatedFleet) -> None:
    fleet.replicas["r1"].engine.is_busy = True
    assert fleet.weights is not None
    with pytest.raises(NotFinished, match="replica r1: the running requests did not finish"):
        swapped(fleet, "/1", in_flight="finish")
    with pytest.raises(NotFinished, match="replica r1: the running requests did not finish"):
        fleet.loop.run(fleet.weights.pause(PauseRequest(30.0, "finish")))
    fleet.pass_time(3)
    assert_all_serve(fleet, 1)


def test_a_replica_that_falls_silent_after_its_vote_stays_parked_while_the_others_go_on(fleet: SimulatedFleet) -> None:
    fleet.before_call = falls_silent_in(fleet, "commit", "r1")
    result = swapped(fleet, "/1")
    fleet.before_call = None
    assert (result.replicas, result.lagging) == (["r0", "r2"], ["r1"])
    assert result.paused_s < SETTINGS.forget_after_s + 1
    assert fleet.generating() == {"r0": 2, "r2": 2}
    fleet.replicas["r1"].awake.set()
    fleet.pass_time(10)
    assert_all_serve(fleet, 2)
    assert not fleet.killed


def test_a_replica_that_does_not_converge_in_time_is_replaced(fleet: SimulatedFleet) -> None:
    fleet.before_call = falls_silent_in(fleet, "commit", "r1")
    swapped(fleet, "/1")
    fleet.before_call = None
    fleet.pass_time(SETTINGS.converge_timeout_s + 10)
    assert fleet.killed == ["r1"]
    assert_all_serve(fleet, 2)


def test_a_replica_that_dies_after_its_vote_does_not_hold_the_others_up(fleet: SimulatedFleet) -> None:
    async def die(method: str, replica: Replica) -> None:
        if (method, replica.name) == ("commit", "r1") and replica.is_alive:
            fleet.kill("r1")
            fleet.add()

    fleet.before_call = die
    result = swapped(fleet, "/1")
    assert result.replicas == ["r0", "r2"]
    fleet.pass_time(10)
    assert_all_serve(fleet, 2)


def test_one_commit_that_fails_leaves_that_replica_parked_until_it_has_caught_up(fleet: SimulatedFleet) -> None:
    fleet.replicas["r1"].engine.fails_to = {"commit"}
    result = swapped(fleet, "/1")
    assert (result.replicas, result.lagging) == (["r0", "r2"], ["r1"])
    assert fleet.generating() == {"r0": 2, "r2": 2}
    fleet.replicas["r1"].engine.fails_to = set()
    fleet.pass_time(15)
    assert_all_serve(fleet, 2)


def test_a_commit_that_fails_everywhere_is_taken_back(fleet: SimulatedFleet) -> None:
    for replica in fleet.replicas.values():
        replica.engine.fails_to = {"commit"}
    assert "cannot commit" in refused(fleet, "/1")
    assert_all_serve(fleet, 1)


def test_a_replica_that_came_too_late_for_a_swap_waits_for_the_word_of_the_next_controller(
    fleet: SimulatedFleet,
) -> None:
    async def die_while_they_resume(phase: str, replica: Replica) -> None:
        if (phase, replica.name) == ("vote", "r0"):
            fleet.add()
            await asyncio.sleep(3)
        elif phase == "resume":
            fleet.kill_controller()

    fleet.before_call = die_while_they_resume
    fleet.swap("/1")
    fleet.pass_time(2 * SETTINGS.lease_s)
    assert "r3" not in fleet.generating()
    assert fleet.weights is None
    fleet.before_call = None
    fleet.start_controller()
    fleet.pass_time(15)
    assert_all_serve(fleet, 2, num_replicas=4)


def test_replicas_that_start_while_the_controller_reads_weights_alone_generate_only_the_new_version(
    fleet: SimulatedFleet,
) -> None:
    for name in list(fleet.replicas):
        fleet.kill(name)
    fleet.pass_time(SETTINGS.forget_after_s + 1)
    fleet.alone_s = 5.0
    swap = fleet.swap("/1")
    for _ in range(2):
        fleet.pass_time(1.5)
        fleet.add()
    fleet.pass_time(20)
    assert swap.result().replicas == []
    assert fleet.violations == []
    assert_all_serve(fleet, 2, num_replicas=2)


def test_a_replica_that_starts_in_mid_swap_generates_only_the_new_version(fleet: SimulatedFleet) -> None:
    async def start(method: str, replica: Replica) -> None:
        if (method, replica.name) == ("vote", "r0"):
            fleet.add()
            await asyncio.sleep(3)

    fleet.before_call = start
    swapped(fleet, "/1")
    fleet.pass_time(10)
    assert_all_serve(fleet, 2, num_replicas=4)


@pytest.mark.parametrize("phase", ["finish", "park", "vote"])
def test_without_a_controller_only_those_that_have_not_voted_resume(fleet: SimulatedFleet, phase: str) -> None:
    async def die(method: str, _: Replica) -> None:
        if method == {"finish": "park", "park": "vote", "vote": "commit"}[phase]:
            fleet.kill_controller()
            await asyncio.sleep(10_000)

    fleet.before_call = die
    fleet.swap("/1")
    fleet.pass_time(SETTINGS.lease_s + 30)
    fleet.before_call = None
    # The decision was durable before the first was told to commit.
    assert fleet.generating() == ({} if phase == "vote" else {"r0": 1, "r1": 1, "r2": 1})
    fleet.start_controller()
    fleet.pass_time(30)
    assert_all_serve(fleet, 2 if phase == "vote" else 1)


def test_a_vote_whose_decision_was_not_written_is_undone_by_the_next_controller(
    fleet: SimulatedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fleet.weights is not None

    async def die(_: object) -> None:
        fleet.kill_controller()
        await asyncio.sleep(10_000)

    monkeypatch.setattr(fleet.weights._history, "commit", die)
    fleet.swap("/1")
    fleet.pass_time(100)
    assert fleet.generating() == {}
    fleet.start_controller()
    fleet.pass_time(20)
    assert_all_serve(fleet, 1)
    assert swapped(fleet, "/2").version == 2


def test_an_answer_of_before_an_order_does_not_drop_what_the_order_has_staged(fleet: SimulatedFleet) -> None:
    follower = fleet.replicas["r0"].follower
    committed = committed_of(fleet)

    async def meet() -> None:
        order = SwapOrder("new", 2, WeightSource("/1"))
        seen = follower.num_changes
        # Both find the lock free; the order takes it first.
        await asyncio.gather(follower.stage(order), follower.settle(committed, seen=seen))
        assert follower.staged_swap_id == "new"

    fleet.loop.run(meet())


def test_the_old_weights_are_freed_after_the_engine_runs_again(
    fleet: SimulatedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    parks: list[int] = []
    monkeypatch.setattr(FakeStaged, "discard", lambda _: parks.append(len(fleet.replicas["r0"].engine.parks)))
    fleet.kill("r1")
    fleet.kill("r2")
    fleet.pass_time(10)
    swapped(fleet, "/1")
    assert parks == [0]


def test_a_silent_replica_is_named_where_nobody_can_say_what_is_staged(fleet: SimulatedFleet) -> None:
    fleet.before_call = falls_silent_in(fleet, "details", "r2")
    started = fleet.loop.time()
    assert "replica r2 staged the weights but is silent since" in refused(fleet, "/1")
    assert fleet.loop.time() - started < SETTINGS.commit_timeout_s + 5


def test_a_replica_that_is_slow_for_a_while_does_not_lose_what_is_staged(fleet: SimulatedFleet) -> None:
    async def linger(method: str, replica: Replica) -> None:
        if (method, replica.name) == ("details", "r2") and fleet.loop.time() < SETTINGS.commit_timeout_s:
            await asyncio.sleep(SETTINGS.commit_timeout_s + 5)

    fleet.before_call = linger
    assert swapped(fleet, "/1").version == 2


def test_a_swap_that_lets_pinned_requests_finish_does_not_take_a_hold_over_that_ends_them(
    fleet: SimulatedFleet,
) -> None:
    follower = fleet.replicas["r0"].follower

    async def meet(pinned: str) -> SwapReply:
        for swap_id, how in (("first" + pinned, "end"), ("second" + pinned, pinned)):
            order = SwapOrder(swap_id, 2, WeightSource("/1"), pinned=how, lease_s=60.0, finish_timeout_s=1.0)
            await follower.stage(order)
            reply = await follower.park(order)
        return reply

    assert "were not to finish" in str(fleet.loop.run(meet("finish")).error)
    fleet.pass_time(5)
    assert fleet.loop.run(meet("end")).ok


# Whose turn it is


def test_a_swap_that_does_not_wait_is_refused_where_another_has_waited_for_the_turn(fleet: SimulatedFleet) -> None:
    turn = SwapTurn()

    async def take(wait_s: float, seconds: float) -> None:
        async with turn.taken(wait_s=wait_s):
            await asyncio.sleep(seconds)

    async def come() -> None:
        waiter = asyncio.ensure_future(take(10.0, 5.0))
        async with asyncio.TaskGroup() as group:
            async with turn.taken(wait_s=0.0):
                group.create_task(_done(waiter))
                await asyncio.sleep(1)
            with pytest.raises(SwapConflict, match="another swap is under way"):
                await take(0.0, 0.0)

    fleet.loop.run(come())


@pytest.mark.parametrize("seconds", [100.0, 4000.0])
def test_a_download_holds_no_other_swap_up_and_ends(
    fleet: SimulatedFleet, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    assert fleet.weights is not None
    fetched_to: list[WeightSource] = []

    def fetch(source: WeightSource) -> WeightSource:
        fetched_to.append(source)
        return replace(source, path="/2")

    monkeypatch.setattr("serve_app.weights.fleet_weights.fetch_from_hub", fetch)
    fleet.kill_controller()
    fleet.start_controller()
    fleet.pass_time(5)
    delays = iter([seconds])
    fleet.loop.thread_delay = lambda: next(delays, 0.0)
    fetched = fleet.request(fleet.weights.swap(SwapRequest(WeightSource(hub="org/name"))))
    fleet.pass_time(1)
    assert swapped(fleet, "/1").version == 2
    if seconds < SETTINGS.fetch_timeout_s:
        assert fleet.loop.run(_done(fetched)).version == 3
        assert_all_serve(fleet, 3)
        return
    with pytest.raises(WeightsSourceError, match="org/name was not fetched from the hub within 3600 s"):
        fleet.loop.run(_done(fetched))
    assert_all_serve(fleet, 2)
    # What is still on its way is waited for, and not begun again.
    assert fetched_to == []
    assert fleet.loop.run(fleet.weights.swap(SwapRequest(WeightSource(hub="org/name")))).version == 3
    assert len(fetched_to) == 1


# Rolling


def test_a_rolling_swap_leads_requests_away_and_pauses_no_more_than_allowed(fleet: SimulatedFleet) -> None:
    fleet.is_synchronous = False
    fenced: list[int] = []
    versions: list[list[int]] = []

    async def look(phase: str, replica: Replica) -> None:
        if phase == "commit":
            fenced.append(sum(one.follower.is_fenced for one in fleet.replicas.values()))
            versions.append(sorted(fleet.versions()))

    fleet.before_call = look
    result = swapped(fleet, "/1", strategy="rolling", max_paused=1)
    assert_all_serve(fleet, 2)
    assert set(fenced) == {1}
    assert [1, 2] in versions
    assert result.replicas == ["r0", "r1", "r2"]
    assert not any(one.follower.is_fenced for one in fleet.replicas.values())


def test_a_replica_that_fails_in_a_rolling_swap_is_replaced_by_one_at_the_new_version(fleet: SimulatedFleet) -> None:
    fleet.is_synchronous = False
    fleet.replicas["r1"].engine.fails_to = {"commit"}
    result = swapped(fleet, "/1", strategy="rolling")
    assert (result.replicas, result.replaced) == (["r0", "r2"], ["r1"])
    fleet.pass_time(5)
    assert_all_serve(fleet, 2)


def test_requests_that_take_their_time_cost_no_replica_in_a_rolling_swap(fleet: SimulatedFleet) -> None:
    fleet.is_synchronous = False
    fleet.replicas["r1"].engine.is_busy = True
    result = swapped(fleet, "/1", strategy="rolling", in_flight="finish")
    assert (result.replicas, result.lagging, result.replaced) == (["r0", "r2"], ["r1"], [])
    fleet.pass_time(SETTINGS.converge_timeout_s / 2)
    assert [name for name, one in fleet.replicas.items() if one.follower.is_fenced] == ["r1"]
    fleet.replicas["r1"].engine.is_busy = False
    fleet.pass_time(15)
    assert_all_serve(fleet, 2)
    assert fleet.killed == []
    assert not any(one.follower.is_fenced for one in fleet.replicas.values())


def test_a_replica_whose_requests_never_finish_is_replaced_when_its_time_is_up(fleet: SimulatedFleet) -> None:
    fleet.is_synchronous = False
    fleet.replicas["r1"].engine.is_busy = True
    swapped(fleet, "/1", strategy="rolling", in_flight="finish")
    fleet.pass_time(SETTINGS.converge_timeout_s + 20)
    assert fleet.killed == ["r1"]
    assert_all_serve(fleet, 2)


def fail_next_commit(fleet: SimulatedFleet) -> None:
    """Has the next swap fail where it is committed, but not the one that goes back."""
    fleet.is_synchronous = False
    fleet.replicas["r1"].engine.fails_to = {"commit"}
    num_heard = len(fleet.heard)

    async def mend(method: str, replica: Replica) -> None:
        if method == "stage" and ("r1", "commit") in fleet.heard[num_heard:]:
            replica.engine.fails_to = set()

    fleet.before_call = mend


def test_a_rolling_swap_that_fails_brings_all_back_where_that_was_asked(fleet: SimulatedFleet) -> None:
    fail_next_commit(fleet)
    message = refused(fleet, "/1", strategy="rolling", on_failure="rollback")
    assert message == ("replica r1: cannot commit; all replicas are back at the weights of version 1, as version 3")
    assert_all_serve(fleet, 3)
    assert all(one.engine.content == fleet.folders["/base"] for one in fleet.replicas.values())


def test_a_rolling_swap_that_went_back_is_carried_out_when_it_is_repeated(fleet: SimulatedFleet) -> None:
    fail_next_commit(fleet)
    options: dict[str, Any] = {"strategy": "rolling", "on_failure": "rollback", "idempotency_key": "k"}
    assert "all replicas are back" in refused(fleet, "/1", **options)
    fleet.kill_controller()
    fleet.start_controller()
    fleet.pass_time(3)
    again = swapped(fleet, "/1", **options)
    assert again.version == 4
    assert_all_serve(fleet, 4)
    assert swapped(fleet, "/1", **options) == again


def test_by_default_nobody_goes_back_to_weights_that_have_failed(fleet: SimulatedFleet) -> None:
    swapped(fleet, "/1")
    options: dict[str, Any] = {"strategy": "rolling", "on_failure": "rollback"}
    fail_next_commit(fleet)
    assert "back at the weights of version 2, as version 4" in refused(fleet, "/2", **options)
    # What was served before a rollback that fails comes back, though it has the same weights.
    fail_next_commit(fleet)
    assert fleet.weights is not None
    with pytest.raises(RollingFailed, match="back at the weights of version 4, as version 6"):
        fleet.loop.run(fleet.weights.rollback(RollbackRequest(2, **options)))
    fleet.kill_controller()
    fleet.start_controller()
    fleet.pass_time(3)
    assert fleet.loop.run(fleet.weights.rollback(RollbackRequest())).version == 7
    assert all(one.engine.content == fleet.folders["/base"] for one in fleet.replicas.values())
    # Who names it gets it.
    fleet.loop.run(fleet.weights.rollback(RollbackRequest(3)))
    assert all(one.engine.content == fleet.folders["/2"] for one in fleet.replicas.values())


# What the weights are


def test_changes_are_not_applied_to_a_version_that_was_committed_while_they_waited(fleet: SimulatedFleet) -> None:
    fleet.folders["/part"] = {"b": 9.0}
    first = fleet.swap("/1")
    changes = fleet.swap("/part", partial=True, base_version=1, wait_s=SETTINGS.stage_timeout_s)
    with pytest.raises(SwapConflict, match="changes to version 1; begin again"):
        fleet.loop.run(_done(changes))
    assert first.result().version == 2
    assert_all_serve(fleet, 2)
    assert swapped(fleet, "/part", partial=True, base_version=2).version == 3


def test_a_partial_swap_keeps_the_other_tensors_and_says_which(fleet: SimulatedFleet) -> None:
    swapped(fleet, "/1")
    fleet.folders["/part"] = {"b": 9.0}
    result = swapped(fleet, "/part", partial=True)
    assert result.unchanged == ["a"]
    assert all(one.engine.content == {"a": 1.0, "b": 9.0} for one in fleet.replicas.values())
    fleet.kill("r0")
    fleet.add()
    fleet.pass_time(5)
    assert_all_serve(fleet, 3)
    assert all(one.engine.content == {"a": 1.0, "b": 9.0} for one in fleet.replicas.values())


def test_replicas_that_read_different_weights_are_told_apart(fleet: SimulatedFleet) -> None:
    async def overwrite(method: str, replica: Replica) -> None:
        if (method, replica.name) == ("stage", "r2"):
            await asyncio.sleep(0.5)
            fleet.folders["/1"] = {"a": 7.0, "b": 1.0}

    fleet.before_call = overwrite
    assert "replicas r0 and r2 read different weights" in refused(fleet, "/1")
    assert_all_serve(fleet, 1)


def test_a_folder_overwritten_after_its_commit_is_found_by_the_next_replica_that_starts(fleet: SimulatedFleet) -> None:
    swapped(fleet, "/1")
    fleet.folders["/1"] = {"a": 1.0, "b": 7.0}
    fleet.add()
    fleet.pass_time(5)
    assert sorted(fleet.generating()) == ["r0", "r1", "r2"]
    assert fleet.weights is not None
    problem = str(fleet.loop.run(fleet.weights.status()).problem)
    assert "/1 no longer holds the weights that were committed" in problem
    assert "the first tensor that differs is b" in problem
    fleet.folders["/1"] = {"a": 1.0, "b": 1.0}
    fleet.pass_time(10)
    assert_all_serve(fleet, 2, num_replicas=4)


def test_a_rollback_to_what_is_gone_or_overwritten_is_refused(fleet: SimulatedFleet) -> None:
    swapped(fleet, "/1")
    swapped(fleet, "/2")
    for content in ({"a": 5.0, "b": 5.0}, None):
        if content is None:
            del fleet.folders["/1"]
        else:
            fleet.folders["/1"] = content
        assert fleet.weights is not None
        with pytest.raises(VersionUnavailable, match="no going back to version 2"):
            fleet.loop.run(fleet.weights.rollback(RollbackRequest(2)))
    assert_all_serve(fleet, 3)


def test_weights_that_are_not_what_was_staged_are_found_and_their_replica_replaced(fleet: SimulatedFleet) -> None:
    async def corrupt(method: str, replica: Replica) -> None:
        if (method, replica.name) == ("verify", "r1"):
            replica.engine.content["b"] = 99.0

    fleet.before_call = corrupt
    result = swapped(fleet, "/1", verify=True)
    assert (result.verified, result.replaced) == (["r0", "r2"], ["r1"])
    fleet.pass_time(5)
    assert_all_serve(fleet, 2)


def test_a_replica_that_starts_while_others_verify_begins_without_waiting_for_them(fleet: SimulatedFleet) -> None:
    generating: list[dict[str, int]] = []

    async def start(method: str, replica: Replica) -> None:
        if (method, replica.name) == ("vote", "r0"):
            fleet.add()
            await asyncio.sleep(3)
        if (method, replica.name) == ("verify", "r0"):
            await asyncio.sleep(SETTINGS.lease_s / 2)
            generating.append(fleet.generating())

    fleet.before_call = start
    swapped(fleet, "/1", verify=True)
    assert generating[0] == {"r0": 2, "r1": 2, "r2": 2, "r3": 2}


@pytest.mark.parametrize(
    ("probes", "message"),
    [
        (Probes([[1, 2]], [[1.5]], 0.1), "0.5 from its reference; at most 0.1"),
        (Probes([[1, 2]]), None),
        (Probes([[1, 2, 3]], [[1.0, 1.05]], 0.1), None),
    ],
)
def test_probes_decide_before_the_commit(fleet: SimulatedFleet, probes: Probes, message: str | None) -> None:
    if message is None:
        assert swapped(fleet, "/1", probes=probes).version == 2
    else:
        assert message in refused(fleet, "/1", probes=probes)
        assert_all_serve(fleet, 1)


def test_a_probe_that_is_not_finite_is_refused(fleet: SimulatedFleet) -> None:
    fleet.folders["/nan"] = {"a": float("nan"), "b": 0.0}
    with pytest.raises(WeightsInvalid, match="not finite"):
        swapped(fleet, "/nan", probes=Probes([[1, 2]]))


def test_a_probe_that_the_model_cannot_read_is_the_callers_mistake(fleet: SimulatedFleet) -> None:
    with pytest.raises(InvalidRequest, match=r"replica r\d: a probe has an id that is not in the vocabulary"):
        swapped(fleet, "/1", probes=Probes([[1, -2]]))
    assert_all_serve(fleet, 1)


def test_without_a_replica_the_controller_checks_and_commits(fleet: SimulatedFleet) -> None:
    for name in list(fleet.replicas):
        fleet.kill(name)
    fleet.pass_time(10)
    assert "there is no folder /nowhere" in refused(fleet, "/nowhere")
    result = swapped(fleet, "/1", verify=True)
    assert (result.version, result.replicas, result.lagging) == (2, [], [])
    assert (result.verified, "verify" in result.phases_s) == ([], False), "nobody has read anything back"
    assert fleet.weights is not None
    assert fleet.loop.run(fleet.weights.rollback(RollbackRequest(1))).version == 3
    fleet.add()
    fleet.pass_time(5)
    assert_all_serve(fleet, 3, num_replicas=1)


def test_changes_that_the_controller_took_alone_lie_over_the_configured_model(fleet: SimulatedFleet) -> None:
    fleet.folders["/part"] = {"b": 9.0}
    for name in list(fleet.replicas):
        fleet.kill(name)
    fleet.pass_time(10)
    result = swapped(fleet, "/part", partial=True)
    assert (result.version, result.unchanged) == (2, ["a"])
    fleet.add()
    fleet.pass_time(5)
    assert_all_serve(fleet, 2, num_replicas=1)
    assert [one.engine.content for one in fleet.replicas.values()] == [{"a": 0.0, "b": 9.0}]


def test_without_a_replica_there_is_no_going_back_to_what_was_overwritten(fleet: SimulatedFleet) -> None:
    swapped(fleet, "/1")
    swapped(fleet, "/2")
    for name in list(fleet.replicas):
        fleet.kill(name)
    fleet.pass_time(10)
    fleet.folders["/1"] = {"a": 5.0, "b": 5.0}
    assert fleet.weights is not None
    with pytest.raises(VersionUnavailable, match="/1 no longer holds the weights that were committed"):
        fleet.loop.run(fleet.weights.rollback(RollbackRequest(2)))
    assert committed_of(fleet).version == 3


def test_what_a_partial_swap_left_is_told_again_to_whoever_repeats_it(fleet: SimulatedFleet) -> None:
    fleet.folders["/part"] = {"b": 9.0}
    first = swapped(fleet, "/part", partial=True, idempotency_key="k")
    fleet.kill_controller()
    fleet.start_controller()
    fleet.pass_time(5)
    assert swapped(fleet, "/part", partial=True, idempotency_key="k") == first
    assert first.unchanged == ["a"]


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("partial", [False, True])
def test_a_key_is_for_the_weights_that_it_brought_and_no_others(
    fleet: SimulatedFleet, partial: bool, cast: bool
) -> None:
    first = swapped(fleet, "/1", partial=partial, cast=cast, idempotency_key="k")
    for changed in ({"cast": not cast}, {"partial": not partial}):
        with pytest.raises(SwapConflict, match=f"'k' brought version {first.version} from .*; use another"):
            swapped(fleet, "/1", **{"partial": partial, "cast": cast, "idempotency_key": "k", **changed})
    # How they are brought, and what they are called, is not what they are.
    again = swapped(fleet, "/1", partial=partial, cast=cast, idempotency_key="k", label="again", verify=True)
    assert again == first


def test_a_version_may_not_lie_in_ever_more_folders(fleet: SimulatedFleet) -> None:
    assert fleet.weights is not None
    swap = SwapRequest(WeightSource(layers=tuple(f"/{i}" for i in range(65))))
    with pytest.raises(InvalidRequest, match="at most 64"):
        fleet.loop.run(fleet.weights.swap(swap))


# Leased pauses


def test_a_leased_pause_stops_all_and_ends_by_itself(fleet: SimulatedFleet) -> None:
    assert fleet.weights is not None
    lease = fleet.loop.run(fleet.weights.pause(PauseRequest(20.0)))
    assert lease.replicas == ["r0", "r1", "r2"]
    assert fleet.generating() == {}
    fleet.pass_time(10)
    fleet.loop.run(fleet.weights.renew_pause(lease.lease_id))
    fleet.pass_time(15)
    assert fleet.generating() == {}
    assert [one.lease_id for one in fleet.loop.run(fleet.weights.status()).pauses] == [lease.lease_id]
    fleet.pass_time(7)
    assert_all_serve(fleet, 1)
    with pytest.raises(LeaseGone, match="is over, so the fleet generates"):
        fleet.loop.run(fleet.weights.renew_pause(lease.lease_id))


def test_a_pause_ends_when_it_is_told_to_and_others_go_on(fleet: SimulatedFleet) -> None:
    assert fleet.weights is not None
    first, second = (fleet.loop.run(fleet.weights.pause(PauseRequest(50.0))) for _ in range(2))
    assert fleet.loop.run(fleet.weights.resume(first.lease_id)) == [first.lease_id]
    with pytest.raises(LeaseGone, match="is over, so the fleet stands still for another pause alone"):
        fleet.loop.run(fleet.weights.renew_pause(first.lease_id))
    fleet.pass_time(5)
    assert fleet.generating() == {}
    assert fleet.loop.run(fleet.weights.resume()) == [second.lease_id]
    assert_all_serve(fleet, 1)


def test_a_pause_that_lets_requests_finish_is_refused_where_the_fleet_stands_still(fleet: SimulatedFleet) -> None:
    assert fleet.weights is not None
    first = fleet.loop.run(fleet.weights.pause(PauseRequest(50.0)))
    with pytest.raises(WeightsError, match="stands still already, so nothing can finish"):
        fleet.loop.run(fleet.weights.pause(PauseRequest(50.0, "finish")))
    fleet.loop.run(fleet.weights.resume(first.lease_id))
    assert_all_serve(fleet, 1)
    fleet.loop.run(fleet.weights.pause(PauseRequest(50.0, "finish")))
    fleet.loop.run(fleet.weights.pause(PauseRequest(50.0, "finish")))
    assert fleet.generating() == {}


def test_a_replica_that_starts_during_a_pause_stands_still_too(fleet: SimulatedFleet) -> None:
    assert fleet.weights is not None
    fleet.loop.run(fleet.weights.pause(PauseRequest(30.0)))
    fleet.add()
    fleet.pass_time(20)
    assert fleet.generating() == {}
    fleet.pass_time(15)
    assert_all_serve(fleet, 1, num_replicas=4)


def test_a_pause_outlives_its_controller_no_longer_than_its_lease(fleet: SimulatedFleet) -> None:
    assert fleet.weights is not None
    lease = fleet.loop.run(fleet.weights.pause(PauseRequest(30.0)))
    fleet.kill_controller()
    fleet.pass_time(15)
    assert fleet.generating() == {}
    fleet.start_controller()
    fleet.pass_time(3)
    assert fleet.loop.run(fleet.weights.renew_pause(lease.lease_id, 10.0)).lease_id == lease.lease_id
    fleet.kill_controller()
    fleet.pass_time(12)
    assert_all_serve(fleet, 1)


def test_a_controller_that_has_just_restarted_renews_and_ends_the_pauses_of_before(fleet: SimulatedFleet) -> None:
    assert fleet.weights is not None
    lease = fleet.loop.run(fleet.weights.pause(PauseRequest(30.0)))
    fleet.kill_controller()
    assert fleet.loop.run(fleet.start_controller().renew_pause(lease.lease_id, 40.0)).lease_id == lease.lease_id
    fleet.kill_controller()
    assert fleet.loop.run(fleet.start_controller().resume()) == [lease.lease_id]
    assert_all_serve(fleet, 1)


def test_a_pause_ends_when_its_caller_goes_away_before_it_has_it(fleet: SimulatedFleet) -> None:
    assert fleet.weights is not None
    controller: Any = WeightController.func_or_class
    controller = controller.__new__(controller)
    controller._weights = fleet.weights

    async def linger(method: str, replica: Replica) -> None:
        if (method, replica.name) == ("pause", "r1"):
            await asyncio.sleep(2)

    fleet.before_call = linger
    asked = fleet.request(controller.pause(PauseRequest(3600.0)))
    fleet.pass_time(1)
    assert fleet.generating() == {}
    asked.cancel()
    fleet.pass_time(5)
    assert asked.cancelled()
    assert fleet.loop.run(fleet.weights.status()).pauses == []
    assert_all_serve(fleet, 1)


@pytest.mark.parametrize("is_answered_late", [False, True])
def test_a_pause_that_is_ended_before_all_stand_still_says_so(fleet: SimulatedFleet, is_answered_late: bool) -> None:
    assert fleet.weights is not None

    async def linger(method: str, replica: Replica) -> None:
        if (method, replica.name) == ("pause", "r1"):
            await asyncio.sleep(2 if is_answered_late else 0)

    fleet.before_call = linger
    asked = fleet.request(fleet.weights.pause(PauseRequest(600.0)))
    fleet.pass_time(1 if is_answered_late else 0.0015)
    assert not asked.done()
    assert len(fleet.loop.run(fleet.weights.resume())) == 1
    with pytest.raises(LeaseGone, match="ended by a resume"):
        fleet.loop.run(asyncio.wait_for(asked, 10))
    assert_all_serve(fleet, 1)


def test_a_swap_during_a_pause_is_carried_out_in_it(fleet: SimulatedFleet) -> None:
    assert fleet.weights is not None
    fleet.loop.run(fleet.weights.pause(PauseRequest(30.0)))
    assert swapped(fleet, "/1").version == 2
    assert fleet.generating() == {}
    fleet.loop.run(fleet.weights.resume())
    assert_all_serve(fleet, 2)


def test_a_pause_that_one_replica_cannot_keep_pauses_none(fleet: SimulatedFleet) -> None:
    assert fleet.weights is not None
    fleet.replicas["r1"].engine.fails_to = {"park"}
    with pytest.raises(WeightsError, match="replica r1: cannot park"):
        fleet.loop.run(fleet.weights.pause(PauseRequest(30.0)))
    fleet.replicas["r1"].engine.fails_to = set()
    fleet.pass_time(3)
    assert_all_serve(fleet, 1)


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_flight": "kill"}, "in_flight is 'kill'"),
        ({"strategy": "sideways"}, "strategy is 'sideways'"),
        ({"max_paused": 2}, "for strategy 'rolling' alone"),
        ({"strategy": "rolling", "max_paused": 0}, "max_paused is 0"),
        ({"finish_timeout_s": -1.0}, "finish_timeout_s is -1.0"),
        ({"finish_timeout_s": math.inf}, "finish_timeout_s is inf; it must be above 0 and at most 3600"),
        ({"wait_s": -1.0}, "wait_s is -1.0; it must be 0 to 3600"),
        ({"wait_s": math.nan}, "wait_s is nan"),
        ({"wait_s": "5"}, "wait_s is '5'; it must be 0 to 3600 seconds"),
        ({"finish_timeout_s": "5"}, "finish_timeout_s is '5'; it must be above 0"),
        ({"max_paused": None}, "max_paused is None; it must be an integer, at least 1"),
        ({"verify": "yes"}, "verify is 'yes'; it must be true or false"),
        ({"partial": None}, "partial is None; it must be true or false"),
        ({"cast": 1}, "cast is 1; it must be true or false"),
        ({"base_version": "1"}, "base_version is '1'; it must be an integer"),
        ({"probes": [[1, 2]]}, r"probes is \[\[1, 2\]\]; it must be Probes"),
        ({"probes": Probes([[1]])}, "each needs 2 to"),
        ({"probes": Probes([[1, 2]], [[0.0, 0.0]])}, "does not fit its prompts"),
        (
            {"probes": Probes([[1, 2], [1, 2, 3]], [[0.0], [0.0, math.nan]], 0.1)},
            "reference has nan for probe 1; it must",
        ),
        ({"probes": Probes([[1, 2, 3]], [[math.inf, 0.0]], 0.1)}, "reference has inf for probe 0; it must"),
        ({"probes": Probes([[1, 2]], [[0.0]], math.nan)}, "max_abs_difference is nan; it must be a finite"),
        ({"probes": Probes([[1, 2]], [[0.0]], -1.0)}, "max_abs_difference is -1.0; it must be a finite"),
    ],
)
def test_an_option_that_cannot_be_honoured_is_refused(
    fleet: SimulatedFleet, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        swapped(fleet, "/1", **options)
