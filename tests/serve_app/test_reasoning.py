"""Reasoning and answer are told apart, however the text is cut."""

import pytest

from serve_app.text.reasoning import ReasoningParser


def parse(pieces: list[str], *, is_open: bool) -> tuple[str, str]:
    parser = ReasoningParser(is_open=is_open)
    thoughts = [*(parser.push(piece) for piece in pieces), parser.flush()]
    return "".join(part.reasoning for part in thoughts), "".join(part.content for part in thoughts)


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        ("<think>\nhm, <b>\n\n</think>\n\nYes.\n", False, "hm, <b>", "Yes.\n"),
        ("\n<think>hm</think>Yes", False, "hm", "Yes"),
        ("hm\n</think>\n\nYes", True, "hm", "Yes"),
        ("\n\n</think>\n\nYes </think> no", True, "", "Yes </think> no"),
        ("<think>\n\n</think>\n\nYes", False, "", "Yes"),
        ("hm </thin", True, "hm </thin", ""),
        ("<think>hm", False, "hm", ""),
        ("no <think> at all</think>", False, "", "no <think> at all</think>"),
        (" <thin", False, "", " <thin"),
        ("", False, "", ""),
        (" 日本 ", True, "日本", ""),
    ],
)
def test_they_are_told_apart_at_every_cut(text: str, is_open: bool, reasoning: str, content: str) -> None:
    assert parse([text], is_open=is_open) == (reasoning, content)
    assert parse(list(text), is_open=is_open) == (reasoning, content)
    for cut in range(len(text) + 1):
        assert parse([text[:cut], text[cut:]], is_open=is_open) == (reasoning, content)
