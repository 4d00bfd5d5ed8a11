"""Tools as clients send them, and the calls that they send back."""

import json
from typing import Any

import pytest

from engine import InvalidRequest
from serve_app.protocol.parsing import parse_body
from serve_app.protocol.requests import ChatRequest

USER = {"role": "user", "content": "hi"}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
SEARCH = {"type": "function", "function": {"name": "search", "description": "finds", "strict": True}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
NAMED = {"type": "function", "function": {"name": "search"}}


def chat(*messages: dict[str, Any], **fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": messages or [USER]} | fields
    return parse_body(ChatRequest, json.dumps(body).encode())


@pytest.mark.parametrize(
    ("fields", "offered", "required"),
    [
        ({}, [], []),
        ({"tools": []}, [], []),
        ({"tools": [WEATHER, SEARCH]}, ["weather", "search"], []),
        ({"tools": [WEATHER, SEARCH], "tool_choice": "auto"}, ["weather", "search"], []),
        ({"tools": [WEATHER, SEARCH], "tool_choice": "none"}, [], []),
        ({"tools": [WEATHER, SEARCH], "tool_choice": "required"}, ["weather", "search"], ["weather", "search"]),
        ({"tools": [WEATHER, SEARCH], "tool_choice": NAMED}, ["weather", "search"], ["search"]),
        ({"tool_choice": "none", "parallel_tool_calls": True}, [], []),
    ],
)
def test_the_choice_says_which_tools_may_and_which_must_be_called(
    fields: dict[str, Any], offered: list[str], required: list[str]
) -> None:
    request = chat(**fields)
    assert [tool.function.name for tool in request.offered_tools] == offered
    assert [tool.function.name for tool in request.required_tools] == required


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [WEATHER], "tool_choice": NAMED}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools[0].function.name"),
        ({"tools": [WEATHER] * 129}, "tools"),
        ({"functions": [{"name": "old"}]}, "functions"),
    ],
)
def test_tools_that_cannot_be_meant_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        chat(**fields)
    assert refusal.value.param == param


def test_calls_and_results_reach_the_template_with_arguments_as_an_object() -> None:
    request = chat(
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": [{"type": "text", "text": "rain"}]},
    )
    called = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
    assert [message.for_template() for message in request.messages[1:]] == [
        {"role": "assistant", "content": "", "tool_calls": [called], "reasoning_content": "hm"},
        {"role": "tool", "content": "rain", "tool_call_id": "call_1", "name": "weather"},
    ]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "assistant"}, "messages[0].content"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "messages[0].content"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages[0].tool_calls"),
        ({"role": "user", "content": "x", "name": "Ada"}, "messages[0].name"),
        ({"role": "user", "content": "x", "tool_call_id": "a"}, "messages[0].tool_call_id"),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "tool", "tool_call_id": "a"}, "messages[0].content"),
        ({"role": "assistant", "content": "x", "tool_calls": [{"id": "a"}]}, "messages[0].tool_calls[0].function"),
    ],
)
def test_fields_of_another_role_are_refused(message: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        chat(message)
    assert refusal.value.param == param


@pytest.mark.parametrize("arguments", ["[1]", "no json", '"text"', "[" * 5000])
def test_arguments_that_are_no_object_are_refused(arguments: str) -> None:
    call = CALL | {"function": {"name": "weather", "arguments": arguments}}
    request = chat({"role": "assistant", "tool_calls": [call]})
    with pytest.raises(InvalidRequest, match="must be a JSON object as text") as refusal:
        request.messages[0].for_template()
    assert refusal.value.param == "messages"
