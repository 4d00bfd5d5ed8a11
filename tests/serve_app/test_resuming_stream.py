"""What a request does when its replicas fail: how often it is tried, where, and when it is given up."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from virtual_loop import VirtualLoop

from engine import EngineDead, PitstopError, QueueFull, SamplingParams, WeightSpan, WeightVersionGone
from serve_app.messages import CommittedWeights, FleetStatus, GenerateRequest, ReplicaReport, TokenEvent
from serve_app.metrics import ROUTER_METRICS, Recorder
from serve_app.protocol.errors import (
    PoisonRequest,
    ReplicaDraining,
    ReplicaLost,
    ReplicaSilent,
    WeightVersionUnavailable,
)
from serve_app.router.fleet_watch import FleetWatch
from serve_app.router.resuming_stream import ResumeMeter, ResumingStream
from serve_app.router.version_watch import LOOK_INTERVAL_S, FleetVersions
from serve_app.routing import signals as routing_signals
from serve_app.settings import parse_settings

NUM_TOKENS = 10
PLACES = ("a", "b", "c")


class Attempt:
    """Gives tokens one by one, each its own position, until it is told to fail."""

    def __init__(self, request: GenerateRequest, *, version: int, replica_id: str, fails: Exception | None) -> None:
        self.request = request
        self._version = version
        self._replica_id = replica_id
        self._fails = fails
        self.is_closed = False

    async def __anext__(self) -> TokenEvent:
        done = len((self.request.resumed or ((),))[0] or ())
        if isinstance(self._fails, PitstopError):
            raise self._fails
        self._fails = ReplicaLost("it died")
        if done == NUM_TOKENS - 1:
            self._fails = None
        return TokenEvent(
            self.request.request_id,
            [done],
            weight_versions=(WeightSpan(self._version, done, done + 1),),
            replica_id=self._replica_id,
            finish_reason="length" if done == NUM_TOKENS - 1 else None,
        )

    def close(self) -> None:
        self.is_closed = True

    def interrupt(self, error: PitstopError) -> None:
        self._fails = error


class Fleet:
    """Replicas that fail attempt i as the script says; a None there gives one token and then dies, or the last one."""

    def __init__(self, script: Callable[[int], Exception | None], *, version: int = 1) -> None:
        self._script = script
        self.version = version
        self.on_look: Callable[[], None] = lambda: None
        self.attempts: list[Attempt] = []
        self.asked_at: list[float | None] = []

    def generate(self, request: GenerateRequest, *, asked_at: float | None = None) -> Attempt:
        number = len(self.attempts)
        fails = self._script(number)
        if fails is None and not request.accepts(self.version):
            fails = WeightVersionUnavailable("other weights")
            if request.weight_version is not None:
                fails = WeightVersionGone("other weights")
        place = PLACES[number % 3]
        routing_signals.note_place(request.request_id, place)
        self.attempts.append(Attempt(request, version=self.version, replica_id=place, fails=fails))
        self.asked_at.append(asked_at)
        return self.attempts[-1]

    async def versions(self) -> FleetVersions:
        await asyncio.sleep(LOOK_INTERVAL_S)
        self.on_look()
        return FleetVersions(self.version, frozenset({self.version}))

    async def status(self) -> FleetStatus:
        return FleetStatus(CommittedWeights(1), [ReplicaReport(name, 1, "ready") for name in PLACES])


class Run:
    """One request to its end."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        resume: dict[str, Any] | None = None,
        pin: int | None = None,
        max_time: float | None = None,
        least: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._fleet = fleet
        self._settings = parse_settings({"model": "x", "resume": resume or {}})
        sampling = SamplingParams(seed=1, max_new_tokens=NUM_TOKENS, max_time=max_time)
        self._request = GenerateRequest(
            "r", [1], sampling, weight_version=pin, min_weight_version=least, timeout_s=timeout_s
        )
        self._recorder = Recorder(ROUTER_METRICS)
        self.events: list[TokenEvent] = []
        self.seconds = 0.0
        self.on_event: Callable[[], None] = lambda: None

    def start(self) -> list[int]:
        """Gives the tokens; raises what the reader of the stream would get."""
        loop = VirtualLoop()
        try:
            loop.run(self._read(loop))
        finally:
            self.seconds = loop.time()
            loop.end()
        return [token for event in self.events for token in event.token_ids]

    def number(self, name: str) -> float:
        """Gives a counter, all its labels together."""
        lines = [line for line in self._recorder.expose().splitlines() if line.startswith(name)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    async def _read(self, loop: VirtualLoop) -> None:  # noqa: ARG002
        fleet: Any = self._fleet
        stream = ResumingStream(
            fleet,
            self._request,
            settings=self._settings,
            watch=FleetWatch(fleet.status, silent_after_s=self._settings.resume.silent_after_s),
            meter=ResumeMeter(self._recorder),
        )
        try:
            while not self.events or self.events[-1].finish_reason is None:
                self.events.append(await anext(stream))
                self.on_event()
        finally:
            stream.close()


def test_it_goes_on_until_it_is_whole_and_nobody_sees_it() -> None:
    fleet = Fleet(lambda number: ReplicaSilent("no news") if number % 2 else None)
    run = Run(fleet)
    # Each replica gives one token and is then drained, which is nobody's fault.
    run.on_event = lambda: fleet.attempts[-1].interrupt(ReplicaDraining("going away"))
    assert run.start() == list(range(NUM_TOKENS))
    assert {event.request_id for event in run.events} == {"r"}
    assert [event.finish_reason for event in run.events] == [None] * (NUM_TOKENS - 1) + ["length"]
    assert all(attempt.is_closed for attempt in fleet.attempts)
    assert run.number("pitstop_resumes_total") == len(fleet.attempts) - 1
    assert run.number("pitstop_resume_seconds_count") == NUM_TOKENS - 1
    last = fleet.attempts[-1].request
    assert last.resumed == (tuple(range(NUM_TOKENS - 1)),)
    assert last.resume_version == 1
    assert last.sampling.seed == 1
    assert not last.is_alone
    assert {"a", "b", "c"} >= last.excluded
    assert len(set(fleet.asked_at)) == 1, "the deadline must count from the first attempt"


@pytest.mark.parametrize("death", [ReplicaLost("died"), EngineDead("the loop ended")])
def test_the_third_death_is_of_a_request_alone_and_the_last(death: PitstopError) -> None:
    fleet = Fleet(lambda _: death)
    run = Run(fleet)
    with pytest.raises(PoisonRequest, match="3 replicas died"):
        run.start()
    assert [attempt.request.is_alone for attempt in fleet.attempts] == [False, False, True]
    assert run.number("pitstop_poison_requests_total") == 1


def test_deaths_count_though_tokens_came_between() -> None:
    fleet = Fleet(lambda _: None)
    run = Run(fleet)
    with pytest.raises(PoisonRequest):
        run.start()
    assert len(run.events) == 3
    assert [attempt.request.is_alone for attempt in fleet.attempts] == [False, False, True]


def test_silent_replicas_are_given_up_after_a_number_of_attempts() -> None:
    fleet = Fleet(lambda _: ReplicaSilent("no news"))
    run = Run(fleet, resume={"max_attempts": 5})
    with pytest.raises(ReplicaSilent):
        run.start()
    assert len(fleet.attempts) == 6
    assert run.number("pitstop_poison_requests_total") == 0
    # The first move is made at once, the others wait twice as long each time.
    assert run.seconds == pytest.approx(0.1 + 0.2 + 0.4 + 0.8, abs=0.3)


@pytest.mark.parametrize("wait", [ReplicaDraining("going away"), QueueFull("full")])
def test_what_is_nobodys_fault_is_tried_again_and_again(wait: PitstopError) -> None:
    fleet = Fleet(lambda number: wait if 0 < number < 30 else None)
    run = Run(fleet)
    run.on_event = lambda: fleet.attempts[-1].interrupt(ReplicaDraining("going away"))
    assert run.start() == list(range(NUM_TOKENS))


@pytest.mark.parametrize("refusal", [QueueFull("full"), PitstopError("internal"), WeightVersionGone("no", "x")])
def test_a_refusal_of_the_first_attempt_is_one(refusal: PitstopError) -> None:
    fleet = Fleet(lambda _: refusal)
    with pytest.raises(type(refusal)):
        Run(fleet).start()
    assert len(fleet.attempts) == 1


def test_a_replica_that_drains_refuses_nothing() -> None:
    fleet = Fleet(lambda number: ReplicaDraining("going away") if number < 2 else None)
    run = Run(fleet)
    run.on_event = lambda: fleet.attempts[-1].interrupt(ReplicaDraining("going away"))
    assert run.start() == list(range(NUM_TOKENS))
    assert fleet.attempts[2].request.resumed is None
    assert fleet.attempts[2].request.excluded == {"a", "b"}


def swapped(fleet: Fleet, run: Run) -> None:
    """Has other weights served from the fourth token on, and the replica that had the old ones die."""

    def on_event() -> None:
        fleet.attempts[-1].interrupt(ReplicaDraining("going away"))
        if len(run.events) == 4:
            fleet.version = 2

    run.on_event = on_event


def test_it_continues_under_other_weights_and_says_so() -> None:
    fleet = Fleet(lambda _: None)
    run = Run(fleet)
    swapped(fleet, run)
    assert run.start() == list(range(NUM_TOKENS))
    spans = [span for event in run.events for span in event.weight_versions]
    assert [span.version for span in spans] == [1] * 4 + [2] * 6
    # Each of the later replicas computed the tokens of the old weights anew.
    assert [span.is_recomputed for span in spans] == [False] * 4 + [True] * 6


def test_it_fails_where_only_the_old_weights_will_do() -> None:
    fleet = Fleet(lambda _: None)
    run = Run(fleet, resume={"on_version_gone": "fail"})
    swapped(fleet, run)
    with pytest.raises(WeightVersionUnavailable, match="so far is of weight version 1"):
        run.start()
    assert len(run.events) == 4


@pytest.mark.parametrize("comes_back", [True, False])
def test_it_waits_for_the_old_weights_where_that_is_wanted(comes_back: bool) -> None:
    fleet = Fleet(lambda _: None)
    run = Run(fleet, resume={"on_version_gone": "wait", "version_wait_s": 20})
    swapped(fleet, run)
    if not comes_back:
        with pytest.raises(WeightVersionUnavailable):
            run.start()
        assert run.seconds >= 20
        return
    looks: list[int] = []

    def on_look() -> None:
        looks.append(fleet.version)
        if len(looks) == 50:
            fleet.version = 1

    fleet.on_look = on_look
    assert run.start() == list(range(NUM_TOKENS))
    assert {span.version for event in run.events for span in event.weight_versions} == {1}


@pytest.mark.parametrize("timeout_s", [0.5, 1.0, 7.0, 600.0])
def test_no_wait_for_weights_is_longer_than_the_request_may_take(timeout_s: float) -> None:
    run = Run(Fleet(lambda _: None), least=9, timeout_s=timeout_s)
    waited_s = min(timeout_s, 30.0)
    with pytest.raises(WeightVersionUnavailable, match=f"min_weight_version is 9 .* within {waited_s:g} s"):
        run.start()
    assert waited_s <= run.seconds <= waited_s + 2 * LOOK_INTERVAL_S

    fleet = Fleet(lambda _: None)
    run = Run(fleet, resume={"on_version_gone": "wait", "version_wait_s": 30}, timeout_s=timeout_s)
    swapped(fleet, run)
    with pytest.raises(WeightVersionUnavailable):
        run.start()
    assert waited_s <= run.seconds <= max(timeout_s, waited_s) + 2 * LOOK_INTERVAL_S


def test_no_wait_for_routing_to_hear_of_a_replica_is_longer_than_the_request_may_take() -> None:
    fleet = Fleet(lambda _: WeightVersionUnavailable("routing is late"), version=9)
    run = Run(fleet, least=9, timeout_s=1.0)
    with pytest.raises(WeightVersionUnavailable):
        run.start()
    assert 1.0 <= run.seconds <= 1.0 + 4 * LOOK_INTERVAL_S


def test_a_pinned_request_ends_with_what_it_has() -> None:
    fleet = Fleet(lambda _: None)
    run = Run(fleet, pin=1)
    swapped(fleet, run)
    assert run.start() == list(range(4))
    assert run.events[-1].finish_reason == "weight_version_gone"


def test_time_that_has_passed_is_not_given_again() -> None:
    fleet = Fleet(lambda number: None if number == 0 else ReplicaSilent("no news") if number < 4 else None)
    run = Run(fleet, max_time=0.5)
    run.on_event = lambda: fleet.attempts[-1].interrupt(ReplicaDraining("going away"))
    run.start()
    left = [attempt.request.sampling.max_time for attempt in fleet.attempts]
    assert left[0] == 0.5
    assert left == sorted(left, reverse=True)
    assert left[-1] == 0.001
    waited = [attempt.request.hints.waited_s for attempt in fleet.attempts]
    assert waited[0] == 0
    assert waited == sorted(waited)
    assert waited[-1] >= 0.5, "it keeps its place in line"
