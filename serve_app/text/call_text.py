"""The JSON of a call as far as it has come: its name, where its arguments begin, and where they end."""

import json
import re
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

ARGUMENT_NAMES = ("arguments", "parameters")

_BLANKS = re.compile(r"[ \t\r\n]*")
_STRING = re.compile(r'"((?:[^"\\\x00-\x1f]|\\.)*)"')
_HALF_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*\\?')
_STRUCTURE = re.compile(r'["\\{}\[\]]')
_BARE = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?[ \t\r\n]*(?=\{)")
_HALF_BARE = re.compile(r"[\w.-]+(?:\[[A-Z_]*\]?\w*)*[ \t\r\n]*")


class Incomplete(Exception):
    """The text may go on as a call, or may not."""


class NoCall(Exception):
    """However the text goes on, it is no call."""


@dataclass(frozen=True, slots=True)
class CallHead:
    """The start of a call. arguments: the whole of them where they came first, or with the object's end; end: what was
    read. is_bare: a name stands before the arguments, and no object is around them.
    """

    name: str
    end: int
    arguments: str = ""
    is_complete: bool = False
    is_bare: bool = False


class ObjectEnd:
    """Finds the end of one JSON value with brackets in text that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def find(self, text: str) -> int | None:
        """Gives where the value ends in this piece; None where it goes on."""
        at = 0
        if self._is_escaped and text:
            self._is_escaped, at = False, 1
        while (found := _STRUCTURE.search(text, at)) is not None:
            at = found.end()
            mark = found.group()
            if self._in_string:
                if mark == "\\":
                    self._is_escaped, at = at == len(text), at + 1
                elif mark == '"':
                    self._in_string = False
            elif mark == '"':
                self._in_string = True
            elif mark in "{[":
                self._depth += 1
            elif mark in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at
        return None


def skip_to_brace(text: str, *, tag: str, is_list: bool) -> int:
    """Gives where a call may begin: behind blanks, a tag, and the bracket of a list."""
    at = _blanks(text, 0)
    if tag and text[at : at + len(tag)] == tag[: len(text) - at]:
        if len(text) - at < len(tag):
            raise Incomplete
        at = _blanks(text, at + len(tag))
    if is_list and text[at : at + 1] == "[":
        at = _blanks(text, at + 1)
    return at


def read_head(text: str, at: int, names: AbstractSet[str], *, allows_names: bool) -> CallHead:
    """Gives the call that begins at `at`; raises Incomplete and NoCall."""
    if allows_names and at < len(text) and text[at] != "{":
        return _read_bare(text, at, names)
    at = _expect(text, at, "{")
    name: str | None = None
    arguments: str | None = None
    while True:
        key, at = _string(text, _blanks(text, at))
        at = _blanks(text, _expect(text, _blanks(text, at), ":"))
        if key in ARGUMENT_NAMES and text[at : at + 1] == '"':
            value, at = _string(text, at)
            arguments = _unquoted(value)
        elif key in ARGUMENT_NAMES:
            _expect(text, at, "{")
            if name is not None:
                return CallHead(name, at)
            end = ObjectEnd().find(text[at:])
            if end is None:
                raise Incomplete
            arguments, at = text[at : at + end], at + end
        else:
            value, at = _string(text, at)
            if key == "name":
                name = _known(value, names)
        at = _blanks(text, at)
        if text[at : at + 1] == "}":
            if name is None:
                raise NoCall
            return CallHead(name, at + 1, arguments or "{}", is_complete=True)
        at = _expect(text, at, ",")


def end_of_object(text: str) -> int:
    """Gives where the object ends whose arguments have been read; texts may stand between. Raises as `read_head`."""
    at = _blanks(text, 0)
    while text[at : at + 1] != "}":
        at = _blanks(text, _expect(text, at, ","))
        _, at = _string(text, at)
        at = _blanks(text, _expect(text, _blanks(text, at), ":"))
        _, at = _string(text, at)
        at = _blanks(text, at)
    return at + 1


def _read_bare(text: str, at: int, names: AbstractSet[str]) -> CallHead:
    found = _BARE.match(text, at)
    if found is None:
        if _HALF_BARE.fullmatch(text, at):
            raise Incomplete
        raise NoCall
    return CallHead(_known(found[1], names), found.end(), is_bare=True)


def _unquoted(value: str) -> str:
    """Gives the object that some models write as a string."""
    try:
        text = json.loads(f'"{value}"')
        if not isinstance(json.loads(text), dict):
            raise NoCall
    except (ValueError, RecursionError):
        raise NoCall from None
    return str(text)


def _known(name: str, names: AbstractSet[str]) -> str:
    if name not in names:
        raise NoCall
    return name


def _blanks(text: str, at: int) -> int:
    found = _BLANKS.match(text, at)
    assert found is not None
    return found.end()


def _expect(text: str, at: int, mark: str) -> int:
    if at >= len(text):
        raise Incomplete
    if text[at] != mark:
        raise NoCall
    return at + 1


def _string(text: str, at: int) -> tuple[str, int]:
    """Gives the string that begins at `at`, as it is written, and where it ends."""
    found = _STRING.match(text, at)
    if found is not None:
        return found[1], found.end()
    if at >= len(text) or _HALF_STRING.fullmatch(text, at):
        raise Incomplete
    raise NoCall
