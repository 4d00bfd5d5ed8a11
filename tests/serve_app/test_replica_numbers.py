"""The numbers that label the metrics of replicas: one process each, as few as can be, through deaths and restarts."""

import asyncio

import pytest

from serve_app.weights.replica_numbers import START_S, ReplicaNumbers
from tests.serve_app.simulated_fleet import SETTINGS, SimulatedFleet
from tests.serve_app.virtual_loop import VirtualLoop


@pytest.fixture
def fleet(loop: VirtualLoop) -> SimulatedFleet:
    fleet = SimulatedFleet(loop, None)
    fleet.start_controller()
    for _ in range(3):
        fleet.add()
        fleet.pass_time(2)
    return fleet


def numbers(fleet: SimulatedFleet) -> dict[str, int | None]:
    return {name: replica.member.number for name, replica in fleet.replicas.items()}


def test_replicas_are_numbered_from_zero(fleet: SimulatedFleet) -> None:
    assert numbers(fleet) == {"r0": 0, "r1": 1, "r2": 2}
    assert fleet.weights is not None
    status = fleet.loop.run(fleet.weights.status())
    assert [report.number for report in status.replicas] == [0, 1, 2]


def test_who_stays_keeps_its_number_and_who_comes_takes_a_free_one(fleet: SimulatedFleet) -> None:
    fleet.kill("r0")
    fleet.pass_time(SETTINGS.forget_after_s + 1)
    assert numbers(fleet) == {"r1": 1, "r2": 2}
    for _ in range(2):
        fleet.add()
        fleet.pass_time(2)
    assert numbers(fleet) == {"r1": 1, "r2": 2, "r3": 0, "r4": 3}


def test_a_restarted_controller_gives_no_number_of_a_replica_that_runs(fleet: SimulatedFleet) -> None:
    fleet.kill("r1")
    fleet.kill_controller()
    fleet.pass_time(SETTINGS.forget_after_s + 1)
    fleet.start_controller()
    fleet.add()
    fleet.pass_time(20)
    assert numbers(fleet) == {"r0": 0, "r2": 2, "r3": 1}


def test_replicas_that_start_at_once_have_numbers_of_their_own_and_a_lost_start_frees_its(loop: VirtualLoop) -> None:
    given = ReplicaNumbers()

    async def take(name: str, *alive: str) -> int:
        return given.take(name, alive={*alive})

    assert [loop.run(take(name)) for name in ("a", "b", "a")] == [0, 1, 0]
    loop.run(asyncio.sleep(START_S + 1))
    assert loop.run(take("c", "b")) == 0
