"""The grammar of calls that a model has to make, or may make, in its style: arguments always fit their schemas."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from engine import InvalidRequest
from serve_app.messages import Grammar, GrammarKind
from serve_app.protocol.structure import MAX_GRAMMAR_LENGTH
from serve_app.protocol.tools import Tool
from serve_app.text.tool_calls import CLOSING, OPENING, ToolStyle

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
ARGS_MARKER = "[ARGS]"
TEXT = r"TEXT: /(.|\n)*/"
PLAIN = r"PLAIN: /([ \t\r\n]*[^{ \t\r\n](.|\n)*)?/"
"""An answer that no parser takes for a call of Llama's."""


def call_grammar(
    tools: Sequence[Tool],
    style: ToolStyle,
    *,
    is_required: bool,
    is_parallel: bool,
    token_of: Callable[[str], int | None],
    has_bare_names: bool = False,
) -> Grammar:
    """Gives the grammar of an answer that calls tools: of calls alone, or where none is required of text with calls.

    token_of: gives the token that a marker is, where it is one of its own: no text spells it then. has_bare_names:
    Mistral's newer form. Raises InvalidRequest for parameters that are not those of an object, and for too long ones.
    """

    def marker(text: str) -> str:
        token = token_of(text)
        return _quoted(text) if token is None else f"<[{token}]>"

    opening = marker(OPENING[style]) if OPENING[style] else ""
    if style is ToolStyle.MISTRAL and has_bare_names:
        calls = [f"{_quoted(tool.function.name)} {marker(ARGS_MARKER)} args_{i}" for i, tool in enumerate(tools)]
        one, more = "call", f"({opening} call)*"
    else:
        key = "parameters" if style is ToolStyle.LLAMA3_JSON else "arguments"
        calls = [_object(tool, i, key) for i, tool in enumerate(tools)]
        one, more = _joints(style, opening, marker(CLOSING))
    body = f"{one} {more}" if is_parallel else one
    if style is ToolStyle.MISTRAL and not has_bare_names:
        body = f'"[" {body} "]"'
    lines = [f"call: {' | '.join(calls)}"]
    lines += [f"args_{i}: %json {json.dumps(_parameters(tool), ensure_ascii=False)}" for i, tool in enumerate(tools)]
    if is_required:
        start = f"{opening} {body}"
    elif not opening:
        start = f"{body} | PLAIN"
        lines.append(PLAIN)
    else:
        repeats = "*" if is_parallel else "?"
        start = f"(text_and_opening {one if style is ToolStyle.HERMES else body}){repeats} TEXT"
        begins = f": TEXT {opening}" if opening.startswith("<[") else f"[lazy]: TEXT {opening}"
        lines += [f"text_and_opening{begins}", TEXT]
    text = "\n".join([f"start: {start}", *lines])
    if len(text) > MAX_GRAMMAR_LENGTH:
        raise InvalidRequest(f"tools have {len(text)} characters; at most {MAX_GRAMMAR_LENGTH} are taken", "tools")
    return Grammar(GrammarKind.LARK, text, "tools", tuple(f"parameters of {tool.function.name}" for tool in tools))


def _joints(style: ToolStyle, opening: str, closing: str) -> tuple[str, str]:
    """Gives how a call is written behind what opens it, and how others follow."""
    if style is ToolStyle.HERMES:
        one = f'"\\n" call "\\n" {closing}'
        return one, f'("\\n" {opening} {one})*'
    return "call", '("; " call)*' if style is ToolStyle.LLAMA3_JSON else '(", " call)*'


def _object(tool: Tool, index: int, arguments: str) -> str:
    head = f'{{"name": "{tool.function.name}", "{arguments}": '
    return f'{_quoted(head)} args_{index} "}}"'


def _parameters(tool: Tool) -> dict[str, Any]:
    given = tool.function.parameters or NO_PARAMETERS
    if given.get("type", "object") != "object":
        raise InvalidRequest(
            f"tools: the parameters of {tool.function.name} are of type {given['type']!r}; it must be 'object'", "tools"
        )
    return {"x-guidance": {"whitespace_pattern": r"[ \n]{0,32}"}} | given | {"type": "object"}


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
