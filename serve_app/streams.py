"""One open request of a replica: what the engine delivers between two reads becomes one token event."""

import asyncio
import time

from engine import FinishReason, GenerationOutput, WeightSpan
from serve_app.messages import GenerateRequest, TokenEvent
from serve_app.routing import expected_work


class TokenStream:
    """Collects the outputs of one request and hands them out, each token exactly once.

    Everything runs in one event loop; the engine calls `deliver` there. After the event with a finish reason nothing
    follows.
    """

    def __init__(self, request: GenerateRequest, *, replica_id: str) -> None:
        self._request_id = request.request_id
        self._replica_id = replica_id
        self._expected_tokens = expected_work(request).decode_tokens
        self._wake = asyncio.Event()
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._num_read = 0
        self._latest: GenerationOutput | None = None
        self._failure: str | None = None
        self.num_prompt_tokens = len(request.prompt_ids)
        self.arrived_at = time.perf_counter()
        self.num_tokens = 0

    @property
    def remaining_tokens(self) -> int:
        """Tokens still expected; at least one, since the request is not over."""
        return max(1, self._expected_tokens - self.num_tokens)

    def deliver(self, output: GenerationOutput) -> None:
        """Takes what the engine has for this request."""
        self._tokens += output.new_tokens
        self._logprobs += output.new_logprobs
        self.num_tokens += len(output.new_tokens)
        self._latest = output
        self._wake.set()

    def fail(self, error: str) -> None:
        """Ends the stream with an error when the engine can no longer do so itself."""
        self._failure = error
        self._wake.set()

    async def read(self) -> TokenEvent:
        """Gives everything since the last read in one event; waits while there is nothing."""
        await self._wake.wait()
        self._wake.clear()
        tokens, logprobs = self._tokens, self._logprobs
        self._tokens, self._logprobs = [], []
        start, self._num_read = self._num_read, self._num_read + len(tokens)
        output = self._latest
        reason, error = _ending(output)
        if reason is None and self._failure is not None:
            reason, error = FinishReason.FAILED.value, self._failure
        return TokenEvent(
            request_id=self._request_id,
            token_ids=tokens,
            logprobs=logprobs,
            weight_versions=_clip(output.weight_versions if output else (), start, self._num_read),
            finish_reason=reason,
            error=error,
            num_cached_tokens=output.num_cached_tokens if output else 0,
            replica_id=self._replica_id,
        )


def _ending(output: GenerationOutput | None) -> tuple[str | None, str | None]:
    if output is None or not output.is_finished():
        return None, None
    return (output.finish_reason or FinishReason.FAILED).value, output.error


def _clip(spans: tuple[WeightSpan, ...], start: int, end: int) -> tuple[WeightSpan, ...]:
    """Gives the parts of `spans` that lie in [start, end), positions unchanged."""
    clipped = (WeightSpan(span.version, max(span.start, start), min(span.end, end)) for span in spans)
    return tuple(span for span in clipped if span.start < span.end)
