import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine import WeightSpan
from serve_app.messages import TokenEvent
from serve_app.protocol.errors import GenerationFailed, NoReplica
from serve_app.router.answer import Answer, Piece, TextRules
from serve_app.router.deployment import _token_events
from serve_app.router.generation import Generation
from serve_app.text.tokenizer import Tokenizer
from tests.serve_app.tiny_tokenizers import byte_fallback_tokenizer, byte_level_tokenizer

TEXT = "the stop string 日本語 👩‍👩‍👧‍👦 ends here, the end"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_tokenizer())


class Events:
    """The events of one request, and after them silence."""

    def __init__(self, events: Sequence[TokenEvent]) -> None:
        self._events = list(events)
        self.is_closed = False

    async def __anext__(self) -> TokenEvent:
        if not self._events:
            await asyncio.Event().wait()
        return self._events.pop(0)

    def close(self) -> None:
        self.is_closed = True


def events_of(
    rng: random.Random, ids: Sequence[int], *, reason: str = "length", wants_logprobs: bool
) -> list[TokenEvent]:
    """Puts tokens together in events of random sizes; the weights change after ten tokens."""
    events, start = [], 0
    while start < len(ids):
        end = min(len(ids), start + rng.randint(1, 9))
        spans = [WeightSpan(1, start, min(end, 10)), WeightSpan(2, max(start, 10), end)]
        events.append(
            TokenEvent(
                request_id="r",
                token_ids=list(ids[start:end]),
                logprobs=[-float(i) for i in range(start, end)] if wants_logprobs else [],
                weight_versions=tuple(span for span in spans if span.start < span.end),
                finish_reason=reason if end == len(ids) else None,
            )
        )
        start = end
    return events


def collect(tokenizer: Tokenizer, events: Sequence[TokenEvent], stops: Sequence[str]) -> tuple[Piece, Answer]:
    answer, whole = Answer(tokenizer, TextRules(tuple(stops))), Piece()
    for event in events:
        piece = answer.push(event)
        whole.text += piece.text
        whole.token_ids += piece.token_ids
        whole.logprobs += piece.logprobs
        whole.offsets += piece.offsets
        whole.finish_reason = piece.finish_reason
        if piece.finish_reason:
            break
    return whole, answer


@pytest.mark.parametrize("stops", [[], ["ends"], ["語 👩", "zz"], ["absent"], ["d"]])
@pytest.mark.parametrize("wants_logprobs", [False, True])
def test_an_answer_does_not_depend_on_how_tokens_came_together(
    tokenizer: Tokenizer, stops: list[str], wants_logprobs: bool
) -> None:
    rng = random.Random(7)
    ids = tokenizer.encode(TEXT)
    seen = []
    for _ in range(50):
        whole, answer = collect(tokenizer, events_of(rng, ids, wants_logprobs=wants_logprobs), stops)
        seen.append((whole, answer.weight_versions, answer.num_tokens))
    assert all(one == seen[0] for one in seen)
    whole, spans, num_tokens = seen[0]
    found = [TEXT.find(stop) for stop in stops if stop in TEXT]
    assert whole.text == TEXT[: min(found, default=len(TEXT))]
    assert whole.finish_reason == ("stop" if found else "length")
    assert num_tokens == len(whole.token_ids) == spans[-1].end
    assert [span.version for span in spans] == [1, 2][: len(spans)]
    assert len(whole.logprobs) == len(whole.offsets) == (num_tokens if wants_logprobs else 0)


def all_at_once(tokenizer: Tokenizer, text: str, *, reason: str = "length", **rules: Any) -> Piece:
    event = TokenEvent("r", tokenizer.encode(text), finish_reason=reason)
    return Answer(tokenizer, TextRules(**rules)).push(event)


def test_the_reason_to_stop_is_named_and_shown_where_asked_for(tokenizer: Tokenizer) -> None:
    piece = all_at_once(tokenizer, TEXT, stop_strings=("end", "string"))
    assert (piece.text, piece.finish_reason, piece.stop_reason) == ("the stop ", "stop", "string")
    piece = all_at_once(tokenizer, TEXT, stop_strings=("end", "string"), includes_stop=True)
    assert (piece.text, piece.stop_reason) == ("the stop string", "string")
    last = tokenizer.encode(TEXT)[-1]
    for includes, text in ((False, TEXT[: -len(tokenizer.decode([last]))]), (True, TEXT)):
        piece = all_at_once(tokenizer, TEXT, reason="stop", stop_token_ids=frozenset({last}), includes_stop=includes)
        assert (piece.text, piece.finish_reason, piece.stop_reason) == (text, "stop", last)
    # The model's own end token is hidden alike, and is no reason; one that a parser looks for is not.
    for shown, includes in ((False, False), (True, False), (False, True)):
        rules = {"end_ids": frozenset({last}), "shown_ids": frozenset({last} if shown else ())}
        piece = all_at_once(tokenizer, TEXT, reason="stop", includes_stop=includes, skips_special_tokens=False, **rules)
        text = TEXT if shown or includes else TEXT[: -len(tokenizer.decode([last]))]
        assert (piece.text, piece.finish_reason, piece.stop_reason) == (text, "stop", None)
    # The token is in its place by chance: it is not what ended the answer.
    assert all_at_once(tokenizer, TEXT, stop_token_ids=frozenset({last})).stop_reason is None


def test_no_stop_string_counts_before_the_least_number_of_tokens(tokenizer: Tokenizer) -> None:
    num_tokens = len(tokenizer.encode("the end the"))
    piece = all_at_once(tokenizer, "the end the end", stop_strings=("end",), min_tokens=num_tokens)
    assert (piece.text, piece.finish_reason) == ("the end the ", "stop")
    piece = all_at_once(tokenizer, "the end the end", stop_strings=("end",), min_tokens=100)
    assert (piece.text, piece.finish_reason) == ("the end the end", "length")


@pytest.mark.parametrize("includes", [False, True])
def test_a_stop_string_counts_that_is_complete_only_after_the_least_number_of_tokens(
    tokenizer: Tokenizer, includes: bool
) -> None:
    rng = random.Random(6)
    for _ in range(1000):
        text = "".join(rng.choices("abc", k=rng.randint(1, 12)))
        stops = tuple("".join(rng.choices("abc", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3)))
        ids, least = tokenizer.encode(text), rng.randint(0, 8)
        whole, answer = Piece(), Answer(tokenizer, TextRules(stops, min_tokens=least, includes_stop=includes))
        for number, token_id in enumerate(ids, 1):
            whole.extend(
                answer.push(TokenEvent("r", [token_id], finish_reason="length" if number == len(ids) else None))
            )
            if answer.is_over:
                break
        uncounted = len(tokenizer.decode(ids[:least]))
        ends = [(at + len(stop), at) for stop in stops for at in range(len(text)) if text.startswith(stop, at)]
        end, start = min((found for found in ends if found[0] > uncounted), default=(len(text), len(text)))
        assert whole.text == text[: end if includes else start], (text, stops, least)
        assert whole.stop_reason == (text[start:end] or None)


def test_an_answer_that_goes_on_with_its_prompt_has_the_space_between_them() -> None:
    fast = byte_fallback_tokenizer()
    tokenizer = Tokenizer(fast)
    prompt, later = fast.convert_tokens_to_ids(["▁the"]), fast.convert_tokens_to_ids(["▁st", "o", "p"])
    assert tokenizer.decode(prompt + later) == "the stop"
    for continues, text in ((True, " stop"), (False, "stop")):
        for num_before in range(len(later)):
            answer = Answer(tokenizer, TextRules(continues_prompt=continues), prompt_ids=prompt)
            before = answer.push(TokenEvent("r", later[:num_before])).text
            resumed = Answer(tokenizer, TextRules(continues_prompt=continues), prompt_ids=prompt)
            resumed.go_on(later[:num_before], [])
            rest = [one.push(TokenEvent("r", later[num_before:], finish_reason="length")) for one in (answer, resumed)]
            assert [before + piece.text for piece in rest] == [text, text]
    answer = Answer(tokenizer, TextRules((" stop",), continues_prompt=True), prompt_ids=prompt)
    piece = answer.push(TokenEvent("r", later, finish_reason="length"))
    assert (piece.text, piece.stop_reason) == ("", " stop")


def test_special_tokens_are_shown_where_asked_for(tokenizer: Tokenizer) -> None:
    assert all_at_once(tokenizer, "a<|end|>b").text == "ab"
    assert all_at_once(tokenizer, "a<|end|>b", skips_special_tokens=False).text == "a<|end|>b"


@pytest.mark.parametrize("stops", [[], ["ends"], ["語 👩"]])
async def test_every_token_has_one_version_however_weights_and_events_fall(
    tokenizer: Tokenizer, stops: list[str]
) -> None:
    rng, ids = random.Random(3), tokenizer.encode(TEXT)
    for _ in range(100):
        version_of = sorted(rng.randint(1, 5) for _ in ids)
        events = [
            replace(event, weight_versions=spans_of(version_of, event.weight_versions[0].start, len(event.token_ids)))
            for event in events_of(rng, ids, wants_logprobs=rng.random() < 0.5)
        ]
        answer = Answer(tokenizer, TextRules(tuple(stops)))
        generation = Generation(Events(events), [answer], prompt_ids=[1])  # type: ignore[arg-type]
        await generation.prime(probe=never_asked)
        handed_out = [event async for event in _token_events(generation)]
        expected = version_of[: answer.num_tokens]
        assert versions_in(answer.weight_versions) == expected
        assert versions_in([span for event in handed_out for span in event.weight_versions]) == expected
        assert [span.version for span in answer.weight_versions] == sorted(set(expected))


def test_a_piece_says_when_other_weights_begin(tokenizer: Tokenizer) -> None:
    ids, answer = tokenizer.encode("abcdef"), Answer(tokenizer)
    spans = [(WeightSpan(1, 0, 2),), (WeightSpan(1, 2, 4),), (WeightSpan(1, 4, 5), WeightSpan(2, 5, 6))]
    events = [TokenEvent("r", ids[2 * i : 2 * i + 2], weight_versions=span) for i, span in enumerate(spans)]
    pieces = [answer.push(event) for event in events]
    assert [piece.begins_version for piece in pieces] == [True, False, True]
    assert not Piece(begins_version=True).is_empty


def spans_of(version_of: Sequence[int], start: int, length: int) -> tuple[WeightSpan, ...]:
    """The spans of an event: one for each version in it."""
    part = version_of[start : start + length]
    firsts = [start + part.index(version) for version in sorted(set(part))]
    return tuple(
        WeightSpan(version_of[first], first, end)
        for first, end in zip(firsts, [*firsts[1:], start + length], strict=True)
    )


def versions_in(spans: Sequence[WeightSpan]) -> list[int]:
    """The version of each token, after a look that nothing is missing or twice."""
    assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])][: len(spans)]
    return [span.version for span in spans for _ in range(span.start, span.end)]


async def read_all(generation: Generation) -> list[Piece]:
    return [piece async for pieces in generation for piece in pieces]


def generation_of(tokenizer: Tokenizer, events: Sequence[TokenEvent]) -> Generation:
    return Generation(Events(events), [Answer(tokenizer)])  # type: ignore[arg-type]  # stands in for a handle's stream


async def never_asked() -> None:
    pytest.fail("a request that is answered needs no probe")


async def test_a_request_without_a_replica_is_refused_by_the_probe(tokenizer: Tokenizer) -> None:
    async def probe() -> None:
        raise NoReplica("none")

    with pytest.raises(NoReplica):
        await generation_of(tokenizer, []).prime(probe=probe, probe_after_s=0.001)


async def test_a_request_that_only_waits_goes_on_waiting(tokenizer: Tokenizer) -> None:
    num_probes = 0

    async def probe() -> None:
        nonlocal num_probes
        num_probes += 1

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await generation_of(tokenizer, []).prime(probe=probe, probe_after_s=0.001)
    assert num_probes > 1


async def test_a_failed_request_gives_its_tokens_and_then_the_reason(tokenizer: Tokenizer) -> None:
    event = TokenEvent("r", tokenizer.encode("ab"), finish_reason="failed", error="not finite")
    generation = generation_of(tokenizer, [event])
    await generation.prime(probe=never_asked)
    assert [piece.text for piece in await anext(generation)] == ["ab"]
    with pytest.raises(GenerationFailed, match="not finite"):
        await anext(generation)


async def test_a_sequence_that_meets_a_stop_string_ends_alone(tokenizer: Tokenizer) -> None:
    ended = []

    async def end(sequence_id: str) -> None:
        ended.append(sequence_id)

    def event(index: int, text: str, reason: str | None = None) -> TokenEvent:
        return TokenEvent(f"r{index}", tokenizer.encode(text), finish_reason=reason, index=index)

    first, second, last = event(0, "a stop"), event(0, " b", "cancelled"), event(1, "e", "length")
    first.more.append(event(1, "c"))
    second.more.append(event(1, "d"))
    answers = [Answer(tokenizer, TextRules(("stop",)), index=index) for index in (4, 5)]
    source: Any = Events([first, second, last])
    generation = Generation(source, answers, end_sequence=end)
    await generation.prime(probe=never_asked)
    pieces = await read_all(generation)
    assert [(piece.index, piece.text, piece.finish_reason) for piece in pieces] == [
        (4, "a ", "stop"), (5, "c", None), (5, "d", None), (5, "e", "length"),
    ]  # fmt: skip
    await asyncio.sleep(0)  # for the task that tells the engine
    assert ended == ["r0"]


async def test_pieces_end_with_the_finish_reason(tokenizer: Tokenizer) -> None:
    events = events_of(random.Random(1), tokenizer.encode("the end"), reason="stop", wants_logprobs=False)
    generation = generation_of(tokenizer, events)
    await generation.prime(probe=never_asked)
    pieces = await read_all(generation)
    assert "".join(piece.text for piece in pieces) == "the end"
    assert [piece.finish_reason for piece in pieces[-1:]] == ["stop"]
