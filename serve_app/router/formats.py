"""An answer in the two shapes of OpenAI: whole, or as the chunks of a stream."""

from collections.abc import Sequence
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
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    PromptTokensDetails,
    TokenLogprob,
    Usage,
    VersionSpan,
)
from serve_app.router.answer import Piece
from serve_app.router.choices import Choices
from serve_app.text import Tokenizer


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every part of one answer repeats, and what of it was asked for."""

    id: str
    created: int
    model: str
    returns_ids: bool
    returns_logprobs: bool


class AnswerFormat(Protocol):
    """How the choices of a request are written."""

    def whole(self, pieces: Sequence[Piece], choices: Choices) -> BaseModel:
        """Gives the complete answer; each piece is all of its choice."""
        ...

    def chunk(self, piece: Piece, choices: Choices, *, is_first: bool) -> BaseModel:
        """Gives one event of a stream; is_first: of its choice."""
        ...

    def usage_chunk(self, choices: Choices) -> BaseModel:
        """Gives the event that only counts tokens; it has no choices."""
        ...


class ChatFormat:
    """`/v1/chat/completions`."""

    def __init__(self, envelope: Envelope, tokenizer: Tokenizer) -> None:
        self._envelope = envelope
        self._tokenizer = tokenizer

    def whole(self, pieces: Sequence[Piece], choices: Choices) -> ChatCompletion:
        e = self._envelope
        return ChatCompletion(
            id=e.id,
            created=e.created,
            model=e.model,
            system_fingerprint=_fingerprint(e, choices),
            choices=[self._choice(piece, choices) for piece in pieces],
            usage=_usage(choices),
            prompt_token_ids=choices.prompt_ids(0) if e.returns_ids else None,
        )

    def chunk(self, piece: Piece, choices: Choices, *, is_first: bool) -> ChatChunk:
        e = self._envelope
        choice = ChatChunkChoice(
            index=piece.index,
            delta=Delta(role="assistant" if is_first else None, content=piece.text),
            logprobs=self._logprobs(piece),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            weight_versions=_spans_of(piece, choices),
            token_ids=piece.token_ids if e.returns_ids else None,
        )
        prompt_ids = choices.prompt_ids(0) if e.returns_ids and is_first else None
        return self._chunk([choice], choices, prompt_token_ids=prompt_ids)

    def usage_chunk(self, choices: Choices) -> ChatChunk:
        return self._chunk([], choices, usage=_usage(choices))

    def _chunk(
        self,
        written: list[ChatChunkChoice],
        choices: Choices,
        *,
        usage: Usage | None = None,
        prompt_token_ids: list[int] | None = None,
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
        )

    def _choice(self, piece: Piece, choices: Choices) -> ChatChoice:
        return ChatChoice(
            index=piece.index,
            message=AssistantMessage(content=piece.text),
            logprobs=self._logprobs(piece),
            finish_reason=piece.finish_reason or "",
            stop_reason=piece.stop_reason,
            weight_versions=_spans(choices.answers[piece.index].weight_versions),
            token_ids=piece.token_ids if self._envelope.returns_ids else None,
        )

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        if not self._envelope.returns_logprobs:
            return None
        return ChatLogprobs(
            content=[
                _token_logprob(self._tokenizer.token_text(token_id), logprob)
                for token_id, logprob in zip(piece.token_ids, piece.logprobs, strict=True)
            ]
        )


class CompletionFormat:
    """`/v1/completions`."""

    def __init__(self, envelope: Envelope, tokenizer: Tokenizer) -> None:
        self._envelope = envelope
        self._tokenizer = tokenizer

    def whole(self, pieces: Sequence[Piece], choices: Choices) -> Completion:
        written = [self._choice(piece, choices, is_first=True) for piece in pieces]
        return self._completion(written, choices, usage=_usage(choices))

    def chunk(self, piece: Piece, choices: Choices, *, is_first: bool) -> Completion:
        return self._completion([self._choice(piece, choices, is_first=is_first)], choices)

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
        )

    def _choice(self, piece: Piece, choices: Choices, *, is_first: bool) -> CompletionChoice:
        e = self._envelope
        return CompletionChoice(
            index=piece.index,
            text=piece.text,
            logprobs=self._logprobs(piece),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            weight_versions=_spans_of(piece, choices),
            token_ids=piece.token_ids if e.returns_ids else None,
            prompt_token_ids=choices.prompt_ids(piece.index) if e.returns_ids and is_first else None,
        )

    def _logprobs(self, piece: Piece) -> CompletionLogprobs | None:
        if not self._envelope.returns_logprobs:
            return None
        return CompletionLogprobs(
            tokens=[self._tokenizer.token_text(token_id) for token_id in piece.token_ids],
            token_logprobs=piece.logprobs,
            text_offset=piece.offsets,
        )


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
    return [VersionSpan(version=span.version, start=span.start, end=span.end) for span in spans]


def _token_logprob(token: str, logprob: float) -> TokenLogprob:
    return TokenLogprob(token=token, logprob=logprob, bytes=None if "\ufffd" in token else list(token.encode()))
