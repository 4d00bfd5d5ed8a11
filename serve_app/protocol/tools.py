"""Tools in a chat: what a client offers, which of them the model has to call, and calls in the messages."""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from engine import InvalidRequest
from serve_app.protocol.parsing import shorten
from serve_app.protocol.strict import Items, RequestModel

MAX_TOOLS = 128
"""OpenAI's limit."""

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(RequestModel):
    """A tool. parameters is a JSON schema of an object; strict makes every call of it follow that."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestModel):
    """OpenAI's wrapping of a function, the one type of tool."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """Gives the tool as chat templates take it."""
        function: dict[str, Any] = {"name": self.function.name, "description": self.function.description or ""}
        function["parameters"] = self.function.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


class NamedFunction(RequestModel):
    """Which tool."""

    name: ToolName


class NamedTool(RequestModel):
    """A choice of one tool."""

    type: Literal["function"]
    function: NamedFunction


class FunctionCall(RequestModel):
    """What was called. arguments is JSON text, as the model wrote it."""

    name: ToolName
    arguments: str

    def arguments_object(self) -> dict[str, Any]:
        """Gives the arguments as chat templates take them; raises InvalidRequest where they are no JSON object."""
        try:
            value = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise InvalidRequest(
                f"arguments of a call in messages are {shorten(self.arguments)}; they must be a JSON object as text",
                "messages",
            )
        return value


class ToolCall(RequestModel):
    """A call in a message of the assistant's."""

    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"] = "function"
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        """Gives the call as chat templates take it."""
        function = {"name": self.function.name, "arguments": self.function.arguments_object()}
        return {"id": self.id, "type": "function", "function": function}


class ToolFields(RequestModel):
    """What a chat says of tools. parallel_tool_calls: false leaves every call but the first out."""

    tools: Annotated[Items[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise InvalidRequest("tools has two functions of one name; names must differ", "tools")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            name = self.tool_choice.function.name
            raise InvalidRequest(f"tool_choice names {name!r}, which is not among the tools", "tool_choice")
        if self.tool_choice == "required" and not names:
            raise InvalidRequest("tool_choice is 'required' and there are no tools; send some", "tool_choice")
        return self

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else list(self.tools or ())

    @property
    def required_tools(self) -> list[Tool]:
        """Those of which it has to call one; none where it need not call any."""
        if isinstance(self.tool_choice, NamedTool):
            return [tool for tool in self.offered_tools if tool.function.name == self.tool_choice.function.name]
        return self.offered_tools if self.tool_choice == "required" else []
