"""An answer in the two shapes of OpenAI: whole, or as the chunks of a stream."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pydantic import BaseModel

from engine import WeightSpan
from serve_app.protocol.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    PromptLogprobs,
    PromptTokensDetails,
    Timings,
    Usage,
    VersionSpan,
)
from serve_app.protocol.written import Written
from serve_app.router.answer import Piece
from serve_app.router.choices import Choices
from serve_app.router.logprobs import LogprobWriter, joined
from serve_app.router.message_parts import MessagePart, MessageParts
from serve_app.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every part of one answer repeats, and what of it was asked for."""

    id: str
    created: int
    model: str
    returns_ids: bool
    returns_logprobs: bool
    returns_tops: bool = False
    returns_prompt_logprobs: bool = False
    returns_timings: bool = False
    counts_always: bool = False
    """Every chunk counts the tokens so far."""
    names_ids: bool = False
    """Log-probabilities call tokens by their ids."""
    echoes: bool = False
    """The prompt stands before each answer, of completions."""


class AnswerFormat(Protocol):
    """How the choices of a request are written, under one id."""

    @property
    def id(self) -> str: ...

    def whole(self, pieces: Sequence[Piece], choices: Choices) -> BaseModel:
        """Gives the complete answer; each piece is all of its choice."""
        ...

    def chunk(self, piece: Piece, choices: Choices, *, is_first: bool) -> BaseModel | None:
        """Gives one event of a stream, or None where the piece adds nothing yet; is_first: of its choice."""
        ...

    def usage_chunk(self, choices: Choices) -> BaseModel:
        """Gives the event that only counts tokens; it has no choices."""
        ...


class ChatFormat:
    """`/v1/chat/completions`."""

    def __init__(
        self, envelope: Envelope, tokenizer: Tokenizer, make_parts: Callable[[], MessageParts | None] = lambda: None
    ) -> None:
        """make_parts: gives what takes the text of one choice apart; None where all of it is content."""
        self._envelope = envelope
        self._writer = LogprobWriter(tokenizer, names_ids=envelope.names_ids)
        self._parts: dict[int, MessageParts | None] = defaultdict(make_parts)
        self._prompt_scores: Written | None = None

    @property
    def id(self) -> str:
        return self._envelope.id

    def whole(self, pieces: Sequence[Piece], choices: Choices) -> ChatCompletion:
        e = self._envelope
        return ChatCompletion(
            id=e.id,
            created=e.created,
            model=e.model,
            system_fingerprint=_fingerprint(e, choices),
            choices=[self._choice(piece, choices) for piece in pieces],
            usage=_usage(choices),
            prompt_token_ids=list(choices.prompt_ids(0)) if e.returns_ids else None,
            prompt_logprobs=self._prompt_logprobs(choices),
            timings=_timings(e, choices),
        )

    def chunk(self, piece: Piece, choices: Choices, *, is_first: bool) -> ChatChunk | None:
        e = self._envelope
        part = self._part(piece)
        if part.is_empty and not piece.begins_version and not (e.returns_ids or e.returns_logprobs):
            return None
        choice = ChatChunkChoice(
            index=piece.index,
            delta=Delta(
                role="assistant" if is_first else None,
                content=part.content or (None if part.reasoning or part.calls else ""),
                reasoning_content=part.reasoning or None,
                tool_calls=part.calls or None,
            ),
            logprobs=self._writer.chat(piece) if e.returns_logprobs else None,
            finish_reason=part.finish_reason,
            stop_reason=piece.stop_reason,
            weight_versions=_spans_of(piece, choices),
            token_ids=piece.token_ids if e.returns_ids else None,
        )
        return self._chunk(
            [choice],
            choices,
            usage=_usage(choices) if e.counts_always else None,
            prompt_token_ids=list(choices.prompt_ids(0)) if e.returns_ids and is_first else None,
            prompt_logprobs=self._prompt_logprobs(choices, piece.index) if is_first else None,
        )

    def usage_chunk(self, choices: Choices) -> ChatChunk:
        return self._chunk([], choices, usage=_usage(choices))

    def _chunk(
        self,
        written: list[ChatChunkChoice],
        choices: Choices,
        *,
        usage: Usage | None = None,
        prompt_token_ids: list[int] | None = None,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> ChatChunk:
        e = self._envelope
        return ChatChunk(
            id=e.id,
            created=e.created,
            model=e.model,
            system_fingerprint=_fingerprint(e, choices),
            choices=written,
            usage=usage,
            prompt_token_ids=prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            timings=_timings(e, choices) if written else None,
        )

    def _prompt_logprobs(self, choices: Choices, index: int = 0) -> PromptLogprobs | None:
        if not self._envelope.returns_prompt_logprobs:
            return None
        if self._prompt_scores is None:
            self._prompt_scores = self._writer.prompt(choices.prompt_ids(index), choices.answers[index])
        return self._prompt_scores

    def _choice(self, piece: Piece, choices: Choices) -> ChatChoice:
        part = self._part(piece)
        message = AssistantMessage(
            content=part.content or (None if part.calls else ""),
            reasoning_content=part.reasoning or None,
            tool_calls=[call.model_copy(update={"index": None}) for call in part.calls] or None,
        )
        return ChatChoice(
            index=piece.index,
            message=message,
            logprobs=self._writer.chat(piece) if self._envelope.returns_logprobs else None,
            finish_reason=part.finish_reason or "",
            stop_reason=piece.stop_reason,
            weight_versions=_spans(choices.answers[piece.index].weight_versions),
            token_ids=piece.token_ids if self._envelope.returns_ids else None,
        )

    def _part(self, piece: Piece) -> MessagePart:
        parts = self._parts[piece.index]
        return MessagePart(piece.text, "", [], piece.finish_reason) if parts is None else parts.push(piece)


class CompletionFormat:
    """`/v1/completions`."""

    def __init__(self, envelope: Envelope, tokenizer: Tokenizer) -> None:
        self._envelope = envelope
        self._tokenizer = tokenizer
        self._writer = LogprobWriter(tokenizer, names_ids=envelope.names_ids)
        self._prompts: dict[int, _Prompt] = {}

    @property
    def id(self) -> str:
        return self._envelope.id

    def whole(self, pieces: Sequence[Piece], choices: Choices) -> Completion:
        written = [self._choice(piece, choices, is_first=True) for piece in pieces]
        return self._completion(written, choices, usage=_usage(choices))

    def chunk(self, piece: Piece, choices: Choices, *, is_first: bool) -> Completion:
        usage = _usage(choices) if self._envelope.counts_always else None
        return self._completion([self._choice(piece, choices, is_first=is_first)], choices, usage=usage)

    def usage_chunk(self, choices: Choices) -> Completion:
        return self._completion([], choices, usage=_usage(choices))

    def _completion(
        self, written: list[CompletionChoice], choices: Choices, *, usage: Usage | None = None
    ) -> Completion:
        e = self._envelope
        return Completion(
            id=e.id,
            created=e.created,
            model=e.model,
            system_fingerprint=_fingerprint(e, choices),
            choices=written,
            usage=usage,
            timings=_timings(e, choices) if written else None,
        )

    def _choice(self, piece: Piece, choices: Choices, *, is_first: bool) -> CompletionChoice:
        e = self._envelope
        prompt_ids = choices.prompt_ids(piece.index)
        shown = self._prompt(piece.index, choices, is_scored=is_first)
        return CompletionChoice(
            index=piece.index,
            text=shown.text + piece.text if is_first else piece.text,
            logprobs=self._logprobs(piece, shown, is_first=is_first),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            weight_versions=_spans_of(piece, choices),
            token_ids=piece.token_ids if e.returns_ids else None,
            prompt_token_ids=list(prompt_ids) if e.returns_ids and is_first else None,
            prompt_logprobs=shown.scores if is_first else None,
        )

    def _logprobs(self, piece: Piece, shown: "_Prompt", *, is_first: bool) -> CompletionLogprobs | Written | None:
        if not self._envelope.returns_logprobs:
            return None
        written = self._writer.completion(piece, num_before=len(shown.text))
        if shown.logprobs is None or not is_first:
            return written
        return Written.lists(joined(shown.logprobs, written))

    def _prompt(self, index: int, choices: Choices, *, is_scored: bool) -> "_Prompt":
        """Gives what the answers to one prompt repeat of it: of `n` answers the first makes it.

        is_scored: false where its log-probabilities were given before, by the stream that this one goes on with.
        """
        which = choices.prompt_index(index)
        if which not in self._prompts:
            e, writer = self._envelope, self._writer
            ids, answer = choices.prompt_ids(index), choices.answers[index]
            is_echo = e.echoes and e.returns_logprobs
            self._prompts[which] = _Prompt(
                text=self._tokenizer.decode(ids) if e.echoes else "",
                logprobs=writer.echo(ids, answer, has_tops=e.returns_tops) if is_scored and is_echo else None,
                scores=writer.prompt(ids, answer) if is_scored and e.returns_prompt_logprobs else None,
            )
        return self._prompts[which]


@dataclass(frozen=True, slots=True)
class _Prompt:
    """What an answer shows of its prompt. logprobs: where it is echoed. scores: in vLLM's form."""

    text: str
    logprobs: CompletionLogprobs | None
    scores: Written | None


def _usage(choices: Choices) -> Usage:
    """Counts each prompt once, however many answers it has."""
    num_prompt_tokens = sum(len(generation.prompt_ids) for generation in choices.generations)
    num_tokens = sum(answer.num_tokens for answer in choices.answers)
    num_cached_tokens = sum(generation.num_cached_tokens for generation in choices.generations)
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_tokens,
        total_tokens=num_prompt_tokens + num_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached_tokens),
    )


def _spans_of(piece: Piece, choices: Choices) -> list[VersionSpan] | None:
    """Gives the spans so far where they are news: at the first token, at each new version, and at the end.

    So also the tokens of a stream that is cut off can be traced.
    """
    is_news = piece.begins_version or piece.finish_reason is not None
    return _spans(choices.answers[piece.index].weight_versions) if is_news else None


def _fingerprint(envelope: Envelope, choices: Choices) -> str | None:
    """Gives what OpenAI calls the backend's configuration: the model, and the newest version that drew a token."""
    version = choices.latest_version
    return None if version is None else f"{envelope.model}@{version}"


def _spans(spans: Sequence[WeightSpan]) -> list[VersionSpan]:
    return [
        VersionSpan(
            version=span.version, start=span.start, end=span.end, is_recomputed=True if span.is_recomputed else None
        )
        for span in spans
    ]


def _timings(envelope: Envelope, choices: Choices) -> Timings | None:
    """With what ends the last choice."""
    return choices.timings() if envelope.returns_timings and choices.is_over else None
