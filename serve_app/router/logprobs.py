"""Log-probabilities as OpenAI's clients read them: finite numbers, one entry a token."""

from collections.abc import Sequence

from engine import TopLogprobs
from serve_app.protocol.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    TokenLogprob,
    TopLogprob,
)
from serve_app.protocol.written import Written
from serve_app.router.answer import Answer, Piece
from serve_app.text.tokenizer import REPLACEMENT, Detokeniser, Tokenizer

LEAST = -9999.0
"""OpenAI's number for a token that never comes; JSON has no infinity."""


class LogprobWriter:
    """Writes tokens by their text, or with `names_ids` as "token_id:5", which no two tokens share."""

    def __init__(self, tokenizer: Tokenizer, *, names_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._names_ids = names_ids
        # Prompts repeat their tokens, and the most likely ones are few: decoding is most of the work.
        self._texts: dict[int, str] = {}

    def chat(self, piece: Piece) -> ChatLogprobs:
        """Gives the entries of a piece for `/v1/chat/completions`."""
        tops = piece.top_logprobs or [()] * len(piece.token_ids)
        entries = zip(piece.token_ids, piece.logprobs, tops, strict=True)
        return ChatLogprobs(content=[self._entry(token_id, logprob, top) for token_id, logprob, top in entries])

    def completion(self, piece: Piece, *, num_before: int) -> CompletionLogprobs:
        """Gives the entries of a piece for `/v1/completions`; num_before: characters of an echoed prompt."""
        return CompletionLogprobs(
            tokens=[self._name(token_id) for token_id in piece.token_ids],
            token_logprobs=[_finite(logprob) for logprob in piece.logprobs],
            text_offset=[num_before + offset for offset in piece.offsets],
            top_logprobs=[
                self._choices(token_id, logprob, top)
                for token_id, logprob, top in zip(piece.token_ids, piece.logprobs, piece.top_logprobs, strict=True)
            ]
            if piece.top_logprobs
            else None,
        )

    def echo(self, prompt_ids: Sequence[int], answer: Answer, *, has_tops: bool) -> CompletionLogprobs:
        """Gives the entries of an echoed prompt."""
        scores = _scores(prompt_ids, answer)
        return CompletionLogprobs(
            tokens=[self._name(token_id) for token_id in prompt_ids],
            token_logprobs=[None if score is None else _finite(score[0]) for score in scores],
            text_offset=self._offsets(prompt_ids),
            top_logprobs=[
                None if score is None else self._choices(token_id, *score)
                for token_id, score in zip(prompt_ids, scores, strict=True)
            ]
            if has_tops
            else None,
        )

    def prompt(self, prompt_ids: Sequence[int], answer: Answer) -> Written:
        """Gives vLLM's form of a prompt's: by token id, the token's own and those of the most likely ones."""
        scores = zip(prompt_ids, _scores(prompt_ids, answer), strict=True)
        return Written.array(None if score is None else self._ranked(token_id, *score) for token_id, score in scores)

    def _ranked(self, token_id: int, logprob: float, top: TopLogprobs) -> dict[int, dict[str, float | str | None]]:
        """Gives `PromptLogprob`s as plain dicts: a million of the models take four times as long."""
        ranks = {other: rank for rank, (other, _) in enumerate(top, 1)}
        return {
            other: {"logprob": _finite(value), "rank": ranks.get(other), "decoded_token": self._text(other)}
            for other, value in {token_id: logprob, **dict(top)}.items()
        }

    def _entry(self, token_id: int, logprob: float, top: TopLogprobs) -> TokenLogprob:
        return TokenLogprob(
            token=self._name(token_id),
            logprob=_finite(logprob),
            bytes=self._bytes(token_id),
            top_logprobs=[
                TopLogprob(token=self._name(other), logprob=_finite(value), bytes=self._bytes(other))
                for other, value in top
            ],
        )

    def _choices(self, token_id: int, logprob: float, top: TopLogprobs) -> dict[str, float]:
        """Gives the most likely tokens and, as OpenAI does, the token itself.

        Several may read alike, parts of characters above all: the likeliest keeps the text, the others have their ids.
        """
        found: dict[str, float] = {}
        for other, value in {**dict(top), token_id: logprob}.items():
            name = self._name(other)
            found[f"token_id:{other}" if name in found else name] = _finite(value)
        return found

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._names_ids else self._text(token_id)

    def _text(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._tokenizer.token_text(token_id)
        return text

    def _bytes(self, token_id: int) -> list[int] | None:
        text = self._text(token_id)
        return None if REPLACEMENT in text else list(text.encode())

    def _offsets(self, token_ids: Sequence[int]) -> list[int]:
        reader, offsets, length = Detokeniser(self._tokenizer), [], 0
        for token_id in token_ids:
            offsets.append(length)
            length += len(reader.push([token_id]))
        return offsets


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Gives the entries of an echoed prompt and of what follows it."""
    tops = None
    if first.top_logprobs is not None:
        tops = first.top_logprobs + (second.top_logprobs or [])
    return CompletionLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        text_offset=first.text_offset + second.text_offset,
        top_logprobs=tops,
    )


def _scores(prompt_ids: Sequence[int], answer: Answer) -> list[tuple[float, TopLogprobs] | None]:
    """One entry a token; None for the first, which follows nothing, and for all where the prompt was not scored."""
    known = list(zip(answer.prompt_logprobs, answer.prompt_top_logprobs, strict=True))
    if len(known) != len(prompt_ids) - 1:
        return [None] * len(prompt_ids)
    return [None, *known]


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
