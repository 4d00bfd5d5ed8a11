"""The times and lengths of one request, as the replica's histograms show them."""

import time

from engine import FinishReason
from serve_app.messages import TokenEvent
from serve_app.metrics import Recorder
from serve_app.streams import TokenStream

CUT = (FinishReason.CANCELLED, FinishReason.FAILED)


class RequestTimer:
    """Observes the events of one stream, all its sequences as one, in the order in which they leave the replica."""

    def __init__(self, recorder: Recorder, stream: TokenStream, *, replica: str) -> None:
        self._recorder = recorder
        self._stream = stream
        self._replica = replica
        self._first_at = 0.0
        self._latest_at = 0.0
        self._is_cut = False

    def take(self, event: TokenEvent) -> None:
        """Books what one read of the stream gave, of all its sequences."""
        now = time.perf_counter()
        events = (event, *event.more)
        if num_tokens := sum(len(each.token_ids) for each in events):
            self._take_tokens(num_tokens, now)
        self._is_cut = self._is_cut or any(each.finish_reason in CUT for each in events)
        if self._stream.is_over():
            self._take_end(now)

    def _take_tokens(self, count: int, now: float) -> None:
        if not self._first_at:
            self._first_at = now
            self._observe("pitstop_replica_first_token_seconds", now - self._stream.arrived_at)
        else:
            self._observe("pitstop_inter_token_seconds", (now - self._latest_at) / count)
        self._latest_at = now

    def _take_end(self, now: float) -> None:
        num_tokens = self._stream.num_tokens
        self._observe("pitstop_replica_generation_seconds", now - self._stream.arrived_at)
        self._observe("pitstop_request_prompt_tokens", self._stream.num_prompt_tokens)
        self._observe("pitstop_request_generated_tokens", num_tokens + self._stream.num_resumed_tokens)
        if self._stream.queued_s is not None:
            self._observe("pitstop_replica_queue_seconds", self._stream.queued_s)
        if num_tokens > 1 and not self._is_cut:
            self._observe("pitstop_time_per_output_token_seconds", (now - self._first_at) / (num_tokens - 1))

    def _observe(self, name: str, value: float) -> None:
        self._recorder.observe(name, self._replica, value=value)
