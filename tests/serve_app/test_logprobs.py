"""Log-probabilities of completions keep every entry, also where several tokens read alike."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine import InvalidRequest
from serve_app.protocol.requests import CompletionRequest
from serve_app.protocol.responses import Completion, CompletionLogprobs, PromptLogprob
from serve_app.protocol.written import write
from serve_app.router.answer import Answer, Piece
from serve_app.router.bounds import check_prompt_scores
from serve_app.router.choices import Choices
from serve_app.router.formats import CompletionFormat, Envelope
from serve_app.router.generation import Generation, NoEvents
from serve_app.router.logprobs import LogprobWriter
from serve_app.settings import LimitSettings
from serve_app.text.tokenizer import REPLACEMENT, Tokenizer
from tests.serve_app.tiny_tokenizers import byte_level_tokenizer


def test_tokens_that_read_alike_are_all_listed() -> None:
    tokenizer = Tokenizer(byte_level_tokenizer())
    broken = [token_id for token_id in range(300) if tokenizer.token_text(token_id) == REPLACEMENT][:3]
    (whole,) = tokenizer.encode("a", add_special_tokens=False)
    assert len(broken) == 3
    top = ((broken[0], -0.5), (whole, -1.0), (broken[1], -2.0), (broken[2], -3.0))
    piece = Piece(token_ids=[broken[2]], logprobs=[-3.0], top_logprobs=[top], offsets=[0])
    written = LogprobWriter(tokenizer).completion(piece, num_before=0)
    assert written.top_logprobs == [
        {REPLACEMENT: -0.5, "a": -1.0, f"token_id:{broken[1]}": -2.0, f"token_id:{broken[2]}": -3.0}
    ]


def test_the_token_itself_is_added_to_the_most_likely_ones() -> None:
    tokenizer = Tokenizer(byte_level_tokenizer())
    ids = [tokenizer.encode(text, add_special_tokens=False)[0] for text in "abc"]
    piece = Piece(token_ids=[ids[2]], logprobs=[-4.0], top_logprobs=[((ids[0], -0.1), (ids[1], -2.5))], offsets=[0])
    written = LogprobWriter(tokenizer).completion(piece, num_before=0)
    assert written.top_logprobs == [{"a": -0.1, "b": -2.5, "c": -4.0}]


class CountingTokenizer(Tokenizer):
    """Counts what it decodes."""

    num_named = num_decoded = 0

    def token_text(self, token_id: int) -> str:
        self.num_named += 1
        return super().token_text(token_id)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.num_decoded += len(ids)
        return super().decode(ids, skip_special_tokens=skip_special_tokens)


def completions(tokenizer: Tokenizer, *, n: int, num_tokens: int) -> tuple[list[Piece], Choices]:
    """Gives `n` finished answers to one prompt of scored tokens."""
    ids = [number % 7 + 10 for number in range(num_tokens)]
    answers = [Answer(tokenizer, index=index) for index in range(n)]
    tops = [((1, -0.5), (2, -1.0))] * (num_tokens - 1)
    for answer in answers:
        answer.prompt_logprobs, answer.prompt_top_logprobs = [-2.0] * (num_tokens - 1), tops
    choices = Choices.__new__(Choices)
    choices.generations, choices.answers = [Generation(NoEvents(), answers, prompt_ids=ids)], answers
    piece = Piece(token_ids=[5], logprobs=[-1.0], top_logprobs=[((1, -0.5),)], offsets=[0], finish_reason="stop")
    return [replace(piece, index=index) for index in range(n)], choices


def envelope(**fields: Any) -> Envelope:
    return Envelope("c", 0, "m", returns_ids=False, returns_logprobs=True, returns_tops=True, **fields)


@pytest.mark.parametrize("fields", [{"echoes": True}, {"returns_prompt_logprobs": True}])
def test_the_scores_of_a_prompt_are_made_once_for_all_of_its_answers(fields: dict[str, bool]) -> None:
    counts = []
    for n in (1, 16):
        tokenizer = CountingTokenizer(byte_level_tokenizer())
        pieces, choices = completions(tokenizer, n=n, num_tokens=200)
        style = CompletionFormat(envelope(**fields), tokenizer)
        answer = json.loads(write(style.whole(pieces, choices)))
        assert len(answer["choices"]) == n
        counts.append((tokenizer.num_named, tokenizer.num_decoded))
        assert tokenizer.num_named <= 10, "each distinct token is named once"
    assert counts[0] == counts[1]


def test_what_is_written_in_parts_is_what_the_models_say() -> None:
    tokenizer = Tokenizer(byte_level_tokenizer())
    pieces, choices = completions(tokenizer, n=2, num_tokens=3)
    style = CompletionFormat(envelope(echoes=True, returns_prompt_logprobs=True), tokenizer)
    first, second = (Completion.model_validate_json(write(style.whole(pieces, choices)))).choices
    name = tokenizer.token_text
    assert first.prompt_logprobs == second.prompt_logprobs == [None, *(
        {
            token_id: PromptLogprob(logprob=-2.0, decoded_token=name(token_id)),
            1: PromptLogprob(logprob=-0.5, rank=1, decoded_token=name(1)),
            2: PromptLogprob(logprob=-1.0, rank=2, decoded_token=name(2)),
        }
        for token_id in (11, 12)
    )]  # fmt: skip
    assert isinstance(first.logprobs, CompletionLogprobs)
    assert first.logprobs.token_logprobs == [None, -2.0, -2.0, -1.0]
    assert first.logprobs.top_logprobs is not None
    assert first.logprobs.top_logprobs[1] == {name(1): -0.5, name(2): -1.0, name(11): -2.0}


@pytest.mark.parametrize(("fields", "name"), [
    ({"prompt_logprobs": 4}, "prompt_logprobs"), ({"echo": True, "logprobs": 4}, "logprobs"),
])  # fmt: skip
def test_more_scores_of_prompts_than_the_limit_are_refused_by_name(fields: dict[str, Any], name: str) -> None:
    body = CompletionRequest(model="m", prompt="x", n=2, **fields)
    limits = LimitSettings(max_prompt_logprobs=100)
    check_prompt_scores(body, 10, limits)
    check_prompt_scores(CompletionRequest(model="m", prompt="x", n=2, logprobs=4), 11, limits)
    with pytest.raises(InvalidRequest, match=f"^{name} is 4 for 11 .* 110 log-probabilities; at most 100") as caught:
        check_prompt_scores(body, 11, limits)
    assert caught.value.param == name
