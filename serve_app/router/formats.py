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
from serve_app.router.answer import Answer, Piece
from serve_app.text import Tokenizer


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every part of one answer repeats, and what of it was asked for."""

    id: str
    created: int
    model: str
    prompt_ids: list[int]
    returns_ids: bool
    returns_logprobs: bool


class AnswerFormat(Protocol):
    """How an answer is written."""

    def whole(self, piece: Piece, answer: Answer) -> BaseModel:
        """Gives the complete answer; `piece` is all of it."""
        ...

    def chunk(self, piece: Piece, answer: Answer, *, is_first: bool) -> BaseModel:
        """Gives one event of a stream."""
        ...

    def usage_chunk(self, answer: Answer) -> BaseModel:
        """Gives the event that only counts tokens; it has no choices."""
        ...


class ChatFormat:
    """`/v1/chat/completions`."""

    def __init__(self, envelope: Envelope, tokenizer: Tokenizer) -> None:
        self._envelope = envelope
        self._tokenizer = tokenizer

    def whole(self, piece: Piece, answer: Answer) -> ChatCompletion:
        e = self._envelope
        choice = ChatChoice(
            message=AssistantMessage(content=piece.text),
            logprobs=self._logprobs(piece),
            finish_reason=piece.finish_reason or "",
            stop_reason=piece.stop_reason,
            weight_versions=_spans(answer.weight_versions),
            token_ids=piece.token_ids if e.returns_ids else None,
        )
        return ChatCompletion(
            id=e.id,
            created=e.created,
            model=e.model,
            system_fingerprint=_fingerprint(e, answer),
            choices=[choice],
            usage=_usage(e, answer),
            prompt_token_ids=e.prompt_ids if e.returns_ids else None,
        )

    def chunk(self, piece: Piece, answer: Answer, *, is_first: bool) -> ChatChunk:
        e = self._envelope
        choice = ChatChunkChoice(
            delta=Delta(role="assistant" if is_first else None, content=piece.text),
            logprobs=self._logprobs(piece),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            weight_versions=_spans_of(piece, answer),
            token_ids=piece.token_ids if e.returns_ids else None,
        )
        prompt_ids = e.prompt_ids if e.returns_ids and is_first else None
        return ChatChunk(
            id=e.id,
            created=e.created,
            model=e.model,
            system_fingerprint=_fingerprint(e, answer),
            choices=[choice],
            prompt_token_ids=prompt_ids,
        )

    def usage_chunk(self, answer: Answer) -> ChatChunk:
        e = self._envelope
        return ChatChunk(
            id=e.id,
            created=e.created,
            model=e.model,
            system_fingerprint=_fingerprint(e, answer),
            choices=[],
            usage=_usage(e, answer),
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

    def whole(self, piece: Piece, answer: Answer) -> Completion:
        completion = self.chunk(piece, answer, is_first=True)
        return completion.model_copy(update={"usage": _usage(self._envelope, answer)})

    def chunk(self, piece: Piece, answer: Answer, *, is_first: bool) -> Completion:
        e = self._envelope
        choice = CompletionChoice(
            text=piece.text,
            logprobs=self._logprobs(piece),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            weight_versions=_spans_of(piece, answer),
            token_ids=piece.token_ids if e.returns_ids else None,
            prompt_token_ids=e.prompt_ids if e.returns_ids and is_first else None,
        )
        return Completion(
            id=e.id, created=e.created, model=e.model, system_fingerprint=_fingerprint(e, answer), choices=[choice]
        )

    def usage_chunk(self, answer: Answer) -> Completion:
        e = self._envelope
        return Completion(
            id=e.id,
            created=e.created,
            model=e.model,
            system_fingerprint=_fingerprint(e, answer),
            choices=[],
            usage=_usage(e, answer),
        )

    def _logprobs(self, piece: Piece) -> CompletionLogprobs | None:
        if not self._envelope.returns_logprobs:
            return None
        return CompletionLogprobs(
            tokens=[self._tokenizer.token_text(token_id) for token_id in piece.token_ids],
            token_logprobs=piece.logprobs,
            text_offset=piece.offsets,
        )


def _usage(envelope: Envelope, answer: Answer) -> Usage:
    num_prompt_tokens = len(envelope.prompt_ids)
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=answer.num_tokens,
        total_tokens=num_prompt_tokens + answer.num_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=answer.num_cached_tokens),
    )


def _spans_of(piece: Piece, answer: Answer) -> list[VersionSpan] | None:
    """Gives the spans so far where they are news: at the first token, at each new version, and at the end.

    So also the tokens of a stream that is cut off can be traced.
    """
    is_news = piece.begins_version or piece.finish_reason is not None
    return _spans(answer.weight_versions) if is_news else None


def _fingerprint(envelope: Envelope, answer: Answer) -> str | None:
    """Gives what OpenAI calls the backend's configuration: the model, and the version that drew the latest token."""
    spans = answer.weight_versions
    return f"{envelope.model}@{spans[-1].version}" if spans else None


def _spans(spans: Sequence[WeightSpan]) -> list[VersionSpan]:
    return [VersionSpan(version=span.version, start=span.start, end=span.end) for span in spans]


def _token_logprob(token: str, logprob: float) -> TokenLogprob:
    return TokenLogprob(token=token, logprob=logprob, bytes=None if "\ufffd" in token else list(token.encode()))
