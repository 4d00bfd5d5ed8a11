"""Starts and losses of replicas, each counted once; hours of them in no time."""

import asyncio
from collections.abc import Iterable, Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve_app.metrics import CONTROLLER_METRICS, Recorder
from serve_app.weights.replica_census import LOST_AFTER_S, MAX_REMEMBERED, ReplicaCensus
from tests.serve_app.virtual_loop import VirtualLoop

LEAVES_WITHIN_S = 600.0


class Counted:
    """A census, its time, and what Prometheus sees of it."""

    def __init__(self) -> None:
        self._loop = VirtualLoop()
        self._recorder = Recorder(CONTROLLER_METRICS)
        self._census = ReplicaCensus(self._recorder, forget_after_s=5)

    def end(self) -> None:
        self._loop.end()

    def hear(self, *names: str, is_serving: bool = False) -> list[bool]:
        async def heard() -> list[bool]:
            return [self._census.hear(name, is_serving=is_serving) for name in names]

        return self._loop.run(heard())

    def scale_down(self, num_replicas: int = 1) -> None:
        async def told() -> None:
            self._census.expect_leaving(num_replicas, within_s=LEAVES_WITHIN_S)

        self._loop.run(told())

    def live(self, names: Iterable[str], *, for_s: float) -> None:
        """These report every second, nobody else does."""

        async def lived() -> None:
            for _ in range(int(for_s)):
                for name in names:
                    self._census.hear(name, is_serving=False)
                self._census.look()
                await asyncio.sleep(1)

        self._loop.run(lived())

    def stand_still(self, seconds: float) -> None:
        self._loop.jump(seconds)

    def value(self, name: str) -> float:
        (found,) = (
            sample.value
            for family in text_string_to_metric_families(self._recorder.expose())
            for sample in family.samples
            if sample.name == name
        )
        return found

    @property
    def starts(self) -> float:
        return self.value("pitstop_replica_starts_total")

    @property
    def losses(self) -> float:
        return self.value("pitstop_replica_losses_total")


@pytest.fixture
def counted() -> Iterator[Counted]:
    made = Counted()
    yield made
    made.end()


def test_a_replica_starts_once_however_often_it_reports(counted: Counted) -> None:
    assert counted.hear("a", "b", "a", "a", "b") == [True, True, False, False, False]
    assert counted.starts == 2


def test_a_replica_that_serves_already_has_not_started(counted: Counted) -> None:
    assert counted.hear("a", is_serving=True) == [False]
    assert counted.hear("a") == [False]
    assert counted.starts == 0


def test_a_replica_that_dies_is_lost_once(counted: Counted) -> None:
    counted.live("ab", for_s=10)
    counted.live("a", for_s=3 * LOST_AFTER_S)
    assert counted.losses == 1
    counted.live("ac", for_s=3 * LOST_AFTER_S)
    assert (counted.starts, counted.losses) == (3, 1)


def test_a_replacement_that_is_quick_does_not_hide_the_loss(counted: Counted) -> None:
    counted.live("ab", for_s=10)
    counted.live("ac", for_s=3 * LOST_AFTER_S)
    assert counted.losses == 1


def test_a_replica_that_is_silent_for_a_while_is_not_lost(counted: Counted) -> None:
    counted.live("ab", for_s=10)
    counted.live("a", for_s=LOST_AFTER_S - 5)
    counted.live("ab", for_s=3 * LOST_AFTER_S)
    assert (counted.starts, counted.losses) == (2, 0)


def test_a_replica_that_comes_back_after_it_was_lost_has_not_started(counted: Counted) -> None:
    counted.live("ab", for_s=10)
    counted.live("a", for_s=3 * LOST_AFTER_S)
    assert counted.hear("b") == [False]
    assert counted.starts == 2


def test_scaling_in_and_out_loses_no_replica(counted: Counted) -> None:
    counted.live("ab", for_s=10)
    for name in "cdef":
        counted.scale_down()
        counted.live("a", for_s=3 * LOST_AFTER_S)
        counted.live(f"a{name}", for_s=60)
    # It goes on reporting while its streams end; another has come meanwhile.
    counted.scale_down()
    counted.live("afg", for_s=LEAVES_WITHIN_S)
    counted.live("ag", for_s=3 * LOST_AFTER_S)
    assert (counted.starts, counted.losses) == (7, 0)


def test_a_fleet_that_falls_asleep_loses_no_replica(counted: Counted) -> None:
    counted.live("abc", for_s=10)
    counted.scale_down(3)
    counted.live("", for_s=3 * LOST_AFTER_S)
    assert counted.losses == 0


def test_a_replica_that_was_scaled_away_before_it_reported_hides_no_later_loss(counted: Counted) -> None:
    counted.live("a", for_s=10)
    counted.scale_down()
    counted.live("a", for_s=LEAVES_WITHIN_S + LOST_AFTER_S + 10)
    counted.live("b", for_s=3 * LOST_AFTER_S)
    assert counted.losses == 1


def test_a_controller_that_stood_still_has_lost_nobody(counted: Counted) -> None:
    counted.live("ab", for_s=10)
    counted.stand_still(10 * LOST_AFTER_S)
    counted.live("ab", for_s=10)
    assert counted.losses == 0


def test_no_more_than_so_many_are_remembered(counted: Counted) -> None:
    names = [str(number) for number in range(MAX_REMEMBERED + 1)]
    counted.hear(*names)
    counted.live((), for_s=3 * LOST_AFTER_S)
    assert counted.hear(names[0], names[-1]) == [True, False]
