"""One answer as it grows: token events in, pieces of text out, cut before the first stop string."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine import FinishReason, InvalidRequest, TopLogprobs, WeightSpan
from serve_app.messages import TokenEvent
from serve_app.text.tokenizer import Detokeniser, StopMatcher, Tokenizer


@dataclass(frozen=True, slots=True)
class TextRules:
    """Where the text of an answer ends and what it shows.

    stop_token_ids: those that were asked for beside the model's own end tokens, `end_ids`. min_tokens: no stop string
    counts that is complete by then. includes_stop: the text ends with what stopped it.
    """

    stop_strings: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    end_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    includes_stop: bool = False
    continues_prompt: bool = False
    """The text goes on with that of the prompt, so it has the space between the two, which else is left out."""
    skips_special_tokens: bool = True
    shown_ids: frozenset[int] = frozenset()
    """Special tokens that are shown all the same."""


@dataclass(slots=True)
class Piece:
    """What one event adds to the choice `index`.

    text may lag behind the tokens; offsets (characters, one a token) only with logprobs.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    begins_version: bool = False
    """True where other weights drew tokens of it than those before it."""

    @property
    def is_empty(self) -> bool:
        return not self.text and self.finish_reason is None and not self.begins_version

    def extend(self, later: "Piece") -> None:
        """Adds what came after it."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.top_logprobs += later.top_logprobs
        self.offsets += later.offsets
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


class Answer:
    """The output of one request.

    The token that completes a stop string is the last one of the answer, whatever the event that brought it holds more;
    so an answer does not depend on how tokens were put together in events.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        rules: TextRules = TextRules(),
        *,
        index: int = 0,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        self._index = index
        self._rules = rules
        self._detokeniser = Detokeniser(
            tokenizer,
            skips_special_tokens=rules.skips_special_tokens,
            shown_ids=rules.shown_ids,
            prompt_ids=prompt_ids if rules.continues_prompt else (),
        )
        self._stop = StopMatcher(rules.stop_strings, includes_stop=rules.includes_stop)
        # A grammar may end an answer with a token of its text, and a parser may look for an end token.
        ends = rules.stop_token_ids | (rules.end_ids - rules.shown_ids)
        self._hidden_ends = frozenset[int]() if rules.includes_stop else ends
        self._has_stops = bool(rules.stop_strings)
        self._num_characters = 0
        self._spans: list[WeightSpan] = []
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.is_over = False
        self.prompt_logprobs: Sequence[float] = []
        self.prompt_top_logprobs: Sequence[TopLogprobs] = []
        self.queued_s = 0.0

    def push(self, event: TokenEvent) -> Piece:
        """Takes the next event and gives what it adds; nothing may follow a piece with a finish reason."""
        piece = Piece(self._index)
        if event.prompt_logprobs:
            self.prompt_logprobs, self.prompt_top_logprobs = event.prompt_logprobs, event.prompt_top_logprobs
        self.queued_s = max(self.queued_s, event.queued_s)
        self.num_cached_tokens = max(self.num_cached_tokens, event.num_cached_tokens)
        # One by one only where somebody has to know at which token something happened.
        size = 1 if self._has_stops or event.logprobs else max(1, len(event.token_ids))
        for start in range(0, len(event.token_ids), size):
            self._push_tokens(piece, event, start, start + size)
            if self._stop.is_stopped:
                break
        self._add_spans(piece, event.weight_versions)
        self._finish(piece, event)
        return piece

    def go_on(self, token_ids: Sequence[int], spans: Sequence[WeightSpan]) -> None:
        """Takes what the answer had before, which is not given again; raises InvalidRequest where it has ended."""
        self.push(TokenEvent("", list(token_ids), weight_versions=tuple(spans), index=self._index))
        if self.is_over:
            raise InvalidRequest("resume has a stop string in its tokens, so the answer has ended", "resume")

    @property
    def weight_versions(self) -> list[WeightSpan]:
        """Spans over the tokens of the answer so far, in order, neighbours of one version joined.

        An answer without tokens has an empty one, of the weights that scored its prompt.
        """
        # A stop string may have cut the last event short.
        clipped = [replace(span, end=min(span.end, self.num_tokens)) for span in self._spans]
        return [span for span in clipped if span.start < span.end or self.num_tokens == 0]

    @property
    def latest_version(self) -> int | None:
        """The version of the weights that drew the latest token."""
        return self._spans[-1].version if self._spans else None

    def _add_spans(self, piece: Piece, spans: Sequence[WeightSpan]) -> None:
        for span in spans:
            if self._spans and self._spans[-1].version == span.version and not span.is_recomputed:
                self._spans[-1] = replace(self._spans[-1], end=span.end)
            elif span.start < self.num_tokens or span.end == 0:
                piece.begins_version = True
                self._spans.append(span)

    def _push_tokens(self, piece: Piece, event: TokenEvent, start: int, end: int) -> None:
        token_ids = event.token_ids[start:end]
        if event.logprobs:
            piece.offsets.append(self._num_characters)
            piece.logprobs += event.logprobs[start:end]
            piece.top_logprobs += event.top_logprobs[start:end]
        text = self._detokeniser.push(token_ids[: self._num_shown(token_ids, event, end)])
        self._num_characters += len(text)
        self.num_tokens += len(token_ids)
        piece.token_ids += token_ids
        piece.text += self._before_stop(text)

    def _before_stop(self, text: str) -> str:
        return self._stop.push(text, counts=self.num_tokens > self._rules.min_tokens)

    def _num_shown(self, token_ids: Sequence[int], event: TokenEvent, end: int) -> int:
        """All tokens but a stop or end token, which the text does not show unless it is asked to."""
        is_last = end >= len(event.token_ids) and self._last_token(event) in self._hidden_ends
        return len(token_ids) - is_last

    def _stop_token(self, event: TokenEvent) -> int | None:
        token_id = self._last_token(event)
        return token_id if token_id in self._rules.stop_token_ids else None

    def _last_token(self, event: TokenEvent) -> int | None:
        """The token that ended the answer, if one did."""
        return event.token_ids[-1] if event.finish_reason == FinishReason.STOP and event.token_ids else None

    def _finish(self, piece: Piece, event: TokenEvent) -> None:
        if event.finish_reason is not None and not self._stop.is_stopped:
            piece.text += self._before_stop(self._detokeniser.flush())
            piece.text += self._stop.flush()
            piece.finish_reason, piece.stop_reason = event.finish_reason, self._stop_token(event)
        if self._stop.is_stopped:
            piece.finish_reason, piece.stop_reason = FinishReason.STOP.value, self._stop.found
        self.is_over = piece.finish_reason is not None
