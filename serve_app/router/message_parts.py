"""The text of one chat answer as the parts of a message: content, reasoning, calls of tools."""

import uuid
from dataclasses import dataclass

from engine import FinishReason
from serve_app.protocol.responses import CallDelta, FunctionDelta
from serve_app.router.answer import Piece
from serve_app.text.reasoning import ReasoningParser
from serve_app.text.tool_calls import CallDelta as ParsedCall
from serve_app.text.tool_calls import ToolCallParser


@dataclass(slots=True)
class MessagePart:
    """What a piece adds to the message."""

    content: str
    reasoning: str
    calls: list[CallDelta]
    finish_reason: str | None

    @property
    def is_empty(self) -> bool:
        return not self.content and not self.reasoning and not self.calls and self.finish_reason is None


class MessageParts:
    """Takes one answer apart, piece by piece. id_length: of the ids of calls, where a template is particular."""

    def __init__(
        self, *, reasoning: ReasoningParser | None, calls: ToolCallParser | None, id_length: int | None = None
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._id_length = id_length

    def push(self, piece: Piece) -> MessagePart:
        """Gives what a piece adds; the one with a finish reason gives what was held back too."""
        is_last = piece.finish_reason is not None
        content, reasoning = piece.text, ""
        if self._reasoning is not None:
            thoughts = [self._reasoning.push(content), *([self._reasoning.flush()] if is_last else [])]
            content = "".join(thought.content for thought in thoughts)
            reasoning = "".join(thought.reasoning for thought in thoughts)
        if self._calls is None:
            return MessagePart(content, reasoning, [], piece.finish_reason)
        parsed = [self._calls.push(content), *([self._calls.flush()] if is_last else [])]
        is_call = self._calls.has_calls and piece.finish_reason == FinishReason.STOP
        return MessagePart(
            content="".join(part.content for part in parsed),
            reasoning=reasoning,
            calls=[self._delta(call) for part in parsed for call in part.calls],
            finish_reason="tool_calls" if is_call else piece.finish_reason,
        )

    def _delta(self, call: ParsedCall) -> CallDelta:
        function = FunctionDelta(name=call.name, arguments=call.arguments)
        if call.name is None:
            return CallDelta(index=call.index, function=function)
        return CallDelta(index=call.index, id=self._new_id(), type="function", function=function)

    def _new_id(self) -> str:
        name = uuid.uuid4().hex
        return f"call_{name}" if self._id_length is None else name[: self._id_length]
