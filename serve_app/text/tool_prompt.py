"""Tools for a chat template that knows none: told in the system message, in the words of Hermes.

Source of the wording: the chat templates of Hermes 2 Pro and Qwen 2.5, which models of other families follow as well.
"""

import json
from collections.abc import Sequence
from typing import Any

_HEAD = """You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_TAIL = """
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""


def with_tools_told(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Gives messages of text alone: tools in the first, calls and their results in tags."""
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    told = _HEAD + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools) + _TAIL
    if plain and plain[0]["role"] == "system":
        return [{"role": "system", "content": f"{plain[0]['content']}\n\n{told}"}, *plain[1:]]
    return [{"role": "system", "content": told}, *plain]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        for call in message.get("tool_calls", ())
    ]
    text = message["content"] or ""
    return {"role": message["role"], "content": "\n".join([text, *calls] if text else calls or [""])}
