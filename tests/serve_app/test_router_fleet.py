"""The deadlines of the router's calls, in virtual time."""

import asyncio
import math
from typing import Any

import pytest

from engine import InvalidRequest
from serve_app.messages import (
    CommittedWeights,
    DrainRequest,
    FleetStatus,
    PauseRequest,
    ReplicaReport,
    RollbackRequest,
    SwapRequest,
    WeightSource,
)
from serve_app.protocol.errors import NoReplica, SwapUnfinished
from serve_app.router.fleet import SWAP_MARGIN_S, Fleet
from serve_app.settings import AppSettings
from tests.serve_app.virtual_loop import VirtualLoop


class SlowController:
    """Swaps for a day."""

    @property
    def swap(self) -> Any:
        return self

    def remote(self, _: SwapRequest) -> Any:
        return asyncio.sleep(86_400)


class NoEngine:
    app_name = "app"

    def options(self, **_: Any) -> "NoEngine":
        return self


TEXT: Any = "60"
NOTHING: Any = None
ONE_RUN_S = 600 + 300 + 4 * 60


@pytest.mark.parametrize(
    ("request_", "expected_s"),
    [
        (SwapRequest(WeightSource("/w")), ONE_RUN_S),
        (SwapRequest(WeightSource("/w"), wait_s=50.0), ONE_RUN_S + 50),
        (SwapRequest(WeightSource(hub="org/name")), 3600 + ONE_RUN_S),
        (SwapRequest(WeightSource("/w"), strategy="rolling", on_failure="rollback"), 2 * ONE_RUN_S),
    ],
)
def test_a_swap_has_the_time_that_its_parts_may_take_and_is_said_to_go_on_after_it(
    loop: VirtualLoop, request_: SwapRequest, expected_s: float
) -> None:
    settings = AppSettings.model_validate({"model": "/m", "replicas": {"min": 1, "max": 1}})
    nobody: Any = None
    engine: Any = NoEngine()
    controller: Any = SlowController()
    fleet = Fleet(settings, engine=engine, controller=controller, routers=nobody)
    with pytest.raises(SwapUnfinished, match="goes on; GET /admin/weights says"):
        loop.run(fleet.swap(request_))
    assert loop.time() == pytest.approx(expected_s + SWAP_MARGIN_S, abs=0.01)


@pytest.mark.parametrize(
    ("method", "request_", "name"),
    [
        ("swap", SwapRequest(WeightSource("/w"), max_paused=NOTHING), "max_paused"),
        ("swap", SwapRequest(WeightSource("/w"), wait_s=TEXT), "wait_s"),
        ("swap", SwapRequest(WeightSource("/w"), finish_timeout_s=TEXT), "finish_timeout_s"),
        ("swap", SwapRequest(TEXT), "source"),
        ("rollback", RollbackRequest(wait_s=math.nan), "wait_s"),
        ("rollback", RollbackRequest(TEXT), "version"),
        ("pause", PauseRequest(math.nan), "lease_s"),
        ("pause", PauseRequest(TEXT), "lease_s"),
        ("drain", DrainRequest(replica_ids=("r0",), timeout_s=NOTHING), "timeout_s"),
    ],
)
def test_what_a_handle_brings_is_checked_before_a_deadline_is_made_of_it(
    loop: VirtualLoop, method: str, request_: object, name: str
) -> None:
    nobody: Any = None
    engine: Any = NoEngine()
    fleet = Fleet(AppSettings(model="/m"), engine=engine, controller=nobody, routers=nobody)
    with pytest.raises(InvalidRequest, match=f"{name} is .*; it must be") as caught:
        loop.run(getattr(fleet, method)(request_))
    assert caught.value.param == name


class Engine(NoEngine):
    """Answers once it has started."""

    def __init__(self, *, start_s: float) -> None:
        self.start_s = start_s
        self.num_asked = 0

    @property
    def model_info(self) -> Any:
        return self

    def remote(self) -> Any:
        self.num_asked += 1
        return Response(self._answer())

    async def _answer(self) -> dict[str, int]:
        await asyncio.sleep(self.start_s)
        return {"max_model_len": 128, "vocab_size": 300, "end_ids": (), "weight_version": 1}


class Response:
    """An answer of Serve: awaitable, and it can be cancelled."""

    def __init__(self, work: Any) -> None:
        self._task = asyncio.ensure_future(work)

    def __await__(self) -> Any:
        return self._task.__await__()

    def cancel(self) -> None:
        self._task.cancel()


class QuietController:
    """Hears of these replicas."""

    def __init__(self, *replicas: ReplicaReport) -> None:
        self._status = FleetStatus(CommittedWeights(1), list(replicas))

    @property
    def status(self) -> Any:
        return self

    committed = status

    def remote(self) -> Any:
        return Response(asyncio.sleep(0, self._status))


def fleet_of(engine: Any, controller: Any, **replicas: int) -> Fleet:
    nobody: Any = None
    settings = AppSettings.model_validate({"model": "/m", "replicas": replicas, "autoscaling": {"wake_timeout_s": 90}})
    return Fleet(settings, engine=engine, controller=controller, routers=nobody)


@pytest.mark.parametrize("replicas", [[], [ReplicaReport("a", 1, "loading")]])
def test_a_sleeping_fleet_is_ready_without_being_woken_and_its_first_request_waits_for_it(
    loop: VirtualLoop, replicas: list[ReplicaReport]
) -> None:
    engine = Engine(start_s=60.0)
    fleet = fleet_of(engine, QuietController(*replicas), min=0, max=2)
    assert loop.run(fleet.reason_not_ready()) is None
    assert engine.num_asked == 0
    assert loop.run(fleet.limits()).max_model_len == 128
    assert loop.time() == pytest.approx(60, abs=0.1)


def test_nobody_waits_longer_than_allowed_for_a_fleet_to_wake(loop: VirtualLoop) -> None:
    fleet = fleet_of(Engine(start_s=1000.0), QuietController(), min=0, max=2)
    with pytest.raises(NoReplica, match="which had none and starts one, did not answer in 90 s"):
        loop.run(fleet.limits())
    assert loop.time() == pytest.approx(90, abs=0.1)


@pytest.mark.parametrize(("least", "state"), [(1, "ready"), (0, "ready")])
def test_a_fleet_that_is_awake_has_to_answer_soon(loop: VirtualLoop, least: int, state: str) -> None:
    fleet = fleet_of(Engine(start_s=1000.0), QuietController(ReplicaReport("a", 1, state)), min=least, max=2)
    with pytest.raises(NoReplica, match="an engine replica did not answer in 5 s"):
        loop.run(fleet.probe())
