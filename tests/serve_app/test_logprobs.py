"""Log-probabilities of completions keep every entry, also where several tokens read alike."""

from serve_app.router.answer import Piece
from serve_app.router.logprobs import LogprobWriter
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
