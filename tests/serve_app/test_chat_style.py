"""What the chat template says of a model's calls and reasoning, and what becomes of an answer then."""

import json
import random
from typing import Any

import jsonschema
import pytest
from tiny_model import CHAT_TEMPLATE, byte_tokenizer
from tokenizers import AddedToken

from engine import FinishReason, InvalidRequest
from serve_app.messages import TokenEvent
from serve_app.protocol.parsing import parse_body
from serve_app.protocol.requests import ChatRequest
from serve_app.router.answer import Answer, Piece, TextRules
from serve_app.router.chat_style import ChatStyle, chat_style
from serve_app.settings import AppSettings
from serve_app.text.grammar import GrammarCompiler
from serve_app.text.tokenizer import Tokenizer
from serve_app.text.tool_calls import ToolStyle
from tests.serve_app.test_grammar import walk

TOOLS_PART = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
CALLS_PART = (
    "{% for m in messages %}{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{% endfor %}"
)
TEMPLATES = {
    "hermes": TOOLS_PART + CALLS_PART + "{# <tool_call> #}" + CHAT_TEMPLATE,
    "llama3_json": TOOLS_PART + CALLS_PART + '{# {"name": "f", "parameters": x} #}' + CHAT_TEMPLATE,
    "mistral": TOOLS_PART + CALLS_PART + "{# [TOOL_CALLS] #}" + CHAT_TEMPLATE,
    "mistral with bare names": TOOLS_PART + CALLS_PART + "{# [TOOL_CALLS] [ARGS] #}" + CHAT_TEMPLATE,
}
PARAMETERS = {
    "$defs": {"city": {"enum": ["Köln", "Rom"]}},
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
PING = {"type": "function", "function": {"name": "ping"}}
SPECIALS = ["[TOOL_CALLS]", "[ARGS]"]


def style_of(template: str, **settings: Any) -> tuple[ChatStyle, Any]:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIALS})
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ("<tool_call>", "</tool_call>")])
    tokenizer.chat_template = template
    return chat_style(Tokenizer(tokenizer), AppSettings(**settings)), tokenizer


def chat(**fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields
    return parse_body(ChatRequest, json.dumps(body).encode())


def answer_of(style: ChatStyle, body: ChatRequest, ids: list[int], *, size: int) -> tuple[str, str, list[Any], str]:
    """Gives what a client puts together from the chunks of an answer in events of so many tokens."""
    answer = Answer(style.tokenizer, TextRules(shown_ids=style.shown_ids(body)))
    parts = style.parts(body, style.tokenizer.encode_chat(*style.for_template(body.messages, body)))
    assert parts is not None
    content, reasoning, reason = "", "", ""
    calls: list[Any] = []
    for start in range(0, max(1, len(ids)), size):
        is_last = start + size >= len(ids)
        finish_reason = FinishReason.STOP.value if is_last else None
        part = parts.push(answer.push(TokenEvent("r", ids[start : start + size], finish_reason=finish_reason)))
        content, reasoning, reason = content + part.content, reasoning + part.reasoning, part.finish_reason or reason
        for delta in part.calls:
            if delta.id is not None:
                calls.append([delta.function.name, ""])
            calls[delta.index or 0][1] += delta.function.arguments
    return content, reasoning, calls, reason


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("is_parallel", [True, False])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_required_calls_always_fit_their_parameters(name: str, is_parallel: bool, choice: Any) -> None:
    style, tokenizer = style_of(TEMPLATES[name])
    body = chat(tools=[WEATHER, PING], tool_choice=choice, parallel_tool_calls=is_parallel)
    style.check(body)
    grammar = style.grammar(body)
    assert grammar is not None
    compiler = GrammarCompiler(lambda: tokenizer, vocab_size=len(tokenizer), end_ids=(tokenizer.eos_token_id,))
    num_calls = set()
    for seed in range(12):
        constraint = await compiler.constraint(grammar)
        ids: list[int] = []
        if walk(constraint, tokenizer, random.Random(seed), most=3000, ids=ids) is None:
            continue
        content, _, calls, reason = answer_of(style, body, ids, size=1)
        assert (content, reason) == ("", "tool_calls")
        assert answer_of(style, body, ids, size=len(ids)) == answer_of(style, body, ids, size=7) == (
            content, "", calls, reason,
        )  # fmt: skip
        for called, arguments in calls:
            assert called == "weather" or choice == "required"
            jsonschema.validate(json.loads(arguments), PARAMETERS if called == "weather" else {"maxProperties": 0})
        num_calls.add(len(calls))
    assert (num_calls == {1}) != is_parallel


@pytest.mark.parametrize("name", TEMPLATES)
async def test_strict_tools_leave_text_free_and_calls_right(name: str) -> None:
    style, tokenizer = style_of(TEMPLATES[name])
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    body = chat(tools=[strict])
    grammar = style.grammar(body)
    assert grammar is not None
    assert style.grammar(chat(tools=[WEATHER])) is None
    compiler = GrammarCompiler(lambda: tokenizer, vocab_size=len(tokenizer), end_ids=(tokenizer.eos_token_id,))
    call = {
        "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "%s"}}\n</tool_call>',
        "llama3_json": '{"name": "weather", "parameters": {"city": "%s"}}',
        "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "%s"}}]',
        "mistral with bare names": '[TOOL_CALLS]weather[ARGS]{"city": "%s"}',
    }[name]
    for text, is_good in (("plain text {", True), (call % "Rom", True), (call % "Ulm", False)):
        constraint = await compiler.constraint(grammar)
        ids = tokenizer.encode(text, add_special_tokens=False)
        if is_good:
            constraint.advance(ids)
        else:
            with pytest.raises(ValueError, match="doesn't satisfy"):
                constraint.advance(ids)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_shows_the_style_and_gets_the_tools(name: str) -> None:
    style, _ = style_of(TEMPLATES[name])
    assert style.tool_style == ToolStyle(name.partition(" ")[0])
    body = chat(tools=[WEATHER])
    style.check(body)
    prompt = style.tokenizer.decode(style.tokenizer.encode_chat(*style.for_template(body.messages, body)))
    assert '"name": "weather"' in prompt
    hidden = chat(tools=[WEATHER], tool_choice="none")
    assert "weather" not in style.tokenizer.decode(
        style.tokenizer.encode_chat(*style.for_template(hidden.messages, hidden))
    )


CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rom"}'}}
TOOL_MESSAGES = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "rain"},
]


@pytest.mark.parametrize(
    ("template", "fields", "settings", "param", "message"),
    [
        (CHAT_TEMPLATE, {"tools": [WEATHER]}, {}, "tools", "knows none"),
        (CHAT_TEMPLATE, {"messages": TOOL_MESSAGES}, {}, "messages", "knows none"),
        (TOOLS_PART + CHAT_TEMPLATE, {"tools": [WEATHER]}, {}, "tools", "set tool_parser"),
        (
            TEMPLATES["hermes"],
            {"tools": [WEATHER], "response_format": {"type": "json_object"}},
            {},
            "tools",
            "both given",
        ),
        (CHAT_TEMPLATE, {"tools": [WEATHER]}, {"tool_parser": "mistral"}, "tools", "knows none"),
    ],
)
def test_what_a_model_cannot_be_asked_is_refused(
    template: str, fields: dict[str, Any], settings: dict[str, Any], param: str, message: str
) -> None:
    style, _ = style_of(template, **settings)
    with pytest.raises(InvalidRequest, match=message) as refusal:
        style.check(chat(**fields))
    assert refusal.value.param == param


def test_parameters_of_no_object_are_refused() -> None:
    style, _ = style_of(TEMPLATES["hermes"])
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}
    with pytest.raises(InvalidRequest, match="must be 'object'"):
        style.grammar(chat(tools=[tool], tool_choice="required"))


def test_tools_are_told_where_the_settings_say_so() -> None:
    style, _ = style_of(CHAT_TEMPLATE, tool_parser="hermes")
    body = chat(tools=[WEATHER], messages=TOOL_MESSAGES)
    style.check(body)
    prompt = style.tokenizer.decode(style.tokenizer.encode_chat(*style.for_template(body.messages, body)))
    assert prompt.startswith("system: You may call one or more functions")
    assert '"name": "weather"' in prompt
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>' in prompt
    assert "<tool_response>\nrain\n</tool_response>" in prompt


@pytest.mark.parametrize(
    ("template", "settings", "text", "expected"),
    [
        (CHAT_TEMPLATE + "{# <think> #}", {}, "<think>\nhm\n</think>\n\nyes", ("yes", "hm")),
        (CHAT_TEMPLATE + "<think>\n", {}, "hm\n</think>\n\nyes", ("yes", "hm")),
        (CHAT_TEMPLATE, {"reasoning_parser": "think"}, "<think>hm</think>yes", ("yes", "hm")),
    ],
)
def test_reasoning_is_told_apart_from_the_answer(
    template: str, settings: dict[str, Any], text: str, expected: tuple[str, str]
) -> None:
    style, tokenizer = style_of(template, **settings)
    ids = tokenizer.encode(text)
    for size in (1, 3, len(ids)):
        content, reasoning, calls, reason = answer_of(style, chat(), ids, size=size)
        assert (content, reasoning, calls, reason) == (*expected, [], "stop")


@pytest.mark.parametrize(
    ("template", "settings"), [(CHAT_TEMPLATE, {}), (CHAT_TEMPLATE + "<think>\n", {"reasoning_parser": "none"})]
)
def test_an_answer_of_another_model_stays_whole(template: str, settings: dict[str, Any]) -> None:
    style, _ = style_of(template, **settings)
    assert style.parts(chat(), style.tokenizer.encode("<think>")) is None


def test_reasoning_comes_before_calls() -> None:
    style, tokenizer = style_of(TEMPLATES["hermes"] + "<think>\n")
    text = 'hm </think>\nI ask. <tool_call>{"name": "ping", "arguments": {}}</tool_call>'
    ids = tokenizer.encode(text)
    expected = ("I ask.", "hm", [["ping", "{}"]], "tool_calls")
    assert answer_of(style, chat(tools=[PING]), ids, size=1) == expected
    assert answer_of(style, chat(tools=[PING]), ids, size=len(ids)) == expected


def test_a_call_that_is_cut_off_says_length() -> None:
    style, _ = style_of(TEMPLATES["hermes"])
    parts = style.parts(chat(tools=[PING]), [1])
    assert parts is not None
    part = parts.push(Piece(text='<tool_call>{"name": "ping", "arguments": {"a', finish_reason="length"))
    assert part.finish_reason == "length"
    assert [(call.function.name, call.function.arguments) for call in part.calls] == [("ping", '{"a')]
