"""Streams of replicas that leave or fall silent are interrupted, and no others."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from virtual_loop import VirtualLoop

from engine import PitstopError
from serve_app.messages import CommittedWeights, FleetStatus, ReplicaReport
from serve_app.protocol.errors import NoReplica, ReplicaDraining, ReplicaSilent
from serve_app.router.fleet_watch import DEATH_NOTICE_S, FleetWatch
from serve_app.routing import signals as routing_signals

SILENT_AFTER_S = 3.0


@dataclass(eq=False)
class Stream:
    place: str | None
    heard_at: float = 0.0
    errors: list[PitstopError] = field(default_factory=list)

    def interrupt(self, error: PitstopError) -> None:
        self.errors.append(error)


class Controller:
    """Hears of each replica once a second, except of those that stand still."""

    def __init__(self) -> None:
        self.still: dict[str, float] = {}
        self.is_away = False
        self.forget_after_s = 5.0

    async def status(self) -> FleetStatus:
        if self.is_away:
            raise NoReplica("the controller is away")
        now = asyncio.get_running_loop().time()
        ages = {name: now - self.still.get(name, now) for name in sorted(routing_signals.candidates())}
        reports = [ReplicaReport(name, 1, "ready", age_s=age) for name, age in ages.items()]
        return FleetStatus(
            CommittedWeights(1), [report for report in reports if report.age_s < self.forget_after_s], history=[]
        )


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    routing_signals.set_candidates(frozenset("abc"))
    loop = VirtualLoop()
    yield loop
    loop.end()
    routing_signals.set_candidates(frozenset())
    routing_signals.avoid(())


def test_streams_of_a_replica_that_leaves_alive_are_handed_over_at_once(loop: VirtualLoop) -> None:
    async def run() -> None:
        watch = FleetWatch(Controller().status, silent_after_s=SILENT_AFTER_S)
        streams = {name: Stream(name) for name in ["a", "b", "never seen", None]}
        for stream in streams.values():
            watch.follow(stream)
        await asyncio.sleep(1)
        assert not any(stream.errors for stream in streams.values())
        routing_signals.set_candidates(frozenset("bc"))
        await asyncio.sleep(0.35)
        assert not streams["a"].errors, "it may be dead, of which its stream is told"
        streams["a"].heard_at = loop.time()
        await asyncio.sleep(0.15)
        assert {type(error) for error in streams["a"].errors} == {ReplicaDraining}
        assert not any(stream.errors for name, stream in streams.items() if name != "a")
        for stream in streams.values():
            watch.unfollow(stream)

    loop.run(run())


def test_with_nobody_else_there_they_stay(loop: VirtualLoop) -> None:
    async def run() -> None:
        watch = FleetWatch(Controller().status, silent_after_s=SILENT_AFTER_S)
        stream = Stream("a")
        watch.follow(stream)
        await asyncio.sleep(1)
        routing_signals.set_candidates(frozenset())
        await asyncio.sleep(10)
        assert not stream.errors
        routing_signals.set_candidates(frozenset("d"))
        await asyncio.sleep(DEATH_NOTICE_S - 0.3)
        assert not stream.errors
        await asyncio.sleep(0.5)
        assert stream.errors
        watch.unfollow(stream)

    loop.run(run())


@pytest.mark.parametrize("forget_after_s", [1.0, 5.0, 1e9])
def test_a_silent_replica_loses_its_streams_and_new_ones_until_it_is_heard_again(
    loop: VirtualLoop, forget_after_s: float
) -> None:
    async def run() -> None:
        controller = Controller()
        controller.forget_after_s = forget_after_s
        watch = FleetWatch(controller.status, silent_after_s=SILENT_AFTER_S)
        stopped, lively, other = Stream("a"), Stream("a"), Stream("b")
        for stream in (stopped, lively, other):
            watch.follow(stream)
        await asyncio.sleep(1)
        controller.still["a"] = loop.time()
        for _ in range(60):
            await asyncio.sleep(0.1)
            lively.heard_at = loop.time()
        assert {type(error) for error in stopped.errors} == {ReplicaSilent}
        # Heartbeats may be lost where tokens are not, and a quiet stream of another replica is only slow.
        assert not lively.errors
        assert not other.errors
        assert [name for name in "abc" if routing_signals.is_avoided(name)] == ["a"]
        controller.still.clear()
        await asyncio.sleep(1)
        assert not routing_signals.is_avoided("a")
        for stream in (stopped, lively, other):
            watch.unfollow(stream)

    loop.run(run())


def test_without_the_controller_nobody_is_taken_to_be_silent(loop: VirtualLoop) -> None:
    async def run() -> None:
        controller = Controller()
        watch = FleetWatch(controller.status, silent_after_s=SILENT_AFTER_S)
        stream = Stream("a")
        watch.follow(stream)
        await asyncio.sleep(1)
        controller.is_away = True
        await asyncio.sleep(60)
        assert not stream.errors
        controller.is_away = False
        await asyncio.sleep(60)
        assert not stream.errors
        watch.unfollow(stream)

    loop.run(run())


def test_it_sleeps_while_nothing_is_followed(loop: VirtualLoop) -> None:
    async def run() -> None:
        watch = FleetWatch(Controller().status, silent_after_s=SILENT_AFTER_S)
        for _ in range(3):
            stream = Stream("a")
            watch.follow(stream)
            await asyncio.sleep(1)
            watch.unfollow(stream)
            await asyncio.sleep(1)
            assert len(asyncio.all_tasks()) == 1

    loop.run(run())
