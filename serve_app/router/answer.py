"""One answer as it grows: token events in, pieces of text out, cut before the first stop string."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine import FinishReason, WeightSpan
from serve_app.messages import TokenEvent
from serve_app.text import Detokeniser, StopMatcher, Tokenizer


@dataclass(slots=True)
class Piece:
    """What one event adds. text may lag behind the tokens; offsets (characters, one a token) only with logprobs."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def is_empty(self) -> bool:
        return not self.text and self.finish_reason is None


class Answer:
    """The output of one request.

    The token that completes a stop string is the last one of the answer, whatever the event that brought it holds more;
    so an answer does not depend on how tokens were put together in events.
    """

    def __init__(self, tokenizer: Tokenizer, *, stop_strings: Sequence[str] = ()) -> None:
        self._detokeniser = Detokeniser(tokenizer)
        self._stop = StopMatcher(stop_strings)
        self._has_stops = bool(stop_strings)
        self._num_characters = 0
        self._spans: list[WeightSpan] = []
        self.num_tokens = 0
        self.num_cached_tokens = 0

    def push(self, event: TokenEvent) -> Piece:
        """Takes the next event and gives what it adds; nothing may follow a piece with a finish reason."""
        piece = Piece()
        self.num_cached_tokens = max(self.num_cached_tokens, event.num_cached_tokens)
        # One by one only where somebody has to know at which token something happened.
        size = 1 if self._has_stops or event.logprobs else max(1, len(event.token_ids))
        for start in range(0, len(event.token_ids), size):
            self._push_tokens(piece, event, start, start + size)
            if self._stop.is_stopped:
                break
        self._spans += event.weight_versions
        self._finish(piece, event)
        return piece

    @property
    def weight_versions(self) -> list[WeightSpan]:
        """Spans over the tokens of the answer so far, in order, neighbours of one version joined."""
        joined: list[WeightSpan] = []
        for span in self._spans:
            start = span.start
            if joined and joined[-1].version == span.version and joined[-1].end == start:
                start = joined.pop().start
            joined.append(WeightSpan(span.version, start, min(span.end, self.num_tokens)))
        return [span for span in joined if span.start < span.end]

    def _push_tokens(self, piece: Piece, event: TokenEvent, start: int, end: int) -> None:
        token_ids = event.token_ids[start:end]
        if event.logprobs:
            piece.offsets.append(self._num_characters)
            piece.logprobs += event.logprobs[start:end]
        text = self._detokeniser.push(token_ids)
        self._num_characters += len(text)
        self.num_tokens += len(token_ids)
        piece.token_ids += token_ids
        piece.text += self._stop.push(text)

    def _finish(self, piece: Piece, event: TokenEvent) -> None:
        if event.finish_reason is not None and not self._stop.is_stopped:
            piece.text += self._stop.push(self._detokeniser.flush())
            piece.text += self._stop.flush()
            piece.finish_reason = event.finish_reason
        if self._stop.is_stopped:
            piece.finish_reason = FinishReason.STOP.value
