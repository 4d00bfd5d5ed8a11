import random
from collections.abc import Sequence
from typing import Any

import pytest

from engine import ContextLengthExceeded, InvalidRequest
from serve_app.text.tokenizer import Detokeniser, StopMatcher, Tokenizer
from tests.serve_app.tiny_tokenizers import byte_fallback_tokenizer, byte_level_tokenizer

MARKS = ["e\u0301", "a\u0308\u0323", "\u200d"]
ALPHABET = [*"abc the\n<", "é", "ß", "日", "本", "語", "👩‍👩‍👧‍👦", "🇩🇪", "😀", *MARKS, "\ufffd"]


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return Tokenizer(byte_level_tokenizer())


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    return Tokenizer(byte_fallback_tokenizer())


def random_text(rng: random.Random) -> str:
    return "".join(rng.choices(ALPHABET, k=rng.randint(0, 25)))


def random_chunks(rng: random.Random, ids: Sequence[int]) -> list[Sequence[int]]:
    chunks, start = [], 0
    while start < len(ids):
        end = start + rng.choice([1, 1, 2, 5])
        chunks.append(ids[start:end])
        start = end
    return chunks


def streamed(tokenizer: Tokenizer, chunks: Sequence[Sequence[int]]) -> list[str]:
    detokeniser = Detokeniser(tokenizer)
    return [*(detokeniser.push(chunk) for chunk in chunks), detokeniser.flush()]


def test_streamed_text_is_the_whole_text_for_every_cut(byte_level: Tokenizer) -> None:
    rng = random.Random(1)
    for _ in range(300):
        ids = byte_level.encode(random_text(rng))
        ids = ids[: rng.randint(0, len(ids))]
        assert "".join(streamed(byte_level, random_chunks(rng, ids))) == byte_level.decode(ids)


def test_streamed_text_is_the_whole_text_for_random_tokens(byte_level: Tokenizer) -> None:
    rng = random.Random(2)
    for _ in range(300):
        ids = [rng.randrange(300) for _ in range(rng.randint(0, 60))]
        assert "".join(streamed(byte_level, random_chunks(rng, ids))) == byte_level.decode(ids)


def test_no_piece_of_a_valid_text_holds_a_replacement_character(byte_level: Tokenizer) -> None:
    rng = random.Random(3)
    for _ in range(200):
        text = random_text(rng).replace("\ufffd", "")
        assert "\ufffd" not in "".join(streamed(byte_level, [[i] for i in byte_level.encode(text)]))


def test_streamed_text_is_the_whole_text_with_byte_tokens_and_stripped_spaces(byte_fallback: Tokenizer) -> None:
    rng = random.Random(4)
    for _ in range(300):
        ids = byte_fallback.encode(random_text(rng))
        assert "".join(streamed(byte_fallback, random_chunks(rng, ids))) == byte_fallback.decode(ids)


def whole_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text without the character that ids end within; its bytes spoil those before it where they are tokens."""
    return max((tokenizer.decode(ids[: len(ids) - cut]).rstrip("\ufffd") for cut in range(4)), key=len)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_text_goes_on_with_its_prompt_wherever_that_is_cut(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer, rng = request.getfixturevalue(kind), random.Random(8)
    for _ in range(500):
        ids = tokenizer.encode(random_text(rng).replace("\ufffd", ""))
        cut = rng.randint(0, len(ids))
        detokeniser = Detokeniser(tokenizer, prompt_ids=ids[:cut])
        text = "".join(map(detokeniser.push, random_chunks(rng, ids[cut:]))) + detokeniser.flush()
        if cut < len(ids):
            assert whole_text(tokenizer, ids[:cut]) + text == tokenizer.decode(ids)
        else:
            assert text == ""


def test_what_follows_a_prompt_of_any_tokens_is_what_it_adds_to_the_text(byte_level: Tokenizer) -> None:
    rng = random.Random(9)
    for _ in range(1000):
        ids = [rng.randrange(300) for _ in range(rng.randint(0, 30))]
        cut = rng.randint(0, len(ids))
        before, whole = byte_level.decode(ids[:cut]), byte_level.decode(ids)
        detokeniser = Detokeniser(byte_level, prompt_ids=ids[:cut])
        text = "".join(map(detokeniser.push, random_chunks(rng, ids[cut:]))) + detokeniser.flush()
        if whole.startswith(before):
            assert before + text == whole


def test_an_output_cut_within_a_character_ends_in_one_replacement(byte_level: Tokenizer) -> None:
    first_byte = byte_level.encode("日")[:1]
    assert streamed(byte_level, [byte_level.encode("ab"), first_byte]) == ["ab", "", "\ufffd"]


def test_special_tokens_are_no_part_of_the_text(byte_level: Tokenizer) -> None:
    ids = [*byte_level.encode("a"), *byte_level.encode("<|end|>"), *byte_level.encode("b")]
    assert "".join(streamed(byte_level, [[i] for i in ids])) == "ab"


def test_a_flood_of_broken_bytes_keeps_the_window_short(byte_level: Tokenizer) -> None:
    detokeniser = Detokeniser(byte_level)
    broken = byte_level.encode("日")[:1]
    text = ""
    for _ in range(500):
        text += detokeniser.push(broken)
        assert len(detokeniser._window) < 40
    assert text + detokeniser.flush() == byte_level.decode(broken * 500)


def first_completed(text: str, stops: Sequence[str]) -> str:
    """Cuts a text as a reader would who checks after each character."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


def test_stop_strings_cut_where_a_reader_of_single_characters_would() -> None:
    rng = random.Random(5)
    for _ in range(3000):
        text = "".join(rng.choices("ab", k=rng.randint(0, 14)))
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(rng.randint(0, 3))]
        matcher, given = StopMatcher(stops), ""
        for chunk in random_chunks(rng, [ord(c) for c in text]):
            given += matcher.push("".join(map(chr, chunk)))
            assert first_completed(text, stops).startswith(given)
        if not matcher.is_stopped:
            given += matcher.flush()
        assert given == first_completed(text, stops)


def test_the_head_of_a_stop_string_never_leaks() -> None:
    matcher = StopMatcher(["</answer>"])
    assert [matcher.push(piece) for piece in ["42<", "/ans", "wer", ">tail"]] == ["42", "", "", ""]
    assert matcher.is_stopped


def test_what_only_looked_like_a_stop_string_is_given_out() -> None:
    matcher = StopMatcher(["</answer>"])
    assert [matcher.push("1 <"), matcher.push(" 2"), matcher.push("<")] == ["1 ", "< 2", ""]
    assert matcher.flush() == "<"


def test_a_chat_is_rendered_up_to_the_answer(byte_level: Tokenizer) -> None:
    ids = byte_level.encode_chat([{"role": "user", "content": "hi"}])
    assert byte_level.decode(ids) == "<|user|>hi\n<|assistant|>"


def test_a_template_that_refuses_is_an_invalid_request_with_its_message(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="not this word") as caught:
        byte_level.encode_chat([{"role": "user", "content": "forbidden"}])
    assert caught.value.param == "messages"


def test_a_model_without_a_chat_template_says_so(byte_fallback: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        byte_fallback.encode_chat([{"role": "user", "content": "hi"}])


def test_half_a_surrogate_pair_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        byte_level.encode("a\ud83d")


def test_a_single_token_shows_its_text(byte_level: Tokenizer) -> None:
    assert [byte_level.token_text(i) for i in byte_level.encode("ab<|end|>")][-1] == "<|end|>"


@pytest.mark.parametrize("text", ["the " * 40_000, "日本" * 50_000, "a" * 100_000])
def test_of_an_endless_text_only_the_beginning_is_read(
    byte_level: Tokenizer, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tokens = len(byte_level.encode(text))
    read: list[int] = []
    encode = byte_level._tokenizer.encode

    def counted(part: str, **options: Any) -> Any:
        read.append(len(part))
        return encode(part, **options)

    monkeypatch.setattr(byte_level._tokenizer, "encode", counted)
    with pytest.raises(ContextLengthExceeded, match=rf"has {len(text)} characters.* 100 tokens at most") as caught:
        byte_level.encode(text, max_tokens=100)
    assert caught.value.param == "prompt"
    assert num_tokens > 200
    assert sum(read) < len(text) / 5


@pytest.mark.parametrize("max_tokens", [1, 10, 100])
def test_a_text_that_may_fit_is_read_whole(byte_level: Tokenizer, max_tokens: int) -> None:
    rng = random.Random(max_tokens)
    for _ in range(40):
        text = "".join(rng.choices(ALPHABET, k=rng.randint(0, 30 * max_tokens)))
        ids = byte_level.encode(text)
        try:
            assert byte_level.encode(text, max_tokens=max_tokens) == ids
        except ContextLengthExceeded:
            assert len(ids) > max_tokens


def test_each_distinct_token_is_named_once(byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = byte_level.encode("abc 日本 " * 200)
    expected = [byte_level.token_text(token_id) for token_id in ids]
    named: list[int] = []
    name = byte_level.token_text
    monkeypatch.setattr(byte_level, "token_text", lambda token_id: named.append(token_id) or name(token_id))
    assert byte_level.token_texts(ids) == expected
    assert sorted(named) == sorted(set(ids))
