"""The deadlines of the router's calls, in virtual time."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from serve_app.messages import SwapRequest, WeightSource
from serve_app.protocol.errors import SwapUnfinished
from serve_app.router.fleet import SWAP_MARGIN_S, Fleet
from serve_app.settings import AppSettings
from tests.serve_app.virtual_loop import VirtualLoop


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    yield loop
    loop.end()
    asyncio.set_event_loop(None)


class SlowController:
    """Swaps for a day."""

    @property
    def swap(self) -> Any:
        return self

    def remote(self, _: SwapRequest) -> Any:
        return asyncio.sleep(86_400)


class NoEngine:
    def options(self, **_: Any) -> "NoEngine":
        return self


ONE_RUN_S = 600 + 300 + 4 * 60


@pytest.mark.parametrize(
    ("request_", "expected_s"),
    [
        (SwapRequest(WeightSource("/w")), ONE_RUN_S),
        (SwapRequest(WeightSource("/w"), wait_s=50.0), ONE_RUN_S + 50),
        (SwapRequest(WeightSource(hub="org/name")), 3600 + ONE_RUN_S),
        (SwapRequest(WeightSource("/w"), strategy="rolling", on_failure="rollback"), 2 * ONE_RUN_S),
    ],
)
def test_a_swap_has_the_time_that_its_parts_may_take_and_is_said_to_go_on_after_it(
    loop: VirtualLoop, request_: SwapRequest, expected_s: float
) -> None:
    settings = AppSettings.model_validate({"model": "/m", "replicas": {"min": 1, "max": 1}})
    nobody: Any = None
    engine: Any = NoEngine()
    controller: Any = SlowController()
    fleet = Fleet(settings, engine=engine, controller=controller, routers=nobody)
    with pytest.raises(SwapUnfinished, match="goes on; GET /admin/weights says"):
        loop.run(fleet.swap(request_))
    assert loop.time() == pytest.approx(expected_s + SWAP_MARGIN_S, abs=0.01)
