"""One open request of a replica: what the engine delivers between two reads becomes one token event."""

import asyncio
import time
from contextlib import suppress

from engine import FinishReason, GenerationOutput, TopLogprobs, WeightSpan, sequence_ids
from serve_app.messages import GenerateRequest, TokenEvent
from serve_app.protocol.errors import ReplicaDraining
from serve_app.routing.expected_work import expected_work


class TokenStream:
    """Collects the outputs of one request, of all its sequences, and hands them out, each token exactly once.

    Everything runs in one event loop; the engine calls `deliver` there. After the event with a finish reason nothing
    follows in its sequence, and nothing at all once it `is_over`.
    """

    def __init__(self, request: GenerateRequest, *, replica_id: str) -> None:
        # The request's own output is the first: it is what a request for one sequence gives.
        own, *children = reversed(sequence_ids(request.request_id, request.sampling.num_return_sequences or 1))
        self.sequence_ids = [own, *reversed(children)]
        resumed = request.resumed or ((),) * len(self.sequence_ids)
        self._sequences = {
            name: _Sequence(name, index, replica_id=replica_id, num_read=len(ids))
            for index, (name, ids) in enumerate(zip(self.sequence_ids, resumed, strict=True))
            if ids is not None
        }
        self._expected_tokens = expected_work(request).decode_tokens
        self._moves_because: str | None = None
        self._wake = asyncio.Event()
        self._may_not_wait = asyncio.Event()
        """Set when an output has ended, which nobody keeps from its client."""
        self._read_at: float | None = None
        self.num_prompt_tokens = len(request.prompt_ids)
        self.num_resumed_tokens = request.num_resumed_tokens
        self.arrived_at = time.perf_counter()
        self.num_tokens = 0
        self.queued_s: float | None = None
        """Seconds from the engine's taking the request to its first step; None before."""

    @property
    def open_ids(self) -> list[str]:
        """The outputs that have not ended."""
        return list(self._sequences)

    def is_over(self) -> bool:
        """True once the endings of all sequences were read."""
        return not self._sequences

    @property
    def remaining_tokens(self) -> int:
        """Tokens still expected; at least one, since the request is not over.

        An answer longer than was expected goes on for a while, as lengths have heavy tails: a tenth of what it has.
        """
        return max(1, self._expected_tokens - self.num_tokens, self.num_tokens // 10)

    def deliver(self, output: GenerationOutput) -> None:
        """Takes what the engine has for one sequence of this request."""
        sequence = self._sequences.get(output.request_id)
        if sequence is not None:
            sequence.take_in(output)
            if self.queued_s is None and output.lifespan[0] > 0:
                self.queued_s = output.lifespan[0] - output.created_time
            self.num_tokens += len(output.new_tokens)
            self._wake.set()
            if output.is_finished():
                self._may_not_wait.set()

    def fail(self, error: str) -> None:
        """Ends the stream with an error when the engine can no longer do so itself."""
        for sequence in self._sequences.values():
            sequence.fail(error)
        self._wake.set()
        self._may_not_wait.set()

    def move(self, reason: str) -> None:
        """Has the reader go on at another replica."""
        self._moves_because = reason
        self._wake.set()
        self._may_not_wait.set()

    async def read(self, *, apart_s: float = 0.0) -> TokenEvent:
        """Gives everything since the last read in one event; waits while there is nothing.

        apart_s: seconds from one event to the next, at least; neither the first nor an ending waits for that.
        Raises ReplicaDraining once it has to move; what was not read by then is generated again elsewhere.
        """
        await self._wake.wait()
        await self._wait_until(self._read_at and self._read_at + apart_s)
        if self._moves_because is not None:
            raise ReplicaDraining(self._moves_because)
        self._read_at = time.perf_counter()
        self._wake.clear()
        self._may_not_wait.clear()
        first, *more = [sequence.event() for sequence in self._sequences.values() if sequence.has_news]
        for event in (first, *more):
            if event.finish_reason is not None:
                del self._sequences[self.sequence_ids[event.index]]
        first.more.extend(more)
        return first

    async def _wait_until(self, moment: float | None) -> None:
        wait_s = 0.0 if moment is None else moment - time.perf_counter()
        if wait_s > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._may_not_wait.wait()


class _Sequence:
    """What is new in one output of a prompt."""

    def __init__(self, sequence_id: str, index: int, *, replica_id: str, num_read: int = 0) -> None:
        self._sequence_id = sequence_id
        self._index = index
        self._replica_id = replica_id
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._top_logprobs: list[TopLogprobs] = []
        self._has_begun = False
        self._num_read = num_read
        self._latest: GenerationOutput | None = None
        self._failure: str | None = None
        self.has_news = False

    def take_in(self, output: GenerationOutput) -> None:
        self._tokens += output.new_tokens
        self._logprobs += output.new_logprobs
        self._top_logprobs += output.new_top_logprobs
        self._latest = output
        self.has_news = True

    def fail(self, error: str) -> None:
        self._failure = error
        self.has_news = True

    def event(self) -> TokenEvent:
        """Gives what came since the last event."""
        self.has_news = False
        tokens, logprobs, top_logprobs = self._tokens, self._logprobs, self._top_logprobs
        self._tokens, self._logprobs, self._top_logprobs = [], [], []
        # What is of the prompt is complete by then, and need not cross a process again.
        prompt = None if self._has_begun else self._latest
        self._has_begun = True
        start, self._num_read = self._num_read, self._num_read + len(tokens)
        output = self._latest
        reason, error = _ending(output)
        if reason is None and self._failure is not None:
            reason, error = FinishReason.FAILED.value, self._failure
        return TokenEvent(
            request_id=self._sequence_id,
            token_ids=tokens,
            logprobs=logprobs,
            weight_versions=_clip(output.weight_versions if output else (), start, self._num_read),
            finish_reason=reason,
            error=error,
            num_cached_tokens=output.num_cached_tokens if output else 0,
            replica_id=self._replica_id,
            index=self._index,
            top_logprobs=top_logprobs,
            prompt_logprobs=prompt.prompt_logprobs if prompt else [],
            prompt_top_logprobs=prompt.prompt_top_logprobs if prompt else [],
            queued_s=max(0.0, prompt.lifespan[0] - prompt.created_time) if prompt else 0.0,
            computed_s=max(0.0, time.perf_counter() - prompt.lifespan[0])
            if prompt and prompt.lifespan[0] > 0
            else None,
        )


def _ending(output: GenerationOutput | None) -> tuple[str | None, str | None]:
    if output is None or not output.is_finished():
        return None, None
    return (output.finish_reason or FinishReason.FAILED).value, output.error


def _clip(spans: tuple[WeightSpan, ...], start: int, end: int) -> tuple[WeightSpan, ...]:
    """Gives the parts of `spans` that lie in [start, end), positions unchanged."""
    clipped = (WeightSpan(span.version, max(span.start, start), min(span.end, end)) for span in spans)
    # An empty span at the start is of who has only scored a prompt.
    return tuple(span for span in clipped if span.start < span.end or span.start == span.end == 0)
