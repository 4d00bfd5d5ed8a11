"""A trainer's swap without Ray: over a process group, to the sessions of a controller in this process."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from ray.serve.handle import DeploymentHandle

from engine import InvalidRequest, WeightsError, WeightsInvalid, WeightsSourceError
from serve_app.client import Swap, SyncSwap
from serve_app.client.transport import GroupOptions
from serve_app.messages import SessionRequest, SessionState, SwapResult
from serve_app.protocol.errors import SwapSessionGone
from serve_app.weights.collective import Meeting, PieceHeader
from serve_app.weights.receiver import Receiver
from tests.serve_app.session_fakes import Fleet, request

GROUP = GroupOptions("gloo", 10.0)


class Controller:
    """What the controller's deployment does, with the receiver in a thread; `lost` is what its calls end with."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.lose_receiver()
        fleet.on_end = lambda _: self.lose_receiver()
        self.num_renewals = 0
        self.lost: set[str] = set()

    def lose_receiver(self) -> None:
        """As when its process is killed: the system closes its connections."""
        self.receiver = Receiver()

    async def open_session(self, wanted: SessionRequest) -> SessionState:
        return await self.fleet.sessions.open(wanted)

    async def start_receiver(self, _: str, backend: str) -> None:
        self.receiver.check(backend)

    async def join_group(self, _: str, meeting: Meeting) -> None:
        await asyncio.to_thread(self.receiver.join, meeting)

    async def receive_bucket(self, session_id: str, sequence: int, headers: list[PieceHeader]) -> SessionState:
        return await self.fleet.sessions.put(session_id, sequence, lambda: self.receiver.receive(headers))

    async def renew_session(self, session_id: str) -> SessionState:
        self.num_renewals += 1
        return await self.fleet.sessions.renew(session_id)

    async def commit_session(self, session_id: str) -> SwapResult:
        return await self.fleet.sessions.commit(session_id)

    async def abort_session(self, session_id: str) -> None:
        await self.fleet.sessions.abort(session_id)


class Handle:
    """Calls it as a handle of Serve does."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def options(self, **_: object) -> "Handle":
        return self

    def __getattr__(self, method: str) -> "Method":
        return Method(getattr(self._controller, method), is_lost=method in self._controller.lost)


class Method:
    def __init__(self, call: Callable[..., Coroutine[Any, Any, Any]], *, is_lost: bool) -> None:
        self._call = call
        self._is_lost = is_lost

    def remote(self, *arguments: object) -> "asyncio.Future[Any]":
        return asyncio.ensure_future(self._answer(*arguments))

    async def _answer(self, *arguments: object) -> object:
        answer = await self._call(*arguments)
        if self._is_lost:
            raise SwapSessionGone("the answer was lost")
        return answer


@pytest.fixture
def controller(tmp_path: Path) -> Controller:
    return Controller(Fleet(tmp_path))


def swap(controller: Controller, session_id: str = "one", **options: Any) -> Swap:
    handle = cast("DeploymentHandle[Any]", Handle(controller))
    return Swap(handle, request(session_id, **options), timeout_s=30.0, group=GROUP)


async def test_what_is_put_is_committed_when_the_with_is_left(controller: Controller) -> None:
    async with swap(controller) as one:
        await one.put({"w": torch.arange(4.0)})
        await one.put([("v", torch.ones(2)), ("b", torch.ones(3).to(torch.bfloat16))])
    assert one.result.version == 2
    newest = controller.fleet.newest()
    assert torch.equal(newest["w"], torch.arange(4.0))
    assert torch.equal(newest["b"], torch.ones(3).to(torch.bfloat16))
    assert len(controller.fleet.left()) == 1


async def test_an_exception_aborts_and_there_is_no_result(controller: Controller) -> None:
    one = swap(controller)

    async def fail() -> None:
        async with one:
            await one.put({"w": torch.zeros(4)})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert controller.fleet.left() == []
    with pytest.raises(RuntimeError, match="no result"):
        _ = one.result


async def test_refused_weights_raise_at_the_end_of_the_with(controller: Controller) -> None:
    controller.fleet.error = WeightsInvalid("w is not finite", tensor="w")
    with pytest.raises(WeightsInvalid, match="not finite"):
        async with swap(controller) as one:
            await one.put({"w": torch.zeros(4)})
    assert controller.fleet.left() == []


async def test_a_tensor_that_cannot_be_sent_aborts(controller: Controller) -> None:
    with pytest.raises(InvalidRequest, match=r"v is torch\.complex64"):
        async with swap(controller) as one:
            await one.put({"w": torch.zeros(4), "v": torch.zeros(2, dtype=torch.complex64)})
    assert controller.fleet.left() == []


@pytest.mark.parametrize(("weights", "held"), [(5, "5"), (None, "None"), ([1, 2], r"\[1, 2\]"), ([], "none")])
async def test_what_holds_no_weights_is_refused_and_aborts(controller: Controller, weights: Any, held: str) -> None:
    with pytest.raises(InvalidRequest, match=f"the weights are {held}; give a folder"):
        async with swap(controller) as one:
            await one.put_objects(weights)
    assert controller.fleet.left() == []


async def test_a_trainer_that_thinks_keeps_its_lease(controller: Controller) -> None:
    async with swap(controller, lease_s=1.0) as one:
        async with asyncio.timeout(10):
            while controller.num_renewals < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await one.put({"w": torch.zeros(4)})
    assert one.result.version == 2


async def test_a_lost_answer_is_found_by_the_key_and_a_known_key_sends_nothing(controller: Controller) -> None:
    controller.lost = {"commit_session"}
    async with swap(controller, key="step 7") as one:
        await one.put({"w": torch.zeros(4)})
    assert one.result.version == 2
    async with swap(controller, "two", key="step 7") as two:
        await two.put({"w": torch.ones(4)})
    assert two.result == one.result
    assert controller.fleet.num_swaps == 1


async def test_a_commit_that_never_was_says_so(controller: Controller) -> None:
    async def lose_the_session() -> None:
        async with swap(controller) as one:
            await one.put({"w": torch.zeros(4)})
            await controller.fleet.sessions.abort("one")

    with pytest.raises(SwapSessionGone, match="nothing was committed"):
        await lose_the_session()
    assert controller.fleet.left() == []
    assert controller.fleet.sessions.num_open == 0


async def test_a_receiver_that_is_gone_is_a_clear_error(controller: Controller) -> None:
    one = swap(controller)

    async def lose_the_receiver() -> None:
        async with one:
            await one.put({"w": torch.zeros(4)})
            controller.lose_receiver()
            await one.put({"v": torch.zeros(2**22)})

    with pytest.raises(WeightsError):
        await lose_the_receiver()
    assert controller.fleet.left() == []


async def test_a_session_that_is_gone_ends_the_next_put(controller: Controller) -> None:
    async def outlive_the_session() -> None:
        async with swap(controller) as one:
            await controller.fleet.sessions.abort("one", "its lease ran out")
            await one.put({"w": torch.zeros(2**22)})

    with pytest.raises((SwapSessionGone, WeightsSourceError), match="its lease ran out"):
        await outlive_the_session()


def test_the_synchronous_twin_iterates_in_the_callers_thread(controller: Controller) -> None:
    loop = asyncio.new_event_loop()
    try:
        with SyncSwap(swap(controller), loop.run_until_complete) as one:
            one.put((name, torch.ones(2)) for name in ("a", "b"))
        assert one.result.version == 2
    finally:
        loop.close()
    assert controller.fleet.newest().keys() == {"a", "b"}
