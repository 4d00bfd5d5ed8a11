"""A replica that stands still by lease goes on afterwards, also where that needs a second attempt."""

import asyncio
from typing import Any

import pytest

from engine import InvalidRequest, WeightsError
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


@pytest.mark.parametrize("lease_s", [1e-12, 0.999, 3600.1, float("nan"), float("inf")])
def test_a_lease_that_no_fleet_can_keep_is_refused(lease_s: float) -> None:
    with pytest.raises(InvalidRequest, match=r"lease_s is .*; it must be 1 to 3600"):
        check_pause(PauseRequest(lease_s))


def test_the_shortest_lease_is_taken() -> None:
    check_pause(PauseRequest(1.0))
