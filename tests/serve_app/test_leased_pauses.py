"""A replica that stands still by lease goes on afterwards, also where that needs a second attempt."""

import asyncio
import threading
from typing import Any

import pytest

from engine import InvalidRequest, Patience, WeightsError
from serve_app.messages import PauseOrder, PauseRequest
from serve_app.weights import leased_pauses
from serve_app.weights.leased_pauses import LeasedPauses
from serve_app.weights.swap_checks import check_pause

DEADLINE_S = 30.0


class StubbornManager:
    """Its loop parks, and resumes at the second attempt."""

    weight_version = 3

    def __init__(self) -> None:
        self.num_attempts = 0
        self.has_resumed = asyncio.Event()
        self._events = asyncio.get_running_loop()

    def park(self, **arguments: Any) -> "StubbornManager":  # noqa: ARG002  # the interface of a manager
        return self

    def resume(self) -> float:
        self.num_attempts += 1
        if self.num_attempts == 1:
            raise WeightsError("not now")
        self._events.call_soon_threadsafe(self.has_resumed.set)
        return 1.0


async def test_a_loop_that_does_not_resume_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leased_pauses, "RETRY_S", 0.0)
    manager = StubbornManager()
    pauses = LeasedPauses(manager, replica_id="one")  # type: ignore[arg-type]  # these two verbs are all it needs
    assert (await pauses.pause(PauseOrder("lease", remaining_s=600.0))).ok
    await pauses.end(["lease"])
    assert pauses.is_parked
    async with asyncio.timeout(DEADLINE_S):
        await manager.has_resumed.wait()
        await pauses.follow()
    assert not pauses.is_parked
    assert manager.num_attempts == 2


class BusyManager:
    """Its loop has requests that never finish, so that it parks only for who does not wait for them."""

    weight_version = 3

    def __init__(self) -> None:
        self.is_waited_for = asyncio.Event()
        self.is_parked = False
        self._events = asyncio.get_running_loop()
        self._wake = threading.Condition()

    def park(self, *, in_flight: str, patience: Patience, **_: Any) -> "BusyManager":
        if in_flight == "finish":
            with self._wake:
                patience.begin(self._wake)
                self._events.call_soon_threadsafe(self.is_waited_for.set)
                assert self._wake.wait_for(lambda: patience.is_over, DEADLINE_S)
            raise WeightsError("given up")
        self.is_parked = True
        return self

    def resume(self) -> float:
        self.is_parked = False
        return 1.0


@pytest.mark.parametrize("is_heard_with_a_heartbeat", [False, True])
async def test_a_pause_that_still_waits_ends_at_once_and_lets_others_begin(is_heard_with_a_heartbeat: bool) -> None:
    manager = BusyManager()
    pauses = LeasedPauses(manager, replica_id="one")  # type: ignore[arg-type]  # these two verbs are all it needs
    waiting = asyncio.create_task(pauses.pause(PauseOrder("first", remaining_s=600.0, in_flight="finish")))
    async with asyncio.timeout(DEADLINE_S):
        await manager.is_waited_for.wait()
        other = asyncio.create_task(pauses.pause(PauseOrder("second", remaining_s=600.0)))
        if is_heard_with_a_heartbeat:
            pauses.hear((), ["first"])
        else:
            await pauses.end(["first"])
        reply = await waiting
        assert (await other).ok
    assert (reply.ok, reply.error) == (False, "this pause was ended before it had begun")
    assert [order.lease_id for order in pauses.orders] == ["second"]
    assert manager.is_parked
    await pauses.end(["second"])
    assert not manager.is_parked


@pytest.mark.parametrize("lease_s", [1e-12, 0.999, 3600.1, float("nan"), float("inf")])
def test_a_lease_that_no_fleet_can_keep_is_refused(lease_s: float) -> None:
    with pytest.raises(InvalidRequest, match=r"lease_s is .*; it must be 1 to 3600"):
        check_pause(PauseRequest(lease_s))


def test_the_shortest_lease_is_taken() -> None:
    check_pause(PauseRequest(1.0))
