"""One request from its first event to its last: primed, read as pieces, ended when it is left."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol

from engine import FinishReason, WeightSpan
from serve_app.messages import TokenEvent
from serve_app.protocol.errors import GenerationFailed
from serve_app.router.admission import Admission
from serve_app.router.answer import Answer, Piece

PROBE_AFTER_S = 5.0
"""A request that has no token by then may wait for a replica that does not exist; the fleet is asked for a sign."""


class TokenEvents(Protocol):
    """Where the events of one request come from."""

    async def __anext__(self) -> TokenEvent:
        """Gives the next event; raises errors of the project only."""
        ...

    def close(self) -> None:
        """Ends the request in the engine unless it has ended; may be called at any time and more than once."""
        ...


class Generation:
    """The answer to one request while it is generated.

    Call `prime` first: what is refused is refused there, before anything was sent to the client. Then iterate over the
    pieces; the last one has a finish reason. Whoever made it calls `close`, in every case.
    """

    def __init__(self, events: TokenEvents, answer: Answer) -> None:
        self._events = events
        self._first: TokenEvent | None = None
        self._failure: str | None = None
        self._is_over = False
        self.answer = answer
        self.latest_event: TokenEvent | None = None

    async def prime(
        self, admission: Admission, *, probe: Callable[[], Awaitable[object]], probe_after_s: float = PROBE_AFTER_S
    ) -> None:
        """Waits for the first event; raises QueueFull, what `probe` raises, and the refusals of the engine."""
        with admission.place():
            first = asyncio.ensure_future(anext(self._events))
            try:
                while not (await asyncio.wait({first}, timeout=probe_after_s))[0]:
                    await probe()
                self._first = first.result()
            finally:
                first.cancel()

    @property
    def first_version(self) -> int | None:
        """The weight version of the first token; None where the first event has none."""
        spans: tuple[WeightSpan, ...] = self._first.weight_versions if self._first else ()
        return spans[0].version if spans else None

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> Piece:
        """Gives what the next event adds; raises GenerationFailed after the last piece of a failed request."""
        if self._failure is not None:
            raise GenerationFailed(self._failure)
        if self._is_over:
            raise StopAsyncIteration
        piece = self.answer.push(await self._next_event())
        if piece.finish_reason == FinishReason.FAILED:
            self._failure = (self.latest_event and self.latest_event.error) or "the engine gave no reason"
            return replace(piece, finish_reason=None)
        self._is_over = piece.finish_reason is not None
        return piece

    def close(self) -> None:
        """Ends the request in the engine unless it has ended."""
        self._events.close()

    async def _next_event(self) -> TokenEvent:
        assert self._first is not None, "prime comes first"
        # The primed event is used once; later ones come from the stream.
        is_primed = self.latest_event is None
        try:
            self.latest_event = self._first if is_primed else await anext(self._events)
        except StopAsyncIteration:
            raise GenerationFailed("the replica ended the stream without a finish reason") from None
        return self.latest_event
