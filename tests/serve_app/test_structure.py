"""What the fields of a structured answer mean, and what is refused by name."""

import json
from typing import Any

import pytest

from engine import InvalidRequest
from serve_app.messages import Grammar, GrammarKind
from serve_app.protocol.parsing import parse_body
from serve_app.protocol.requests import ChatRequest, CompletionRequest
from serve_app.protocol.structure import MAX_GRAMMAR_LENGTH

SCHEMA = {"type": "object", "properties": {"größe": {"type": "integer"}}}
SCHEMA_TEXT = '{"type":"object","properties":{"größe":{"type":"integer"}}}'


def chat(**fields: Any) -> ChatRequest:
    messages = [{"role": "user", "content": "hi"}]
    return parse_body(ChatRequest, json.dumps({"model": "m", "messages": messages} | fields).encode())


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, None),
        ({"response_format": None, "structured_outputs": None}, None),
        ({"response_format": {"type": "text"}}, None),
        (
            {"response_format": {"type": "json_object"}},
            Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}', "response_format"),
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "size", "description": "in m", "schema": SCHEMA, "strict": True},
                }
            },
            Grammar(GrammarKind.JSON_SCHEMA, SCHEMA_TEXT, "response_format"),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "any"}}},
            Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}', "response_format"),
        ),
        (
            {"structured_outputs": {"json": SCHEMA}, "response_format": {"type": "text"}},
            Grammar(GrammarKind.JSON_SCHEMA, SCHEMA_TEXT, "structured_outputs"),
        ),
        (
            {"structured_outputs": {"json": '{"type": "null"}'}},
            Grammar(GrammarKind.JSON_SCHEMA, '{"type": "null"}', "structured_outputs"),
        ),
        (
            {"structured_outputs": {"json_object": True}},
            Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}', "structured_outputs"),
        ),
        ({"structured_outputs": {"regex": "a+"}}, Grammar(GrammarKind.REGEX, "a+", "structured_outputs")),
        (
            {"structured_outputs": {"choice": ["a", "b"], "regex": None}},
            Grammar(GrammarKind.CHOICE, '["a", "b"]', "structured_outputs"),
        ),
        (
            {"structured_outputs": {"grammar": 'root ::= "a"'}},
            Grammar(GrammarKind.EBNF, 'root ::= "a"', "structured_outputs"),
        ),
    ],
)
def test_what_is_asked_for_becomes_a_grammar(fields: dict[str, Any], grammar: Grammar | None) -> None:
    assert chat(**fields).grammar() == grammar


def test_completions_take_the_same_fields() -> None:
    body = json.dumps({"model": "m", "prompt": "x", "structured_outputs": {"regex": "a"}})
    assert parse_body(CompletionRequest, body.encode()).grammar() == Grammar(
        GrammarKind.REGEX, "a", "structured_outputs"
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "text", "json_schema": {"name": "a"}}},
            "response_format.json_schema",
        ),
        ({"response_format": {"type": "structural_tag", "structures": []}}, "response_format.type"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a" * (MAX_GRAMMAR_LENGTH + 1)}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
        ),
        ({"guided_json": SCHEMA}, "guided_json"),
        ({"guided_choice": ["a"]}, "guided_choice"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        chat(**fields)
    assert refusal.value.param == param


def test_an_older_name_is_refused_with_the_new_one() -> None:
    with pytest.raises(InvalidRequest, match="send structured_outputs="):
        chat(guided_regex="a")


def test_a_schema_that_is_too_long_is_refused() -> None:
    schema = {"enum": ["x" * 1000 for _ in range(140)]}
    for given in (schema, json.dumps(schema)):
        with pytest.raises(InvalidRequest, match="a schema of 14") as refusal:
            chat(structured_outputs={"json": given}).grammar()
        assert refusal.value.param == "structured_outputs"
