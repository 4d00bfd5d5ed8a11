"""How the model of an application writes calls and reasoning: from its chat template, or as the settings say."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine import InvalidRequest
from serve_app.messages import Grammar
from serve_app.protocol.requests import ChatRequest, Message
from serve_app.router.message_parts import MessageParts
from serve_app.settings import AppSettings
from serve_app.text.reasoning import OPENING as THINK
from serve_app.text.reasoning import ReasoningParser
from serve_app.text.tokenizer import Tokenizer
from serve_app.text.tool_calls import MARKERS, OPENING, PYTHON_TAG, ToolCallParser, ToolStyle
from serve_app.text.tool_grammar import ARGS_MARKER, call_grammar
from serve_app.text.tool_prompt import with_tools_told

MISTRAL_ID_LENGTH = 9
"""Mistral's templates take ids of no other length."""


@dataclass(frozen=True, slots=True)
class ChatStyle:
    """One application's. tool_style None: no call can be read. tells_tools: the template does not, so we do."""

    tokenizer: Tokenizer
    tool_style: ToolStyle | None
    tells_tools: bool
    thinks: bool

    def check(self, body: ChatRequest) -> None:
        """Raises InvalidRequest, by name, for what this model cannot be asked."""
        has_calls = any(message.role == "tool" or message.tool_calls for message in body.messages)
        knows_calls = self.tells_tools or "tool_calls" in self.tokenizer.chat_template
        if has_calls and not knows_calls:
            raise InvalidRequest(
                "messages hold calls of tools, and the chat template of this model knows none", "messages"
            )
        if not body.offered_tools:
            return
        if not self.tells_tools and "tools" not in self.tokenizer.chat_template:
            raise InvalidRequest(
                "tools are given, and the chat template of this model knows none; leave them out, or set tool_parser:"
                " hermes in the settings to have them told in the system message",
                "tools",
            )
        if self.tool_style is None:
            raise InvalidRequest(
                "tools are given, and how this model writes calls is not known; set tool_parser in the settings",
                "tools",
            )
        if body.grammar() is not None:
            raise InvalidRequest(
                "tools and a structure of the answer are both given; send tool_choice='none', or one of them", "tools"
            )

    def for_template(self, messages: Sequence[Message], body: ChatRequest | None) -> tuple[list[Any], list[Any]]:
        """Gives messages and tools as the chat template takes them."""
        plain = [message.for_template() for message in messages]
        tools = [tool.for_template() for tool in body.offered_tools] if body is not None else []
        return (with_tools_told(plain, tools), []) if self.tells_tools else (plain, tools)

    def grammar(self, body: ChatRequest) -> Grammar | None:
        """Gives what the answer has to follow: the structure asked for, or calls that fit their tools' parameters."""
        offered, required = body.offered_tools, body.required_tools
        is_strict = any(tool.function.strict for tool in offered)
        if self.tool_style is None or not (required or is_strict):
            return body.grammar()
        return call_grammar(
            required or offered,
            self.tool_style,
            is_required=bool(required),
            is_parallel=body.parallel_tool_calls is not False,
            token_of=self.tokenizer.added_id,
            has_bare_names=ARGS_MARKER in self.tokenizer.chat_template,
        )

    def parts(self, body: ChatRequest, prompt_ids: Sequence[int]) -> MessageParts | None:
        """Gives what takes an answer apart; None where it is all content."""
        offered = body.offered_tools
        # An answer under a grammar begins at once, without reasoning.
        reasons = self.thinks and self.grammar(body) is None
        if not offered and not reasons:
            return None
        calls = None
        if offered and self.tool_style is not None:
            names = (tool.function.name for tool in offered)
            calls = ToolCallParser(
                self.tool_style,
                names,
                only_first=body.parallel_tool_calls is False,
                is_all_calls=bool(body.required_tools),
            )
        is_open = self.tokenizer.decode(prompt_ids[-8:], skip_special_tokens=False).rstrip().endswith(THINK)
        return MessageParts(
            reasoning=ReasoningParser(is_open=is_open) if reasons else None,
            calls=calls,
            id_length=MISTRAL_ID_LENGTH if self.tool_style is ToolStyle.MISTRAL else None,
        )

    def shown_ids(self, body: ChatRequest) -> frozenset[int]:
        """Special tokens that have to be seen in the text of the answer."""
        markers = MARKERS[self.tool_style] if self.tool_style is not None and body.offered_tools else ()
        tags = (THINK, THINK.replace("<", "</")) if self.thinks else ()
        ids = (self.tokenizer.added_id(marker) for marker in (*markers, *tags))
        return frozenset(token for token in ids if token is not None)


def chat_style(tokenizer: Tokenizer, settings: AppSettings) -> ChatStyle:
    """Gives the style of an application."""
    template = tokenizer.chat_template
    style = ToolStyle(settings.tool_parser) if settings.tool_parser is not None else _style_of(template)
    thinks = THINK in template if settings.reasoning_parser is None else settings.reasoning_parser == "think"
    tells_tools = settings.tool_parser == "hermes" and bool(template) and "tools" not in template
    return ChatStyle(tokenizer, style, tells_tools, thinks)


def _style_of(template: str) -> ToolStyle | None:
    for style in (ToolStyle.HERMES, ToolStyle.MISTRAL):
        if OPENING[style] in template:
            return style
    is_llama = PYTHON_TAG in template or '"parameters": ' in template
    return ToolStyle.LLAMA3_JSON if is_llama else None
