"""Calls are found in every style, however the text is cut, and what only looks like one is content."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.text.tool_calls import CallDelta, ToolCallParser, ToolStyle

NAMES = ("weather", "search")
OBJECT = '{"city": "Köln }\\" [", "days": [1, {"a": {}}]}'
CALL = f'{{"name": "weather", "arguments": {OBJECT}}}'
QUOTED = json.dumps(OBJECT)
LLAMA = CALL.replace("arguments", "parameters")
HERMES, LLAMA3, MISTRAL = ToolStyle.HERMES, ToolStyle.LLAMA3_JSON, ToolStyle.MISTRAL


def parse(style: ToolStyle, pieces: Sequence[str], *, only_first: bool = False) -> tuple[str, list[tuple[str, str]]]:
    """Gives content and calls; asserts what holds for deltas."""
    parser = ToolCallParser(style, NAMES, only_first=only_first)
    parsed = [*(parser.push(piece) for piece in pieces), parser.flush()]
    calls: list[CallDelta] = []
    for delta in (delta for part in parsed for delta in part.calls):
        if delta.index == len(calls):
            assert delta.name is not None
            calls.append(delta)
        else:
            assert delta.name is None
            assert delta.index == len(calls) - 1
            calls[-1] = CallDelta(delta.index, calls[-1].name, calls[-1].arguments + delta.arguments)
    assert parser.has_calls == bool(calls)
    content = "".join(part.content for part in parsed)
    return content, [(str(call.name), call.arguments) for call in calls]


EXAMPLES: list[tuple[ToolStyle, str, str, list[tuple[str, str]]]] = [
    (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", "", [("weather", OBJECT)]),
    (HERMES, f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>", "", [("weather", OBJECT)] * 2),
    (HERMES, f"Let me see.\n\n<tool_call>\n{CALL}\n</tool_call>\n", "Let me see.", [("weather", OBJECT)]),
    (HERMES, f"<tool_call>{CALL}</tool_call>\n Done. \n", "Done. \n", [("weather", OBJECT)]),
    (HERMES, f"hi <tool_call>{CALL}</tool_call>\n bye \n", "hi bye \n", [("weather", OBJECT)]),
    (
        HERMES,
        f"hi<tool_call>{CALL}</tool_call>\n <tool_call>{CALL}</tool_call> bye",
        "hi\n bye",
        [("weather", OBJECT)] * 2,
    ),
    (HERMES, f"<tool_call>{CALL}\n{CALL}</tool_call>", "", [("weather", OBJECT)] * 2),
    (HERMES, f"<tool_call>[{CALL}, {CALL} ]\n</tool_call> bye", "bye", [("weather", OBJECT)] * 2),
    (HERMES, f"<tool_call>[{CALL}]", "", [("weather", OBJECT)]),
    (HERMES, f'<tool_call>{CALL}{{"a": 1}}', '{"a": 1}', [("weather", OBJECT)]),
    (HERMES, f"<tool_call>{CALL}, and more", ", and more", [("weather", OBJECT)]),
    (HERMES, f'<tool_call>{{"name": "weather", "arguments": {QUOTED}}}</tool_call>', "", [("weather", OBJECT)]),
    (HERMES, f'<tool_call>{{"arguments": {QUOTED}, "name": "weather"}}</tool_call>', "", [("weather", OBJECT)]),
    (HERMES, '<tool_call>{"name": "weather", "arguments": "[1]"}</tool_call>', "same", []),
    (LLAMA3, f'{{"name": "weather", "parameters": {QUOTED}}}', "", [("weather", OBJECT)]),
    (HERMES, f'<tool_call>{{"arguments": {OBJECT}, "name": "search"}}</tool_call>', "", [("search", OBJECT)]),
    (HERMES, '<tool_call>{"name": "search"}</tool_call>', "", [("search", "{}")]),
    (HERMES, f"<tool_call>{CALL}", "", [("weather", OBJECT)]),
    (HERMES, '<tool_call>{"name": "weather", "arguments": {"ci', "", [("weather", '{"ci')]),
    (HERMES, "a <tool_call> b", "a <tool_call> b", []),
    (HERMES, "1 <tool_ 2 <<tool_call", "1 <tool_ 2 <<tool_call", []),
    (HERMES, '<tool_call>{"name": "nuke", "arguments": {}}</tool_call>', "same", []),
    (HERMES, '<tool_call>{"name": "weather", "arguments": "x"}</tool_call>', "same", []),
    (HERMES, '<tool_call>{"name": "wea', "same", []),
    (HERMES, f"<tool_call><tool_call>{CALL}</tool_call>", "<tool_call>", [("weather", OBJECT)]),
    (HERMES, " plain \n text \n", "same", []),
    (HERMES, f"<tool_call>{CALL} and more", "and more", [("weather", OBJECT)]),
    (LLAMA3, LLAMA, "", [("weather", OBJECT)]),
    (LLAMA3, f" <|python_tag|>{LLAMA}; {LLAMA}\n", "", [("weather", OBJECT)] * 2),
    (LLAMA3, f'{{"type": "function", "name": "weather", "parameters": {OBJECT}}}', "", [("weather", OBJECT)]),
    (LLAMA3, '{"name": "Bob", "age": 3}', "same", []),
    (LLAMA3, f"Text, then {LLAMA}", "same", []),
    (LLAMA3, f"{LLAMA} and text", "and text", [("weather", OBJECT)]),
    (LLAMA3, "<|python", "same", []),
    (MISTRAL, f"[TOOL_CALLS][{CALL}]", "", [("weather", OBJECT)]),
    (MISTRAL, f"[TOOL_CALLS] [{CALL}, {CALL}]", "", [("weather", OBJECT)] * 2),
    (MISTRAL, f'[TOOL_CALLS] [{CALL[:-1]}, "id": "abcdef123"}}] ', "", [("weather", OBJECT)]),
    (MISTRAL, f"I look. [TOOL_CALLS]weather{OBJECT}", "I look.", [("weather", OBJECT)]),
    (
        MISTRAL,
        f"[TOOL_CALLS]weather[ARGS]{OBJECT}[TOOL_CALLS]search[CALL_ID]abc[ARGS]{{}}",
        "",
        [("weather", OBJECT), ("search", "{}")],
    ),
    (MISTRAL, "[TOOL_CALLS] of the wild", "same", []),
    (MISTRAL, "[TOOL_CALLS]nuke{}", "same", []),
    (MISTRAL, "an [array] of [TOOL_", "same", []),
]


@pytest.mark.parametrize(("style", "text", "content", "calls"), EXAMPLES)
def test_calls_and_content_are_told_apart_at_every_cut(
    style: ToolStyle, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    expected = (text if content == "same" else content, calls)
    assert parse(style, [text]) == expected
    assert parse(style, list(text)) == expected
    for cut in range(len(text) + 1):
        assert parse(style, [text[:cut], text[cut:]]) == expected


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<tool_", "[TOOL_CALLS]", "[TOOL", "[", "]", "{", "}", ",", ";", " ", "\n",
        '{"name": "weather", ', '"arguments": ', '"parameters": ', '{"name": "search"}', OBJECT, CALL, LLAMA,
        "weather", QUOTED, "[ARGS]", "<|python_tag|>", "word", '"', "\\", "日本",
    ]
)  # fmt: skip


@pytest.mark.parametrize("style", ToolStyle)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_deltas_put_together_do_not_depend_on_the_cuts(style: ToolStyle, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(FRAGMENTS, max_size=8)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(style, pieces) == parse(style, [text]) == parse(style, list(text))


@pytest.mark.parametrize("num_examples", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_arguments_come_out_as_they_were_written(num_examples: int) -> None:
    @settings(max_examples=num_examples, deadline=None)
    @given(value=st.dictionaries(st.text(), st.recursive(st.none() | st.text() | st.floats(allow_nan=False), st.lists)))
    def check(value: dict[str, object]) -> None:
        for ascii_only in (True, False):
            arguments = json.dumps(value, ensure_ascii=ascii_only)
            text = f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'
            assert parse(HERMES, [text]) == ("", [("weather", arguments)])

    check()


@pytest.mark.parametrize(
    ("style", "text"),
    [
        (HERMES, f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>"),
        (LLAMA3, f"{LLAMA}; {LLAMA}"),
        (MISTRAL, f"[TOOL_CALLS] [{CALL}, {CALL}]"),
    ],
)
def test_only_the_first_call_is_given_where_calls_may_not_be_parallel(style: ToolStyle, text: str) -> None:
    assert parse(style, list(text), only_first=True) == ("", [("weather", OBJECT)])


@pytest.mark.parametrize(
    ("style", "text"),
    [
        (HERMES, f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>"),
        (LLAMA3, f"{LLAMA}; {LLAMA}"),
        (MISTRAL, f"[TOOL_CALLS] [{CALL}, {CALL}]"),
        (MISTRAL, f"[TOOL_CALLS]weather[ARGS]{OBJECT}[TOOL_CALLS]search[ARGS]{{}}"),
    ],
)
def test_an_answer_that_is_all_calls_has_no_content_wherever_it_is_cut(style: ToolStyle, text: str) -> None:
    for cut in range(len(text) + 1):
        parser = ToolCallParser(style, NAMES, is_all_calls=True)
        assert [part.content for part in (*map(parser.push, text[:cut]), parser.flush())] == [""] * (cut + 1)
