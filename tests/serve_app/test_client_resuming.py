"""The Python client goes on by itself where the router that answers is lost, with every token once."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from ray.exceptions import RayActorError
from virtual_loop import VirtualLoop

from engine import InvalidRequest, WeightSpan
from serve_app.client.resuming import MAX_ATTEMPTS, resumed_stream
from serve_app.messages import TokenEvent
from serve_app.protocol.errors import NoReplica, PoisonRequest, ReplicaLost
from serve_app.resume_point import ResumePoint

LENGTHS = (5, 7)
"""Of two outputs."""


class Response:
    """What a handle gives for one attempt: events until it fails."""

    def __init__(self, point: ResumePoint | None, *, num_events: int | None, error: Exception) -> None:
        self._events = self._all(point)
        self._num_left = num_events
        self._error = error
        self.is_cancelled = False

    async def __anext__(self) -> TokenEvent:
        if self._num_left == 0:
            raise self._error
        if self._num_left is not None:
            self._num_left -= 1
        return await anext(self._events)

    def cancel(self) -> None:
        self.is_cancelled = True

    async def _all(self, point: ResumePoint | None) -> AsyncIterator[TokenEvent]:
        tokens = ((),) * len(LENGTHS) if point is None else point.tokens
        done = [length if ids is None else len(ids) for length, ids in zip(LENGTHS, tokens, strict=True)]
        while done != list(LENGTHS):
            index = min(range(len(LENGTHS)), key=lambda one: (done[one] == LENGTHS[one], done[one]))
            place, done[index] = done[index], done[index] + 1
            yield TokenEvent(
                "r",
                [100 * index + place],
                weight_versions=(WeightSpan(1, place, place + 1),),
                finish_reason="length" if done[index] == LENGTHS[index] else None,
                index=index,
                seed=7 if place == 0 else None,
            )


class Router:
    """Attempt i gives so many events and then fails, as the script says; None is to the end."""

    def __init__(self, script: Callable[[int], int | None], error: Exception | None = None) -> None:
        self._script = script
        self._error = error or RayActorError()
        self.points: list[ResumePoint | None] = []
        self.responses: list[Response] = []

    def ask(self, *, resume: ResumePoint | None) -> Any:
        self.points.append(resume)
        self.responses.append(Response(resume, num_events=self._script(len(self.responses)), error=self._error))
        return self.responses[-1]


def read(router: Router) -> tuple[list[list[int]], float]:
    """Gives the tokens of each output, and how long it took."""

    async def run() -> list[list[int]]:
        outputs: list[list[int]] = [[] for _ in LENGTHS]
        async for event in resumed_stream(router.ask, None, num_sequences=len(LENGTHS), timeout_s=1e6):
            outputs[event.index] += event.token_ids
        return outputs

    loop = VirtualLoop()
    try:
        return loop.run(run()), loop.time()
    finally:
        loop.end()


WHOLE = [[100 * index + place for place in range(length)] for index, length in enumerate(LENGTHS)]


@pytest.mark.parametrize("num_events", range(1, sum(LENGTHS)))
def test_a_stream_goes_on_wherever_its_router_was_lost(num_events: int) -> None:
    router = Router(lambda attempt: num_events if attempt == 0 else None)
    outputs, _ = read(router)
    assert outputs == WHOLE
    first, second = router.points
    assert first is None
    assert second is not None
    assert second.seed == 7
    assert sum(len(ids or ()) for ids in second.tokens) <= num_events


def test_it_goes_on_as_often_as_it_takes() -> None:
    router = Router(lambda _: 1)
    assert read(router)[0] == WHOLE
    assert len(router.points) == sum(LENGTHS)


def test_lost_before_anything_came_it_begins_anew() -> None:
    router = Router(lambda attempt: 0 if attempt < 3 else None)
    assert read(router)[0] == WHOLE
    assert router.points == [None] * 4


@pytest.mark.parametrize("error", [RayActorError(), NoReplica("nobody is there yet")])
def test_it_gives_up_where_no_router_comes(error: Exception) -> None:
    router = Router(lambda attempt: 2 if attempt == 0 else 0)
    first_error = router._error
    ask = router.ask

    def failing(*, resume: ResumePoint | None) -> Any:
        router._error = first_error if not router.responses else error
        return ask(resume=resume)

    router.ask = failing  # type: ignore[method-assign]
    with pytest.raises(ReplicaLost if isinstance(error, RayActorError) else NoReplica):
        read(router)
    assert len(router.points) == MAX_ATTEMPTS + 1


@pytest.mark.parametrize("error", [InvalidRequest("no"), PoisonRequest("it kills"), NoReplica("nobody serves")])
def test_a_refusal_is_one(error: Exception) -> None:
    router = Router(lambda _: 0, error)
    with pytest.raises(type(error)):
        read(router)
    assert len(router.points) == 1
