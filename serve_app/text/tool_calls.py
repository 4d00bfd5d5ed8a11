"""Calls of tools in the text of an answer, taken apart as the text comes: content, and OpenAI's deltas of calls.

What comes out, put together, does not depend on how the text was cut, so a stream and a plain answer agree. Text that
only looks like the start of a call is content, and so is a call of a tool that was not offered. Knows nothing of Ray.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from serve_app.text.call_text import CallHead, Incomplete, NoCall, ObjectEnd, end_of_object, read_head, skip_to_brace
from serve_app.text.tokenizer import overlap


class ToolStyle(StrEnum):
    """How a model writes its calls.

    hermes: an object in <tool_call> tags, as Hermes and Qwen do, or several, or a list of them. llama3_json: the answer
    is an object, or several with semicolons between. mistral: [TOOL_CALLS] and a list of objects, or before each name
    with its arguments.
    """

    HERMES = "hermes"
    LLAMA3_JSON = "llama3_json"
    MISTRAL = "mistral"


OPENING = {ToolStyle.HERMES: "<tool_call>", ToolStyle.LLAMA3_JSON: "", ToolStyle.MISTRAL: "[TOOL_CALLS]"}
"""What begins a call. Llama's begin where the answer does."""
CLOSING = "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
"""Llama 3 may begin an answer with it."""
MARKERS = {
    ToolStyle.HERMES: (OPENING[ToolStyle.HERMES], CLOSING),
    ToolStyle.LLAMA3_JSON: (PYTHON_TAG,),
    ToolStyle.MISTRAL: (OPENING[ToolStyle.MISTRAL], "[ARGS]", "[CALL_ID]"),
}
"""What the parser has to see although it may be a special token, which text leaves out otherwise."""
BLANKS = " \t\r\n"


@dataclass(frozen=True, slots=True)
class CallDelta:
    """New of call `index`: its name, once and first, and pieces of its arguments, which are JSON."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a piece of text adds; at most one delta for each call."""

    content: str = ""
    calls: tuple[CallDelta, ...] = ()


class ToolCallParser:
    """One answer. names: of the tools offered. only_first: later calls are left out, where they may not be parallel.
    is_all_calls: a grammar has the answer be calls alone, so the head of one that was cut is no content.

    Blanks around calls are no content, but for those that keep apart what stands on both sides. Invariant: `_raw` and
    `_text` are what has come and is neither given out nor passed over; `_raw` began what may be a call, and is content
    if it is none.
    """

    def __init__(
        self, style: ToolStyle, names: Iterable[str], *, only_first: bool = False, is_all_calls: bool = False
    ) -> None:
        self._style = style
        self._opening = OPENING[style]
        self._names = frozenset(names)
        self._only_first = only_first
        self._is_all_calls = is_all_calls
        self._raw = self._text = ""
        self._state: Callable[[], bool] = self._find_opening if self._opening else self._read_head
        self._end = ObjectEnd()
        self._is_bare = False
        self._blanks = self._blanks_before_call = ""
        self._has_content = self._follows_call = False
        self._content = ""
        self._calls: list[CallDelta] = []
        self._num_calls = 0

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    def push(self, text: str) -> Parsed:
        """Gives what the text adds that no later text can change."""
        self._text += text
        while self._state():
            pass
        return self._taken()

    def flush(self) -> Parsed:
        """Gives what was held back, at the end of the answer."""
        is_cut = self._state in (self._stream_arguments, self._close_object, self._close_call)
        if not (is_cut or self._is_all_calls):
            self._add_content(self._raw + self._text)
        self._raw = self._text = ""
        if not self._follows_call:
            self._content += self._blanks
        self._blanks = ""
        return self._taken()

    # States: each looks at `_text` and gives False when it needs more of it.

    def _find_opening(self) -> bool:
        before, found, after = self._text.partition(self._opening)
        if found:
            self._add_content(before)
            self._raw, self._text, self._state = self._opening, after, self._read_head
            return True
        settled = len(self._text) - overlap(self._text, self._opening)
        self._add_content(self._text[:settled])
        self._text = self._text[settled:]
        return False

    def _pass_on(self) -> bool:
        self._add_content(self._text)
        self._text = ""
        return False

    def _read_head(self) -> bool:
        is_first_of_list = self._raw == self._opening
        try:
            start = skip_to_brace(self._text, tag=PYTHON_TAG if not self._opening else "", is_list=is_first_of_list)
            head = read_head(self._text, start, self._names, allows_names=self._style is ToolStyle.MISTRAL)
        except Incomplete:
            return False
        except NoCall:
            self._add_content(self._raw)
            self._raw, self._state = "", self._outside
            return True
        self._start_call(head)
        return True

    def _stream_arguments(self) -> bool:
        end = self._end.find(self._text)
        piece = self._text if end is None else self._text[:end]
        if piece:
            self._calls.append(CallDelta(self._num_calls - 1, arguments=piece))
        self._text = self._text[len(piece) :]
        if end is None:
            return False
        self._state = self._close_call if self._is_bare else self._close_object
        return True

    def _close_object(self) -> bool:
        """Passes over what is left of the object: its brace, and an id that some models write."""
        try:
            self._text = self._text[end_of_object(self._text) :]
        except Incomplete:
            return False
        except NoCall:
            self._state = self._outside
            return True
        self._state = self._close_call
        return True

    def _close_call(self) -> bool:
        text = self._text.lstrip(BLANKS)
        self._state, is_whole = self._outside, True
        if self._style is ToolStyle.HERMES:
            if text.startswith(("{", ",")):
                self._raw, self._state = text[0].removeprefix("{"), self._read_head
                self._text = text.removeprefix(",")
                return True
            text = text.removeprefix("]").lstrip(BLANKS)
            is_whole = len(text) >= len(CLOSING) or not CLOSING.startswith(text)
            text = text.removeprefix(CLOSING)
        elif not self._is_bare:
            is_whole = bool(text)
            separator = ";" if self._style is ToolStyle.LLAMA3_JSON else ","
            if text.startswith(separator):
                self._raw, self._state = separator, self._read_head
            text = text.removeprefix(separator) if text.startswith(separator) else text.removeprefix("]")
        if not is_whole:
            self._state = self._close_call
            return False
        self._text = text
        return True

    @property
    def _outside(self) -> Callable[[], bool]:
        return self._find_opening if self._opening else self._pass_on

    def _start_call(self, head: CallHead) -> None:
        self._calls.append(CallDelta(self._num_calls, name=head.name, arguments=head.arguments))
        self._num_calls += 1
        self._blanks_before_call = self._blanks_before_call or self._blanks
        self._blanks, self._follows_call = "", True
        self._raw, self._text = "", self._text[head.end :]
        self._end, self._is_bare = ObjectEnd(), head.is_bare
        self._state = self._close_call if head.is_complete else self._stream_arguments

    def _add_content(self, text: str) -> None:
        """Adds text without the blanks at its end, which count only when more follows."""
        text = self._blanks + text
        settled = text.rstrip(BLANKS)
        self._blanks = text[len(settled) :]
        if not settled:
            return
        if self._follows_call:
            bare = settled.lstrip(BLANKS)
            apart = self._blanks_before_call or settled[: -len(bare)]
            settled = apart + bare if self._has_content else bare
        self._content += settled
        self._blanks_before_call = ""
        self._has_content, self._follows_call = True, False

    def _taken(self) -> Parsed:
        calls: dict[int, CallDelta] = {}
        for delta in self._calls:
            if self._only_first and delta.index > 0:
                continue
            known = calls.get(delta.index)
            calls[delta.index] = replace(known, arguments=known.arguments + delta.arguments) if known else delta
        parsed = Parsed(self._content, tuple(calls.values()))
        self._content, self._calls = "", []
        return parsed
