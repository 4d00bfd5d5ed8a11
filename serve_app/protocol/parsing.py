"""Bytes of a body -> a request model, or an `InvalidRequest` that names the field at fault."""

import json
from reprlib import Repr
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from engine import InvalidRequest

Model = TypeVar("Model", bound=BaseModel)

DEFAULT_MAX_DEPTH = 64
"""Levels of a body where no limit is configured."""
MAX_NAME_LENGTH = 60
"""Characters up to which an unknown name is repeated as it is."""

_short = Repr()
_short.maxstring = _short.maxother = 60
"""Characters of a refused value that a message repeats: enough to recognise it, and never a whole prompt."""


def parse_body(model: type[Model], body: bytes, *, max_depth: int = DEFAULT_MAX_DEPTH) -> Model:
    """Gives the request in `body`; raises InvalidRequest for bad JSON and for the first field that does not fit."""
    return validate(model, read_object(body, max_depth=max_depth))


def read_object(body: bytes, *, max_depth: int = DEFAULT_MAX_DEPTH) -> dict[str, Any]:
    """Gives the JSON object in `body`, nested `max_depth` levels at most. Numbers are bounded by Python's limit."""
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except ValueError as error:
        # Covers bad syntax, bad UTF-8, NaN and integers of thousands of digits.
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body is {_short.repr(value)}; it must be a JSON object")
    _check_depth(value, max_depth)
    return value


def validate(model: type[Model], values: dict[str, Any]) -> Model:
    """Gives `values` as a `model`; raises InvalidRequest naming the first field that does not fit."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _first_problem(error.errors(include_url=False)) from None


def shorten(value: object) -> str:
    """Gives a value as error messages repeat it."""
    return _short.repr(value)


def _check_depth(value: dict[str, Any], max_depth: int) -> None:
    level: list[Any] = [value]
    for _ in range(max_depth):
        inside = (each.values() if isinstance(each, dict) else each for each in level)
        level = [item for items in inside for item in items if isinstance(item, dict | list)]
        if not level:
            return
    raise InvalidRequest(f"the body is nested too deeply; at most {max_depth} levels are taken")


def _first_problem(problems: list[ErrorDetails]) -> InvalidRequest:
    for problem in problems:
        cause = problem.get("ctx", {}).get("error")
        if isinstance(cause, InvalidRequest):
            return _from_validator(cause, _name(problem["loc"]))
    # Of a union, pydantic reports every branch; the one that got deepest is the one that was meant.
    problem = max(problems, key=lambda candidate: len(candidate["loc"]))
    place = _name(problem["loc"])
    if problem["type"].endswith("_type"):
        # Another branch took the type of this value, and refused something else that the client can mend.
        branches = (other for other in problems if _name(other["loc"]) == place)
        problem = next((other for other in branches if not other["type"].endswith("_type")), problem)
    if problem["type"] == "extra_forbidden":
        # The client chose this name, which may look like anything; the others are ours.
        place = _join(_name(problem["loc"][:-1]), _readable(str(problem["loc"][-1])))
        return InvalidRequest(f"{place} is not a parameter of this endpoint", place)
    if problem["type"] == "missing":
        return InvalidRequest(f"{place} is missing", place)
    if problem["type"] == "string_unicode":
        # A value, or a name within an object, which is all that pydantic tells.
        held = f"{shorten(problem['input'])}, which has half a surrogate pair; send whole characters"
        return InvalidRequest(f"{place or 'the body'} holds {held}", place or None)
    message = problem["msg"][0].lower() + problem["msg"][1:]
    return InvalidRequest(f"{place} is {shorten(problem['input'])}; {message}", place)


def _from_validator(cause: InvalidRequest, place: str) -> InvalidRequest:
    """Puts the place of a nested value before what its own validator says, which starts with the field or with "is"."""
    if not place:
        return InvalidRequest(f"the body {cause}" if cause.param is None else str(cause), cause.param)
    if cause.param is None:
        return InvalidRequest(f"{place} {cause}", place)
    return InvalidRequest(f"{place}.{cause}", f"{place}.{cause.param}")


def _name(location: tuple[int | str, ...]) -> str:
    # Names of union branches ("str", "list[TextPart]") stand among the field names; no field looks like them.
    fields = [part for part in location if isinstance(part, int) or (part.isidentifier() and part != "str")]
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fields).removeprefix(".")


def _readable(name: str) -> str:
    return name if name and name.isprintable() and len(name) <= MAX_NAME_LENGTH else shorten(name)


def _join(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
