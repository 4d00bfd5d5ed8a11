"""Requests that mind their weight version: they wait, meet the right replica or are refused, and never hang."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from engine import QueueFull, WeightVersionGone
from serve_app.messages import CommittedWeights, FleetStatus, GenerateRequest, ReplicaReport, TokenEvent
from serve_app.protocol.errors import NoReplica, WeightVersionUnavailable
from serve_app.router.version_watch import FleetVersions, VersionWatch
from serve_app.router.versioned_stream import VersionedStream

LAST = TokenEvent("r", [7], finish_reason="stop")


class Stream:
    """What one replica answers."""

    def __init__(self, answer: TokenEvent | Exception) -> None:
        self._answer = answer
        self.is_closed = False

    async def __anext__(self) -> TokenEvent:
        await asyncio.sleep(0)
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    def close(self) -> None:
        self.is_closed = True


class Fleet:
    """One replica that routing finds, and what the controller says; both change by a script."""

    def __init__(self, *, met: list[int], committed: int, served: list[int]) -> None:
        self._met = met
        self.committed = committed
        self.served = served
        self.streams: list[Stream] = []
        self.asked_at: list[float | None] = []
        self.failure: Exception | None = None
        self.refusal: TokenEvent | None = None
        self.on_look: Callable[[], None] = lambda: None

    def generate(self, request: GenerateRequest, *, asked_at: float | None = None) -> Stream:
        version = self._met.pop(0) if len(self._met) > 1 else self._met[0]
        kind = WeightVersionUnavailable if request.weight_version is None else WeightVersionGone
        refusal = self.refusal or kind(f"this replica serves weight version {version}")
        self.streams.append(Stream(LAST if request.accepts(version) else refusal))
        self.asked_at.append(asked_at)
        return self.streams[-1]

    async def versions(self) -> FleetVersions:
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        self.on_look()
        return FleetVersions(self.committed, frozenset(self.served))


def opened(fleet: Fleet, *, wait_s: float, least: int | None = 5, pin: int | None = None) -> VersionedStream:
    request = GenerateRequest("r", [1], min_weight_version=least, weight_version=pin)
    return VersionedStream(fleet, request, wait_s=wait_s)  # type: ignore[arg-type]  # stands in for the real one


async def test_a_replica_that_fits_answers_at_once() -> None:
    fleet = Fleet(met=[5], committed=5, served=[5])
    assert await anext(opened(fleet, wait_s=0)) == LAST
    assert len(fleet.streams) == 1


async def test_a_version_that_does_not_come_is_refused_with_both_numbers() -> None:
    fleet = Fleet(met=[4], committed=4, served=[4])
    with pytest.raises(WeightVersionUnavailable, match=r"min_weight_version is 5 .* version is 4; .* within 0 s"):
        await anext(opened(fleet, wait_s=0))


async def test_a_commit_ends_the_wait_and_the_time_counts_from_the_start() -> None:
    fleet = Fleet(met=[4, 5], committed=4, served=[4])
    looks = 0

    def commit_at_the_third_look() -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            fleet.committed, fleet.served = 5, [5]

    fleet.on_look = commit_at_the_third_look
    assert await anext(opened(fleet, wait_s=60)) == LAST
    assert looks == 3
    assert fleet.asked_at[0] is None
    assert isinstance(fleet.asked_at[1], float)


async def test_a_replica_that_routing_does_not_know_yet_is_found_without_a_wait_setting() -> None:
    fleet = Fleet(met=[4, 4, 4, 5], committed=5, served=[4, 5])
    assert await anext(opened(fleet, wait_s=0)) == LAST


async def test_a_pinned_version_nobody_serves_is_refused_at_once_however_long_others_wait() -> None:
    fleet = Fleet(met=[5], committed=5, served=[5])
    for pin in (4, 6):
        with pytest.raises(WeightVersionGone, match=rf"weight_version is {pin}, .* version is 5,") as caught:
            await anext(opened(fleet, wait_s=3600, least=None, pin=pin))
        assert caught.value.param == "weight_version"


async def test_a_pinned_request_finds_the_replica_that_still_has_its_version() -> None:
    fleet = Fleet(met=[5, 5, 4], committed=5, served=[4, 5])
    assert await anext(opened(fleet, wait_s=0, least=None, pin=4)) == LAST


async def test_a_pin_that_goes_before_the_first_token_is_a_refusal_and_later_an_end() -> None:
    fleet = Fleet(met=[5], committed=5, served=[5])
    fleet.refusal = TokenEvent("r", [], finish_reason="weight_version_gone")
    with pytest.raises(WeightVersionGone):
        await anext(opened(fleet, wait_s=60, least=None, pin=4))
    other = TokenEvent("r/1", [], finish_reason="weight_version_gone", index=1)
    fleet.refusal = replace(fleet.refusal, more=[other])
    with pytest.raises(WeightVersionGone):
        await anext(opened(fleet, wait_s=60, least=None, pin=4))
    assert all(stream.is_closed for stream in fleet.streams)
    fleet.refusal = TokenEvent("r", [7], finish_reason="weight_version_gone")
    assert (await anext(opened(fleet, wait_s=60, least=None, pin=4))).token_ids == [7]


@pytest.mark.parametrize("failure", [NoReplica("the controller is away"), QueueFull("7 requests wait", 7)])
async def test_other_errors_pass(failure: Exception) -> None:
    fleet = Fleet(met=[4], committed=4, served=[4])
    fleet.failure = failure
    with pytest.raises(type(failure)):
        await anext(opened(fleet, wait_s=60))


async def test_closing_closes_the_stream_of_the_moment() -> None:
    fleet = Fleet(met=[4, 5], committed=5, served=[5])
    stream = opened(fleet, wait_s=0)
    await anext(stream)
    stream.close()
    assert [one.is_closed for one in fleet.streams] == [True, True]


async def test_one_question_serves_all_who_ask_and_who_leaves_does_not_end_it() -> None:
    questions, answer = 0, asyncio.Event()

    async def status() -> FleetStatus:
        nonlocal questions
        questions += 1
        await answer.wait()
        reports = [ReplicaReport(f"{v}", v, state) for v, state in [(4, "lagging"), (5, "ready"), (6, "unhealthy")]]
        return FleetStatus(CommittedWeights(5), reports)

    watch = VersionWatch(status)
    looks = [asyncio.ensure_future(watch.look()) for _ in range(20)]
    await asyncio.sleep(0)
    looks[0].cancel()
    await asyncio.sleep(0)
    answer.set()
    assert await asyncio.gather(*looks[1:]) == [FleetVersions(5, frozenset({5}))] * 19
    assert questions == 1
    await watch.look()
    assert questions == 2
