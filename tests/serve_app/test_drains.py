"""Draining replicas by name: who is meant, who is refused, and what is waited for."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from virtual_loop import VirtualLoop

from engine import InvalidRequest
from serve_app.drains import Drains
from serve_app.messages import CommittedWeights, DrainOrder, DrainRequest, FleetStatus, ReplicaReport
from serve_app.protocol.drains import DrainBody, UndrainBody


class Fleet:
    """Two replicas on one machine, one on another; a drained one is empty `empties_after_s` later."""

    def __init__(self, *, empties_after_s: float = 0.3) -> None:
        self.reports = {
            name: ReplicaReport(name, 1, "ready", num_running=3, node=node)
            for name, node in (("a", "10.0.0.1"), ("b", "10.0.0.1"), ("c", "10.0.0.2"))
        }
        self._empties_after_s = empties_after_s
        self._drained_at: dict[str, float] = {}
        self.killed: list[str] = []
        self.drains = Drains(status=self.status, call_all=self.call_all, kill=self.kill)

    async def status(self) -> FleetStatus:
        now = asyncio.get_running_loop().time()
        for name, at in self._drained_at.items():
            if now >= at + self._empties_after_s:
                self.reports[name] = replace(self.reports[name], num_running=0)
        # Reported at the full second before.
        return FleetStatus(CommittedWeights(1), [replace(one, age_s=now % 1) for one in self.reports.values()])

    async def call_all(self, method: str, argument: Any, *, timeout_s: float) -> list[Any]:
        if method == "takes_requests_beside":
            return await self.who_serves_beside(argument, timeout_s=timeout_s)
        assert method == "set_drained"
        order: DrainOrder = argument
        for name in order.replica_ids:
            self.reports[name] = replace(self.reports[name], state="drained" if order.is_drained else "ready")
            self._drained_at[name] = asyncio.get_running_loop().time()
        return [name if name in order.replica_ids else None for name in self.reports]

    async def who_serves_beside(self, meant: frozenset[str], *, timeout_s: float) -> list[Any]:  # noqa: ARG002
        return [None if name in meant or one.state == "drained" else name for name, one in self.reports.items()]

    async def kill(self, name: str) -> None:
        self.killed.append(name)


class LateFleet(Fleet):
    """Reports tell a second late that a replica is drained."""

    async def status(self) -> FleetStatus:
        told, now = await super().status(), asyncio.get_running_loop().time()
        late = {name for name, at in self._drained_at.items() if now < at + 1}
        return replace(
            told, replicas=[replace(one, state="ready") if one.replica_id in late else one for one in told.replicas]
        )


class ShrinkingFleet(Fleet):
    """Serve takes all but one replica away; while their streams end, they report that they are ready."""

    def __init__(self, *, stays: str | None) -> None:
        super().__init__()
        self._stays = stays

    async def who_serves_beside(self, meant: frozenset[str], *, timeout_s: float) -> list[Any]:
        return [name for name in await super().who_serves_beside(meant, timeout_s=timeout_s) if name == self._stays]


class HangingFleet(Fleet):
    """One of the replicas does not say whether it serves."""

    async def who_serves_beside(self, meant: frozenset[str], *, timeout_s: float) -> list[Any]:  # noqa: ARG002
        await asyncio.sleep(timeout_s)
        raise TimeoutError


def test_one_that_serve_takes_away_is_no_other_that_serves(loop: VirtualLoop) -> None:
    fleet = ShrinkingFleet(stays="c")
    for request in (DrainRequest(replica_ids=("c",), is_replaced=True), DrainRequest(node="10.0.0.2")):
        with pytest.raises(InvalidRequest, match="c drained would leave no replica that serves; add one first"):
            loop.run(fleet.drains.drain(request))
    assert (fleet.reports["c"].state, fleet.killed) == ("ready", [])
    assert loop.run(fleet.drains.drain(DrainRequest(replica_ids=("a",)))).replicas == ["a"]
    fleet = ShrinkingFleet(stays=None)
    for name in "abc":
        with pytest.raises(InvalidRequest, match="would leave no replica"):
            loop.run(fleet.drains.drain(DrainRequest(replica_ids=(name,))))


@pytest.mark.parametrize("state", ["loading", "lagging", "draining", "unhealthy"])
def test_one_that_is_not_in_step_is_no_other_that_serves(loop: VirtualLoop, state: str) -> None:
    fleet = Fleet()
    for name in "ab":
        fleet.reports[name] = replace(fleet.reports[name], state=state)
    with pytest.raises(InvalidRequest, match="would leave no replica"):
        loop.run(fleet.drains.drain(DrainRequest(replica_ids=("c",))))


def test_without_an_answer_only_force_drains(loop: VirtualLoop) -> None:
    fleet = HangingFleet()
    with pytest.raises(InvalidRequest, match=r"did not say within 5 s whether it serves.*; try again, or say force"):
        loop.run(fleet.drains.drain(DrainRequest(replica_ids=("a",))))
    assert fleet.reports["a"].state == "ready"
    assert loop.run(fleet.drains.drain(DrainRequest(replica_ids=("a",), is_forced=True))).replicas == ["a"]


def test_it_waits_until_a_replica_is_empty_and_undrains_it_again(loop: VirtualLoop) -> None:
    fleet = Fleet()
    result = loop.run(fleet.drains.drain(DrainRequest(replica_ids=("a",))))
    assert (result.replicas, result.requests_left, fleet.killed) == (["a"], {}, [])
    assert fleet.reports["a"].num_running == 0
    assert loop.time() < 3
    assert loop.run(fleet.drains.undrain(DrainRequest(replica_ids=("a",)))).replicas == ["a"]
    assert fleet.reports["a"].state == "ready"


def test_drains_at_once_or_soon_after_each_other_leave_one_that_serves(loop: VirtualLoop) -> None:
    fleet = LateFleet()

    async def drain_all() -> list[Any]:
        drains = (fleet.drains.drain(DrainRequest(replica_ids=(name,))) for name in "abc")
        return await asyncio.gather(*drains, return_exceptions=True)

    *_, last = loop.run(drain_all())
    assert isinstance(last, InvalidRequest)
    assert [one.state for one in fleet.reports.values()] == ["drained", "drained", "ready"]
    loop.run(fleet.drains.undrain(DrainRequest(replica_ids=("a",))))
    assert loop.run(fleet.drains.drain(DrainRequest(replica_ids=("c",)))).replicas == ["c"]
    with pytest.raises(InvalidRequest):
        loop.run(fleet.drains.drain(DrainRequest(replica_ids=("a",))))


def test_a_node_is_drained_whole_and_its_replicas_replaced(loop: VirtualLoop) -> None:
    fleet = Fleet()
    result = loop.run(fleet.drains.drain(DrainRequest(node="10.0.0.1", is_replaced=True)))
    assert (result.replicas, fleet.killed) == (["a", "b"], ["a", "b"])


def test_one_that_does_not_get_empty_is_told_of_and_not_replaced(loop: VirtualLoop) -> None:
    fleet = Fleet(empties_after_s=1e9)
    result = loop.run(fleet.drains.drain(DrainRequest(replica_ids=("a",), timeout_s=5, is_replaced=True)))
    assert (result.requests_left, fleet.killed) == ({"a": 3}, [])
    assert loop.time() == pytest.approx(5, abs=0.3)


@pytest.mark.parametrize(("empties_after_s", "left", "killed"), [(0.0, {}, ["a"]), (1e9, {"a": 3}, [])])
def test_without_time_to_wait_it_is_what_the_next_report_says(
    loop: VirtualLoop, empties_after_s: float, left: dict[str, int], killed: list[str]
) -> None:
    fleet = Fleet(empties_after_s=empties_after_s)
    loop.run(asyncio.sleep(0.5))
    result = loop.run(fleet.drains.drain(DrainRequest(replica_ids=("a",), timeout_s=0, is_replaced=True)))
    assert (result.requests_left, fleet.killed) == (left, killed)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (DrainRequest(replica_ids=("x",)), "x is not one of those that report: a, b, c"),
        (DrainRequest(node="10.0.0.9"), "no replica reports from node 10.0.0.9"),
        (DrainRequest(), "name replicas or a node"),
        (DrainRequest(replica_ids=("a", "b", "c")), "would leave no replica"),
    ],
)
def test_what_cannot_be_drained_is_refused(loop: VirtualLoop, request_: DrainRequest, message: str) -> None:
    fleet = Fleet()
    with pytest.raises(InvalidRequest, match=message):
        loop.run(fleet.drains.drain(request_))
    assert {report.state for report in fleet.reports.values()} == {"ready"}


def test_the_last_one_is_drained_by_force_alone(loop: VirtualLoop) -> None:
    fleet = Fleet()
    loop.run(fleet.drains.drain(DrainRequest(replica_ids=("a", "b"))))
    with pytest.raises(InvalidRequest, match="would leave no replica"):
        loop.run(fleet.drains.drain(DrainRequest(replica_ids=("c",))))
    assert loop.run(fleet.drains.drain(DrainRequest(replica_ids=("c",), is_forced=True))).replicas == ["c"]


def test_bodies_say_what_the_controller_takes() -> None:
    body = DrainBody(replica_ids=["a"], node="n", timeout_s=3.0, replace=True, force=True)
    assert body.request() == DrainRequest(replica_ids=("a",), node="n", timeout_s=3, is_replaced=True, is_forced=True)
    assert UndrainBody(replica_ids=["a"]).request() == DrainRequest(replica_ids=("a",))
