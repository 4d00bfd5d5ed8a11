"""Requests for weights that are yet to come wait in nobody's way, each for its own time, and hear of their commit."""

import asyncio
from typing import Any

import pytest

from engine import SamplingParams, WorkloadHints
from serve_app.messages import GenerateRequest, TokenEvent
from serve_app.metrics import ROUTER_METRICS, Recorder
from serve_app.protocol.errors import LineFull, NoReplica, WeightVersionUnavailable
from serve_app.router.admission import Admission
from serve_app.router.admitted_events import AdmittedEvents
from serve_app.router.version_gate import VersionGate
from serve_app.router.version_watch import FleetVersions
from serve_app.routing.prospect import Prospect
from serve_app.routing.request_routing import RequestRouting
from serve_app.settings import LimitSettings
from tests.serve_app.virtual_loop import VirtualLoop

WAIT_S = 30.0
MAX_WAITING = 400
BUSY = Prospect(
    first_token_s=1.0, decode_s=2.0, alone_s=0.1, token_s=0.01, num_replicas=1, room_tokens=100, room_requests=4
)


class Fleet:
    """Says what it serves, ten times a second, and opens streams that answer at once."""

    def __init__(self, *, committed: int = 1, served: tuple[int, ...] = (1,)) -> None:
        self.committed, self.served = committed, served
        self.failure: Exception | None = None
        self.known: RequestRouting | None = None
        self.num_asked = 0
        self.opened: list[GenerateRequest] = []

    async def versions(self) -> FleetVersions:
        self.num_asked += 1
        await asyncio.sleep(0.1)
        if self.failure is not None:
            raise self.failure
        return FleetVersions(self.committed, frozenset(self.served))

    def routing(self) -> RequestRouting | None:
        return self.known

    def open(self, request: GenerateRequest) -> Any:
        self.opened.append(request)
        return Stream()


class Stream:
    async def __anext__(self) -> TokenEvent:
        return TokenEvent("r", [1])

    def close(self) -> None:
        pass


def wish(name: str = "r", *, least: int | None = 99, **fields: Any) -> GenerateRequest:
    hints = WorkloadHints(tenant=name)
    return GenerateRequest(name, [1] * 50, SamplingParams(max_new_tokens=10), hints, min_weight_version=least, **fields)


def gate_of(fleet: Fleet, *, max_waiting: int = MAX_WAITING, recorder: Recorder | None = None) -> VersionGate:
    stands_in: Any = fleet
    recorder = recorder or Recorder(ROUTER_METRICS)
    return VersionGate(stands_in, LimitSettings(version_wait_s=WAIT_S), max_waiting=max_waiting, recorder=recorder)


def shown(recorder: Recorder) -> str:
    lines = recorder.expose().splitlines()
    return next(line for line in lines if line.startswith("pitstop_requests_waiting_for_weights")).split()[-1]


def test_who_waits_for_a_version_holds_nobody_up_and_is_told_in_its_own_time(loop: VirtualLoop) -> None:
    fleet, recorder = Fleet(), Recorder(ROUTER_METRICS)
    gate = gate_of(fleet, recorder=recorder)
    admission = Admission(LimitSettings(), max_waiting=MAX_WAITING, recorder=recorder, prospect=lambda _: BUSY)
    assert shown(recorder) == "0.0"

    def ask(request: GenerateRequest) -> Any:
        return anext(AdmittedEvents(admission, request, fleet.open, gate=gate))

    async def refused_after(arrives_s: float) -> float:
        await asyncio.sleep(arrives_s)
        with pytest.raises(WeightVersionUnavailable, match=r"min_weight_version is 99 .* within 30 s"):
            await ask(wish("trainer"))
        return loop.time() - arrives_s

    async def scene() -> list[float]:
        waits = [asyncio.ensure_future(refused_after(number / 30)) for number in range(300)]
        await asyncio.sleep(15)
        assert (gate.num_waiting, admission.num_waiting, admission.queued_tokens) == (300, 0, 0)
        assert shown(recorder) == "300.0"
        before = loop.time()
        await ask(wish("other", least=None))
        assert loop.time() == pytest.approx(before, abs=0.01)
        return await asyncio.gather(*waits)

    assert loop.run(scene()) == pytest.approx([WAIT_S] * 300, abs=0.2)
    assert (gate.num_waiting, len(fleet.opened)) == (0, 1)
    assert shown(recorder) == "0.0"


def test_a_version_that_comes_lets_its_requests_in_with_the_time_that_is_left(loop: VirtualLoop) -> None:
    fleet = Fleet()
    gate = gate_of(fleet)
    loop.call_later(5.0, setattr, fleet, "committed", 2)
    loop.call_later(6.0, setattr, fleet, "served", (1, 2))
    request = loop.run(gate.enter(wish(least=2, timeout_s=20.0)))
    assert loop.time() == pytest.approx(6.0, abs=0.2)
    assert request.timeout_s == pytest.approx(14.0, abs=0.2)
    with pytest.raises(WeightVersionUnavailable, match="within 3 s"):
        loop.run(gate.enter(wish(least=3, timeout_s=3.0)))


def test_nobody_waits_whose_answer_does_not_hang_on_a_commit(loop: VirtualLoop) -> None:
    fleet = Fleet()
    gate = gate_of(fleet)
    for request in (wish(least=None), wish(weight_version=99), wish(resume_version=98)):
        assert loop.run(gate.enter(request)) is request
    fleet.known = RequestRouting("work")
    fleet.known.update({"old": {"weight_version": 1}, "new": {"weight_version": 2}})
    loop.run(gate.enter(wish(least=2)))
    assert fleet.num_asked == 0
    fleet.known.update({"old": {"weight_version": 1}, "new": {"weight_version": 2, "is_fenced": True}})
    with pytest.raises(WeightVersionUnavailable):
        loop.run(gate.enter(wish(least=2)))


@pytest.mark.parametrize("failure", [None, NoReplica("the controller is away")])
def test_a_fleet_that_sleeps_is_woken_and_a_silent_controller_stops_nobody(
    loop: VirtualLoop, failure: Exception | None
) -> None:
    fleet = Fleet(committed=2, served=())
    fleet.failure = failure
    loop.run(gate_of(fleet).enter(wish(least=2)))
    assert loop.time() < 1


def test_those_who_wait_are_bounded_and_one_who_leaves_makes_room(loop: VirtualLoop) -> None:
    gate = gate_of(Fleet(), max_waiting=1)

    async def scene() -> None:
        first = asyncio.ensure_future(gate.enter(wish()))
        await asyncio.sleep(0)
        with pytest.raises(LineFull, match=r"1 requests wait for weights .* which is the limit") as caught:
            await gate.enter(wish())
        assert caught.value.retry_after_s == WAIT_S
        first.cancel()
        await asyncio.wait([first])
        assert gate.num_waiting == 0

    loop.run(scene())
