"""The reasoning of a model, told apart from its answer as the text comes."""

from dataclasses import dataclass

from serve_app.text.tokenizer import overlap

OPENING, CLOSING = "<think>", "</think>"
BLANKS = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Thought:
    """What a piece of text adds."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser:
    """One answer, which may begin with reasoning between tags. is_open: the prompt ends with the opening one.

    Blanks around the reasoning are no part of it. What comes out, put together, does not depend on how text was cut.
    """

    def __init__(self, *, is_open: bool) -> None:
        self._text = ""
        self._blanks = ""
        self._phase = "reasoning" if is_open else "start"
        self._has_begun = False
        """Of the reasoning, or of what follows it: something other than blanks has come."""

    def push(self, text: str) -> Thought:
        """Gives what the text adds that no later text can change."""
        self._text += text
        if self._phase == "start":
            self._look_for_opening()
        reasoning = self._take_reasoning() if self._phase == "reasoning" else ""
        content = self._take_content() if self._phase == "content" else ""
        return Thought(reasoning, content)

    def flush(self) -> Thought:
        """Gives what was held back, at the end of the answer."""
        text, self._text = self._text, ""
        if self._phase == "reasoning":
            return Thought(reasoning=self._without_blanks(text))
        return Thought(content=text if self._phase == "start" else "")

    def _look_for_opening(self) -> None:
        begun = self._text.lstrip(BLANKS)
        if begun.startswith(OPENING):
            self._text, self._phase = begun[len(OPENING) :], "reasoning"
        elif not OPENING.startswith(begun):
            self._phase, self._has_begun = "content", True

    def _take_reasoning(self) -> str:
        before, found, after = self._text.partition(CLOSING)
        if found:
            reasoning = self._without_blanks(before)
            self._text, self._phase, self._has_begun = after, "content", False
            return reasoning
        settled = len(before) - overlap(before, CLOSING)
        self._text = before[settled:]
        return self._without_blanks(before[:settled])

    def _without_blanks(self, text: str) -> str:
        text = self._blanks + text
        if not self._has_begun:
            text = text.lstrip(BLANKS)
        settled = text.rstrip(BLANKS)
        self._blanks = text[len(settled) :]
        self._has_begun = self._has_begun or bool(settled)
        return settled

    def _take_content(self) -> str:
        content = self._text if self._has_begun else self._text.lstrip(BLANKS)
        self._has_begun = self._has_begun or bool(content)
        self._text = ""
        return content
