"""One prompt from its first event to its last: primed, read as pieces of its answers, ended when it is left."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol

from engine import NOTHING_LEFT, FinishReason, PitstopError, WeightSpan
from serve_app.messages import TokenEvent
from serve_app.protocol.errors import ContradictorySettings, GenerationFailed
from serve_app.resume_point import ResumePoint, ResumeTrail
from serve_app.router.answer import Answer, Piece

PROBE_AFTER_S = 5.0
"""A request that has no token by then may wait for a replica that does not exist; the fleet is asked for a sign."""

EndSequence = Callable[[str], Coroutine[Any, Any, None]]


class TokenEvents(Protocol):
    """Where the events of one request come from."""

    async def __anext__(self) -> TokenEvent:
        """Gives the next event; raises errors of the project only."""
        ...

    def close(self) -> None:
        """Ends the request in the engine unless it has ended; may be called at any time and more than once."""
        ...


class NoEvents:
    """Of a prompt whose answers had all ended before: others of the same request go on."""

    async def __anext__(self) -> TokenEvent:
        raise StopAsyncIteration

    def close(self) -> None:
        pass


class Generation:
    """The answers to one prompt while they are generated: one, or as many as sequences were asked for.

    Call `prime` first: what is refused is refused there, before anything was sent to the client. Then iterate: each
    time gives the pieces of one event, at most one of an answer; the last one of an answer has a finish reason. Whoever
    made it calls `close`, in every case.
    """

    def __init__(
        self,
        events: TokenEvents,
        answers: Sequence[Answer],
        *,
        prompt_ids: Sequence[int] = (),
        end_sequence: EndSequence | None = None,
        trail: ResumeTrail | None = None,
        has_moved: Callable[[], bool] = lambda: False,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """end_sequence: ends one output in the engine whose others go on. trail: what its outputs have already.

        has_moved: a replica had taken it and was lost, so that it waits for another one as long as it may take.
        on_end: called once all answers are over, unless one has failed.
        """
        self._events = events
        self._end_sequence = end_sequence
        self._ending: set[asyncio.Task[None]] = set()
        self._first: TokenEvent | None = None
        self._has_moved = has_moved
        self._on_end = on_end
        self._failure: str | None = None
        self._abort = asyncio.Event()
        self._reader: asyncio.Task[Any] | None = None
        self.answers = answers
        self.trail = trail or ResumeTrail()
        self.prompt_ids = prompt_ids
        self.latest_event: TokenEvent | None = None

    async def prime(self, *, probe: Callable[[], Awaitable[object]], probe_after_s: float = PROBE_AFTER_S) -> None:
        """Waits for the first event; raises what refuses the request, and what `probe` raises."""
        if all(answer.is_over for answer in self.answers):
            return
        first = asyncio.ensure_future(self._read())
        try:
            while not (await asyncio.wait({first}, timeout=probe_after_s))[0]:
                if not self._has_moved():
                    await probe()
            self._first = first.result()
        finally:
            first.cancel()

    @property
    def first_version(self) -> int | None:
        """The weight version of the first token; None where the first event has none."""
        spans: tuple[WeightSpan, ...] = self._first.weight_versions if self._first else ()
        return spans[0].version if spans else None

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that the prefix cache gave."""
        return self.answers[0].num_cached_tokens

    def point(self) -> ResumePoint:
        """Gives where the request is, as of the pieces given so far."""
        point = self.trail.point(len(self.answers))
        assert point is not None, "the service draws a seed for every request"
        return replace(point, first_version=self.first_version)

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> list[Piece]:
        """Gives what the next event adds; raises after the last piece of a failed sequence.

        Raises ContradictorySettings where the request's own settings left nothing to choose, else GenerationFailed.
        """
        if self._failure is not None:
            raise _error_of(self._failure)
        if all(answer.is_over for answer in self.answers):
            raise StopAsyncIteration
        event = await self._next_event()
        pieces = []
        for each in (event, *event.more):
            if not self.answers[each.index].is_over:
                pieces.append(self._piece(each))
                self.trail.add(each)
                if self.answers[each.index].is_over:
                    self.trail.ended.add(each.index)
        if self._failure is None and all(answer.is_over for answer in self.answers):
            self._on_end()
        return pieces

    def close(self) -> None:
        """Ends the request in the engine unless it has ended."""
        self._events.close()

    def abort(self) -> None:
        """Ends the answers with what they have, as cancelled, and the request in the engine."""
        self._abort.set()
        self._events.close()
        # A stream that is closed under its reader need not wake it.
        if self._reader is not None:
            self._reader.cancel()

    async def _read(self) -> TokenEvent:
        """Gives the next event; of an aborted request one that ends what has not ended."""
        if self._abort.is_set():
            return self._cancelled()
        self._reader = reader = asyncio.current_task()
        assert reader is not None
        try:
            return await anext(self._events)
        except asyncio.CancelledError:
            # Somebody else may have cancelled the reader as well, and then it has to go.
            if not self._abort.is_set() or reader.uncancel() > 0:
                raise
        except (PitstopError, StopAsyncIteration):
            if not self._abort.is_set():
                raise
        finally:
            self._reader = None
        return self._cancelled()

    def _cancelled(self) -> TokenEvent:
        first, *more = [
            TokenEvent("", [], finish_reason=FinishReason.CANCELLED.value, index=index)
            for index, answer in enumerate(self.answers)
            if not answer.is_over
        ]
        first.more.extend(more)
        return first

    def _piece(self, event: TokenEvent) -> Piece:
        answer = self.answers[event.index]
        piece = answer.push(event)
        if piece.finish_reason == FinishReason.FAILED:
            self._failure = event.error or "the engine gave no reason"
            piece.finish_reason = None
        # A stop string may have ended it, which the engine does not know. Where it is the last, `close` ends all.
        elif answer.is_over and event.finish_reason is None and not all(one.is_over for one in self.answers):
            self._end(event.request_id)
        return piece

    def _end(self, sequence_id: str) -> None:
        assert self._end_sequence is not None, "only one of several answers ends alone"
        task = asyncio.ensure_future(self._end_sequence(sequence_id))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _next_event(self) -> TokenEvent:
        assert self._first is not None, "prime comes first"
        # The primed event is used once; later ones come from the stream.
        is_primed = self.latest_event is None
        try:
            self.latest_event = self._first if is_primed else await self._read()
        except StopAsyncIteration:
            raise GenerationFailed("the replica ended the stream without a finish reason") from None
        return self.latest_event


def _error_of(failure: str) -> PitstopError:
    if failure == NOTHING_LEFT:
        return ContradictorySettings(
            f"{failure}; what asks for a form (response_format, structured_outputs, tools), allowed_token_ids,"
            " bad_words and logit_bias have no token in common here, so loosen one of them"
        )
    return GenerationFailed(failure)
