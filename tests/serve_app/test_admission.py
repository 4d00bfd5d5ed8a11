"""Admission: the line is bounded and fair, what cannot be in time is refused at once, and no place is ever lost."""

import asyncio
import pickle
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine import InvalidRequest, QueueFull, SamplingParams, WorkloadHints
from serve_app.messages import GenerateRequest, TokenEvent
from serve_app.metrics import ROUTER_METRICS, Recorder
from serve_app.protocol.errors import DeadlineExceeded, DeadlineTooShort, LineFull, TooLate
from serve_app.router.admission import Admission, Turn
from serve_app.router.admitted_events import AdmittedEvents
from serve_app.router.version_gate import VersionGate
from serve_app.routing.prospect import Prospect
from serve_app.settings import LimitSettings
from tests.serve_app.virtual_loop import VirtualLoop

FLEET = Prospect(
    first_token_s=1.0, decode_s=2.0, alone_s=0.1, token_s=0.01, num_replicas=1, room_tokens=100, room_requests=4
)


def ask(
    tenant: str = "a", *, prompt: int = 10, answer: int = 10, expected: int = 0, timeout_s: float | None = None
) -> Any:
    hints = WorkloadHints(tenant=tenant, expected_generated_length=expected)
    return GenerateRequest(tenant, [1] * prompt, SamplingParams(max_new_tokens=answer), hints, timeout_s=timeout_s)


class Line:
    """An admission over a fleet whose prospect a test sets."""

    def __init__(self, prospect: Prospect | None = FLEET, **limits: Any) -> None:
        self.prospect = prospect
        self.recorder = Recorder(ROUTER_METRICS)
        self.admission = Admission(
            LimitSettings(**limits), max_waiting=1000, recorder=self.recorder, prospect=lambda _: self.prospect
        )
        self.order: list[str] = []

    async def enter(self, request: GenerateRequest) -> Turn:
        turn = await self.admission.enter(request)
        self.order.append(request.hints.tenant or "")
        return turn

    def start(self, request: GenerateRequest) -> asyncio.Task[Turn]:
        return asyncio.ensure_future(self.enter(request))

    def outcomes(self) -> dict[str, float]:
        families = text_string_to_metric_families(self.recorder.expose())
        samples = [sample for family in families for sample in family.samples]
        return {s.labels["outcome"]: s.value for s in samples if s.name == "pitstop_admissions_total" and s.value}


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Runs a test on virtual time."""

    def on_virtual_time() -> None:
        loop = VirtualLoop()
        try:
            loop.run(test())
        finally:
            loop.end()

    on_virtual_time.__name__ = test.__name__
    return on_virtual_time


@run
async def test_what_the_replicas_have_room_for_is_sent_at_once_and_the_rest_in_turn() -> None:
    line = Line()
    turns = [line.start(ask()) for _ in range(6)]
    await asyncio.sleep(0)
    assert line.order == ["a"] * 4
    assert (line.admission.num_waiting, line.admission.num_in_line, line.admission.queued_tokens) == (6, 2, 40)
    (await turns[0]).begin()
    (await turns[0]).begin()
    await asyncio.sleep(0.01)
    assert line.order == ["a"] * 5
    (await turns[1]).leave()
    (await turns[5]).leave()
    for turn in turns:
        (await turn).leave()
    assert (line.admission.num_waiting, line.admission.num_in_line, line.admission.queued_tokens) == (0, 0, 0)
    assert line.outcomes() == {"at_once": 4, "waited": 2}


@run
async def test_a_flood_of_one_tenant_does_not_starve_another() -> None:
    line = Line()
    flood = [line.start(ask("flood")) for _ in range(200)]
    await asyncio.sleep(0)
    late = line.start(ask("late"))
    await asyncio.sleep(0)
    for number, turn in enumerate(flood):
        if late.done():
            break
        assert number < 8, "the other tenant waits behind the flood"
        (await turn).begin()
        await asyncio.sleep(0)
    assert line.order.index("late") < 12
    for task in flood:
        task.cancel()


@run
async def test_a_tenant_may_have_its_share_of_a_line_that_others_have_filled() -> None:
    line = Line(max_queued_tokens=400)
    flood = [line.start(ask("flood")) for _ in range(40)]
    await asyncio.sleep(0)
    refused = [task for task in flood if task.done() and task.exception()]
    assert len(refused) == 40 - 4 - 20
    error = refused[0].exception()
    assert isinstance(error, LineFull)
    assert error.retry_after_s >= 1
    assert "limit is 400" in str(error)
    others = [line.start(ask("other")) for _ in range(20)]
    await asyncio.sleep(0)
    assert sum(task.done() for task in others) == 10, "up to an equal share"
    assert line.admission.queued_tokens == 600
    for task in (*flood, *others):
        task.cancel()
        if task.done():
            task.exception()


@run
async def test_what_cannot_be_in_time_is_refused_at_once() -> None:
    line = Line()
    with pytest.raises(TooLate, match="too late for a timeout") as caught:
        await line.enter(ask(timeout_s=0.5))
    assert caught.value.retry_after_s == 1
    with pytest.raises(DeadlineTooShort, match="even on an idle replica") as refused:
        await line.enter(ask(timeout_s=0.05))
    assert isinstance(refused.value, InvalidRequest)
    assert refused.value.param == "timeout"
    with pytest.raises(DeadlineTooShort):
        await line.enter(ask(timeout_s=1.05, expected=10))
    (await line.enter(ask(timeout_s=1.05))).leave()  # nobody knows that the answer is as long as its limit
    assert line.outcomes() == {"too_late": 1, "never": 2, "at_once": 1}


@run
async def test_who_stands_in_line_too_long_is_told_so_and_the_line_goes_on() -> None:
    line = Line()
    sent = [await line.enter(ask()) for _ in range(4)]
    with pytest.raises(DeadlineExceeded, match="waited for 5 s"):
        await line.enter(ask(timeout_s=5.0))
    assert line.admission.num_waiting == 4
    gone = line.start(ask())
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.sleep(0)
    assert (line.admission.num_waiting, line.admission.queued_tokens) == (4, 0)
    for turn in sent:
        turn.leave()
    assert line.outcomes() == {"at_once": 4, "expired": 1, "left": 1}


@run
async def test_new_replicas_make_room_without_a_word_to_the_line() -> None:
    line = Line()
    waiting = [line.start(ask()) for _ in range(8)]
    await asyncio.sleep(1)
    assert len(line.order) == 4
    line.prospect = None
    await asyncio.wait_for(asyncio.gather(*waiting), 1)


@run
async def test_a_fleet_of_which_nothing_is_known_gets_everything_but_what_is_too_much() -> None:
    line = Line(None)
    turns = [await line.enter(ask()) for _ in range(1000)]
    with pytest.raises(QueueFull, match="1000 requests wait") as caught:
        await line.enter(ask())
    assert caught.value.num_waiting == 1000
    for turn in turns:
        turn.leave()
    assert line.admission.num_waiting == 0
    assert 1 <= line.admission.retry_after_s() <= 60


@run
async def test_no_storm_loses_a_place() -> None:
    rng, line = random.Random(4), Line(max_queued_tokens=2000)

    async def live() -> None:
        await asyncio.sleep(rng.random() * 5)
        try:
            async with asyncio.timeout(rng.choice([0.3, 30])):
                turn = await line.enter(
                    ask(rng.choice("abc"), prompt=rng.randrange(1, 60), timeout_s=rng.choice([1.5, 9]))
                )
                try:
                    await asyncio.sleep(rng.random())
                    turn.begin()
                finally:
                    turn.leave()
        except (QueueFull, DeadlineExceeded, TimeoutError, InvalidRequest):
            return

    await asyncio.gather(*(live() for _ in range(400)))
    assert (line.admission.num_waiting, line.admission.queued_tokens) == (0, 0)
    assert sum(line.outcomes().values()) == 400


class Events:
    def __init__(self) -> None:
        self.is_closed = False

    async def __anext__(self) -> TokenEvent:
        return TokenEvent("r", [1])

    def close(self) -> None:
        self.is_closed = True


@run
async def test_a_stream_is_opened_when_its_turn_comes_with_the_time_that_is_left() -> None:
    line, opened = Line(), list[GenerateRequest]()
    sent = [await line.enter(ask()) for _ in range(4)]

    def open_events(request: GenerateRequest) -> Events:
        opened.append(request)
        return Events()

    nobody: Any = None
    gate = VersionGate(nobody, LimitSettings(), max_waiting=0, recorder=Recorder(ROUTER_METRICS))
    events = AdmittedEvents(line.admission, ask(timeout_s=8.0), open_events, gate=gate)
    first = asyncio.ensure_future(anext(events))
    await asyncio.sleep(3)
    assert opened == []
    sent[0].begin()
    assert (await first).token_ids == [1]
    assert opened[0].timeout_s == pytest.approx(5.0, abs=0.01)
    assert line.admission.num_waiting == 3
    events.close()
    left = AdmittedEvents(line.admission, ask(), open_events, gate=gate)
    for turn in sent[1:]:
        turn.leave()
    left.close()
    with pytest.raises(StopAsyncIteration):
        await anext(left)
    assert line.admission.num_waiting == 0


def test_refusals_survive_the_way_between_processes() -> None:
    copy = pickle.loads(pickle.dumps(TooLate("late", 3, retry_after_s=7)))
    assert (str(copy), copy.num_waiting, copy.retry_after_s, type(copy)) == ("late", 3, 7, TooLate)
