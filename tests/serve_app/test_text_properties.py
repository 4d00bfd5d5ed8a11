"""Text that comes token by token is the text of all tokens, whatever the characters and the cuts: by hypothesis."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import WeightSpan
from serve_app.messages import TokenEvent
from serve_app.router.answer import Answer, Piece, TextRules
from serve_app.text.tokenizer import REPLACEMENT, Detokeniser, StopMatcher, Tokenizer
from tests.serve_app.tiny_tokenizers import byte_fallback_tokenizer, byte_level_tokenizer

pytestmark = pytest.mark.slow
SOURCES = ["byte_level", "byte_fallback"]
EXAMPLES = settings(max_examples=150, deadline=None, database=None, derandomize=True)
"""The same cases on every machine; the machine may be slow."""

characters = st.one_of(
    st.sampled_from(
        [*"abc the\n<", "é", "ß", "e\u0301", "a\u0308\u0323", "\u200d", "👩‍👩‍👧‍👦", "🇩🇪", "👍🏽", "日", "語", "𐍈"]
    ),
    st.characters(exclude_categories=["Cs"], exclude_characters=[REPLACEMENT, "▁"]),
)
texts = st.lists(characters, max_size=20).map("".join)


@cache
def tokenizer(source: str) -> Tokenizer:
    return Tokenizer(byte_level_tokenizer() if source == "byte_level" else byte_fallback_tokenizer())


def split(data: st.DataObject, ids: Sequence[int]) -> list[list[int]]:
    """Puts ids together in events, as steps would; some of them are empty."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=len(ids))))
    return [list(ids[start:end]) for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


@pytest.mark.parametrize("source", SOURCES)
@EXAMPLES
@given(text=texts, data=st.data())
def test_pieces_are_the_whole_text_at_every_cut(source: str, text: str, data: st.DataObject) -> None:
    ids = tokenizer(source).encode(text)
    ids = ids[: data.draw(st.integers(0, len(ids)))]
    reader = Detokeniser(tokenizer(source))
    pieces = [reader.push(part) for part in split(data, ids)]
    # The input has none, so that each would be half of a character.
    assert REPLACEMENT not in "".join(pieces)
    tail = reader.flush()
    assert REPLACEMENT not in tail.rstrip(REPLACEMENT)
    whole = tokenizer(source).decode(ids)
    if source == "byte_fallback" and whole.endswith(REPLACEMENT):
        # Decoding all at once spoils whole characters before the incomplete one: here they were given out before.
        assert whole.startswith("".join(pieces)[: len(whole.rstrip(REPLACEMENT))])
    else:
        assert "".join([*pieces, tail]) == whole


@EXAMPLES
@given(ids=st.lists(st.integers(0, 319), max_size=60), data=st.data())
def test_any_tokens_at_all_are_the_whole_text(ids: list[int], data: st.DataObject) -> None:
    reader = Detokeniser(tokenizer("byte_level"))
    assert "".join([*(reader.push(part) for part in split(data, ids)), reader.flush()]) == tokenizer(
        "byte_level"
    ).decode(ids)


def cut_at(text: str, stops: Sequence[str], *, includes: bool) -> str:
    """The text up to the stop string that is complete first; of two that end together the longer one counts."""
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return text if not found else text[: min(found)[0 if includes else 1]]


@EXAMPLES
@given(data=st.data(), text=texts, includes=st.booleans())
def test_no_head_of_a_stop_string_ever_comes_out(data: st.DataObject, text: str, includes: bool) -> None:
    inside = st.tuples(st.integers(0, len(text)), st.integers(1, 6)).map(lambda at: text[at[0] : at[0] + at[1]])
    stops = data.draw(
        st.lists(st.one_of(inside, st.text(min_size=1, max_size=4)), max_size=3).map(lambda s: [*filter(None, s)])
    )
    expected = cut_at(text, stops, includes=includes)
    matcher, given_out = StopMatcher(stops, includes_stop=includes), ""
    for character in text:
        given_out += matcher.push(character)
        assert expected.startswith(given_out)
    assert given_out + matcher.flush() == expected
    assert matcher.is_stopped == any(stop in text for stop in stops)


@pytest.mark.parametrize("source", SOURCES)
@EXAMPLES
@given(data=st.data(), text=texts.filter(bool))
def test_an_answer_has_one_end_and_counts_what_it_gave(source: str, data: st.DataObject, text: str) -> None:
    ids = tokenizer(source).encode(text)
    whole = tokenizer(source).decode(ids)
    at = data.draw(st.integers(0, max(0, len(whole) - 1)))
    stops = [whole[at : at + data.draw(st.integers(1, 5))]] if whole and data.draw(st.booleans()) else []
    rules = TextRules(tuple(stops), includes_stop=data.draw(st.booleans()))
    parts = split(data, ids)
    pieces = read(Answer(tokenizer(source), rules), parts)
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == ("stop" if stops else "length")
    assert "".join(piece.text for piece in pieces) == cut_at(whole, stops, includes=rules.includes_stop)
    counted = [token for piece in pieces for token in piece.token_ids]
    assert counted == ids[: len(counted)]
    assert stops or len(counted) == len(ids)
    # Put together in other events it is the same answer.
    together = read(Answer(tokenizer(source), rules), [list(ids)])
    assert [token for piece in together for token in piece.token_ids] == counted
    assert "".join(piece.text for piece in together) == "".join(piece.text for piece in pieces)


def read(answer: Answer, parts: Sequence[Sequence[int]]) -> list[Piece]:
    pieces, start = [], 0
    for number, part in enumerate(parts):
        span = WeightSpan(1, start, start + len(part))
        event = TokenEvent("r", list(part), weight_versions=(span,) if part else ())
        start += len(part)
        if number == len(parts) - 1:
            event = replace(event, finish_reason="length")
        pieces.append(answer.push(event))
        if pieces[-1].finish_reason is not None:
            break
    assert answer.num_tokens == sum(len(piece.token_ids) for piece in pieces)
    assert answer.is_over
    return pieces
